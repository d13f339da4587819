;; Never becomes an instance.
(func $start (loop $for-ever (br $for-ever)))
(start $start)

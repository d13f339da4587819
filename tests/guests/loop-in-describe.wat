;; Never says what it is.
(func (export "describe") (result i32)
  (loop $for-ever (br $for-ever))
  unreachable)

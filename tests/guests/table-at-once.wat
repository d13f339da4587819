;; Wants a table of ten million elements before it starts.
(table 10000000 funcref)

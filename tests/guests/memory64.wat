;; Addresses of 64 bits.
(memory (export "memory64") i64 1)

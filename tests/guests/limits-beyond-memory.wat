;; `admit` allows, and tells the container that it may use a million MiB, which no GPU has.
(data (i32.const 0x500)
  "\01\00\00\00\00\00\00\00"           ;; some
  "\00\00\00\00\00\00\00\00"           ;; allow
  "\00\00\00\00" "\00\00\00\00"        ;; environment
  "\01\00\00\00\00\00\00\00"           ;; memory: some
  "\40\42\0f\00\00\00\00\00"
  "\00\00\00\00" "\00\00\00\00"        ;; compute: none
  "\00\00\00\00" "\00\00\00\00")       ;; reason
(func (export "admit") (param i32) (result i32) (i32.const 0x500))

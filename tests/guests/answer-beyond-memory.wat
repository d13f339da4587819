;; `place` answers a list of 100 million devices that is not there.
(data (i32.const 0x500)
  "\01\00\00\00"                       ;; some
  "\00\00\00\00" "\00\e1\f5\05"        ;; devices
  "\00\00\00\00" "\00\00\00\00")       ;; reason
(func (export "place") (param i32) (result i32) (i32.const 0x500))

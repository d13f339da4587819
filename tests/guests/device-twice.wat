;; `place` chooses device 1 twice.
(data (i32.const 0x400) "\01\00\00\00" "\01\00\00\00")
(data (i32.const 0x500)
  "\01\00\00\00"
  "\00\04\00\00" "\02\00\00\00"
  "\00\00\00\00" "\00\00\00\00")
(func (export "place") (param i32) (result i32) (i32.const 0x500))

;; `place` gives a reason that is no UTF-8.
(data (i32.const 0x400) "\ff\fe")
(data (i32.const 0x500)
  "\01\00\00\00"
  "\00\00\00\00" "\00\00\00\00"
  "\00\04\00\00" "\02\00\00\00")
(func (export "place") (param i32) (result i32) (i32.const 0x500))

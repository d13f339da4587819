;; `place` chooses device 0, whatever is available and whatever resource was asked for.
(data (i32.const 0x400) "\00\00\00\00")
(data (i32.const 0x500)
  "\01\00\00\00"
  "\00\04\00\00" "\01\00\00\00"
  "\00\00\00\00" "\00\00\00\00")
(func (export "place") (param i32) (result i32) (i32.const 0x500))

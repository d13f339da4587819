;; `describe` names no hook, so it would never be asked.
(data (i32.const 0x100) "hostile")
(data (i32.const 0x110) "0.1.0")
(data (i32.const 0x130) "{}")
(data (i32.const 0x200)
  "\00\01\00\00" "\07\00\00\00"
  "\10\01\00\00" "\05\00\00\00"
  "\10\01\00\00" "\05\00\00\00"
  "\00\00\00\00"
  "\30\01\00\00" "\02\00\00\00")
(func (export "describe") (result i32) (i32.const 0x200))

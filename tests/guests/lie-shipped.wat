;; `describe` says that it is the shipped policy `exclusive`, in version 99.
(data (i32.const 0x100) "exclusive")
(data (i32.const 0x110) "99.0.0")
(data (i32.const 0x130) "{}")
(data (i32.const 0x200)
  "\00\01\00\00" "\09\00\00\00"
  "\10\01\00\00" "\06\00\00\00"
  "\10\01\00\00" "\06\00\00\00"
  "\0f\00\00\00"
  "\30\01\00\00" "\02\00\00\00")
(func (export "describe") (result i32) (i32.const 0x200))

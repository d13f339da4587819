;; `offer` offers part 77, as nothing.
(data (i32.const 0x400) "\4d\00\00\00" "\00\00\00\00" "\00\00\00\00")
(data (i32.const 0x500) "\01\00\00\00" "\00\04\00\00" "\01\00\00\00" "\00")
(func (export "offer")
    (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)
  (i32.const 0x500))

;; `offer` offers part 0 under the name of another vendor's plugin.
(data (i32.const 0x3e0) "amd.com/gpu")
(data (i32.const 0x400) "\00\00\00\00" "\20\04\00\00" "\01\00\00\00")
(data (i32.const 0x420) "\e0\03\00\00" "\0b\00\00\00" "\01\00\00\00\00\00\00\00" "\00")
(data (i32.const 0x500) "\01\00\00\00" "\00\04\00\00" "\01\00\00\00" "\00")
(func (export "offer")
    (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)
  (i32.const 0x500))

;; `offer` offers part 0 as four billion shares.
(data (i32.const 0x3e0) "nvidia.com/gpu.shared")
(data (i32.const 0x400) "\00\00\00\00" "\20\04\00\00" "\01\00\00\00")
(data (i32.const 0x420)
  "\e0\03\00\00" "\15\00\00\00" "\ff\ff\ff\ff\00\00\00\00"
  "\01\00\00\00\00\00\00\00" "\00\00\00\00\00\00\00\00" "\00\00\00\00")
(data (i32.const 0x500) "\01\00\00\00" "\00\04\00\00" "\01\00\00\00" "\00")
(func (export "offer")
    (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)
  (i32.const 0x500))

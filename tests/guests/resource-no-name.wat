;; `offer` offers part 0 as one device of `gpu`, which is no resource name.
(data (i32.const 0x3f0) "gpu")
(data (i32.const 0x400) "\00\00\00\00" "\20\04\00\00" "\01\00\00\00")
;; A line: the text, the count, and `whole`; 8-aligned, since a slice holds a u64.
(data (i32.const 0x420) "\f0\03\00\00" "\03\00\00\00" "\01\00\00\00\00\00\00\00" "\00")
(data (i32.const 0x500) "\01\00\00\00" "\00\04\00\00" "\01\00\00\00" "\00")
(func (export "offer")
    (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)
  (i32.const 0x500))

;; `offer` answers 100,000 parts that all share one list of lines, each of which names one text of a
;; megabyte: some 1 MB here, 100 GB once the host has copied it.
(func (export "offer")
    (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)
  (local $at i32)
  (drop (memory.grow (i32.const 64)))
  ;; One line at 0x20000: a text, a count, `whole`.
  (i32.store (i32.const 0x20000) (i32.const 0x100000))
  (i32.store (i32.const 0x20004) (i32.const 0x100000))
  (i32.store (i32.const 0x20008) (i32.const 1))
  ;; Parts from 0x200000 on: an index, a list.
  (local.set $at (i32.const 0x200000))
  (loop $more
    (i32.store (local.get $at) (i32.const 0))
    (i32.store (i32.add (local.get $at) (i32.const 4)) (i32.const 0x20000))
    (i32.store (i32.add (local.get $at) (i32.const 8)) (i32.const 1))
    (local.set $at (i32.add (local.get $at) (i32.const 12)))
    (br_if $more (i32.lt_u (local.get $at) (i32.const 0x324f80))))
  ;; The answer at 0x600: some, the list of parts, no time.
  (i32.store (i32.const 0x600) (i32.const 1))
  (i32.store (i32.const 0x604) (i32.const 0x200000))
  (i32.store (i32.const 0x608) (i32.const 100000))
  (i32.const 0x600))

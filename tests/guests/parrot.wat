;; Answers whatever bytes its parameters spell, two letters from `a` to `p` a byte: so that a fuzzer can
;; put anything at all into the memory that the host reads an answer from. The answer lies at 0x800.
(func $parrot (param $from i32) (param $letters i32) (result i32)
  (local $at i32)
  (local.set $at (i32.const 0x800))
  (block $said
    (loop $more
      (br_if $said (i32.lt_u (local.get $letters) (i32.const 2)))
      ;; What is put from 0x4000 on is the question.
      (br_if $said (i32.ge_u (local.get $at) (i32.const 0x4000)))
      (i32.store8 (local.get $at)
        (i32.or
          (i32.shl
            (i32.sub (i32.load8_u (local.get $from)) (i32.const 97))
            (i32.const 4))
          (i32.sub (i32.load8_u offset=1 (local.get $from)) (i32.const 97))))
      (local.set $at (i32.add (local.get $at) (i32.const 1)))
      (local.set $from (i32.add (local.get $from) (i32.const 2)))
      (local.set $letters (i32.sub (local.get $letters) (i32.const 2)))
      (br $more)))
  (i32.const 0x800))
;; The parameters are the last of a context.
(func (export "offer")
    (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (param $from i32) (param $letters i32)
    (result i32)
  (call $parrot (local.get $from) (local.get $letters)))
(func $asked (param $at i32) (result i32)
  (call $parrot (i32.load offset=40 (local.get $at)) (i32.load offset=44 (local.get $at))))
(func (export "place") (param i32) (result i32) (call $asked (local.get 0)))
(func (export "admit") (param i32) (result i32) (call $asked (local.get 0)))
(func (export "triage") (param i32) (result i32) (call $asked (local.get 0)))

;; Takes all the memory that there is, and traps when there is no more, as an allocator does.
(func (export "place") (param i32) (result i32)
  (loop $more
    (br_if $more (i32.ne (memory.grow (i32.const 16)) (i32.const -1))))
  unreachable)

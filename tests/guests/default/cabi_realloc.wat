(func (export "cabi_realloc") (param $old i32) (param $old-size i32) (param $align i32)
    (param $size i32) (result i32)
  (local $at i32)
  (local.set $at (i32.and (i32.add (global.get $heap) (i32.const 7)) (i32.const -8)))
  (global.set $heap (i32.add (local.get $at) (local.get $size)))
  (block $fits
    (loop $more
      (br_if $fits
        (i32.le_u (global.get $heap) (i32.mul (memory.size) (i32.const 65536))))
      (br_if $more (i32.ne (memory.grow (i32.const 1)) (i32.const -1)))
      unreachable))
  (local.get $at))

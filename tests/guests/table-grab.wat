(table $table 1 funcref)
(func (export "place") (param i32) (result i32)
  (loop $more
    (br_if $more
      (i32.ne (table.grow $table (ref.null func) (i32.const 4096)) (i32.const -1))))
  unreachable)

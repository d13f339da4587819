;; Logs a line of two megabytes.
(import "$root" "log" (func $log (param i32 i32)))
(func (export "place") (param i32) (result i32)
  (drop (memory.grow (i32.const 64)))
  (call $log (i32.const 0x1000) (i32.const 0x200000))
  (i32.const 0x300))

;; Two pages; what the host hands over is put from 0x4000 on and never given back: an instance lives
;; for one call.
(memory (export "memory") 2)
(global $heap (mut i32) (i32.const 0x4000))

;; Wants 250 MiB before it starts. (Its own memory, so none of the default one.)
(memory (export "memory") 4000)
(global $heap (mut i32) (i32.const 0x4000))

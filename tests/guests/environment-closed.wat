;; `admit` allows, and has the container load a library.
(data (i32.const 0x400) "LD_PRELOAD")
(data (i32.const 0x410) "/x.so")
(data (i32.const 0x420) "\00\04\00\00" "\0a\00\00\00" "\10\04\00\00" "\05\00\00\00")
(data (i32.const 0x500)
  "\01\00\00\00\00\00\00\00"           ;; some
  "\00\00\00\00\00\00\00\00"           ;; allow
  "\20\04\00\00" "\01\00\00\00"        ;; environment
  "\00\00\00\00\00\00\00\00"           ;; memory: none
  "\00\00\00\00\00\00\00\00"
  "\00\00\00\00" "\00\00\00\00"        ;; compute: none
  "\00\00\00\00" "\00\00\00\00")       ;; reason
(func (export "admit") (param i32) (result i32) (i32.const 0x500))

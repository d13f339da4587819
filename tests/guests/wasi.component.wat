;; Wants to know what time it is.
(component
  (import "wasi:clocks/wall-clock@0.2.0"
    (instance (export "resolution" (func (result u64))))))

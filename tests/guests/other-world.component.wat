;; A component of some other world.
(component
  (core module $module (func (export "run") (result i32) (i32.const 1)))
  (core instance $instance (instantiate $module))
  (func (export "run") (result u32) (canon lift (core func $instance "run"))))

;; Never answers `place`.
(func (export "place") (param i32) (result i32)
  (loop $for-ever (br $for-ever))
  unreachable)

;; Memory that several threads could share.
(memory $shared (export "shared") 1 1 shared)

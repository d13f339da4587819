;; Passes on everything: what a guest does that misbehaves in nothing.

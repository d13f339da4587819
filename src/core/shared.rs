//! A value that is replaced as a whole while other threads read it, such as settings that a changed configuration sets.

use parking_lot::RwLock;
use std::sync::Arc;

/// The current value. Clones share it. The lock is held only to copy or replace a pointer, so no reader waits for
/// another's work, and each sees either the old value or the new one.
#[derive(Debug)]
pub struct Shared<T>(Arc<RwLock<Arc<T>>>);

impl<T> Shared<T> {
    /// Shares this value.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(value))))
    }

    /// The current value.
    #[must_use]
    pub fn get(&self) -> Arc<T> {
        Arc::clone(&self.0.read())
    }

    /// Replaces the value; returns the previous one.
    pub fn replace(&self, value: impl Into<Arc<T>>) -> Arc<T> {
        std::mem::replace(&mut *self.0.write(), value.into())
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

//! Ends the pauses of threads early.

use parking_lot::{Condvar, Mutex};
use std::time::Instant;

/// Wakes threads that wait until a time, or until something has changed.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    /// Held by a notifier for a moment, so that a change is either seen by a check or its notification ends the wait.
    changing: Mutex<()>,
    changed: Condvar,
}

impl Wake {
    /// To be called after a change.
    pub(crate) fn notify(&self) {
        drop(self.changing.lock());
        self.changed.notify_all();
    }

    /// Waits until `end` or a notification; not at all if `is_over`.
    pub(crate) fn wait_until(&self, end: Instant, is_over: impl FnOnce() -> bool) {
        let mut changing = self.changing.lock();
        if !is_over() {
            self.changed.wait_until(&mut changing, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    #[test]
    fn a_change_ends_a_wait_and_no_notification_is_missed() {
        let (wake, is_over) = (Arc::new(Wake::default()), Arc::new(AtomicBool::new(false)));
        let end = Instant::now() + Duration::from_secs(600);
        let waiting = {
            let (wake, is_over) = (Arc::clone(&wake), Arc::clone(&is_over));
            std::thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    wake.wait_until(end, || is_over.load(Ordering::Relaxed));
                }
            })
        };
        wake.notify();
        is_over.store(true, Ordering::Relaxed);
        wake.notify();
        waiting.join().unwrap();
        assert!(Instant::now() < end);
        wake.wait_until(Instant::now() + Duration::from_millis(1), || false);
    }
}

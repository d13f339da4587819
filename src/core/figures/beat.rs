//! Signs of life of a thread that works off jobs.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// When a thread began and ended what it did last.
#[derive(Debug, Default)]
pub struct Beat(Mutex<State>);

#[derive(Clone, Copy, Debug, Default)]
struct State {
    began: Option<Instant>,
    ended: Option<Instant>,
}

impl Beat {
    /// It begins something. What is returned ends it when it is dropped, but not by a panic: a thread
    /// that died at its work is one that does not end it.
    #[must_use]
    pub fn begin(&self) -> Busy<'_> {
        self.0.lock().began = Some(Instant::now());
        Busy(self)
    }

    /// How long it has been at what it does; `None` while it waits for work, or never had any.
    #[must_use]
    pub fn busy_for(&self) -> Option<Duration> {
        let State { began, ended } = *self.0.lock();
        began.filter(|began| ended.is_none_or(|ended| ended < *began)).map(|began| began.elapsed())
    }

    /// How long ago it gave a sign of life, at the beginning or end of something; `None` before the
    /// first.
    #[must_use]
    pub fn silent_for(&self) -> Option<Duration> {
        let State { began, ended } = *self.0.lock();
        began.max(ended).map(|sign| sign.elapsed())
    }
}

/// Something is under way.
#[derive(Debug)]
pub struct Busy<'b>(&'b Beat);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.0.0.lock().ended = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_does_not_end_is_seen() {
        let beat = Beat::default();
        assert_eq!((beat.busy_for(), beat.silent_for()), (None, None));
        let busy = beat.begin();
        assert!(beat.busy_for().is_some());
        drop(busy);
        assert_eq!(beat.busy_for(), None);
        assert!(beat.silent_for().is_some());
        let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _busy = beat.begin();
            panic!("at its work");
        }));
        assert!(died.is_err() && beat.busy_for().is_some());
    }
}

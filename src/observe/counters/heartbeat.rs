//! Heartbeat of a thread that processes jobs.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// When a thread began and ended its last job.
#[derive(Debug, Default)]
pub struct Heartbeat(Mutex<State>);

#[derive(Clone, Copy, Debug, Default)]
struct State {
    began: Option<Instant>,
    ended: Option<Instant>,
}

impl Heartbeat {
    /// Records the start of a job. Dropping the guard records its end, except during a panic: the job of
    /// a thread that panicked counts as not ended.
    #[must_use]
    pub fn begin(&self) -> Busy<'_> {
        self.0.lock().began = Some(Instant::now());
        Busy(self)
    }

    /// How long the current job has taken; `None` while the thread is idle or before its first job.
    #[must_use]
    pub fn busy_for(&self) -> Option<Duration> {
        let State { began, ended } = *self.0.lock();
        began.filter(|began| ended.is_none_or(|ended| ended < *began)).map(|began| began.elapsed())
    }

    /// Time since a job last began or ended; `None` before the first.
    #[must_use]
    pub fn silent_for(&self) -> Option<Duration> {
        let State { began, ended } = *self.0.lock();
        began.max(ended).map(|last| last.elapsed())
    }
}

/// Guard of a job in progress.
#[derive(Debug)]
pub struct Busy<'b>(&'b Heartbeat);

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
    fn a_job_that_does_not_end_is_busy() {
        let heartbeat = Heartbeat::default();
        assert_eq!((heartbeat.busy_for(), heartbeat.silent_for()), (None, None));
        let busy = heartbeat.begin();
        assert!(heartbeat.busy_for().is_some());
        drop(busy);
        assert_eq!(heartbeat.busy_for(), None);
        assert!(heartbeat.silent_for().is_some());
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _busy = heartbeat.begin();
            panic!("during a job");
        }));
        assert!(panicked.is_err() && heartbeat.busy_for().is_some());
    }
}

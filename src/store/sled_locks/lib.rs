//! The locks of sled 0.34: those of `parking_lot` 0.12, under the name and version that sled requires.
//!
//! sled writes its log on seven threads that share one queue. With `parking_lot` 0.11 each of them wakes up once a
//! second while there is nothing to do, and every piece of work wakes all seven, of which one finds it. Both waits are
//! those of the queue's [`Condvar`], the only one in sled that waits until a point in time ([`Condvar::wait_until`]).

pub use parking_lot_0_12::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, WaitTimeoutResult};

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a thread of the queue waits for work. Without work there is nothing to do after it: sled's own second only
/// ends threads that it started beyond the seven.
const QUEUE_WAIT: Duration = Duration::from_secs(3600);

/// A condition variable.
#[derive(Debug, Default)]
pub struct Condvar {
    inner: parking_lot_0_12::Condvar,
    /// Whether threads wait on it for work of a queue.
    is_queue: AtomicBool,
}

impl Condvar {
    /// A condition variable on which no thread waits.
    #[must_use]
    pub const fn new() -> Self {
        Self { inner: parking_lot_0_12::Condvar::new(), is_queue: AtomicBool::new(false) }
    }

    /// Waits for a notification.
    pub fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>) {
        self.inner.wait(guard);
    }

    /// Waits for a notification, at most this long.
    pub fn wait_for<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, timeout: Duration) -> WaitTimeoutResult {
        self.inner.wait_for(guard, timeout)
    }

    /// Waits for work of the queue: longer than until `_cutoff`, since there is nothing to do without work.
    pub fn wait_until<T: ?Sized>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        _cutoff: Instant,
    ) -> WaitTimeoutResult {
        self.is_queue.store(true, Ordering::Relaxed);
        self.inner.wait_for(guard, QUEUE_WAIT)
    }

    /// Wakes one thread.
    pub fn notify_one(&self) -> bool {
        self.inner.notify_one()
    }

    /// Wakes all threads; of a queue only one, since sled calls this once for each piece of work, and a thread that has
    /// finished one looks for the next before it waits.
    pub fn notify_all(&self) -> usize {
        // A thread sets the flag under the queue's lock before it waits, and sled adds work under the same lock before
        // it notifies: while the flag still looks unset, no thread waits.
        match self.is_queue.load(Ordering::Relaxed) {
            true => usize::from(self.inner.notify_one()),
            false => self.inner.notify_all(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::thread;

    #[derive(Default)]
    struct Queue {
        work: Mutex<VecDeque<u32>>,
        changed: Condvar,
    }

    impl Queue {
        /// As in sled: waits until there is work or the cutoff has passed.
        fn receive(&self) -> Option<u32> {
            let mut work = self.work.lock();
            let cutoff = Instant::now() + Duration::from_millis(1);
            while work.is_empty() {
                if self.changed.wait_until(&mut work, cutoff).timed_out() {
                    break;
                }
            }
            work.pop_front()
        }

        fn send(&self, item: u32) {
            self.work.lock().push_back(item);
            self.changed.notify_all();
        }
    }

    #[test]
    fn each_piece_of_work_of_a_queue_is_done() {
        const ITEMS: u32 = 10_000;
        let queue = Arc::new(Queue::default());
        let threads: Vec<_> = (0..7)
            .map(|_| {
                let queue = Arc::clone(&queue);
                thread::spawn(move || {
                    let mut sum = 0;
                    while let Some(item) = queue.receive() {
                        if item == 0 {
                            return sum;
                        }
                        sum += u64::from(item);
                    }
                    panic!("a wait ended at sled's cutoff");
                })
            })
            .collect();
        (1..=ITEMS).for_each(|item| queue.send(item));
        (0..7).for_each(|_| queue.send(0));
        let sum: u64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(sum, u64::from(ITEMS) * u64::from(ITEMS + 1) / 2);
    }

    #[test]
    fn all_threads_that_wait_for_something_else_are_woken() {
        let state = Arc::new((Mutex::new((0, false)), Condvar::new()));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let state = Arc::clone(&state);
                thread::spawn(move || {
                    let mut guard = state.0.lock();
                    guard.0 += 1;
                    while !guard.1 {
                        state.1.wait(&mut guard);
                    }
                })
            })
            .collect();
        while state.0.lock().0 < threads.len() {
            thread::yield_now();
        }
        state.0.lock().1 = true;
        state.1.notify_all();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

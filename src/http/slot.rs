//! The state of one connection, from which [`super::connection_slots`] decides which one to close.

use super::rate_limit::Client;
use futures_util::task::AtomicWaker;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::Waker;
use std::time::{Duration, Instant};

/// Longest time from the end of a response to the end of the next head: the keep-alive of 30 s and the 5 s for a
/// head.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(35);
/// Longest time in which a client reads nothing of a response. Over TCP the system ends the connection by then too;
/// over a Unix socket it does not.
pub(super) const UNREAD_MAX: Duration = Duration::from_secs(60);
/// Time for one large response, plus a second for each so many bytes. A client that is slower only keeps the response
/// in memory.
const ANSWER_MAX: Duration = Duration::from_secs(60);
const ANSWER_BYTES_PER_SECOND: u64 = 16 * 1024;
/// Longest time for which a connection is kept because the daemon has not read from it yet.
const FIRST_REQUEST_WAIT: Duration = Duration::from_secs(1);

/// One connection's slot, as seen by its requests.
pub(super) struct Slot {
    pub(super) client: Client,
    began: Instant,
    /// When it was taken, milliseconds after `began`.
    born: u64,
    /// Whether the daemon has tried to read from it.
    heard: AtomicBool,
    /// Requests in progress.
    requests_in_progress: AtomicU32,
    /// Whether one of its requests was authenticated.
    is_authenticated: AtomicBool,
    /// Since when it has no request in progress, milliseconds after `began`.
    idle_since: AtomicU64,
    /// Since when its client reads nothing of a response, milliseconds after `began` plus one; 0: it reads.
    unread_since: AtomicU64,
    /// Deadline for reading a large response, milliseconds after `began` plus one; 0: there is none.
    taken_until: AtomicU64,
    /// Whether reading is paused.
    reading_paused: AtomicBool,
    /// Whether a read was requested meanwhile.
    waits: AtomicBool,
    closed: AtomicBool,
    waker: AtomicWaker,
}

/// A request in progress.
pub(super) struct Work(Arc<Slot>);

/// The priority of a connection; the lowest is closed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SlotPriority {
    /// Unauthenticated without a request in progress: the first state of each.
    Silent,
    /// Unauthenticated with a response in progress.
    Unauthenticated,
    /// An authenticated client's, between requests.
    Idle,
    /// Silent, while there are so few silent ones that they have just come.
    New,
    /// An authenticated client's that reads nothing of its response at present.
    Unread,
    /// An authenticated client's with a request in progress. A lost event stream resumes with Last-Event-ID.
    Busy,
}

impl Slot {
    /// A slot taken at `now`, in milliseconds after `began`.
    pub(super) fn new(client: Client, began: Instant, now: u64) -> Self {
        Self {
            client,
            began,
            born: now,
            heard: AtomicBool::new(false),
            requests_in_progress: AtomicU32::new(0),
            is_authenticated: AtomicBool::new(false),
            idle_since: AtomicU64::new(now),
            unread_since: AtomicU64::new(0),
            taken_until: AtomicU64::new(0),
            reading_paused: AtomicBool::new(false),
            waits: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        }
    }

    /// Marks a request as in progress until the returned guard is dropped.
    pub(super) fn work(self: &Arc<Self>) -> Work {
        self.requests_in_progress.fetch_add(1, Ordering::Relaxed);
        Work(Arc::clone(self))
    }

    /// Pauses reading once the request in progress is complete, until it is answered. The HTTP library would read
    /// thousands of requests, and each takes many times the memory of its bytes.
    pub(super) fn pause_reading(&self) {
        self.reading_paused.store(true, Ordering::Relaxed);
    }

    /// Whether reading is paused; the task that asked is woken at the end of the pause.
    pub(super) fn is_reading_paused(&self) -> bool {
        let reading_paused = self.reading_paused.load(Ordering::Relaxed);
        if reading_paused {
            self.waits.store(true, Ordering::Relaxed);
        }
        reading_paused
    }

    /// Whether a request is in progress.
    pub(super) fn is_handling(&self) -> bool {
        self.requests_in_progress.load(Ordering::Relaxed) > 0
    }

    /// Marks that the daemon has read what was sent so far.
    pub(super) fn mark_read(&self) {
        if !self.heard.load(Ordering::Relaxed) {
            self.heard.store(true, Ordering::Relaxed);
        }
    }

    /// Marks the client as authenticated.
    pub(super) fn mark_authenticated(&self) {
        self.is_authenticated.store(true, Ordering::Relaxed);
    }

    /// Whether it was closed; `waker` is woken when it is, and at the end of a pause.
    pub(super) fn is_closed(&self, waker: &Waker) -> bool {
        // Registered before the check, so that a close is either seen or wakes.
        self.waker.register(waker);
        self.closed.load(Ordering::SeqCst)
    }

    /// Closes it: its connection ends at its next step, for which it is woken.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.waker.wake();
    }

    /// Notes whether the client reads its response.
    pub(super) fn set_reading(&self, takes: bool) {
        match (takes, self.unread_since.load(Ordering::Relaxed)) {
            (true, 0) | (false, 1..) => {}
            (true, _) => self.unread_since.store(0, Ordering::Relaxed),
            (false, 0) => self.unread_since.store(millis(self.began) + 1, Ordering::Relaxed),
        }
    }

    pub(super) fn priority(&self) -> SlotPriority {
        let works = self.is_handling();
        let unread = self.unread_since.load(Ordering::Relaxed) > 0;
        match (self.is_authenticated.load(Ordering::Relaxed), works, unread) {
            (false, false, _) => SlotPriority::Silent,
            (false, true, _) => SlotPriority::Unauthenticated,
            (true, _, true) => SlotPriority::Unread,
            (true, false, false) => SlotPriority::Idle,
            (true, true, false) => SlotPriority::Busy,
        }
    }

    /// How much longer an unauthenticated connection keeps its slot because it is new: for `grace`, and until the
    /// daemon has read from it.
    pub(super) fn grace_left(&self, grace: Duration, now: u64) -> Duration {
        let age = passed(now, self.born);
        match self.is_authenticated.load(Ordering::Relaxed) {
            true => Duration::ZERO,
            false if self.heard.load(Ordering::Relaxed) => grace.saturating_sub(age),
            false => FIRST_REQUEST_WAIT.saturating_sub(age),
        }
    }

    /// Whether it is idle, or does not read, for too long.
    pub(super) fn is_over(&self, now: u64) -> bool {
        let rests = !self.is_handling() && passed(now, self.idle_since.load(Ordering::Relaxed)) > IDLE_MAX;
        let unread = match self.unread_since.load(Ordering::Relaxed) {
            0 => false,
            since => passed(now, since - 1) > UNREAD_MAX,
        };
        let slow = match self.taken_until.load(Ordering::Relaxed) {
            0 => false,
            until => now > until - 1,
        };
        rests || unread || slow
    }
}

impl Work {
    /// Sets the deadline for reading a response of so many bytes.
    pub(super) fn must_be_taken(&self, bytes: u64) {
        let most = ANSWER_MAX + Duration::from_secs(bytes / ANSWER_BYTES_PER_SECOND);
        let most = u64::try_from(most.as_millis()).unwrap_or(u64::MAX);
        let until = millis(self.0.began).saturating_add(most).saturating_add(1);
        self.0.taken_until.store(until, Ordering::Relaxed);
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.0.idle_since.store(millis(self.0.began), Ordering::Relaxed);
        self.0.taken_until.store(0, Ordering::Relaxed);
        self.0.requests_in_progress.fetch_sub(1, Ordering::Relaxed);
        self.0.reading_paused.store(false, Ordering::Relaxed);
        if self.0.waits.swap(false, Ordering::Relaxed) {
            self.0.waker.wake();
        }
    }
}

fn passed(now: u64, since: u64) -> Duration {
    Duration::from_millis(now.saturating_sub(since))
}

/// Milliseconds since this moment.
pub(super) fn millis(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot() -> Arc<Slot> {
        Arc::new(Slot::new(Client::Others, Instant::now(), 0))
    }

    #[test]
    fn pipelined_requests_wait_for_the_response() {
        let one = slot();
        assert!(!one.is_reading_paused());
        let work = one.work();
        assert!(!one.is_reading_paused(), "its body may still come");
        one.pause_reading();
        assert!(one.is_reading_paused() && one.is_handling());
        drop(work);
        assert!(!one.is_reading_paused() && !one.waits.load(Ordering::Relaxed));
    }

    #[test]
    fn a_client_that_takes_something_now_and_then_is_no_unread_one() {
        let slow = slot();
        let _work = slow.work();
        slow.set_reading(false);
        slow.set_reading(true);
        assert!(!slow.is_over(u64::try_from(UNREAD_MAX.as_millis()).unwrap() * 2));
    }

    #[test]
    fn a_large_answer_has_a_minute_and_a_second_for_each_16_kib() {
        let slow = slot();
        let work = slow.work();
        let after = |seconds: u64| slow.is_over(millis(slow.began) + seconds * 1_000);
        assert!(!after(3_600), "a stream of events has no end");
        work.must_be_taken(160 * 1024);
        slow.set_reading(false);
        slow.set_reading(true);
        assert!(!after(69) && after(71));
        drop(work);
        let _next = slow.work();
        assert!(!after(71));
    }

    #[test]
    fn a_new_connection_has_a_grace_period_until_its_first_request() {
        let (one, grace) = (slot(), Duration::from_millis(100));
        assert_eq!(one.grace_left(grace, 100), FIRST_REQUEST_WAIT - grace);
        assert_eq!(one.grace_left(grace, 1_000), Duration::ZERO, "it is not spared for ever");
        one.mark_read();
        assert_eq!(one.grace_left(grace, 40), Duration::from_millis(60));
        assert_eq!(one.grace_left(grace, 100), Duration::ZERO);
        one.mark_authenticated();
        assert_eq!(one.grace_left(grace, 0), Duration::ZERO, "only its priority counts now");
    }
}

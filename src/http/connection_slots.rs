//! Connection slots: which connection is closed when a listener is full.
//!
//! A connection takes a slot before TLS begins. If none is free, another connection is closed: first unauthenticated
//! ones without a request in progress; among those, one of the address with most slots; among those, the oldest. So a
//! good client, whose one connection is young and soon authenticated, is not kept out by many silent connections, by
//! heads that arrive a byte a second, or by clients that do not read. A new client needs time to authenticate while
//! all other slots belong to authenticated clients: a quarter of the slots is for connections that have not sent
//! anything yet. In a burst, a new connection keeps its slot for some milliseconds, and until its first bytes are
//! read; the next connection waits for that, and further ones wait in the system's queue, where none is lost.
//!
//! The HTTP library has a deadline for the first head of a connection only. [`ConnectionSlots::sweep`] enforces those
//! of later heads, and of responses over a Unix socket.

use crate::rate_limit::Client;
use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::Waker;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// How often connections that are idle, or do not read, for too long are closed.
pub(crate) const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// The reciprocal of the share of slots for connections that have not sent anything yet.
const NEW_SHARE: usize = 4;
/// Most connections a second that may lose their slot before they have sent anything. A connection keeps its slot for
/// its share of that: 100 ms with 256 slots, 25 ms with 64. A burst that fills the system's queue (4,096) is accepted
/// within two seconds.
const UNAUTHENTICATED_ACCEPTS_PER_SECOND: u32 = 2_560;
/// Shortest and longest interval between two attempts to get a slot.
const RETRY_WAITS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(10)];
/// Least time between two log lines about a full listener.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The slots of one listener.
pub(crate) struct ConnectionSlots {
    what: &'static str,
    most: usize,
    /// A connection keeps its slot at least for this time.
    grace: Duration,
    began: Instant,
    /// Connections wait for a slot in the order in which they came.
    turn: tokio::sync::Mutex<()>,
    /// Notified when a connection takes a slot.
    taken: Notify,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    next: u64,
    /// By number, so the oldest first.
    taken: BTreeMap<u64, Arc<Slot>>,
    /// How many slots each client has.
    by_client: HashMap<Client, usize>,
    reassigned: u64,
    logged: Option<Instant>,
}

/// A slot in use; free again when this is dropped.
pub(crate) struct SlotGuard {
    slots: Arc<ConnectionSlots>,
    number: u64,
    pub(crate) slot: Arc<Slot>,
}

impl ConnectionSlots {
    /// At most `most` slots, for the listener with this name.
    pub(crate) fn new(what: &'static str, most: usize) -> Arc<Self> {
        let grace = Duration::from_secs(1) * u32::try_from(most).unwrap_or(u32::MAX)
            / UNAUTHENTICATED_ACCEPTS_PER_SECOND;
        Arc::new(Self {
            what,
            most,
            grace,
            began: Instant::now(),
            turn: tokio::sync::Mutex::default(),
            taken: Notify::new(),
            inner: Mutex::default(),
        })
    }

    /// Takes a slot, if necessary that of another connection once its grace time is over.
    pub(crate) async fn take(self: &Arc<Self>, client: Client) -> SlotGuard {
        let _turn = self.turn.lock().await;
        loop {
            match self.take_at(&client, millis(self.began)) {
                Ok(taken) => return taken,
                Err(wait) => tokio::time::sleep(wait.clamp(RETRY_WAITS[0], RETRY_WAITS[1])).await,
            }
        }
    }

    /// As [`Self::take`], or returns how long to wait.
    fn take_at(self: &Arc<Self>, client: &Client, now: u64) -> Result<SlotGuard, Duration> {
        let mut inner = self.inner.lock();
        if inner.taken.len() >= self.most {
            self.make_room(&mut inner, now)?;
        }
        let number = inner.next;
        inner.next += 1;
        let slot = Arc::new(Slot::new(client.clone(), self.began, now));
        inner.taken.insert(number, Arc::clone(&slot));
        self.taken.notify_one();
        *inner.by_client.entry(client.clone()).or_default() += 1;
        Ok(SlotGuard { slots: Arc::clone(self), number, slot })
    }

    /// Closes a connection. Reads each of some hundreds of slots, which takes some microseconds for each connection
    /// beyond the limit.
    fn make_room(&self, inner: &mut Inner, now: u64) -> Result<(), Duration> {
        let priorities = || inner.taken.values().map(|slot| slot.priority());
        let silent = priorities().filter(|priority| *priority == SlotPriority::Silent).count();
        let unauthenticated =
            priorities().filter(|priority| *priority <= SlotPriority::Unauthenticated).count();
        let worth = |(number, slot): (&u64, &Arc<Slot>)| {
            let of_client = inner.by_client.get(&slot.client).copied().unwrap_or_default();
            let priority = match slot.priority() {
                SlotPriority::Silent if silent <= self.most / NEW_SHARE => SlotPriority::New,
                other => other,
            };
            (priority, Reverse(of_client), *number)
        };
        let grace_left = |number: u64| {
            inner.taken.get(&number).map_or(Duration::ZERO, |slot| slot.grace_left(self.grace, now))
        };
        let all = || inner.taken.iter().map(worth);
        let Some((priority, _, first)) = all().min() else { return Ok(()) };
        // New connections wait while many are unauthenticated, and no authenticated client loses its slot to them. If
        // authenticated clients have most of the slots, one of theirs is closed rather than a connection that came
        // just now.
        let must_wait = priority <= SlotPriority::Unauthenticated && unauthenticated > self.most / NEW_SHARE;
        let number = match must_wait {
            true => Some(first).filter(|first| grace_left(*first).is_zero()),
            false => all().filter(|(_, _, number)| grace_left(*number).is_zero()).min().map(|(_, _, n)| n),
        };
        let Some(number) = number else { return Err(grace_left(first)) };
        inner.close(number);
        inner.reassigned += 1;
        if inner.logged.is_none_or(|logged| logged.elapsed() >= LOG_INTERVAL) {
            inner.logged = Some(Instant::now());
            tracing::warn!(
                listener = self.what,
                slots = self.most,
                reassigned = inner.reassigned,
                "all connections are in use: idle connections of unauthenticated clients are closed for new ones"
            );
        }
        Ok(())
    }

    /// Waits until a connection takes a slot, or did since the last call. For one task.
    pub(crate) async fn wait_for_connection(&self) {
        self.taken.notified().await;
    }

    /// Whether no slot is in use.
    pub(crate) fn is_empty(&self) -> bool {
        self.inner.lock().taken.is_empty()
    }

    /// Whether a connection has a request in progress, or had one within this time.
    pub(crate) fn has_active(&self, within: Duration) -> bool {
        let now = millis(self.began);
        self.inner.lock().taken.values().any(|slot| slot.was_active(within, now))
    }

    /// Closes connections that are idle, or do not read, for too long.
    pub(crate) fn sweep(&self) {
        self.sweep_at(millis(self.began));
    }

    fn sweep_at(&self, now: u64) {
        let mut inner = self.inner.lock();
        let over: Vec<u64> =
            inner.taken.iter().filter(|(_, slot)| slot.is_over(now)).map(|(number, _)| *number).collect();
        for number in over {
            inner.close(number);
        }
    }
}

impl Inner {
    fn close(&mut self, number: u64) {
        if let Some(slot) = self.leave(number) {
            slot.close();
        }
    }

    fn leave(&mut self, number: u64) -> Option<Arc<Slot>> {
        let slot = self.taken.remove(&number)?;
        if let Some(crowd) = self.by_client.get_mut(&slot.client) {
            *crowd -= 1;
            if *crowd == 0 {
                self.by_client.remove(&slot.client);
            }
        }
        Some(slot)
    }
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        self.slots.inner.lock().leave(self.number);
    }
}

/// Longest time from the end of a response to the end of the next head: the keep-alive of 30 s and the 5 s for a
/// head.
pub(crate) const IDLE_MAX: Duration = Duration::from_secs(35);
/// Longest time in which a client reads nothing of a response. Over TCP the system ends the connection by then too;
/// over a Unix socket it does not.
pub(crate) const UNREAD_MAX: Duration = Duration::from_secs(60);
/// Time for one large response, plus a second for each so many bytes. A client that is slower only keeps the response
/// in memory.
const ANSWER_MAX: Duration = Duration::from_secs(60);
const ANSWER_BYTES_PER_SECOND: u64 = 16 * 1024;
/// Longest time for which a connection is kept because the daemon has not read from it yet.
const FIRST_REQUEST_WAIT: Duration = Duration::from_secs(1);

/// One connection's slot, as seen by its requests.
pub(crate) struct Slot {
    pub(crate) client: Client,
    began: Instant,
    /// When it was taken, milliseconds after `began`.
    created_at: u64,
    /// Whether the daemon has tried to read from it.
    has_sent: AtomicBool,
    /// Requests in progress.
    requests_in_progress: AtomicU32,
    /// Whether one of its requests was authenticated.
    is_authenticated: AtomicBool,
    /// Since when it has no request in progress and its client reads, milliseconds after `began`.
    idle_since: AtomicU64,
    /// Since when its client reads nothing of a response, milliseconds after `began` plus one; 0: it reads.
    unread_since: AtomicU64,
    /// Deadline for reading a large response, milliseconds after `began` plus one; 0: there is none.
    taken_until: AtomicU64,
    pause: ReadingPause,
    closed: AtomicBool,
    waker: AtomicWaker,
}

/// The pause of reading until a request is answered.
#[derive(Default)]
struct ReadingPause {
    is_on: AtomicBool,
    /// Whether a read was requested meanwhile.
    is_awaited: AtomicBool,
}

/// A request in progress.
pub(crate) struct Work(Arc<Slot>);

/// The priority of a connection; the lowest is closed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SlotPriority {
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
    pub(crate) fn new(client: Client, began: Instant, now: u64) -> Self {
        Self {
            client,
            began,
            created_at: now,
            has_sent: AtomicBool::new(false),
            requests_in_progress: AtomicU32::new(0),
            is_authenticated: AtomicBool::new(false),
            idle_since: AtomicU64::new(now),
            unread_since: AtomicU64::new(0),
            taken_until: AtomicU64::new(0),
            pause: ReadingPause::default(),
            closed: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        }
    }

    /// Marks a request as in progress until the returned guard is dropped.
    pub(crate) fn work(self: &Arc<Self>) -> Work {
        self.requests_in_progress.fetch_add(1, Ordering::Relaxed);
        Work(Arc::clone(self))
    }

    /// Pauses reading once the request in progress is complete, until it is answered. The HTTP library would read
    /// thousands of requests, and each takes many times the memory of its bytes.
    pub(crate) fn pause_reading(&self) {
        self.pause.is_on.store(true, Ordering::Relaxed);
    }

    /// Whether reading is paused; the task that asked is woken at the end of the pause.
    pub(crate) fn is_reading_paused(&self) -> bool {
        let is_on = self.pause.is_on.load(Ordering::Relaxed);
        if is_on {
            self.pause.is_awaited.store(true, Ordering::Relaxed);
        }
        is_on
    }

    /// Whether a request is in progress.
    pub(crate) fn is_handling(&self) -> bool {
        self.requests_in_progress.load(Ordering::Relaxed) > 0
    }

    /// Marks that the daemon has read what was sent so far.
    pub(crate) fn mark_read(&self) {
        if !self.has_sent.load(Ordering::Relaxed) {
            self.has_sent.store(true, Ordering::Relaxed);
        }
    }

    /// Marks the client as authenticated.
    pub(crate) fn mark_authenticated(&self) {
        self.is_authenticated.store(true, Ordering::Relaxed);
    }

    /// Whether it was closed; `waker` is woken when it is, and at the end of a pause.
    pub(crate) fn is_closed(&self, waker: &Waker) -> bool {
        // Registered before the check, so that a close is either seen or wakes.
        self.waker.register(waker);
        self.closed.load(Ordering::SeqCst)
    }

    /// Closes it: its connection ends at its next step, for which it is woken.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.waker.wake();
    }

    /// Notes whether the client reads its response.
    pub(crate) fn set_reading(&self, takes: bool) {
        match (takes, self.unread_since.load(Ordering::Relaxed)) {
            (true, 0) | (false, 1..) => {}
            (true, _) => {
                self.idle_since.store(millis(self.began), Ordering::Relaxed);
                self.unread_since.store(0, Ordering::Relaxed);
            }
            (false, 0) => self.unread_since.store(millis(self.began) + 1, Ordering::Relaxed),
        }
    }

    pub(crate) fn priority(&self) -> SlotPriority {
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
    pub(crate) fn grace_left(&self, grace: Duration, now: u64) -> Duration {
        let age = passed(now, self.created_at);
        match self.is_authenticated.load(Ordering::Relaxed) {
            true => Duration::ZERO,
            false if self.has_sent.load(Ordering::Relaxed) => grace.saturating_sub(age),
            false => FIRST_REQUEST_WAIT.saturating_sub(age),
        }
    }

    /// Whether it has a request in progress, or had one within this time. A new connection counts as active.
    fn was_active(&self, within: Duration, now: u64) -> bool {
        self.is_handling() || passed(now, self.idle_since.load(Ordering::Relaxed)) < within
    }

    /// Whether it is idle, or does not read, for too long.
    pub(crate) fn is_over(&self, now: u64) -> bool {
        // A connection is not idle while its client has not read the whole response.
        let idle_or_unread = match self.unread_since.load(Ordering::Relaxed) {
            0 => !self.is_handling() && passed(now, self.idle_since.load(Ordering::Relaxed)) > IDLE_MAX,
            since => passed(now, since - 1) > UNREAD_MAX,
        };
        let slow = match self.taken_until.load(Ordering::Relaxed) {
            0 => false,
            until => now > until - 1,
        };
        idle_or_unread || slow
    }
}

impl Work {
    /// Sets the deadline for reading a response of so many bytes.
    pub(crate) fn must_be_taken(&self, bytes: u64) {
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
        self.0.pause.is_on.store(false, Ordering::Relaxed);
        if self.0.pause.is_awaited.swap(false, Ordering::Relaxed) {
            self.0.waker.wake();
        }
    }
}

fn passed(now: u64, since: u64) -> Duration {
    Duration::from_millis(now.saturating_sub(since))
}

/// Milliseconds since this moment.
pub(crate) fn millis(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;

    fn at(n: u8) -> Client {
        Client::Net([0, 0, 0, 0, 10, 0, 0, n])
    }

    /// Long after all others, whose bytes have been read.
    fn take(slots: &Arc<ConnectionSlots>, client: &Client) -> SlotGuard {
        slots.inner.lock().taken.values().for_each(|slot| slot.mark_read());
        let next = slots.inner.lock().next;
        slots.take_at(client, next * 1_000).unwrap()
    }

    fn closed(taken: &SlotGuard) -> bool {
        taken.slot.is_closed(Waker::noop())
    }

    #[test]
    fn the_client_with_the_most_connections_loses_its_oldest() {
        let slots = ConnectionSlots::new("test", 4);
        let alone = take(&slots, &at(1));
        let crowd: Vec<_> = (0..3).map(|_| take(&slots, &at(2))).collect();
        let new = take(&slots, &at(3));
        assert!(closed(&crowd[0]) && !closed(&alone) && !closed(&crowd[1]) && !closed(&new));
        // The rest of the many is still the largest group.
        let next = take(&slots, &at(4));
        assert!(closed(&crowd[1]) && !closed(&alone) && !closed(&next));
        // All have one each: the oldest is closed.
        let last = take(&slots, &at(5));
        assert!(closed(&alone) && !closed(&crowd[2]) && !closed(&last));
        drop((crowd, new, next, last, alone));
        let inner = slots.inner.lock();
        assert!(inner.taken.is_empty() && inner.by_client.is_empty());
    }

    #[test]
    fn authenticated_clients_are_closed_last_and_new_ones_have_a_quarter() {
        let slots = ConnectionSlots::new("test", 8);
        let all: Vec<_> = (0..8).map(|_| take(&slots, &at(1))).collect();
        let _stranger = all[4].slot.work();
        all[5..].iter().for_each(|known| known.slot.mark_authenticated());
        let (_unread, _working) = (all[6].slot.work(), all[7].slot.work());
        all[6].slot.set_reading(false);
        let mut new = Vec::new();
        // Two silent ones are a quarter; the others are closed first.
        for gone in [0, 1, 4, 5, 2, 3, 6, 7] {
            assert!(!closed(&all[gone]));
            // Each new connection is authenticated at once, with a request in progress.
            let one = take(&slots, &at(1));
            one.slot.mark_authenticated();
            new.push((one.slot.work(), one));
            assert!(closed(&all[gone]), "{gone} was to go");
        }
        assert!(new.iter().all(|(_, one)| !closed(one)));
    }

    #[test]
    fn idle_connections_and_those_with_unread_responses_are_closed() {
        let slots = ConnectionSlots::new("test", 9);
        let (rests, works, unread) = (take(&slots, &at(1)), take(&slots, &at(1)), take(&slots, &at(1)));
        let (work, answer) = (works.slot.work(), unread.slot.work());
        unread.slot.set_reading(false);
        let later = |wait: Duration| millis(slots.began) + u64::try_from(wait.as_millis()).unwrap();
        slots.sweep_at(later(IDLE_MAX - Duration::from_secs(1)));
        assert!(!closed(&rests));
        slots.sweep_at(later(IDLE_MAX + Duration::from_secs(1)));
        assert!(closed(&rests) && !closed(&works) && !closed(&unread));
        slots.sweep_at(later(UNREAD_MAX + Duration::from_secs(1)));
        assert!(closed(&unread) && !closed(&works), "what takes long is no rest");
        drop((work, answer));
        slots.sweep_at(later(IDLE_MAX + Duration::from_secs(1)));
        assert!(closed(&works));
    }

    #[test]
    fn in_a_burst_new_connections_keep_their_grace_period() {
        let slots = ConnectionSlots::new("test", 256);
        assert_eq!(slots.grace, Duration::from_millis(100));
        let all: Vec<_> = (0..256).map(|n| slots.take_at(&at(1), n / 64).unwrap()).collect();
        // The oldest was not read yet, then it was, and then its grace time is over.
        assert_eq!(slots.take_at(&at(2), 90).err(), Some(Duration::from_millis(910)));
        all.iter().for_each(|taken| taken.slot.mark_read());
        assert_eq!(slots.take_at(&at(2), 90).err(), Some(Duration::from_millis(10)));
        let later = slots.take_at(&at(2), 100).unwrap();
        assert!(closed(&all[0]) && !closed(&later) && all[1..].iter().all(|taken| !closed(taken)));
        // One that sent something in time keeps its slot, and the next one is closed.
        let _work = all[1].slot.work();
        all[1].slot.mark_authenticated();
        let next = slots.take_at(&at(2), 100).unwrap();
        assert!(!closed(&all[1]) && closed(&all[2]) && !closed(&next));
    }

    #[test]
    fn authenticated_clients_do_not_wait_for_the_grace_period_of_others() {
        let slots = ConnectionSlots::new("test", 256);
        let known: Vec<_> = (0..250).map(|_| slots.take_at(&at(1), 0).unwrap()).collect();
        let _work: Vec<_> = known.iter().map(|taken| taken.slot.work()).collect();
        known.iter().for_each(|taken| taken.slot.mark_authenticated());
        // Silent connections have a quarter, each in the slot of an authenticated one at once.
        let new: Vec<_> = (0..65).map(|_| slots.take_at(&at(2), 10).unwrap()).collect();
        assert!(known[..59].iter().all(closed) && !new.iter().any(closed));
        // Further ones wait, and no authenticated client loses its slot to them.
        assert!(slots.take_at(&at(3), 20).is_err());
        new.iter().for_each(|taken| taken.slot.mark_read());
        let late = slots.take_at(&at(3), 110).unwrap();
        assert!(closed(&new[0]) && !closed(&known[59]) && !closed(&late));
    }

    #[tokio::test]
    async fn a_connection_that_waits_for_a_slot_gets_one() {
        let slots = ConnectionSlots::new("test", 1);
        let first = slots.take(at(1)).await;
        let waits = {
            let slots = Arc::clone(&slots);
            tokio::spawn(async move { slots.take(at(2)).await })
        };
        first.slot.mark_read();
        let second = waits.await.unwrap();
        assert!(closed(&first) && !closed(&second));
        drop(second);
        assert!(!closed(&slots.take(at(1)).await));
    }

    #[tokio::test]
    async fn a_listener_without_connections_is_neither_swept_nor_waited_for() {
        let slots = ConnectionSlots::new("test", 2);
        let hour = Duration::from_secs(3600);
        let soon = Duration::from_millis(20);
        assert!(slots.is_empty() && !slots.has_active(hour));
        assert!(tokio::time::timeout(soon, slots.wait_for_connection()).await.is_err());
        let taken = slots.take(at(1)).await;
        tokio::time::timeout(hour, slots.wait_for_connection()).await.unwrap();
        assert!(!slots.is_empty() && slots.has_active(hour));
        let work = taken.slot.work();
        tokio::time::sleep(soon * 2).await;
        assert!(slots.has_active(soon), "a request is in progress");
        drop(work);
        assert!(slots.has_active(hour), "its response may not have left");
        tokio::time::sleep(soon * 2).await;
        assert!(!slots.has_active(soon), "the client only keeps its connection");
        drop(taken);
        assert!(slots.is_empty());
    }

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
        assert!(!one.is_reading_paused() && !one.pause.is_awaited.load(Ordering::Relaxed));
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
    fn a_client_has_a_minute_to_read_a_response_that_the_daemon_has_ended() {
        let one = slot();
        drop(one.work());
        let after =
            |wait: Duration| one.is_over(millis(one.began) + u64::try_from(wait.as_millis()).unwrap());
        let second = Duration::from_secs(1);
        assert!(!after(IDLE_MAX) && after(IDLE_MAX + second));
        one.set_reading(false);
        assert!(!after(IDLE_MAX + second), "it is not idle");
        assert!(after(UNREAD_MAX + second));
        one.set_reading(true);
        assert!(!after(IDLE_MAX) && after(IDLE_MAX + second), "it is idle once it reads");
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
        assert_eq!(one.grace_left(grace, 1_000), Duration::ZERO, "its grace period ends");
        one.mark_read();
        assert_eq!(one.grace_left(grace, 40), Duration::from_millis(60));
        assert_eq!(one.grace_left(grace, 100), Duration::ZERO);
        one.mark_authenticated();
        assert_eq!(one.grace_left(grace, 0), Duration::ZERO, "only its priority counts now");
    }
}

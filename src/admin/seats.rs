//! Who may stay when connections run short.
//!
//! A listener has so many seats. A connection takes one as soon as it is accepted, before TLS, and is never
//! made to wait for one: where none is free, somebody else's is taken away. First go those who showed
//! nothing that opens the door and ask for nothing; of those, whoever's address has most seats; of its, the
//! oldest. So neither a crowd that says nothing, nor heads that come a byte a second, nor answers that nobody
//! reads keep a good client out, whose one connection is young, and soon known. Whoever comes has to have the
//! time for that, beside known clients in all other seats: a quarter of the seats is for those alone who have
//! said nothing yet.
//!
//! The HTTP library has a deadline for the first head of a connection alone. For those that follow, and for
//! answers over a Unix socket, the sweep has one.

use super::rate::Client;
use futures_util::task::AtomicWaker;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

/// Longest time from an answer's end to the end of the next head: the keep-alive of 30 s and the 5 s that
/// a head may take.
pub(super) const REST_MAX: Duration = Duration::from_secs(35);
/// Longest time in which a client takes nothing of what waits for it. Over TCP the system ends it by then,
/// too; over a Unix socket it does not.
pub(super) const UNREAD_MAX: Duration = Duration::from_secs(60);
/// How often both are looked at.
pub(super) const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// One seat in so many is for those who have only just come.
const NEW_SHARE: usize = 4;
/// That seats ran short is told at most once in this time.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// The seats of one listener.
pub(super) struct Seats {
    what: &'static str,
    most: usize,
    began: Instant,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    next: u64,
    /// By number, so by age.
    taken: BTreeMap<u64, Arc<Seat>>,
    /// How many of them each client has.
    crowds: HashMap<Client, usize>,
    taken_away: u64,
    told: Option<Instant>,
}

/// One connection's seat, as seen by its requests.
pub(super) struct Seat {
    client: Client,
    began: Instant,
    /// Requests under way.
    at_work: AtomicU32,
    /// Whether the door let somebody in by it.
    known: AtomicBool,
    /// Since when it asks for nothing, milliseconds after `began`.
    rests_since: AtomicU64,
    /// Since when it takes nothing of what waits for it, the same plus one; 0: it does.
    unread_since: AtomicU64,
    /// Nothing more is to be read of it for now.
    hushed: AtomicBool,
    /// Somebody wanted to read meanwhile.
    waits: AtomicBool,
    closed: AtomicBool,
    waker: AtomicWaker,
}

/// A seat that is taken, for as long as this lives.
pub(super) struct Taken {
    seats: Arc<Seats>,
    number: u64,
    pub(super) seat: Arc<Seat>,
}

/// A request under way.
pub(super) struct Work(Arc<Seat>);

/// How much it costs to lose a connection; the least goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    /// Nobody is known by it, and nothing is under way: as all are at first.
    Silent,
    /// Nobody is known by it; an answer is under way.
    Stranger,
    /// A known client's, between requests.
    Resting,
    /// One of so few silent ones that they have only just come.
    New,
    /// A known client's, who takes nothing of the answer at the moment.
    Unread,
    /// A known client's, at work. Comes back with Last-Event-ID or Idempotency-Key where it is lost.
    Working,
}

impl Seats {
    /// So many, of the listener that is called so.
    pub(super) fn new(what: &'static str, most: usize) -> Arc<Self> {
        Arc::new(Self { what, most, began: Instant::now(), inner: Mutex::default() })
    }

    /// Takes a seat; somebody else's, if it must be.
    pub(super) fn take(self: &Arc<Self>, client: Client) -> Taken {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.taken.len() >= self.most {
            self.make_room(&mut inner);
        }
        let number = inner.next;
        inner.next += 1;
        let seat = Arc::new(Seat {
            client: client.clone(),
            began: self.began,
            at_work: AtomicU32::new(0),
            known: AtomicBool::new(false),
            rests_since: AtomicU64::new(millis(self.began)),
            unread_since: AtomicU64::new(0),
            hushed: AtomicBool::new(false),
            waits: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        });
        inner.taken.insert(number, Arc::clone(&seat));
        *inner.crowds.entry(client).or_default() += 1;
        Taken { seats: Arc::clone(self), number, seat }
    }

    /// A look at each of some hundreds of seats: some microseconds, at each connection that is too many.
    fn make_room(&self, inner: &mut Inner) {
        let silent = inner.taken.values().filter(|seat| seat.standing() == Standing::Silent).count();
        let worth = |(number, seat): (&u64, &Arc<Seat>)| {
            let crowd = inner.crowds.get(&seat.client).copied().unwrap_or_default();
            let standing = match seat.standing() {
                Standing::Silent if silent <= self.most / NEW_SHARE => Standing::New,
                other => other,
            };
            (standing, Reverse(crowd), *number)
        };
        let Some((_, _, number)) = inner.taken.iter().map(worth).min() else { return };
        inner.close(number);
        inner.taken_away += 1;
        if inner.told.is_none_or(|told| told.elapsed() >= TOLD_EVERY) {
            inner.told = Some(Instant::now());
            tracing::warn!(
                listener = self.what,
                seats = self.most,
                taken_away = inner.taken_away,
                "all connections are in use: idle ones of clients that nobody knows are closed for new ones"
            );
        }
    }

    /// Closes those that rest, or leave an answer lying, for too long.
    pub(super) fn sweep(&self) {
        self.sweep_at(millis(self.began));
    }

    fn sweep_at(&self, now: u64) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let over: Vec<u64> =
            inner.taken.iter().filter(|(_, seat)| seat.is_over(now)).map(|(number, _)| *number).collect();
        for number in over {
            inner.close(number);
        }
    }
}

impl Inner {
    /// Its connection ends at its next step, to which it is woken.
    fn close(&mut self, number: u64) {
        if let Some(seat) = self.leave(number) {
            seat.closed.store(true, Ordering::SeqCst);
            seat.waker.wake();
        }
    }

    fn leave(&mut self, number: u64) -> Option<Arc<Seat>> {
        let seat = self.taken.remove(&number)?;
        if let Some(crowd) = self.crowds.get_mut(&seat.client) {
            *crowd -= 1;
            if *crowd == 0 {
                self.crowds.remove(&seat.client);
            }
        }
        Some(seat)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.seats.inner.lock().unwrap_or_else(PoisonError::into_inner).leave(self.number);
    }
}

impl Seat {
    /// A request of its is under way until what this gives is dropped.
    pub(super) fn work(self: &Arc<Self>) -> Work {
        self.at_work.fetch_add(1, Ordering::Relaxed);
        Work(Arc::clone(self))
    }

    /// All of the request under way is there: what follows can wait until it was answered. (The HTTP library
    /// would take in thousands of requests, and each takes many times the room of its bytes.)
    pub(super) fn hush(&self) {
        self.hushed.store(true, Ordering::Relaxed);
    }

    /// Whether to wait with reading; whoever asked is woken when it is over.
    pub(super) fn is_hushed(&self) -> bool {
        let hushed = self.hushed.load(Ordering::Relaxed);
        if hushed {
            self.waits.store(true, Ordering::Relaxed);
        }
        hushed
    }

    /// Whether a request is under way.
    pub(super) fn is_at_work(&self) -> bool {
        self.at_work.load(Ordering::Relaxed) > 0
    }

    /// The door knows who is there.
    pub(super) fn know(&self) {
        self.known.store(true, Ordering::Relaxed);
    }

    /// Whether it was taken away; `waker` is woken when it will be, and at the end of a hush.
    pub(super) fn is_closed(&self, waker: &Waker) -> bool {
        // Registered before the look, so that a close either is seen or wakes.
        self.waker.register(waker);
        self.closed.load(Ordering::SeqCst)
    }

    /// The client took something of what waits for it, or did not.
    pub(super) fn takes(&self, takes: bool) {
        match (takes, self.unread_since.load(Ordering::Relaxed)) {
            (true, 0) | (false, 1..) => {}
            (true, _) => self.unread_since.store(0, Ordering::Relaxed),
            (false, 0) => self.unread_since.store(millis(self.began) + 1, Ordering::Relaxed),
        }
    }

    fn standing(&self) -> Standing {
        let works = self.is_at_work();
        let unread = self.unread_since.load(Ordering::Relaxed) > 0;
        match (self.known.load(Ordering::Relaxed), works, unread) {
            (false, false, _) => Standing::Silent,
            (false, true, _) => Standing::Stranger,
            (true, _, true) => Standing::Unread,
            (true, false, false) => Standing::Resting,
            (true, true, false) => Standing::Working,
        }
    }

    fn is_over(&self, now: u64) -> bool {
        let rests = !self.is_at_work() && passed(now, self.rests_since.load(Ordering::Relaxed)) > REST_MAX;
        let unread = match self.unread_since.load(Ordering::Relaxed) {
            0 => false,
            since => passed(now, since - 1) > UNREAD_MAX,
        };
        rests || unread
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.0.rests_since.store(millis(self.0.began), Ordering::Relaxed);
        self.0.at_work.fetch_sub(1, Ordering::Relaxed);
        self.0.hushed.store(false, Ordering::Relaxed);
        if self.0.waits.swap(false, Ordering::Relaxed) {
            self.0.waker.wake();
        }
    }
}

fn passed(now: u64, since: u64) -> Duration {
    Duration::from_millis(now.saturating_sub(since))
}

fn millis(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(n: u8) -> Client {
        Client::Net([0, 0, 0, 0, 10, 0, 0, n])
    }

    fn closed(taken: &Taken) -> bool {
        taken.seat.is_closed(Waker::noop())
    }

    #[test]
    fn a_crowd_of_one_address_loses_its_oldest_and_others_none() {
        let seats = Seats::new("test", 4);
        let alone = seats.take(at(1));
        let crowd: Vec<_> = (0..3).map(|_| seats.take(at(2))).collect();
        let new = seats.take(at(3));
        assert!(closed(&crowd[0]) && !closed(&alone) && !closed(&crowd[1]) && !closed(&new));
        // What is left of the crowd is still the largest.
        let next = seats.take(at(4));
        assert!(closed(&crowd[1]) && !closed(&alone) && !closed(&next));
        // All have one each: the oldest goes.
        let last = seats.take(at(5));
        assert!(closed(&alone) && !closed(&crowd[2]) && !closed(&last));
        drop((crowd, new, next, last, alone));
        let inner = seats.inner.lock().unwrap();
        assert!(inner.taken.is_empty() && inner.crowds.is_empty());
    }

    #[test]
    fn whoever_is_known_goes_last_and_those_who_just_came_have_a_quarter() {
        let seats = Seats::new("test", 8);
        let all: Vec<_> = (0..8).map(|_| seats.take(at(1))).collect();
        let _stranger = all[4].seat.work();
        all[5..].iter().for_each(|known| known.seat.know());
        let (_unread, _working) = (all[6].seat.work(), all[7].seat.work());
        all[6].seat.takes(false);
        let mut new = Vec::new();
        // Two of the silent are a quarter; the others go first.
        for gone in [0, 1, 4, 5, 2, 3, 6, 7] {
            assert!(!closed(&all[gone]));
            // Each newcomer is known at once, and at work.
            let one = seats.take(at(1));
            one.seat.know();
            new.push((one.seat.work(), one));
            assert!(closed(&all[gone]), "{gone} was to go");
        }
        assert!(new.iter().all(|(_, one)| !closed(one)));
    }

    #[test]
    fn who_rests_too_long_or_leaves_an_answer_lying_is_swept_out() {
        let seats = Seats::new("test", 9);
        let (rests, works, unread) = (seats.take(at(1)), seats.take(at(1)), seats.take(at(1)));
        let (work, answer) = (works.seat.work(), unread.seat.work());
        unread.seat.takes(false);
        let later = |wait: Duration| millis(seats.began) + u64::try_from(wait.as_millis()).unwrap();
        seats.sweep_at(later(REST_MAX - Duration::from_secs(1)));
        assert!(!closed(&rests));
        seats.sweep_at(later(REST_MAX + Duration::from_secs(1)));
        assert!(closed(&rests) && !closed(&works) && !closed(&unread));
        seats.sweep_at(later(UNREAD_MAX + Duration::from_secs(1)));
        assert!(closed(&unread) && !closed(&works), "what takes long is no rest");
        drop((work, answer));
        seats.sweep_at(later(REST_MAX + Duration::from_secs(1)));
        assert!(closed(&works));
    }

    #[test]
    fn what_follows_a_request_waits_for_its_answer() {
        let seats = Seats::new("test", 9);
        let one = seats.take(at(1));
        assert!(!one.seat.is_hushed());
        let work = one.seat.work();
        assert!(!one.seat.is_hushed(), "its body may still come");
        one.seat.hush();
        assert!(one.seat.is_hushed() && one.seat.is_at_work());
        drop(work);
        assert!(!one.seat.is_hushed() && !one.seat.waits.load(Ordering::Relaxed));
    }

    #[test]
    fn a_client_that_takes_something_now_and_then_is_no_unread_one() {
        let seats = Seats::new("test", 9);
        let slow = seats.take(at(1));
        let _work = slow.seat.work();
        slow.seat.takes(false);
        slow.seat.takes(true);
        seats.sweep_at(u64::try_from(UNREAD_MAX.as_millis()).unwrap() * 2);
        assert!(!closed(&slow));
    }
}

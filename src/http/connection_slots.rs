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

use super::rate_limit::Client;
use super::slot::{Slot, SlotPriority, millis};
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often connections that are idle, or do not read, for too long are closed.
pub(super) const SWEEP_EVERY: Duration = Duration::from_secs(1);
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
pub(super) struct ConnectionSlots {
    what: &'static str,
    most: usize,
    /// A connection keeps its slot at least for so long.
    grace: Duration,
    began: Instant,
    /// Connections wait for a slot in the order in which they came.
    turn: tokio::sync::Mutex<()>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    next: u64,
    /// By number, so the oldest first.
    taken: BTreeMap<u64, Arc<Slot>>,
    /// How many slots each client has.
    by_client: HashMap<Client, usize>,
    taken_away: u64,
    logged: Option<Instant>,
}

/// A slot in use; free again when this is dropped.
pub(super) struct SlotGuard {
    slots: Arc<ConnectionSlots>,
    number: u64,
    pub(super) slot: Arc<Slot>,
}

impl ConnectionSlots {
    /// So many slots for the listener with this name.
    pub(super) fn new(what: &'static str, most: usize) -> Arc<Self> {
        let grace = Duration::from_secs(1) * u32::try_from(most).unwrap_or(u32::MAX)
            / UNAUTHENTICATED_ACCEPTS_PER_SECOND;
        Arc::new(Self {
            what,
            most,
            grace,
            began: Instant::now(),
            turn: tokio::sync::Mutex::default(),
            inner: Mutex::default(),
        })
    }

    /// Takes a slot, if necessary that of another connection once its grace time is over.
    pub(super) async fn take(self: &Arc<Self>, client: Client) -> SlotGuard {
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
        *inner.by_client.entry(client.clone()).or_default() += 1;
        Ok(SlotGuard { slots: Arc::clone(self), number, slot })
    }

    /// Closes a connection. Reads each of some hundreds of slots, which takes some microseconds for each connection
    /// beyond the limit.
    fn make_room(&self, inner: &mut Inner, now: u64) -> Result<(), Duration> {
        let priorities = || inner.taken.values().map(|slot| slot.priority());
        let silent = priorities().filter(|priority| *priority == SlotPriority::Silent).count();
        let strange = priorities().filter(|priority| *priority <= SlotPriority::Unauthenticated).count();
        let worth = |(number, slot): (&u64, &Arc<Slot>)| {
            let crowd = inner.by_client.get(&slot.client).copied().unwrap_or_default();
            let priority = match slot.priority() {
                SlotPriority::Silent if silent <= self.most / NEW_SHARE => SlotPriority::New,
                other => other,
            };
            (priority, Reverse(crowd), *number)
        };
        let spared = |number: u64| {
            inner.taken.get(&number).map_or(Duration::ZERO, |slot| slot.grace_left(self.grace, now))
        };
        let all = || inner.taken.iter().map(worth);
        let Some((priority, _, first)) = all().min() else { return Ok(()) };
        // New connections wait while many are unauthenticated, and no authenticated client loses its slot to them. If
        // authenticated clients have most of the slots, one of theirs is closed rather than a connection that came
        // just now.
        let crowded = priority <= SlotPriority::Unauthenticated && strange > self.most / NEW_SHARE;
        let number = match crowded {
            true => Some(first).filter(|first| spared(*first).is_zero()),
            false => all().filter(|(_, _, number)| spared(*number).is_zero()).min().map(|(_, _, n)| n),
        };
        let Some(number) = number else { return Err(spared(first)) };
        inner.close(number);
        inner.taken_away += 1;
        if inner.logged.is_none_or(|logged| logged.elapsed() >= LOG_INTERVAL) {
            inner.logged = Some(Instant::now());
            tracing::warn!(
                listener = self.what,
                slots = self.most,
                taken_away = inner.taken_away,
                "all connections are in use: idle connections of unauthenticated clients are closed for new ones"
            );
        }
        Ok(())
    }

    /// Closes connections that are idle, or do not read, for too long.
    pub(super) fn sweep(&self) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot::{IDLE_MAX, UNREAD_MAX};
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
}

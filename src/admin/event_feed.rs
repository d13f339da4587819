//! The node's newest events in memory, made of the transitions of the node and of policies; and the permits of the
//! streams that read them.

use crate::past_events::PastEvents;
use berth_api::{Event, EventKind, rfc3339};
use berth_core::RefusedRequest;
use berth_core::policy_transitions::PolicyTransition;
use berth_kernel::drain::marks::Drain;
use berth_kernel::ids::time::Now;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::transitions::{GpuName, Transition};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, watch};

/// How often all streams send a comment while no permit is free. The first write to a connection that its client closed is
/// answered with a reset, and the next one fails, which ends the stream.
const NUDGES: u32 = 4;
/// How long streams that a nudge ends take to return their permits: a write to a local socket.
const NUDGE_WAIT: Duration = Duration::from_millis(50);

/// The node's newest events, and the permits of the streams that read them.
pub(crate) struct Feed {
    pub(crate) ring: Arc<Ring>,
    /// The events of the last day that concern operators.
    pub(crate) past: PastEvents,
    permits: Arc<StreamPermits>,
}

impl Feed {
    /// Without events.
    pub(crate) fn new(now: Now) -> Self {
        // No two runs of a daemon start in the same millisecond.
        Self { ring: Arc::new(Ring::new(now.wall_ms)), past: PastEvents::default(), permits: Arc::default() }
    }

    /// Adds an event that was noticed now.
    pub(crate) fn add(&self, event: &Event, now: Now) {
        self.ring.add(event);
        self.past.add(event, now);
    }

    /// A permit for one more stream of this caller. A closed connection is noticed only when something is written to
    /// it, so all streams write before another caller's stream is ended.
    pub(crate) async fn permit(&self, caller: &str) -> Option<StreamPermit> {
        for _ in 0..NUDGES {
            if let Some(permit) = self.permits.acquire(caller) {
                return Some(permit);
            }
            self.ring.nudge();
            let _ = tokio::time::timeout(NUDGE_WAIT, self.permits.released()).await;
        }
        let permit = self.permits.acquire_from_largest(caller);
        self.ring.nudge();
        permit
    }
}

/// An event about the whole node. `words` are cut at [`WORDS_BYTES_MAX`].
pub(crate) fn node_event(kind: EventKind, mut words: String, ledger: &Ledger, now: Now) -> Event {
    words.truncate(words.floor_char_boundary(WORDS_BYTES_MAX));
    Event {
        kind,
        at: rfc3339(now.wall_ms),
        generation: ledger.generation,
        gpu: None,
        allocation: None,
        policy: None,
        words,
    }
}

/// The event of a transition; `None` for those that only the log and Kubernetes events report.
pub(crate) fn transition_event(transition: &Transition, ledger: &Ledger, now: Now) -> Option<Event> {
    let (mut allocation, mut policy) = (None, None);
    let kind = match transition {
        Transition::PartFound(_) => EventKind::GpuFound,
        Transition::OffersChanged(_) => EventKind::OffersChanged,
        Transition::HealthChanged { .. } => EventKind::GpuHealth,
        Transition::DrainChanged { now, .. } => match now {
            Drain::Active => EventKind::GpuUncordoned,
            Drain::Cordoned(_) => EventKind::GpuCordoned,
            Drain::Draining(..) => EventKind::GpuDraining,
            Drain::Drained(_) => EventKind::GpuDrained,
        },
        Transition::ViaChanged { .. } => EventKind::GpuVia,
        Transition::GpuForgotten { .. } => EventKind::GpuForgotten,
        Transition::Granted(granted) => {
            allocation = Some(granted.id);
            EventKind::AllocationGranted
        }
        Transition::HolderLearned(held) => {
            allocation = Some(held.id);
            EventKind::AllocationHolder
        }
        Transition::Ended(ended) => {
            allocation = Some(ended.id);
            EventKind::AllocationEnded
        }
        Transition::Contested(found) => {
            allocation = Some(found.allocation.id);
            EventKind::AllocationContested
        }
        Transition::LimitFailed(limited, _) => {
            allocation = Some(limited.id);
            EventKind::LimitNotSet
        }
        Transition::LimitChanged(limited, _) => {
            allocation = Some(limited.id);
            EventKind::LimitChanged
        }
        Transition::GrantForged(named, _) => {
            allocation = Some(named.id);
            EventKind::GrantForged
        }
        Transition::ContainerBypass(_) => EventKind::ContainerBypass,
        Transition::GuardChanged(_) => EventKind::Guard,
        Transition::Eviction(_) => EventKind::Eviction,
        Transition::EndsWithheldChanged(_) => EventKind::Hold,
        Transition::StrategyChanged(_) => EventKind::NoDeviceStrategy,
        Transition::NodesChanged(_) => EventKind::DeviceNodesMissing,
        Transition::ResourceWithdrawn(..) => EventKind::ResourceWithdrawn,
        Transition::PolicyAdded(version) => {
            policy = Some(version.label());
            EventKind::PolicyUploaded
        }
        Transition::PolicyDeleted(version) => {
            policy = Some(version.label());
            EventKind::PolicyDeleted
        }
        Transition::StackActivated(_) => EventKind::StackActivated,
        Transition::BypassStarted(_) => EventKind::Bypass,
        Transition::BypassEnded(_) => EventKind::BypassOver,
        // An eviction event has the reason already; the GPU's drain lists the pods.
        Transition::DrainBlocked { .. } | Transition::BypassPossible(_) => return None,
    };
    let gpu = transition.gpu(ledger).map(|gpu| gpu.to_string());
    let event = node_event(kind, transition.describe(ledger, GpuName::Index), ledger, now);
    Some(Event { gpu, allocation: allocation.map(|id| id.to_string()), policy, ..event })
}

/// The event of a policy of the active stack.
pub(crate) fn policy_event(transition: &PolicyTransition, ledger: &Ledger, now: Now) -> Event {
    let kind = match transition {
        PolicyTransition::Failed { .. } => EventKind::PolicyFault,
        PolicyTransition::Suspended { .. } => EventKind::PolicySuspended,
        PolicyTransition::Resumed { .. } => EventKind::PolicyAskedAgain,
    };
    let event = node_event(kind, transition.describe(), ledger, now);
    Event { policy: Some(transition.label().to_owned()), ..event }
}

/// The event of a refused request.
pub(crate) fn refused_event(refused: &RefusedRequest, ledger: &Ledger) -> Event {
    let event = node_event(EventKind::RequestRefused, refused.message.clone(), ledger, refused.at);
    Event { gpu: refused.gpu.as_ref().map(ToString::to_string), ..event }
}

/// Events that are kept for readers that reconnect. Each has at most [`WORDS_BYTES_MAX`] of words and about 300 other
/// bytes: at most 1.3 MiB together, 0.4 MiB as a rule.
pub(crate) const EVENTS_MAX: usize = 1024;
/// Longest words of an event, bytes.
pub(crate) const WORDS_BYTES_MAX: usize = 1024;

/// One event as it is sent.
#[derive(Debug)]
pub(crate) struct KeptEvent {
    pub(crate) kind: EventKind,
    pub(crate) gpu: Option<Box<str>>,
    /// The frame with its id.
    pub(crate) frame: Box<str>,
}

/// The newest events. A reader has a position in the ring and no queue of its own, so a slow reader needs no memory; it
/// misses events.
pub(crate) struct Ring {
    /// The start of the daemon, part of each id: numbers begin at 1 with each run.
    start: u64,
    inner: Mutex<Inner>,
    /// The number of the newest event; wakes readers.
    newest: watch::Sender<u64>,
    /// How often [`Ring::nudge`] was called.
    nudges: AtomicU64,
}

#[derive(Default)]
struct Inner {
    events: VecDeque<Arc<KeptEvent>>,
    /// The number of the newest event; the first one has 1.
    newest: u64,
    closed: Option<&'static str>,
}

impl Inner {
    fn oldest(&self) -> u64 {
        self.newest - self.events.len() as u64
    }
}

/// The events after a position in the ring.
pub(crate) enum Following {
    /// These, and the number of the last one. Empty if there are none.
    Events(Vec<Arc<KeptEvent>>, u64),
    /// Some of them are no longer kept.
    Gone,
    /// There are none, and there will be none, for this reason.
    Closed(&'static str),
}

/// The id of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EventId {
    pub(crate) start: u64,
    pub(crate) seq: u64,
}

impl EventId {
    /// Parses `start-number` in exactly the form that [`Ring::id`] prints.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (start, seq) = text.split_once('-')?;
        let id = Self { start: u64::from_str_radix(start, 16).ok()?, seq: seq.parse().ok()? };
        (id.to_string() == text).then_some(id)
    }
}

impl std::fmt::Display for EventId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:x}-{}", self.start, self.seq)
    }
}

impl Ring {
    /// An empty ring; `start` differs from that of every earlier run.
    pub(crate) fn new(start: u64) -> Self {
        Self { start, inner: Mutex::default(), newest: watch::Sender::new(0), nudges: AtomicU64::new(0) }
    }

    /// The id of the event with this number.
    pub(crate) fn id(&self, seq: u64) -> EventId {
        EventId { start: self.start, seq }
    }

    /// The number of the newest event.
    pub(crate) fn newest(&self) -> u64 {
        self.inner.lock().newest
    }

    /// The number before that of the oldest kept event.
    pub(crate) fn oldest(&self) -> u64 {
        self.inner.lock().oldest()
    }

    /// Changes with each new event, nudge, and when the ring is closed.
    pub(crate) fn watch(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    /// Adds an event; the oldest is dropped if the ring is full.
    pub(crate) fn add(&self, event: &Event) {
        let mut inner = self.inner.lock();
        inner.newest += 1;
        let frame = frame(self.id(inner.newest), event).into();
        let gpu = event.gpu.as_deref().map(Into::into);
        if inner.events.len() == EVENTS_MAX {
            inner.events.pop_front();
        }
        inner.events.push_back(Arc::new(KeptEvent { kind: event.kind.clone(), gpu, frame }));
        self.newest.send_replace(inner.newest);
    }

    /// The events after number `after`, at most `max`.
    pub(crate) fn following(&self, after: u64, max: usize) -> Following {
        let inner = self.inner.lock();
        let oldest = inner.oldest();
        if after < oldest {
            return Following::Gone;
        }
        let passed = usize::try_from(after - oldest).unwrap_or(usize::MAX);
        let events: Vec<_> = inner.events.iter().skip(passed).take(max).cloned().collect();
        match (events.is_empty(), inner.closed) {
            (true, Some(why)) => Following::Closed(why),
            _ => {
                let last = after + events.len() as u64;
                Following::Events(events, last)
            }
        }
    }

    /// Makes every stream send a comment, so that streams with closed connections end.
    pub(crate) fn nudge(&self) {
        // Counted before the streams wake, so that they see the count.
        self.nudges.fetch_add(1, Ordering::SeqCst);
        self.newest.send_modify(|_| {});
    }

    /// How often [`Self::nudge`] was called.
    pub(crate) fn nudges(&self) -> u64 {
        self.nudges.load(Ordering::SeqCst)
    }

    /// Ends all readers once they have read the kept events.
    pub(crate) fn close(&self, reason: &'static str) {
        self.inner.lock().closed = Some(reason);
        self.newest.send_modify(|_| {});
    }
}

/// One event as a frame of the stream. JSON has no line breaks, so its data is one line.
pub(crate) fn frame(id: EventId, event: &Event) -> String {
    // Serializing strings and numbers cannot fail.
    let data = serde_json::to_string(event).unwrap_or_default();
    format!("id: {id}\nevent: {}\ndata: {data}\n\n", event.kind.as_str())
}

/// Most streams at the same time: some pages and scripts of a node's operators. Each uses a connection of the 256 that the
/// listener has, and at most 100 KiB of unsent events.
pub(crate) const STREAMS_MAX: usize = 32;

/// The permits of all streams: how many streams there may be, and how they are divided between callers.
///
/// A permit is free again when its stream ends. While none is free, a caller takes over the oldest one of the caller
/// with the most streams, if that caller still has at least as many afterwards. The client of the ended stream reconnects
/// with its last event id and misses nothing. So no caller keeps the others out, and a single caller may use all permits.
#[derive(Default)]
pub(crate) struct StreamPermits {
    inner: Mutex<PermitsInUse>,
    released: Notify,
}

#[derive(Default)]
struct PermitsInUse {
    next: u64,
    /// By number, so the oldest first.
    in_use: BTreeMap<u64, InUse>,
}

struct InUse {
    caller: String,
    revoked: Arc<AtomicBool>,
}

/// The permit of one stream; free again when it is dropped.
pub(crate) struct StreamPermit {
    permits: Arc<StreamPermits>,
    number: u64,
    revoked: Arc<AtomicBool>,
}

impl StreamPermits {
    /// A free permit, if there is one.
    pub(crate) fn acquire(self: &Arc<Self>, caller: &str) -> Option<StreamPermit> {
        let mut inner = self.inner.lock();
        (inner.in_use.len() < STREAMS_MAX).then(|| self.insert(&mut inner, caller))
    }

    /// A free permit, or the oldest one of the caller with the most streams. The stream that loses its permit has to be
    /// woken; if its client reads nothing, the connection stays open for up to a minute.
    pub(crate) fn acquire_from_largest(self: &Arc<Self>, caller: &str) -> Option<StreamPermit> {
        let mut inner = self.inner.lock();
        if inner.in_use.len() >= STREAMS_MAX {
            let number = inner.oldest_of_largest(caller)?;
            if let Some(in_use) = inner.in_use.remove(&number) {
                in_use.revoked.store(true, Ordering::Relaxed);
            }
        }
        Some(self.insert(&mut inner, caller))
    }

    fn insert(self: &Arc<Self>, inner: &mut PermitsInUse, caller: &str) -> StreamPermit {
        let (number, revoked) = (inner.next, Arc::new(AtomicBool::new(false)));
        inner.next += 1;
        inner.in_use.insert(number, InUse { caller: caller.to_owned(), revoked: Arc::clone(&revoked) });
        StreamPermit { permits: Arc::clone(self), number, revoked }
    }

    /// Waits until a permit is released; returns at once if one was since the last wait.
    pub(crate) async fn released(&self) {
        self.released.notified().await;
    }
}

impl PermitsInUse {
    /// The oldest permit of the caller with the most, if it then still has at least as many as `caller`.
    fn oldest_of_largest(&self, caller: &str) -> Option<u64> {
        let mut counts = HashMap::<&str, usize>::new();
        for in_use in self.in_use.values() {
            *counts.entry(&in_use.caller).or_default() += 1;
        }
        let own = counts.get(caller).copied().unwrap_or_default();
        let most = counts.values().copied().max().filter(|most| own + 1 < *most)?;
        let oldest = self.in_use.iter().find(|(_, in_use)| counts.get(&*in_use.caller) == Some(&most));
        oldest.map(|(number, _)| *number)
    }
}

impl StreamPermit {
    /// Whether another stream took it over.
    pub(crate) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Relaxed)
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        let mut inner = self.permits.inner.lock();
        if inner.in_use.remove(&self.number).is_some() {
            self.permits.released.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(n: u64) -> Event {
        Event {
            kind: EventKind::GpuHealth,
            at: String::new(),
            generation: n,
            gpu: Some("GPU-0".into()),
            allocation: None,
            policy: None,
            words: "two\nlines".into(),
        }
    }

    fn ids(following: Following) -> Option<(Vec<String>, u64)> {
        match following {
            Following::Events(events, last) => {
                let id = |kept: &Arc<KeptEvent>| {
                    kept.frame.lines().next().unwrap().trim_start_matches("id: ").to_owned()
                };
                Some((events.iter().map(id).collect(), last))
            }
            Following::Gone | Following::Closed(_) => None,
        }
    }

    #[test]
    fn readers_get_the_events_after_their_position_or_learn_that_they_are_gone() {
        let ring = Ring::new(0xa7);
        assert_eq!(ids(ring.following(0, 9)), Some((vec![], 0)));
        for n in 1..=3 {
            ring.add(&event(n));
        }
        assert_eq!(ids(ring.following(1, 9)), Some((vec!["a7-2".into(), "a7-3".into()], 3)));
        assert_eq!(ids(ring.following(0, 2)), Some((vec!["a7-1".into(), "a7-2".into()], 2)));
        assert_eq!(ids(ring.following(3, 9)), Some((vec![], 3)));
        for n in 4..=EVENTS_MAX as u64 + 3 {
            ring.add(&event(n));
        }
        assert!(matches!(ring.following(2, 9), Following::Gone));
        assert_eq!((ring.oldest(), ring.newest()), (3, EVENTS_MAX as u64 + 3));
        assert_eq!(ids(ring.following(3, usize::MAX)).unwrap().0.len(), EVENTS_MAX);
    }

    #[test]
    fn a_closed_ring_ends_readers_after_the_remaining_events() {
        let ring = Ring::new(1);
        ring.add(&event(1));
        ring.close("over");
        assert_eq!(ids(ring.following(0, 9)).unwrap().1, 1);
        assert!(matches!(ring.following(1, 9), Following::Closed("over")));
    }

    #[test]
    fn a_frame_has_an_id_a_kind_and_one_line_of_data() {
        let text = frame(EventId { start: 0xff, seq: 7 }, &event(1));
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[..2], ["id: ff-7", "event: gpuHealth"]);
        let data: Event = serde_json::from_str(lines[2].strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!((data, lines.len()), (event(1), 4));
        assert!(text.ends_with("\n\n"));
    }

    #[test]
    fn ids_are_parsed_only_in_their_printed_form() {
        let id = EventId { start: 0x19a, seq: 12 };
        assert_eq!(EventId::parse(&id.to_string()), Some(id));
        for odd in ["", "-", "19a", "19A-12", "19a-012", "19a-+2", "19a-1-2", "x-1", " 19a-12"] {
            assert_eq!(EventId::parse(odd), None, "{odd}");
        }
    }

    #[test]
    fn the_caller_with_the_most_streams_loses_permits_until_all_have_as_many() {
        let permits = Arc::new(StreamPermits::default());
        let greedy: Vec<_> = (0..STREAMS_MAX).map(|_| permits.acquire("a").unwrap()).collect();
        assert!(permits.acquire("a").is_none() && permits.acquire("b").is_none());
        assert!(permits.acquire_from_largest("a").is_none(), "it would take its own");
        let others: Vec<_> = (0..16).map(|_| permits.acquire_from_largest("b").unwrap()).collect();
        assert!(greedy[..16].iter().all(StreamPermit::is_revoked));
        assert!(!greedy[16..].iter().any(StreamPermit::is_revoked));
        assert!(permits.acquire_from_largest("b").is_none() && permits.acquire_from_largest("a").is_none());
        let third = permits.acquire_from_largest("c").unwrap();
        assert!(greedy[16].is_revoked() != others[0].is_revoked());
        drop((greedy, others, third));
        assert!(permits.inner.lock().in_use.is_empty());
        assert!(permits.acquire("a").is_some());
    }
}

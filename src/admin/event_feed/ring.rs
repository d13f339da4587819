//! The newest events, in memory. A reader has a position in the ring and no queue of its own, so a slow reader needs no
//! memory; it misses events.

use berth_api::{Event, EventKind};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::watch;

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

/// The ring.
pub(crate) struct Ring {
    /// The start of the daemon, part of each id: numbers begin at 1 with each run.
    start: u64,
    kept: Mutex<Inner>,
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
        Self { start, kept: Mutex::default(), newest: watch::Sender::new(0), nudges: AtomicU64::new(0) }
    }

    /// The id of the event with this number.
    pub(crate) fn id(&self, seq: u64) -> EventId {
        EventId { start: self.start, seq }
    }

    /// The number of the newest event.
    pub(crate) fn newest(&self) -> u64 {
        self.lock().newest
    }

    /// The number before that of the oldest kept event.
    pub(crate) fn oldest(&self) -> u64 {
        let inner = self.lock();
        inner.newest - inner.events.len() as u64
    }

    /// Changes with each new event, nudge, and when the ring is closed.
    pub(crate) fn watch(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    /// Adds an event; the oldest is dropped if the ring is full.
    pub(crate) fn add(&self, event: &Event) {
        let mut inner = self.lock();
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
        let inner = self.lock();
        let oldest = inner.newest - inner.events.len() as u64;
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
        self.lock().closed = Some(reason);
        self.newest.send_modify(|_| {});
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, Inner> {
        self.kept.lock()
    }
}

/// One event as a frame of the stream. JSON has no line breaks, so its data is one line.
pub(crate) fn frame(id: EventId, event: &Event) -> String {
    // Serializing strings and numbers cannot fail.
    let data = serde_json::to_string(event).unwrap_or_default();
    format!("id: {id}\nevent: {}\ndata: {data}\n\n", event.kind.as_str())
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
}

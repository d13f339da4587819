//! The events of the last 24 hours that concern operators. Grants and ends of allocations, which may be many a second, are
//! left out, so that they cannot displace the others.

use berth_api::{Event, EventKind};
use berth_kernel::ids::time::Now;
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};

/// Most events that are kept. Each has at most 1024 bytes of words and about 300 bytes more: at most 0.7 MiB together,
/// 0.2 MiB as a rule.
pub(crate) const PAST_EVENTS_MAX: usize = 500;
/// How long they are kept, milliseconds: a day.
const AGE_MS_MAX: u64 = 24 * 3600 * 1000;

/// The kept events.
#[derive(Debug, Default)]
pub(crate) struct PastEvents(Mutex<VecDeque<PastEvent>>);

#[derive(Debug)]
struct PastEvent {
    at_mono_ms: u64,
    event: Event,
}

impl PastEvents {
    /// Adds an event of this time, if it concerns operators. If there are too many, the oldest one of the most frequent kind
    /// is dropped, so that a flood of one kind leaves the others.
    pub(crate) fn add(&self, event: &Event, now: Now) {
        if !event.kind.concerns_operators() {
            return;
        }
        let mut kept = self.0.lock();
        // Old events are removed on each addition, so that they do not stay in memory without a request.
        while kept.front().is_some_and(|oldest| now.passed(oldest.at_mono_ms, AGE_MS_MAX)) {
            kept.pop_front();
        }
        if kept.len() >= PAST_EVENTS_MAX
            && let Some(at) = oldest_of_most_frequent(&kept)
        {
            kept.remove(at);
        }
        kept.push_back(PastEvent { at_mono_ms: now.mono_ms, event: event.clone() });
    }

    /// The newest events that are at most `last_ms` old, newest first.
    pub(crate) fn newest(&self, last_ms: u64, limit: usize, now: Now) -> Vec<Event> {
        let kept = self.0.lock();
        let recent = kept.iter().rev().take_while(|kept| !now.passed(kept.at_mono_ms, last_ms));
        recent.take(limit).map(|kept| kept.event.clone()).collect()
    }
}

fn oldest_of_most_frequent(kept: &VecDeque<PastEvent>) -> Option<usize> {
    let mut counts: BTreeMap<&EventKind, usize> = BTreeMap::new();
    for kept in kept {
        *counts.entry(&kept.event.kind).or_default() += 1;
    }
    let (most, _) = counts.into_iter().max_by_key(|(_, count)| *count)?;
    kept.iter().position(|kept| kept.event.kind == *most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: EventKind, generation: u64) -> Event {
        Event {
            kind,
            at: String::new(),
            generation,
            gpu: None,
            allocation: None,
            policy: None,
            words: String::new(),
        }
    }

    fn at(seconds: u64) -> Now {
        Now { wall_ms: 0, mono_ms: seconds * 1000 }
    }

    #[test]
    fn grants_are_left_out_and_the_newest_event_comes_first() {
        let past = PastEvents::default();
        past.add(&event(EventKind::GpuHealth, 1), at(10));
        past.add(&event(EventKind::AllocationGranted, 2), at(11));
        past.add(&event(EventKind::GpuCordoned, 3), at(12));
        let generations = |last_ms, limit, now| -> Vec<u64> {
            past.newest(last_ms, limit, now).iter().map(|event| event.generation).collect()
        };
        assert_eq!(generations(AGE_MS_MAX, 500, at(12)), [3, 1]);
        assert_eq!(generations(AGE_MS_MAX, 1, at(12)), [3]);
        assert_eq!(generations(2_000, 500, at(13)), [3]);
        past.add(&event(EventKind::GpuHealth, 4), at(24 * 3600 + 11));
        assert_eq!(generations(AGE_MS_MAX, 500, at(24 * 3600 + 11)), [4, 3]);
        assert_eq!(past.0.lock().len(), 2, "the first one is a day old");
    }

    #[test]
    fn a_flood_of_one_kind_leaves_the_others() {
        let past = PastEvents::default();
        past.add(&event(EventKind::GpuHealth, 0), at(1));
        for n in 1..=3_000 {
            past.add(&event(EventKind::RequestRefused, n), at(1));
        }
        past.add(&event(EventKind::Bypass, 4_000), at(1));
        let all = past.newest(AGE_MS_MAX, usize::MAX, at(1));
        assert_eq!(all.len(), PAST_EVENTS_MAX);
        assert_eq!((all[0].generation, all[1].generation), (4_000, 3_000));
        assert_eq!(all.last().unwrap().kind, EventKind::GpuHealth);
    }
}

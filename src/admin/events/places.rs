//! How many streams there may be, and whose.
//!
//! A place is free again when its stream ends. That a client is gone is noticed only when something is sent
//! to it, so places are waited for a little. Where all are taken for good, whoever has most gives its oldest
//! one up for a caller who has fewer, as long as that makes it fairer; its client comes back with the id that
//! it is at, and misses nothing. So nobody keeps all others out, and one caller alone may have them all.

use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::Notify;

/// Streams at a time: some pages and scripts of a node's operators. Each has a connection of its own, of
/// which the listener has 256, and at most 100 KiB of what was not sent yet.
pub(super) const STREAMS_MAX: usize = 32;

/// The places of all streams.
#[derive(Default)]
pub(super) struct Places {
    inner: Mutex<Inner>,
    left: Notify,
}

#[derive(Default)]
struct Inner {
    next: u64,
    /// By number, so by age.
    taken: BTreeMap<u64, Taken>,
}

struct Taken {
    whose: String,
    gone: Arc<AtomicBool>,
}

/// A stream's place; free again when this is dropped.
pub(super) struct Place {
    places: Arc<Places>,
    number: u64,
    gone: Arc<AtomicBool>,
}

impl Places {
    /// A place that nobody has.
    pub(super) fn take(self: &Arc<Self>, whose: &str) -> Option<Place> {
        let mut inner = self.inner.lock();
        (inner.taken.len() < STREAMS_MAX).then(|| self.put(&mut inner, whose))
    }

    /// One that nobody has, or the oldest of whoever has most. Whoever had that has to be woken; one that reads
    /// nothing is there for a minute more, with what its connection holds.
    pub(super) fn take_over(self: &Arc<Self>, whose: &str) -> Option<Place> {
        let mut inner = self.inner.lock();
        if inner.taken.len() >= STREAMS_MAX {
            let number = inner.oldest_of_a_crowd(whose)?;
            if let Some(taken) = inner.taken.remove(&number) {
                taken.gone.store(true, Ordering::Relaxed);
            }
        }
        Some(self.put(&mut inner, whose))
    }

    fn put(self: &Arc<Self>, inner: &mut Inner, whose: &str) -> Place {
        let (number, gone) = (inner.next, Arc::new(AtomicBool::new(false)));
        inner.next += 1;
        inner.taken.insert(number, Taken { whose: whose.to_owned(), gone: Arc::clone(&gone) });
        Place { places: Arc::clone(self), number, gone }
    }

    /// Until a place was left; at once where one was since the last wait.
    pub(super) async fn left(&self) {
        self.left.notified().await;
    }
}

impl Inner {
    /// Of whoever would still have more than this caller afterwards, or as many.
    fn oldest_of_a_crowd(&self, whose: &str) -> Option<u64> {
        let mut crowds = HashMap::<&str, usize>::new();
        for taken in self.taken.values() {
            *crowds.entry(&taken.whose).or_default() += 1;
        }
        let mine = crowds.get(whose).copied().unwrap_or_default();
        let most = crowds.values().copied().max().filter(|most| mine + 1 < *most)?;
        let oldest = self.taken.iter().find(|(_, taken)| crowds.get(&*taken.whose) == Some(&most));
        oldest.map(|(number, _)| *number)
    }
}

impl Place {
    /// Whether somebody else has it by now.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut inner = self.places.inner.lock();
        if inner.taken.remove(&self.number).is_some() {
            self.places.left.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_most_makes_room_until_it_is_fair() {
        let places = Arc::new(Places::default());
        let greedy: Vec<_> = (0..STREAMS_MAX).map(|_| places.take("a").unwrap()).collect();
        assert!(places.take("a").is_none() && places.take("b").is_none());
        assert!(places.take_over("a").is_none(), "nothing is won by that");
        let others: Vec<_> = (0..16).map(|_| places.take_over("b").unwrap()).collect();
        assert!(greedy[..16].iter().all(Place::is_gone) && !greedy[16..].iter().any(Place::is_gone));
        assert!(places.take_over("b").is_none() && places.take_over("a").is_none());
        let third = places.take_over("c").unwrap();
        assert!(greedy[16].is_gone() != others[0].is_gone());
        drop((greedy, others, third));
        assert!(places.inner.lock().taken.is_empty());
        assert!(places.take("a").is_some());
    }
}

//! Permits of event streams: how many streams there may be, and how they are divided between callers.
//!
//! A permit is free again when its stream ends. While none is free, a caller takes over the oldest one of the caller with
//! the most streams, if that caller still has at least as many afterwards. The client of the ended stream reconnects with
//! its last event id and misses nothing. So no caller keeps the others out, and a single caller may use all permits.

use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::Notify;

/// Most streams at the same time: some pages and scripts of a node's operators. Each uses a connection of the 256 that the
/// listener has, and at most 100 KiB of unsent events.
pub(crate) const STREAMS_MAX: usize = 32;

/// The permits of all streams.
#[derive(Default)]
pub(crate) struct StreamPermits {
    inner: Mutex<Inner>,
    released: Notify,
}

#[derive(Default)]
struct Inner {
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

    fn insert(self: &Arc<Self>, inner: &mut Inner, caller: &str) -> StreamPermit {
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

impl Inner {
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

//! What every handler works with.

use super::access::Access;
use super::budget::Budget;
use super::events::Feed;
use super::idempotency::Keys;
use super::places::Places;
use super::survey::Surveys;
use super::written::Written;
use super::{Facts, Settings};
use berth_core::admission::Door;
use berth_core::metrics::Metrics;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tokio::sync::Mutex;

/// Shared by all workers.
pub(super) struct State {
    pub(super) door: Door,
    pub(super) metrics: Metrics,
    pub(super) facts: Facts,
    pub(super) access: Access,
    /// What follows from the newest snapshot.
    pub(super) surveys: Surveys,
    /// Allocations as they were shown last.
    pub(super) written: Written,
    /// Who uploads.
    pub(super) places: Places,
    /// What answers weigh that are not read yet.
    pub(super) budget: Budget,
    /// Whose turn it is to order something of a GPU.
    pub(super) orders: Mutex<()>,
    /// What uploads were answered, by their keys.
    pub(super) keys: Keys,
    /// What changes, for whoever looks on.
    pub(super) feed: Feed,
    pub(super) gate: Gate,
}

impl State {
    pub(super) fn new(settings: &Settings, access: Access, door: Door) -> Self {
        Self {
            metrics: Metrics::new(door.clone()),
            feed: Feed::new(door.now()),
            door,
            facts: settings.facts.clone(),
            access,
            surveys: Surveys::default(),
            written: Written::default(),
            places: Places::default(),
            budget: Budget::default(),
            orders: Mutex::new(()),
            keys: Keys::default(),
            gate: Gate::default(),
        }
    }
}

/// Counts requests, so that a stop can let them finish.
#[derive(Default)]
pub(super) struct Gate {
    inside: AtomicUsize,
    closed: AtomicBool,
}

impl Gate {
    /// Lets a request in; `None` once closed.
    pub(super) fn enter(&self) -> Option<Inside<'_>> {
        // Counted before the look, so that a close either sees the request or is seen by it.
        self.inside.fetch_add(1, Ordering::SeqCst);
        let inside = Inside(self);
        (!self.closed.load(Ordering::SeqCst)).then_some(inside)
    }

    /// Lets nobody in any more.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Whether nobody is inside.
    pub(super) fn is_empty(&self) -> bool {
        self.inside.load(Ordering::SeqCst) == 0
    }
}

/// One request inside.
pub(super) struct Inside<'a>(&'a Gate);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

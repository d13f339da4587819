//! What every handler works with.

use super::Facts;
use super::events::Feed;
use super::idempotency::Keys;
use super::places::Places;
use super::survey::Surveys;
use super::written::Written;
use berth_core::admission::Door;
use berth_core::metrics::Metrics;
use berth_http::gate::Context;
use std::sync::Arc;
use tokio::sync::Mutex;

/// Shared by all workers.
pub(super) struct State {
    pub(super) door: Door,
    pub(super) metrics: Metrics,
    pub(super) facts: Facts,
    pub(super) http: Arc<Context>,
    /// What follows from the newest snapshot.
    pub(super) surveys: Surveys,
    /// Allocations as they were shown last.
    pub(super) written: Written,
    /// Who uploads.
    pub(super) places: Places,
    /// Whose turn it is to order something of a GPU.
    pub(super) orders: Mutex<()>,
    /// What uploads were answered, by their keys.
    pub(super) keys: Keys,
    /// What changes, for whoever looks on.
    pub(super) feed: Feed,
}

impl State {
    pub(super) fn new(facts: Facts, http: Arc<Context>, door: Door) -> Self {
        Self {
            metrics: Metrics::new(door.clone()),
            feed: Feed::new(door.now()),
            door,
            facts,
            http,
            surveys: Surveys::default(),
            written: Written::default(),
            places: Places::default(),
            orders: Mutex::new(()),
            keys: Keys::default(),
        }
    }
}

//! What every handler works with.

use super::events::feed::Feed;
use super::facts::Facts;
use super::survey::Surveys;
use super::upload_permits::UploadPermits;
use super::written::Written;
use berth_core::admission::Door;
use berth_core::metrics::Metrics;
use berth_http::context::Context;
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
    /// The uploads under way.
    pub(super) upload_permits: UploadPermits,
    /// Whose turn it is to order something of a GPU.
    pub(super) orders: Mutex<()>,
    /// The newest events of the node.
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
            upload_permits: UploadPermits::default(),
            orders: Mutex::new(()),
        }
    }
}

//! The state that all handlers share.

use crate::allocation_cache::Written;
use crate::event_feed::Feed;
use crate::node_facts::Facts;
use crate::survey::Surveys;
use crate::upload_permits::UploadPermits;
use berth_core::metrics::Metrics;
use berth_core::{Core, KernelHandle, Lab, PolicyService};
use berth_http::context::Context;
use std::sync::Arc;
use tokio::sync::Mutex;

/// Shared by all workers.
pub(crate) struct State {
    pub(crate) kernel: KernelHandle,
    pub(crate) policies: PolicyService,
    pub(crate) lab: Lab,
    pub(crate) metrics: Metrics,
    pub(crate) facts: Facts,
    pub(crate) http: Arc<Context>,
    /// Device counts of the newest snapshot.
    pub(crate) surveys: Surveys,
    /// Allocations as JSON texts.
    pub(crate) written: Written,
    /// Permits of uploads.
    pub(crate) upload_permits: UploadPermits,
    /// Held while the drain state of a GPU is changed.
    pub(crate) orders: Mutex<()>,
    /// The newest events of the node.
    pub(crate) feed: Feed,
}

impl State {
    pub(crate) fn new(facts: Facts, http: Arc<Context>, core: Core) -> Self {
        Self {
            metrics: Metrics::new(&core),
            feed: Feed::new(core.kernel.now()),
            kernel: core.kernel,
            policies: core.policies,
            lab: core.lab,
            facts,
            http,
            surveys: Surveys::default(),
            written: Written::default(),
            upload_permits: UploadPermits::default(),
            orders: Mutex::new(()),
        }
    }
}

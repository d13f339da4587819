//! The state that one scrape shows.

use crate::keeper::Snapshot;
use crate::stack::{CallCounters, PolicyStatuses};
use berth_kernel::hardware::gpu::Load;
use berth_kernel::ids::names::{GpuId, Resource};
use berth_kernel::node::ports::JournalStats;
use berth_kernel::sharing::listing::ListedDevice;
use berth_observe::counters::Counters;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// Results of the daemon's checks, which the ledger does not hold.
#[derive(Clone, Debug, Default)]
pub struct CheckResults {
    /// The checks of `/readyz`, and whether each passes.
    pub ready: Vec<(String, bool)>,
    /// The checks of `/livez`, and whether each passes.
    pub live: Vec<(String, bool)>,
    /// The checks of `/readyz`, and whether each has a message.
    pub messages: Vec<(String, bool)>,
    /// Whether the configuration file as it is now is refused; `None` without a file.
    pub file_refused: Option<bool>,
    /// Whether a stack of the API is in use in place of the file's; `None` without a file.
    pub file_stack_overridden: Option<bool>,
}

/// The state that one scrape shows.
pub(super) struct Scrape {
    pub(super) about: CheckResults,
    pub(super) ledger: Snapshot,
    /// Index and UUID of the GPUs with metrics.
    pub(super) gpus: Vec<(String, GpuId)>,
    /// The loads of the GPUs at the last scan.
    pub(super) loads: Arc<BTreeMap<GpuId, Load>>,
    pub(super) listed: BTreeMap<Resource, Vec<ListedDevice>>,
    /// Resources with metrics of grants and ends.
    pub(super) counted: BTreeSet<String>,
    pub(super) policy_statuses: PolicyStatuses,
    /// Number of commands in the keeper's inboxes: the kubelet's and the other one.
    pub(super) queue_lengths: (usize, usize),
    pub(super) store_failed: bool,
    pub(super) counters: Arc<Counters>,
    pub(super) call_counters: CallCounters,
    /// `None` if decisions are not recorded.
    pub(super) journal: Option<JournalStats>,
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scrape").field("generation", &self.ledger.generation).finish_non_exhaustive()
    }
}

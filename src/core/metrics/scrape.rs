//! The state that one scrape shows.

use crate::admission::{Standings, Tally};
use crate::figures::Figures;
use crate::keeper::Snapshot;
use berth_kernel::listing::Listed;
use berth_kernel::names::{PartId, Resource};
use berth_kernel::ports::Standing;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// What the ledger does not have: the checks of the daemon.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// The conditions of readiness, and whether each holds.
    pub ready: Vec<(String, bool)>,
    /// The conditions of liveness, and whether each holds.
    pub live: Vec<(String, bool)>,
    /// The checks of readiness, and whether each has a warning.
    pub noted: Vec<(String, bool)>,
}

/// The state that one scrape shows.
pub(super) struct Scrape {
    pub(super) about: About,
    pub(super) ledger: Snapshot,
    /// Index and UUID of the GPUs that are shown.
    pub(super) gpus: Vec<(String, PartId)>,
    pub(super) listed: BTreeMap<Resource, Vec<Listed>>,
    /// Resources whose grants and ends are shown.
    pub(super) counted: BTreeSet<String>,
    pub(super) standings: Standings,
    /// Commands that wait for the keeper: the kubelet's, and others'.
    pub(super) waiting: (usize, usize),
    pub(super) store_failed: bool,
    pub(super) figures: Arc<Figures>,
    pub(super) tally: Tally,
    /// `None` if decisions are not recorded.
    pub(super) journal: Option<Standing>,
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scrape").field("generation", &self.ledger.generation).finish_non_exhaustive()
    }
}

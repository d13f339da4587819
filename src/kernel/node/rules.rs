//! The settings of the kernel's rules, which the configuration sets.

use crate::evidence::limits::Enforcement;
use crate::grants::bypass::{BypassAction, BypassRules};
use crate::grants::history::HistoryLimit;
use crate::ids::time::Timing;
use crate::policy::version::TrustedKey;
use crate::sharing::via::KubeletApi;
use std::sync::Arc;

/// Settings of the rules. They are part of the ledger, so that a reader of a snapshot has the rules that its offers and
/// grants obey. They are not stored: each start sets them from the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Timeouts and intervals.
    pub timing: Timing,
    /// How much of each part's memory may be granted, percent.
    pub overcommit_percent: u32,
    /// Whether the driver limits the memory of containers.
    pub enforcement: Enforcement,
    /// What the guard does about containers that can use GPUs that were not allocated to them.
    pub bypass: BypassRules,
    /// The folder of the files by which the guard knows what claims were granted.
    pub claim_grants: Option<Arc<str>>,
    /// The API through which new GPUs are granted.
    pub via: KubeletApi,
    /// Limits of the history of ended allocations.
    pub history: HistoryLimit,
    /// Keys that policies may be signed with; if empty, a policy needs no signature.
    pub trusted_keys: Vec<TrustedKey>,
}

impl Rules {
    /// The setting that only the guard puts into effect; `None` if there is none, so that a node can be without a guard.
    #[must_use]
    pub fn why_guard_is_needed(&self) -> Option<&'static str> {
        match (self.enforcement, self.bypass.action) {
            (Enforcement::Require, _) => Some("`enforce.memory` is `require`"),
            (_, BypassAction::Strip | BypassAction::Deny) => Some("`bypass.action` is not `report`"),
            _ => None,
        }
    }
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            timing: Timing::default(),
            overcommit_percent: 100,
            enforcement: Enforcement::default(),
            bypass: BypassRules::default(),
            claim_grants: None,
            via: KubeletApi::default(),
            history: HistoryLimit::default(),
            trusted_keys: Vec::new(),
        }
    }
}

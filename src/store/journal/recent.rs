//! The newest decisions in memory, for clients that poll: such a request reads and verifies no file of
//! 4 MiB.

use berth_kernel::decision::{Decision, Filter};
use berth_kernel::ports::DecisionPage;
use std::collections::VecDeque;

/// Decisions in memory: the API's default page of 50, one more, and some spare. At most about 4 KiB each,
/// so 256 KiB.
const RECENT_MAX: usize = 64;

/// The newest decisions, oldest first.
#[derive(Debug, Default)]
pub(super) struct Recent(VecDeque<Decision>);

impl Recent {
    pub(super) fn push(&mut self, decision: Decision) {
        if self.0.len() == RECENT_MAX {
            self.0.pop_front();
        }
        self.0.push_back(decision);
    }

    /// Removes all, since some may not be on disk.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// As [`berth_kernel::ports::Journal::find`], among decisions from number `oldest` on. `None` if there are
    /// too few matches in memory, so that the files must be read.
    pub(super) fn find(&self, filter: &Filter, limit: usize, oldest: u64) -> Option<DecisionPage> {
        let kept = self.0.iter().rev().take_while(|decision| decision.seq >= oldest);
        let matches = kept.filter(|decision| filter.matches(decision));
        // Counted before any decision is cloned.
        let after = matches.clone().nth(limit)?;
        Some(DecisionPage { decisions: matches.take(limit).cloned().collect(), next: Some(after.seq + 1) })
    }
}

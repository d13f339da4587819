//! The newest decisions in memory: what a page or a script that looks again and again asks for. A file of
//! 4 MiB is not read and held against its checksums for a screenful.

use berth_kernel::decision::{Decision, Filter};
use berth_kernel::ports::Found;
use std::collections::VecDeque;

/// Decisions that are kept: what the API answers by default, 50, with one more, and some to spare. At most
/// some 4 KiB each, so 256 KiB.
const RECENT: usize = 64;

/// The newest of them, oldest first.
#[derive(Debug, Default)]
pub(super) struct Recent(VecDeque<Decision>);

impl Recent {
    pub(super) fn push(&mut self, decision: Decision) {
        if self.0.len() == RECENT {
            self.0.pop_front();
        }
        self.0.push_back(decision);
    }

    /// Forgets what may not have reached the disk.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// As [`berth_kernel::ports::Journal::find`], of those whose files are kept from `oldest` on; `None` where
    /// the files must be asked, since older ones may be wanted as well.
    pub(super) fn find(&self, filter: &Filter, limit: usize, oldest: u64) -> Option<Found> {
        let kept = self.0.iter().rev().take_while(|decision| decision.seq >= oldest);
        let wanted = kept.filter(|decision| filter.wants(decision));
        // Not copied before it is known that they are enough.
        let after = wanted.clone().nth(limit)?;
        Some(Found { decisions: wanted.take(limit).cloned().collect(), next: Some(after.seq + 1) })
    }
}

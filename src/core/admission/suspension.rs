//! An operator's word that a suspended policy is to be asked again.

use super::thread::{OtherJob, Worker};
use super::{Door, send, within};
use crate::keeper::{AskError, Snapshot};
use berth_kernel::refusal::Refusal;
use tokio::sync::oneshot;

impl Door {
    /// Ends the suspension of the entry at this place of the stack of this revision, and asks the stack
    /// what it offers. An entry that is not suspended stays as it is. Answers whether it was.
    ///
    /// # Errors
    /// If another stack is active, or the stack has no such place, or the policy thread is busy.
    pub async fn unsuspend(&self, place: usize, revision: u64) -> Result<bool, AskError> {
        let (reply, answer) = oneshot::channel();
        send(&self.other_jobs, OtherJob::Unsuspend { place, revision, reply })?;
        within(answer).await?
    }
}

impl Worker {
    pub(super) fn unsuspend(&self, place: usize, revision: u64) -> Result<bool, AskError> {
        let node: Snapshot = self.keeper.snapshot();
        let moved = || AskError::Refused(Refusal::StackMoved { revision: node.stack.revision });
        if node.stack.revision != revision {
            return Err(moved());
        }
        let entry = node.stack.entries.get(place).ok_or_else(moved)?;
        let was = self.account.faults.lock().forgive(place, entry);
        if was {
            tracing::info!(policy = entry.label(), place, "a suspended policy is asked again");
            self.account.publish(&node.stack);
            // What it offers may differ from what the rest of the stack did meanwhile. If that cannot be
            // recorded, the log says so, and the next change of the node asks again.
            let _ = self.reoffer();
        }
        Ok(was)
    }
}

//! An operator's order to end the suspension of a policy.

use super::policy_thread::{OtherJob, Worker};
use super::{Door, send, within};
use crate::keeper::{AskError, Snapshot};
use berth_kernel::refusal::Refusal;
use tokio::sync::oneshot;

impl Door {
    /// Ends the suspension of the entry at this index of the stack with this revision, and evaluates the stack's
    /// offers again. Returns whether the entry was suspended.
    ///
    /// # Errors
    /// If another stack is active, the stack has no such entry, or the policy thread is busy.
    pub async fn unsuspend(&self, index: usize, revision: u64) -> Result<bool, AskError> {
        let (reply, answer) = oneshot::channel();
        send(&self.other_jobs, OtherJob::Unsuspend { index, revision, reply })?;
        within(answer).await?
    }
}

impl Worker {
    pub(super) fn unsuspend(&self, index: usize, revision: u64) -> Result<bool, AskError> {
        let node: Snapshot = self.keeper.snapshot();
        let stack_changed = || AskError::Refused(Refusal::StackMoved { revision: node.stack.revision });
        if node.stack.revision != revision {
            return Err(stack_changed());
        }
        let entry = node.stack.entries.get(index).ok_or_else(stack_changed)?;
        let was_suspended = self.policy_stats.faults.lock().unsuspend(index, entry);
        if was_suspended {
            tracing::info!(policy = entry.label(), index, "the suspension of a policy ended");
            self.policy_stats.publish(&node.stack);
            // The entry's offers may differ from those of the other entries. A failure to record them is logged, and the
            // next change of the node evaluates the offers again.
            let _ = self.reoffer();
        }
        Ok(was_suspended)
    }
}

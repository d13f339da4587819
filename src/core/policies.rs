//! The node's policies: uploaded, made callable, activated, deleted.

mod chunks;
mod prepare;
pub mod signatures;
mod upload;

pub use chunks::ModuleChunks;
pub use prepare::Prepared;
pub use upload::{DeleteError, DeletePrecondition, Upload, UploadError, Uploaded};

use crate::jobs::{ActivateError, OtherJob, Reconfiguration};
use crate::keeper::{CommandError, Snapshot};
use crate::kernel_handle::{KernelHandle, send, within};
use crate::lab::shadow::Shadows;
use crate::priority::at_low_priority;
use crate::shared::Shared;
use crate::spans;
use crate::stack::{Baseline, DryRun, TIME_FACTOR};
use berth_kernel::command::NewStack;
use berth_kernel::ports::{PolicyFiles, PolicyRuntime};
use berth_kernel::refusal::Refusal;
use berth_kernel::trust_check::check_trust;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, RwLock, oneshot};

/// Longest wait for another trial of a stack.
const TURN_MAX: Duration = Duration::from_secs(20);

/// Uploads, activates and deletes policies. Cheap to clone.
#[derive(Clone)]
pub struct PolicyService {
    pub(crate) kernel: KernelHandle,
    pub(crate) runtime: Arc<dyn PolicyRuntime>,
    pub(crate) baseline: Shared<Baseline>,
    pub(crate) shadows: Arc<Shadows>,
    files: Arc<dyn PolicyFiles>,
    /// Uploads hold it shared, deletions exclusively, or a deletion could remove the files of a concurrent upload.
    files_lock: Arc<RwLock<()>>,
    /// Held while an upload is recorded.
    recording: Arc<Mutex<()>>,
    /// Held while policies are prepared.
    preparing: Arc<Mutex<()>>,
    /// Held while a stack is tried.
    trying: Arc<Mutex<()>>,
}

impl PolicyService {
    pub(crate) fn new(
        kernel: KernelHandle,
        files: Arc<dyn PolicyFiles>,
        runtime: Arc<dyn PolicyRuntime>,
        baseline: Shared<Baseline>,
        shadows: Arc<Shadows>,
    ) -> Self {
        let (files_lock, recording, preparing, trying) = Default::default();
        Self { kernel, runtime, baseline, shadows, files, files_lock, recording, preparing, trying }
    }

    /// The kernel's handle.
    #[must_use]
    pub fn kernel(&self) -> &KernelHandle {
        &self.kernel
    }

    /// The policies' files.
    #[must_use]
    pub fn files(&self) -> &Arc<dyn PolicyFiles> {
        &self.files
    }

    /// Calls the policies, and loads their code.
    #[must_use]
    pub fn runtime(&self) -> &Arc<dyn PolicyRuntime> {
        &self.runtime
    }

    /// Activates a stack: its policies are prepared, called on the live node and checked, then the stack replaces the
    /// active one as a whole.
    ///
    /// # Errors
    /// If one of its policies fails on this node, or `expected` is not the active revision. Nothing
    /// has changed then.
    pub async fn activate(&self, stack: NewStack, expected: Option<u64>) -> Result<Snapshot, ActivateError> {
        let node = self.kernel.snapshot();
        let refused = |refusal| ActivateError::Command(CommandError::Refused(refusal));
        // An early check, before anything is compiled. The keeper checks again when it activates the stack.
        let revision = node.stack.revision;
        if expected.is_some_and(|expected| expected != revision) {
            return Err(refused(Refusal::StackMoved { revision }));
        }
        // Untrusted policies are never called.
        check_trust(&node, &stack.entries, &self.kernel.rules().trusted_keys).map_err(refused)?;
        let prepared = self.prepare(stack.entries.iter().map(|entry| &entry.digest)).await;
        let activated = match prepared {
            Ok(_prepared) => self.replace_stack(stack, expected).await,
            Err(error) => Err(ActivateError::Unprepared(error)),
        };
        self.unload_unused();
        activated
    }

    async fn replace_stack(&self, stack: NewStack, expected: Option<u64>) -> Result<Snapshot, ActivateError> {
        self.try_stack(&stack).await?;
        let (reply, answer) = oneshot::channel();
        send(&self.kernel.other_jobs, OtherJob::Activate { stack, expected, reply })
            .map_err(ActivateError::Command)?;
        within(answer).await.map_err(ActivateError::Command)?
    }

    /// Applies new settings; the caller has tried their stack. As for an activation, the policies of that stack are prepared
    /// first.
    ///
    /// # Errors
    /// As for [`Self::activate`]; nothing has changed then.
    pub async fn reconfigure(&self, new: Reconfiguration) -> Result<Snapshot, ActivateError> {
        let entries = new.stack.iter().flat_map(|(stack, _)| &stack.entries);
        let prepared = self.prepare(entries.map(|entry| &entry.digest)).await;
        let reconfigured = match prepared {
            Ok(_prepared) => self.submit_reconfiguration(new).await,
            Err(error) => Err(ActivateError::Unprepared(error)),
        };
        self.unload_unused();
        reconfigured
    }

    async fn submit_reconfiguration(&self, new: Reconfiguration) -> Result<Snapshot, ActivateError> {
        let (reply, answer) = oneshot::channel();
        send(&self.kernel.other_jobs, OtherJob::Reconfigure { new: Box::new(new), reply })
            .map_err(ActivateError::Command)?;
        within(answer).await.map_err(ActivateError::Command)?
    }

    /// Tries a stack on the live node, off the policy thread: a dry run calls more hooks than an activation
    /// needs.
    pub(crate) async fn try_stack(&self, stack: &NewStack) -> Result<(), ActivateError> {
        // One at a time, so that an Allocate always finds a free instance for its calls.
        let turn = tokio::time::timeout(TURN_MAX, Arc::clone(&self.trying).lock_owned()).await;
        let turn = turn.map_err(|_| ActivateError::Command(CommandError::Busy))?;
        let (service, stack) = (self.clone(), stack.clone());
        let work = move || {
            let _turn = turn;
            let dry_run = DryRun {
                stack: &stack,
                policies: &*service.runtime,
                node: &service.kernel.snapshot(),
                now: service.kernel.now(),
                baseline: &service.baseline.get(),
                rules: &service.kernel.rules(),
                time_factor: TIME_FACTOR,
            };
            dry_run.run().map(drop).map_err(ActivateError::from)
        };
        let result = tokio::task::spawn_blocking(spans::in_current_span(at_low_priority(work))).await;
        result.unwrap_or(Err(ActivateError::Command(CommandError::Stopping)))
    }
}

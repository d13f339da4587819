//! The node's policies: uploaded, made callable, activated, deleted.

mod chunks;
mod loader;
mod prepare;
mod resolve;
pub mod signatures;
mod upload;

pub use chunks::ModuleChunks;
pub use loader::{LoadError, NotCallable, PolicyLoader};
pub use prepare::Prepared;
pub use resolve::{ResolveError, resolve_version};
pub use upload::{DeleteError, Upload, UploadError, Uploaded};

use crate::jobs::{ActivateError, FileStack, OtherJob, Reconfiguration};
use crate::keeper::{CommandError, Snapshot};
use crate::kernel_handle::{KernelHandle, send, within};
use crate::lab::shadow::Shadows;
use crate::priority::at_low_priority;
use crate::shared::Shared;
use crate::stack::{Baseline, DryRun, Offers, TIME_FACTOR};
use berth_kernel::hardware::judgement::TriagedReading;
use berth_kernel::node::command::{Activation, Command, NewStack, Verdict};
use berth_kernel::node::decide::decide;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::{PolicyFiles, PolicyRuntime};
use berth_kernel::node::revision::Revision;
use berth_kernel::policy::version_records::check_trust;
use berth_observe::spans;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, RwLock, oneshot, watch};

/// Longest wait for another trial of a stack.
const TURN_MAX: Duration = Duration::from_secs(20);

/// What the activation of a stack would change.
#[derive(Clone, Debug)]
pub struct Preview {
    /// The node at present.
    pub node: Snapshot,
    /// The node after the activation.
    pub after: Ledger,
    /// The warnings about its offers.
    pub warnings: Vec<String>,
}

/// A stack that was tried on the live node.
pub(crate) struct Tried {
    /// The node.
    node: Snapshot,
    /// The stack's offers on it.
    offers: Offers,
    /// The stack's triage of the readings that were judged by policies that it does not have with the same parameters.
    triage: Vec<TriagedReading>,
}

/// Uploads, activates and deletes policies. Cheap to clone.
#[derive(Clone)]
pub struct PolicyService {
    pub(crate) kernel: KernelHandle,
    pub(crate) runtime: Arc<dyn PolicyRuntime>,
    pub(crate) baseline: Shared<Baseline>,
    pub(crate) shadows: Arc<Shadows>,
    file_stack: Shared<FileStack>,
    files: Arc<dyn PolicyFiles>,
    /// Uploads hold it shared, deletions exclusively, or a deletion could remove the files of a concurrent upload.
    files_lock: Arc<RwLock<()>>,
    /// Held while policies are prepared.
    preparing: Arc<Mutex<()>>,
    /// Held while a stack is tried.
    trying: Arc<Mutex<()>>,
    /// Changes after each upload.
    uploads: Arc<watch::Sender<()>>,
}

impl PolicyService {
    pub(crate) fn new(
        kernel: KernelHandle,
        files: Arc<dyn PolicyFiles>,
        runtime: Arc<dyn PolicyRuntime>,
        baseline: Shared<Baseline>,
        file_stack: Shared<FileStack>,
        shadows: Arc<Shadows>,
    ) -> Self {
        let (files_lock, preparing, trying) = Default::default();
        let uploads = Arc::new(watch::Sender::new(()));
        Self { kernel, runtime, baseline, shadows, file_stack, files, files_lock, preparing, trying, uploads }
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

    /// A receiver that wakes after each upload, which may have replaced files that were lost.
    #[must_use]
    pub fn watch_uploads(&self) -> watch::Receiver<()> {
        self.uploads.subscribe()
    }

    /// The stack of the configuration file.
    #[must_use]
    pub fn file_stack(&self) -> Arc<FileStack> {
        self.file_stack.get()
    }

    /// The answers if all policies pass.
    #[must_use]
    pub fn baseline(&self) -> Arc<Baseline> {
        self.baseline.get()
    }

    /// Sets the stack of the configuration file at the start; afterwards [`Self::reconfigure`] does.
    pub fn set_file_stack(&self, stack: FileStack) {
        self.file_stack.replace(stack);
    }

    /// Activates a stack: its policies are prepared, called on the live node and checked, then the stack replaces the
    /// active one as a whole.
    ///
    /// # Errors
    /// If one of its policies fails on this node, `expected` is not the active revision, or it is a stack of the
    /// configuration file that the file no longer has. Nothing has changed then.
    pub async fn activate(&self, stack: NewStack, expected: Option<u64>) -> Result<Snapshot, ActivateError> {
        let activated = match self.prepare_stack(&stack, expected).await {
            Ok(_prepared) => self.replace_stack(stack, expected).await,
            Err(error) => Err(error),
        };
        self.unload_unused();
        activated
    }

    /// What [`Self::activate`] would change. Its policies are called in the same way; nothing changes.
    ///
    /// # Errors
    /// As for [`Self::activate`].
    pub async fn preview(&self, stack: NewStack, expected: Option<u64>) -> Result<Preview, ActivateError> {
        let previewed = match self.prepare_stack(&stack, expected).await {
            Ok(_prepared) => {
                let tried = self.try_stack(&stack).await;
                tried.and_then(|tried| self.decide_activation(stack, expected, tried))
            }
            Err(error) => Err(error),
        };
        self.unload_unused();
        previewed
    }

    fn decide_activation(
        &self,
        stack: NewStack,
        expected: Option<u64>,
        tried: Tried,
    ) -> Result<Preview, ActivateError> {
        let Tried { node, offers, triage } = tried;
        let activation = Activation { stack, offers: offers.parts, triage };
        let command = Command::Activate(activation).expecting(expected.map(Revision::Stack));
        let Verdict { entry, refusal } = decide(&node, &command, self.kernel.now());
        if let Some(refusal) = refusal {
            return Err(ActivateError::Command(CommandError::Refused(refusal)));
        }
        let mut after = Ledger::clone(&node);
        after.apply(&entry);
        Ok(Preview { node, after, warnings: offers.notes.reasons() })
    }

    /// Checks a stack, and makes its policies callable.
    async fn prepare_stack(
        &self,
        stack: &NewStack,
        expected: Option<u64>,
    ) -> Result<Prepared, ActivateError> {
        let node = self.kernel.snapshot();
        let refused = |refusal| ActivateError::Command(CommandError::Refused(refusal));
        // An early check, before anything is compiled. The keeper checks again when it activates the stack.
        if let Some(revision) = expected {
            Revision::Stack(revision).check(&node).map_err(refused)?;
        }
        // Untrusted policies are never called.
        check_trust(&node, &stack.entries, &node.rules.trusted_keys).map_err(refused)?;
        let prepared = self.prepare(stack.entries.iter().map(|entry| &entry.digest)).await;
        prepared.map_err(ActivateError::Unprepared)
    }

    async fn replace_stack(&self, stack: NewStack, expected: Option<u64>) -> Result<Snapshot, ActivateError> {
        self.try_stack(&stack).await?;
        let (reply, answer) = oneshot::channel();
        send(&self.kernel.other_jobs, OtherJob::Activate { stack, expected, reply })
            .map_err(ActivateError::Command)?;
        within(answer).await.map_err(ActivateError::Command)?
    }

    /// Applies new settings; the caller has tried their stack. As for an activation, the policies of that stack are
    /// prepared first.
    ///
    /// # Errors
    /// As for [`Self::activate`], and that the stack has changed if another one is active than the caller read; nothing
    /// has changed then.
    pub async fn reconfigure(&self, new: Reconfiguration) -> Result<Snapshot, ActivateError> {
        let entries = new.stack.iter().flat_map(|stack| &stack.entries);
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
    pub(crate) async fn try_stack(&self, stack: &NewStack) -> Result<Tried, ActivateError> {
        // One at a time, so that an Allocate always finds a free instance for its calls.
        let turn = tokio::time::timeout(TURN_MAX, Arc::clone(&self.trying).lock_owned()).await;
        let turn = turn.map_err(|_| ActivateError::Command(CommandError::Busy))?;
        let (service, stack) = (self.clone(), stack.clone());
        let work = move || {
            let _turn = turn;
            let node = service.kernel.snapshot();
            let dry_run = DryRun {
                stack: &stack,
                policies: &*service.runtime,
                node: &node,
                now: service.kernel.now(),
                baseline: &service.baseline.get(),
                time_factor: TIME_FACTOR,
            };
            let offers = dry_run.run().map_err(ActivateError::from)?;
            let triage = dry_run.judge_again();
            Ok(Tried { offers, triage, node })
        };
        let result = tokio::task::spawn_blocking(spans::in_current_span(at_low_priority(work))).await;
        result.unwrap_or(Err(ActivateError::Command(CommandError::Stopping)))
    }
}

//! The front ends' handle to the kernel, and the thread that calls policies.
//!
//! Front ends parse requests, submit commands here, and read snapshots. Async ends here: everything below is synchronous.

mod activation;
mod baseline;
mod call_counters;
mod call_recorder;
mod call_stats;
mod decisions;
mod evaluate;
mod fault_log;
mod faults;
mod gpu_watch;
mod gpus;
mod inventory_scanner;
mod offers;
mod policy_stats;
mod policy_thread;
mod prepare;
mod recorder;
mod replay;
mod shadow;
#[cfg(test)]
mod stack_tests;
mod suspension;
mod trial;
mod uploads;

pub use activation::{LEISURE, Trial};
pub use baseline::Baseline;
pub use berth_kernel::command::Attempt;
pub use call_counters::{CallCounters, PolicyCounters, VERSIONS_COUNTED_MAX};
pub use call_recorder::{Ear, Heard};
pub use call_stats::{Fared, LATENCY_BOUNDS_US, Latencies};
pub use decisions::PastError;
pub use evaluate::{CALL_MS_MAX, STACK_TIME_MAX, Walk};
pub use faults::{FAULTS_TO_SUSPEND, Faults, Record, Standing, Standings};
pub use gpu_watch::GpuWatch;
pub use inventory_scanner::Looker;
pub use offers::{Notes, Offers};
pub use policy_thread::{ActivateError, Granted};
pub use prepare::{Prepared, Unprepared};
pub use replay::{Candidate, Report};
pub use shadow::{Counts, Difference, SHADOWS_MAX, Shadow};
pub use trial::{Proposal, TRIED_DEVICES_MAX, Tell, Tried, TryError, Wish, Wished};
pub use uploads::{DeleteError, DeletePrecondition, ModuleChunks, Upload, UploadError};

use crate::keeper::{self, Applied, AskError, Handle, Keeper, Snapshot};
use berth_kernel::command::{Command, NewStack, Rules};
use berth_kernel::drain::{Mark, Order};
use berth_kernel::evict::{Ask, Outcome};
use berth_kernel::listing::{Listed, listing};
use berth_kernel::names::{AllocationId, Digest, PartId, Resource};
use berth_kernel::placement;
use berth_kernel::pods::PodsView;
use berth_kernel::policy::{AdmitRequest, PlaceRequest, Placement, PolicyVersion};
use berth_kernel::ports::{Clock, Journal, Policies};
use berth_kernel::reconcile::RoundView;
use berth_kernel::refusal::Refusal;
use berth_kernel::stack::StackEntry;
use berth_kernel::time::Now;
use berth_kernel::trust::check_trust;
use crossbeam_channel::{Sender, TrySendError, bounded};
use policy_thread::{Inboxes, KubeletJob, OtherJob, Worker};
use std::cell::RefCell;
use std::future::Future;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::{oneshot, watch};

/// Capacity of the inbox for the kubelet's jobs, as at the keeper.
const KUBELET_JOBS: usize = keeper::KUBELET_INBOX;
/// Capacity of the inbox for other jobs: at most one reading per GPU and event, 64 GPUs.
const OTHER_JOBS: usize = 64;
/// Longest wait for any answer, seconds: twice a stack's time and an append's deadline of 2 s, doubled.
const ANSWER_S_MAX: u64 = 8;
/// Longest wait for a placement, milliseconds. The kubelet has no timeout and admits no other pod meanwhile.
const PLACE_MS_MAX: u64 = 1_500;

/// The front ends' handle to the kernel: snapshots, commands, policies. Cheap to clone.
#[derive(Clone)]
pub struct Door {
    keeper: Handle,
    kubelet_jobs: Sender<(tracing::Span, KubeletJob)>,
    other_jobs: Sender<(tracing::Span, OtherJob)>,
    policies: Arc<dyn Policies>,
    clock: Arc<dyn Clock>,
    rules: Arc<Rules>,
    baseline: Arc<Baseline>,
    policy_stats: policy_stats::PolicyStats,
    /// Permits for trials of a policy.
    trials: Arc<tokio::sync::Semaphore>,
    /// Guards the policies' files: uploads hold it shared, deletions exclusively, or a deletion could remove the files of a
    /// concurrent upload.
    files: Arc<tokio::sync::RwLock<()>>,
    /// Held while policies are prepared.
    preparing: Arc<tokio::sync::Mutex<()>>,
    /// Held while a stack is tried.
    trying: Arc<tokio::sync::Mutex<()>>,
    decisions: decisions::Decisions,
}

/// The running keeper, policy thread and recorder. They end when the last [`Door`] is dropped.
pub struct Middle {
    /// The front ends' handle.
    pub door: Door,
    /// The threads, in the order in which they end.
    pub threads: Vec<JoinHandle<()>>,
}

/// Starts keeper, policy thread and recorder. Without a journal no decision is recorded.
///
/// # Errors
/// If a thread cannot be started.
pub fn start(
    keeper: Keeper,
    policies: Arc<dyn Policies>,
    clock: Arc<dyn Clock>,
    rules: Rules,
    baseline: Baseline,
    journal: Option<Arc<dyn Journal>>,
) -> std::io::Result<Middle> {
    let (nudge, nudges) = bounded(1);
    let running = keeper::spawn(keeper, nudge)?;
    let (kubelet_jobs, kubelet) = bounded(KUBELET_JOBS);
    let (other_jobs, other) = bounded(OTHER_JOBS);
    let policy_stats = policy_stats::PolicyStats::default();
    let shadows = Arc::default();
    let recording = recorder::start(Arc::clone(&policies), journal.clone(), Arc::clone(&shadows))?;
    let worker = Worker {
        recorder: recording.recorder,
        last_offers: RefCell::default(),
        keeper: running.handle.clone(),
        policies: Arc::clone(&policies),
        clock: Arc::clone(&clock),
        baseline: baseline.clone(),
        last_signs: RefCell::default(),
        rules: rules.clone(),
        policy_stats: policy_stats.clone(),
        fault_log: RefCell::default(),
    };
    let inboxes = Inboxes { kubelet, other, nudge: nudges };
    let thread = std::thread::Builder::new().name("policy".into()).spawn(move || worker.run(&inboxes))?;
    let (rules, baseline) = (Arc::new(rules), Arc::new(baseline));
    let (files, preparing, trying) = (Arc::default(), Arc::default(), Arc::default());
    let decisions = decisions::Decisions::new(journal, recording.lost, shadows, Arc::clone(&policies));
    let kernel = Door {
        keeper: running.handle,
        kubelet_jobs,
        other_jobs,
        policies,
        clock,
        rules,
        baseline,
        policy_stats,
        trials: Arc::new(tokio::sync::Semaphore::new(trial::TRIALS)),
        files,
        preparing,
        trying,
        decisions,
    };
    Ok(Middle { door: kernel, threads: vec![thread, recording.thread, running.thread] })
}

impl Door {
    /// The newest snapshot.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.keeper.snapshot()
    }

    /// A receiver that wakes at each new snapshot.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Snapshot> {
        self.keeper.watch()
    }

    /// The time of the kernel's clock, for front ends that measure intervals by it.
    #[must_use]
    pub fn now(&self) -> Now {
        self.clock.now()
    }

    /// The rules in force.
    #[must_use]
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Error of the store, if it failed.
    #[must_use]
    pub fn store_trouble(&self) -> Option<String> {
        self.keeper.store_trouble()
    }

    /// The devices of one resource as the kubelet is sent them (I3).
    #[must_use]
    pub fn listing(&self, snapshot: &Snapshot, resource: &Resource) -> Vec<Listed> {
        listing(snapshot, resource, self.rules.overcommit_percent)
    }

    /// Call statistics of the stack entry at this index since its activation.
    #[must_use]
    pub fn record(&self, index: usize, entry: &StackEntry) -> Record {
        self.policy_stats.record(index, entry)
    }

    /// Grants devices to a container; durable before `Ok`.
    ///
    /// # Errors
    /// If the grant is refused or fails. Nothing was granted then, except possibly after
    /// [`AskError::Late`]: such a grant ends as `neverStarted`.
    pub async fn allocate(&self, request: AdmitRequest, attempt: Attempt) -> Result<Granted, AskError> {
        let (reply, answer) = oneshot::channel();
        send(&self.kubelet_jobs, KubeletJob::Allocate { request, attempt, reply })?;
        within(answer).await?
    }

    /// Chooses the devices to prefer; returns the label of the policy that chose them, too. Never fails: an error would fail the
    /// pod.
    pub async fn place(&self, request: PlaceRequest) -> (Placement, String) {
        let (reply, answer) = oneshot::channel();
        let job = KubeletJob::Place { request: request.clone(), reply };
        if send(&self.kubelet_jobs, job).is_ok() {
            let wait = Duration::from_millis(PLACE_MS_MAX);
            if let Ok(Ok(placement)) = tokio::time::timeout(wait, answer).await {
                return placement;
            }
        }
        let snapshot = self.snapshot();
        let request = placement::narrowed(&snapshot, &request, self.rules.overcommit_percent);
        (placement::baseline(&snapshot, &request), "baseline".into())
    }

    /// Submits the observations of a reconcile pass.
    ///
    /// # Errors
    /// If they could not be recorded.
    pub async fn observe(&self, view: RoundView) -> Result<Applied, AskError> {
        self.command(Command::Observe(view)).await
    }

    /// Submits a source's view of all pods of this node.
    ///
    /// # Errors
    /// If it could not be recorded.
    pub async fn pods(&self, view: PodsView) -> Result<Applied, AskError> {
        self.command(Command::Pods(view)).await
    }

    /// Cordons a GPU.
    ///
    /// # Errors
    /// If there is no such GPU or it could not be recorded.
    pub async fn cordon(&self, gpu: PartId, by: String, why: String) -> Result<Applied, AskError> {
        let mark = Mark { by, why, since_wall_ms: self.clock.now().wall_ms };
        self.command(Command::Cordon { gpu, mark }).await
    }

    /// Drains a GPU.
    ///
    /// # Errors
    /// If there is no such GPU or it could not be recorded.
    pub async fn drain(
        &self,
        gpu: PartId,
        by: String,
        why: String,
        order: Order,
    ) -> Result<Applied, AskError> {
        let mark = Mark { by, why, since_wall_ms: self.clock.now().wall_ms };
        self.command(Command::Drain { gpu, mark, order }).await
    }

    /// Submits the outcome of an eviction request for a pod on a GPU that is drained.
    ///
    /// # Errors
    /// If it could not be recorded.
    pub async fn asked(&self, ask: Ask, outcome: Outcome) -> Result<Applied, AskError> {
        self.command(Command::Asked { ask, outcome }).await
    }

    /// Calls a drain off; the GPU stays cordoned.
    ///
    /// # Errors
    /// If there is no such GPU or it could not be recorded.
    pub async fn stop_drain(&self, gpu: PartId) -> Result<Applied, AskError> {
        self.command(Command::StopDrain { gpu }).await
    }

    /// Ends a GPU's cordon or drain, so that it is granted again.
    ///
    /// # Errors
    /// If there is no such GPU or it could not be recorded.
    pub async fn uncordon(&self, gpu: PartId) -> Result<Applied, AskError> {
        self.command(Command::Uncordon { gpu }).await
    }

    /// Marks a GPU healthy on an operator's order, until the next bad reading.
    ///
    /// # Errors
    /// If there is no such GPU, it is not present, or the order could not be recorded.
    pub async fn heal(&self, gpu: PartId, by: String, why: String) -> Result<Applied, AskError> {
        self.command(Command::Heal { gpu, by, why }).await
    }

    /// Forgets a GPU that vanished.
    ///
    /// # Errors
    /// If the GPU is present, held, or vanished only just now.
    pub async fn forget(&self, gpu: PartId) -> Result<Applied, AskError> {
        self.command(Command::Forget { gpu }).await
    }

    /// Ends an allocation on an operator's order; with `force` even while a source shows its pod running.
    ///
    /// # Errors
    /// If there is no such live allocation, a source shows its pod running, or it could not be recorded.
    pub async fn end(&self, id: AllocationId, force: bool) -> Result<Applied, AskError> {
        self.command(Command::End { id, force }).await
    }

    /// Activates a stack: its policies are prepared, called on the live node and checked, then the stack replaces the
    /// active one as a whole.
    ///
    /// # Errors
    /// If one of its policies fails on this node, or `expected` is not the active revision. Nothing
    /// has changed then.
    pub async fn activate(&self, stack: NewStack, expected: Option<u64>) -> Result<Snapshot, ActivateError> {
        let (node, refused) = (self.snapshot(), |refusal| ActivateError::Ask(AskError::Refused(refusal)));
        // An early check, before anything is compiled. The keeper checks again when it activates the stack.
        let revision = node.stack.revision;
        if expected.is_some_and(|expected| expected != revision) {
            return Err(refused(Refusal::StackMoved { revision }));
        }
        // Untrusted policies are never called.
        check_trust(&node, &stack.entries, &self.rules.trusted_keys).map_err(refused)?;
        let prepared = self.prepare(stack.entries.iter().map(|entry| &entry.digest)).await;
        let activated = match prepared {
            Ok(_prepared) => self.swap(stack, expected).await,
            Err(error) => Err(ActivateError::Unprepared(error)),
        };
        self.rest();
        activated
    }

    async fn swap(&self, stack: NewStack, expected: Option<u64>) -> Result<Snapshot, ActivateError> {
        self.try_stack(&stack).await?;
        let (reply, answer) = oneshot::channel();
        send(&self.other_jobs, OtherJob::Activate { stack, expected, reply }).map_err(ActivateError::Ask)?;
        within(answer).await.map_err(ActivateError::Ask)?
    }

    /// Evaluates the stack's offers for this node now.
    ///
    /// # Errors
    /// If the offers could not be recorded.
    pub async fn reoffer(&self) -> Result<Applied, AskError> {
        let (reply, answer) = oneshot::channel();
        send(&self.other_jobs, OtherJob::Offer { reply })?;
        within(answer).await?
    }

    /// Records a policy version, from a thread that may block: at start.
    ///
    /// # Errors
    /// If it could not be recorded.
    pub fn keep(&self, version: PolicyVersion) -> Result<Applied, AskError> {
        self.keeper.execute(Command::KeepPolicy(version))
    }

    /// Removes the record of a policy version, from a thread that may block: at start.
    ///
    /// # Errors
    /// If the version is in use, or the removal could not be recorded.
    pub fn forget_policy(&self, digest: Digest) -> Result<Applied, AskError> {
        self.keeper.execute(Command::DeletePolicy { digest })
    }

    async fn command(&self, command: Command) -> Result<Applied, AskError> {
        within(self.keeper.submit(command)?).await?
    }
}

fn send<T>(jobs: &Sender<(tracing::Span, T)>, job: T) -> Result<(), AskError> {
    jobs.try_send((crate::spans::current(), job)).map_err(|error| match error {
        TrySendError::Full(_) => AskError::Busy,
        TrySendError::Disconnected(_) => AskError::Stopping,
    })
}

async fn within<T>(
    answer: impl Future<Output = Result<T, oneshot::error::RecvError>>,
) -> Result<T, AskError> {
    match tokio::time::timeout(Duration::from_secs(ANSWER_S_MAX), answer).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(_)) => Err(AskError::Stopping),
        Err(_) => Err(AskError::Late(ANSWER_S_MAX)),
    }
}

//! The door to the kernel: what front ends may ask, and the thread that asks policies.
//!
//! Front ends parse, ask here, and read snapshots. Async ends here: everything behind is sync.

mod account;
mod activation;
mod baseline;
mod ear;
mod fared;
mod fault_log;
mod faults;
mod gpu_watch;
mod gpus;
mod looker;
mod offers;
mod past;
mod prepare;
mod recorder;
mod replay;
mod shadow;
mod stack;
#[cfg(test)]
mod stack_tests;
mod suspension;
mod tally;
mod thread;
mod trial;
mod uploads;

pub use activation::{LEISURE, Trial};
pub use baseline::Baseline;
pub use berth_kernel::command::Attempt;
pub use ear::{Ear, Heard};
pub use fared::{Fared, TIMES_US, Times};
pub use faults::{FAULTS_TO_SUSPEND, Faults, Record, Standing, Standings};
pub use gpu_watch::GpuWatch;
pub use looker::Looker;
pub use offers::{Notes, Offers};
pub use past::PastError;
pub use prepare::{Prepared, Unprepared};
pub use replay::{Candidate, Report};
pub use shadow::{Counts, Difference, SHADOWS_MAX, Shadow};
pub use stack::{CALL_MS_MAX, STACK_TIME_MAX, Walk};
pub use tally::{Counted, Tally, VERSIONS_COUNTED_MAX};
pub use thread::{ActivateError, Granted};
pub use trial::{Proposal, TRIED_DEVICES_MAX, Tell, Tried, TryError, Wish, Wished};
pub use uploads::{DeleteError, Pieces, Still, Upload, UploadError};

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
use std::cell::RefCell;
use std::future::Future;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use thread::{Inboxes, KubeletJob, OtherJob, Worker};
use tokio::sync::{oneshot, watch};

/// Jobs of the kubelet that may wait, as at the keeper.
const KUBELET_JOBS: usize = keeper::KUBELET_INBOX;
/// Other jobs that may wait: readings come at most one a GPU and event, 64 GPUs.
const OTHER_JOBS: usize = 64;
/// Longest wait for any answer: twice a stack's time and an append's deadline of 2 s, doubled.
const ANSWER_S_MAX: u64 = 8;
/// Longest wait for a placement. The kubelet has no timeout and admits no other pod meanwhile.
const PLACE_MS_MAX: u64 = 1_500;

/// What front ends hold. Cheap to clone.
#[derive(Clone)]
pub struct Door {
    keeper: Handle,
    kubelet_jobs: Sender<(tracing::Span, KubeletJob)>,
    other_jobs: Sender<(tracing::Span, OtherJob)>,
    policies: Arc<dyn Policies>,
    clock: Arc<dyn Clock>,
    rules: Arc<Rules>,
    baseline: Arc<Baseline>,
    account: account::Account,
    /// Whose place whoever tries a policy takes.
    trials: Arc<tokio::sync::Semaphore>,
    /// Uploads read it; whoever deletes files has it alone, or bytes uploaded meanwhile would have none.
    files: Arc<tokio::sync::RwLock<()>>,
    /// Whose turn it is to make policies callable, and to try a stack.
    preparing: Arc<tokio::sync::Mutex<()>>,
    trying: Arc<tokio::sync::Mutex<()>>,
    past: past::Past,
}

/// The running middle: keeper and policy thread. Both end when the last [`Door`] is gone.
pub struct Middle {
    /// The way in.
    pub door: Door,
    /// In the order in which they end.
    pub threads: Vec<JoinHandle<()>>,
}

/// Starts keeper, policy thread and recorder. Without a journal no decision is put down.
///
/// # Errors
/// If the system gives no thread.
pub fn start(
    keeper: Keeper,
    policies: Arc<dyn Policies>,
    clock: Arc<dyn Clock>,
    rules: Rules,
    baseline: Baseline,
    journal: Option<Arc<dyn Journal>>,
) -> std::io::Result<Middle> {
    let (nudge, nudged) = bounded(1);
    let running = keeper::spawn(keeper, nudge)?;
    let (kubelet_jobs, kubelet) = bounded(KUBELET_JOBS);
    let (other_jobs, other) = bounded(OTHER_JOBS);
    let account = account::Account::default();
    let shadows = Arc::default();
    let recording = recorder::start(Arc::clone(&policies), journal.clone(), Arc::clone(&shadows))?;
    let worker = Worker {
        recorder: recording.recorder,
        offered: RefCell::default(),
        keeper: running.handle.clone(),
        policies: Arc::clone(&policies),
        clock: Arc::clone(&clock),
        baseline: baseline.clone(),
        told: RefCell::default(),
        rules: rules.clone(),
        account: account.clone(),
        fault_log: RefCell::default(),
    };
    let inboxes = Inboxes { kubelet, other, nudge: nudged };
    let thread = std::thread::Builder::new().name("policy".into()).spawn(move || worker.run(&inboxes))?;
    let (rules, baseline) = (Arc::new(rules), Arc::new(baseline));
    let (files, preparing, trying) = (Arc::default(), Arc::default(), Arc::default());
    let past = past::Past::new(journal, recording.lost, shadows, Arc::clone(&policies));
    let door = Door {
        keeper: running.handle,
        kubelet_jobs,
        other_jobs,
        policies,
        clock,
        rules,
        baseline,
        account,
        trials: Arc::new(tokio::sync::Semaphore::new(trial::TRIALS)),
        files,
        preparing,
        trying,
        past,
    };
    Ok(Middle { door, threads: vec![thread, recording.thread, running.thread] })
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

    /// What time it is, for front ends that measure intervals by the kernel's clock.
    #[must_use]
    pub fn now(&self) -> Now {
        self.clock.now()
    }

    /// The rules in force.
    #[must_use]
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// What is wrong with the store, if anything.
    #[must_use]
    pub fn store_trouble(&self) -> Option<String> {
        self.keeper.store_trouble()
    }

    /// What the kubelet is told of one resource (I3).
    #[must_use]
    pub fn listing(&self, snapshot: &Snapshot, resource: &Resource) -> Vec<Listed> {
        listing(snapshot, resource, self.rules.overcommit_percent)
    }

    /// The record of a stack entry since its activation.
    #[must_use]
    pub fn record(&self, place: usize, entry: &StackEntry) -> Record {
        self.account.record(place, entry)
    }

    /// Allocate: durable before `Ok`.
    ///
    /// # Errors
    /// If it is refused or cannot be done now; then nothing was granted, except after
    /// [`AskError::Late`], where it may have been and ends as `neverStarted`.
    pub async fn allocate(&self, request: AdmitRequest, attempt: Attempt) -> Result<Granted, AskError> {
        let (reply, answer) = oneshot::channel();
        send(&self.kubelet_jobs, KubeletJob::Allocate { request, attempt, reply })?;
        within(answer).await?
    }

    /// Which devices to prefer, and who says so. Never fails: an error would fail the pod.
    pub async fn place(&self, request: PlaceRequest) -> (Placement, String) {
        let (reply, answer) = oneshot::channel();
        let job = KubeletJob::Place { request: request.clone(), reply };
        if send(&self.kubelet_jobs, job).is_ok() {
            let wait = Duration::from_millis(PLACE_MS_MAX);
            if let Ok(Ok(placed)) = tokio::time::timeout(wait, answer).await {
                return placed;
            }
        }
        let snapshot = self.snapshot();
        let request = placement::narrowed(&snapshot, &request, self.rules.overcommit_percent);
        (placement::baseline(&snapshot, &request), "baseline".into())
    }

    /// Hands in what a round saw.
    ///
    /// # Errors
    /// If it could not be taken in.
    pub async fn observe(&self, view: RoundView) -> Result<Applied, AskError> {
        self.command(Command::Observe(view)).await
    }

    /// Hands in what a source shows of all pods of this node.
    ///
    /// # Errors
    /// If it could not be taken in.
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

    /// Has a GPU emptied.
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

    /// Hands in what came of asking a pod to leave a GPU that is emptied.
    ///
    /// # Errors
    /// If it could not be taken in.
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

    /// Lets a GPU be granted again.
    ///
    /// # Errors
    /// If there is no such GPU or it could not be recorded.
    pub async fn uncordon(&self, gpu: PartId) -> Result<Applied, AskError> {
        self.command(Command::Uncordon { gpu }).await
    }

    /// Believes an operator that a GPU works again, until the next bad sign.
    ///
    /// # Errors
    /// If there is no such GPU, it is not there, or it could not be recorded.
    pub async fn heal(&self, gpu: PartId, by: String, why: String) -> Result<Applied, AskError> {
        self.command(Command::Heal { gpu, by, why }).await
    }

    /// Lets go of a GPU that vanished.
    ///
    /// # Errors
    /// If it is there, held, or vanished just now.
    pub async fn forget(&self, gpu: PartId) -> Result<Applied, AskError> {
        self.command(Command::Forget { gpu }).await
    }

    /// Ends an allocation by an operator's word; with `force` even while a source shows its pod running.
    ///
    /// # Errors
    /// If there is no such live allocation, a source shows its pod running, or it could not be recorded.
    pub async fn end(&self, id: AllocationId, force: bool) -> Result<Applied, AskError> {
        self.command(Command::End { id, force }).await
    }

    /// Activates a stack: asked on the live node, checked, then swapped in as a whole.
    ///
    /// # Errors
    /// If a policy of it fails here, or `expected` is no longer the active revision; nothing
    /// changed then.
    pub async fn activate(&self, stack: NewStack, expected: Option<u64>) -> Result<Snapshot, ActivateError> {
        let (node, refused) = (self.snapshot(), |refusal| ActivateError::Ask(AskError::Refused(refusal)));
        // Before anything is compiled for an operator who does not know what is active; the keeper, who
        // swaps, looks once more.
        let revision = node.stack.revision;
        if expected.is_some_and(|expected| expected != revision) {
            return Err(refused(Refusal::StackMoved { revision }));
        }
        // Before a policy that nobody trusts is asked.
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

    /// Asks the stack now what this node offers.
    ///
    /// # Errors
    /// If the answer could not be recorded.
    pub async fn reoffer(&self) -> Result<Applied, AskError> {
        let (reply, answer) = oneshot::channel();
        send(&self.other_jobs, OtherJob::Offer { reply })?;
        within(answer).await?
    }

    /// Records policy versions, from a thread that may block: at start.
    ///
    /// # Errors
    /// If they could not be recorded.
    pub fn keep(&self, version: PolicyVersion) -> Result<Applied, AskError> {
        self.keeper.ask(Command::KeepPolicy(version))
    }

    /// Takes a policy version off the record, from a thread that may block: at start.
    ///
    /// # Errors
    /// If it is in use, or that could not be recorded.
    pub fn forget_policy(&self, digest: Digest) -> Result<Applied, AskError> {
        self.keeper.ask(Command::DeletePolicy { digest })
    }

    async fn command(&self, command: Command) -> Result<Applied, AskError> {
        within(self.keeper.submit(command)?).await?
    }
}

fn send<T>(jobs: &Sender<(tracing::Span, T)>, job: T) -> Result<(), AskError> {
    jobs.try_send((crate::spans::here(), job)).map_err(|error| match error {
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

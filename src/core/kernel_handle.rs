//! The handle by which the rest of the daemon submits commands to the keeper and the policy thread.

use crate::jobs::{Granted, KubeletJob, OtherJob, Prepared};
use crate::keeper::{Applied, CommandError, Handle, Snapshot};
use crate::lab::recorder::Recorder;
use crate::refusals::Refusals;
use crate::shared::Shared;
use crate::stack::evaluate::{outcome, prepared_outcome};
use crate::stack::policy_stats::PolicyStats;
use crate::stack::{Baseline, CallCounters, EntryStats, OfferNotes, PolicyStatuses};
use berth_kernel::grants::prepare::ClaimToPrepare;
use berth_kernel::hardware::gpu::{Inventory, Reading, XID};
use berth_kernel::hardware::triage::{TriageAnswer, baseline_triage};
use berth_kernel::ids::names::{DeviceId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::{Attempt, Command, StackAnswer};
use berth_kernel::node::ports::Clock;
use berth_kernel::node::refusal::Refusal;
use berth_kernel::policy::decider::Decider;
use berth_kernel::policy::decision::{NewDecision, Outcome, OwnedQuestion};
use berth_kernel::policy::hooks::{AdmitRequest, Hook, PlaceRequest, Placement};
use berth_kernel::policy::stack::{Stack, StackEntry};
use berth_kernel::sharing::placement::{self, DeviceOrder};
use berth_observe::counters::{Counters, DriverVersions};
use berth_observe::gpu_history::GpuHistory;
use crossbeam_channel::{Sender, TrySendError};
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};

/// Longest wait for any answer, seconds. An Allocate that is tried twice evaluates the stack twice, 1 s each, and
/// appends within 2 s; that is doubled for the commands that wait before it.
const ANSWER_S_MAX: u64 = 8;
/// Longest wait for a placement, milliseconds. The kubelet has no timeout and admits no other pod meanwhile.
const PLACE_MS_MAX: u64 = 1_500;
/// Longest wait for an order of devices.
const ORDER_MAX: Duration = Duration::from_secs(1);
/// Longest wait until the policy thread's inbox has accepted the readings of a scan.
const SIGNS_WAIT_MAX: Duration = Duration::from_secs(5);
/// Interval of attempts to submit to an inbox that is full.
pub(crate) const BUSY_RETRY: Duration = Duration::from_millis(10);

/// Handle for submitting commands to the keeper and the policy thread, and for reading snapshots and statistics. Cheap
/// to clone.
#[derive(Clone)]
pub struct KernelHandle {
    pub(crate) keeper: Handle,
    pub(crate) kubelet_jobs: Sender<(tracing::Span, KubeletJob)>,
    pub(crate) other_jobs: Sender<(tracing::Span, OtherJob)>,
    pub(crate) recorder: Recorder,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) baseline: Shared<Baseline>,
    pub(crate) policy_stats: PolicyStats,
    pub(crate) gpu_history: Arc<GpuHistory>,
    pub(crate) refusals: Arc<Refusals>,
}

impl KernelHandle {
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

    /// The load of the GPUs and its past.
    #[must_use]
    pub fn gpu_history(&self) -> &GpuHistory {
        &self.gpu_history
    }

    /// The triage of a reading for which every policy passes.
    #[must_use]
    pub fn baseline_triage(&self, reading: &Reading) -> TriageAnswer {
        let baseline = self.baseline.get();
        baseline_triage(reading, &baseline.xids, baseline.quiet_ms)
    }

    /// Reports that a request of the kubelet for these devices was refused.
    pub fn request_refused(&self, resource: &Resource, devices: &[DeviceId], reason: &dyn std::fmt::Display) {
        self.refusals.report(&self.snapshot(), resource, devices, reason, self.now());
    }

    /// Error of the store, if it failed.
    #[must_use]
    pub fn store_error(&self) -> Option<String> {
        self.keeper.store_trouble()
    }

    /// Call statistics of the stack entry at this index since its activation.
    #[must_use]
    pub fn entry_stats(&self, index: usize, entry: &StackEntry) -> EntryStats {
        self.policy_stats.record(index, entry)
    }

    /// Grants devices to a container; durable before `Ok`.
    ///
    /// # Errors
    /// If the grant is refused or fails. Nothing was granted then, except possibly after
    /// [`CommandError::Late`]: such a grant ends as `neverStarted`.
    pub async fn allocate(&self, request: AdmitRequest, attempt: Attempt) -> Result<Granted, CommandError> {
        let node = self.snapshot();
        if self.needs_no_policy_thread(&node, [&request.resource]) {
            match self.allocate_without_policies(node, &request, attempt).await {
                Err(CommandError::Refused(Refusal::Moved)) => {}
                result => return result,
            }
        }
        let (reply, answer) = oneshot::channel();
        send(&self.kubelet_jobs, KubeletJob::Allocate { request, attempt, reply })?;
        within(answer).await?
    }

    /// Whether the policy thread has nothing to do for grants of these resources: no policy has the hook `admit`, and none of
    /// the resources has MPS. The keeper is then asked directly, since each thread on the way costs a wake-up.
    fn needs_no_policy_thread<'r>(
        &self,
        node: &Snapshot,
        resources: impl IntoIterator<Item = &'r Resource>,
    ) -> bool {
        let baseline = self.baseline.get();
        !node.calls_policies(Hook::Admit)
            && !resources.into_iter().any(|resource| baseline.mps_sockets.contains_key(resource))
    }

    async fn allocate_without_policies(
        &self,
        node: Snapshot,
        request: &AdmitRequest,
        attempt: Attempt,
    ) -> Result<Granted, CommandError> {
        let now = self.now();
        let command = Command::Allocate {
            request: request.clone(),
            answer: StackAnswer::NotCalled,
            evaluated: Some(node.generation),
            attempt,
        };
        let granted = match self.execute(command).await {
            // The policy thread decides, and records what it decided.
            Err(error @ CommandError::Refused(Refusal::Moved)) => return Err(error),
            result => result.and_then(|applied| Granted::of(applied).ok_or(CommandError::Stopping)),
        };
        let id = granted.as_ref().map(|granted| Some(granted.allocation.id)).map_err(ToString::to_string);
        let outcome = outcome(StackAnswer::NotCalled, id);
        self.record(node, now, OwnedQuestion::Admit(request.clone()), outcome);
        granted
    }

    /// Prepares a claim: grants its requests the devices that the scheduler chose; durable before `Ok`. A claim that is
    /// prepared keeps its allocations. The answers in its requests are replaced by those of the stack.
    ///
    /// # Errors
    /// If a request is refused or fails. Nothing was granted then, except possibly after [`CommandError::Late`]: the
    /// kubelet prepares the claim again, or unprepares it.
    pub async fn prepare(&self, claim: ClaimToPrepare) -> Result<Prepared, CommandError> {
        let node = self.snapshot();
        let resources = claim.requests.iter().map(|request| &request.devices.resource);
        if self.needs_no_policy_thread(&node, resources) {
            match self.prepare_without_policies(node, &claim).await {
                Err(CommandError::Refused(Refusal::Moved)) => {}
                result => return result,
            }
        }
        let (reply, answer) = oneshot::channel();
        send(&self.kubelet_jobs, KubeletJob::Prepare { claim, reply })?;
        within(answer).await?
    }

    async fn prepare_without_policies(
        &self,
        node: Snapshot,
        claim: &ClaimToPrepare,
    ) -> Result<Prepared, CommandError> {
        let now = self.now();
        let command = Command::Prepare { claim: claim.clone(), evaluated: Some(node.generation) };
        let prepared = match self.execute(command).await {
            // The policy thread decides, and records what it decided.
            Err(error @ CommandError::Refused(Refusal::Moved)) => return Err(error),
            result => result.map(|applied| Prepared::of(applied, &claim.claim.uid)),
        };
        for request in &claim.requests {
            let outcome = prepared_outcome(request, &prepared);
            self.record(Arc::clone(&node), now, OwnedQuestion::Admit(claim.question(request)), outcome);
        }
        prepared
    }

    /// Ends the allocations of a claim, if it has any; durable before `Ok`.
    ///
    /// # Errors
    /// If the ends could not be recorded.
    pub async fn unprepare(&self, claim_uid: String) -> Result<Applied, CommandError> {
        self.execute(Command::Unprepare { claim: claim_uid }).await
    }

    /// Records a decision without a call of a policy.
    fn record(&self, node: Snapshot, now: Now, question: OwnedQuestion, outcome: Outcome) {
        let decision = NewDecision { node, now, question, calls: Vec::new(), outcome, is_repeat: false };
        self.recorder.record(&self.policy_stats, decision);
    }

    /// Chooses the devices to prefer; returns the label of the policy that chose them, too. Never fails: an error would
    /// fail the pod.
    pub async fn place(&self, request: PlaceRequest) -> (Placement, Decider) {
        let calls_policies = self.snapshot().calls_policies(Hook::Place);
        if calls_policies {
            let (reply, answer) = oneshot::channel();
            let job = KubeletJob::Place { request: request.clone(), reply };
            if send(&self.kubelet_jobs, job).is_ok() {
                let wait = Duration::from_millis(PLACE_MS_MAX);
                if let Ok(Ok(placement)) = tokio::time::timeout(wait, answer).await {
                    return placement;
                }
            }
        }
        let node = self.snapshot();
        // The journal records the request as policies see it.
        let request = placement::without_ungrantable(&node, &request);
        let placement = placement::baseline(&node, &request);
        if !calls_policies {
            let outcome = Outcome::Placed(placement.clone(), Decider::Baseline);
            self.record(node, self.now(), OwnedQuestion::Place(request), outcome);
        }
        (placement, Decider::Baseline)
    }

    /// These devices in the order in which the policies or the baseline would choose them. No decision is recorded, since nothing
    /// is placed. The baseline orders the devices that the policies have not ordered within a second.
    pub async fn order(&self, resource: &Resource, devices: Vec<DeviceId>) -> Vec<DeviceId> {
        let node = self.snapshot();
        let mut ordering = DeviceOrder::new(resource.clone(), devices);
        if node.calls_policies(Hook::Place) {
            let by_policies = tokio::time::timeout(ORDER_MAX, async {
                while let Some(request) = ordering.request() {
                    let (reply, answer) = oneshot::channel();
                    send(&self.other_jobs, OtherJob::Order { request: request.clone(), reply }).ok()?;
                    ordering.add(&answer.await.ok()?);
                }
                Some(())
            });
            if by_policies.await.is_err() {
                tracing::warn!(
                    resource = resource.as_str(),
                    "the policies did not order all devices within {} s, so the baseline orders the others: make the hook `place` \
                     faster",
                    ORDER_MAX.as_secs()
                );
            }
        }
        while let Some(request) = ordering.request() {
            let chosen = placement::baseline(&node, request).devices;
            ordering.add(&chosen);
        }
        ordering.into_devices()
    }

    /// Submits a scan of the GPUs, from a thread that may block.
    ///
    /// # Errors
    /// If the scan could not be recorded; changes that need no record are published all the same.
    pub fn record_scan(&self, mut inventory: Inventory) -> Result<Applied, CommandError> {
        let signs = inventory.signs.clone();
        let loads = std::mem::take(&mut inventory.loads);
        let (driver, cuda) = (inventory.driver_version.clone(), inventory.cuda_version.clone());
        self.counters().gpus.set_versions(DriverVersions { driver, cuda });
        // The inventory first: a sign of an unknown GPU would be ignored.
        let applied = self.keeper.execute(Command::RecordScan(inventory));
        self.gpu_history.add(&self.snapshot(), loads, self.now());
        let end = Instant::now() + SIGNS_WAIT_MAX;
        for sign in signs {
            while let Err(error) = self.submit_reading(sign.clone()) {
                // A scan finds a reset and new ECC errors by comparing with the scan before: no later scan finds them.
                if !matches!(error, CommandError::Busy) || Instant::now() >= end {
                    tracing::error!(%error, gpu = %sign.part, source = sign.source, "a GPU reading of a scan was lost");
                    break;
                }
                std::thread::sleep(BUSY_RETRY);
            }
        }
        applied
    }

    /// Submits a reading of a GPU to the policies, which judge its severity.
    ///
    /// # Errors
    /// If the policy thread's inbox is full.
    pub fn submit_reading(&self, reading: Reading) -> Result<(), CommandError> {
        let xid = (reading.source == XID).then(|| (reading.part.clone(), reading.code));
        send(&self.other_jobs, OtherJob::Triage(reading))?;
        if let Some((part, code)) = xid {
            let snapshot = self.snapshot();
            let gpu = snapshot.part(&part).map_or(&part, |part| part.part.gpu.as_part());
            self.counters().gpus.xid(gpu.as_str(), code);
        }
        Ok(())
    }

    /// Evaluates the stack's offers for this node now.
    ///
    /// # Errors
    /// If the offers could not be recorded.
    pub async fn reoffer(&self) -> Result<Applied, CommandError> {
        let (reply, answer) = oneshot::channel();
        send(&self.other_jobs, OtherJob::Offer { reply })?;
        within(answer).await?
    }

    /// Submits a command, and waits for its outcome. It is for commands that need no answer of a policy: the policy
    /// thread submits the others, after it has evaluated the stack.
    ///
    /// # Errors
    /// If the command is refused, or fails. Nothing has changed then, except possibly after [`CommandError::Late`].
    pub async fn execute(&self, command: Command) -> Result<Applied, CommandError> {
        within(self.keeper.submit(command)?).await?
    }

    /// As [`Self::execute`], from a thread that may block.
    ///
    /// # Errors
    /// As for [`Self::execute`].
    pub fn execute_blocking(&self, command: Command) -> Result<Applied, CommandError> {
        self.keeper.execute(command)
    }

    /// Counters and heartbeats since the daemon started, for metrics and liveness.
    #[must_use]
    pub fn counters(&self) -> &Arc<Counters> {
        self.keeper.counters()
    }

    /// Number of commands in the keeper's inboxes: the kubelet's and the other one.
    #[must_use]
    pub fn queue_lengths(&self) -> (usize, usize) {
        self.keeper.queue_lengths()
    }

    /// Call and decision counters since the daemon started.
    #[must_use]
    pub fn call_counters(&self) -> CallCounters {
        self.policy_stats.call_counters.lock().clone()
    }

    /// Status of each policy of the active stack.
    #[must_use]
    pub fn policy_statuses(&self, stack: &Stack) -> PolicyStatuses {
        self.policy_stats.faults().policy_statuses(stack)
    }

    /// A receiver of the policies' statuses; empty before the first fault or activation.
    #[must_use]
    pub fn watch_policy_statuses(&self) -> watch::Receiver<Arc<PolicyStatuses>> {
        self.policy_stats.statuses.subscribe()
    }

    /// Messages for operators about the offers in force; empty before the first evaluation.
    #[must_use]
    pub fn offer_notes(&self) -> OfferNotes {
        self.policy_stats.notes.lock().clone()
    }

    /// Ends the suspension of the entry at this index of the stack with this revision, and evaluates the stack's
    /// offers again. Returns whether the entry was suspended.
    ///
    /// # Errors
    /// If another stack is active, the stack has no such entry, or the policy thread is busy.
    pub async fn unsuspend(&self, index: usize, revision: u64) -> Result<bool, CommandError> {
        let (reply, answer) = oneshot::channel();
        send(&self.other_jobs, OtherJob::Unsuspend { index, revision, reply })?;
        within(answer).await?
    }
}

pub(crate) fn send<T>(jobs: &Sender<(tracing::Span, T)>, job: T) -> Result<(), CommandError> {
    jobs.try_send((berth_observe::spans::current(), job)).map_err(|error| match error {
        TrySendError::Full(_) => CommandError::Busy,
        TrySendError::Disconnected(_) => CommandError::Stopping,
    })
}

pub(crate) async fn within<T>(
    answer: impl Future<Output = Result<T, oneshot::error::RecvError>>,
) -> Result<T, CommandError> {
    match tokio::time::timeout(Duration::from_secs(ANSWER_S_MAX), answer).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(_)) => Err(CommandError::Stopping),
        Err(_) => Err(CommandError::Late(ANSWER_S_MAX)),
    }
}

//! Trials of a policy on the live node: its offers, and the outcome of a device request. A trial works on
//! a copy of the ledger, with the same evaluation and the same kernel, off the policy thread.
//! Nothing is recorded or granted.

use super::Lab;
use super::comparison::Candidate;
use crate::jobs::Unprepared;
use crate::keeper::Snapshot;
use crate::policies::PolicyService;
use crate::priority::at_low_priority;
use crate::stack::evaluate::outcome;
use crate::stack::{Baseline, CallRecorder, DryRun, Evaluation, Faults, TIME_FACTOR};
use berth_kernel::evidence::pods::{Pod, PodContainer, PodsSource, PodsView, Stage};
use berth_kernel::grants::pod_candidates;
use berth_kernel::ids::names::{DeviceId, Digest, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::{Activation, Attempt, Command, NewStack, Verdict};
use berth_kernel::node::decide::decide;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::decision::{CallOutcome, CallRecord, Outcome};
use berth_kernel::policy::hooks::{AdmitRequest, Fault, Hook, PlaceRequest, STACK_ENTRIES_MAX};
use berth_kernel::policy::stack::{OnFault, Permissions, Stack, StackEntry, StackOrigin};
use berth_kernel::sharing::listing::free_devices;
use berth_kernel::sharing::placement;
use berth_observe::spans;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Concurrent trials: each makes up to three evaluations, and the calls of an activation.
pub(super) const TRIALS: usize = 1;
/// Most devices of a request in a trial: those of the largest node, 16 GPUs with 128 devices each.
pub const TRIAL_DEVICES_MAX: usize = 2048;
/// UID of the simulated pod.
const SIMULATED_UID: &str = "imagined-by-berth";

/// A trial.
#[derive(Clone, Debug)]
pub struct Proposal {
    /// What is tried.
    pub proposed: Proposed,
    /// The device request to try.
    pub request: Option<DeviceRequest>,
}

/// A policy or a stack to try.
#[derive(Clone, Debug)]
pub enum Proposed {
    /// A policy in place of the entry of the same name, or before all others.
    Policy {
        /// The policy.
        candidate: Candidate,
        /// Permissions of its entry; if `None`, those of the entry that it replaces, or the default.
        permissions: Option<Permissions>,
        /// Behaviour on a fault; if `None`, that of the entry that it replaces, or the default.
        on_fault: Option<OnFault>,
        /// Whether the policy is tried without the active stack.
        alone: bool,
    },
    /// A whole stack. As by an activation, none of its entries is suspended.
    Stack(Vec<StackEntry>),
}

impl Proposed {
    /// The policies that are not active, or may not be.
    fn digests(&self) -> Vec<&Digest> {
        match self {
            Self::Policy { candidate, .. } => vec![&candidate.digest],
            Self::Stack(entries) => entries.iter().map(|entry| &entry.digest).collect(),
        }
    }
}

/// A container's device request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRequest {
    /// The resource.
    pub resource: Resource,
    /// Number of devices, at least one.
    pub count: usize,
    /// The container's pod: policies see it as the only candidate. If `None`, they see the candidates of the live node.
    pub pod: Option<RequestingPod>,
}

/// The pod of a device request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestingPod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its labels, which are added to those of a pod of the node with this name.
    pub labels: BTreeMap<String, String>,
}

/// Result of a trial.
#[derive(Clone, Debug)]
pub struct TrialReport {
    /// The live node.
    pub node: Snapshot,
    /// The node after an activation of the stack; the live node if the activation would be refused.
    pub after: Arc<Ledger>,
    /// The stack that was tried.
    pub stack: Stack,
    /// Index of the candidate's entry in `stack`; of a whole stack 0.
    pub index: usize,
    /// Label of the entry that the candidate replaces.
    pub replaces: Option<String>,
    /// Reason why the stack would not be activated, if so.
    pub refused: Option<String>,
    /// The warnings about the stack's offers.
    pub warnings: Vec<String>,
    /// Outcome of the device request.
    pub outcome: Option<RequestOutcome>,
    /// All policy calls, in order.
    pub calls: Vec<CallReport>,
}

/// Outcome of a device request.
#[derive(Clone, Debug)]
pub struct RequestOutcome {
    /// The pods that may own the container, as namespace/pod.
    pub candidates: Vec<String>,
    /// The chosen devices; empty if too few are free.
    pub devices: Vec<DeviceId>,
    /// Label of the policy that chose them, and its reason.
    pub placed: Option<(String, String)>,
    /// Granted, denied or refused.
    pub outcome: Outcome,
}

/// One policy call.
#[derive(Clone, Debug)]
pub struct CallReport {
    /// The hook that was called.
    pub hook: Hook,
    /// The call, with the checked answer.
    pub note: CallRecord,
    /// Lines that the policy logged.
    pub log_lines: Vec<String>,
}

/// Error of a trial.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrialError {
    /// The policy cannot be made callable.
    #[error("{0}")]
    Unprepared(Unprepared),
    /// Another trial is running.
    #[error("another policy is being tried; try again when its trial has ended")]
    Busy,
    /// The stack has [`STACK_ENTRIES_MAX`] entries already.
    #[error(
        "the active stack has {STACK_ENTRIES_MAX} entries already: try the policy alone, or in place of one of them"
    )]
    Full,
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Stopping,
}

impl Lab {
    /// Tries a policy on the live node. Usually takes milliseconds; up to a minute and a half if policies use
    /// all their time, and longer if code must be read or compiled first.
    ///
    /// # Errors
    /// If another trial is running, the stack is full, or the policy cannot be made callable.
    pub async fn try_policy(&self, proposal: Proposal) -> Result<TrialReport, TrialError> {
        let permit = Arc::clone(&self.trials).try_acquire_owned().map_err(|_| TrialError::Busy)?;
        let prepared = self.policies.prepare(proposal.proposed.digests()).await;
        let report = match prepared {
            Ok(_prepared) => {
                let policies = self.policies.clone();
                // The task holds the permit, since it continues if the caller is dropped.
                let work = move || {
                    let _permit = permit;
                    RunningTrial::new(&policies, &proposal).map(|trial| trial.run(proposal.request.as_ref()))
                };
                let work = tokio::task::spawn_blocking(spans::in_current_span(at_low_priority(work)));
                work.await.unwrap_or(Err(TrialError::Stopping))
            }
            Err(error) => Err(TrialError::Unprepared(error)),
        };
        self.policies.unload_unused();
        report
    }
}

/// The stack of a trial.
#[derive(Default)]
struct TriedStack {
    entries: Vec<StackEntry>,
    /// Those that are suspended in the active stack are not called.
    faults: Faults,
    /// Index of the candidate's entry.
    index: usize,
    /// Label of the entry that the candidate replaces.
    replaces: Option<String>,
}

impl TriedStack {
    /// The active stack with a policy in it.
    fn with(
        policies: &PolicyService,
        node: &Ledger,
        candidate: &Candidate,
        permissions: Option<&Permissions>,
        on_fault: Option<OnFault>,
        alone: bool,
    ) -> Result<Self, TrialError> {
        let Candidate { digest, parameters, .. } = candidate;
        let name = candidate.name();
        let replaced = node.stack.entries.iter().position(|entry| entry.name == name);
        let active = replaced.map(|index| &node.stack.entries[index]);
        let entry = StackEntry {
            name: name.to_owned(),
            digest: digest.clone(),
            parameters: parameters.clone(),
            permissions: permissions
                .cloned()
                .unwrap_or_else(|| active.map_or_else(Permissions::default, |e| e.permissions.clone())),
            on_fault: on_fault.unwrap_or_else(|| active.map(|e| e.on_fault).unwrap_or_default()),
        };
        // The entries of the tried stack, those of the active stack with their index in it.
        let mut entries: Vec<(Option<usize>, StackEntry)> = Vec::new();
        if !alone {
            entries.extend(node.stack.entries.iter().cloned().enumerate().map(|(n, e)| (Some(n), e)));
        }
        let index = match replaced.filter(|_| !alone) {
            Some(index) => {
                entries[index] = (None, entry);
                index
            }
            None if entries.len() >= STACK_ENTRIES_MAX => return Err(TrialError::Full),
            None => {
                entries.insert(0, (None, entry));
                0
            }
        };
        let live = policies.kernel.policy_stats.faults();
        let mut faults = Faults::default();
        for (new, (old, entry)) in entries.iter().enumerate() {
            if old.is_some_and(|old| live.is_suspended(old, entry)) {
                faults.suspend(new, entry);
            }
        }
        let entries = entries.into_iter().map(|(_, entry)| entry).collect();
        let replaces = replaced.filter(|_| !alone).map(|index| node.stack.entries[index].label());
        Ok(Self { entries, faults, index, replaces })
    }
}

/// A trial in progress.
struct RunningTrial<'p> {
    policies: &'p PolicyService,
    baseline: Arc<Baseline>,
    now: Now,
    stack: Stack,
    faults: Faults,
    report: TrialReport,
}

impl<'p> RunningTrial<'p> {
    fn new(policies: &'p PolicyService, proposal: &Proposal) -> Result<Self, TrialError> {
        let node = policies.kernel.snapshot();
        let tried = match &proposal.proposed {
            Proposed::Policy { candidate, permissions, on_fault, alone } => {
                TriedStack::with(policies, &node, candidate, permissions.as_ref(), *on_fault, *alone)?
            }
            Proposed::Stack(entries) => TriedStack { entries: entries.clone(), ..TriedStack::default() },
        };
        let stack = Stack { entries: tried.entries, ..Stack::default() };
        let report = TrialReport {
            after: Arc::clone(&node),
            node,
            stack: stack.clone(),
            index: tried.index,
            replaces: tried.replaces,
            refused: None,
            warnings: Vec::new(),
            outcome: None,
            calls: Vec::new(),
        };
        let (baseline, now) = (policies.baseline.get(), policies.kernel.now());
        Ok(Self { policies, baseline, now, stack, faults: tried.faults, report })
    }

    fn run(mut self, request: Option<&DeviceRequest>) -> TrialReport {
        self.activate();
        if let Some(request) = request {
            self.report.outcome = Some(self.request_devices(request));
        }
        self.report
    }

    /// Evaluates the stack's offers, and activates the stack on the copy.
    fn activate(&mut self) {
        let node = Arc::clone(&self.report.node);
        let offers = self.evaluate(Hook::Offer, &node, |evaluation| evaluation.offers());
        self.report.warnings = offers.notes.reasons();
        let failure = offers.faults.into_iter().next();
        let stack = NewStack {
            origin: StackOrigin::Api,
            failed: None,
            by: String::new(),
            why: String::new(),
            entries: self.stack.entries.clone(),
        };
        let triage = self.dry_run(&stack, &node).judge_again();
        let command = Command::Activate(Activation { stack: stack.clone(), offers: offers.parts, triage });
        let Verdict { entry, refusal } = decide(&node, &command, self.now);
        let mut after = Ledger::clone(&node);
        after.apply(&entry);
        let after = Arc::new(after);
        let failure = failure.or_else(|| self.try_parameters(&stack, &after));
        let failure = failure.map(|(policy, fault)| format!("policy {policy} fails on this node: {fault}"));
        self.report.refused = failure.or_else(|| refusal.map(|refusal| refusal.to_string()));
        if self.report.refused.is_none() {
            self.report.after = after;
        }
    }

    /// The label and fault of the first policy whose parameters an activation would reject.
    fn try_parameters(&self, stack: &NewStack, node: &Arc<Ledger>) -> Option<(String, Fault)> {
        self.dry_run(stack, node).try_parameters(node).err()
    }

    fn dry_run<'t>(&'t self, stack: &'t NewStack, node: &'t Arc<Ledger>) -> DryRun<'t> {
        DryRun {
            stack,
            policies: &**self.policies.runtime(),
            node,
            now: self.now,
            baseline: &self.baseline,
            time_factor: TIME_FACTOR,
        }
    }

    /// Requests devices as the kubelet does: first a placement, then the admission of its devices.
    fn request_devices(&mut self, requested: &DeviceRequest) -> RequestOutcome {
        let mut node = Ledger::clone(&self.report.after);
        if let Some(pod) = &requested.pod {
            node.pods = Some(Arc::new(with_pod(&node, pod, requested, self.now)));
        }
        let node = Arc::new(node);
        let candidates = pod_candidates::candidates(&node, &requested.resource, requested.count);
        let candidates = candidates.iter().map(|c| format!("{}/{}", c.pod.namespace, c.pod.name)).collect();
        let available = free_devices(&node, &requested.resource);
        if available.len() < requested.count {
            let reason =
                format!("{} of {} are free, not {}", available.len(), requested.resource, requested.count);
            let (devices, outcome) = (Vec::new(), Outcome::Refused { reason });
            return RequestOutcome { candidates, devices, placed: None, outcome };
        }
        let request = PlaceRequest {
            resource: requested.resource.clone(),
            available,
            required: Vec::new(),
            size: requested.count,
        };
        let request = placement::without_ungrantable(&node, &request);
        let (placement, by) = self.evaluate(Hook::Place, &node, |evaluation| evaluation.place(&request));
        let mut devices = placement.devices;
        let index = |id: &DeviceId| node.part(&id.part).map(|part| part.part.gpu_index);
        devices.sort_by_cached_key(|id| (index(id), id.clone()));
        let mut sorted = devices.clone();
        sorted.sort();
        let request = AdmitRequest { resource: requested.resource.clone(), devices: sorted, claim: None };
        let answer = match self.baseline.mps_denial(&requested.resource) {
            Some(denial) => denial,
            None => self.evaluate(Hook::Admit, &node, |evaluation| evaluation.admit(&request)),
        };
        let stack_answer = answer.clone();
        let attempt = Attempt::Last { asked_mono_ms: self.now.mono_ms };
        let command = Command::Allocate { request, answer, evaluated: None, attempt };
        let refusal = decide(&node, &command, self.now).refusal;
        let outcome = outcome(stack_answer, refusal.map_or(Ok(None), |refusal| Err(refusal.to_string())));
        RequestOutcome { candidates, devices, placed: Some((by.to_string(), placement.reason)), outcome }
    }

    fn evaluate<T>(
        &mut self,
        hook: Hook,
        node: &Arc<Ledger>,
        evaluate: impl FnOnce(Evaluation<'_>) -> T,
    ) -> T {
        let recorder = CallRecorder::new(&**self.policies.runtime());
        let mut calls = Vec::new();
        let answer = evaluate(Evaluation {
            stack: &self.stack,
            policies: &recorder,
            node,
            now: self.now,
            faults: &mut self.faults,
            baseline: &self.baseline,
            calls: &mut calls,
            time_factor: TIME_FACTOR,
        });
        let mut recorded = recorder.take();
        for note in calls {
            // A suspended entry was not called, and has no recorded call.
            let matches = recorded.front().is_some_and(|call| call.digest == note.digest);
            let call =
                if matches && note.outcome != CallOutcome::Suspended { recorded.pop_front() } else { None };
            self.report.calls.push(CallReport {
                hook,
                note,
                log_lines: call.map(|call| call.log_lines).unwrap_or_default(),
            });
        }
        answer
    }
}

/// The node's pods, with this one as the only candidate. Labels of an existing pod with the same name are kept, except
/// those that are given.
fn with_pod(node: &Ledger, pod: &RequestingPod, requested: &DeviceRequest, now: Now) -> PodsView {
    let RequestingPod { namespace, name, labels: given } = pod;
    let mut view = node.pods.as_deref().cloned().unwrap_or_else(|| PodsView {
        current: true,
        listed_mono_ms: now.mono_ms,
        ..PodsView::empty(PodsSource::ApiServer)
    });
    view.current = true;
    let existing = view.pods.values().find(|pod| pod.namespace == *namespace && pod.name == *name);
    let mut labels: BTreeMap<String, String> =
        existing.map(|pod| pod.labels.iter().cloned().collect()).unwrap_or_default();
    labels.extend(given.clone());
    view.pods.retain(|_, pod| pod.stage != Stage::Waiting);
    let requests = vec![(requested.resource.clone(), u32::try_from(requested.count).unwrap_or(u32::MAX))];
    let pod = Pod {
        uid: SIMULATED_UID.into(),
        namespace: namespace.clone(),
        name: name.clone(),
        labels: labels.into_iter().collect(),
        is_static: false,
        owner: None,
        stage: Stage::Waiting,
        deletion_wall_ms: None,
        created_wall_ms: now.wall_ms,
        containers: vec![PodContainer { name: "main".into(), requests }],
        bypass: None,
        has_claims: false,
        named_claims: Vec::new(),
    };
    view.pods.insert(SIMULATED_UID.into(), Arc::new(pod));
    view
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pod_of_a_trial_has_the_given_labels_and_those_of_its_namesake() {
        let requested =
            DeviceRequest { resource: Resource::parse("nvidia.com/gpu").unwrap(), count: 1, pod: None };
        let pod = |name: &str, labels: &[(&str, &str)]| RequestingPod {
            namespace: "ns".into(),
            name: name.into(),
            labels: labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        };
        let labels = |node: &Ledger, pod: &RequestingPod| {
            let mut node = node.clone();
            node.pods = Some(Arc::new(with_pod(&node, pod, &requested, Now::default())));
            let candidates = pod_candidates::candidates(&node, &requested.resource, 1);
            let [candidate] = candidates.as_slice() else { panic!("{candidates:?}") };
            assert_eq!((&candidate.pod.namespace, &candidate.pod.name), (&pod.namespace, &pod.name));
            candidate.pod.labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>()
        };
        let mut node = Ledger::default();
        let gold = pod("a", &[("tier", "gold"), ("app", "a")]);
        assert_eq!(labels(&node, &gold), ["app=a", "tier=gold"]);
        node.pods = Some(Arc::new(with_pod(&node, &gold, &requested, Now::default())));
        assert_eq!(labels(&node, &pod("a", &[("tier", "iron")])), ["app=a", "tier=iron"]);
        assert_eq!(labels(&node, &pod("b", &[("tier", "iron")])), ["tier=iron"]);
    }
}

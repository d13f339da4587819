//! The policy thread: evaluates the stack on a snapshot, and submits request and answer to the keeper.
//!
//! One thread suffices, since the kubelet calls serially and a policy call takes tens of microseconds. The
//! kubelet's jobs go first; offers are evaluated again when no job waits.

use crate::jobs::{ActivateError, FileStack, Granted, KubeletJob, OtherJob, Prepared, Reconfiguration};
use crate::keeper::{Applied, CommandError, Handle, Snapshot};
use crate::lab::recorder::Recorder;
use crate::log_limit::LogLimit;
use crate::shared::Shared;
use crate::stack::evaluate::{outcome, prepared_outcome};
use crate::stack::fault_log::FaultLog;
use crate::stack::policy_stats::PolicyStats;
use crate::stack::{Baseline, DryRun, Evaluation, FAULTS_TO_SUSPEND, Faults, OfferNotes, Offers};
use berth_kernel::grants::prepare::ClaimToPrepare;
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::hardware::health::Health;
use berth_kernel::hardware::judgement::TriagedReading;
use berth_kernel::ids::names::{DeviceId, Digest, PartId};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::{Activation, Attempt, Command, NewOffers, NewStack};
use berth_kernel::node::ports::{Clock, PolicyRuntime};
use berth_kernel::node::refusal::Refusal;
use berth_kernel::node::revision::Revision;
use berth_kernel::policy::decider::Decider;
use berth_kernel::policy::decision::{CallOutcome, CallRecord, NewDecision, Outcome, OwnedQuestion};
use berth_kernel::policy::hooks::{AdmitRequest, Hook, PlaceRequest};
use berth_kernel::policy::stack::{Stack, StackOrigin};
use berth_kernel::sharing::offer::PartOffer;
use berth_kernel::sharing::placement;
use berth_observe::spans;
use crossbeam_channel::{Receiver, after, never, select_biased};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::Span;

/// Delay between a change of the ledger and the next evaluation of offers, so that a burst of
/// Allocates causes one call. Health and drain take effect without it: the kernel derives them.
const OFFERS_DELAY: Duration = Duration::from_millis(50);

/// One evaluation of the stack.
struct Evaluated {
    /// Time of the evaluation.
    now: Now,
    /// The policies' calls.
    calls: Vec<CallRecord>,
}

/// Offers, and the calls that led to them: version, parameters, answer.
type RecordedOffers = (Vec<(PartOffer, Decider)>, Vec<(Digest, String, CallOutcome)>);

/// State of the policy thread.
pub(crate) struct Worker {
    keeper: Handle,
    recorder: Recorder,
    policies: Arc<dyn PolicyRuntime>,
    clock: Arc<dyn Clock>,
    baseline: Shared<Baseline>,
    /// Only this thread replaces it once the daemon runs, so that no activation of it is of an earlier version.
    file_stack: Shared<FileStack>,
    policy_stats: PolicyStats,
    /// The offers that were recorded last.
    last_offers: RefCell<Option<RecordedOffers>>,
    fault_log: RefCell<FaultLog>,
    /// The last sign by part and source: at most two sources for each GPU since the start.
    last_signs: RefCell<BTreeMap<(PartId, String), (u64, String)>>,
    /// The events that were logged and recorded, by part, source and code: a program can cause thousands of XIDs a
    /// second.
    event_log: RefCell<LogLimit<(PartId, String, u64)>>,
}

/// What the configuration sets; a [`Reconfiguration`] replaces it.
pub(crate) struct Configured {
    pub baseline: Shared<Baseline>,
    pub file_stack: Shared<FileStack>,
}

/// The thread's inboxes.
pub(crate) struct Inboxes {
    pub kubelet: Receiver<(Span, KubeletJob)>,
    pub other: Receiver<(Span, OtherJob)>,
    /// The keeper's signal of a new snapshot.
    pub nudge: Receiver<()>,
}

impl Worker {
    pub(crate) fn new(
        keeper: Handle,
        recorder: Recorder,
        policies: Arc<dyn PolicyRuntime>,
        clock: Arc<dyn Clock>,
        configured: Configured,
        policy_stats: PolicyStats,
    ) -> Self {
        let Configured { baseline, file_stack } = configured;
        let (last_offers, fault_log, last_signs, event_log) = Default::default();
        Self {
            keeper,
            recorder,
            policies,
            clock,
            baseline,
            file_stack,
            policy_stats,
            last_offers,
            fault_log,
            last_signs,
            event_log,
        }
    }

    /// Runs until all handles are dropped.
    ///
    /// Changes of the ledger cause an evaluation of offers only after a job has requested the first one. Before that,
    /// the devices that pods hold are not adopted and the configured stack is not active: baseline offers would stay
    /// listed together with the stack's own devices as long as any of their ids (I10).
    pub(crate) fn run(&self, inboxes: &Inboxes) {
        let mut next_offers: Option<Instant> = None;
        let mut offering = false;
        let no_nudge = never();
        // Whether a change of the ledger has set `next_offers`: further ones are not received, and wake no thread,
        // until then.
        let mut is_nudged = false;
        loop {
            let nudges = if is_nudged { &no_nudge } else { &inboxes.nudge };
            let timer =
                next_offers.map_or_else(never, |at| after(at.saturating_duration_since(Instant::now())));
            let next_omitted = self.event_log.borrow().next_omitted();
            let omitted =
                next_omitted.map_or_else(never, |at| after(at.saturating_duration_since(Instant::now())));
            select_biased! {
                recv(inboxes.kubelet) -> job => match job {
                    Ok((span, job)) => span.in_scope(|| self.kubelet_job(job)),
                    Err(_) => return,
                },
                recv(inboxes.other) -> job => match job {
                    Ok((span, job)) => {
                        let offered = span.in_scope(|| self.other_job(job));
                        if offered && !offering {
                            offering = true;
                            // First offers that change nothing publish no snapshot, and a policy may have requested
                            // another evaluation.
                            next_offers = Some(Instant::now() + OFFERS_DELAY);
                        }
                    }
                    Err(_) => return,
                },
                recv(nudges) -> nudge => match nudge {
                    Ok(()) if !offering => {}
                    Ok(()) => {
                        is_nudged = true;
                        let soon = Instant::now() + OFFERS_DELAY;
                        next_offers = Some(next_offers.map_or(soon, |at| at.min(soon)));
                    }
                    Err(_) => return,
                },
                recv(timer) -> _ => {
                    is_nudged = false;
                    let _busy = self.keeper.counters().policies.begin();
                    // Offers that could not be recorded are evaluated again, like those that failed.
                    let again_after_s = self.reoffer().map_or(Some(1), |(_, again_after_s)| again_after_s);
                    next_offers =
                        again_after_s.map(|s| Instant::now() + Duration::from_secs(u64::from(s.max(1))));
                }
                recv(omitted) -> _ => self.log_omitted_events(),
            }
        }
    }

    fn kubelet_job(&self, job: KubeletJob) {
        let _busy = self.keeper.counters().policies.begin();
        match job {
            // The caller has stopped waiting and the pod has failed: a grant would hold GPUs without a pod.
            KubeletJob::Allocate { reply, .. } if reply.is_closed() => {}
            KubeletJob::Allocate { request, attempt, reply } => {
                let _ = reply.send(self.allocate(&request, attempt));
            }
            // The kubelet has given up; it will want the claim prepared again, or unprepared.
            KubeletJob::Prepare { reply, .. } if reply.is_closed() => {}
            KubeletJob::Prepare { claim, reply } => {
                let prepared = self.prepare(claim, || reply.is_closed());
                let _ = reply.send(prepared);
            }
            KubeletJob::Place { request, reply } => {
                let node = self.keeper.snapshot();
                // The journal records the request as policies see it.
                let request = placement::without_ungrantable(&node, &request);
                let ((placement, by), evaluated) =
                    self.evaluate(&node, Hook::Place, |evaluation| evaluation.place(&request));
                let _ = reply.send((placement.clone(), by.clone()));
                self.record(&node, OwnedQuestion::Place(request), evaluated, Outcome::Placed(placement, by));
            }
        }
    }

    /// Returns whether the job evaluated the offers of the stack that the node is to have. A failed activation
    /// did not: at start it is retried, and until then the stack is empty.
    fn other_job(&self, job: OtherJob) -> bool {
        let _busy = self.keeper.counters().policies.begin();
        match job {
            OtherJob::Triage(reading) => self.triage(reading),
            OtherJob::Offer { reply } => {
                let _ = reply.send(self.reoffer().map(|(applied, _)| applied));
                return true;
            }
            OtherJob::Order { reply, .. } if reply.is_closed() => {}
            OtherJob::Order { request, reply } => {
                let _ = reply.send(self.order(&request));
            }
            OtherJob::Activate { stack, expected, reply } => {
                let activated = self.activate(stack, expected);
                let offered = activated.is_ok();
                let _ = reply.send(activated);
                return offered;
            }
            // Its caller has given up, and has refused the new configuration.
            OtherJob::Reconfigure { reply, .. } if reply.is_closed() => {}
            OtherJob::Reconfigure { new, reply } => {
                let reconfigured = self.reconfigure(*new);
                let offered = reconfigured.is_ok();
                let _ = reply.send(reconfigured);
                return offered;
            }
            OtherJob::Unsuspend { index, revision, reply } => {
                let _ = reply.send(self.unsuspend(index, revision));
            }
        }
        false
    }

    /// Evaluates the active stack, with the baseline in force.
    fn evaluate<T>(
        &self,
        node: &Snapshot,
        hook: Hook,
        evaluate: impl FnOnce(Evaluation<'_>) -> T,
    ) -> (T, Evaluated) {
        self.evaluate_with(&self.baseline.get(), node, hook, evaluate)
    }

    /// Evaluates the active stack. Works on a copy of the statistics, which only this thread writes, so that readers do
    /// not wait for a policy call.
    fn evaluate_with<T>(
        &self,
        baseline: &Baseline,
        node: &Snapshot,
        hook: Hook,
        evaluate: impl FnOnce(Evaluation<'_>) -> T,
    ) -> (T, Evaluated) {
        let mut faults = self.policy_stats.faults();
        let mut evaluated = Evaluated { now: self.clock.now(), calls: Vec::new() };
        let span = spans::stack(hook.as_str());
        let _inside = span.enter();
        let answer = evaluate(Evaluation {
            stack: &node.stack,
            policies: &*self.policies,
            node,
            now: evaluated.now,
            faults: &mut faults,
            baseline,
            calls: &mut evaluated.calls,
            time_factor: 1,
        });
        spans::stack_evaluated(&span, evaluated.calls.len());
        self.record_calls(&node.stack, hook, &evaluated.calls, faults);
        (answer, evaluated)
    }

    fn record(&self, node: &Snapshot, question: OwnedQuestion, evaluated: Evaluated, outcome: Outcome) {
        let Evaluated { now, calls } = evaluated;
        let node = Arc::clone(node);
        let decision = NewDecision { node, now, question, calls, outcome, is_repeat: false };
        self.recorder.record(&self.policy_stats, decision);
    }

    /// Evaluates the stack and submits the answer to the keeper; repeats both once if the node changed in between.
    fn allocate(&self, request: &AdmitRequest, attempt: Attempt) -> Result<Granted, CommandError> {
        let mut again = false;
        loop {
            let node = self.keeper.snapshot();
            let (answer, evaluated) = match self.baseline.get().mps_denial(&request.resource) {
                Some(denial) => (denial, Evaluated { now: self.clock.now(), calls: Vec::new() }),
                None => self.evaluate(&node, Hook::Admit, |evaluation| evaluation.admit(request)),
            };
            let stack_answer = answer.clone();
            let command = Command::Allocate {
                request: request.clone(),
                answer,
                evaluated: (!again).then_some(node.generation),
                attempt,
            };
            let granted = match self.keeper.execute(command) {
                Err(CommandError::Refused(Refusal::Moved)) if !again => {
                    again = true;
                    continue;
                }
                // An Allocate that is not refused always grants. If it ever did not, the kubelet's call must
                // still fail.
                result => result.and_then(|applied| Granted::of(applied).ok_or(CommandError::Stopping)),
            };
            let id = granted.as_ref().map(|granted| Some(granted.allocation.id)).map_err(ToString::to_string);
            self.record(&node, OwnedQuestion::Admit(request.clone()), evaluated, outcome(stack_answer, id));
            return granted;
        }
    }

    /// Evaluates the stack for each request of a claim, and submits the answers to the keeper; repeats both once if the
    /// node changed in between. Nothing is submitted if `is_abandoned`: the kubelet may have unprepared the claim since.
    fn prepare(
        &self,
        mut claim: ClaimToPrepare,
        is_abandoned: impl Fn() -> bool,
    ) -> Result<Prepared, CommandError> {
        let mut again = false;
        loop {
            let node = self.keeper.snapshot();
            let questions: Vec<AdmitRequest> =
                claim.requests.iter().map(|request| claim.question(request)).collect();
            let mut all_evaluated = Vec::new();
            for (request, question) in claim.requests.iter_mut().zip(&questions) {
                let (answer, evaluated) = match self.baseline.get().mps_denial(&question.resource) {
                    Some(denial) => (denial, Evaluated { now: self.clock.now(), calls: Vec::new() }),
                    None => self.evaluate(&node, Hook::Admit, |evaluation| evaluation.admit(question)),
                };
                request.answer = answer;
                all_evaluated.push(evaluated);
            }
            if is_abandoned() {
                return Err(CommandError::Stopping);
            }
            let evaluated = (!again).then_some(node.generation);
            let prepared = match self.keeper.execute(Command::Prepare { claim: claim.clone(), evaluated }) {
                Err(CommandError::Refused(Refusal::Moved)) if !again => {
                    again = true;
                    continue;
                }
                result => result.map(|applied| Prepared::of(applied, &claim.claim.uid)),
            };
            for ((request, question), evaluated) in claim.requests.iter().zip(questions).zip(all_evaluated) {
                let outcome = prepared_outcome(request, &prepared);
                self.record(&node, OwnedQuestion::Admit(question), evaluated, outcome);
            }
            return prepared;
        }
    }

    /// As for `place`, but nothing is placed: neither the decision nor a fault is recorded, which would suspend the policy.
    fn order(&self, request: &PlaceRequest) -> Vec<DeviceId> {
        let node = self.keeper.snapshot();
        let evaluation = Evaluation {
            stack: &node.stack,
            policies: &*self.policies,
            node: &node,
            now: self.clock.now(),
            faults: &mut self.policy_stats.faults(),
            baseline: &self.baseline.get(),
            calls: &mut Vec::new(),
            time_factor: 1,
        };
        evaluation.place(request).0.devices
    }

    fn triage(&self, reading: Reading) {
        let node = self.keeper.snapshot();
        let (triaged, evaluated) =
            self.evaluate(&node, Hook::Triage, |evaluation| evaluation.triage(&reading));
        let TriagedReading { answer, by, .. } = &triaged;
        if let Some(omitted) = self.news(&node, &triaged) {
            tracing::warn!(
                part = reading.part.as_str(), source = reading.source, code = reading.code,
                detail = reading.detail, severity = ?answer.severity, reason = answer.reason, omitted,
                "a GPU error was rated"
            );
            self.record(
                &node,
                OwnedQuestion::Triage(reading),
                evaluated,
                Outcome::Triaged(answer.clone(), by.clone()),
            );
        } else {
            self.policy_stats.record_outcome(Hook::Triage, "triaged");
        }
        if let Err(error) = self.keeper.execute(Command::ApplyTriage(triaged)) {
            tracing::error!(%error, "the rating of a GPU error could not be recorded");
        }
    }

    /// Whether a reading is to be logged and recorded, and the number of equal ones before it that were not. Each scan
    /// repeats a sign, which is news if it differs from the last one; of events of one part, source and code, one a
    /// minute is. What changes the GPU's health always is.
    fn news(&self, node: &Snapshot, triaged: &TriagedReading) -> Option<u64> {
        let TriagedReading { reading, answer, .. } = triaged;
        let (part, source) = (reading.part.clone(), reading.source.clone());
        let omitted = if reading.is_sign() {
            let value = (reading.code, answer.reason.clone());
            let same = self.last_signs.borrow_mut().insert((part, source), value.clone()) == Some(value);
            (!same).then_some(0)
        } else {
            self.event_log.borrow_mut().admit((part, source, reading.code), Instant::now())
        };
        let health = node.part(&reading.part).and_then(|part| node.gpu_of(part)).map(|gpu| &gpu.health);
        let (revision, now) = (node.stack.revision, self.clock.now());
        let changes = |old: &Health| old.after_reading(triaged, revision, now).state != old.state;
        omitted.or_else(|| health.is_some_and(changes).then_some(0))
    }

    fn log_omitted_events(&self) {
        for ((part, source, code), omitted) in self.event_log.borrow_mut().take_omitted(Instant::now()) {
            tracing::warn!(
                part = part.as_str(),
                source,
                code,
                omitted,
                "the same GPU reading came again and again"
            );
        }
    }

    fn reoffer(&self) -> Result<(Applied, Option<u32>), CommandError> {
        let Offers { parts, again_after_s, notes, .. } =
            self.evaluate_offers(&self.keeper.snapshot(), &self.baseline.get());
        self.set_notes(notes);
        let applied = self.keeper.execute(Command::Offer(parts)).inspect_err(|error| {
            tracing::warn!(%error, "the new offers could not be recorded; the previous ones stay in effect");
        })?;
        Ok((applied, again_after_s))
    }

    /// Evaluates the active stack's offers on this node, and records the evaluation.
    fn evaluate_offers(&self, node: &Snapshot, baseline: &Baseline) -> Offers {
        let (offers, evaluated) =
            self.evaluate_with(baseline, node, Hook::Offer, |evaluation| evaluation.offers());
        self.policy_stats.record_outcome(Hook::Offer, "offered");
        self.record_offers(node, evaluated, &offers.parts);
        offers
    }

    /// Records offers unless the baseline alone made them. Offers are evaluated at every change of the node, and most
    /// evaluations repeat the last one: those are marked `again`, or they would displace all other decisions from the
    /// journal.
    fn record_offers(&self, node: &Snapshot, evaluated: Evaluated, parts: &[(PartOffer, Decider)]) {
        let answers = evaluated
            .calls
            .iter()
            .map(|call| (call.digest.clone(), call.parameters.clone(), call.outcome.clone()));
        let offers = Some((parts.to_vec(), answers.collect()));
        let Evaluated { now, calls } = evaluated;
        if calls.is_empty() {
            return;
        }
        // Shadows are called for repeated offers, too.
        let again = self.last_offers.replace(offers.clone()) == offers;
        let (node, outcome) = (Arc::clone(node), Outcome::Offered(parts.to_vec()));
        self.recorder.submit(NewDecision {
            node,
            now,
            question: OwnedQuestion::Offer,
            calls,
            outcome,
            is_repeat: again,
        });
    }

    /// Activates a stack, if none of its policies fails on the live node. A stack of the configuration file must be the
    /// one that the file has now.
    fn activate(&self, stack: NewStack, expected: Option<u64>) -> Result<Snapshot, ActivateError> {
        if stack.origin == StackOrigin::File && stack.entries != self.file_stack.get().entries {
            return Err(ActivateError::FileChanged);
        }
        let (activation, notes) =
            self.evaluate_stack(stack, &self.keeper.snapshot(), &self.baseline.get())?;
        let command = Command::Activate(activation).expecting(expected.map(Revision::Stack));
        let applied = self.keeper.execute(command).map_err(ActivateError::Command)?;
        self.set_notes(notes);
        self.restart_stats(&applied.snapshot.stack);
        Ok(applied.snapshot)
    }

    /// Evaluates a new stack's offers on this node, and its triage of the readings that are judged again.
    fn evaluate_stack(
        &self,
        stack: NewStack,
        node: &Snapshot,
        baseline: &Baseline,
    ) -> Result<(Activation, OfferNotes), ActivateError> {
        let (policies, now) = (&*self.policies, self.clock.now());
        let dry_run = DryRun { stack: &stack, policies, node, now, baseline, time_factor: 1 };
        let offers = dry_run.offers().map_err(ActivateError::from)?;
        let triage = dry_run.judge_again();
        for TriagedReading { reading, answer, by } in &triage {
            tracing::info!(
                part = reading.part.as_str(), source = reading.source, code = reading.code, %by,
                severity = ?answer.severity, reason = answer.reason,
                "a GPU reading is judged again, since the new stack does not have the policy that judged it with the \
                 same parameters"
            );
        }
        Ok((Activation { stack, offers: offers.parts, triage }, offers.notes))
    }

    /// The statistics begin again with a stack that was activated.
    fn restart_stats(&self, stack: &Stack) {
        self.policy_stats.faults.lock().reset();
        self.policy_stats.publish(stack);
    }

    /// Applies new settings: the stack is evaluated under them, and the keeper gets the rules and the offers in one
    /// command. If that fails, the old settings stay, except after [`CommandError::Late`]: then the keeper has applied
    /// the command, and only the disk is late.
    fn reconfigure(&self, new: Reconfiguration) -> Result<Snapshot, ActivateError> {
        let Reconfiguration { rules, baseline, file_stack, stack, revision } = new;
        let (node, expected) = (self.keeper.snapshot(), Revision::Stack(revision));
        // No policy is called for a stack that is no longer active.
        expected.check(&node).map_err(|refusal| ActivateError::Command(refusal.into()))?;
        let rules = Arc::new(rules);
        let ruled = Arc::new(node.with_rules(&rules));
        let is_activation = stack.is_some();
        let (offers, notes) = match stack {
            Some(stack) => {
                let (activation, notes) = self.evaluate_stack(stack, &ruled, &baseline)?;
                (NewOffers::OfStack(activation), notes)
            }
            None => {
                let Offers { parts, notes, .. } = self.evaluate_offers(&ruled, &baseline);
                (NewOffers::OfActiveStack(parts), notes)
            }
        };
        // First the baseline, so that no new resource is granted without what its containers need.
        let old_baseline = self.baseline.replace(baseline);
        let command = Command::SetRules { rules, offers }.expecting(Some(expected));
        let result = self.keeper.execute(command);
        if !matches!(result, Ok(_) | Err(CommandError::Late(_))) {
            self.baseline.replace(old_baseline);
            return result.map(|applied| applied.snapshot).map_err(ActivateError::Command);
        }
        self.file_stack.replace(file_stack);
        self.set_notes(notes);
        if is_activation {
            self.restart_stats(&self.keeper.snapshot().stack);
        }
        result.map(|applied| applied.snapshot).map_err(ActivateError::Command)
    }

    fn unsuspend(&self, index: usize, revision: u64) -> Result<bool, CommandError> {
        let node: Snapshot = self.keeper.snapshot();
        Revision::Stack(revision).check(&node)?;
        let no_entry = || Refusal::StackChanged { revision: node.stack.revision };
        let entry = node.stack.entries.get(index).ok_or_else(no_entry)?;
        let was_suspended = self.policy_stats.faults.lock().unsuspend(index, entry);
        if was_suspended {
            tracing::info!(policy = entry.label(), index, "the suspension of a policy ended");
            self.policy_stats.publish(&node.stack);
            // The entry's offers may differ from those of the other entries. A failure to record them is logged, and
            // the next change of the node evaluates the offers again.
            let _ = self.reoffer();
        }
        Ok(was_suspended)
    }

    /// Replaces the messages about the offers in force, and logs new ones.
    fn set_notes(&self, notes: OfferNotes) {
        let mut current = self.policy_stats.notes.lock();
        if notes.mig.refusal != current.mig.refusal {
            match &notes.mig.refusal {
                Some(refusal) => tracing::error!("{refusal}"),
                None => tracing::info!("MIG instances can be offered again"),
            }
        }
        for note in notes.mig.notes.iter().filter(|note| !current.mig.notes.contains(note)) {
            tracing::warn!("{note}");
        }
        for warning in notes.warnings.iter().filter(|warning| !current.warnings.contains(warning)) {
            tracing::warn!("{warning}");
        }
        *current = notes;
    }

    /// Records the calls of an evaluation of the active stack. Only this thread writes the statistics.
    fn record_calls(&self, stack: &Stack, hook: Hook, calls: &[CallRecord], faults: Faults) {
        self.policy_stats.call_counters.lock().record_calls(hook, calls);
        self.fault_log.borrow_mut().log(hook, calls);
        let failed = calls.iter().any(|call| matches!(call.outcome, CallOutcome::Fault(_)));
        let before = {
            let mut current = self.policy_stats.faults.lock();
            std::mem::replace(&mut *current, faults)
        };
        if !failed {
            return;
        }
        let now = self.policy_stats.faults();
        for (index, entry) in stack.entries.iter().enumerate() {
            if now.is_suspended(index, entry) && !before.is_suspended(index, entry) {
                tracing::error!(
                    policy = entry.label(),
                    index,
                    "the policy is suspended after {FAULTS_TO_SUSPEND} faults in a row: it is not called \
                     until `berth policy unsuspend` or another activation"
                );
            }
        }
        self.policy_stats.publish(stack);
    }
}

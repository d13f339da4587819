//! Evaluates the stack entry by entry, and checks every answer against the offer, the free devices and
//! the entry's permissions (I8). An invalid answer is a fault; the baseline answers last (I9).

use super::baseline::Baseline;
use super::faults::Faults;
use crate::jobs::Prepared;
use crate::keeper::CommandError;
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::grants::prepare::RequestToPrepare;
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::hardware::judgement::TriagedReading;
use berth_kernel::hardware::triage::baseline_triage;
use berth_kernel::ids::names::{AllocationId, PartId};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::StackAnswer;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::{Call, CallOutput, PolicyRuntime};
use berth_kernel::policy::compare::check_placement;
use berth_kernel::policy::decider::Decider;
use berth_kernel::policy::decision::{CallOutcome, CallRecord, Cost, Grant, Outcome};
use berth_kernel::policy::hooks::{
    AdmitRequest, Answer, ENVIRONMENT_BYTES_MAX, ENVIRONMENT_MAX, ENVIRONMENT_VALUE_BYTES_MAX, Fault,
    FaultKind, Hook, PlaceRequest, Placement, Question, REASON_BYTES_MAX, Terms,
};
use berth_kernel::policy::reserved_environment::reserved_for;
use berth_kernel::policy::stack::{OnFault, Permissions, Stack, StackEntry};
use berth_kernel::sharing::part_state::{PartState, Taken};
use berth_kernel::sharing::placement;
use berth_observe::spans;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Wall time limit of one call while the kubelet waits, milliseconds; fuel stops a busy guest long before.
pub const CALL_MS_MAX: u64 = 500;
/// Wall time limit of an evaluation: the kubelet admits no other pod meanwhile.
pub const STACK_TIME_MAX: Duration = Duration::from_secs(1);

/// One evaluation of a stack on one snapshot.
pub struct Evaluation<'a> {
    /// The stack.
    pub stack: &'a Stack,
    /// Calls the policies.
    pub policies: &'a dyn PolicyRuntime,
    /// The snapshot that the policies see.
    pub node: &'a Arc<Ledger>,
    /// The time that the policies see.
    pub now: Now,
    /// The entries' call statistics, which the evaluation updates.
    pub faults: &'a mut Faults,
    /// Answers if all policies pass.
    pub baseline: &'a Baseline,
    /// Receives the calls, in order.
    pub calls: &'a mut Vec<CallRecord>,
    /// Factor of the wall time limits of calls and of the evaluation: 1 while the kubelet waits.
    pub time_factor: u32,
}

/// The wall time of one evaluation.
pub(super) struct StackTime {
    limit: Duration,
    deadline: Instant,
    /// The entry that has taken the longest, and how long.
    slowest: Option<(usize, Duration)>,
    /// Whether it was used up.
    is_used_up: bool,
}

impl StackTime {
    fn left_ms(&self) -> u64 {
        let left = self.deadline.saturating_duration_since(Instant::now());
        u64::try_from(left.as_millis()).unwrap_or(u64::MAX)
    }

    fn add(&mut self, index: usize, took: Duration) {
        if self.slowest.is_none_or(|(_, most)| took > most) {
            self.slowest = Some((index, took));
        }
    }
}

impl Evaluation<'_> {
    /// Starts the time of an evaluation of this hook.
    pub(super) fn start(&mut self, hook: Hook) -> StackTime {
        self.faults.start_evaluation(hook);
        let limit = STACK_TIME_MAX * self.time_factor;
        StackTime { limit, deadline: Instant::now() + limit, slowest: None, is_used_up: false }
    }

    /// Decides whether these devices may be granted. All policies must allow it.
    pub fn admit(mut self, request: &AdmitRequest) -> StackAnswer {
        let (mut by, mut terms) = (Vec::new(), Terms::default());
        let mut time = self.start(Hook::Admit);
        for (index, entry) in self.stack.entries.iter().enumerate() {
            let merged = terms.clone();
            let result =
                self.call(index, entry, Question::Admit(request), &mut time, |evaluation, answer| {
                    check_admit(&entry.permissions, &merged, answer)?;
                    evaluation.check_limits(request, answer)
                });
            match result {
                CallResult::Answer(Answer::Allow(more)) => {
                    by.push(entry.decider());
                    merge(&mut terms, more);
                }
                CallResult::Answer(Answer::Deny(reason)) => {
                    return StackAnswer::Deny { policy: entry.label(), reason };
                }
                CallResult::Fault(fault) if entry.on_fault == OnFault::Deny => {
                    return StackAnswer::Faulted {
                        policy: entry.label(),
                        kind: fault.kind,
                        detail: fault.detail,
                    };
                }
                CallResult::Answer(_) | CallResult::Pass | CallResult::Suspended | CallResult::Fault(_) => {}
            }
        }
        if by.is_empty() {
            by.push(Decider::Baseline);
        }
        StackAnswer::Allow { by, terms }
    }

    /// Chooses devices. The first answer counts; never fails, since an error would fail the pod.
    pub fn place(mut self, request: &PlaceRequest) -> (Placement, Decider) {
        let request = &placement::without_ungrantable(self.node, request);
        let mut time = self.start(Hook::Place);
        for (index, entry) in self.stack.entries.iter().enumerate() {
            let result = self.call(index, entry, Question::Place(request), &mut time, |_, answer| {
                check_place(request, answer)
            });
            if let CallResult::Answer(Answer::Place(placement)) = result {
                return (placement, entry.decider());
            }
        }
        (placement::baseline(self.node, request), Decider::Baseline)
    }

    /// Judges a GPU reading. The first answer counts.
    pub fn triage(mut self, reading: &Reading) -> TriagedReading {
        let mut time = self.start(Hook::Triage);
        self.triage_within(reading, &mut time)
    }

    /// Judges several GPU readings in the time of one.
    pub fn triage_all(mut self, readings: &[Reading]) -> Vec<TriagedReading> {
        let mut time = self.start(Hook::Triage);
        let triaged = readings.iter().map(|reading| self.triage_within(reading, &mut time)).collect();
        if time.is_used_up {
            let (limit_s, readings) = (time.limit.as_secs(), readings.len());
            tracing::warn!(
                limit_s,
                readings,
                "the time for judging readings was used up: Berth's own rules judged those that were left"
            );
        }
        triaged
    }

    fn triage_within(&mut self, reading: &Reading, time: &mut StackTime) -> TriagedReading {
        let triaged = |answer, by| TriagedReading { reading: reading.clone(), answer, by };
        for (index, entry) in self.stack.entries.iter().enumerate() {
            if let CallResult::Answer(Answer::Triage(answer)) =
                self.call(index, entry, Question::Triage(reading), time, |_, answer| match answer {
                    Answer::Triage(answer) => check_reason(&answer.reason),
                    _ => Err("not a judgement of a reading".into()),
                })
            {
                return triaged(answer, entry.decider());
            }
        }
        let answer = baseline_triage(reading, &self.baseline.xids, self.baseline.quiet_ms);
        triaged(answer, Decider::Baseline)
    }

    fn call(
        &mut self,
        index: usize,
        entry: &StackEntry,
        question: Question<'_>,
        time: &mut StackTime,
        check: impl FnOnce(&Self, &Answer) -> Result<(), String>,
    ) -> CallResult {
        self.call_with_log(index, entry, question, time, check).0
    }

    /// Calls the policy of one entry, and returns the lines that it logged, too.
    pub(super) fn call_with_log(
        &mut self,
        index: usize,
        entry: &StackEntry,
        question: Question<'_>,
        time: &mut StackTime,
        check: impl FnOnce(&Self, &Answer) -> Result<(), String>,
    ) -> (CallResult, Vec<String>) {
        let hook = question.hook();
        if !self.node.has_hook(entry, hook) {
            return (CallResult::Pass, Vec::new());
        }
        if self.faults.is_suspended(index, entry) {
            self.record(entry, CallOutcome::Suspended, Cost::default());
            return (CallResult::Suspended, Vec::new());
        }
        let left = time.left_ms();
        if left == 0 {
            return (CallResult::Fault(self.time_used_up(hook, time)), Vec::new());
        }
        let wall_ms_max = CALL_MS_MAX * u64::from(self.time_factor);
        let call = Call {
            digest: &entry.digest,
            parameters: &entry.parameters,
            node: self.node,
            now: self.now,
            question,
            wall_ms_max: left.min(wall_ms_max),
        };
        let span = spans::policy(hook.as_str(), || entry.label());
        let began = Instant::now();
        let CallOutput { answer, cost, log_lines: lines } = span.in_scope(|| self.policies.call(call));
        time.add(index, began.elapsed());
        // It had less time than a call has, since others had used it.
        if left < wall_ms_max && answer.as_ref().is_err_and(|fault| fault.kind == FaultKind::Time) {
            spans::policy_answered(&span, "fault", Some(FaultKind::Time.as_str()), cost.fuel);
            return (CallResult::Fault(self.time_used_up(hook, time)), lines);
        }
        let checked = answer.and_then(|answer| match answer {
            None => Ok(None),
            Some(answer) => match check(self, &answer) {
                Ok(()) => Ok(Some(answer)),
                Err(mut detail) => {
                    // The message may quote an environment key of the guest, which can have a megabyte.
                    detail.truncate(detail.floor_char_boundary(REASON_BYTES_MAX));
                    Err(Fault { kind: FaultKind::Answer, detail })
                }
            },
        });
        let outcome = match &checked {
            Ok(None) => CallOutcome::Pass,
            Ok(Some(answer)) => CallOutcome::Answer(answer.clone()),
            Err(fault) => CallOutcome::Fault(fault.clone()),
        };
        let fault = checked.as_ref().err().map(|fault| fault.kind.as_str());
        spans::policy_answered(&span, outcome.as_str(), fault, cost.fuel);
        self.faults.record_call(index, entry, hook, &outcome, cost);
        self.record(entry, outcome, cost);
        let result = match checked {
            Ok(answer) => answer.map_or(CallResult::Pass, CallResult::Answer),
            Err(fault) => CallResult::Fault(fault),
        };
        (result, lines)
    }

    /// The fault of an entry that has no answer since the stack's time was used up. It is counted once for an
    /// evaluation, as a fault of the entry that took the longest.
    fn time_used_up(&mut self, hook: Hook, time: &mut StackTime) -> Fault {
        let (limit, stack) = (time.limit.as_secs(), self.stack);
        let used = time.slowest.and_then(|(index, took)| Some((index, took, stack.entries.get(index)?)));
        let Some((index, took, slowest)) = used else {
            // Unreachable: without a call no time is used.
            return Fault { kind: FaultKind::Time, detail: format!("the stack used up its {limit} s") };
        };
        let (took, label) = (took.as_millis(), slowest.label());
        if !std::mem::replace(&mut time.is_used_up, true) {
            let detail =
                format!("the stack used up its {limit} s, and this policy the most of it, {took} ms");
            let outcome = CallOutcome::Fault(Fault { kind: FaultKind::Time, detail });
            self.faults.record_call(index, slowest, hook, &outcome, Cost::default());
            self.faults.record_time_used_up(index, slowest, hook);
            self.record(slowest, outcome, Cost::default());
        }
        let detail = format!("no answer: the stack used up its {limit} s, {label} the most of it, {took} ms");
        Fault { kind: FaultKind::Time, detail }
    }

    fn record(&mut self, entry: &StackEntry, outcome: CallOutcome, cost: Cost) {
        self.calls.push(CallRecord {
            policy: entry.label(),
            digest: entry.digest.clone(),
            parameters: entry.parameters.clone(),
            outcome,
            cost,
        });
    }

    /// Checks that limits do not exceed the GPU, which the container would rely on. The limits of the requested
    /// devices themselves are always valid: the kernel checks whether they fit.
    fn check_limits(&self, request: &AdmitRequest, answer: &Answer) -> Result<(), String> {
        let Answer::Allow(Terms { limits, .. }) = answer else { return Ok(()) };
        let mut requested = BTreeMap::<&PartId, Taken>::new();
        for id in &request.devices {
            let sum = requested.entry(&id.part).or_default();
            if let Some(device) = self.node.device(&request.resource, id) {
                *sum = sum.plus(device.consumes);
            }
        }
        let grantable = |part: &PartState| self.node.memory_to_grant_mib(part);
        let memory = requested
            .iter()
            .map(|(id, sum)| self.node.part(id).map_or(0, grantable).max(sum.memory_mib))
            .max();
        let compute = requested.values().map(|sum| sum.compute_percent.max(100)).max();
        if let (Some(limit), Some(max)) = (limits.memory_mib, memory)
            && limit > max
        {
            return Err(format!("a limit of {limit} MiB where there are {max} MiB"));
        }
        match (limits.compute_percent, compute) {
            (Some(limit), Some(max)) if limit > max => {
                Err(format!("a limit of {limit} percent of the compute; at most {max}"))
            }
            _ => Ok(()),
        }
    }
}

/// Result of calling one entry's policy.
pub(super) enum CallResult {
    Pass,
    Suspended,
    Answer(Answer),
    Fault(Fault),
}

/// Checks an answer of an entry with these permissions; `merged` are the terms of the entries before it.
pub(crate) fn check_admit(permissions: &Permissions, merged: &Terms, answer: &Answer) -> Result<(), String> {
    match answer {
        Answer::Deny(_) if !permissions.deny => {
            Err("it denied, which its stack entry does not permit (permissions.deny)".into())
        }
        Answer::Deny(reason) => check_reason(reason),
        Answer::Allow(terms) => check_terms(permissions, merged, terms),
        Answer::Offer(_) | Answer::Place(_) | Answer::Triage(_) => Err("not a verdict".into()),
    }
}

/// Checks a reason, which is recorded and shown on terminals.
fn check_reason(reason: &str) -> Result<(), String> {
    if reason.len() > REASON_BYTES_MAX {
        return Err(format!("a reason of {} bytes; at most {REASON_BYTES_MAX}", reason.len()));
    }
    if reason.chars().any(char::is_control) {
        return Err("a reason with control characters".into());
    }
    Ok(())
}

fn check_terms(permissions: &Permissions, merged: &Terms, terms: &Terms) -> Result<(), String> {
    check_reason(&terms.reason)?;
    let mut environment: BTreeMap<&str, &str> =
        merged.environment.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    let mut own = BTreeSet::new();
    for (key, value) in &terms.environment {
        if !own.insert(key) {
            return Err(format!("environment key {key:?} twice"));
        }
        if let Some(what) = reserved_for(key) {
            return Err(format!(
                "the environment key {key:?} is reserved: it affects {what}; no policy may set it"
            ));
        }
        if !permissions.allows_environment(key) {
            return Err(format!(
                "its stack entry may not set the environment key {key:?} (permissions.environment)"
            ));
        }
        if value.len() > ENVIRONMENT_VALUE_BYTES_MAX || value.contains(|c: char| c.is_control() && c != '\t')
        {
            return Err(format!(
                "the value of {key} is over {ENVIRONMENT_VALUE_BYTES_MAX} bytes, or holds a control character"
            ));
        }
        if environment.insert(key, value).is_some_and(|other| other != value) {
            return Err(format!("environment key {key} has another value from an earlier policy"));
        }
    }
    if environment.len() > ENVIRONMENT_MAX {
        return Err(format!("{} environment keys; at most {ENVIRONMENT_MAX}", environment.len()));
    }
    let bytes: usize = environment.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > ENVIRONMENT_BYTES_MAX {
        return Err(format!("an environment of {bytes} bytes; at most {ENVIRONMENT_BYTES_MAX}"));
    }
    Ok(())
}

fn merge(terms: &mut Terms, more: Terms) {
    terms.environment.extend(more.environment);
    terms.environment.sort();
    terms.environment.dedup();
    terms.limits = terms.limits.min(more.limits);
    if !more.reason.is_empty() && terms.reason.len() + more.reason.len() < REASON_BYTES_MAX {
        if !terms.reason.is_empty() {
            terms.reason.push_str("; ");
        }
        terms.reason.push_str(&more.reason);
    }
}

fn check_place(request: &PlaceRequest, answer: &Answer) -> Result<(), String> {
    match answer {
        Answer::Place(placement) => check_placement(request, placement),
        _ => Err("not a placement".into()),
    }
}

/// The outcome of one request of a claim, all of whose requests are granted or none.
pub(crate) fn prepared_outcome(
    request: &RequestToPrepare,
    prepared: &Result<Prepared, CommandError>,
) -> Outcome {
    let id = prepared.as_ref().map(|prepared| {
        let is_of_request = |a: &&Arc<Allocation>| {
            a.origin.claim().is_some()
                && (&a.resource, &a.devices) == (&request.devices.resource, &request.devices.devices)
        };
        prepared.allocations.iter().find(is_of_request).map(|allocation| allocation.id)
    });
    outcome(request.answer.clone(), id.map_err(ToString::to_string))
}

/// The outcome of an Allocate: the stack's answer, and the keeper's, which is the new allocation's id or why there is
/// none.
pub(crate) fn outcome(answer: StackAnswer, granted: Result<Option<AllocationId>, String>) -> Outcome {
    match (answer, granted) {
        (StackAnswer::Deny { policy: by, reason }, _) => Outcome::Denied { by, reason },
        (StackAnswer::Faulted { policy: by, kind, detail }, _) => {
            Outcome::Denied { by, reason: format!("it failed ({}): {detail}", kind.as_str()) }
        }
        (StackAnswer::NotCalled | StackAnswer::Allow { .. }, Err(reason)) => Outcome::Refused { reason },
        (StackAnswer::NotCalled, Ok(allocation)) => {
            Outcome::Granted(Grant { allocation, by: vec![Decider::Baseline], terms: Terms::default() })
        }
        (StackAnswer::Allow { by, terms }, Ok(allocation)) => {
            Outcome::Granted(Grant { allocation, by, terms })
        }
    }
}

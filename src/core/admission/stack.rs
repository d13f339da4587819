//! Asks the stack, entry by entry, and holds every answer against the offer, the free devices and
//! the entry's permissions (I8). What breaks a rule is a fault; the baseline answers last (I9).

use super::baseline::{BASELINE, Baseline};
use super::faults::Faults;
use crate::spans;
use berth_kernel::command::StackAnswer;
use berth_kernel::compare::check_placement;
use berth_kernel::decision::{CallNote, Cost, Said};
use berth_kernel::gpu::Reading;
use berth_kernel::health::baseline_triage;
use berth_kernel::ledger::Ledger;
use berth_kernel::names::PartId;
use berth_kernel::part_state::{PartState, Taken};
use berth_kernel::placement;
use berth_kernel::policy::{
    AdmitRequest, Answer, Call, ENVIRONMENT_BYTES_MAX, ENVIRONMENT_MAX, ENVIRONMENT_VALUE_BYTES_MAX, Fault,
    FaultKind, PlaceRequest, Placement, Question, REASON_BYTES_MAX, Terms, TriageAnswer,
};
use berth_kernel::ports::{Aloud, Policies};
use berth_kernel::stack::{OnFault, Stack, StackEntry};
use berth_kernel::time::Now;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Wall time of one call where the kubelet waits, milliseconds; fuel stops a busy guest long before.
pub const CALL_MS_MAX: u64 = 500;
/// Wall time of a whole stack: the kubelet admits no other pod meanwhile.
pub const STACK_TIME_MAX: Duration = Duration::from_secs(1);

/// One walk over a stack, on one snapshot.
pub struct Walk<'a> {
    /// Who is asked.
    pub stack: &'a Stack,
    /// How.
    pub policies: &'a dyn Policies,
    /// What they see.
    pub node: &'a Arc<Ledger>,
    /// When.
    pub now: Now,
    /// Their record.
    pub faults: &'a mut Faults,
    /// Who answers if all pass.
    pub baseline: &'a Baseline,
    /// Memory that may be granted, percent.
    pub overcommit_percent: u32,
    /// What each policy said, in order.
    pub calls: &'a mut Vec<CallNote>,
    /// Calls and the whole walk may take so many times as long by the wall: 1 where the kubelet waits.
    pub leisure: u32,
}

impl Walk<'_> {
    /// May these devices be granted? All must allow.
    pub fn admit(mut self, request: &AdmitRequest) -> StackAnswer {
        let (mut by, mut terms) = (Vec::new(), Terms::default());
        let deadline = Instant::now() + STACK_TIME_MAX * self.leisure;
        for (place, entry) in self.stack.entries.iter().enumerate() {
            let merged = terms.clone();
            let asked = self.ask(place, entry, Question::Admit(request), deadline, |walk, answer| {
                check_admit(entry, &merged, answer)?;
                walk.check_limits(request, answer)
            });
            match asked {
                Asked::Answer(Answer::Allow(more)) => {
                    by.push(entry.label());
                    merge(&mut terms, more);
                }
                Asked::Answer(Answer::Deny(reason)) => {
                    return StackAnswer::Deny { policy: entry.label(), reason };
                }
                Asked::Fault(fault) if entry.on_fault == OnFault::Deny => {
                    return StackAnswer::Faulted {
                        policy: entry.label(),
                        kind: fault.kind,
                        detail: fault.detail,
                    };
                }
                Asked::Answer(_) | Asked::Pass | Asked::Suspended | Asked::Fault(_) => {}
            }
        }
        if by.is_empty() {
            by.push(BASELINE.into());
        }
        StackAnswer::Allow { by, terms }
    }

    /// Which devices? The first answer counts; never an error, since that would fail the pod.
    pub fn place(mut self, request: &PlaceRequest) -> (Placement, String) {
        let request = &placement::narrowed(self.node, request, self.overcommit_percent);
        let deadline = Instant::now() + STACK_TIME_MAX * self.leisure;
        for (place, entry) in self.stack.entries.iter().enumerate() {
            let asked = self.ask(place, entry, Question::Place(request), deadline, |_, answer| {
                check_place(request, answer)
            });
            if let Asked::Answer(Answer::Place(placement)) = asked {
                return (placement, entry.label());
            }
        }
        (placement::baseline(self.node, request), BASELINE.into())
    }

    /// What does this reading mean? The first answer counts.
    pub fn triage(mut self, reading: &Reading) -> (TriageAnswer, String) {
        let deadline = Instant::now() + STACK_TIME_MAX * self.leisure;
        for (place, entry) in self.stack.entries.iter().enumerate() {
            if let Asked::Answer(Answer::Triage(answer)) =
                self.ask(place, entry, Question::Triage(reading), deadline, |_, answer| match answer {
                    Answer::Triage(answer) => check_reason(&answer.reason),
                    _ => Err("not a word on health".into()),
                })
            {
                return (answer, entry.label());
            }
        }
        let answer = baseline_triage(reading, &self.baseline.ignored_xids, self.baseline.quiet_ms);
        (answer, BASELINE.into())
    }

    fn ask(
        &mut self,
        place: usize,
        entry: &StackEntry,
        question: Question<'_>,
        deadline: Instant,
        check: impl FnOnce(&Self, &Answer) -> Result<(), String>,
    ) -> Asked {
        self.ask_with_log(place, entry, question, deadline, check).0
    }

    /// Asks one entry, and answers the lines that it logged, too.
    pub(super) fn ask_with_log(
        &mut self,
        place: usize,
        entry: &StackEntry,
        question: Question<'_>,
        deadline: Instant,
        check: impl FnOnce(&Self, &Answer) -> Result<(), String>,
    ) -> (Asked, Vec<String>) {
        let hook = question.hook();
        let wanted = self.node.policies.get(&entry.digest).is_none_or(|v| v.hooks.contains(&hook));
        if !wanted {
            return (Asked::Pass, Vec::new());
        }
        if self.faults.suspended(place, entry) {
            self.note(entry, Said::Suspended, Cost::default());
            return (Asked::Suspended, Vec::new());
        }
        let left =
            u64::try_from(deadline.saturating_duration_since(Instant::now()).as_millis()).unwrap_or(u64::MAX);
        let call = Call {
            digest: &entry.digest,
            parameters: &entry.parameters,
            node: self.node,
            now: self.now,
            question,
            wall_ms_max: left.min(CALL_MS_MAX * u64::from(self.leisure)),
        };
        let span = spans::policy(hook.as_str(), || entry.label());
        let Aloud { told, cost, said: lines } = if left == 0 {
            let detail = format!("the stack used up its {} s", (STACK_TIME_MAX * self.leisure).as_secs());
            Aloud {
                told: Err(Fault { kind: FaultKind::Time, detail }),
                cost: Cost::default(),
                said: Vec::new(),
            }
        } else {
            span.in_scope(|| self.policies.ask_aloud(call))
        };
        let checked = told.and_then(|answer| match answer {
            None => Ok(None),
            Some(answer) => match check(self, &answer) {
                Ok(()) => Ok(Some(answer)),
                Err(mut detail) => {
                    // It may quote the guest, who has a megabyte for an environment key.
                    detail.truncate(detail.floor_char_boundary(REASON_BYTES_MAX));
                    Err(Fault { kind: FaultKind::Answer, detail })
                }
            },
        });
        let said = match &checked {
            Ok(None) => Said::Pass,
            Ok(Some(answer)) => Said::Answer(answer.clone()),
            Err(fault) => Said::Fault(fault.clone()),
        };
        let fault = checked.as_ref().err().map(|fault| fault.kind.as_str());
        spans::policy_answered(&span, said.word(), fault, cost.fuel);
        self.faults.take(place, entry, hook, &said, cost);
        self.note(entry, said, cost);
        let asked = match checked {
            Ok(answer) => answer.map_or(Asked::Pass, Asked::Answer),
            Err(fault) => Asked::Fault(fault),
        };
        (asked, lines)
    }

    fn note(&mut self, entry: &StackEntry, said: Said, cost: Cost) {
        self.calls.push(CallNote {
            policy: entry.label(),
            digest: entry.digest.clone(),
            parameters: entry.parameters.clone(),
            said,
            cost,
        });
    }

    /// A container that is told more than its GPU has would believe it. What the devices asked for take
    /// may be said in any case: whether they fit is the kernel's to judge.
    fn check_limits(&self, request: &AdmitRequest, answer: &Answer) -> Result<(), String> {
        let Answer::Allow(Terms { limits, .. }) = answer else { return Ok(()) };
        let mut asked = BTreeMap::<&PartId, Taken>::new();
        for id in &request.devices {
            let sum = asked.entry(&id.part).or_default();
            if let Some(device) = self.node.device(&request.resource, id) {
                *sum = sum.plus(device.consumes);
            }
        }
        let has = |part: &PartState| part.memory_to_grant_mib(self.overcommit_percent);
        let memory =
            asked.iter().map(|(id, sum)| self.node.part(id).map_or(0, has).max(sum.memory_mib)).max();
        let compute = asked.values().map(|sum| sum.compute_percent.max(100)).max();
        if let (Some(said), Some(most)) = (limits.memory_mib, memory)
            && said > most
        {
            return Err(format!("a limit of {said} MiB where there are {most} MiB"));
        }
        match (limits.compute_percent, compute) {
            (Some(said), Some(most)) if said > most => {
                Err(format!("a limit of {said} percent of the compute; at most {most}"))
            }
            _ => Ok(()),
        }
    }
}

/// What came of asking one entry.
pub(super) enum Asked {
    Pass,
    Suspended,
    Answer(Answer),
    Fault(Fault),
}

fn check_admit(entry: &StackEntry, merged: &Terms, answer: &Answer) -> Result<(), String> {
    match answer {
        Answer::Deny(_) if !entry.permissions.deny => {
            Err("it denies, and its stack entry may not (permissions.deny)".into())
        }
        Answer::Deny(reason) => check_reason(reason),
        Answer::Allow(terms) => check_terms(entry, merged, terms),
        Answer::Offer(_) | Answer::Place(_) | Answer::Triage(_) => Err("not a verdict".into()),
    }
}

/// A reason is kept in records and shown on terminals.
fn check_reason(reason: &str) -> Result<(), String> {
    if reason.len() > REASON_BYTES_MAX {
        return Err(format!("a reason of {} bytes; at most {REASON_BYTES_MAX}", reason.len()));
    }
    if reason.chars().any(char::is_control) {
        return Err("a reason with control characters".into());
    }
    Ok(())
}

fn check_terms(entry: &StackEntry, merged: &Terms, terms: &Terms) -> Result<(), String> {
    check_reason(&terms.reason)?;
    let mut all: BTreeMap<&str, &str> =
        merged.environment.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    let mut own = BTreeSet::new();
    for (key, value) in &terms.environment {
        if !own.insert(key) {
            return Err(format!("environment key {key:?} twice"));
        }
        if !entry.permissions.allows_environment(key) {
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
        if all.insert(key, value).is_some_and(|other| other != value) {
            return Err(format!("environment key {key} has another value from an earlier policy"));
        }
    }
    if all.len() > ENVIRONMENT_MAX {
        return Err(format!("{} environment keys; at most {ENVIRONMENT_MAX}", all.len()));
    }
    let bytes: usize = all.iter().map(|(key, value)| key.len() + value.len()).sum();
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

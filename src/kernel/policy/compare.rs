//! Compares the answer of another policy with the outcome of a recorded question.
//!
//! A candidate is one policy. If it passes, the stack would have called other policies: that is neither the
//! same nor different, and is counted separately.

use crate::grants::allocation::Limits;
use crate::hardware::triage::TriageAnswer;
use crate::ids::names::{DeviceId, PartId};
use crate::policy::decider::Decider;
use crate::policy::decision::{CallOutcome, CallRecord, Grant, Outcome, OwnedQuestion};
use crate::policy::hooks::{Answer, Fault, PlaceRequest, Placement, REASON_BYTES_MAX, Terms};
use crate::sharing::offer::{Consumes, OfferLine, PartOffer};
use std::collections::{BTreeMap, BTreeSet};

/// The result of comparing a candidate's answer with the outcome of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerComparison {
    /// The effect is the same: the same parts, terms, severity or offers. Reasons may differ.
    Same,
    /// The effect differs; the text says how.
    Differs(String),
    /// The candidate denies what was granted, with this reason.
    Denies(String),
    /// The candidate passes.
    Passes,
    /// The candidate fails, with this error message.
    Fails(String),
}

/// Compares the result of a call of the policy `name` with the answer of the version that took part in the
/// decision, or else with the decision's outcome. The answer was not checked against a live node; whatever
/// can be checked without one is checked here.
#[must_use]
pub fn compare(
    question: &OwnedQuestion,
    calls: &[CallRecord],
    outcome: &Outcome,
    name: &str,
    result: &Result<Option<Answer>, Fault>,
) -> AnswerComparison {
    let own = calls.iter().find(|call| call.policy.split('@').next() == Some(name));
    match own.map(|call| &call.outcome) {
        Some(CallOutcome::Answer(answer)) => {
            match compare_outcome(question, &outcome_of(answer, name), result, true) {
                // Another policy or the kernel has not granted it.
                AnswerComparison::Denies(message) if !matches!(outcome, Outcome::Granted(_)) => {
                    AnswerComparison::Differs(message)
                }
                comparison => comparison,
            }
        }
        _ => compare_outcome(question, outcome, result, false),
    }
}

/// The outcome of a policy's answer in a stack of that policy alone.
fn outcome_of(answer: &Answer, name: &str) -> Outcome {
    let by = || Decider::from(name);
    match answer {
        Answer::Offer(offers) => Outcome::Offered(offers.parts.iter().map(|o| (o.clone(), by())).collect()),
        Answer::Place(placement) => Outcome::Placed(placement.clone(), by()),
        Answer::Deny(reason) => Outcome::Denied { by: name.to_owned(), reason: reason.clone() },
        Answer::Triage(answer) => Outcome::Triaged(answer.clone(), by()),
        Answer::Allow(terms) => {
            Outcome::Granted(Grant { allocation: None, by: vec![by()], terms: terms.clone() })
        }
    }
}

fn compare_outcome(
    question: &OwnedQuestion,
    outcome: &Outcome,
    result: &Result<Option<Answer>, Fault>,
    is_own_answer: bool,
) -> AnswerComparison {
    let answer = match result {
        Err(fault) => return AnswerComparison::Fails(fault.to_string()),
        Ok(None) => return AnswerComparison::Passes,
        Ok(Some(answer)) => answer,
    };
    let difference = match (answer, outcome) {
        (Answer::Place(placement), Outcome::Placed(before, _)) => {
            if let OwnedQuestion::Place(request) = question
                && let Err(error) = check_placement(request, placement)
            {
                return AnswerComparison::Fails(error);
            }
            placement_difference(before, placement)
        }
        (Answer::Allow(terms), Outcome::Granted(grant)) if is_own_answer => {
            terms_difference(&grant.terms, terms)
        }
        (Answer::Allow(terms), Outcome::Granted(grant)) => {
            terms_difference(&grant.terms, &merged_terms(&grant.terms, terms))
        }
        (Answer::Allow(_), Outcome::Refused { .. }) | (Answer::Deny(_), Outcome::Denied { .. }) => None,
        // All policies must allow, so another policy's denial stands.
        (Answer::Allow(_), Outcome::Denied { .. }) if !is_own_answer => None,
        (Answer::Allow(_), Outcome::Denied { by, reason }) => {
            Some(format!("allows what {by} denied: {reason}"))
        }
        (Answer::Deny(reason), Outcome::Granted(_)) => {
            return AnswerComparison::Denies(format!("denies: {reason}"));
        }
        (Answer::Deny(reason), _) => Some(format!("denies: {reason}")),
        (Answer::Offer(offers), Outcome::Offered(before)) => offer_difference(before, &offers.parts),
        (Answer::Triage(triage), Outcome::Triaged(before, _)) => triage_difference(before, triage),
        _ => return AnswerComparison::Fails("the answer is for another hook".into()),
    };
    difference.map_or(AnswerComparison::Same, AnswerComparison::Differs)
}

/// Checks that a placement has the requested number of distinct available devices, and all required ones.
///
/// # Errors
/// The violated rule.
pub fn check_placement(request: &PlaceRequest, placement: &Placement) -> Result<(), String> {
    let Placement { devices, reason } = placement;
    let available: BTreeSet<&DeviceId> = request.available.iter().collect();
    let chosen: BTreeSet<&DeviceId> = devices.iter().collect();
    if chosen.len() != devices.len() {
        return Err("a device is listed twice".into());
    }
    if devices.len() != request.size {
        return Err(format!("{} devices instead of {}", devices.len(), request.size));
    }
    if let Some(unavailable) = chosen.iter().find(|id| !available.contains(*id)) {
        return Err(format!("device {unavailable} is not available"));
    }
    if let Some(missing) = request.required.iter().find(|id| !chosen.contains(id)) {
        return Err(format!("the required device {missing} is missing"));
    }
    if reason.len() > REASON_BYTES_MAX {
        return Err(format!("a reason of {} bytes; at most {REASON_BYTES_MAX}", reason.len()));
    }
    // `explain` shows it on terminals.
    if reason.chars().any(char::is_control) {
        return Err("a reason with control characters".into());
    }
    Ok(())
}

/// Compares parts only: the share of a part makes no difference.
fn placement_difference(before: &Placement, now: &Placement) -> Option<String> {
    let parts = |placement: &Placement| {
        let mut counts = BTreeMap::<PartId, u32>::new();
        for device in &placement.devices {
            *counts.entry(device.part.clone()).or_default() += 1;
        }
        counts
    };
    let (before, now) = (parts(before), parts(now));
    (before != now)
        .then(|| format!("chooses {} instead of {}", describe_parts(&now), describe_parts(&before)))
}

fn describe_parts(parts: &BTreeMap<PartId, u32>) -> String {
    let one = |(part, count): (&PartId, &u32)| {
        if *count == 1 { part.to_string() } else { format!("{part} x{count}") }
    };
    parts.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// The terms of a grant merged with those of one more policy.
fn merged_terms(granted: &Terms, more: &Terms) -> Terms {
    let mut environment: BTreeMap<String, String> = granted.environment.iter().cloned().collect();
    environment.extend(more.environment.iter().cloned());
    Terms {
        environment: environment.into_iter().collect(),
        limits: granted.limits.min(more.limits),
        reason: String::new(),
    }
}

fn terms_difference(before: &Terms, now: &Terms) -> Option<String> {
    let differs = |what: &str, before: String, now: String| {
        (before != now).then(|| format!("{what} {now} instead of {before}"))
    };
    let mib = |limits: Limits| limits.memory_mib.map_or("none".to_owned(), |n| format!("{n} MiB"));
    let percent = |limits: Limits| limits.compute_percent.map_or("none".to_owned(), |n| format!("{n} %"));
    let memory = differs("memory limit", mib(before.limits), mib(now.limits));
    let compute = differs("compute limit", percent(before.limits), percent(now.limits));
    let environment = |pairs: &[(String, String)]| pairs.iter().cloned().collect::<BTreeMap<_, _>>();
    let (old, new) = (environment(&before.environment), environment(&now.environment));
    let keys: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let variables = keys.into_iter().filter_map(|key| {
        let value = |environment: &BTreeMap<String, String>| {
            environment.get(key).map_or_else(|| "nothing".into(), |v| format!("{v:?}"))
        };
        differs(&format!("{key} is"), value(&old), value(&new))
    });
    join(memory.into_iter().chain(compute).chain(variables))
}

/// Ignores parts without an offer of the candidate, which the stack would pass to the next policy.
fn offer_difference(before: &[(PartOffer, Decider)], now: &[PartOffer]) -> Option<String> {
    let old: BTreeMap<&PartId, &[OfferLine]> =
        before.iter().map(|(offer, _)| (&offer.part, offer.lines.as_slice())).collect();
    join(now.iter().filter_map(|offer| {
        let before = old.get(&offer.part).copied();
        let differs = before.is_none_or(|lines| !same_lines(lines, &offer.lines));
        let before = describe_lines(before.unwrap_or_default());
        let now = describe_lines(&offer.lines);
        differs.then(|| format!("offers {} as {now} instead of {before}", offer.part))
    }))
}

fn join(differences: impl Iterator<Item = String>) -> Option<String> {
    let differences: Vec<String> = differences.collect();
    (!differences.is_empty()).then(|| differences.join("; "))
}

fn same_lines(a: &[OfferLine], b: &[OfferLine]) -> bool {
    let sorted = |lines: &[OfferLine]| {
        let mut lines = lines.to_vec();
        lines.sort_by(|a, b| a.resource.cmp(&b.resource));
        lines
    };
    sorted(a) == sorted(b)
}

fn describe_lines(lines: &[OfferLine]) -> String {
    if lines.is_empty() {
        return "nothing".into();
    }
    let one = |line: &OfferLine| match line.consumes {
        Consumes::Whole => format!("{} {} (whole)", line.count, line.resource),
        Consumes::Slice { memory_mib, compute_percent } => {
            format!("{} {} ({memory_mib} MiB, {compute_percent} %)", line.count, line.resource)
        }
    };
    lines.iter().map(one).collect::<Vec<_>>().join(" + ")
}

fn triage_difference(before: &TriageAnswer, now: &TriageAnswer) -> Option<String> {
    let describe = |answer: &TriageAnswer| match (answer.severity.as_str(), answer.again_after_s) {
        (severity, Some(seconds)) => format!("{severity} for {seconds} s"),
        (severity, None) => format!("{severity} until an operator marks it healthy"),
    };
    let (before, now) = (describe(before), describe(now));
    (before != now).then(|| format!("{now} instead of {before}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::triage::Severity;
    use crate::ids::names::{Digest, Resource};
    use crate::policy::decision::Cost;
    use crate::policy::hooks::{FaultKind, OfferAnswer};

    fn share(part: &str, n: u32) -> DeviceId {
        DeviceId { part: PartId::parse(part).unwrap(), share: Some(n) }
    }

    fn placement(devices: &[(&str, u32)]) -> Placement {
        Placement { devices: devices.iter().map(|(p, n)| share(p, *n)).collect(), reason: String::new() }
    }

    fn place(available: &[(&str, u32)], size: usize) -> OwnedQuestion {
        let resource = Resource::parse("nvidia.com/gpu.shared").unwrap();
        let available = available.iter().map(|(p, n)| share(p, *n)).collect();
        OwnedQuestion::Place(PlaceRequest { resource, available, required: Vec::new(), size })
    }

    /// Compares the answer of a policy that took no part in the decision.
    fn compare(
        question: &OwnedQuestion,
        outcome: &Outcome,
        result: &Result<Option<Answer>, Fault>,
    ) -> AnswerComparison {
        super::compare(question, &[], outcome, "new", result)
    }

    fn call(policy: &str, outcome: CallOutcome) -> CallRecord {
        let digest = Digest::parse(&"a".repeat(64)).unwrap();
        CallRecord { policy: policy.into(), digest, parameters: "{}".into(), outcome, cost: Cost::default() }
    }

    #[test]
    fn another_version_of_a_policy_is_compared_with_that_policys_answer() {
        let limits = Limits { memory_mib: Some(4096), compute_percent: None };
        let memory = Terms { limits, ..Terms::default() };
        let calls = [
            call("quota@1", CallOutcome::Answer(Answer::Allow(Terms::default()))),
            call("memory@1", CallOutcome::Answer(Answer::Allow(memory.clone()))),
        ];
        let granted = Outcome::Granted(Grant { terms: memory.clone(), ..Grant::default() });
        let question = place(&[], 0);
        let same = |name: &str, terms: Terms| {
            super::compare(&question, &calls, &granted, name, &Ok(Some(Answer::Allow(terms))))
        };
        assert_eq!(same("quota", Terms::default()), AnswerComparison::Same);
        assert_eq!(same("memory", memory), AnswerComparison::Same);
        assert_eq!(text_of(same("memory", Terms::default())), "memory limit none instead of 4096 MiB");
        let deny = Ok(Some(Answer::Deny("no".into())));
        let compared = |outcome| super::compare(&question, &calls, outcome, "quota", &deny);
        assert_eq!(compared(&granted), AnswerComparison::Denies("denies: no".into()));
        let refused = Outcome::Refused { reason: "held".into() };
        assert_eq!(compared(&refused), AnswerComparison::Differs("denies: no".into()));
        let denied = Outcome::Denied { by: "quota@1".into(), reason: "no".into() };
        let calls = [call("quota@1", CallOutcome::Answer(Answer::Deny("no".into())))];
        let allow = Ok(Some(Answer::Allow(Terms::default())));
        assert_eq!(super::compare(&question, &calls, &denied, "memory", &allow), AnswerComparison::Same);
        assert_eq!(
            text_of(super::compare(&question, &calls, &denied, "quota", &allow)),
            "allows what quota denied: no"
        );
    }

    fn text_of(compared: AnswerComparison) -> String {
        match compared {
            AnswerComparison::Differs(text)
            | AnswerComparison::Denies(text)
            | AnswerComparison::Fails(text) => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn another_share_of_the_same_gpu_is_no_difference() {
        let question = place(&[("GPU-a", 0), ("GPU-a", 1), ("GPU-b", 0)], 1);
        let before = Outcome::Placed(placement(&[("GPU-a", 0)]), "baseline".into());
        let answered = |devices| Ok(Some(Answer::Place(placement(devices))));
        assert_eq!(compare(&question, &before, &answered(&[("GPU-a", 1)])), AnswerComparison::Same);
        let difference = text_of(compare(&question, &before, &answered(&[("GPU-b", 0)])));
        assert_eq!(difference, "chooses GPU-b instead of GPU-a");
        let failure = text_of(compare(&question, &before, &answered(&[("GPU-c", 0)])));
        assert_eq!(failure, "device GPU-c::0 is not available");
        assert_eq!(compare(&question, &before, &Ok(None)), AnswerComparison::Passes);
    }

    #[test]
    fn terms_are_compared_one_by_one() {
        let limits = Limits { memory_mib: Some(1024), compute_percent: None };
        let granted = Terms { limits, environment: vec![("A".into(), "1".into())], ..Terms::default() };
        let question = place(&[], 0);
        let terms = Terms { limits, environment: vec![("A".into(), "1".into())], reason: "x".into() };
        let granted = Outcome::Granted(Grant { terms: granted, ..Grant::default() });
        assert_eq!(compare(&question, &granted, &Ok(Some(Answer::Allow(terms)))), AnswerComparison::Same);
        let tighter = Limits { memory_mib: Some(512), compute_percent: None };
        let environment = vec![("B".into(), "2".into())];
        let other = Answer::Allow(Terms { environment, limits: tighter, ..Terms::default() });
        assert_eq!(
            text_of(compare(&question, &granted, &Ok(Some(other)))),
            "memory limit 512 MiB instead of 1024 MiB; B is \"2\" instead of nothing"
        );
        assert_eq!(
            compare(&question, &granted, &Ok(Some(Answer::Deny("no".into())))),
            AnswerComparison::Denies("denies: no".into())
        );
    }

    #[test]
    fn an_admission_is_compared_with_the_stacks_answer_not_with_the_kernels_refusal() {
        let question = place(&[], 0);
        let refused = Outcome::Refused { reason: "held".into() };
        let allow = Ok(Some(Answer::Allow(Terms::default())));
        assert_eq!(compare(&question, &refused, &allow), AnswerComparison::Same);
        let deny = Ok(Some(Answer::Deny("no".into())));
        let denies = AnswerComparison::Differs("denies: no".into());
        assert_eq!(compare(&question, &refused, &deny), denies, "it was not granted either");
        let denied = Outcome::Denied { by: "quota@1".into(), reason: "too many".into() };
        assert_eq!(
            compare(&question, &denied, &allow),
            AnswerComparison::Same,
            "another policy's denial stands"
        );
        assert_eq!(
            compare(&question, &denied, &Ok(Some(Answer::Deny("mine".into())))),
            AnswerComparison::Same
        );
    }

    #[test]
    fn only_the_parts_that_the_candidate_offers_are_compared() {
        let part = |id: &str| PartId::parse(id).unwrap();
        let line = |count| OfferLine {
            resource: Resource::parse("nvidia.com/gpu").unwrap(),
            count,
            consumes: Consumes::Whole,
        };
        let offer = |id: &str, count| PartOffer { part: part(id), lines: vec![line(count)] };
        let before = Outcome::Offered(vec![(offer("GPU-a", 1), "x".into()), (offer("GPU-b", 1), "x".into())]);
        let answered = |parts| Ok(Some(Answer::Offer(OfferAnswer { parts, again_after_s: None })));
        assert_eq!(
            compare(&OwnedQuestion::Offer, &before, &answered(vec![offer("GPU-b", 1)])),
            AnswerComparison::Same
        );
        assert_eq!(
            text_of(compare(&OwnedQuestion::Offer, &before, &answered(vec![offer("GPU-b", 2)]))),
            "offers GPU-b as 2 nvidia.com/gpu (whole) instead of 1 nvidia.com/gpu (whole)"
        );
    }

    #[test]
    fn severity_and_duration_are_compared() {
        let answer =
            |severity, again_after_s| TriageAnswer { severity, reason: String::new(), again_after_s };
        let before = Outcome::Triaged(answer(Severity::Unhealthy, None), "baseline".into());
        let answered = Ok(Some(Answer::Triage(answer(Severity::Degraded, Some(60)))));
        assert_eq!(
            text_of(compare(&OwnedQuestion::Offer, &before, &answered)),
            "degraded for 60 s instead of unhealthy until an operator marks it healthy"
        );
        let fault = Err(Fault { kind: FaultKind::Trap, detail: "boom".into() });
        assert_eq!(text_of(compare(&OwnedQuestion::Offer, &before, &fault)), "boom (trap)");
    }
}

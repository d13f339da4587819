//! What another policy would have answered, held against what came of a question.
//!
//! A candidate is one policy. Where it passes, others would have been asked: that is neither the
//! same nor different, and counted by itself.

use super::decision::{Asked, CallNote, Grant, Outcome, Said};
use super::names::{DeviceId, PartId};
use super::offer::{Consumes, OfferLine, PartOffer};
use super::policy::{Answer, Fault, PlaceRequest, Placement, REASON_BYTES_MAX, Terms, TriageAnswer};
use std::collections::{BTreeMap, BTreeSet};

/// How a candidate's answer stands to what came of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Compared {
    /// To the same effect: the same parts, terms, severity or offers. Reasons may differ.
    Same,
    /// Otherwise, in words.
    Differs(String),
    /// It leaves the answer to others.
    Passes,
    /// It fails, in words.
    Fails(String),
}

/// Compares the answer of the policy `name`. Where a version of it had a word in the decision, with that
/// word; else with what came of the question. The answer was not checked against a live node; what can
/// be known without is.
#[must_use]
pub fn compare(
    asked: &Asked,
    calls: &[CallNote],
    outcome: &Outcome,
    name: &str,
    told: &Result<Option<Answer>, Fault>,
) -> Compared {
    let own = calls.iter().find(|call| call.policy.split('@').next() == Some(name));
    match own.map(|call| &call.said) {
        Some(Said::Answer(answer)) => against(asked, &alone(answer, name), told, true),
        _ => against(asked, outcome, told, false),
    }
}

/// What would have come of a policy's answer if nobody else had been asked.
fn alone(answer: &Answer, name: &str) -> Outcome {
    let by = || name.to_owned();
    match answer {
        Answer::Offer(offers) => Outcome::Offered(offers.parts.iter().map(|o| (o.clone(), by())).collect()),
        Answer::Place(placement) => Outcome::Placed(placement.clone(), by()),
        Answer::Deny(reason) => Outcome::Denied { by: by(), reason: reason.clone() },
        Answer::Triage(answer) => Outcome::Triaged(answer.clone(), by()),
        Answer::Allow(terms) => Outcome::Granted(Grant {
            allocation: None,
            by: vec![by()],
            reason: terms.reason.clone(),
            limits: terms.limits,
            environment: terms.environment.clone(),
        }),
    }
}

fn against(asked: &Asked, outcome: &Outcome, told: &Result<Option<Answer>, Fault>, own: bool) -> Compared {
    let answer = match told {
        Err(fault) => return Compared::Fails(fault.to_string()),
        Ok(None) => return Compared::Passes,
        Ok(Some(answer)) => answer,
    };
    let difference = match (answer, outcome) {
        (Answer::Place(placement), Outcome::Placed(before, _)) => {
            if let Asked::Place(request) = asked
                && let Err(wrong) = check_placement(request, placement)
            {
                return Compared::Fails(wrong);
            }
            placed(before, placement)
        }
        (Answer::Allow(terms), Outcome::Granted(grant)) if own => granted(grant, terms),
        (Answer::Allow(terms), Outcome::Granted(grant)) => granted(grant, &beside(grant, terms)),
        (Answer::Allow(_), Outcome::Refused { .. }) | (Answer::Deny(_), Outcome::Denied { .. }) => None,
        // All must allow: another's denial stands whatever this one says.
        (Answer::Allow(_), Outcome::Denied { .. }) if !own => None,
        (Answer::Allow(_), Outcome::Denied { by, reason }) => {
            Some(format!("allows what {by} denied: {reason}"))
        }
        (Answer::Deny(reason), _) => Some(format!("denies: {reason}")),
        (Answer::Offer(offers), Outcome::Offered(before)) => offered(before, &offers.parts),
        (Answer::Triage(triage), Outcome::Triaged(before, _)) => triaged(before, triage),
        _ => return Compared::Fails("an answer to another question".into()),
    };
    difference.map_or(Compared::Same, Compared::Differs)
}

/// Whether a placement is one: so many different devices of those available, the required among them.
///
/// # Errors
/// In words, what it breaks.
pub fn check_placement(request: &PlaceRequest, placement: &Placement) -> Result<(), String> {
    let Placement { devices, reason } = placement;
    let available: BTreeSet<&DeviceId> = request.available.iter().collect();
    let chosen: BTreeSet<&DeviceId> = devices.iter().collect();
    if chosen.len() != devices.len() {
        return Err("a device twice".into());
    }
    if devices.len() != request.size {
        return Err(format!("{} devices instead of {}", devices.len(), request.size));
    }
    if let Some(strange) = chosen.iter().find(|id| !available.contains(*id)) {
        return Err(format!("device {strange} is not available"));
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

/// Which share of a part it is makes no difference.
fn placed(before: &Placement, now: &Placement) -> Option<String> {
    let parts = |placement: &Placement| {
        let mut counts = BTreeMap::<PartId, u32>::new();
        for device in &placement.devices {
            *counts.entry(device.part.clone()).or_default() += 1;
        }
        counts
    };
    let (before, now) = (parts(before), parts(now));
    (before != now).then(|| format!("chooses {} instead of {}", counted(&now), counted(&before)))
}

fn counted(parts: &BTreeMap<PartId, u32>) -> String {
    let one = |(part, count): (&PartId, &u32)| {
        if *count == 1 { part.to_string() } else { format!("{part} x{count}") }
    };
    parts.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// The terms of a grant if one more policy had a word in them.
fn beside(grant: &Grant, more: &Terms) -> Terms {
    let mut environment: BTreeMap<String, String> = grant.environment.iter().cloned().collect();
    environment.extend(more.environment.iter().cloned());
    Terms {
        environment: environment.into_iter().collect(),
        limits: grant.limits.min(more.limits),
        reason: String::new(),
    }
}

fn granted(before: &Grant, now: &Terms) -> Option<String> {
    let mut differences = Vec::new();
    let number = |n: Option<u64>, unit: &str| n.map_or_else(|| "none".to_owned(), |n| format!("{n}{unit}"));
    if now.limits.memory_mib != before.limits.memory_mib {
        let (now, before) = (number(now.limits.memory_mib, " MiB"), number(before.limits.memory_mib, " MiB"));
        differences.push(format!("memory limit {now} instead of {before}"));
    }
    if now.limits.compute_percent != before.limits.compute_percent {
        let percent = |n: Option<u32>| number(n.map(u64::from), " %");
        let (now, before) = (percent(now.limits.compute_percent), percent(before.limits.compute_percent));
        differences.push(format!("compute limit {now} instead of {before}"));
    }
    let environment = |all: &[(String, String)]| all.iter().cloned().collect::<BTreeMap<_, _>>();
    let (old, new) = (environment(&before.environment), environment(&now.environment));
    let keys: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    for key in keys.into_iter().filter(|key| old.get(*key) != new.get(*key)) {
        let value = |all: &BTreeMap<String, String>| {
            all.get(key).map_or_else(|| "nothing".into(), |v| format!("{v:?}"))
        };
        differences.push(format!("{key} is {} instead of {}", value(&new), value(&old)));
    }
    (!differences.is_empty()).then(|| differences.join("; "))
}

/// Parts that the candidate does not name are passed on.
fn offered(before: &[(PartOffer, String)], now: &[PartOffer]) -> Option<String> {
    let old: BTreeMap<&PartId, &[OfferLine]> =
        before.iter().map(|(offer, _)| (&offer.part, offer.lines.as_slice())).collect();
    let differs = |offer: &&PartOffer| old.get(&offer.part).is_none_or(|lines| !alike(lines, &offer.lines));
    let differences: Vec<_> = now
        .iter()
        .filter(differs)
        .map(|offer| {
            let before = old.get(&offer.part).map_or_else(|| "nothing".to_owned(), |lines| listed(lines));
            format!("offers {} as {} instead of {before}", offer.part, listed(&offer.lines))
        })
        .collect();
    (!differences.is_empty()).then(|| differences.join("; "))
}

fn alike(a: &[OfferLine], b: &[OfferLine]) -> bool {
    let sorted = |lines: &[OfferLine]| {
        let mut lines = lines.to_vec();
        lines.sort_by(|a, b| a.resource.cmp(&b.resource));
        lines
    };
    sorted(a) == sorted(b)
}

fn listed(lines: &[OfferLine]) -> String {
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

fn triaged(before: &TriageAnswer, now: &TriageAnswer) -> Option<String> {
    let again = |answer: &TriageAnswer| {
        answer.again_after_s.map_or_else(|| "until an operator's word".to_owned(), |s| format!("for {s} s"))
    };
    let same = (before.severity, before.again_after_s) == (now.severity, now.again_after_s);
    (!same).then(|| {
        format!(
            "{} {} instead of {} {}",
            now.severity.as_str(),
            again(now),
            before.severity.as_str(),
            again(before)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocation::Limits;
    use crate::decision::Cost;
    use crate::names::Digest;
    use crate::names::Resource;
    use crate::policy::{FaultKind, OfferAnswer, Severity};

    fn share(part: &str, n: u32) -> DeviceId {
        DeviceId { part: PartId::parse(part).unwrap(), share: Some(n) }
    }

    fn placement(devices: &[(&str, u32)]) -> Placement {
        Placement { devices: devices.iter().map(|(p, n)| share(p, *n)).collect(), reason: String::new() }
    }

    fn place(available: &[(&str, u32)], size: usize) -> Asked {
        let resource = Resource::parse("nvidia.com/gpu.shared").unwrap();
        let available = available.iter().map(|(p, n)| share(p, *n)).collect();
        Asked::Place(PlaceRequest { resource, available, required: Vec::new(), size })
    }

    /// As a policy that had no word in the decision.
    fn compare(asked: &Asked, outcome: &Outcome, told: &Result<Option<Answer>, Fault>) -> Compared {
        super::compare(asked, &[], outcome, "new", told)
    }

    fn call(policy: &str, said: Said) -> CallNote {
        let digest = Digest::parse(&"a".repeat(64)).unwrap();
        CallNote { policy: policy.into(), digest, parameters: "{}".into(), said, cost: Cost::default() }
    }

    #[test]
    fn another_version_of_a_policy_is_held_against_what_that_policy_said() {
        let limits = Limits { memory_mib: Some(4096), compute_percent: None };
        let memory = Terms { limits, ..Terms::default() };
        let calls = [
            call("quota@1", Said::Answer(Answer::Allow(Terms::default()))),
            call("memory@1", Said::Answer(Answer::Allow(memory.clone()))),
        ];
        let granted = Outcome::Granted(Grant { limits, ..Grant::default() });
        let asked = place(&[], 0);
        let same = |name: &str, terms: Terms| {
            super::compare(&asked, &calls, &granted, name, &Ok(Some(Answer::Allow(terms))))
        };
        assert_eq!(same("quota", Terms::default()), Compared::Same);
        assert_eq!(same("memory", memory), Compared::Same);
        assert_eq!(words(same("memory", Terms::default())), "memory limit none instead of 4096 MiB");
        let denied = Outcome::Denied { by: "quota@1".into(), reason: "no".into() };
        let calls = [call("quota@1", Said::Answer(Answer::Deny("no".into())))];
        let allow = Ok(Some(Answer::Allow(Terms::default())));
        assert_eq!(super::compare(&asked, &calls, &denied, "memory", &allow), Compared::Same);
        assert_eq!(
            words(super::compare(&asked, &calls, &denied, "quota", &allow)),
            "allows what quota denied: no"
        );
    }

    fn words(compared: Compared) -> String {
        match compared {
            Compared::Differs(words) | Compared::Fails(words) => words,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn another_share_of_the_same_gpu_is_the_same() {
        let asked = place(&[("GPU-a", 0), ("GPU-a", 1), ("GPU-b", 0)], 1);
        let before = Outcome::Placed(placement(&[("GPU-a", 0)]), "baseline".into());
        let told = |devices| Ok(Some(Answer::Place(placement(devices))));
        assert_eq!(compare(&asked, &before, &told(&[("GPU-a", 1)])), Compared::Same);
        let other = words(compare(&asked, &before, &told(&[("GPU-b", 0)])));
        assert_eq!(other, "chooses GPU-b instead of GPU-a");
        let wrong = words(compare(&asked, &before, &told(&[("GPU-c", 0)])));
        assert_eq!(wrong, "device GPU-c::0 is not available");
        assert_eq!(compare(&asked, &before, &Ok(None)), Compared::Passes);
    }

    #[test]
    fn terms_are_compared_one_by_one() {
        let limits = Limits { memory_mib: Some(1024), compute_percent: None };
        let grant = Grant { limits, environment: vec![("A".into(), "1".into())], ..Grant::default() };
        let asked = place(&[], 0);
        let terms = Terms { limits, environment: vec![("A".into(), "1".into())], reason: "x".into() };
        let granted = Outcome::Granted(grant);
        assert_eq!(compare(&asked, &granted, &Ok(Some(Answer::Allow(terms)))), Compared::Same);
        let tighter = Limits { memory_mib: Some(512), compute_percent: None };
        let environment = vec![("B".into(), "2".into())];
        let other = Answer::Allow(Terms { environment, limits: tighter, ..Terms::default() });
        assert_eq!(
            words(compare(&asked, &granted, &Ok(Some(other)))),
            "memory limit 512 MiB instead of 1024 MiB; B is \"2\" instead of nothing"
        );
        assert_eq!(words(compare(&asked, &granted, &Ok(Some(Answer::Deny("no".into()))))), "denies: no");
    }

    #[test]
    fn a_verdict_is_held_against_the_stack_and_not_against_the_kernel() {
        let asked = place(&[], 0);
        let refused = Outcome::Refused { reason: "held".into() };
        let allow = Ok(Some(Answer::Allow(Terms::default())));
        assert_eq!(compare(&asked, &refused, &allow), Compared::Same);
        let denied = Outcome::Denied { by: "quota@1".into(), reason: "too many".into() };
        assert_eq!(compare(&asked, &denied, &allow), Compared::Same, "another's denial stands");
        assert_eq!(compare(&asked, &denied, &Ok(Some(Answer::Deny("mine".into())))), Compared::Same);
    }

    #[test]
    fn offers_are_compared_where_the_candidate_has_a_word() {
        let part = |id: &str| PartId::parse(id).unwrap();
        let line = |count| OfferLine {
            resource: Resource::parse("nvidia.com/gpu").unwrap(),
            count,
            consumes: Consumes::Whole,
        };
        let offer = |id: &str, count| PartOffer { part: part(id), lines: vec![line(count)] };
        let before = Outcome::Offered(vec![(offer("GPU-a", 1), "x".into()), (offer("GPU-b", 1), "x".into())]);
        let told = |parts| Ok(Some(Answer::Offer(OfferAnswer { parts, again_after_s: None })));
        assert_eq!(compare(&Asked::Offer, &before, &told(vec![offer("GPU-b", 1)])), Compared::Same);
        assert_eq!(
            words(compare(&Asked::Offer, &before, &told(vec![offer("GPU-b", 2)]))),
            "offers GPU-b as 2 nvidia.com/gpu (whole) instead of 1 nvidia.com/gpu (whole)"
        );
    }

    #[test]
    fn severity_and_time_are_compared() {
        let answer =
            |severity, again_after_s| TriageAnswer { severity, reason: String::new(), again_after_s };
        let before = Outcome::Triaged(answer(Severity::Unhealthy, None), "baseline".into());
        let told = Ok(Some(Answer::Triage(answer(Severity::Degraded, Some(60)))));
        assert_eq!(
            words(compare(&Asked::Offer, &before, &told)),
            "degraded for 60 s instead of unhealthy until an operator's word"
        );
        let fault = Err(Fault { kind: FaultKind::Trap, detail: "boom".into() });
        assert_eq!(words(compare(&Asked::Offer, &before, &fault)), "boom (trap)");
    }
}

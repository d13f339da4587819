//! Decides every command against the ledger: what changes, and whether the caller is refused. Pure.

use crate::drain::eviction_plan;
use crate::drain::marks::{Marks, TooManyMarks};
use crate::evidence::pods::PodsView;
use crate::evidence::reconcile::reset_breaker;
use crate::evidence::{reconcile, running, runtime};
use crate::grants::allocation::EndReason;
use crate::grants::{allocate, prepare};
use crate::hardware::device_access::DeviceAccess;
use crate::hardware::health::HealthState;
use crate::ids::names::{AllocationId, GpuId};
use crate::ids::time::Now;
use crate::node::change::{Change, Entry};
use crate::node::command::{Activation, Command, NewOffers, Verdict};
use crate::node::ledger::{GpuState, Ledger};
use crate::node::refusal::Refusal;
use crate::node::rules::Rules;
use crate::node::{scan, tick};
use crate::policy::decider::Decider;
use crate::policy::judge_again::judge_again;
use crate::policy::stack::StackOrigin;
use crate::policy::version_records;
use crate::policy::version_records::check_trust;
use crate::sharing::offer::{PartOffer, RESOURCES_MAX};
use crate::sharing::reoffer::{check_offer, reoffer};
use crate::sharing::via;
use std::sync::Arc;

/// Decides one command. Equal inputs give equal verdicts.
#[must_use]
pub fn decide(ledger: &Ledger, command: &Command, now: Now) -> Verdict {
    let decided = match command {
        Command::Allocate { request, answer, evaluated, attempt } => {
            let answer_is_final = evaluated.is_none_or(|generation| generation == ledger.generation);
            return allocate::allocate(ledger, request, answer, answer_is_final, *attempt, now);
        }
        Command::Prepare { claim, evaluated } => {
            let answer_is_final = evaluated.is_none_or(|generation| generation == ledger.generation);
            return prepare::prepare(ledger, claim, answer_is_final, now);
        }
        Command::Unprepare { claim } => Ok(prepare::unprepare(ledger, claim)),
        Command::RecordClaimPods { claim, pods } => Ok(prepare::record_pods(ledger, claim, pods)),
        Command::AdoptClaims(found) => Ok(prepare::adopt(ledger, found, now)),
        Command::If { expected, then } => match expected.check(ledger) {
            Ok(()) => return decide(ledger, then, now),
            Err(refusal) => Err(refusal),
        },
        Command::RecordScan(inventory) => Ok(scan::changes(ledger, inventory, now)),
        Command::ApplyTriage(triaged) => Ok(scan::apply_triage(ledger, triaged, now)),
        Command::Offer(offers) => apply_offers(ledger, offers, now),
        Command::Reconcile(view) => Ok(reconcile::changes(ledger, view, now)),
        Command::Pods(view) => Ok(update_pods(ledger, view)),
        Command::SeeContainers(view) => Ok(runtime::see_containers(ledger, view, now)),
        Command::SetDeviceAccess(device_access) => Ok(set_device_access(ledger, device_access)),
        Command::RecordEviction { ask, outcome } => {
            Ok(eviction_plan::record_outcome(ledger, ask, outcome, now))
        }
        Command::Cordon { gpu, author } => change_marks(ledger, gpu, |marks| marks.with_cordon(author, now)),
        Command::Drain { gpu, author, order } => {
            change_marks(ledger, gpu, |marks| marks.with_drain(author, *order, now))
        }
        Command::StopDrain { gpu, owners } => {
            change_marks(ledger, gpu, |marks| Ok(marks.without_drains(owners)))
        }
        Command::Uncordon { gpu, owners } => change_marks(ledger, gpu, |marks| Ok(marks.without(owners))),
        Command::SetVia { gpu, api, author } => via::order(ledger, gpu, *api, author, now),
        Command::FinishMove { gpu } => via::finish_move(ledger, gpu, now),
        Command::MarkHealthy { gpu, by, why } => mark_healthy(ledger, gpu, by, why, now),
        Command::Forget { gpu } => forget(ledger, gpu, now),
        Command::End { id, force } => end(ledger, *id, *force, now),
        Command::RecordUpload(version) => version_records::record_upload(ledger, version),
        Command::RecordArtifact { digest, artifact } => {
            version_records::record_artifact(ledger, digest, artifact)
        }
        Command::RecordLoaded(version) => Ok(version_records::record_loaded(ledger, version)),
        Command::RecordShipped(versions) => Ok(version_records::record_shipped(ledger, versions)),
        Command::DeletePolicy { digest } => version_records::delete(ledger, digest),
        Command::Activate(activation) => activate(ledger, activation, now),
        Command::SettleStack { revision } => settle_stack(ledger, *revision),
        Command::EndBreakGlass { revision } => end_break_glass(ledger, *revision),
        Command::SetRules { rules, offers } => set_rules(ledger, rules, offers, now),
        Command::Tick => Ok(tick::changes(ledger, now)),
    };
    match decided {
        Ok(changes) => Verdict { entry: Entry { at: now, changes }, refusal: None },
        Err(refusal) => Verdict { entry: Entry { at: now, changes: Vec::new() }, refusal: Some(refusal) },
    }
}

fn apply_offers(ledger: &Ledger, offers: &[(PartOffer, Decider)], now: Now) -> Result<Vec<Change>, Refusal> {
    let mut changes = Vec::new();
    let mut resources = ledger.resources();
    for (offer, by) in offers {
        // A part that disappeared during the evaluation keeps its old offer.
        let Some(part) = ledger.part(&offer.part) else {
            continue;
        };
        check_offer(part, offer, None, ledger.rules.overcommit_percent)?;
        resources.extend(offer.lines.iter().map(|l| l.resource.clone()));
        if resources.len() > RESOURCES_MAX {
            let why = format!("the node would list more than {RESOURCES_MAX} resources");
            return Err(Refusal::BadOffer { part: offer.part.clone(), why });
        }
        changes.extend(reoffer(part, offer, by, now)?);
    }
    Ok(changes)
}

fn update_pods(ledger: &Ledger, view: &PodsView) -> Vec<Change> {
    let known = ledger.pods.as_deref();
    let changed = known != Some(view) && known.is_none_or(|known| view.replaces(known));
    if changed { vec![Change::PodsSeen(Arc::new(view.clone()))] } else { Vec::new() }
}

fn set_device_access(ledger: &Ledger, device_access: &DeviceAccess) -> Vec<Change> {
    if *ledger.device_access == *device_access {
        return Vec::new();
    }
    vec![Change::DeviceAccessChanged(Arc::new(device_access.clone()))]
}

fn find_gpu<'l>(ledger: &'l Ledger, gpu: &GpuId) -> Result<&'l GpuState, Refusal> {
    ledger.gpus.get(gpu).map(AsRef::as_ref).ok_or_else(|| Refusal::UnknownGpu { gpu: gpu.clone() })
}

/// The change of a GPU's marks; none if they stay the same.
fn change_marks(
    ledger: &Ledger,
    gpu: &GpuId,
    change: impl FnOnce(&Marks) -> Result<Marks, TooManyMarks>,
) -> Result<Vec<Change>, Refusal> {
    let old = &find_gpu(ledger, gpu)?.marks;
    let marks = change(old).map_err(|TooManyMarks| Refusal::TooManyMarks { gpu: gpu.clone() })?;
    Ok(if marks == *old { Vec::new() } else { vec![Change::MarksChanged { gpu: gpu.clone(), marks }] })
}

fn mark_healthy(ledger: &Ledger, gpu: &GpuId, by: &str, why: &str, now: Now) -> Result<Vec<Change>, Refusal> {
    let health = &find_gpu(ledger, gpu)?.health;
    // The next scan would mark it unhealthy again, and a reader would see a wrong state until then.
    if !ledger.parts_of(gpu).any(|p| p.present) {
        return Err(Refusal::Vanished { gpu: gpu.clone() });
    }
    if let Some(error) = ledger.scan_errors.get(gpu) {
        return Err(Refusal::NoAnswer { gpu: gpu.clone(), error: error.reason.clone() });
    }
    match health.state {
        HealthState::Healthy if health.judgements.is_empty() => Ok(Vec::new()),
        HealthState::Vanished => Err(Refusal::Vanished { gpu: gpu.clone() }),
        // A policy may have ignored an event of a healthy GPU, and the event would count once the policy is removed.
        HealthState::Healthy | HealthState::Degraded | HealthState::Unhealthy => {
            let why = if why.is_empty() { String::new() } else { format!(" ({why})") };
            let health = health.marked_healthy(&format!("marked healthy by {by}{why}"), now);
            Ok(vec![Change::HealthChanged { gpu: gpu.clone(), health }])
        }
    }
}

fn forget(ledger: &Ledger, gpu: &GpuId, now: Now) -> Result<Vec<Change>, Refusal> {
    let state = find_gpu(ledger, gpu)?;
    let parts = || ledger.parts_of(gpu);
    if state.health.state != HealthState::Vanished || parts().any(|p| p.present) {
        return Err(Refusal::StillThere { gpu: gpu.clone() });
    }
    if let Some(by) = parts().find_map(|p| ledger.newest_on(p)) {
        return Err(Refusal::StillHeld { gpu: gpu.clone(), by: by.id });
    }
    // Its ids leave the list with it, so they must have been Unhealthy and unheld for the full period (I10).
    let retire_ms = ledger.rules.timing.retire_ms;
    let settled = |since_ms| now.passed(since_ms, retire_ms);
    if parts().any(|p| !settled(p.present_changed_mono_ms) || !settled(p.idle_since_mono_ms)) {
        return Err(Refusal::TooSoon { gpu: gpu.clone(), wait_ms: retire_ms });
    }
    Ok(vec![Change::GpuForgotten(gpu.clone())])
}

fn end(ledger: &Ledger, id: AllocationId, force: bool, now: Now) -> Result<Vec<Change>, Refusal> {
    let Some(allocation) = ledger.live.get(&id) else {
        return Err(match ledger.ended.get(id) {
            Some(past) => Refusal::AlreadyEnded { id, reason: past.end().reason },
            None => Refusal::UnknownAllocation { id },
        });
    };
    let running_sources = running::running_sources(ledger, allocation, now);
    if !force && !running_sources.is_empty() {
        let holder = Box::new(allocation.holder.clone());
        return Err(Refusal::StillRunning { id, holder, running_sources });
    }
    Ok(reconcile::end_changes(ledger, &[(id, EndReason::Operator)]))
}

fn activate(ledger: &Ledger, activation: &Activation, now: Now) -> Result<Vec<Change>, Refusal> {
    let Activation { stack, offers, triage } = activation;
    for entry in &stack.entries {
        version_records::find(ledger, &entry.digest)?;
    }
    check_trust(ledger, &stack.entries, &ledger.rules.trusted_keys)?;
    let revision = ledger.stack.revision + 1;
    let mut new = stack.clone().into_stack(revision, now.wall_ms);
    // Another stack of the file or of a caller is no reason to try a failed revision of the GPUNode again.
    if new.failed.is_none() && !matches!(new.origin, StackOrigin::Fleet { .. }) {
        new.failed.clone_from(&ledger.stack.failed);
    }
    let mut changes = vec![Change::StackActivated(new)];
    changes.extend(apply_offers(ledger, offers, now)?);
    changes.extend(judge_again(ledger, &stack.entries, triage, revision, now));
    // The denials were those of the former stack, or of its offers.
    changes.extend(ledger.breakers.keys().filter_map(|resource| reset_breaker(ledger, resource)));
    Ok(changes)
}

fn settle_stack(ledger: &Ledger, revision: u64) -> Result<Vec<Change>, Refusal> {
    if ledger.stack.revision != revision {
        return Err(Refusal::StackChanged { revision: ledger.stack.revision });
    }
    Ok(match &ledger.stack.origin {
        StackOrigin::Fleet { revision, is_settled: false } => {
            let origin = StackOrigin::Fleet { revision: revision.clone(), is_settled: true };
            vec![Change::StackOriginChanged(origin)]
        }
        _ => Vec::new(),
    })
}

/// Sets the end of a break-glass to 0. The task of the node's stack then activates the stack that was active before.
fn end_break_glass(ledger: &Ledger, revision: u64) -> Result<Vec<Change>, Refusal> {
    if ledger.stack.revision != revision {
        return Err(Refusal::StackChanged { revision: ledger.stack.revision });
    }
    let ended = Change::StackOriginChanged(StackOrigin::BreakGlass { until_wall_ms: 0 });
    Ok(if ledger.stack.is_break_glass() { vec![ended] } else { Vec::new() })
}

/// The offers are checked by the new rules.
fn set_rules(
    ledger: &Ledger,
    rules: &Arc<Rules>,
    offers: &NewOffers,
    now: Now,
) -> Result<Vec<Change>, Refusal> {
    let ruled = ledger.with_rules(rules);
    let of_offers = match offers {
        NewOffers::OfActiveStack(offers) => apply_offers(&ruled, offers, now)?,
        NewOffers::OfStack(activation) => activate(&ruled, activation, now)?,
    };
    let mut changes = Vec::new();
    if ledger.rules != *rules {
        changes.push(Change::RulesChanged(Arc::clone(rules)));
    }
    changes.extend(of_offers);
    Ok(changes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::command::NewStack;
    use crate::node::revision::Revision;
    use crate::node::test_node::{Node, part, shared};
    use crate::policy::stack::{FailedRevision, FleetRevision, OnFault, Permissions, StackEntry};
    use crate::policy::version::{TrustedKey, test_version};
    use crate::sharing::offer::{Consumes, OfferLine};

    fn rules(overcommit_percent: u32) -> Arc<Rules> {
        Arc::new(Rules { overcommit_percent, ..Rules::default() })
    }

    /// Two shares of GPU-0, each of twice its memory.
    fn offers() -> Vec<(PartOffer, Decider)> {
        let consumes = Consumes::Slice { memory_mib: 2 * 81_920, compute_percent: 0 };
        let line = OfferLine { resource: shared(), count: 2, consumes };
        vec![(PartOffer { part: part("GPU-0"), lines: vec![line] }, "test".into())]
    }

    fn activation(offers: Vec<(PartOffer, Decider)>) -> Activation {
        let stack = NewStack {
            origin: StackOrigin::Api,
            failed: None,
            by: "ann".into(),
            why: String::new(),
            entries: Vec::new(),
        };
        Activation { stack, offers, triage: Vec::new() }
    }

    #[test]
    fn a_stack_of_a_gpu_node_settles_once_and_a_failed_one_stays_known_until_the_next() {
        let mut node = Node::new();
        let revision =
            |text: &str| FleetRevision { policy: "team".into(), revision: text.into(), attempt: 1 };
        let activate = |node: &mut Node, origin: StackOrigin, failed: Option<&str>| {
            let failed = failed
                .map(|text| Box::new(FailedRevision { revision: revision(text), reason: "it traps".into() }));
            let stack = NewStack { origin, failed, ..activation(Vec::new()).stack };
            node.decide(&Command::Activate(Activation { stack, ..activation(Vec::new()) })).unwrap();
            node.ledger.stack.failed.as_ref().map(|failed| failed.revision.revision.clone())
        };
        let of_fleet = |text: &str| StackOrigin::Fleet { revision: revision(text), is_settled: false };
        assert_eq!(activate(&mut node, of_fleet("a"), None), None);
        let stack = node.ledger.stack.revision;
        node.decide(&Command::SettleStack { revision: stack }).unwrap();
        assert!(node.ledger.stack.is_settled() && node.ledger.stack.revision == stack);
        let late = node.decide(&Command::SettleStack { revision: stack - 1 });
        assert_eq!(late, Err(Refusal::StackChanged { revision: stack }));
        assert_eq!(activate(&mut node, StackOrigin::File, Some("b")), Some("b".into()));
        assert_eq!(activate(&mut node, StackOrigin::File, None), Some("b".into()));
        assert_eq!(activate(&mut node, of_fleet("c"), None), None);
    }

    #[test]
    fn ending_a_break_glass_keeps_its_stack_and_sets_its_end_to_0() {
        let mut node = Node::new();
        let stack = |origin| NewStack { origin, ..activation(Vec::new()).stack };
        let activate = |node: &mut Node, origin| {
            let stack = stack(origin);
            node.decide(&Command::Activate(Activation { stack, ..activation(Vec::new()) })).unwrap();
            node.ledger.stack.revision
        };
        let of_api = activate(&mut node, StackOrigin::Api);
        assert!(node.decide(&Command::EndBreakGlass { revision: of_api }).unwrap().changes.is_empty());
        let revision = activate(&mut node, StackOrigin::BreakGlass { until_wall_ms: 7 });
        let late = node.decide(&Command::EndBreakGlass { revision: of_api });
        assert_eq!(late, Err(Refusal::StackChanged { revision }));
        node.decide(&Command::EndBreakGlass { revision }).unwrap();
        let ended = &node.ledger.stack;
        assert_eq!(
            (ended.revision, &ended.origin),
            (revision, &StackOrigin::BreakGlass { until_wall_ms: 0 })
        );
    }

    #[test]
    fn rules_are_changed_with_the_offers_that_follow_from_them_or_not_at_all() {
        let mut node = Node::new();
        let (of_active, of_stack) =
            (NewOffers::OfActiveStack(offers()), NewOffers::OfStack(activation(offers())));
        for (overcommit_percent, offers, fits) in [
            (150, &of_active, false),
            (200, &of_active, true),
            (100, &of_active, false),
            (150, &of_stack, false),
            (200, &of_stack, true),
        ] {
            let (before, offers) = (node.ledger.clone(), offers.clone());
            let decided = node.decide(&Command::SetRules { rules: rules(overcommit_percent), offers });
            assert_eq!(decided.is_ok(), fits, "{decided:?}");
            if let Err(refusal) = decided {
                assert!(matches!(refusal, Refusal::BadOffer { .. }), "{refusal}");
                assert_eq!(node.ledger, before);
            }
        }
        assert_eq!(node.ledger.rules, rules(200));
        assert_eq!(node.ledger.part(&part("GPU-0")).unwrap().devices.len(), 2);
        assert_eq!(node.ledger.stack.revision, 1, "the last one activated its stack");
    }

    #[test]
    fn a_stack_must_be_trusted_by_the_keys_that_come_with_it() {
        let mut node = Node::new();
        let version = test_version('a');
        let digest = version.digest.clone();
        node.decide(&Command::RecordUpload(version)).unwrap();
        let entry = StackEntry {
            name: "own".into(),
            digest,
            parameters: "{}".into(),
            permissions: Permissions::default(),
            on_fault: OnFault::Skip,
        };
        let key = TrustedKey { name: "ops".into(), key: [1; 32] };
        let mut activation = activation(Vec::new());
        activation.stack.entries = vec![entry.clone()];
        for (trusted_keys, is_trusted) in [(vec![key], false), (Vec::new(), true)] {
            let rules = Arc::new(Rules { trusted_keys, ..Rules::default() });
            let offers = NewOffers::OfStack(activation.clone());
            let decided = node.decide(&Command::SetRules { rules, offers });
            let untrusted = Refusal::Untrusted { policies: vec![entry.label()] };
            assert_eq!(decided.map(drop), if is_trusted { Ok(()) } else { Err(untrusted) });
        }
    }

    #[test]
    fn rules_that_were_tried_beside_another_stack_are_refused() {
        let mut node = Node::new();
        let revision = node.ledger.stack.revision;
        node.decide(&Command::Activate(activation(Vec::new()))).unwrap();
        for offers in [NewOffers::OfActiveStack(offers()), NewOffers::OfStack(activation(Vec::new()))] {
            let command = Command::SetRules { rules: rules(200), offers };
            let decided = node.decide(&command.expecting(Some(Revision::Stack(revision))));
            assert_eq!(decided, Err(Refusal::StackChanged { revision: revision + 1 }));
        }
        assert_eq!((&node.ledger.rules, node.ledger.stack.revision), (&rules(100), revision + 1));
    }
}

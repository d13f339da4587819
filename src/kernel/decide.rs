//! Decides every command against the ledger: what changes, and whether the caller is refused. Pure.

use super::allocation::EndReason;
use super::change::{Change, Entry};
use super::command::{Command, NewStack, Rules};
use super::decider::Decider;
use super::device_access::DeviceAccess;
use super::drain::{Marks, TooManyMarks};
use super::health::HealthState;
use super::judgement::judge_again;
use super::ledger::Ledger;
use super::names::{AllocationId, Digest, PartId};
use super::offer::{PartOffer, RESOURCES_MAX};
use super::offering::{check_offer, reoffer};
use super::pods::PodsView;
use super::policy::{PolicyVersion, VERSIONS_MAX};
use super::reconcile::reset_breaker;
use super::refusal::Refusal;
use super::time::Now;
use super::trust_check::check_trust;
use super::{allocate, evict, reconcile, running, scan, tick};
use std::sync::Arc;

/// The decision on a command.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The changes, also of a refused command: a denial changes its breaker. An entry without changes is
    /// not applied.
    pub entry: Entry,
    /// Why the caller is refused; `None` if it is not.
    pub refusal: Option<Refusal>,
}

/// Decides one command. Equal inputs give equal verdicts.
#[must_use]
pub fn decide(ledger: &Ledger, rules: &Rules, command: &Command, now: Now) -> Verdict {
    let decided = match command {
        Command::Allocate { request, answer, generation, is_retry, attempt } => {
            let current = *generation == ledger.generation || *is_retry;
            return allocate::allocate(ledger, rules, request, answer, current, *attempt, now);
        }
        Command::RecordScan(inventory) => Ok(scan::look(ledger, inventory, rules, now)),
        Command::ApplyTriage(triaged) => Ok(scan::triaged(ledger, triaged, now)),
        Command::Offer(offers) => apply_offers(ledger, offers, rules, now),
        Command::Reconcile(view) => Ok(reconcile::observe(ledger, view, rules, now)),
        Command::Pods(view) => Ok(update_pods(ledger, view)),
        Command::SetDeviceAccess(device_access) => Ok(set_device_access(ledger, device_access)),
        Command::RecordEviction { ask, outcome } => {
            Ok(evict::record_outcome(ledger, ask, outcome, rules.timing.evict_again_ms, now))
        }
        Command::Cordon { gpu, author } => change_marks(ledger, gpu, |marks| marks.with_cordon(author, now)),
        Command::Drain { gpu, author, order } => {
            change_marks(ledger, gpu, |marks| marks.with_drain(author, *order, now))
        }
        Command::StopDrain { gpu, owners } => {
            change_marks(ledger, gpu, |marks| Ok(marks.without_drains(owners)))
        }
        Command::Uncordon { gpu, owners } => change_marks(ledger, gpu, |marks| Ok(marks.without(owners))),
        Command::IfMarks { gpu, marks, then } => match ledger.gpus.get(gpu) {
            Some(known) if known.marks == *marks => return decide(ledger, rules, then, now),
            Some(_) => Err(Refusal::MarksChanged { gpu: gpu.clone() }),
            None => Err(Refusal::UnknownGpu { gpu: gpu.clone() }),
        },
        Command::MarkHealthy { gpu, by, why } => mark_healthy(ledger, gpu, by, why, now),
        Command::Forget { gpu } => forget(ledger, gpu, rules, now),
        Command::End { id, force } => end(ledger, rules, *id, *force, now),
        Command::StorePolicy(version) => {
            // The few versions that ship with the daemon are always stored.
            let has_room = version.shipped || ledger.policies.len() < VERSIONS_MAX;
            if !has_room && !ledger.policies.contains_key(&version.digest) {
                Err(Refusal::TooManyVersions { limit: VERSIONS_MAX })
            } else {
                Ok(vec![Change::PolicyStored(version.clone())])
            }
        }
        Command::RecordArtifact { digest, artifact } => record_artifact(ledger, digest, artifact),
        Command::DeletePolicy { digest } => delete_policy(ledger, digest),
        Command::Activate { stack, expected, offers, triage } => {
            activate(ledger, stack, *expected, offers, rules, now).map(|mut changes| {
                let revision = ledger.stack.revision + 1;
                changes.extend(judge_again(ledger, &stack.entries, triage, revision, now));
                // The denials were those of the former stack, or of its offers.
                changes.extend(ledger.breakers.keys().filter_map(|resource| reset_breaker(ledger, resource)));
                changes
            })
        }
        Command::Tick => Ok(tick::changes(ledger, rules, now)),
    };
    match decided {
        Ok(changes) => Verdict { entry: Entry { at: now, changes }, refusal: None },
        Err(refusal) => Verdict { entry: Entry { at: now, changes: Vec::new() }, refusal: Some(refusal) },
    }
}

fn apply_offers(
    ledger: &Ledger,
    offers: &[(PartOffer, Decider)],
    rules: &Rules,
    now: Now,
) -> Result<Vec<Change>, Refusal> {
    let mut changes = Vec::new();
    let mut resources = ledger.resources();
    for (offer, by) in offers {
        // A part that disappeared during the evaluation keeps its old offer.
        let Some(part) = ledger.part(&offer.part) else {
            continue;
        };
        check_offer(part, offer, None, rules.overcommit_percent)?;
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

fn find_gpu<'l>(ledger: &'l Ledger, gpu: &PartId) -> Result<&'l super::ledger::GpuState, Refusal> {
    ledger.gpus.get(gpu).map(AsRef::as_ref).ok_or_else(|| Refusal::UnknownGpu { gpu: gpu.clone() })
}

fn find_policy<'l>(ledger: &'l Ledger, digest: &Digest) -> Result<&'l PolicyVersion, Refusal> {
    let found = ledger.policies.get(digest).map(AsRef::as_ref);
    found.ok_or_else(|| Refusal::UnknownPolicy { digest: digest.clone() })
}

/// The change of a GPU's marks; none if they stay the same.
fn change_marks(
    ledger: &Ledger,
    gpu: &PartId,
    change: impl FnOnce(&Marks) -> Result<Marks, TooManyMarks>,
) -> Result<Vec<Change>, Refusal> {
    let old = &find_gpu(ledger, gpu)?.marks;
    let marks = change(old).map_err(|TooManyMarks| Refusal::TooManyMarks { gpu: gpu.clone() })?;
    Ok(if marks == *old { Vec::new() } else { vec![Change::MarksChanged { gpu: gpu.clone(), marks }] })
}

fn mark_healthy(
    ledger: &Ledger,
    gpu: &PartId,
    by: &str,
    why: &str,
    now: Now,
) -> Result<Vec<Change>, Refusal> {
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

fn forget(ledger: &Ledger, gpu: &PartId, rules: &Rules, now: Now) -> Result<Vec<Change>, Refusal> {
    let state = find_gpu(ledger, gpu)?;
    let parts = || ledger.parts_of(gpu);
    if state.health.state != HealthState::Vanished || parts().any(|p| p.present) {
        return Err(Refusal::StillThere { gpu: gpu.clone() });
    }
    if let Some(by) = parts().find_map(|p| ledger.newest_on(p)) {
        return Err(Refusal::StillHeld { gpu: gpu.clone(), by: by.id });
    }
    // Its ids leave the list with it, so they must have been Unhealthy and unheld for the full period (I10).
    let settled = |since_ms| now.passed(since_ms, rules.timing.retire_ms);
    if parts().any(|p| !settled(p.present_changed_mono_ms) || !settled(p.idle_since_mono_ms)) {
        return Err(Refusal::TooSoon { gpu: gpu.clone(), wait_ms: rules.timing.retire_ms });
    }
    Ok(vec![Change::GpuForgotten(gpu.clone())])
}

fn end(
    ledger: &Ledger,
    rules: &Rules,
    id: AllocationId,
    force: bool,
    now: Now,
) -> Result<Vec<Change>, Refusal> {
    let Some(allocation) = ledger.live.get(&id) else {
        return Err(match ledger.ended.get(id) {
            Some(past) => Refusal::AlreadyEnded { id, reason: past.end().reason },
            None => Refusal::UnknownAllocation { id },
        });
    };
    let running_sources = running::running_sources(ledger, &rules.timing, allocation, now);
    if !force && !running_sources.is_empty() {
        let holder = Box::new(allocation.holder.clone());
        return Err(Refusal::StillRunning { id, holder, running_sources });
    }
    Ok(reconcile::end_changes(ledger, rules, &[(id, EndReason::Operator)]))
}

/// Changes only the artifact: the version's signature may have changed meanwhile, or the version may be gone.
fn record_artifact(ledger: &Ledger, digest: &Digest, artifact: &Digest) -> Result<Vec<Change>, Refusal> {
    let known = find_policy(ledger, digest)?;
    let same = known.artifact == *artifact;
    let version = PolicyVersion { artifact: artifact.clone(), ..known.clone() };
    Ok(if same { Vec::new() } else { vec![Change::PolicyStored(version)] })
}

fn delete_policy(ledger: &Ledger, digest: &Digest) -> Result<Vec<Change>, Refusal> {
    let version = find_policy(ledger, digest)?;
    if ledger.stack.entries.iter().any(|e| e.digest == *digest) {
        return Err(Refusal::PolicyInUse { digest: digest.clone() });
    }
    if version.shipped {
        return Err(Refusal::PolicyShipped { digest: digest.clone() });
    }
    Ok(vec![Change::PolicyDeleted(digest.clone())])
}

fn activate(
    ledger: &Ledger,
    stack: &NewStack,
    expected: Option<u64>,
    offers: &[(PartOffer, Decider)],
    rules: &Rules,
    now: Now,
) -> Result<Vec<Change>, Refusal> {
    let revision = ledger.stack.revision;
    if expected.is_some_and(|e| e != revision) {
        return Err(Refusal::StackMoved { revision });
    }
    stack.entries.iter().try_for_each(|entry| find_policy(ledger, &entry.digest).map(drop))?;
    check_trust(ledger, &stack.entries, &rules.trusted_keys)?;
    let mut changes = vec![Change::StackActivated(stack.clone().into_stack(revision + 1, now.wall_ms))];
    changes.extend(apply_offers(ledger, offers, rules, now)?);
    Ok(changes)
}

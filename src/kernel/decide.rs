//! Every command against the ledger: what changes, and whether the caller is refused. Pure.

use super::change::{Change, Entry};
use super::command::{Command, NewStack, Rules};
use super::drain::{self, Drain};
use super::health::HealthState;
use super::ledger::Ledger;
use super::names::{AllocationId, Digest, PartId};
use super::offer::{PartOffer, RESOURCES_MAX};
use super::offering::{check_offer, due_to_leave, reoffer};
use super::part_state::{Device, PartState};
use super::pods::PodsView;
use super::policy::{PolicyVersion, VERSIONS_MAX};
use super::refusal::Refusal;
use super::time::{Now, Timing};
use super::trust::check_trust;
use super::{allocate, breaker, evict, look, round, running};
use std::sync::Arc;

/// What becomes of a command.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// What changes, refused or not (a denial moves its breaker). Without changes there is nothing
    /// to apply.
    pub entry: Entry,
    /// Why the caller is refused, if so.
    pub refusal: Option<Refusal>,
}

/// Decides one command. Answers the same to the same, always.
#[must_use]
pub fn decide(ledger: &Ledger, rules: &Rules, command: &Command, now: Now) -> Verdict {
    let decided = match command {
        Command::Allocate { request, answer, seen, again, attempt } => {
            let current = *seen == ledger.generation || *again;
            let asked = allocate::Asked { request, answer, current, attempt: *attempt };
            return allocate::allocate(ledger, rules, asked, now);
        }
        Command::Look(inventory) => Ok(look::look(ledger, inventory, rules, now)),
        Command::Triaged { reading, answer } => Ok(look::triaged(ledger, reading, answer, now)),
        Command::Offer(offers) => offer(ledger, offers, rules, now),
        Command::Observe(view) => Ok(round::observe(ledger, view, rules, now)),
        Command::Pods(view) => Ok(pods_seen(ledger, view)),
        Command::Asked { ask, outcome } => {
            Ok(evict::asked(ledger, ask, outcome, rules.timing.evict_again_ms, now))
        }
        Command::Cordon { gpu, mark } => turn_drain(ledger, gpu, |d| d.cordoned(mark)),
        Command::Drain { gpu, mark, order } => turn_drain(ledger, gpu, |d| d.ordered(mark, *order)),
        Command::StopDrain { gpu } => turn_drain(ledger, gpu, Drain::called_off),
        Command::Uncordon { gpu } => turn_drain(ledger, gpu, |_| Drain::Active),
        Command::Heal { gpu, by, why } => heal(ledger, gpu, by, why, now),
        Command::Forget { gpu } => forget(ledger, gpu, rules, now),
        Command::End { id, force } => end(ledger, rules, *id, *force, now),
        Command::KeepPolicy(version) => {
            // What comes with the daemon is a handful and has no say in when it comes.
            let room = version.shipped || ledger.policies.len() < VERSIONS_MAX;
            if !room && !ledger.policies.contains_key(&version.digest) {
                Err(Refusal::TooManyVersions { limit: VERSIONS_MAX })
            } else {
                Ok(vec![Change::PolicyKept(version.clone())])
            }
        }
        Command::Compiled { digest, artifact } => compiled(ledger, digest, artifact),
        Command::DeletePolicy { digest } => delete_policy(ledger, digest),
        Command::Activate { stack, expected, offers } => {
            activate(ledger, stack, *expected, offers, rules, now)
        }
        Command::Tick => Ok(tick(ledger, rules, now)),
    };
    match decided {
        Ok(changes) => Verdict { entry: Entry { at: now, changes }, refusal: None },
        Err(refusal) => Verdict { entry: Entry { at: now, changes: Vec::new() }, refusal: Some(refusal) },
    }
}

fn offer(
    ledger: &Ledger,
    offers: &[(PartOffer, String)],
    rules: &Rules,
    now: Now,
) -> Result<Vec<Change>, Refusal> {
    let mut changes = Vec::new();
    let mut resources = ledger.resources();
    for (offer, by) in offers {
        // A part that went away while the policy was asked keeps its old offer.
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

fn pods_seen(ledger: &Ledger, view: &PodsView) -> Vec<Change> {
    let known = ledger.pods.as_deref();
    let news = known != Some(view) && known.is_none_or(|known| view.replaces(known));
    if news { vec![Change::PodsSeen(Arc::new(view.clone()))] } else { Vec::new() }
}

fn known_gpu<'l>(ledger: &'l Ledger, gpu: &PartId) -> Result<&'l super::ledger::GpuState, Refusal> {
    ledger.gpus.get(gpu).map(AsRef::as_ref).ok_or_else(|| Refusal::UnknownGpu { gpu: gpu.clone() })
}

/// The change that turns a GPU's drain state, if it is another then.
fn turn_drain(
    ledger: &Ledger,
    gpu: &PartId,
    turn: impl FnOnce(&Drain) -> Drain,
) -> Result<Vec<Change>, Refusal> {
    let old = &known_gpu(ledger, gpu)?.drain;
    let drain = turn(old);
    Ok(if drain == *old { Vec::new() } else { vec![Change::DrainTurned { gpu: gpu.clone(), drain }] })
}

fn heal(ledger: &Ledger, gpu: &PartId, by: &str, why: &str, now: Now) -> Result<Vec<Change>, Refusal> {
    let health = &known_gpu(ledger, gpu)?.health;
    // The next look would turn it back: somebody who reads "healthy" in between is misled.
    if !ledger.parts.values().any(|p| p.present && p.part.gpu() == gpu) {
        return Err(Refusal::Vanished { gpu: gpu.clone() });
    }
    if let Some(trouble) = ledger.troubles.get(gpu) {
        return Err(Refusal::NoAnswer { gpu: gpu.clone(), trouble: trouble.clone() });
    }
    match health.state {
        HealthState::Healthy => Ok(Vec::new()),
        HealthState::Vanished => Err(Refusal::Vanished { gpu: gpu.clone() }),
        HealthState::Degraded | HealthState::Unhealthy => {
            let said = if why.is_empty() { String::new() } else { format!(" ({why})") };
            let health = health.healed(&format!("marked healthy by {by}{said}"), now);
            Ok(vec![Change::HealthTurned { gpu: gpu.clone(), health }])
        }
    }
}

fn forget(ledger: &Ledger, gpu: &PartId, rules: &Rules, now: Now) -> Result<Vec<Change>, Refusal> {
    let state = known_gpu(ledger, gpu)?;
    let parts = || ledger.parts.values().filter(|p| p.part.gpu() == gpu);
    if state.health.state != HealthState::Vanished || parts().any(|p| p.present) {
        return Err(Refusal::StillThere { gpu: gpu.clone() });
    }
    if let Some(by) = parts().find_map(|p| ledger.newest_on(p)) {
        return Err(Refusal::StillHeld { gpu: gpu.clone(), by: by.id });
    }
    // Its ids leave the list with it, so they must have been Unhealthy and unheld as long as any (I10).
    let settled = |since_ms| now.passed(since_ms, rules.timing.retire_ms);
    if parts().any(|p| !settled(p.turned_mono_ms) || !settled(p.idle_since_mono_ms)) {
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
    Ok(round::end_changes(
        ledger,
        rules,
        &[(id, super::allocation::EndReason::Operator)],
        std::slice::from_ref(&allocation.resource),
    ))
}

/// Nothing else of it: who signed it may have changed meanwhile, or it may be gone.
fn compiled(ledger: &Ledger, digest: &Digest, artifact: &Digest) -> Result<Vec<Change>, Refusal> {
    let known = ledger.policies.get(digest);
    let known = known.ok_or_else(|| Refusal::UnknownPolicy { digest: digest.clone() })?;
    let same = known.artifact == *artifact;
    let version = PolicyVersion { artifact: artifact.clone(), ..PolicyVersion::clone(known) };
    Ok(if same { Vec::new() } else { vec![Change::PolicyKept(version)] })
}

fn delete_policy(ledger: &Ledger, digest: &Digest) -> Result<Vec<Change>, Refusal> {
    let version =
        ledger.policies.get(digest).ok_or_else(|| Refusal::UnknownPolicy { digest: digest.clone() })?;
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
    offers: &[(PartOffer, String)],
    rules: &Rules,
    now: Now,
) -> Result<Vec<Change>, Refusal> {
    let revision = ledger.stack.revision;
    if expected.is_some_and(|e| e != revision) {
        return Err(Refusal::StackMoved { revision });
    }
    if let Some(entry) = stack.entries.iter().find(|e| !ledger.policies.contains_key(&e.digest)) {
        return Err(Refusal::UnknownPolicy { digest: entry.digest.clone() });
    }
    check_trust(ledger, &stack.entries, &rules.trusted_keys)?;
    let mut changes = vec![Change::StackActivated(stack.clone().at(revision + 1, now.wall_ms))];
    changes.extend(offer(ledger, offers, rules, now)?);
    Ok(changes)
}

fn tick(ledger: &Ledger, rules: &Rules, now: Now) -> Vec<Change> {
    let timing = &rules.timing;
    let mut changes = Vec::new();
    for (resource, state) in ledger.breakers.iter() {
        if let Some(breaker) = breaker::ticked(state, timing, now) {
            changes.push(Change::BreakerTurned { resource: resource.clone(), breaker });
        }
    }
    for part in ledger.parts.values().filter(|p| p.present) {
        let due =
            part.devices.iter().filter(|(_, d)| due_to_leave(d, timing.retire_ms, timing.named_ms, now));
        changes.extend(due.map(|((resource, share), _)| Change::Delisted(part.key(resource, *share))));
    }
    let gone_for_good = ledger.parts.iter().filter(|(_, part)| is_gone_for_good(ledger, part, timing, now));
    changes.extend(gone_for_good.map(|(id, _)| Change::PartForgotten(id.clone())));
    changes.extend(drain::ticked(ledger, now));
    changes.extend(evict::ticked(ledger));
    // What ends prunes as many; more are left where the settings allow fewer than they did.
    changes.extend(ledger.ended.to_prune(rules.history, None).into_iter().map(Change::Pruned));
    changes
}

/// Whether a part went and will not come back by that name: a MIG instance that was destroyed on a
/// GPU that is still there. A GPU itself may come back, so an operator lets go of it.
fn is_gone_for_good(ledger: &Ledger, part: &PartState, timing: &Timing, now: Now) -> bool {
    let gpu = part.part.gpu();
    let gpu_is_there = ledger.parts.values().any(|p| p.present && p.part.gpu() == gpu);
    let named = |d: &Device| d.named_mono_ms.is_some_and(|at| !now.passed(at, timing.named_ms));
    !part.present
        && gpu_is_there
        && part.part.parent.is_some()
        && now.passed(part.turned_mono_ms, timing.retire_ms)
        && now.passed(part.idle_since_mono_ms, timing.retire_ms)
        && !part.devices.values().any(|d| d.held() || named(d))
}

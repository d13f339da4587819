//! All invariants after every turn, and what the world was promised.

use super::disk::Disk;
use super::ends::{Cause, Ends, Truth, Turn};
use super::limits::ReportedLimits;
use super::marks::Marks;
use super::state;
use super::violation::Violation;
use berth_kernel::evidence::kubelet_view::{CheckpointEntry, ReconcileView};
use berth_kernel::grants::allocate::RECORDS_PER_DEVICE;
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::grants::pod_candidates::candidates;
use berth_kernel::grants::prepare::ClaimToPrepare;
use berth_kernel::ids::names::{AllocationId, DeviceId, GpuId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::{Command, StackAnswer};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::record::{RecordKey, records};
use berth_kernel::node::rules::Rules;
use berth_kernel::policy::hooks::AdmitRequest;
use berth_kernel::policy::judge_again::to_judge_again;
use berth_kernel::sharing::breaker::Phase;
use berth_kernel::sharing::via::KubeletApi;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Beside the ledger: what it was heard to say.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    pub(crate) violations: Vec<Violation>,
    pub(crate) marks: Marks,
    ends: Ends,
    limits: ReportedLimits,
    /// Grants that were answered with success and have not ended.
    answered: BTreeMap<AllocationId, (Resource, Vec<DeviceId>)>,
    /// GPUs whose API an operator's order was answered with: the API, and whether the GPU leaves it.
    apis: BTreeMap<GpuId, (KubeletApi, bool)>,
    /// GPUs whose cordon (or uncordon) was acknowledged to an operator.
    cordoned: BTreeMap<GpuId, bool>,
}

/// What a turn was about, for the checks.
pub(crate) struct Heard<'a> {
    pub(crate) command: &'a Command,
    pub(crate) cause: Cause,
    pub(crate) taken_in: bool,
    /// Whether memory and disk may differ at present.
    pub(crate) may_differ: bool,
    pub(crate) now: Now,
    pub(crate) true_ms: u64,
}

impl Checks {
    pub(crate) fn note(&mut self, checked: Result<(), Violation>) {
        self.violations.extend(checked.err());
    }

    /// A command with an unknown outcome.
    pub(crate) fn unsure(&mut self, command: &Command, cause: Cause) {
        self.ends.unsure(cause);
        if let Command::Cordon { gpu, .. }
        | Command::Drain { gpu, .. }
        | Command::Uncordon { gpu, .. }
        | Command::Forget { gpu } = command
        {
            self.cordoned.remove(gpu);
        }
        if let Command::SetVia { gpu, .. } | Command::FinishMove { gpu } | Command::Forget { gpu } = command {
            self.apis.remove(gpu);
        }
    }

    /// After a turn that did not die.
    pub(crate) fn turn(
        &mut self,
        before: &Ledger,
        after: &Ledger,
        heard: &Heard<'_>,
        rules: &Rules,
        truth: Truth<'_>,
        disk: &Disk,
    ) {
        if let (Command::Allocate { request, .. }, true) = (heard.command, heard.taken_in) {
            self.granted(before, after, &request.devices, truth, heard.true_ms);
        }
        if let Command::Prepare { claim, .. } = heard.command {
            let checked = match heard.taken_in {
                true => self.prepared(before, after, claim),
                // An earlier command that failed may show in this turn that it was written after all.
                false if heard.may_differ || !self.ends.are_sure() => Ok(()),
                false => unchanged(before, after, &claim.claim.uid),
            };
            self.note(checked);
        }
        if let (Command::Unprepare { claim }, true) = (heard.command, heard.taken_in)
            && let Some(left) = of_claim(after, claim).next()
        {
            let what = format!("{claim} was unprepared and holds {}", left.id);
            self.violations.push(Violation::new("I5", what));
        }
        if heard.taken_in {
            self.heard_operator(heard.command);
            let moved = self.moved(before, after, heard.command);
            self.note(moved);
        }
        self.note(denied(before, after, heard.command));
        if let (Command::Reconcile(view), true) = (heard.command, heard.taken_in)
            && view.adopt
        {
            // An adopted allocation counts as granted now: the time of its grant is unknown.
            for (_, a) in after.live.iter().filter(|(id, _)| !before.live.contains_key(id)) {
                self.marks.named(&a.resource, &a.devices, heard.true_ms);
            }
        }
        let Heard { cause, taken_in, true_ms, .. } = heard;
        let turn = Turn { before, after, cause, taken_in: *taken_in, true_ms: *true_ms };
        let pods = self.ends.pods(&turn, heard.command, heard.now);
        self.note(pods);
        let containers = self.ends.containers(&turn, heard.command);
        self.note(containers);
        let limits = self.limits.turn(after, heard.command, *taken_in, heard.now);
        self.note(limits);
        let ends = self.ends.turn(&turn, &rules.timing, truth);
        self.note(ends);
        if let (Cause::Round(sight), true) = (cause, *taken_in) {
            self.note(contested(after, &sight.view));
        }
        self.generation(before, after, heard);
        // Health is shown first, and written with the next command for which no pod waits.
        let is_awaited = matches!(heard.command, Command::Allocate { .. } | Command::Prepare { .. });
        let health = disk.is_well() && !is_awaited;
        self.state(after, heard, rules, disk, health);
        // Memory was read back from the disk, or nothing is open.
        if !heard.may_differ {
            self.ends.sure();
        }
    }

    /// A new process has read the store.
    pub(crate) fn restarted(
        &mut self,
        before: &Ledger,
        after: &Ledger,
        heard: &Heard<'_>,
        rules: &Rules,
        truth: Truth<'_>,
        disk: &Disk,
    ) {
        let turn = Turn { before, after, cause: &Cause::Nothing, taken_in: false, true_ms: heard.true_ms };
        let ends = self.ends.turn(&turn, &rules.timing, truth);
        self.note(ends);
        self.ends.restarted();
        self.limits.restarted();
        // What is live now, this process knows since now.
        let turn = Turn { before: after, ..turn };
        let ends = self.ends.turn(&turn, &rules.timing, truth);
        self.note(ends);
        self.ends.sure();
        // A crash may have come between a GPU's record and that of its health, which the first command writes.
        self.state(after, heard, rules, disk, false);
    }

    /// What holds of every ledger. `health`: whether the store has the health of the GPUs by now.
    fn state(&mut self, ledger: &Ledger, heard: &Heard<'_>, rules: &Rules, disk: &Disk, health: bool) {
        self.note(state::check(ledger, rules, heard.now));
        if !heard.may_differ {
            self.note(judged(ledger));
        }
        let left = self.marks.look(ledger, &rules.timing, heard.true_ms);
        self.note(left);
        self.kept(ledger);
        if !heard.may_differ {
            // I5: what is written is what is. A store that was never written to has no stack.
            let mut all = records(ledger);
            all.retain(|r| r.key() != RecordKey::Stack || ledger.stack.revision > 0);
            if let Some(difference) = disk.differs(&all, health) {
                self.violations.push(Violation::new("I5", difference));
            }
        }
    }

    /// I5: whatever was answered with success is live until a rule ends it.
    fn kept(&mut self, ledger: &Ledger) {
        let mut lost = Vec::new();
        self.answered.retain(|id, (resource, devices)| match ledger.live.get(id) {
            Some(a) if a.resource == *resource && a.devices == *devices => true,
            Some(a) => {
                lost.push(format!("{id} was answered with {devices:?} and is live with {:?}", a.devices));
                false
            }
            // Whether it may have ended, the ends say.
            None if ledger.ended.iter().any(|a| a.id == *id) => false,
            None => {
                lost.push(format!("{id} was answered with success and is gone"));
                false
            }
        });
        self.violations.extend(lost.into_iter().map(|what| Violation::new("I5", what)));
        for (gpu, answered) in &self.apis {
            let is = ledger.gpus.get(gpu).map(|state| (state.via.api, state.via.moving));
            if is != Some(*answered) {
                let what =
                    format!("an order for {gpu} was answered with the API {answered:?}, and it is {is:?}");
                self.violations.push(Violation::new("I5", what));
            }
        }
        for (gpu, cordoned) in &self.cordoned {
            let is = ledger.gpus.get(gpu).is_some_and(|g| !g.marks.is_empty());
            if is != *cordoned {
                let what =
                    format!("an operator was answered that {gpu} is cordoned: {cordoned}, and it is {is}");
                self.violations.push(Violation::new("I5", what));
            }
        }
    }

    /// I1, I4, I5: each request of the claim has its devices and nothing else does, by the allocations that it had before.
    fn prepared(&mut self, before: &Ledger, after: &Ledger, claim: &ClaimToPrepare) -> Result<(), Violation> {
        let uid = &claim.claim.uid;
        let live: Vec<_> = of_claim(after, uid).collect();
        if live.len() != claim.requests.len() {
            let what = format!("{uid} was prepared with {} allocations", live.len());
            return Err(Violation::new("I5", what));
        }
        for request in &claim.requests {
            let (resource, devices) = (&request.devices.resource, &request.devices.devices);
            let Some(allocation) = live.iter().find(|a| a.resource == *resource && a.devices == *devices)
            else {
                let what = format!("{uid} was prepared without {devices:?}");
                return Err(Violation::new("I5", what));
            };
            for device in devices {
                let holders = after.device(resource, device).map_or(&[][..], |d| &d.holders);
                if holders != [allocation.id] {
                    let what = format!("{device} of {uid} is held by {holders:?}");
                    return Err(Violation::new("I1", what));
                }
                let part = before.part(&device.part).filter(|_| !before.live.contains_key(&allocation.id));
                let drains =
                    |part| before.gpu_of(part).is_some_and(|gpu| gpu.marks.orders().next().is_some());
                if part.is_some_and(|part| !before.is_usable(part) || drains(part)) {
                    let what = format!("{device} was granted to {uid}, although it may not be");
                    return Err(Violation::new("I4", what));
                }
            }
            let granted = (allocation.resource.clone(), allocation.devices.clone());
            self.answered.insert(allocation.id, granted);
        }
        let had: Vec<_> = of_claim(before, uid).map(|a| (&a.resource, &a.devices)).collect();
        let has: Vec<_> = live.iter().map(|a| (&a.resource, &a.devices)).collect();
        if had == has && of_claim(before, uid).any(|a| !after.live.contains_key(&a.id)) {
            return Err(Violation::new("I5", format!("{uid} was prepared again by other allocations")));
        }
        Ok(())
    }

    /// I14: an order is as it was given, and a GPU changes its API only after one, without allocations of the former.
    fn moved(&mut self, before: &Ledger, after: &Ledger, command: &Command) -> Result<(), Violation> {
        let gpu = match command {
            Command::SetVia { gpu, .. } | Command::FinishMove { gpu } => gpu,
            Command::Forget { gpu } => {
                self.apis.remove(gpu);
                return Ok(());
            }
            _ => return Ok(()),
        };
        let via = |ledger: &Ledger| ledger.gpus.get(gpu).map(|state| (state.via.api, state.via.moving));
        let (Some((old, was_moving)), Some((new, moving))) = (via(before), via(after)) else {
            return Err(Violation::new("I14", format!("an order for {gpu}, which is unknown, was taken")));
        };
        let right = match command {
            Command::SetVia { api, .. } => new == old && moving == (*api != old),
            _ => !moving && (new != old) == was_moving,
        };
        let left = before.live.values().filter(|a| before.gpus_of(a).contains(gpu));
        let of_old = |a: &&Arc<Allocation>| a.origin.claim().is_some() == (old == KubeletApi::Dra);
        if !right || (new != old && left.filter(of_old).count() > 0) {
            let what = format!("{gpu} went from {old} (moving: {was_moving}) to {new} (moving: {moving})");
            return Err(Violation::new("I14", what));
        }
        self.apis.insert(gpu.clone(), (new, moving));
        Ok(())
    }

    fn heard_operator(&mut self, command: &Command) {
        match command {
            Command::Cordon { gpu, .. } | Command::Drain { gpu, .. } => {
                self.cordoned.insert(gpu.clone(), true)
            }
            Command::Uncordon { gpu, .. } => self.cordoned.insert(gpu.clone(), false),
            Command::Forget { gpu } => self.cordoned.remove(gpu),
            _ => None,
        };
    }

    /// I4, I7, and that the requested devices are granted.
    fn granted(
        &mut self,
        before: &Ledger,
        after: &Ledger,
        asked: &[DeviceId],
        truth: Truth<'_>,
        true_ms: u64,
    ) {
        let new =
            |(id, _): &(&AllocationId, _)| !before.live.contains_key(id) && !self.answered.contains_key(id);
        // A grant that was written although its append failed can come to light in the same turn.
        let Some((_, allocation)) = after.live.iter().rev().find(new) else {
            self.violations
                .push(Violation::new("I5", "an Allocate was answered with success and is not live"));
            return;
        };
        let allocation = Allocation::clone(allocation);
        if allocation.devices != asked {
            let what = format!("{asked:?} were asked for and {:?} granted", allocation.devices);
            self.violations.push(Violation::new("I8", what));
        }
        for id in &allocation.devices {
            let may = before.may_grant_device(&allocation.resource, id);
            // The next container of the same pod requests what its init container holds.
            if !may && !truth.kubelet.is_of_init_container(&allocation.resource, id) {
                let what = format!("{id} was granted to a new pod, although it may not be");
                self.violations.push(Violation::new("I4", what));
            }
            let holders = after.device(&allocation.resource, id).map_or(&[][..], |d| &d.holders);
            self.note(bounded(after, id, holders));
            for older in holders.iter().filter(|h| **h != allocation.id) {
                if after.live.get(older).is_some_and(|a| !a.overlapped) {
                    let what = format!("{older} still counts although {} has its {id}", allocation.id);
                    self.violations.push(Violation::new("I7", what));
                }
            }
        }
        self.marks.named(&allocation.resource, &allocation.devices, true_ms);
        self.answered.insert(allocation.id, (allocation.resource, allocation.devices));
    }

    /// I11: one more with each applied entry. A look is shown before it is recorded, and a store that
    /// was read back counts one; health is written after the entry, so a turn can read it back twice.
    fn generation(&mut self, before: &Ledger, after: &Ledger, heard: &Heard<'_>) {
        let shown_first = matches!(heard.command, Command::RecordScan(_) | Command::ApplyTriage(_));
        let most = before.generation + 3 + u64::from(shown_first);
        let right = after.generation >= before.generation && after.generation <= most;
        if !right {
            let what = format!("from generation {} to {}", before.generation, after.generation);
            self.violations.push(Violation::new("I11", what));
        }
    }
}

/// I1: after a round with a fresh checkpoint the ledger knows which of its devices are held by another pod, too.
fn contested(ledger: &Ledger, view: &ReconcileView) -> Result<(), Violation> {
    let Some(entries) = view.checkpoint.as_ref().filter(|_| view.fresh && !view.adopt) else {
        return Ok(());
    };
    for entry in entries {
        let Some((id, sighting)) = entry.allocation.and_then(|id| Some((id, ledger.sightings.get(&id)?)))
        else {
            continue;
        };
        let allocation = &ledger.live[&id];
        let shares = |other: &CheckpointEntry| {
            other.pod_uid != entry.pod_uid
                && other.resource == allocation.resource
                && other.devices.iter().any(|device| allocation.devices.contains(device))
        };
        let is_contested = entries.iter().any(shares);
        if sighting.since_mono_ms < view.began_mono_ms && sighting.contested != is_contested {
            let what =
                format!("{id} shares devices with another pod: {is_contested}, and the ledger denies it");
            return Err(Violation::new("I1", what));
        }
    }
    Ok(())
}

/// I3: a policy's denial withdraws nothing where a source shows the pods, which are all of one namespace.
fn denied(before: &Ledger, after: &Ledger, command: &Command) -> Result<(), Violation> {
    let Command::Allocate {
        request: AdmitRequest { resource, devices, claim: None },
        answer: StackAnswer::Deny { .. },
        ..
    } = command
    else {
        return Ok(());
    };
    let is_open = |ledger: &Ledger| {
        ledger.breakers.get(resource).is_some_and(|breaker| matches!(breaker.phase, Phase::Open { .. }))
    };
    let is_known = !candidates(before, resource, devices.len()).is_empty();
    if is_known && is_open(after) && !is_open(before) {
        return Err(Violation::new("I3", format!("a denial of one namespace withdraws {resource}")));
    }
    Ok(())
}

/// I5: a claim that is refused keeps what it has, and is granted nothing.
fn unchanged(before: &Ledger, after: &Ledger, uid: &str) -> Result<(), Violation> {
    let ids = |ledger| of_claim(ledger, uid).map(|allocation| allocation.id).collect::<Vec<_>>();
    let (had, has) = (ids(before), ids(after));
    if had == has {
        return Ok(());
    }
    Err(Violation::new("I5", format!("{uid} was refused, had {had:?} and has {has:?}")))
}

/// The live allocations of a claim.
fn of_claim<'l>(ledger: &'l Ledger, uid: &str) -> impl Iterator<Item = &'l Arc<Allocation>> {
    ledger.live.values().filter(move |a| a.origin.claim().is_some_and(|request| request.claim.uid == uid))
}

/// No GPU is judged by a policy that is not active.
fn judged(ledger: &Ledger) -> Result<(), Violation> {
    let left = to_judge_again(ledger, &ledger.stack.entries);
    if left.is_empty() {
        return Ok(());
    }
    Err(Violation::new("health", format!("a policy that is not active judged {left:?}")))
}

/// I6: records that no source can judge do not accumulate on a device. Those that a grant must leave are known to a
/// source, or alone on another of their devices.
fn bounded(ledger: &Ledger, device: &DeviceId, holders: &[AllocationId]) -> Result<(), Violation> {
    let old = holders.len().saturating_sub(RECORDS_PER_DEVICE);
    let piled = holders[..old].iter().filter_map(|id| ledger.live.get(id)).filter(|allocation| {
        let newest = |id| ledger.holders_of(&allocation.resource, id).last() == Some(&allocation.id);
        allocation.holder.is_unknown() && !allocation.devices.iter().any(newest)
    });
    match piled.count() {
        0 => Ok(()),
        n => Err(Violation::new("I6", format!("{n} records of {device} pile up that no source knows"))),
    }
}

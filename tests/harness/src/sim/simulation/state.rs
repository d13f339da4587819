//! What must be true of every ledger, whatever happened: I1, I2, I3.

use super::violation::Violation;
use berth_kernel::ids::names::{AllocationId, DeviceId, GpuId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::{Attempt, Command, StackAnswer};
use berth_kernel::node::decide::decide;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::refusal::Refusal;
use berth_kernel::node::rules::Rules;
use berth_kernel::policy::hooks::{AdmitRequest, Terms};
use berth_kernel::sharing::breaker::Phase;
use berth_kernel::sharing::listing::{ListedDevice, listing};
use berth_kernel::sharing::offer::Consumes;
use berth_kernel::sharing::part_state::PartState;
use berth_kernel::sharing::via::KubeletApi;
use std::collections::BTreeSet;

/// Checks a ledger alone.
pub(crate) fn check(ledger: &Ledger, rules: &Rules, now: Now) -> Result<(), Violation> {
    // No restart and no second reading of the store changes them.
    if *ledger.rules != *rules {
        return Err(Violation::new("rules", format!("{:?} instead of {rules:?}", ledger.rules)));
    }
    for part in ledger.parts.values() {
        holders(ledger, part)?;
        counters(ledger, part, rules)?;
    }
    for resource in ledger.resources() {
        listed(ledger, &resource, now)?;
    }
    apis(ledger)
}

/// I14: a GPU has no allocation that was granted through the API that it does not have. Adopted allocations are excepted,
/// since another plugin granted them.
fn apis(ledger: &Ledger) -> Result<(), Violation> {
    for allocation in ledger.live.values().filter(|allocation| !allocation.decision.is_adoption()) {
        let api = |gpu: &GpuId| ledger.gpus.get(gpu).map(|state| state.via.api);
        let own =
            if allocation.origin.claim().is_some() { KubeletApi::Dra } else { KubeletApi::DevicePlugin };
        if let Some(gpu) = ledger.gpus_of(allocation).iter().find(|gpu| api(gpu) != Some(own)) {
            let what = format!(
                "{} was granted through {own}, and {gpu} is granted through the other",
                allocation.id
            );
            return Err(Violation::new("I14", what));
        }
    }
    Ok(())
}

/// I1: no two live allocations of different pods hold the same device.
fn holders(ledger: &Ledger, part: &PartState) -> Result<(), Violation> {
    for ((resource, share), device) in &part.devices {
        let id = part.key(resource, *share).id;
        let mut pods = BTreeSet::new();
        let mut current = 0;
        for holder in &device.holders {
            let Some(allocation) = ledger.live.get(holder) else {
                return Err(Violation::new("I1", format!("{id} is held by {holder}, which is not live")));
            };
            if !allocation.overlapped {
                current += 1;
                pods.insert(&allocation.holder.pod_uid);
            }
        }
        if current > 1 && (pods.len() != 1 || pods.contains(&None)) {
            return Err(Violation::new("I1", format!("{id} of {resource} is held for {pods:?}")));
        }
    }
    Ok(())
}

/// I2: what is granted takes no more than there is, counter by counter. Counted here independently.
///
/// What was taken over was not granted: where another plugin granted more than there is, or an
/// operator ended what a pod still had, the ledger says so rather than to lose track of it.
fn counters(ledger: &Ledger, part: &PartState, rules: &Rules) -> Result<(), Violation> {
    let taken_over = |id: &AllocationId| ledger.live.get(id).is_some_and(|a| a.decision.is_adoption());
    if part.devices.values().flat_map(|d| &d.holders).any(taken_over) {
        return Ok(());
    }
    let (mut wholes, mut slices, mut memory, mut compute) = (0, 0, 0, 0);
    for device in part.devices.values().filter(|d| d.held()) {
        match device.consumes {
            Consumes::Whole => wholes += 1,
            Consumes::Slice { memory_mib, compute_percent } => {
                slices += 1;
                memory += memory_mib;
                compute += compute_percent;
            }
        }
    }
    let one_hardware = |other: &&PartState| {
        other.part.gpu == part.part.gpu && other.part.is_whole_gpu() != part.part.is_whole_gpu()
    };
    let granted = |p: &&PartState| p.held() && !p.devices.values().flat_map(|d| &d.holders).any(taken_over);
    if let Some(other) = ledger.parts.values().map(AsRef::as_ref).filter(one_hardware).find(granted)
        && part.held()
    {
        return Err(Violation::new("I2", format!("{} and {} are both held", part.part.id, other.part.id)));
    }
    let has = part.part.memory_mib * u64::from(rules.overcommit_percent) / 100;
    if (wholes > 0 && wholes + slices > 1) || memory > has || compute > 100 {
        let what = format!(
            "{} gives {wholes} wholes, {slices} slices, {memory} of {has} MiB, {compute} percent",
            part.part.id
        );
        return Err(Violation::new("I2", what));
    }
    Ok(())
}

/// I3: Healthy is what is held on a working GPU, and what could be granted all at once; and what
/// could be granted beside that is Healthy too, lowest numbers first.
fn listed(ledger: &Ledger, resource: &Resource, now: Now) -> Result<(), Violation> {
    let list = listing(ledger, resource);
    let is_withdrawn = ledger.breakers.get(resource).is_some_and(|b| b.phase != Phase::Closed);
    let bad = |l: &ListedDevice, why: &str| {
        let health = if l.healthy { "Healthy" } else { "Unhealthy" };
        Err(Violation::new("I3", format!("{} of {resource} is listed {health} {why}", l.id)))
    };
    let mut free: Vec<DeviceId> = Vec::new();
    for l in &list {
        let Some(part) = ledger.part(&l.id.part) else {
            return bad(l, "and has no part");
        };
        let Some(device) = part.device(resource, l.id.share) else {
            return bad(l, "and is no device");
        };
        if device.held() {
            let evicts = ledger.gpu_of(part).is_some_and(|g| g.marks.evicts());
            // The kubelet would count a device that a claim holds as free.
            let newest = device.holders.last().and_then(|id| ledger.live.get(id));
            let of_claim = newest.is_some_and(|newest| newest.origin.claim().is_some());
            if l.healthy != (ledger.is_usable(part) && !evicts && !of_claim) {
                return bad(l, "while held");
            }
        } else if l.healthy {
            free.push(l.id.clone());
        } else if device.offered() && ledger.may_grant(part) && !is_withdrawn {
            let lower =
                list.iter().filter(|o| o.id.part == l.id.part && o.healthy && !held(ledger, resource, &o.id));
            let promised = |o: &&ListedDevice| o.healthy && !held(ledger, resource, &o.id);
            let mut kin = ledger.parts_on_same_hardware(part);
            if kin.any(|k| list.iter().filter(promised).any(|o| o.id.part == k.part.id)) {
                continue;
            }
            let mut taken = ledger.taken(part);
            for other in lower {
                let Some(lower) = part.device(resource, other.id.share) else { continue };
                if lower.consumes == device.consumes && other.id > l.id {
                    return bad(l, "while a higher number is Healthy");
                }
                taken = taken.plus(lower.consumes);
            }
            if taken.plus(device.consumes).excess(ledger.memory_to_grant_mib(part)).is_none() {
                return bad(l, "and could be had");
            }
        }
    }
    if free.is_empty() {
        return Ok(());
    }
    // One Allocate may request any devices that the kubelet considers free.
    match decide(ledger, &allow(resource, free.clone()), now).refusal {
        None | Some(Refusal::LedgerFull { .. }) => Ok(()),
        Some(refusal) => {
            Err(Violation::new("I3", format!("{free:?} of {resource} are listed free: {refusal}")))
        }
    }
}

fn held(ledger: &Ledger, resource: &Resource, id: &DeviceId) -> bool {
    ledger.device(resource, id).is_some_and(berth_kernel::sharing::part_state::Device::held)
}

fn allow(resource: &Resource, devices: Vec<DeviceId>) -> Command {
    Command::Allocate {
        request: AdmitRequest { resource: resource.clone(), devices, claim: None },
        answer: StackAnswer::Allow { by: vec!["baseline".into()], terms: Terms::default() },
        evaluated: None,
        attempt: Attempt::Last { asked_mono_ms: 0 },
    }
}

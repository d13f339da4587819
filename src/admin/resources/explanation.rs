//! Why an allocation has its devices, in sentences: the preferred placement, the decision of the policies, and what
//! is no longer recorded.

use berth_api::{DecisionRecord, Explanation, rfc3339};
use berth_core::admission::KernelHandle;
use berth_kernel::allocation::Allocation;
use berth_kernel::decider::Decider;
use berth_kernel::decision::{CallOutcome, Decision, Filter, Outcome, Requester};
use berth_kernel::ledger::Ledger;
use berth_kernel::names::{DeviceId, PartId};
use berth_kernel::policy::Hook;
use std::collections::{BTreeMap, BTreeSet};

/// Longest time between a placement and its Allocate: the kubelet requests the placement just before, but waits in
/// between for other containers of the pod.
const PLACED_BEFORE_MS: u64 = 60_000;
/// Most placements that are searched.
const PLACEMENTS: usize = 100;
/// Most pages of the journal that are searched for one decision: all of it, at the default size.
const PAGES: usize = 8;

/// Explains an allocation; without a readable journal, from the allocation itself.
pub(crate) async fn explain(kernel: &KernelHandle, node: &Ledger, allocation: &Allocation) -> Explanation {
    let admitted = admitted(kernel, allocation).await;
    let placed = match &admitted {
        Some(admitted) => placed(kernel, allocation, admitted).await,
        None => None,
    };
    let mut sentences = vec![what(node, allocation)];
    match (&admitted, &placed) {
        (Some(_), Some(placed)) => sentences.extend(why_there(node, allocation, placed)),
        (Some(_), None) => sentences.push(
            "The kubelet did not call GetPreferredAllocation just before, and chose these devices itself."
                .into(),
        ),
        (None, _) => sentences.push(
            "The decision is not recorded, or no longer; the following is from the allocation itself.".into(),
        ),
    }
    sentences.extend(why_allowed(allocation, admitted.as_ref()));
    if let Some(end) = &allocation.ended {
        sentences.push(format!("It ended at {} ({}).", rfc3339(end.wall_ms), end.reason.as_str()));
    }
    let decisions = placed.iter().chain(&admitted).map(DecisionRecord::of).collect();
    Explanation { allocation: allocation.id.to_string(), sentences, decisions }
}

async fn admitted(kernel: &KernelHandle, allocation: &Allocation) -> Option<Decision> {
    let whose = Requester { allocations: vec![allocation.id], pod: None };
    // By its id only: the clock may have been set meanwhile.
    let mut filter = Filter { requester: Some(whose), hook: Some(Hook::Admit), ..Filter::default() };
    for _ in 0..PAGES {
        let (found, _) = kernel.decisions(filter.clone(), 1).await.ok()?;
        if let Some(decision) = found.decisions.into_iter().next() {
            return Some(decision);
        }
        filter.before = Some(found.next?);
    }
    None
}

/// The newest placement of exactly these devices, else of as many of this resource that its pod may have requested.
async fn placed(kernel: &KernelHandle, allocation: &Allocation, admitted: &Decision) -> Option<Decision> {
    let filter = Filter {
        hook: Some(Hook::Place),
        since_wall_ms: Some(admitted.at_wall_ms.saturating_sub(PLACED_BEFORE_MS)),
        before: Some(admitted.seq),
        ..Filter::default()
    };
    let found = kernel.decisions(filter, PLACEMENTS).await.ok()?.0.decisions;
    let asked = |d: &&Decision| {
        let request = d.request.as_ref();
        request.is_some_and(|r| {
            r.resource == allocation.resource.as_str() && r.count == allocation.devices.len()
        })
    };
    let same = |d: &&Decision| matches!(&d.outcome, Outcome::Placed(p, _) if set(&p.devices) == set(&allocation.devices));
    let of_these = found.iter().find(|d| asked(d) && same(d));
    let holder = &allocation.holder;
    let own = holder.namespace.as_ref().zip(holder.pod.as_ref()).map(|(ns, pod)| format!("{ns}/{pod}"));
    let may_be_its =
        |d: &&Decision| asked(d) && own.as_ref().is_some_and(|own| d.candidates == [own.as_str()]);
    of_these.or_else(|| found.iter().find(may_be_its)).cloned()
}

fn set(devices: &[DeviceId]) -> BTreeSet<&DeviceId> {
    devices.iter().collect()
}

fn what(node: &Ledger, allocation: &Allocation) -> String {
    let holder = &allocation.holder;
    let who = match (&holder.namespace, &holder.pod) {
        (Some(namespace), Some(pod)) => {
            let container = holder.container.as_deref().map_or_else(String::new, |c| format!("/{c}"));
            format!("{namespace}/{pod}{container}")
        }
        _ => "a pod that no source has shown yet".into(),
    };
    format!(
        "{} is {} x {} on {} for {who}, granted at {}.",
        allocation.id,
        allocation.devices.len(),
        allocation.resource,
        gpus(node, &allocation.devices),
        rfc3339(allocation.granted_wall_ms)
    )
}

fn why_there(node: &Ledger, allocation: &Allocation, placed: &Decision) -> Vec<String> {
    let Outcome::Placed(placement, by) = &placed.outcome else { return Vec::new() };
    let of = placed.request.as_ref().map_or(0, |r| r.devices.len());
    let required = match of {
        0 => String::new(),
        _ => format!(", {of} of them required"),
    };
    let because = if placement.reason.is_empty() { String::new() } else { format!(": {}", placement.reason) };
    let mut sentences = vec![format!(
        "When the kubelet asked for {}{required}, {} chose {}{because}.",
        if placement.devices.len() == 1 {
            "device".into()
        } else {
            format!("{} devices", placement.devices.len())
        },
        name(by),
        gpus(node, &placement.devices),
    )];
    for call in placed.calls.iter().filter(|call| call.policy != by.as_str()) {
        match &call.outcome {
            CallOutcome::Pass => sentences.push(format!("{} passed.", call.policy)),
            CallOutcome::Fault(fault) => {
                sentences.push(format!("{} was called first and failed: {fault}.", call.policy));
            }
            CallOutcome::Suspended => {
                sentences
                    .push(format!("{} was not called: it was suspended after too many faults.", call.policy));
            }
            CallOutcome::Answer(_) => {}
        }
    }
    if set(&placement.devices) != set(&allocation.devices) {
        sentences.push(format!("The kubelet then allocated {} instead.", gpus(node, &allocation.devices)));
    }
    sentences
}

fn why_allowed(allocation: &Allocation, admitted: Option<&Decision>) -> Vec<String> {
    let decision = &allocation.decision;
    if decision.is_adoption() {
        return vec!["It is older than this daemon, which adopted it from the kubelet's checkpoint.".into()];
    }
    let because = if decision.reason.is_empty() { String::new() } else { format!(": {}", decision.reason) };
    let by: Vec<_> = decision.by.iter().map(name).collect();
    let mut sentences = vec![format!("Allowed by {}{because}.", by.join(", "))];
    for call in admitted.iter().flat_map(|d| &d.calls) {
        match &call.outcome {
            CallOutcome::Pass => sentences.push(format!("{} passed.", call.policy)),
            CallOutcome::Fault(fault) => {
                sentences.push(format!("{} failed and was skipped: {fault}.", call.policy));
            }
            CallOutcome::Suspended => {
                sentences
                    .push(format!("{} was not called: it was suspended after too many faults.", call.policy));
            }
            CallOutcome::Answer(_) => {}
        }
    }
    let memory = decision.limits.memory_mib.map(|m| format!("{m} MiB of memory"));
    let compute = decision.limits.compute_percent.map(|c| format!("{c} % of compute"));
    let limits: Vec<_> = memory.into_iter().chain(compute).collect();
    if !limits.is_empty() {
        sentences.push(format!("Its limits are {}.", limits.join(" and ")));
    }
    sentences
}

fn name(by: &Decider) -> String {
    match by {
        Decider::Baseline => "the built-in baseline, since all policies passed".into(),
        Decider::Adopted | Decider::Policy(_) => by.to_string(),
    }
}

/// `GPU 0 and GPU 2 (2 devices)`, sorted by index.
fn gpus(node: &Ledger, devices: &[DeviceId]) -> String {
    let mut counts = BTreeMap::<(u32, PartId), usize>::new();
    for device in devices {
        let part = node.part(&device.part);
        let index = part.map_or(u32::MAX, |p| p.part.gpu_index);
        let gpu = part.map_or(&device.part, |p| p.part.gpu()).clone();
        *counts.entry((index, gpu)).or_default() += 1;
    }
    let one = |((index, gpu), count): (&(u32, PartId), &usize)| {
        let many = if *count > 1 { format!(" ({count} devices)") } else { String::new() };
        if *index == u32::MAX { format!("{gpu}{many}") } else { format!("GPU {index}{many}") }
    };
    let all: Vec<_> = counts.iter().map(one).collect();
    match all.as_slice() {
        [] => "no GPU".into(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

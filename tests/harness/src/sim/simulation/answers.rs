//! What the stack made of policies' answers: never anything outside what was offered, free,
//! permitted (I8), and never more than one question to each (I9).

use super::violation::Violation;
use berth_core::stack::{Faults, Offers};
use berth_kernel::ids::names::{DeviceId, Digest, PartId};
use berth_kernel::node::command::StackAnswer;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::decider::Decider;
use berth_kernel::policy::hooks::{
    ENVIRONMENT_MAX, ENVIRONMENT_VALUE_BYTES_MAX, PlaceRequest, REASON_BYTES_MAX,
};
use berth_kernel::policy::stack::{OnFault, Stack, StackEntry};
use berth_kernel::sharing::offer::Consumes;
use std::collections::BTreeSet;

type Checked = Result<(), Violation>;

fn i8(what: impl Into<String>) -> Checked {
    Err(Violation::new("I8", what))
}

/// I9: each entry is called at most once, a suspended one not at all.
pub(crate) fn asked(stack: &Stack, before: &Faults, asked: &[Digest]) -> Checked {
    if asked.len() > stack.entries.len() {
        return Err(Violation::new(
            "I9",
            format!("{} calls of {} policies", asked.len(), stack.entries.len()),
        ));
    }
    for digest in asked {
        let mut places = stack.entries.iter().enumerate().filter(|(_, e)| e.digest == *digest);
        if places.all(|(place, entry)| before.is_suspended(place, entry)) {
            return Err(Violation::new("I9", format!("{} was asked while suspended", digest.short())));
        }
    }
    Ok(())
}

/// Every part that is there is offered as something exactly once, and within what it has.
pub(crate) fn offers(node: &Ledger, stack: &Stack, overcommit_percent: u32, offers: &Offers) -> Checked {
    let mut parts: BTreeSet<&PartId> =
        node.parts.iter().filter(|(_, p)| p.present).map(|(id, _)| id).collect();
    for (offer, by) in &offers.parts {
        if !parts.remove(&offer.part) {
            return i8(format!("{} is offered twice or is not there", offer.part));
        }
        let Some(part) = node.part(&offer.part) else { continue };
        let entry = stack.entries.iter().find(|e| e.decider() == *by);
        if part.part.mig_enabled && *by != Decider::Baseline && !offer.lines.is_empty() {
            return i8(format!("{} is in MIG mode and offered", offer.part));
        }
        let mut names = BTreeSet::new();
        for line in &offer.lines {
            let permitted = entry.is_none_or(|_| {
                let mut same = stack.entries.iter().filter(|e| e.decider() == *by);
                same.any(|e| {
                    e.permissions.allows_resource(&line.resource) && line.count <= e.permissions.share_max
                })
            });
            let fits = match line.consumes {
                Consumes::Whole => line.count == 1,
                Consumes::Slice { memory_mib, compute_percent } => {
                    memory_mib * 100 <= part.part.memory_mib * u64::from(overcommit_percent)
                        && compute_percent <= 100
                        && (1..=128).contains(&line.count)
                }
            };
            if !permitted || !fits || !names.insert(&line.resource) {
                return i8(format!("{by} offers {} as {line:?}", offer.part));
            }
        }
    }
    if parts.is_empty() {
        return Ok(());
    }
    Err(Violation::new("I9", format!("no policy offers {parts:?}")))
}

/// Environment that an entry of the stack may set; a denial by an entry that may deny.
pub(crate) fn admit(stack: &Stack, answer: &StackAnswer) -> Checked {
    match answer {
        StackAnswer::NotCalled => Ok(()),
        StackAnswer::Allow { by, terms } => {
            let allowing =
                || by.iter().flat_map(|label| stack.entries.iter().filter(move |e| e.decider() == *label));
            let mut keys = BTreeSet::new();
            for (key, value) in &terms.environment {
                let closed = ["NVIDIA_", "LD_", "BERTH_"].iter().any(|prefix| key.starts_with(prefix));
                let may = allowing().any(|e| e.permissions.allows_environment(key));
                let long = value.len() > ENVIRONMENT_VALUE_BYTES_MAX || value.contains('\n');
                if closed || !may || long || !keys.insert(key) {
                    return i8(format!("environment {key}={value:?} by {by:?}"));
                }
            }
            if keys.len() > ENVIRONMENT_MAX || terms.reason.len() > REASON_BYTES_MAX {
                return i8(format!("{} keys and a reason of {} bytes", keys.len(), terms.reason.len()));
            }
            Ok(())
        }
        StackAnswer::Deny { policy, .. } if labelled(stack, policy).any(|e| e.permissions.deny) => Ok(()),
        StackAnswer::Deny { policy, .. } => i8(format!("{policy} denies and may not")),
        StackAnswer::Faulted { policy, .. }
            if labelled(stack, policy).any(|e| e.on_fault == OnFault::Deny) =>
        {
            Ok(())
        }
        StackAnswer::Faulted { policy, .. } => Err(Violation::new(
            "I9",
            format!("{policy} failed and that denied the pod, although its rule is skip"),
        )),
    }
}

fn labelled<'s>(stack: &'s Stack, label: &'s str) -> impl Iterator<Item = &'s StackEntry> {
    stack.entries.iter().filter(move |e| e.label() == label)
}

/// As many as requested, all available, including the required ones.
pub(crate) fn place(request: &PlaceRequest, devices: &[DeviceId]) -> Checked {
    let chosen: BTreeSet<&DeviceId> = devices.iter().collect();
    let fits = chosen.len() == devices.len()
        && devices.len() == request.size.min(request.available.len())
        && chosen.iter().all(|id| request.available.contains(id))
        && request.required.iter().all(|id| chosen.contains(id));
    if fits { Ok(()) } else { i8(format!("{devices:?} is placed for {request:?}")) }
}

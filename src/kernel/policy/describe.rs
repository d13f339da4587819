//! Answers and offers as text, for authors of policies.

use crate::ids::names::{DeviceId, PartId};
use crate::node::ledger::Ledger;
use crate::policy::hooks::Answer;
use crate::sharing::offer::{Consumes, OfferLine};
use std::collections::BTreeMap;

/// A policy's answer. GPUs are named by their index on `node`.
#[must_use]
pub fn answer(answer: &Answer, node: &Ledger) -> String {
    match answer {
        Answer::Offer(offer) => {
            let mut gpus_by_offer: BTreeMap<String, Vec<String>> = BTreeMap::new();
            for part in &offer.parts {
                gpus_by_offer.entry(lines(&part.lines)).or_default().push(gpu(node, &part.part));
            }
            let mut text: Vec<_> =
                gpus_by_offer.iter().map(|(offer, gpus)| format!("{}: {offer}", gpus.join(" "))).collect();
            text.extend(offer.again_after_s.map(|s| format!("again after {s} s")));
            if text.is_empty() { "no GPU named".into() } else { text.join("; ") }
        }
        Answer::Place(placement) => {
            let devices: Vec<_> = placement.devices.iter().map(|id| device(node, id)).collect();
            format!("{} ({})", devices.join(", "), placement.reason)
        }
        Answer::Allow(terms) => {
            let mut text = vec!["allow".to_owned()];
            text.extend(terms.limits.memory_mib.map(|mib| format!("{mib} MiB")));
            text.extend(terms.limits.compute_percent.map(|percent| format!("{percent} % of compute")));
            text.extend(terms.environment.iter().map(|(key, value)| format!("{key}={value}")));
            let reason = if terms.reason.is_empty() { String::new() } else { format!(" ({})", terms.reason) };
            text.join(", ") + &reason
        }
        Answer::Deny(reason) => format!("deny ({reason})"),
        Answer::Triage(triage) => {
            let again = triage
                .again_after_s
                .map_or("until an operator marks it healthy".into(), |s| format!("again after {s} s"));
            format!("{}, {again} ({})", triage.severity.as_str(), triage.reason)
        }
    }
}

/// The offer of a part.
#[must_use]
pub fn lines(lines: &[OfferLine]) -> String {
    let line = |line: &OfferLine| match line.consumes {
        Consumes::Whole => format!("{} x {} (whole)", line.count, line.resource),
        Consumes::Slice { memory_mib, compute_percent } => {
            format!("{} x {} ({memory_mib} MiB, {compute_percent} %)", line.count, line.resource)
        }
    };
    let lines: Vec<_> = lines.iter().map(line).collect();
    if lines.is_empty() { "nothing".into() } else { lines.join(", ") }
}

/// `GPU 3`, or `GPU 3 (1g.10gb)` for a MIG instance; the UUID of one that vanished and whose index another GPU has now.
#[must_use]
pub fn gpu(node: &Ledger, id: &PartId) -> String {
    let part = node.part(id).map(|state| &state.part);
    match part.and_then(|part| Some((part, node.index_of(&part.gpu)?))) {
        None => id.to_string(),
        Some((part, index)) => match &part.mig {
            None => format!("GPU {index}"),
            Some(mig) => format!("GPU {index} ({})", mig.profile),
        },
    }
}

/// `GPU 3`, or `GPU 3 share 1`.
#[must_use]
pub fn device(node: &Ledger, id: &DeviceId) -> String {
    let share = id.share.map_or(String::new(), |n| format!(" share {n}"));
    gpu(node, &id.part) + &share
}

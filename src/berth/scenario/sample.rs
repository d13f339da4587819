//! Every question that a policy answers, once, on a sample node: what parameters break shows.

use super::format::Group;
use super::node::Node;
use berth_core::admission::{CALL_MS_MAX, Ear};
use berth_kernel::gpu::Reading;
use berth_kernel::ledger::Ledger;
use berth_kernel::names::{DeviceId, Resource};
use berth_kernel::policy::{AdmitRequest, FaultKind, Hook, PlaceRequest, PolicyVersion, Question};
use berth_kernel::policy_call::Call;
use berth_kernel::ports::{Clock as _, Policies as _};
use std::sync::Arc;

/// The sample: what many nodes look like.
const MODEL: &str = "h100";
/// As many as a board has.
const COUNT: u32 = 8;

/// Asks each hook.
///
/// # Errors
/// In words, which one failed and how.
pub(super) fn ask_all(policies: &Ear<'_>, version: &PolicyVersion, parameters: &str) -> Result<(), String> {
    let group = Group { model: MODEL.into(), count: COUNT, mig: Vec::new() };
    let mut node = Node::new(&[group], std::slice::from_ref(version), policies)?;
    // The baseline's offer: there are devices to place and to admit.
    node.settle()?;
    let shown = node.snapshot();
    // Parameters are read before a policy looks at any GPU: what they break, they break here.
    let empty = Arc::new(Ledger { policies: shown.policies.clone(), ..Ledger::default() });
    let resource = Resource::parse("nvidia.com/gpu").map_err(|error| error.to_string())?;
    let available: Vec<DeviceId> = node.free(&resource);
    let devices = available.iter().take(1).cloned().collect();
    let reading =
        Reading { part: node.gpu(0)?, source: "xid".into(), code: 79, detail: "fell off the bus".into() };
    let place = PlaceRequest { resource: resource.clone(), available, required: Vec::new(), size: 1 };
    let admit = AdmitRequest { resource, devices };
    for hook in &version.hooks {
        let question = match hook {
            Hook::Describe => continue,
            Hook::Offer => Question::Offer,
            Hook::Place => Question::Place(&place),
            Hook::Admit => Question::Admit(&admit),
            Hook::Triage => Question::Triage(&reading),
        };
        let nodes: &[&Arc<Ledger>] = if *hook == Hook::Offer { &[&empty, &shown] } else { &[&shown] };
        for node_shown in nodes {
            let call = Call {
                digest: &version.digest,
                parameters,
                node: node_shown,
                now: node.clock.now(),
                question,
                wall_ms_max: CALL_MS_MAX,
            };
            let gpus = if node_shown.parts.is_empty() { 0 } else { COUNT };
            policies.ask(call).map_err(|fault| match fault.kind {
                // The same in every hook, whatever it is asked.
                FaultKind::Parameters => fault.to_string(),
                _ => format!("`{hook}`, asked on a node of {gpus} GPUs: {fault}"),
            })?;
        }
    }
    Ok(())
}

//! Calls every hook of a policy once, on a sample node, to check its parameters.

use super::format::Group;
use super::node::Node;
use berth_core::stack::{CALL_MS_MAX, CallRecorder};
use berth_kernel::gpu::Reading;
use berth_kernel::ledger::Ledger;
use berth_kernel::names::{DeviceId, Resource};
use berth_kernel::policy::{AdmitRequest, FaultKind, Hook, PlaceRequest, PolicyVersion, Question};
use berth_kernel::policy_call::Call;
use berth_kernel::ports::{Clock as _, PolicyRuntime as _};
use std::sync::Arc;

/// The model of the sample node's GPUs.
const MODEL: &str = "h100";
/// The number of its GPUs: those of one board.
const COUNT: u32 = 8;

/// Calls each hook.
///
/// # Errors
/// The hook that failed, with its fault.
pub(super) fn call_all_hooks(
    policies: &CallRecorder<'_>,
    version: &PolicyVersion,
    parameters: &str,
) -> Result<(), String> {
    let group = Group { model: MODEL.into(), count: COUNT, mig: Vec::new() };
    let mut node = Node::new(&[group], std::slice::from_ref(version), policies)?;
    // The baseline's offers provide devices to place and admit.
    node.settle()?;
    let full = node.snapshot();
    // Policies read parameters before any GPU, so invalid ones fail on a node without GPUs, too.
    let empty = Arc::new(Ledger { policies: full.policies.clone(), ..Ledger::default() });
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
        let nodes: &[&Arc<Ledger>] = if *hook == Hook::Offer { &[&empty, &full] } else { &[&full] };
        for snapshot in nodes {
            let call = Call {
                digest: &version.digest,
                parameters,
                node: snapshot,
                now: node.clock.now(),
                question,
                wall_ms_max: CALL_MS_MAX,
            };
            let gpus = if snapshot.parts.is_empty() { 0 } else { COUNT };
            policies.call(call).answer.map_err(|fault| match fault.kind {
                // Independent of hook and node.
                FaultKind::Parameters => fault.to_string(),
                _ => format!("`{hook}`, called on a node with {gpus} GPUs: {fault}"),
            })?;
        }
    }
    Ok(())
}

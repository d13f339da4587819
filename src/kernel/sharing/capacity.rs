//! Why devices are neither held nor free, so that the numbers of a resource add up to its devices.

use crate::drain::marks::Drain;
use crate::ids::names::{GpuId, Resource};
use crate::node::ledger::Ledger;
use crate::policy::describe;
use crate::sharing::breaker::Phase;
use crate::sharing::part_state::{Device, PartState};
use crate::sharing::via::KubeletApi;
use std::collections::BTreeSet;

/// What keeps a device that is not held from being granted, the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NotFreeState {
    /// Its GPU is unhealthy or vanished.
    Unhealthy,
    /// Its GPU is cordoned or drained.
    Cordoned,
    /// The GPU works, and the device cannot be granted at present.
    Withdrawn,
}

/// Why a device is not free.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NotFree {
    /// What keeps it from being granted.
    pub state: NotFreeState,
    /// The reason, as a sentence without a full stop.
    pub reason: String,
    /// The GPU that the reason is about; `None` if it is about the node or the resource.
    pub gpu: Option<GpuId>,
}

/// Why a device of this part, which is not held and which [`crate::sharing::listing::listing`] shows Unhealthy, cannot
/// be granted.
#[must_use]
pub fn why_not_free(ledger: &Ledger, part: &PartState, resource: &Resource, device: &Device) -> NotFree {
    use NotFreeState::{Cordoned, Unhealthy, Withdrawn};
    let name = describe::gpu(ledger, &part.part.id);
    let of_gpu = |state, why: &str| NotFree {
        state,
        reason: format!("{name}: {why}"),
        gpu: Some(part.part.gpu.clone()),
    };
    let of_node = |reason: String| NotFree { state: Withdrawn, reason, gpu: None };
    if let Some(gpu) = ledger.gpu_of(part) {
        let health = &gpu.health;
        if !health.state.is_usable() {
            let why = if health.reason.is_empty() { health.state.as_str() } else { &health.reason };
            return of_gpu(Unhealthy, why);
        }
        if !part.present {
            return of_gpu(Unhealthy, "the last scan did not find it");
        }
        if !gpu.via.grants(KubeletApi::DevicePlugin) {
            let is_moving = gpu.via.api == KubeletApi::DevicePlugin;
            return of_gpu(
                Withdrawn,
                if is_moving { "it is to be moved to DRA" } else { "it is granted through DRA" },
            );
        }
        if !gpu.marks.is_empty() {
            return of_gpu(Cordoned, &describe_drain(&gpu.drain()));
        }
    }
    if let Some(why) = &ledger.device_access.no_strategy {
        return of_node(why.to_string());
    }
    if ledger.is_excluded(part) {
        return of_gpu(Withdrawn, "excluded by the configuration (gpus.exclude)");
    }
    if !device.offered() {
        return of_gpu(Withdrawn, "no longer offered; it is removed from the list within a minute");
    }
    if !ledger.device_access.gives(KubeletApi::DevicePlugin, part) {
        return of_gpu(Withdrawn, "no CDI specification names it yet");
    }
    if let Some(why) = ledger.why_not_enforceable(part, device) {
        return of_gpu(Withdrawn, &format!("its memory limit cannot be enforced: {why}"));
    }
    let memory_mib = ledger.memory_to_grant_mib(part);
    let has_room = ledger.taken(part).plus(device.consumes).excess(memory_mib).is_none();
    let holding = resources_held(ledger, part);
    if !has_room && !holding.is_empty() {
        return of_gpu(Withdrawn, &format!("too little is left of it: it is held as {}", holding.join(", ")));
    }
    match ledger.breakers.get(resource).map(|breaker| breaker.phase) {
        Some(Phase::Open { .. }) => of_node(format!(
            "{resource} is withdrawn for a while, since requests for it were denied repeatedly"
        )),
        Some(Phase::HalfOpen) => of_node(format!(
            "one device of {resource} is offered after repeated denials, and the others once a request succeeds or after \
             a while"
        )),
        Some(Phase::Closed) | None => of_gpu(
            Withdrawn,
            "too little of it would be left for this device if the other free devices were granted",
        ),
    }
}

/// The resources as which the part, or the hardware that it shares, is held.
fn resources_held(ledger: &Ledger, part: &PartState) -> Vec<String> {
    let parts = ledger.parts_on_same_hardware(part).chain([part]);
    let held = parts.flat_map(|part| part.devices.iter()).filter(|(_, device)| device.held());
    let names: BTreeSet<_> = held.map(|((resource, _), _)| resource.to_string()).collect();
    names.into_iter().collect()
}

fn describe_drain(drain: &Drain) -> String {
    let Some(mark) = drain.mark() else { return drain.as_str().to_owned() };
    let reason = mark.reason();
    let reason = if reason.is_empty() { String::new() } else { format!(" ({reason})") };
    let by = if matches!(drain, Drain::Draining(..) | Drain::Drained(_)) { ", ordered by" } else { " by" };
    format!("{}{by} {}{reason}", drain.as_str(), mark.by)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drain::marks::Author;
    use crate::evidence::limits::Enforcement;
    use crate::hardware::health::{Health, HealthState};
    use crate::node::change::{Change, Entry};
    use crate::node::command::Command;
    use crate::node::test_node::{Node, gpu_id, part, shared};
    use crate::sharing::breaker::Breaker;
    use crate::sharing::offer::Consumes;
    use crate::sharing::part_state::DeviceState;
    use std::sync::Arc;

    /// A node whose GPU-0 is offered as two shares of this memory.
    fn node(memory_mib: u64) -> Node {
        let mut node = Node::new();
        let state = Arc::make_mut(node.ledger.parts.get_mut(&part("GPU-0")).unwrap());
        for share in [0, 1] {
            let consumes = Consumes::Slice { memory_mib, compute_percent: 0 };
            state.devices.insert((shared(), Some(share)), Device::new(consumes, DeviceState::Offered));
        }
        node
    }

    fn why(node: &Node) -> (NotFreeState, String) {
        let state = node.ledger.part(&part("GPU-0")).unwrap();
        let device = state.device(&shared(), Some(1)).unwrap();
        let why = why_not_free(&node.ledger, state, &shared(), device);
        assert_eq!(why.gpu.is_some(), why.reason.starts_with("GPU 0: "), "{why:?}");
        (why.state, why.reason)
    }

    fn apply(node: &mut Node, change: Change) {
        node.ledger.apply(&Entry { at: node.now, changes: vec![change] });
    }

    #[test]
    fn the_worst_reason_counts() {
        let mut node = node(50_000);
        node.grant("GPU-0", Some(0), "pod", "main");
        let (state, reason) = why(&node);
        assert_eq!(state, NotFreeState::Withdrawn);
        assert_eq!(reason, "GPU 0: too little is left of it: it is held as nvidia.com/gpu.shared");
        let cordon =
            Command::Cordon { gpu: gpu_id("GPU-0"), author: Author::api("ann".into(), "fan".into()) };
        node.decide(&cordon).unwrap();
        assert_eq!(why(&node), (NotFreeState::Cordoned, "GPU 0: cordoned by ann (fan)".into()));
        let health = Health {
            state: HealthState::Unhealthy,
            reason: "XID 79: GPU has fallen off the bus".into(),
            ..Health::healthy(node.now)
        };
        apply(&mut node, Change::HealthChanged { gpu: gpu_id("GPU-0"), health });
        assert_eq!(why(&node), (NotFreeState::Unhealthy, "GPU 0: XID 79: GPU has fallen off the bus".into()));
    }

    #[test]
    fn a_device_whose_required_limit_cannot_be_enforced_says_so() {
        let mut node = node(50_000);
        Arc::make_mut(&mut node.ledger.rules).enforcement = Enforcement::Require;
        let (state, reason) = why(&node);
        assert_eq!(state, NotFreeState::Withdrawn);
        assert!(
            reason.starts_with("GPU 0: its memory limit cannot be enforced: the guard does not show"),
            "{reason}"
        );
    }

    #[test]
    fn a_device_without_room_beside_free_ones_and_one_of_a_withdrawn_resource_say_so() {
        let mut node = node(50_000);
        assert_eq!(
            why(&node).1,
            "GPU 0: too little of it would be left for this device if the other free devices were granted"
        );
        let phase = Phase::Open { until_mono_ms: 1 };
        let breaker =
            Some(Breaker { phase, denials: 0, namespaces: Vec::new(), window_mono_ms: 0, pause_ms: 10_000 });
        apply(&mut node, Change::BreakerChanged { resource: shared(), breaker });
        let (state, reason) = why(&node);
        assert_eq!(state, NotFreeState::Withdrawn);
        assert!(reason.starts_with("nvidia.com/gpu.shared is withdrawn for a while"), "{reason}");
        let state = Arc::make_mut(node.ledger.parts.get_mut(&part("GPU-0")).unwrap());
        let device = state.devices.get_mut(&(shared(), Some(1))).unwrap();
        device.state = DeviceState::Retiring { since_mono_ms: 0 };
        assert!(why(&node).1.contains("no longer offered"));
        // A GPU that is gone is named by its index only while no other GPU has it.
        for other in ["GPU-1", "MIG-a", "MIG-b"] {
            Arc::make_mut(node.ledger.parts.get_mut(&part(other)).unwrap()).part.gpu_index = 1;
        }
        apply(&mut node, Change::PartGone(part("GPU-0")));
        assert_eq!(why(&node), (NotFreeState::Unhealthy, "GPU 0: the last scan did not find it".into()));
    }
}

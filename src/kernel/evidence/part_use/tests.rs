//! Limits, their enforcement, and usage.

use super::*;
use crate::hardware::process::{Owner, Process};
use crate::node::test_node::{Node, of_pod, part, process, shared};
use crate::policy::decider::Decider;
use crate::sharing::offer::Consumes;
use std::sync::Arc;

fn with_memory(mut process: Process, memory_mib: Option<u64>) -> Process {
    process.memory_mib = memory_mib;
    process
}

/// Sets what the devices of an allocation take, and the memory limit of its decision.
fn limit(node: &mut Node, id: AllocationId, consumes: Consumes, decided_mib: Option<u64>) {
    let allocation = Arc::make_mut(Arc::make_mut(&mut node.ledger.live).get_mut(&id).unwrap());
    allocation.decision.limits.memory_mib = decided_mib;
    for device in allocation.devices.clone() {
        let state = Arc::make_mut(node.ledger.parts.get_mut(&device.part).unwrap());
        state.devices.get_mut(&(shared(), device.share)).unwrap().consumes = consumes;
    }
}

fn slice(memory_mib: u64) -> Consumes {
    Consumes::Slice { memory_mib, compute_percent: 25 }
}

fn only_use(node: &Node, id: AllocationId) -> PartUse {
    let uses = part_uses(&Attributions::new(&node.ledger), &node.ledger.live[&id]);
    assert_eq!(uses.len(), 1);
    uses.into_iter().next().unwrap()
}

#[test]
fn the_stricter_of_the_decided_limit_and_the_slice_applies() {
    for (on, share, consumes, decided, memory_mib, by) in [
        ("GPU-0", None, Consumes::Whole, None, None, None),
        ("GPU-0", None, Consumes::Whole, Some(500), Some(500), Some(EnforcedBy::None)),
        ("GPU-0", Some(0), slice(2_000), None, Some(2_000), Some(EnforcedBy::None)),
        ("GPU-0", Some(0), slice(2_000), Some(500), Some(500), Some(EnforcedBy::None)),
        ("GPU-0", Some(0), slice(2_000), Some(9_000), Some(2_000), Some(EnforcedBy::None)),
        ("MIG-a", None, Consumes::Whole, None, Some(10_240), Some(EnforcedBy::Mig)),
        ("MIG-a", Some(0), slice(5_000), None, Some(5_000), Some(EnforcedBy::None)),
    ] {
        let mut node = Node::new();
        let id = node.grant(on, share, "pod", "main");
        limit(&mut node, id, consumes, decided);
        let found = limits(&node.ledger, &node.ledger.live[&id], false);
        assert_eq!(
            found.and_then(|(limits, _)| limits.memory_mib),
            memory_mib,
            "{on} {consumes:?} {decided:?}"
        );
        assert_eq!(found.map(|(_, enforcer)| enforcer), by, "{on} {consumes:?} {decided:?}");
        let with_mps = limits(&node.ledger, &node.ledger.live[&id], true).map(|(_, enforcer)| enforcer);
        assert_eq!(with_mps, by.map(|by| by.max(EnforcedBy::Mps)), "{on} {consumes:?} {decided:?}");
        // The container of an adopted allocation was set up by another plugin.
        let mut adopted = Allocation::clone(&node.ledger.live[&id]);
        adopted.decision.by = vec![Decider::Adopted];
        assert_eq!(limits(&node.ledger, &adopted, true).map(|(_, enforcer)| enforcer), by);
    }
}

#[test]
fn memory_is_summed_by_allocation_and_compared_with_its_limit() {
    let mut node = Node::new();
    let (a, b) =
        (node.grant("GPU-0", Some(0), "pod-a", "main"), node.grant("GPU-0", Some(1), "pod-b", "main"));
    limit(&mut node, a, slice(1_000), None);
    limit(&mut node, b, slice(1_000), None);
    let on = |pid, pod, memory| ("GPU-0", with_memory(process(pid, "GPU-0", of_pod(pod, "main")), memory));
    for (first, second, used, over) in [
        (Some(400), Some(600), Some(1_000), Some(false)),
        (Some(401), Some(600), Some(1_001), Some(true)),
        // With the memory of one process unknown, only an excess is certain.
        (Some(10), None, None, None),
        (Some(2_000), None, None, Some(true)),
    ] {
        node.look(&[on(1, "pod-a", first), on(2, "pod-a", second), on(3, "pod-b", Some(5_000))]);
        let used_by_a = only_use(&node, a);
        assert_eq!((used_by_a.memory_used_mib, used_by_a.over_limit), (used, over), "{first:?} {second:?}");
        assert_eq!(used_by_a.pids, [1, 2]);
        assert_eq!(only_use(&node, b).over_limit, Some(true));
    }
    node.look(&[]);
    assert_eq!((only_use(&node, a).memory_used_mib, only_use(&node, a).over_limit), (Some(0), Some(false)));
}

#[test]
fn processes_that_two_containers_share_count_for_neither_and_are_listed() {
    let mut node = Node::new();
    let (a, b) = (node.grant("GPU-0", Some(0), "pod", "a"), node.grant("GPU-0", Some(1), "pod", "b"));
    limit(&mut node, a, slice(1_000), None);
    limit(&mut node, b, slice(1_000), None);
    let on = |pid, container, memory| {
        ("GPU-0", with_memory(process(pid, "GPU-0", of_pod("pod", container)), Some(memory)))
    };
    node.look(&[on(1, "a", 300), on(2, "", 500)]);
    let used = only_use(&node, a);
    assert_eq!((used.memory_used_mib, used.pids.as_slice()), (Some(300), &[1][..]));
    assert_eq!((used.shared_memory_mib, used.shared_pids, used.shared_with), (500, vec![2], vec![b]));
    assert_eq!(used.over_limit, Some(false), "even with all of the shared memory");
    assert_eq!(only_use(&node, b).shared_with, [a]);
    node.look(&[on(1, "a", 300), on(2, "", 900)]);
    assert_eq!(only_use(&node, a).over_limit, None, "not certain");
    node.look(&[on(1, "a", 1_300), on(2, "", 900)]);
    assert_eq!(only_use(&node, a).over_limit, Some(true));
}

#[test]
fn usage_is_unknown_where_processes_are_hidden() {
    let mut node = Node::new();
    let id = node.grant("GPU-0", Some(0), "pod", "a");
    limit(&mut node, id, slice(1_000), None);
    node.process_visibility = ProcessVisibility::Hidden { why: String::new(), fix: String::new() };
    node.look(&[]);
    let hidden = only_use(&node, id);
    assert_eq!(
        (hidden.memory_used_mib, hidden.over_limit, hidden.limits.memory_mib),
        (None, None, Some(1_000))
    );
}

#[test]
fn a_process_whose_instance_nvml_does_not_name_is_shared_by_the_instances() {
    let mut node = Node::new();
    let a = node.grant("MIG-a", None, "pod", "main");
    limit(&mut node, a, Consumes::Whole, None);
    let on = |on| ("GPU-1", with_memory(process(1, on, of_pod("pod", "main")), Some(700)));
    node.look(&[on("GPU-1")]);
    assert_eq!((only_use(&node, a).memory_used_mib, only_use(&node, a).shared_memory_mib), (Some(0), 700));
    node.look(&[on("MIG-a")]);
    assert_eq!((only_use(&node, a).memory_used_mib, only_use(&node, a).shared_memory_mib), (Some(700), 0));
    node.look(&[("GPU-1", process(1, "GPU-1", Owner::NoPod { container_id: None }))]);
    assert_eq!(only_use(&node, a).shared_pids, Vec::<u32>::new());
    assert_eq!(only_use(&node, a).part, part("MIG-a"));
}

//! Processes that keep a GPU busy, and hidden processes.

use super::*;
use crate::drain::marks::{Author, Order};
use crate::hardware::process::{Owner, UnknownReason, Uses};
use crate::node::command::Command;
use crate::node::decide::decide;
use crate::node::test_node::{Node, gpu_id, of_pod, part, process};

const HOST: Owner = Owner::NoPod { container_id: None };

fn graphics_only(mut process: Process) -> Process {
    process.uses = Uses { graphics: true, ..Uses::default() };
    process
}

fn ignored(mut process: Process) -> Process {
    process.identity.ignored = true;
    process
}

#[test]
fn ignored_daemons_and_the_hosts_display_do_not_keep_a_gpu_busy() {
    let on = |owner| process(1, "GPU-0", owner);
    for (process, busy) in [
        (on(HOST), 1),
        (on(of_pod("other-pod", "main")), 1),
        (on(Owner::Unknown(UnknownReason::Gone)), 1),
        (graphics_only(on(HOST)), 0),
        (graphics_only(on(Owner::Unknown(UnknownReason::Hidden))), 0),
        (graphics_only(on(of_pod("other-pod", "main"))), 1),
        (ignored(on(HOST)), 0),
        (ignored(on(of_pod("dcgm", "exporter"))), 0),
        // A process that an allocation explains counts, whatever its name.
        (ignored(on(of_pod("pod", "main"))), 1),
        (graphics_only(ignored(on(of_pod("pod", "main")))), 1),
    ] {
        let mut node = Node::new();
        node.grant("GPU-0", None, "pod", "main");
        node.look(&[("GPU-0", process.clone())]);
        assert_eq!(node.ledger.processes_on(&part("GPU-0")), Some(busy), "{process:?}");
    }
}

#[test]
fn a_process_on_several_instances_counts_once_for_the_gpu() {
    let mut node = Node::new();
    let on = |pid, part| ("GPU-1", process(pid, part, HOST));
    node.look(&[on(1, "MIG-a"), on(1, "MIG-b"), on(2, "MIG-b"), on(3, "GPU-1")]);
    let count = |name| node.ledger.processes_on(&part(name));
    assert_eq!(
        (count("GPU-1"), count("MIG-a"), count("MIG-b"), count("GPU-0")),
        (Some(3), Some(1), Some(2), Some(0))
    );
}

#[test]
fn an_empty_list_does_not_mean_no_processes_where_they_are_hidden() {
    let mut node = Node::new();
    node.process_visibility = ProcessVisibility::Unsupported { why: "no /proc".into() };
    node.look(&[]);
    assert_eq!(
        node.ledger.processes_on(&part("GPU-0")),
        None,
        "the daemon may be in a PID namespace of its own"
    );
    node.process_visibility =
        ProcessVisibility::Hidden { why: "own PID namespace".into(), fix: "hostPID".into() };
    node.look(&[]);
    assert_eq!(node.ledger.processes_on(&part("GPU-0")), None);
    node.look(&[("GPU-0", process(1, "GPU-0", Owner::Unknown(UnknownReason::Hidden)))]);
    assert_eq!(node.ledger.processes_on(&part("GPU-0")), Some(1), "processes that NVML lists count");
    assert!(matches!(node.ledger.process_visibility(), ProcessVisibility::Hidden { .. }));
    // Simulated GPUs have complete lists.
    node.look(&[]);
    let table = ProcessTable { complete: true, ..ProcessTable::clone(&node.ledger.processes) };
    node.ledger.processes = table.into();
    assert_eq!(node.ledger.processes_on(&part("GPU-0")), Some(0));
}

#[test]
fn processes_are_unsupported_if_no_gpu_lists_them() {
    let mut ledger = Node::new().ledger;
    assert_eq!(ledger.process_visibility(), ProcessVisibility::Visible);
    ledger.processes =
        ProcessTable { process_visibility: ProcessVisibility::Visible, ..ProcessTable::default() }.into();
    assert!(matches!(ledger.process_visibility(), ProcessVisibility::Unsupported { .. }));
    assert!(matches!(Ledger::default().process_visibility(), ProcessVisibility::Unsupported { .. }));
}

/// Drains `GPU-0`, scans every five seconds for this long, and returns its drain state.
fn drain_state_after(node: &mut Node, seconds: u64, processes: &[(&str, Process)]) -> String {
    let author = Author::api("ada".into(), String::new());
    let order = Command::Drain { gpu: gpu_id("GPU-0"), author, order: Order::default() };
    let verdict = decide(&node.ledger, &order, node.now);
    node.ledger.apply(&verdict.entry);
    for _ in 0..seconds / 5 {
        node.look(processes);
        node.pass(5);
    }
    node.look(processes);
    node.ledger.gpus[&gpu_id("GPU-0")].drain().as_str().to_owned()
}

#[test]
fn an_ignored_daemon_does_not_block_a_drain_and_a_leftover_process_does() {
    let daemon = [("GPU-0", ignored(process(1, "GPU-0", HOST)))];
    assert_eq!(drain_state_after(&mut Node::new(), 15, &daemon), "drained");
    let mut node = Node::new();
    let held = node.grant("GPU-0", None, "pod", "main");
    node.end(held);
    let leftover = [daemon[0].clone(), ("GPU-0", process(2, "GPU-0", of_pod("pod", "main")))];
    assert_eq!(drain_state_after(&mut node, 100, &leftover), "draining");
    assert_eq!(drain_state_after(&mut node, 15, &daemon), "drained");
}

#[test]
fn a_drain_waits_longer_where_processes_are_hidden() {
    let mut node = Node::new();
    node.process_visibility = ProcessVisibility::Hidden { why: String::new(), fix: String::new() };
    assert_eq!(drain_state_after(&mut node, 50, &[]), "draining");
    assert_eq!(drain_state_after(&mut node, 20, &[]), "drained");
    let mut node = Node::new();
    node.process_visibility = ProcessVisibility::Hidden { why: String::new(), fix: String::new() };
    let listed = [("GPU-0", process(1, "GPU-0", Owner::Unknown(UnknownReason::Hidden)))];
    assert_eq!(drain_state_after(&mut node, 100, &listed), "draining");
}

#[test]
fn a_scan_with_the_same_processes_changes_nothing() {
    let mut node = Node::new();
    let same = [("GPU-0", process(1, "GPU-0", HOST))];
    node.look(&same);
    node.pass(20);
    node.look(&same);
    let before = node.ledger.processes.clone();
    node.pass(5);
    node.look(&same);
    assert_eq!(node.ledger.processes, before);
    let many: Vec<_> = (1..=300).map(|pid| ("GPU-0", process(pid, "GPU-0", HOST))).collect();
    node.look(&many);
    assert_eq!(node.ledger.processes.by_gpu[&gpu_id("GPU-0")].len(), PROCESSES_PER_GPU_MAX);
}

//! What keeps a GPU busy, and what cannot be seen.

use super::*;
use crate::command::{Command, Rules};
use crate::decide::decide;
use crate::drain::{Mark, Order};
use crate::test_node::{Node, of_pod, part, process};

const HOST: Owner = Owner::NoPod { container_id: None };

fn drawing(mut process: Process) -> Process {
    process.uses = Uses { graphics: true, ..Uses::default() };
    process
}

fn ignored(mut process: Process) -> Process {
    process.who.ignored = true;
    process
}

#[test]
fn daemons_and_the_hosts_display_do_not_keep_a_gpu_busy() {
    let on = |owner| process(1, "GPU-0", owner);
    for (process, busy) in [
        (on(HOST), 1),
        (on(of_pod("stranger", "main")), 1),
        (on(Owner::Unknown(Unseen::Gone)), 1),
        (drawing(on(HOST)), 0),
        (drawing(on(Owner::Unknown(Unseen::Hidden))), 0),
        (drawing(on(of_pod("stranger", "main"))), 1),
        (ignored(on(HOST)), 0),
        (ignored(on(of_pod("dcgm", "exporter"))), 0),
        // What an allocation explains counts, whatever it calls itself.
        (ignored(on(of_pod("pod", "main"))), 1),
        (drawing(ignored(on(of_pod("pod", "main")))), 1),
    ] {
        let mut node = Node::new();
        node.grant("GPU-0", None, "pod", "main");
        node.look(&[("GPU-0", process.clone())]);
        assert_eq!(node.ledger.processes_on(&part("GPU-0")), Some(busy), "{process:?}");
    }
}

#[test]
fn a_gpus_processes_are_those_of_its_instances_each_once() {
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
fn no_process_that_can_be_seen_is_not_no_process() {
    let mut node = Node::new();
    node.sight = Sight::Unsupported { why: "no /proc".into() };
    node.look(&[]);
    assert_eq!(node.ledger.processes_on(&part("GPU-0")), None, "it may be in a PID namespace of its own");
    node.sight = Sight::Hidden { why: "own PID namespace".into(), fix: "hostPID".into() };
    node.look(&[]);
    assert_eq!(node.ledger.processes_on(&part("GPU-0")), None);
    node.look(&[("GPU-0", process(1, "GPU-0", Owner::Unknown(Unseen::Hidden)))]);
    assert_eq!(node.ledger.processes_on(&part("GPU-0")), Some(1), "what NVML does tell is there");
    assert!(matches!(node.ledger.sight(), Sight::Hidden { .. }));
    // Who makes the GPUs up knows of everybody on them.
    node.look(&[]);
    let table = ProcessTable { complete: true, ..ProcessTable::clone(&node.ledger.processes) };
    node.ledger.processes = table.into();
    assert_eq!(node.ledger.processes_on(&part("GPU-0")), Some(0));
}

#[test]
fn gpus_that_tell_nothing_one_by_one_are_said_to() {
    let mut ledger = Node::new().ledger;
    assert_eq!(ledger.sight(), Sight::Visible);
    ledger.processes = ProcessTable { sight: Sight::Visible, ..ProcessTable::default() }.into();
    assert!(matches!(ledger.sight(), Sight::Unsupported { .. }));
    assert!(matches!(Ledger::default().sight(), Sight::Unsupported { .. }));
}

/// Cordons `GPU-0`, looks every five seconds for so long, and says where its drain stands.
fn drained_after(node: &mut Node, seconds: u64, processes: &[(&str, Process)]) -> String {
    let mark = Mark { by: "ada".into(), why: String::new(), since_wall_ms: 0 };
    let order = Command::Drain { gpu: part("GPU-0"), mark, order: Order::default() };
    let verdict = decide(&node.ledger, &Rules::default(), &order, node.now);
    node.ledger.apply(&verdict.entry);
    for _ in 0..seconds / 5 {
        node.look(processes);
        node.pass(5);
    }
    node.look(processes);
    node.ledger.gpus[&part("GPU-0")].drain.as_str().to_owned()
}

#[test]
fn an_ignored_daemon_lets_a_gpu_be_drained_and_a_leftover_does_not() {
    let daemon = [("GPU-0", ignored(process(1, "GPU-0", HOST)))];
    assert_eq!(drained_after(&mut Node::new(), 15, &daemon), "drained");
    let mut node = Node::new();
    let held = node.grant("GPU-0", None, "pod", "main");
    node.end(held);
    let leftover = [daemon[0].clone(), ("GPU-0", process(2, "GPU-0", of_pod("pod", "main")))];
    assert_eq!(drained_after(&mut node, 100, &leftover), "draining");
    assert_eq!(drained_after(&mut node, 15, &daemon), "drained");
}

#[test]
fn where_processes_are_hidden_a_drain_takes_the_longer_wait() {
    let mut node = Node::new();
    node.sight = Sight::Hidden { why: String::new(), fix: String::new() };
    assert_eq!(drained_after(&mut node, 50, &[]), "draining");
    assert_eq!(drained_after(&mut node, 20, &[]), "drained");
    let mut node = Node::new();
    node.sight = Sight::Hidden { why: String::new(), fix: String::new() };
    let told = [("GPU-0", process(1, "GPU-0", Owner::Unknown(Unseen::Hidden)))];
    assert_eq!(drained_after(&mut node, 100, &told), "draining");
}

#[test]
fn a_look_that_finds_the_same_changes_nothing() {
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
    assert_eq!(node.ledger.processes.on[&part("GPU-0")].len(), PROCESSES_PER_GPU_MAX);
}

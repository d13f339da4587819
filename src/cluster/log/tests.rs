use super::super::news::tests::Node;
use super::*;
use berth_kernel::command::Command;
use berth_kernel::drain::Order;
use berth_kernel::names::AllocationId;

fn says(log: &mut Log, node: &Node) -> Vec<(bool, String)> {
    let lines = log.step(Arc::new(node.ledger.clone()), node.now);
    lines.into_iter().map(|line| (line.warning, line.text)).collect()
}

fn one(log: &mut Log, node: &Node, warning: bool, words: &str) {
    let lines = says(log, node);
    assert!(lines.len() == 1 && lines[0].0 == warning && lines[0].1.contains(words), "{words}: {lines:?}");
    assert_eq!(says(log, node), [], "once");
}

fn drain(node: &mut Node, order: Order) {
    let mark = berth_kernel::drain::Mark { by: "ada".into(), why: "fan".into(), since_wall_ms: 0 };
    let gpu = PartId::parse("GPU-0").unwrap();
    node.turn(&Command::Drain { gpu, mark, order });
}

#[test]
fn each_turn_of_a_gpus_health_is_said_once_and_an_operators_word_is_not() {
    let mut node = Node::new();
    let mut log = Log::new(Arc::new(node.ledger.clone()));
    assert_eq!(says(&mut log, &node), [], "a healthy node is quiet");
    node.look(false);
    one(&mut log, &node, true, "GPU 3 (GPU-0) is gone: NVML no longer lists it");
    let left = Arc::new(node.ledger.clone());
    one(&mut Log::new(left), &node, true, "GPU 3 (GPU-0) is still gone");
    node.look(true);
    one(&mut log, &node, false, "is there again, and healthy");
    node.trouble("fell off the bus");
    one(&mut log, &node, true, "is unhealthy: fell off the bus");
    node.trouble("a call hangs");
    one(&mut log, &node, true, "is unhealthy: a call hangs");
    node.now.mono_ms += 3_600_000;
    node.look(true);
    one(&mut log, &node, false, "is healthy again");
    node.trouble("lost");
    one(&mut log, &node, true, "is unhealthy: lost");
    node.look(true);
    let gpu = PartId::parse("GPU-0").unwrap();
    node.turn(&Command::Heal { gpu, by: "ada".into(), why: String::new() });
    assert_eq!(says(&mut log, &node), [], "the admin API says so");
}

#[test]
fn a_gpu_that_is_missing_or_unwell_at_the_start_is_said() {
    let mut node = Node::new();
    let left = Arc::new(node.ledger.clone());
    node.look(false);
    one(&mut Log::new(left), &node, true, "is gone");
    let mut node = Node::new();
    node.trouble("lost");
    one(&mut Log::new(Arc::new(Ledger::default())), &node, true, "is unhealthy: lost");
}

#[test]
fn how_a_drain_goes_on_and_ends_is_said_and_its_order_is_not() {
    let mut node = Node::new();
    let mut log = Log::new(Arc::new(node.ledger.clone()));
    let deadline_wall_ms = Some(node.now.wall_ms + 5_000);
    drain(&mut node, Order { deadline_wall_ms, ..Order::default() });
    assert_eq!(says(&mut log, &node), [], "the admin API says so");
    let left = Arc::new(node.ledger.clone());
    one(
        &mut Log::new(left),
        &node,
        false,
        "the drain of GPU 3 (GPU-0) by ada (fan) goes on after the restart",
    );
    node.now.wall_ms += 5_000;
    one(&mut log, &node, true, "was not drained by its deadline");
    drain(&mut node, Order { deadline_wall_ms, at_deadline: AtDeadline::GiveUp, ..Order::default() });
    assert_eq!(says(&mut log, &node), []);
    node.turn(&Command::Tick);
    one(&mut log, &node, true, "cordoned by ada (fan; drain given up at its deadline)");
    drain(&mut node, Order::default());
    assert_eq!(says(&mut log, &node), []);
    node.turn(&Command::End { id: AllocationId { store: 0, number: 0 }, force: true });
    node.look(true);
    node.now.mono_ms += 3_600_000;
    node.look(true);
    one(&mut log, &node, false, "is drained: nobody holds it any more");
}

use super::*;
use berth_kernel::drain::marks::Order;
use berth_kernel::grants::allocation::{Allocation, Decision, GrantOrigin, Holder};
use berth_kernel::hardware::gpu::{Inventory, Part};
use berth_kernel::ids::names::{AllocationId, DeviceId, GpuId, Resource};
use berth_kernel::node::change::{Change, Entry};
use berth_kernel::node::command::Command;
use berth_kernel::node::decide::decide;
use berth_kernel::node::transitions::Transitions;
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};
use std::sync::Arc;

fn gpu() -> GpuId {
    GpuId::parse("GPU-0").unwrap()
}

struct Node {
    ledger: Ledger,
    now: Now,
}

impl Node {
    /// One GPU with one allocation.
    fn new() -> Self {
        let now = Now { wall_ms: 1_000_000, mono_ms: 1_000 };
        let mut node = Self { ledger: Ledger::default(), now };
        node.scan(true);
        let resource = Resource::parse("nvidia.com/gpu").unwrap();
        let line = OfferLine { resource: resource.clone(), count: 1, consumes: Consumes::Whole };
        node.apply(&Command::Offer(vec![(
            PartOffer { part: gpu().as_part().clone(), lines: vec![line] },
            "test".into(),
        )]));
        let allocation = Allocation {
            id: AllocationId { store: 0, number: 0 },
            resource,
            devices: vec![DeviceId::whole(gpu().as_part())],
            granted_wall_ms: 0,
            origin: GrantOrigin::DevicePlugin,
            holder: Holder::default(),
            overlapped: false,
            decision: Decision::default(),
            ended: None,
        };
        node.ledger.apply(&Entry { at: now, changes: vec![Change::Granted(allocation)] });
        node
    }

    fn apply(&mut self, command: &Command) {
        let verdict = decide(&self.ledger, command, self.now);
        self.ledger.apply(&verdict.entry);
    }

    fn scan(&mut self, present: bool) {
        self.scan_with(present, None);
    }

    fn scan_with_error(&mut self, error: &str) {
        self.scan_with(true, Some(error));
    }

    fn scan_with(&mut self, present: bool, error: Option<&str>) {
        let part = Part::whole_gpu(gpu(), 3);
        let mut inventory =
            Inventory { parts: present.then_some(part).into_iter().collect(), ..Inventory::default() };
        inventory.scan_errors.extend(error.map(|error| (gpu(), error.into())));
        self.apply(&Command::RecordScan(inventory));
    }
}

/// The log with the transitions that it is given.
struct Logged {
    transitions: Transitions,
    log: Log,
}

impl Logged {
    fn since(ledger: Ledger) -> Self {
        Self { transitions: Transitions::since(Arc::new(ledger)), log: Log::default() }
    }
}

fn new_lines(logged: &mut Logged, node: &Node) -> Vec<(bool, String)> {
    let transitions = logged.transitions.step(Arc::new(node.ledger.clone()));
    fields(logged.log.lines(&transitions, &node.ledger, node.now))
}

/// Level and text of each line about what is as the last process left it.
fn unchanged(before: &Ledger, node: &Node) -> Vec<(bool, String)> {
    fields(unchanged_lines(before, &node.ledger))
}

fn fields(lines: Vec<Line>) -> Vec<(bool, String)> {
    lines.into_iter().map(|line| (line.warning, line.text)).collect()
}

/// Asserts that there is one new line, of this level and with this text.
fn one(log: &mut Logged, node: &Node, warning: bool, text: &str) {
    let lines = new_lines(log, node);
    assert!(lines.len() == 1 && lines[0].0 == warning && lines[0].1.contains(text), "{text}: {lines:?}");
    assert_eq!(new_lines(log, node), [], "once");
}

fn drain(node: &mut Node, order: Order) {
    let author = berth_kernel::drain::marks::Author::api("ada".into(), "fan".into());
    node.apply(&Command::Drain { gpu: gpu(), author, order });
}

#[test]
fn each_change_of_a_gpus_health_is_logged_once_and_an_operators_order_is_not() {
    let mut node = Node::new();
    let mut log = Logged::since(node.ledger.clone());
    assert_eq!(new_lines(&mut log, &node), [], "no line for a healthy node");
    node.scan(false);
    one(&mut log, &node, true, "GPU 3 (GPU-0) is gone: NVML no longer lists it");
    let still = unchanged(&node.ledger, &node);
    assert!(
        matches!(&still[..], [(true, text)] if text.starts_with("GPU 3 (GPU-0) is still gone")),
        "{still:?}"
    );
    node.scan(true);
    one(&mut log, &node, false, "is back, and healthy");
    node.scan_with_error("fell off the bus");
    one(&mut log, &node, true, "is unhealthy: fell off the bus");
    node.scan_with_error("a call hangs");
    one(&mut log, &node, true, "is unhealthy: a call hangs");
    node.now.mono_ms += 3_600_000;
    node.scan(true);
    one(&mut log, &node, false, "is healthy again");
    node.scan_with_error("lost");
    one(&mut log, &node, true, "is unhealthy: lost");
    node.scan(true);
    node.apply(&Command::MarkHealthy { gpu: gpu(), by: "ada".into(), why: String::new() });
    assert_eq!(new_lines(&mut log, &node), [], "the admin API logs it");
}

#[test]
fn a_gpu_that_is_missing_or_unhealthy_at_the_start_is_logged() {
    let mut node = Node::new();
    let stored = node.ledger.clone();
    node.scan(false);
    assert_eq!(unchanged(&stored, &node), [], "its health changed");
    one(&mut Logged::since(stored), &node, true, "is gone");
    let mut node = Node::new();
    node.scan_with_error("lost");
    one(&mut Logged::since(Ledger::default()), &node, true, "is unhealthy: lost");
}

#[test]
fn the_progress_and_end_of_a_drain_are_logged_and_its_order_is_not() {
    let mut node = Node::new();
    let mut log = Logged::since(node.ledger.clone());
    let deadline_wall_ms = Some(node.now.wall_ms + 5_000);
    drain(&mut node, Order { deadline_wall_ms, ..Order::default() });
    assert_eq!(new_lines(&mut log, &node), [], "the admin API logs it");
    let text = "the drain of GPU 3 (GPU-0) by ada (fan) continues after the restart";
    let continued = unchanged(&node.ledger, &node);
    assert!(matches!(&continued[..], [(false, line)] if line.starts_with(text)), "{continued:?}");
    node.now = Now { wall_ms: node.now.wall_ms + 5_000, mono_ms: node.now.mono_ms + 5_000 };
    one(&mut log, &node, true, "was not drained by its deadline");
    drain(&mut node, Order { deadline_wall_ms, at_deadline: AtDeadline::GiveUp, ..Order::default() });
    assert_eq!(new_lines(&mut log, &node), []);
    node.apply(&Command::Tick);
    one(&mut log, &node, true, "cordoned by ada (fan; drain given up at its deadline)");
    drain(&mut node, Order::default());
    assert_eq!(new_lines(&mut log, &node), []);
    node.apply(&Command::End { id: AllocationId { store: 0, number: 0 }, force: true });
    node.scan(true);
    node.now.mono_ms += 3_600_000;
    node.scan(true);
    one(&mut log, &node, false, "is drained: no allocation is left on it");
}

#[test]
fn the_next_deadline_is_waited_for_and_no_other_time() {
    let mut node = Node::new();
    assert_eq!(next_deadline(&node.ledger, node.now), None);
    drain(&mut node, Order::default());
    assert_eq!(next_deadline(&node.ledger, node.now), None, "without a deadline");
    let deadline_wall_ms = Some(node.now.wall_ms + 5_000);
    drain(&mut node, Order { deadline_wall_ms, ..Order::default() });
    assert_eq!(next_deadline(&node.ledger, node.now), Some(Duration::from_secs(5)));
    node.now = Now { wall_ms: node.now.wall_ms + 5_000, mono_ms: node.now.mono_ms + 5_000 };
    assert_eq!(next_deadline(&node.ledger, node.now), None, "it has passed");
}

use super::*;
use crate::drain::eviction::EvictionMethod;
use crate::drain::marks::{
    AtDeadline, Author, Drain, MARKS_MAX, Mark, MarkKind, Order, Owner, Owners, TooManyMarks,
};
use crate::hardware::gpu::{Inventory, Part, Usage};
use crate::ids::names::{DeviceId, GpuId, Resource};
use crate::node::command;
use crate::node::command::Command;
use crate::node::decide::decide;
use crate::node::refusal::Refusal;
use crate::node::revision::Revision;
use crate::policy::hooks::{AdmitRequest, Terms};
use crate::sharing::listing;
use crate::sharing::offer::{Consumes, OfferLine, PartOffer};

fn gpu() -> GpuId {
    GpuId::parse("GPU-0").unwrap()
}

fn resource() -> Resource {
    Resource::parse("nvidia.com/gpu").unwrap()
}

fn author(by: &str, why: &str) -> Author {
    Author::api(by.into(), why.into())
}

/// A node of one GPU, offered whole.
struct Node {
    ledger: Ledger,
    now: Now,
    processes: u32,
    hangs: bool,
    lists_processes: bool,
}

impl Node {
    fn new() -> Self {
        let mut node = Self {
            ledger: Ledger::default(),
            now: Now { wall_ms: 1_000_000, mono_ms: 1_000 },
            processes: 0,
            hangs: false,
            lists_processes: true,
        };
        node.scan();
        let line = OfferLine { resource: resource(), count: 1, consumes: Consumes::Whole };
        node.apply(&Command::Offer(vec![(
            PartOffer { part: gpu().as_part().clone(), lines: vec![line] },
            "test".into(),
        )]))
        .unwrap();
        node
    }

    fn apply(&mut self, command: &Command) -> Result<(), Refusal> {
        let verdict = decide(&self.ledger, command, self.now);
        if !verdict.entry.changes.is_empty() {
            self.ledger.apply(&verdict.entry);
        }
        verdict.refusal.map_or(Ok(()), Err)
    }

    fn scan(&mut self) {
        let part = Part::whole_gpu(gpu(), 0);
        let mut inventory = Inventory { parts: vec![part], ..Inventory::default() };
        if self.hangs {
            inventory.scan_errors.insert(gpu(), "a call hangs".into());
        } else if self.lists_processes {
            inventory.usage.insert(
                gpu().as_part().clone(),
                Usage { memory_used_mib: Some(0), processes: self.processes },
            );
        }
        self.apply(&Command::RecordScan(inventory)).unwrap();
    }

    fn grant(&mut self) -> Result<(), Refusal> {
        self.apply(&Command::Allocate {
            request: AdmitRequest {
                resource: resource(),
                devices: vec![DeviceId::whole(gpu().as_part())],
                claim: None,
            },
            answer: command::StackAnswer::Allow { by: vec!["test".into()], terms: Terms::default() },
            evaluated: None,
            attempt: command::Attempt::Last { asked_mono_ms: 0 },
        })
    }

    fn end_all(&mut self) {
        let ids: Vec<_> = self.ledger.live.keys().copied().collect();
        ids.into_iter().for_each(|id| self.apply(&Command::End { id, force: true }).unwrap());
    }

    fn drain(&mut self, order: Order) {
        self.apply(&Command::Drain { gpu: gpu(), author: author("ada", "fan"), order }).unwrap();
    }

    /// Waits with a tick every second and a scan every five.
    fn wait(&mut self, seconds: u64) -> &'static str {
        for _ in 0..seconds {
            self.now.mono_ms += 1000;
            self.now.wall_ms += 1000;
            self.apply(&Command::Tick).unwrap();
            if self.now.mono_ms.is_multiple_of(5_000) {
                self.scan();
            }
        }
        self.state()
    }

    fn state(&self) -> &'static str {
        self.ledger.gpus[&gpu()].drain().as_str()
    }

    fn listed_healthy(&self) -> bool {
        listing::listing(&self.ledger, &resource())[0].healthy
    }
}

#[test]
fn an_unused_gpu_is_drained_after_a_quiet_period() {
    let mut node = Node::new();
    node.drain(Order::default());
    assert_eq!(node.wait(10), "draining");
    assert_eq!(node.wait(5), "drained");
    assert!(matches!(node.grant(), Err(Refusal::Cordoned { .. })));
    node.apply(&Command::Uncordon { gpu: gpu(), owners: Owners::All }).unwrap();
    assert_eq!(node.wait(20), "active");
    node.grant().unwrap();
}

#[test]
fn holders_and_processes_keep_a_gpu_from_being_drained() {
    let mut node = Node::new();
    node.grant().unwrap();
    node.drain(Order::default());
    assert!(node.listed_healthy(), "without evict a held device stays as it is");
    assert_eq!(node.wait(60), "draining");
    // A force-deleted pod: its allocation ends and its process runs on.
    node.processes = 1;
    node.end_all();
    assert_eq!(node.wait(60), "draining");
    node.processes = 0;
    node.wait(8);
    node.processes = 2;
    node.wait(5);
    node.processes = 0;
    assert_eq!(node.wait(10), "draining", "the quiet period restarted");
    assert_eq!(node.wait(10), "drained");
}

#[test]
fn a_gpu_that_cannot_be_read_is_drained_after_a_longer_period_and_none_without_a_scan() {
    let mut node = Node::new();
    node.drain(Order::default());
    for _ in 0..100 {
        node.now.mono_ms += 1_000;
        node.apply(&Command::Tick).unwrap();
    }
    assert_eq!(node.state(), "draining", "there was no scan");
    node.hangs = true;
    assert_eq!(node.wait(60), "draining");
    assert_eq!(node.wait(10), "drained");
}

#[test]
fn a_gpu_that_does_not_list_processes_takes_the_longer_period() {
    let mut node = Node::new();
    node.lists_processes = false;
    node.drain(Order::default());
    assert_eq!(node.wait(60), "draining");
    assert_eq!(node.wait(10), "drained");
}

#[test]
fn one_scan_without_processes_after_failed_scans_is_not_enough() {
    let mut node = Node::new();
    node.hangs = true;
    node.drain(Order::default());
    node.wait(30);
    node.hangs = false;
    assert_eq!(node.wait(10), "draining", "seen empty for 5 s");
    assert_eq!(node.wait(5), "drained");
    // A GPU that can be read only intermittently is drained after the longer period.
    let mut node = Node::new();
    node.drain(Order::default());
    for _ in 0..6 {
        node.wait(5);
        node.hangs = !node.hangs;
        assert_eq!(node.wait(5), "draining");
        node.hangs = !node.hangs;
    }
    assert_eq!(node.wait(10), "drained");
}

#[test]
fn a_container_granted_again_makes_a_drained_gpu_draining() {
    let mut node = Node::new();
    node.drain(Order::default());
    assert_eq!(node.wait(20), "drained");
    let allocation = crate::grants::allocation::Allocation {
        id: crate::ids::names::AllocationId { store: 0, number: 0 },
        resource: resource(),
        devices: vec![DeviceId::whole(gpu().as_part())],
        granted_wall_ms: 0,
        origin: crate::grants::allocation::GrantOrigin::DevicePlugin,
        holder: crate::grants::allocation::Holder::default(),
        overlapped: false,
        decision: crate::grants::allocation::Decision::default(),
        ended: None,
    };
    let entry = crate::node::change::Entry { at: node.now, changes: vec![Change::Granted(allocation)] };
    node.ledger.apply(&entry);
    assert_eq!(node.wait(1), "draining");
}

#[test]
fn the_order_decides_what_happens_at_the_deadline() {
    let deadline_wall_ms = Some(1_000_000 + 30_000);
    for (at_deadline, expected) in
        [(AtDeadline::Wait, "draining"), (AtDeadline::Delete, "draining"), (AtDeadline::GiveUp, "cordoned")]
    {
        let mut node = Node::new();
        node.grant().unwrap();
        node.drain(Order { deadline_wall_ms, at_deadline, ..Order::default() });
        assert_eq!(node.wait(29), "draining");
        assert_eq!(node.wait(1), expected);
        assert!(Order { deadline_wall_ms, at_deadline, ..Order::default() }.is_late(node.now));
    }
    let mut node = Node::new();
    node.drain(Order { deadline_wall_ms: Some(0), at_deadline: AtDeadline::GiveUp, ..Order::default() });
    assert_eq!(node.wait(20), "drained", "an empty GPU is drained, however late");
}

#[test]
fn a_clock_that_is_set_moves_no_deadline() {
    const HOUR_MS: u64 = 3_600_000;
    let later = |now: Now, ms: u64| Now { wall_ms: now.wall_ms + ms, mono_ms: now.mono_ms + ms };
    for (is_forward, start) in [(true, 1_000_000), (false, 3 * HOUR_MS)] {
        let mut node = Node::new();
        node.now.wall_ms = start;
        node.grant().unwrap();
        let deadline_wall_ms = Some(start + 60_000);
        node.drain(Order {
            evict: true,
            deadline_wall_ms,
            at_deadline: AtDeadline::Delete,
            ..Order::default()
        });
        node.wait(10);
        node.now.wall_ms =
            if is_forward { node.now.wall_ms + 2 * HOUR_MS } else { node.now.wall_ms - 2 * HOUR_MS };
        let method = |node: &Node| node.ledger.gpus[&gpu()].marks.eviction_method(node.now);
        assert_eq!(method(&node), Some(EvictionMethod::Evict), "50 s are left");
        // The record follows the clock, so that a restart does not end the drain either.
        assert_eq!(node.wait(1), "draining");
        let order = *node.ledger.gpus[&gpu()].drain().order().unwrap();
        assert_eq!(order.deadline_wall_ms, Some(node.now.wall_ms + 49_000));
        let restarted = Now { mono_ms: 5, ..later(node.now, 9_000) };
        let marks = Marks::clone(&node.ledger.gpus[&gpu()].marks).restored(restarted);
        assert_eq!(marks.eviction_method(later(restarted, 39_999)), Some(EvictionMethod::Evict));
        assert_eq!(marks.eviction_method(later(restarted, 40_000)), Some(EvictionMethod::Delete));
        // A clock that was set back while the daemon was stopped does not extend it beyond its length.
        let restarted = Now { wall_ms: 1, mono_ms: 5 };
        let marks = marks.restored(restarted);
        assert_eq!(marks.eviction_method(later(restarted, 60_000)), Some(EvictionMethod::Delete));
        assert_eq!(method(&node), Some(EvictionMethod::Evict));
        node.wait(48);
        assert_eq!(method(&node), Some(EvictionMethod::Evict));
        node.wait(1);
        assert_eq!(method(&node), Some(EvictionMethod::Delete));
    }
}

#[test]
fn held_devices_are_listed_unhealthy_while_pods_are_evicted() {
    let mut node = Node::new();
    node.grant().unwrap();
    node.drain(Order { evict: true, ..Order::default() });
    assert!(!node.listed_healthy());
    node.apply(&Command::StopDrain { gpu: gpu(), owners: Owners::All }).unwrap();
    assert_eq!(node.state(), "cordoned");
    assert!(node.listed_healthy());
}

#[test]
fn a_second_order_of_an_owner_replaces_the_first_and_a_cordon_does_not() {
    let late = Order { deadline_wall_ms: Some(9), ..Order::default() };
    let first = Now { wall_ms: 7, mono_ms: 0 };
    let second = Now { wall_ms: 99, mono_ms: 0 };
    let marks = Marks::default().with_drain(&author("ada", "fan"), Order::default(), first).unwrap();
    let again = marks.with_drain(&author("ada", ""), late, second).unwrap();
    let mark = |why: &str| Mark { kind: MarkKind::Drain(late), ..Mark::cordon("ada", why, 7) };
    assert_eq!(again.drain(), Drain::Draining(mark("fan"), late));
    assert_eq!(again.with_cordon(&author("ada", ""), second).unwrap(), again);
    let renamed = again.with_cordon(&author("ada", "other"), second).unwrap();
    assert_eq!(renamed.drain(), Drain::Draining(mark("other"), late));
    let drained = again.after_drained(second);
    assert_eq!(drained.with_drain(&author("ada", "x"), late, second).unwrap(), drained);
    assert_eq!(Marks::default().without_drains(&Owners::All), Marks::default());
}

#[test]
fn the_next_order_replaces_the_reason_of_a_drain_that_was_given_up() {
    for (why, shown) in
        [("fan", "fan; drain given up at its deadline"), ("", "drain given up at its deadline")]
    {
        let mut node = Node::new();
        node.grant().unwrap();
        let order = Order { deadline_wall_ms: Some(0), at_deadline: AtDeadline::GiveUp, ..Order::default() };
        node.apply(&Command::Drain { gpu: gpu(), author: author("ada", why), order }).unwrap();
        node.apply(&Command::Tick).unwrap();
        let marks = node.ledger.gpus[&gpu()].marks.clone();
        assert!(marks.drain().was_given_up());
        assert_eq!(marks.drain().mark().unwrap().reason(), shown);
        let reason = |marks: Result<Marks, TooManyMarks>| marks.unwrap().drain().mark().unwrap().reason();
        assert_eq!(reason(marks.with_drain(&author("ada", ""), Order::default(), node.now)), why);
        assert_eq!(reason(marks.with_cordon(&author("ada", ""), node.now)), why);
        assert_eq!(reason(marks.with_cordon(&author("ada", "rack"), node.now)), "rack");
    }
    assert!(!Drain::Active.was_given_up());
}

#[test]
fn a_gpu_is_out_while_one_mark_is_left() {
    let mut node = Node::new();
    let uncordon = |node: &mut Node, owners: Owners| {
        node.apply(&Command::Uncordon { gpu: gpu(), owners }).unwrap();
        node.state().to_owned()
    };
    node.drain(Order::default());
    node.apply(&Command::Cordon { gpu: gpu(), author: author("bob", "rack") }).unwrap();
    assert_eq!(node.wait(15), "drained");
    assert_eq!(uncordon(&mut node, Owners::One(Owner::api("eve"))), "drained");
    assert_eq!(uncordon(&mut node, Owners::One(Owner::api("ada"))), "cordoned");
    assert_eq!(node.ledger.gpus[&gpu()].drain().mark().unwrap().by, "bob");
    assert!(matches!(node.grant(), Err(Refusal::Cordoned { by, .. }) if by == "bob"));
    assert_eq!(uncordon(&mut node, Owners::One(Owner::api("bob"))), "active");
    node.drain(Order::default());
    node.apply(&Command::Cordon { gpu: gpu(), author: author("bob", "rack") }).unwrap();
    assert_eq!(uncordon(&mut node, Owners::All), "active");
    // The mark of a store in which marks had no owner is removed by each caller.
    let operator = Author { owner: Owner::operator(), ..author("ada", "") };
    node.apply(&Command::Cordon { gpu: gpu(), author: operator }).unwrap();
    assert_eq!(uncordon(&mut node, Owners::One(Owner::api("bob"))), "active");
}

#[test]
fn the_mark_of_an_object_is_removed_for_the_object_alone() {
    let mut node = Node::new();
    let owner = Owner::maintenance("b7d0").unwrap();
    let maintenance = Author { owner: owner.clone(), ..author("GPUMaintenance/fan", "fan") };
    node.apply(&Command::Drain { gpu: gpu(), author: maintenance, order: Order::default() }).unwrap();
    let rule = Owner::taint_rule("b7d0").unwrap();
    let of_rule = Author { owner: rule.clone(), ..author("DeviceTaintRule/fan", "") };
    node.apply(&Command::Cordon { gpu: gpu(), author: of_rule }).unwrap();
    assert_eq!(node.wait(15), "drained");
    for owners in [Owners::All, Owners::One(Owner::api("ada")), Owners::One(Owner::operator())] {
        node.apply(&Command::StopDrain { gpu: gpu(), owners: owners.clone() }).unwrap();
        assert_eq!(node.state(), "drained", "{owners:?}");
        node.apply(&Command::Uncordon { gpu: gpu(), owners }).unwrap();
        assert_eq!(node.state(), "drained");
    }
    let operator = Author { owner: Owner::operator(), ..author("ada", "") };
    node.apply(&Command::Cordon { gpu: gpu(), author: operator }).unwrap();
    node.apply(&Command::Uncordon { gpu: gpu(), owners: Owners::One(owner) }).unwrap();
    node.apply(&Command::Uncordon { gpu: gpu(), owners: Owners::One(rule) }).unwrap();
    assert_eq!(node.state(), "cordoned", "the mark of a person stays");
    node.apply(&Command::Uncordon { gpu: gpu(), owners: Owners::All }).unwrap();
    assert_eq!(node.state(), "active");
    assert!(Owner::maintenance(&"x".repeat(160)).is_err());
}

#[test]
fn several_drains_evict_if_one_does_and_have_the_earliest_deadline() {
    let now = |ms| Now { wall_ms: ms, mono_ms: ms };
    let order = |evict, deadline_wall_ms, at_deadline| Order {
        evict,
        deadline_wall_ms,
        at_deadline,
        ..Order::default()
    };
    let give_up = order(false, Some(10), AtDeadline::GiveUp);
    let delete = order(true, Some(20), AtDeadline::Delete);
    let marks = Marks::default().with_drain(&author("ada", "fan"), give_up, now(1)).unwrap();
    let marks = marks.with_drain(&author("bob", ""), delete, now(2)).unwrap();
    let Drain::Draining(mark, combined) = marks.drain() else { panic!("{marks:?}") };
    assert_eq!((mark.by.as_str(), combined), ("ada", order(true, Some(10), AtDeadline::GiveUp)));
    assert_eq!(marks.eviction_method(now(15)), Some(EvictionMethod::Evict));
    let later = marks.after_deadlines(now(10));
    assert_eq!(later.by_owner[&Owner::api("ada")].kind, MarkKind::Cordon);
    assert!(later.by_owner[&Owner::api("ada")].expired);
    assert_eq!(later.drain().order(), Some(&delete));
    assert_eq!(later.eviction_method(now(20)), Some(EvictionMethod::Delete));
    assert_eq!(later.without_drains(&Owners::One(Owner::api("bob"))).drain().as_str(), "cordoned");
}

#[test]
fn marks_have_a_limit() {
    let now = Now { wall_ms: 1, mono_ms: 0 };
    let mut marks = Marks::default();
    for i in 0..MARKS_MAX {
        marks = marks.with_cordon(&author(&format!("caller-{i}"), &"x".repeat(500)), now).unwrap();
    }
    assert_eq!(marks.with_cordon(&author("one-more", ""), now), Err(TooManyMarks));
    let marks = marks.with_cordon(&author("caller-0", &"x".repeat(1024)), now).unwrap();
    assert_eq!(marks.with_cordon(&author("caller-1", &"x".repeat(5000)), now), Err(TooManyMarks));
    let mut node = Node::new();
    for i in 0..=MARKS_MAX {
        let cordoned = node.apply(&Command::Cordon { gpu: gpu(), author: author(&i.to_string(), "") });
        assert_eq!(cordoned.is_ok(), i < MARKS_MAX, "{cordoned:?}");
    }
}

#[test]
fn an_order_for_marks_that_a_deadline_changed_is_refused() {
    let mut node = Node::new();
    node.grant().unwrap();
    let deadline_wall_ms = Some(node.now.wall_ms + 1_000);
    node.drain(Order { deadline_wall_ms, at_deadline: AtDeadline::GiveUp, ..Order::default() });
    let marks = node.ledger.gpus[&gpu()].marks.clone();
    let cordon = |marks| {
        let cordon = Command::Cordon { gpu: gpu(), author: author("ada", "fan") };
        cordon.expecting(Some(Revision::Marks { gpu: gpu(), marks }))
    };
    node.apply(&cordon(marks.clone())).unwrap();
    // The deadline gives the drain up between the caller's reading and its order.
    node.wait(2);
    let given_up = node.ledger.gpus[&gpu()].marks.clone();
    assert!(given_up.drain().was_given_up());
    assert_eq!(node.apply(&cordon(marks)), Err(Refusal::MarksChanged { gpu: gpu() }));
    assert_eq!(node.ledger.gpus[&gpu()].marks, given_up, "the caller still learns that it was given up");
    node.apply(&cordon(given_up)).unwrap();
}

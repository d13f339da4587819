use super::*;
use crate::drain::eviction::EvictionMethod;
use crate::drain::marks::{AtDeadline, Author, Order, Owners};
use crate::evidence::pods::tests::pod_without_containers;
use crate::evidence::pods::{PodOwner, PodsSource, PodsView};
use crate::grants::allocation::{Decision, GrantOrigin, Holder};
use crate::hardware::gpu::{Inventory, Part};
use crate::ids::names::{DeviceId, GpuId, PartId, Resource};
use crate::node::change::Entry;
use crate::node::command::Command;
use crate::node::decide::decide;
use crate::sharing::listing::listing;
use crate::sharing::offer::{Consumes, OfferLine, PartOffer};
use std::collections::VecDeque;

const AGAIN_MS: u64 = 5_000;

fn id(text: &str) -> PartId {
    PartId::parse(text).unwrap()
}

fn resource() -> Resource {
    Resource::parse("nvidia.com/gpu.shared").unwrap()
}

fn gpu_id(text: &str) -> GpuId {
    GpuId::parse(text).unwrap()
}

fn part(name: &str, parent: Option<&str>) -> Part {
    Part { id: id(name), memory_mib: 100, ..Part::whole_gpu(gpu_id(parent.unwrap_or(name)), 0) }
}

fn owner(kind: &str) -> PodOwner {
    PodOwner { kind: kind.into(), name: "its-owner".into() }
}

fn pod(uid: &str) -> Pod {
    pod_without_containers(uid, Stage::Admitted)
}

/// GPU-0, and GPU-1 with an instance; eight shares of each part.
struct Node {
    ledger: Ledger,
    now: Now,
    pods: Vec<Pod>,
    next: u64,
}

impl Node {
    fn new() -> Self {
        let mut node = Self {
            ledger: Ledger::default(),
            now: Now { wall_ms: 1_000_000, mono_ms: 100_000 },
            pods: Vec::new(),
            next: 0,
        };
        let parts = vec![part("GPU-0", None), part("GPU-1", None), part("MIG-1", Some("GPU-1"))];
        node.submit(&Command::RecordScan(Inventory { parts, ..Inventory::default() }));
        let line = OfferLine {
            resource: resource(),
            count: 8,
            consumes: Consumes::Slice { memory_mib: 1, compute_percent: 1 },
        };
        let offer = |name| (PartOffer { part: id(name), lines: vec![line.clone()] }, "test".into());
        node.submit(&Command::Offer(["GPU-0", "GPU-1", "MIG-1"].map(offer).to_vec()));
        node
    }

    fn submit(&mut self, command: &Command) {
        let verdict = decide(&self.ledger, command, self.now);
        assert_eq!(verdict.refusal, None);
        self.ledger.apply(&verdict.entry);
    }

    /// Grants a share of each part to a container of `pod_uid`.
    fn grant(&mut self, pod_uid: Option<&str>, container: &str, parts: &[&str]) {
        let share = u32::try_from(self.next).unwrap();
        let allocation = Allocation {
            id: AllocationId { store: 0, number: self.next },
            resource: resource(),
            devices: parts.iter().map(|part| DeviceId { part: id(part), share: Some(share) }).collect(),
            granted_wall_ms: 0,
            origin: GrantOrigin::DevicePlugin,
            holder: Holder {
                pod_uid: pod_uid.map(Into::into),
                container: pod_uid.map(|_| container.into()),
                ..Holder::default()
            },
            overlapped: false,
            decision: Decision::default(),
            ended: None,
        };
        self.next += 1;
        self.ledger.apply(&Entry { at: self.now, changes: vec![Change::Granted(allocation)] });
    }

    fn show_pods(&mut self, pods: &[Pod]) {
        self.pods = pods.to_vec();
        self.submit_view(true, &[]);
    }

    fn submit_view(&mut self, current: bool, deleted: &[&str]) {
        let pods = self.pods.iter().map(|p| (p.uid.clone(), Arc::new(p.clone()))).collect();
        self.submit(&Command::Pods(PodsView {
            source: PodsSource::ApiServer,
            current,
            listed_mono_ms: 1,
            pods,
            deleted: deleted.iter().map(|uid| (*uid).to_owned()).collect::<VecDeque<_>>(),
            finished: VecDeque::new(),
        }));
    }

    fn drain(&mut self, gpu: &str, order: Order) {
        let author = Author::api("ada".into(), "fan".into());
        self.submit(&Command::Drain { gpu: gpu_id(gpu), author, order });
    }

    fn record(&mut self, uid: &str, way: EvictionMethod, outcome: EvictionOutcome) {
        let ask = EvictionRequest { pod: Arc::new(pod(uid)), method: way, gpu: gpu_id("GPU-0") };
        self.submit(&Command::RecordEviction { ask, outcome });
    }

    fn wait(&mut self, ms: u64) {
        self.now.mono_ms += ms;
        self.now.wall_ms += ms;
        self.submit(&Command::Tick);
    }

    fn asks(&self) -> Vec<(String, EvictionMethod)> {
        due_requests(&self.ledger, self.now).into_iter().map(|a| (a.pod.uid.clone(), a.method)).collect()
    }

    fn leaving(&self, gpu: &str) -> Vec<EvictionStatus> {
        holders(&self.ledger, &gpu_id(gpu)).into_iter().map(|h| h.status).collect()
    }
}

const EVICT: Order =
    Order { evict: true, deadline_wall_ms: None, deadline_mono_ms: None, at_deadline: AtDeadline::Wait };

fn evict(uid: &str) -> (String, EvictionMethod) {
    (uid.into(), EvictionMethod::Evict)
}

#[test]
fn only_running_and_waiting_pods_are_evicted() {
    type Case = (&'static str, fn(&mut Pod), bool, EvictionStatus);
    let cases: [Case; 6] = [
        ("a running pod", |_| {}, true, EvictionStatus::NotRequested),
        ("a waiting pod", |p| p.stage = Stage::Waiting, true, EvictionStatus::NotRequested),
        ("a pod of a DaemonSet", |p| p.owner = Some(owner("DaemonSet")), true, EvictionStatus::NotRequested),
        ("a static pod", |p| p.is_static = true, false, EvictionStatus::Static),
        ("a finished pod", |p| p.stage = Stage::Finished, false, EvictionStatus::Over),
        (
            "a terminating pod",
            |p| p.deletion_wall_ms = Some(9),
            false,
            EvictionStatus::Terminating { since_wall_ms: 9 },
        ),
    ];
    for (name, change, is_evicted, status) in cases {
        let mut node = Node::new();
        node.grant(Some("a"), "main", &["GPU-0"]);
        let mut a = pod("a");
        change(&mut a);
        node.show_pods(&[a.clone()]);
        node.drain("GPU-0", EVICT);
        assert_eq!(node.asks(), if is_evicted { vec![evict("a")] } else { Vec::new() }, "{name}");
        assert_eq!(node.leaving("GPU-0"), [status], "{name}");
        let shown = holders(&node.ledger, &gpu_id("GPU-0"))[0].shown.clone();
        assert_eq!(shown.as_deref(), Some(&a), "{name}");
    }
}

#[test]
fn no_pod_is_evicted_without_an_order_or_a_current_source_or_by_name_alone() {
    let mut node = Node::new();
    node.grant(Some("a"), "main", &["GPU-0"]);
    node.drain("GPU-0", EVICT);
    assert!(node.asks().is_empty(), "no source of pods");
    assert_eq!(node.leaving("GPU-0"), [EvictionStatus::NotShown]);
    node.show_pods(&[pod("a")]);
    assert_eq!(node.asks(), [evict("a")]);
    node.submit_view(false, &[]);
    assert!(node.asks().is_empty(), "the source is not current");
    node.show_pods(&[pod("b")]);
    assert!(node.asks().is_empty(), "another pod");
    node.show_pods(&[pod("a")]);
    node.drain("GPU-0", Order::default());
    assert!(node.asks().is_empty(), "an order without eviction replaced the first");
    assert_eq!(node.leaving("GPU-0"), [EvictionStatus::NotRequested]);
}

#[test]
fn each_holder_of_the_gpu_is_evicted_once() {
    let mut node = Node::new();
    node.grant(Some("two-containers"), "main", &["GPU-1"]);
    node.grant(Some("two-containers"), "side", &["GPU-1"]);
    node.grant(Some("on-its-instance"), "main", &["MIG-1"]);
    node.grant(Some("on-both"), "main", &["GPU-0", "GPU-1"]);
    node.grant(Some("elsewhere"), "main", &["GPU-0"]);
    node.grant(None, "", &["GPU-1"]);
    node.show_pods(&["two-containers", "on-its-instance", "on-both", "elsewhere", "holds-nothing"].map(pod));
    node.drain("GPU-1", EVICT);
    assert_eq!(node.asks(), ["on-both", "on-its-instance", "two-containers"].map(evict));
    let holders = holders(&node.ledger, &gpu_id("GPU-1"));
    assert_eq!(holders.len(), 4);
    let two = holders.iter().find(|h| h.uid.as_deref() == Some("two-containers")).unwrap();
    assert_eq!((two.pod.as_deref(), two.namespace.as_deref()), (Some("pod-two-containers"), Some("team")));
    assert_eq!((two.allocations.len(), two.containers.len()), (2, 2));
    assert_eq!(holders.last().unwrap().status, EvictionStatus::Unidentified, "unknown holders come last");
    // A pod that also holds another draining GPU is still evicted once.
    node.drain("GPU-0", EVICT);
    assert_eq!(node.asks(), ["elsewhere", "on-both", "on-its-instance", "two-containers"].map(evict));
}

#[test]
fn evictions_are_repeated_after_a_while_the_longest_waiting_first() {
    let mut node = Node::new();
    node.grant(Some("a"), "main", &["GPU-0"]);
    node.grant(Some("b"), "main", &["GPU-0"]);
    node.show_pods(&[pod("a"), pod("b")]);
    node.drain("GPU-0", EVICT);
    node.record("a", EvictionMethod::Evict, EvictionOutcome::Budget("needs 3\u{1b}".into()));
    assert_eq!(node.asks(), [evict("b")]);
    assert_eq!(
        node.leaving("GPU-0"),
        [EvictionStatus::Budget { message: "needs 3 ".into() }, EvictionStatus::NotRequested]
    );
    node.wait(1_000);
    node.record("b", EvictionMethod::Evict, EvictionOutcome::Failed("x".repeat(2 * MESSAGE_BYTES_MAX)));
    assert_eq!(node.asks(), []);
    assert_eq!(node.leaving("GPU-0")[1], EvictionStatus::Failed { message: "x".repeat(MESSAGE_BYTES_MAX) });
    node.wait(AGAIN_MS);
    assert_eq!(node.asks(), [evict("a"), evict("b")]);
    let since_wall_ms = node.ledger.evictions["a"].since_wall_ms;
    node.record("a", EvictionMethod::Evict, EvictionOutcome::Accepted);
    assert_eq!(node.leaving("GPU-0")[0], EvictionStatus::Requested { since_wall_ms });
    // Accepted, but the pod is not terminating: the request is repeated.
    node.wait(AGAIN_MS);
    assert_eq!(node.asks(), [evict("b"), evict("a")]);
}

#[test]
fn the_order_decides_whether_pods_are_deleted_at_the_deadline() {
    for (at_deadline, way) in [
        (AtDeadline::Wait, EvictionMethod::Evict),
        (AtDeadline::Delete, EvictionMethod::Delete),
        (AtDeadline::GiveUp, EvictionMethod::Evict),
    ] {
        let mut node = Node::new();
        node.grant(Some("a"), "main", &["GPU-0"]);
        node.grant(Some("static"), "main", &["GPU-0"]);
        node.show_pods(&[pod("a"), Pod { is_static: true, ..pod("static") }]);
        let deadline_wall_ms = Some(node.now.wall_ms + 2_000);
        node.drain("GPU-0", Order { deadline_wall_ms, at_deadline, ..EVICT });
        node.record("a", EvictionMethod::Evict, EvictionOutcome::Budget(String::new()));
        assert_eq!(node.asks(), [], "{at_deadline:?}");
        node.now.wall_ms += 2_000;
        node.now.mono_ms += 2_000;
        // A deletion need not wait for the interval after an eviction.
        let expected = if way == EvictionMethod::Delete { vec![("a".into(), way)] } else { Vec::new() };
        assert_eq!(node.asks(), expected, "{at_deadline:?}");
        if way == EvictionMethod::Delete {
            node.record("a", EvictionMethod::Delete, EvictionOutcome::Accepted);
            assert_eq!(node.asks(), [], "it is not repeated at once");
        }
    }
}

#[test]
fn a_pod_of_two_gpus_is_deleted_if_either_order_deletes() {
    let mut node = Node::new();
    node.grant(Some("a"), "main", &["GPU-0", "GPU-1"]);
    node.show_pods(&[pod("a")]);
    node.drain("GPU-0", EVICT);
    let late = Order { deadline_wall_ms: Some(1), at_deadline: AtDeadline::Delete, ..EVICT };
    node.drain("GPU-1", late);
    assert_eq!(node.asks(), [("a".to_owned(), EvictionMethod::Delete)]);
    assert_eq!(due_requests(&node.ledger, node.now)[0].gpu, gpu_id("GPU-1"));
}

#[test]
fn uncordoning_ends_evictions_at_once_and_removes_their_records() {
    for command in [
        Command::Uncordon { gpu: gpu_id("GPU-0"), owners: Owners::All },
        Command::StopDrain { gpu: gpu_id("GPU-0"), owners: Owners::All },
    ] {
        let mut node = Node::new();
        node.grant(Some("a"), "main", &["GPU-0"]);
        node.show_pods(&[pod("a")]);
        node.drain("GPU-0", EVICT);
        node.record("a", EvictionMethod::Evict, EvictionOutcome::Budget(String::new()));
        assert!(is_being_evicted(&node.ledger, "a"));
        node.submit(&command);
        assert!(!is_being_evicted(&node.ledger, "a"));
        node.record("a", EvictionMethod::Evict, EvictionOutcome::Accepted);
        node.wait(AGAIN_MS);
        assert_eq!(node.asks(), []);
        assert!(node.ledger.evictions.is_empty());
    }
}

#[test]
fn a_deleted_pod_is_over_until_the_kubelet_releases_its_devices() {
    let mut node = Node::new();
    node.grant(Some("a"), "main", &["GPU-0"]);
    node.show_pods(&[pod("a")]);
    node.drain("GPU-0", EVICT);
    node.record("a", EvictionMethod::Evict, EvictionOutcome::Gone);
    assert!(matches!(node.leaving("GPU-0")[0], EvictionStatus::Requested { .. }));
    node.pods.clear();
    node.submit_view(true, &["a"]);
    assert_eq!(node.leaving("GPU-0"), [EvictionStatus::Over]);
    assert_eq!(node.asks(), []);
}

#[test]
fn held_devices_are_listed_unhealthy_before_any_pod_can_be_evicted() {
    let mut node = Node::new();
    node.grant(Some("a"), "main", &["GPU-0", "MIG-1"]);
    node.show_pods(&[pod("a")]);
    let unhealthy = |node: &Node, part: &str| -> usize {
        let listed = listing(&node.ledger, &resource()).into_iter();
        listed.filter(|l| l.id.part == id(part) && !l.healthy).count()
    };
    assert_eq!(unhealthy(&node, "GPU-0"), 0);
    node.drain("GPU-0", EVICT);
    // The first ledger that evicts the pod lists no device of the GPU healthy, and all those of the other
    // GPU's instance.
    assert_eq!(node.asks(), [evict("a")]);
    assert_eq!((unhealthy(&node, "GPU-0"), unhealthy(&node, "MIG-1")), (8, 0));
    node.drain("GPU-1", EVICT);
    assert_eq!(unhealthy(&node, "MIG-1"), 8, "an instance follows its GPU");
}

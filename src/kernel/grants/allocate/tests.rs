use super::*;
use crate::evidence::kubelet_view::{KubeletAge, PodList, ReconcileView};
use crate::evidence::pods::tests::pod_without_containers;
use crate::evidence::pods::{Pod, PodsSource, PodsView, Stage};
use crate::grants::allocation::{EndReason, Holder};
use crate::hardware::device_access::{DeviceAccess, NamedPart};
use crate::hardware::gpu::{Inventory, Part};
use crate::hardware::process::{Owner, PodProcess, Process, ProcessIdentity, ProcessVisibility, Uses};
use crate::ids::names::{GpuId, PartId, Resource};
use crate::ids::time::Now;
use crate::node::change::{Change, Entry};
use crate::node::command::{Attempt, Command, StackAnswer};
use crate::node::decide::decide;
use crate::policy::hooks::Terms;
use crate::sharing::listing::listing;
use crate::sharing::offer::{Consumes, OfferLine, PartOffer};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

const STEP_MS: u64 = 10;

struct Node {
    ledger: Ledger,
    now: Now,
    parts: Vec<Part>,
}

fn resource() -> Resource {
    Resource::parse("nvidia.com/gpu").unwrap()
}

fn part(i: u32) -> PartId {
    PartId::parse(&format!("GPU-{i}")).unwrap()
}

fn share(gpu: u32, n: u32) -> DeviceId {
    DeviceId::share(&part(gpu), n)
}

impl Node {
    /// A node of `gpus` GPUs with `shares` shares each.
    fn new(gpus: u32, shares: u32) -> Self {
        let part = |i| Part { memory_mib: 1_000, ..Part::whole_gpu(GpuId::of_whole(&part(i)), i) };
        let parts: Vec<Part> = (0..gpus).map(part).collect();
        let consumes = Consumes::Slice { memory_mib: 0, compute_percent: 0 };
        let line = OfferLine { resource: resource(), count: shares, consumes };
        let offers =
            parts.iter().map(|p| (PartOffer { part: p.id.clone(), lines: vec![line.clone()] }, "t".into()));
        let offers = Command::Offer(offers.collect());
        let now = Now { wall_ms: 1_000_000, mono_ms: 1_000_000 };
        let mut node = Self { ledger: Ledger::default(), now, parts };
        let parts = node.parts.clone();
        node.scan(&parts);
        node.turn(&offers);
        node
    }

    fn turn(&mut self, command: &Command) -> Entry {
        self.now.mono_ms += STEP_MS;
        self.now.wall_ms += STEP_MS;
        let verdict = decide(&self.ledger, command, self.now);
        assert_eq!(verdict.refusal, None);
        if !verdict.entry.changes.is_empty() {
            self.ledger.apply(&verdict.entry);
        }
        verdict.entry
    }

    fn scan(&mut self, parts: &[Part]) {
        self.turn(&Command::RecordScan(Inventory { parts: parts.to_vec(), ..Inventory::default() }));
    }

    fn allocate(&self, devices: &[DeviceId]) -> Command {
        Command::Allocate {
            request: AdmitRequest { resource: resource(), devices: devices.to_vec(), claim: None },
            answer: StackAnswer::Allow { by: vec!["baseline".into()], terms: Terms::default() },
            evaluated: None,
            attempt: Attempt::Last { asked_mono_ms: 0 },
        }
    }

    /// Decides without applying.
    fn try_grant(&self, devices: &[DeviceId]) -> Verdict {
        decide(&self.ledger, &self.allocate(devices), self.now)
    }

    fn grant(&mut self, devices: &[DeviceId]) -> AllocationId {
        let entry = self.turn(&self.allocate(devices));
        let mut granted = None;
        for change in entry.changes {
            match change {
                Change::Granted(allocation) => granted = Some(allocation.id),
                Change::Ended { reason, .. } => assert_eq!(reason, EndReason::Superseded),
                _ => {}
            }
        }
        granted.unwrap()
    }

    fn learn(&mut self, id: AllocationId, pod: &str) {
        let holder = Holder {
            namespace: Some("ns".into()),
            pod: Some(pod.into()),
            pod_uid: Some(format!("uid-{pod}")),
            container: Some("main".into()),
        };
        self.ledger.apply(&Entry { at: self.now, changes: vec![Change::HolderLearned { id, holder }] });
    }

    /// Reads the kubelet's `List` with these pods; its checkpoint cannot be read.
    fn observe_list(&mut self, pods: &[&str]) {
        self.now.mono_ms += STEP_MS;
        self.turn(&Command::Reconcile(ReconcileView {
            began_mono_ms: self.now.mono_ms,
            kubelet: Some(KubeletAge { created_wall_ms: 5, created_mono_ms: 5 }),
            list: Some(PodList {
                pods: pods.iter().map(|pod| ("ns".into(), (*pod).into())).collect(),
                held: Vec::new(),
            }),
            ..ReconcileView::default()
        }));
    }

    fn is_live(&self, id: AllocationId) -> bool {
        self.ledger.live.contains_key(&id)
    }
}

/// More grants than there are records of one device.
fn many() -> impl Iterator<Item = usize> {
    0..3 * RECORDS_PER_DEVICE
}

#[test]
fn the_same_gpus_can_be_granted_repeatedly_without_any_evidence() {
    let mut node = Node::new(8, 1);
    let devices: Vec<DeviceId> = (0..8).map(|gpu| share(gpu, 0)).collect();
    for n in 0..2 * LIVE_ALLOCATIONS_MAX {
        node.grant(&devices[n % 8..=n % 8]);
        assert!(node.ledger.live.len() <= 8 * RECORDS_PER_DEVICE, "{} after {n}", node.ledger.live.len());
    }
    assert_eq!(node.ledger.live.len(), 8 * RECORDS_PER_DEVICE);
    node.grant(&devices);
    assert!(node.ledger.parts.values().all(|part| part.held()));
}

#[test]
fn init_containers_and_the_app_container_of_a_pod_all_keep_their_records() {
    let mut node = Node::new(1, 1);
    let granted: Vec<_> = (0..RECORDS_PER_DEVICE).map(|_| node.grant(&[share(0, 0)])).collect();
    assert!(granted.iter().all(|id| node.is_live(*id)));
    node.grant(&[share(0, 0)]);
    assert!(!node.is_live(granted[0]) && granted[1..].iter().all(|id| node.is_live(*id)));
}

#[test]
fn a_record_stays_while_it_alone_holds_one_of_its_devices() {
    let mut node = Node::new(2, 1);
    let both = node.grant(&[share(0, 0), share(1, 0)]);
    for _ in many() {
        node.grant(&[share(0, 0)]);
    }
    assert!(node.is_live(both));
    // With a newer record of the other device no device becomes free.
    node.grant(&[share(1, 0)]);
    assert!(!node.is_live(both));
    assert!(node.ledger.parts.values().all(|part| part.held()));
}

fn api_server_shows(uid: &str) -> Command {
    let pod = Pod {
        namespace: "ns".into(),
        name: "runs".into(),
        created_wall_ms: 0,
        ..pod_without_containers(uid, Stage::Admitted)
    };
    Command::Pods(PodsView {
        source: PodsSource::ApiServer,
        current: true,
        listed_mono_ms: 0,
        pods: BTreeMap::from([(uid.into(), Arc::new(pod))]),
        deleted: VecDeque::new(),
        finished: VecDeque::new(),
    })
}

fn process_of(node: &Node, uid: &str) -> Command {
    let owner =
        Owner::Pod(PodProcess { uid: uid.into(), container_id: None, container: Some("main".into()) });
    let who = ProcessIdentity { name: None, started_ticks: Some(1), owner, ignored: false };
    let uses = Uses { compute: true, ..Uses::default() };
    let process = Process { pid: 2, part: part(0), uses, memory_mib: None, identity: who };
    Command::RecordScan(Inventory {
        parts: node.parts.clone(),
        process_visibility: ProcessVisibility::Visible,
        processes: BTreeMap::from([(GpuId::of_whole(&part(0)), vec![process])]),
        ..Inventory::default()
    })
}

#[test]
fn a_record_whose_pod_any_source_shows_running_stays() {
    for source in ["api server", "list", "process"] {
        let mut node = Node::new(1, 1);
        let runs = node.grant(&[share(0, 0)]);
        node.learn(runs, "runs");
        match source {
            "api server" => drop(node.turn(&api_server_shows("uid-runs"))),
            "list" => node.observe_list(&["runs"]),
            _ => drop(node.turn(&process_of(&node, "uid-runs"))),
        }
        for _ in many() {
            node.grant(&[share(0, 0)]);
        }
        assert!(node.is_live(runs), "{source}");
        assert_eq!(node.ledger.live.len(), RECORDS_PER_DEVICE + 1, "{source}");
    }
}

#[test]
fn a_record_ends_once_the_kubelet_no_longer_lists_its_pod() {
    let mut node = Node::new(1, 1);
    let ran = node.grant(&[share(0, 0)]);
    node.learn(ran, "ran");
    node.observe_list(&["ran"]);
    // A failed `List` proves nothing.
    node.turn(&Command::Reconcile(ReconcileView {
        began_mono_ms: node.now.mono_ms,
        ..ReconcileView::default()
    }));
    for _ in many() {
        node.grant(&[share(0, 0)]);
    }
    assert!(node.is_live(ran));
    node.observe_list(&[]);
    node.grant(&[share(0, 0)]);
    assert!(!node.is_live(ran));
}

#[test]
fn a_record_of_a_running_pod_ends_once_the_pod_has_a_newer_one_of_the_device() {
    let mut node = Node::new(1, 1);
    let (first, second) = (node.grant(&[share(0, 0)]), node.grant(&[share(0, 0)]));
    node.learn(first, "runs");
    node.learn(second, "runs");
    node.turn(&api_server_shows("uid-runs"));
    for _ in many() {
        node.grant(&[share(0, 0)]);
    }
    assert!(!node.is_live(first) && node.is_live(second));
}

#[test]
fn a_part_is_granted_once_a_cdi_specification_names_it_as_it_is() {
    let mut node = Node::new(2, 1);
    let healthy = |node: &Node| -> Vec<DeviceId> {
        let list = listing(&node.ledger, &resource()).into_iter();
        list.filter(|device| device.healthy).map(|device| device.id).collect()
    };
    // A check of the specification that names these GPUs.
    let check = |node: &mut Node, gpus: &[u32]| {
        let named = |gpu| (part(gpu), NamedPart::of(node.ledger.part(&part(gpu)).unwrap()));
        let named_parts = Some(Arc::new(gpus.iter().copied().map(named).collect()));
        node.turn(&Command::SetDeviceAccess(DeviceAccess { named_parts, ..DeviceAccess::default() }));
    };
    assert_eq!(healthy(&node), [share(0, 0), share(1, 0)], "no strategy uses a specification");
    check(&mut node, &[0]);
    assert_eq!(healthy(&node), [share(0, 0)]);
    let refused = node.try_grant(&[share(1, 0)]).refusal;
    assert_eq!(refused, Some(Refusal::NoCdiName { part: part(1) }));
    node.grant(&[share(0, 0)]);
    check(&mut node, &[0, 1]);
    assert_eq!(healthy(&node), [share(0, 0), share(1, 0)]);
    // It leaves and comes back between two checks; so does its name.
    let parts = node.parts.clone();
    node.scan(&parts[..1]);
    node.scan(&parts);
    assert_eq!(healthy(&node), [share(0, 0)]);
    check(&mut node, &[0, 1]);
    assert_eq!(healthy(&node), [share(0, 0), share(1, 0)]);
    // Its name still stands for the device node of before.
    let moved = Part { minor: Some(7), ..parts[1].clone() };
    node.scan(&[parts[0].clone(), moved]);
    assert_eq!(healthy(&node), [share(0, 0)]);
    // What is held stays Healthy without a name, and is not granted a second time.
    check(&mut node, &[1]);
    assert_eq!(healthy(&node), [share(0, 0), share(1, 0)]);
    node.now.mono_ms += node.ledger.rules.timing.allocate_grace_ms;
    assert_eq!(node.try_grant(&[share(0, 0)]).refusal, Some(Refusal::NoCdiName { part: part(0) }));
}

#[test]
fn the_largest_node_never_runs_out_of_records() {
    let (gpus, shares) = (16, 128);
    let mut node = Node::new(gpus, shares);
    for _ in 0..3 {
        for device in (0..gpus).flat_map(|gpu| (0..shares).map(move |n| share(gpu, n))) {
            node.grant(&[device]);
        }
    }
    assert!(node.ledger.live.len() <= LIVE_ALLOCATIONS_MAX);
    assert!(node.ledger.parts.values().all(|part| part.devices.values().all(|device| device.held())));
}

#[test]
fn a_device_that_is_no_longer_offered_goes_to_no_other_pod() {
    for is_excluded in [false, true] {
        let mut node = Node::new(1, 1);
        let held = node.grant(&[share(0, 0)]);
        if is_excluded {
            let gpus = node.parts.iter().map(|part| part.gpu.clone()).collect();
            let inventory = Inventory { parts: node.parts.clone(), excluded: gpus, ..Inventory::default() };
            node.turn(&Command::RecordScan(inventory));
        } else {
            let nothing = PartOffer { part: node.parts[0].id.clone(), lines: Vec::new() };
            node.turn(&Command::Offer(vec![(nothing, "t".into())]));
        }
        assert!(node.is_live(held));
        let refusal = node.try_grant(&[share(0, 0)]).refusal;
        assert!(matches!(refusal, Some(Refusal::NotOffered { .. })), "{is_excluded}: {refusal:?}");
    }
}

use super::*;
use crate::drain::marks::{Author, Order, Owners};
use crate::grants::allocation::{Decision, GrantOrigin, Holder};
use crate::hardware::gpu::{Inventory, Part};
use crate::hardware::process::{Owner, Process, ProcessIdentity, Uses};
use crate::ids::names::{AllocationId, DeviceId, GpuId, Resource};
use crate::ids::time::Now;
use crate::node::change::{Change, Entry};
use crate::node::command::{Activation, Command, NewStack};
use crate::node::decide::decide;
use crate::policy::stack::StackOrigin;
use crate::sharing::breaker::{Breaker, Phase};
use crate::sharing::offer::{Consumes, OfferLine, PartOffer};
use crate::sharing::via::KubeletApi;

fn gpu() -> GpuId {
    GpuId::parse("GPU-0").unwrap()
}

fn id(number: u64) -> AllocationId {
    AllocationId { store: 7, number }
}

struct Node {
    ledger: Ledger,
    now: Now,
    transitions: Transitions,
}

impl Node {
    fn new() -> Self {
        Self {
            ledger: Ledger::default(),
            now: Now { wall_ms: 1_000_000, mono_ms: 1_000 },
            transitions: Transitions::since(Arc::default()),
        }
    }

    /// A node with one GPU, whose transitions so far are over.
    fn with_gpu() -> Self {
        let mut node = Self::new();
        node.scan(true, &[]);
        node.offer(1);
        node.step();
        node
    }

    fn step(&mut self) -> Vec<Transition> {
        self.transitions.step(Arc::new(self.ledger.clone()))
    }

    /// The texts of the next transitions.
    fn texts(&mut self) -> Vec<String> {
        self.step().iter().map(|one| one.describe(&self.ledger, GpuName::Index)).collect()
    }

    /// The text of the next transition, which has to be the only one.
    fn text(&mut self) -> String {
        let mut texts = self.texts();
        assert_eq!(texts.len(), 1, "{texts:?}");
        texts.remove(0)
    }

    fn turn(&mut self, command: &Command) {
        let entry = decide(&self.ledger, command, self.now).entry;
        self.ledger.apply(&entry);
    }

    fn apply(&mut self, change: Change) {
        self.ledger.apply(&Entry { at: self.now, changes: vec![change] });
    }

    fn scan(&mut self, present: bool, pids: &[u32]) {
        let part = Part { model: "H100".into(), memory_mib: 80, ..Part::whole_gpu(gpu(), 3) };
        let process = |pid: &u32| Process {
            pid: *pid,
            part: gpu().as_part().clone(),
            memory_mib: None,
            uses: Uses { compute: true, ..Uses::default() },
            identity: ProcessIdentity {
                name: Some("train".into()),
                started_ticks: Some(1),
                owner: Owner::NoPod { container_id: None },
                ignored: false,
            },
        };
        let inventory = Inventory {
            parts: present.then_some(part).into_iter().collect(),
            processes: BTreeMap::from([(gpu(), pids.iter().map(process).collect())]),
            ..Inventory::default()
        };
        self.turn(&Command::RecordScan(inventory));
    }

    fn offer(&mut self, count: u32) {
        let consumes = Consumes::Slice { memory_mib: 80 / u64::from(count), compute_percent: 100 / count };
        let resource = Resource::parse("nvidia.com/gpu.shared").unwrap();
        let lines = vec![OfferLine { resource, count, consumes }];
        self.turn(&Command::Offer(vec![(
            PartOffer { part: gpu().as_part().clone(), lines },
            "timeslice@1".into(),
        )]));
    }

    fn grant(&mut self, number: u64) {
        self.apply(Change::Granted(Allocation {
            id: id(number),
            resource: Resource::parse("nvidia.com/gpu.shared").unwrap(),
            devices: vec![DeviceId { part: gpu().as_part().clone(), share: Some(0) }],
            granted_wall_ms: 5,
            origin: GrantOrigin::DevicePlugin,
            holder: Holder::default(),
            overlapped: false,
            decision: Decision { by: vec!["timeslice@1".into()], ..Decision::default() },
            ended: None,
        }));
    }
}

#[test]
fn a_gpu_is_found_once_and_its_offers_are_reported_when_they_change() {
    let mut node = Node::new();
    node.scan(true, &[]);
    let found = node.step();
    assert!(matches!(&found[..], [Transition::PartFound(_)]), "{found:?}");
    assert_eq!(found[0].gpu(&node.ledger), Some(gpu()));
    assert_eq!(found[0].describe(&node.ledger, GpuName::Index), "GPU 3 was found: H100, 80 MiB");
    node.offer(4);
    let text = node.text();
    assert_eq!(text, "GPU 3 is offered as 4 x nvidia.com/gpu.shared (20 MiB, 25 %) by timeslice@1");
    node.offer(4);
    node.scan(true, &[]);
    assert_eq!(node.step(), []);
    node.scan(false, &[]);
    assert!(node.text().starts_with("GPU 3 is gone"));
    node.scan(true, &[]);
    assert!(node.text().starts_with("GPU 3 is back"), "it is not found again");
    node.apply(Change::GpuForgotten(gpu()));
    let forgotten = node.step();
    let name = |style| forgotten[0].describe(&node.ledger, style);
    assert_eq!(name(GpuName::Index), "GPU 3 was removed from the list");
    assert_eq!(name(GpuName::IndexAndUuid), "GPU 3 (GPU-0) was removed from the list");
}

#[test]
fn a_gpu_that_is_unhealthy_when_it_is_found_changes_its_health() {
    let mut node = Node::with_gpu();
    node.ledger.gpus.clear();
    node.step();
    let health =
        Health { state: HealthState::Unhealthy, reason: "XID 79".into(), ..Health::healthy(node.now) };
    node.ledger.gpus.insert(gpu(), Arc::new(GpuState::new(health, node.now)));
    let found = node.step();
    assert!(found.len() == 1 && found[0].is_warning(), "{found:?}");
    assert_eq!(found[0].describe(&node.ledger, GpuName::Index), "GPU 3 is unhealthy: XID 79");
}

#[test]
fn each_change_of_a_drain_has_its_author_and_reason() {
    let mut node = Node::with_gpu();
    let author = |why: &str| Author::api("ada".into(), why.into());
    node.turn(&Command::Cordon { gpu: gpu(), author: author("fan") });
    assert_eq!(node.text(), "GPU 3 is cordoned by ada (fan)");
    node.turn(&Command::Cordon { gpu: gpu(), author: author("fan") });
    assert_eq!(node.step(), []);
    let order = Order { evict: true, ..Order::default() };
    node.turn(&Command::Drain { gpu: gpu(), author: author(""), order });
    assert_eq!(node.text(), "GPU 3 is being drained by ada (fan); its pods are evicted");
    node.turn(&Command::StopDrain { gpu: gpu(), owners: Owners::All });
    assert!(node.text().contains("no longer drained"));
    node.turn(&Command::Uncordon { gpu: gpu(), owners: Owners::All });
    assert_eq!(node.text(), "GPU 3 may be granted again");
    // A change that is undone before the next step is not a transition.
    node.turn(&Command::Cordon { gpu: gpu(), author: author("") });
    node.turn(&Command::Uncordon { gpu: gpu(), owners: Owners::All });
    assert_eq!(node.step(), []);
}

#[test]
fn orders_to_move_a_gpu_and_the_move_are_reported() {
    let mut node = Node::with_gpu();
    let order =
        |api, why: &str| Command::SetVia { gpu: gpu(), api, author: Author::api("ada".into(), why.into()) };
    node.turn(&order(KubeletApi::Dra, "new jobs"));
    assert_eq!(node.text(), "GPU 3 is being moved from the device plugin API to DRA by ada (new jobs)");
    node.turn(&order(KubeletApi::DevicePlugin, ""));
    assert_eq!(node.text(), "GPU 3 stays with the device plugin API: its move was cancelled by ada");
    node.turn(&order(KubeletApi::Dra, "new jobs"));
    node.step();
    node.now.mono_ms += node.ledger.rules.timing.via_ms;
    node.turn(&Command::FinishMove { gpu: gpu() });
    assert_eq!(node.text(), "GPU 3 is granted through DRA now");
    // A GPU that is granted through DRA from the start was not moved.
    node.turn(&order(KubeletApi::DevicePlugin, ""));
    node.ledger.gpus.clear();
    node.step();
    let via = Via::new(KubeletApi::Dra);
    let fresh = GpuState::new(Health::healthy(node.now), node.now);
    node.ledger.gpus.insert(gpu(), Arc::new(GpuState { via, ..fresh }));
    assert_eq!(node.step(), []);
}

#[test]
fn allocations_are_reported_even_if_they_end_before_the_next_step() {
    let mut node = Node::with_gpu();
    node.grant(1);
    assert_eq!(node.text(), "00000007-1 granted by timeslice@1: 1 x nvidia.com/gpu.shared");
    let holder = Holder { namespace: Some("default".into()), pod: Some("a".into()), ..Holder::default() };
    node.apply(Change::HolderLearned { id: id(1), holder });
    assert_eq!(node.text(), "00000007-1 is held by default/a/?");
    node.turn(&Command::End { id: id(1), force: true });
    node.grant(2);
    node.turn(&Command::End { id: id(2), force: true });
    let all = node.step();
    assert!(all.iter().all(|one| one.gpu(&node.ledger) == Some(gpu())), "{all:?}");
    let texts: Vec<_> = all.iter().map(|one| one.describe(&node.ledger, GpuName::Index)).collect();
    let expected = [
        "00000007-1 ended (operator): 1 x nvidia.com/gpu.shared of default/a/?",
        "00000007-2 granted by timeslice@1: 1 x nvidia.com/gpu.shared",
        "00000007-2 ended (operator): 1 x nvidia.com/gpu.shared",
    ];
    assert_eq!(texts, expected);
    assert_eq!(node.step(), []);
}

#[test]
fn an_activation_is_reported_with_its_entries() {
    let mut node = Node::with_gpu();
    let stack = NewStack {
        origin: StackOrigin::Api,
        failed: None,
        by: "ada".into(),
        why: "test".into(),
        entries: Vec::new(),
    };
    node.turn(&Command::Activate(Activation { stack, offers: Vec::new(), triage: Vec::new() }));
    assert_eq!(node.text(), "stack 1 was activated by ada (test): the baseline alone");
}

#[test]
fn a_process_without_an_allocation_is_reported_once_and_when_it_is_gone() {
    let mut node = Node::with_gpu();
    node.scan(true, &[41]);
    assert_eq!(node.step(), [], "an allocation may explain it in a moment");
    node.now.mono_ms += 60_000;
    node.scan(true, &[41]);
    let text = node.text();
    assert!(text.starts_with("GPU 3 is used without an allocation by process 41 (train): "), "{text}");
    node.scan(true, &[41]);
    assert_eq!(node.step(), []);
    node.scan(true, &[]);
    assert_eq!(node.text(), "process 41 no longer uses GPU 3 without an allocation");
}

#[test]
fn the_first_step_reports_no_bypass_of_the_ledger_that_it_starts_at() {
    let mut node = Node::with_gpu();
    node.scan(true, &[41]);
    node.now.mono_ms += 60_000;
    node.scan(true, &[41]);
    node.transitions = Transitions::since(Arc::new(node.ledger.clone()));
    node.scan(true, &[41]);
    assert_eq!(node.step(), []);
}

#[test]
fn a_hold_is_reported_when_it_begins_and_ends() {
    let mut node = Node::with_gpu();
    let withheld = |withheld: Option<&str>| Change::SightingsUpdated {
        sightings: Arc::default(),
        ends_withheld: withheld.map(Into::into),
    };
    node.apply(withheld(Some("all vanished at once")));
    assert_eq!(node.text(), "no allocation ends at present: all vanished at once");
    node.apply(withheld(None));
    assert_eq!(node.text(), "allocations end by themselves again");
}

#[test]
fn a_node_without_a_strategy_and_missing_nodes_are_reported_once_for_each_change() {
    let mut node = Node::with_gpu();
    let device_access = |no_strategy: Option<&str>, missing_nodes: Option<&str>| {
        let (no_strategy, missing_nodes) = (no_strategy.map(Into::into), missing_nodes.map(Into::into));
        let device_access =
            crate::hardware::device_access::DeviceAccess { no_strategy, missing_nodes, ..Default::default() };
        Change::DeviceAccessChanged(Arc::new(device_access))
    };
    node.apply(device_access(Some("the runtime has no CDI: upgrade it"), None));
    assert_eq!(node.text(), "no device is offered: the runtime has no CDI: upgrade it");
    node.apply(device_access(None, None));
    assert_eq!(node.text(), "devices can be passed to containers again");
    node.apply(device_access(None, Some("/dev/nvidia-uvm does not exist")));
    assert_eq!(node.text(), "/dev/nvidia-uvm does not exist");
    node.apply(device_access(None, Some("/dev/nvidia-uvm does not exist")));
    assert_eq!(node.step(), []);
    node.apply(device_access(None, None));
    assert_eq!(node.text(), "all device nodes that containers need exist");
}

#[test]
fn a_withdrawn_resource_is_reported_once_and_when_it_is_listed_again() {
    let mut node = Node::with_gpu();
    let resource = Resource::parse("nvidia.com/gpu").unwrap();
    let set = |node: &mut Node, phase: Option<Phase>| {
        let breaker = phase.map(|phase| Breaker {
            phase,
            denials: 0,
            namespaces: Vec::new(),
            window_mono_ms: 0,
            pause_ms: 10_000,
        });
        node.apply(Change::BreakerChanged { resource: resource.clone(), breaker });
    };
    set(&mut node, Some(Phase::Closed));
    assert_eq!(node.step(), [], "denials are counted");
    set(&mut node, Some(Phase::Open { until_mono_ms: 20_000 }));
    let text = node.text();
    assert!(text.starts_with("requests for nvidia.com/gpu were denied repeatedly"), "{text}");
    assert!(text.contains("at first for 10 s"), "{text}");
    set(&mut node, Some(Phase::HalfOpen));
    set(&mut node, Some(Phase::Open { until_mono_ms: 40_000 }));
    assert_eq!(node.step(), [], "one withdrawal");
    set(&mut node, None);
    assert_eq!(node.text(), "the free devices of nvidia.com/gpu are listed again");
}

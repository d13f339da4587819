use super::*;
use EventKind as K;
use berth_core::admission::Standing;
use berth_kernel::allocation::{Decision, Holder};
use berth_kernel::change::{Change, Entry};
use berth_kernel::command::{Command, NewStack, Rules};
use berth_kernel::decide::decide;
use berth_kernel::drain::{Mark, Order};
use berth_kernel::gpu::{Inventory, Part};
use berth_kernel::names::{DeviceId, Resource};
use berth_kernel::offer::{Consumes, OfferLine, PartOffer};
use berth_kernel::process::{Owner, Process, Uses, Who};
use berth_kernel::time::Now;
use std::collections::BTreeMap;

fn gpu() -> PartId {
    PartId::parse("GPU-0").unwrap()
}

fn id(number: u64) -> AllocationId {
    AllocationId { store: 7, number }
}

/// A ledger, and what is told of it.
struct Node {
    ledger: Ledger,
    now: Now,
    told: Told,
    standings: Standings,
}

impl Node {
    fn new() -> Self {
        let told = Told::new(Arc::default(), Arc::default());
        Self {
            ledger: Ledger::default(),
            now: Now { wall_ms: 1_000_000, mono_ms: 1_000 },
            told,
            standings: Standings::new(),
        }
    }

    /// One with a GPU of which all was told.
    fn with_gpu() -> Self {
        let mut node = Self::new();
        node.look(true, &[]);
        node.offer(1);
        node.news();
        node
    }

    fn news(&mut self) -> Vec<News> {
        self.told.step(Arc::new(self.ledger.clone()), Arc::new(self.standings.clone()))
    }

    /// What is told now, in short.
    fn kinds(&mut self) -> Vec<EventKind> {
        self.news().into_iter().map(|news| news.kind).collect()
    }

    /// The words of what is told now, which is one thing.
    fn only(&mut self, kind: EventKind) -> String {
        let mut news = self.news();
        assert_eq!(news.iter().map(|n| n.kind).collect::<Vec<_>>(), [kind], "{news:?}");
        news.remove(0).words
    }

    fn turn(&mut self, command: &Command) {
        let entry = decide(&self.ledger, &Rules::default(), command, self.now).entry;
        self.ledger.apply(&entry);
    }

    fn apply(&mut self, change: Change) {
        self.ledger.apply(&Entry { at: self.now, changes: vec![change] });
    }

    fn look(&mut self, present: bool, pids: &[u32]) {
        let part = Part {
            id: gpu(),
            parent: None,
            vendor: "nvidia".into(),
            model: "H100".into(),
            gpu_index: 3,
            minor: None,
            memory_mib: 80,
            pci_bus: String::new(),
            numa_node: None,
            mig_enabled: false,
            mig: None,
            attributes: BTreeMap::new(),
        };
        let process = |pid: &u32| Process {
            pid: *pid,
            part: gpu(),
            memory_mib: None,
            uses: Uses { compute: true, ..Uses::default() },
            who: Who {
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
        self.turn(&Command::Look(inventory));
    }

    fn offer(&mut self, count: u32) {
        let consumes = Consumes::Slice { memory_mib: 80 / u64::from(count), compute_percent: 100 / count };
        let resource = Resource::parse("nvidia.com/gpu.shared").unwrap();
        let lines = vec![OfferLine { resource, count, consumes }];
        self.turn(&Command::Offer(vec![(PartOffer { part: gpu(), lines }, "timeslice@1".into())]));
    }

    fn grant(&mut self, number: u64) {
        self.apply(Change::Granted(Allocation {
            id: id(number),
            resource: Resource::parse("nvidia.com/gpu.shared").unwrap(),
            devices: vec![DeviceId { part: gpu(), share: Some(0) }],
            granted_wall_ms: 5,
            holder: Holder::default(),
            overlapped: false,
            decision: Decision { by: vec!["timeslice@1".into()], ..Decision::default() },
            ended: None,
        }));
    }
}

#[test]
fn gpus_and_offers_are_told_as_they_come_and_change() {
    let mut node = Node::new();
    node.look(true, &[]);
    let news = node.news();
    assert_eq!((news[0].kind, news[0].gpu.clone(), news.len()), (K::GpuFound, Some(gpu()), 1), "{news:?}");
    assert_eq!(news[0].words, "GPU 3 is there: H100, 80 MiB");
    node.offer(4);
    let words = node.only(K::OffersChanged);
    assert_eq!(words, "GPU 3 is offered as 4 x nvidia.com/gpu.shared (20 MiB, 25 %) by timeslice@1");
    node.offer(4);
    node.look(true, &[]);
    assert_eq!(node.kinds(), []);
    node.look(false, &[]);
    assert!(node.only(K::GpuHealth).starts_with("GPU 3 is vanished"));
    node.look(true, &[]);
    // It is there again, and not found anew.
    assert_eq!(node.kinds(), [K::GpuHealth]);
    node.apply(Change::GpuForgotten(gpu()));
    assert_eq!(node.only(K::GpuForgotten), "GPU 3 was removed from the list");
}

#[test]
fn each_turn_of_a_drain_is_told_with_who_and_why() {
    let mut node = Node::with_gpu();
    let mark = |why: &str| Mark { by: "ada".into(), why: why.into(), since_wall_ms: 0 };
    node.turn(&Command::Cordon { gpu: gpu(), mark: mark("fan") });
    assert_eq!(node.only(K::GpuCordoned), "GPU 3 is cordoned by ada (fan)");
    node.turn(&Command::Cordon { gpu: gpu(), mark: mark("fan") });
    assert_eq!(node.kinds(), []);
    let order = Order { evict: true, ..Order::default() };
    node.turn(&Command::Drain { gpu: gpu(), mark: mark(""), order });
    assert_eq!(node.only(K::GpuDraining), "GPU 3 is being drained by ada (fan); its pods are evicted");
    node.turn(&Command::StopDrain { gpu: gpu() });
    assert!(node.only(K::GpuCordoned).contains("no longer drained"));
    node.turn(&Command::Uncordon { gpu: gpu() });
    assert_eq!(node.only(K::GpuUncordoned), "GPU 3 may be granted again");
    // What comes and goes between two looks is not told.
    node.turn(&Command::Cordon { gpu: gpu(), mark: mark("") });
    node.turn(&Command::Uncordon { gpu: gpu() });
    assert_eq!(node.kinds(), []);
}

#[test]
fn allocations_are_told_even_if_they_end_between_two_looks() {
    let mut node = Node::with_gpu();
    node.grant(1);
    let words = node.only(K::AllocationGranted);
    assert_eq!(words, "00000007-1 granted by timeslice@1: 1 x nvidia.com/gpu.shared");
    let holder = Holder { namespace: Some("default".into()), pod: Some("a".into()), ..Holder::default() };
    node.apply(Change::Learned { id: id(1), holder });
    assert_eq!(node.only(K::AllocationHolder), "00000007-1 is held by default/a/?");
    node.turn(&Command::End { id: id(1), force: true });
    node.grant(2);
    node.turn(&Command::End { id: id(2), force: true });
    let news = node.news();
    let short: Vec<_> = news.iter().map(|n| (n.kind, n.allocation.unwrap().number)).collect();
    assert_eq!(short, [(K::AllocationEnded, 1), (K::AllocationGranted, 2), (K::AllocationEnded, 2)]);
    assert_eq!(news[0].words, "00000007-1 ended (operator): 1 x nvidia.com/gpu.shared of default/a/?");
    assert!(news.iter().all(|n| n.gpu == Some(gpu())));
    assert_eq!(node.kinds(), []);
}

#[test]
fn an_activation_and_policies_that_fail_are_told() {
    let mut node = Node::with_gpu();
    let stack = NewStack { from_api: true, by: "ada".into(), why: "test".into(), entries: Vec::new() };
    node.turn(&Command::Activate { stack, offers: Vec::new(), expected: None });
    assert_eq!(node.only(K::StackActivated), "stack 1 is active by ada (test): the baseline alone");
    let of = |revision, faults, suspended| Standing {
        revision,
        faults,
        suspended,
        last: Some("place: trap".into()),
    };
    let standing = |faults, suspended| of(1, faults, suspended);
    node.standings = Standings::from([("a@1".into(), standing(0, false))]);
    assert_eq!(node.kinds(), []);
    node.standings = Standings::from([("a@1".into(), standing(1, false))]);
    assert_eq!(node.only(K::PolicyFault), "a@1 failed: place: trap");
    node.standings = Standings::from([("a@1".into(), standing(5, true))]);
    let news = node.news();
    assert_eq!(news.iter().map(|n| n.kind).collect::<Vec<_>>(), [K::PolicyFault, K::PolicySuspended]);
    assert!(news[0].words.contains("4 times") && news[0].policy.as_deref() == Some("a@1"), "{news:?}");
    node.standings = Standings::from([("a@1".into(), standing(5, false))]);
    assert_eq!(node.kinds(), [K::PolicyAskedAgain]);
    // Activated again: all faults since are new, whether they are fewer, as many or more.
    for (revision, faults) in [(2, 1), (3, 1), (4, 3)] {
        node.standings = Standings::from([("a@1".into(), of(revision, faults, false))]);
        let words = node.only(K::PolicyFault);
        assert_eq!(words.contains("3 times"), faults == 3, "{words}");
        assert_eq!(node.kinds(), []);
    }
}

#[test]
fn a_process_without_an_allocation_is_told_once_and_when_it_is_gone() {
    let mut node = Node::with_gpu();
    node.look(true, &[41]);
    assert_eq!(node.kinds(), [], "it may be explained in a moment");
    node.now.mono_ms += 60_000;
    node.look(true, &[41]);
    let words = node.only(K::Bypass);
    assert!(words.starts_with("GPU 3 is used without an allocation by process 41 (train): "), "{words}");
    node.look(true, &[41]);
    assert_eq!(node.kinds(), []);
    node.look(true, &[]);
    assert_eq!(node.only(K::BypassOver), "process 41 no longer uses GPU 3 without an allocation");
}

#[test]
fn a_hold_is_told_when_it_begins_and_ends() {
    let mut node = Node::with_gpu();
    let hold = |hold: Option<&str>| Change::Sighted { sightings: Arc::default(), hold: hold.map(Into::into) };
    node.apply(hold(Some("all vanished at once")));
    assert_eq!(node.only(K::Hold), "no allocation ends at present: all vanished at once");
    node.apply(hold(None));
    assert_eq!(node.only(K::Hold), "allocations end by themselves again");
}

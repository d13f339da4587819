use super::*;
use crate::bypass::Bypasses;
use berth_kernel::allocation::{Allocation, Decision, Holder};
use berth_kernel::change::{Change, Entry};
use berth_kernel::command::{Command, Rules};
use berth_kernel::decide::decide;
use berth_kernel::drain::Mark;
use berth_kernel::evict::{Ask, Outcome};
use berth_kernel::gpu::{Inventory, Part};
use berth_kernel::names::{AllocationId, DeviceId, Resource};
use berth_kernel::offer::{Consumes, OfferLine, PartOffer};
use berth_kernel::pod_bypass::PodBypass;
use berth_kernel::pods::{Pod, PodsSource, PodsView, Stage};
use berth_kernel::policy::{Severity, TriageAnswer};
use berth_kernel::process::{Owner, Process, Uses, Who};
use berth_kernel::time::Now;
use std::collections::VecDeque;

fn gpu() -> PartId {
    PartId::parse("GPU-0").unwrap()
}

fn resource() -> Resource {
    Resource::parse("nvidia.com/gpu").unwrap()
}

fn mark(why: &str) -> Mark {
    Mark { by: "ada".into(), why: why.into(), since_wall_ms: 0 }
}

pub(crate) struct Node {
    pub(crate) ledger: Ledger,
    pub(crate) now: Now,
    /// Processes of the host on the GPU, where it tells. From 1000 on each has a name of its own.
    hosts: Option<Vec<u32>>,
    bypasses: Bypasses,
    /// How many events of bypasses there is room for.
    room: usize,
}

impl Node {
    /// One GPU that a pod holds.
    pub(crate) fn new() -> Self {
        let mut node = Self {
            ledger: Ledger::default(),
            now: Now { wall_ms: 1_000_000, mono_ms: 1_000 },
            hosts: None,
            bypasses: Bypasses::default(),
            room: 100,
        };
        node.look(true);
        let line = OfferLine { resource: resource(), count: 1, consumes: Consumes::Whole };
        node.turn(&Command::Offer(vec![(PartOffer { part: gpu(), lines: vec![line] }, "test".into())]));
        let allocation = Allocation {
            id: AllocationId { store: 0, number: 0 },
            resource: resource(),
            devices: vec![DeviceId::whole(&gpu())],
            granted_wall_ms: 0,
            holder: Holder { pod_uid: Some("u".into()), ..Holder::default() },
            overlapped: false,
            decision: Decision::default(),
            ended: None,
        };
        node.ledger.apply(&Entry { at: node.now, changes: vec![Change::Granted(allocation)] });
        node.pod(false);
        node
    }

    /// Applies, and answers what is told of it.
    pub(crate) fn turn(&mut self, command: &Command) -> Vec<Notice> {
        let before = self.ledger.clone();
        let verdict = decide(&self.ledger, &Rules::default(), command, self.now);
        self.ledger.apply(&verdict.entry);
        let mut told = news(&before, &self.ledger);
        told.extend(self.bypasses.news(&self.ledger, self.room));
        told
    }

    /// Ten seconds later these are on the GPU.
    pub(crate) fn later(&mut self, hosts: Option<&[u32]>) -> Vec<Notice> {
        self.now.mono_ms += 10_000;
        self.hosts = hosts.map(<[u32]>::to_vec);
        self.look(true)
    }

    pub(crate) fn look(&mut self, present: bool) -> Vec<Notice> {
        self.look_at(present, None)
    }

    /// A look at which the GPU does not answer.
    pub(crate) fn trouble(&mut self, trouble: &str) -> Vec<Notice> {
        self.look_at(true, Some(trouble))
    }

    fn look_at(&mut self, present: bool, trouble: Option<&str>) -> Vec<Notice> {
        let part = Part {
            id: gpu(),
            parent: None,
            vendor: "nvidia".into(),
            model: String::new(),
            gpu_index: 3,
            minor: None,
            memory_mib: 1,
            pci_bus: String::new(),
            numa_node: None,
            mig_enabled: false,
            mig: None,
            attributes: BTreeMap::new(),
        };
        let mut inventory =
            Inventory { parts: present.then_some(part).into_iter().collect(), ..Inventory::default() };
        inventory.troubles.extend(trouble.map(|trouble| (gpu(), trouble.to_owned())));
        if let Some(pids) = &self.hosts {
            let processes = pids.iter().map(|pid| Process {
                pid: *pid,
                part: gpu(),
                uses: Uses { compute: true, ..Uses::default() },
                memory_mib: None,
                who: Who {
                    name: Some(if *pid < 1000 { "x\ny".into() } else { format!("p{pid}") }),
                    started_ticks: Some(1),
                    owner: Owner::NoPod { container_id: None },
                    ignored: false,
                },
            });
            inventory.processes.insert(gpu(), processes.collect());
        }
        self.turn(&Command::Look(inventory))
    }

    fn pod(&mut self, is_static: bool) -> Vec<Notice> {
        self.pod_with(is_static, None)
    }

    fn pod_with(&mut self, is_static: bool, bypass: Option<PodBypass>) -> Vec<Notice> {
        let pod = Pod {
            uid: "u".into(),
            namespace: "team".into(),
            name: "web".into(),
            labels: Vec::new(),
            is_static,
            of_daemon_set: false,
            stage: Stage::Admitted,
            leaving_since_wall_ms: None,
            created_wall_ms: 1,
            containers: Vec::new(),
            bypass,
        };
        self.turn(&Command::Pods(PodsView {
            source: PodsSource::ApiServer,
            current: true,
            listed_mono_ms: 1,
            pods: [("u".to_owned(), Arc::new(pod))].into(),
            deleted: VecDeque::new(),
            finished: VecDeque::new(),
        }))
    }

    pub(crate) fn cordon(&mut self, why: &str) -> Vec<Notice> {
        self.turn(&Command::Cordon { gpu: gpu(), mark: mark(why) })
    }

    fn drain(&mut self, order: Order) -> Vec<Notice> {
        self.turn(&Command::Drain { gpu: gpu(), mark: mark("fan"), order })
    }

    fn asked(&mut self, way: Way, outcome: Outcome) -> Vec<Notice> {
        let pod = Arc::clone(&self.ledger.pods.as_ref().unwrap().pods["u"]);
        self.turn(&Command::Asked { ask: Ask { pod, way, gpu: gpu() }, outcome })
    }
}

const EVICT: Order = Order { evict: true, deadline_wall_ms: None, at_deadline: AtDeadline::Wait };

/// The only notice: of the node, its reason and note.
fn one(notices: &[Notice]) -> (&'static str, bool, &str) {
    let [notice] = notices else { panic!("{notices:?}") };
    assert_eq!(notice.about, About::Node);
    (notice.reason, notice.warning, &notice.note)
}

#[test]
fn every_turn_of_a_drain_is_told_once() {
    let mut node = Node::new();
    let cordoned = "GPU 3 (GPU-0) is cordoned by ada (fan)";
    assert_eq!(one(&node.cordon("fan")), ("GPUCordoned", false, cordoned));
    assert_eq!(node.cordon("fan"), []);
    assert_eq!(one(&node.cordon("other")).2, "GPU 3 (GPU-0) is cordoned by ada (other)");
    let order = Order { deadline_wall_ms: Some(1_767_225_600_500), at_deadline: AtDeadline::Delete, ..EVICT };
    let says = "GPU 3 (GPU-0) is being drained by ada (fan); its pods are evicted; until 2026-01-01T00:00:00Z, then they are deleted";
    assert_eq!(one(&node.drain(order)), ("GPUDraining", false, says));
    assert_eq!(node.drain(order), []);
    assert_eq!(
        one(&node.drain(EVICT)).2,
        "GPU 3 (GPU-0) is being drained by ada (fan); its pods are evicted"
    );
    let stopped = node.turn(&Command::StopDrain { gpu: gpu() });
    assert_eq!(one(&stopped).0, "GPUDrainStopped");
    assert_eq!(one(&node.turn(&Command::Uncordon { gpu: gpu() })).0, "GPUUncordoned");

    node.turn(&Command::End { id: AllocationId { store: 0, number: 0 }, force: true });
    node.drain(Order::default());
    assert_eq!(node.look(true), []);
    node.now.mono_ms += 100_000;
    assert_eq!(one(&node.look(true)).0, "GPUDrained");
    assert_eq!(node.look(true), []);
}

#[test]
fn turns_of_health_are_told_with_their_reason() {
    let mut node = Node::new();
    let sick = |severity, reason: &str| Command::Triaged {
        reading: berth_kernel::gpu::Reading {
            part: gpu(),
            source: "xid".into(),
            code: 79,
            detail: String::new(),
        },
        answer: TriageAnswer { severity, reason: reason.into(), again_after_s: Some(1) },
    };
    let told = node.turn(&sick(Severity::Degraded, "remapped"));
    assert_eq!(one(&told), ("GPUDegraded", true, "GPU 3 (GPU-0) is degraded, and still granted: remapped"));
    let told = node.turn(&sick(Severity::Unhealthy, "XID 79"));
    assert_eq!(one(&told), ("GPUUnhealthy", true, "GPU 3 (GPU-0) is unhealthy: XID 79"));
    assert_eq!(node.turn(&sick(Severity::Unhealthy, "XID 79")), []);
    assert_eq!(one(&node.turn(&sick(Severity::Unhealthy, "XID 48"))).2, "GPU 3 (GPU-0) is unhealthy: XID 48");
    assert_eq!(one(&node.look(false)).0, "GPUVanished");
    node.now.mono_ms += 10;
    assert_eq!((one(&node.look(true)).0, one(&node.look(false)).0), ("GPUReturned", "GPUVanished"));
    node.now.mono_ms += 10_000;
    assert_eq!(one(&node.look(true)), ("GPUReturned", false, "GPU 3 (GPU-0) is there again, and healthy"));
    node.turn(&sick(Severity::Unhealthy, "XID 79"));
    node.now.mono_ms += 10_000;
    assert_eq!(one(&node.look(true)), ("GPUHealthy", false, "GPU 3 (GPU-0) is healthy again"));
}

#[test]
fn what_stands_in_the_way_of_a_drain_is_told_when_it_changes() {
    let mut node = Node::new();
    node.drain(EVICT);
    let told = node.asked(Way::Evict, Outcome::Budget("needs 3".into()));
    let says = "GPU 3 (GPU-0) cannot be drained yet: pod team/web waits for its disruption budget: needs 3";
    assert_eq!(one(&told), ("GPUDrainBlocked", true, says));
    assert_eq!(node.asked(Way::Evict, Outcome::Budget("needs 3".into())), []);
    assert_eq!(one(&node.asked(Way::Evict, Outcome::Failed("no right".into()))).0, "GPUDrainBlocked");

    let mut node = Node::new();
    node.pod(true);
    let told = node.drain(EVICT);
    let reasons: Vec<_> = told.iter().map(|n| n.reason).collect();
    assert_eq!(reasons, ["GPUDraining", "GPUDrainBlocked"]);
    assert!(told[1].note.contains("is a static pod"), "{}", told[1].note);
    let mut node = Node::new();
    node.pod(true);
    assert_eq!(node.drain(Order::default()).len(), 1, "without evict nobody stands in the way");
}

#[test]
fn a_pod_is_told_why_it_had_to_go() {
    let mut node = Node::new();
    node.drain(EVICT);
    let told = node.asked(Way::Evict, Outcome::Taken);
    let about = About::Pod { namespace: "team".into(), name: "web".into(), uid: "u".into() };
    assert_eq!((told.len(), &told[0].about, told[0].reason), (1, &about, "GPUDrain"));
    assert_eq!(told[0].note, "evicted: GPU 3 (GPU-0) is being drained by ada (fan)");
    assert_eq!(node.asked(Way::Evict, Outcome::Taken), []);
    let told = node.asked(Way::Delete, Outcome::Taken);
    assert!(told[0].note.starts_with("deleted at the deadline"), "{told:?}");
}

#[test]
fn a_hold_and_its_end_are_told() {
    let mut node = Node::new();
    let before = node.ledger.clone();
    node.ledger.hold = Some("all vanished".into());
    assert_eq!(one(&news(&before, &node.ledger)).0, "AllocationsOnHold");
    assert_eq!(news(&node.ledger, &node.ledger), []);
    assert_eq!(one(&news(&node.ledger, &before)).0, "AllocationsHoldOver");
}

#[test]
fn a_note_is_no_longer_than_the_api_server_takes() {
    let mut node = Node::new();
    let told = node.cordon(&"\u{e4}".repeat(512));
    assert!(one(&told).2.len() <= NOTE_BYTES_MAX);
}

#[test]
fn a_gpu_that_is_used_without_an_allocation_is_told_once_and_when_it_is_over() {
    let mut node = Node::new();
    assert_eq!(node.later(Some(&[7])), [], "not before it has lasted");
    let told = node.later(Some(&[7]));
    let (reason, warning, note) = one(&told);
    assert_eq!((reason, warning), ("GPUBypassed", true));
    assert!(note.contains(r"by process x\ny: ") && note.contains("in no pod"), "{note}");
    assert_eq!(node.later(Some(&[7])), []);
    // More of that name are the same job, whatever their ids; another one is told.
    for pids in [&[7, 8, 9][..], &[7, 8, 9], &[8], &[10], &[10]] {
        assert_eq!(node.later(Some(pids)), [], "{pids:?}");
    }
    node.later(Some(&[10, 1001]));
    let other = node.later(Some(&[10, 1001]));
    assert!(one(&other).2.contains("by process p1001: "), "{other:?}");
    // A GPU that tells nothing is not known to be left alone, nor used anew when it tells again.
    assert_eq!(node.later(None), []);
    node.later(Some(&[10, 1001]));
    assert_eq!(node.later(Some(&[10, 1001])), []);
    assert_eq!(one(&node.later(Some(&[]))).0, "GPUBypassOver");
    // In the same words: the API server is told of a repetition.
    node.later(Some(&[11]));
    assert_eq!(node.later(Some(&[11])), told);
}

#[test]
fn what_finds_no_room_is_told_later() {
    let mut node = Node::new();
    node.later(Some(&[1001, 1002, 1003]));
    node.room = 2;
    assert_eq!(node.later(Some(&[1001, 1002, 1003])).len(), 2);
    assert_eq!(node.later(Some(&[1001, 1002, 1003])).len(), 1);
    node.room = 0;
    assert_eq!(node.later(Some(&[])), []);
    node.room = 1;
    assert_eq!(one(&node.later(Some(&[]))).0, "GPUBypassOver");
}

#[test]
fn a_pod_whose_spec_reaches_gpus_is_told_of_once() {
    let mut node = Node::new();
    let by = |container: &str| PodBypass::NamesGpus { container: container.into() };
    let told = node.pod_with(false, Some(by("main")));
    let [notice] = told.as_slice() else { panic!("{told:?}") };
    let about = About::Pod { namespace: "team".into(), name: "web".into(), uid: "u".into() };
    assert_eq!((&notice.about, notice.reason, notice.warning), (&about, "GPUBypassPossible", true));
    assert!(notice.note.contains("main sets NVIDIA_VISIBLE_DEVICES"), "{}", notice.note);
    assert_eq!(node.pod_with(false, Some(by("main"))), []);
    // Nor again where the API server was away, or the pods were too many to be shown.
    let view = PodsView::clone(node.ledger.pods.as_ref().unwrap());
    node.turn(&Command::Pods(view.silenced()));
    assert_eq!(node.turn(&Command::Pods(view)), []);
    let mut node = Node::new();
    let told = node.pod_with(false, Some(PodBypass::Privileged { container: "main".into() }));
    assert!(!told[0].warning, "it need not mean it");
}

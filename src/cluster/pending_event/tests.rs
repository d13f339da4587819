use super::*;
use berth_kernel::drain::eviction::EvictionRequest;
use berth_kernel::drain::marks::{AtDeadline, Author, Order, Owners};
use berth_kernel::evidence::pods::{BypassKind, Pod, PodBypass, PodsSource, PodsView, Stage};
use berth_kernel::grants::allocation::{Allocation, Decision, GrantOrigin, Holder};
use berth_kernel::hardware::gpu::{Inventory, Part};
use berth_kernel::hardware::judgement::TriagedReading;
use berth_kernel::hardware::process::{Owner, Process, ProcessIdentity, Uses};
use berth_kernel::hardware::triage::{Severity, TriageAnswer};
use berth_kernel::ids::names::{AllocationId, DeviceId, GpuId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::change::{Change, Entry};
use berth_kernel::node::command::Command;
use berth_kernel::node::decide::decide;
use berth_kernel::node::transitions::Transitions;
use berth_kernel::policy::decider::Decider;
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};
use berth_kernel::sharing::via::KubeletApi;
use std::collections::VecDeque;
use std::sync::Arc;

fn gpu() -> GpuId {
    GpuId::parse("GPU-0").unwrap()
}

fn resource() -> Resource {
    Resource::parse("nvidia.com/gpu").unwrap()
}

fn author(why: &str) -> Author {
    Author::api("ada".into(), why.into())
}

fn events_between(old: Ledger, new: &Ledger) -> Vec<PendingEvent> {
    let transitions = Transitions::since(Arc::new(old)).step(Arc::new(new.clone()));
    transitions.iter().filter_map(|transition| PendingEvent::of_transition(transition, new)).collect()
}

pub(crate) struct Node {
    pub(crate) ledger: Ledger,
    pub(crate) now: Now,
    /// Ids of processes on the GPU that are in no pod; `None`: NVML lists no processes. From 1000 on each has a name of
    /// its own.
    pids: Option<Vec<u32>>,
    bypasses: Bypasses,
    /// The limit passed to [`Bypasses::events`].
    bypass_events_max: usize,
}

impl Node {
    /// One GPU that a pod holds.
    pub(crate) fn new() -> Self {
        let mut node = Self {
            ledger: Ledger::default(),
            now: Now { wall_ms: 1_000_000, mono_ms: 1_000 },
            pids: None,
            bypasses: Bypasses::default(),
            bypass_events_max: 100,
        };
        node.scan(true);
        let line = OfferLine { resource: resource(), count: 1, consumes: Consumes::Whole };
        node.apply(&Command::Offer(vec![(
            PartOffer { part: gpu().as_part().clone(), lines: vec![line] },
            "test".into(),
        )]));
        let allocation = Allocation {
            id: AllocationId { store: 0, number: 0 },
            resource: resource(),
            devices: vec![DeviceId::whole(gpu().as_part())],
            granted_wall_ms: 0,
            origin: GrantOrigin::DevicePlugin,
            holder: Holder { pod_uid: Some("u".into()), ..Holder::default() },
            overlapped: false,
            decision: Decision::default(),
            ended: None,
        };
        node.ledger.apply(&Entry { at: node.now, changes: vec![Change::Granted(allocation)] });
        node.pod(false);
        node
    }

    /// Applies a command, and returns its events.
    pub(crate) fn apply(&mut self, command: &Command) -> Vec<PendingEvent> {
        let before = self.ledger.clone();
        let verdict = decide(&self.ledger, command, self.now);
        self.ledger.apply(&verdict.entry);
        let mut notices = events_between(before, &self.ledger);
        notices.extend(self.bypasses.events(&self.ledger, self.bypass_events_max));
        notices
    }

    /// A scan after ten seconds, with these processes on the GPU.
    pub(crate) fn scan_later(&mut self, pids: Option<&[u32]>) -> Vec<PendingEvent> {
        self.now.mono_ms += 10_000;
        self.pids = pids.map(<[u32]>::to_vec);
        self.scan(true)
    }

    pub(crate) fn scan(&mut self, present: bool) -> Vec<PendingEvent> {
        let part = Part::whole_gpu(gpu(), 3);
        let mut inventory =
            Inventory { parts: present.then_some(part).into_iter().collect(), ..Inventory::default() };
        if let Some(pids) = &self.pids {
            let processes = pids.iter().map(|pid| Process {
                pid: *pid,
                part: gpu().as_part().clone(),
                uses: Uses { compute: true, ..Uses::default() },
                memory_mib: None,
                identity: ProcessIdentity {
                    name: Some(if *pid < 1000 { "x\ny".into() } else { format!("p{pid}") }),
                    started_ticks: Some(1),
                    owner: Owner::NoPod { container_id: None },
                    ignored: false,
                },
            });
            inventory.processes.insert(gpu(), processes.collect());
        }
        self.apply(&Command::RecordScan(inventory))
    }

    fn pod(&mut self, is_static: bool) -> Vec<PendingEvent> {
        self.pod_with(is_static, None)
    }

    fn pod_with(&mut self, is_static: bool, bypass: Option<PodBypass>) -> Vec<PendingEvent> {
        let pod = Pod {
            uid: "u".into(),
            namespace: "team".into(),
            name: "web".into(),
            labels: Vec::new(),
            is_static,
            owner: None,
            stage: Stage::Admitted,
            deletion_wall_ms: None,
            created_wall_ms: 1,
            containers: Vec::new(),
            has_claims: false,
            named_claims: Vec::new(),
            bypass,
        };
        self.apply(&Command::Pods(PodsView {
            source: PodsSource::ApiServer,
            current: true,
            listed_mono_ms: 1,
            pods: [("u".to_owned(), Arc::new(pod))].into(),
            deleted: VecDeque::new(),
            finished: VecDeque::new(),
        }))
    }

    pub(crate) fn cordon(&mut self, why: &str) -> Vec<PendingEvent> {
        self.apply(&Command::Cordon { gpu: gpu(), author: author(why) })
    }

    fn drain(&mut self, order: Order) -> Vec<PendingEvent> {
        self.apply(&Command::Drain { gpu: gpu(), author: author("fan"), order })
    }

    fn asked(&mut self, way: EvictionMethod, outcome: EvictionOutcome) -> Vec<PendingEvent> {
        let pod = Arc::clone(&self.ledger.pods.as_ref().unwrap().pods["u"]);
        self.apply(&Command::RecordEviction {
            ask: EvictionRequest { pod, method: way, gpu: gpu() },
            outcome,
        })
    }
}

const EVICT: Order =
    Order { evict: true, deadline_wall_ms: None, deadline_mono_ms: None, at_deadline: AtDeadline::Wait };

/// The reason, whether it is a warning, and the note of the only event, which regards the node.
fn one(notices: &[PendingEvent]) -> (&'static str, bool, &str) {
    let [notice] = notices else { panic!("{notices:?}") };
    assert_eq!(notice.regarding, Regarding::Node);
    (notice.reason, notice.warning, &notice.note)
}

#[test]
fn every_change_of_a_drain_is_one_event() {
    let mut node = Node::new();
    let cordoned = "GPU 3 (GPU-0) is cordoned by ada (fan)";
    assert_eq!(one(&node.cordon("fan")), ("GPUCordoned", false, cordoned));
    assert_eq!(node.cordon("fan"), []);
    assert_eq!(one(&node.cordon("other")).2, "GPU 3 (GPU-0) is cordoned by ada (other)");
    let order = Order { deadline_wall_ms: Some(1_767_225_600_500), at_deadline: AtDeadline::Delete, ..EVICT };
    let expected = "GPU 3 (GPU-0) is being drained by ada (fan); its pods are evicted; until 2026-01-01T00:00:00Z, then they are deleted";
    assert_eq!(one(&node.drain(order)), ("GPUDraining", false, expected));
    assert_eq!(node.drain(order), []);
    assert_eq!(
        one(&node.drain(EVICT)).2,
        "GPU 3 (GPU-0) is being drained by ada (fan); its pods are evicted"
    );
    let stopped = node.apply(&Command::StopDrain { gpu: gpu(), owners: Owners::All });
    assert_eq!(one(&stopped).0, "GPUDrainStopped");
    assert_eq!(one(&node.apply(&Command::Uncordon { gpu: gpu(), owners: Owners::All })).0, "GPUUncordoned");

    node.apply(&Command::End { id: AllocationId { store: 0, number: 0 }, force: true });
    node.drain(Order::default());
    assert_eq!(node.scan(true), []);
    node.now.mono_ms += 100_000;
    assert_eq!(one(&node.scan(true)).0, "GPUDrained");
    assert_eq!(node.scan(true), []);
    for (api, expected) in [(KubeletApi::Dra, "GPUMoving"), (KubeletApi::DevicePlugin, "GPUMoveCancelled")] {
        assert_eq!(one(&node.apply(&Command::SetVia { gpu: gpu(), api, author: author("") })).0, expected);
    }
    node.apply(&Command::SetVia { gpu: gpu(), api: KubeletApi::Dra, author: author("") });
    node.now.mono_ms += 100_000;
    assert_eq!(one(&node.apply(&Command::FinishMove { gpu: gpu() })).0, "GPUMoved");
}

#[test]
fn changes_of_health_are_events_with_their_reason() {
    let mut node = Node::new();
    let sick = |severity, reason: &str| {
        let (part, source) = (gpu().as_part().clone(), "xid".into());
        Command::ApplyTriage(TriagedReading {
            reading: berth_kernel::hardware::gpu::Reading { part, source, code: 79, detail: String::new() },
            answer: TriageAnswer { severity, reason: reason.into(), again_after_s: Some(1) },
            by: Decider::Baseline,
        })
    };
    let notices = node.apply(&sick(Severity::Degraded, "remapped"));
    assert_eq!(
        one(&notices),
        ("GPUDegraded", true, "GPU 3 (GPU-0) is degraded, and still granted: remapped")
    );
    let notices = node.apply(&sick(Severity::Unhealthy, "XID 79"));
    assert_eq!(one(&notices), ("GPUUnhealthy", true, "GPU 3 (GPU-0) is unhealthy: XID 79"));
    assert_eq!(node.apply(&sick(Severity::Unhealthy, "XID 79")), []);
    assert_eq!(
        one(&node.apply(&sick(Severity::Unhealthy, "XID 48"))).2,
        "GPU 3 (GPU-0) is unhealthy: XID 48"
    );
    assert_eq!(one(&node.scan(false)).0, "GPUVanished");
    node.now.mono_ms += 10;
    assert_eq!((one(&node.scan(true)).0, one(&node.scan(false)).0), ("GPUReturned", "GPUVanished"));
    node.now.mono_ms += 10_000;
    assert_eq!(one(&node.scan(true)), ("GPUReturned", false, "GPU 3 (GPU-0) is back, and healthy"));
    node.apply(&sick(Severity::Unhealthy, "XID 79"));
    node.now.mono_ms += 10_000;
    assert_eq!(
        one(&node.scan(true)),
        ("GPUHealthy", false, "GPU 3 (GPU-0) is healthy again; it was unhealthy: XID 79")
    );
}

#[test]
fn a_pod_that_blocks_a_drain_is_an_event_whenever_the_reason_changes() {
    let mut node = Node::new();
    node.drain(EVICT);
    let notices = node.asked(EvictionMethod::Evict, EvictionOutcome::Budget("needs 3".into()));
    let expected =
        "GPU 3 (GPU-0) cannot be drained yet: pod team/web waits for its disruption budget: needs 3";
    assert_eq!(one(&notices), ("GPUDrainBlocked", true, expected));
    assert_eq!(node.asked(EvictionMethod::Evict, EvictionOutcome::Budget("needs 3".into())), []);
    assert_eq!(
        one(&node.asked(EvictionMethod::Evict, EvictionOutcome::Failed("no right".into()))).0,
        "GPUDrainBlocked"
    );

    let mut node = Node::new();
    node.pod(true);
    let notices = node.drain(EVICT);
    let reasons: Vec<_> = notices.iter().map(|n| n.reason).collect();
    assert_eq!(reasons, ["GPUDraining", "GPUDrainBlocked"]);
    assert!(notices[1].note.contains("is a static pod"), "{}", notices[1].note);
    let mut node = Node::new();
    node.pod(true);
    assert_eq!(node.drain(Order::default()).len(), 1, "without evict no pod blocks it");
}

#[test]
fn an_evicted_pod_has_an_event_with_the_reason() {
    let mut node = Node::new();
    node.drain(EVICT);
    let notices = node.asked(EvictionMethod::Evict, EvictionOutcome::Accepted);
    let regarding = Regarding::Pod { namespace: "team".into(), name: "web".into(), uid: "u".into() };
    assert_eq!((notices.len(), &notices[0].regarding, notices[0].reason), (1, &regarding, "GPUDrain"));
    assert_eq!(notices[0].note, "evicted: GPU 3 (GPU-0) is being drained by ada (fan)");
    assert_eq!(node.asked(EvictionMethod::Evict, EvictionOutcome::Accepted), []);
    let notices = node.asked(EvictionMethod::Delete, EvictionOutcome::Accepted);
    assert!(notices[0].note.starts_with("deleted at the deadline"), "{notices:?}");
}

#[test]
fn a_hold_and_its_end_are_events() {
    let mut node = Node::new();
    let before = node.ledger.clone();
    node.ledger.ends_withheld = Some("all vanished".into());
    let held = node.ledger;
    assert_eq!(one(&events_between(before.clone(), &held)).0, "AllocationsOnHold");
    assert_eq!(events_between(held.clone(), &held), []);
    assert_eq!(one(&events_between(held, &before)).0, "AllocationsHoldOver");
}

#[test]
fn a_note_is_no_longer_than_the_api_server_takes() {
    let mut node = Node::new();
    let notices = node.cordon(&"\u{e4}".repeat(512));
    assert!(one(&notices).2.len() <= NOTE_BYTES_MAX);
}

#[test]
fn a_gpu_that_is_used_without_an_allocation_is_one_event_and_its_end_another() {
    let mut node = Node::new();
    assert_eq!(node.scan_later(Some(&[7])), [], "not before it has lasted");
    let notices = node.scan_later(Some(&[7]));
    let (reason, warning, note) = one(&notices);
    assert_eq!((reason, warning), ("GPUBypassed", true));
    assert!(note.contains(r"by process x\ny: ") && note.contains("in no pod"), "{note}");
    assert_eq!(node.scan_later(Some(&[7])), []);
    // Processes of one name are one job, whatever their ids; another name is another event.
    for pids in [&[7, 8, 9][..], &[7, 8, 9], &[8], &[10], &[10]] {
        assert_eq!(node.scan_later(Some(pids)), [], "{pids:?}");
    }
    node.scan_later(Some(&[10, 1001]));
    let other = node.scan_later(Some(&[10, 1001]));
    assert!(one(&other).2.contains("by process p1001: "), "{other:?}");
    // While the GPU lists no processes, the bypass is not over; when it lists them again, it is not a new one.
    assert_eq!(node.scan_later(None), []);
    node.scan_later(Some(&[10, 1001]));
    assert_eq!(node.scan_later(Some(&[10, 1001])), []);
    assert_eq!(one(&node.scan_later(Some(&[]))).0, "GPUBypassOver");
    // With the same text, so that the API server counts it as a repetition.
    node.scan_later(Some(&[11]));
    assert_eq!(node.scan_later(Some(&[11])), notices);
}

#[test]
fn events_beyond_the_limit_are_returned_later() {
    let mut node = Node::new();
    node.scan_later(Some(&[1001, 1002, 1003]));
    node.bypass_events_max = 2;
    assert_eq!(node.scan_later(Some(&[1001, 1002, 1003])).len(), 2);
    assert_eq!(node.scan_later(Some(&[1001, 1002, 1003])).len(), 1);
    node.bypass_events_max = 0;
    assert_eq!(node.scan_later(Some(&[])), []);
    node.bypass_events_max = 1;
    assert_eq!(one(&node.scan_later(Some(&[]))).0, "GPUBypassOver");
}

#[test]
fn a_pod_whose_spec_reaches_gpus_is_one_event() {
    let mut node = Node::new();
    let by = |container: &str| PodBypass { kind: BypassKind::NamesGpus, container: container.into() };
    let notices = node.pod_with(false, Some(by("main")));
    let [notice] = notices.as_slice() else { panic!("{notices:?}") };
    let regarding = Regarding::Pod { namespace: "team".into(), name: "web".into(), uid: "u".into() };
    assert_eq!((&notice.regarding, notice.reason, notice.warning), (&regarding, "GPUBypassPossible", true));
    assert!(notice.note.contains("main sets NVIDIA_VISIBLE_DEVICES"), "{}", notice.note);
    assert_eq!(node.pod_with(false, Some(by("main"))), []);
    // Nor again after the API server was unreachable, or the pods were too many.
    let view = PodsView::clone(node.ledger.pods.as_ref().unwrap());
    node.apply(&Command::Pods(view.ended_only()));
    assert_eq!(node.apply(&Command::Pods(view)), []);
    let mut node = Node::new();
    let notices =
        node.pod_with(false, Some(PodBypass { kind: BypassKind::Privileged, container: "main".into() }));
    assert!(!notices[0].warning, "it may not use GPUs at all");
}

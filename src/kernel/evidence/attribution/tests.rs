//! Attribution of processes to allocations on a node with one whole GPU and one in MIG mode.

use super::*;
use crate::evidence::pods::tests::pod_without_containers;
use crate::evidence::pods::{BypassKind, PodsSource, PodsView};
use crate::grants::allocation::Holder;
use crate::node::change::{Change, Entry};
use crate::node::test_node::{Node, gpu_id, of_pod, process};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

const HOST: Owner = Owner::NoPod { container_id: None };

#[test]
fn a_process_uses_the_allocation_of_its_pod_on_its_part() {
    let mut node = Node::new();
    let whole = node.grant("GPU-0", None, "pod-a", "main");
    let (a, b) = (node.grant("MIG-a", None, "pod-b", "main"), node.grant("MIG-b", None, "pod-b", "main"));
    for (gpu, on, owner, expected) in [
        ("GPU-0", "GPU-0", of_pod("pod-a", "main"), Attribution::To(whole)),
        ("GPU-0", "GPU-0", of_pod("pod-a", ""), Attribution::To(whole)),
        ("GPU-1", "MIG-a", of_pod("pod-b", "main"), Attribution::To(a)),
        ("GPU-1", "MIG-b", of_pod("pod-b", ""), Attribution::To(b)),
        // NVML did not name the instance.
        ("GPU-1", "GPU-1", of_pod("pod-b", "main"), Attribution::OneOf(vec![a, b])),
        (
            "GPU-0",
            "GPU-0",
            of_pod("pod-b", "main"),
            Attribution::Unexplained(Reason::PodHoldsOthers { by: None }),
        ),
        (
            "GPU-0",
            "GPU-0",
            of_pod("pod-c", "main"),
            Attribution::Unexplained(Reason::PodHoldsNothing { by: None }),
        ),
        ("GPU-0", "GPU-0", HOST, Attribution::Unexplained(Reason::HostProcess)),
        ("GPU-0", "GPU-0", Owner::Unknown(UnknownReason::Hidden), Attribution::Possibly(vec![whole])),
        (
            "GPU-0",
            "GPU-0",
            of_pod("pod-a", "sidecar"),
            Attribution::Unexplained(Reason::ContainerHoldsNothing { container: "sidecar".into() }),
        ),
    ] {
        let process = process(1, on, owner);
        assert_eq!(attribute_process(&node.ledger, &gpu_id(gpu), &process), expected, "{process:?}");
        let unexplained = matches!(expected, Attribution::Unexplained(_));
        let expected = (!unexplained).then_some(expected);
        assert_eq!(find_attribution(&node.ledger, &gpu_id(gpu), &process), expected, "{process:?}");
    }
}

#[test]
fn containers_of_one_pod_are_distinguished_where_the_container_is_known() {
    let mut node = Node::new();
    let (a, b) = (node.grant("GPU-0", Some(0), "pod", "a"), node.grant("GPU-0", Some(1), "pod", "b"));
    let attribution = |node: &Node, container: &str| {
        attribute_process(&node.ledger, &gpu_id("GPU-0"), &process(1, "GPU-0", of_pod("pod", container)))
    };
    assert_eq!(attribution(&node, "a"), Attribution::To(a));
    assert_eq!(attribution(&node, "b"), Attribution::To(b));
    assert_eq!(attribution(&node, ""), Attribution::OneOf(vec![a, b]));
    // One container with two devices of the GPU.
    let c = node.grant("GPU-0", Some(2), "pod", "a");
    assert_eq!(attribution(&node, "a"), Attribution::OneOf(vec![a, c]));
    // An allocation whose container is not known yet.
    let d = node.grant("GPU-0", Some(3), "pod", "");
    assert_eq!(attribution(&node, "z"), Attribution::To(d));
    // The same container is granted the device again: the newer record counts (I7).
    let e = node.grant("GPU-0", Some(1), "pod", "b");
    assert!(node.ledger.live[&b].overlapped);
    assert_eq!(attribution(&node, "b"), Attribution::To(e));
}

#[test]
fn a_process_that_may_use_an_allocation_without_known_holder_is_no_bypass() {
    let mut node = Node::new();
    let unattributed = node.grant("GPU-0", Some(0), "", "");
    let on = |owner| process(1, "GPU-0", owner);
    let attribution = |node: &Node, owner| attribute_process(&node.ledger, &gpu_id("GPU-0"), &on(owner));
    assert_eq!(attribution(&node, of_pod("pod", "a")), Attribution::Possibly(vec![unattributed]));
    assert_eq!(
        attribution(&node, HOST),
        Attribution::Unexplained(Reason::HostProcess),
        "the host was granted nothing"
    );
    let holder = Holder { pod_uid: Some("pod".into()), container: Some("a".into()), ..Holder::default() };
    let learned = Change::HolderLearned { id: unattributed, holder };
    node.ledger.apply(&Entry { at: node.now, changes: vec![learned] });
    assert_eq!(attribution(&node, of_pod("pod", "a")), Attribution::To(unattributed));
    assert_eq!(
        attribution(&node, of_pod("other", "a")),
        Attribution::Unexplained(Reason::PodHoldsNothing { by: None })
    );
}

#[test]
fn an_ignored_name_counts_only_where_no_allocation_explains_the_process() {
    let mut node = Node::new();
    let ignored = |owner| {
        let mut process = process(1, "GPU-0", owner);
        process.identity.ignored = true;
        process
    };
    let attribution = |node: &Node, owner| attribute_process(&node.ledger, &gpu_id("GPU-0"), &ignored(owner));
    for owner in [HOST, of_pod("dcgm", "exporter"), Owner::Unknown(UnknownReason::Gone)] {
        assert_eq!(attribution(&node, owner), Attribution::Ignored);
    }
    let held = node.grant("GPU-0", None, "pod", "main");
    assert_eq!(attribution(&node, of_pod("pod", "main")), Attribution::To(held));
}

#[test]
fn a_bypass_is_reported_after_the_grace_period_and_only_while_it_lasts() {
    let mut node = Node::new();
    let held = node.grant("GPU-0", None, "pod", "main");
    let processes =
        [("GPU-0", process(1, "GPU-0", of_pod("pod", "main"))), ("GPU-0", process(2, "GPU-0", HOST))];
    let reported = |node: &Node| -> Vec<(u32, Reason)> {
        let bypasses = Attributions::new(&node.ledger).bypasses();
        bypasses.into_iter().map(|b| (b.process.pid, b.reason)).collect()
    };
    node.look(&processes);
    assert_eq!(reported(&node), []);
    node.pass(9);
    node.look(&processes);
    assert_eq!(reported(&node), []);
    node.pass(1);
    assert_eq!(reported(&node), [], "a scan reports it, not time alone");
    node.look(&processes);
    assert_eq!(reported(&node), [(2, Reason::HostProcess)]);
    let since = Attributions::new(&node.ledger).bypasses()[0].since_wall_ms;
    assert_eq!(since, 1_000_000);
    // The pod ends and its process runs on: the grace period starts at the end.
    node.end(held);
    node.look(&processes);
    assert_eq!(reported(&node), [(2, Reason::HostProcess)]);
    node.pass(10);
    node.look(&processes);
    assert_eq!(reported(&node), [(1, Reason::Leftover { allocation: held }), (2, Reason::HostProcess)]);
    // Another process with the same id has its own grace period.
    let mut later = process(2, "GPU-0", HOST);
    later.identity.started_ticks = Some(2);
    node.look(&[("GPU-0", later)]);
    assert_eq!(reported(&node), []);
}

#[test]
fn a_holder_learned_after_a_scan_explains_its_processes_at_once() {
    let mut node = Node::new();
    node.look(&[("GPU-0", process(1, "GPU-0", of_pod("pod", "main")))]);
    node.pass(20);
    node.look(&[("GPU-0", process(1, "GPU-0", of_pod("pod", "main")))]);
    assert_eq!(Attributions::new(&node.ledger).bypasses().len(), 1);
    node.grant("GPU-0", None, "pod", "main");
    assert_eq!(Attributions::new(&node.ledger).bypasses(), []);
}

#[test]
fn every_reason_has_a_distinct_name_and_text() {
    let all = [
        Reason::PodHoldsNothing { by: None },
        Reason::PodHoldsOthers { by: None },
        Reason::ContainerHoldsNothing { container: "sidecar".into() },
        Reason::Leftover { allocation: AllocationId { store: 1, number: 2 } },
        Reason::HostProcess,
        Reason::Unknown(UnknownReason::Gone),
    ];
    let names: BTreeSet<_> = all.iter().map(Reason::as_str).collect();
    let texts: BTreeSet<_> = all.iter().map(Reason::describe).collect();
    assert_eq!((names.len(), texts.len()), (all.len(), all.len()));
    assert!(texts.iter().all(|text| !text.contains("  ")), "{texts:?}");
}

#[test]
fn the_reason_shows_how_a_pods_spec_gives_access_to_gpus() {
    let mut node = Node::new();
    let by = PodBypass { kind: BypassKind::NamesGpus, container: "main".into() };
    let pod = |uid: &str, stage, bypass: Option<&PodBypass>| {
        let pod = Pod { bypass: bypass.cloned(), ..pod_without_containers(uid, stage) };
        (uid.to_owned(), Arc::new(pod))
    };
    let view = PodsView {
        source: PodsSource::ApiServer,
        current: true,
        listed_mono_ms: 0,
        pods: BTreeMap::from([
            pod("taker", Stage::Admitted, Some(&by)),
            pod("plain", Stage::Admitted, None),
            pod("done", Stage::Finished, Some(&by)),
        ]),
        deleted: VecDeque::new(),
        finished: VecDeque::new(),
    };
    let seen = Change::PodsSeen(Arc::new(view));
    node.ledger.apply(&Entry { at: node.now, changes: vec![seen] });
    let attribution =
        |uid| attribute_process(&node.ledger, &gpu_id("GPU-0"), &process(1, "GPU-0", of_pod(uid, "main")));
    let known = Reason::PodHoldsNothing { by: Some(by) };
    assert!(known.describe().contains("main sets NVIDIA_VISIBLE_DEVICES"), "{}", known.describe());
    assert_eq!(attribution("taker"), Attribution::Unexplained(known));
    assert_eq!(attribution("plain"), Attribution::Unexplained(Reason::PodHoldsNothing { by: None }));
    let with_bypass: Vec<_> = pods_with_gpu_bypass(&node.ledger).map(|(pod, _)| pod.uid.as_str()).collect();
    assert_eq!(with_bypass, ["taker"]);
}

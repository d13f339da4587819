//! Names and devices that the kubelet uses again: the next pod of a StatefulSet, short pods one after another on a GPU
//! that grants nothing new, an id that two pods get.

use crate::kubelet::allocation::{allocate, dial_whole, refused};
use crate::support::gpus::WHOLE;
use crate::support::kubelet_node::{KubeletNode, NodeOptions, cordon};
use crate::support::wait::SOON;
use berth_kernel::drain::marks::{Author, Order};
use berth_kernel::grants::contested::contested;
use berth_kernel::ids::names::GpuId;
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_kubelet::ReconcileTiming;
use kubelet_standin::PodSpec;
use std::collections::BTreeSet;

fn pod(name: &str) -> PodSpec {
    PodSpec::new("default", name).container("main", &[(WHOLE, 1)])
}

/// Runs a pod and returns its UID and its GPU.
async fn run(node: &KubeletNode, spec: PodSpec) -> (String, GpuId) {
    let uid = node.run(spec).await;
    node.wait("the holder", |l| holder(l, &uid).is_some()).await;
    let gpu = holder(&node.kernel.snapshot(), &uid).unwrap();
    (uid, gpu)
}

/// The GPU that the pod with this UID and a known name holds.
fn holder(ledger: &Ledger, uid: &str) -> Option<GpuId> {
    let mut live = ledger.live.values();
    let of_pod = live.find(|a| a.holder.pod_uid.as_deref() == Some(uid) && a.holder.pod.is_some())?;
    Some(ledger.gpu_id_of(&of_pod.devices[0].part))
}

async fn node_of(gpus: u32) -> KubeletNode {
    let node = NodeOptions { gpus, ..NodeOptions::default() }.started().await;
    node.allocatable(WHOLE, gpus as usize).await;
    node
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_pod_of_a_stateful_set_does_not_keep_the_gpu_of_the_last_one() {
    for restart_kubelet in [false, true] {
        let node = node_of(2).await;
        let (first, gpu) = run(&node, pod("web-0")).await;
        node.kernel.execute(cordon(gpu.clone(), "")).await.unwrap();
        node.kubelet.delete(&first);
        // The cordoned GPU is free for the kubelet, and Berth refuses it until the kubelet chooses the other one.
        let mut next = None;
        for _ in 0..100 {
            let spec = pod("web-0");
            let uid = spec.uid.clone();
            if node.kubelet.admit(spec).await.is_ok() {
                next = Some(uid);
                break;
            }
        }
        let next = next.expect("a pod on the other GPU");
        node.kubelet.run(&next).await.unwrap();
        if restart_kubelet {
            node.kubelet.restart().await.unwrap();
            node.allocatable(WHOLE, 1).await;
        }
        node.wait("the end of the first pod's allocation", |l| {
            let uids: BTreeSet<_> = l.live.values().filter_map(|a| a.holder.pod_uid.clone()).collect();
            uids == BTreeSet::from([next.clone()])
        })
        .await;
        assert_ne!(holder(&node.kernel.snapshot(), &next), Some(gpu));
        node.assert_harmless();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_of_the_same_name_without_a_gpu_keeps_none() {
    let node = node_of(1).await;
    let (first, _) = run(&node, pod("web-0")).await;
    node.kubelet.delete(&first);
    node.kubelet.admit(PodSpec::new("default", "web-0").container("main", &[])).await.unwrap();
    node.wait("its end", |l| l.live.is_empty()).await;
    node.assert_harmless();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_pods_one_after_another_get_nothing_of_a_gpu_that_drains() {
    let node = node_of(1).await;
    let (first, gpu) = run(&node, pod("short-0")).await;
    let order = Order::default();
    node.kernel
        .execute(Command::Drain { gpu: gpu.clone(), author: Author::api("ada".into(), String::new()), order })
        .await
        .unwrap();
    node.kubelet.finish(&first);
    // The kubelet knows of the end before Berth does, and gives the device to the next pod at once.
    for n in 1..=10 {
        let message = refused(&node, pod(&format!("short-{n}"))).await;
        assert!(message.contains("cordoned by ada") || message.contains("no healthy devices"), "{message}");
    }
    assert_eq!(node.kernel.snapshot().next_number, 1, "only the first was granted");
    node.wait("an empty GPU", |l| l.live.is_empty()).await;
    node.assert_harmless();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_with_an_init_container_is_admitted_although_its_gpu_is_cordoned_meanwhile() {
    // However busy the machine is, the pass before the refusal sees what the kubelet writes.
    let options = NodeOptions { gpus: 1, ..NodeOptions::default() };
    let reconcile = ReconcileTiming { checkpoint_wait: SOON, ..options.reconcile };
    let options =
        NodeOptions { reconcile, ..options }.with_timeouts(|t| t.reconcile.refusal_pass_limit = SOON);
    let node = options.started().await;
    node.allocatable(WHOLE, 1).await;
    let init = PodSpec::new("default", "p").init("fetch", &[(WHOLE, 1)]);
    let uid = init.uid.clone();
    node.kubelet.admit(init).await.unwrap();
    let gpu = GpuId::of_whole(&node.live()[0].devices[0].part);
    node.kernel.execute(cordon(gpu, "")).await.unwrap();
    let mut client = dial_whole(&node).await;
    client.allocate(allocate(&["GPU-0"])).await.expect("the pod's next container uses the device again");
    // The pod ends, and the device belongs to no init container any more.
    node.kubelet.delete(&uid);
    client.allocate(allocate(&["GPU-0"])).await.unwrap_err();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_id_that_two_pods_got_is_reported_and_each_pod_is_found_by_its_name() {
    let node = node_of(1).await;
    let (first, gpu) = run(&node, pod("pod-a")).await;
    // What kubernetes#137534 leads to: the kubelet calls Allocate for a device that another pod holds.
    let mut client = dial_whole(&node).await;
    let id = gpu.to_string();
    let response =
        client.allocate(allocate(&[&id])).await.unwrap().into_inner().container_responses.remove(0);
    let second = pod("pod-b");
    let uid = second.uid.clone();
    node.kubelet.run_allocated(second, WHOLE, &[id], response).unwrap();
    node.reconcile().await;
    node.wait("both holders", |l| holder(l, &first).is_some() && holder(l, &uid).is_some()).await;
    node.wait("the report", |l| contested(l).len() == 2).await;
    let ledger = node.kernel.snapshot();
    for (uid, name) in [(&first, "pod-a"), (&uid, "pod-b")] {
        let mut live = ledger.live.values();
        let found = live.find(|a| a.holder.pod_uid.as_ref() == Some(uid)).unwrap();
        assert_eq!(found.holder.pod.as_deref(), Some(name));
    }
    node.kubelet.delete(&first);
    let since = std::time::Instant::now();
    while !contested(&node.kernel.snapshot()).is_empty() {
        assert!(since.elapsed() < SOON);
        node.reconcile().await;
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

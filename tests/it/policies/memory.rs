//! Slices of two sizes on each GPU, over the whole daemon: what is listed is what still fits.
// Clippy does not see that helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use crate::support::process_node::ProcessNode;
use crate::support::wait::SOON;
use std::collections::BTreeSet;

const SMALL: &str = "nvidia.com/gpu.mem-4g";
const LARGE: &str = "nvidia.com/gpu.mem-8g";
const SETTINGS: &str = "gpus: sim:2xt4\n\
    stack: [{ policy: memory, permissions: { resources: ['nvidia.com/gpu.mem-*'] } }]";

/// Waits until so many small and large ones are allocatable, held ones among them.
async fn allocatable(node: &ProcessNode, small: usize, large: usize) {
    for (resource, count) in [(SMALL, small), (LARGE, large)] {
        node.kubelet.wait_allocatable(resource, count, SOON).await.unwrap();
    }
}

fn healthy(node: &ProcessNode, resource: &str) -> BTreeSet<String> {
    let listed = node.kubelet.listed(resource);
    listed.into_iter().filter(|(_, health)| health == "Healthy").map(|(id, _)| id).collect()
}

/// The share numbers that a resource owns, the same on every GPU.
fn numbers(node: &ProcessNode, resource: &str) -> BTreeSet<String> {
    let listed = node.kubelet.listed(resource);
    listed.keys().map(|id| id.rsplit("::").next().unwrap().to_owned()).collect()
}

/// A variable of the pod by the start of its name.
fn variable(node: &ProcessNode, pod: &str, start: &str) -> String {
    let envs = node.kubelet.view(pod, "main").unwrap().envs;
    envs.iter().find(|(key, _)| key.starts_with(start)).map(|(_, value)| value.clone()).unwrap_or_default()
}

/// A T4 has 15360 MiB: three of 4096, or one of 8192 and one of 4096.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_sizes_share_the_memory_of_a_gpu_until_it_is_full() {
    let node = ProcessNode::new(SETTINGS).await;
    let daemon = node.serve();
    allocatable(&node, 6, 2).await;
    assert_eq!(numbers(&node, SMALL), ["0", "1", "2"].map(String::from).into());
    assert_eq!(numbers(&node, LARGE), ["3".to_owned()].into(), "unique per GPU over both resources");

    // Two small ones go to one GPU, so that the other still has a large one.
    let first = node.start("first", SMALL, 1).await.unwrap();
    allocatable(&node, 6, 2).await;
    let second = node.start("second", SMALL, 1).await.unwrap();
    allocatable(&node, 6, 1).await;
    let gpu = variable(&node, &first, "NVIDIA_VISIBLE_DEVICES");
    assert_eq!(variable(&node, &second, "NVIDIA_VISIBLE_DEVICES"), gpu);
    assert_eq!(variable(&node, &first, "BERTH_MEMORY_LIMIT_MIB_"), "4096");
    assert_eq!(variable(&node, &first, "BERTH_COMPUTE_LIMIT_PERCENT_"), "", "none is set aside");

    let large = node.start("large", LARGE, 1).await.unwrap();
    allocatable(&node, 4, 1).await;
    assert_ne!(variable(&node, &large, "NVIDIA_VISIBLE_DEVICES"), gpu);
    assert_eq!(variable(&node, &large, "BERTH_MEMORY_LIMIT_MIB_"), "8192");

    // One more small one fits on each, then nothing does.
    node.start("third", SMALL, 1).await.unwrap();
    node.start("fourth", SMALL, 1).await.unwrap();
    allocatable(&node, 4, 1).await;
    for resource in [SMALL, LARGE] {
        assert_eq!(healthy(&node, resource), node.kubelet.in_use(resource), "{resource} is full");
        node.start(&format!("late-{}", resource.len()), resource, 1).await.unwrap_err();
    }
    daemon.stop();

    // The same after a restart, and room for a large one once two small ones ended.
    let daemon = node.serve();
    allocatable(&node, 4, 1).await;
    node.kubelet.delete(&first);
    node.kubelet.delete(&second);
    allocatable(&node, 4, 2).await;
    let next = node.start("next", LARGE, 1).await.unwrap();
    assert_eq!(variable(&node, &next, "NVIDIA_VISIBLE_DEVICES"), gpu);
    allocatable(&node, 2, 2).await;
    assert_eq!(node.kubelet.anomalies(), []);
    drop(daemon);
}

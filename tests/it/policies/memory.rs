//! Slices of two sizes on each GPU, over the whole daemon: what is listed is what still fits.
// Clippy does not see that helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use crate::daemon::process::{House, SOON};
use std::collections::BTreeSet;

const SMALL: &str = "nvidia.com/gpu.mem-4g";
const LARGE: &str = "nvidia.com/gpu.mem-8g";
const SETTINGS: &str = "gpus: sim:2xt4\n\
    stack: [{ policy: memory, permissions: { resources: ['nvidia.com/gpu.mem-*'] } }]";

/// Waits until so many small and large ones are allocatable, held ones among them.
async fn allocatable(house: &House, small: usize, large: usize) {
    for (resource, count) in [(SMALL, small), (LARGE, large)] {
        house.kubelet.wait_allocatable(resource, count, SOON).await.unwrap();
    }
}

fn healthy(house: &House, resource: &str) -> BTreeSet<String> {
    let listed = house.kubelet.listed(resource);
    listed.into_iter().filter(|(_, health)| health == "Healthy").map(|(id, _)| id).collect()
}

/// The share numbers that a resource owns, the same on every GPU.
fn numbers(house: &House, resource: &str) -> BTreeSet<String> {
    let listed = house.kubelet.listed(resource);
    listed.keys().map(|id| id.rsplit("::").next().unwrap().to_owned()).collect()
}

/// A variable of the pod by the start of its name.
fn variable(house: &House, pod: &str, start: &str) -> String {
    let envs = house.kubelet.view(pod, "main").unwrap().envs;
    envs.iter().find(|(key, _)| key.starts_with(start)).map(|(_, value)| value.clone()).unwrap_or_default()
}

/// A T4 has 15360 MiB: three of 4096, or one of 8192 and one of 4096.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_sizes_share_the_memory_of_a_gpu_until_it_is_full() {
    let house = House::new(SETTINGS).await;
    let serving = house.serve();
    allocatable(&house, 6, 2).await;
    assert_eq!(numbers(&house, SMALL), ["0", "1", "2"].map(String::from).into());
    assert_eq!(numbers(&house, LARGE), ["3".to_owned()].into(), "unique per GPU over both resources");

    // Two small ones go to one GPU, so that the other still has a large one.
    let first = house.start("first", SMALL, 1).await.unwrap();
    allocatable(&house, 6, 2).await;
    let second = house.start("second", SMALL, 1).await.unwrap();
    allocatable(&house, 6, 1).await;
    let gpu = variable(&house, &first, "NVIDIA_VISIBLE_DEVICES");
    assert_eq!(variable(&house, &second, "NVIDIA_VISIBLE_DEVICES"), gpu);
    assert_eq!(variable(&house, &first, "BERTH_MEMORY_LIMIT_MIB_"), "4096");
    assert_eq!(variable(&house, &first, "BERTH_COMPUTE_LIMIT_PERCENT_"), "", "none is set aside");

    let large = house.start("large", LARGE, 1).await.unwrap();
    allocatable(&house, 4, 1).await;
    assert_ne!(variable(&house, &large, "NVIDIA_VISIBLE_DEVICES"), gpu);
    assert_eq!(variable(&house, &large, "BERTH_MEMORY_LIMIT_MIB_"), "8192");

    // One more small one fits on each, then nothing does.
    house.start("third", SMALL, 1).await.unwrap();
    house.start("fourth", SMALL, 1).await.unwrap();
    allocatable(&house, 4, 1).await;
    for resource in [SMALL, LARGE] {
        assert_eq!(healthy(&house, resource), house.kubelet.in_use(resource), "{resource} is full");
        house.start(&format!("late-{}", resource.len()), resource, 1).await.unwrap_err();
    }
    serving.stop();

    // The same after a restart, and room for a large one once two small ones ended.
    let serving = house.serve();
    allocatable(&house, 4, 1).await;
    house.kubelet.delete(&first);
    house.kubelet.delete(&second);
    allocatable(&house, 4, 2).await;
    let next = house.start("next", LARGE, 1).await.unwrap();
    assert_eq!(variable(&house, &next, "NVIDIA_VISIBLE_DEVICES"), gpu);
    allocatable(&house, 2, 2).await;
    assert_eq!(house.kubelet.anomalies(), []);
    drop(serving);
}

//! Claims under each shipped policy: what it offers, chooses, admits and judges counts for claims, too.

use crate::support::claim_node::{ClaimNode, result};
use crate::support::gpus::{MEMORY_MIB, SHARED, WHOLE, gpu, gpu_id, resource};
use berth_kernel::grants::annotation::GrantAnnotation;
use berth_kernel::grants::claim::DeviceResult;
use berth_kernel::hardware::gpu::{Reading, XID};
use berth_kernel::ids::names::DeviceId;
use berth_kernel::sharing::publish::{Capacity, PublishedDevice, Versions, publication};
use berth_proto::dra;

fn published(node: &ClaimNode) -> Vec<PublishedDevice> {
    publication(&node.node.kernel.snapshot(), &Versions::default())
}

fn names(node: &ClaimNode) -> Vec<String> {
    published(node).into_iter().map(|device| device.name).collect()
}

/// One device of each GPU, in the order in which the scheduler would give them to claims.
async fn order(node: &ClaimNode, resource_name: &str, share: Option<u32>) -> Vec<DeviceId> {
    let devices = (0..4).map(|index| DeviceId { part: gpu(index), share }).collect();
    node.node.kernel.order(&resource(resource_name), devices).await
}

/// What each allocation may use of the memory of its GPU, MiB, as its container shows it to the guard.
fn memory_limits(node: &ClaimNode) -> Vec<Option<u64>> {
    let ledger = node.node.kernel.snapshot();
    ledger.live.values().map(|allocation| GrantAnnotation::of(&ledger, allocation).parts[0].1).collect()
}

/// A claim for so much memory of a shared device.
fn memory(node: &ClaimNode, name: &str, device: &str, mib: u64) -> dra::Claim {
    let consumed = [("memory".to_owned(), mib * 1024 * 1024)].into();
    let share_id = Some(format!("share-{name}"));
    node.allocated(name, vec![DeviceResult { share_id, consumed, ..result(device) }])
}

async fn refusal(node: &ClaimNode, claim: &dra::Claim) -> String {
    node.prepare(claim).await.unwrap_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn under_exclusive_a_claim_gets_a_gpu_to_itself() {
    let node = ClaimNode::shipped(&[("exclusive", "{}")]).await;
    assert_eq!(names(&node), ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]);
    node.prepare(&node.claim("first", &[0])).await.unwrap();
    let error = refusal(&node, &node.claim("second", &[0])).await;
    assert!(error.contains("not free in time"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn under_timeslice_claims_share_a_gpu_and_have_the_memory_of_their_shares() {
    const GREEDY: &str = r#"{"replicas": 4, "failRequestsGreaterThanOne": true}"#;
    let node = ClaimNode::shipped(&[("timeslice", GREEDY)]).await;
    assert_eq!(names(&node), ["gpu-0-shared", "gpu-1-shared", "gpu-2-shared", "gpu-3-shared"]);
    for name in ["first", "second"] {
        node.prepare(&node.shares(name, &[(0, 1)])).await.unwrap();
    }
    assert_eq!(memory_limits(&node), [Some(MEMORY_MIB / 4); 2]);
    // The hook `admit` of the policy denies the claim.
    let error = refusal(&node, &node.shares("greedy", &[(0, 2)])).await;
    assert!(error.contains("timeslice"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn under_mixed_a_gpu_is_granted_whole_or_in_shares() {
    let node = ClaimNode::shipped(&[("mixed", r#"{"replicas": 4}"#)]).await;
    assert_eq!(names(&node)[..2], ["gpu-0", "gpu-0-shared"]);
    assert!(
        published(&node).iter().all(|device| device.counter.is_some()),
        "the counter lets the scheduler allocate a GPU either whole or in shares"
    );
    node.prepare(&node.claim("whole", &[0])).await.unwrap();
    node.prepare(&node.shares("part", &[(1, 1)])).await.unwrap();
    for claim in [node.shares("part-of-held", &[(0, 1)]), node.claim("whole-of-shared", &[1])] {
        let error = refusal(&node, &claim).await;
        assert!(error.contains("not free in time"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn under_memory_a_claim_gets_slices_by_mib() {
    let node = ClaimNode::shipped(&[("memory", "{}")]).await;
    let devices = published(&node);
    let device = &devices[0];
    assert_eq!(
        device.resource.as_str(),
        "nvidia.com/gpu.mem-4g",
        "of two sizes of slices only the first one by name is published"
    );
    assert!(matches!(&device.capacity, Capacity::Shared(shares) if shares.memory_mib == 4096), "{device:?}");
    let claim = memory(&node, "three", "gpu-0-shared", 3 * 4096);
    node.prepare(&claim).await.unwrap();
    assert_eq!(node.held_shares(&claim).len(), 3);
    assert_eq!(memory_limits(&node), [Some(3 * 4096)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn binpack_and_spread_order_the_devices_of_claims() {
    const SHARES: (&str, &str) = ("timeslice", r#"{"replicas": 4}"#);
    let held = DeviceId { part: gpu(2), share: Some(3) };
    let node = ClaimNode::shipped(&[("binpack", "{}"), SHARES]).await;
    node.prepare(&node.shares("held", &[(2, 1)])).await.unwrap();
    assert_eq!(order(&node, SHARED, Some(3)).await[0], held);
    let node = ClaimNode::shipped(&[("spread", r#"{"distinct": "required"}"#), SHARES]).await;
    node.prepare(&node.shares("held", &[(2, 1)])).await.unwrap();
    // The order is built from choices of one, two and four devices.
    assert!(!order(&node, SHARED, Some(3)).await[..2].contains(&held));
    // The hook `admit` of the policy denies the claim.
    let error = refusal(&node, &node.shares("two-of-one", &[(0, 2)])).await;
    assert!(error.contains("spread"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn topology_has_claims_of_two_gpus_get_linked_pairs() {
    let stack = &[("exclusive", "{}"), ("topology", "{}")];
    let node = ClaimNode::linked(stack, &[(0, 3), (1, 2)]).await;
    let order: Vec<_> = order(&node, WHOLE, None).await.into_iter().map(|id| id.part).collect();
    for pair in order.chunks(2) {
        assert!(
            [[gpu(0), gpu(3)], [gpu(1), gpu(2)]]
                .iter()
                .any(|linked| linked.iter().all(|one| pair.contains(one))),
            "{order:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn quota_counts_the_claims_of_a_namespace() {
    const QUOTA: &str = r#"{"namespaces": [{"namespace": "ns", "devices": 1}]}"#;
    let node = ClaimNode::shipped(&[("exclusive", "{}"), ("quota", QUOTA)]).await;
    let first = node.claim("first", &[0]);
    node.prepare(&first).await.unwrap();
    let second = node.claim("second", &[1]);
    let error = refusal(&node, &second).await;
    assert!(error.contains("quota") && error.contains("ns"), "{error}");
    node.prepare(&first).await.unwrap();
    node.unprepare(&first).await;
    node.prepare(&second).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn triage_xid_judges_the_gpus_of_claims() {
    let node = ClaimNode::shipped(&[("exclusive", "{}"), ("triage-xid", "{}")]).await;
    for (index, code) in [(0, 13), (1, 79)] {
        let reading = Reading { part: gpu(index), source: XID.into(), code, detail: String::new() };
        node.node.kernel.submit_reading(reading).unwrap();
    }
    let is_unusable = |index| {
        move |ledger: &berth_kernel::node::ledger::Ledger| {
            !ledger.gpus[&gpu_id(index)].health.state.is_usable()
        }
    };
    node.node.wait("XID 79 makes the GPU unhealthy", is_unusable(1)).await;
    let error = refusal(&node, &node.claim("lost", &[1])).await;
    assert!(error.contains("unhealthy"), "{error}");
    node.prepare(&node.claim("application", &[0])).await.unwrap();
}

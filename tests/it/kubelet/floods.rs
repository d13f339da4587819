//! Requests far larger than any kubelet's: each gets an error, and the next valid one works.

use crate::kubelet::allocation::{allocate, dial_whole, prefer};
use crate::support::gpus::WHOLE;
use crate::support::kubelet_node::NodeOptions;
use kubelet_standin::PodSpec;
use kubelet_standin::proto::v1beta1::PreferredAllocationRequest;
use tonic::Code;

#[tokio::test]
async fn ten_thousand_ids_and_ids_of_megabytes_get_an_error_and_do_no_harm() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let mut client = dial_whole(&node).await;
    let many: Vec<String> = (0..10_000).map(|n| format!("GPU-{n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let placement = |available: &[&str], required: &[&str]| PreferredAllocationRequest {
        container_requests: vec![prefer(available, required, 1)],
    };
    for status in [
        client.allocate(allocate(&many)).await.unwrap_err(),
        client.get_preferred_allocation(placement(&many, &[])).await.unwrap_err(),
        client.get_preferred_allocation(placement(&["GPU-0"], &many)).await.unwrap_err(),
    ] {
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert!(status.message().contains("10000 devices; at most 2048"), "{status}");
    }
    // Past what is read at all: the length is seen before the bytes.
    let huge = "x".repeat(8 * 1024 * 1024);
    for status in [
        client.allocate(allocate(&[&huge])).await.unwrap_err(),
        client.get_preferred_allocation(placement(&[&huge], &[])).await.unwrap_err(),
        client.get_preferred_allocation(placement(&["GPU-0"], &[&huge])).await.unwrap_err(),
    ] {
        assert_eq!(status.code(), Code::OutOfRange, "{status}");
        assert!(status.message().contains("1048576"), "{status}");
    }
    // The same connection, and the kubelet's own, work on.
    let answer = client.get_preferred_allocation(placement(&["GPU-0", "GPU-1"], &["GPU-1"])).await;
    assert_eq!(answer.unwrap().into_inner().container_responses[0].device_i_ds, ["GPU-1"]);
    assert!(node.live().is_empty());
    let pod = PodSpec::new("default", "p").container("main", &[(WHOLE, 1)]);
    node.kubelet.admit(pod).await.unwrap();
    assert_eq!(node.live().len(), 1);
    node.assert_harmless();
}

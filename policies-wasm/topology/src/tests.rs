use super::*;
use berth_policy_sdk::testing::{Built, NodeBuilder, assert_schema_matches, share};
use berth_policy_sdk::{Consumes, DrainState, Path, parse};

const WHOLE: &str = "nvidia.com/gpu";
const SHARED: &str = "nvidia.com/gpu.shared";
const MIG: &str = "nvidia.com/mig-1g.10gb";

fn topology(json: &str) -> Result<Topology, String> {
    parse(json).and_then(Topology::new)
}

fn placed(json: &str, node: &Built, resource: &str, size: u32) -> Option<Vec<u32>> {
    let request = node.place_request(resource, size);
    topology(json).unwrap().place(&node.node, &request).map(|placement| placement.devices)
}

/// Whole GPUs, device n on GPU n, linked by a function of the two.
fn wholes(count: u32, link: impl Fn(u32, u32) -> (Path, u32)) -> NodeBuilder {
    let node = NodeBuilder::new().gpus(count, "Test GPU", 40_960);
    let node = (0..count).fold(node, |node, gpu| node.devices(gpu, WHOLE, 1, Consumes::Whole));
    let pairs = (0..count).flat_map(|b| (0..b).map(move |a| (a, b)));
    pairs.fold(node, |node, (a, b)| {
        let (path, nvlinks) = link(a, b);
        node.link(a, b, path, nvlinks)
    })
}

/// Pairs of GPUs, each connected by a bridge: 0-1, 2-3 and so on.
fn bridged(count: u32) -> NodeBuilder {
    wholes(count, |a, b| if a / 2 == b / 2 { (Path::SameNuma, 4) } else { (Path::SameNuma, 0) })
}

#[test]
fn two_gpus_of_one_bridge_are_chosen_together() {
    assert_eq!(placed("{}", &bridged(4).hold(&[0]).build(), WHOLE, 2), Some(vec![2, 3]));
}

#[test]
fn a_single_gpu_is_one_whose_partner_is_held() {
    assert_eq!(placed("{}", &bridged(4).hold(&[2]).build(), WHOLE, 1), Some(vec![3]));
    assert_eq!(placed("{}", &bridged(4).build(), WHOLE, 1), Some(vec![0]));
}

#[test]
fn three_gpus_leave_a_complete_pair() {
    assert_eq!(placed("{}", &bridged(6).hold(&[4]).build(), WHOLE, 3), Some(vec![0, 1, 5]));
}

#[test]
fn the_weight_decides_between_the_best_set_and_the_best_remaining_set() {
    // 1-2 is connected slightly better than 0-1 and 2-3, but choosing it breaks up both pairs.
    let node = wholes(4, |a, b| match (a, b) {
        (0, 1) | (2, 3) => (Path::SameNuma, 1),
        (1, 2) => (Path::SingleSwitch, 1),
        _ => (Path::CrossNuma, 0),
    })
    .build();
    assert_eq!(placed("{}", &node, WHOLE, 2), Some(vec![0, 1]));
    assert_eq!(placed(r#"{"leaveWeight": 0}"#, &node, WHOLE, 2), Some(vec![1, 2]));
}

#[test]
fn without_known_links_numa_nodes_count() {
    // The links are removed below; GPUs 2 and 3 are on NUMA node 1.
    let node = wholes(4, |_, _| (Path::CrossNuma, 0));
    let mut node = node.hold(&[0]).build();
    node.node.links.clear();
    assert_eq!(placed("{}", &node, WHOLE, 2), Some(vec![2, 3]));
    node.node.parts.iter_mut().for_each(|part| part.numa_node = None);
    assert_eq!(placed("{}", &node, WHOLE, 2), Some(vec![1, 2]));
}

#[test]
fn required_gpus_are_in_the_set() {
    let node = bridged(4).build();
    let mut request = node.place_request(WHOLE, 2);
    request.required = vec![3];
    let placed = topology("{}").unwrap().place(&node.node, &request).unwrap();
    assert_eq!(placed.devices, [2, 3]);
}

#[test]
fn cordoned_gpus_come_last() {
    let node = bridged(4).part(1, |part| part.drain = DrainState::Cordoned).build();
    assert_eq!(placed("{}", &node, WHOLE, 2), Some(vec![2, 3]));
    assert_eq!(placed("{}", &node, WHOLE, 3), Some(vec![0, 2, 3]));
    assert_eq!(placed("{}", &node, WHOLE, 4), Some(vec![0, 1, 2, 3]));
}

#[test]
fn mig_instances_have_the_connections_of_their_gpu() {
    let node = NodeBuilder::new()
        .gpus(2, "Test GPU", 40_960)
        .link(0, 1, Path::CrossNuma, 0)
        .mig(0, "1g.10gb", 1, 9_728)
        .mig(1, "1g.10gb", 2, 9_728)
        .devices(2, MIG, 1, Consumes::Whole)
        .devices(3, MIG, 1, Consumes::Whole)
        .devices(4, MIG, 1, Consumes::Whole)
        .build();
    assert_eq!(placed("{}", &node, MIG, 2), Some(vec![1, 2]));
}

/// Four shares of each of four GPUs, which two bridges connect in pairs: devices 0 to 3 on GPU 0 and so on.
fn shared() -> NodeBuilder {
    let node = NodeBuilder::new().gpus(4, "Test GPU", 16_384);
    let node = (0..4).fold(node, |node, gpu| node.devices(gpu, SHARED, 4, share(4, 16_384)));
    node.link(0, 1, Path::SameNuma, 4).link(2, 3, Path::SameNuma, 4)
}

#[test]
fn several_shares_are_on_well_connected_gpus_and_a_single_one_is_passed_on() {
    assert_eq!(placed("{}", &shared().build(), SHARED, 1), None);
    assert_eq!(placed("{}", &shared().build(), SHARED, 2), Some(vec![0, 4]));
    // The emptier of two equal pairs.
    assert_eq!(placed("{}", &shared().hold(&[0]).build(), SHARED, 2), Some(vec![8, 12]));
    // More shares than GPUs: the next round begins with the best pair.
    assert_eq!(placed("{}", &shared().build(), SHARED, 6), Some(vec![0, 4, 8, 12, 1, 5]));
}

#[test]
fn the_gpu_of_a_required_share_is_in_the_set() {
    let node = shared().build();
    let mut request = node.place_request(SHARED, 2);
    request.required = vec![13];
    let placed = topology("{}").unwrap().place(&node.node, &request).unwrap();
    assert_eq!(placed.devices, [13, 8]);
}

#[test]
fn shares_of_a_draining_gpu_come_last() {
    let node = shared().part(1, |part| part.drain = DrainState::Draining).build();
    assert_eq!(placed("{}", &node, SHARED, 2), Some(vec![8, 12]));
    assert_eq!(placed("{}", &node, SHARED, 4), Some(vec![0, 4, 8, 12]));
}

#[test]
fn other_resources_and_requests_that_cannot_be_met_are_passed_on() {
    let node = bridged(4).build();
    assert_eq!(placed(r#"{"resources": ["nvidia.com/gpu.shared"]}"#, &node, WHOLE, 2), None);
    assert_eq!(placed("{}", &node, WHOLE, 5), None);
    assert_eq!(placed("{}", &shared().build(), SHARED, 17), None);
}

#[test]
fn wrong_parameters_are_refused_and_the_schema_names_the_right_ones() {
    assert!(topology(r#"{"leaveWeight": 1001}"#).unwrap_err().contains("write 0 to 1000"));
    assert!(topology(r#"{"leaveWeight": -1}"#).unwrap_err().contains("expected u32"));
    assert!(topology(r#"{"leaveweight": 1}"#).unwrap_err().contains("`leaveWeight`"));
    let example = r#"{"leaveWeight": 100, "resources": ["a.b/c"]}"#;
    topology(example).unwrap();
    assert_schema_matches(&Topology::describe().parameters_schema, example);
}

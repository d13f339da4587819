use super::*;
use berth_policy_sdk::testing::{Built, NodeBuilder, assert_schema_matches, share};
use berth_policy_sdk::{Consumes, DeviceState, DrainState, Health, parse};

const SHARED: &str = "nvidia.com/gpu.shared";
const MIG: &str = "nvidia.com/mig-1g.10gb";

fn binpack(json: &str) -> Result<Binpack, String> {
    parse(json).and_then(Binpack::new)
}

fn placed(node: &Built, size: u32) -> Vec<u32> {
    binpack("{}").unwrap().place(&node.node, &node.place_request(SHARED, size)).unwrap().devices
}

/// Three GPUs of four shares: devices 0 to 3, 4 to 7, 8 to 11.
fn three() -> NodeBuilder {
    (0..3).fold(NodeBuilder::new().gpus(3, "Test GPU", 16_384), |node, gpu| {
        node.devices(gpu, SHARED, 4, share(4, 16_384))
    })
}

#[test]
fn the_fullest_gpu_that_fits_comes_first() {
    let node = three().hold(&[4, 8, 9]).build();
    assert_eq!(placed(&node, 1), [10]);
    assert_eq!(placed(&node, 2), [10, 11]);
    // The fullest GPU has only two free shares, the next one three.
    assert_eq!(placed(&node, 3), [5, 6, 7]);
    // Only the idle GPU has four free shares, and it stays empty as long as the others suffice.
    assert_eq!(placed(&node, 4), [10, 11, 5, 6]);
    assert_eq!(placed(&node, 6), [10, 11, 5, 6, 7, 0]);
}

#[test]
fn an_idle_node_is_filled_from_its_first_gpu() {
    assert_eq!(placed(&three().build(), 5), [0, 1, 2, 3, 4]);
}

#[test]
fn an_idle_gpu_gets_all_shares_if_one_has_to_be_used_anyway() {
    let node = three().hold(&[0, 1, 2]).build();
    assert_eq!(placed(&node, 1), [3]);
    assert_eq!(placed(&node, 2), [4, 5]);
}

#[test]
fn draining_and_unhealthy_gpus_come_last() {
    let node = three()
        .part(0, |part| part.drain = DrainState::Draining)
        .part(1, |part| part.health = Health::Unhealthy)
        .hold(&[0, 1, 4])
        .build();
    assert_eq!(placed(&node, 2), [8, 9]);
    assert_eq!(placed(&node, 5), [8, 9, 10, 11, 2]);
}

#[test]
fn the_gpu_of_a_required_device_comes_first() {
    let node = three().build();
    let mut request = node.place_request(SHARED, 3);
    request.required = vec![9];
    let placed = binpack("{}").unwrap().place(&node.node, &request).unwrap();
    assert_eq!(placed.devices, [9, 8, 10]);
}

#[test]
fn shares_of_instances_fill_up_one_instance_after_the_other() {
    let third = share(3, 9_728);
    let node = NodeBuilder::new()
        .gpus(1, "Test GPU", 40_960)
        .mig(0, "1g.10gb", 2, 9_728)
        .devices(1, SHARED, 3, third)
        .devices(2, SHARED, 3, third)
        .hold(&[4])
        .build();
    assert_eq!(placed(&node, 1), [3]);
    assert_eq!(placed(&node, 2), [3, 5]);
}

/// Right after a change from whole GPUs to shares of the same name, the whole GPUs are still listed.
#[test]
fn shares_are_packed_while_whole_gpus_of_their_name_are_retiring() {
    let gpu = "nvidia.com/gpu";
    let mut node = (0..2).fold(NodeBuilder::new().gpus(2, "Test GPU", 16_384), |node, n| {
        node.devices(n, gpu, 1, Consumes::Whole).devices(n, gpu, 4, share(4, 16_384))
    });
    for n in 0..2 {
        node = node.part(n, |part| drop(part.offered.remove(0)));
    }
    let mut node = node.build();
    for whole in [0, 5] {
        node.node.devices[whole].state = DeviceState::Retiring;
    }
    let placed = binpack("{}").unwrap().place(&node.node, &node.place_request(gpu, 4)).unwrap();
    assert_eq!(placed.devices, [1, 2, 3, 4]);
}

#[test]
fn mig_instances_are_packed_by_their_gpu() {
    let node = NodeBuilder::new()
        .gpus(2, "Test GPU", 40_960)
        .mig(0, "1g.10gb", 2, 9_728)
        .mig(1, "1g.10gb", 2, 9_728)
        .devices(2, MIG, 1, Consumes::Whole)
        .devices(3, MIG, 1, Consumes::Whole)
        .devices(4, MIG, 1, Consumes::Whole)
        .devices(5, MIG, 1, Consumes::Whole)
        .hold(&[3])
        .build();
    let policy = binpack("{}").unwrap();
    let placed = policy.place(&node.node, &node.place_request(MIG, 1)).unwrap();
    assert_eq!(placed.devices, [2]);
}

#[test]
fn whole_gpus_and_resources_that_are_not_named_are_passed_on() {
    let node = three().devices(0, "nvidia.com/gpu", 1, Consumes::Whole).build();
    let place = |json: &str, name: &str| {
        binpack(json).unwrap().place(&node.node, &node.place_request(name, 1)).map(|p| p.devices)
    };
    assert_eq!(place("{}", "nvidia.com/gpu"), None);
    assert_eq!(place(r#"{"resources": ["nvidia.com/gpu"]}"#, "nvidia.com/gpu"), Some(vec![12]));
    assert_eq!(place(r#"{"resources": ["nvidia.com/gpu"]}"#, SHARED), None);
}

#[test]
fn requests_that_cannot_be_met_are_passed_on() {
    let node = three().build();
    let policy = binpack("{}").unwrap();
    assert_eq!(policy.place(&node.node, &node.place_request(SHARED, 13)), None);
    let mut request = node.place_request(SHARED, 1);
    request.required = vec![0, 1];
    assert_eq!(policy.place(&node.node, &request), None);
}

#[test]
fn wrong_parameters_are_refused_and_the_schema_names_the_right_ones() {
    assert!(binpack(r#"{"resources": []}"#).unwrap_err().contains("the list is empty"));
    assert!(binpack(r#"{"resource": "a.b/c"}"#).unwrap_err().contains("unknown field `resource`"));
    let example = r#"{"resources": ["a.b/c"]}"#;
    binpack(example).unwrap();
    assert_schema_matches(&Binpack::describe().parameters_schema, example);
}

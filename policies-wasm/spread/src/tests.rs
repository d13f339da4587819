use super::*;
use berth_policy_sdk::testing::{Built, NodeBuilder, assert_schema_matches, share};
use berth_policy_sdk::{Consumes, DrainState, parse};

const SHARED: &str = "nvidia.com/gpu.shared";
const MIG: &str = "nvidia.com/mig-1g.10gb";
const REQUIRED: &str = r#"{"distinct": "required"}"#;

fn spread(json: &str) -> Result<Spread, String> {
    parse(json).and_then(Spread::new)
}

fn placed(node: &Built, size: u32) -> Vec<u32> {
    spread("{}").unwrap().place(&node.node, &node.place_request(SHARED, size)).unwrap().devices
}

/// The message of the denial; `None` if the devices are not denied.
fn denied(json: &str, node: &Built, resource: &str, devices: &[u32]) -> Option<String> {
    let request = AdmitRequest { request: node.request(resource), devices: devices.to_vec() };
    match spread(json).unwrap().admit(&node.node, &request) {
        None => None,
        Some(Verdict::Deny(why)) => Some(why),
        Some(Verdict::Allow(terms)) => panic!("{terms:?}"),
    }
}

/// Three GPUs of four shares: devices 0 to 3, 4 to 7, 8 to 11.
fn three() -> NodeBuilder {
    (0..3).fold(NodeBuilder::new().gpus(3, "Test GPU", 16_384), |node, gpu| {
        node.devices(gpu, SHARED, 4, share(4, 16_384))
    })
}

#[test]
fn the_least_held_gpu_comes_first() {
    assert_eq!(placed(&three().hold(&[0, 4, 5]).build(), 1), [8]);
    assert_eq!(placed(&three().hold(&[0, 4, 5, 8]).build(), 1), [1]);
}

#[test]
fn several_shares_are_on_several_gpus_however_full_those_are() {
    let node = three().hold(&[4, 5, 6]).build();
    assert_eq!(placed(&node, 3), [0, 8, 7]);
    // More shares than GPUs: evenly distributed.
    assert_eq!(placed(&node, 5), [0, 8, 7, 1, 9]);
}

#[test]
fn a_draining_gpu_comes_last_even_if_it_would_be_a_further_gpu() {
    let node = three().part(0, |part| part.drain = DrainState::Draining).build();
    assert_eq!(placed(&node, 3), [4, 8, 5]);
}

#[test]
fn two_shares_of_one_gpu_are_denied_only_if_distinct_is_required() {
    let node = three().build();
    let why = denied(REQUIRED, &node, SHARED, &[0, 4, 5]).unwrap();
    assert!(why.contains("2 of them are on GPU 1") && why.contains("try again"), "{why}");
    assert_eq!(denied(REQUIRED, &node, SHARED, &[0, 4, 8]), None);
    assert_eq!(denied("{}", &node, SHARED, &[0, 4, 5]), None);
    let why = denied(REQUIRED, &node, SHARED, &[0, 4, 8, 9]).unwrap();
    assert!(why.contains("3 GPUs with this resource: request at most 3"), "{why}");
}

/// An app container repeats the devices of its init container, which are held by then.
#[test]
fn a_repeated_request_for_the_same_devices_has_the_same_answer() {
    let free = three().build();
    let held = three().hold(&[0, 4]).build();
    assert_eq!(denied(REQUIRED, &free, SHARED, &[0, 4]), None);
    assert_eq!(denied(REQUIRED, &held, SHARED, &[0, 4]), None);
    let draining = three().hold(&[0, 4]).part(0, |part| part.drain = DrainState::Draining).build();
    assert_eq!(denied(REQUIRED, &draining, SHARED, &[0, 4]), None);
    assert_eq!(denied(REQUIRED, &held, SHARED, &[0, 1]), denied(REQUIRED, &free, SHARED, &[0, 1]));
}

#[test]
fn instances_of_one_gpu_are_not_distinct() {
    let node = NodeBuilder::new()
        .gpus(1, "Test GPU", 40_960)
        .mig(0, "1g.10gb", 2, 9_728)
        .devices(1, MIG, 1, Consumes::Whole)
        .devices(2, MIG, 1, Consumes::Whole)
        .build();
    let why = denied(REQUIRED, &node, MIG, &[0, 1]).unwrap();
    assert!(why.contains("2 of them are on GPU 0") && why.contains("at most 1"), "{why}");
    let only = r#"{"distinct": "required", "resources": ["nvidia.com/gpu.shared"]}"#;
    assert_eq!(denied(only, &node, MIG, &[0, 1]), None);
}

#[test]
fn whole_gpus_are_passed_on() {
    let node = three().devices(0, "nvidia.com/gpu", 1, Consumes::Whole).build();
    let request = node.place_request("nvidia.com/gpu", 1);
    assert_eq!(spread("{}").unwrap().place(&node.node, &request), None);
    assert_eq!(denied(REQUIRED, &node, "nvidia.com/gpu", &[12]), None);
}

#[test]
fn requests_that_cannot_be_met_are_passed_on() {
    let node = three().build();
    assert_eq!(spread("{}").unwrap().place(&node.node, &node.place_request(SHARED, 13)), None);
}

#[test]
fn wrong_parameters_are_refused_and_the_schema_names_the_right_ones() {
    assert!(spread(r#"{"distinct": "always"}"#).unwrap_err().contains("`preferred` or `required`"));
    assert!(spread(r#"{"resources": ["x"]}"#).unwrap_err().contains("resources[0]: `x`"));
    let example = r#"{"distinct": "required", "resources": ["a.b/c"]}"#;
    spread(example).unwrap();
    assert_schema_matches(&Spread::describe().parameters_schema, example);
}

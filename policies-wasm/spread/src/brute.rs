//! Compares the answers with all possible ones, by the rules in `choose`, on small random nodes.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use berth_policy_sdk::placement::gpu_of;
use berth_policy_sdk::room::is_leaving;
use berth_policy_sdk::testing::{Built, assert_best, assert_sound, fullness, random_questions, steady};
use berth_policy_sdk::{AdmitRequest, Node, PlaceRequest, Policy, Verdict};

use crate::choose::choose;
use crate::{Distinct, Parameters, Spread};

/// A smaller measure is better. The sum does not depend on the order in which devices are taken.
fn measure(node: &Node, request: &PlaceRequest, chosen: &[u32]) -> (usize, Reverse<usize>, u64) {
    let gpu = |device: u32| gpu_of(node, node.devices[device as usize].part).unwrap();
    let added = || chosen.iter().copied().filter(|device| !request.required.contains(device));
    let avoided = added().filter(|device| is_leaving(&node.parts[gpu(*device)])).count();
    let gpus = chosen.iter().map(|device| gpu(*device)).collect::<BTreeSet<_>>().len();
    let mut taken = request.required.clone();
    let mut full = 0;
    for device in added() {
        full += fullness(node, device, &taken);
        taken.push(device);
    }
    (avoided, Reverse(gpus), full)
}

#[test]
fn the_answer_is_as_good_as_the_best_of_all() {
    assert_best(choose, measure);
}

fn admitted(policy: &Spread, node: &Built, request: &PlaceRequest, devices: &[u32]) -> bool {
    let request = AdmitRequest { request: request.request.clone(), devices: devices.to_vec() };
    let verdict = policy.admit(&node.node, &request);
    assert!(!matches!(verdict, Some(Verdict::Allow(_))), "it sets no terms: {verdict:?}");
    assert_eq!(verdict, policy.admit(&node.node, &request));
    verdict.is_none()
}

/// 10,000 requests: each has one answer among the available devices, and `admit` agrees with it.
#[test]
fn the_same_request_has_one_answer_and_it_is_admitted_if_its_gpus_are_distinct() {
    let policy = Spread::new(Parameters { distinct: Distinct::Required, ..Parameters::default() }).unwrap();
    let mut denied = 0;
    for (node, request) in random_questions(2, 8).take(10_000) {
        let placed = steady(choose, &node.node, &request).unwrap();
        assert_sound(&request, &placed);
        let gpu = |device: &u32| gpu_of(&node.node, node.node.devices[*device as usize].part);
        let gpus: BTreeSet<_> = placed.devices.iter().map(gpu).collect();
        let distinct = gpus.len() == placed.devices.len();
        assert_eq!(admitted(&policy, &node, &request, &placed.devices), distinct, "{placed:?}");
        denied += u32::from(!distinct);
    }
    assert!((1_000..9_000).contains(&denied), "both are common: {denied}");
}

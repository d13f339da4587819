//! Compares the answers with all possible ones, by the rules in `pack`, on small random nodes.

use std::collections::BTreeSet;

use berth_policy_sdk::placement::{gpu_of, loads};
use berth_policy_sdk::room::is_leaving;
use berth_policy_sdk::testing::{assert_best, assert_sound, fullness, in_use, random_questions, steady};
use berth_policy_sdk::{Node, PlaceRequest, Placement};

use crate::pack::pack;

/// Always by GPU: random nodes have no shares of MIG instances.
fn by_gpu(node: &Node, request: &PlaceRequest) -> Option<Placement> {
    pack(loads(node, request)?, request)
}

/// A smaller measure is better.
fn measure(node: &Node, request: &PlaceRequest, chosen: &[u32]) -> (usize, usize, bool, i128) {
    let gpu = |device: u32| gpu_of(node, node.devices[device as usize].part).unwrap();
    let of = |devices: &mut dyn Iterator<Item = u32>| devices.map(gpu).collect::<BTreeSet<_>>();
    let in_use_before = of(&mut in_use(node, &request.required).map(|(device, _)| device));
    let added = || chosen.iter().copied().filter(|device| !request.required.contains(device));
    let avoided = added().filter(|device| is_leaving(&node.parts[gpu(*device)])).count();
    let idle = of(&mut added()).difference(&in_use_before).count();
    let several = of(&mut chosen.iter().copied()).len() > 1;
    let full: i128 = added().map(|device| i128::from(fullness(node, device, &request.required))).sum();
    // Required devices cannot be moved, so being on one GPU counts only without them.
    (avoided, idle, several && request.required.is_empty(), -full)
}

#[test]
fn the_answer_is_as_good_as_the_best_of_all() {
    assert_best(by_gpu, measure);
}

#[test]
fn the_same_request_has_one_answer_among_the_available_devices() {
    for (node, request) in random_questions(2, 8).take(10_000) {
        assert_sound(&request, &steady(by_gpu, &node.node, &request).unwrap());
    }
}

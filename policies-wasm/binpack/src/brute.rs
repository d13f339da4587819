//! Every possible answer, measured by the definition in `pack`, on small random nodes.

use std::collections::{BTreeMap, BTreeSet};

use berth_policy_sdk::placement::{gpu_of, loads};
use berth_policy_sdk::room::is_leaving;
use berth_policy_sdk::testing::{Random, random_node};
use berth_policy_sdk::{DeviceState, Node, PlaceRequest};

use crate::pack::pack;

/// Devices in a question that all sets of are looked at: 4096 sets.
const BRUTE_DEVICES_MAX: usize = 12;

/// Less is better.
fn measure(node: &Node, request: &PlaceRequest, chosen: &[u32]) -> (usize, usize, bool, i128) {
    let gpu = |device: u32| gpu_of(node, node.devices[device as usize].part).unwrap();
    let begun_by = |devices: &mut dyn Iterator<Item = u32>| devices.map(gpu).collect::<BTreeSet<_>>();
    let is_held = |device: &u32| node.devices[*device as usize].state == DeviceState::Held;
    let begun = begun_by(&mut (0..).take(node.devices.len()).filter(is_held).chain(request.required.clone()));
    let added = || chosen.iter().copied().filter(|device| !request.required.contains(device));
    let avoided = added().filter(|device| is_leaving(&node.parts[gpu(*device)])).count();
    let idle = begun_by(&mut added()).difference(&begun).count();
    let several = begun_by(&mut chosen.iter().copied()).len() > 1;
    let fullness: BTreeMap<u32, u64> =
        loads(node, request).unwrap().iter().map(|load| (load.gpu_index, load.fullness())).collect();
    let full: i128 = added().map(|d| i128::from(fullness[&node.parts[gpu(d)].gpu_index])).sum();
    // Required devices lie where they lie: only where there are none can one GPU be a merit.
    (avoided, idle, several && request.required.is_empty(), -full)
}

fn best(node: &Node, request: &PlaceRequest) -> (usize, usize, bool, i128) {
    let available = &request.available;
    let sets = (0u32..1 << available.len()).filter(|set| set.count_ones() == request.size);
    let chosen = |set: u32| -> Vec<u32> {
        (0..available.len()).filter(|n| set >> n & 1 == 1).map(|n| available[n]).collect()
    };
    let with_required = sets.map(chosen).filter(|set| request.required.iter().all(|r| set.contains(r)));
    with_required.map(|set| measure(node, request, &set)).min().unwrap()
}

#[test]
fn the_answer_is_as_good_as_the_best_of_all() {
    let (mut random, mut looked) = (Random(1), 0);
    while looked < 2_000 {
        let node = random_node(&mut random, 4);
        let Some(request) = node.random_request(&mut random) else { continue };
        if request.available.len() > BRUTE_DEVICES_MAX {
            continue;
        }
        looked += 1;
        let placed = pack(&node.node, &request).unwrap().devices;
        let best = best(&node.node, &request);
        assert_eq!(measure(&node.node, &request, &placed), best, "{placed:?} of {request:?} on {node:#?}");
    }
}

#[test]
fn the_same_question_has_one_answer_within_what_is_available() {
    let mut random = Random(2);
    for _ in 0..10_000 {
        let node = random_node(&mut random, 8);
        let Some(request) = node.random_request(&mut random) else { continue };
        let placed = pack(&node.node, &request).unwrap();
        berth_policy_sdk::testing::assert_sound(&request, &placed);
        let mut turned = request.clone();
        turned.available.reverse();
        assert_eq!(pack(&node.node, &turned), Some(placed), "the order of what is available is nothing");
    }
}

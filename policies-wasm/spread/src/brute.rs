//! Every possible answer, measured by the definition in `choose`, on small random nodes.

use std::collections::{BTreeMap, BTreeSet};

use berth_policy_sdk::placement::{gpu_of, loads};
use berth_policy_sdk::room::is_leaving;
use berth_policy_sdk::testing::{Built, Random, assert_sound, random_node};
use berth_policy_sdk::{AdmitRequest, Node, PlaceRequest, Policy, Verdict};

use crate::choose::choose;
use crate::{Distinct, Parameters, Spread};

/// Devices in a question that all sets of are looked at: 4096 sets.
const BRUTE_DEVICES_MAX: usize = 12;

/// Less is better. Devices are taken in the order of their indices, which the sum does not mind.
fn measure(node: &Node, request: &PlaceRequest, chosen: &[u32]) -> (usize, i32, u64) {
    let gpu = |device: u32| gpu_of(node, node.devices[device as usize].part).unwrap();
    let added = || chosen.iter().copied().filter(|device| !request.required.contains(device));
    let avoided = added().filter(|device| is_leaving(&node.parts[gpu(*device)])).count();
    let gpus = chosen.iter().map(|device| gpu(*device)).collect::<BTreeSet<_>>().len();
    let mut full = 0;
    let all = loads(node, request).unwrap();
    let mut loads: BTreeMap<u32, _> = all.into_iter().map(|load| (load.gpu_index, load)).collect();
    for device in added() {
        // Devices of a resource on one GPU are alike here, so which of them is taken is the same.
        let load = loads.get_mut(&node.parts[gpu(device)].gpu_index).unwrap();
        full += load.fullness();
        load.take().unwrap();
    }
    (avoided, -i32::try_from(gpus).unwrap(), full)
}

fn best(node: &Node, request: &PlaceRequest) -> (usize, i32, u64) {
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
        let placed = choose(&node.node, &request).unwrap().devices;
        let best = best(&node.node, &request);
        assert_eq!(measure(&node.node, &request, &placed), best, "{placed:?} of {request:?} on {node:#?}");
    }
}

fn admitted(policy: &Spread, node: &Built, request: &PlaceRequest, devices: &[u32]) -> bool {
    let request = AdmitRequest { request: request.request.clone(), devices: devices.to_vec() };
    let verdict = policy.admit(&node.node, &request);
    assert!(!matches!(verdict, Some(Verdict::Allow(_))), "it sets no terms: {verdict:?}");
    assert_eq!(verdict, policy.admit(&node.node, &request));
    verdict.is_none()
}

/// 10,000 questions: one answer each, within what is available, and `admit` agrees with it.
#[test]
fn the_same_question_has_one_answer_and_it_is_admitted_where_the_rule_can_be_kept() {
    let policy = Spread::new(Parameters { distinct: Distinct::Required, ..Parameters::default() }).unwrap();
    let (mut random, mut denied) = (Random(2), 0);
    for _ in 0..10_000 {
        let node = random_node(&mut random, 8);
        let Some(request) = node.random_request(&mut random) else { continue };
        let placed = choose(&node.node, &request).unwrap();
        assert_sound(&request, &placed);
        let mut turned = request.clone();
        turned.available.reverse();
        assert_eq!(choose(&node.node, &turned).as_ref(), Some(&placed));
        let gpu = |device: &u32| gpu_of(&node.node, node.node.devices[*device as usize].part);
        let gpus: BTreeSet<_> = placed.devices.iter().map(gpu).collect();
        let distinct = gpus.len() == placed.devices.len();
        assert_eq!(admitted(&policy, &node, &request, &placed.devices), distinct, "{placed:?}");
        denied += u32::from(!distinct);
    }
    assert!((1_000..9_000).contains(&denied), "both are common: {denied}");
}

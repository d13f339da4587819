//! Compares the answers with all possible ones, by the rules in `fit`, on small random nodes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use berth_policy_sdk::room::{is_leaving, takes_mib};
use berth_policy_sdk::testing::{assert_best, assert_sound, in_use, random_questions, steady};
use berth_policy_sdk::{Node, PlaceRequest};

use crate::fit::best;

/// A smaller measure is better; fields are compared in their order.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Measure {
    /// Devices on GPUs that should be avoided, and devices beyond the memory that is left.
    leaving: usize,
    beyond: usize,
    /// GPUs of the whole answer.
    gpus: usize,
    /// Devices on GPUs with required ones. This field and the next count only if the first two are 0.
    beside: Reverse<usize>,
    distribution: Vec<OnGpu>,
}

/// The number of devices on a GPU, and its memory left: more devices first, then less memory.
type OnGpu = (Reverse<usize>, u64);

fn measure(node: &Node, request: &PlaceRequest, chosen: &[u32]) -> Measure {
    let part = |device: &u32| node.devices[*device as usize].part;
    let left = |part: u32| {
        let used = in_use(node, &request.required).filter(|(_, device)| device.part == part);
        let used: u64 = used.map(|(_, device)| takes_mib(node, device)).sum();
        node.parts[part as usize].memory_mib.saturating_sub(used)
    };
    let required: BTreeSet<u32> = request.required.iter().map(part).collect();
    let all: BTreeSet<u32> = chosen.iter().map(part).collect();
    let (mut leaving, mut beyond, mut beside) = (0, 0, 0);
    let (mut of_required, mut of_others) = (Vec::<OnGpu>::new(), Vec::new());
    let mut counts = BTreeMap::<u32, (usize, u64)>::new();
    for device in chosen.iter().filter(|device| !request.required.contains(device)) {
        let takes = takes_mib(node, &node.devices[*device as usize]);
        counts.entry(part(device)).or_insert((0, takes)).0 += 1;
    }
    for (part, (count, takes)) in counts {
        let fits = usize::try_from(left(part) / takes).unwrap();
        leaving += if is_leaving(&node.parts[part as usize]) { count } else { 0 };
        beyond += count.saturating_sub(fits);
        let with_required = required.contains(&part);
        beside += if with_required { count } else { 0 };
        let group = if with_required { &mut of_required } else { &mut of_others };
        group.push((Reverse(count), left(part)));
    }
    of_required.sort_unstable();
    of_others.sort_unstable();
    let distribution = [of_required, of_others].concat();
    let (beside, distribution) = if leaving + beyond > 0 { (0, Vec::new()) } else { (beside, distribution) };
    Measure { leaving, beyond, gpus: all.len(), beside: Reverse(beside), distribution }
}

#[test]
fn the_answer_is_as_good_as_the_best_of_all() {
    assert_best(best, measure);
}

#[test]
fn the_same_request_has_one_answer_among_the_available_devices() {
    for (node, request) in random_questions(2, 8).take(10_000) {
        assert_sound(&request, &steady(best, &node.node, &request).unwrap());
    }
}

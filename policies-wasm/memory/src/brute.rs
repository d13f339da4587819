//! Every possible answer, measured by the definition in `fit`, on small random nodes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use berth_policy_sdk::room::{is_leaving, takes_mib};
use berth_policy_sdk::testing::{assert_best, assert_sound, in_use, random_questions, steady};
use berth_policy_sdk::{Node, PlaceRequest};

use crate::fit::best;

/// Less is better, the first field first.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Measure {
    /// Devices on GPUs that are leaving, and devices beyond the memory that is left.
    leaving: usize,
    beyond: usize,
    /// GPUs of the whole answer.
    gpus: usize,
    /// Devices beside required ones. This and what follows only where neither of the first is forced.
    beside: Reverse<usize>,
    lie: Vec<Lie>,
}

/// How many devices on a GPU, and its memory left: the larger number first, then the least left.
type Lie = (Reverse<usize>, u64);

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
    let (mut of_required, mut of_others) = (Vec::<Lie>::new(), Vec::new());
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
        let of = if with_required { &mut of_required } else { &mut of_others };
        of.push((Reverse(count), left(part)));
    }
    of_required.sort_unstable();
    of_others.sort_unstable();
    let lie = [of_required, of_others].concat();
    let (beside, lie) = if leaving + beyond > 0 { (0, Vec::new()) } else { (beside, lie) };
    Measure { leaving, beyond, gpus: all.len(), beside: Reverse(beside), lie }
}

#[test]
fn the_answer_is_as_good_as_the_best_of_all() {
    assert_best(best, measure);
}

#[test]
fn the_same_question_has_one_answer_within_what_is_available() {
    for (node, request) in random_questions(2, 8).take(10_000) {
        assert_sound(&request, &steady(best, &node.node, &request).unwrap());
    }
}

//! Compares the answers with the score by its definition, over all sets and all remaining sets.

use std::collections::BTreeSet;

use berth_policy_sdk::placement::{Kind, gpu_of};
use berth_policy_sdk::room::is_leaving;
use berth_policy_sdk::testing::{Random, assert_sound, fullness, random_questions, steady};
use berth_policy_sdk::{DeviceState, Policy};

use crate::grow::grow;
use crate::pairs::Pairs;
use crate::search::{Search, bits, sort_best_first};
use crate::{Parameters, Topology};

/// A table of pair scores, either like those of real nodes or less regular.
pub(crate) fn random_pairs(random: &mut Random, n: usize) -> Pairs {
    let style = random.below(6);
    let group = 1 + random.below(8) as usize;
    let noise: Vec<u32> = (0..n * n).map(|_| random.below(6_461)).collect();
    Pairs::new(n, |a, b| match style {
        // All equal, as behind NVSwitch.
        0 => 1_820,
        // Boards, then boards on NUMA nodes.
        1 => {
            if a / group == b / group {
                450
            } else {
                10
            }
        }
        2 => 10 + 10 * u32::from(a / 8 == b / 8) + 400 * u32::from(a / group == b / group),
        // A few different values, then any values.
        3 => noise[a * n + b] % 6 * 10,
        4 => noise[a * n + b],
        // Some parts that all good sets have in common.
        _ => {
            if b < group {
                6_000 + noise[a * n + b] % 7
            } else {
                noise[a * n + b] % 50
            }
        }
    })
}

/// All sets of `size` parts.
fn sets(n: usize, size: usize) -> Vec<u32> {
    (0..1 << n).filter(|mask: &u32| mask.count_ones() as usize == size).collect()
}

/// Score, then the pairs that remain, then the lower bits. Greater is better.
type Measure = (i64, i64, std::cmp::Reverse<u32>);

/// The definition: for each set, all remaining sets.
fn exact(pairs: &Pairs, must: u32, size: usize, weight: i64) -> Measure {
    let n = pairs.len();
    let sum = |mask: u32| i64::from(pairs.sum(&bits(mask).collect::<Vec<_>>()));
    let mut all: Vec<(u32, i64)> = sets(n, size).into_iter().map(|mask| (mask, sum(mask))).collect();
    all.sort_by_key(|(_, sum)| std::cmp::Reverse(*sum));
    let top = all[0].1;
    let measure = |&(mask, sum_of_set): &(u32, i64)| {
        let left = all.iter().find(|(other, _)| other & mask == 0);
        let loss = left.map_or(0, |(_, left)| top - left);
        // The pairs of the remaining parts with each other.
        let remaining = sum(!mask & ((1 << n) - 1));
        (100 * sum_of_set - weight * loss, remaining, std::cmp::Reverse(mask))
    };
    all.iter().filter(|(mask, _)| mask & must == must).map(measure).max().unwrap()
}

fn found(pairs: &Pairs, must: u32, size: usize, weight: u32) -> u32 {
    let costs: Vec<u32> = (0..pairs.len()).map(|part| pairs.sum_of(part)).collect();
    let search =
        Search { pairs, must, size, leave_weight: weight, costs: &costs, own_pairs_cost_nothing: true };
    if 2 * size < pairs.len() && weight > 0 {
        // Both algorithms must agree, unless the search gives up.
        let mut sets = search.sets();
        sort_best_first(&mut sets);
        let by_table = search.by_table(&sets).unwrap();
        assert_eq!(search.by_search(&sets).unwrap_or(by_table), by_table, "{size} of {pairs:?}");
    }
    search.best()
}

fn check(random: &mut Random, n: usize, size: usize) {
    let pairs = random_pairs(random, n);
    let must = if random.once_in(3) { 1 << random.below(u32::try_from(n).unwrap()) } else { 0 };
    let weight = [0, 50, 50, 100, 1_000][random.below(5) as usize];
    let (_, _, std::cmp::Reverse(best)) = exact(&pairs, must, size, i64::from(weight));
    let found = found(&pairs, must, size, weight);
    assert_eq!(
        found, best,
        "{size} of {n}, must {must:b}, weight {weight}: {found:b}, not {best:b}; {pairs:?}"
    );
}

#[test]
fn sets_of_up_to_eight_parts_are_the_exact_best() {
    let mut random = Random(1);
    for n in 2..=8 {
        for size in 1..n {
            for _ in 0..60 {
                check(&mut random, n, size);
            }
        }
    }
}

#[test]
fn sets_of_sixteen_parts_are_the_exact_best() {
    let mut random = Random(2);
    for size in 1..16 {
        // Comparing thousands of sets with thousands of others takes long.
        for _ in 0..(if (5..9).contains(&size) { 1 } else { 6 }) {
            check(&mut random, 16, size);
        }
    }
}

#[test]
fn sets_of_more_than_sixteen_parts_are_good_on_boards() {
    let pairs = Pairs::new(24, |a, b| if a / 4 == b / 4 { 100 } else { 1 });
    assert_eq!(grow(&pairs, &[9], 4), [8, 9, 10, 11]);
    assert_eq!(grow(&pairs, &[], 4), [0, 1, 2, 3]);
    let odd = Pairs::new(24, |a, b| if a > 20 && b > 20 { 100 } else { u32::from(a < 3 && b < 3) * 101 });
    // The best pair is not part of the best set of three, so other first parts must be tried as well.
    assert_eq!(odd.sum(&grow(&odd, &[], 3)), 303);
}

/// Requests for several shares, each of which can come from another GPU than the required ones. The sum of
/// the pairs counts, including the GPUs of required shares, then how full the GPUs were.
#[test]
fn several_shares_are_on_the_exact_best_gpus() {
    let policy = Topology::new(Parameters::default()).unwrap();
    let (mut checked, mut held) = (0, 0);
    for (node, request) in random_questions(4, 8) {
        let gpu = |device: &u32| gpu_of(&node.node, node.node.devices[*device as usize].part).unwrap();
        let must: BTreeSet<usize> = request.required.iter().map(gpu).collect();
        let mut open: Vec<usize> = request.available.iter().map(gpu).collect();
        open.retain(|gpu| must.contains(gpu) || !is_leaving(&node.node.parts[*gpu]));
        open.dedup();
        let size = request.size as usize - request.required.len() + must.len();
        let share = Kind::of(&node.node, request.request.resource) == Some(Kind::Share);
        if !share || request.size < 2 || size > open.len() {
            continue;
        }
        checked += 1;
        let is_held = |device: &u32| node.node.devices[*device as usize].state == DeviceState::Held;
        held += u32::from(size > must.len() && request.required.iter().any(is_held));
        let parts: Vec<u32> = open.iter().map(|gpu| u32::try_from(*gpu).unwrap()).collect();
        let pairs = Pairs::of(&node.node, &parts).unwrap();
        let measure = |set: &[usize]| {
            let on = |k: &usize| request.available.iter().find(|device| gpu(device) == open[*k]).unwrap();
            let full = |k: &usize| fullness(&node.node, *on(k), &request.required);
            (pairs.sum(set), std::cmp::Reverse(set.iter().map(full).sum::<u64>()))
        };
        let with_must = |set: &Vec<usize>| {
            open.iter().enumerate().all(|(k, gpu)| !must.contains(gpu) || set.contains(&k))
        };
        let all = sets(open.len(), size).into_iter().map(|mask| bits(mask).collect::<Vec<_>>());
        let best = all.filter(with_must).map(|set| measure(&set)).max().unwrap();
        let placed = policy.place(&node.node, &request).unwrap();
        assert_sound(&request, &placed);
        let position = |device: &u32| open.iter().position(|open| *open == gpu(device)).unwrap();
        let chosen: BTreeSet<usize> = placed.devices.iter().map(position).collect();
        let chosen: Vec<usize> = chosen.into_iter().collect();
        assert_eq!((chosen.len(), measure(&chosen)), (size, best), "{placed:?} of {request:?} on {node:#?}");
        if checked == 2_000 {
            break;
        }
    }
    assert!(held >= 100, "only {held} requests require a share that is held");
}

/// 10,000 requests on nodes with all kinds of devices.
#[test]
fn the_same_request_has_one_answer_among_the_available_devices() {
    let policy = Topology::new(Parameters::default()).unwrap();
    for (node, request) in random_questions(3, 9).take(10_000) {
        let placed = steady(|node, request| policy.place(node, request), &node.node, &request);
        if Kind::of(&node.node, request.request.resource) == Some(Kind::Share) && request.size == 1 {
            assert_eq!(placed, None);
            continue;
        }
        let placed = placed.unwrap();
        assert_sound(&request, &placed);
        let gpu = |device: &u32| gpu_of(&node.node, node.node.devices[*device as usize].part).unwrap();
        let working = |device: &&u32| !is_leaving(&node.node.parts[gpu(device)]);
        if Kind::of(&node.node, request.request.resource) != Some(Kind::Share) {
            let left_over = request.available.iter().filter(|device| !placed.devices.contains(device));
            let failing_chosen =
                placed.devices.iter().any(|device| !request.required.contains(device) && !working(&device));
            assert!(!failing_chosen || left_over.filter(working).count() == 0, "{placed:?} of {request:?}");
        }
    }
}

//! The placement score by its definition, every set looked at: what the kernel's way of finding the
//! best set is held against.

use berth_kernel::sharing::placement::{LEFT_WEIGHT, Pairs};

/// A point of pair score in the units of [`LEFT_WEIGHT`], which counts eighths.
const UNIT: i64 = 8;

/// Every set of `size` of `n` parts, as bit masks, in their order.
pub(crate) fn sets(n: usize, size: usize) -> impl Iterator<Item = u32> {
    (0..1u32 << n).filter(move |set| set.count_ones() as usize == size)
}

/// The sum of pair scores within a set.
fn sum(pairs: &Pairs, n: usize, set: u32) -> i64 {
    let members = || (0..n).filter(|i| set & 1 << i != 0);
    members().flat_map(|a| members().filter(move |b| *b > a).map(move |b| i64::from(pairs.get(a, b)))).sum()
}

/// The score of every set of `size`: its sum, less a weighted loss in the best set of the same size
/// among what it leaves.
pub(crate) fn scores(pairs: &Pairs, n: usize, size: usize) -> Vec<(u32, i64)> {
    let sums: Vec<(u32, i64)> = sets(n, size).map(|set| (set, sum(pairs, n, set))).collect();
    let before = sums.iter().map(|(_, sum)| *sum).max().unwrap_or(0);
    let score = |&(set, sum): &(u32, i64)| {
        let left = sums.iter().filter(|(other, _)| other & set == 0).map(|(_, sum)| *sum).max();
        (set, sum * UNIT - LEFT_WEIGHT * left.map_or(0, |left| before - left))
    };
    sums.iter().map(score).collect()
}

/// The best of them, the lowest bit mask of equals.
pub(crate) fn best(scores: &[(u32, i64)]) -> Option<(u32, i64)> {
    scores.iter().copied().reduce(|best, next| if next.1 > best.1 { next } else { best })
}

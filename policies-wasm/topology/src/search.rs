//! Finds the exact best set of up to 16 parts.
//!
//! The score of a set depends on a second set: the best one of the same size among the remaining parts. All
//! sets of that size are listed, best sum first. The search goes through the list; for each set, the first
//! later one that has no part in common with it is its best remaining set. The outer and the inner loop
//! end as soon as no later set can be better, which is soon on real boards, since one of the two sets must
//! be near the start of the list. If it is not soon, a table is used instead, which takes the same time for
//! all connections.

use crate::pairs::Pairs;

/// Parts up to which the best set is found exactly: at most 12,870 sets (8 of 16).
pub(crate) const EXACT_PARTS_MAX: usize = 16;
/// Bits of a set of parts, and bits of a sum of scores, which is below 2^20 (see `pairs`).
const SET_BITS: u32 = 16;
const SUM_BITS: u32 = 20;
/// Candidates for the remaining set after which the table is used instead. Real boards, bridges and NVSwitch
/// stay below it for sets of any size out of 16 parts (tests/it/policies/topology.rs); this many candidates
/// take a tenth of the table's time.
const CANDIDATES_MAX: usize = 100_000;

/// A search, with everything that decides between sets.
pub(crate) struct Search<'a> {
    pub(crate) pairs: &'a Pairs,
    /// Parts that the set must contain, one bit each.
    pub(crate) must: u32,
    pub(crate) size: usize,
    /// The weight of a point that the best remaining set loses, percent.
    pub(crate) leave_weight: u32,
    /// The cost of each part: of sets with equal scores, the one with the smallest sum of costs is chosen.
    pub(crate) costs: &'a [u32],
    /// Whether the sum of the set's own pairs is subtracted from its cost.
    pub(crate) own_pairs_cost_nothing: bool,
}

/// A set of parts, one bit each, with its sum in the bits above: sets sort by sum and then by parts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Set(u64);

impl Set {
    fn mask(self) -> u32 {
        u32::try_from(self.0 & ((1 << SET_BITS) - 1)).unwrap_or(0)
    }

    fn index(self) -> usize {
        usize::try_from(self.mask()).unwrap_or(0)
    }

    fn sum(self) -> i64 {
        i64::try_from(self.0 >> SET_BITS).unwrap_or(0)
    }
}

/// The best so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Best {
    score: i64,
    cost: i64,
    mask: u32,
}

impl Search<'_> {
    /// The best set, one bit per part; 1 <= size < parts <= 16. Of equal sets the one with the lowest parts
    /// is returned. The score is the sum of the set minus the weighted loss. All losses are relative to the
    /// same best set, so the sum of the remaining set is added instead.
    pub(crate) fn best(&self) -> u32 {
        let parts = self.pairs.len();
        let mut sets = self.sets();
        let found = if 2 * self.size > parts || self.leave_weight == 0 {
            // No set of this size remains, or it has no weight.
            self.best_of(&sets, |_| 0)
        } else if 2 * self.size == parts {
            // The only remaining set consists of all other parts. Sets are sorted by their bits, so it is as
            // far from the end as this set is from the start.
            self.best_of(&sets, |index| sets[sets.len() - 1 - index].sum())
        } else {
            sort_best_first(&mut sets);
            self.by_search(&sets).or_else(|| self.by_table(&sets))
        };
        found.map_or(self.must, |best| best.mask)
    }

    /// All sets of the size, sorted by their bits.
    pub(crate) fn sets(&self) -> Vec<Set> {
        let mut sets = Vec::with_capacity(choose(self.pairs.len(), self.size));
        self.extend(&mut sets, self.pairs.len(), self.size, Set(0), &[0; EXACT_PARTS_MAX]);
        sets
    }

    /// Adds all sets that extend `set` by `more` parts below `end`. The highest part is chosen first, so that
    /// they are sorted by their bits. `gains` has what each part would add to the sum of `set`.
    fn extend(&self, sets: &mut Vec<Set>, end: usize, more: usize, set: Set, gains: &[u32; EXACT_PARTS_MAX]) {
        let with = |part: usize| Set(set.0 + (u64::from(gains[part]) << SET_BITS) + (1 << part));
        if more == 1 {
            sets.extend((0..end).map(with));
            return;
        }
        for part in more - 1..end {
            let mut gains = *gains;
            for (below, gain) in gains.iter_mut().enumerate().take(part) {
                *gain += self.pairs.get(part, below);
            }
            self.extend(sets, part, more - 1, with(part), &gains);
        }
    }

    fn best_of(&self, sets: &[Set], left: impl Fn(usize) -> i64) -> Option<Best> {
        let costs = Costs::new(self.costs);
        let mut best = None;
        for (index, set) in sets.iter().enumerate() {
            let mask = set.mask();
            if mask & self.must != self.must {
                continue;
            }
            let (score, cost) = (self.score(*set, left(index)), self.cost(&costs, *set));
            let better = |best: Best| {
                score > best.score || (score == best.score && (cost, mask) < (best.cost, best.mask))
            };
            if best.is_none_or(better) {
                best = Some(Best { score, cost, mask });
            }
        }
        best
    }

    /// The best of all sets, with the best remaining set of each from a table.
    pub(crate) fn by_table(&self, sets: &[Set]) -> Option<Best> {
        let best_within = best_within(sets, self.pairs.len());
        let all = best_within.len() - 1;
        self.best_of(sets, |index| i64::from(best_within[all & !sets[index].index()]))
    }

    /// The best set, found by search; `sets` must be sorted best first. `None` if the search takes too long.
    pub(crate) fn by_search(&self, sets: &[Set]) -> Option<Best> {
        let costs = Costs::new(self.costs);
        let first_without = FirstWithout::new(sets, self.pairs.len());
        let top = sets.first()?.sum();
        let mut best: Option<Best> = None;
        let mut candidates = 0;
        for &set in sets {
            if candidates > CANDIDATES_MAX {
                return None;
            }
            if best.is_some_and(|best| self.score(set, top) < best.score) {
                break;
            }
            let mask = set.mask();
            if mask & self.must != self.must {
                continue;
            }
            let cost = self.cost(&costs, set);
            // The score that makes this set better: a higher one, or the same if it has the lower cost.
            let wins_ties = best.is_none_or(|best| (cost, mask) < (best.cost, best.mask));
            let reach = best.map_or(0, |best| best.score + i64::from(!wins_ties));
            if self.score(set, top) < reach {
                continue;
            }
            let start = first_without.all_of(mask);
            let later = sets[start..].iter().take_while(|left| self.score(set, left.sum()) >= reach);
            let left = later.inspect(|_| candidates += 1).find(|left| left.mask() & mask == 0);
            if let Some(left) = left {
                best = Some(Best { score: self.score(set, left.sum()), cost, mask });
            }
        }
        best
    }

    fn score(&self, set: Set, left: i64) -> i64 {
        100 * set.sum() + i64::from(self.leave_weight) * left
    }

    fn cost(&self, costs: &Costs, set: Set) -> i64 {
        costs.of(set.mask()) - if self.own_pairs_cost_nothing { set.sum() } else { 0 }
    }
}

/// The number of sets with `size` out of `n` parts.
fn choose(n: usize, size: usize) -> usize {
    (0..size).fold(1, |sets, k| sets * (n - k) / (k + 1))
}

/// Sorts by sum, greatest first; sets with equal sums keep their order. A radix sort by ten bits of the sum
/// at a time, which is several times faster for thousands of sets than sorting by comparison.
pub(crate) fn sort_best_first(sets: &mut Vec<Set>) {
    const DIGIT_BITS: u32 = SUM_BITS / 2;
    const DIGITS: usize = 1 << DIGIT_BITS;
    let mut sorted = vec![Set(0); sets.len()];
    for turn in 0..2 {
        let digit = |set: &Set| {
            let shifted = set.0 >> (SET_BITS + turn * DIGIT_BITS);
            DIGITS - 1 - usize::try_from(shifted).unwrap_or(0) % DIGITS
        };
        let mut starts = [0_u32; DIGITS + 1];
        sets.iter().for_each(|set| starts[digit(set) + 1] += 1);
        (1..DIGITS).for_each(|d| starts[d] += starts[d - 1]);
        for set in &*sets {
            let start = &mut starts[digit(set)];
            sorted[usize::try_from(*start).unwrap_or(0)] = *set;
            *start += 1;
        }
        std::mem::swap(sets, &mut sorted);
    }
}

/// A table with, for each set of parts (its bits are the index), the best sum of any of `sets` that is
/// contained in it, or 0 if there is none. At first only the sets themselves have an entry. Then, two parts
/// at a time, each set with a part gets at least the value of the same set without that part.
fn best_within(sets: &[Set], parts: usize) -> Vec<u32> {
    // An even number of parts; one more is in no set.
    let parts = parts.next_multiple_of(2);
    let mut best = vec![0; 1 << parts];
    for set in sets {
        best[set.index()] = u32::try_from(set.0 >> SET_BITS).unwrap_or(u32::MAX);
    }
    for part in (0..parts).step_by(2) {
        for all in best.chunks_exact_mut(4 << part) {
            let (without_second, with_second) = all.split_at_mut(2 << part);
            let (neither, first) = without_second.split_at_mut(1 << part);
            let (second, both) = with_second.split_at_mut(1 << part);
            for (((neither, first), second), both) in neither.iter().zip(first).zip(second).zip(both) {
                *first = (*first).max(*neither);
                *second = (*second).max(*neither);
                *both = (*both).max(*first).max(*second);
            }
        }
    }
    best
}

/// For each pair of parts, the position in a list of the first set that has neither of them: no set before
/// it is disjoint from a set with both. Without this index, a part that all good sets have in common would
/// make every inner loop long.
struct FirstWithout([[u32; EXACT_PARTS_MAX]; EXACT_PARTS_MAX]);

impl FirstWithout {
    fn new(sets: &[Set], parts: usize) -> Self {
        let all = (1_u32 << parts) - 1;
        let mut first = [[0; EXACT_PARTS_MAX]; EXACT_PARTS_MAX];
        // For each part, the parts (including itself) for which no set without both has been found yet.
        let mut missing = [all; EXACT_PARTS_MAX];
        let mut open = all;
        for (index, set) in (0..).zip(sets) {
            let without = all & !set.mask();
            for a in bits(without & open) {
                for b in bits(missing[a] & without) {
                    first[a][b] = index;
                }
                missing[a] &= !without;
                if missing[a] == 0 {
                    open &= !(1 << a);
                }
            }
            if open == 0 {
                break;
            }
        }
        Self(first)
    }

    fn all_of(&self, mask: u32) -> usize {
        let pairs = bits(mask).flat_map(|a| bits(mask & (u32::MAX << a)).map(move |b| self.0[a][b]));
        usize::try_from(pairs.max().unwrap_or(0)).unwrap_or(0)
    }
}

/// Precomputed sums of the parts' costs, for each half of the parts.
struct Costs {
    low: [u32; 256],
    high: [u32; 256],
}

impl Costs {
    fn new(costs: &[u32]) -> Self {
        let half = |from: usize| {
            let mut sums = [0; 256];
            for mask in 1..256_usize {
                let part = from + mask.trailing_zeros() as usize;
                sums[mask] = sums[mask & (mask - 1)] + costs.get(part).copied().unwrap_or(0);
            }
            sums
        };
        Self { low: half(0), high: half(8) }
    }

    fn of(&self, mask: u32) -> i64 {
        let [low, high, ..] = mask.to_le_bytes();
        i64::from(self.low[usize::from(low)]) + i64::from(self.high[usize::from(high)])
    }
}

/// The positions of the bits that are set.
pub(crate) fn bits(mask: u32) -> impl Iterator<Item = usize> {
    let next = |mask: &u32| Some(mask & (mask - 1)).filter(|mask| *mask != 0);
    std::iter::successors(Some(mask).filter(|mask| *mask != 0), next)
        .map(|mask| mask.trailing_zeros() as usize)
}

//! A good set of more parts than can be looked at exactly.

use crate::pairs::Pairs;

/// Starts that are tried: 64 x a set of 16 of 112 instances are some 100,000 additions.
const STARTS_MAX: usize = 64;

/// Grows a set from the required parts, or from each part in turn, by the part that adds most, and
/// keeps the one with the highest sum. Of equal ones the one with the lowest parts.
pub(crate) fn grow(pairs: &Pairs, must: &[usize], size: usize) -> Vec<usize> {
    if !must.is_empty() {
        return grown(pairs, must, size);
    }
    let starts = (0..pairs.len()).take(STARTS_MAX);
    let sets = starts.map(|start| grown(pairs, &[start], size));
    sets.min_by_key(|set| std::cmp::Reverse(pairs.sum(set))).unwrap_or_default()
}

fn grown(pairs: &Pairs, from: &[usize], size: usize) -> Vec<usize> {
    let mut chosen = vec![false; pairs.len()];
    let mut gains = vec![0_u32; pairs.len()];
    let mut set = Vec::with_capacity(size);
    let mut next = from.iter().copied();
    while set.len() < size {
        let free = (0..pairs.len()).filter(|part| !chosen[*part]);
        let Some(part) = next.next().or_else(|| free.min_by_key(|part| std::cmp::Reverse(gains[*part])))
        else {
            break;
        };
        chosen[part] = true;
        set.push(part);
        gains.iter_mut().enumerate().for_each(|(other, gain)| *gain += pairs.get(part, other));
    }
    set.sort_unstable();
    set
}

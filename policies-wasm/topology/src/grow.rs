//! Finds a good set if there are too many parts for an exact search.

use crate::pairs::Pairs;

/// First parts that are tried: 64 sets of 16 out of 112 instances cost about 100,000 additions.
const STARTS_MAX: usize = 64;

/// Starts with the required parts, or with each part in turn, and repeatedly adds the part with the highest
/// gain. Returns the set with the highest sum, and of equal sets the one with the lowest parts.
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

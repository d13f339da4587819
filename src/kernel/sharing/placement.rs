//! The baseline's choice of preferred devices, for requests that no policy answers, and the reference
//! that policies are measured against.
//!
//! Whole parts are chosen by topology. The score of a set is the sum of its pair scores minus
//! [`LEFT_WEIGHT`] times the loss for later requests: how far the best set of the same size among the
//! remaining parts falls short of the best one before. The score is maximised exactly for up to
//! [`EXACT_PARTS_MAX`] parts; beyond that a set is grown greedily. Shares are taken from the part with
//! the fewest held devices first.

use crate::hardware::gpu::{Link, Links, Part, Path};
use crate::ids::names::{DeviceId, PartId, Resource};
use crate::node::ledger::Ledger;
use crate::policy::hooks::{PlaceRequest, Placement};
use crate::sharing::part_state::Taken;
use std::collections::{BTreeMap, BTreeSet};
use std::iter::successors;

/// Most parts for which all sets are compared: 2^16 sets, 2^20 additions and comparisons, most of them
/// vectorised.
pub const EXACT_PARTS_MAX: usize = 16;
/// Weight of the pair score that later requests lose, in eighths.
pub const LEFT_WEIGHT: i64 = 4;
/// One point of pair score in eighths, so that the weight is a whole number.
const UNIT: i64 = 8;

/// How well two parts are connected, on the scale of NVIDIA's device plugin: 10 to 60 for the PCIe path
/// and 100 for each NVLink. Parts of one GPU count as one board; an unknown path counts 0.
#[must_use]
pub fn pair_score(links: &Links, a: &Part, b: &Part) -> u32 {
    if a.gpu == b.gpu {
        return path_score(Path::SameBoard);
    }
    links.between(&a.gpu, &b.gpu).map_or(0, |Link { path, nvlinks }| path_score(path) + 100 * nvlinks)
}

fn path_score(path: Path) -> u32 {
    match path {
        Path::CrossNuma => 10,
        Path::SameNuma => 20,
        Path::HostBridge => 30,
        Path::MultiSwitch => 40,
        Path::SingleSwitch => 50,
        Path::SameBoard => 60,
    }
}

/// The baseline's choice: `size` devices, or all if there are fewer, the required ones always included.
/// Never fails, since an error would fail the pod.
#[must_use]
pub fn baseline(ledger: &Ledger, request: &PlaceRequest) -> Placement {
    let (devices, reason) = if request.available.iter().any(|id| id.share.is_some()) {
        (spread_shares(ledger, request), "shares of the least-held GPUs")
    } else {
        (best_connected_wholes(ledger, request), "the nearest GPUs that leave the best ones for later")
    };
    Placement { devices, reason: reason.into() }
}

/// The same request without the available devices that could not be granted now, if enough remain. For
/// example, a cordoned GPU is listed Healthy until its last pod's end is recorded, and a pod placed there
/// would fail permanently. Devices on parts that grant nothing are removed first, then those that the
/// ledger has as taken, since a reconcile pass before the refusal may still free these.
#[must_use]
pub fn without_ungrantable(ledger: &Ledger, request: &PlaceRequest) -> PlaceRequest {
    let find = |id: &DeviceId| {
        let part = ledger.part(&id.part)?;
        Some((part, part.device(&request.resource, id.share)?))
    };
    let is_grantable = |id: &DeviceId| ledger.may_grant_device(&request.resource, id);
    // Summed once for each part: once for each device would be quadratic in the number of shares.
    let parts: BTreeSet<&PartId> = request.available.iter().map(|id| &id.part).collect();
    let taken: BTreeMap<&PartId, Taken> =
        parts.into_iter().filter_map(|id| Some((id, ledger.taken(ledger.part(id)?)))).collect();
    // Each slice is checked alone; the sum of several on one part is left to the policy or the baseline.
    let is_free = |id: &DeviceId| {
        find(id).is_some_and(|(part, device)| {
            let Some(taken) = taken.get(&id.part) else { return false };
            let with_device = taken.plus(device.consumes);
            !device.held() && with_device.excess(ledger.memory_to_grant_mib(part)).is_none()
        })
    };
    let retain = |from: &PlaceRequest, is_good: &dyn Fn(&DeviceId) -> bool| {
        let keep = |id: &&DeviceId| from.required.contains(id) || is_good(id);
        let available: Vec<DeviceId> = from.available.iter().filter(keep).cloned().collect();
        if available.len() < from.size { from.clone() } else { PlaceRequest { available, ..from.clone() } }
    };
    retain(&retain(request, &is_grantable), &is_free)
}

/// Orders devices for a scheduler that takes the first ones that fit: the best device comes first, then those that complete
/// the best two, four, eight and so on. Devices that were added in one step are ordered in the same way among themselves, so
/// that the next two are a good pair, too, once the first ones are taken.
#[derive(Clone, Debug)]
pub struct DeviceOrder {
    /// The steps that are not finished. The first one orders all devices; each further one orders those that its predecessor
    /// adds next.
    requests: Vec<PlaceRequest>,
}

impl DeviceOrder {
    /// Begins with no device.
    #[must_use]
    pub fn new(resource: Resource, devices: Vec<DeviceId>) -> Self {
        Self { requests: vec![PlaceRequest { resource, available: devices, required: Vec::new(), size: 1 }] }
    }

    /// What is to be placed next; `None` if all devices have their place.
    #[must_use]
    pub fn request(&self) -> Option<&PlaceRequest> {
        self.requests.last().filter(|request| request.required.len() < request.available.len())
    }

    /// Adds the devices of the answer that have no place yet. If there is none, all others are added.
    pub fn add(&mut self, chosen: &[DeviceId]) {
        let Some(PlaceRequest { resource, available, required, .. }) = self.requests.last() else { return };
        let is_new = |id: &&DeviceId| available.contains(id) && !required.contains(id);
        let mut new: Vec<DeviceId> = chosen.iter().filter(is_new).cloned().collect();
        if new.is_empty() {
            new = available.iter().filter(|id| !required.contains(id)).cloned().collect();
        }
        new.sort();
        new.dedup();
        if (3..available.len()).contains(&new.len()) {
            self.requests.push(Self::new(resource.clone(), new).requests.remove(0));
            return;
        }
        while let Some(PlaceRequest { available, required, size, .. }) = self.requests.last_mut() {
            required.append(&mut new);
            *size = (2 * required.len()).min(available.len());
            if required.len() < available.len() || self.requests.len() == 1 {
                return;
            }
            new = self.requests.pop().map(|done| done.required).unwrap_or_default();
        }
    }

    /// The devices that have their place.
    #[must_use]
    pub fn into_devices(mut self) -> Vec<DeviceId> {
        self.requests.swap_remove(0).required
    }
}

fn spread_shares(ledger: &Ledger, request: &PlaceRequest) -> Vec<DeviceId> {
    let mut free: BTreeMap<&PartId, BTreeSet<&DeviceId>> = BTreeMap::new();
    let required: BTreeSet<&DeviceId> = request.required.iter().collect();
    for id in request.available.iter().filter(|id| !required.contains(id)) {
        free.entry(&id.part).or_default().insert(id);
    }
    let held =
        |part: &PartId| ledger.part(part).map_or(0, |p| p.devices.values().filter(|d| d.held()).count());
    let mut load: BTreeMap<&PartId, usize> = free.keys().map(|part| (*part, held(part))).collect();
    let mut chosen = request.required.clone();
    // A required device that an init container of the same pod holds is counted already.
    let is_counted = |id: &DeviceId| ledger.device(&request.resource, id).is_some_and(|d| d.held());
    for id in request.required.iter().filter(|id| !is_counted(id)) {
        load.entry(&id.part).and_modify(|l| *l += 1);
    }
    while chosen.len() < request.size {
        let open = free.iter_mut().filter(|(_, ids)| !ids.is_empty());
        let Some((part, ids)) = open.min_by_key(|(part, _)| load.get(*part).copied()) else {
            break;
        };
        chosen.extend(ids.pop_first().cloned());
        load.entry(*part).and_modify(|l| *l += 1);
    }
    chosen.sort();
    chosen
}

fn best_connected_wholes(ledger: &Ledger, request: &PlaceRequest) -> Vec<DeviceId> {
    let ids: Vec<&DeviceId> = request.available.iter().collect::<BTreeSet<_>>().into_iter().collect();
    let required: Vec<usize> =
        request.required.iter().filter_map(|r| ids.iter().position(|id| *id == r)).collect();
    let pairs = Pairs::of(ledger, &ids);
    let chosen = best_set(&pairs, &required, request.size);
    chosen.into_iter().map(|i| ids[i].clone()).collect()
}

/// Pair scores of `n` parts.
pub struct Pairs {
    n: usize,
    scores: Vec<u32>,
}

impl Pairs {
    /// Calls `score` once for each pair of indices below `n`.
    #[must_use]
    pub fn new(n: usize, score: impl Fn(usize, usize) -> u32) -> Self {
        let mut scores = vec![0; n * n];
        for a in 0..n {
            for b in a + 1..n {
                scores[a * n + b] = score(a, b);
                scores[b * n + a] = scores[a * n + b];
            }
        }
        Self { n, scores }
    }

    fn of(ledger: &Ledger, ids: &[&DeviceId]) -> Self {
        let parts: Vec<Option<&Part>> = ids.iter().map(|id| ledger.part(&id.part).map(|p| &p.part)).collect();
        Self::new(ids.len(), |a, b| match (parts[a], parts[b]) {
            (Some(a), Some(b)) => pair_score(&ledger.links, a, b),
            _ => 0,
        })
    }

    /// The score of one pair.
    #[must_use]
    pub fn get(&self, a: usize, b: usize) -> u32 {
        self.scores[a * self.n + b]
    }
}

/// Indices of the best set of `size` parts that contains `required`, sorted; of equally good sets the
/// one with the lowest indices. All parts if there are not more than `size`.
#[must_use]
pub fn best_set(pairs: &Pairs, required: &[usize], size: usize) -> Vec<usize> {
    let n = pairs.n;
    let size = size.max(required.len());
    if size >= n {
        return (0..n).collect();
    }
    if n > EXACT_PARTS_MAX {
        return grow(pairs, required, size);
    }
    if size == 0 {
        return Vec::new();
    }
    let required_mask: usize = required.iter().fold(0, |mask, i| mask | 1 << i);
    let full_mask = (1usize << n) - 1;
    let sums = sums(pairs);
    // If fewer than `size` parts remain, later requests lose no set of that size.
    let within = (2 * size <= n).then(|| best_within(&sums, n, size));
    let mut best: Option<(i64, usize)> = None;
    // The smallest bit pattern wins a tie, so that low indices fill up first.
    for mask in sets(n, size).filter(|mask| mask & required_mask == required_mask) {
        let loss = within.as_ref().map_or(0, |best| best[full_mask] - best[full_mask & !mask]);
        let score = i64::from(sums[mask]) * UNIT - LEFT_WEIGHT * i64::from(loss);
        if best.is_none_or(|(best_score, _)| score > best_score) {
            best = Some((score, mask));
        }
    }
    let mask = best.map_or(required_mask, |(_, mask)| mask);
    (0..n).filter(|i| mask & 1 << i != 0).collect()
}

/// Every set of `size` (at least 1) of `n` parts, as ascending bit masks.
fn sets(n: usize, size: usize) -> impl Iterator<Item = usize> {
    // The next number with equally many bits: the top bit of the lowest run of ones moves up by one, and
    // the other bits of the run move to the bottom.
    let next = |set: &usize| {
        let up = set + (set & set.wrapping_neg());
        Some(up | (set ^ up) >> 2 >> set.trailing_zeros())
    };
    successors(Some((1usize << size) - 1), next).take_while(move |set| *set < 1 << n)
}

/// The sum of pair scores of every set, by bit mask. The sum of a set whose highest part is `top` is the
/// sum without `top` plus what `top` adds. Slices are added as a whole, which compilers turn into vector
/// instructions: 2^17 additions for 16 parts.
fn sums(pairs: &Pairs) -> Vec<i32> {
    let n = pairs.n;
    let (mut sums, mut adds) = (vec![0i32; 1 << n], vec![0i32; 1 << n]);
    for top in 0..n {
        for low in 0..top {
            let add = i32::try_from(pairs.get(top, low)).unwrap_or(i32::MAX / 256);
            let (without, with) = adds.split_at_mut(1 << low);
            with.iter_mut().zip(without).for_each(|(with, without)| *with = *without + add);
        }
        let (without, with) = sums.split_at_mut(1 << top);
        let parts = without.iter().zip(&adds);
        with.iter_mut().zip(parts).for_each(|(with, (without, add))| *with = without + add);
    }
    sums
}

/// The best sum of a set of `size` within every mask, 0 for smaller masks. Goes part by part: a mask with
/// the part is worth at least as much as the mask without it.
fn best_within(sums: &[i32], n: usize, size: usize) -> Vec<i32> {
    let mut best = vec![0i32; sums.len()];
    sets(n, size).for_each(|set| best[set] = sums[set]);
    for part in 0..n {
        for masks in best.chunks_exact_mut(2 << part) {
            let (without, with) = masks.split_at_mut(1 << part);
            with.iter_mut().zip(without).for_each(|(with, without)| *with = (*with).max(*without));
        }
    }
    best
}

/// Grows a set from the required parts, or from the best pair, by the part that adds most.
fn grow(pairs: &Pairs, required: &[usize], size: usize) -> Vec<usize> {
    let mut chosen: BTreeSet<usize> = required.iter().copied().collect();
    if chosen.is_empty() && size > 1 {
        let indices = (0..pairs.n).flat_map(|a| (a + 1..pairs.n).map(move |b| (a, b)));
        let best = indices.max_by_key(|&(a, b)| (pairs.get(a, b), std::cmp::Reverse((a, b))));
        chosen.extend(best.map(|(a, b)| [a, b]).into_iter().flatten());
    }
    let gain = |i| chosen.iter().map(|j| u64::from(pairs.get(i, *j))).sum();
    let mut gains: Vec<u64> = (0..pairs.n).map(gain).collect();
    while chosen.len() < size {
        let candidates = (0..pairs.n).filter(|i| !chosen.contains(i));
        let Some(next) = candidates.max_by_key(|i| (gains[*i], std::cmp::Reverse(*i))) else {
            break;
        };
        chosen.insert(next);
        gains.iter_mut().enumerate().for_each(|(i, gain)| *gain += u64::from(pairs.get(i, next)));
    }
    chosen.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sum(pairs: &Pairs, set: &[usize]) -> i64 {
        set.iter()
            .enumerate()
            .flat_map(|(k, a)| set[k + 1..].iter().map(move |b| i64::from(pairs.get(*a, *b))))
            .sum()
    }

    fn sets(n: usize, size: usize) -> Vec<Vec<usize>> {
        (0usize..1 << n)
            .filter(|m| m.count_ones() as usize == size)
            .map(|m| (0..n).filter(|i| m & 1 << i != 0).collect())
            .collect()
    }

    /// The score by its definition, over every set of the remaining parts.
    fn score(pairs: &Pairs, set: &[usize], size: usize) -> i64 {
        let sets: Vec<Vec<usize>> = sets(pairs.n, size);
        let best = |include: &dyn Fn(&Vec<usize>) -> bool| {
            sets.iter().filter(|s| include(s)).map(|s| sum(pairs, s)).max()
        };
        let before = best(&|_| true).unwrap_or(0);
        let after = best(&|s| s.iter().all(|i| !set.contains(i)));
        sum(pairs, set) * UNIT - LEFT_WEIGHT * after.map_or(0, |after| before - after)
    }

    #[test]
    fn an_order_begins_with_the_best_one_two_and_four_and_has_every_device_once() {
        let id = |name: &str| DeviceId::whole(&PartId::parse(&format!("GPU-{name}")).unwrap());
        let all = || ["a", "b", "c", "d", "e"].map(id).to_vec();
        let order = |place: &dyn Fn(&PlaceRequest) -> Vec<DeviceId>| {
            let mut ordering = DeviceOrder::new(Resource::nvidia_gpu(), all());
            while let Some(request) = ordering.request() {
                let chosen = place(request);
                ordering.add(&chosen);
            }
            ordering.into_devices().iter().map(|id| id.part.as_str().replace("GPU-", "")).collect::<String>()
        };
        let best = |request: &PlaceRequest| {
            assert!(request.required.iter().all(|id| request.available.contains(id)));
            ["c", "a", "e", "b", "d"].map(id)[..request.size].to_vec()
        };
        assert_eq!(order(&best), "cabed");
        // A policy that answers too few, or others, ends nothing.
        assert_eq!(order(&|_| Vec::new()), "abcde");
        assert_eq!(order(&|_| vec![id("x"), id("d")]), "dabce");
        assert_eq!(order(&|request| request.required.clone()), "abcde");
    }

    #[test]
    fn an_order_keeps_all_pairs_together() {
        const PAIRS: [[u32; 2]; 4] = [[0, 5], [1, 4], [2, 7], [3, 6]];
        let id = |n: u32| DeviceId::whole(&PartId::parse(&format!("GPU-{n}")).unwrap());
        let mut ordering = DeviceOrder::new(Resource::nvidia_gpu(), (0..8).map(id).collect());
        while let Some(PlaceRequest { available, required, size, .. }) = ordering.request() {
            let by_pairs = PAIRS.iter().flatten().map(|n| id(*n)).filter(|one| available.contains(one));
            assert!(by_pairs.clone().take(required.len()).all(|one| required.contains(&one)));
            let chosen: Vec<DeviceId> = by_pairs.take(*size).collect();
            ordering.add(&chosen);
        }
        let order = ordering.into_devices();
        for pair in order.chunks(2) {
            assert!(PAIRS.iter().any(|pairs| pairs.iter().all(|n| pair.contains(&id(*n)))), "{order:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_chosen_set_is_as_good_as_the_best_of_all(
            n in 2usize..8,
            size in 1usize..8,
            scores in prop::collection::vec(0u32..2000, 64),
            required in 0usize..8,
        ) {
            let size = size.min(n);
            let pairs = Pairs::new(n, |a, b| scores[a * 8 + b]);
            let required: Vec<usize> = if required < n { vec![required] } else { vec![] };
            let chosen = best_set(&pairs, &required, size);
            prop_assert_eq!(chosen.len(), size);
            prop_assert!(required.iter().all(|r| chosen.contains(r)));
            let best = sets(n, size).into_iter().filter(|s| required.iter().all(|r| s.contains(r)))
                .map(|s| score(&pairs, &s, size)).max().unwrap();
            prop_assert_eq!(score(&pairs, &chosen, size), best);
        }
    }

    #[test]
    fn two_of_four_leave_a_good_pair() {
        // 0-1 and 2-3 are well connected; 1-2 is slightly better but would split both pairs.
        let pairs = Pairs::new(4, |a, b| match (a, b) {
            (0, 1) | (2, 3) => 100,
            (1, 2) => 110,
            _ => 10,
        });
        assert_eq!(best_set(&pairs, &[], 2), [0, 1]);
    }

    #[test]
    fn a_set_of_too_many_parts_is_grown_greedily() {
        let pairs = Pairs::new(20, |a, b| if a / 4 == b / 4 { 100 } else { 1 });
        assert_eq!(best_set(&pairs, &[9], 4), [8, 9, 10, 11]);
        assert_eq!(best_set(&pairs, &[], 4), [0, 1, 2, 3]);
    }
}

//! Groups of GPUs that NVLink connects with each other, so that a claim can demand GPUs of one group. They do not depend on
//! which GPUs are held: a claim's constraint (`matchAttribute`) means the same for all claims.

use crate::ids::names::GpuId;
use crate::node::ledger::Ledger;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The most GPUs that are grouped: all sets of four are compared. No server has more.
const GPUS_MAX: usize = 32;

/// The groups of the node's GPUs. Pairs and quads are each numbered from 0, in the order of their GPU with the lowest index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NvlinkGroups {
    pairs: BTreeMap<GpuId, i64>,
    quads: BTreeMap<GpuId, i64>,
}

impl NvlinkGroups {
    /// Forms quads first, and then pairs, within the quads where there are some. A quad or pair that begins at a multiple of its
    /// size is preferred, so that the groups of other GPUs stay when one is lost.
    pub(crate) fn of(ledger: &Ledger) -> Self {
        let nodes = Gpus::of(ledger);
        let quads = nodes.disjoint(nodes.cliques::<4>());
        let quad_of = |gpu: usize| quads.iter().position(|quad| quad.contains(&gpu));
        let mut pairs = Vec::new();
        for quad in &quads {
            let [a, b, c, d] = *quad;
            let halves = [[[a, b], [c, d]], [[a, c], [b, d]], [[a, d], [b, c]]];
            let best = halves.into_iter().min_by_key(|[x, y]| Reverse(nodes.strength(x) + nodes.strength(y)));
            pairs.extend(best.into_iter().flatten());
        }
        let mut of_others = nodes.cliques::<2>();
        of_others.retain(|pair| pair.iter().all(|gpu| quad_of(*gpu).is_none()));
        pairs.extend(nodes.disjoint(of_others));
        pairs.sort_unstable();
        Self { pairs: nodes.numbered(&pairs), quads: nodes.numbered(&quads) }
    }

    /// The pair that a GPU belongs to, if any.
    pub(crate) fn pair(&self, gpu: &GpuId) -> Option<i64> {
        self.pairs.get(gpu).copied()
    }

    /// The quad that a GPU belongs to, if any.
    pub(crate) fn quad(&self, gpu: &GpuId) -> Option<i64> {
        self.quads.get(gpu).copied()
    }
}

/// The GPUs of the node in the order of their indices, and how strongly NVLink connects each two.
struct Gpus<'l> {
    gpus: Vec<(u32, &'l GpuId)>,
    /// 0 without NVLinks, 2 with at least three quarters of the most that two GPUs of the node have, and 1 with fewer: a link that
    /// is down does not make new groups of all GPUs.
    strengths: Vec<Vec<u32>>,
}

impl<'l> Gpus<'l> {
    fn of(ledger: &'l Ledger) -> Self {
        let whole =
            ledger.parts.values().filter(|part| part.part.is_whole_gpu() && !ledger.is_excluded(part));
        let mut gpus: Vec<_> = whole.map(|part| (part.part.gpu_index, &part.part.gpu)).collect();
        gpus.sort();
        gpus.truncate(GPUS_MAX);
        let most = ledger.links.iter().map(|(_, _, link)| link.nvlinks).max().unwrap_or(0);
        let strength = |a: &GpuId, b: &GpuId| match ledger.links.between(a, b).map_or(0, |link| link.nvlinks)
        {
            0 => 0,
            nvlinks if 4 * nvlinks >= 3 * most => 2,
            _ => 1,
        };
        let of = |a: &GpuId| gpus.iter().map(|(_, b)| strength(a, b)).collect();
        let strengths = gpus.iter().map(|(_, a)| of(a)).collect();
        Self { gpus, strengths }
    }

    fn strength(&self, group: &[usize]) -> u32 {
        pairs_of(group).map(|(a, b)| self.strengths[a][b]).sum()
    }

    /// All sets of this many GPUs that are all connected with each other, the best first.
    fn cliques<const SIZE: usize>(&self) -> Vec<[usize; SIZE]> {
        let mut sets: Vec<Vec<usize>> = vec![Vec::new()];
        for _ in 0..SIZE {
            let grown = sets.iter().flat_map(|set| {
                let from = set.last().map_or(0, |last| last + 1);
                let next = (from..self.gpus.len())
                    .filter(|gpu| set.iter().all(|one| self.strengths[*one][*gpu] > 0));
                next.map(move |gpu| [&set[..], &[gpu]].concat())
            });
            sets = grown.collect();
        }
        let mut cliques: Vec<[usize; SIZE]> =
            sets.into_iter().filter_map(|set| set.try_into().ok()).collect();
        let size = u32::try_from(SIZE).unwrap_or(u32::MAX);
        let is_aligned = |set: &[usize]| {
            let mut blocks = set.iter().map(|gpu| self.gpus[*gpu].0 / size);
            let first = blocks.next();
            blocks.all(|block| Some(block) == first)
        };
        cliques.sort_by_key(|set| (Reverse(self.strength(set)), !is_aligned(set), *set));
        cliques
    }

    /// Those that have no GPU in common with one before them, in the order of their GPUs.
    fn disjoint<const SIZE: usize>(&self, cliques: Vec<[usize; SIZE]>) -> Vec<[usize; SIZE]> {
        let mut is_taken = vec![false; self.gpus.len()];
        let mut chosen = Vec::new();
        for set in cliques {
            if set.iter().all(|gpu| !is_taken[*gpu]) {
                set.iter().for_each(|gpu| is_taken[*gpu] = true);
                chosen.push(set);
            }
        }
        chosen.sort_unstable();
        chosen
    }

    fn numbered<const SIZE: usize>(&self, groups: &[[usize; SIZE]]) -> BTreeMap<GpuId, i64> {
        let numbers =
            (0..).zip(groups).flat_map(|(number, group)| group.iter().map(move |gpu| (*gpu, number)));
        numbers.map(|(gpu, number)| (self.gpus[gpu].1.clone(), number)).collect()
    }
}

/// Each two of them.
fn pairs_of(group: &[usize]) -> impl Iterator<Item = (usize, usize)> + '_ {
    group.iter().enumerate().flat_map(|(n, a)| group[n + 1..].iter().map(move |b| (*a, *b)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::gpu::{Inventory, Link, Links, Part, Path};
    use crate::ids::time::Now;
    use crate::node::command::Command;
    use crate::node::decide::decide;

    /// The pairs and quads of GPUs with these NVLinks, each as `NUMBER:GPUS`.
    fn groups(count: u32, nvlinks: &[(u32, u32, u32)]) -> (Vec<String>, Vec<String>) {
        let id = |n: u32| GpuId::parse(&format!("GPU-{n}")).unwrap();
        let mut links = Links::default();
        for a in 0..count {
            for b in a + 1..count {
                let nvlinks = nvlinks.iter().find(|(x, y, _)| (*x, *y) == (a, b)).map_or(0, |(_, _, n)| *n);
                links.set(&id(a), &id(b), Link { path: Path::SameNuma, nvlinks });
            }
        }
        let parts = (0..count).map(|n| Part::whole_gpu(id(n), n)).collect();
        let scan = Command::RecordScan(Inventory { parts, links, ..Inventory::default() });
        let mut ledger = Ledger::default();
        let verdict = decide(&ledger, &scan, Now { wall_ms: 1, mono_ms: 1 });
        ledger.apply(&verdict.entry);
        let groups = NvlinkGroups::of(&ledger);
        let shown = |of: &dyn Fn(&GpuId) -> Option<i64>| {
            let mut shown: BTreeMap<i64, String> = BTreeMap::new();
            for n in 0..count {
                if let Some(group) = of(&id(n)) {
                    shown.entry(group).or_insert_with(|| format!("{group}:")).push_str(&n.to_string());
                }
            }
            shown.into_values().collect()
        };
        (shown(&|gpu| groups.pair(gpu)), shown(&|gpu| groups.quad(gpu)))
    }

    #[test]
    fn bridges_make_pairs_and_no_quads() {
        let none: Vec<String> = Vec::new();
        assert_eq!(groups(4, &[]), (none.clone(), none.clone()));
        let pairs = ["0:05", "1:14", "2:27", "3:36"].map(str::to_owned).to_vec();
        assert_eq!(groups(9, &[(0, 5, 4), (1, 4, 4), (2, 7, 4), (3, 6, 4)]), (pairs, none));
    }

    #[test]
    fn a_switch_makes_pairs_and_quads_of_neighbours_also_without_a_link_or_a_gpu() {
        let mut all: Vec<(u32, u32, u32)> =
            (0..8).flat_map(|a| (a + 1..8).map(move |b| (a, b, 18))).collect();
        let (pairs, quads) = (["0:01", "1:23", "2:45", "3:67"], ["0:0123", "1:4567"]);
        assert_eq!(groups(8, &all), (pairs.map(str::to_owned).to_vec(), quads.map(str::to_owned).to_vec()));
        all.iter_mut().filter(|(a, b, _)| *a == 3 || *b == 3).for_each(|(_, _, links)| *links = 17);
        assert_eq!(groups(8, &all), (pairs.map(str::to_owned).to_vec(), quads.map(str::to_owned).to_vec()));
        all.retain(|(a, b, _)| *a != 2 && *b != 2);
        let (pairs, quads) = groups(8, &all);
        assert_eq!(
            (pairs, quads),
            (["0:01", "1:45", "2:67"].map(str::to_owned).to_vec(), vec!["0:4567".to_owned()])
        );
    }

    /// The hybrid cube mesh of a DGX-1 with V100.
    #[test]
    fn a_cube_mesh_makes_pairs_of_two_links() {
        let face = |n: u32| {
            [(0, 1, 1), (0, 2, 1), (0, 3, 2), (1, 2, 2), (1, 3, 1), (2, 3, 2)]
                .map(|(a, b, l)| (a + n, b + n, l))
        };
        let across = [(0, 4, 2), (1, 5, 2), (2, 6, 1), (3, 7, 1)];
        let (pairs, quads) = groups(8, &[&face(0)[..], &face(4), &across].concat());
        assert_eq!(pairs, ["0:03", "1:12", "2:47", "3:56"]);
        assert_eq!(quads, ["0:0123", "1:4567"]);
    }
}

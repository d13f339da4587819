//! Groups of GPUs that NVLink connects with each other, so that a claim can demand GPUs of one group. They do not depend on
//! which GPUs are held: a claim's constraint (`matchAttribute`) means the same for all claims.

use crate::ids::names::GpuId;
use crate::node::ledger::Ledger;
use std::collections::{BTreeMap, BTreeSet};

/// The groups of the node's GPUs. The numbers begin with 0 at the GPU with the lowest index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NvlinkGroups {
    pairs: BTreeMap<GpuId, i64>,
    quads: BTreeMap<GpuId, i64>,
}

impl NvlinkGroups {
    /// Forms pairs of the GPUs with the most NVLinks between them first, and quads of two such pairs.
    pub(crate) fn of(ledger: &Ledger) -> Self {
        if ledger.links.iter().all(|(_, _, link)| link.nvlinks == 0) {
            return Self::default();
        }
        let wholes = ledger.parts.values().filter(|part| part.part.is_whole_gpu());
        let mut gpus: Vec<_> = wholes.map(|part| (part.part.gpu_index, &part.part.gpu)).collect();
        gpus.sort();
        let pairs = joined(ledger, &gpus.into_iter().map(|(_, gpu)| vec![gpu]).collect::<Vec<_>>());
        let quads = joined(ledger, &pairs);
        Self { pairs: numbered(&pairs), quads: numbered(&quads) }
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

/// Joins two groups at a time whose GPUs all have NVLinks to those of the other, the most NVLinks first. A group without such a
/// partner is left out. The result has the order of the given groups.
fn joined<'l>(ledger: &Ledger, groups: &[Vec<&'l GpuId>]) -> Vec<Vec<&'l GpuId>> {
    let nvlinks = |a: &GpuId, b: &GpuId| ledger.links.between(a, b).map_or(0, |link| link.nvlinks);
    let between = |a: &[&GpuId], b: &[&GpuId]| -> Option<u32> {
        let each = a.iter().flat_map(|a| b.iter().map(move |b| nvlinks(a, b)));
        each.map(|links| (links > 0).then_some(links)).sum()
    };
    let mut candidates = Vec::new();
    for a in 0..groups.len() {
        for b in a + 1..groups.len() {
            candidates.extend(between(&groups[a], &groups[b]).map(|links| (links, a, b)));
        }
    }
    candidates.sort_by_key(|(links, a, b)| (std::cmp::Reverse(*links), *a, *b));
    let (mut taken, mut joined) = (BTreeSet::new(), BTreeMap::new());
    for (_, a, b) in candidates {
        if !taken.contains(&a) && !taken.contains(&b) {
            taken.extend([a, b]);
            joined.insert(a, [&groups[a][..], &groups[b][..]].concat());
        }
    }
    joined.into_values().collect()
}

fn numbered(groups: &[Vec<&GpuId>]) -> BTreeMap<GpuId, i64> {
    let gpus = (0..).zip(groups).flat_map(|(number, group)| group.iter().map(move |gpu| (*gpu, number)));
    gpus.map(|(gpu, number)| (gpu.clone(), number)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::gpu::{Inventory, Link, Links, Part, Path};
    use crate::ids::time::Now;
    use crate::node::command::Command;
    use crate::node::decide::decide;

    /// The pairs and quads of GPUs with these NVLinks, each as `PAIR:GPUS`.
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
    fn a_switch_makes_pairs_and_quads_of_neighbours() {
        let all: Vec<(u32, u32, u32)> = (0..8).flat_map(|a| (a + 1..8).map(move |b| (a, b, 18))).collect();
        let (pairs, quads) = groups(8, &all);
        assert_eq!(pairs, ["0:01", "1:23", "2:45", "3:67"]);
        assert_eq!(quads, ["0:0123", "1:4567"]);
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

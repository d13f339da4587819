//! Scores of how well two parts are connected.

use berth_policy_sdk::placement::gpu_of;
use berth_policy_sdk::{Node, Path};

/// Two parts of one GPU.
const SAME_GPU: u32 = 60;
/// Each active NVLink between two GPUs.
const NVLINK: u32 = 100;
/// NVLinks between two GPUs that count at most. Real GPUs have up to 18. A pair scores at most 6,460, and
/// the 120 pairs of 16 GPUs score less than 2^20, which the search relies on.
const NVLINKS_MAX: u32 = 64;

/// The scale of NVIDIA's device plugin.
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

/// The scores of all pairs of `n` parts. The score of a part with itself is 0.
#[derive(Clone, Debug)]
pub(crate) struct Pairs {
    n: usize,
    scores: Vec<u32>,
}

impl Pairs {
    /// Fills the table from a function of two indices below `n`, the greater one first.
    pub(crate) fn new(n: usize, score: impl Fn(usize, usize) -> u32) -> Self {
        let mut scores = vec![0; n * n];
        for a in 0..n {
            for b in 0..a {
                scores[a * n + b] = score(a, b);
                scores[b * n + a] = scores[a * n + b];
            }
        }
        Self { n, scores }
    }

    /// The scores of parts of a node. `None` for an index out of range.
    pub(crate) fn of(node: &Node, parts: &[u32]) -> Option<Self> {
        let gpus: Vec<usize> = parts.iter().map(|part| gpu_of(node, *part)).collect::<Option<_>>()?;
        // The table has the scores of GPUs by their position in `known`; instances have those of their GPU.
        let mut known = gpus.clone();
        known.sort_unstable();
        known.dedup();
        let mut place = vec![None; node.parts.len()];
        for (index, gpu) in known.iter().enumerate() {
            place[*gpu] = Some(index);
        }
        let place_of = |part: u32| gpu_of(node, part).and_then(|gpu| place[gpu]);
        let numa = |index: usize| node.parts[known[index]].numa_node;
        let mut table = Self::new(known.len(), |a, b| by_numa(numa(a), numa(b)));
        for link in &node.links {
            if let (Some(a), Some(b)) = (place_of(link.a), place_of(link.b))
                && a != b
            {
                table.set(a, b, path_score(link.path) + NVLINK * link.nvlinks.min(NVLINKS_MAX));
            }
        }
        let places: Vec<usize> = gpus.iter().filter_map(|gpu| place[*gpu]).collect();
        Some(Self::new(parts.len(), |a, b| match (places[a], places[b]) {
            (a, b) if a == b => SAME_GPU,
            (a, b) => table.get(a, b),
        }))
    }

    fn set(&mut self, a: usize, b: usize, score: u32) {
        self.scores[a * self.n + b] = score;
        self.scores[b * self.n + a] = score;
    }

    /// How many parts there are.
    pub(crate) fn len(&self) -> usize {
        self.n
    }

    /// The score of one pair.
    pub(crate) fn get(&self, a: usize, b: usize) -> u32 {
        self.scores[a * self.n + b]
    }

    /// The sum of a part's scores with all others.
    pub(crate) fn sum_of(&self, part: usize) -> u32 {
        self.scores[part * self.n..][..self.n].iter().sum()
    }

    /// The sum of the scores of all pairs of a set.
    pub(crate) fn sum(&self, set: &[usize]) -> u32 {
        let with_later = |(k, a): (usize, &usize)| set[k + 1..].iter().map(|b| self.get(*a, *b)).sum::<u32>();
        set.iter().enumerate().map(with_later).sum()
    }
}

/// The score of two GPUs whose link is unknown, by their NUMA nodes if those are known.
fn by_numa(a: Option<u32>, b: Option<u32>) -> u32 {
    match (a, b) {
        (Some(a), Some(b)) if a == b => path_score(Path::SameNuma),
        (Some(_), Some(_)) => path_score(Path::CrossNuma),
        _ => 0,
    }
}

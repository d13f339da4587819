//! The requests: reads of dashboards, scripts and operators, in a fixed mixed order.

use crate::load_admin::node::{NAMESPACES, Node};
use anyhow::{Context as _, ensure};
use serde_json::Value;

/// Slots of the order in which the reads come: a hundredth of them is 50 reads a second at 5,000.
const SLOTS: usize = 1_000;
/// How many of [`SLOTS`] each kind of read has.
const GPUS: usize = 200;
const GPU: usize = 200;
const OF_NAMESPACE: usize = 150;
const OF_GPU: usize = 50;
const ALLOCATION: usize = 120;
const NODE: usize = 100;
const STACK: usize = 80;
const DRAIN: usize = 60;
/// Twenty at a time: what a page shows.
const DECISIONS: usize = 30;
const READY: usize = 8;
/// Ten a second at 5,000: a scraper comes every 15 s, so this is 150 of them.
const METRICS: usize = 2;
/// One in so many sends the ETag of the previous response, as polling clients do.
const CONDITIONAL_EVERY: usize = 4;
/// One in so many takes gzip. No divisor of the one above, so that some do both.
const GZIP_EVERY: usize = 5;

/// One read.
#[derive(Clone)]
pub(crate) struct Read {
    /// Which of [`Mix::paths`].
    pub(crate) path: usize,
    /// With `If-None-Match`, once there is a tag.
    pub(crate) conditional: bool,
    pub(crate) gzip: bool,
}

/// All reads in their order, repeated from the start at its end.
pub(crate) struct Mix {
    pub(crate) paths: Vec<String>,
    /// The first path of each kind.
    pub(crate) kinds: Vec<usize>,
    pub(crate) order: Vec<Read>,
}

impl Mix {
    /// Of what this node has.
    pub(crate) fn of(node: &Node) -> anyhow::Result<Self> {
        let agent = node.agent()?;
        let names = |list: &Value, key: &str| -> anyhow::Result<Vec<String>> {
            let items = list["items"].as_array().context("no list")?;
            let names = items.iter().filter_map(|item| Some(item[key].as_str()?.to_owned()));
            Ok(names.collect())
        };
        let gpus = names(&node.get(&agent, "/api/v1/gpus")?, "uuid")?;
        let allocations = names(&node.get(&agent, "/api/v1/allocations?limit=1000")?, "id")?;
        ensure!(!gpus.is_empty() && !allocations.is_empty(), "the node is empty");
        let one = |path: &str| vec![path.to_owned()];
        let of = |names: &[String], path: fn(&str) -> String| names.iter().map(|name| path(name)).collect();
        let namespaces = (0..NAMESPACES).map(|n| format!("/api/v1/allocations?namespace=team-{n}"));
        let kinds: [(usize, Vec<String>); 11] = [
            (GPUS, one("/api/v1/gpus")),
            (GPU, of(&gpus, |gpu| format!("/api/v1/gpus/{gpu}"))),
            (OF_NAMESPACE, namespaces.collect()),
            (OF_GPU, of(&gpus, |gpu| format!("/api/v1/allocations?gpu={gpu}&limit=50"))),
            (ALLOCATION, of(&allocations, |id| format!("/api/v1/allocations/{id}"))),
            (NODE, one("/api/v1/node")),
            (STACK, one("/api/v1/stack")),
            (DRAIN, of(&gpus, |gpu| format!("/api/v1/gpus/{gpu}/drain"))),
            (DECISIONS, one("/api/v1/decisions?limit=20")),
            (READY, one("/readyz")),
            (METRICS, one("/metrics")),
        ];
        let (mut paths, mut firsts, mut order) = (Vec::new(), Vec::new(), Vec::with_capacity(SLOTS));
        for (slots, of_kind) in kinds {
            let first = paths.len();
            for slot in 0..slots {
                order.push(Read {
                    path: first + slot % of_kind.len(),
                    conditional: slot % CONDITIONAL_EVERY == 0,
                    gzip: slot % GZIP_EVERY == 0,
                });
            }
            firsts.push(first);
            paths.extend(of_kind);
        }
        ensure!(order.len() == SLOTS, "{} slots of {SLOTS}", order.len());
        shuffle(&mut order);
        Ok(Self { paths, kinds: firsts, order })
    }
}

/// The same order at every run: what is compared is not luck (Fisher and Yates, over a xorshift).
fn shuffle<T>(items: &mut [T]) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for last in (1..items.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let below = last as u64 + 1;
        items.swap(last, usize::try_from(state % below).unwrap_or(last));
    }
}

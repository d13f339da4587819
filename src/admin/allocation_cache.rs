//! A cache of live allocations as JSON texts. Lists of some dozens are requested repeatedly while few of them change,
//! and serializing an allocation takes most of a list's time.
//!
//! A text is valid as long as everything that it depends on is the same object in memory: the allocation, the parts
//! of its devices, and the process table. If there are processes on its GPUs, it also depends on the other holders
//! there, and is valid for one generation of the ledger only.

use berth_api::Allocation;
use berth_kernel::evidence::attribution::Attributions;
use berth_kernel::grants::allocation;
use berth_kernel::hardware::process::ProcessTable;
use berth_kernel::ids::names::{AllocationId, Resource};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::sharing::part_state::PartState;
use parking_lot::Mutex;
use serde_json::value::{RawValue, to_raw_value};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Weak};

/// Texts of ended allocations that are kept until the next cleanup: some 1 KiB each.
const ENDED_MAX: usize = 64;

/// The texts, by allocation.
#[derive(Default)]
pub(crate) struct JsonCache(Mutex<HashMap<AllocationId, Arc<Text>>>);

/// The text of an allocation, with weak references to what it depends on: these keep no object alive, only its
/// address, which no new object can have meanwhile.
pub(crate) struct Text {
    allocation: Weak<allocation::Allocation>,
    /// The parts of its devices, in their order.
    parts: Vec<Option<Weak<PartState>>>,
    processes: Weak<ProcessTable>,
    /// Set if there are processes on its GPUs.
    generation: Option<u64>,
    mps: bool,
    pub(crate) json: Box<RawValue>,
}

impl Text {
    fn of(
        owners: &Attributions<'_>,
        mps: &BTreeSet<Resource>,
        allocation: &Arc<allocation::Allocation>,
    ) -> serde_json::Result<Self> {
        let ledger = owners.ledger;
        let busy = |part: &Arc<PartState>| owners.on(&part.part.gpu).is_some_and(|all| !all.is_empty());
        // The processes on an unknown part are unknown.
        let busy = parts(ledger, allocation).any(|part| part.is_none_or(busy));
        Ok(Self {
            generation: busy.then_some(ledger.generation),
            json: to_raw_value(&Allocation::of(owners, mps, allocation))?,
            allocation: Arc::downgrade(allocation),
            parts: parts(ledger, allocation).map(|part| part.map(Arc::downgrade)).collect(),
            processes: Arc::downgrade(&ledger.processes),
            mps: mps.contains(&allocation.resource),
        })
    }

    fn is_good(
        &self,
        ledger: &Ledger,
        mps: &BTreeSet<Resource>,
        allocation: &Arc<allocation::Allocation>,
    ) -> bool {
        is(&self.allocation, allocation)
            && is(&self.processes, &ledger.processes)
            && self.generation.is_none_or(|generation| generation == ledger.generation)
            && self.mps == mps.contains(&allocation.resource)
            && parts(ledger, allocation).zip(&self.parts).all(|(now, then)| match (now, then) {
                (Some(now), Some(then)) => is(then, now),
                (None, None) => true,
                _ => false,
            })
    }
}

impl JsonCache {
    /// The texts of these allocations, in their order. `owners` is called only if one of them has to be serialized.
    ///
    /// # Errors
    /// If one cannot be serialized, which its types exclude.
    pub(crate) fn of<'l>(
        &self,
        ledger: &'l Ledger,
        mps: &BTreeSet<Resource>,
        owners: impl Fn() -> &'l Attributions<'l>,
        found: &[&Arc<allocation::Allocation>],
    ) -> serde_json::Result<Vec<Arc<Text>>> {
        let kept: Vec<Option<Arc<Text>>> = {
            let all = self.0.lock();
            let good = |a: &&Arc<allocation::Allocation>| {
                all.get(&a.id).filter(|text| text.is_good(ledger, mps, a)).cloned()
            };
            found.iter().map(good).collect()
        };
        // Outside the lock: two requests may serialize the same, and none waits.
        let mut new = Vec::new();
        let mut texts = Vec::with_capacity(found.len());
        for (allocation, kept) in found.iter().zip(kept) {
            texts.push(match kept {
                Some(text) => text,
                None => {
                    let text = Arc::new(Text::of(owners(), mps, allocation)?);
                    new.push((allocation.id, Arc::clone(&text)));
                    text
                }
            });
        }
        if !new.is_empty() {
            let mut all = self.0.lock();
            all.extend(new);
            if all.len() > ledger.live.len() + ENDED_MAX {
                all.retain(|id, _| ledger.live.contains_key(id));
            }
        }
        Ok(texts)
    }
}

/// The part of each device, if known.
fn parts<'l>(
    ledger: &'l Ledger,
    allocation: &allocation::Allocation,
) -> impl Iterator<Item = Option<&'l Arc<PartState>>> {
    allocation.devices.iter().map(|device| ledger.parts.get(&device.part))
}

fn is<T>(then: &Weak<T>, now: &Arc<T>) -> bool {
    std::ptr::eq(then.as_ptr(), Arc::as_ptr(now))
}

#[cfg(test)]
#[allow(dead_code)] // The kernel's own tests use all of it.
#[path = "../kernel/node/test_node.rs"]
mod test_node;

#[cfg(test)]
mod tests {
    use super::*;
    use test_node::{Node, of_pod, process};

    /// All live allocations, from the cache and serialized again.
    fn both(written: &JsonCache, ledger: &Ledger, mps: &BTreeSet<Resource>) -> [Vec<String>; 2] {
        let (owners, live) = (Attributions::new(ledger), ledger.live.values().collect::<Vec<_>>());
        let kept = written.of(ledger, mps, || &owners, &live).unwrap();
        let fresh = live.iter().map(|a| serde_json::to_string(&Allocation::of(&owners, mps, a)).unwrap());
        [kept.iter().map(|text| text.json.to_string()).collect(), fresh.collect()]
    }

    #[test]
    fn a_text_is_good_only_while_all_that_it_follows_from_is_the_same() {
        let (written, mut mps, mut node) = (JsonCache::default(), BTreeSet::new(), Node::new());
        node.grant("GPU-0", Some(0), "pod-a", "main");
        let other = node.grant("GPU-0", Some(1), "pod-b", "main");
        let same = |node: &Node, mps: &BTreeSet<Resource>| {
            let [kept, fresh] = both(&written, &node.ledger, mps);
            assert_eq!(kept, fresh);
            kept
        };
        node.look(&[]);
        let idle = same(&node, &mps);
        assert_eq!(same(&node, &mps), idle);
        node.look(&[("GPU-0", process(1, "GPU-0", of_pod("pod-a", "main")))]);
        let used = same(&node, &mps);
        assert_ne!(used, idle);
        // The first one itself does not change: the second one's holder becomes known, and is of the same pod.
        let live = Arc::make_mut(&mut node.ledger.live);
        Arc::make_mut(live.get_mut(&other).unwrap()).holder.pod_uid = Some("pod-a".into());
        node.ledger.generation += 1;
        assert_ne!(same(&node, &mps)[0], used[0]);
        mps.insert(node.ledger.live[&other].resource.clone());
        same(&node, &mps);
        node.ledger.parts.clear();
        same(&node, &mps);
        assert_eq!(written.0.lock().len(), 2);
    }

    #[test]
    fn texts_of_allocations_that_are_gone_are_not_kept() {
        let (written, mut node) = (JsonCache::default(), Node::new());
        for _ in 0..4 * ENDED_MAX {
            let id = node.grant("GPU-0", Some(0), "pod-a", "main");
            both(&written, &node.ledger, &BTreeSet::new());
            Arc::make_mut(&mut node.ledger.live).remove(&id);
        }
        assert!(written.0.lock().len() <= ENDED_MAX + 1);
    }
}

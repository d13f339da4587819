//! A cache of recent views. The placement and admission of a pod, each policy of the stack and the recorder usually
//! use the same snapshot, and creating its view takes longer than many policy calls.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

use super::view::{Rules, View};
use berth_kernel::ledger::Ledger;
use berth_kernel::time::Now;

/// Number of cached views: that of the newest snapshot, and those of older ones that the recorder still has to
/// process. A view has some tens of kilobytes and owns its snapshot, which shares nearly all of its memory with the
/// next one.
const VIEWS_MAX: usize = 4;

/// A view is removed while it is in use. Concurrent users do not wait, but create their own.
pub(super) struct ViewCache {
    views: Mutex<VecDeque<View>>,
    rules: Rules,
}

impl ViewCache {
    pub(super) fn new(rules: Rules) -> Self {
        Self { views: Mutex::default(), rules }
    }

    /// Calls `read` with the view of a snapshot for a policy with these parameters.
    pub(super) fn with<T>(
        &self,
        node: &Arc<Ledger>,
        now: Now,
        parameters: &str,
        read: impl FnOnce(&View) -> T,
    ) -> T {
        let cached = self.take(node, now);
        let mut view = cached.unwrap_or_else(|| View::new(node, now, &self.rules));
        view.context.parameters.clear();
        view.context.parameters.push_str(parameters);
        let result = read(&view);
        self.put(view);
        result
    }

    fn take(&self, node: &Arc<Ledger>, now: Now) -> Option<View> {
        let mut views = self.views.lock();
        let newest = views.iter().rposition(|view| view.is_current(node, now))?;
        views.remove(newest)
    }

    fn put(&self, view: View) {
        let mut views = self.views.lock();
        views.push_back(view);
        let oldest = if views.len() > VIEWS_MAX { views.pop_front() } else { None };
        // Frees the memory without the lock.
        drop(views);
        drop(oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::allocation::{Allocation, Decision, Holder};
    use berth_kernel::change::{Change, Entry};
    use berth_kernel::gpu::Part;
    use berth_kernel::names::{AllocationId, PartId, Resource};
    use std::collections::BTreeMap;

    fn at(ms: u64) -> Now {
        Now { wall_ms: 1_000_000 + ms, mono_ms: ms }
    }

    /// Two GPUs and an allocation whose ages differ in their fractions of a second.
    fn node() -> Arc<Ledger> {
        let mut node = Ledger::default();
        for (index, since_ms) in [(0, 300), (1, 1_750)] {
            let part = Part {
                id: PartId::parse(&format!("GPU-{index}")).unwrap(),
                parent: None,
                vendor: "nvidia".into(),
                model: String::new(),
                gpu_index: index,
                minor: None,
                memory_mib: 1_000,
                pci_bus: String::new(),
                numa_node: None,
                mig_enabled: false,
                mig: None,
                attributes: BTreeMap::new(),
            };
            node.apply(&Entry { at: at(since_ms), changes: vec![Change::PartFound(part)] });
        }
        let allocation = Allocation {
            id: AllocationId { store: 1, number: 1 },
            resource: Resource::parse("nvidia.com/gpu").unwrap(),
            devices: Vec::new(),
            granted_wall_ms: at(1_920).wall_ms,
            holder: Holder::default(),
            overlapped: false,
            decision: Decision::default(),
            ended: None,
        };
        node.live = Arc::new([(allocation.id, Arc::new(allocation))].into());
        Arc::new(node)
    }

    #[test]
    fn a_current_view_equals_a_new_one() {
        let node = node();
        let (mut current, mut different) = (0, 0);
        for created in (2_000..4_000).step_by(70) {
            let view = View::new(&node, at(created), &Rules::sample());
            for now in (1_000..6_000).step_by(10) {
                let same = View::new(&node, at(now), &Rules::sample()).context == view.context;
                let is_current = view.is_current(&node, at(now));
                assert!(same || !is_current, "created at {created}, current at {now}");
                // A view with the same ages is current, unless the time went back.
                assert!(is_current || !same || now < created, "created at {created}, not current at {now}");
                current += u32::from(is_current);
                different += u32::from(!same);
            }
        }
        assert!(current > 0 && different > 0, "{current} current, {different} different");
    }

    #[test]
    fn a_view_of_another_snapshot_or_time_is_not_reused() {
        let (cache, node) = (ViewCache::new(Rules::sample()), node());
        let count = || cache.views.lock().len();
        let allocations = |node: &Arc<Ledger>, now| {
            cache.with(node, now, "{}", |view| {
                assert_eq!(view.context.parameters, "{}");
                view.context.node.allocations.len()
            })
        };
        assert_eq!(allocations(&node, at(2_000)), 1);
        assert_eq!((allocations(&node, at(2_010)), count()), (1, 1), "the same view");
        let other = Arc::new(Ledger { live: Arc::default(), ..Ledger::clone(&node) });
        assert_eq!((allocations(&other, at(2_010)), count()), (0, 2));
        assert_eq!(
            (allocations(&node, Now { wall_ms: 0, ..at(2_010) }), count()),
            (1, 3),
            "the wall clock jumped"
        );
        for _ in 0..2 * VIEWS_MAX {
            assert_eq!(allocations(&Arc::new(Ledger::clone(&other)), at(2_010)), 0);
        }
        assert_eq!(count(), VIEWS_MAX);
    }

    #[test]
    fn concurrent_users_have_their_own_parameters() {
        let (cache, node) = (ViewCache::new(Rules::sample()), node());
        cache.with(&node, at(2_000), "first", |first| {
            cache.with(&node, at(2_000), "second", |second| {
                let parameters = (first.context.parameters.as_str(), second.context.parameters.as_str());
                assert_eq!(parameters, ("first", "second"));
            });
        });
    }
}

//! Views made lately: a pod's placement, its admission, each policy of the stack and the record of decisions
//! mostly look at one and the same snapshot, and to show it takes longer than many a policy's answer.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

use super::view::{Rules, View};
use berth_kernel::ledger::Ledger;
use berth_kernel::time::Now;

/// So many are kept: the newest snapshot's, and what the recorder is behind by. Each is some tens of
/// kilobytes, and holds its snapshot, which shares nearly all of the next one's memory.
const KEPT: usize = 4;

/// Nobody waits for another's call: who finds no view to have alone makes one.
pub(super) struct Views {
    kept: Mutex<VecDeque<View>>,
    rules: Rules,
}

impl Views {
    pub(super) fn new(rules: Rules) -> Self {
        Self { kept: Mutex::default(), rules }
    }

    /// Hands over what a policy with these parameters is shown of a snapshot.
    pub(super) fn with<T>(
        &self,
        node: &Arc<Ledger>,
        now: Now,
        parameters: &str,
        look: impl FnOnce(&View) -> T,
    ) -> T {
        let known = self.take(node, now);
        let mut view = known.unwrap_or_else(|| View::new(node, now, &self.rules));
        view.context.parameters.clear();
        view.context.parameters.push_str(parameters);
        let seen = look(&view);
        self.keep(view);
        seen
    }

    fn take(&self, node: &Arc<Ledger>, now: Now) -> Option<View> {
        let mut kept = self.kept.lock();
        let newest_first = kept.iter().rposition(|view| view.shows(node, now))?;
        kept.remove(newest_first)
    }

    fn keep(&self, view: View) {
        let mut kept = self.kept.lock();
        kept.push_back(view);
        let oldest = if kept.len() > KEPT { kept.pop_front() } else { None };
        // Its memory is given back without the lock.
        drop(kept);
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

    /// Two GPUs, idle since other fractions of a second, and an allocation of a third fraction.
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
    fn a_view_that_is_used_again_says_what_a_new_one_would() {
        let node = node();
        let (mut again, mut anew) = (0, 0);
        for made in (2_000..4_000).step_by(70) {
            let view = View::new(&node, at(made), &Rules::sample());
            for now in (1_000..6_000).step_by(10) {
                let same = View::new(&node, at(now), &Rules::sample()).context == view.context;
                let used = view.shows(&node, at(now));
                assert!(same || !used, "made at {made}, used at {now}");
                // Where ages have not grown yet it is used, unless time went back.
                assert!(used || !same || now < made, "made at {made}, not used at {now}");
                again += u32::from(used);
                anew += u32::from(!same);
            }
        }
        assert!(again > 0 && anew > 0, "{again} used again, {anew} would differ");
    }

    #[test]
    fn of_another_snapshot_or_moment_no_view_is_lent() {
        let (views, node) = (Views::new(Rules::sample()), node());
        let kept = || views.kept.lock().len();
        let allocations = |node: &Arc<Ledger>, now| {
            views.with(node, now, "{}", |view| {
                assert_eq!(view.context.parameters, "{}");
                view.context.node.allocations.len()
            })
        };
        assert_eq!(allocations(&node, at(2_000)), 1);
        assert_eq!((allocations(&node, at(2_010)), kept()), (1, 1), "the same one");
        let other = Arc::new(Ledger { live: Arc::default(), ..Ledger::clone(&node) });
        assert_eq!((allocations(&other, at(2_010)), kept()), (0, 2));
        assert_eq!(
            (allocations(&node, Now { wall_ms: 0, ..at(2_010) }), kept()),
            (1, 3),
            "a clock that jumped"
        );
        for _ in 0..2 * KEPT {
            assert_eq!(allocations(&Arc::new(Ledger::clone(&other)), at(2_010)), 0);
        }
        assert_eq!(kept(), KEPT);
    }

    #[test]
    fn two_who_look_at_once_see_their_own_parameters() {
        let (views, node) = (Views::new(Rules::sample()), node());
        views.with(&node, at(2_000), "first", |first| {
            views.with(&node, at(2_000), "second", |second| {
                let seen = (first.context.parameters.as_str(), second.context.parameters.as_str());
                assert_eq!(seen, ("first", "second"));
            });
        });
    }
}

//! Differences between `List` and the ledger, and how often they cause a reconcile pass.

use berth_kernel::evidence::kubelet_view::{ListedHolding, PodList};
use berth_kernel::evidence::pods::PodState;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::sharing::part_state::Device;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Passes about one dispute before they become rarer. Two that are far enough apart end an allocation,
/// but not within 30 s of Berth's reply or the kubelet's start: with 5 s between passes, by the sixth to
/// eighth pass.
const EAGER_PASSES: u32 = 8;

/// The open disputes, each with the number of passes that ran while it was open.
#[derive(Debug, Default)]
pub(super) struct Disputes(BTreeMap<String, u32>);

impl Disputes {
    /// Removes disputes that are settled and adds new ones.
    pub(super) fn update(&mut self, ledger: &Ledger, list: Option<&PodList>) {
        // A failed `List` settles no dispute.
        let Some(list) = list else {
            return;
        };
        let disputed = find_disputes(ledger, list);
        self.0.retain(|dispute, _| disputed.contains(dispute));
        for dispute in disputed {
            self.0.entry(dispute).or_insert(0);
        }
    }

    /// Whether a pass is due `since` after the last one. `min_gap`: the time between two passes that end
    /// an allocation. `max_wait`: the longest wait for any dispute.
    ///
    /// A dispute can be open for hours (a pod in its init phase), and every pass makes the kubelet write
    /// its checkpoint. So the waits for a dispute that a few passes did not settle double.
    pub(super) fn is_pass_due(&self, since: Duration, min_gap: Duration, max_wait: Duration) -> bool {
        self.0.values().any(|passes| match passes.checked_sub(EAGER_PASSES) {
            _ if *passes == 0 => true,
            None => since >= min_gap,
            Some(more) => since >= min_gap.saturating_mul(2_u32.saturating_pow(more + 1)).min(max_wait),
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Counts a pass for every open dispute.
    pub(super) fn count_pass(&mut self) {
        for passes in self.0.values_mut() {
            *passes = passes.saturating_add(1);
        }
    }
}

/// The current disputes: ids of allocations, and containers that hold devices without an allocation.
fn find_disputes(ledger: &Ledger, list: &PodList) -> BTreeSet<String> {
    let mut disputed = BTreeSet::new();
    for allocation in ledger.live.values() {
        let holder = &allocation.holder;
        let is_unlisted = match (&holder.namespace, &holder.pod) {
            // A later pod of the same name, as of a StatefulSet, has other devices or none.
            (Some(namespace), Some(pod)) => {
                let holds = |held: &&ListedHolding| (&held.namespace, &held.pod) == (namespace, pod);
                let mut of_pod = list.held.iter().filter(holds);
                !of_pod.any(|held| {
                    held.resource == allocation.resource
                        && held.devices.iter().any(|id| allocation.devices.contains(id))
                })
            }
            // The pod is in its init phase, or the kubelet rejected it after Allocate. `List` contains
            // neither; only a full pass distinguishes them.
            _ => true,
        };
        if is_unlisted || allocation.overlapped {
            disputed.insert(allocation.id.to_string());
        }
        // A dispute of its own, even if the allocation is disputed already: a pass settles it.
        if matches!(ledger.pod_state_of(allocation), PodState::Over | PodState::Gone) {
            disputed.insert(format!("{} is over", allocation.id));
        }
    }
    for held in &list.held {
        let is_recorded =
            held.devices.iter().all(|id| ledger.device(&held.resource, id).is_some_and(Device::held));
        if !is_recorded {
            disputed.insert(format!("{}/{}/{}", held.namespace, held.pod, held.container));
        }
    }
    disputed
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIN_GAP: Duration = Duration::from_secs(5);
    const MAX_WAIT: Duration = Duration::from_secs(60);

    /// The waits in seconds before the first `passes` passes about one dispute.
    fn waits(passes: usize) -> Vec<u64> {
        let mut disputes = Disputes(BTreeMap::from([("a".into(), 0)]));
        let mut waits = Vec::new();
        for _ in 0..passes {
            let is_due = |s: &u64| disputes.is_pass_due(Duration::from_secs(*s), MIN_GAP, MAX_WAIT);
            waits.push((0..=1000).find(is_due).unwrap());
            disputes.count_pass();
        }
        waits
    }

    #[test]
    fn the_waits_for_an_unsettled_dispute_grow() {
        assert_eq!(waits(12), [0, 5, 5, 5, 5, 5, 5, 5, 10, 20, 40, 60]);
    }

    #[test]
    fn a_new_dispute_does_not_wait_for_the_old_ones() {
        let mut disputes = Disputes(BTreeMap::from([("old".into(), 20)]));
        assert!(!disputes.is_pass_due(Duration::ZERO, MIN_GAP, MAX_WAIT));
        disputes.0.insert("new".into(), 0);
        assert!(disputes.is_pass_due(Duration::ZERO, MIN_GAP, MAX_WAIT));
    }

    #[test]
    fn no_pass_is_due_without_an_open_dispute() {
        let mut disputes = Disputes(BTreeMap::from([("a".into(), 0)]));
        disputes.update(&Ledger::default(), None);
        assert!(disputes.is_pass_due(MAX_WAIT, MIN_GAP, MAX_WAIT), "a list that failed settles nothing");
        disputes.update(&Ledger::default(), Some(&PodList::default()));
        assert!(!disputes.is_pass_due(MAX_WAIT, MIN_GAP, MAX_WAIT));
    }
}

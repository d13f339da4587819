//! What `List` and the ledger see differently, and how often that is worth a round.

use berth_kernel::ledger::Ledger;
use berth_kernel::part_state::Device;
use berth_kernel::pods::Fate;
use berth_kernel::reconcile::PodList;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Rounds about one dispute before they become rarer. Two that are far enough apart end an
/// allocation, but not sooner than 30 s after our reply or the kubelet's start: with 5 s between
/// rounds that is at most the sixth to eighth.
const EAGER_ROUNDS: u32 = 8;

/// The open disputes, each with the number of rounds that were taken while it was open.
#[derive(Debug, Default)]
pub(super) struct Disputes(BTreeMap<String, u32>);

impl Disputes {
    /// Forgets what `List` and the ledger agree on by now, and takes up what is new.
    pub(super) fn look(&mut self, ledger: &Ledger, list: Option<&PodList>) {
        // Of what could not be asked nothing is settled.
        let Some(list) = list else {
            return;
        };
        let found = found(ledger, list);
        self.0.retain(|dispute, _| found.contains(dispute));
        for dispute in found {
            self.0.entry(dispute).or_insert(0);
        }
    }

    /// Whether a round is due, so long after the last one. `apart`: what two rounds that end an
    /// allocation must lie apart. `at_most`: the wait that no dispute exceeds.
    ///
    /// A dispute can be open for hours (a pod in its init phase), and every round makes the
    /// kubelet write its checkpoint: what a few rounds did not settle is asked about ever less
    /// often.
    pub(super) fn due(&self, since: Duration, apart: Duration, at_most: Duration) -> bool {
        self.0.values().any(|rounds| match rounds.checked_sub(EAGER_ROUNDS) {
            _ if *rounds == 0 => true,
            None => since >= apart,
            Some(more) => since >= apart.saturating_mul(2_u32.saturating_pow(more + 1)).min(at_most),
        })
    }

    /// A round was taken about all that are open.
    pub(super) fn asked(&mut self) {
        for rounds in self.0.values_mut() {
            *rounds = rounds.saturating_add(1);
        }
    }
}

/// Each in a word of its own: an allocation's id, or the container that holds what nobody recorded.
fn found(ledger: &Ledger, list: &PodList) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for allocation in ledger.live.values() {
        let holder = &allocation.holder;
        let gone = match (&holder.namespace, &holder.pod) {
            (Some(namespace), Some(pod)) => !list.pods.contains(&(namespace.clone(), pod.clone())),
            // A pod in its init phase, or one that the kubelet refused after it had our answer:
            // `List` shows neither, and only a round tells one from the other.
            _ => true,
        };
        if gone || allocation.overlapped {
            found.insert(allocation.id.to_string());
        }
        // However long its id was in dispute before: this is news, and a round settles it.
        if matches!(ledger.fate_of(allocation), Fate::Over | Fate::Gone) {
            found.insert(format!("{} is over", allocation.id));
        }
    }
    for held in &list.held {
        let known = held.devices.iter().all(|id| ledger.device(&held.resource, id).is_some_and(Device::held));
        if !known {
            found.insert(format!("{}/{}/{}", held.namespace, held.pod, held.container));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const APART: Duration = Duration::from_secs(5);
    const AT_MOST: Duration = Duration::from_secs(60);

    /// The waits before the first so many rounds about one dispute.
    fn waits(rounds: usize) -> Vec<u64> {
        let mut disputes = Disputes(BTreeMap::from([("a".into(), 0)]));
        let mut waits = Vec::new();
        for _ in 0..rounds {
            let due = |s: &u64| disputes.due(Duration::from_secs(*s), APART, AT_MOST);
            waits.push((0..=1000).find(due).unwrap());
            disputes.asked();
        }
        waits
    }

    #[test]
    fn what_rounds_do_not_settle_is_asked_about_ever_less_often() {
        assert_eq!(waits(12), [0, 5, 5, 5, 5, 5, 5, 5, 10, 20, 40, 60]);
    }

    #[test]
    fn a_new_dispute_does_not_wait_for_the_old_ones() {
        let mut disputes = Disputes(BTreeMap::from([("old".into(), 20)]));
        assert!(!disputes.due(Duration::ZERO, APART, AT_MOST));
        disputes.0.insert("new".into(), 0);
        assert!(disputes.due(Duration::ZERO, APART, AT_MOST));
    }

    #[test]
    fn nothing_open_asks_for_no_round() {
        let mut disputes = Disputes(BTreeMap::from([("a".into(), 0)]));
        disputes.look(&Ledger::default(), None);
        assert!(disputes.due(AT_MOST, APART, AT_MOST), "a list that failed settles nothing");
        disputes.look(&Ledger::default(), Some(&PodList::default()));
        assert!(!disputes.due(AT_MOST, APART, AT_MOST));
    }
}

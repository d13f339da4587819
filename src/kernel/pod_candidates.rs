//! Pods that may request devices next.

use super::ledger::Ledger;
use super::names::Resource;
use super::pods::{Pod, Stage};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Most candidates of one request that policies see; more pods than a kubelet starts at one moment.
pub const CANDIDATES_MAX: usize = 64;

/// A pod's container that an Allocate may be for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The pod.
    pub pod: Arc<Pod>,
    /// The container's name.
    pub container: String,
}

/// Containers that an Allocate of `count` devices of `resource` may be for, since Allocate names no pod.
/// The actual container may be missing, as the kubelet may receive its pod before the source of this view
/// shows it. Empty without a current view of pods.
#[must_use]
pub fn candidates(ledger: &Ledger, resource: &Resource, count: usize) -> Vec<Candidate> {
    let Some(view) = ledger.pods.as_ref().filter(|view| view.current) else {
        return Vec::new();
    };
    let served: BTreeSet<(&str, &str)> = ledger
        .live
        .values()
        .filter(|a| a.resource == *resource)
        .filter_map(|a| Some((a.holder.pod_uid.as_deref()?, a.holder.container.as_deref()?)))
        .collect();
    let mut found = Vec::new();
    for pod in view.pods.values().filter(|pod| pod.stage == Stage::Waiting) {
        for container in &pod.containers {
            let matches = container
                .requests
                .iter()
                .any(|(name, n)| name == resource && usize::try_from(*n).is_ok_and(|n| n == count));
            if matches && !served.contains(&(pod.uid.as_str(), container.name.as_str())) {
                found.push(Candidate { pod: Arc::clone(pod), container: container.name.clone() });
            }
        }
        if found.len() >= CANDIDATES_MAX {
            break;
        }
    }
    found.truncate(CANDIDATES_MAX);
    found
}

#[cfg(test)]
mod tests {
    use super::super::pods::PodsView;
    use super::super::pods::tests::{pod, resource, view};
    use super::super::time::Now;
    use super::*;

    #[test]
    fn candidates_wait_request_that_count_and_hold_nothing_yet() {
        let mut ledger = Ledger::default();
        assert!(candidates(&ledger, &resource(), 1).is_empty(), "no source");
        let pods = [
            pod("waits", Stage::Waiting, 1),
            pod("more", Stage::Waiting, 2),
            pod("runs", Stage::Admitted, 1),
        ];
        ledger.pods = Some(Arc::new(view(&pods)));
        let uids = |ledger: &Ledger, n| -> Vec<String> {
            candidates(ledger, &resource(), n).into_iter().map(|c| c.pod.uid.clone()).collect()
        };
        assert_eq!(uids(&ledger, 1), ["waits"]);
        assert_eq!(uids(&ledger, 2), ["more"]);
        let mut served = super::super::allocation::Allocation {
            id: super::super::names::AllocationId { store: 0, number: 1 },
            resource: resource(),
            devices: Vec::new(),
            granted_wall_ms: 0,
            holder: super::super::allocation::Holder::default(),
            overlapped: false,
            decision: super::super::allocation::Decision::default(),
            ended: None,
        };
        served.holder.pod_uid = Some("waits".into());
        served.holder.container = Some("main".into());
        let change = super::super::change::Change::Granted(served);
        let entry = super::super::change::Entry { at: Now::default(), changes: vec![change] };
        ledger.apply(&entry);
        assert!(uids(&ledger, 1).is_empty(), "it has an allocation already");
        let disconnected = PodsView { current: false, ..view(&pods) };
        ledger.pods = Some(Arc::new(disconnected));
        assert!(uids(&ledger, 2).is_empty(), "a disconnected source gives no candidates");
    }
}

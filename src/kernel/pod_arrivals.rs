//! Whether the kubelet's next Allocate may be for a pod that has just appeared. Views with such a pod are
//! submitted without delay: the kubelet sees a pod at the same moment as Berth, and its Allocate may
//! follow within milliseconds.

use super::ledger::Ledger;
use super::pods::{Pod, Stage};

/// Most views submitted without delay within one second. The kubelet admits pods one after another and
/// starts no more than that. In a burst, the remaining views are batched like other changes: for 100 ms
/// from the API server, for 50 ms from the kubelet. So pods cost the keeper at most 20 + 10 commands a
/// second from the one source and 20 + 20 from the other, however many there are.
pub const IMMEDIATE_VIEWS_PER_SECOND_MAX: u32 = 20;

/// Whether `pod` waits for devices of any kind and its previous version `known` did not.
#[must_use]
pub fn is_newly_waiting(pod: &Pod, known: Option<&Pod>) -> bool {
    pod.stage == Stage::Waiting
        && pod.containers.iter().any(|container| !container.requests.is_empty())
        && known.is_none_or(|known| known.stage != Stage::Waiting || known.containers != pod.containers)
}

/// Whether a pod requests a resource with a listed device. The kubelet sends Berth no Allocate for others.
#[must_use]
pub fn requests_listed_resource(pod: &Pod, ledger: &Ledger) -> bool {
    let is_listed =
        |resource| ledger.parts.values().any(|part| part.devices.keys().any(|(name, _)| name == resource));
    pod.containers.iter().flat_map(|container| &container.requests).any(|(resource, _)| is_listed(resource))
}

/// Rate limiter of the views that are submitted without delay.
#[derive(Debug, Default)]
pub struct ImmediateViewLimiter {
    second_mono_ms: Option<u64>,
    taken: u32,
}

impl ImmediateViewLimiter {
    /// Whether one more view may be submitted without delay; if so, it is counted.
    pub fn try_acquire(&mut self, now_mono_ms: u64) -> bool {
        if self.second_mono_ms.is_none_or(|start| now_mono_ms.saturating_sub(start) >= 1_000) {
            (self.second_mono_ms, self.taken) = (Some(now_mono_ms), 0);
        }
        let allowed = self.taken < IMMEDIATE_VIEWS_PER_SECOND_MAX;
        self.taken += u32::from(allowed);
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Resource;
    use crate::pods::PodContainer;

    fn pod(stage: Stage, asks: &[(&str, u32)]) -> Pod {
        let requests = asks.iter().map(|(name, n)| (Resource::parse(name).unwrap(), *n)).collect();
        Pod {
            uid: "u-1".into(),
            namespace: "team".into(),
            name: "p".into(),
            labels: Vec::new(),
            is_static: false,
            is_of_daemon_set: false,
            stage,
            deletion_wall_ms: None,
            created_wall_ms: 0,
            containers: vec![PodContainer { name: "main".into(), requests }],
            bypass: None,
        }
    }

    #[test]
    fn a_pod_starts_waiting_when_it_appears_and_when_its_requests_change() {
        let (one, two) = ([("nvidia.com/gpu", 1)], [("nvidia.com/gpu", 2)]);
        let waiting = pod(Stage::Waiting, &one);
        assert!(is_newly_waiting(&waiting, None));
        assert!(is_newly_waiting(&waiting, Some(&pod(Stage::Waiting, &two))));
        let labelled = Pod { labels: vec![("a".into(), "b".into())], ..waiting.clone() };
        assert!(
            !is_newly_waiting(&labelled, Some(&waiting)),
            "other changes of a waiting pod are not urgent"
        );
        assert!(!is_newly_waiting(&pod(Stage::Admitted, &one), None));
        assert!(!is_newly_waiting(&pod(Stage::Waiting, &[]), None));
    }

    #[test]
    fn a_burst_of_pods_is_limited_per_second() {
        let mut limiter = ImmediateViewLimiter::default();
        let taken = |limiter: &mut ImmediateViewLimiter, from: u64, to: u64| {
            (from..to).filter(|ms| limiter.try_acquire(*ms)).count()
        };
        assert_eq!(taken(&mut limiter, 5_000, 6_000), IMMEDIATE_VIEWS_PER_SECOND_MAX as usize);
        assert_eq!(taken(&mut limiter, 6_000, 6_999), IMMEDIATE_VIEWS_PER_SECOND_MAX as usize);
    }
}

//! Pods that may request devices next.

use crate::evidence::pods::{Pod, Stage};
use crate::ids::names::Resource;
use crate::node::ledger::Ledger;
use crate::policy::hooks::{AdmitRequest, Hook};
use crate::policy::version::PolicyVersion;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Most candidates of one request that policies see; more pods than a kubelet starts at one moment.
pub const CANDIDATES_MAX: usize = 64;

/// The shipped policies whose answers depend on the candidates, which a test compares with their sources.
pub const SHIPPED_WITH_RULES_ABOUT_PODS: [&str; 1] = ["quota"];

/// A pod's container that a request may be for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The pod.
    pub pod: Arc<Pod>,
    /// The container's name; empty for a claim, whose containers no source shows.
    pub container: String,
}

/// Whether the ledger has a view of pods in which candidates can be found.
#[must_use]
pub fn has_source(ledger: &Ledger) -> bool {
    ledger.pods.as_ref().is_some_and(|view| view.current)
}

/// Whether the answers of a policy's hook may depend on the candidates. The contract does not tell, so this is known
/// only of shipped policies; any other policy gets the candidates in each call of `place` and `admit`, and may have a
/// rule about them.
#[must_use]
pub fn may_have_rules_about_pods(version: &PolicyVersion, hook: Hook) -> bool {
    let gets_candidates = matches!(hook, Hook::Place | Hook::Admit) && version.hooks.contains(&hook);
    let is_known = version.shipped || version.origin.once_shipped;
    gets_candidates && (!is_known || SHIPPED_WITH_RULES_ABOUT_PODS.contains(&version.name.as_str()))
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

/// Containers that these devices may be for: those that an Allocate may be for, or else the pods that the claim is
/// reserved for. Empty without a current view of pods.
#[must_use]
pub fn candidates_of(ledger: &Ledger, request: &AdmitRequest) -> Vec<Candidate> {
    let Some(claim) = &request.claim else {
        return candidates(ledger, &request.resource, request.devices.len());
    };
    let Some(view) = ledger.pods.as_ref().filter(|view| view.current) else {
        return Vec::new();
    };
    let pods = claim.pods.iter().filter_map(|pod| view.pods.get(&pod.uid));
    pods.map(|pod| Candidate { pod: Arc::clone(pod), container: String::new() }).collect()
}

/// Most views submitted without delay within one second. The kubelet admits pods one after another and
/// starts no more than that. In a burst, the remaining views are batched like other changes: for 100 ms
/// from the API server, for 50 ms from the kubelet. So pods cost the keeper at most 20 + 10 commands a
/// second from the one source and 20 + 20 from the other, however many there are.
pub const IMMEDIATE_VIEWS_PER_SECOND_MAX: u32 = 20;

/// Whether `pod` waits for devices of any kind and its previous version `known` did not. The kubelet's next Allocate
/// may be for such a pod. Views with one are submitted without delay: the kubelet sees a pod at the same moment as
/// Berth, and its Allocate may follow within milliseconds.
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
    use crate::evidence::pods::PodsView;
    use crate::evidence::pods::tests::{pod, resource, view};
    use crate::grants::allocation::{Allocation, Decision, GrantOrigin, Holder};
    use crate::ids::names::AllocationId;
    use crate::ids::time::Now;
    use crate::node::change::{Change, Entry};

    #[test]
    fn candidates_wait_request_that_count_and_hold_nothing_yet() {
        let mut ledger = Ledger::default();
        assert!(candidates(&ledger, &resource(), 1).is_empty() && !has_source(&ledger), "no source");
        let pods = [
            pod("waits", Stage::Waiting, 1),
            pod("more", Stage::Waiting, 2),
            pod("runs", Stage::Admitted, 1),
        ];
        ledger.pods = Some(Arc::new(view(&pods)));
        let uids = |ledger: &Ledger, n| -> Vec<String> {
            candidates(ledger, &resource(), n).into_iter().map(|c| c.pod.uid.clone()).collect()
        };
        assert!(has_source(&ledger));
        assert_eq!(uids(&ledger, 1), ["waits"]);
        assert_eq!(uids(&ledger, 2), ["more"]);
        let served = Allocation {
            id: AllocationId { store: 0, number: 1 },
            resource: resource(),
            devices: Vec::new(),
            granted_wall_ms: 0,
            origin: GrantOrigin::DevicePlugin,
            holder: Holder {
                pod_uid: Some("waits".into()),
                container: Some("main".into()),
                ..Holder::default()
            },
            overlapped: false,
            decision: Decision::default(),
            ended: None,
        };
        ledger.apply(&Entry { at: Now::default(), changes: vec![Change::Granted(served)] });
        assert!(uids(&ledger, 1).is_empty(), "it has an allocation already");
        let disconnected = PodsView { current: false, ..view(&pods) };
        ledger.pods = Some(Arc::new(disconnected));
        assert!(uids(&ledger, 2).is_empty(), "a disconnected source gives no candidates");
        assert!(!has_source(&ledger));
    }

    #[test]
    fn a_policy_may_have_rules_about_pods_unless_it_is_shipped_without_them() {
        use crate::ids::names::Digest;
        use crate::policy::version::Origin;
        let digest = Digest::parse(&"a".repeat(64)).unwrap();
        let version = |name: &str, hooks: &[Hook], shipped, once_shipped| PolicyVersion {
            name: name.into(),
            version: "1.0.0".into(),
            summary: String::new(),
            hooks: hooks.to_vec(),
            parameters_schema: "{}".into(),
            digest: digest.clone(),
            artifact: digest.clone(),
            bytes: 0,
            shipped,
            since_wall_ms: 0,
            origin: Origin { once_shipped, ..Origin::default() },
        };
        let both = [Hook::Place, Hook::Admit];
        for (version, may) in [
            (version("quota", &[Hook::Admit], true, false), [false, true]),
            (version("quota", &[Hook::Admit], false, true), [false, true]),
            (version("memory", &both, true, false), [false, false]),
            (version("memory", &both, false, true), [false, false]),
            (version("memory", &both, false, false), [true, true]),
            (version("own", &[Hook::Place, Hook::Offer], false, false), [true, false]),
            (version("own", &[Hook::Offer, Hook::Triage], false, false), [false, false]),
        ] {
            assert_eq!(both.map(|hook| may_have_rules_about_pods(&version, hook)), may, "{version:?}");
            assert!(!may_have_rules_about_pods(&version, Hook::Offer), "no candidates: {version:?}");
        }
    }

    #[test]
    fn a_pod_starts_waiting_when_it_appears_and_when_its_requests_change() {
        let waiting = pod("u-1", Stage::Waiting, 1);
        assert!(is_newly_waiting(&waiting, None));
        assert!(is_newly_waiting(&waiting, Some(&pod("u-1", Stage::Waiting, 2))));
        let labelled = Pod { labels: vec![("a".into(), "b".into())], ..Pod::clone(&waiting) };
        assert!(
            !is_newly_waiting(&labelled, Some(&waiting)),
            "other changes of a waiting pod are not urgent"
        );
        assert!(!is_newly_waiting(&pod("u-1", Stage::Admitted, 1), None));
        let mut requests_nothing = Pod::clone(&waiting);
        requests_nothing.containers[0].requests.clear();
        assert!(!is_newly_waiting(&requests_nothing, None));
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

//! What the stand-in kubelet believes: the truth that the API is held against.

use kubelet_standin::{Kubelet, Phase};
use std::collections::{BTreeMap, BTreeSet};

/// What Berth's environment variables begin with; the id is the value.
const ID_VARIABLE: &str = "BERTH_ALLOCATION_ID_";

/// One container's grant of one resource, answered with success, of a pod that lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The pod's name.
    pub pod: String,
    /// The pod's UID.
    pub uid: String,
    /// The requested resource.
    pub resource: String,
    /// Ids of its devices.
    pub devices: BTreeSet<String>,
}

/// Every grant of a pod that lives, by allocation id.
#[must_use]
pub fn grants(kubelet: &Kubelet) -> BTreeMap<String, Grant> {
    let pods = kubelet.pods();
    let live = pods.iter().filter(|(_, pod)| matches!(pod.phase, Phase::Pending | Phase::Running));
    live.flat_map(|(uid, _)| of_pod(kubelet, uid)).collect()
}

/// What the kubelet has cached for one pod, whether it lives or failed half-way.
#[must_use]
pub fn of_pod(kubelet: &Kubelet, uid: &str) -> BTreeMap<String, Grant> {
    let mut found = BTreeMap::new();
    let Some(pod) = kubelet.pod(uid) else { return found };
    for container in pod.spec.init_containers.iter().chain(&pod.spec.containers) {
        let Some(view) = kubelet.view(uid, &container.name) else { continue };
        for (resource, devices) in view.held {
            let variable = format!("{ID_VARIABLE}{}", in_capitals(&resource));
            // A grant without its id would be a loss as well: it is searched under this name.
            let id = view.envs.get(&variable).cloned().unwrap_or_else(|| format!("no id: {uid}"));
            let grant = Grant { pod: pod.spec.name.clone(), uid: uid.to_owned(), resource, devices };
            found.insert(id, grant);
        }
    }
    found
}

fn in_capitals(resource: &str) -> String {
    let letter = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
    resource.chars().map(letter).collect()
}

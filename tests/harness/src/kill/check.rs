//! The API's list against what the stand-in kubelet believes.

use super::believed::Grant;
use super::process::Listed;
use super::tally::Wrong;
use std::collections::{BTreeMap, BTreeSet};

/// What is remembered from round to round.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// Ids that the kubelet was sent at any time.
    heard: BTreeSet<String>,
    /// Ids that no kubelet was sent: the process died between record and response.
    unheard: BTreeSet<String>,
    /// Ids that were live and then were not.
    ended: BTreeSet<String>,
    /// Ids in the last list.
    listed: BTreeSet<String>,
    /// Allocates that failed since the last list: each may have left a record.
    failed: usize,
    /// Answers with success, ever.
    pub(crate) granted: u64,
}

impl Memory {
    /// A pod was admitted: these are its allocations.
    pub(crate) fn hear(&mut self, ids: impl IntoIterator<Item = String>) -> Vec<Wrong> {
        let mut wrong = Vec::new();
        for id in ids {
            self.granted += 1;
            if self.listed.contains(&id) || self.ended.contains(&id) || !self.heard.insert(id.clone()) {
                wrong.push(Wrong::Mismatch(format!("the id {id} was given twice")));
            }
        }
        wrong
    }

    /// A pod was not admitted: so many Allocates may have been made for it, and these were answered,
    /// for its first containers.
    pub(crate) fn fail(&mut self, allocates: usize, answered: impl IntoIterator<Item = String>) {
        self.failed += allocates;
        self.heard.extend(answered);
    }

    /// The list after a restart, while nothing is admitted.
    pub(crate) fn check(&mut self, grants: &BTreeMap<String, Grant>, list: &[Listed]) -> Vec<Wrong> {
        let mut wrong = kept(grants, list);
        wrong.extend(doubles_of_kubelet(grants));
        wrong.extend(doubles_of_list(list));
        let listed: BTreeSet<String> = list.iter().map(|a| a.id.clone()).collect();
        for allocation in list.iter().filter(|a| !grants.contains_key(&a.id)) {
            wrong.extend(self.explain(allocation));
        }
        self.failed = 0;
        self.ended.extend(self.listed.difference(&listed).cloned());
        self.listed = listed;
        wrong
    }

    /// Why an allocation is listed that no living pod has: its pod ended and no two rounds have
    /// shown it yet, or its Allocate was never answered.
    fn explain(&mut self, allocation: &Listed) -> Option<Wrong> {
        let Listed { id, resource, devices, .. } = allocation;
        if self.ended.contains(id) {
            return Some(Wrong::Mismatch(format!("{id} had ended and is live again")));
        }
        if self.heard.contains(id) || self.unheard.contains(id) {
            return None;
        }
        if self.failed == 0 {
            return Some(Wrong::Mismatch(format!(
                "{id} ({devices:?} of {resource}) was not requested by a pod"
            )));
        }
        self.failed -= 1;
        self.unheard.insert(id.clone());
        allocation
            .holder
            .as_ref()
            .map(|h| Wrong::Mismatch(format!("{id} was not sent to a kubelet, and has the holder {h:?}")))
    }

    /// How many grants were recorded and never answered.
    pub(crate) fn unheard(&self) -> usize {
        self.unheard.len()
    }
}

/// Every acknowledged grant is a live allocation with the right devices.
fn kept(grants: &BTreeMap<String, Grant>, list: &[Listed]) -> Vec<Wrong> {
    let mut wrong = Vec::new();
    for (id, grant) in grants {
        let Some(found) = list.iter().find(|a| a.id == *id) else {
            wrong.push(Wrong::Lost(format!("{id} of pod {}: {:?}", grant.pod, grant.devices)));
            continue;
        };
        let devices: BTreeSet<String> = found.devices.iter().cloned().collect();
        if devices != grant.devices || found.resource != grant.resource {
            wrong.push(Wrong::Lost(format!(
                "{id} of pod {} is {devices:?} of {} now, and was {:?} of {}",
                grant.pod, found.resource, grant.devices, grant.resource
            )));
        }
        let holder = found.holder.as_ref();
        let other = |shown: Option<&String>, true_one: &String| shown.is_some_and(|s| s != true_one);
        if other(holder.and_then(|h| h.pod.as_ref()), &grant.pod)
            || other(holder.and_then(|h| h.pod_uid.as_ref()), &grant.uid)
        {
            wrong.push(Wrong::Mismatch(format!("{id} of pod {} is shown as held by {holder:?}", grant.pod)));
        }
    }
    wrong
}

/// The GPU of a device id: a share is `<uuid>::<n>`.
fn gpu(device: &str) -> &str {
    device.split("::").next().unwrap_or(device)
}

/// No two living pods share a device, and a whole GPU is not shared.
fn doubles_of_kubelet(grants: &BTreeMap<String, Grant>) -> Vec<Wrong> {
    let held: Vec<(&str, &Grant)> =
        grants.values().flat_map(|g| g.devices.iter().map(move |d| (d.as_str(), g))).collect();
    let mut wrong = Vec::new();
    for (i, (device, grant)) in held.iter().enumerate() {
        for (other_device, other) in &held[i + 1..] {
            let whole = !device.contains("::") || !other_device.contains("::");
            let collide = device == other_device || (whole && gpu(device) == gpu(other_device));
            if collide && grant.uid != other.uid {
                wrong.push(Wrong::Double(format!(
                    "{device} of pod {} and {other_device} of pod {}",
                    grant.pod, other.pod
                )));
            }
        }
    }
    wrong
}

/// In the list, a device is in one allocation, if the others on it are not marked as overlapped or
/// are the same pod's (its init container's).
fn doubles_of_list(list: &[Listed]) -> Vec<Wrong> {
    let mut by_device: BTreeMap<(&str, &str), Vec<&Listed>> = BTreeMap::new();
    for allocation in list.iter().filter(|a| !a.overlapped) {
        for device in &allocation.devices {
            by_device.entry((&allocation.resource, device)).or_default().push(allocation);
        }
    }
    // By UID: an init container's pod has its name from `List` later than that.
    let pod = |a: &Listed| a.holder.as_ref().and_then(|h| h.pod_uid.clone());
    let several = by_device.into_iter().filter(|(_, holders)| {
        let pods: BTreeSet<_> = holders.iter().map(|a| pod(a)).collect();
        holders.len() > 1 && (pods.len() > 1 || pods.contains(&None))
    });
    several
        .map(|((_, device), holders)| {
            let ids: Vec<_> = holders.iter().map(|a| (&a.id, pod(a))).collect();
            Wrong::Double(format!("{device} in {ids:?}"))
        })
        .collect()
}

//! Which pods are evicted from a GPU that is drained with `evict`, and the progress of each holder.
//!
//! This module is pure: the caller sends the requests to the API server and submits their outcomes. Outcomes
//! are not stored, because the drain's order survives a restart and a repeated eviction does no harm.

use crate::drain::eviction::{EvictionOutcome, EvictionRecord, EvictionRequest};
use crate::evidence::pods::{Pod, PodState, PodsSource, Stage};
use crate::grants::allocation::{Allocation, Holder};
use crate::ids::names::{AllocationId, GpuId};
use crate::ids::time::Now;
use crate::node::change::Change;
use crate::node::ledger::Ledger;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Longest API server message that is kept of one pod, bytes; those about disruption budgets have about 100.
const MESSAGE_BYTES_MAX: usize = 512;

/// A pod that holds devices of a GPU, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuHolder {
    /// The pod's namespace, once known.
    pub namespace: Option<String>,
    /// The pod's name, once known.
    pub pod: Option<String>,
    /// The pod's UID, once known.
    pub uid: Option<String>,
    /// Its containers that are known to hold devices, sorted.
    pub containers: BTreeSet<String>,
    /// Its allocations on the GPU.
    pub allocations: Vec<AllocationId>,
    /// The pod as a source of pods shows it; `None` while none does.
    pub shown: Option<Arc<Pod>>,
    /// Its eviction status.
    pub status: EvictionStatus,
}

/// The eviction status of a holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EvictionStatus {
    /// No source has shown the holder yet.
    Unidentified,
    /// The API server has not shown this pod (yet), so it cannot be evicted.
    NotShown,
    /// No request has been sent.
    NotRequested,
    /// A static pod, which is a file on the node and cannot be evicted.
    Static,
    /// A request was accepted, and the pod is not terminating yet.
    Requested {
        /// When the first request was sent, milliseconds since 1970.
        since_wall_ms: u64,
    },
    /// A disruption budget forbids its eviction; the request is repeated.
    Budget {
        /// The API server's message.
        message: String,
    },
    /// The request failed; it is repeated.
    Failed {
        /// The error message.
        message: String,
    },
    /// It is in its grace period.
    Terminating {
        /// When its deletion was requested, milliseconds since 1970.
        since_wall_ms: u64,
    },
    /// It finished or is deleted; the kubelet has not yet released its devices.
    Over,
}

impl EvictionStatus {
    /// The status of a pod whose eviction was only checked, not requested.
    #[must_use]
    pub fn checked(outcome: &EvictionOutcome) -> Self {
        match outcome {
            EvictionOutcome::Accepted => Self::NotRequested,
            EvictionOutcome::Gone => Self::NotShown,
            EvictionOutcome::Budget(message) => Self::Budget { message: sanitized(message) },
            EvictionOutcome::Failed(message) => Self::Failed { message: sanitized(message) },
        }
    }
}

/// The requests that are due, the longest waiting first. None while the API server's view is not current: a
/// pod may have been replaced by another of the same name.
#[must_use]
pub fn due_requests(ledger: &Ledger, now: Now) -> Vec<EvictionRequest> {
    let mut requests: BTreeMap<&str, EvictionRequest> = BTreeMap::new();
    let Some(view) = ledger.pods.as_ref().filter(|view| view.current && view.source == PodsSource::ApiServer)
    else {
        return Vec::new();
    };
    for (gpu, state) in &ledger.gpus {
        let Some(method) = state.marks.eviction_method(now) else {
            continue;
        };
        for allocation in ledger.allocations_on(ledger.parts_of(gpu)) {
            let pods = allocation.pod_uids().filter_map(|uid| view.pods.get_key_value(uid));
            for (uid, pod) in pods.filter(|(_, pod)| can_be_evicted(pod)) {
                let request = EvictionRequest { pod: Arc::clone(pod), method, gpu: gpu.clone() };
                let known = requests.entry(uid).or_insert_with(|| request.clone());
                if known.method < method {
                    *known = request;
                }
            }
        }
    }
    let newest = |request: &EvictionRequest| ledger.evictions.get(&request.pod.uid);
    let is_due = |request: &EvictionRequest| {
        newest(request)
            .is_none_or(|n| n.request.method < request.method || now.mono_ms >= n.quiet_until_mono_ms)
    };
    let mut due: Vec<EvictionRequest> = requests.into_values().filter(is_due).collect();
    due.sort_by_key(|request| newest(request).map(|n| n.quiet_until_mono_ms));
    due
}

/// Whether this pod still holds devices of a GPU whose holders are evicted.
#[must_use]
pub fn is_being_evicted(ledger: &Ledger, uid: &str) -> bool {
    pods_to_evict(ledger).contains(uid)
}

/// The holders of this GPU, sorted by name; those without a known name come last.
#[must_use]
pub fn holders(ledger: &Ledger, gpu: &GpuId) -> Vec<GpuHolder> {
    let evicts = ledger.gpus.get(gpu).is_some_and(|g| g.marks.evicts());
    holders_if(ledger, gpu, evicts)
}

/// The holders as [`holders`] has them once the GPU is drained, with or without evictions.
#[must_use]
pub fn holders_if(ledger: &Ledger, gpu: &GpuId, evicts: bool) -> Vec<GpuHolder> {
    let mut holders: BTreeMap<HolderKey, GpuHolder> = BTreeMap::new();
    let allocations = ledger.allocations_on(ledger.parts_of(gpu)).into_iter();
    for (allocation, holder) in allocations.flat_map(|one| one.holders().map(move |holder| (one, holder))) {
        let known = holders.entry(HolderKey::of(&holder, allocation.id)).or_insert_with(|| {
            let named = holder.pod_uid.as_deref().and_then(|uid| ledger.pod_by_uid(uid));
            GpuHolder {
                namespace: holder.namespace.clone().or_else(|| named.as_ref()?.namespace.clone()),
                pod: holder.pod.clone().or_else(|| named?.pod),
                uid: holder.pod_uid.clone(),
                containers: BTreeSet::new(),
                allocations: Vec::new(),
                shown: shown_pod(ledger, &holder).cloned(),
                status: eviction_status(ledger, allocation, &holder, evicts),
            }
        });
        known.containers.extend(holder.container);
        known.allocations.push(allocation.id);
    }
    let mut holders: Vec<GpuHolder> = holders.into_values().collect();
    holders.sort_by_cached_key(|holder| (holder.pod.is_none(), holder.namespace.clone(), holder.pod.clone()));
    holders
}

/// Records the outcome of a request. No change if the pod is no longer to be evicted.
#[must_use]
pub fn record_outcome(
    ledger: &Ledger,
    ask: &EvictionRequest,
    outcome: &EvictionOutcome,
    now: Now,
) -> Vec<Change> {
    let uid = &ask.pod.uid;
    if !is_being_evicted(ledger, uid) {
        return Vec::new();
    }
    let outcome = match outcome {
        EvictionOutcome::Accepted | EvictionOutcome::Gone => outcome.clone(),
        EvictionOutcome::Budget(message) => EvictionOutcome::Budget(sanitized(message)),
        EvictionOutcome::Failed(message) => EvictionOutcome::Failed(sanitized(message)),
    };
    let since_wall_ms = ledger.evictions.get(uid).map_or(now.wall_ms, |a| a.since_wall_ms);
    let quiet_until_mono_ms = now.mono_ms.saturating_add(ledger.rules.timing.evict_again_ms);
    let newest = EvictionRecord { request: ask.clone(), outcome, since_wall_ms, quiet_until_mono_ms };
    let mut evictions = BTreeMap::clone(&ledger.evictions);
    evictions.insert(uid.clone(), newest);
    vec![Change::EvictionsUpdated(Arc::new(evictions))]
}

/// Removes the records of pods that are no longer to be evicted.
pub(crate) fn prune_evictions(ledger: &Ledger) -> Option<Change> {
    if ledger.evictions.is_empty() {
        return None;
    }
    let pods = pods_to_evict(ledger);
    let mut evictions = BTreeMap::clone(&ledger.evictions);
    evictions.retain(|uid, _| pods.contains(uid.as_str()));
    (evictions.len() < ledger.evictions.len()).then(|| Change::EvictionsUpdated(Arc::new(evictions)))
}

/// UIDs of all pods that hold devices of a GPU whose holders are evicted.
fn pods_to_evict(ledger: &Ledger) -> BTreeSet<&str> {
    let gpus = ledger.gpus.iter().filter(|(_, state)| state.marks.evicts());
    gpus.flat_map(|(gpu, _)| ledger.allocations_on(ledger.parts_of(gpu)))
        .flat_map(Allocation::pod_uids)
        .collect()
}

/// A terminating or finished pod need not be evicted; a static pod cannot be.
fn can_be_evicted(pod: &Pod) -> bool {
    !pod.is_static && pod.stage != Stage::Finished && pod.deletion_wall_ms.is_none()
}

/// The holder's pod in the ledger's view of pods.
fn shown_pod<'l>(ledger: &'l Ledger, holder: &Holder) -> Option<&'l Arc<Pod>> {
    ledger.pods.as_ref()?.pods.get(holder.pod_uid.as_ref()?)
}

fn eviction_status(
    ledger: &Ledger,
    allocation: &Allocation,
    holder: &Holder,
    evicts: bool,
) -> EvictionStatus {
    if holder.is_unknown() {
        return EvictionStatus::Unidentified;
    }
    let Some(pod) = shown_pod(ledger, holder) else {
        let state = holder.pod_uid.as_ref().map(|uid| ledger.state_of_pod(allocation, uid));
        return match state.unwrap_or(PodState::Unknown) {
            PodState::Over | PodState::Gone => EvictionStatus::Over,
            PodState::Alive | PodState::Unknown if evicts => EvictionStatus::NotShown,
            PodState::Alive | PodState::Unknown => EvictionStatus::NotRequested,
        };
    };
    let newest = ledger.evictions.get(&pod.uid).filter(|_| evicts);
    if pod.is_static {
        EvictionStatus::Static
    } else if pod.stage == Stage::Finished {
        EvictionStatus::Over
    } else if let Some(since_wall_ms) = pod.deletion_wall_ms {
        EvictionStatus::Terminating { since_wall_ms }
    } else if let Some(newest) = newest {
        match &newest.outcome {
            EvictionOutcome::Accepted | EvictionOutcome::Gone => {
                EvictionStatus::Requested { since_wall_ms: newest.since_wall_ms }
            }
            EvictionOutcome::Budget(message) => EvictionStatus::Budget { message: message.clone() },
            EvictionOutcome::Failed(message) => EvictionStatus::Failed { message: message.clone() },
        }
    } else {
        EvictionStatus::NotRequested
    }
}

/// Groups allocations by holder.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum HolderKey {
    Uid(String),
    Named(Option<String>, String),
    Unknown(AllocationId),
}

impl HolderKey {
    fn of(holder: &Holder, id: AllocationId) -> Self {
        match (&holder.pod_uid, &holder.pod) {
            (Some(uid), _) => Self::Uid(uid.clone()),
            (None, Some(pod)) => Self::Named(holder.namespace.clone(), pod.clone()),
            (None, None) => Self::Unknown(id),
        }
    }
}

/// Shortens a server's message and replaces control characters, since it is shown on terminals.
fn sanitized(message: &str) -> String {
    message[..message.floor_char_boundary(MESSAGE_BYTES_MAX)].replace(char::is_control, " ")
}

#[cfg(test)]
mod tests;

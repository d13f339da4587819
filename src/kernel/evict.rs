//! Who is asked to leave a GPU that is emptied with `evict`, and how far each of its holders is.
//!
//! Pure: the room that talks to the API server asks here what to ask next, and hands in what came of
//! it. What came of it is not written down: the drain's order outlives a restart, and asking a pod
//! twice does no harm.

use super::allocation::Allocation;
use super::change::Change;
use super::drain::{AtDeadline, Order};
use super::ledger::Ledger;
use super::names::{AllocationId, PartId};
use super::pods::{Fate, Pod, PodsSource, Stage};
use super::time::Now;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Longest message of the API server that is kept of one pod, bytes; budgets are told in about 100.
const MESSAGE_BYTES_MAX: usize = 512;

/// How a pod is asked to leave, the gentler way first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// By the Eviction API: disruption budgets hold.
    Evict,
    /// Deleted, with its own grace period: budgets are not asked.
    Delete,
}

/// One thing to ask of the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Whom to send away; its UID is the precondition.
    pub pod: Arc<Pod>,
    /// How.
    pub way: Way,
    /// Of which GPU; the first one of several.
    pub gpu: PartId,
}

/// What came of an ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The API server tells the pod to go.
    Taken,
    /// It has no pod of this UID any more.
    Gone,
    /// A disruption budget forbids it at present; in the API server's words.
    Budget(String),
    /// It could not be asked, or refuses for another reason.
    Failed(String),
}

/// The last ask of one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Who was asked, how, and of which GPU.
    pub ask: Ask,
    /// What came of it.
    pub outcome: Outcome,
    /// When it was first asked, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// When it may be asked again, monotonic milliseconds.
    pub again_mono_ms: u64,
}

/// A pod, or what is known of one, that holds something of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderOn {
    /// The pod's namespace, once known.
    pub namespace: Option<String>,
    /// The pod's name, once known.
    pub pod: Option<String>,
    /// The pod's UID, once known.
    pub uid: Option<String>,
    /// Those of its containers that are known to hold something, sorted.
    pub containers: BTreeSet<String>,
    /// What it holds.
    pub allocations: Vec<AllocationId>,
    /// It belongs to a DaemonSet, which makes it anew on this node.
    pub comes_back: bool,
    /// How far it is.
    pub leaving: Leaving,
}

/// How far a holder is on its way out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// No source has said yet who it is.
    NotKnown,
    /// The API server has not shown this pod (yet), so it cannot be asked.
    NotShown,
    /// Nobody asked it, or not yet.
    NotAsked,
    /// A static pod: a file on the node that nobody can evict.
    Static,
    /// Asked, and not yet told to go.
    Asked {
        /// When first, milliseconds since 1970.
        since_wall_ms: u64,
    },
    /// A disruption budget keeps it; it is asked again.
    Budget {
        /// In the API server's words.
        message: String,
    },
    /// It could not be asked; it is asked again.
    Failed {
        /// Why.
        message: String,
    },
    /// It was told to go and has its grace period.
    Terminating {
        /// When it was told, milliseconds since 1970.
        since_wall_ms: u64,
    },
    /// It finished or is deleted; the kubelet has yet to let go of its devices.
    Over,
}

impl Order {
    /// How holders are asked to leave now, if they are.
    #[must_use]
    pub fn way(&self, now: Now) -> Option<Way> {
        let late = self.at_deadline == AtDeadline::Delete && self.is_late(now);
        self.evict.then_some(if late { Way::Delete } else { Way::Evict })
    }
}

/// What to ask of the API server now, whoever waits longest first. Nothing while it is not heard: a
/// pod may have gone unseen, and another may have its name.
#[must_use]
pub fn asks(ledger: &Ledger, now: Now) -> Vec<Ask> {
    let mut asks: BTreeMap<&str, Ask> = BTreeMap::new();
    let Some(view) = ledger.pods.as_ref().filter(|view| view.current && view.source == PodsSource::ApiServer)
    else {
        return Vec::new();
    };
    for (gpu, state) in &ledger.gpus {
        let Some(way) = state.drain.order().and_then(|order| order.way(now)) else {
            continue;
        };
        for allocation in allocations_on(ledger, gpu) {
            let pod = allocation.holder.pod_uid.as_ref().and_then(|uid| view.pods.get_key_value(uid));
            let Some((uid, pod)) = pod.filter(|(_, pod)| can_be_asked(pod)) else {
                continue;
            };
            let ask = Ask { pod: Arc::clone(pod), way, gpu: gpu.clone() };
            let known = asks.entry(uid).or_insert_with(|| ask.clone());
            if known.way < way {
                *known = ask;
            }
        }
    }
    let asked = |ask: &Ask| ledger.evictions.get(&ask.pod.uid);
    let due = |ask: &Ask| asked(ask).is_none_or(|a| a.ask.way < ask.way || now.mono_ms >= a.again_mono_ms);
    let mut due: Vec<Ask> = asks.into_values().filter(due).collect();
    due.sort_by_key(|ask| asked(ask).map(|a| a.again_mono_ms));
    due
}

/// Whether this pod is still to be sent away, however often it was asked.
#[must_use]
pub fn is_wanted(ledger: &Ledger, uid: &str) -> bool {
    wanted(ledger).contains(uid)
}

/// Everybody who holds something of this GPU, by name; who is not known yet comes last.
#[must_use]
pub fn holders(ledger: &Ledger, gpu: &PartId) -> Vec<HolderOn> {
    let evicts = ledger.gpus.get(gpu).is_some_and(|g| g.drain.evicts());
    let mut found: BTreeMap<Who<'_>, HolderOn> = BTreeMap::new();
    for allocation in allocations_on(ledger, gpu) {
        let named = allocation.holder.pod_uid.as_deref().and_then(|uid| ledger.pod_by_uid(uid));
        let holder = &allocation.holder;
        let known = found.entry(who(allocation)).or_insert_with(|| HolderOn {
            namespace: holder.namespace.clone().or_else(|| named.as_ref()?.namespace.clone()),
            pod: holder.pod.clone().or_else(|| named?.pod),
            uid: holder.pod_uid.clone(),
            containers: BTreeSet::new(),
            allocations: Vec::new(),
            comes_back: shown(ledger, allocation).is_some_and(|pod| pod.of_daemon_set),
            leaving: leaving(ledger, allocation, evicts),
        });
        known.containers.extend(holder.container.clone());
        known.allocations.push(allocation.id);
    }
    let mut all: Vec<HolderOn> = found.into_values().collect();
    all.sort_by(|a, b| {
        let name = |h: &HolderOn| (h.pod.is_none(), h.namespace.clone(), h.pod.clone());
        name(a).cmp(&name(b))
    });
    all
}

/// Takes down what came of an ask. Nothing, if nobody wants the pod away any more.
#[must_use]
pub fn asked(ledger: &Ledger, ask: &Ask, outcome: &Outcome, again_ms: u64, now: Now) -> Vec<Change> {
    let uid = &ask.pod.uid;
    if !is_wanted(ledger, uid) {
        return Vec::new();
    }
    let outcome = match outcome {
        Outcome::Taken | Outcome::Gone => outcome.clone(),
        Outcome::Budget(message) => Outcome::Budget(told(message)),
        Outcome::Failed(message) => Outcome::Failed(told(message)),
    };
    let since_wall_ms = ledger.evictions.get(uid).map_or(now.wall_ms, |a| a.since_wall_ms);
    let again_mono_ms = now.mono_ms.saturating_add(again_ms);
    let asked = Asked { ask: ask.clone(), outcome, since_wall_ms, again_mono_ms };
    let mut evictions = BTreeMap::clone(&ledger.evictions);
    evictions.insert(uid.clone(), asked);
    vec![Change::Evicting(Arc::new(evictions))]
}

/// Forgets what came of asks that nobody has a use for any more.
pub(super) fn ticked(ledger: &Ledger) -> Option<Change> {
    if ledger.evictions.is_empty() {
        return None;
    }
    let wanted = wanted(ledger);
    if ledger.evictions.keys().all(|uid| wanted.contains(uid.as_str())) {
        return None;
    }
    let mut evictions = BTreeMap::clone(&ledger.evictions);
    evictions.retain(|uid, _| wanted.contains(uid.as_str()));
    Some(Change::Evicting(Arc::new(evictions)))
}

/// UIDs of all pods that hold something of a GPU whose holders are asked to leave.
fn wanted(ledger: &Ledger) -> BTreeSet<&str> {
    let gpus = ledger.gpus.iter().filter(|(_, state)| state.drain.evicts());
    gpus.flat_map(|(gpu, _)| allocations_on(ledger, gpu))
        .filter_map(|a| a.holder.pod_uid.as_deref())
        .collect()
}

/// Live allocations of a GPU and its MIG instances, each once.
fn allocations_on<'l>(ledger: &'l Ledger, gpu: &PartId) -> impl Iterator<Item = &'l Allocation> {
    let parts = ledger.parts.values().filter(|p| p.part.gpu() == gpu);
    let ids: BTreeSet<AllocationId> =
        parts.flat_map(|p| p.devices.values()).flat_map(|d| d.holders.iter().copied()).collect();
    ids.into_iter().filter_map(|id| ledger.live.get(&id)).map(AsRef::as_ref)
}

/// Whoever is told to go already, or is over, need not be asked; a static pod cannot.
fn can_be_asked(pod: &Pod) -> bool {
    !pod.is_static && pod.stage != Stage::Finished && pod.leaving_since_wall_ms.is_none()
}

/// The pod that the source of pods shows for an allocation.
fn shown<'l>(ledger: &'l Ledger, allocation: &Allocation) -> Option<&'l Pod> {
    let uid = allocation.holder.pod_uid.as_ref()?;
    ledger.pods.as_ref()?.pods.get(uid).map(AsRef::as_ref)
}

fn leaving(ledger: &Ledger, allocation: &Allocation, evicts: bool) -> Leaving {
    if allocation.holder.is_unknown() {
        return Leaving::NotKnown;
    }
    let Some(pod) = shown(ledger, allocation) else {
        return match ledger.fate_of(allocation) {
            Fate::Over | Fate::Gone => Leaving::Over,
            Fate::Alive | Fate::Unknown if evicts => Leaving::NotShown,
            Fate::Alive | Fate::Unknown => Leaving::NotAsked,
        };
    };
    let asked = ledger.evictions.get(&pod.uid).filter(|_| evicts);
    if pod.is_static {
        Leaving::Static
    } else if pod.stage == Stage::Finished {
        Leaving::Over
    } else if let Some(since_wall_ms) = pod.leaving_since_wall_ms {
        Leaving::Terminating { since_wall_ms }
    } else if let Some(asked) = asked {
        match &asked.outcome {
            Outcome::Taken | Outcome::Gone => Leaving::Asked { since_wall_ms: asked.since_wall_ms },
            Outcome::Budget(message) => Leaving::Budget { message: message.clone() },
            Outcome::Failed(message) => Leaving::Failed { message: message.clone() },
        }
    } else {
        Leaving::NotAsked
    }
}

/// What makes allocations those of one holder.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Who<'l> {
    Uid(&'l str),
    Named(Option<&'l str>, &'l str),
    Unknown(AllocationId),
}

fn who(allocation: &Allocation) -> Who<'_> {
    let holder = &allocation.holder;
    match (&holder.pod_uid, &holder.pod) {
        (Some(uid), _) => Who::Uid(uid),
        (None, Some(pod)) => Who::Named(holder.namespace.as_deref(), pod),
        (None, None) => Who::Unknown(allocation.id),
    }
}

/// What a server says is shown on terminals, too.
fn told(message: &str) -> String {
    message[..message.floor_char_boundary(MESSAGE_BYTES_MAX)].replace(char::is_control, " ")
}

#[cfg(test)]
mod tests;

//! The nodes whose stack each SharingPolicy decides, and how far they are.

use super::{Key, Memory, NodeFacts, Seen, View};
use crate::gpu_node::{GpuNode, StackPhase};
use kube::core::{Selector, SelectorExt};
use sha2::{Digest, Sha256};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

/// A node whose daemon has not reported for so long is away: the daemon does it at least every 18 minutes.
const HEARTBEAT_MAX: Duration = Duration::from_secs(25 * 60);
/// How long a node may take for a stack beyond gate and soak.
const UNSETTLED_MAX: Duration = Duration::from_secs(600);

/// A node of a SharingPolicy.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) name: String,
    pub(super) uid: String,
    /// The models of its GPUs.
    pub(super) model: String,
    pub(super) is_away: bool,
    pub(super) assigned: Option<Key>,
    progress: Progress,
}

/// How far a node is with the revision that it was assigned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// It works on it; `tries` if it was not away when it was assigned, or its daemon has begun with it.
    Working {
        tries: bool,
    },
    Settled,
    Failed(String),
}

/// What each policy has.
#[derive(Default)]
pub(super) struct Owners {
    /// By policy.
    pub(super) members: BTreeMap<String, Vec<Member>>,
    /// Policies that match a node which another policy of the same priority has, and that policy.
    pub(super) overlapped: BTreeMap<String, String>,
    /// Policies whose selector is invalid, and why.
    pub(super) invalid: BTreeMap<String, String>,
}

impl Member {
    fn new(object: &GpuNode, node: &NodeFacts, seen: &mut Seen, now: Duration) -> Self {
        let status = object.status.as_ref();
        let stack = status.and_then(|status| status.stack.as_ref());
        let assigned = object.spec.stack.as_ref().map(Key::of);
        let is_overridden = stack.is_some_and(|stack| stack.phase == Some(StackPhase::LocalOverride));
        let is_silent = seen.heartbeat.is_none() || now.saturating_sub(seen.heartbeat_at) > HEARTBEAT_MAX;
        let is_away = !node.is_ready || is_overridden || is_silent;
        seen.was_present |= !is_away;
        let progress = match &assigned {
            Some(assigned) => progress(object, assigned, seen, now),
            None => Progress::Working { tries: false },
        };
        // One that went away while it tried the revision must come back in time.
        if is_away && progress != (Progress::Working { tries: true }) {
            seen.assigned_at = now;
        }
        Self {
            name: object.metadata.name.clone().unwrap_or_default(),
            uid: object.metadata.uid.clone().unwrap_or_default(),
            model: status.and_then(|status| status.models.clone()).unwrap_or_default().join(", "),
            is_away,
            assigned,
            progress,
        }
    }

    /// Its progress with this revision; `None` if it was assigned another one, or none.
    pub(super) fn progress(&self, key: &Key) -> Option<&Progress> {
        (self.assigned.as_ref() == Some(key)).then_some(&self.progress)
    }

    /// Orders the nodes at random, but the same way each time, and differently for each revision.
    pub(super) fn rank(&self, key: &Key) -> [u8; 32] {
        Sha256::digest(format!("{}/{}/{}", key.revision, key.attempt, self.uid)).into()
    }
}

fn progress(object: &GpuNode, assigned: &Key, seen: &Seen, now: Duration) -> Progress {
    let stack = object.status.as_ref().and_then(|status| status.stack.clone()).unwrap_or_default();
    if let Some(failed) = &stack.failed
        && (&failed.revision, failed.attempt) == (&assigned.revision, assigned.attempt)
    {
        return Progress::Failed(failed.reason.clone());
    }
    let observed = object.status.as_ref().and_then(|status| status.observed_generation);
    // The phase is of the specification that the daemon has read.
    let is_current = observed >= object.metadata.generation;
    if is_current
        && stack.phase == Some(StackPhase::Settled)
        && stack.active.as_deref() == Some(&assigned.revision)
    {
        return Progress::Settled;
    }
    let spec = object.spec.stack.as_ref();
    let shadow = spec.and_then(|spec| spec.gate.as_ref()).and_then(|gate| gate.shadow_for());
    let soak = spec.map(|spec| spec.soak()).unwrap_or_default();
    let most = UNSETTLED_MAX + shadow.unwrap_or_default() + soak;
    if now.saturating_sub(seen.assigned_at) > most {
        let why = object.status.as_ref().and_then(|status| status.conditions.as_ref());
        let why = why.and_then(|all| all.iter().find(|one| one.type_ == "Synced"));
        let why = why.map_or_else(String::new, |synced| format!(": {}", synced.message));
        return Progress::Failed(format!("it has not settled within {} s{why}", most.as_secs()));
    }
    let begun = is_current && matches!(stack.phase, Some(StackPhase::Gating | StackPhase::Soaking));
    let is_overridden = stack.phase == Some(StackPhase::LocalOverride);
    Progress::Working { tries: (begun || seen.was_present) && !is_overridden }
}

/// The nodes of each policy. A node without a GPUNode has no daemon, and a GPUNode of a deleted Node is about to be collected.
pub(super) fn owners(view: &View, memory: &mut Memory, now: Duration) -> Owners {
    let mut owners = Owners::default();
    let mut policies = Vec::new();
    for (name, policy) in &view.policies {
        if policy.metadata.deletion_timestamp.is_some() {
            continue;
        }
        match Selector::try_from(policy.spec.node_selector.clone()) {
            Ok(selector) => policies.push((policy.spec.priority.unwrap_or(0), name, selector)),
            Err(error) => {
                owners.invalid.insert(name.clone(), format!("nodeSelector: {error}"));
            }
        }
    }
    policies.sort_by_key(|(priority, name, _)| (Reverse(*priority), *name));
    for (name, object) in &view.gpu_nodes {
        let Some(node) = view.nodes.get(name).filter(|node| is_of(object, node)) else { continue };
        let mut matching = policies.iter().filter(|(_, _, selector)| selector.matches(&node.labels));
        let Some((priority, policy, _)) = matching.next() else { continue };
        for (_, other, _) in matching.take_while(|(other, _, _)| other == priority) {
            owners.overlapped.entry((*other).clone()).or_insert_with(|| (*policy).clone());
        }
        let Some(seen) = object.metadata.uid.as_ref().and_then(|uid| memory.seen.get_mut(uid)) else {
            continue;
        };
        let member = Member::new(object, node, seen, now);
        owners.members.entry((*policy).clone()).or_default().push(member);
    }
    owners
}

/// Whether the GPUNode is of this Node, and not of an earlier one of the same name.
fn is_of(object: &GpuNode, node: &NodeFacts) -> bool {
    let owners = object.metadata.owner_references.iter().flatten();
    object.metadata.deletion_timestamp.is_none()
        && owners.into_iter().any(|owner| owner.kind == "Node" && owner.uid == node.uid)
}

//! What the container runtime shows of the containers that hold allocations. The guard, a plugin of the runtime, sends
//! it.
//!
//! It names the container of an allocation before the container's first instruction, and shows that a container exists
//! although its pod was deleted by force. It is never an end by itself (I6).

use crate::evidence::limits::{LimitSupport, MemoryLimit, with_expiry};
use crate::grants::allocation::{Allocation, Holder};
use crate::grants::bypass::BypassAction;
use crate::ids::names::AllocationId;
use crate::ids::time::Now;
use crate::node::change::Change;
use crate::node::ledger::Ledger;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What the runtime shows at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeView {
    /// Whether the guard is connected to the runtime and has all of its containers. If not, a container that is missing
    /// may exist.
    pub is_whole: bool,
    /// Identifies the run of the guard. Another run does not know the processes of containers that the runtime had
    /// removed before.
    pub guard_run: u64,
    /// UIDs of the pods whose sandbox runs.
    pub pods: BTreeSet<String>,
    /// The containers that hold allocations: those that the runtime has not removed and that have not exited, and those
    /// whose cgroup still has processes. More than one names an allocation if a pod claims that of another, and while a
    /// container is replaced.
    pub containers: BTreeMap<AllocationId, Vec<Arc<RuntimeContainer>>>,
    /// On which GPUs the guard can limit the memory of containers.
    pub limit_support: LimitSupport,
    /// What the guard did about containers that could use GPUs that were not allocated to them, the newest of each container
    /// of the pods whose sandbox runs.
    pub container_bypasses: Vec<Arc<ContainerBypass>>,
    /// What the guard does about such containers, as it reported; `None` for a guard that does not know it, or has not been sent it.
    pub bypass_action: Option<BypassAction>,
}

/// What the guard did about a container that could use GPUs that were not allocated to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerBypass {
    /// The namespace of its pod.
    pub namespace: String,
    /// The name of its pod.
    pub pod: String,
    /// The UID of its pod.
    pub pod_uid: String,
    /// Its name in the pod.
    pub container: String,
    /// What was done.
    pub outcome: BypassOutcome,
    /// How it could use them.
    pub detail: String,
    /// Why that was not done, or what it does not cover.
    pub why: Option<Arc<str>>,
    /// When, milliseconds since 1970.
    pub wall_ms: u64,
    /// How often it was done to this container.
    pub count: u32,
}

/// What the guard did about a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BypassOutcome {
    /// Nothing: it could not.
    Failed,
    /// It removed the access to those GPUs.
    Stripped,
    /// It refused the container.
    Denied,
}

impl BypassOutcome {
    /// Its value in the API and in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Stripped => "stripped",
            Self::Denied => "denied",
        }
    }
}

/// A container that was given an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeContainer {
    /// Its id at the container runtime.
    pub id: String,
    /// The namespace of its pod.
    pub namespace: String,
    /// The name of its pod.
    pub pod: String,
    /// The UID of its pod.
    pub pod_uid: String,
    /// Its name in the pod.
    pub name: String,
    /// What connects it with the allocation.
    pub tie: Tie,
    /// Whether its cgroup is known if it runs. If not, processes that outlive it are not seen, so that its end shows
    /// nothing.
    pub is_cgroup_known: bool,
    /// Whether it may use all devices of the node: it can remove its limits.
    pub is_privileged: bool,
    /// Its memory limits, by GPU.
    pub limits: Vec<MemoryLimit>,
}

/// What connects a container with an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tie {
    /// The annotation of the grant, or the mount of a claim ([`crate::grants::annotation`]), which a pod's author
    /// cannot set.
    Annotation,
    /// The allocation's id in the environment, as older releases granted it. A pod can set it too, so it counts only if
    /// the ledger has the holder's UID from elsewhere.
    Environment,
}

/// What the runtime shows of one allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuntimeState {
    /// Its container exists.
    Exists,
    /// This run of the guard has seen its container, and neither the container nor the sandbox of its pod exists any
    /// more.
    Gone,
    /// Neither is known: the view is not whole, this run of the guard has not seen the container, or the sandbox
    /// exists.
    Unknown,
}

impl RuntimeContainer {
    /// The holder that this container is to an allocation.
    fn holder(&self) -> Holder {
        Holder {
            namespace: Some(self.namespace.clone()),
            pod: Some(self.pod.clone()),
            pod_uid: Some(self.pod_uid.clone()),
            container: Some(self.name.clone()),
        }
    }

    /// Whether it is the container of this allocation.
    fn is_of(&self, allocation: &Allocation) -> bool {
        let known = allocation.holder.pod_uid.as_ref();
        match self.tie {
            // The kubelet has a claim prepared once, for the first of its pods: the ledger may lack the pods that use it later.
            Tie::Annotation if allocation.origin.claim().is_some() => true,
            Tie::Environment if allocation.origin.claim().is_some() => {
                allocation.pod_uids().any(|uid| uid == self.pod_uid)
            }
            Tie::Annotation => known.is_none_or(|uid| *uid == self.pod_uid),
            Tie::Environment => known == Some(&self.pod_uid),
        }
    }
}

impl RuntimeView {
    /// The container of an allocation: as a rule one that has the annotation of the grant or the mount of its claim.
    #[must_use]
    pub fn container_of(&self, allocation: &Allocation) -> Option<&RuntimeContainer> {
        let annotated = self.annotated_containers_of(allocation).next();
        annotated.or_else(|| self.containers_of(allocation).next())
    }

    /// The containers that have the annotation of an allocation's grant or the mount of its claim. There are several while one
    /// is replaced, or if several use a claim.
    pub fn annotated_containers_of<'v, 'a>(
        &'v self,
        allocation: &'a Allocation,
    ) -> impl Iterator<Item = &'v RuntimeContainer> + use<'v, 'a> {
        self.containers_of(allocation).filter(|container| container.tie == Tie::Annotation)
    }

    fn containers_of<'v, 'a>(
        &'v self,
        allocation: &'a Allocation,
    ) -> impl Iterator<Item = &'v RuntimeContainer> + use<'v, 'a> {
        let named = self.containers.get(&allocation.id).into_iter().flatten().map(AsRef::as_ref);
        named.filter(|container| container.is_of(allocation))
    }
}

impl Ledger {
    /// The container of a live allocation, as the guard has last shown it.
    #[must_use]
    pub fn container_of(&self, allocation: &Allocation) -> Option<&RuntimeContainer> {
        self.runtime.as_deref().filter(|_| allocation.ended.is_none())?.container_of(allocation)
    }

    /// What the runtime shows of an allocation.
    #[must_use]
    pub fn runtime_state_of(&self, allocation: &Allocation) -> RuntimeState {
        let Some(view) = self.runtime.as_deref().filter(|view| view.is_whole) else {
            return RuntimeState::Unknown;
        };
        if view.container_of(allocation).is_some() {
            return RuntimeState::Exists;
        }
        let was_seen = self
            .sightings
            .get(&allocation.id)
            .is_some_and(|sighting| sighting.seen_by_guard_run == Some(view.guard_run));
        let has_sandbox = allocation.holder.pod_uid.as_ref().is_none_or(|uid| view.pods.contains(uid));
        if was_seen && !has_sandbox { RuntimeState::Gone } else { RuntimeState::Unknown }
    }

    /// The live allocations whose container and sandbox are gone.
    #[must_use]
    pub fn gone_by_runtime(&self) -> BTreeSet<AllocationId> {
        let is_gone = |a: &&Arc<Allocation>| self.runtime_state_of(a) == RuntimeState::Gone;
        self.live.values().filter(is_gone).map(|a| a.id).collect()
    }
}

/// The changes of a view of the runtime: the view, and the holders that it shows.
pub(crate) fn see_containers(ledger: &Ledger, view: &RuntimeView, now: Now) -> Vec<Change> {
    let known = ledger.runtime.as_deref();
    let view = with_expiry(known, view, now);
    if known == Some(&view) {
        return Vec::new();
    }
    let mut changes = vec![Change::RuntimeSeen(Arc::new(view.clone()))];
    for id in view.containers.keys() {
        let Some(allocation) = ledger.live.get(id) else { continue };
        let Some(container) = view.container_of(allocation) else { continue };
        // Of a claim the API server has shown the pods, and several containers can use it.
        if allocation.origin.claim().is_some() {
            continue;
        }
        let holder = container.holder();
        if allocation.holder.clone().update_from(&holder) {
            changes.push(Change::HolderLearned { id: *id, holder });
        }
    }
    changes
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::node::command::Command;
    use crate::node::test_node::Node;

    pub(crate) fn container(uid: &str, name: &str, tie: Tie) -> Arc<RuntimeContainer> {
        Arc::new(RuntimeContainer {
            id: format!("{name}-of-{uid}"),
            namespace: "team".into(),
            pod: format!("pod-{uid}"),
            pod_uid: uid.into(),
            name: name.into(),
            tie,
            is_cgroup_known: true,
            is_privileged: false,
            limits: Vec::new(),
        })
    }

    /// A whole view of the guard's first run.
    pub(crate) fn view(containers: &[(AllocationId, Arc<RuntimeContainer>)]) -> RuntimeView {
        RuntimeView {
            is_whole: true,
            guard_run: 1,
            pods: containers.iter().map(|(_, container)| container.pod_uid.clone()).collect(),
            containers: containers.iter().map(|(id, container)| (*id, vec![Arc::clone(container)])).collect(),
            ..RuntimeView::default()
        }
    }

    fn see(node: &mut Node, view: RuntimeView) {
        node.decide(&Command::SeeContainers(view)).unwrap();
    }

    fn state(node: &Node, id: AllocationId) -> RuntimeState {
        node.ledger.runtime_state_of(&node.ledger.live[&id])
    }

    #[test]
    fn an_annotation_names_the_holder_at_once_and_an_environment_does_not() {
        let mut node = Node::new();
        let (annotated, claimed) =
            (node.grant("GPU-0", Some(0), "", ""), node.grant("GPU-0", Some(1), "", ""));
        let known = node.grant("GPU-0", Some(2), "uid-3", "");
        see(
            &mut node,
            view(&[
                (annotated, container("uid-1", "main", Tie::Annotation)),
                (claimed, container("uid-2", "main", Tie::Environment)),
                (known, container("uid-3", "main", Tie::Environment)),
            ]),
        );
        let holder = |id: &AllocationId| node.ledger.live[id].holder.clone();
        assert_eq!(holder(&annotated), container("uid-1", "main", Tie::Annotation).holder());
        assert!(holder(&claimed).is_unknown(), "the pod may have set the variable itself");
        assert_eq!(holder(&known).pod.as_deref(), Some("pod-uid-3"), "the checkpoint named the pod before");
        assert_eq!(state(&node, claimed), RuntimeState::Unknown);
    }

    #[test]
    fn a_container_of_another_pod_than_the_known_holder_is_not_believed() {
        let mut node = Node::new();
        let id = node.grant("GPU-0", Some(0), "uid-1", "main");
        see(&mut node, view(&[(id, container("uid-2", "main", Tie::Annotation))]));
        assert_eq!(node.ledger.live[&id].holder.pod_uid.as_deref(), Some("uid-1"));
        assert_eq!(state(&node, id), RuntimeState::Unknown);
    }

    #[test]
    fn it_is_gone_once_a_container_that_was_seen_and_its_sandbox_are_missing_from_a_whole_view() {
        let mut node = Node::new();
        let id = node.grant("GPU-0", Some(0), "", "");
        see(&mut node, view(&[]));
        assert_eq!(state(&node, id), RuntimeState::Unknown, "it was never seen");
        let seen = view(&[(id, container("uid-1", "main", Tie::Annotation))]);
        see(&mut node, seen.clone());
        assert_eq!(state(&node, id), RuntimeState::Exists);
        see(&mut node, RuntimeView { containers: BTreeMap::new(), ..seen });
        assert_eq!(state(&node, id), RuntimeState::Unknown, "the container may restart in its sandbox");
        assert!(node.ledger.gone_by_runtime().is_empty());
        see(&mut node, view(&[]));
        assert_eq!(state(&node, id), RuntimeState::Gone);
        assert_eq!(node.ledger.gone_by_runtime(), BTreeSet::from([id]));
        for unsure in [
            RuntimeView { is_whole: false, ..view(&[]) },
            // A new run of the guard does not know whether processes of the container are left.
            RuntimeView { guard_run: 2, ..view(&[]) },
        ] {
            see(&mut node, unsure);
            assert_eq!(state(&node, id), RuntimeState::Unknown);
        }
    }

    #[test]
    fn a_container_that_claims_the_allocation_of_another_does_not_hide_it() {
        let mut node = Node::new();
        let id = node.grant("GPU-0", Some(0), "uid-1", "main");
        let mut view = view(&[(id, container("uid-1", "main", Tie::Environment))]);
        let claims = container("uid-2", "main", Tie::Environment);
        for place in [0, 2] {
            view.containers.get_mut(&id).unwrap().insert(place, Arc::clone(&claims));
        }
        see(&mut node, view);
        assert_eq!(state(&node, id), RuntimeState::Exists);
    }

    #[test]
    fn the_end_of_a_container_whose_cgroup_was_not_found_shows_nothing() {
        let mut node = Node::new();
        let id = node.grant("GPU-0", Some(0), "uid-1", "main");
        let traced = container("uid-1", "main", Tie::Annotation);
        let untraced =
            Arc::new(RuntimeContainer { is_cgroup_known: false, ..RuntimeContainer::clone(&traced) });
        for (seen, expected) in [(&traced, RuntimeState::Gone), (&untraced, RuntimeState::Unknown)] {
            // It is created, and then started.
            see(&mut node, view(&[(id, Arc::clone(&traced))]));
            see(&mut node, view(&[(id, Arc::clone(seen))]));
            assert_eq!(state(&node, id), RuntimeState::Exists);
            see(&mut node, view(&[]));
            assert_eq!(state(&node, id), expected);
        }
    }

    #[test]
    fn a_view_that_is_known_changes_nothing() {
        let mut node = Node::new();
        let id = node.grant("GPU-0", Some(0), "", "");
        let view = view(&[(id, container("uid-1", "main", Tie::Annotation))]);
        see(&mut node, view.clone());
        let generation = node.ledger.generation;
        see(&mut node, view);
        assert_eq!(node.ledger.generation, generation);
    }
}

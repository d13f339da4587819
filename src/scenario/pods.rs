//! The pods of a scenario: candidates of requests, and holders of allocations.

use super::format::Candidate;
use super::node::Node;
use berth_kernel::evidence::kubelet_view::{CheckpointEntry, ReconcileView};
use berth_kernel::evidence::pods::{Pod, PodContainer, PodsSource, PodsView, Stage};
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::grants::pod_candidates;
use berth_kernel::ids::names::{AllocationId, Resource};
use berth_kernel::node::command::Command;
use berth_kernel::node::ports::Clock as _;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The pods of the node.
#[derive(Debug, Default)]
pub(super) struct Pods {
    /// Pods that hold an allocation, by UID.
    running: BTreeMap<String, Arc<Pod>>,
    /// UIDs of the holders.
    held: BTreeMap<AllocationId, String>,
    /// Whether pods were published to the keeper; without candidates there is no source of pods.
    is_published: bool,
}

impl Pods {
    /// Publishes the candidates of a request as waiting pods.
    ///
    /// # Errors
    /// If the kernel shows one of them to no policy, since its container holds devices of the resource.
    pub(super) fn publish_candidates(
        &mut self,
        node: &mut Node<'_>,
        candidates: &[Candidate],
        resource: &Resource,
        count: usize,
    ) -> Result<(), String> {
        if candidates.is_empty() {
            return Ok(());
        }
        let mut pods = self.running.clone();
        for candidate in candidates {
            let waiting = waiting_pod(&pods, candidate, resource, count);
            pods.insert(waiting.uid.clone(), Arc::new(waiting));
        }
        self.is_published = true;
        publish(node, pods)?;
        let shown = pod_candidates::candidates(&node.snapshot(), resource, count);
        let is_shown = |candidate: &&Candidate| {
            let uid = uid(candidate);
            shown.iter().any(|shown| shown.pod.uid == uid && shown.container == candidate.container)
        };
        match candidates.iter().find(|candidate| !is_shown(candidate)) {
            None => Ok(()),
            Some(candidate) => Err(format!(
                "allocate: the candidate {candidate} holds devices of {resource}, so no policy would see it: name another \
                 container, or release its allocation first"
            )),
        }
    }

    /// Makes the first candidate the holder of the allocation. The other candidates end; without an allocation, all do.
    pub(super) fn record_grant(
        &mut self,
        node: &mut Node<'_>,
        candidates: &[Candidate],
        allocation: Option<&Allocation>,
    ) -> Result<(), String> {
        let (Some(first), Some(allocation)) = (candidates.first(), allocation) else {
            return self.publish_running(node);
        };
        let uid = uid(first);
        let snapshot = node.snapshot();
        if let Some(pod) = snapshot.pods.as_ref().and_then(|view| view.pods.get(&uid)) {
            let pod = Pod { stage: Stage::Admitted, ..Pod::clone(pod) };
            self.running.insert(uid.clone(), Arc::new(pod));
        }
        self.held.insert(allocation.id, uid.clone());
        self.publish_running(node)?;
        // The holder, as the kubelet's checkpoint has it. No allocation ends, since the pass has no `List` response.
        let entry = CheckpointEntry {
            pod_uid: uid,
            container: first.container.clone(),
            resource: allocation.resource.clone(),
            devices: allocation.devices.clone(),
            allocation: Some(allocation.id),
        };
        let view = ReconcileView {
            began_mono_ms: node.clock.now().mono_ms,
            checkpoint: Some(vec![entry]),
            ..ReconcileView::default()
        };
        node.turn(&Command::Reconcile(view)).map(drop)
    }

    /// Removes a released allocation, and its pod if it holds no other one.
    pub(super) fn record_release(&mut self, node: &mut Node<'_>, id: AllocationId) -> Result<(), String> {
        if let Some(uid) = self.held.remove(&id)
            && !self.held.values().any(|other| *other == uid)
        {
            self.running.remove(&uid);
        }
        self.publish_running(node)
    }

    fn publish_running(&self, node: &mut Node<'_>) -> Result<(), String> {
        if self.is_published { publish(node, self.running.clone()) } else { Ok(()) }
    }
}

fn waiting_pod(
    known: &BTreeMap<String, Arc<Pod>>,
    candidate: &Candidate,
    resource: &Resource,
    count: usize,
) -> Pod {
    let uid = uid(candidate);
    let mut containers = known.get(&uid).map(|pod| pod.containers.clone()).unwrap_or_default();
    let requests = vec![(resource.clone(), u32::try_from(count).unwrap_or(u32::MAX))];
    containers.retain(|container| container.name != candidate.container);
    containers.push(PodContainer { name: candidate.container.clone(), requests });
    Pod {
        uid,
        namespace: candidate.namespace.clone(),
        name: candidate.pod.clone(),
        labels: candidate.labels.clone().into_iter().collect(),
        is_static: false,
        owner: None,
        stage: Stage::Waiting,
        deletion_wall_ms: None,
        created_wall_ms: 0,
        containers,
        bypass: None,
        has_claims: false,
        named_claims: Vec::new(),
    }
}

/// A UID with a dash, like those of the API server. It begins with the length of the namespace, so that pod `c` of
/// `a-b` and pod `b-c` of `a` have different UIDs.
fn uid(candidate: &Candidate) -> String {
    format!("{}-{}-{}", candidate.namespace.len(), candidate.namespace, candidate.pod)
}

fn publish(node: &mut Node<'_>, pods: BTreeMap<String, Arc<Pod>>) -> Result<(), String> {
    let view = PodsView {
        current: true,
        listed_mono_ms: node.clock.now().mono_ms,
        pods,
        ..PodsView::empty(PodsSource::ApiServer)
    };
    node.turn(&Command::Pods(view)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::super::format::{Group, Scenario};
    use super::super::{PolicyTester, run};
    use super::*;
    use berth_core::stack::CallRecorder;

    #[test]
    fn the_first_candidate_holds_the_allocation_until_its_release() {
        let bench = PolicyTester::new().unwrap();
        let policies = CallRecorder::new(&bench.policies);
        let group = Group { model: "l4".into(), count: 2, mig: Vec::new() };
        let mut node = Node::new(&[group], &[], &policies).unwrap();
        node.settle().unwrap();
        let text = "about: x\nnode: [{model: l4, count: 2}]\nsteps:\n  - allocate: {resource: nvidia.com/gpu, on: [1], \
                    as: a, candidates: [{namespace: n, pod: p, labels: {tier: gold}}, {namespace: n, pod: q}]}\n";
        let scenario = Scenario::parse(text).unwrap();
        assert_eq!(run::run(&scenario, &mut node, &[]), Ok(Vec::new()));
        let snapshot = node.snapshot();
        let holder = &snapshot.live.values().next().unwrap().holder;
        let names = [&holder.namespace, &holder.pod, &holder.container, &holder.pod_uid];
        assert_eq!(names.map(|text| text.as_deref().unwrap_or_default()), ["n", "p", "main", "1-n-p"]);
        let pods: Vec<_> =
            snapshot.pods.as_ref().unwrap().pods.values().map(|pod| pod.name.as_str()).collect();
        assert_eq!(pods, ["p"], "the other candidate has ended");

        let scenario = Scenario::parse(&format!("{text}  - release: a\n")).unwrap();
        let mut node = Node::new(&scenario.node, &[], &policies).unwrap();
        node.settle().unwrap();
        assert_eq!(run::run(&scenario, &mut node, &[]), Ok(Vec::new()));
        assert!(node.snapshot().live.is_empty() && node.snapshot().pods.as_ref().unwrap().pods.is_empty());
    }
}

//! Transitions of what the guard shows: its connection, memory limits that are not in force, and containers that name
//! allocations of others.

use super::Transition;
use crate::evidence::limits::{LimitState, MemoryLimit};
use crate::evidence::runtime::{BypassOutcome, RuntimeContainer, RuntimeView, Tie};
use crate::grants::allocation::Allocation;
use crate::node::ledger::Ledger;
use std::collections::BTreeSet;
use std::sync::Arc;

/// What the guard did, by the UID of the pod and the container's name, as far as it was reported: a guard that has started
/// again, or a container that is tried again, gives the same once more.
#[derive(Debug, Default)]
pub(super) struct ReportedBypasses(BTreeSet<(String, String, BypassOutcome)>);

impl ReportedBypasses {
    pub(super) fn step(&mut self, ledger: &Ledger) -> Vec<Transition> {
        let Some(view) = &ledger.runtime else { return Vec::new() };
        if view.is_whole {
            self.0.retain(|(uid, ..)| view.pods.contains(uid));
        }
        let bypasses = view.container_bypasses.iter();
        let new = bypasses.filter(|bypass| {
            self.0.insert((bypass.pod_uid.clone(), bypass.container.clone(), bypass.outcome))
        });
        new.map(|bypass| Transition::ContainerBypass(Arc::clone(bypass))).collect()
    }
}

/// The transitions from view to view. Most ledgers have the view of the one before.
pub(super) fn container_transitions(old: &Ledger, new: &Ledger) -> Vec<Transition> {
    let Some(view) = &new.runtime else { return Vec::new() };
    let before = old.runtime.as_ref();
    if before.is_some_and(|before| Arc::ptr_eq(before, view)) {
        return Vec::new();
    }
    let was_whole = before.is_some_and(|before| before.is_whole);
    let mut all: Vec<_> =
        (was_whole != view.is_whole).then_some(Transition::GuardChanged(view.is_whole)).into_iter().collect();
    // Of a container with several allocations the limits are reported once.
    let mut reported = BTreeSet::new();
    for allocation in new.live.values() {
        let Some(container) = view.container_of(allocation) else { continue };
        if reported.insert(&container.id) {
            let known = before.and_then(|before| find(before, &container.id));
            all.extend(limit_transitions(allocation, known, container));
        }
    }
    all.extend(
        forgeries(new, view)
            .filter(|(_, container)| {
                let known = before.and_then(|before| find(before, &container.id));
                known.is_none()
            })
            .map(|(allocation, container)| Transition::GrantForged(allocation, container)),
    );
    all
}

fn find<'v>(view: &'v RuntimeView, id: &str) -> Option<&'v Arc<RuntimeContainer>> {
    view.containers.values().flatten().find(|container| container.id == id)
}

fn limit_transitions(
    allocation: &Arc<Allocation>,
    before: Option<&Arc<RuntimeContainer>>,
    now: &RuntimeContainer,
) -> Vec<Transition> {
    let known = |limit: &MemoryLimit| {
        let mut limits = before.into_iter().flat_map(|container| &container.limits);
        limits.find(|known| known.gpu == limit.gpu)
    };
    let mut all = Vec::new();
    for limit in &now.limits {
        let (state, times_changed) =
            known(limit).map_or((LimitState::Pending, 0), |known| (known.state, known.times_changed));
        if limit.state == LimitState::Failed && state != LimitState::Failed {
            all.push(Transition::LimitFailed(Arc::clone(allocation), limit.clone()));
        } else if limit.times_changed > times_changed {
            all.push(Transition::LimitChanged(Arc::clone(allocation), limit.clone()));
        }
    }
    all
}

/// Containers that name an allocation of another pod by what a pod can set.
fn forgeries<'l>(
    ledger: &'l Ledger,
    view: &'l RuntimeView,
) -> impl Iterator<Item = (Arc<Allocation>, Arc<RuntimeContainer>)> {
    view.containers.iter().flat_map(|(id, containers)| {
        let allocation = ledger.live.get(id);
        containers.iter().filter_map(move |container| {
            let allocation = allocation?;
            let mut pod_uids = allocation.pod_uids().peekable();
            pod_uids.peek()?;
            let is_forged = container.tie == Tie::Environment && pod_uids.all(|uid| uid != container.pod_uid);
            is_forged.then(|| (Arc::clone(allocation), Arc::clone(container)))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evidence::runtime::ContainerBypass;
    use crate::evidence::runtime::tests::{container, view};
    use crate::node::command::Command;
    use crate::node::test_node::{Node, gpu_id};
    use crate::node::transitions::{GpuName, Transitions};

    fn limit(state: LimitState, times_changed: u32) -> MemoryLimit {
        let why = (state == LimitState::Failed).then(|| "NVML does not answer".into());
        MemoryLimit { gpu: gpu_id("GPU-0"), granted_mib: 4096, state, times_changed, why, reading: None }
    }

    fn limited(uid: &str, limits: Vec<MemoryLimit>) -> Arc<RuntimeContainer> {
        Arc::new(RuntimeContainer {
            limits,
            ..RuntimeContainer::clone(&container(uid, "main", Tie::Annotation))
        })
    }

    /// The texts of what follows from these views, one after the other.
    fn texts(node: &mut Node, views: Vec<RuntimeView>) -> Vec<Vec<String>> {
        let mut transitions = Transitions::since(Arc::new(node.ledger.clone()));
        let mut step = |view| {
            node.decide(&Command::SeeContainers(view)).unwrap();
            let ledger = Arc::new(node.ledger.clone());
            let found = transitions.step(Arc::clone(&ledger));
            found.iter().map(|one| one.describe(&ledger, GpuName::Index)).collect()
        };
        views.into_iter().map(&mut step).collect()
    }

    #[test]
    fn a_limit_that_fails_or_is_changed_is_reported_once_for_each_container() {
        let mut node = Node::new();
        let id = node.grant("GPU-0", Some(0), "uid-1", "main");
        let other = node.grant("GPU-0", Some(1), "uid-1", "main");
        let shown = |limits: Vec<MemoryLimit>| {
            view(&[(id, limited("uid-1", limits.clone())), (other, limited("uid-1", limits))])
        };
        let found = texts(
            &mut node,
            vec![
                shown(vec![limit(LimitState::Set, 0)]),
                shown(vec![limit(LimitState::Set, 1)]),
                shown(vec![limit(LimitState::Failed, 2)]),
                shown(vec![limit(LimitState::Failed, 2)]),
                shown(vec![limit(LimitState::Late, 2)]),
            ],
        );
        let of_limits: Vec<Vec<_>> = found
            .iter()
            .map(|texts| texts.iter().filter(|text| text.contains("memory")).map(String::as_str).collect())
            .collect();
        assert_eq!(
            of_limits,
            [
                vec![],
                vec![
                    "the memory limit of 00000007-1 of team/pod-uid-1/main on GPU 0 was changed by something other than the guard, which has set it to 4096 MiB again"
                ],
                vec![
                    "00000007-1 of team/pod-uid-1/main is not limited to its 4096 MiB of memory on GPU 0: NVML does not answer"
                ],
                vec![],
                vec![],
            ]
        );
    }

    #[test]
    fn a_container_that_names_the_allocation_of_another_pod_is_reported_once() {
        let mut node = Node::new();
        let id = node.grant("GPU-0", Some(0), "uid-1", "main");
        let unknown = node.grant("GPU-0", Some(1), "", "");
        let claims = container("uid-2", "other", Tie::Environment);
        let own = container("uid-1", "main", Tie::Environment);
        let mut shown = view(&[(id, own), (unknown, Arc::clone(&claims))]);
        shown.containers.get_mut(&id).unwrap().push(claims);
        let again = RuntimeView { guard_run: 2, ..shown.clone() };
        let found = texts(&mut node, vec![shown, again]);
        let forged = |texts: &[String]| texts.iter().filter(|text| text.contains("names allocation")).count();
        assert_eq!(found.iter().map(|texts| forged(texts)).collect::<Vec<_>>(), [1, 0], "{found:?}");
    }

    #[test]
    fn what_the_guard_did_is_reported_once_while_the_pod_runs() {
        let mut node = Node::new();
        let bypass = |outcome, count| {
            Arc::new(ContainerBypass {
                namespace: "team".into(),
                pod: "p".into(),
                pod_uid: "uid-1".into(),
                container: "main".into(),
                outcome,
                detail: "NVIDIA_VISIBLE_DEVICES is \"all\"".into(),
                why: None,
                wall_ms: 1,
                count,
            })
        };
        let shown = |is_whole, pods: &[&str], bypasses| RuntimeView {
            is_whole,
            pods: pods.iter().map(|uid| (*uid).to_owned()).collect(),
            container_bypasses: bypasses,
            ..view(&[])
        };
        let denied = BypassOutcome::Denied;
        let found = texts(
            &mut node,
            vec![
                shown(true, &["uid-1"], vec![bypass(denied, 1)]),
                shown(true, &["uid-1"], vec![bypass(denied, 2)]),
                // Another run of the guard, which has not been sent the containers yet.
                shown(false, &[], vec![]),
                shown(true, &["uid-1"], vec![bypass(denied, 1)]),
                shown(true, &["uid-1"], vec![bypass(BypassOutcome::Failed, 1)]),
                shown(true, &[], vec![]),
                shown(true, &["uid-1"], vec![bypass(denied, 1)]),
            ],
        );
        let bypasses = |texts: &Vec<String>| texts.iter().filter(|text| text.contains("team/p/main")).count();
        assert_eq!(found.iter().map(bypasses).collect::<Vec<_>>(), [1, 0, 0, 0, 1, 0, 1], "{found:?}");
    }

    #[test]
    fn the_guard_comes_and_goes() {
        let mut node = Node::new();
        let away = RuntimeView { is_whole: false, ..view(&[]) };
        let found =
            texts(&mut node, vec![view(&[]), away.clone(), RuntimeView { guard_run: 3, ..away }, view(&[])]);
        let words: Vec<_> =
            found.iter().map(|texts| texts.iter().any(|text| text.contains("does not"))).collect();
        assert_eq!((words, found[2].len()), (vec![false, true, false, false], 0), "{found:?}");
    }
}

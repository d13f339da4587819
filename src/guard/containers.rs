//! The containers of the node that hold allocations, as the runtime's calls have shown them.

use crate::cgroup::ContainerCgroup;
use berth_kernel::grants::annotation::{self, ALLOCATION_VARIABLE, GrantAnnotation};
use berth_kernel::ids::names::AllocationId;
use berth_proto::guard::{self, Tie};
use berth_proto::nri::{Container, PodSandbox};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What the runtime has shown, and what is left of it.
#[derive(Debug, Default)]
pub(crate) struct Containers {
    /// UIDs of the pods by the id of their sandbox.
    sandboxes: BTreeMap<String, String>,
    /// Containers with allocations, by id.
    containers: BTreeMap<String, Known>,
}

#[derive(Debug)]
struct Known {
    /// As it is sent to the daemon.
    shown: Arc<guard::Container>,
    sandbox: String,
    /// `None` until it is started.
    cgroup: Option<ContainerCgroup>,
    /// The runtime has stopped or removed it, and its cgroup still has processes.
    outlives_its_end: bool,
}

impl Known {
    /// It was started in this cgroup. An unknown one, since the runtime named no process, does not replace a known one.
    fn start(&mut self, cgroup: Option<ContainerCgroup>) {
        self.cgroup = cgroup.or_else(|| self.cgroup.take());
        let is_cgroup_known = self.cgroup.is_some();
        if self.shown.is_cgroup_known != is_cgroup_known {
            self.shown =
                Arc::new(guard::Container { is_cgroup_known, ..guard::Container::clone(&self.shown) });
        }
    }
}

impl Containers {
    /// Replaces what is known by what the runtime shows, with the cgroups of containers that run. A container that the
    /// runtime does not show any more stays while its cgroup has processes.
    pub(crate) fn synchronize(
        &mut self,
        pods: &[PodSandbox],
        containers: &[Container],
        cgroup_of: impl Fn(&Container) -> Option<ContainerCgroup>,
    ) {
        let shown: BTreeSet<&String> = containers.iter().map(|container| &container.id).collect();
        let missing: Vec<String> = self.containers.keys().filter(|id| !shown.contains(id)).cloned().collect();
        for id in &missing {
            self.end(id);
        }
        // The runtime also shows sandboxes that have stopped, whose process is gone. Runtimes whose sandboxes have no
        // process show none at all.
        let has_processes = pods.iter().any(|pod| pod.pid != 0);
        let running = pods.iter().filter(|pod| !has_processes || pod.pid != 0);
        self.sandboxes = running.map(|pod| (pod.id.clone(), pod.uid.clone())).collect();
        let pods: BTreeMap<&String, &PodSandbox> = pods.iter().map(|pod| (&pod.id, pod)).collect();
        for container in containers {
            let Some(pod) = pods.get(&container.pod_sandbox_id) else { continue };
            self.create(pod, container);
            if self.is_known(&container.id) {
                self.start(&container.id, cgroup_of(container));
            }
        }
    }

    /// A container is being created, or was before. Returns whether anything changed.
    pub(crate) fn create(&mut self, pod: &PodSandbox, container: &Container) -> bool {
        let is_new = self.sandboxes.insert(pod.id.clone(), pod.uid.clone()).is_none();
        let ties = ties(pod, container);
        if ties.is_empty() {
            return is_new;
        }
        let shown = Arc::new(guard::Container {
            id: container.id.clone(),
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            pod_uid: pod.uid.clone(),
            name: container.name.clone(),
            ties,
            // Nothing of it runs yet.
            is_cgroup_known: true,
        });
        let cgroup = self.containers.remove(&container.id).and_then(|known| known.cgroup);
        let known = Known { shown, sandbox: pod.id.clone(), cgroup, outlives_its_end: false };
        self.containers.insert(container.id.clone(), known);
        true
    }

    /// Whether the container has an allocation.
    pub(crate) fn is_known(&self, id: &str) -> bool {
        self.containers.contains_key(id)
    }

    /// A container is being started in this cgroup; `None` if it cannot be found.
    pub(crate) fn start(&mut self, id: &str, cgroup: Option<ContainerCgroup>) {
        if let Some(known) = self.containers.get_mut(id) {
            known.start(cgroup);
        }
    }

    /// A container was stopped, has exited, or was removed. Returns whether it was known.
    pub(crate) fn end(&mut self, id: &str) -> bool {
        let Some(known) = self.containers.get_mut(id) else { return false };
        known.outlives_its_end = known.cgroup.as_ref().is_some_and(ContainerCgroup::has_processes);
        if !known.outlives_its_end {
            self.containers.remove(id);
        }
        true
    }

    /// A sandbox was stopped or removed, and the containers in it before. Returns whether it ran.
    pub(crate) fn end_sandbox(&mut self, id: &str) -> bool {
        let was_running = self.sandboxes.remove(id).is_some();
        let inside = self.containers.iter().filter(|(_, known)| known.sandbox == id);
        let inside: Vec<String> = inside.map(|(id, _)| id.clone()).collect();
        for id in &inside {
            self.end(id);
        }
        was_running || !inside.is_empty()
    }

    /// Removes containers that the runtime has stopped or removed and whose cgroup has no processes any more. Returns
    /// whether others are left.
    pub(crate) fn sweep(&mut self) -> bool {
        self.containers.retain(|_, known| {
            !known.outlives_its_end || known.cgroup.as_ref().is_some_and(ContainerCgroup::has_processes)
        });
        self.has_left()
    }

    /// Whether a container's processes are left although the runtime has stopped or removed it.
    pub(crate) fn has_left(&self) -> bool {
        self.containers.values().any(|known| known.outlives_its_end)
    }

    /// UIDs of the pods whose sandbox runs.
    pub(crate) fn pods(&self) -> BTreeSet<String> {
        self.sandboxes.values().cloned().collect()
    }

    /// The containers, by id.
    pub(crate) fn shown(&self) -> BTreeMap<String, Arc<guard::Container>> {
        self.containers.iter().map(|(id, known)| (id.clone(), Arc::clone(&known.shown))).collect()
    }
}

/// The allocations that a container was given. CRI-O copies the annotations of a pod to its containers, as containerd
/// does for those that `pod_annotations` of a runtime handler names: such a key is the pod author's, and no grant.
fn ties(pod: &PodSandbox, container: &Container) -> Vec<Tie> {
    let mut ties = BTreeMap::new();
    let variables = container.env.iter().filter_map(|variable| variable.split_once('='));
    for (_, id) in variables.filter(|(name, _)| name.starts_with(ALLOCATION_VARIABLE)) {
        // The pod may have set it, so another value is no error of Berth's.
        if let Ok(id) = AllocationId::parse(id) {
            ties.insert(id, false);
        }
    }
    let is_grant = |key: &String| annotation::is_key(key) && !pod.annotations.contains_key(key);
    for (key, value) in container.annotations.iter().filter(|(key, _)| is_grant(key)) {
        match GrantAnnotation::parse(value) {
            Ok(grant) => drop(ties.insert(grant.allocation, true)),
            Err(error) => {
                tracing::warn!(container = container.id, key, %error, "an annotation of a container is not used");
            }
        }
    }
    let tie = |(id, is_annotation): (AllocationId, _)| Tie { allocation: id.to_string(), is_annotation };
    ties.into_iter().map(tie).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    fn pod(id: &str) -> PodSandbox {
        PodSandbox {
            id: id.into(),
            name: format!("pod-{id}"),
            uid: format!("uid-{id}"),
            namespace: "team".into(),
            ..PodSandbox::default()
        }
    }

    fn container(id: &str, sandbox: &str, allocation: &str) -> Container {
        let annotations = [("berth.dev/grant.nvidia.com_gpu".to_owned(), format!("{allocation} GPU-1=4096"))];
        Container {
            id: id.into(),
            pod_sandbox_id: sandbox.into(),
            name: "main".into(),
            annotations: annotations.into(),
            ..Container::default()
        }
    }

    /// A cgroup with a process, or one without.
    fn cgroup(root: &Path, name: &str, has_processes: bool) -> ContainerCgroup {
        fs::write(root.join("cgroup.controllers"), "").unwrap();
        let folder = root.join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("cgroup.events"), format!("populated {}\n", u8::from(has_processes))).unwrap();
        ContainerCgroup::find_for_tests(&format!("0::/{name}\n"), root)
    }

    #[test]
    fn only_containers_with_allocations_are_kept_and_all_sandboxes() {
        let mut seen = Containers::default();
        let plain =
            Container { annotations: BTreeMap::new().into_iter().collect(), ..container("c", "s", "x") };
        seen.create(&pod("s"), &plain);
        assert!(seen.shown().is_empty());
        assert_eq!(seen.pods(), BTreeSet::from(["uid-s".to_owned()]));
        seen.create(&pod("s"), &container("c", "s", "0000002a-7"));
        let shown = seen.shown();
        assert_eq!(
            (shown["c"].pod_uid.as_str(), shown["c"].namespace.as_str(), shown["c"].name.as_str()),
            ("uid-s", "team", "main")
        );
    }

    #[test]
    fn an_annotation_is_stronger_than_a_variable_and_other_values_are_not_ties() {
        let mut both = container("c", "s", "0000002a-7");
        both.env = ["0000002a-7", "0000002a-8", "mine"]
            .iter()
            .zip(["A", "B", "C"])
            .map(|(id, name)| format!("{ALLOCATION_VARIABLE}{name}={id}"))
            .collect();
        both.annotations.insert("berth.dev/grant.other".into(), "nonsense".into());
        both.annotations.insert("example.com/grant".into(), "0000002a-9".into());
        let of = |pod: &PodSandbox| {
            let found = ties(pod, &both).into_iter().map(|tie| (tie.allocation, tie.is_annotation));
            found.collect::<Vec<_>>()
        };
        let found = of(&pod("s"));
        assert_eq!(found, [("0000002a-7".to_owned(), true), ("0000002a-8".to_owned(), false)]);
        // A runtime that copies the pod's annotations.
        let mut forger = pod("s");
        forger.annotations.insert("berth.dev/grant.nvidia.com_gpu".into(), "0000002a-7".into());
        assert_eq!(of(&forger)[0], ("0000002a-7".to_owned(), false));
    }

    #[test]
    fn a_container_that_ended_stays_while_its_cgroup_has_processes() {
        let root = tempfile::tempdir().unwrap();
        let mut seen = Containers::default();
        for (id, has_processes) in [("gone", false), ("left", true)] {
            seen.create(&pod("s"), &container(id, "s", "0000002a-7"));
            seen.start(id, Some(cgroup(root.path(), id, has_processes)));
        }
        seen.end_sandbox("s");
        assert!(seen.pods().is_empty());
        assert_eq!(seen.shown().into_keys().collect::<Vec<_>>(), ["left"]);
        assert!(seen.sweep(), "it is looked at again");
        let _ = cgroup(root.path(), "left", false);
        assert!(!seen.sweep() && seen.shown().is_empty());
    }

    #[test]
    fn a_container_whose_cgroup_cannot_be_found_is_shown_as_such_and_a_known_cgroup_is_kept() {
        let root = tempfile::tempdir().unwrap();
        let mut seen = Containers::default();
        let shown = |seen: &Containers| seen.shown()["c"].is_cgroup_known;
        seen.create(&pod("s"), &container("c", "s", "0000002a-7"));
        assert!(shown(&seen), "nothing of it runs");
        seen.start("c", None);
        assert!(!shown(&seen));
        seen.start("c", Some(cgroup(root.path(), "c", true)));
        assert!(shown(&seen));
        // The runtime has started again, and does not name the container's process.
        seen.synchronize(&[pod("s")], &[container("c", "s", "0000002a-7")], |_| None);
        assert!(shown(&seen));
        seen.end_sandbox("s");
        assert!(seen.has_left(), "its cgroup has processes");
    }

    #[test]
    fn a_container_that_was_never_started_ends_with_the_runtimes_removal() {
        let mut seen = Containers::default();
        seen.create(&pod("s"), &container("c", "s", "0000002a-7"));
        seen.end("c");
        assert!(seen.shown().is_empty() && !seen.has_left());
    }

    #[test]
    fn a_sandbox_that_has_stopped_does_not_run_unless_it_has_containers() {
        let with_pid = |id: &str, pid| PodSandbox { pid, ..pod(id) };
        let mut seen = Containers::default();
        let containers = [container("c", "odd", "0000002a-7")];
        seen.synchronize(
            &[with_pid("runs", 7), with_pid("stopped", 0), with_pid("odd", 0)],
            &containers,
            |_| None,
        );
        assert_eq!(seen.pods(), BTreeSet::from(["uid-odd".to_owned(), "uid-runs".to_owned()]));
        // A runtime whose sandboxes have no process.
        seen.synchronize(&[with_pid("a", 0), with_pid("b", 0)], &[], |_| None);
        assert_eq!(seen.pods(), BTreeSet::from(["uid-a".to_owned(), "uid-b".to_owned()]));
    }

    #[test]
    fn a_synchronization_replaces_what_was_known() {
        let root = tempfile::tempdir().unwrap();
        let mut seen = Containers::default();
        for (id, has_processes) in [("exited", false), ("left", true), ("kept", true)] {
            seen.create(&pod("s"), &container(id, "s", "0000002a-7"));
            seen.start(id, Some(cgroup(root.path(), id, has_processes)));
        }
        let shown = vec![container("kept", "s", "0000002a-7"), container("new", "t", "0000002a-8")];
        let orphan = container("orphan", "unknown", "0000002a-9");
        let containers: Vec<_> = shown.into_iter().chain([orphan]).collect();
        seen.synchronize(&[pod("s"), pod("t")], &containers, |_| None);
        assert_eq!(seen.shown().into_keys().collect::<Vec<_>>(), ["kept", "left", "new"]);
        assert_eq!(seen.pods(), BTreeSet::from(["uid-s".to_owned(), "uid-t".to_owned()]));
        assert!(seen.has_left());
    }
}

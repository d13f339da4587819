//! The containers of the node that hold allocations, as the runtime's calls have shown them.

use crate::cgroup::ContainerCgroup;
use berth_kernel::grants::annotation::{self, ALLOCATION_VARIABLE, GrantAnnotation};
use berth_kernel::ids::names::{AllocationId, GpuId, PartId};
use berth_proto::guard::{self, ContainerBypass, MemoryLimit, Tie};
use berth_proto::nri::{Container, Mount, PodSandbox};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the runtime has shown, and what is left of it.
#[derive(Debug)]
pub(crate) struct Containers {
    /// See [`Settings::claim_grants`].
    ///
    /// [`Settings::claim_grants`]: crate::settings::Settings::claim_grants
    claim_grants: PathBuf,
    /// UIDs of the pods by the id of their sandbox.
    sandboxes: BTreeMap<String, String>,
    /// Containers with allocations, by id.
    containers: BTreeMap<String, Known>,
    /// What the guard did about containers that could use GPUs that were not allocated to them, by the UID of the pod and the container's name.
    bypasses: BTreeMap<(String, String), ContainerBypass>,
}

/// The most [`ContainerBypass`] values that are kept: more than a node has containers.
const BYPASSES_MAX: usize = 1024;

#[derive(Debug)]
struct Known {
    /// As it is sent to the daemon.
    shown: Arc<guard::Container>,
    sandbox: String,
    /// See [`Grants::doubtful_key`].
    doubtful_key: Option<String>,
    /// `None` until it is started.
    cgroup: Option<ContainerCgroup>,
    /// The runtime has stopped or removed it, and its cgroup still has processes.
    outlives_its_end: bool,
}

impl Known {
    /// It was started in this cgroup. A known one that exists stays: the container's first process can have moved itself to
    /// a cgroup below it since.
    fn start(&mut self, cgroup: Option<ContainerCgroup>) {
        let known = self.cgroup.take();
        let is_kept = cgroup.is_none() || known.as_ref().is_some_and(|known| known.path().exists());
        self.cgroup = if is_kept { known.or(cgroup) } else { cgroup };
        let is_cgroup_known = self.cgroup.is_some();
        if self.shown.is_cgroup_known != is_cgroup_known {
            self.shown =
                Arc::new(guard::Container { is_cgroup_known, ..guard::Container::clone(&self.shown) });
        }
    }
}

impl Containers {
    pub(crate) fn new(claim_grants: PathBuf) -> Self {
        let (sandboxes, containers, bypasses) = Default::default();
        Self { claim_grants, sandboxes, containers, bypasses }
    }

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
        self.drop_bypasses_of_ended_pods();
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
        let Grants { doubtful_key, ties, limits } = Grants::of(pod, container, &self.claim_grants);
        if ties.is_empty() {
            return is_new;
        }
        // What is known of its limits stays, since a runtime that has started again shows all containers once more.
        let before = self.containers.remove(&container.id);
        let known_limit = |gpu: &GpuId| {
            let mut limits = before.iter().flat_map(|known| &known.shown.limits);
            limits.find(|limit| limit.gpu == gpu.as_str()).cloned()
        };
        let limit = |(gpu, granted_mib): (GpuId, u64)| {
            let new = MemoryLimit { gpu: gpu.to_string(), granted_mib, ..MemoryLimit::default() };
            known_limit(&gpu).filter(|known| known.granted_mib == granted_mib).unwrap_or(new)
        };
        let shown = Arc::new(guard::Container {
            id: container.id.clone(),
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            pod_uid: pod.uid.clone(),
            name: container.name.clone(),
            ties,
            // Nothing of it runs yet.
            is_cgroup_known: true,
            is_privileged: is_privileged(container),
            limits: limits.into_iter().map(limit).collect(),
        });
        let cgroup = before.and_then(|known| known.cgroup);
        let sandbox = pod.id.clone();
        let known = Known { shown, sandbox, doubtful_key, cgroup, outlives_its_end: false };
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

    /// A container's memory limits.
    pub(crate) fn limits_of(&self, id: &str) -> Vec<MemoryLimit> {
        self.containers.get(id).map_or_else(Vec::new, |known| known.shown.limits.clone())
    }

    /// The key of a container's grant that can be its pod author's, see [`Grants::doubtful_key`].
    pub(crate) fn doubtful_key_of(&self, id: &str) -> Option<String> {
        self.containers.get(id)?.doubtful_key.clone()
    }

    /// The containers that have memory limits and a known cgroup.
    pub(crate) fn all_limited(&self) -> Vec<(String, ContainerCgroup, Vec<MemoryLimit>)> {
        let limited = self.containers.iter().filter(|(_, known)| !known.shown.limits.is_empty());
        let with_cgroup =
            limited.filter_map(|(id, known)| Some((id.clone(), known.cgroup.clone()?, &known.shown.limits)));
        with_cgroup.map(|(id, cgroup, limits)| (id, cgroup, limits.clone())).collect()
    }

    /// Records what is known of a container's limit now. Returns whether that is new.
    pub(crate) fn set_limit(&mut self, id: &str, now: MemoryLimit) -> bool {
        let Some(known) = self.containers.get_mut(id) else { return false };
        let Some(at) = known.shown.limits.iter().position(|limit| limit.gpu == now.gpu) else { return false };
        let is_new = known.shown.limits[at] != now;
        if is_new {
            Arc::make_mut(&mut known.shown).limits[at] = now;
        }
        is_new
    }

    /// Removes readings of limits from before this time, milliseconds since 1970. Returns whether there were any.
    pub(crate) fn drop_readings_before(&mut self, oldest_ms: u64) -> bool {
        let mut is_any = false;
        for known in self.containers.values_mut() {
            let is_old =
                |limit: &MemoryLimit| limit.reading.as_ref().is_some_and(|read| read.wall_ms < oldest_ms);
            if known.shown.limits.iter().any(is_old) {
                is_any = true;
                let limits = &mut Arc::make_mut(&mut known.shown).limits;
                limits.iter_mut().filter(|limit| is_old(limit)).for_each(|limit| limit.reading = None);
            }
        }
        is_any
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
        self.drop_bypasses_of_ended_pods();
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

    /// Records what was done about a container, in the place of what was done before. Returns whether it differs from that.
    pub(crate) fn record_bypass(&mut self, bypass: ContainerBypass) -> bool {
        let key = (bypass.pod_uid.clone(), bypass.container.clone());
        let before = self.bypasses.get(&key);
        let is_new = before.is_none_or(|before| {
            (before.outcome, &before.details, &before.why) != (bypass.outcome, &bypass.details, &bypass.why)
        });
        let count = before.map_or(0, |before| before.count) + 1;
        if self.bypasses.len() >= BYPASSES_MAX && !self.bypasses.contains_key(&key) {
            let oldest =
                self.bypasses.iter().min_by_key(|(_, bypass)| bypass.wall_ms).map(|(key, _)| key.clone());
            oldest.and_then(|key| self.bypasses.remove(&key));
        }
        self.bypasses.insert(key, ContainerBypass { count, ..bypass });
        is_new
    }

    /// Forgets what was done about a container. Returns whether there was something.
    pub(crate) fn forget_bypass(&mut self, pod_uid: &str, container: &str) -> bool {
        self.bypasses.remove(&(pod_uid.to_owned(), container.to_owned())).is_some()
    }

    /// Forgets the containers of pods whose sandbox has ended.
    fn drop_bypasses_of_ended_pods(&mut self) {
        let running = self.pods();
        self.bypasses.retain(|(uid, _), _| running.contains(uid));
    }

    /// What the guard did about containers that could use GPUs that were not allocated to them.
    pub(crate) fn bypasses(&self) -> Vec<ContainerBypass> {
        self.bypasses.values().cloned().collect()
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

/// The most allocations that a container may name by what its pod's author can set: a container has no more resources.
const CLAIMS_MAX: usize = 64;

/// What a container was granted.
struct Grants {
    /// The key of a grant whose annotation can be the pod author's: the pod has the same annotation, and some runtimes copy
    /// the annotations of a pod to its containers.
    doubtful_key: Option<String>,
    ties: Vec<Tie>,
    /// MiB that the container may use of each GPU on which it has a limit.
    limits: BTreeMap<GpuId, u64>,
}

impl Grants {
    /// Reads the annotations of the container, which the kubelet sets, and the sources of the mounts that a claim gives it.
    /// CRI-O copies the annotations of a pod to its containers, as containerd does for those that `pod_annotations` of a
    /// runtime handler names: an annotation that the pod has, too, with the same value, is not used. What a pod's author can
    /// set counts as a variable, which the daemon believes only if it knows the holder.
    fn of(pod: &PodSandbox, container: &Container, claim_grants: &Path) -> Self {
        let variables = container.env.iter().filter_map(|variable| variable.split_once('='));
        let variables = variables.filter(|(name, _)| name.starts_with(ALLOCATION_VARIABLE));
        // Another value is no error of Berth's.
        let in_variables = variables.filter_map(|(_, id)| AllocationId::parse(id).ok());
        let of_pod = pod.annotations.iter().filter(|(key, _)| annotation::is_key(key));
        let in_pod = of_pod.filter_map(|(_, value)| Some(GrantAnnotation::parse(value).ok()?.allocation));
        let mut ties: BTreeMap<AllocationId, bool> =
            in_variables.chain(in_pod).take(CLAIMS_MAX).map(|id| (id, false)).collect();
        let mut parts: BTreeMap<PartId, Option<u64>> = BTreeMap::new();
        let (doubtful, given): (Vec<_>, Vec<_>) = container
            .annotations
            .iter()
            .filter(|(key, _)| annotation::is_key(key))
            .partition(|(key, value)| pod.annotations.get(*key) == Some(*value));
        let parse = |(key, value): (&String, &String)| {
            let error = match GrantAnnotation::parse(value) {
                Ok(grant) => return Some(grant),
                Err(error) => error,
            };
            tracing::warn!(container = container.id, key, %error, "an annotation of a container is not used");
            None
        };
        // Each grant once; an annotation counts more than a mount.
        let mut grants: BTreeMap<AllocationId, GrantAnnotation> =
            given.into_iter().filter_map(parse).map(|grant| (grant.allocation, grant)).collect();
        for grant in claim_grants_of(container, claim_grants) {
            grants.entry(grant.allocation).or_insert(grant);
        }
        for (id, grant) in grants {
            ties.insert(id, true);
            for (part, limit) in grant.parts {
                // Several grants add up.
                let sum = parts.entry(part).or_insert(Some(0));
                *sum = sum.zip(limit).map(|(sum, limit)| sum.saturating_add(limit));
            }
        }
        let tie = |(id, is_annotation): (AllocationId, _)| Tie { allocation: id.to_string(), is_annotation };
        // The hardware limits the memory of a MIG instance, and the driver limits no share of one.
        let gpus = parts.into_iter().filter(|(part, _)| !part.as_str().starts_with("MIG-"));
        let limits = gpus.filter_map(|(part, limit)| Some((GpuId::of_whole(&part), limit?))).collect();
        let doubtful_key = doubtful.first().map(|(key, _)| (*key).clone());
        Self { doubtful_key, ties: ties.into_iter().map(tie).collect(), limits }
    }
}

/// What Berth granted to a container through claims, as the container's mounts show.
pub(crate) fn claim_grants_of(
    container: &Container,
    claim_grants: &Path,
) -> impl Iterator<Item = GrantAnnotation> {
    container.mounts.iter().filter_map(|mount| of_claim(mount, claim_grants))
}

/// What a claim has granted to a container with this mount. The first two folders are the claim's and the request's; those
/// after them name the grant.
fn of_claim(mount: &Mount, claim_grants: &Path) -> Option<GrantAnnotation> {
    let path = Path::new(&mount.source).strip_prefix(claim_grants).ok()?;
    let folders: PathBuf = path.parent()?.iter().skip(2).collect();
    annotation::of_folders(&folders)
}

/// Whether a container may use all devices of the node, as privileged ones may.
pub(crate) fn is_privileged(container: &Container) -> bool {
    let resources = container.linux.as_ref().and_then(|linux| linux.resources.as_ref());
    let rules = resources.into_iter().flat_map(|resources| &resources.devices);
    let is_all = |access: &str| ['r', 'w', 'm'].iter().all(|right| access.contains(*right));
    rules
        .into_iter()
        .any(|rule| rule.allow && rule.major.is_none() && rule.minor.is_none() && is_all(&rule.access))
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_proto::guard::LimitState;
    use berth_proto::nri::{LinuxContainer, LinuxDeviceCgroup, LinuxResources, OptionalInt64};
    use std::fs;

    const GRANTS: &str = "/k/plugins/gpu.nvidia.com/grants";

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
        let mut seen = Containers::new(GRANTS.into());
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
            let found = Grants::of(pod, &both, Path::new(GRANTS))
                .ties
                .into_iter()
                .map(|tie| (tie.allocation, tie.is_annotation));
            found.collect::<Vec<_>>()
        };
        let found = of(&pod("s"));
        assert_eq!(found, [("0000002a-7".to_owned(), true), ("0000002a-8".to_owned(), false)]);
        // A runtime that copies the pod's annotations.
        let mut forger = pod("s");
        let key = "berth.dev/grant.nvidia.com_gpu";
        forger.annotations.insert(key.into(), both.annotations[key].clone());
        assert_eq!(of(&forger)[0], ("0000002a-7".to_owned(), false));
        // Without the copy, what the pod has set is known as its author's.
        forger.annotations.insert(key.into(), "0000002a-9 GPU-1".into());
        assert_eq!(of(&forger)[0], ("0000002a-7".to_owned(), true));
        assert_eq!(of(&forger)[2], ("0000002a-9".to_owned(), false));
    }

    #[test]
    fn limits_of_several_grants_add_up_unless_one_has_all_of_the_gpu() {
        let mut both = container("c", "s", "0000002a-7");
        for (resource, value) in
            [("b", "0000002a-8 GPU-1=1000 GPU-2=5"), ("c", "0000002a-9 GPU-2 GPU-3=7 MIG-GPU-9/1/0=4")]
        {
            both.annotations.insert(format!("berth.dev/grant.{resource}"), value.into());
        }
        let limit = |gpu, mib| (GpuId::parse(gpu).unwrap(), mib);
        assert_eq!(
            Grants::of(&pod("s"), &both, Path::new(GRANTS)).limits,
            BTreeMap::from([limit("GPU-1", 5096), limit("GPU-3", 7)])
        );
        // The pod has the annotation of the first grant, too: its author may have set it, with another value.
        let mut forger = pod("s");
        let key = "berth.dev/grant.nvidia.com_gpu";
        forger.annotations.insert(key.into(), "0000002a-7 GPU-1=99999".into());
        let grants = Grants::of(&forger, &both, Path::new(GRANTS));
        assert_eq!((grants.doubtful_key, grants.limits.len()), (None, 2), "the value is the kubelet's");
        forger.annotations.insert(key.into(), both.annotations[key].clone());
        let grants = Grants::of(&forger, &both, Path::new(GRANTS));
        assert_eq!(grants.doubtful_key.as_deref(), Some(key));
        assert_eq!(grants.limits, BTreeMap::from([limit("GPU-1", 1000), limit("GPU-3", 7)]));
    }

    #[test]
    fn a_mount_of_a_claim_is_a_grant_and_other_mounts_are_none() {
        let mount = |source: &str| Mount { source: source.into(), ..Mount::default() };
        let claimed = |mounts: &[&str]| Container {
            mounts: mounts.iter().map(|source| mount(source)).collect(),
            annotations: BTreeMap::new().into_iter().collect(),
            ..container("c", "s", "x")
        };
        let of = |mounts: &[&str]| {
            let Grants { ties, limits, .. } = Grants::of(&pod("s"), &claimed(mounts), Path::new(GRANTS));
            let ties: Vec<_> = ties.into_iter().map(|tie| (tie.allocation, tie.is_annotation)).collect();
            (ties, limits.into_iter().map(|(gpu, mib)| (gpu.to_string(), mib)).collect::<Vec<_>>())
        };
        let own = format!("{GRANTS}/uid-1/gpu/0000002a-7/GPU-1=4096/metadata.json");
        let other = format!("{GRANTS}/uid-1/other/0000002a-8/GPU-1=1000/GPU-2/metadata.json");
        let tie = |id: &str| (id.to_owned(), true);
        assert_eq!(of(&[&own, &own]), (vec![tie("0000002a-7")], vec![("GPU-1".into(), 4096)]));
        let both = (vec![tie("0000002a-7"), tie("0000002a-8")], vec![("GPU-1".into(), 5096)]);
        assert_eq!(of(&[&own, &other]), both);
        for source in [
            "/tmp/grants/uid-1/gpu/0000002a-7/GPU-1=4096/metadata.json",
            "/k/plugins/gpu.nvidia.com/grants",
            "/k/plugins/gpu.nvidia.com/grants/uid-1/gpu/metadata.json",
            "relative/0000002a-7",
            "",
        ] {
            assert_eq!(of(&[source]), (vec![], vec![]), "{source}");
        }
    }

    #[test]
    fn what_is_known_of_a_limit_stays_when_the_runtime_shows_the_container_again() {
        let mut seen = Containers::new(GRANTS.into());
        let shown = container("c", "s", "0000002a-7");
        seen.create(&pod("s"), &shown);
        let granted = seen.limits_of("c")[0].clone();
        assert_eq!((granted.gpu.as_str(), granted.granted_mib), ("GPU-1", 4096));
        let set = MemoryLimit { state: LimitState::Set.into(), ..granted };
        assert!(seen.set_limit("c", set.clone()) && !seen.set_limit("c", set.clone()));
        assert!(!seen.set_limit("other", set.clone()));
        seen.synchronize(&[pod("s")], &[shown], |_| None);
        assert_eq!(seen.shown()["c"].limits, [set]);
    }

    #[test]
    fn a_container_that_may_use_every_device_is_privileged() {
        let rule = |allow, major: Option<i64>, access: &str| LinuxDeviceCgroup {
            allow,
            major: major.map(|value| OptionalInt64 { value }),
            access: access.into(),
            ..LinuxDeviceCgroup::default()
        };
        for (rules, expected) in [
            (vec![rule(false, None, "rwm"), rule(true, Some(1), "rwm")], false),
            (vec![rule(true, None, "m")], false),
            (vec![rule(true, None, "rwm")], true),
            (Vec::new(), false),
        ] {
            let linux = LinuxContainer {
                resources: Some(LinuxResources { devices: rules.clone() }),
                ..LinuxContainer::default()
            };
            let container = Container { linux: Some(linux), ..Container::default() };
            assert_eq!(is_privileged(&container), expected, "{rules:?}");
        }
    }

    #[test]
    fn a_container_that_ended_stays_while_its_cgroup_has_processes() {
        let root = tempfile::tempdir().unwrap();
        let mut seen = Containers::new(GRANTS.into());
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
        let mut seen = Containers::new(GRANTS.into());
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
        let mut seen = Containers::new(GRANTS.into());
        seen.create(&pod("s"), &container("c", "s", "0000002a-7"));
        seen.end("c");
        assert!(seen.shown().is_empty() && !seen.has_left());
    }

    #[test]
    fn a_sandbox_that_has_stopped_does_not_run_unless_it_has_containers() {
        let with_pid = |id: &str, pid| PodSandbox { pid, ..pod(id) };
        let mut seen = Containers::new(GRANTS.into());
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
        let mut seen = Containers::new(GRANTS.into());
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

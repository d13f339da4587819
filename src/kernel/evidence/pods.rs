//! The pods of this node from a source that has all of them with their UIDs: the API server, or the
//! kubelet's Pods API. Unlike `List` and the checkpoint, such a source shows that a pod has ended
//! permanently, and which pods the next Allocate may be for.

use crate::ids::names::Resource;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Most pods of one view: several times the pods of any kubelet (110 by default, 250 at most in
/// practice), which leaves room for finished pods that are not deleted. At about 1 KiB each that is 2 MiB.
pub const PODS_MAX: usize = 2048;
/// Most deleted pods that are remembered: as many as a node deletes in the minutes by which a reconcile
/// pass may be late.
pub const DELETED_MAX: usize = 1024;

/// The source of a view of pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodsSource {
    /// The API server.
    ApiServer,
    /// The kubelet's Pods API.
    Kubelet,
}

impl PodsSource {
    /// Its value in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ApiServer => "apiServer",
            Self::Kubelet => "kubelet",
        }
    }
}

/// All pods of this node at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodsView {
    /// The source.
    pub source: PodsSource,
    /// Whether the source is connected. If not, only what it showed of ended pods is still certain.
    pub current: bool,
    /// When the list behind this view was requested, monotonic milliseconds: an older pod is in the
    /// list or has ended.
    pub listed_mono_ms: u64,
    /// Pods by the kubelet's UID.
    pub pods: BTreeMap<String, Arc<Pod>>,
    /// UIDs of pods that were in the view and were deleted, the newest last; at most [`DELETED_MAX`].
    pub deleted: VecDeque<String>,
    /// UIDs of pods that finished and are no longer in [`Self::pods`], the same way.
    pub finished: VecDeque<String>,
}

/// One pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// The kubelet's UID; for a mirror pod, the UID of its static pod.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its labels, sorted.
    pub labels: Vec<(String, String)>,
    /// It is a static pod, defined by a file on the node, and cannot be evicted.
    pub is_static: bool,
    /// What created it; `None` for a pod that is not created again.
    pub owner: Option<PodOwner>,
    /// Its stage.
    pub stage: Stage,
    /// When its deletion was requested, milliseconds since 1970.
    pub deletion_wall_ms: Option<u64>,
    /// When it was created, milliseconds since 1970.
    pub created_wall_ms: u64,
    /// Its containers, init containers first.
    pub containers: Vec<PodContainer>,
    /// How its spec gives access to GPUs that were not granted.
    pub bypass: Option<PodBypass>,
    /// Whether it has claims (DRA), by which it may have GPUs.
    pub has_claims: bool,
    /// The names of the ResourceClaims in its spec, which other pods can use, too; claims from templates are not among them.
    pub named_claims: Vec<String>,
}

/// The controller of a pod, which creates another one in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodOwner {
    /// Such as `ReplicaSet`, `StatefulSet`, `Job`.
    pub kind: String,
    /// Its name.
    pub name: String,
}

impl PodOwner {
    /// The owner among a pod's owner references, as kind, name and whether it is the controller: the controller, else
    /// the first. A mirror pod's is its node, which creates nothing.
    #[must_use]
    pub fn among(references: impl Iterator<Item = (String, String, bool)>) -> Option<Self> {
        let all: Vec<_> = references.collect();
        let place = all.iter().position(|(_, _, is_controller)| *is_controller).unwrap_or(0);
        let (kind, name, _) = all.into_iter().nth(place)?;
        (kind != "Node").then_some(Self { kind, name })
    }
}

impl Pod {
    /// Whether it belongs to a DaemonSet, which recreates an evicted pod on the same node at once.
    #[must_use]
    pub fn is_of_daemon_set(&self) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.kind == "DaemonSet")
    }

    /// Whether it has finished or its deletion was requested, so that another pod may have its name soon.
    fn is_leaving(&self) -> bool {
        self.stage == Stage::Finished || self.deletion_wall_ms.is_some()
    }
}

/// A pod's stage at the kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Not yet admitted by the kubelet.
    Waiting,
    /// Admitted by the kubelet.
    Admitted,
    /// Succeeded or failed permanently; its devices are free.
    Finished,
}

impl Stage {
    /// The stage by a pod's status. The kubelet sets `startTime` before it admits a pod, but writes the
    /// status only afterwards.
    #[must_use]
    pub fn of(phase: Option<&str>, started: bool) -> Self {
        match phase {
            Some("Succeeded" | "Failed") => Self::Finished,
            Some("Running") => Self::Admitted,
            _ if started => Self::Admitted,
            _ => Self::Waiting,
        }
    }
}

/// A container and its requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodContainer {
    /// Its name.
    pub name: String,
    /// Requested extended resources, with the count of each.
    pub requests: Vec<(Resource, u32)>,
}

/// What a view shows of one pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodState {
    /// It exists and is not finished.
    Alive,
    /// It finished: its kubelet reported that its containers have ended.
    Over,
    /// It is no longer at the API server. If it was force-deleted, its containers may still run.
    Gone,
    /// Not certain.
    Unknown,
}

impl PodsView {
    /// A view without pods of a source that is not connected.
    #[must_use]
    pub fn empty(source: PodsSource) -> Self {
        Self {
            source,
            current: false,
            listed_mono_ms: 0,
            pods: BTreeMap::new(),
            deleted: VecDeque::new(),
            finished: VecDeque::new(),
        }
    }

    /// The state of the pod with this UID. `since_mono_ms`: a time at which the kubelet had it; if a list
    /// requested later lacks it, it is gone.
    #[must_use]
    pub fn state_of(&self, uid: &str, since_mono_ms: u64) -> PodState {
        match self.pods.get(uid) {
            Some(pod) if pod.stage == Stage::Finished => PodState::Over,
            Some(_) if self.current => PodState::Alive,
            Some(_) => PodState::Unknown,
            None if self.finished.iter().any(|f| f == uid) => PodState::Over,
            None if self.deleted.iter().any(|d| d == uid) => match self.source {
                PodsSource::ApiServer => PodState::Gone,
                PodsSource::Kubelet => PodState::Over,
            },
            // The API server has only the mirror of a static pod, and the pod runs without it, too.
            None if self.listed_mono_ms > since_mono_ms && !is_of_static_pod(uid) => PodState::Gone,
            None => PodState::Unknown,
        }
    }

    /// Records that the pod with this UID has left the view; `finished`: it had finished before.
    pub fn record_removal(&mut self, uid: String, finished: bool) {
        let removed = if finished { &mut self.finished } else { &mut self.deleted };
        removed.retain(|known| *known != uid);
        removed.push_back(uid);
        if removed.len() > DELETED_MAX {
            removed.pop_front();
        }
    }

    /// Keeps only the UIDs of finished pods if there are more than [`PODS_MAX`] pods: a series of rejected
    /// admissions leaves thousands.
    pub fn drop_finished(&mut self) {
        if self.pods.len() <= PODS_MAX {
            return;
        }
        let finished = |pod: &Pod| pod.stage == Stage::Finished;
        let uids: Vec<String> =
            self.pods.iter().filter(|(_, pod)| finished(pod)).map(|(uid, _)| uid.clone()).collect();
        self.pods.retain(|_, pod| !finished(pod));
        uids.into_iter().for_each(|uid| self.record_removal(uid, true));
    }

    /// The view for a node that has too many pods even so: only how pods ended, and no other pod.
    #[must_use]
    pub fn ended_only(&self) -> Self {
        Self { current: false, listed_mono_ms: 0, pods: BTreeMap::new(), ..self.clone() }
    }

    /// Whether this view replaces a known one: the API server's view, while it is connected, has priority
    /// over the kubelet's, and a view of a connected source over one that is not.
    #[must_use]
    pub fn replaces(&self, known: &Self) -> bool {
        self.source == known.source
            || self.current && !(known.current && known.source == PodsSource::ApiServer)
    }

    /// Whether, while the source is connected, this name is that of a pod with another UID than `uid`.
    #[must_use]
    pub fn has_other_pod_of_name(&self, namespace: &str, name: &str, uid: &str) -> bool {
        let mut pods = self.pods.values();
        self.current && pods.any(|pod| pod.namespace == namespace && pod.name == name && pod.uid != uid)
    }

    /// The only pod with this name that neither finished nor is being deleted, if it was created by `by_wall_ms`.
    #[must_use]
    pub fn find_by_name(&self, namespace: &str, name: &str, by_wall_ms: u64) -> Option<&Pod> {
        let mut found = self
            .pods
            .values()
            .map(Arc::as_ref)
            .filter(|pod| pod.namespace == namespace && pod.name == name && !pod.is_leaving());
        let pod = found.next()?;
        (found.next().is_none() && pod.created_wall_ms <= by_wall_ms).then_some(pod)
    }
}

/// Whether this is the UID of a static pod: a hash of 32 hex digits (kubelet: `applyDefaults`), while the
/// API server's UIDs have dashes (RFC 9562).
#[must_use]
pub fn is_of_static_pod(uid: &str) -> bool {
    !uid.contains('-')
}

/// How a pod may reach GPUs that were not granted, without any device plugin: its own environment is appended after
/// the plugin's, NVIDIA's runtime may be configured to read GPUs from mounts, and a privileged container sees
/// all devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodBypass {
    /// How one of its containers reaches them.
    pub kind: BypassKind,
    /// The container's name.
    pub container: String,
}

/// How a container may reach GPUs that were not granted, the most explicit way first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BypassKind {
    /// It sets `NVIDIA_VISIBLE_DEVICES` itself.
    NamesGpus,
    /// It mounts a volume at [`DEVICE_MOUNTS`].
    MountsGpus,
    /// It is privileged.
    Privileged,
    /// It imports variables (`envFrom`) under a prefix that a key may complete to [`VISIBLE_DEVICES`].
    ImportsVariables,
}

/// The variable by which NVIDIA's container runtime selects GPUs, whatever set it.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// The folder below which NVIDIA's container runtime takes the targets of mounts as names of GPUs (strategy
/// `volume-mounts`; nvidia-container-toolkit: `requestsFromMounts`).
pub const DEVICE_MOUNTS: &str = "/var/run/nvidia-container-devices";

impl PodBypass {
    /// The most explicit bypass of a pod's containers; of equal ones the first.
    #[must_use]
    pub fn most_explicit(bypasses: impl Iterator<Item = Self>) -> Option<Self> {
        bypasses.min_by_key(|bypass| bypass.kind)
    }

    /// Whether a mount at this path names GPUs, in any spelling of the path.
    #[must_use]
    pub fn mounts_gpus(path: &str) -> bool {
        // `/var/run` is often a link, and a path may have empty parts.
        DEVICE_MOUNTS.rsplit('/').next().is_some_and(|folder| path.contains(folder))
    }

    /// Whether a variable under this prefix may be [`VISIBLE_DEVICES`]. Without a prefix, such a source cannot be
    /// distinguished from any other ConfigMap.
    #[must_use]
    pub fn may_name_gpus(prefix: &str) -> bool {
        !prefix.is_empty() && prefix != VISIBLE_DEVICES && VISIBLE_DEVICES.starts_with(prefix)
    }

    /// Whether this value of a container's own [`VISIBLE_DEVICES`] shows GPUs to it. `None`, a value from a reference
    /// (`valueFrom`), is not known and counts as showing them.
    #[must_use]
    pub fn shows_gpus(value: Option<&str>) -> bool {
        !matches!(value, Some("" | "void" | "none"))
    }

    /// One sentence for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let how = match self.kind {
            BypassKind::NamesGpus => "sets NVIDIA_VISIBLE_DEVICES itself, which overrides every grant",
            BypassKind::MountsGpus => {
                "mounts /var/run/nvidia-container-devices itself, which may name any GPU"
            }
            BypassKind::ImportsVariables => {
                "takes variables from elsewhere under a prefix that may set NVIDIA_VISIBLE_DEVICES"
            }
            BypassKind::Privileged => "is privileged and sees every GPU",
        };
        format!("its container {} {how}", self.container)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn resource() -> Resource {
        Resource::parse("nvidia.com/gpu").unwrap()
    }

    pub(crate) fn pod_without_containers(uid: &str, stage: Stage) -> Pod {
        Pod {
            uid: uid.into(),
            namespace: "team".into(),
            name: format!("pod-{uid}"),
            labels: Vec::new(),
            is_static: false,
            owner: None,
            stage,
            deletion_wall_ms: None,
            created_wall_ms: 1_000,
            containers: Vec::new(),
            bypass: None,
            has_claims: false,
            named_claims: Vec::new(),
        }
    }

    pub(crate) fn pod(uid: &str, stage: Stage, asks: u32) -> Arc<Pod> {
        let containers = vec![PodContainer { name: "main".into(), requests: vec![(resource(), asks)] }];
        Arc::new(Pod { containers, ..pod_without_containers(uid, stage) })
    }

    pub(crate) fn view(pods: &[Arc<Pod>]) -> PodsView {
        PodsView {
            source: PodsSource::ApiServer,
            current: true,
            listed_mono_ms: 10_000,
            pods: pods.iter().map(|p| (p.uid.clone(), Arc::clone(p))).collect(),
            deleted: VecDeque::from(["gone".to_owned()]),
            finished: VecDeque::from(["ended".to_owned()]),
        }
    }

    #[test]
    fn a_pod_is_over_once_finished_and_gone_once_deleted_or_missing_from_a_later_list() {
        let mut view = view(&[pod("a", Stage::Admitted, 1), pod("done", Stage::Finished, 1)]);
        assert_eq!(view.state_of("a", 0), PodState::Alive);
        assert_eq!(view.state_of("done", 0), PodState::Over);
        assert_eq!(view.state_of("gone", 20_000), PodState::Gone);
        assert_eq!(view.state_of("ended", 20_000), PodState::Over);
        assert_eq!(view.state_of("nev-er", 9_999), PodState::Gone, "the list is newer");
        assert_eq!(view.state_of("static", 9_999), PodState::Unknown, "it may run without its mirror");
        assert_eq!(view.state_of("nev-er", 10_000), PodState::Unknown, "it may be newer than the list");
        view.current = false;
        assert_eq!(view.state_of("a", 0), PodState::Unknown, "a disconnected source shows no pod alive");
        assert_eq!(view.state_of("done", 0), PodState::Over, "a finished pod stays finished");
    }

    #[test]
    fn the_api_server_has_priority_over_the_kubelet_while_connected() {
        let view_of = |source, current| PodsView { source, current, ..view(&[]) };
        let (api, kubelet) = (PodsSource::ApiServer, PodsSource::Kubelet);
        for (new, known, replaces) in [
            ((api, true), (api, true), true),
            ((api, false), (api, true), true),
            ((kubelet, false), (kubelet, true), true),
            ((kubelet, true), (api, true), false),
            ((kubelet, true), (api, false), true),
            ((kubelet, false), (api, false), false),
            ((kubelet, false), (api, true), false),
            ((api, true), (kubelet, true), true),
            ((api, false), (kubelet, true), false),
        ] {
            let (new_view, known_view) = (view_of(new.0, new.1), view_of(known.0, known.1));
            assert_eq!(new_view.replaces(&known_view), replaces, "{new:?} {known:?}");
        }
    }

    #[test]
    fn a_name_identifies_a_pod_if_it_is_unique_and_older_than_the_grant() {
        let view = view(&[pod("a", Stage::Admitted, 1)]);
        assert_eq!(view.find_by_name("team", "pod-a", 2_000).map(|p| p.uid.as_str()), Some("a"));
        assert!(view.find_by_name("team", "pod-a", 500).is_none(), "created after the grant");
        assert!(view.find_by_name("other", "pod-a", 2_000).is_none());
        let mut ambiguous = view.clone();
        let same_name = Pod { uid: "b".into(), ..Pod::clone(&view.pods["a"]) };
        ambiguous.pods.insert("b".into(), Arc::new(same_name));
        assert!(ambiguous.find_by_name("team", "pod-a", 2_000).is_none(), "two pods have this name");
    }
}

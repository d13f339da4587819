//! The pods of this node, as shown by somebody who knows all of them with their UIDs: the API
//! server, or the kubelet itself where it serves its pods. A source like `List` and the checkpoint,
//! but one that can say that a pod is over for good, and who may be asking next.

use super::ledger::Ledger;
use super::names::Resource;
use super::pod_bypass::PodBypass;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Most pods of one view: several times what any kubelet takes (110 by default, 250 at most in
/// practice), finished ones that nobody deleted among them. At about 1 KiB each that is 2 MiB.
pub const PODS_MAX: usize = 2048;
/// Deleted pods that are remembered, newest last: what a node deletes in the minutes that a round
/// may be late.
pub const DELETED_MAX: usize = 1024;
/// Most candidates of one request that policies are shown; more than may start at one moment.
pub const CANDIDATES_MAX: usize = 64;

/// Who shows the pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodsSource {
    /// The API server.
    ApiServer,
    /// The kubelet's Pods API.
    Kubelet,
}

impl PodsSource {
    /// As the API writes it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ApiServer => "apiServer",
            Self::Kubelet => "kubelet",
        }
    }
}

/// All pods of this node at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodsView {
    /// Who shows them.
    pub source: PodsSource,
    /// Whether the source is heard at present. What it said of a pod's end stays true if not.
    pub current: bool,
    /// When the list that this view goes back to was asked for, monotonic milliseconds: a pod of
    /// before that is in it, or over.
    pub listed_mono_ms: u64,
    /// By UID, as the kubelet knows it.
    pub pods: BTreeMap<String, Arc<Pod>>,
    /// UIDs of pods that were seen and deleted, the newest last; at most [`DELETED_MAX`].
    pub deleted: VecDeque<String>,
    /// UIDs of pods that finished and are not among [`Self::pods`] any more, the same way.
    pub finished: VecDeque<String>,
}

/// One pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// As the kubelet knows it: of a mirror pod, the UID of the static pod behind it.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its labels, sorted.
    pub labels: Vec<(String, String)>,
    /// A file on the node: nobody can evict it.
    pub is_static: bool,
    /// Belongs to a DaemonSet: evicted, it comes back to the same node at once.
    pub of_daemon_set: bool,
    /// How far it is.
    pub stage: Stage,
    /// When it was told to go, milliseconds since 1970, if it was.
    pub leaving_since_wall_ms: Option<u64>,
    /// When it was made, milliseconds since 1970.
    pub created_wall_ms: u64,
    /// Its containers, init containers first.
    pub containers: Vec<PodContainer>,
    /// How it may reach GPUs that it was not given.
    pub bypass: Option<PodBypass>,
}

/// How far a pod is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The kubelet has not taken it yet.
    Waiting,
    /// The kubelet has taken it.
    Admitted,
    /// It succeeded or failed for good; its devices are free.
    Finished,
}

impl Stage {
    /// By a pod's status. The kubelet sets `startTime` when it first takes a pod up, before it is
    /// admitted, but writes the status only afterwards.
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

/// What one container asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodContainer {
    /// Its name.
    pub name: String,
    /// Extended resources and how many of each.
    pub asks: Vec<(Resource, u32)>,
}

/// What a view says of one pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is there and not finished.
    Alive,
    /// It finished, by the word of its kubelet: its containers have ended.
    Over,
    /// The API server has it no longer. One that was deleted by force may still run.
    Gone,
    /// Nothing certain.
    Unknown,
}

/// A pod's container that may be the one that the kubelet asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The pod.
    pub pod: Arc<Pod>,
    /// The container's name.
    pub container: String,
}

impl PodsView {
    /// What became of the pod with this UID. `since_mono_ms`: a moment at which the kubelet had it; a
    /// list that was asked for later and lacks it says that it is gone.
    #[must_use]
    pub fn fate(&self, uid: &str, since_mono_ms: u64) -> Fate {
        match self.pods.get(uid) {
            Some(pod) if pod.stage == Stage::Finished => Fate::Over,
            Some(_) if self.current => Fate::Alive,
            Some(_) => Fate::Unknown,
            None if self.finished.iter().any(|f| f == uid) => Fate::Over,
            None if self.deleted.iter().any(|d| d == uid) => match self.source {
                PodsSource::ApiServer => Fate::Gone,
                PodsSource::Kubelet => Fate::Over,
            },
            // A static pod runs without its mirror, too, and the API server shows only that.
            None if self.listed_mono_ms > since_mono_ms && !is_of_static_pod(uid) => Fate::Gone,
            None => Fate::Unknown,
        }
    }

    /// Takes down that the pod with this UID is not shown any more; `finished`: it had ended.
    pub fn left(&mut self, uid: String, finished: bool) {
        let left = if finished { &mut self.finished } else { &mut self.deleted };
        left.retain(|known| *known != uid);
        left.push_back(uid);
        if left.len() > DELETED_MAX {
            left.pop_front();
        }
    }

    /// Makes room where more pods are shown than are taken: of finished ones only the UID is kept. An
    /// admission storm leaves thousands.
    pub fn shed(&mut self) {
        if self.pods.len() <= PODS_MAX {
            return;
        }
        let finished = |pod: &Pod| pod.stage == Stage::Finished;
        let gone: Vec<String> =
            self.pods.iter().filter(|(_, pod)| finished(pod)).map(|(uid, _)| uid.clone()).collect();
        self.pods.retain(|_, pod| !finished(pod));
        gone.into_iter().for_each(|uid| self.left(uid, true));
    }

    /// What is left to say where there are too many pods all the same: how pods ended, and of no other
    /// pod anything.
    #[must_use]
    pub fn silenced(&self) -> Self {
        Self { current: false, listed_mono_ms: 0, pods: BTreeMap::new(), ..self.clone() }
    }

    /// Whether this view takes the place of one that is known: the API server's goes before the
    /// kubelet's while it is heard, and any that is heard goes before one that is not.
    #[must_use]
    pub fn replaces(&self, known: &Self) -> bool {
        self.source == known.source
            || self.current && !(known.current && known.source == PodsSource::ApiServer)
    }

    /// The one pod of this name that is not over, if it was made before `by_wall_ms`.
    #[must_use]
    pub fn named(&self, namespace: &str, name: &str, by_wall_ms: u64) -> Option<&Pod> {
        let mut found = self
            .pods
            .values()
            .map(Arc::as_ref)
            .filter(|pod| pod.namespace == namespace && pod.name == name && pod.stage != Stage::Finished);
        let pod = found.next()?;
        (found.next().is_none() && pod.created_wall_ms <= by_wall_ms).then_some(pod)
    }
}

/// Whether this is the UID of a static pod: the kubelet makes it of a hash, in 32 hex digits (kubelet:
/// `applyDefaults`), while the API server's have dashes (RFC 9562).
#[must_use]
pub fn is_of_static_pod(uid: &str) -> bool {
    !uid.contains('-')
}

/// Containers that may be asking for `count` devices of `resource` now: Allocate names no pod, so
/// these are all whom we know that it can be for. The asker itself may be missing: the kubelet may hear
/// of it first. Empty where no source shows pods at present.
#[must_use]
pub fn candidates(ledger: &Ledger, resource: &Resource, count: usize) -> Vec<Candidate> {
    let Some(view) = ledger.pods.as_ref().filter(|view| view.current) else {
        return Vec::new();
    };
    let served: BTreeSet<(&str, &str)> = ledger
        .live
        .values()
        .filter(|a| a.resource == *resource)
        .filter_map(|a| Some((a.holder.pod_uid.as_deref()?, a.holder.container.as_deref()?)))
        .collect();
    let mut found = Vec::new();
    for pod in view.pods.values().filter(|pod| pod.stage == Stage::Waiting) {
        for container in &pod.containers {
            let asks = container
                .asks
                .iter()
                .any(|(asked, n)| asked == resource && usize::try_from(*n).is_ok_and(|n| n == count));
            if asks && !served.contains(&(pod.uid.as_str(), container.name.as_str())) {
                found.push(Candidate { pod: Arc::clone(pod), container: container.name.clone() });
            }
        }
        if found.len() >= CANDIDATES_MAX {
            break;
        }
    }
    found.truncate(CANDIDATES_MAX);
    found
}

#[cfg(test)]
mod tests {
    use super::super::time::Now;
    use super::*;

    fn resource() -> Resource {
        Resource::parse("nvidia.com/gpu").unwrap()
    }

    fn pod(uid: &str, stage: Stage, asks: u32) -> Arc<Pod> {
        Arc::new(Pod {
            uid: uid.into(),
            namespace: "team".into(),
            name: format!("pod-{uid}"),
            labels: Vec::new(),
            is_static: false,
            of_daemon_set: false,
            stage,
            leaving_since_wall_ms: None,
            created_wall_ms: 1_000,
            containers: vec![PodContainer { name: "main".into(), asks: vec![(resource(), asks)] }],
            bypass: None,
        })
    }

    fn view(pods: &[Arc<Pod>]) -> PodsView {
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
    fn a_pod_is_over_if_it_finished_and_gone_if_it_was_deleted_or_a_later_list_lacks_it() {
        let mut view = view(&[pod("a", Stage::Admitted, 1), pod("done", Stage::Finished, 1)]);
        assert_eq!(view.fate("a", 0), Fate::Alive);
        assert_eq!(view.fate("done", 0), Fate::Over);
        assert_eq!(view.fate("gone", 20_000), Fate::Gone);
        assert_eq!(view.fate("ended", 20_000), Fate::Over);
        assert_eq!(view.fate("nev-er", 9_999), Fate::Gone, "the list is of later");
        assert_eq!(view.fate("static", 9_999), Fate::Unknown, "it runs without its mirror");
        assert_eq!(view.fate("nev-er", 10_000), Fate::Unknown, "it may have come after the list");
        view.current = false;
        assert_eq!(view.fate("a", 0), Fate::Unknown, "a source that is silent vouches for nobody");
        assert_eq!(view.fate("done", 0), Fate::Over, "what is over stays over");
    }

    #[test]
    fn the_api_server_goes_before_the_kubelet_while_it_is_heard() {
        let of = |source, current| PodsView { source, current, ..view(&[]) };
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
            assert_eq!(of(new.0, new.1).replaces(&of(known.0, known.1)), replaces, "{new:?} {known:?}");
        }
    }

    #[test]
    fn only_the_one_pod_of_a_name_that_is_old_enough_is_meant() {
        let view = view(&[pod("a", Stage::Admitted, 1)]);
        assert_eq!(view.named("team", "pod-a", 2_000).map(|p| p.uid.as_str()), Some("a"));
        assert!(view.named("team", "pod-a", 500).is_none(), "made after the grant");
        assert!(view.named("other", "pod-a", 2_000).is_none());
        let mut twice = view.clone();
        let twin = Pod { uid: "b".into(), ..Pod::clone(&view.pods["a"]) };
        twice.pods.insert("b".into(), Arc::new(twin));
        assert!(twice.named("team", "pod-a", 2_000).is_none(), "two of one name: nobody knows which");
    }

    #[test]
    fn candidates_wait_ask_for_that_many_and_hold_nothing_yet() {
        let mut ledger = Ledger::default();
        assert!(candidates(&ledger, &resource(), 1).is_empty(), "no source");
        let pods = [
            pod("waits", Stage::Waiting, 1),
            pod("more", Stage::Waiting, 2),
            pod("runs", Stage::Admitted, 1),
        ];
        ledger.pods = Some(Arc::new(view(&pods)));
        let uids = |ledger: &Ledger, n| -> Vec<String> {
            candidates(ledger, &resource(), n).into_iter().map(|c| c.pod.uid.clone()).collect()
        };
        assert_eq!(uids(&ledger, 1), ["waits"]);
        assert_eq!(uids(&ledger, 2), ["more"]);
        let mut served = super::super::allocation::Allocation {
            id: super::super::names::AllocationId { store: 0, number: 1 },
            resource: resource(),
            devices: Vec::new(),
            granted_wall_ms: 0,
            holder: super::super::allocation::Holder::default(),
            overlapped: false,
            decision: super::super::allocation::Decision::default(),
            ended: None,
        };
        served.holder.pod_uid = Some("waits".into());
        served.holder.container = Some("main".into());
        let change = super::super::change::Change::Granted(served);
        let entry = super::super::change::Entry { at: Now::default(), changes: vec![change] };
        ledger.apply(&entry);
        assert!(uids(&ledger, 1).is_empty(), "its status is late, its allocation is not");
        let silent = PodsView { current: false, ..view(&pods) };
        ledger.pods = Some(Arc::new(silent));
        assert!(uids(&ledger, 2).is_empty(), "a silent source names nobody");
    }
}

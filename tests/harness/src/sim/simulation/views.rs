//! The sources of all pods by UID: the API server, and the kubelet's Pods API. What they have is the
//! truth, at times behind it; what of it reaches the keeper is late, doubled, out of order, or cut off.

use super::ends::Cause;
use super::event::Showing;
use super::kubelet::{Kubelet, uid};
use super::world::World;
use berth_kernel::evidence::pods::{Pod, PodsSource, PodsView, Stage, is_of_static_pod};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::Command;
use berth_kernel::node::ports::Clock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Views that may wait to be submitted.
const WAITING_MAX: usize = 6;

/// Whether the run of this seed has such sources. Not all have: the kubelet's own accounts must do
/// without. Those that docs/measurements.md names for rules broken on purpose go on without them.
pub(crate) fn has_sources(seed: u64) -> bool {
    [4, 5, 8, 10, 12, 14, 15].contains(&(seed % 16))
}

/// A pod as the API server has it.
#[derive(Clone, Copy, Debug)]
struct Row {
    stage: Stage,
    /// The number in its name.
    name: u32,
    leaving_since_wall_ms: Option<u64>,
    created_wall_ms: u64,
}

/// The sources, and the daemon's book of what they showed.
#[derive(Debug, Default)]
pub(crate) struct Views {
    rows: BTreeMap<u32, Row>,
    /// Pods up to this number were made.
    made: u32,
    /// Deleted by force: the API server has them no longer, whether or not they run.
    by_force: BTreeSet<u32>,
    /// The daemon's book, once a first list was whole. It dies with the daemon.
    known: Option<PodsView>,
    waiting: Vec<PodsView>,
}

impl Views {
    /// The daemon died, and what it knew with it.
    pub(crate) fn forget(&mut self) {
        self.known = None;
        self.waiting.clear();
    }

    /// Whether a pod was deleted by force.
    pub(crate) fn deleted_by_force(&self, pod_uid: &str) -> bool {
        self.by_force.iter().any(|pod| uid(*pod) == pod_uid)
    }

    /// A pod is at the API server before any kubelet sees it.
    fn follow(&mut self, kubelet: &Kubelet, wall_ms: u64) {
        for pod in self.made + 1..=kubelet.made() {
            let name = kubelet.name_number(pod);
            // A name is that of one object at a time.
            self.rows.retain(|_, row| row.name != name);
            let row =
                Row { stage: Stage::Waiting, name, leaving_since_wall_ms: None, created_wall_ms: wall_ms };
            self.rows.insert(pod, row);
        }
        self.made = kubelet.made();
    }

    /// The kubelet writes the status of its pods.
    fn write_status(&mut self, kubelet: &Kubelet) {
        for (pod, row) in &mut self.rows {
            if !kubelet.is_alive(*pod) {
                row.stage = Stage::Finished;
            } else if row.stage == Stage::Waiting && kubelet.held().any(|h| h.pod == *pod) {
                row.stage = Stage::Admitted;
            }
        }
    }

    /// The object of a pod goes: of one that ended, or by force of one that may run.
    fn delete(&mut self, which: u32, force: bool, kubelet: &Kubelet) -> Option<u32> {
        let may = |pod: &&u32| force || !kubelet.is_alive(**pod);
        let count = self.rows.keys().filter(may).count();
        let pod = self.rows.keys().filter(may).nth(which as usize % count.max(1)).copied()?;
        self.rows.remove(&pod);
        if force {
            self.by_force.insert(pod);
        }
        Some(pod)
    }

    /// The API server deletes a pod. Returns whether it has it.
    pub(crate) fn leave(&mut self, pod_uid: &str, wall_ms: u64) -> Option<u32> {
        let (pod, row) = self.rows.iter_mut().find(|(pod, _)| uid(**pod) == pod_uid)?;
        row.leaving_since_wall_ms.get_or_insert(wall_ms);
        Some(*pod)
    }

    /// Whether the API server has this pod.
    pub(crate) fn has(&self, pod_uid: &str) -> bool {
        self.rows.keys().any(|pod| uid(*pod) == pod_uid)
    }

    fn pods(&self) -> BTreeMap<String, Arc<Pod>> {
        let pods = self.rows.iter().map(|(pod, row)| {
            let pod = Pod {
                deletion_wall_ms: row.leaving_since_wall_ms,
                created_wall_ms: row.created_wall_ms,
                ..shown(*pod, format!("pod-{}", row.name), row.stage)
            };
            (pod.uid.clone(), Arc::new(pod))
        });
        pods.collect()
    }

    /// What the daemon's book becomes, and the view that it hands in.
    fn show(&mut self, how: Showing, kubelet: &Kubelet, now: Now) -> Option<PodsView> {
        let pods = self.pods();
        let known = match (how, &mut self.known) {
            (Showing::KubeletPods | Showing::KubeletSilent, _) => {
                return of_kubelet(kubelet, how == Showing::KubeletPods);
            }
            (Showing::List, known) => known.get_or_insert_with(|| PodsView::empty(PodsSource::ApiServer)),
            // Half a list would show that pods are gone; a watch continues from a list.
            (_, None) => return None,
            (Showing::Watch, Some(known)) if !known.current => return None,
            (_, Some(known)) => known,
        };
        match how {
            Showing::List | Showing::Watch => {
                for (uid, pod) in std::mem::replace(&mut known.pods, pods) {
                    if !known.pods.contains_key(&uid) && !pod.is_static {
                        known.record_removal(uid, pod.stage == Stage::Finished);
                    }
                }
                known.current = true;
                if how == Showing::List {
                    known.listed_mono_ms = now.mono_ms;
                }
            }
            Showing::Silent => known.current = false,
            Showing::TooMany => return Some(known.ended_only()),
            Showing::KubeletPods | Showing::KubeletSilent => {}
        }
        Some(known.clone())
    }
}

/// A pod's object, as far as it matters here.
fn shown(pod: u32, name: String, stage: Stage) -> Pod {
    let uid = uid(pod);
    Pod {
        is_static: is_of_static_pod(&uid),
        uid,
        namespace: "ns".into(),
        name,
        labels: Vec::new(),
        owner: None,
        stage,
        deletion_wall_ms: None,
        created_wall_ms: 0,
        containers: Vec::new(),
        bypass: None,
        has_claims: false,
        named_claims: Vec::new(),
    }
}

/// The kubelet's own pods: what it lacks says nothing, and what it says has ended has.
fn of_kubelet(kubelet: &Kubelet, current: bool) -> Option<PodsView> {
    if current && !kubelet.running {
        return None;
    }
    let mut view = PodsView::empty(PodsSource::Kubelet);
    view.current = current;
    for pod in 1..=kubelet.made() {
        if !kubelet.is_alive(pod) {
            view.record_removal(uid(pod), false);
        } else if kubelet.ready || is_of_static_pod(&uid(pod)) {
            let holds = kubelet.held().any(|h| h.pod == pod);
            let pod = shown(pod, kubelet.name(pod), if holds { Stage::Admitted } else { Stage::Waiting });
            view.pods.insert(pod.uid.clone(), Arc::new(pod));
        }
    }
    Some(view)
}

impl World {
    /// The kubelet writes its pods' status to the API server.
    pub(crate) fn write_status(&mut self) {
        self.views_follow();
        self.shows.write_status(&self.kubelet);
    }

    pub(crate) fn delete_pod(&mut self, which: u32, force: bool) {
        self.views_follow();
        let deleted = self.shows.delete(which, force, &self.kubelet);
        // The kubelet forgets a pod that is deleted by force. Of one with devices it may keep the books a while.
        if let Some(pod) = deleted.filter(|pod| !self.kubelet.held().any(|hold| hold.pod == *pod)) {
            self.kubelet.end_pod(pod);
        }
    }

    /// A source shows its pods; the view is submitted at once or waits.
    pub(crate) fn show_pods(&mut self, how: Showing, later: bool) {
        if self.daemon.is_none() {
            return;
        }
        self.views_follow();
        let now = self.around.hands.now();
        let Some(view) = self.shows.show(how, &self.kubelet, now) else { return };
        if !later {
            self.turn(&Command::Pods(view), Cause::Nothing);
        } else if self.shows.waiting.len() < WAITING_MAX {
            self.shows.waiting.push(view);
        }
    }

    /// One of the waiting views is submitted, however old.
    pub(crate) fn pods_arrive(&mut self, which: u32, keep: bool) {
        let waiting = &mut self.shows.waiting;
        if waiting.is_empty() {
            return;
        }
        let at = which as usize % waiting.len();
        let view = if keep { waiting[at].clone() } else { waiting.remove(at) };
        self.turn(&Command::Pods(view), Cause::Nothing);
    }

    fn views_follow(&mut self) {
        let wall_ms = self.around.hands.now().wall_ms;
        self.shows.follow(&self.kubelet, wall_ms);
    }
}

//! Whoever knows all pods by UID, evictions, and processes, in a history.

use super::Showing;
use super::world::{Held, PARTS, World, part};
use crate::allocation::EndReason;
use crate::change::{Change, Entry};
use crate::command::Command;
use crate::drain::Drain;
use crate::evict::{Outcome, asks, is_wanted};
use crate::gpu::Inventory;
use crate::ledger::Ledger;
use crate::pods::{Pod, PodsSource, PodsView, Stage};
use crate::process::{Owner, PodProcess, Process, Sight, Uses, Who};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// What the sources have, and what the daemon made of it.
#[derive(Default)]
pub(super) struct Sources {
    /// The API server's objects.
    objects: BTreeMap<String, Arc<Pod>>,
    /// Deleted by force: they may run on.
    pub(super) forced: BTreeSet<String>,
    /// Pods that live on although the kubelet forgot what they hold.
    pub(super) forgotten: Vec<Held>,
    /// The daemon's book, after a first list. It dies with the daemon.
    book: Option<PodsView>,
    /// A view of before, to come again or late.
    late: Option<PodsView>,
}

impl Sources {
    pub(super) fn made(&mut self, uid: &str) {
        self.objects.insert(uid.into(), Arc::new(object(uid, Stage::Waiting)));
    }

    pub(super) fn crashed(&mut self) {
        self.book = None;
        self.late = None;
    }
}

impl World {
    fn lives(&self, uid: &str) -> bool {
        self.pods.iter().chain(&self.sources.forgotten).any(|held| held.uid == uid)
    }

    /// The kubelet writes the status of its pods.
    pub(super) fn write_status(&mut self) {
        let uids: Vec<String> = self.sources.objects.keys().cloned().collect();
        for uid in uids {
            let stage = if self.lives(&uid) { Stage::Admitted } else { Stage::Finished };
            let pod = self.sources.objects.get_mut(&uid).unwrap();
            Arc::make_mut(pod).stage = stage;
        }
    }

    pub(super) fn delete_object(&mut self, which: usize, force: bool) {
        let may = |uid: &&String| force || !self.lives(uid);
        let uids: Vec<String> = self.sources.objects.keys().filter(may).cloned().collect();
        let Some(uid) = uids.get(which % uids.len().max(1)) else { return };
        self.sources.objects.remove(uid);
        if force {
            self.sources.forced.insert(uid.clone());
        }
    }

    /// The kubelet's checkpoint is lost with what one pod holds, and the pod lives on.
    pub(super) fn forgets(&mut self, which: usize) {
        if !self.pods.is_empty() {
            let lost = self.pods.remove(which % self.pods.len());
            self.file.clone_from(&self.pods);
            self.stale.retain(|held| *held != lost);
            self.sources.forgotten.push(lost);
        }
    }

    pub(super) fn show(&mut self, how: Showing) {
        let now = self.now.mono_ms;
        let view = match (how, &mut self.sources.book) {
            (Showing::Again, _) => self.sources.late.clone(),
            (Showing::Kubelets, _) => Some(self.of_kubelet()),
            (Showing::List, book) => {
                let book = book.get_or_insert_with(|| nothing(PodsSource::ApiServer));
                catch_up(book, &self.sources.objects);
                book.listed_mono_ms = now;
                Some(book.clone())
            }
            // What has not listed yet says nothing, and a watch goes on from what is heard.
            (_, None) => None,
            (Showing::Watch, Some(book)) if !book.current => None,
            (Showing::Watch, Some(book)) => {
                catch_up(book, &self.sources.objects);
                Some(book.clone())
            }
            (Showing::Silent, Some(book)) => {
                book.current = false;
                Some(book.clone())
            }
            (Showing::TooMany, Some(book)) => Some(book.silenced()),
        };
        let Some(view) = view else { return };
        if how != Showing::Again && now.is_multiple_of(3) {
            self.sources.late = Some(view.clone());
        }
        let before = self.ledger.live.clone();
        self.turn(&Command::Pods(view)).unwrap();
        assert_eq!(self.ledger.live, before, "a view alone ends nothing");
    }

    fn of_kubelet(&self) -> PodsView {
        let mut view = nothing(PodsSource::Kubelet);
        view.current = true;
        for held in &self.pods {
            view.pods.insert(held.uid.clone(), Arc::new(object(&held.uid, Stage::Admitted)));
        }
        for uid in (0..self.next_pod).map(|n| format!("uid-{n}")).filter(|uid| !self.lives(uid)) {
            view.left(uid, false);
        }
        view
    }

    /// One that is due is asked to leave, and the answer comes at once.
    pub(super) fn evict(&mut self, which: usize, outcome: usize) {
        let due = asks(&self.ledger, self.now);
        let Some(ask) = due.get(which % due.len().max(1)).cloned() else { return };
        let uid = ask.pod.uid.clone();
        let view = self.ledger.pods.as_ref().unwrap();
        assert!(view.current && view.source == PodsSource::ApiServer, "nobody is asked of a silent source");
        assert!(view.pods.contains_key(&uid) && is_wanted(&self.ledger, &uid), "{uid} is asked to leave");
        let outcome = match outcome {
            _ if !self.sources.objects.contains_key(&uid) => Outcome::Gone,
            0 => Outcome::Budget("one more".into()),
            1 => Outcome::Failed("no answer".into()),
            _ => Outcome::Taken,
        };
        if outcome == Outcome::Taken {
            self.pods.retain(|held| held.uid != uid);
            self.sources.forgotten.retain(|held| held.uid != uid);
        }
        self.turn(&Command::Asked { ask, outcome }).unwrap();
        assert!(self.ledger.evictions.contains_key(&uid));
        let again = asks(&self.ledger, self.now);
        assert!(again.iter().all(|ask| ask.pod.uid != uid), "{uid} is asked again at once");
    }

    /// A look that shows who is on the GPUs.
    pub(super) fn look_at_processes(&mut self, host: bool) {
        let mut look = Inventory {
            parts: (0..PARTS).map(part).collect(),
            sight: Sight::Visible,
            ..Inventory::default()
        };
        for gpu in (0..PARTS).map(|i| part(i).gpu().clone()) {
            look.processes.entry(gpu).or_default();
        }
        let uses = Uses { compute: true, ..Uses::default() };
        let mut add = |pid, on: &crate::names::PartId, owner| {
            let gpu = (0..PARTS).map(part).find(|p| p.id == *on).unwrap().gpu().clone();
            let who = Who { name: None, started_ticks: Some(1), owner, ignored: false };
            let process = Process { pid, part: on.clone(), uses, memory_mib: None, who };
            look.processes.get_mut(&gpu).unwrap().push(process);
        };
        for (pid, held) in self.pods.iter().chain(&self.sources.forgotten).enumerate() {
            let pod =
                PodProcess { uid: held.uid.clone(), container_id: None, container: Some("main".into()) };
            let parts: BTreeSet<_> = held.devices.iter().map(|d| &d.part).collect();
            for on in parts {
                add(u32::try_from(pid).unwrap() + 2, on, Owner::Pod(pod.clone()));
            }
        }
        if host {
            add(1, &part(0).id, Owner::NoPod { container_id: None });
        }
        let entry = self.turn(&Command::Look(look.clone())).unwrap();
        for change in &entry.changes {
            if let Change::DrainTurned { gpu, drain: Drain::Drained(_) } = change {
                assert!(look.processes[gpu].is_empty(), "{gpu} is drained with somebody on it");
            }
        }
    }

    /// I6, the second half: what ends by the word of whoever knows all pods is not shown alive by it,
    /// and without a checkpoint nothing else ends.
    pub(super) fn i6_whoever_knows_all_pods_has_a_say(&self, before: &Ledger, entry: &Entry, readable: bool) {
        for change in &entry.changes {
            let Change::Ended { id, reason } = change else {
                continue;
            };
            assert_eq!(*reason == EndReason::PodGone, !readable, "I6: {id} ended as {reason:?}");
            let uid = before.live[id].holder.pod_uid.as_ref();
            let shown = uid.and_then(|uid| {
                let view = before.pods.as_ref().filter(|view| view.current)?;
                view.pods.get(uid).filter(|pod| pod.stage != Stage::Finished)
            });
            let alive = shown.is_some() && *reason != EndReason::Superseded;
            assert!(!alive, "I6: {id} ended as {reason:?} and its pod is shown alive");
        }
    }
}

fn catch_up(book: &mut PodsView, objects: &BTreeMap<String, Arc<Pod>>) {
    for (uid, pod) in std::mem::replace(&mut book.pods, objects.clone()) {
        if !objects.contains_key(&uid) {
            book.left(uid, pod.stage == Stage::Finished);
        }
    }
    book.current = true;
}

fn nothing(source: PodsSource) -> PodsView {
    PodsView {
        source,
        current: false,
        listed_mono_ms: 0,
        pods: BTreeMap::new(),
        deleted: VecDeque::new(),
        finished: VecDeque::new(),
    }
}

/// As `List` names it, too.
fn object(uid: &str, stage: Stage) -> Pod {
    Pod {
        uid: uid.into(),
        namespace: "ns".into(),
        name: uid.into(),
        labels: Vec::new(),
        is_static: false,
        of_daemon_set: false,
        stage,
        leaving_since_wall_ms: None,
        created_wall_ms: 0,
        containers: Vec::new(),
        bypass: None,
    }
}

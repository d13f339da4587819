//! What is told of GPUs that are used, or may be used, past every grant. Pure, but for what was told.

use super::news::{About, Notice, bounded, calm, name_of, warning};
use berth_kernel::belongs::{Bypass, Owners, reaching};
use berth_kernel::ledger::Ledger;
use berth_kernel::names::PartId;
use berth_kernel::pod_bypass::PodBypass;
use berth_kernel::pods::Pod;
use berth_kernel::process::{Process, Seen};
use std::collections::{BTreeMap, BTreeSet};

/// What makes two bypasses one to people: a job that starts process after process is one. A pod may
/// call its processes what it likes, so of a pod only its UID counts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    gpu: PartId,
    who: Who,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    /// A pod, by UID.
    Pod(String),
    /// Processes of this name that are in no pod.
    Named(String),
}

/// What was told so far, and is not over.
#[derive(Debug, Default)]
pub(super) struct Bypasses {
    open: BTreeSet<Key>,
    /// UIDs of pods whose spec reaches GPUs.
    pods: BTreeSet<String>,
}

impl Bypasses {
    /// What is to be told of this snapshot: at most `room` notices. What finds no room is told of a
    /// later snapshot, if it is still so.
    pub(super) fn news(&mut self, ledger: &Ledger, room: usize) -> Vec<Notice> {
        let mut notices = Vec::new();
        let now = seen(ledger);
        for (key, one) in &now {
            if notices.len() < room && self.open.insert(key.clone()) {
                notices.push(used(ledger, key, one));
            }
        }
        self.forget(ledger, &now, room, &mut notices);
        self.may_reach(ledger, room, &mut notices);
        notices
    }

    /// What is over; of a GPU that nobody uses past its grants any more that is told.
    fn forget(
        &mut self,
        ledger: &Ledger,
        now: &BTreeMap<Key, Bypass>,
        room: usize,
        notices: &mut Vec<Notice>,
    ) {
        self.open.retain(|key| ledger.gpus.contains_key(&key.gpu));
        // One that came a moment ago in the place of another carries on what that did.
        let alone: BTreeSet<(&PartId, Who)> = ledger.processes.on.iter().flat_map(all_alone).collect();
        let used = |gpu: &PartId| alone.iter().any(|(on, _)| *on == gpu);
        // A GPU that does not answer any more says nothing of who is on it.
        let answers = |gpu: &PartId| ledger.processes.on.contains_key(gpu);
        let open: BTreeSet<PartId> = self.open.iter().map(|key| key.gpu.clone()).collect();
        for gpu in open.iter().filter(|gpu| answers(gpu) && !used(gpu)) {
            if notices.len() < room {
                let note = format!("{} is no longer used without an allocation", name_of(ledger, gpu));
                notices.push(calm("GPUBypassOver", "Look", note));
                self.open.retain(|key| key.gpu != *gpu);
            }
        }
        self.open.retain(|key| {
            !(answers(&key.gpu) && used(&key.gpu))
                || now.contains_key(key)
                || alone.contains(&(&key.gpu, key.who.clone()))
        });
    }

    /// Pods that came whose spec lets them reach GPUs, told on the pods themselves.
    fn may_reach(&mut self, ledger: &Ledger, room: usize, notices: &mut Vec<Notice>) {
        if let Some(view) = ledger.pods.as_ref().filter(|view| view.current) {
            self.pods.retain(|uid| view.pods.contains_key(uid));
        }
        for (pod, by) in reaching(ledger) {
            if notices.len() < room && !self.pods.contains(&pod.uid) {
                notices.push(reaches(pod, by));
                self.pods.insert(pod.uid.clone());
            }
        }
    }
}

/// Who is on a GPU that nothing explains, told or not yet.
fn all_alone<'l>((gpu, all): (&'l PartId, &'l Vec<Seen>)) -> impl Iterator<Item = (&'l PartId, Who)> {
    all.iter().filter(|seen| seen.alone_since.is_some()).map(move |seen| (gpu, who(&seen.process)))
}

fn who(process: &Process) -> Who {
    let named = || process.who.name.clone().unwrap_or_default();
    process.who.owner.pod().map_or_else(|| Who::Named(named()), |pod| Who::Pod(pod.uid.clone()))
}

/// One bypass for each key.
fn seen(ledger: &Ledger) -> BTreeMap<Key, Bypass> {
    // Whose a process is takes some finding out, and this is asked of every snapshot.
    if !ledger.processes.on.values().flatten().any(|seen| seen.told) {
        return BTreeMap::new();
    }
    let all = Owners::of(ledger).bypasses().into_iter().map(|bypass| {
        let (gpu, who) = (bypass.gpu.clone(), who(&bypass.process));
        (Key { gpu, who, reason: bypass.reason.as_str() }, bypass)
    });
    // The first of each: of many processes the one with the lowest id.
    all.rev().collect()
}

/// The note says nothing that differs from one process to the next: what comes again is counted as a
/// repetition then, not as another event.
fn used(ledger: &Ledger, key: &Key, one: &Bypass) -> Notice {
    let who = match &key.who {
        Who::Pod(uid) => {
            let known = ledger.pod_by_uid(uid);
            let name = known.and_then(|pod| Some(format!("{}/{}", pod.namespace?, pod.pod?)));
            format!("pod {}", name.unwrap_or_else(|| uid.clone()))
        }
        Who::Named(name) if name.is_empty() => "a process".into(),
        // Every process chooses its own name.
        Who::Named(name) => format!("process {}", name.escape_debug()),
    };
    let gpu = name_of(ledger, &key.gpu);
    warning(
        "GPUBypassed",
        "Look",
        format!("{gpu} is used without an allocation by {who}: {}", one.reason.words()),
    )
}

/// A privileged pod need not mean it, nor one that takes variables; one that names GPUs or mounts them does.
fn reaches(pod: &Pod, by: &PodBypass) -> Notice {
    Notice {
        about: About::Pod { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() },
        warning: matches!(by, PodBypass::NamesGpus { .. } | PodBypass::MountsGpus { .. }),
        reason: "GPUBypassPossible",
        action: "Look",
        note: bounded(format!("can use GPUs of this node without an allocation: {}", by.words())),
    }
}

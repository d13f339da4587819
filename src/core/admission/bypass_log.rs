//! Says once when a GPU begins to be used without an allocation, and once when that is over; and of
//! each pod whose spec lets it reach GPUs past every grant, once.

use berth_kernel::belongs::{Bypass, Owners, reaching};
use berth_kernel::ledger::Ledger;
use berth_kernel::names::PartId;
use berth_kernel::pod_bypass::PodBypass;
use berth_kernel::pods::Pod;
use std::collections::{BTreeMap, BTreeSet};

/// Most lines about single processes after one look, each way: a job of eight ranks on each of two
/// GPUs, and some room. What is beyond is one number; the API lists them all.
const LINES_MAX: usize = 20;

/// GPU, process id, start.
type Key = (PartId, u32, Option<u64>);

/// One that is told.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Told {
    who: String,
    why: String,
}

/// Those of one kind.
type Many = Vec<(Key, Told)>;

/// What was said so far.
#[derive(Default)]
pub(super) struct BypassLog {
    open: BTreeMap<Key, Told>,
    /// UIDs of pods that may.
    pods: BTreeSet<String>,
}

impl BypassLog {
    /// Compares what is with what was said, and says the difference.
    pub(super) fn tell(&mut self, ledger: &Ledger) {
        let now_open = Owners::of(ledger).bypasses().into_iter().map(named);
        let (began, ended) = self.turn(now_open.collect());
        for ((gpu, pid, _), Told { who, why }) in began.iter().take(LINES_MAX) {
            tracing::warn!(%gpu, pid, who, why, "a GPU is used without an allocation");
        }
        for ((gpu, pid, _), Told { who, .. }) in ended.iter().take(LINES_MAX) {
            tracing::info!(%gpu, pid, who, "a process no longer uses a GPU without an allocation");
        }
        let unsaid = began.len().saturating_sub(LINES_MAX) + ended.len().saturating_sub(LINES_MAX);
        if unsaid > 0 {
            tracing::warn!(
                unsaid,
                "more processes without an allocation came or went (`berth process bypass` lists them)"
            );
        }
        for (pod, by) in self.may(ledger) {
            let (namespace, name, why) = (&pod.namespace, &pod.name, by.words());
            tracing::info!(namespace, name, why, "a pod can use GPUs without an allocation");
        }
    }

    /// Pods that were not said yet, so many at a time.
    fn may<'l>(&mut self, ledger: &'l Ledger) -> Vec<(&'l Pod, &'l PodBypass)> {
        if let Some(view) = ledger.pods.as_ref().filter(|view| view.current) {
            self.pods.retain(|uid| view.pods.contains_key(uid));
        }
        let new = reaching(ledger).filter(|(pod, _)| !self.pods.contains(&pod.uid));
        let new: Vec<_> = new.take(LINES_MAX).collect();
        self.pods.extend(new.iter().map(|(pod, _)| pod.uid.clone()));
        new
    }

    /// What is new and what is over.
    fn turn(&mut self, now_open: BTreeMap<Key, Told>) -> (Many, Many) {
        let not_in = |all: &BTreeMap<Key, Told>, other: &BTreeMap<Key, Told>| -> Many {
            let missing = all.iter().filter(|(key, _)| !other.contains_key(*key));
            missing.map(|(key, told)| (key.clone(), told.clone())).collect()
        };
        let turned = (not_in(&now_open, &self.open), not_in(&self.open, &now_open));
        self.open = now_open;
        turned
    }
}

/// A process by what names it, and in words.
fn named(bypass: Bypass) -> (Key, Told) {
    let who = &bypass.process.who;
    // Every process chooses its own name: no line break of its gets into the log.
    let name = who.name.as_deref().unwrap_or("a process").escape_debug().to_string();
    let pod = who.owner.pod().map_or_else(String::new, |pod| format!(" of pod {}", pod.uid));
    let told = Told { who: name + &pod, why: bypass.reason.words() };
    ((bypass.gpu, bypass.process.pid, who.started_ticks), told)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_said_once_when_it_begins_and_once_when_it_ends() {
        let gpu = PartId::parse("GPU-0").unwrap();
        let one = |start: u64| {
            let told = Told { who: format!("p{start}"), why: "because".into() };
            ((gpu.clone(), 7, Some(start)), told)
        };
        let mut log = BypassLog::default();
        let mut turn = |all: Many| log.turn(all.into_iter().collect());
        assert_eq!(turn(vec![one(1)]), (vec![one(1)], vec![]));
        assert_eq!(turn(vec![one(1)]), (vec![], vec![]));
        // Another process with the same id.
        assert_eq!(turn(vec![one(2)]), (vec![one(2)], vec![one(1)]));
        assert_eq!(turn(vec![]), (vec![], vec![one(2)]));
        assert_eq!(turn(vec![]), (vec![], vec![]));
    }
}

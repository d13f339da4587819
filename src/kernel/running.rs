//! Sources that show a pod running. While one does, an operator's `end` is refused; it is checked against the newest
//! ledger, in the turn that would end the allocation.

use super::allocation::Allocation;
use super::attribution::{Attribution, attribute_process};
use super::ledger::Ledger;
use super::pods::{Fate, PodsSource};
use super::time::Now;
use std::fmt;

/// Most process ids in one message; further ones are counted.
const PIDS_SHOWN_MAX: usize = 8;

/// A source that shows the pod running, or the reason why no source can rule it out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunningSource {
    /// No reconcile pass has read the kubelet's List and checkpoint since the grant, or since the daemon started.
    NotRead,
    /// It was granted, or read from the store, so recently that a container may be starting that no source shows yet.
    JustGranted {
        /// Time since then, milliseconds.
        age_ms: u64,
    },
    /// The kubelet's `List`.
    List,
    /// The kubelet's checkpoint.
    Checkpoint,
    /// The API server or the kubelet's Pods API shows the pod alive.
    Pods(PodsSource),
    /// Its pod has processes with these ids on its GPUs.
    Processes(Vec<u32>),
}

impl fmt::Display for RunningSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRead => write!(
                f,
                "the kubelet's checkpoint, or List where its pod is known, has not been read since it was granted or read from the store"
            ),
            Self::JustGranted { age_ms } => write!(
                f,
                "it was granted or read from the store {} s ago, and its container may be starting",
                age_ms / 1000
            ),
            Self::List => write!(f, "the kubelet's pod resources API (List) shows its pod"),
            Self::Checkpoint => write!(f, "the kubelet's checkpoint shows it"),
            Self::Pods(PodsSource::ApiServer) => write!(f, "the API server shows its pod"),
            Self::Pods(PodsSource::Kubelet) => write!(f, "the kubelet's Pods API shows its pod"),
            Self::Processes(pids) => {
                let shown: Vec<_> = pids.iter().take(PIDS_SHOWN_MAX).map(ToString::to_string).collect();
                write!(f, "processes of its pod are on the GPU: {}", shown.join(" "))?;
                match pids.len().saturating_sub(shown.len()) {
                    0 => Ok(()),
                    more => write!(f, " and {more} more"),
                }
            }
        }
    }
}

/// Every source that shows the pod of `allocation` running, the most certain last. If none does, an operator may end it
/// without force. A source that cannot be read counts as it was last read; `--force` is for sources that stay
/// unreadable.
#[must_use]
pub fn running_sources(ledger: &Ledger, allocation: &Allocation, now: Now) -> Vec<RunningSource> {
    let mut found = Vec::new();
    let sighting = ledger.sightings.get(&allocation.id);
    let since_ms = sighting.map_or(now.mono_ms, |s| s.since_mono_ms);
    let fate = ledger.fate_of(allocation);
    // A pod that its kubelet reported as finished has no containers left, whatever the kubelet still lists.
    if fate != Fate::Over {
        let shown = sighting.and_then(|s| s.shown);
        if shown.is_none() {
            found.push(RunningSource::NotRead);
        }
        if !now.passed(since_ms, ledger.rules.timing.reply_settle_ms) {
            found.push(RunningSource::JustGranted { age_ms: now.mono_ms.saturating_sub(since_ms) });
        }
        let shown = shown.unwrap_or_default();
        found.extend(shown.by_checkpoint.then_some(RunningSource::Checkpoint));
        found.extend(shown.by_list.then_some(RunningSource::List));
    }
    if let Some(view) = ledger.pods.as_ref().filter(|_| fate == Fate::Alive) {
        found.push(RunningSource::Pods(view.source));
    }
    let pids = pids(ledger, allocation);
    if !pids.is_empty() {
        found.push(RunningSource::Processes(pids));
    }
    found
}

/// Ids of processes that use this allocation, or possibly another of its pod.
fn pids(ledger: &Ledger, allocation: &Allocation) -> Vec<u32> {
    let gpus = ledger.gpus_of(allocation);
    let on = gpus.into_iter().filter_map(|gpu| Some((gpu, ledger.processes.by_gpu.get(gpu)?)));
    let mut pids: Vec<u32> = on
        .flat_map(|(gpu, processes)| processes.iter().map(move |seen| (gpu, &seen.process)))
        .filter(|(gpu, process)| match attribute_process(ledger, gpu, process) {
            Attribution::To(id) => id == allocation.id,
            Attribution::OneOf(ids) => ids.contains(&allocation.id),
            Attribution::Possibly(_) | Attribution::Ignored | Attribution::Unexplained(_) => false,
        })
        .map(|(_, process)| process.pid)
        .collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_node::{Node, of_pod, process};

    #[test]
    fn processes_of_its_pod_keep_an_allocation_from_ending_and_others_do_not() {
        let mut node = Node::new();
        let id = node.grant("GPU-0", Some(0), "pod-a", "main");
        node.grant("GPU-0", Some(1), "pod-b", "main");
        node.pass(60);
        let found = |node: &Node| {
            let mut found = running_sources(&node.ledger, &node.ledger.live[&id], node.now);
            found.retain(|source| *source != RunningSource::NotRead);
            found
        };
        node.look(&[("GPU-0", process(7, "GPU-0", of_pod("pod-b", "main")))]);
        assert_eq!(found(&node), [], "the process is another pod's");
        let own = |pid| ("GPU-0", process(pid, "GPU-0", of_pod("pod-a", "main")));
        node.look(&[own(9), own(8), ("GPU-0", process(7, "GPU-0", of_pod("pod-b", "main")))]);
        assert_eq!(found(&node), [RunningSource::Processes(vec![8, 9])]);
        node.look(&[]);
        assert_eq!(found(&node), [], "only the newest scan counts");
    }

    #[test]
    fn a_message_names_eight_processes_and_counts_the_others() {
        let message = RunningSource::Processes((1..=20).collect()).to_string();
        assert!(message.ends_with(": 1 2 3 4 5 6 7 8 and 12 more"), "{message}");
    }
}

//! Sources that show a pod running. While one does, an operator's `end` is refused; it is checked against the newest
//! ledger, in the turn that would end the allocation.

use crate::evidence::attribution::{Attribution, attribute_process};
use crate::evidence::pods::PodState;
use crate::evidence::runtime::RuntimeState;
use crate::evidence::sighting::RunningSource;
use crate::grants::allocation::{Allocation, GrantOrigin};
use crate::ids::time::Now;
use crate::node::ledger::Ledger;

/// Every source that shows the pod of `allocation` running, the most certain last. If none does, an operator may end it
/// without force. A source that cannot be read counts as it was last read; `--force` is for sources that stay
/// unreadable.
#[must_use]
pub fn running_sources(ledger: &Ledger, allocation: &Allocation, now: Now) -> Vec<RunningSource> {
    let mut found = Vec::new();
    let sighting = ledger.sightings.get(&allocation.id);
    let since_ms = sighting.map_or(now.mono_ms, |s| s.since_mono_ms);
    let pod_state = ledger.pod_state_of(allocation);
    // A pod that its kubelet reported as finished has no containers left, whatever the kubelet still lists. Of a claim
    // the kubelet lists no devices.
    if pod_state != PodState::Over && allocation.origin == GrantOrigin::DevicePlugin {
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
    if let Some(view) = ledger.pods.as_ref().filter(|_| pod_state == PodState::Alive) {
        found.push(RunningSource::Pods(view.source));
    }
    if ledger.runtime_state_of(allocation) == RuntimeState::Exists {
        found.push(RunningSource::Runtime);
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
    let on = gpus.iter().filter_map(|gpu| Some((gpu, ledger.processes.by_gpu.get(gpu)?)));
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
    use crate::node::test_node::{Node, of_pod, process};

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
}

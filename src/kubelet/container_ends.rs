//! Reconcile passes after the container runtime showed the end of a container that holds devices. The kubelet releases
//! the devices a moment later, and such a pass then ends the allocation.

use berth_kernel::evidence::runtime::RuntimeView;
use berth_kernel::ids::names::AllocationId;
use berth_kernel::node::ledger::Ledger;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// When passes run after an end: the kubelet takes up to seconds to release the devices of a pod, and it is slow when
/// many pods end. Later, the periodic passes remain.
const PASSES: [Duration; 4] =
    [Duration::ZERO, Duration::from_millis(300), Duration::from_secs(1), Duration::from_secs(3)];
/// Least time from one of these passes to the next, so that pods that end one after another share passes.
const APART: Duration = Duration::from_millis(300);

/// The ends that were shown, and the passes that are due.
#[derive(Debug, Default)]
pub(super) struct ContainerEnds {
    /// The view that was evaluated last.
    view: Option<Arc<RuntimeView>>,
    /// Live allocations whose container and sandbox have ended.
    ended: BTreeSet<AllocationId>,
    due: VecDeque<Instant>,
    last: Option<Instant>,
}

impl ContainerEnds {
    /// Plans passes if the runtime shows more ends than before. It is called with each snapshot, and most snapshots
    /// have the view of the one before.
    pub(super) fn update(&mut self, ledger: &Ledger, now: Instant) {
        if self.view.as_ref().map(Arc::as_ptr) == ledger.runtime.as_ref().map(Arc::as_ptr) {
            return;
        }
        self.view.clone_from(&ledger.runtime);
        let ended = ledger.gone_by_runtime();
        if !ended.is_subset(&self.ended) {
            let first = self.last.map_or(now, |last| now.max(last + APART));
            self.due = PASSES.iter().map(|wait| first + *wait).collect();
        }
        self.ended = ended;
    }

    /// Waits for the next pass; for ever if none is planned.
    pub(super) async fn due(&self) {
        match self.due.front() {
            Some(at) => sleep_until(*at).await,
            None => std::future::pending().await,
        }
    }

    /// A pass begins. The others are dropped if no allocation is left whose container has ended.
    pub(super) fn count_pass(&mut self, ledger: &Ledger) {
        let now = Instant::now();
        self.last = Some(now);
        // Passes that became due during a long pass are not made up for.
        while self.due.front().is_some_and(|at| *at <= now) {
            self.due.pop_front();
        }
        self.ended.retain(|id| ledger.live.contains_key(id));
        if self.ended.is_empty() {
            self.due.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::evidence::runtime::{RuntimeContainer, Tie};
    use berth_kernel::grants::allocation::{Allocation, Decision, GrantOrigin, Holder};
    use berth_kernel::ids::names::Resource;
    use berth_kernel::ids::time::Now;
    use berth_kernel::node::change::{Change, Entry};

    fn allocation(number: u64) -> Allocation {
        Allocation {
            id: AllocationId { store: 1, number },
            resource: Resource::parse("nvidia.com/gpu").unwrap(),
            devices: Vec::new(),
            granted_wall_ms: 0,
            origin: GrantOrigin::DevicePlugin,
            holder: Holder { pod_uid: Some(format!("uid-{number}")), ..Holder::default() },
            overlapped: false,
            decision: Decision::default(),
            ended: None,
        }
    }

    fn apply(ledger: &mut Ledger, change: Change) {
        ledger.apply(&Entry { at: Now::default(), changes: vec![change] });
    }

    /// The runtime shows the containers of these allocations.
    fn show(ledger: &mut Ledger, numbers: &[u64]) {
        let container = |number: u64| RuntimeContainer {
            id: format!("c{number}"),
            namespace: "team".into(),
            pod: format!("pod-{number}"),
            pod_uid: format!("uid-{number}"),
            name: "main".into(),
            tie: Tie::Annotation,
            is_cgroup_known: true,
            is_privileged: false,
            limits: Vec::new(),
        };
        let containers =
            numbers.iter().map(|n| (AllocationId { store: 1, number: *n }, vec![Arc::new(container(*n))]));
        let view = RuntimeView {
            is_whole: true,
            guard_run: 1,
            pods: numbers.iter().map(|n| format!("uid-{n}")).collect(),
            containers: containers.collect(),
            ..RuntimeView::default()
        };
        apply(ledger, Change::RuntimeSeen(Arc::new(view)));
    }

    #[tokio::test]
    async fn an_end_plans_four_passes_which_are_dropped_once_the_allocation_has_ended() {
        let (mut ends, mut ledger, now) = (ContainerEnds::default(), Ledger::default(), Instant::now());
        for number in [1, 2] {
            apply(&mut ledger, Change::Granted(allocation(number)));
        }
        show(&mut ledger, &[1, 2]);
        ends.update(&ledger, now);
        assert!(ends.due.is_empty(), "nothing has ended");
        show(&mut ledger, &[2]);
        ends.update(&ledger, now);
        assert_eq!(ends.due, PASSES.map(|wait| now + wait));
        ends.due().await;
        ends.count_pass(&ledger);
        assert!(!ends.due.is_empty(), "the kubelet may not have released it yet");
        let ended = Change::Ended {
            id: AllocationId { store: 1, number: 1 },
            reason: berth_kernel::grants::allocation::EndReason::Released,
        };
        apply(&mut ledger, ended);
        ends.update(&ledger, now);
        ends.count_pass(&ledger);
        assert!(ends.due.is_empty());
        // The next end shortly after: its first pass keeps its distance.
        let last = ends.last.unwrap();
        show(&mut ledger, &[]);
        ends.update(&ledger, last);
        assert_eq!(ends.due.front(), Some(&(last + APART)));
    }
}

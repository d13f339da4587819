//! The progress of a drain, as the API shows it.

use crate::node_facts::Step;
use berth_api::{DrainHolder, DrainHolderState, DrainProgress, rfc3339};
use berth_kernel::drain::Order;
use berth_kernel::evict::{EvictionStatus, GpuHolder, holders};
use berth_kernel::ledger::Ledger;
use berth_kernel::names::{AllocationId, PartId};
use berth_kernel::time::Now;
use std::collections::BTreeSet;

/// The progress of the order for this GPU. `api_server`: the connection to the API server, if it is used.
pub(crate) fn progress(
    ledger: &Ledger,
    gpu: &PartId,
    order: &Order,
    api_server: Option<&Step>,
    now: Now,
) -> DrainProgress {
    let holders = holders(ledger, gpu);
    let allocations: BTreeSet<AllocationId> =
        holders.iter().flat_map(|h| h.allocations.iter().copied()).collect();
    // The process list of a GPU includes its instances.
    let whole = ledger.processes_on(gpu);
    let parts = ledger.parts.values().filter(|p| p.part.gpu() == gpu);
    let seen = parts.filter_map(|p| ledger.processes_on(&p.part.id));
    DrainProgress {
        evict: order.evict,
        deadline: order.deadline_wall_ms.map(rfc3339),
        seconds_left: order.deadline_wall_ms.map(|deadline| deadline.saturating_sub(now.wall_ms) / 1000),
        at_deadline: order.at_deadline.into(),
        late: order.is_late(now),
        warning: warning(order, api_server),
        allocations: allocations.iter().map(ToString::to_string).collect(),
        processes: whole.or_else(|| seen.reduce(u32::saturating_add)),
        holders: holders.into_iter().map(holder).collect(),
    }
}

/// Why pods cannot be evicted at all, if so.
fn warning(order: &Order, api_server: Option<&Step>) -> Option<String> {
    match api_server {
        _ if !order.evict => None,
        Some(Step::Done) => None,
        Some(Step::Waiting(why)) => {
            Some(format!("no pod is evicted while the API server cannot be used: {why}"))
        }
        // An order outlives a restart with other settings.
        None => Some(
            "no pod is evicted: no API server is configured any more (set --kubeconfig, or run in a pod \
             with a service account)"
                .into(),
        ),
    }
}

fn holder(holder: GpuHolder) -> DrainHolder {
    use DrainHolderState as State;
    let (state, message, since) = match holder.status {
        EvictionStatus::Unidentified => (State::NotKnown, None, None),
        EvictionStatus::NotShown => (State::NotShown, None, None),
        EvictionStatus::NotRequested => (State::NotAsked, None, None),
        EvictionStatus::Static => (State::StaticPod, None, None),
        EvictionStatus::Requested { since_wall_ms } => (State::Asked, None, Some(since_wall_ms)),
        EvictionStatus::Budget { message } => (State::DisruptionBudget, Some(message), None),
        EvictionStatus::Failed { message } => (State::Failed, Some(message), None),
        EvictionStatus::Terminating { since_wall_ms } => (State::Terminating, None, Some(since_wall_ms)),
        EvictionStatus::Over => (State::Over, None, None),
    };
    DrainHolder {
        namespace: holder.namespace,
        pod: holder.pod,
        pod_uid: holder.uid,
        containers: holder.containers.into_iter().collect(),
        allocations: holder.allocations.iter().map(ToString::to_string).collect(),
        comes_back: holder.is_recreated,
        state,
        message,
        since: since.map(rfc3339),
    }
}

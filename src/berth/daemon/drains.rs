//! A span for each drain, from the order until the GPU is drained or the drain is stopped. A drain may last hours, so its span
//! is not part of the trace of the request that ordered it.

use berth_core::keeper::Snapshot;
use berth_core::spans;
use berth_kernel::drain::Drain;
use berth_kernel::ledger::Ledger;
use berth_kernel::names::PartId;
use std::collections::BTreeMap;
use tokio::sync::watch;
use tracing::Span;

/// Follows the drains of all GPUs until the keeper has ended. A drain that lasts longer than the daemon has a span for each
/// run of the daemon.
pub(super) async fn follow(mut snapshots: watch::Receiver<Snapshot>) {
    let mut open = BTreeMap::new();
    loop {
        update(&mut open, &snapshots.borrow_and_update());
        if snapshots.changed().await.is_err() {
            open.values().for_each(|span| spans::ended(span, "daemonStopped"));
            return;
        }
    }
}

fn update(open: &mut BTreeMap<PartId, Span>, ledger: &Ledger) {
    let state = |gpu: &PartId| ledger.gpus.get(gpu).map(|gpu| gpu.drain());
    open.retain(|gpu, span| {
        let outcome = match state(gpu) {
            Some(Drain::Draining(..)) => return true,
            Some(Drain::Drained(_)) => "drained",
            _ => "calledOff",
        };
        spans::ended(span, outcome);
        false
    });
    for (gpu, state) in &ledger.gpus {
        if matches!(state.drain(), Drain::Draining(..)) && !open.contains_key(gpu) {
            open.insert(gpu.clone(), spans::drain(gpu, state.marks.evicts()));
        }
    }
}

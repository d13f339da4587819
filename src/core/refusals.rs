//! Requests of the kubelet that were refused, for the stream of transitions: nothing of them is in the ledger.

use berth_kernel::grants::pod_candidates::candidates;
use berth_kernel::ids::names::{DeviceId, GpuId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::ledger::Ledger;
use parking_lot::Mutex;
use std::collections::{BTreeSet, VecDeque};
use std::fmt::Display;
use tokio::sync::Notify;

/// Most refusals in a minute that are reported one by one; a controller that recreates a refused pod makes many. The
/// next event says how many were left out, so that 20 a minute are all that a flood adds to the events.
pub const REFUSALS_PER_MINUTE_MAX: u32 = 20;
/// Most refusals that wait for the reader: it reads every 50 ms, unless a subscriber delays it.
const WAITING_MAX: usize = 64;
/// Most pods that are named as those that a request may be for.
const PODS_NAMED_MAX: usize = 3;

/// A refused request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedRequest {
    /// When it was refused.
    pub at: Now,
    /// The GPU of its devices, if they are all on one.
    pub gpu: Option<GpuId>,
    /// What was requested, which pods it may be for, and why it was refused: one sentence without a full stop.
    pub message: String,
}

/// The refused requests that were not read yet.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    inner: Mutex<Inner>,
    added: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    waiting: VecDeque<RefusedRequest>,
    /// Start of the present minute, monotonic milliseconds.
    minute_mono_ms: Option<u64>,
    /// Refusals that were reported in it.
    reported: u32,
    left_out: u64,
}

impl Refusals {
    /// Reports that a request of the kubelet for these devices was refused. No devices: the request could not be read.
    pub(crate) fn report(
        &self,
        ledger: &Ledger,
        resource: &Resource,
        devices: &[DeviceId],
        reason: &dyn Display,
        now: Now,
    ) {
        let gpus: BTreeSet<GpuId> = devices.iter().map(|id| ledger.gpu_id_of(&id.part)).collect();
        let pods = candidates(ledger, resource, devices.len());
        let pods: BTreeSet<_> =
            pods.iter().map(|one| format!("{}/{}", one.pod.namespace, one.pod.name)).collect();
        let what = match devices.len() {
            0 => format!("a request for {resource}"),
            count => format!("{count} x {resource}"),
        };
        let message = format!("refused {what}{}: {reason}", for_pods(&pods));
        self.add(RefusedRequest {
            at: now,
            gpu: gpus.first().filter(|_| gpus.len() == 1).map(|gpu| (*gpu).clone()),
            message: message.replace(char::is_control, " "),
        });
    }

    /// Adds a refusal, or only counts it.
    fn add(&self, mut refused: RefusedRequest) {
        let mut inner = self.inner.lock();
        let now = refused.at.mono_ms;
        if inner.minute_mono_ms.is_none_or(|start| now.saturating_sub(start) >= 60_000) {
            (inner.minute_mono_ms, inner.reported) = (Some(now), 0);
        }
        if inner.reported >= REFUSALS_PER_MINUTE_MAX || inner.waiting.len() >= WAITING_MAX {
            inner.left_out = inner.left_out.saturating_add(1);
            return;
        }
        inner.reported += 1;
        match std::mem::take(&mut inner.left_out) {
            0 => {}
            // In front, since a long reason is cut at its end.
            n => refused.message.insert_str(0, &format!("({n} more were refused since the previous event) ")),
        }
        inner.waiting.push_back(refused);
        drop(inner);
        self.added.notify_one();
    }

    /// The refusals since the last call, oldest first; waits for the first one.
    pub(crate) async fn next(&self) -> VecDeque<RefusedRequest> {
        loop {
            let waiting = std::mem::take(&mut self.inner.lock().waiting);
            if !waiting.is_empty() {
                return waiting;
            }
            // A refusal between the two steps has left a permit.
            self.added.notified().await;
        }
    }
}

/// The pods that a request may be for, as a text that follows it. Allocate names no pod.
fn for_pods(pods: &BTreeSet<String>) -> String {
    let named: Vec<&str> = pods.iter().take(PODS_NAMED_MAX).map(String::as_str).collect();
    let more = if pods.len() > named.len() { ", ..." } else { "" };
    match named[..] {
        [] => String::new(),
        [pod] => format!(" for {pod}"),
        _ => format!(" for one of {} waiting pods ({}{more})", pods.len(), named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(mono_ms: u64) -> RefusedRequest {
        RefusedRequest { at: Now { wall_ms: 0, mono_ms }, gpu: None, message: "refused".into() }
    }

    #[tokio::test]
    async fn a_flood_is_counted_and_the_next_event_has_the_number() {
        let refusals = Refusals::default();
        for at in 0..1_000 {
            refusals.add(refused(at));
        }
        assert_eq!(refusals.next().await.len(), REFUSALS_PER_MINUTE_MAX as usize);
        refusals.add(refused(59_999));
        refusals.add(refused(60_000));
        refusals.add(refused(60_001));
        let messages: Vec<_> = refusals.next().await.into_iter().map(|refused| refused.message).collect();
        assert_eq!(messages, ["(981 more were refused since the previous event) refused", "refused"]);
    }

    #[tokio::test]
    async fn refusals_without_a_reader_are_bounded() {
        let refusals = Refusals::default();
        for minute in 0..100 {
            refusals.add(refused(minute * 60_000));
        }
        assert_eq!(refusals.next().await.len(), WAITING_MAX);
    }

    #[test]
    fn pods_are_named_as_far_as_they_are_known() {
        let pods = |n: u32| (0..n).map(|pod| format!("default/p{pod}")).collect();
        assert_eq!(for_pods(&pods(0)), "");
        assert_eq!(for_pods(&pods(1)), " for default/p0");
        assert_eq!(for_pods(&pods(2)), " for one of 2 waiting pods (default/p0, default/p1)");
        assert_eq!(
            for_pods(&pods(9)),
            " for one of 9 waiting pods (default/p0, default/p1, default/p2, ...)"
        );
    }
}

//! The node's newest events, and the streams that read them.

pub(crate) mod convert;
pub(crate) mod ring;
pub(crate) mod stream_permits;

use berth_core::policy_transitions::PolicyTransition;
use berth_kernel::ledger::Ledger;
use berth_kernel::time::Now;
use berth_kernel::transitions::Transition;
use convert::{policy_event, transition_event};
use ring::Ring;
use std::sync::Arc;
use std::time::Duration;
use stream_permits::{StreamPermit, StreamPermits};

/// How often all streams send a comment while no permit is free. The first write to a connection that its client closed is
/// answered with a reset, and the next one fails, which ends the stream.
const NUDGES: u32 = 4;
/// How long streams that a nudge ends take to return their permits: a write to a local socket.
const NUDGE_WAIT: Duration = Duration::from_millis(50);

/// The node's newest events, and the permits of the streams that read them.
pub(crate) struct Feed {
    pub(crate) ring: Arc<Ring>,
    permits: Arc<StreamPermits>,
}

impl Feed {
    /// Without events.
    pub(crate) fn new(now: Now) -> Self {
        // No two runs of a daemon start in the same millisecond.
        Self { ring: Arc::new(Ring::new(now.wall_ms)), permits: Arc::default() }
    }

    /// Ends all streams, with the reason.
    pub(crate) fn close(&self, reason: &'static str) {
        self.ring.close(reason);
    }

    /// A permit for one more stream of this caller. A closed connection is noticed only when something is written to
    /// it, so all streams write before another caller's stream is ended.
    pub(crate) async fn permit(&self, caller: &str) -> Option<StreamPermit> {
        for _ in 0..NUDGES {
            if let Some(permit) = self.permits.acquire(caller) {
                return Some(permit);
            }
            self.ring.nudge();
            let _ = tokio::time::timeout(NUDGE_WAIT, self.permits.released()).await;
        }
        let permit = self.permits.acquire_from_largest(caller);
        self.ring.nudge();
        permit
    }

    pub(crate) fn add_transitions(&self, transitions: &[Transition], ledger: &Ledger, now: Now) {
        for event in transitions.iter().filter_map(|one| transition_event(one, ledger, now)) {
            self.ring.add(&event);
        }
    }

    pub(crate) fn add_policy_transitions(&self, transitions: &[PolicyTransition], ledger: &Ledger, now: Now) {
        for transition in transitions {
            self.ring.add(&policy_event(transition, ledger, now));
        }
    }
}

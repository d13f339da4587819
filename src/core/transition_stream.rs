//! The stream of the node's transitions: they are computed once, and the log, the event streams of the admin API and
//! Kubernetes events all report them.
//!
//! Each subscriber gets every batch. While a subscriber's queue is full, the stream waits, and so do the other
//! subscribers, but not the keeper; the next batch then compares the newest ledger with the ledger of the previous
//! batch. Only a change that was undone between these two ledgers is in no batch.

use crate::KernelHandle;
use crate::keeper::Snapshot;
use crate::policy_transitions::{PolicyTransition, policy_transitions};
use crate::refusals::RefusedRequest;
use crate::stack::PolicyStatuses;
use berth_kernel::ids::time::Now;
use berth_kernel::node::transitions::{Transition, Transitions};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Most batches in the queue of one subscriber. Each keeps its ledger in memory. Batches are at least [`COMPARE_PAUSE`]
/// apart, so a full queue covers more than 1.5 s.
const BATCHES_WAITING_MAX: usize = 32;
/// The pause after each comparison of ledgers, so that a burst of Allocates is compared once.
const COMPARE_PAUSE: Duration = Duration::from_millis(50);

/// What changed on the node since the previous batch.
#[derive(Debug)]
pub struct Batch {
    /// When it was computed.
    pub at: Now,
    /// The ledger after the transitions.
    pub ledger: Snapshot,
    /// The transitions of the ledger; none if only other things changed.
    pub transitions: Vec<Transition>,
    /// The transitions of the active policies.
    pub policies: Vec<PolicyTransition>,
    /// The status of each active policy after them.
    pub statuses: Arc<PolicyStatuses>,
    /// The refused requests of the kubelet.
    pub refused: Vec<RefusedRequest>,
}

/// The batches of a subscriber; they end with the kernel.
pub type Batches = mpsc::Receiver<Arc<Batch>>;

/// The stream before it runs: only then can one subscribe, so that each subscriber gets every batch.
#[derive(Debug)]
pub struct TransitionStream {
    transitions: Transitions,
    statuses: Arc<PolicyStatuses>,
    subscribers: Vec<mpsc::Sender<Arc<Batch>>>,
}

impl TransitionStream {
    /// A stream that begins at `ledger`, which may be that of an earlier process.
    #[must_use]
    pub fn since(ledger: Snapshot) -> Self {
        Self { transitions: Transitions::since(ledger), statuses: Arc::default(), subscribers: Vec::new() }
    }

    /// Adds a subscriber. One that does not read delays the others; one that is dropped is removed.
    pub fn subscribe(&mut self) -> Batches {
        let (sender, batches) = mpsc::channel(BATCHES_WAITING_MAX);
        self.subscribers.push(sender);
        batches
    }

    /// Sends the batches until the kernel ends, or no subscriber is left. It is the only reader of the kernel's refused
    /// requests.
    pub fn run(mut self, kernel: &KernelHandle) -> impl Future<Output = ()> + use<> {
        let (mut snapshots, mut statuses) = (kernel.watch(), kernel.watch_policy_statuses());
        let (refusals, clock) = (Arc::clone(&kernel.refusals), Arc::clone(&kernel.clock));
        snapshots.mark_changed();
        async move {
            loop {
                let mut refused = Vec::new();
                let changed = tokio::select! {
                    changed = snapshots.changed() => changed,
                    changed = statuses.changed() => changed,
                    requests = refusals.next() => {
                        refused = requests.into();
                        Ok(())
                    }
                };
                if changed.is_err() {
                    return;
                }
                let ledger = snapshots.borrow_and_update().clone();
                let statuses = statuses.borrow_and_update().clone();
                let batch = self.step(ledger, statuses, refused, clock.now());
                self.send(&Arc::new(batch)).await;
                if self.subscribers.is_empty() {
                    return;
                }
                tokio::time::sleep(COMPARE_PAUSE).await;
            }
        }
    }

    fn step(
        &mut self,
        ledger: Snapshot,
        statuses: Arc<PolicyStatuses>,
        refused: Vec<RefusedRequest>,
        at: Now,
    ) -> Batch {
        let transitions = self.transitions.step(Arc::clone(&ledger));
        let policies = policy_transitions(&self.statuses, &statuses);
        self.statuses = Arc::clone(&statuses);
        Batch { at, ledger, transitions, policies, statuses, refused }
    }

    async fn send(&mut self, batch: &Arc<Batch>) {
        for subscriber in &self.subscribers {
            // An error means that it was dropped.
            let _ = subscriber.send(Arc::clone(batch)).await;
        }
        self.subscribers.retain(|subscriber| !subscriber.is_closed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::node::ledger::Ledger;

    /// A ledger in which allocations no longer end, for this reason.
    fn withheld(reason: &str) -> Snapshot {
        Arc::new(Ledger { ends_withheld: Some(reason.into()), ..Ledger::default() })
    }

    async fn send(stream: &mut TransitionStream, ledger: &Snapshot) {
        let batch = stream.step(Arc::clone(ledger), Arc::default(), Vec::new(), Now::default());
        stream.send(&Arc::new(batch)).await;
    }

    #[tokio::test]
    async fn each_subscriber_gets_the_changes_since_the_stored_ledger() {
        let mut stream = TransitionStream::since(Arc::default());
        let (mut one, mut other, dropped) = (stream.subscribe(), stream.subscribe(), stream.subscribe());
        drop(dropped);
        send(&mut stream, &withheld("the kubelet is down")).await;
        let first = one.recv().await.unwrap();
        assert_eq!(first.transitions, [Transition::EndsWithheldChanged(Some("the kubelet is down".into()))]);
        assert!(Arc::ptr_eq(&first, &other.recv().await.unwrap()), "computed once");
        assert_eq!(stream.subscribers.len(), 2, "the dropped one is removed");
    }

    #[tokio::test]
    async fn a_subscriber_that_is_slow_delays_the_stream_and_loses_nothing() {
        let mut stream = TransitionStream::since(Arc::default());
        let (mut slow, mut quick) = (stream.subscribe(), stream.subscribe());
        let sending = tokio::spawn(async move {
            for n in 0..2 * BATCHES_WAITING_MAX {
                send(&mut stream, &withheld(&n.to_string())).await;
            }
        });
        for n in 0..BATCHES_WAITING_MAX {
            let batch = quick.recv().await.unwrap();
            assert_eq!(batch.transitions, [Transition::EndsWithheldChanged(Some(n.to_string().into()))]);
        }
        tokio::task::yield_now().await;
        assert!(quick.try_recv().is_err(), "the stream waits for the slow one");
        for n in 0..2 * BATCHES_WAITING_MAX {
            let batch = slow.recv().await.unwrap();
            assert_eq!(batch.transitions, [Transition::EndsWithheldChanged(Some(n.to_string().into()))]);
        }
        sending.await.unwrap();
    }
}

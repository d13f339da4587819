//! Watches the pods of this node, and sends the complete view to the keeper after each change.

use super::client::report_error;
use super::pod::convert_pod;
use super::settings::{ApiServerStatus, Settings};
use berth_core::KernelHandle;
use berth_core::keeper::CommandError;
use berth_kernel::evidence::pods::{PODS_MAX, Pod, PodsSource, PodsView, Stage};
use berth_kernel::grants::pod_candidates::{
    ImmediateViewLimiter, is_newly_waiting, requests_listed_resource,
};
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_kube::{Backoff, Cause, Error, after_loss, events, random};
use futures_util::{FutureExt, Stream, StreamExt};
use k8s_openapi::api::core::v1::Pod as ApiPod;
use kube::{Api, Client};
use std::sync::Arc;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

type Event = berth_kube::Event<Arc<Pod>>;

/// What is watched, for errors.
const WHAT: &str = "the pods of this node";

/// The pods of this node as the list and the watches delivered them.
struct KnownPods {
    view: PodsView,
    /// When the newest list was requested, monotonic milliseconds.
    requested_mono_ms: u64,
    /// Whether a first list is complete.
    complete: bool,
    /// Pods that began to wait for devices since the last call of [`Self::has_next_candidate`].
    waiting: Vec<Arc<Pod>>,
}

impl KnownPods {
    fn new() -> Self {
        let view = PodsView::empty(PodsSource::ApiServer);
        Self { view, requested_mono_ms: 0, complete: false, waiting: Vec::new() }
    }

    /// Applies one event. Returns whether the view changed.
    fn apply(&mut self, event: Event, now_mono_ms: u64) -> bool {
        match event {
            Event::Listing => {
                self.requested_mono_ms = now_mono_ms;
                false
            }
            Event::Listed(pods) => {
                let pods = pods.into_iter().map(|pod| (pod.uid.clone(), pod)).collect();
                let before = std::mem::replace(&mut self.view.pods, pods);
                for (uid, pod) in &before {
                    if !self.view.pods.contains_key(uid) {
                        self.record_deleted(pod);
                    }
                }
                let starts_waiting =
                    |pod: &&Arc<Pod>| is_newly_waiting(pod, before.get(&pod.uid).map(Arc::as_ref));
                self.waiting.extend(self.view.pods.values().filter(starts_waiting).cloned());
                self.view.listed_mono_ms = self.requested_mono_ms;
                self.view.current = true;
                self.complete = true;
                self.view.drop_finished();
                true
            }
            // Changes from while no watch was open follow within the time for which events are collected.
            Event::Opened => !std::mem::replace(&mut self.view.current, true),
            Event::Applied(pod) => {
                let known = self.view.pods.get(&pod.uid);
                if known == Some(&pod) {
                    return false;
                }
                if is_newly_waiting(&pod, known.map(Arc::as_ref)) {
                    self.waiting.push(Arc::clone(&pod));
                }
                self.view.pods.insert(pod.uid.clone(), pod);
                self.view.drop_finished();
                true
            }
            Event::Deleted(pod) => {
                self.view.pods.remove(&pod.uid);
                self.record_deleted(&pod);
                true
            }
        }
    }

    /// Records a deleted pod, but no mirror pod: its static pod may go on running.
    fn record_deleted(&mut self, pod: &Pod) {
        if !pod.is_static {
            self.view.record_removal(pod.uid.clone(), pod.stage == Stage::Finished);
        }
    }

    /// Whether a pod began to wait since the last call that may be the next to get an Allocate.
    fn has_next_candidate(&mut self, ledger: &Ledger) -> bool {
        std::mem::take(&mut self.waiting).iter().any(|pod| requests_listed_resource(pod, ledger))
    }

    /// The view to send, once there was a complete list: with half a list, pods would seem to be deleted.
    fn complete_view(&self) -> Option<PodsView> {
        match self.has_too_many() {
            _ if !self.complete => None,
            true => Some(self.view.ended_only()),
            false => Some(self.view.clone()),
        }
    }

    fn has_too_many(&self) -> bool {
        self.view.pods.len() > PODS_MAX
    }
}

fn converted(pod: &ApiPod) -> Option<Arc<Pod>> {
    convert_pod(pod).map(Arc::new)
}

/// Watches the pods and sends each change to the keeper; never returns.
pub(super) async fn keep(
    settings: &Settings,
    client: Client,
    kernel: &KernelHandle,
    link: &watch::Sender<ApiServerStatus>,
) {
    let (mut known, mut limiter) = (KnownPods::new(), ImmediateViewLimiter::default());
    let mut backoff = Backoff::new(settings.connection.retry_interval);
    let mut stream =
        Box::pin(events(&settings.connection, WHAT, Api::all(client), settings.of_node(), converted));
    loop {
        let error = match gather(&mut stream, &mut known, &mut limiter, kernel, settings).await {
            Ok(changed) => {
                if known.view.current {
                    backoff.reset();
                }
                if changed {
                    send_view(&known, settings, kernel, link).await;
                }
                continue;
            }
            Err(error) => error,
        };
        let was_open = std::mem::replace(&mut known.view.current, false);
        send_view(&known, settings, kernel, link).await;
        // Not an error: the API server keeps versions for some minutes only.
        let expired = matches!(error.cause, Cause::Expired);
        if !expired {
            report_error(link, &error);
        }
        let wait = match was_open && !expired {
            true => after_loss(settings.reconnect_wait_max, random()),
            false => backoff.next(random()),
        };
        sleep(settings.connection.retry_after.delay(wait, Instant::now())).await;
    }
}

/// Applies the events of [`Settings::batch_window`] from the first one on; returns earlier when a pod comes that may be
/// the next to get an Allocate. Returns whether the view changed.
async fn gather(
    stream: &mut (impl Stream<Item = Result<Event, Error>> + Unpin),
    known: &mut KnownPods,
    limiter: &mut ImmediateViewLimiter,
    kernel: &KernelHandle,
    settings: &Settings,
) -> Result<bool, Error> {
    let Some(first) = stream.next().await else {
        // The stream never ends.
        return std::future::pending().await;
    };
    let mut changed = known.apply(first?, kernel.now().mono_ms);
    let end = Instant::now() + settings.batch_window;
    loop {
        // Events that are ready are applied first: pods that are created together become one view.
        while Instant::now() < end
            && let Some(Some(event)) = stream.next().now_or_never()
        {
            changed |= known.apply(event?, kernel.now().mono_ms);
        }
        if known.has_next_candidate(&kernel.snapshot()) && limiter.try_acquire(kernel.now().mono_ms) {
            return Ok(changed);
        }
        tokio::select! {
            () = sleep_until(end) => return Ok(changed),
            Some(event) = stream.next() => changed |= known.apply(event?, kernel.now().mono_ms),
        }
    }
}

/// Sends the view to the keeper, with retries while the keeper's inbox is full.
async fn send_view(
    known: &KnownPods,
    settings: &Settings,
    kernel: &KernelHandle,
    link: &watch::Sender<ApiServerStatus>,
) {
    let Some(view) = known.complete_view() else {
        return;
    };
    if known.has_too_many() {
        let cause = Cause::TooMany { found: known.view.pods.len(), supported: PODS_MAX };
        report_error(link, &Error { what: WHAT, cause });
    }
    while let Err(error) = kernel.execute(Command::Pods(view.clone())).await {
        if error == CommandError::Stopping {
            return;
        }
        // The keeper is busy. Events that come meanwhile wait in the watch.
        tracing::debug!(%error, "the keeper is busy; the pods of this node are sent again");
        sleep(settings.connection.retry_interval).await;
    }
    if view.current && link.send_replace(ApiServerStatus::Watching) != ApiServerStatus::Watching {
        tracing::info!(pods = view.pods.len(), "watching the pods of this node at the API server");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::evidence::pods::DELETED_MAX;
    use serde_json::json;

    fn pod(uid: &str, phase: &str) -> Arc<Pod> {
        let pod = json!({
            "metadata": {"name": format!("pod-{uid}"), "namespace": "team", "uid": uid},
            "spec": {"containers": [{"name": "main"}]},
            "status": {"phase": phase},
        });
        Arc::new(convert_pod(&serde_json::from_value(pod).unwrap()).unwrap())
    }

    fn applied(uid: &str, phase: &str) -> Event {
        Event::Applied(pod(uid, phase))
    }

    fn deleted(uid: &str, phase: &str) -> Event {
        Event::Deleted(pod(uid, phase))
    }

    fn uids(view: &PodsView) -> Vec<&str> {
        view.pods.keys().map(String::as_str).collect()
    }

    #[test]
    fn nothing_is_sent_before_the_first_list_is_complete() {
        let mut known = KnownPods::new();
        assert!(!known.apply(Event::Listing, 5));
        assert!(known.complete_view().is_none());
        assert!(known.apply(Event::Listed(vec![pod("a", "Running")]), 7));
        let view = known.complete_view().unwrap();
        assert_eq!(uids(&view), ["a"]);
        assert!(view.current);
        assert_eq!(view.listed_mono_ms, 5, "the time of the request, not of the answer");
    }

    #[test]
    fn a_watch_that_opens_again_makes_the_source_current_and_one_that_goes_on_changes_nothing() {
        let mut known = KnownPods::new();
        known.apply(Event::Listed(vec![pod("a", "Running")]), 1);
        assert!(!known.apply(Event::Opened, 2), "the list was current");
        known.view.current = false;
        assert!(known.apply(Event::Opened, 3));
        assert!(known.complete_view().unwrap().current);
        assert_eq!(uids(&known.view), ["a"], "nothing is forgotten meanwhile");
    }

    #[test]
    fn pods_that_a_new_list_lacks_or_a_watch_deletes_are_recorded_as_deleted() {
        let mut known = KnownPods::new();
        known.apply(Event::Listing, 1);
        known.apply(Event::Listed(vec![pod("a", "Running"), pod("b", "Running")]), 1);
        assert!(known.apply(deleted("b", "Running"), 2));
        assert!(known.apply(applied("c", "Pending"), 3));
        assert!(!known.apply(applied("c", "Pending"), 4), "unchanged");
        known.apply(Event::Listing, 9);
        known.apply(Event::Listed(vec![pod("c", "Running")]), 10);
        let view = known.complete_view().unwrap();
        assert_eq!(uids(&view), ["c"]);
        assert_eq!(view.deleted, ["b", "a"]);
        assert_eq!(view.listed_mono_ms, 9);
    }

    #[test]
    fn deleted_pods_are_kept_up_to_a_limit() {
        let mut known = KnownPods::new();
        for n in 0..DELETED_MAX + 3 {
            known.apply(deleted(&format!("{n}-"), "Running"), 1);
        }
        assert_eq!(known.view.deleted.len(), DELETED_MAX);
        assert_eq!(known.view.deleted[0], "3-");
    }

    #[test]
    fn of_too_many_pods_the_finished_ones_are_kept_as_uids() {
        let mut known = KnownPods::new();
        let failed = (0..PODS_MAX).map(|n| pod(&n.to_string(), "Failed"));
        known.apply(Event::Listed(failed.chain([pod("runs", "Running")]).collect()), 1);
        let view = known.complete_view().unwrap();
        assert_eq!(uids(&view), ["runs"]);
        assert!(view.current);
        assert_eq!(view.finished.len(), DELETED_MAX);
    }

    #[test]
    fn too_many_unfinished_pods_silence_the_source() {
        let mut known = KnownPods::new();
        known.apply(Event::Listing, 1);
        known.apply(Event::Listed((0..PODS_MAX).map(|n| pod(&n.to_string(), "Running")).collect()), 1);
        assert!(known.complete_view().unwrap().current);
        known.apply(applied("more", "Running"), 2);
        let view = known.complete_view().unwrap();
        assert!(
            !view.current && view.pods.is_empty() && view.listed_mono_ms == 0,
            "no allocation ends by it"
        );
        known.apply(deleted("more", "Running"), 3);
        assert!(known.complete_view().unwrap().current, "as soon as they fit again");
    }

    #[test]
    fn a_deleted_pod_that_had_finished_is_recorded_apart_from_one_deleted_by_force() {
        let mut known = KnownPods::new();
        known.apply(Event::Listed(Vec::new()), 1);
        known.apply(deleted("a", "Succeeded"), 2);
        known.apply(deleted("b", "Running"), 2);
        assert_eq!((&known.view.finished[0][..], &known.view.deleted[0][..]), ("a", "b"));
    }
}

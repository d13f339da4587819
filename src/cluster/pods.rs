//! The pods of this node, watched and handed in as a whole after each change.

use super::client::trouble;
use super::pod_watch::{Error, Event, events};
use super::wait::{self, Backoff};
use super::{Link, Settings, understand};
use berth_core::admission::Door;
use berth_core::keeper::AskError;
use berth_kernel::asking::{Haste, asks_for_ours, waits_anew};
use berth_kernel::ledger::Ledger;
use berth_kernel::pods::{PODS_MAX, Pod, PodsSource, PodsView, Stage};
use futures_util::{FutureExt, Stream, StreamExt};
use kube::Client;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

/// What is known of the pods so far.
struct Known {
    view: PodsView,
    /// When the newest list was asked for, monotonic milliseconds.
    asked_mono_ms: u64,
    /// Whether a first list is complete.
    complete: bool,
    /// Pods that wait for devices since [`Self::asker`] was asked last.
    waiting: Vec<Arc<Pod>>,
}

impl Known {
    fn new() -> Self {
        let view = PodsView {
            source: PodsSource::ApiServer,
            current: false,
            listed_mono_ms: 0,
            pods: BTreeMap::new(),
            deleted: VecDeque::new(),
            finished: VecDeque::new(),
        };
        Self { view, asked_mono_ms: 0, complete: false, waiting: Vec::new() }
    }

    /// Takes in one event. Answers whether the view is another now.
    fn take(&mut self, event: Event, now_mono_ms: u64) -> bool {
        match event {
            Event::Listing => {
                self.asked_mono_ms = now_mono_ms;
                false
            }
            Event::Listed(pods) => {
                let pods = pods.iter().filter_map(understand).map(|pod| (pod.uid.clone(), Arc::new(pod)));
                let before = std::mem::replace(&mut self.view.pods, pods.collect());
                for (uid, pod) in &before {
                    if !self.view.pods.contains_key(uid) {
                        self.left(pod);
                    }
                }
                let now: Vec<Arc<Pod>> = self.view.pods.values().cloned().collect();
                self.waiting
                    .extend(now.into_iter().filter(|p| waits_anew(p, before.get(&p.uid).map(Arc::as_ref))));
                self.view.listed_mono_ms = self.asked_mono_ms;
                self.view.current = true;
                self.complete = true;
                self.view.shed();
                true
            }
            // What changed while no watch was open follows within the time for which events are gathered.
            Event::Opened => !std::mem::replace(&mut self.view.current, true),
            Event::Applied(pod) => {
                let Some(pod) = understand(&pod) else {
                    return false;
                };
                let known = self.view.pods.get(&pod.uid);
                if known.is_some_and(|known| **known == pod) {
                    return false;
                }
                let asks = waits_anew(&pod, known.map(Arc::as_ref));
                let pod = Arc::new(pod);
                if asks {
                    self.waiting.push(Arc::clone(&pod));
                }
                self.view.pods.insert(pod.uid.clone(), pod);
                self.view.shed();
                true
            }
            Event::Deleted(pod) => {
                let Some(pod) = understand(&pod) else {
                    return false;
                };
                self.view.pods.remove(&pod.uid);
                self.left(&pod);
                true
            }
        }
    }

    /// The mirror of a static pod says nothing of it by going away.
    fn left(&mut self, pod: &Pod) {
        if !pod.is_static {
            self.view.left(pod.uid.clone(), pod.stage == Stage::Finished);
        }
    }

    /// Whether somebody came since the last time who may be the next to be asked for.
    fn asker(&mut self, ledger: &Ledger) -> bool {
        std::mem::take(&mut self.waiting).iter().any(|pod| asks_for_ours(pod, ledger))
    }

    /// The view to hand in, once there was a whole list: half a list would say that pods are gone.
    fn whole(&self) -> Option<PodsView> {
        match self.too_many() {
            _ if !self.complete => None,
            true => Some(self.view.silenced()),
            false => Some(self.view.clone()),
        }
    }

    fn too_many(&self) -> bool {
        self.view.pods.len() > PODS_MAX
    }
}

/// Watches for ever.
pub(super) async fn keep(settings: &Settings, client: Client, door: &Door, told: &watch::Sender<Link>) {
    let (mut known, mut haste) = (Known::new(), Haste::default());
    let mut backoff = Backoff::new(settings.again);
    let mut stream = Box::pin(events(settings, client));
    loop {
        let error = match gather(&mut stream, &mut known, &mut haste, door, settings).await {
            Ok(changed) => {
                if known.view.current {
                    backoff.reset();
                }
                if changed {
                    hand_in(&known, settings, door, told).await;
                }
                continue;
            }
            Err(error) => error,
        };
        let was_open = std::mem::replace(&mut known.view.current, false);
        hand_in(&known, settings, door, told).await;
        // An API server that forgot what we saw last, as it does after some minutes, is in no trouble.
        let expired = matches!(error, Error::Expired);
        if !expired {
            trouble(told, &error);
        }
        let wait = match was_open && !expired {
            true => wait::after_loss(settings.lost, wait::random()),
            false => backoff.next(wait::random()),
        };
        sleep(settings.retry_after.delay(wait, Instant::now())).await;
    }
}

/// The events of the next while, from the first one on; no more of them when a pod comes that may be
/// the next to be asked for. Answers whether anything changed.
async fn gather(
    stream: &mut (impl Stream<Item = Result<Event, Error>> + Unpin),
    known: &mut Known,
    haste: &mut Haste,
    door: &Door,
    settings: &Settings,
) -> Result<bool, Error> {
    let Some(first) = stream.next().await else {
        // It never ends; if it did, waiting is all that is left.
        return std::future::pending().await;
    };
    let mut changed = known.take(first?, door.now().mono_ms);
    let end = Instant::now() + settings.gather;
    loop {
        // What is here already comes along: pods that are made together are one view.
        while Instant::now() < end
            && let Some(Some(event)) = stream.next().now_or_never()
        {
            changed |= known.take(event?, door.now().mono_ms);
        }
        if known.asker(&door.snapshot()) && haste.take(door.now().mono_ms) {
            return Ok(changed);
        }
        tokio::select! {
            () = sleep_until(end) => return Ok(changed),
            Some(event) = stream.next() => changed |= known.take(event?, door.now().mono_ms),
        }
    }
}

async fn hand_in(known: &Known, settings: &Settings, door: &Door, told: &watch::Sender<Link>) {
    let Some(view) = known.whole() else {
        return;
    };
    if known.too_many() {
        trouble(told, &TooMany { pods: known.view.pods.len() });
    }
    while let Err(error) = door.pods(view.clone()).await {
        if error == AskError::Stopping {
            return;
        }
        // The keeper is busy. What happens meanwhile waits in the watch.
        tracing::debug!(%error, "the pods of this node could not be handed in yet");
        sleep(settings.again).await;
    }
    if view.current && told.send_replace(Link::Watching) != Link::Watching {
        tracing::info!(pods = view.pods.len(), "the API server shows the pods of this node");
    }
}

#[derive(Debug, thiserror::Error)]
#[error("it shows {pods} pods of this node; that have not finished; at most {PODS_MAX} are taken")]
struct TooMany {
    pods: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::pods::DELETED_MAX;
    use k8s_openapi::api::core::v1::Pod as ApiPod;
    use serde_json::json;

    fn pod(uid: &str, phase: &str) -> ApiPod {
        serde_json::from_value(json!({
            "metadata": {"name": format!("pod-{uid}"), "namespace": "team", "uid": uid},
            "spec": {"containers": [{"name": "main"}]},
            "status": {"phase": phase},
        }))
        .unwrap()
    }

    fn applied(uid: &str, phase: &str) -> Event {
        Event::Applied(Box::new(pod(uid, phase)))
    }

    fn deleted(uid: &str, phase: &str) -> Event {
        Event::Deleted(Box::new(pod(uid, phase)))
    }

    fn uids(view: &PodsView) -> Vec<&str> {
        view.pods.keys().map(String::as_str).collect()
    }

    #[test]
    fn nothing_is_handed_in_before_the_first_list_is_whole() {
        let mut known = Known::new();
        assert!(!known.take(Event::Listing, 5));
        assert!(known.whole().is_none());
        assert!(known.take(Event::Listed(vec![pod("a", "Running")]), 7));
        let view = known.whole().unwrap();
        assert_eq!(uids(&view), ["a"]);
        assert!(view.current);
        assert_eq!(view.listed_mono_ms, 5, "of when it was asked for, not of when it came");
    }

    #[test]
    fn a_watch_that_opens_again_makes_the_source_current_and_one_that_goes_on_is_no_news() {
        let mut known = Known::new();
        known.take(Event::Listed(vec![pod("a", "Running")]), 1);
        assert!(!known.take(Event::Opened, 2), "the list was current");
        known.view.current = false;
        assert!(known.take(Event::Opened, 3));
        assert!(known.whole().unwrap().current);
        assert_eq!(uids(&known.view), ["a"], "nothing is forgotten meanwhile");
    }

    #[test]
    fn what_a_new_list_lacks_and_what_a_watch_deletes_is_remembered_as_deleted() {
        let mut known = Known::new();
        known.take(Event::Listing, 1);
        known.take(Event::Listed(vec![pod("a", "Running"), pod("b", "Running")]), 1);
        assert!(known.take(deleted("b", "Running"), 2));
        assert!(known.take(applied("c", "Pending"), 3));
        assert!(!known.take(applied("c", "Pending"), 4), "no news");
        known.take(Event::Listing, 9);
        known.take(Event::Listed(vec![pod("c", "Running")]), 10);
        let view = known.whole().unwrap();
        assert_eq!(uids(&view), ["c"]);
        assert_eq!(view.deleted, ["b", "a"]);
        assert_eq!(view.listed_mono_ms, 9);
    }

    #[test]
    fn deleted_pods_are_remembered_to_a_limit() {
        let mut known = Known::new();
        for n in 0..DELETED_MAX + 3 {
            known.take(deleted(&format!("{n}-"), "Running"), 1);
        }
        assert_eq!(known.view.deleted.len(), DELETED_MAX);
        assert_eq!(known.view.deleted[0], "3-");
    }

    #[test]
    fn of_too_many_pods_the_finished_ones_are_kept_as_uids() {
        let mut known = Known::new();
        let failed = (0..PODS_MAX).map(|n| pod(&n.to_string(), "Failed"));
        known.take(Event::Listed(failed.chain([pod("runs", "Running")]).collect()), 1);
        let view = known.whole().unwrap();
        assert_eq!(uids(&view), ["runs"]);
        assert!(view.current);
        assert_eq!(view.finished.len(), DELETED_MAX);
    }

    #[test]
    fn too_many_pods_all_the_same_silence_the_source() {
        let mut known = Known::new();
        known.take(Event::Listing, 1);
        known.take(Event::Listed((0..PODS_MAX).map(|n| pod(&n.to_string(), "Running")).collect()), 1);
        assert!(known.whole().unwrap().current);
        known.take(applied("more", "Running"), 2);
        let view = known.whole().unwrap();
        assert!(!view.current && view.pods.is_empty() && view.listed_mono_ms == 0, "nobody is over by it");
        known.take(deleted("more", "Running"), 3);
        assert!(known.whole().unwrap().current, "as soon as they fit again");
    }

    #[test]
    fn a_pod_that_finished_before_it_went_is_told_from_one_that_was_deleted_by_force() {
        let mut known = Known::new();
        known.take(Event::Listed(Vec::new()), 1);
        known.take(deleted("a", "Succeeded"), 2);
        known.take(deleted("b", "Running"), 2);
        assert_eq!((&known.view.finished[0][..], &known.view.deleted[0][..]), ("a", "b"));
    }
}

//! The pods of this node, watched and handed in as a whole after each change.

use super::client::trouble;
use super::{AGAIN_MAX, Link, Settings, understand};
use crate::admission::Door;
use crate::keeper::AskError;
use crate::kernel::pods::{DELETED_MAX, PODS_MAX, Pod, PodsSource, PodsView};
use futures_util::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Node, Pod as ApiPod};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

/// Pods of one page of the first list.
const PAGE: u32 = 250;
/// How long a call of a watch may last, seconds. A connection that died unseen is noticed after it.
const WATCH_S: u32 = 60;

/// What is known of the pods so far.
struct Known {
    view: PodsView,
    /// While a list comes in: its pods, and when it was asked for.
    listing: Option<(BTreeMap<String, Arc<Pod>>, u64)>,
    /// Whether a first list is complete.
    complete: bool,
    /// Set while more pods are shown than are taken.
    too_many: bool,
}

impl Known {
    fn new() -> Self {
        let view = PodsView {
            source: PodsSource::ApiServer,
            current: false,
            listed_mono_ms: 0,
            pods: BTreeMap::new(),
            deleted: VecDeque::new(),
        };
        Self { view, listing: None, complete: false, too_many: false }
    }

    /// Takes in one event. Answers whether the view is another now.
    fn take(&mut self, event: Event<ApiPod>, now_mono_ms: u64) -> bool {
        match event {
            Event::Init => {
                self.listing = Some((BTreeMap::new(), now_mono_ms));
                false
            }
            Event::InitApply(pod) => {
                if let Some((pods, _)) = &mut self.listing
                    && let Some(pod) = understand(&pod)
                {
                    pods.insert(pod.uid.clone(), Arc::new(pod));
                }
                false
            }
            Event::InitDone => {
                let Some((pods, asked_mono_ms)) = self.listing.take() else {
                    return false;
                };
                let before = std::mem::replace(&mut self.view.pods, pods);
                for uid in
                    before.into_keys().filter(|uid| !self.view.pods.contains_key(uid)).collect::<Vec<_>>()
                {
                    self.deleted(uid);
                }
                self.view.listed_mono_ms = asked_mono_ms;
                self.view.current = true;
                self.complete = true;
                true
            }
            Event::Apply(pod) => {
                self.view.current = self.complete;
                let Some(pod) = understand(&pod) else {
                    return false;
                };
                let known = self.view.pods.get(&pod.uid);
                if known.is_some_and(|known| **known == pod) {
                    return false;
                }
                self.view.pods.insert(pod.uid.clone(), Arc::new(pod));
                true
            }
            Event::Delete(pod) => {
                self.view.current = self.complete;
                let Some(pod) = understand(&pod) else {
                    return false;
                };
                self.view.pods.remove(&pod.uid);
                self.deleted(pod.uid);
                true
            }
        }
    }

    /// A static pod that is deleted at the API server comes back under the same UID: what is shown
    /// again is not deleted.
    fn deleted(&mut self, uid: String) {
        let deleted = &mut self.view.deleted;
        deleted.retain(|known| *known != uid);
        deleted.push_back(uid);
        if deleted.len() > DELETED_MAX {
            deleted.pop_front();
        }
    }

    /// The view to hand in. One that is not whole would say that pods are gone.
    fn whole(&mut self) -> Option<PodsView> {
        self.too_many = self.view.pods.len() > PODS_MAX;
        (self.complete && !self.too_many).then(|| self.view.clone())
    }
}

/// Watches for ever.
pub(super) async fn keep(settings: &Settings, client: Client, door: &Door, told: &watch::Sender<Link>) {
    let pods: Api<ApiPod> = Api::all(client.clone());
    let config = watcher::Config::default()
        .fields(&format!("spec.nodeName={}", settings.node))
        .timeout(WATCH_S)
        .page_size(PAGE);
    let mut stream = Box::pin(watcher(pods, config));
    let mut known = Known::new();
    let mut wait = settings.again;
    loop {
        match gather(&mut stream, &mut known, door, settings.gather).await {
            Ok(changed) => {
                wait = settings.again;
                if changed {
                    hand_in(&mut known, settings, door, told).await;
                }
            }
            // The server forgot what we saw last, as it does after some minutes: a new list follows.
            Err(watcher::Error::WatchError(status)) if status.code == 410 => {}
            Err(error) => {
                trouble(told, &error);
                known.view.current = false;
                if known.complete {
                    hand_in(&mut known, settings, door, told).await;
                }
                answers_again(&client, settings, &mut wait).await;
                // A watch that goes on where it stopped says nothing until something changes.
                known.view.current = known.complete;
                hand_in(&mut known, settings, door, told).await;
            }
        }
    }
}

/// The events of the next while, from the first one on. Answers whether anything changed.
async fn gather(
    stream: &mut (impl Stream<Item = Result<Event<ApiPod>, watcher::Error>> + Unpin),
    known: &mut Known,
    door: &Door,
    gather: Duration,
) -> Result<bool, watcher::Error> {
    let Some(first) = stream.next().await else {
        // It never ends; if it did, waiting is all that is left.
        return std::future::pending().await;
    };
    let mut changed = known.take(first?, door.now().mono_ms);
    let end = Instant::now() + gather;
    loop {
        tokio::select! {
            () = sleep_until(end) => return Ok(changed),
            Some(event) = stream.next() => changed |= known.take(event?, door.now().mono_ms),
        }
    }
}

async fn hand_in(known: &mut Known, settings: &Settings, door: &Door, told: &watch::Sender<Link>) {
    let Some(view) = known.whole() else {
        if known.too_many {
            let pods = known.view.pods.len();
            trouble(told, &TooMany { pods });
        }
        return;
    };
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
#[error("it shows {pods} pods of this node; at most {PODS_MAX} are taken (delete finished ones)")]
struct TooMany {
    pods: usize,
}

/// Waits until the API server answers a small question again.
async fn answers_again(client: &Client, settings: &Settings, wait: &mut Duration) {
    let nodes: Api<Node> = Api::all(client.clone());
    loop {
        sleep(*wait).await;
        *wait = (*wait * 2).min(AGAIN_MAX);
        let asked = tokio::time::timeout(AGAIN_MAX, nodes.get_metadata(&settings.node)).await;
        if matches!(asked, Ok(Ok(_))) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(uid: &str, phase: &str) -> ApiPod {
        serde_json::from_value(json!({
            "metadata": {"name": format!("pod-{uid}"), "namespace": "team", "uid": uid},
            "spec": {"containers": [{"name": "main"}]},
            "status": {"phase": phase},
        }))
        .unwrap()
    }

    fn uids(view: &PodsView) -> Vec<&str> {
        view.pods.keys().map(String::as_str).collect()
    }

    #[test]
    fn nothing_is_handed_in_before_the_first_list_is_whole() {
        let mut known = Known::new();
        assert!(!known.take(Event::Init, 5));
        assert!(!known.take(Event::InitApply(pod("a", "Running")), 6));
        assert!(known.whole().is_none());
        assert!(known.take(Event::InitDone, 7));
        let view = known.whole().unwrap();
        assert_eq!(uids(&view), ["a"]);
        assert!(view.current);
        assert_eq!(view.listed_mono_ms, 5, "of when it was asked for, not of when it came");
    }

    #[test]
    fn what_a_new_list_lacks_and_what_a_watch_deletes_is_remembered_as_deleted() {
        let mut known = Known::new();
        known.take(Event::Init, 1);
        known.take(Event::InitApply(pod("a", "Running")), 1);
        known.take(Event::InitApply(pod("b", "Running")), 1);
        known.take(Event::InitDone, 1);
        assert!(known.take(Event::Delete(pod("b", "Running")), 2));
        assert!(known.take(Event::Apply(pod("c", "Pending")), 3));
        assert!(!known.take(Event::Apply(pod("c", "Pending")), 4), "no news");
        known.take(Event::Init, 9);
        known.take(Event::InitApply(pod("c", "Running")), 9);
        known.take(Event::InitDone, 10);
        let view = known.whole().unwrap();
        assert_eq!(uids(&view), ["c"]);
        assert_eq!(view.deleted, ["b", "a"]);
        assert_eq!(view.listed_mono_ms, 9);
    }

    #[test]
    fn deleted_pods_are_remembered_to_a_limit() {
        let mut known = Known::new();
        for n in 0..DELETED_MAX + 3 {
            known.take(Event::Delete(pod(&n.to_string(), "Running")), 1);
        }
        assert_eq!(known.view.deleted.len(), DELETED_MAX);
        assert_eq!(known.view.deleted[0], "3");
    }

    #[test]
    fn too_many_pods_are_no_view_at_all() {
        let mut known = Known::new();
        known.take(Event::Init, 1);
        for n in 0..=PODS_MAX {
            known.take(Event::InitApply(pod(&n.to_string(), "Succeeded")), 1);
        }
        known.take(Event::InitDone, 1);
        assert!(known.whole().is_none());
    }
}

//! The kubelet's Pods API: the pods of this node with their UIDs, watched and handed in as a whole.
//!
//! Alpha and off by default in kubelet 1.36, so its absence is nothing to speak of. What it says of a
//! pod that it shows is the kubelet's own word: that it is there, and that its containers have stopped
//! for good. That a pod is missing says nothing (after a restart the kubelet knows static pods alone
//! until its API server answers), so its view goes back to no list ([`PodsView::listed_mono_ms`] is 0).

mod pod;

use super::settings::Settings;
use super::wire::dial;
use super::wire::v1alpha1::pods_client::PodsClient;
use super::wire::v1alpha1::{EventType, WatchPodsEvent, WatchPodsRequest};
use berth_core::admission::KernelHandle;
use berth_core::keeper::{CommandError, Snapshot};
use berth_kernel::pod_arrivals::{ImmediateViewLimiter, is_newly_waiting, requests_listed_resource};
use berth_kernel::pods::{DELETED_MAX, PODS_MAX, Pod, PodsSource, PodsView, Stage};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tonic::{Code, Status};

/// What is known of the pods so far.
struct Known {
    view: PodsView,
    /// While a first list comes in: its pods.
    listing: Option<BTreeMap<String, Arc<Pod>>>,
    /// Whether a list was ever whole.
    complete: bool,
    /// Whether something changed since the view was last handed in. A stream may end in between, and
    /// the next one's list is no news to the view then.
    dirty: bool,
    /// Whether it was handed in that there are more pods than are taken.
    too_many: bool,
    /// The pod of the last event, if it waits for devices and did not before.
    waits: Option<Arc<Pod>>,
}

impl Default for Known {
    fn default() -> Self {
        let view = PodsView {
            source: PodsSource::Kubelet,
            current: false,
            listed_mono_ms: 0,
            pods: BTreeMap::new(),
            deleted: VecDeque::new(),
            finished: VecDeque::new(),
        };
        Self { view, listing: None, complete: false, dirty: false, too_many: false, waits: None }
    }
}

impl Known {
    /// A new stream begins, with all pods that there are. What the last one said counts until then.
    fn begin(&mut self) {
        self.listing = Some(BTreeMap::new());
    }

    /// Takes in one event. Answers whether the view is to be handed in now.
    fn take(&mut self, event: &WatchPodsEvent) -> bool {
        self.waits = None;
        match event.r#type() {
            EventType::Added | EventType::Modified => {
                let Some(pod) = pod::understand(&event.pod) else {
                    return false;
                };
                if let Some(listing) = &mut self.listing {
                    listing.insert(pod.uid.clone(), Arc::new(pod));
                    return false;
                }
                let known = self.view.pods.get(&pod.uid).map(Arc::as_ref);
                if known == Some(&pod) {
                    return false;
                }
                let waits = is_newly_waiting(&pod, known);
                let pod = Arc::new(pod);
                self.waits = waits.then(|| Arc::clone(&pod));
                self.view.pods.insert(pod.uid.clone(), pod);
                self.dirty = true;
                true
            }
            EventType::Deleted => {
                let Some(uid) = pod::uid(&event.pod) else {
                    return false;
                };
                if let Some(listing) = &mut self.listing {
                    listing.remove(&uid);
                }
                self.view.pods.remove(&uid);
                self.deleted(uid);
                self.dirty = true;
                self.listing.is_none()
            }
            EventType::InitialSyncComplete => {
                let Some(listing) = self.listing.take() else {
                    return false;
                };
                let same = self.view.current && self.view.pods == listing;
                // Who is missing may be over, or not known to this kubelet yet: nobody vouches for it.
                self.view.pods = listing;
                self.view.current = true;
                self.complete = true;
                self.dirty |= !same;
                self.dirty
            }
            // Of a version to come.
            EventType::Unspecified => false,
        }
    }

    /// The view to hand in: without finished pods where there are too many.
    ///
    /// # Errors
    /// How many pods there are, if those that are not finished are too many as well.
    fn taken(&self) -> Result<PodsView, usize> {
        let mut view = self.view.clone();
        if view.pods.len() > PODS_MAX {
            view.pods.retain(|_, pod| pod.stage != Stage::Finished);
        }
        if view.pods.len() > PODS_MAX { Err(view.pods.len()) } else { Ok(view) }
    }

    /// Takes the last view's place where there are too many pods: nobody is vouched for, and nobody is
    /// said to be gone but those that were told to be.
    fn silent(&self) -> PodsView {
        let mut view = Self::default().view;
        // A static pod comes back under its UID: what is there again is not deleted.
        let gone = self.view.deleted.iter().filter(|uid| !self.view.pods.contains_key(*uid));
        view.deleted = gone.cloned().collect();
        view
    }

    fn deleted(&mut self, uid: String) {
        let deleted = &mut self.view.deleted;
        deleted.retain(|known| *known != uid);
        deleted.push_back(uid);
        if deleted.len() > DELETED_MAX {
            deleted.pop_front();
        }
    }
}

/// Why a stream is over.
#[derive(Debug)]
enum End {
    /// It was time to begin anew.
    Again,
    /// There is no such API here.
    Absent,
    /// It ended, or never began.
    Lost(String),
    /// The daemon goes.
    Stopping,
}

impl From<Status> for End {
    fn from(status: Status) -> Self {
        match status.code() {
            Code::Unimplemented => Self::Absent,
            _ => Self::Lost(status.message().to_owned()),
        }
    }
}

/// Watches for ever.
pub(super) async fn keep(settings: Arc<Settings>, kernel: KernelHandle) {
    let mut watch = Watch {
        settings,
        kernel,
        known: Known::default(),
        haste: ImmediateViewLimiter::default(),
        said: None,
    };
    let mut wait = watch.settings.waits.pods_again;
    loop {
        let began = Instant::now();
        match watch.stream().await {
            End::Again => continue,
            End::Stopping => return,
            End::Absent => {}
            End::Lost(why) => watch.trouble(&why),
        }
        watch.known.view.current = false;
        if watch.known.complete && watch.hand_in().await.is_err() {
            return;
        }
        let waits = &watch.settings.waits;
        // One that lasted was no failure to begin with.
        wait = if began.elapsed() > waits.pods_again_max { waits.pods_again } else { wait };
        sleep(wait).await;
        wait = (wait * 2).min(waits.pods_again_max);
    }
}

struct Watch {
    settings: Arc<Settings>,
    kernel: KernelHandle,
    known: Known,
    haste: ImmediateViewLimiter,
    /// The last trouble, or that all is well; so that each is said once.
    said: Option<Option<String>>,
}

impl Watch {
    /// One stream, from its first list to its end.
    async fn stream(&mut self) -> End {
        let socket = self.settings.pods_api_socket();
        if std::fs::symlink_metadata(&socket).is_err() {
            return End::Absent;
        }
        let channel = match dial(&socket).await {
            Ok(channel) => channel,
            Err(error) => return End::Lost(error.to_string()),
        };
        let mut client: PodsClient<_> = PodsClient::new(channel);
        let waits = self.settings.waits.clone();
        let first = Instant::now() + waits.pods_first_list;
        let request = WatchPodsRequest {};
        let mut events = match timeout_at(first, client.watch_pods(request)).await {
            Ok(Ok(answer)) => answer.into_inner(),
            Ok(Err(status)) => return status.into(),
            Err(_) => return End::Lost("it does not answer".into()),
        };
        self.known.begin();
        let mut snapshots = self.kernel.watch();
        // Single events can be lost without a word, so a stream is not trusted for ever.
        let again = Instant::now() + waits.pods_resync;
        let mut due = None;
        loop {
            let listing = self.known.listing.is_some();
            tokio::select! {
                event = events.message() => match event {
                    Ok(Some(event)) => {
                        if self.known.take(&event) {
                            let due = due.get_or_insert_with(|| Instant::now() + waits.gather);
                            if self.hurries() {
                                *due = Instant::now();
                            }
                        }
                    }
                    Ok(None) => return End::Lost("it ended the watch".into()),
                    Err(status) => return status.into(),
                },
                () = sleep_until(due.unwrap_or(again)), if due.is_some() => {
                    due = None;
                    if self.hand_in().await.is_err() {
                        return End::Stopping;
                    }
                }
                () = sleep_until(first), if listing => return End::Lost("its first list does not end".into()),
                () = sleep_until(again), if !listing => return End::Again,
                changed = snapshots.changed(), if !listing && due.is_none() => {
                    if changed.is_err() {
                        return End::Stopping;
                    }
                    // The API server's word went first, and is not heard any more.
                    if self.is_missing(&snapshots.borrow_and_update()) {
                        due = Some(Instant::now() + waits.gather);
                    }
                }
            }
        }
    }

    /// Whether the last event brought a pod that may be the next to be asked for.
    fn hurries(&mut self) -> bool {
        let Some(pod) = &self.known.waits else { return false };
        requests_listed_resource(pod, &self.kernel.snapshot())
            && self.haste.try_acquire(self.kernel.now().mono_ms)
    }

    /// Whether our view would be taken and is not there.
    fn is_missing(&self, ledger: &Snapshot) -> bool {
        let view = &self.known.view;
        let other = ledger.pods.as_deref().is_none_or(|known| known.source != PodsSource::Kubelet);
        let heard = view.current && !self.known.too_many;
        heard && other && ledger.pods.as_deref().is_none_or(|known| view.replaces(known))
    }

    /// Hands the view in. That there are too many pods is handed in once.
    ///
    /// # Errors
    /// If there is nobody any more to hand it to.
    async fn hand_in(&mut self) -> Result<(), CommandError> {
        let (view, too_many) = match self.known.taken() {
            Ok(view) => (view, false),
            Err(pods) => {
                self.trouble(&format!(
                    "it shows {pods} pods that are not finished; at most {PODS_MAX} are taken"
                ));
                if self.known.too_many {
                    return Ok(());
                }
                (self.known.silent(), true)
            }
        };
        while let Err(error) = self.kernel.pods(view.clone()).await {
            if error == CommandError::Stopping {
                return Err(error);
            }
            // The keeper is busy. What happens meanwhile waits in the stream.
            tracing::debug!(%error, "the kubelet's pods could not be handed in yet");
            sleep(self.settings.waits.pods_again).await;
        }
        self.known.dirty = false;
        self.known.too_many = too_many;
        if view.current && self.said.replace(None) != Some(None) {
            tracing::info!(pods = view.pods.len(), "the kubelet's Pods API shows the pods of this node");
        }
        Ok(())
    }

    fn trouble(&mut self, why: &str) {
        if self.said.replace(Some(why.to_owned())) != Some(Some(why.to_owned())) {
            tracing::warn!(why, "the kubelet's Pods API cannot be watched; it is tried again");
        }
    }
}

#[cfg(test)]
mod tests;

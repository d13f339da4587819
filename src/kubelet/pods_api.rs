//! Watches the pods of this node, with their UIDs, in the kubelet's Pods API and sends all of them to the
//! core after each change.
//!
//! The API is alpha and off by default in kubelet 1.36, so its absence is not logged. A listed pod's state
//! is reliable: that it exists, and that its containers have stopped permanently. A missing pod proves
//! nothing (after a restart the kubelet lists only static pods until the API server answers), so the view
//! never counts as a complete list ([`PodsView::listed_mono_ms`] is 0).

mod pod;

use super::socket_path::NoConnection;
use super::timeouts::PodsApiTimeouts;
use super::wire::dial;
use super::wire::v1alpha1::pods_client::PodsClient;
use super::wire::v1alpha1::{EventType, WatchPodsEvent, WatchPodsRequest};
use berth_core::keeper::{CommandError, Snapshot};
use berth_core::{KernelHandle, next_beat};
use berth_kernel::evidence::pods::{DELETED_MAX, PODS_MAX, Pod, PodsSource, PodsView, Stage};
use berth_kernel::grants::pod_candidates::{
    ImmediateViewLimiter, is_newly_waiting, requests_listed_resource,
};
use berth_kernel::node::command::Command;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tonic::{Code, Status};

/// The pods received so far.
struct PodCache {
    view: PodsView,
    /// The pods of a stream's first list until it is complete.
    listing: Option<BTreeMap<String, Arc<Pod>>>,
    /// Whether a first list was ever complete.
    has_listed: bool,
    /// Whether the view changed since it was last sent. If a stream ends in between, the next stream's list
    /// may equal the view, which still has to be sent.
    dirty: bool,
    /// Whether the last view sent was [`overflow_view`](Self::overflow_view).
    overflowed: bool,
    /// The pod of the last event, if it newly waits for devices.
    newly_waiting: Option<Arc<Pod>>,
}

impl Default for PodCache {
    fn default() -> Self {
        let view = PodsView::empty(PodsSource::Kubelet);
        Self { view, listing: None, has_listed: false, dirty: false, overflowed: false, newly_waiting: None }
    }
}

impl PodCache {
    /// Starts a new stream, which begins with a list of all pods. The current view applies until it is complete.
    fn begin(&mut self) {
        self.listing = Some(BTreeMap::new());
    }

    /// Applies one event. True if the view has to be sent.
    fn apply(&mut self, event: &WatchPodsEvent) -> bool {
        self.newly_waiting = None;
        match event.r#type() {
            EventType::Added | EventType::Modified => {
                let Some(pod) = pod::parse_pod(&event.pod) else {
                    return false;
                };
                if let Some(listing) = &mut self.listing {
                    listing.insert(pod.uid.clone(), Arc::new(pod));
                    return false;
                }
                let previous = self.view.pods.get(&pod.uid).map(Arc::as_ref);
                if previous == Some(&pod) {
                    return false;
                }
                let is_newly_waiting = is_newly_waiting(&pod, previous);
                let pod = Arc::new(pod);
                self.newly_waiting = is_newly_waiting.then(|| Arc::clone(&pod));
                self.view.pods.insert(pod.uid.clone(), pod);
                self.dirty = true;
                true
            }
            EventType::Deleted => {
                let Some(uid) = pod::parse_uid(&event.pod) else {
                    return false;
                };
                if let Some(listing) = &mut self.listing {
                    listing.remove(&uid);
                }
                self.view.pods.remove(&uid);
                self.record_deletion(uid);
                self.dirty = true;
                self.listing.is_none()
            }
            EventType::InitialSyncComplete => {
                let Some(listing) = self.listing.take() else {
                    return false;
                };
                let is_same = self.view.current && self.view.pods == listing;
                // A missing pod may have ended, or may not be known to this kubelet yet: its state is unknown.
                self.view.pods = listing;
                self.view.current = true;
                self.has_listed = true;
                self.dirty |= !is_same;
                self.dirty
            }
            // An event type of a future version.
            EventType::Unspecified => false,
        }
    }

    /// The view to send, without finished pods if there are more than `PODS_MAX`.
    ///
    /// # Errors
    /// The number of unfinished pods, if it exceeds `PODS_MAX`.
    fn bounded_view(&self) -> Result<PodsView, usize> {
        let mut view = self.view.clone();
        if view.pods.len() > PODS_MAX {
            view.pods.retain(|_, pod| pod.stage != Stage::Finished);
        }
        if view.pods.len() > PODS_MAX { Err(view.pods.len()) } else { Ok(view) }
    }

    /// The view to send if there are too many pods: all pods are unknown except those whose deletion was
    /// received.
    fn overflow_view(&self) -> PodsView {
        let mut view = Self::default().view;
        // A static pod can come back under its UID, so a listed pod is not deleted.
        let deleted = self.view.deleted.iter().filter(|uid| !self.view.pods.contains_key(*uid));
        view.deleted = deleted.cloned().collect();
        view
    }

    fn record_deletion(&mut self, uid: String) {
        let deleted = &mut self.view.deleted;
        deleted.retain(|previous| *previous != uid);
        deleted.push_back(uid);
        if deleted.len() > DELETED_MAX {
            deleted.pop_front();
        }
    }
}

/// Why a stream ended.
#[derive(Debug)]
enum StreamEnd {
    /// The watch has to be restarted (see [`PodsApiTimeouts::resync`]).
    Resync,
    /// The kubelet does not serve the API.
    Absent,
    /// The stream failed, or could not be opened.
    Failed(String),
    /// The daemon is stopping.
    Stopping,
}

impl From<Status> for StreamEnd {
    fn from(status: Status) -> Self {
        match status.code() {
            Code::Unimplemented => Self::Absent,
            _ => Self::Failed(status.message().to_owned()),
        }
    }
}

/// Watches the pods until the daemon stops.
pub(super) async fn run(socket: PathBuf, timeouts: PodsApiTimeouts, kernel: KernelHandle) {
    let mut watcher = PodWatcher {
        socket,
        timeouts,
        kernel,
        cache: PodCache::default(),
        limiter: ImmediateViewLimiter::default(),
        last_logged: None,
    };
    let mut wait = timeouts.retry;
    loop {
        let began = Instant::now();
        match watcher.watch_once().await {
            StreamEnd::Resync => continue,
            StreamEnd::Stopping => return,
            StreamEnd::Absent => {}
            StreamEnd::Failed(reason) => watcher.log_failure(&reason),
        }
        watcher.cache.view.current = false;
        if watcher.cache.has_listed && watcher.submit_view().await.is_err() {
            return;
        }
        // A stream that lasted resets the wait.
        wait = if began.elapsed() > timeouts.retry_max { timeouts.retry } else { wait };
        let is_longest = wait == timeouts.retry_max;
        sleep_until(if is_longest { next_beat(wait) } else { Instant::now() + wait }).await;
        wait = (wait * 2).min(timeouts.retry_max);
    }
}

struct PodWatcher {
    socket: PathBuf,
    timeouts: PodsApiTimeouts,
    kernel: KernelHandle,
    cache: PodCache,
    limiter: ImmediateViewLimiter,
    /// The last logged failure, or `Some(None)` for the last logged success; so that each is logged once.
    last_logged: Option<Option<String>>,
}

impl PodWatcher {
    /// Opens one stream and applies its events until it ends.
    async fn watch_once(&mut self) -> StreamEnd {
        if std::fs::symlink_metadata(&self.socket).is_err() {
            return StreamEnd::Absent;
        }
        let channel = match dial(&self.socket).await {
            Ok(channel) => channel,
            Err(error) => return StreamEnd::Failed(NoConnection::of_dial(&self.socket, &error).to_string()),
        };
        let mut client: PodsClient<_> = PodsClient::new(channel);
        let timeouts = self.timeouts;
        let list_deadline = Instant::now() + timeouts.first_list;
        let request = WatchPodsRequest {};
        let mut events = match timeout_at(list_deadline, client.watch_pods(request)).await {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => return status.into(),
            Err(_) => return StreamEnd::Failed("the kubelet does not answer".into()),
        };
        self.cache.begin();
        let mut snapshots = self.kernel.watch();
        let resync_at = Instant::now() + timeouts.resync;
        let mut due = None;
        loop {
            let is_listing = self.cache.listing.is_some();
            tokio::select! {
                event = events.message() => match event {
                    Ok(Some(event)) => {
                        if self.cache.apply(&event) {
                            let due = due.get_or_insert_with(|| Instant::now() + timeouts.gather);
                            if self.is_urgent() {
                                *due = Instant::now();
                            }
                        }
                    }
                    Ok(None) => return StreamEnd::Failed("the kubelet ended the watch".into()),
                    Err(status) => return status.into(),
                },
                () = sleep_until(due.unwrap_or(resync_at)), if due.is_some() => {
                    due = None;
                    if self.submit_view().await.is_err() {
                        return StreamEnd::Stopping;
                    }
                }
                () = sleep_until(list_deadline), if is_listing => {
                    return StreamEnd::Failed("the first list was not complete in time".into());
                }
                // The listed pods are published first; otherwise a list that takes longer than the resync interval
                // would start again without end.
                () = sleep_until(resync_at), if !is_listing && due.is_none() => return StreamEnd::Resync,
                changed = snapshots.changed(), if !is_listing && due.is_none() => {
                    if changed.is_err() {
                        return StreamEnd::Stopping;
                    }
                    // The API server's view, which has priority, may be gone now.
                    if self.should_submit(&snapshots.borrow_and_update()) {
                        due = Some(Instant::now() + timeouts.gather);
                    }
                }
            }
        }
    }

    /// Whether the pod of the last event may be the next one with an Allocate call.
    fn is_urgent(&mut self) -> bool {
        let Some(pod) = &self.cache.newly_waiting else { return false };
        requests_listed_resource(pod, &self.kernel.snapshot())
            && self.limiter.try_acquire(self.kernel.now().mono_ms)
    }

    /// Whether the core lacks this view and would accept it.
    fn should_submit(&self, ledger: &Snapshot) -> bool {
        let view = &self.cache.view;
        let is_lacking = ledger.pods.as_deref().is_none_or(|current| current.source != PodsSource::Kubelet);
        let is_usable = view.current && !self.cache.overflowed;
        is_usable && is_lacking && ledger.pods.as_deref().is_none_or(|current| view.replaces(current))
    }

    /// Sends the view to the core. Sends an overflow view once only.
    ///
    /// # Errors
    /// If the core is stopping.
    async fn submit_view(&mut self) -> Result<(), CommandError> {
        let (view, overflowed) = match self.cache.bounded_view() {
            Ok(view) => (view, false),
            Err(pods) => {
                self.log_failure(&format!(
                    "the kubelet lists {pods} unfinished pods; at most {PODS_MAX} are supported"
                ));
                if self.cache.overflowed {
                    return Ok(());
                }
                (self.cache.overflow_view(), true)
            }
        };
        while let Err(error) = self.kernel.execute(Command::Pods(view.clone())).await {
            if error == CommandError::Stopping {
                return Err(error);
            }
            // The keeper is busy. Events wait in the stream meanwhile.
            tracing::debug!(%error, "the kubelet's pods could not be applied; trying again");
            sleep(self.timeouts.retry).await;
        }
        self.cache.dirty = false;
        self.cache.overflowed = overflowed;
        if view.current && self.last_logged.replace(None) != Some(None) {
            tracing::info!(
                pods = view.pods.len(),
                "watching the pods of this node in the kubelet's Pods API"
            );
        }
        Ok(())
    }

    fn log_failure(&mut self, reason: &str) {
        if self.last_logged.replace(Some(reason.to_owned())) != Some(Some(reason.to_owned())) {
            tracing::warn!(reason, "cannot watch the kubelet's Pods API; trying again");
        }
    }
}

#[cfg(test)]
mod tests;

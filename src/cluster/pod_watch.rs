//! The pods of this node as a stream of events: one list, then watches that each begin where the one before ended.
//!
//! After an error no list is needed: the next watch begins at the newest version that was received. Only if the API
//! server no longer has that version (410), the pods are listed again. The library's own watcher (kube 5.0,
//! `runtime::watcher`) resumes, too, but does not report that it has: until the next change it would be unknown whether
//! the source is current.

use super::client::ANSWER_MAX;
use super::pod::convert_pod;
use super::settings::Settings;
use berth_kernel::evidence::pods::{PODS_MAX, Pod};
use futures_util::stream::{BoxStream, Stream, StreamExt, unfold};
use k8s_openapi::api::core::v1::Pod as ApiPod;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::Status;
use kube::{Api, Client, ResourceExt};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Timeout of a list: the API server's own timeout of a request (kube-apiserver, `--request-timeout`, a minute).
const LIST_MAX: Duration = Duration::from_secs(60);

/// One event of the pods of this node.
pub(super) enum Event {
    /// A list is about to be requested: the first event, and the next one after [`Error::Expired`].
    Listing,
    /// All pods of the node, as of some moment after [`Self::Listing`].
    Listed(Vec<Arc<Pod>>),
    /// A watch is open: the changes since the last event follow.
    Opened,
    /// A pod was added or modified.
    Applied(Arc<Pod>),
    /// A pod was deleted.
    Deleted(Arc<Pod>),
}

/// Why there is no event, or none can be used. The stream goes on after each error, when the caller polls it again.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the pods of this node cannot be listed")]
    List(#[source] kube::Error),
    #[error("listing this node's pods took longer than {} s", LIST_MAX.as_secs())]
    ListLate,
    #[error("the list of this node's pods has no resourceVersion, so this may not be an API server")]
    NoVersion,
    #[error("the pods of this node cannot be watched")]
    Watch(#[source] kube::Error),
    #[error("opening the watch of this node's pods took longer than {} s", ANSWER_MAX.as_secs())]
    WatchLate,
    #[error("the watch of this node's pods was interrupted")]
    Broken(#[source] kube::Error),
    #[error("the API server ended the watch of this node's pods: {} ({})", .0.message, .0.code)]
    Ended(Box<Status>),
    #[error("the watch of this node's pods ended after {after_s} s, and {asked_s} s were requested")]
    Early { after_s: u64, asked_s: u64 },
    #[error("the watch of this node's pods delivered nothing for {} s", .0.as_secs_f32())]
    Silent(Duration),
    /// The API server no longer has the version at which a watch should begin, as after minutes without a watch.
    #[error("the API server no longer has the resourceVersion of this watch; listing the pods again")]
    Expired,
    #[error("the API server lists {0} unfinished pods of this node; at most {PODS_MAX} are supported")]
    TooMany(usize),
}

enum State {
    Unlisted,
    Listing,
    /// The next watch begins at this version.
    At(String),
    Watching {
        version: String,
        opened: Instant,
        stream: BoxStream<'static, kube::Result<WatchEvent<ApiPod>>>,
    },
}

struct PodWatch {
    pods: Api<ApiPod>,
    fields: String,
    watch_timeout: Duration,
    read_timeout: Duration,
    state: State,
}

/// The events of the pods of this node; the stream never ends.
pub(super) fn events(
    settings: &Settings,
    client: Client,
) -> impl Stream<Item = Result<Event, Error>> + Send + use<> {
    let watch = PodWatch {
        pods: Api::all(client),
        fields: format!("spec.nodeName={}", settings.node),
        watch_timeout: settings.watch_timeout,
        read_timeout: settings.read_timeout,
        state: State::Unlisted,
    };
    // `unfold` keeps the future of a request that is under way when the caller stops polling; with a plain method it
    // would be dropped.
    unfold(watch, |mut watch| async move { Some((watch.next().await, watch)) })
}

impl PodWatch {
    async fn next(&mut self) -> Result<Event, Error> {
        loop {
            match std::mem::replace(&mut self.state, State::Unlisted) {
                State::Unlisted => {
                    self.state = State::Listing;
                    return Ok(Event::Listing);
                }
                State::Listing => return self.list().await,
                State::At(version) => return self.open(version).await,
                State::Watching { version, opened, stream } => {
                    if let Some(event) = self.read(version, opened, stream).await? {
                        return Ok(event);
                    }
                }
            }
        }
    }

    /// Lists the pods, without pages: the API server serves the whole list of one node from its watch cache, but
    /// further pages from etcd.
    async fn list(&mut self) -> Result<Event, Error> {
        let params = ListParams::default().fields(&self.fields);
        let listed = timeout(LIST_MAX, self.pods.list(&params)).await.map_err(|_| Error::ListLate)?;
        let list = listed.map_err(Error::List)?;
        let version = list.metadata.resource_version.filter(|version| !version.is_empty());
        self.state = State::At(version.ok_or(Error::NoVersion)?);
        Ok(Event::Listed(list.items.iter().filter_map(convert_pod).map(Arc::new).collect()))
    }

    async fn open(&mut self, version: String) -> Result<Event, Error> {
        // The API server counts the timeout from the request.
        let opened = Instant::now();
        let asked_s = u32::try_from(self.watch_timeout.as_secs()).unwrap_or(u32::MAX);
        let params = WatchParams::default().fields(&self.fields).timeout(asked_s);
        let error = match timeout(ANSWER_MAX, self.pods.watch(&params, &version)).await {
            Ok(Ok(stream)) => {
                self.state = State::Watching { version, opened, stream: stream.boxed() };
                return Ok(Event::Opened);
            }
            // 400: the version is from another cluster behind the same address.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 400 | 410) => {
                return Err(Error::Expired);
            }
            Ok(Err(error)) => Error::Watch(error),
            Err(_) => Error::WatchLate,
        };
        self.state = State::At(version);
        Err(error)
    }

    /// The next event of a watch; `None` for a bookmark, which only moves the version, and at the watch's end.
    async fn read(
        &mut self,
        version: String,
        opened: Instant,
        mut stream: BoxStream<'static, kube::Result<WatchEvent<ApiPod>>>,
    ) -> Result<Option<Event>, Error> {
        // Bookmarks come each minute: a watch that delivers nothing for longer is dead.
        let next = timeout(self.read_timeout, stream.next()).await;
        let (newer, event) = match next {
            Ok(Some(Ok(WatchEvent::Added(pod) | WatchEvent::Modified(pod)))) => {
                (pod.resource_version(), convert_pod(&pod).map(|pod| Event::Applied(Arc::new(pod))))
            }
            Ok(Some(Ok(WatchEvent::Deleted(pod)))) => {
                (pod.resource_version(), convert_pod(&pod).map(|pod| Event::Deleted(Arc::new(pod))))
            }
            Ok(Some(Ok(WatchEvent::Bookmark(bookmark)))) => (Some(bookmark.metadata.resource_version), None),
            Ok(Some(Ok(WatchEvent::Error(status)))) if status.code == 410 => return Err(Error::Expired),
            ended => {
                self.state = State::At(version);
                return match ended {
                    Ok(Some(Ok(WatchEvent::Error(status)))) => Err(Error::Ended(status)),
                    Ok(Some(Err(error))) => Err(Error::Broken(error)),
                    Err(_) => Err(Error::Silent(self.read_timeout)),
                    _ => self.ended(opened).map(|()| None),
                };
            }
        };
        let version = newer.filter(|newer| !newer.is_empty()).unwrap_or(version);
        self.state = State::Watching { version, opened, stream };
        Ok(event)
    }

    /// After a watch that lasted its timeout the next one is opened at once. One that ended earlier is an error, since
    /// as a rule the watches of all daemons were cut at one moment. A broken connection looks like such an early end,
    /// too.
    fn ended(&self, opened: Instant) -> Result<(), Error> {
        let lasted = opened.elapsed();
        // A tenth less, for a server that counts coarsely.
        if lasted >= self.watch_timeout.mul_f64(0.9) {
            return Ok(());
        }
        Err(Error::Early { after_s: lasted.as_secs(), asked_s: self.watch_timeout.as_secs() })
    }
}

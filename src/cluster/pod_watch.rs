//! The pods of this node as events: one list, then watches that each go on where the one before it ended.
//!
//! An error costs no list: the next watch begins at the newest version that is known. Only where the API server no longer
//! has that version (410) the pods are listed again. The library's own watcher (kube 5.0, `runtime::watcher`) resumes,
//! too, but does not report that it has: whether the source is current could not be known before the next change.

use super::Settings;
use super::client::ANSWER_MAX;
use futures_util::stream::{BoxStream, Stream, StreamExt, unfold};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::Status;
use kube::{Api, Client, ResourceExt};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Longest wait for a list. The API server itself gives up a request after a minute (kube-apiserver,
/// `--request-timeout`).
const LIST_MAX: Duration = Duration::from_secs(60);

/// What comes of the pods.
pub(super) enum Event {
    /// A list is asked for: the first event, and the next one after [`Error::Expired`].
    Listing,
    /// All of them, some time since it was asked for.
    Listed(Vec<Pod>),
    /// A watch is open: what changed since the last event follows.
    Opened,
    /// A pod came or changed.
    Applied(Box<Pod>),
    /// A pod was deleted.
    Deleted(Box<Pod>),
}

/// Why nothing comes at present. The stream goes on after each: the caller says when.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the pods of this node cannot be listed")]
    List(#[source] kube::Error),
    #[error("listing this node's pods took longer than {} s", LIST_MAX.as_secs())]
    ListLate,
    #[error("the list of this node's pods has no resourceVersion: is this an API server?")]
    NoVersion,
    #[error("the pods of this node cannot be watched")]
    Watch(#[source] kube::Error),
    #[error("opening the watch of this node's pods took longer than {} s", ANSWER_MAX.as_secs())]
    WatchLate,
    #[error("the watch of this node's pods was interrupted")]
    Broken(#[source] kube::Error),
    #[error("the API server ended the watch of this node's pods: {} ({})", .0.message, .0.code)]
    Ended(Box<Status>),
    #[error("the watch of this node's pods ended after {after_s} s instead of {asked_s} s")]
    Early { after_s: u64, asked_s: u64 },
    #[error("the watch of this node's pods delivered nothing for {} s", .0.as_secs_f32())]
    Silent(Duration),
    /// The API server no longer has the version at which a watch was to begin, as after minutes without one.
    #[error("the API server no longer has the resourceVersion of this watch; listing the pods again")]
    Expired,
}

enum State {
    Unlisted,
    Listing,
    /// To be watched from this version on.
    At(String),
    Watching {
        version: String,
        opened: Instant,
        stream: BoxStream<'static, kube::Result<WatchEvent<Pod>>>,
    },
}

struct PodWatch {
    pods: Api<Pod>,
    fields: String,
    watch: Duration,
    silence: Duration,
    state: State,
}

/// The pods of this node, for ever.
pub(super) fn events(
    settings: &Settings,
    client: Client,
) -> impl Stream<Item = Result<Event, Error>> + Send + use<> {
    let watch = PodWatch {
        pods: Api::all(client),
        fields: format!("spec.nodeName={}", settings.node),
        watch: settings.watch,
        silence: settings.silence,
        state: State::Unlisted,
    };
    // Not a plain method: a request that is under way goes on while nothing polls the stream.
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

    /// Without pages: the API server answers the whole list of one node from its watch cache, further pages from etcd.
    async fn list(&mut self) -> Result<Event, Error> {
        let params = ListParams::default().fields(&self.fields);
        let listed = timeout(LIST_MAX, self.pods.list(&params)).await.map_err(|_| Error::ListLate)?;
        let list = listed.map_err(Error::List)?;
        let version = list.metadata.resource_version.filter(|version| !version.is_empty());
        self.state = State::At(version.ok_or(Error::NoVersion)?);
        Ok(Event::Listed(list.items))
    }

    async fn open(&mut self, version: String) -> Result<Event, Error> {
        // The server counts from when it is asked.
        let opened = Instant::now();
        let asked_s = u32::try_from(self.watch.as_secs()).unwrap_or(u32::MAX);
        let params = WatchParams::default().fields(&self.fields).timeout(asked_s);
        let error = match timeout(ANSWER_MAX, self.pods.watch(&params, &version)).await {
            Ok(Ok(stream)) => {
                self.state = State::Watching { version, opened, stream: stream.boxed() };
                return Ok(Event::Opened);
            }
            // 400: the version is of another cluster behind the same address.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 400 | 410) => {
                return Err(Error::Expired);
            }
            Ok(Err(error)) => Error::Watch(error),
            Err(_) => Error::WatchLate,
        };
        self.state = State::At(version);
        Err(error)
    }

    /// The next event of a watch; `None` for what only moves its version, and at its end.
    async fn read(
        &mut self,
        mut version: String,
        opened: Instant,
        mut stream: BoxStream<'static, kube::Result<WatchEvent<Pod>>>,
    ) -> Result<Option<Event>, Error> {
        // Bookmarks come each minute, so one that is silent for longer is dead.
        let next = timeout(self.silence, stream.next()).await;
        let event = match next {
            Ok(Some(Ok(WatchEvent::Added(pod) | WatchEvent::Modified(pod)))) => Event::Applied(Box::new(pod)),
            Ok(Some(Ok(WatchEvent::Deleted(pod)))) => Event::Deleted(Box::new(pod)),
            Ok(Some(Ok(WatchEvent::Bookmark(bookmark)))) => {
                version = bookmark.metadata.resource_version;
                self.state = State::Watching { version, opened, stream };
                return Ok(None);
            }
            Ok(Some(Ok(WatchEvent::Error(status)))) if status.code == 410 => return Err(Error::Expired),
            ended => {
                self.state = State::At(version);
                return match ended {
                    Ok(Some(Ok(WatchEvent::Error(status)))) => Err(Error::Ended(status)),
                    Ok(Some(Err(error))) => Err(Error::Broken(error)),
                    Err(_) => Err(Error::Silent(self.silence)),
                    _ => self.ended(opened).map(|()| None),
                };
            }
        };
        if let Event::Applied(pod) | Event::Deleted(pod) = &event
            && let Some(newer) = pod.resource_version().filter(|version| !version.is_empty())
        {
            version = newer;
        }
        self.state = State::Watching { version, opened, stream };
        Ok(Some(event))
    }

    /// A watch that ended in its time goes on with the next one at once. One that ended before it was cut off, with
    /// those of all other daemons as a rule: the library shows a connection that broke as such an end, too.
    fn ended(&self, opened: Instant) -> Result<(), Error> {
        let lasted = opened.elapsed();
        // A tenth for a server that counts coarsely.
        if lasted >= self.watch.mul_f64(0.9) {
            return Ok(());
        }
        Err(Error::Early { after_s: lasted.as_secs(), asked_s: self.watch.as_secs() })
    }
}

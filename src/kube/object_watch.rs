//! The objects of one kind, either all or those of this node, as a stream of events: one list, then watches that each begin where
//! the one before ended.
//!
//! After an error no list is needed: the next watch begins at the newest version that was received. Only if the API
//! server no longer has that version (410), the objects are listed again. The library's own watcher (kube 5.0,
//! `runtime::watcher`) resumes, too, but does not report that it has: until the next change it would be unknown whether
//! the source is current.

use super::connection::Connection;
use super::request::{ANSWER_MAX, error_chain};
use super::wait::{Backoff, after_loss, random, retry_at};
use futures_util::stream::{BoxStream, Stream, StreamExt, unfold};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::Status;
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Timeout of a list: the API server's own timeout of a request (kube-apiserver, `--request-timeout`, a minute).
const LIST_MAX: Duration = Duration::from_secs(60);

/// One event of the objects.
pub enum Event<T> {
    /// A list is about to be requested: the first event, and the next one after [`Cause::Expired`].
    Listing,
    /// All objects, as of some moment after [`Self::Listing`].
    Listed(Vec<T>),
    /// A watch is open: the changes since the last event follow.
    Opened,
    /// An object was added or modified.
    Applied(T),
    /// An object was deleted.
    Deleted(T),
}

/// Why there is no event, or none can be used. The stream goes on after each error, when the caller polls it again.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct Error {
    /// What is watched, plural.
    pub what: &'static str,
    /// Why.
    #[source]
    pub cause: Cause,
}

/// The cause of an [`Error`].
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    /// The request for the list failed.
    #[error("they cannot be listed")]
    List(#[source] kube::Error),
    /// No list came in time.
    #[error("listing them took longer than {} s", LIST_MAX.as_secs())]
    ListLate,
    /// No watch can begin after the list.
    #[error("their list has no resourceVersion, so this may not be an API server")]
    NoVersion,
    /// The request for the watch failed.
    #[error("they cannot be watched")]
    Watch(#[source] kube::Error),
    /// No watch was opened in time.
    #[error("opening their watch took longer than {} s", ANSWER_MAX.as_secs())]
    WatchLate,
    /// The connection failed.
    #[error("their watch was interrupted")]
    Broken(#[source] kube::Error),
    /// The API server sent an error in the watch.
    #[error("the API server ended their watch: {} ({})", .0.message, .0.code)]
    Ended(Box<Status>),
    /// The watch ended before its timeout.
    #[error("their watch ended after {after_s} s, and {asked_s} s were requested")]
    Early {
        /// How long it lasted, seconds.
        after_s: u64,
        /// Its timeout, seconds.
        asked_s: u64,
    },
    /// The watch delivered not even a bookmark.
    #[error("their watch delivered nothing for {} s", .0.as_secs_f32())]
    Silent(Duration),
    /// The API server no longer has the version at which a watch should begin, as after minutes without a watch.
    #[error("the API server no longer has the resourceVersion of their watch; they are listed again")]
    Expired,
    /// There are more objects than the caller supports.
    #[error("the API server lists {found} of them that have not finished; at most {supported} are supported")]
    TooMany {
        /// How many there are.
        found: usize,
        /// How many are supported.
        supported: usize,
    },
}

impl Error {
    /// The error for people. `right`: what a 403 lacks; `absent`: what a 404 means.
    pub fn text(&self, right: &str, absent: &str) -> String {
        let text = error_chain(self);
        match self.cause.code() {
            403 => format!("{text} (it needs: {right}; see deploy/cluster-role.yaml)"),
            404 => format!("{text}: {absent}"),
            _ => text,
        }
    }

    /// When the stream is to be polled again. `longest_after_loss`: the longest wait after an open watch was lost, since an API
    /// server that restarts ends those of all nodes at one moment.
    pub fn retry_at(
        &self,
        connection: &Connection,
        backoff: &mut Backoff,
        was_open: bool,
        longest_after_loss: Duration,
    ) -> Instant {
        if was_open && !matches!(self.cause, Cause::Expired) && self.cause.code() == 0 {
            let now = Instant::now();
            return now + connection.retry_after.delay(after_loss(longest_after_loss, random()), now);
        }
        retry_at(connection, backoff, self.cause.code())
    }
}

impl Cause {
    /// The code of the error status with which the API server answered; 0 without one.
    pub fn code(&self) -> u16 {
        match self {
            Self::List(kube::Error::Api(status)) | Self::Watch(kube::Error::Api(status)) => status.code,
            _ => 0,
        }
    }
}

enum State<K> {
    Unlisted,
    Listing,
    /// The next watch begins at this version.
    At(String),
    Watching {
        version: String,
        opened: Instant,
        stream: BoxStream<'static, kube::Result<WatchEvent<K>>>,
    },
}

struct ObjectWatch<K, T> {
    api: Api<K>,
    /// The part of an object that is used; `None` for an object that is left out.
    convert: fn(&K) -> Option<T>,
    fields: Option<String>,
    watch_timeout: Duration,
    read_timeout: Duration,
    state: State<K>,
}

/// The events of the objects that the field selector `fields` selects; of all objects of the kind if it is `None`. The stream
/// never ends. `what` names the objects in errors.
pub fn events<K, T>(
    connection: &Connection,
    what: &'static str,
    api: Api<K>,
    fields: Option<String>,
    convert: fn(&K) -> Option<T>,
) -> impl Stream<Item = Result<Event<T>, Error>> + Send + use<K, T>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    T: Send + 'static,
{
    let watch = ObjectWatch {
        api,
        convert,
        fields,
        watch_timeout: connection.watch_timeout,
        read_timeout: connection.read_timeout,
        state: State::Unlisted,
    };
    // `unfold` keeps the future of a request that is under way when the caller stops polling; with a plain method it
    // would be dropped.
    unfold(watch, move |mut watch| async move {
        let next = watch.next().await.map_err(|cause| Error { what, cause });
        Some((next, watch))
    })
}

impl<K, T> ObjectWatch<K, T>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    async fn next(&mut self) -> Result<Event<T>, Cause> {
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

    /// Lists the objects, without pages: the API server serves the whole list from its watch cache, but
    /// further pages from etcd.
    async fn list(&mut self) -> Result<Event<T>, Cause> {
        let params = ListParams { field_selector: self.fields.clone(), ..ListParams::default() };
        let listed = timeout(LIST_MAX, self.api.list(&params)).await.map_err(|_| Cause::ListLate)?;
        let list = listed.map_err(Cause::List)?;
        let version = list.metadata.resource_version.filter(|version| !version.is_empty());
        self.state = State::At(version.ok_or(Cause::NoVersion)?);
        Ok(Event::Listed(list.items.iter().filter_map(self.convert).collect()))
    }

    async fn open(&mut self, version: String) -> Result<Event<T>, Cause> {
        // The API server counts the timeout from the request.
        let opened = Instant::now();
        let asked_s = u32::try_from(self.watch_timeout.as_secs()).unwrap_or(u32::MAX);
        let params =
            WatchParams { field_selector: self.fields.clone(), ..WatchParams::default() }.timeout(asked_s);
        let error = match timeout(ANSWER_MAX, self.api.watch(&params, &version)).await {
            Ok(Ok(stream)) => {
                self.state = State::Watching { version, opened, stream: stream.boxed() };
                return Ok(Event::Opened);
            }
            // 400: the version is from another cluster behind the same address.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 400 | 410) => {
                return Err(Cause::Expired);
            }
            Ok(Err(error)) => Cause::Watch(error),
            Err(_) => Cause::WatchLate,
        };
        self.state = State::At(version);
        Err(error)
    }

    /// The next event of a watch; `None` for a bookmark, which only moves the version, and at the watch's end.
    async fn read(
        &mut self,
        version: String,
        opened: Instant,
        mut stream: BoxStream<'static, kube::Result<WatchEvent<K>>>,
    ) -> Result<Option<Event<T>>, Cause> {
        // Bookmarks come each minute: a watch that delivers nothing for longer is dead.
        let next = timeout(self.read_timeout, stream.next()).await;
        let (newer, event) = match next {
            Ok(Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)))) => {
                (object.resource_version(), (self.convert)(&object).map(Event::Applied))
            }
            Ok(Some(Ok(WatchEvent::Deleted(object)))) => {
                (object.resource_version(), (self.convert)(&object).map(Event::Deleted))
            }
            Ok(Some(Ok(WatchEvent::Bookmark(bookmark)))) => (Some(bookmark.metadata.resource_version), None),
            Ok(Some(Ok(WatchEvent::Error(status)))) if status.code == 410 => return Err(Cause::Expired),
            ended => {
                self.state = State::At(version);
                return match ended {
                    Ok(Some(Ok(WatchEvent::Error(status)))) => Err(Cause::Ended(status)),
                    Ok(Some(Err(error))) => Err(Cause::Broken(error)),
                    Err(_) => Err(Cause::Silent(self.read_timeout)),
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
    fn ended(&self, opened: Instant) -> Result<(), Cause> {
        let lasted = opened.elapsed();
        // A tenth less, for a server that counts coarsely.
        if lasted >= self.watch_timeout.mul_f64(0.9) {
            return Ok(());
        }
        Err(Cause::Early { after_s: lasted.as_secs(), asked_s: self.watch_timeout.as_secs() })
    }
}

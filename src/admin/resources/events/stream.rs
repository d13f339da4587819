//! One event stream: a position in the ring that advances as the client reads.

use crate::event_feed::{Following, KeptEvent, Ring, StreamPermit, frame};
use actix_web::web::Bytes;
use berth_api::{Event, EventKind, rfc3339};
use futures_util::future::LocalBoxFuture;
use futures_util::stream::{self, Stream};
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::time::Instant;

/// Most events in one write: 16 KiB of about 500 bytes each wait for a reader, besides the system's own buffers.
const EVENTS_AT_ONCE: usize = 32;
/// How often a stream without events sends a comment. Proxies close connections that are silent for a minute.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How often a stream checks whether its client is still authorized.
const ADMISSION_CHECK_INTERVAL: Duration = Duration::from_secs(15);
/// Longest life of a stream: bounds any fault that nothing else ends.
const STREAM_MAX: Duration = Duration::from_secs(3600);
/// Least time between a write and a comment for a nudge. A nudge within it is skipped; they are repeated.
const NUDGE_MIN_GAP: Duration = Duration::from_millis(20);

/// Returns the ledger's generation.
pub(crate) type Generation = Box<dyn Fn() -> u64 + Send>;

/// Returns whether the stream's client is authorized now.
pub(crate) type IsAdmitted = Box<dyn Fn() -> LocalBoxFuture<'static, bool>>;

/// The intervals of a stream.
#[derive(Clone, Copy)]
pub(crate) struct StreamTimes {
    keep_alive: Duration,
    admission_check: Duration,
    life: Duration,
}

impl Default for StreamTimes {
    fn default() -> Self {
        Self { keep_alive: KEEP_ALIVE, admission_check: ADMISSION_CHECK_INTERVAL, life: STREAM_MAX }
    }
}

/// The events that a client requested.
pub(crate) struct EventFilter {
    /// Of these kinds; `None`: of all.
    pub(crate) kinds: Option<BTreeSet<EventKind>>,
    /// About this GPU; `None`: about all, and about none.
    pub(crate) gpu: Option<String>,
}

impl EventFilter {
    fn matches(&self, event: &KeptEvent) -> bool {
        self.kinds.as_ref().is_none_or(|kinds| kinds.contains(&event.kind))
            && self.gpu.as_deref().is_none_or(|gpu| event.gpu.as_deref() == Some(gpu))
    }
}

/// One stream.
pub(crate) struct EventStream {
    ring: Arc<Ring>,
    woken: watch::Receiver<u64>,
    filter: EventFilter,
    /// The number of the last event that was read.
    after: u64,
    follow: bool,
    /// Sent before anything else.
    first: Option<String>,
    generation: Generation,
    times: StreamTimes,
    last_sent: LastSent,
    until: Instant,
    ended: bool,
    admission: Admission,
}

/// What was last sent.
struct LastSent {
    at: Instant,
    /// The number in its id.
    id: u64,
    /// The count of nudges at the last comment.
    nudges: u64,
}

/// Whether the client may still have the stream.
struct Admission {
    /// `None` for a stream that does not follow.
    permit: Option<StreamPermit>,
    is_admitted: IsAdmitted,
    /// When [`Self::is_admitted`] was last called.
    checked: Instant,
}

/// The start of a stream.
pub(crate) struct Start {
    /// The number of the event that it starts after.
    pub(crate) after: u64,
    /// Whether it stays open once all kept events were sent.
    pub(crate) follow: bool,
    /// The frames that are sent before anything else. Their id is that of `after`.
    pub(crate) first: String,
    pub(crate) generation: Generation,
    pub(crate) is_admitted: IsAdmitted,
}

impl EventStream {
    pub(crate) fn new(
        ring: Arc<Ring>,
        filter: EventFilter,
        start: Start,
        permit: Option<StreamPermit>,
        times: StreamTimes,
    ) -> Self {
        let now = Instant::now();
        Self {
            woken: ring.watch(),
            last_sent: LastSent { at: now, id: start.after, nudges: ring.nudges() },
            ring,
            filter,
            after: start.after,
            follow: start.follow,
            first: Some(start.first),
            generation: start.generation,
            times,
            until: now + times.life,
            ended: false,
            admission: Admission { permit, is_admitted: start.is_admitted, checked: now },
        }
    }

    /// The body of the response.
    pub(crate) fn into_stream(self) -> impl Stream<Item = Result<Bytes, Infallible>> + 'static {
        stream::unfold(self, |mut events| async move {
            let chunk = events.next().await?;
            Some((Ok(Bytes::from(chunk)), events))
        })
    }

    async fn next(&mut self) -> Option<String> {
        if self.ended {
            return None;
        }
        let chunk = match self.first.take() {
            Some(first) => first,
            None => self.following().await?,
        };
        self.last_sent.at = Instant::now();
        self.last_sent.id = self.after;
        Some(chunk)
    }

    async fn following(&mut self) -> Option<String> {
        loop {
            // Marked as seen before the ring is read, so that an event after that wakes the stream.
            self.woken.borrow_and_update();
            if self.admission.checked.elapsed() >= self.times.admission_check {
                self.admission.checked = Instant::now();
                if !(self.admission.is_admitted)().await {
                    return Some(self.end(
                        "no longer authorized: the token, the certificate or its permission was removed",
                    ));
                }
            }
            // Checked in each turn: an endless run of events that the filter drops must not keep the stream silent.
            if let Some(chunk) = self.due() {
                return Some(chunk);
            }
            match self.ring.following(self.after, EVENTS_AT_ONCE) {
                Following::Gone => {
                    return Some(self.end(
                        "the client reads too slowly, so that the next events are no longer kept: reconnect and read the state again",
                    ));
                }
                Following::Closed(reason) => return Some(self.end(reason)),
                Following::Events(events, last) if !events.is_empty() => {
                    self.after = last;
                    let text: String =
                        events.iter().filter(|event| self.filter.matches(event)).map(|e| &*e.frame).collect();
                    if !text.is_empty() {
                        return Some(text);
                    }
                }
                Following::Events(..) if !self.follow => {
                    self.ended = true;
                    return (self.after != self.last_sent.id).then(|| self.id_alone());
                }
                Following::Events(..) => {
                    let comment = self.last_sent.at + self.times.keep_alive;
                    let check = self.admission.checked + self.times.admission_check;
                    let due = comment.min(check).min(self.until);
                    // After a timeout and after a change the loop checks everything again. The channel cannot be
                    // closed: this stream holds the ring.
                    let _ = tokio::time::timeout_at(due, self.woken.changed()).await;
                }
            }
        }
    }

    /// What has to be sent now without any event.
    fn due(&mut self) -> Option<String> {
        let now = Instant::now();
        if now >= self.until {
            return Some(self.end("the stream is an hour old: reconnect, no event is missed"));
        }
        if self.admission.permit.as_ref().is_some_and(StreamPermit::is_revoked) {
            return Some(self.end("a caller with fewer streams replaced it: reconnect"));
        }
        let nudges = self.ring.nudges();
        let is_nudged = nudges != self.last_sent.nudges && now >= self.last_sent.at + NUDGE_MIN_GAP;
        if is_nudged || now >= self.last_sent.at + self.times.keep_alive {
            self.last_sent.nudges = nudges;
            return Some(format!(": still here\n{}", self.id_alone()));
        }
        None
    }

    /// Advances the client's id past events that the filter dropped, so that it misses none when it reconnects. A frame
    /// without data is not an event.
    fn id_alone(&self) -> String {
        format!("id: {}\n\n", self.ring.id(self.after))
    }

    fn end(&mut self, reason: &str) -> String {
        self.ended = true;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let event = Event {
            kind: EventKind::End,
            at: rfc3339(u64::try_from(now.as_millis()).unwrap_or(u64::MAX)),
            generation: (self.generation)(),
            gpu: None,
            allocation: None,
            policy: None,
            words: reason.to_owned(),
        };
        frame(self.ring.id(self.after), &event)
    }
}

#[cfg(test)]
mod tests;

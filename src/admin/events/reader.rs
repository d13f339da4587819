//! One stream: a place in the ring that moves on as the client reads.

use super::places::Place;
use super::recent::{Following, Kept, Ring};
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

/// Events in one write: at some 500 bytes each 16 KiB, which is what waits for a reader beside the
/// system's own buffers.
const EVENTS_AT_ONCE: usize = 32;
/// How often a stream without news says that it lives. Proxies cut what is silent for a minute.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How often a stream asks whether its client would still be let in.
const LOOK_EVERY: Duration = Duration::from_secs(15);
/// Longest life of a stream: what goes wrong unseen ends with it.
const STREAM_MAX: Duration = Duration::from_secs(3600);

/// A word that is asked for so soon after another one is not given: whoever asks does so again.
const NUDGE_APART: Duration = Duration::from_millis(20);

/// Answers the ledger's generation.
pub(super) type Generation = Box<dyn Fn() -> u64 + Send>;

/// Answers whether the stream's client would be let in now.
pub(super) type Still = Box<dyn Fn() -> LocalBoxFuture<'static, bool>>;

/// The waits of a stream.
#[derive(Clone, Copy)]
pub(super) struct Waits {
    keep_alive: Duration,
    /// Until it is asked again whether the client would be let in.
    look: Duration,
    life: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        Self { keep_alive: KEEP_ALIVE, look: LOOK_EVERY, life: STREAM_MAX }
    }
}

/// Which events a reader wants.
pub(super) struct Wanted {
    /// Of these kinds; all if not given.
    pub(super) kinds: Option<BTreeSet<EventKind>>,
    /// About this GPU.
    pub(super) gpu: Option<String>,
}

impl Wanted {
    fn takes(&self, event: &Kept) -> bool {
        self.kinds.as_ref().is_none_or(|kinds| kinds.contains(&event.kind))
            && self.gpu.as_deref().is_none_or(|gpu| event.gpu.as_deref() == Some(gpu))
    }
}

/// The reader of one stream.
pub(super) struct Reader {
    ring: Arc<Ring>,
    woken: watch::Receiver<u64>,
    wanted: Wanted,
    /// The number of the last event that was looked at.
    after: u64,
    /// The number that the client knows by the ids that it was sent.
    told: u64,
    follow: bool,
    /// What is sent before anything else.
    first: Option<String>,
    /// Of the ledger, when it is asked.
    generation: Generation,
    keep_alive: Duration,
    /// When something was sent last.
    sent: Instant,
    /// How often the ring wanted a word when this stream gave its last one.
    nudged: u64,
    until: Instant,
    over: bool,
    /// None is needed by a stream that ends with what is kept.
    place: Option<Place>,
    still: Still,
    look: Duration,
    /// When that was asked last.
    looked: Instant,
}

/// What a stream begins with.
pub(super) struct Begin {
    /// The number of the event that it follows.
    pub(super) after: u64,
    /// Whether it goes on once all that is kept was sent.
    pub(super) follow: bool,
    /// What is sent before anything else; its ids are that of `after`.
    pub(super) first: String,
    /// For what the stream says of itself.
    pub(super) generation: Generation,
    /// Whether its client would be let in.
    pub(super) still: Still,
}

impl Reader {
    pub(super) fn new(
        ring: Arc<Ring>,
        wanted: Wanted,
        begin: Begin,
        place: Option<Place>,
        waits: Waits,
    ) -> Self {
        let now = Instant::now();
        Self {
            woken: ring.watch(),
            nudged: ring.nudges(),
            ring,
            wanted,
            after: begin.after,
            told: begin.after,
            follow: begin.follow,
            first: Some(begin.first),
            generation: begin.generation,
            keep_alive: waits.keep_alive,
            sent: now,
            until: now + waits.life,
            over: false,
            place,
            still: begin.still,
            look: waits.look,
            looked: now,
        }
    }

    /// What is sent, piece by piece.
    pub(super) fn stream(self) -> impl Stream<Item = Result<Bytes, Infallible>> + 'static {
        stream::unfold(self, |mut reader| async move {
            let piece = reader.next().await?;
            Some((Ok(Bytes::from(piece)), reader))
        })
    }

    async fn next(&mut self) -> Option<String> {
        if self.over {
            return None;
        }
        let piece = match self.first.take() {
            Some(first) => first,
            None => self.following().await?,
        };
        self.sent = Instant::now();
        self.told = self.after;
        Some(piece)
    }

    async fn following(&mut self) -> Option<String> {
        loop {
            // Seen before the look, so that what comes after the look wakes.
            self.woken.borrow_and_update();
            if self.looked.elapsed() >= self.look {
                self.looked = Instant::now();
                if !(self.still)().await {
                    return Some(
                        self.end("no longer let in: the token, the certificate or its right is gone"),
                    );
                }
            }
            // Whether or not events come: of those that are not wanted nothing is sent, and without end
            // they must not keep the stream silent, nor alive.
            if let Some(piece) = self.due() {
                return Some(piece);
            }
            match self.ring.following(self.after, EVENTS_AT_ONCE) {
                Following::Gone => {
                    return Some(
                        self.end("too slow: what came next is no longer kept; come back and read anew"),
                    );
                }
                Following::Closed(why) => return Some(self.end(why)),
                Following::Events(events, last) if !events.is_empty() => {
                    self.after = last;
                    let text: String =
                        events.iter().filter(|event| self.wanted.takes(event)).map(|e| &*e.frame).collect();
                    if !text.is_empty() {
                        return Some(text);
                    }
                }
                Following::Events(..) if !self.follow => {
                    self.over = true;
                    return (self.after != self.told).then(|| self.id_alone());
                }
                Following::Events(..) => {
                    let due = (self.sent + self.keep_alive).min(self.looked + self.look).min(self.until);
                    // Either way there is something to look at. The ring is ours, too, so its sender is there.
                    let _ = tokio::time::timeout_at(due, self.woken.changed()).await;
                }
            }
        }
    }

    /// What is to be said by now without any news.
    fn due(&mut self) -> Option<String> {
        let now = Instant::now();
        if now >= self.until {
            return Some(self.end("an hour is over: come back, and nothing is missed"));
        }
        if self.place.as_ref().is_some_and(Place::is_gone) {
            return Some(self.end("a caller with fewer streams needed its place: come back"));
        }
        let nudges = self.ring.nudges();
        let nudged = nudges != self.nudged && now >= self.sent + NUDGE_APART;
        if nudged || now >= self.sent + self.keep_alive {
            self.nudged = nudges;
            return Some(format!(": still here\n{}", self.id_alone()));
        }
        None
    }

    /// Moves the client's id on although nothing was wanted of what came, so that when it comes back it
    /// need not hear that it missed something. Without data it is no event.
    fn id_alone(&self) -> String {
        format!("id: {}\n\n", self.ring.id(self.after))
    }

    fn end(&mut self, why: &str) -> String {
        self.over = true;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let event = Event {
            kind: EventKind::End,
            at: rfc3339(u64::try_from(now.as_millis()).unwrap_or(u64::MAX)),
            generation: (self.generation)(),
            gpu: None,
            allocation: None,
            policy: None,
            words: why.to_owned(),
        };
        super::recent::frame(self.ring.id(self.after), &event)
    }
}

#[cfg(test)]
mod tests;

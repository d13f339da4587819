//! The node's events, and the streams that read them.

use super::news::News;
use super::places::{Place, Places};
use super::recent::{Ring, WORDS_BYTES_MAX};
use berth_api::{Event, rfc3339};
use berth_kernel::ledger::Ledger;
use berth_kernel::time::Now;
use std::sync::Arc;
use std::time::Duration;

/// Where all places are taken, every stream says a word, and once more: the first is answered with a reset
/// where its client has closed the connection, and the next one fails.
const NUDGES: u32 = 4;
/// For what a nudge frees to be free: a write to a local socket.
const NUDGE_WAIT: Duration = Duration::from_millis(50);

/// The node's events, and who reads them.
pub(crate) struct Feed {
    pub(super) ring: Arc<Ring>,
    places: Arc<Places>,
}

impl Feed {
    /// One that nothing was told to yet.
    pub(crate) fn new(now: Now) -> Self {
        // No two runs of a daemon begin in the same millisecond.
        Self { ring: Arc::new(Ring::new(now.wall_ms)), places: Arc::default() }
    }

    /// Ends all streams, with the reason.
    pub(crate) fn close(&self, why: &'static str) {
        self.ring.close(why);
    }

    /// A place for one more stream of this caller's. That a client is gone is noticed only when something is
    /// sent to it.
    pub(super) async fn place(&self, whose: &str) -> Option<Place> {
        for _ in 0..NUDGES {
            if let Some(place) = self.places.take(whose) {
                return Some(place);
            }
            self.ring.nudge();
            let _ = tokio::time::timeout(NUDGE_WAIT, self.places.left()).await;
        }
        let place = self.places.take_over(whose);
        self.ring.nudge();
        place
    }

    pub(super) fn tell(&self, news: Vec<News>, ledger: &Ledger, now: Now) {
        for one in news {
            self.ring.add(&event(one, ledger, now));
        }
    }
}

pub(super) fn event(news: News, ledger: &Ledger, now: Now) -> Event {
    let News { kind, gpu, allocation, policy, mut words } = news;
    words.truncate(words.floor_char_boundary(WORDS_BYTES_MAX));
    Event {
        kind,
        at: rfc3339(now.wall_ms),
        generation: ledger.generation,
        gpu: gpu.map(|gpu| gpu.to_string()),
        allocation: allocation.map(|id| id.to_string()),
        policy,
        words,
    }
}

//! What the daemon tells of itself in numbers, as OpenMetrics text for Prometheus.
//!
//! A scrape reads snapshots and counters that lie ready; it never reaches the keeper or the policy
//! thread, so a scraper that is too eager costs nobody an Allocate. Each family is written by a function
//! of the file of its noun: a new one needs a line there, and nothing is registered anywhere.
//!
//! Labels are few and bounded: versions of policies ([`crate::admission::VERSIONS_COUNTED_MAX`]), hooks,
//! kinds of fault, outcomes. No GPU's, pod's or namespace's name is a label here.

mod families;
mod node;
mod policies;

use crate::admission::{Door, Standings, Tally};
use crate::keeper::Snapshot;
use crate::ports::Standing;
use families::Families;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::registry::Registry;
use std::fmt;

/// The media type of what [`Metrics::text`] gives.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Where the numbers come from.
#[derive(Clone)]
pub struct Metrics {
    door: Door,
}

impl Metrics {
    /// The numbers behind this door.
    #[must_use]
    pub fn new(door: Door) -> Self {
        Self { door }
    }

    /// All of them, as they are now.
    ///
    /// # Errors
    /// If one cannot be written as text; then it is the daemon's bug.
    pub async fn text(&self) -> Result<String, fmt::Error> {
        let ledger = self.door.snapshot();
        let seen = Seen {
            standings: self.door.standings(&ledger.stack),
            ledger,
            tally: self.door.tally(),
            journal: self.door.journal_size().await,
        };
        let mut registry = Registry::default();
        registry.register_collector(Box::new(seen));
        let mut text = String::new();
        text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

/// What one scrape sees.
struct Seen {
    ledger: Snapshot,
    standings: Standings,
    tally: Tally,
    /// `None` where no decisions are put down.
    journal: Option<Standing>,
}

impl fmt::Debug for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seen").field("generation", &self.ledger.generation).finish_non_exhaustive()
    }
}

impl Collector for Seen {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut families = Families::new(encoder);
        node::tell(self, &mut families)?;
        policies::tell(self, &mut families)
    }
}

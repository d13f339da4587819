//! What the daemon tells of itself in numbers, as OpenMetrics text for Prometheus.
//!
//! A scrape reads snapshots and counters that lie ready; it never reaches the keeper or the policy
//! thread, so a scraper that is too eager costs nobody an Allocate. Each family is a row of [`table`] and
//! is written by a function of the file of its noun; nothing is registered anywhere.
//!
//! Labels are bounded: GPUs ([`GPUS_SHOWN_MAX`]), resources ([`berth_kernel::offer::RESOURCES_MAX`] at a time, and
//! [`crate::figures::RESOURCES_COUNTED_MAX`] over time), versions of policies
//! ([`crate::admission::VERSIONS_COUNTED_MAX`]), XIDs ([`crate::figures::XIDS_COUNTED_MAX`]), routes
//! ([`crate::figures::ROUTES_COUNTED_MAX`]); all others are closed lists. No pod and no namespace is a label.

mod allocations;
mod daemon;
mod families;
mod gpus;
mod kubelet;
mod ledger;
mod policies;
mod process;
pub mod table;

use crate::admission::{Door, Standings, Tally};
use crate::figures::Figures;
use crate::keeper::Snapshot;
use berth_kernel::listing::Listed;
use berth_kernel::names::{PartId, Resource};
use berth_kernel::ports::Standing;
use families::Families;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::registry::Registry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// The media type of what [`Metrics::text`] gives.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// GPUs that are shown one by one: four times the largest node, since vanished ones are kept until an
/// operator forgets them. The first by index are.
pub const GPUS_SHOWN_MAX: usize = 64;

/// Where the numbers come from.
#[derive(Clone)]
pub struct Metrics {
    door: Door,
}

/// What the ledger does not know, in the words of whoever asks.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// What readiness is held against, and whether it is well.
    pub ready: Vec<(String, bool)>,
    /// What life is held against, and whether it is well.
    pub live: Vec<(String, bool)>,
    /// The checks of readiness, and whether each has something to say.
    pub noted: Vec<(String, bool)>,
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
    pub fn text(&self, about: About) -> Result<String, fmt::Error> {
        let ledger = self.door.snapshot();
        let figures = Arc::clone(self.door.figures());
        let listed: BTreeMap<_, _> = ledger
            .resources()
            .into_iter()
            .map(|name| (name.clone(), self.door.listing(&ledger, &name)))
            .collect();
        let past = figures.keeper.grants().into_keys().chain(figures.keeper.ends().into_keys());
        let counted = past.map(|(resource, _)| resource).chain(listed.keys().map(ToString::to_string));
        let seen = Seen {
            counted: counted.collect(),
            about,
            gpus: gpus::shown(&ledger),
            listed,
            standings: self.door.standings(&ledger.stack),
            waiting: self.door.waiting(),
            store_trouble: self.door.store_trouble().is_some(),
            figures,
            tally: self.door.tally(),
            journal: self.door.journal_size(),
            ledger,
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
    about: About,
    ledger: Snapshot,
    /// Index and UUID of the GPUs that are shown.
    gpus: Vec<(String, PartId)>,
    listed: BTreeMap<Resource, Vec<Listed>>,
    /// Resources whose grants and ends are shown.
    counted: BTreeSet<String>,
    standings: Standings,
    /// Commands that wait for the keeper: the kubelet's, and others'.
    waiting: (usize, usize),
    store_trouble: bool,
    figures: Arc<Figures>,
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
        daemon::tell(self, &mut families)?;
        gpus::tell(self, &mut families)?;
        allocations::tell(self, &mut families)?;
        ledger::tell(self, &mut families)?;
        policies::tell(self, &mut families)?;
        kubelet::tell(self, &mut families)?;
        daemon::tell_http(self, &mut families)?;
        daemon::tell_traces(&mut families)?;
        process::tell(&mut families)
    }
}

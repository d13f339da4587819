//! The daemon's metrics, as OpenMetrics text for Prometheus.
//!
//! A scrape reads snapshots and counters; it never waits for the keeper or the policy thread, so frequent scrapes delay no
//! Allocate. Each family is a row of [`table`] and is written by a function of the file of its noun; nothing is
//! registered anywhere.
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
mod scrape;
pub mod table;

use crate::admission::Door;
use families::Families;
pub use gpus::GPUS_SHOWN_MAX;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::registry::Registry;
pub use scrape::About;
use scrape::Scrape;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// The media type of [`Metrics::text`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Reads the metrics.
#[derive(Clone)]
pub struct Metrics {
    door: Door,
}

impl Metrics {
    /// The metrics of this daemon.
    #[must_use]
    pub fn new(door: Door) -> Self {
        Self { door }
    }

    /// The text of all metrics.
    ///
    /// # Errors
    /// If one cannot be written as text, which is a bug of the daemon.
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
        let scrape = Scrape {
            counted: counted.collect(),
            about,
            gpus: gpus::shown(&ledger),
            listed,
            standings: self.door.standings(&ledger.stack),
            waiting: self.door.waiting(),
            store_failed: self.door.store_trouble().is_some(),
            figures,
            tally: self.door.tally(),
            journal: self.door.journal_size(),
            ledger,
        };
        let mut registry = Registry::default();
        registry.register_collector(Box::new(scrape));
        let mut text = String::new();
        text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

impl Collector for Scrape {
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

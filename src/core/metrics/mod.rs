//! The daemon's metrics, as OpenMetrics text for Prometheus.
//!
//! A scrape reads snapshots and counters; it never waits for the keeper or the policy thread, so frequent scrapes delay
//! no Allocate. Each family is a row of [`table`], encoded by the module of its subject; nothing is registered
//! globally.
//!
//! Label values are bounded: GPUs ([`GPUS_SHOWN_MAX`]), resources ([`berth_kernel::sharing::offer::RESOURCES_MAX`] at a
//! time, and [`berth_observe::counters::RESOURCES_COUNTED_MAX`] over time), policy versions
//! ([`crate::stack::VERSIONS_COUNTED_MAX`]), XIDs ([`berth_observe::counters::XIDS_COUNTED_MAX`]), routes
//! ([`berth_observe::counters::ROUTES_COUNTED_MAX`]); all others are closed lists. Pods and namespaces are not labels.

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

use crate::{Core, KernelHandle, Lab};
use berth_kernel::sharing::listing::listing;
use families::Families;
pub use gpus::GPUS_SHOWN_MAX;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::registry::Registry;
pub use scrape::CheckResults;
use scrape::Scrape;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// The media type of [`Metrics::text`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Encodes the daemon's metrics.
#[derive(Clone)]
pub struct Metrics {
    kernel: KernelHandle,
    lab: Lab,
}

impl Metrics {
    /// The metrics of this daemon.
    #[must_use]
    pub fn new(core: &Core) -> Self {
        Self { kernel: core.kernel.clone(), lab: core.lab.clone() }
    }

    /// Encodes all metrics as text.
    ///
    /// # Errors
    /// If a metric cannot be encoded, which is a bug of the daemon.
    pub fn text(&self, about: CheckResults) -> Result<String, fmt::Error> {
        let ledger = self.kernel.snapshot();
        let counters = Arc::clone(self.kernel.counters());
        let listed: BTreeMap<_, _> =
            ledger.resources().into_iter().map(|name| (name.clone(), listing(&ledger, &name))).collect();
        let resources = counters.keeper.grants().into_keys().chain(counters.keeper.ends().into_keys());
        let counted = resources.map(|(resource, _)| resource).chain(listed.keys().map(ToString::to_string));
        let scrape = Scrape {
            counted: counted.collect(),
            about,
            gpus: gpus::shown(&ledger),
            loads: self.kernel.gpu_history().loads(),
            listed,
            policy_statuses: self.kernel.policy_statuses(&ledger.stack),
            queue_lengths: self.kernel.queue_lengths(),
            store_failed: self.kernel.store_error().is_some(),
            counters,
            call_counters: self.kernel.call_counters(),
            journal: self.lab.journal_stats(),
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
        daemon::encode(self, &mut families)?;
        gpus::encode(self, &mut families)?;
        allocations::encode(self, &mut families)?;
        allocations::encode_limits(self, &mut families)?;
        ledger::encode(self, &mut families)?;
        policies::encode(self, &mut families)?;
        kubelet::encode(self, &mut families)?;
        daemon::encode_http(self, &mut families)?;
        daemon::encode_traces(&mut families)?;
        process::encode(&mut families)
    }
}

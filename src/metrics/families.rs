//! Families of metrics from values in hand. The library keeps its values itself and is told of each
//! change; ours lie in snapshots, so they are handed over as constants.

use crate::admission::{TIMES_US, Times};
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use std::fmt;

/// A label and its value.
pub(super) type Label<'a> = (&'static str, &'a str);

/// Takes one family after the other. Names are without `berth_`, and counters without `_total`.
pub(super) struct Families<'e> {
    encoder: DescriptorEncoder<'e>,
}

impl<'e> Families<'e> {
    pub(super) fn new(encoder: DescriptorEncoder<'e>) -> Self {
        Self { encoder }
    }

    /// What only grows.
    pub(super) fn counter<'a>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Vec<Label<'a>>, u64)>,
    ) -> fmt::Result {
        let name = full(name);
        let mut family = self.encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
        for (labels, value) in values {
            // Without labels the library would write empty braces.
            if labels.is_empty() {
                family.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
            } else {
                family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
            }
        }
        Ok(())
    }

    /// What comes and goes.
    pub(super) fn gauge<'a>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        values: impl IntoIterator<Item = (Vec<Label<'a>>, u64)>,
    ) -> fmt::Result {
        let name = full(name);
        let mut family = self.encoder.encode_descriptor(&name, help, unit, MetricType::Gauge)?;
        for (labels, value) in values {
            if labels.is_empty() {
                family.encode_gauge(&value)?;
            } else {
                family.encode_family(&labels)?.encode_gauge(&value)?;
            }
        }
        Ok(())
    }

    /// What a thing is, in labels; `_info` is added to the name.
    pub(super) fn info(&mut self, name: &str, help: &str, labels: &[Label<'_>]) -> fmt::Result {
        let name = full(name);
        let mut family = self.encoder.encode_descriptor(&name, help, None, MetricType::Info)?;
        family.encode_info(&labels)
    }

    /// How long things took, in seconds; `_seconds` is added to the name.
    pub(super) fn seconds<'a>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Vec<Label<'a>>, Times)>,
    ) -> fmt::Result {
        let name = full(name);
        let unit = Some(&Unit::Seconds);
        let mut family = self.encoder.encode_descriptor(&name, help, unit, MetricType::Histogram)?;
        for (labels, times) in values {
            let bounds = TIMES_US.iter().map(|us| seconds(*us)).chain([f64::INFINITY]);
            // The library adds them up.
            let buckets: Vec<(f64, u64)> = bounds.zip(times.counts).collect();
            let count = times.counts.iter().sum();
            let mut one = family.encode_family(&labels)?;
            one.encode_histogram::<NoLabelSet>(seconds(times.sum_us), count, &buckets, None)?;
        }
        Ok(())
    }
}

fn full(name: &str) -> String {
    format!("berth_{name}")
}

#[allow(clippy::cast_precision_loss)] // 2^53 us are 285 years.
fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

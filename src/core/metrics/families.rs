//! Encodes metric families from existing values. The Prometheus library would keep the values itself; the daemon's are
//! in snapshots, so they are passed to the encoder directly.

use super::table::{Family, Kind};
use crate::stack::{LATENCY_BOUNDS_US, Latencies};
use berth_observe::counters::HistogramSnapshot;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use std::fmt;

/// The values of a family's labels, in the order of the table.
pub(super) type Values<'a> = Vec<&'a str>;

/// Name suffixes that are units.
static UNITS: [(&str, Unit); 2] = [("_bytes", Unit::Bytes), ("_seconds", Unit::Seconds)];

/// A histogram at one moment.
pub(super) struct Buckets {
    bounds: Vec<f64>,
    counts: Vec<u64>,
    sum: f64,
}

impl From<HistogramSnapshot> for Buckets {
    fn from(histogram: HistogramSnapshot) -> Self {
        let bounds = histogram.bounds_us.iter().map(|us| seconds(*us)).collect();
        Self { bounds, counts: histogram.counts, sum: seconds(histogram.sum_us) }
    }
}

impl From<Latencies> for Buckets {
    fn from(latencies: Latencies) -> Self {
        let bounds = LATENCY_BOUNDS_US.iter().map(|us| seconds(*us)).collect();
        Self { bounds, counts: latencies.counts.to_vec(), sum: seconds(latencies.sum_us) }
    }
}

/// Encodes one family after the other.
pub(super) struct Families<'e> {
    encoder: DescriptorEncoder<'e>,
}

impl<'e> Families<'e> {
    pub(super) fn new(encoder: DescriptorEncoder<'e>) -> Self {
        Self { encoder }
    }

    /// Writes the family's descriptor; its values follow.
    fn describe(&mut self, family: &Family) -> Result<MetricEncoder<'_>, fmt::Error> {
        let kind = match family.kind {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge => MetricType::Gauge,
            Kind::Histogram => MetricType::Histogram,
            Kind::Info => MetricType::Info,
        };
        // The library appends the unit and the suffix of the kind to the name.
        let name = family.name;
        let name = name.strip_suffix("_total").or_else(|| name.strip_suffix("_info")).unwrap_or(name);
        let unit = UNITS.iter().find_map(|(end, unit)| Some((name.strip_suffix(end)?, unit)));
        match unit {
            Some((name, unit)) => self.encoder.encode_descriptor(name, family.help, Some(unit), kind),
            None => self.encoder.encode_descriptor(name, family.help, None, kind),
        }
    }

    fn write_values<'a, T>(
        &mut self,
        family: &Family,
        values: impl IntoIterator<Item = (Values<'a>, T)>,
        write: impl Fn(&mut MetricEncoder<'_>, T) -> fmt::Result,
    ) -> fmt::Result {
        let mut encoder = self.describe(family)?;
        for (labels, value) in values {
            debug_assert_eq!(labels.len(), family.labels.len(), "{}", family.name);
            // `encode_family` would write empty braces if there are no labels.
            if labels.is_empty() {
                write(&mut encoder, value)?;
            } else {
                let labels: Vec<_> = family.labels.iter().copied().zip(labels).collect();
                write(&mut encoder.encode_family(&labels)?, value)?;
            }
        }
        Ok(())
    }

    /// Writes a counter.
    pub(super) fn counter<'a>(
        &mut self,
        family: &Family,
        values: impl IntoIterator<Item = (Values<'a>, u64)>,
    ) -> fmt::Result {
        self.write_values(family, values, |to, value| to.encode_counter::<NoLabelSet, _, u64>(&value, None))
    }

    /// Writes a fractional counter without labels.
    pub(super) fn counter_f64(&mut self, family: &Family, value: Option<f64>) -> fmt::Result {
        let values = value.map(|value| (Vec::new(), value));
        self.write_values(family, values, |to, value| to.encode_counter::<NoLabelSet, _, f64>(&value, None))
    }

    /// Writes a gauge.
    pub(super) fn gauge<'a>(
        &mut self,
        family: &Family,
        values: impl IntoIterator<Item = (Values<'a>, u64)>,
    ) -> fmt::Result {
        self.write_values(family, values, |to, value| to.encode_gauge(&value))
    }

    /// Writes a fractional gauge.
    pub(super) fn gauge_f64<'a>(
        &mut self,
        family: &Family,
        values: impl IntoIterator<Item = (Values<'a>, f64)>,
    ) -> fmt::Result {
        self.write_values(family, values, |to, value| to.encode_gauge(&value))
    }

    /// Writes a gauge without labels.
    pub(super) fn value(&mut self, family: &Family, value: Option<u64>) -> fmt::Result {
        self.gauge(family, value.map(|value| (Vec::new(), value)))
    }

    /// Writes a gauge per state: 1 for the current one, 0 for the others.
    pub(super) fn states<'a>(
        &mut self,
        family: &Family,
        all: &[&'static str],
        values: impl IntoIterator<Item = (Values<'a>, &'static str)>,
    ) -> fmt::Result {
        let gauges = values.into_iter().flat_map(|(labels, current)| {
            all.iter().map(move |state| {
                let mut labels = labels.clone();
                labels.push(state);
                (labels, u64::from(*state == current))
            })
        });
        self.gauge(family, gauges)
    }

    /// Writes facts as labels.
    pub(super) fn info<'a>(
        &mut self,
        family: &Family,
        values: impl IntoIterator<Item = Values<'a>>,
    ) -> fmt::Result {
        let mut encoder = self.describe(family)?;
        for labels in values {
            debug_assert_eq!(labels.len(), family.labels.len(), "{}", family.name);
            let labels: Vec<_> = family.labels.iter().copied().zip(labels).collect();
            encoder.encode_info(&labels)?;
        }
        Ok(())
    }

    /// Writes histograms, in seconds.
    pub(super) fn histogram<'a>(
        &mut self,
        family: &Family,
        values: impl IntoIterator<Item = (Values<'a>, Buckets)>,
    ) -> fmt::Result {
        self.write_values(family, values, |to, Buckets { bounds, counts, sum }| {
            let count = counts.iter().sum();
            // The library makes the buckets cumulative.
            let buckets: Vec<(f64, u64)> = bounds.into_iter().chain([f64::INFINITY]).zip(counts).collect();
            to.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
        })
    }

    /// Writes a histogram without labels.
    pub(super) fn duration(&mut self, family: &Family, durations: HistogramSnapshot) -> fmt::Result {
        self.histogram(family, [(Vec::new(), durations.into())])
    }
}

#[allow(clippy::cast_precision_loss)] // 2^53 us are 285 years.
fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

/// Converts milliseconds since 1970 to seconds.
#[allow(clippy::cast_precision_loss)] // 2^53 ms are 285,000 years.
pub(super) fn wall_seconds(wall_ms: u64) -> f64 {
    wall_ms as f64 / 1e3
}

//! Families of metrics from values in hand. The library keeps its values itself and is told of each
//! change; ours lie in snapshots, so they are handed over as constants.

use super::table::{Family, Kind};
use crate::admission;
use crate::figures::Spread;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use std::fmt;

/// The values of a family's labels, in the order of the table.
pub(super) type Values<'a> = Vec<&'a str>;

/// The ends of names that are units.
static UNITS: [(&str, Unit); 2] = [("_bytes", Unit::Bytes), ("_seconds", Unit::Seconds)];

/// A histogram at one moment.
pub(super) struct Buckets {
    bounds: Vec<f64>,
    counts: Vec<u64>,
    sum: f64,
}

impl From<Spread> for Buckets {
    fn from(spread: Spread) -> Self {
        let bounds = spread.bounds_us.iter().map(|us| seconds(*us)).collect();
        Self { bounds, counts: spread.counts, sum: seconds(spread.sum_us) }
    }
}

impl From<admission::Times> for Buckets {
    fn from(times: admission::Times) -> Self {
        let bounds = admission::TIMES_US.iter().map(|us| seconds(*us)).collect();
        Self { bounds, counts: times.counts.to_vec(), sum: seconds(times.sum_us) }
    }
}

/// Takes one family after the other.
pub(super) struct Families<'e> {
    encoder: DescriptorEncoder<'e>,
}

impl<'e> Families<'e> {
    pub(super) fn new(encoder: DescriptorEncoder<'e>) -> Self {
        Self { encoder }
    }

    /// The family's words; what follows is its values.
    fn describe(&mut self, family: &Family) -> Result<MetricEncoder<'_>, fmt::Error> {
        let kind = match family.kind {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge => MetricType::Gauge,
            Kind::Histogram => MetricType::Histogram,
            Kind::Info => MetricType::Info,
        };
        // The library puts unit and kind back behind the name.
        let name = family.name;
        let name = name.strip_suffix("_total").or_else(|| name.strip_suffix("_info")).unwrap_or(name);
        let unit = UNITS.iter().find_map(|(end, unit)| Some((name.strip_suffix(end)?, unit)));
        match unit {
            Some((name, unit)) => self.encoder.encode_descriptor(name, family.help, Some(unit), kind),
            None => self.encoder.encode_descriptor(name, family.help, None, kind),
        }
    }

    fn each<'a, T>(
        &mut self,
        family: &Family,
        values: impl IntoIterator<Item = (Values<'a>, T)>,
        write: impl Fn(&mut MetricEncoder<'_>, T) -> fmt::Result,
    ) -> fmt::Result {
        let mut encoder = self.describe(family)?;
        for (labels, value) in values {
            debug_assert_eq!(labels.len(), family.labels.len(), "{}", family.name);
            // Without labels the library would write empty braces.
            if labels.is_empty() {
                write(&mut encoder, value)?;
            } else {
                let labels: Vec<_> = family.labels.iter().copied().zip(labels).collect();
                write(&mut encoder.encode_family(&labels)?, value)?;
            }
        }
        Ok(())
    }

    /// What only grows.
    pub(super) fn counter<'a>(
        &mut self,
        family: &Family,
        values: impl IntoIterator<Item = (Values<'a>, u64)>,
    ) -> fmt::Result {
        self.each(family, values, |to, value| to.encode_counter::<NoLabelSet, _, u64>(&value, None))
    }

    /// What only grows and is no whole number.
    pub(super) fn counter_f64(&mut self, family: &Family, value: Option<f64>) -> fmt::Result {
        let values = value.map(|value| (Vec::new(), value));
        self.each(family, values, |to, value| to.encode_counter::<NoLabelSet, _, f64>(&value, None))
    }

    /// What comes and goes.
    pub(super) fn gauge<'a>(
        &mut self,
        family: &Family,
        values: impl IntoIterator<Item = (Values<'a>, u64)>,
    ) -> fmt::Result {
        self.each(family, values, |to, value| to.encode_gauge(&value))
    }

    /// The same of numbers that need not be whole.
    pub(super) fn gauge_f64<'a>(
        &mut self,
        family: &Family,
        values: impl IntoIterator<Item = (Values<'a>, f64)>,
    ) -> fmt::Result {
        self.each(family, values, |to, value| to.encode_gauge(&value))
    }

    /// One number without labels.
    pub(super) fn one(&mut self, family: &Family, value: Option<u64>) -> fmt::Result {
        self.gauge(family, value.map(|value| (Vec::new(), value)))
    }

    /// Of several states the one that something is in.
    pub(super) fn states<'a>(
        &mut self,
        family: &Family,
        all: &[&'static str],
        values: impl IntoIterator<Item = (Values<'a>, &'static str)>,
    ) -> fmt::Result {
        let each = values.into_iter().flat_map(|(labels, is)| {
            all.iter().map(move |state| {
                let mut labels = labels.clone();
                labels.push(state);
                (labels, u64::from(*state == is))
            })
        });
        self.gauge(family, each)
    }

    /// What things are, in labels.
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

    /// How long things took, in seconds.
    pub(super) fn histogram<'a>(
        &mut self,
        family: &Family,
        values: impl IntoIterator<Item = (Values<'a>, Buckets)>,
    ) -> fmt::Result {
        self.each(family, values, |to, Buckets { bounds, counts, sum }| {
            let count = counts.iter().sum();
            // The library adds them up.
            let buckets: Vec<(f64, u64)> = bounds.into_iter().chain([f64::INFINITY]).zip(counts).collect();
            to.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
        })
    }

    /// One histogram without labels.
    pub(super) fn times(&mut self, family: &Family, spread: Spread) -> fmt::Result {
        self.histogram(family, [(Vec::new(), spread.into())])
    }
}

#[allow(clippy::cast_precision_loss)] // 2^53 us are 285 years.
fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

/// Seconds since 1970 of so many milliseconds.
#[allow(clippy::cast_precision_loss)] // 2^53 ms are 285,000 years.
pub(super) fn wall_seconds(wall_ms: u64) -> f64 {
    wall_ms as f64 / 1e3
}

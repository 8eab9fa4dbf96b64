//! Metric families, and how the samples of one are written.
//!
//! Invariant: an exposition describes a family once, also when it has no samples. Not here: the values.

use std::fmt;

use prometheus_client::encoding::{
    DescriptorEncoder, EncodeGaugeValue, EncodeLabelValue, EncodeMetric, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

/// A family: what is known of a metric before any value.
#[derive(Debug)]
pub struct MetricFamily {
    /// Its name without the unit and without the suffixes `_total` and `_info`.
    stem: &'static str,
    /// The unit, which ends the name; empty if the value has none.
    unit: &'static str,
    kind: MetricType,
    help: &'static str,
}

impl MetricFamily {
    /// A number that only grows while the program runs. `help` is a sentence.
    #[must_use]
    pub const fn counter(stem: &'static str, unit: &'static str, help: &'static str) -> Self {
        Self { stem, unit, kind: MetricType::Counter, help }
    }

    /// A number that grows and falls.
    #[must_use]
    pub const fn gauge(stem: &'static str, unit: &'static str, help: &'static str) -> Self {
        Self { stem, unit, kind: MetricType::Gauge, help }
    }

    /// A histogram of durations, in seconds.
    #[must_use]
    pub const fn durations(stem: &'static str, help: &'static str) -> Self {
        Self { stem, unit: "seconds", kind: MetricType::Histogram, help }
    }

    /// A histogram of sizes.
    #[must_use]
    pub const fn sizes(stem: &'static str, unit: &'static str, help: &'static str) -> Self {
        Self { stem, unit, kind: MetricType::Histogram, help }
    }

    /// Labels whose value is always 1.
    #[must_use]
    pub const fn info(stem: &'static str, help: &'static str) -> Self {
        Self { stem, unit: "", kind: MetricType::Info, help }
    }

    fn unit(&self) -> Option<Unit> {
        (!self.unit.is_empty()).then(|| Unit::Other(self.unit.to_owned()))
    }
}

/// Counts by size, read from elsewhere.
#[derive(Clone, Debug)]
pub struct SizeCounts {
    /// Sum of all sizes.
    pub sum: u64,
    /// Upper bounds, the last one infinite, each with the number of sizes up to it and above the one before.
    pub buckets: Vec<(f64, u64)>,
}

impl EncodeMetric for SizeCounts {
    #[allow(clippy::cast_precision_loss)] // as every sample of Prometheus
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let count = self.buckets.iter().map(|(_, count)| count).sum();
        encoder.encode_histogram::<NoLabelSet>(self.sum as f64, count, &self.buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

/// Writes families in the order of the calls.
#[derive(Debug)]
pub struct MetricWriter<'a>(DescriptorEncoder<'a>);

impl<'a> MetricWriter<'a> {
    /// Writes to the encoder of one exposition.
    #[must_use]
    pub const fn new(encoder: DescriptorEncoder<'a>) -> Self {
        Self(encoder)
    }

    /// Writes a counter with labels.
    ///
    /// # Errors
    /// If the exposition cannot be written.
    pub fn counters<L: EncodeLabelValue, const N: usize>(
        &mut self,
        family: &MetricFamily,
        samples: impl IntoIterator<Item = ([(&'static str, L); N], u64)>,
    ) -> fmt::Result {
        self.each(family, samples.into_iter().map(|(labels, value)| (labels, ConstCounter::new(value))))
    }

    /// Writes a gauge with labels.
    ///
    /// # Errors
    /// If the exposition cannot be written.
    pub fn gauges<L: EncodeLabelValue, V: EncodeGaugeValue, const N: usize>(
        &mut self,
        family: &MetricFamily,
        samples: impl IntoIterator<Item = ([(&'static str, L); N], V)>,
    ) -> fmt::Result {
        self.each(family, samples.into_iter().map(|(labels, value)| (labels, ConstGauge::new(value))))
    }

    /// Writes a histogram with labels.
    ///
    /// # Errors
    /// If the exposition cannot be written.
    pub fn histograms<L: EncodeLabelValue, const N: usize>(
        &mut self,
        family: &MetricFamily,
        samples: impl IntoIterator<Item = ([(&'static str, L); N], SizeCounts)>,
    ) -> fmt::Result {
        self.each(family, samples)
    }

    /// Writes a gauge without labels.
    ///
    /// # Errors
    /// If the exposition cannot be written.
    pub fn gauge(&mut self, family: &MetricFamily, value: u64) -> fmt::Result {
        self.metric(family, &ConstGauge::new(value))
    }

    /// Writes a metric that has its own values, such as a histogram.
    ///
    /// # Errors
    /// If the exposition cannot be written.
    pub fn metric(&mut self, family: &MetricFamily, metric: &impl EncodeMetric) -> fmt::Result {
        let unit = family.unit();
        metric.encode(self.0.encode_descriptor(family.stem, family.help, unit.as_ref(), family.kind)?)
    }

    fn each<L: EncodeLabelValue, const N: usize>(
        &mut self,
        family: &MetricFamily,
        samples: impl IntoIterator<Item = ([(&'static str, L); N], impl EncodeMetric)>,
    ) -> fmt::Result {
        let unit = family.unit();
        let mut encoder = self.0.encode_descriptor(family.stem, family.help, unit.as_ref(), family.kind)?;
        for (labels, value) in samples {
            value.encode(encoder.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

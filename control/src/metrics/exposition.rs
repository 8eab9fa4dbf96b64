//! The text formats of metrics, and which of them a client accepts.
//!
//! `prometheus-client` writes OpenMetrics. The older text format of Prometheus differs in what it calls a family, so it
//! is made from that text line by line.
//! Not here: the metrics, and HTTP.

use std::fmt::{self, Write as _};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

/// A text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextFormat {
    /// Prometheus text 0.0.4, which every scraper and a person with curl can read.
    Prometheus,
    /// OpenMetrics 1.0.0, with units.
    OpenMetrics,
}

impl TextFormat {
    /// The format that the header `Accept` of a request prefers (RFC 9110, 12.5.1); Prometheus text without one, and
    /// for equal weights.
    #[must_use]
    pub fn accepted(header: Option<&str>) -> Self {
        let weight_of = |wanted: &[&str]| {
            let of_range = |range: &str| {
                let mut parts = range.split(';').map(str::trim);
                let is_wanted = parts.next().is_some_and(|media| wanted.iter().any(|one| media.eq_ignore_ascii_case(one)));
                let quality =
                    || parts.find_map(|part| part.strip_prefix("q=")).map_or(Some(1.0), |text| text.parse::<f32>().ok());
                is_wanted.then(quality).flatten()
            };
            header.unwrap_or_default().split(',').filter_map(of_range).fold(0.0, f32::max)
        };
        let prometheus = weight_of(&["text/plain", "text/*", "*/*"]);
        if weight_of(&["application/openmetrics-text"]) > prometheus { Self::OpenMetrics } else { Self::Prometheus }
    }

    /// The header `Content-Type`.
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// All metrics of a collector as text.
    ///
    /// # Errors
    /// If a value cannot be formatted.
    pub fn text(self, collector: impl Collector) -> Result<String, fmt::Error> {
        let (mut registry, mut text) = (Registry::default(), String::new());
        registry.register_collector(Box::new(collector));
        text::encode(&mut text, &registry)?;
        match self {
            Self::OpenMetrics => Ok(text),
            Self::Prometheus => prometheus_text(&text),
        }
    }
}

/// OpenMetrics text as Prometheus text 0.0.4: there a family is named as its samples are, an info is a gauge, and units
/// and the end are not written.
fn prometheus_text(open_metrics: &str) -> Result<String, fmt::Error> {
    let mut text = String::with_capacity(open_metrics.len());
    let mut lines = open_metrics.lines().peekable();
    while let Some(line) = lines.next() {
        let Some(comment) = line.strip_prefix("# ") else {
            writeln!(text, "{line}")?;
            continue;
        };
        // A description of a family: HELP, then TYPE.
        let (Some((name, help)), Some(kind)) = (
            comment.strip_prefix("HELP ").and_then(|rest| rest.split_once(' ')),
            lines.peek().and_then(|next| next.rsplit(' ').next()),
        ) else {
            continue;
        };
        let (name, kind) = match kind {
            "counter" => (format!("{name}_total"), kind),
            "info" => (format!("{name}_info"), "gauge"),
            _ => (name.to_owned(), kind),
        };
        writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}")?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_with_the_higher_weight_is_chosen() {
        let of_prometheus = "application/openmetrics-text;version=1.0.0;q=0.75,application/openmetrics-text;version=0.0.1;q=0.7,\
                             text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let rows = [
            (None, TextFormat::Prometheus),
            (Some("*/*"), TextFormat::Prometheus),
            (Some("text/html, text/plain;q=0.9, */*;q=0.1"), TextFormat::Prometheus),
            (Some(of_prometheus), TextFormat::OpenMetrics),
            (Some("Application/OpenMetrics-Text; version=1.0.0"), TextFormat::OpenMetrics),
            (Some("application/openmetrics-text;q=0.2, text/plain;q=0.3"), TextFormat::Prometheus),
            (Some("application/openmetrics-text;q=x"), TextFormat::Prometheus),
        ];
        for (header, format) in rows {
            assert_eq!(TextFormat::accepted(header), format, "{header:?}");
        }
    }

    #[test]
    fn prometheus_text_names_families_as_their_samples() {
        let open_metrics = "# HELP a_bytes Help of a.\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\na_bytes_total{b=\"# HELP\"} 1\n\
                            # HELP c Help.\n# TYPE c info\nc_info{d=\"e\"} 1\n# HELP f Help.\n# TYPE f gauge\nf 2.5\n# EOF\n";
        let expected = "# HELP a_bytes_total Help of a.\n# TYPE a_bytes_total counter\na_bytes_total{b=\"# HELP\"} 1\n\
                        # HELP c_info Help.\n# TYPE c_info gauge\nc_info{d=\"e\"} 1\n# HELP f Help.\n# TYPE f gauge\nf 2.5\n";
        assert_eq!(prometheus_text(open_metrics).unwrap(), expected);
    }
}

//! Scalar values of the configuration, each with its parser and its canonical form.

pub mod url;

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use proto::Scheduler;

use crate::crd::CLASS_CHARS_MAX;

/// Bytes of a label's value, and of its key without the prefix, that Kubernetes allows.
const LABEL_BYTES_MAX: usize = 63;
/// Bytes of the prefix of a label's key.
const LABEL_PREFIX_BYTES_MAX: usize = 253;

/// Units of a duration, largest first, in milliseconds.
const UNITS: [(&str, u64); 4] = [("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// Parses `500ms`, `1s`, `15m`, and sums of falling units such as `2h5m`. Zero needs a unit too; fractions are invalid.
#[must_use]
pub fn duration(text: &str) -> Option<Duration> {
    let (mut rest, mut sum_ms, mut units) = (text, 0_u64, UNITS.iter());
    loop {
        let (number, after) = rest.split_at(rest.bytes().take_while(u8::is_ascii_digit).count());
        let (unit, after) = after.split_at(after.bytes().take_while(u8::is_ascii_alphabetic).count());
        // Each unit is searched behind the one before.
        let (_, unit_ms) = units.find(|(name, _)| *name == unit)?;
        sum_ms = sum_ms.checked_add(number.parse::<u64>().ok()?.checked_mul(*unit_ms)?)?;
        if after.is_empty() {
            return Some(Duration::from_millis(sum_ms));
        }
        rest = after;
    }
}

/// Parses a scheduler by its name or its name in IPVS. All schedulers are weighted if a backend has a weight.
#[must_use]
pub fn scheduler(text: &str) -> Option<Scheduler> {
    Some(match text {
        "mh" => Scheduler::Maglev,
        "rr" | "wrr" => Scheduler::RoundRobin,
        "lc" | "wlc" => Scheduler::LeastConnections,
        "sh" => Scheduler::SourceHash,
        "dh" => Scheduler::DestinationHash,
        "sed" => Scheduler::ShortestExpectedDelay,
        "nq" => Scheduler::NeverQueue,
        ours => return ours.parse().ok(),
    })
}

/// Formats a duration so that [`duration`] parses it, in the largest exact unit. Configured durations have whole
/// milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DurationText(pub Duration);

impl serde::Serialize for DurationText {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Display for DurationText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.as_millis();
        let exact = UNITS.iter().find(|(_, unit_ms)| ms > 0 && ms.is_multiple_of(u128::from(*unit_ms)));
        match exact {
            Some((unit, unit_ms)) => write!(f, "{}{unit}", ms / u128::from(*unit_ms)),
            None => write!(f, "{ms}ms"),
        }
    }
}

/// The format that [`is_class`] accepts.
pub const CLASS_EXPECTED: &str = "a class such as sluice.dev/gateway";

/// Whether this is a load balancer class: a name, or two names with a slash between them.
#[must_use]
pub fn is_class(text: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    let is_part = |part: &str| !part.is_empty() && part.bytes().all(legal);
    text.len() <= CLASS_CHARS_MAX && text.split('/').count() <= 2 && text.split('/').all(is_part)
}

/// Whether this is a DNS-1123 label of at most `bytes_max` bytes.
#[must_use]
pub fn is_dns_label(text: &str, bytes_max: usize) -> bool {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    !text.is_empty() && text.len() <= bytes_max && text.bytes().all(legal) && !text.starts_with('-') && !text.ends_with('-')
}

/// Whether this is a DNS-1123 subdomain, the format of most Kubernetes names.
#[must_use]
pub fn is_dns_name(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(|label| is_dns_label(label, 253))
}

/// Whether an interface or a peer can have this address: it is neither unspecified, loopback, multicast nor the IPv4
/// broadcast address.
#[must_use]
pub fn is_host(address: IpAddr) -> bool {
    let broadcast = matches!(address, IpAddr::V4(a) if a.is_broadcast());
    !(address.is_unspecified() || address.is_loopback() || address.is_multicast() || broadcast)
}

/// Whether a text is the key of a label: an optional prefix that is a DNS name, a slash, and a name.
#[must_use]
pub fn is_label_key(text: &str) -> bool {
    let (prefix, name) = text.split_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
    let is_prefix = |prefix: &str| prefix.len() <= LABEL_PREFIX_BYTES_MAX && prefix.split('.').all(|part| is_dns_label(part, 63));
    prefix.is_none_or(is_prefix) && !name.is_empty() && is_label_value(name)
}

/// Whether a text is the value of a label: letters, digits, `-`, `_` and `.`, the first and the last a letter or digit; or nothing.
#[must_use]
pub fn is_label_value(text: &str) -> bool {
    let ends = [text.bytes().next(), text.bytes().last()];
    text.len() <= LABEL_BYTES_MAX
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && ends.into_iter().flatten().all(|b| b.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn durations_have_a_number_and_a_unit() {
        assert_eq!(duration("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(duration("15m"), Some(Duration::from_secs(900)));
        assert_eq!(duration("2h5m"), Some(Duration::from_secs(7_500)));
        assert_eq!(duration("1h2m3s4ms"), Some(Duration::from_millis(3_723_004)));
        for wrong in [
            "",
            "5",
            "s",
            "1.5s",
            "5m2h",
            "1s1s",
            "2h5",
            "2h 5m",
            "hm",
            "-1s",
            " 1s",
            "1S",
            "99999999999999999999s",
            "18446744073709551615h",
        ] {
            assert_eq!(duration(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn durations_are_written_in_the_largest_exact_unit() {
        let written = |ms| DurationText(Duration::from_millis(ms)).to_string();
        assert_eq!([written(0), written(1500), written(90_000), written(7_200_000)], ["0ms", "1500ms", "90s", "2h"]);
    }

    proptest! {
        #[test]
        fn a_formatted_duration_parses_to_the_same_duration(ms in 0..=u64::MAX / 2) {
            let value = Duration::from_millis(ms);
            prop_assert_eq!(duration(&DurationText(value).to_string()), Some(value));
        }
    }
}

//! HTTP statuses that a probe expects.

use std::fmt;
use std::str::FromStr;

/// HTTP statuses. Written as numbers and ranges, `200-299,404`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StatusRanges(Vec<(u16, u16)>);

/// Maximum number of ranges: nobody distinguishes more kinds of answers, and each probe looks through them.
const RANGES_MAX: usize = 16;

impl StatusRanges {
    /// This status alone.
    #[must_use]
    pub fn only(status: u16) -> Self {
        Self(vec![(status, status)])
    }

    /// Whether it is one of them.
    #[must_use]
    pub fn contains(&self, status: u16) -> bool {
        self.0.iter().any(|(first, last)| (*first..=*last).contains(&status))
    }
}

impl Default for StatusRanges {
    /// 200 to 399, as for the probes of Kubernetes.
    fn default() -> Self {
        Self(vec![(200, 399)])
    }
}

impl FromStr for StatusRanges {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("expected statuses from 100 to 599 such as 200-299,404, at most {RANGES_MAX} ranges");
        let status = |text: &str| text.trim().parse().ok().filter(|status| (100..=599).contains(status));
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            status(first).zip(status(last)).filter(|(first, last)| first <= last)
        };
        // One more than allowed shows an excess without reading all of a long text.
        let ranges: Vec<(u16, u16)> = text.split(',').take(RANGES_MAX + 1).map(range).collect::<Option<_>>().ok_or_else(wrong)?;
        if ranges.len() > RANGES_MAX { Err(wrong()) } else { Ok(Self(ranges)) }
    }
}

impl fmt::Display for StatusRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (first, last)) in self.0.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            if first == last { write!(f, "{comma}{first}")? } else { write!(f, "{comma}{first}-{last}")? }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_read_as_numbers_and_ranges_and_written_back() {
        for (text, written, passes, fails) in [
            ("200-399", "200-399", &[200, 204, 399][..], &[100, 199, 400, 500][..]),
            (" 200 , 301-302,404", "200,301-302,404", &[200, 301, 302, 404], &[201, 300, 303, 403]),
            ("599", "599", &[599], &[598]),
        ] {
            let ranges: StatusRanges = text.parse().unwrap();
            assert_eq!(ranges.to_string(), written);
            assert!(passes.iter().all(|status| ranges.contains(*status)), "{text}");
            assert!(!fails.iter().any(|status| ranges.contains(*status)), "{text}");
        }
        assert_eq!(StatusRanges::default(), "200-399".parse().unwrap());
        assert_eq!(StatusRanges::only(200), "200".parse().unwrap());
    }

    #[test]
    fn what_is_no_status_is_an_error_that_says_what_is_expected() {
        let long = ["200"; RANGES_MAX + 1].join(",");
        for text in ["", "200,", "ok", "2xx", "99", "600", "300-200", "200-", "-1", long.as_str()] {
            let error = text.parse::<StatusRanges>().unwrap_err();
            assert!(error.contains("200-299,404"), "{text}: {error}");
        }
        assert!(["200"; RANGES_MAX].join(",").parse::<StatusRanges>().is_ok());
    }
}

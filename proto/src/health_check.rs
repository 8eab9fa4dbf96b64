//! How the backends of a Service are probed.
//!
//! Not here: the probes themselves, which each gateway makes for itself.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::Probe;

/// Health check of the backends of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// Protocol of the probe.
    pub probe: Probe,
    /// Port to probe instead of that of the backend.
    pub port: Option<u16>,
    /// `http` and `https`: path and query of the request, `/` if absent. `grpc`: the service to ask about, the whole
    /// server if absent.
    pub path: Option<String>,
    /// `http`, `https` and `grpc`: the host to ask for, and the name in the certificate; the address if absent.
    pub host: Option<String>,
    /// `http` and `https`: the statuses that pass.
    pub status: StatusRanges,
    /// `https`: whether the certificate must be valid for the host and signed by an authority that the gateway's
    /// machine trusts.
    pub tls_verify: bool,
    /// Port at which a node must answer `GET /healthz` with 200, in addition to passing the probe:
    /// `healthCheckNodePort` of Kubernetes, where kube-proxy reports whether the node has ready endpoints, or
    /// [`crate::limits::KUBE_PROXY_HEALTH_PORT`], which counts only while some node passes it.
    pub node_health_port: Option<u16>,
    /// Time between the starts of two probes of one target.
    pub interval: Duration,
    /// Maximum duration of a probe; a longer one has failed.
    pub timeout: Duration,
    /// Consecutive passed probes that make an unhealthy target healthy; at least 1.
    pub rise: u32,
    /// Consecutive failed probes that make a healthy target unhealthy; at least 1.
    pub fall: u32,
    /// If all backends fail: use all of them (true), or none.
    pub fail_open: bool,
}

impl Default for HealthCheck {
    /// DESIGN section 7, key `health`.
    fn default() -> Self {
        Self {
            probe: Probe::Tcp,
            port: None,
            path: None,
            host: None,
            status: StatusRanges::default(),
            tls_verify: false,
            node_health_port: None,
            interval: Duration::from_secs(1),
            timeout: Duration::from_millis(500),
            rise: 2,
            fall: 3,
            fail_open: true,
        }
    }
}

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

//! Health probes: targets, schedule and results. Each gateway probes for itself, and results change only its own tables
//! (CONTROL section 2).
//!
//! Invariant: each distinct target is probed once, however many services share it, and concurrent probes are limited by
//! file descriptors. A probe goes only where packets go: by a port of the gateway. Targets, schedule and health are
//! plain values with time as an argument; only [`run`] waits, and only a [`Prober`] uses the network. A change is
//! applied to the targets that it concerns, not to all of them.
//! Deliberately not here: the case that all backends of a service fail (the compiler decides), and how a probe to a VIP
//! reaches its backend (the engine sends it there).

mod connections;
mod grpc;
mod history;
mod http_request;
mod icmp;
mod prober;
mod schedule;
mod source_ports;
mod target;
mod task;
mod tls;
mod tracker;

pub use connections::ConnectionWatch;
#[cfg(test)]
pub(crate) use history::tests::saved as saved_health;
pub use history::{SavedHealth, UnusableHealth};
pub use prober::{Prober, concurrency};
pub use target::{Changes, Subjects, TargetTable};
pub use task::{Findings, ProbeInputs, run};
pub use tracker::HealthTracker;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use proto::limits::KUBE_PROXY_HEALTH_PORT;
use proto::{HealthCheck, InitialHealth, StatusRanges};

/// What is asked, where and how often, and how many results turn its health. Services that agree in all of it share the
/// probes and their results; no other Service hears of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    /// Where to. An echo request has port 0.
    pub address: SocketAddr,
    /// The backend under test if `address` is a VIP, which this backend must serve like the others.
    pub behind_vip: Option<IpAddr>,
    /// The question.
    pub question: Question,
    /// As the services set it.
    pub settings: Arc<ProbeSettings>,
}

/// How a service wants its targets probed, and which results turn their health.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProbeSettings {
    /// Time between the starts of two probes.
    pub interval: Duration,
    /// Timeout of a probe.
    pub timeout: Duration,
    /// Consecutive passed probes after which the target is healthy again.
    pub rise: u32,
    /// Consecutive failed probes after which the target is unhealthy.
    pub fall: u32,
    /// Health before the first probe.
    pub initial: InitialHealth,
}

impl From<&HealthCheck> for ProbeSettings {
    fn from(health: &HealthCheck) -> Self {
        Self { interval: health.interval, timeout: health.timeout, rise: health.rise, fall: health.fall, initial: health.initial }
    }
}

/// What a target must answer to pass.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Question {
    /// None: packets to the backend must leave by a port, as for every target.
    Route,
    /// A TCP connection is accepted.
    Tcp,
    /// An echo request is answered.
    Icmp,
    /// kube-proxy answers `GET /healthz` with 200.
    NodeHealth,
    /// A request is answered with an expected status.
    Http(Arc<HttpQuestion>),
    /// `grpc.health.v1.Health/Check` is answered with `SERVING`.
    Grpc(Arc<GrpcQuestion>),
}

/// An HTTP/1.1 request and the expected answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HttpQuestion {
    /// TLS, if it is used.
    pub tls: Option<Trust>,
    /// Path and query; begins with `/`.
    pub path: String,
    /// The host to ask for; `None` means the address.
    pub host: Option<String>,
    /// The statuses that pass.
    pub status: StatusRanges,
}

/// A query of `grpc.health.v1`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrpcQuestion {
    /// The service to ask about; empty means the whole server.
    pub service: String,
    /// The host to ask for; `None` means the address.
    pub host: Option<String>,
}

/// The certificates that a probe accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Trust {
    /// Any.
    Any,
    /// Valid ones for the host, of an authority that this machine trusts.
    Machine,
}

impl Target {
    /// A target that is no VIP.
    #[must_use]
    pub const fn at(address: SocketAddr, question: Question, settings: Arc<ProbeSettings>) -> Self {
        Self { address, behind_vip: None, question, settings }
    }

    /// The address of the backend, to which the gateway must have a route.
    #[must_use]
    pub fn backend(&self) -> IpAddr {
        self.behind_vip.unwrap_or(self.address.ip())
    }

    /// Whether its failure counts only while another node passes the same question. Port 10256 belongs to kube-proxy by
    /// default, but the cluster may have closed it or have another proxy.
    #[must_use]
    pub fn needs_precedent(&self) -> bool {
        self.question == Question::NodeHealth && self.address.port() == KUBE_PROXY_HEALTH_PORT
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.address;
        match &self.question {
            Question::Route => write!(f, "route to {}", address.ip())?,
            Question::Tcp => write!(f, "tcp {address}")?,
            Question::Icmp => write!(f, "ping {}", address.ip())?,
            Question::NodeHealth => write!(f, "GET http://{address}/healthz")?,
            Question::Http(asked) => {
                let scheme = if asked.tls.is_some() { "https" } else { "http" };
                write!(f, "GET {scheme}://{address}{}", asked.path)?;
            }
            Question::Grpc(asked) if asked.service.is_empty() => write!(f, "grpc.health.v1 {address}")?,
            Question::Grpc(asked) => write!(f, "grpc.health.v1 {address} ({})", asked.service)?,
        }
        self.behind_vip.map_or(Ok(()), |backend| write!(f, " at {backend}"))
    }
}

/// Result of a probe. The texts continue a sentence that begins with the target: "answered 500, expected 200-399".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The target answers.
    Passed,
    /// The target does not answer as expected, and why.
    Failed(String),
    /// This machine could not probe; the health of the target is unknown.
    NotAsked(String),
}

#[cfg(test)]
mod tests {
    use super::target::tests::at;
    use super::*;

    #[test]
    fn a_target_is_written_as_an_operator_would_ask_it() {
        let address: SocketAddr = "10.0.0.5:8080".parse().unwrap();
        let http = |tls| {
            let (path, status) = ("/healthz".to_owned(), StatusRanges::default());
            Question::Http(Arc::new(HttpQuestion { tls, path, host: None, status }))
        };
        let grpc = |service: &str| Question::Grpc(Arc::new(GrpcQuestion { service: service.to_owned(), host: None }));
        for (question, text) in [
            (Question::Route, "route to 10.0.0.5"),
            (Question::Tcp, "tcp 10.0.0.5:8080"),
            (Question::Icmp, "ping 10.0.0.5"),
            (Question::NodeHealth, "GET http://10.0.0.5:8080/healthz"),
            (http(None), "GET http://10.0.0.5:8080/healthz"),
            (http(Some(Trust::Any)), "GET https://10.0.0.5:8080/healthz"),
            (grpc(""), "grpc.health.v1 10.0.0.5:8080"),
            (grpc("shop.Cart"), "grpc.health.v1 10.0.0.5:8080 (shop.Cart)"),
        ] {
            assert_eq!(at(address, question).to_string(), text);
        }
        let through = Target { behind_vip: Some("10.0.0.9".parse().unwrap()), ..at(address, Question::Tcp) };
        assert_eq!(through.to_string(), "tcp 10.0.0.5:8080 at 10.0.0.9");
    }

    #[test]
    fn only_the_port_of_kube_proxy_itself_needs_a_precedent() {
        let needs = |address: &str, question| at(address.parse().unwrap(), question).needs_precedent();
        assert!(needs("10.0.0.1:10256", Question::NodeHealth));
        assert!(!needs("10.0.0.1:31000", Question::NodeHealth) && !needs("10.0.0.1:10256", Question::Tcp));
    }
}

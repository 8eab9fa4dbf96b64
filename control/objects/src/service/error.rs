//! Errors of Services: why one cannot be served, and which settings cannot be parsed.
//!
//! Invariant: for a setting that cannot be parsed ([`Unread`]) the previous value stays in force; those that decide who
//! may connect are a [`SpecError`]. After a change of leader the checkpoint has the words in force (mode, target,
//! scheduler, `ipMode`, scope of affinity, probe), and the status the address; for other settings the default applies.
//! A Service without address whose request for one cannot be parsed waits.

use proto::{Reason, Refusal, ServiceName};

use crate::note;

/// Part of a message: the effect of a value that cannot be parsed.
pub(super) const STAYS: &str = "the previous value stays in force, else the default";

/// The same of a request for an address or a pool: another address than the requested one would end up in the DNS.
pub(super) const WAITS: &str = "a Service that has an address keeps it, another one waits until this is corrected";

/// A setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unread {
    /// Addresses by name.
    Addresses,
    /// A pool by name.
    Pool,
    /// Whether an address is exchanged.
    Readdress,
    /// Sharing of addresses.
    Sharing,
    /// How packets reach backends.
    Mode,
    /// Whether backends are endpoints or nodes.
    Target,
    /// How backends are chosen.
    Scheduler,
    /// `ipMode` of its status.
    IpMode,
    /// What a probe speaks.
    Probe,
    /// The port that is probed.
    HealthPort,
    /// The path that a probe requests.
    HealthPath,
    /// The host that a probe requests.
    HealthHost,
    /// The statuses that pass.
    HealthStatus,
    /// Whether a probe verifies certificates.
    TlsVerify,
    /// Time between probes.
    Interval,
    /// How long a probe may take.
    Timeout,
    /// Number of passed probes that make a target healthy.
    Rise,
    /// Number of failed probes that make a target unhealthy.
    Fall,
    /// How long flows of a removed backend continue.
    DrainTimeout,
    /// How long a flow may be idle.
    IdleTimeout,
    /// Over what affinity is shared.
    AffinityScope,
}

/// Why an object is not a Service that sluice can serve.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum NotServable {
    /// No name.
    #[error("a Service without metadata.name")]
    Unnamed,
    /// Neither `LoadBalancer` nor `NodePort` nor with `externalIPs`, or being deleted.
    #[error("Service {name}: {why}")]
    NotOurs {
        /// Which.
        name: ServiceName,
        /// In a few words.
        why: &'static str,
        /// Whether its owner seems to expect that it is served, although it can never be (headless, `ExternalName`).
        is_expected: bool,
    },
}

/// Why a Service that may be ours cannot be served.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum SpecError {
    /// A field or annotation requests an unsupported setting.
    #[error("{place} is {found}, which this version does not support; {remedy}")]
    Unsupported {
        /// Field or annotation.
        place: String,
        /// Its value.
        found: String,
        /// What to do.
        remedy: String,
    },
    /// An annotation has an unsupported value.
    #[error("annotation {key}: {expected}")]
    Annotation {
        /// The annotation.
        key: String,
        /// What was found and what it may be.
        expected: String,
    },
    /// An invalid client prefix.
    #[error("{place}: found {found:?}, expected a CIDR such as 192.0.2.0/24; no client is admitted until it is corrected")]
    SourceRange {
        /// Field or annotation.
        place: String,
        /// What was found.
        found: String,
    },
    /// No port at all.
    #[error("spec.ports is empty; a Service that is served has at least one port")]
    NoPorts,
    /// A port number out of range.
    #[error("spec.ports[{index}].{field} is {found}, expected 1 to 65535")]
    Port {
        /// Which port.
        index: usize,
        /// Which field.
        field: &'static str,
        /// Its value.
        found: i32,
    },
    /// An invalid protocol.
    #[error("spec.ports[{index}].protocol is {found:?}, expected TCP, UDP or SCTP")]
    Protocol {
        /// Which port.
        index: usize,
        /// Its value.
        found: String,
    },
    /// Two ports with the same protocol and number, or the same name.
    #[error("spec.ports[{index}] repeats {what} of an earlier port; each must be different")]
    RepeatedPort {
        /// Which port.
        index: usize,
        /// What both have.
        what: String,
    },
    /// Type `NodePort` without number.
    #[error("spec.ports[{index}].nodePort is missing; without an API server none is chosen: set it")]
    NodePortMissing {
        /// Which port.
        index: usize,
    },
    /// A headless Service.
    #[error("spec.clusterIP is None: a headless Service has no frontend; remove it")]
    Headless,
    /// A field that looks like one that decides who may connect.
    #[error("field {found} is unknown, did you mean `{meant}`? The Service is not served until it is corrected or removed")]
    Misspelt {
        /// Its path.
        found: String,
        /// The field that it looks like, with `spec.` if it stands elsewhere.
        meant: String,
    },
    /// An invalid type, family or policy.
    #[error("{field} is {found:?}, expected {expected}")]
    Word {
        /// Which field.
        field: &'static str,
        /// Its value.
        found: String,
        /// What it may be.
        expected: &'static str,
    },
}

impl SpecError {
    pub(crate) fn unsupported(place: &str, found: &str, remedy: &str) -> Self {
        Self::Unsupported { place: place.to_owned(), found: note::quoted(found.trim()), remedy: remedy.to_owned() }
    }

    /// Why the Service is not served.
    #[must_use]
    pub fn refusal(&self) -> Refusal {
        let reason = if matches!(self, Self::Unsupported { .. }) { Reason::Unsupported } else { Reason::Refused };
        Refusal { reason, message: self.to_string() }
    }
}

pub(crate) fn word(field: &'static str, found: &str, expected: &'static str) -> SpecError {
    SpecError::Word { field, found: found.chars().take(80).collect(), expected }
}

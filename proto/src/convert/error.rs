//! Errors of conversions.

use std::net::{IpAddr, SocketAddr};

use crate::{AddressRangeError, AggregationError, CommunityError, Family, Mode, Protocol, ProxyProtocol, limits};

/// Errors of converting a message to a domain value.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConvertError {
    /// The name is not of the form `namespace/name`.
    #[error("{0:?} is not a Service name; expected namespace/name")]
    Name(String),
    /// A mode that this version does not know.
    #[error("mode {0}; this gateway is older than its controller: update it, or choose a mode it knows")]
    Mode(String),
    /// A target that this version does not know.
    #[error("target {0}; this gateway is older than its controller: update it")]
    Target(String),
    /// A scheduler that this version does not know.
    #[error("scheduler {0}; this gateway is older than its controller: update it, or choose a scheduler it knows")]
    Scheduler(String),
    /// A version of the PROXY protocol that this version does not know.
    #[error("PROXY protocol {0}; this gateway is older than its controller: update it, or choose a version it knows")]
    ProxyProtocol(String),
    /// The PROXY protocol where it cannot be.
    #[error("PROXY protocol {version} on a {protocol} port in mode {mode}; expected tcp, or v2 on udp, in nat or dnat")]
    ProxyProtocolUnfit {
        /// The version.
        version: ProxyProtocol,
        /// The mode of the Service.
        mode: Mode,
        /// The protocol of the port.
        protocol: Protocol,
    },
    /// The health check is missing.
    #[error("the health check is missing")]
    HealthCheckMissing,
    /// A probe that this version does not know.
    #[error("health check {0}; this gateway is older than its controller: update it, or choose a probe it knows")]
    Probe(String),
    /// Statuses that this version cannot read.
    #[error("health check status: {0}")]
    Status(String),
    /// The interval, timeout, rise or fall of a health check is zero.
    #[error("health check {0} is 0; expected at least 1")]
    HealthCheckZero(&'static str),
    /// A reason that this version does not know.
    #[error("refusal reason {0}; this gateway is older than its controller: update it")]
    Reason(String),
    /// An IANA protocol number that frontends do not support.
    #[error("protocol number {0} is none of 6 (TCP), 17 (UDP), 132 (SCTP)")]
    Protocol(u32),
    /// A family that is neither 4 nor 6.
    #[error("address family {0} is neither 4 nor 6")]
    Family(u32),
    /// A number that is not a port.
    #[error("{field} {found} is not a port; expected 1 to 65535")]
    Port {
        /// The field.
        field: &'static str,
        /// Its value.
        found: u32,
    },
    /// Bytes that are not an address.
    #[error("an address has {0} bytes; expected 4 or 16")]
    AddressBytes(usize),
    /// An address of the other family.
    #[error("{address} is not an {family} address, but its port is {family}")]
    WrongFamily {
        /// The address.
        address: IpAddr,
        /// The family of the port.
        family: Family,
    },
    /// A Maglev table size that is not on the list.
    #[error("Maglev table size {0} is unknown to this gateway; update it")]
    MaglevSize(u32),
    /// A version of the Maglev hash that this program does not have.
    #[error("Maglev hash version {0} is unknown to this gateway, which has version {ours}; update it", ours = limits::MAGLEV_HASH_VERSION)]
    MaglevHashVersion(u32),
    /// A prefix longer than its address.
    #[error("a source range has {0} bits, more than its address")]
    PrefixLength(u32),
    /// A weight above 65,535.
    #[error("weight {0} is above 65535")]
    Weight(u32),
    /// More backends on a port than a table can balance.
    #[error("a port has {0} backends; expected at most {max}", max = limits::BACKENDS_PER_PORT_MAX)]
    TooManyBackends(usize),
    /// Backends that are not strictly ascending by address.
    #[error("backend {0} is out of order or listed twice")]
    BackendOrder(SocketAddr),
    /// The backends of a zone are not backends of the port, or not strictly ascending.
    #[error("zone {0} lists no backends, unknown backends, or some twice")]
    ZoneBackends(String),
    /// A node set that was not sent.
    #[error("a port refers to node set {0}, which the controller did not send")]
    NodeSetUnknown(String),
    /// Nodes of a set that are not strictly ascending by address.
    #[error("node {0} of a set is out of order or listed twice")]
    NodeOrder(IpAddr),
    /// A node set of another family than the port that refers to it.
    #[error("node set {name} is not of family {family} like the port that refers to it")]
    NodeSetFamily {
        /// The set.
        name: String,
        /// The family of the port.
        family: Family,
    },
    /// A port with both backends and a node set.
    #[error("a port lists backends and also refers to node set {0}")]
    NodeSetBesideBackends(String),
    /// An invalid address range of a pool.
    #[error("pool {pool}: {error}")]
    Range {
        /// The pool.
        pool: String,
        /// The error in it.
        error: AddressRangeError,
    },
    /// A community that this version does not know.
    #[error("pool {pool}: community {found:?}, {error}; if this gateway is older than its controller, update it")]
    Community {
        /// The pool.
        pool: String,
        /// The community.
        found: String,
        /// The error in it.
        error: CommunityError,
    },
    /// An aggregation length that is illegal, or too short for the pool.
    #[error("pool {pool}, {field}: {error}", field = error.field())]
    Aggregation {
        /// The pool.
        pool: String,
        /// The error in it.
        error: Box<AggregationError>,
    },
    /// A kind of announcement that this version does not know.
    #[error("pool {pool}: announcement {found} is unknown; this gateway is older than its controller: update it")]
    Announce {
        /// The pool.
        pool: String,
        /// The number of the enum value.
        found: i32,
    },
}

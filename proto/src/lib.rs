//! The domain types that the control plane and the forwarding engine share, and the limits, ports and names on which
//! several crates must agree. Each type is defined once. Past the edges (Kubernetes objects, protobuf, YAML) only these
//! valid values exist.
//!
//! Feature `grpc` adds the messages of `sluice.v1` and the conversions to and from these types. The forwarding engine
//! builds without it. Not here: I/O.

mod address;
mod bgp;
mod earlier_backends;
mod fleet;
mod generation;
pub mod limits;
mod service;
mod state;

#[cfg(feature = "grpc")]
pub mod convert;
#[cfg(feature = "grpc")]
pub mod message_parts;
#[cfg(feature = "grpc")]
pub mod trouble;
#[cfg(feature = "grpc")]
pub mod v1;

pub use address::{AddressRange, AddressRangeError, Family, NetworkError, ParseProtocolError, Protocol, endpoint, network};
pub use bgp::{AggregationError, Community, CommunityError, PoolBgp};
pub use fleet::{
    Arbitration, FleetPartner, FleetStatus, GatewayProfile, GroupClaims, GroupKey, KEY_BYTES, LimitKind, LinkEdge, Member,
    Membership, RoutingSession, ServiceLimit, SessionHealth, SessionProtocol, VipElection, fnv1a, vip_group,
};
pub use generation::Generation;
pub use service::{
    AffinityScope, Backend, BackendState, EarlierBackends, HealthCheck, InitialHealth, MaglevSpec, Mode, NodeBackend, NodeSet,
    NodeSets, NodesAt, Probe, ProxyProtocol, Reason, Refusal, Scheduler, Service, ServiceName, ServicePort, StatusRanges, Target,
    ZoneBackends,
};
pub use state::{Announce, GatewayState, Origin, Pool, ProbeTags, Services, State};

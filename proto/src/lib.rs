//! The domain types that the control plane and the forwarding engine share, and the limits, ports and names that two
//! crates must agree on. Each type stands here once. Past the edges (Kubernetes objects, protobuf, YAML) only these
//! valid values exist.
//!
//! Behind feature `grpc`: the messages of `sluice.v1` and the conversions to and from these types. The forwarding
//! engine builds without it. Deliberately not here: anything that does I/O.

mod address;
mod generation;
pub mod limits;
mod service;
mod state;

#[cfg(feature = "grpc")]
pub mod convert;
#[cfg(feature = "grpc")]
pub mod parts;
#[cfg(feature = "grpc")]
pub mod v1;

pub use address::{AddressRange, AddressRangeError, Family, ParseProtocolError, Protocol, endpoint};
pub use generation::Generation;
pub use service::{
    Backend, BackendState, HealthCheck, MaglevSpec, Mode, NodeBackend, NodeSet, NodeSets, NodesAt, Probe, Reason, Refusal,
    Scheduler, Service, ServiceName, ServicePort, Target, ZoneBackends,
};
pub use state::{Announce, Known, Origin, Pool, ProbeTags, Services, State};

//! Kubernetes objects become specs here, once: past this module only valid values exist.
//!
//! Invariant: what a Service asks for and is not built makes it an error, never a Service that is served otherwise. The
//! defaults of the API server are applied, so that a manifest means here what it means in a cluster.
//! Deliberately not here: which class is ours, addresses, and which endpoints are used.

mod annotations;
pub(crate) mod foreign;
mod held;
mod kept;
mod node;
pub mod pool;
mod service;
mod slice;
mod traffic;

pub use annotations::HealthWish;
pub use held::{Condition, ConditionType, Held, Leftover};
pub use kept::Unread;
pub use node::{NodeError, NodeSpec};
pub use pool::{PoolError, PoolSpec};
pub use service::{Candidate, Kind, NotServable, PortSpec, ServiceSpec, SpecError};
use traffic::source_ranges;

pub use slice::{EndpointSpec, SliceError, SlicePort, SliceSpec};

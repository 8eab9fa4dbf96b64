//! Parsing of Kubernetes objects into specs, at the edge: behind this package only valid values exist. Also the kinds
//! that sluice adds to a cluster, and the content that it writes back into objects.
//!
//! Invariant: an unsupported setting of a Service is an error; the Service is never served in another way. The defaults
//! of the API server are applied, so that a manifest means the same as an object in a cluster.
//! Deliberately not here: ownership, addresses, selection of endpoints, and requests to an API server. The controller
//! and `sluicectl` share this package, and only the first has a Kubernetes client.

pub mod crd;
pub mod documents;
mod endpoint_slice;
mod node;
pub mod note;
pub mod pool;
pub mod scalar;
pub mod service;
pub mod spelling;
pub mod status;
pub mod text;
mod used;

pub use endpoint_slice::{EndpointSpec, ReadSlice, SliceError, SlicePort, SliceSpec};
pub use node::{NodeError, NodeSpec};
pub use pool::{PoolError, PoolSpec};
pub use service::{
    Candidate, HealthSpec, Kind, Namespaces, NotServable, OwnedParts, PortSpec, ReadService, ServiceObject, ServiceSpec, Sharing,
    SpecError, Unread,
};
pub use status::{Condition, ConditionType};
pub use used::{UsedService, UsedSlice};

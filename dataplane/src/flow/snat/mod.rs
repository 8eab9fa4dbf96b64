//! SNAT ports: which source ports of the gateway are free towards a target
//! (docs/internals/decisions/0001-snat-ports.md).
//!
//! A pool is one SNAT address towards one target, shared by all services that use the target. A pool belongs to one
//! generation of its target: when the target's slot is reassigned, the pool starts empty, and ports that flows of the
//! old target still hold are not returned to it.
//!
//! With several workers, each has a share of the ports of every pool (`port_share`), so that the port of a backend's
//! reply identifies the worker: by the remainder of the port, or by the hash with which network cards spread replies
//! (`port_spread`).

mod lease;
mod port_share;
mod port_spread;
mod ports;
mod preview;
mod restore;
#[cfg(test)]
mod tests;

pub use lease::{PoolId, SNAT_ADDRESSES_MAX, SnatAddress, SnatLease, SnatTarget, TARGETS_MAX, TargetSlot};
pub use port_share::PortShare;
pub(crate) use port_spread::PortSpread;
pub use ports::SnatPorts;
pub use preview::LeaseOffer;
pub(crate) use preview::TrialPorts;
pub(crate) use restore::UsedPort;

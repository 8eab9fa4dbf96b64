//! Several gateways as one: the groups of their VIPs, and what each gateway reports about its part.
//!
//! Not here: the election, replication and routing themselves, which are the gateway's.

mod status;
mod vip_group;

pub use status::{FleetPartner, FleetStatus, RoutingSession, SessionHealth, SessionProtocol, VipElection};
pub use vip_group::{fnv1a, vip_group};

//! Several gateways as one: the groups of their VIPs, who replicates flows with whom, VIPs that several claim,
//! and what each gateway reports about its part.
//!
//! Not here: the election, replication and routing themselves, which are the gateway's.

mod arbitration;
mod membership;
mod profile;
mod status;
mod vip_group;

pub use arbitration::{Arbitration, GroupClaims};
pub use membership::{GroupKey, KEY_BYTES, Member, Membership};
pub use profile::{GatewayProfile, LinkEdge};
pub use status::{
    FleetPartner, FleetStatus, LimitKind, RoutingSession, ServiceLimit, SessionHealth, SessionProtocol, VipElection,
};
pub use vip_group::{fnv1a, vip_group};

//! The fleet: agreement of the gateways of a group with each other and with routers, about owners of VIPs, flows, and
//! routes to VIPs.
//!
//! Invariant: a gateway without partners forwards as well. Not here: the controller, which knows all gateways.

pub mod election;
pub mod gateway_drain;
pub mod replication;
pub mod routing_sessions;
pub mod service_limits;
pub mod status;

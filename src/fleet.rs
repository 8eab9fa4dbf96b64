//! What gateways of a group agree on with each other and with routers: who owns which VIPs, which flows last, and which
//! sessions announce routes.
//!
//! Invariant: a gateway without partners forwards as well. Not here: the controller, which knows all gateways.

pub mod election;
pub mod gateway_drain;
pub mod replication;
pub mod routing_sessions;
pub mod service_limits;
pub mod status;

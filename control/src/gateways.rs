//! The controller's side of gateways: the registry of connected gateways, the published state, and the connections.
//!
//! Invariant: this module publishes and sends states and records acknowledgements; `plan` decides their content.

pub mod arbiter;
pub mod fleet_queries;
pub mod listener;
pub(crate) mod local_connections;
pub mod programming;
pub mod publish;
pub mod registry;
pub mod server;
pub mod socket;
pub mod tls;

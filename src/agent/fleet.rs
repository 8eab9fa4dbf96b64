//! What gateways of a group agree on with each other: who owns which VIPs, and which flows last.
//!
//! Invariant: a gateway without partners forwards as well. Not here: the controller, which knows all gateways.

pub mod election;
pub mod replication;

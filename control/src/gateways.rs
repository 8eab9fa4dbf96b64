//! Gateways as the controller serves them: who is connected, what each is sent, and the connections themselves.
//!
//! Invariant: nothing here decides what gateways forward by (`plan`); it is published, sent and acknowledged here.

pub mod fleet;
pub mod listener;
pub mod publish;
pub mod registry;
pub mod server;
pub mod socket;
pub mod tls;

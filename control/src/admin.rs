//! The admin API across gateways: the controller's part of `sluice.v1.Admin`, and all of it in `sluice-controller`.
//!
//! Invariant: rows about gateways come from the gateways, which are queried concurrently; one that does not answer is
//! named. An override is validated, then stored, and only then confirmed.
//! Deliberately not here: the answers of a gateway about itself.

mod caller;
mod fleet;
mod flows_left;
mod gateway_rows;
mod names;
mod service;
mod sockets;
mod troubles;
mod view;

pub use caller::Caller;
pub use gateway_rows::{KnownGateways, fleet_row};
pub use service::{ControllerAdmin, serve};
pub use sockets::{AdminSockets, read_only_path};
pub use troubles::{combine, observed_certificates, trouble_messages};
pub(crate) use troubles::{troubles_at_start, watch as watch_troubles};
pub use view::{View, time_text};

#[cfg(test)]
mod tests;

//! Interfaces for operators: the admin API, and the metrics, probes and status page of a gateway on `metrics.listen`.
//!
//! Invariant: a slow reader keeps no snapshot alive. Not here: the admin API across gateways (`control::admin`), and
//! tables as text (`sluicectl`).

pub mod api;
mod capture;
mod ended_flows;
mod explanation;
mod flows;
mod heaviest;
mod history;
pub mod metrics;
pub(crate) mod tables;
pub mod troubles;
mod watch;

pub use api::{ControllerAccess, FleetSources, Sources, StateSources, WorkerSources};
pub use capture::Captures;
pub use watch::Watches;

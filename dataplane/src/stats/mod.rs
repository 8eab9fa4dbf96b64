//! Counters of workers, and the named reasons of drops.
//!
//! Not here: metrics and commands, which read the counters.

mod counters;
mod drop_reason;
mod service_drops;
mod tally;

pub(crate) use counters::BACKEND_SLOTS;
pub use counters::{Account, BackendCounters, Counter, WorkerCounters};
pub use drop_reason::DropReason;
pub use service_drops::ServiceDrops;
pub(crate) use tally::Tally;

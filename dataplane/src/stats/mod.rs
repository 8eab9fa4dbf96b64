//! Counters of workers, and the named reasons of drops.
//!
//! Not here: metrics and commands, which read the counters.

mod counters;
mod drop_reason;
mod tally;

pub(crate) use counters::BACKEND_SLOTS;
pub use counters::{Account, BackendCounters, Counter, WorkerCounters};
pub use drop_reason::DropReason;
pub(crate) use tally::Tally;

//! TODO: docs.

mod counters;
mod drop_reason;
mod tally;

pub(crate) use counters::BACKEND_SLOTS;
pub use counters::{Account, BackendCounters, Counter, WorkerCounters};
pub use drop_reason::DropReason;
pub(crate) use tally::Tally;

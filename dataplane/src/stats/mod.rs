//! Counters of workers, and the named reasons of drops.
//!
//! Not here: metrics and commands, which read the counters.

mod counter_slot;
mod counters;
mod drop_reason;
mod frontend_counters;
mod service_drops;
mod service_flows;
mod tally;

pub(crate) use counter_slot::{COUNTED_BACKENDS, COUNTER_SLOTS, FrontendNumberSet};
pub use counter_slot::{CounterSlot, FrontendNumber};
pub use counters::{Account, BackendCounters, Counter, WorkerCounters};
pub use drop_reason::DropReason;
pub use frontend_counters::{FrontendCounters, FrontendTotals};
pub use service_drops::ServiceDrops;
pub use service_flows::{FlowCount, ServiceNumber};
pub(crate) use tally::Tally;

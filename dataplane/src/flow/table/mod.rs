//! The table of flows, and its sweep.

mod flow_table;
mod sweep;
#[cfg(test)]
mod tests;

pub(crate) use flow_table::PortUse;
pub use flow_table::{Candidate, FlowIndex, FlowTable, Full};
pub(crate) use sweep::{Fate, SweepRules};

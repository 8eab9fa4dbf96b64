//! The table of flows, and its sweep.

mod flow_table;
mod sweep;
#[cfg(test)]
mod tests;

pub use flow_table::{Candidate, FlowIndex, FlowTable, Full};
pub(crate) use flow_table::{CandidateSearch, PortUse};
pub(crate) use sweep::{Fate, SweepRules};

//! The choice of a backend for a new flow: Maglev tables, the other schedulers, and source ranges.
//!
//! Not here: affinity, which remembers choices (`flow`), and the health of backends (`compiler`).

mod loads;
mod maglev;
mod robin;
mod rounds;
mod schedule;
mod source_ranges;

pub(crate) use maglev::reduce;
pub use maglev::{MaglevTable, identity_hash};
pub use schedule::Chooser;
pub(crate) use schedule::{HashedBy, Schedule};
pub use source_ranges::{Intervals, SourceRanges};

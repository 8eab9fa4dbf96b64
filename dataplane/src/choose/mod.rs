//! TODO: docs.

mod loads;
mod maglev;
mod robin;
mod rounds;
mod schedule;
mod source_ranges;

pub use maglev::{MaglevTable, identity_hash};
pub use schedule::Chooser;
pub(crate) use schedule::{HashedBy, Schedule};
pub use source_ranges::{Intervals, SourceRanges};

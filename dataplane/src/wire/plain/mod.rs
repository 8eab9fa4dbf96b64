//! Plain packets, of which the fast path knows all that it needs from their heads: where fields stand, and what makes a
//! packet plain. One packet or eight at a time.

pub(crate) mod head;
mod recognise;
mod shape;

pub(crate) use recognise::{ExpectedLink, Plain, Recognised, WideFamily, recognise, recognise_eight};
pub(crate) use shape::Shape;

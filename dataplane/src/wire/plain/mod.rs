//! Plain packets, of which the fast path knows all that it needs from their heads: where fields stand, and what makes a
//! packet plain. One packet or eight at a time.

pub(crate) mod head;
mod recognise;

pub(crate) use recognise::{ExpectedLink, Plain, Recognised, Shape, WideFamily, recognise, recognise_eight};

//! The commands of `sluiced` beside `run`: each runs once, prints what it found, and ends.

pub mod bench;
pub mod check;
pub mod doctor;
pub mod replay;

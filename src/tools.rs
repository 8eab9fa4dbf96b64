//! The commands of `sluiced` other than `run`: each runs once, prints its result, and ends.

pub mod bench;
pub mod cli;
pub mod doctor;
pub mod prepare;
pub mod replay;

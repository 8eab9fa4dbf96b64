//! The command line of `sluiced` and its commands: `run` is the gateway, each of the others prints its result and ends.
//!
//! Invariant: no command imports another one. `preflight` is none: `check` and `doctor` print what it finds.

pub mod bench;
pub mod cli;
pub mod doctor;
pub mod preflight;
pub mod prepare;
pub mod replay;
pub mod run;

//! The path of a packet through a worker. Reading order: `worker` polls, `sort` parses a burst, `burst` looks up flows
//! and passes each packet on, `decide` gives the verdict, `engine` carries it out and sends, `rewrite` changes the
//! bytes.
//!
//! Special cases have files of their own: `answers`, `fragments`, `icmp_errors`, `linux` (packets of the kernel),
//! `steer` (hand-over to other workers). The sweep of idle flows is in `worker`.

mod answers;
mod burst;
mod decide;
mod engine;
mod fragments;
mod icmp_errors;
mod linux;
mod observer;
pub mod rewrite;
mod sort;
mod steer;
mod worker;

pub use observer::{Belongs, Fate, Observe};
pub use worker::{NoMemory, Parts, PortWithTwin, Worker};

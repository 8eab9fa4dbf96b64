//! TODO: docs.

mod answers;
mod burst;
pub mod decide;
mod engine;
mod fragments;
mod icmp_errors;
mod linux;
mod observer;
pub mod rewrite;
mod send;
mod steer;
mod sweep;
mod worker;

pub use icmp_errors::{follow_error, follow_tunnel_error};
pub use observer::{Belongs, Fate, Observe};
pub use worker::{NoMemory, Parts, PortWithTwin, Worker};

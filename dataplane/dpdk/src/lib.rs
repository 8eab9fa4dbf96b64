//! The engine's port over DPDK: what a worker polls, and how much memory its packets need.
//!
//! Invariant: nothing here reads packet contents. Each packet has one segment: scattered reception is not requested,
//! buffers hold the longest frame of any port, and `dpdk-sys` copies frames that a driver delivers in segments
//! (docs/internals/decisions/0025).
//!
//! Deliberately not here: the configured devices, and threads (`sluice`).

mod memory;
mod port;
mod queue_handover;

pub use memory::{memory_mb, packets_of_pair, size_memory, size_pool};
pub use port::{DpdkPort, Packet, Wakeup};
pub use queue_handover::{QueuePair, QueueReceiver, QueueSender, channel};

//! The rings between the workers and the thread that serves the Linux twins. Whole bursts cross them; neither side ever
//! waits for the other.
//!
//! Invariant: what a ring refuses comes back to the one who pushed it, who counts and frees it. Deliberately not here:
//! taps and the thread that reads and writes them (the root package), and the rate that Linux is given (the worker's).

use crossbeam_queue::ArrayQueue;

use crate::Burst;

/// Bursts that may wait on their way to Linux, per port. The twin thread empties the ring every millisecond at the
/// latest, so 256 bursts of one packet each carry 256,000 packets a second, full ones 8 million.
pub const TO_LINUX_BURSTS: usize = 256;
/// Bursts that may wait on their way from Linux, per port: 64 * 32 = 2048 packets, four times a tap's own queue of 500.
/// When it is full the twin thread stops reading, and the rest waits in the tap.
pub const FROM_LINUX_BURSTS: usize = 64;

/// The two rings of one port's Linux twin. Shared by all workers and the twin thread.
#[derive(Debug)]
pub struct TwinQueues<B> {
    /// Frames for Linux, pushed by workers.
    pub to_linux: ArrayQueue<Burst<B>>,
    /// Frames that Linux sends out of the port, pushed by the twin thread. Never an empty burst.
    pub from_linux: ArrayQueue<Burst<B>>,
}

impl<B> TwinQueues<B> {
    /// Empty rings of the documented sizes.
    #[must_use]
    pub fn new() -> Self {
        Self { to_linux: ArrayQueue::new(TO_LINUX_BURSTS), from_linux: ArrayQueue::new(FROM_LINUX_BURSTS) }
    }
}

impl<B> Default for TwinQueues<B> {
    fn default() -> Self {
        Self::new()
    }
}

//! The rings between the workers and the thread that serves the Linux twins. Whole bursts pass through them; neither
//! side waits for the other, and each wakes the other if that sleeps.
//!
//! **Invariant:** a burst that a ring refuses returns to the side that pushed it, which counts and frees it.
//!
//! Not here: taps and the thread that reads and writes them (the root package), and the rate limit towards the kernel
//! (the worker).

use std::sync::Arc;

use crossbeam_queue::ArrayQueue;

use super::doorbell::Doorbell;
use super::io::Burst;
use super::kernel_exchanges::KernelExchanges;

/// Capacity of the ring to the kernel, in bursts per port. The twin thread empties the ring at least every millisecond,
/// so 256 bursts of one packet each carry 256,000 packets a second, full ones 16 million.
pub const TO_LINUX_BURSTS: usize = 256;
/// Capacity of the ring from the kernel, in bursts per port: 16 * 128 = 2048 packets, four times a tap's own queue of
/// 500. When it is full, perhaps of bursts of one packet, the twin thread stops reading, and the rest waits in the tap.
pub const FROM_LINUX_BURSTS: usize = 16;

/// The two rings of one port's Linux twin, shared by all workers and the twin thread.
#[derive(Debug)]
pub struct TwinQueues<B> {
    /// Frames for the kernel, pushed by workers.
    pub to_linux: ArrayQueue<Burst<B>>,
    /// Frames that the kernel sends out of the port, pushed by the twin thread. Never an empty burst.
    pub from_linux: ArrayQueue<Burst<B>>,
    /// Exchanges that the kernel has begun through the port.
    pub(crate) begun: KernelExchanges,
    /// Of the twin thread; `None` if it never sleeps for more than a millisecond.
    doorbell: Option<Arc<Doorbell>>,
}

impl<B> TwinQueues<B> {
    /// Empty rings of the documented sizes.
    #[must_use]
    pub fn new() -> Self {
        Self {
            to_linux: ArrayQueue::new(TO_LINUX_BURSTS),
            from_linux: ArrayQueue::new(FROM_LINUX_BURSTS),
            begun: KernelExchanges::default(),
            doorbell: None,
        }
    }

    /// The same queues, with a memory of exchanges that is hashed with this random number of the process, so that no
    /// sender can choose exchanges that displace others.
    #[must_use]
    pub fn keyed(mut self, seed: u64) -> Self {
        self.begun = KernelExchanges::new(seed);
        self
    }

    /// The same queues with the doorbell of the twin thread.
    #[must_use]
    pub fn with_doorbell(self, doorbell: Option<Arc<Doorbell>>) -> Self {
        Self { doorbell, ..self }
    }

    /// Pushes a burst for the kernel, and wakes the twin thread if it sleeps.
    ///
    /// The burst, when the ring is full.
    pub(crate) fn push_to_linux(&self, burst: Burst<B>) -> Result<(), Burst<B>> {
        let pushed = self.to_linux.push(burst);
        if let Some(doorbell) = &self.doorbell {
            doorbell.ring();
        }
        pushed
    }
}

impl<B> Default for TwinQueues<B> {
    fn default() -> Self {
        Self::new()
    }
}

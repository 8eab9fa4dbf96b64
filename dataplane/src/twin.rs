//! The rings between the workers and the thread that serves the Linux twins. Whole bursts cross them; neither side ever
//! waits for the other.
//!
//! Invariant: what a ring refuses comes back to the one who pushed it, who counts and frees it. Deliberately not here:
//! taps and the thread that reads and writes them (the root package), and the rate that Linux is given (the worker's).

use std::sync::atomic::{AtomicU32, Ordering};

use crossbeam_queue::ArrayQueue;

use crate::hash::split_mix;
use crate::{Address, Burst, Headers, Transport, Tuple, tcp_flags};

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
    /// What Linux has begun by the port.
    pub(crate) begun: Begun,
}

impl<B> TwinQueues<B> {
    /// Empty rings of the documented sizes.
    #[must_use]
    pub fn new() -> Self {
        Self {
            to_linux: ArrayQueue::new(TO_LINUX_BURSTS),
            from_linux: ArrayQueue::new(FROM_LINUX_BURSTS),
            begun: Begun::default(),
        }
    }
}

impl<B> Default for TwinQueues<B> {
    fn default() -> Self {
        Self::new()
    }
}

/// Exchanges that are remembered, per port: 16,384 * 4 bytes = 64 KiB. At 1,000 probes a second one is overwritten after
/// 16 s, long after its answer.
const BEGUN: usize = 16_384;

/// What Linux has begun: TCP connections, UDP exchanges and echo requests that it sent the first packet of, the latest
/// ones. Whose packets these are nobody outside can tell without seeing them, so a flood of strays is none of them.
///
/// Shared by the workers: one sees what Linux sends, another may receive the answer. A slot is one word, written whole; of
/// two exchanges in one slot the later is remembered, the other is treated as any packet is.
#[derive(Debug)]
pub(crate) struct Begun {
    tags: Box<[AtomicU32]>,
}

impl Default for Begun {
    fn default() -> Self {
        Self { tags: (0..BEGUN).map(|_| AtomicU32::new(0)).collect() }
    }
}

impl Begun {
    /// Notes a packet that Linux sends.
    pub(crate) fn sent<A: Address>(&self, headers: &Headers<A>) {
        let begins = match headers.transport {
            Transport::Tcp { flags } => flags & (tcp_flags::SYN | tcp_flags::ACK) == tcp_flags::SYN,
            Transport::Icmp { kind, .. } => matches!(kind, 8 | 128),
            Transport::Udp | Transport::Sctp { .. } => true,
            _ => false,
        };
        if begins {
            let (slot, tag) = place(&headers.tuple);
            if let Some(known) = self.tags.get(slot).filter(|known| known.load(Ordering::Relaxed) != tag) {
                known.store(tag, Ordering::Relaxed);
            }
        }
    }

    /// Whether a packet that arrives belongs to what Linux has begun.
    pub(crate) fn knows<A: Address>(&self, headers: &Headers<A>) -> bool {
        let (slot, tag) = place(&headers.tuple.reversed());
        self.tags.get(slot).is_some_and(|known| known.load(Ordering::Relaxed) == tag)
    }
}

/// Slot and tag of an exchange, by the tuple of the packets that Linux sends. The tag is not 0.
#[allow(clippy::cast_possible_truncation)] // halves are folded and taken apart
fn place<A: Address>(tuple: &Tuple<A>) -> (usize, u32) {
    let (to, from) = (tuple.destination.wide(), tuple.source.wide());
    let ports = u64::from(tuple.source_port) << 32 | u64::from(tuple.destination_port) << 16 | u64::from(tuple.protocol);
    let hash = split_mix(split_mix((to ^ to >> 64) as u64 ^ ports) ^ (from ^ from >> 64) as u64);
    ((hash >> 32) as usize % BEGUN, hash as u32 | 1)
}

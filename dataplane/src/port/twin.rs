//! The rings between the workers and the thread that serves the Linux twins. Whole bursts pass through them; neither
//! side waits for the other, and each wakes the other if that sleeps.
//!
//! **Invariant:** a burst that a ring refuses returns to the side that pushed it, which counts and frees it.
//!
//! Not here: taps and the thread that reads and writes them (the root package), and the rate limit towards the kernel
//! (the worker).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crossbeam_queue::ArrayQueue;

use super::doorbell::Doorbell;
use super::io::Burst;
use crate::wire::{Address, Headers, Transport, Tuple, icmpv4, icmpv6, split_mix, tcp_flags};

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

    /// The same, with the doorbell of the twin thread.
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

/// Number of remembered exchanges per port: 16,384 * 4 bytes = 64 KiB. At 1,000 probes a second an entry is overwritten
/// after 16 s, long after its answer.
const BEGUN: usize = 16_384;

/// The latest exchanges that the kernel has begun: TCP connections, UDP exchanges and echo requests whose first packet
/// it sent. An outsider cannot guess their tuples, so packets of a flood do not belong to any of them.
///
/// Shared by the workers: one sees what the kernel sends, another may receive the answer. A slot is one word, written
/// whole; of two exchanges in one slot the later one is remembered, and the other is treated like any packet.
#[derive(Debug)]
pub(crate) struct KernelExchanges {
    tags: Box<[AtomicU32]>,
}

impl Default for KernelExchanges {
    fn default() -> Self {
        Self { tags: (0..BEGUN).map(|_| AtomicU32::new(0)).collect() }
    }
}

impl KernelExchanges {
    /// Records a packet that the kernel sends.
    pub(crate) fn sent<A: Address>(&self, headers: &Headers<A>) {
        let begins = match headers.transport {
            Transport::Tcp { flags } => flags & (tcp_flags::SYN | tcp_flags::ACK) == tcp_flags::SYN,
            Transport::Icmp { kind, .. } => matches!(kind, icmpv4::ECHO_REQUEST | icmpv6::ECHO_REQUEST),
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

    /// Whether a received packet belongs to an exchange that the kernel has begun.
    pub(crate) fn knows<A: Address>(&self, headers: &Headers<A>) -> bool {
        let (slot, tag) = place(&headers.tuple.reversed());
        self.tags.get(slot).is_some_and(|known| known.load(Ordering::Relaxed) == tag)
    }
}

/// Slot and tag of an exchange, from the tuple of the packets that the kernel sends. The tag is not 0.
#[allow(clippy::cast_possible_truncation)] // halves are folded and taken apart
fn place<A: Address>(tuple: &Tuple<A>) -> (usize, u32) {
    let (to, from) = (tuple.destination.wide(), tuple.source.wide());
    let ports = u64::from(tuple.source_port) << 32 | u64::from(tuple.destination_port) << 16 | u64::from(tuple.protocol);
    let hash = split_mix(split_mix((to ^ to >> 64) as u64 ^ ports) ^ (from ^ from >> 64) as u64);
    ((hash >> 32) as usize % BEGUN, hash as u32 | 1)
}

//! A worker's receive and transmit queue of a port, and the pool that its packets come from.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use dataplane::{BURST, Buffer, Burst, Port};
use dpdk_sys::{Mbuf, Mempool, RxQueue};

use crate::queue_handover::QueueReceiver;

/// A packet in DPDK's memory, as the engine handles it.
#[derive(Debug)]
#[repr(transparent)]
pub struct Packet(Mbuf);

impl From<Mbuf> for Packet {
    #[inline]
    fn from(mbuf: Mbuf) -> Self {
        Self(mbuf)
    }
}

impl From<Packet> for Mbuf {
    #[inline]
    fn from(packet: Packet) -> Self {
        packet.0
    }
}

impl Buffer for Packet {
    #[inline(always)]
    fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    #[inline(always)]
    fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }

    #[inline(always)]
    fn prefetch_metadata(&self) {
        dataplane::prefetch_to_write(self.0.metadata());
    }

    #[inline]
    fn resize(&mut self, len: usize) -> bool {
        self.0.resize(len)
    }

    #[inline(always)]
    fn prepend(&mut self, len: usize) -> bool {
        self.0.prepend(len)
    }

    #[inline]
    fn rss_hash(&self) -> Option<u32> {
        self.0.rss_hash()
    }

    #[inline]
    fn trim_front(&mut self, len: usize) {
        self.0.trim_front(len);
    }
}

/// How a packet wakes a worker that sleeps.
#[derive(Debug)]
pub enum Wakeup<'p> {
    /// This descriptor becomes readable.
    Readable(&'p Arc<OwnedFd>),
    /// It wakes nobody: the worker has to look.
    Never,
}

/// A port as one worker sees it: its queues while the device is there, and the pool that packets come from.
#[derive(Debug)]
pub struct DpdkPort {
    receiver: QueueReceiver,
    pool: Mempool,
}

impl DpdkPort {
    /// A port that gets and returns its queues by a hand-over.
    #[must_use]
    pub fn new(receiver: QueueReceiver, pool: Mempool) -> Self {
        Self { receiver, pool }
    }

    /// Arms what wakes a worker that sleeps, or disarms it.
    pub fn arm(&mut self, armed: bool) {
        if let Some(rx) = self.receiver.same_queues().and_then(|queues| queues.rx.as_mut()) {
            rx.arm(armed);
        }
    }

    /// How a packet wakes a worker that sleeps; none without a receive queue.
    pub fn wakeup(&mut self) -> Option<Wakeup<'_>> {
        let readable = self.receiver.same_queues()?.rx.as_ref().map(RxQueue::readable)?;
        Some(readable.map_or(Wakeup::Never, Wakeup::Readable))
    }
}

impl Port for DpdkPort {
    type Buffer = Packet;

    #[inline]
    fn receive(&mut self, burst: &mut Burst<Packet>) {
        if let Some(rx) = self.receiver.queues().and_then(|queues| queues.rx.as_mut()) {
            rx.receive(burst);
        }
    }

    /// Without a device every packet is refused.
    #[inline]
    fn transmit(&mut self, burst: &mut Burst<Packet>) {
        if let Some(tx) = self.receiver.same_queues().and_then(|queues| queues.tx.as_mut()) {
            tx.transmit(burst);
        }
    }

    fn allocate(&mut self) -> Option<Packet> {
        self.pool.allocate().map(Packet)
    }

    fn release(&mut self, burst: &mut Burst<Packet>) {
        dpdk_sys::release(burst);
    }
}

// The burst size of the engine equals that of the driver.
const _: () = assert!(BURST == dpdk_sys::BURST);

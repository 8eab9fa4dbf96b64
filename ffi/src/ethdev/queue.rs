//! The receive and transmit queues of a port, which move bursts of packets.
//!
//! Invariant: a queue belongs to one thread at a time (`Send`, not `Sync`, not `Clone`), as DPDK requires. Neither call
//! waits or fails: it may receive nothing, or send nothing.
//!
//! Received frames have one segment. If the driver says that a queue does not scatter frames, its packets are not
//! inspected; the packets of all other queues are, and frames in several segments are linearised
//! (docs/internals/decisions/0025).

use std::cell::Cell;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use arrayvec::ArrayVec;

use super::owned_port::OwnedPort;
use super::wakeup::Wakeup;
use crate::mbuf::{self, Mbuf, RawBurst};
use crate::mempool::Mempool;
use crate::raw;

/// Maximum number of packets moved by one call to a driver.
pub const BURST: usize = 128;

/// A receive queue of a port.
#[derive(Debug)]
pub struct RxQueue {
    port: u16,
    queue: u16,
    /// Pool for linearised frames; none if the device delivers no frames in several segments.
    linearize_into: Option<Mempool>,
    /// Before the port, so that it is dropped first.
    wakeup: Option<Wakeup>,
    owned: Arc<OwnedPort>,
    not_sync: PhantomData<Cell<()>>,
}

/// A transmit queue of a port.
#[derive(Debug)]
pub struct TxQueue {
    port: u16,
    queue: u16,
    owned: Arc<OwnedPort>,
    not_sync: PhantomData<Cell<()>>,
}

impl RxQueue {
    /// To be called once for each queue number. `pool` is the one that the queue was set up with.
    pub(super) fn new(port: Arc<OwnedPort>, queue: u16, pool: Mempool, wakeup: Option<Wakeup>) -> Self {
        // SAFETY: the port is started, and has the queue.
        let may_chain = unsafe { raw::sluice_port_may_chain(port.id, queue) } != 0;
        let linearize_into = may_chain.then_some(pool);
        Self { port: port.id, queue, linearize_into, wakeup, owned: port, not_sync: PhantomData }
    }

    /// Whether it is a queue of this port.
    pub(super) fn is_of(&self, port: &OwnedPort) -> bool {
        std::ptr::eq(&raw const *self.owned, port)
    }

    /// Runs the timers of drivers that are due ([`super::Port::needs_timers`]), those of all ports. Does nothing on a
    /// thread that is not registered.
    pub fn run_timers(&mut self) {
        // SAFETY: EAL runs, because a port exists.
        unsafe { raw::sluice_timers_run() }
    }

    /// Becomes readable when packets wait, if the queue is armed ([`RxQueue::arm`]). None: the queue wakes nobody.
    #[must_use]
    pub fn readable(&self) -> Option<&Arc<OwnedFd>> {
        self.wakeup.as_ref().map(|wakeup| &wakeup.readable)
    }

    /// Arms the queue for a sleep of its thread, or disarms it. Packets that arrived before may go unnoticed: receive
    /// once more after arming.
    pub fn arm(&mut self, armed: bool) {
        if let Some(wakeup) = &mut self.wakeup {
            wakeup.arm(armed);
        }
    }

    /// Appends received packets while there is room, at most [`BURST`], each in one segment. A frame in several segments
    /// becomes empty if it is longer than a buffer or no buffer is free.
    #[inline]
    pub fn receive<B: From<Mbuf>, const N: usize>(&mut self, burst: &mut ArrayVec<B, N>) {
        let mut packets = RawBurst::<BURST>::new();
        #[allow(clippy::cast_possible_truncation)] // At most `BURST`.
        let wanted = burst.remaining_capacity().min(BURST) as u16;
        // SAFETY: the port is started and stays so while `owned` lives; `&mut self` and the absence of Clone and
        // Sync make this thread the only user of the queue; there is room for `wanted` pointers. The driver passes
        // ownership of as many packets as it returns, at most `wanted`, for which the burst has room.
        unsafe {
            let count = raw::sluice_rx_burst(self.port, self.queue, packets.as_mut_ptr(), wanted);
            packets.set_len(usize::from(count));
            if let Some(pool) = self.linearize_into {
                // Each pointer is replaced by that of a packet that we own as well.
                raw::sluice_linearize(pool.as_ptr(), packets.as_mut_ptr(), count);
            }
            mbuf::put(burst, &packets);
        }
    }
}

impl TxQueue {
    /// To be called once for each queue number.
    pub(super) fn new(port: Arc<OwnedPort>, queue: u16) -> Self {
        Self { port: port.id, queue, owned: port, not_sync: PhantomData }
    }

    /// Whether it is a queue of this port.
    pub(super) fn is_of(&self, port: &OwnedPort) -> bool {
        std::ptr::eq(&raw const *self.owned, port)
    }

    /// Sends the pending LACP frames of an 802.3ad bond. DPDK sends them only during a transmit call.
    pub fn send_lacp(&mut self) {
        // SAFETY: as in `transmit`; no packet is passed.
        unsafe { raw::sluice_tx_burst(self.port, self.queue, std::ptr::null_mut(), 0) };
    }

    /// Sends from the front of the burst. Refused packets stay in it, in order; the caller counts and frees them.
    #[inline]
    pub fn transmit<B: From<Mbuf> + Into<Mbuf>, const N: usize>(&mut self, burst: &mut ArrayVec<B, N>) {
        let mut packets = mbuf::take::<B, N>(burst);
        let count = u16::try_from(packets.len()).unwrap_or(u16::MAX);
        // SAFETY: as in `receive`; `packets` holds `count` packets that we own, and those that the driver takes are not
        // used again.
        let sent = unsafe { raw::sluice_tx_burst(self.port, self.queue, packets.as_mut_ptr(), count) };
        // SAFETY: the driver did not take these, so we still own them; the burst had room for all.
        unsafe { mbuf::put(burst, &packets[usize::from(sent.min(count))..]) };
    }
}

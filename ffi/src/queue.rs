//! The two ends of a port that packets pass: bursts in, bursts out.
//!
//! Invariant: a queue belongs to one thread at a time (`Send`, not `Sync`, not `Clone`), which is all that DPDK asks of its
//! users. Neither call waits, and neither fails: nothing arrived, or nothing could be sent.
//!
//! What is received is in one segment. A device that can be told so never scatters a frame over several; the packets of any other
//! are looked at, and put together where they must be (docs/adr/0025).

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

use arrayvec::ArrayVec;

use crate::mbuf::{self, Mbuf, RawBurst};
use crate::mempool::Mempool;
use crate::port::Started;
use crate::raw;

/// Most packets moved by one call to a driver.
pub const BURST: usize = 32;

/// Where packets arrive.
#[derive(Debug)]
pub struct RxQueue {
    port: u16,
    queue: u16,
    /// Where frames in several segments are put together; none where the device delivers none.
    gathers: Option<Mempool>,
    _started: Arc<Started>,
    not_sync: PhantomData<Cell<()>>,
}

/// Where packets leave.
#[derive(Debug)]
pub struct TxQueue {
    port: u16,
    queue: u16,
    _started: Arc<Started>,
    not_sync: PhantomData<Cell<()>>,
}

impl RxQueue {
    /// Each number is given out once. `pool` is the one that the queue was set up with.
    pub(crate) fn new(started: Arc<Started>, queue: u16, pool: Mempool) -> Self {
        // SAFETY: the port is started, and has the queue.
        let may_chain = unsafe { raw::sluice_port_may_chain(started.id, queue) } != 0;
        let gathers = may_chain.then_some(pool);
        Self { port: started.id, queue, gathers, _started: started, not_sync: PhantomData }
    }

    /// Appends what has arrived, as far as there is room, 32 at most, each in one segment. A frame in several that is longer
    /// than a buffer, or finds none free, is empty.
    #[inline]
    pub fn receive<B: From<Mbuf>, const N: usize>(&mut self, burst: &mut ArrayVec<B, N>) {
        let mut packets = RawBurst::<BURST>::new();
        #[allow(clippy::cast_possible_truncation)] // At most 32.
        let wanted = burst.remaining_capacity().min(BURST) as u16;
        // SAFETY: the port is started and stays so while `_started` lives; `&mut self` and the absence of Clone and Sync make
        // this thread the only user of the queue; there is room for `wanted` pointers. The driver gives us so many packets to
        // own as it says, at most `wanted`, for which the burst has room.
        unsafe {
            let count = raw::sluice_rx_burst(self.port, self.queue, packets.as_mut_ptr(), wanted);
            packets.set_len(usize::from(count));
            if let Some(pool) = self.gathers {
                // Each pointer is replaced by that of a packet which is ours likewise.
                raw::sluice_gather(pool.as_ptr(), packets.as_mut_ptr(), count);
            }
            mbuf::put(burst, &packets);
        }
    }
}

impl TxQueue {
    /// Each number is given out once.
    pub(crate) fn new(started: Arc<Started>, queue: u16) -> Self {
        Self { port: started.id, queue, _started: started, not_sync: PhantomData }
    }

    /// Sends what an 802.3ad bond has to say to its partner, which DPDK puts on the wire only when it is called to send.
    pub fn speak(&mut self) {
        // SAFETY: as in `transmit`; no packet is given.
        unsafe { raw::sluice_tx_burst(self.port, self.queue, std::ptr::null_mut(), 0) };
    }

    /// Sends from the front of the burst. What is refused stays in it, in order, and is the caller's to count and free.
    #[inline]
    pub fn transmit<B: From<Mbuf> + Into<Mbuf>, const N: usize>(&mut self, burst: &mut ArrayVec<B, N>) {
        let mut packets = mbuf::take::<B, N>(burst);
        let count = u16::try_from(packets.len()).unwrap_or(u16::MAX);
        // SAFETY: as in `receive`; `packets` holds `count` packets that we own, and of those that the driver takes none is
        // used again.
        let sent = unsafe { raw::sluice_tx_burst(self.port, self.queue, packets.as_mut_ptr(), count) };
        // SAFETY: the driver did not take these, so they are ours still; the burst had room for all.
        unsafe { mbuf::put(burst, &packets[usize::from(sent.min(count))..]) };
    }
}

//! A port made of two rings in memory: the port receives the packets of one ring, and sends into the other. The
//! benchmark feeds a worker through it.
//!
//! Each ring has one producer and one consumer: the driver at one end, and a handle that cannot be cloned at the other.
//! Rings, like pools, live as long as the process.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::NonNull;

use arrayvec::ArrayVec;

use super::port::{Descriptors, Port, PortConfig, StartedPort};
use super::queue::{BURST, RxQueue, TxQueue};
use crate::device::Device;
use crate::eal::{Eal, log};
use crate::error::Error;
use crate::mbuf::{self, Mbuf, RawBurst};
use crate::mempool::Mempool;
use crate::raw;

/// MTU of a ring port, bytes.
const MTU_BYTES: u16 = 1500;

/// A port and the far ends of its rings.
#[derive(Debug)]
pub struct RingPort {
    /// The port.
    pub port: Port,
    /// Its receive queue.
    pub rx: RxQueue,
    /// Its transmit queue.
    pub tx: TxQueue,
    /// Packets put here arrive at `rx`.
    pub input: RingInput,
    /// Packets sent by `tx` are taken here.
    pub output: RingOutput,
}

/// The producer end of the receive ring.
#[derive(Debug)]
pub struct RingInput {
    ring: NonNull<raw::rte_ring>,
    not_sync: PhantomData<Cell<()>>,
}

/// The consumer end of the transmit ring.
#[derive(Debug)]
pub struct RingOutput {
    ring: NonNull<raw::rte_ring>,
    not_sync: PhantomData<Cell<()>>,
}

// SAFETY: the ring is never freed, and a handle is the only user of its end, from one thread at a time.
unsafe impl Send for RingInput {}
// SAFETY: as for RingInput.
unsafe impl Send for RingOutput {}

impl RingPort {
    /// Creates a port over two rings of `slots` packets each (a power of two, one of which stays empty).
    ///
    /// # Errors
    /// The number is in use, `slots` is not a power of two, or memory is short.
    pub fn new(eal: Eal, number: u16, slots: u32, pool: Mempool) -> Result<Self, Error> {
        // The driver prefixes this name, so a configuration cannot name the device.
        let name = format!("rings{number}");
        let device = Device::Virtual { name: format!("net_ring_{name}"), arguments: String::new() };
        let refused = |step| Error::Device {
            device: device.to_string(),
            step,
            reason: raw::error_text(raw::errno()),
            logged: log::take_errors(),
        };
        let input = ring(eal, &format!("{name}_in"), slots).ok_or_else(|| refused("make its receive ring"))?;
        let output = ring(eal, &format!("{name}_out"), slots).ok_or_else(|| refused("make its transmit ring"))?;
        let c_name = raw::c_string(&name);
        // SAFETY: EAL runs; each array has one ring; the driver copies pointers and name, and rings are never freed.
        let id = unsafe { raw::rte_eth_from_rings(c_name.as_ptr(), &input.as_ptr(), 1, &output.as_ptr(), 1, 0) };
        let id = u16::try_from(id).map_err(|_| refused("make a port of its rings"))?;
        let config = PortConfig {
            device: device.clone(),
            mtu_bytes: MTU_BYTES,
            mac: None,
            queues: 1,
            spread: None,
            descriptors: Descriptors::default(),
            wakes: false,
            fast_free: false,
        };
        let StartedPort { port, mut rx, mut tx, .. } = Port::configure(id, &config, pool)?;
        let (Some(rx), Some(tx)) = (rx.pop(), tx.pop()) else { return Err(refused("have its queues")) };
        let input = RingInput { ring: input, not_sync: PhantomData };
        Ok(Self { port, rx, tx, input, output: RingOutput { ring: output, not_sync: PhantomData } })
    }
}

fn ring(_eal: Eal, name: &str, slots: u32) -> Option<NonNull<raw::rte_ring>> {
    let name = raw::c_string(name);
    let flags = raw::RING_F_SP_ENQ | raw::RING_F_SC_DEQ;
    // SAFETY: EAL runs; the name is terminated and copied.
    NonNull::new(unsafe { raw::rte_ring_create(name.as_ptr(), slots, -1, flags) })
}

impl RingInput {
    /// Enqueues from the front of the burst. Packets for which there is no room stay in it, in order.
    #[inline]
    pub fn put<B: From<Mbuf> + Into<Mbuf>, const N: usize>(&mut self, burst: &mut ArrayVec<B, N>) {
        let mut packets = mbuf::take::<B, N>(burst);
        let count = u32::try_from(packets.len()).unwrap_or(u32::MAX);
        // SAFETY: the ring is never freed and this is its only producer; `packets` holds `count` packets that we own.
        let taken = unsafe { raw::sluice_ring_enqueue(self.ring.as_ptr(), packets.as_mut_ptr(), count) };
        // SAFETY: the ring did not take these, so we still own them; the burst had room for all.
        unsafe { mbuf::put(burst, &packets[taken.min(count) as usize..]) };
    }
}

impl RingOutput {
    /// Appends sent packets while there is room, at most [`BURST`].
    #[inline]
    pub fn take<B: From<Mbuf>, const N: usize>(&mut self, burst: &mut ArrayVec<B, N>) {
        let mut packets = RawBurst::<BURST>::new();
        let wanted = u32::try_from(burst.remaining_capacity().min(BURST)).unwrap_or(0);
        // SAFETY: the ring is never freed and this is its only consumer; there is room for `wanted` pointers. The
        // port's driver passed ownership of the packets in the ring. At most `wanted` are returned, for which the burst
        // has room.
        unsafe {
            let count = raw::sluice_ring_dequeue(self.ring.as_ptr(), packets.as_mut_ptr(), wanted);
            packets.set_len(count as usize);
            mbuf::put(burst, &packets);
        }
    }
}

//! The harness: feeds frames into one side of a gateway and collects transmitted packets. There are two, one in memory
//! and one over DPDK's rings.

use std::cell::RefCell;
use std::rc::Rc;

use dataplane::{Buffer, Burst, Port};
use dpdk_sys::{Eal, EalConfig, Hugepages, Mempool, RingInput, RingOutput, RingPort};

use super::frame::{FRAME_BYTES_V4, FRAME_BYTES_V6};
use super::report::BenchError;
use crate::ports::dpdk::{DpdkPort, Packet, size_memory};
use crate::ports::queue_handover::{QueuePair, QueueReceiver};

/// A side of the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// The side of the clients.
    Uplink,
    /// The side of the backends.
    Cluster,
}

/// Two ports of a worker, and their peers.
pub(super) trait Harness {
    /// The port type.
    type Port: Port;

    /// The ports, uplink first. To be called once.
    fn ports(&mut self) -> Option<[Self::Port; 2]>;

    /// Feeds one burst into a side: the frames of `next`, at most 32.
    fn feed<'t>(&mut self, side: Side, next: impl FnMut() -> Option<&'t [u8]>);

    /// Collects all packets transmitted on a side.
    fn drain(&mut self, side: Side, see: impl FnMut(&[u8]));
}

/// Size of a buffer, equal to DPDK's, so that the same amount of memory is used.
const ROOM: usize = 2048;
/// Headroom for tunnel headers, equal to DPDK's.
const HEADROOM: usize = 128;
/// Number of buffers: more than are ever in use at once (a burst in, a burst out on each side).
const BUFFERS: usize = 512;

/// A reused buffer in memory.
#[derive(Debug)]
pub(super) struct Slot {
    bytes: Box<[u8; HEADROOM + ROOM]>,
    start: usize,
    len: usize,
}

impl Slot {
    /// The buffer with its full headroom again.
    #[inline]
    fn reset(self) -> Self {
        Self { start: HEADROOM, ..self }
    }
}

impl Buffer for Slot {
    #[inline]
    fn bytes(&self) -> &[u8] {
        self.bytes.get(self.start..self.start + self.len).unwrap_or(&[])
    }

    #[inline]
    fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.start..self.start + self.len).unwrap_or(&mut [])
    }

    #[inline]
    fn resize(&mut self, len: usize) -> bool {
        let fits = len <= ROOM;
        if fits {
            self.len = len;
        }
        fits
    }

    #[inline]
    fn prepend(&mut self, len: usize) -> bool {
        let fits = len <= self.start;
        if fits {
            self.start -= len;
            self.len += len;
        }
        fits
    }

    fn trim_front(&mut self, len: usize) {
        let len = len.min(self.len);
        self.start += len;
        self.len -= len;
    }
}

type Shared<T> = Rc<RefCell<T>>;

/// A port in memory.
#[derive(Debug)]
pub(super) struct SlotPort {
    arriving: Shared<Burst<Slot>>,
    sent: Shared<Burst<Slot>>,
    /// Packets transmitted in the same poll while `sent` is occupied: RSTs of reclaimed flows.
    more: Shared<Vec<Slot>>,
    free: Shared<Vec<Slot>>,
}

impl Port for SlotPort {
    type Buffer = Slot;

    fn receive(&mut self, burst: &mut Burst<Slot>) {
        std::mem::swap(burst, &mut *self.arriving.borrow_mut());
    }

    fn transmit(&mut self, burst: &mut Burst<Slot>) {
        let mut sent = self.sent.borrow_mut();
        if sent.is_empty() {
            return std::mem::swap(burst, &mut *sent);
        }
        self.more.borrow_mut().extend(burst.drain(..));
    }

    fn allocate(&mut self) -> Option<Slot> {
        self.free.borrow_mut().pop()
    }

    fn release(&mut self, burst: &mut Burst<Slot>) {
        self.free.borrow_mut().extend(burst.drain(..).map(Slot::reset));
    }
}

/// The harness in memory.
#[derive(Debug)]
pub(super) struct Memory {
    arriving: [Shared<Burst<Slot>>; 2],
    sent: [Shared<Burst<Slot>>; 2],
    more: [Shared<Vec<Slot>>; 2],
    free: Shared<Vec<Slot>>,
}

impl Memory {
    pub(super) fn new() -> Self {
        let slot = || Slot { bytes: Box::new([0; HEADROOM + ROOM]), start: HEADROOM, len: 0 };
        let slots = (0..BUFFERS).map(|_| slot()).collect();
        let more = std::array::from_fn(|_| Rc::new(RefCell::new(Vec::with_capacity(BUFFERS))));
        Self { arriving: Default::default(), sent: Default::default(), more, free: Rc::new(RefCell::new(slots)) }
    }
}

impl Harness for Memory {
    type Port = SlotPort;

    fn ports(&mut self) -> Option<[SlotPort; 2]> {
        let port = |side: Side| SlotPort {
            arriving: self.arriving[side as usize].clone(),
            sent: self.sent[side as usize].clone(),
            more: self.more[side as usize].clone(),
            free: self.free.clone(),
        };
        Some([port(Side::Uplink), port(Side::Cluster)])
    }

    #[inline]
    fn feed<'t>(&mut self, side: Side, mut next: impl FnMut() -> Option<&'t [u8]>) {
        let mut arriving = self.arriving[side as usize].borrow_mut();
        let mut free = self.free.borrow_mut();
        while !arriving.is_full() {
            let (Some(frame), Some(mut slot)) = (next(), free.pop()) else { return };
            fill(&mut slot, frame);
            arriving.push(slot);
        }
    }

    #[inline]
    fn drain(&mut self, side: Side, mut see: impl FnMut(&[u8])) {
        let mut free = self.free.borrow_mut();
        let (mut sent, mut more) = (self.sent[side as usize].borrow_mut(), self.more[side as usize].borrow_mut());
        for slot in sent.drain(..).chain(more.drain(..)) {
            see(slot.bytes());
            free.push(slot.reset());
        }
    }
}

/// Copies a frame into a buffer. The frame lengths of traces are listed, because a copy of constant length compiles to
/// a few moves, any other to a call.
#[inline(always)]
fn fill<B: Buffer>(buffer: &mut B, frame: &[u8]) {
    if !buffer.resize(frame.len()) {
        return;
    }
    let bytes = buffer.bytes_mut();
    if !(copy::<{ FRAME_BYTES_V4 }>(bytes, frame) || copy::<{ FRAME_BYTES_V6 }>(bytes, frame)) {
        bytes.copy_from_slice(frame);
    }
}

/// Copies a frame if it is `N` bytes long.
#[inline(always)]
fn copy<const N: usize>(bytes: &mut [u8], frame: &[u8]) -> bool {
    let (Ok(bytes), Ok(frame)) = (<&mut [u8; N]>::try_from(bytes), <&[u8; N]>::try_from(frame)) else { return false };
    *bytes = *frame;
    true
}

/// The harness over DPDK's rings.
#[derive(Debug)]
pub(super) struct Rings {
    ports: Option<[DpdkPort; 2]>,
    inputs: [RingInput; 2],
    outputs: [RingOutput; 2],
    pool: Mempool,
}

/// Slots of a ring: a few bursts.
const RING_SLOTS: u32 = 512;

impl Rings {
    pub(super) fn new() -> Result<Self, BenchError> {
        let failed = |error: dpdk_sys::Error| BenchError::Dpdk(error.to_string());
        let (pool, memory_mb) = size_memory(2, 1, 1500);
        let config = EalConfig { hugepages: Hugepages::Auto, memory_mb, devices: Vec::new(), cores: Vec::new() };
        let eal = Eal::start(&config).map_err(failed)?;
        let pool = Mempool::new(eal, &pool).map_err(failed)?;
        let uplink = RingPort::new(eal, 0, RING_SLOTS, pool).map_err(failed)?;
        let cluster = RingPort::new(eal, 1, RING_SLOTS, pool).map_err(failed)?;
        let port = |rx, tx| DpdkPort::new(QueueReceiver::fixed(QueuePair { rx: Some(rx), tx: Some(tx) }), pool);
        Ok(Self {
            ports: Some([port(uplink.rx, uplink.tx), port(cluster.rx, cluster.tx)]),
            inputs: [uplink.input, cluster.input],
            outputs: [uplink.output, cluster.output],
            pool,
        })
    }
}

impl Harness for Rings {
    type Port = DpdkPort;

    fn ports(&mut self) -> Option<[DpdkPort; 2]> {
        self.ports.take()
    }

    #[inline]
    fn feed<'t>(&mut self, side: Side, mut next: impl FnMut() -> Option<&'t [u8]>) {
        let mut burst: Burst<Packet> = Burst::new();
        if !self.pool.fill(&mut burst) {
            return;
        }
        let mut filled = 0;
        for buffer in &mut burst {
            let Some(frame) = next() else { break };
            fill(buffer, frame);
            filled += 1;
        }
        burst.truncate(filled);
        self.inputs[side as usize].put(&mut burst);
    }

    #[inline]
    fn drain(&mut self, side: Side, mut see: impl FnMut(&[u8])) {
        loop {
            let mut burst: Burst<Packet> = Burst::new();
            self.outputs[side as usize].take(&mut burst);
            if burst.is_empty() {
                return;
            }
            burst.iter().for_each(|frame| see(frame.bytes()));
            dpdk_sys::release(&mut burst);
        }
    }
}

//! The interface to packet I/O: bursts of buffers through a port. Ports are in memory in tests, capture files in
//! `replay`, DPDK queues in the gateway.
//!
//! **Invariant:** no call waits; buffers that a port refuses stay with the caller.
//!
//! Not here: drivers.

use arrayvec::ArrayVec;

use crate::wire::Buffer;

/// Maximum number of packets in a burst: four times as many as the vector paths of DPDK's drivers handle at a time.
/// Many packets share the fixed cost of a poll, and memory is waited for at the start of a burst only
/// (docs/internals/decisions/0078-bursts-in-parts-of-thirty-two.md).
pub const BURST: usize = 128;

/// Up to [`BURST`] buffers.
pub type Burst<B> = ArrayVec<B, BURST>;

/// One network port as a worker uses it: with a receive queue and a transmit queue of the worker's own.
pub trait Port {
    /// The type of its buffers.
    type Buffer: Buffer;

    /// Appends received packets while the burst has room. Never waits.
    fn receive(&mut self, burst: &mut Burst<Self::Buffer>);

    /// Transmits from the front of the burst, and leaves refused packets in it, in order.
    fn transmit(&mut self, burst: &mut Burst<Self::Buffer>);

    /// An empty buffer (length 0); `None` when memory is short.
    fn allocate(&mut self) -> Option<Self::Buffer>;

    /// Frees all buffers of the burst.
    fn release(&mut self, burst: &mut Burst<Self::Buffer>);
}

//! How packets come and go: bursts of buffers through a port. Memory ports in tests, capture files in `replay`, DPDK in
//! the gateway.

use arrayvec::ArrayVec;

/// Packets in a burst, at most. 32 fills a cache line of descriptors on common NICs and is what the DPDK drivers'
/// vector paths work in.
pub const BURST: usize = 32;

/// Up to [`BURST`] buffers.
pub type Burst<B> = ArrayVec<B, BURST>;

/// One packet, contiguous in memory, from the Ethernet header on.
pub trait Buffer: Send {
    /// The frame.
    fn bytes(&self) -> &[u8];
    /// The frame, to be changed in place.
    fn bytes_mut(&mut self) -> &mut [u8];
    /// Makes the frame `len` bytes long, keeping its start; new bytes have any value. False, and nothing changed,
    /// when there is no room.
    #[must_use]
    fn resize(&mut self, len: usize) -> bool;
    /// Makes room for `len` bytes, of any value, before the frame. False, and nothing changed, when there is none. Before a
    /// received frame there is room for 128 bytes (DPDK's default headroom).
    #[must_use]
    fn prepend(&mut self, len: usize) -> bool;
    /// Takes `len` bytes off the front of the frame; all there are when they are fewer.
    fn trim_front(&mut self, len: usize);
    /// The hash that the network card computed when it chose a receive queue, if it says so.
    #[inline]
    fn rss_hash(&self) -> Option<u32> {
        None
    }
}

/// One network port as one worker sees it: a receive queue and a transmit queue of its own.
pub trait Port {
    /// What it moves.
    type Buffer: Buffer;

    /// Appends what has arrived, as far as there is room. Never waits.
    fn receive(&mut self, burst: &mut Burst<Self::Buffer>);

    /// Sends from the front of the burst, and leaves in it what was refused, in order.
    fn transmit(&mut self, burst: &mut Burst<Self::Buffer>);

    /// An empty buffer (length 0), or none when memory is short.
    fn allocate(&mut self) -> Option<Self::Buffer>;

    /// Frees the buffers at once.
    fn release(&mut self, burst: &mut Burst<Self::Buffer>);
}

//! The interface to the bytes of a packet, and the functions that take views of headers from them.
//!
//! **Invariant:** a view exists only over bytes that hold the whole header, so no access to it can fail.
//!
//! Not here: the meaning of values and the rejection of invalid ones; `parse` and the modules that answer packets do
//! both.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::processor::prefetch_to_write;

/// One packet, contiguous in memory, from the Ethernet header on.
pub trait Buffer: Send {
    /// The frame.
    fn bytes(&self) -> &[u8];
    /// Prefetches, to be written, the cache line of the byte at an offset from the start of the frame, also before it. The
    /// offset is not checked.
    #[inline(always)]
    fn prefetch(&self, offset: isize) {
        prefetch_to_write(self.bytes().as_ptr().wrapping_offset(offset));
    }
    /// Prefetches, to be written, the cache line that tells where the frame is: for a buffer that another core wrote last.
    #[inline(always)]
    fn prefetch_metadata(&self) {}
    /// The frame, mutable.
    fn bytes_mut(&mut self) -> &mut [u8];
    /// Sets the length of the frame to `len` bytes and keeps its start; new bytes have any value. Returns false, and
    /// changes nothing, when there is no room.
    #[must_use]
    fn resize(&mut self, len: usize) -> bool;
    /// Removes the bytes after the first `len` bytes of the frame, if there are any.
    #[inline(always)]
    fn truncate(&mut self, len: usize) {
        if len < self.bytes().len() {
            let _ = self.resize(len); // it gets shorter, so there is room
        }
    }
    /// Makes room for `len` bytes, of any value, before the frame. Returns false, and changes nothing, when there is
    /// none. A received frame has room for 128 bytes in front (DPDK's default headroom).
    #[must_use]
    fn prepend(&mut self, len: usize) -> bool;
    /// Removes `len` bytes from the front of the frame, or all if there are fewer.
    fn trim_front(&mut self, len: usize);
    /// The hash by which the network card chose a receive queue, if it reports it.
    #[inline]
    fn rss_hash(&self) -> Option<u32> {
        None
    }
}

/// The header at the start of `bytes` and the bytes after it; `None` when `bytes` is too short.
#[inline]
#[must_use]
pub fn take<T: FromBytes + KnownLayout + Immutable + Unaligned>(bytes: &[u8]) -> Option<(&T, &[u8])> {
    T::ref_from_prefix(bytes).ok()
}

/// As [`take`], but mutable.
#[inline]
#[must_use]
pub fn take_mut<T: FromBytes + IntoBytes + KnownLayout + Unaligned>(bytes: &mut [u8]) -> Option<(&mut T, &mut [u8])> {
    T::mut_from_prefix(bytes).ok()
}

//! Frame buffers of the harness in memory, and the ring of those that are free.
//!
//! A buffer is handled as one pointer. Its start and length stand in a cache line of its own before the headroom, as in
//! DPDK's packets. Buffers live as long as the process, as DPDK's do, so a handle is an exclusive reference.
//!
//! **Invariant:** free buffers are used in turn, the one that has been free for the longest first.
//!
//! Not here: what is written into a buffer (`trace`).

use dataplane::{Buffer, Burst};
use zerocopy::FromZeros;

use super::super::error::BenchError;
use super::super::trace::{FrameRoom, HEAD_BYTES, Pattern};

/// Headroom for tunnel headers and tags, bytes, equal to DPDK's.
const HEADROOM: usize = HEAD_BYTES;
/// Room for a frame, bytes, equal to DPDK's, so that the same amount of memory is used.
const ROOM: usize = size_of::<Pattern>();
/// Headroom and room, in pieces of the size of both the headroom and a head.
const PIECES: usize = (HEADROOM + ROOM) / HEAD_BYTES;
const BYTES: usize = PIECES * HEAD_BYTES;

/// The memory of one buffer: 35 cache lines, an odd number, so that buffers spread over all sets of a cache.
#[derive(Debug, FromZeros)]
#[repr(C, align(64))]
struct BufferMemory {
    /// Start of the frame in the lower half, its length in the upper: one store.
    extent: u32,
    /// Whether the engine took it for a packet of its own, and may have written anywhere.
    is_foreign: bool,
    /// When the frame arrived, in cycles; only if packets arrive at a pace.
    arrival: u64,
    _line: [u8; 48],
    pieces: [[u8; HEAD_BYTES]; PIECES],
}

const _: () = assert!(size_of::<BufferMemory>() == 35 * 64);

/// A buffer.
#[derive(Debug)]
pub(in super::super) struct FrameBuffer(&'static mut BufferMemory);

impl FrameBuffer {
    /// Makes it a frame of `len` bytes at the usual place, and returns the first bytes, which are to be written.
    #[inline(always)]
    fn begin(&mut self, len: u16) -> &mut [u8; HEAD_BYTES] {
        self.set_extent(HEADROOM, len.into());
        let [_, head, ..] = &mut self.0.pieces;
        head
    }

    /// Start and length of the frame.
    #[inline(always)]
    fn extent(&self) -> (usize, usize) {
        ((self.0.extent & 0xffff) as usize, (self.0.extent >> 16) as usize)
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // both are at most `BYTES`
    fn set_extent(&mut self, start: usize, len: usize) {
        self.0.extent = start as u32 | (len as u32) << 16;
    }

    /// When the frame arrived, in cycles. None for a packet of the engine.
    pub(super) fn arrival(&self) -> Option<u64> {
        (!self.0.is_foreign).then_some(self.0.arrival)
    }

    pub(super) fn set_arrival(&mut self, cycles: u64) {
        self.0.arrival = cycles;
    }

    /// Writes the bytes behind the headers of all frames, which are the same in each.
    fn fill(&mut self, pattern: &Pattern) {
        self.0.is_foreign = false;
        self.0.pieces.as_flattened_mut()[HEADROOM..].copy_from_slice(pattern);
    }
}

impl FrameRoom for FrameBuffer {
    #[inline(always)]
    fn begin(&mut self, len: u16) -> Option<&mut [u8; HEAD_BYTES]> {
        Some(self.begin(len))
    }

    /// A free buffer has it already.
    #[inline(always)]
    fn complete(&mut self, _: u16, _: usize, _: &Pattern) {}
}

impl Buffer for FrameBuffer {
    #[inline(always)]
    fn bytes(&self) -> &[u8] {
        let (start, len) = self.extent();
        self.0.pieces.as_flattened().get(start..start + len).unwrap_or(&[])
    }

    #[inline(always)]
    fn bytes_mut(&mut self) -> &mut [u8] {
        let (start, len) = self.extent();
        self.0.pieces.as_flattened_mut().get_mut(start..start + len).unwrap_or(&mut [])
    }

    #[inline]
    fn resize(&mut self, len: usize) -> bool {
        let (start, _) = self.extent();
        let fits = start + len <= BYTES;
        if fits {
            self.set_extent(start, len);
        }
        fits
    }

    #[inline(always)]
    fn truncate(&mut self, len: usize) {
        let (start, before) = self.extent();
        self.set_extent(start, before.min(len));
    }

    #[inline(always)]
    fn prepend(&mut self, bytes: usize) -> bool {
        let (start, len) = self.extent();
        let fits = bytes <= start;
        if fits {
            self.set_extent(start - bytes, len + bytes);
        }
        fits
    }

    #[inline]
    fn trim_front(&mut self, bytes: usize) {
        let (start, len) = self.extent();
        let bytes = bytes.min(len);
        self.set_extent(start + bytes, len - bytes);
    }
}

/// A ring of free buffers.
#[derive(Debug)]
pub(super) struct FreeBuffers {
    /// A power of two, with room for the buffers of all workers.
    slots: Box<[Option<FrameBuffer>]>,
    /// Where the next buffer is taken, and where the next is put, counted on beyond the slots.
    head: usize,
    tail: usize,
    pattern: Box<Pattern>,
    /// Buffers given out by `allocate` that have not been filled again.
    foreign: usize,
}

impl FreeBuffers {
    /// `count` new buffers in one piece of memory, in huge pages if they take several. `shares` workers exchange theirs.
    pub(super) fn new(count: usize, shares: usize, pattern: Pattern) -> Result<Self, BenchError> {
        let memory = BufferMemory::new_vec_zeroed(count).map_err(|_| BenchError::Buffers(count))?;
        let mut slots: Vec<_> = memory.leak().iter_mut().map(FrameBuffer).map(Some).collect();
        slots.iter_mut().flatten().for_each(|buffer| buffer.fill(&pattern));
        slots.resize_with((count * shares).next_power_of_two(), || None);
        Ok(Self { slots: slots.into(), head: 0, tail: count, pattern: Box::new(pattern), foreign: 0 })
    }

    /// The slots from a counted position on, `count` or up to the last.
    #[inline(always)]
    fn slots_at(&mut self, position: usize, count: usize) -> &mut [Option<FrameBuffer>] {
        let start = position & self.slots.len().wrapping_sub(1);
        let end = self.slots.len().min(start + count);
        self.slots.get_mut(start..end).unwrap_or(&mut [])
    }

    /// Adds up to `count` buffers to a burst.
    #[inline(always)]
    pub(super) fn take(&mut self, count: usize, burst: &mut Burst<FrameBuffer>) {
        let mut left = count.min(self.tail - self.head).min(burst.remaining_capacity());
        while left > 0 {
            let slots = self.slots_at(self.head, left);
            let taken = slots.len();
            burst.extend(slots.iter_mut().map_while(Option::take));
            self.head += taken;
            left -= taken;
        }
    }

    /// Puts the buffers of a burst back.
    #[inline(always)]
    pub(super) fn put(&mut self, burst: &mut Burst<FrameBuffer>) {
        if self.foreign > 0 {
            self.fill_foreign(burst);
        }
        let (tail, count) = (self.tail, burst.len());
        self.tail += count;
        let slots = self.slots_at(tail, count);
        if slots.len() == count {
            slots.iter_mut().zip(burst.drain(..)).for_each(|(slot, buffer)| *slot = Some(buffer));
            return;
        }
        for (position, buffer) in (tail..).zip(burst.drain(..)) {
            self.slots_at(position, 1).iter_mut().zip([buffer]).for_each(|(slot, buffer)| *slot = Some(buffer));
        }
    }

    #[cold]
    fn fill_foreign(&mut self, burst: &mut Burst<FrameBuffer>) {
        for buffer in burst.iter_mut().filter(|buffer| buffer.0.is_foreign) {
            buffer.fill(&self.pattern);
            self.foreign = self.foreign.saturating_sub(1);
        }
    }

    /// An empty buffer for a packet of the engine.
    #[cold]
    pub(super) fn allocate(&mut self) -> Option<FrameBuffer> {
        let mut one = Burst::new();
        self.take(1, &mut one);
        let mut buffer = one.pop()?;
        buffer.begin(0);
        buffer.0.is_foreign = true;
        self.foreign += 1;
        Some(buffer)
    }
}

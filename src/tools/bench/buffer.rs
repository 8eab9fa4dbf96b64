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

use super::report::BenchError;

/// Bytes at the start of a frame that are written for each packet, at most; the headers are there.
pub(super) const HEAD_BYTES: usize = 128;
/// Headroom for tunnel headers and tags, bytes, equal to DPDK's.
const HEADROOM: usize = HEAD_BYTES;
/// Room for a frame, bytes, equal to DPDK's, so that the same amount of memory is used.
const ROOM: usize = 2048;
/// Headroom and room, in pieces of the size of both the headroom and a head.
const PIECES: usize = (HEADROOM + ROOM) / HEAD_BYTES;
const BYTES: usize = PIECES * HEAD_BYTES;

/// The memory of one buffer: 35 cache lines, an odd number, so that buffers spread over all sets of a cache.
#[derive(Debug, FromZeros)]
#[repr(C, align(64))]
struct BufferMemory {
    start: u16,
    len: u16,
    /// Whether the engine took it for a packet of its own, and may have written anywhere.
    is_foreign: bool,
    _line: [u8; 59],
    pieces: [[u8; HEAD_BYTES]; PIECES],
}

const _: () = assert!(size_of::<BufferMemory>() == 35 * 64);

/// A buffer.
#[derive(Debug)]
pub(super) struct FrameBuffer(&'static mut BufferMemory);

impl FrameBuffer {
    /// Makes it a frame of `len` bytes at the usual place, and returns the first bytes, which are to be written.
    #[inline(always)]
    pub(super) fn begin(&mut self, len: u16) -> &mut [u8; HEAD_BYTES] {
        self.0.start = HEADROOM as u16;
        self.0.len = len;
        let [_, head, ..] = &mut self.0.pieces;
        head
    }

    /// Writes the bytes behind the headers of all frames, which are the same in each.
    fn fill(&mut self, pattern: &[u8; ROOM]) {
        self.0.is_foreign = false;
        self.0.pieces.as_flattened_mut()[HEADROOM..].copy_from_slice(pattern);
    }

    /// Whether [`FreeBuffers::allocate`] gave it out since it was last filled.
    fn is_foreign(&self) -> bool {
        self.0.is_foreign
    }
}

impl Buffer for FrameBuffer {
    #[inline(always)]
    fn bytes(&self) -> &[u8] {
        let (start, end) = (usize::from(self.0.start), usize::from(self.0.start) + usize::from(self.0.len));
        self.0.pieces.as_flattened().get(start..end).unwrap_or(&[])
    }

    #[inline(always)]
    fn bytes_mut(&mut self) -> &mut [u8] {
        let (start, end) = (usize::from(self.0.start), usize::from(self.0.start) + usize::from(self.0.len));
        self.0.pieces.as_flattened_mut().get_mut(start..end).unwrap_or(&mut [])
    }

    #[inline]
    fn resize(&mut self, len: usize) -> bool {
        let fits = usize::from(self.0.start) + len <= BYTES;
        if fits {
            self.0.len = len as u16;
        }
        fits
    }

    #[inline]
    fn prepend(&mut self, len: usize) -> bool {
        let fits = len <= usize::from(self.0.start);
        if fits {
            self.0.start -= len as u16;
            self.0.len += len as u16;
        }
        fits
    }

    #[inline]
    fn trim_front(&mut self, len: usize) {
        let len = len.min(self.0.len.into()) as u16;
        self.0.start += len;
        self.0.len -= len;
    }
}

/// The bytes of a frame from its start on, as far as all frames have them in common.
pub(super) type Pattern = [u8; ROOM];

/// A ring of free buffers.
#[derive(Debug)]
pub(super) struct FreeBuffers {
    /// A power of two; with room for the buffers of all workers.
    slots: Box<[Option<FrameBuffer>]>,
    /// Numbers of the next buffer to take and of the next place to put one, modulo the slots.
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

    /// Number of free buffers.
    pub(super) fn len(&self) -> usize {
        self.tail - self.head
    }

    /// The slot of a number.
    #[inline(always)]
    fn slot(&mut self, number: usize) -> Option<&mut Option<FrameBuffer>> {
        let mask = self.slots.len().wrapping_sub(1);
        self.slots.get_mut(number & mask)
    }

    /// Adds up to `count` buffers to a burst.
    #[inline(always)]
    pub(super) fn take(&mut self, count: usize, burst: &mut Burst<FrameBuffer>) {
        let count = count.min(self.len()).min(burst.remaining_capacity());
        let start = self.head & self.slots.len().wrapping_sub(1);
        match self.slots.get_mut(start..start + count) {
            Some(slots) => slots.iter_mut().filter_map(Option::take).for_each(|buffer| burst.push(buffer)),
            None => (self.head..self.head + count).for_each(|number| burst.extend(self.slot(number).and_then(Option::take))),
        }
        self.head += count;
    }

    /// Puts the buffers of a burst back.
    #[inline(always)]
    pub(super) fn put(&mut self, burst: &mut Burst<FrameBuffer>) {
        if self.foreign > 0 {
            self.fill_foreign(burst);
        }
        let count = burst.len();
        let start = self.tail & self.slots.len().wrapping_sub(1);
        let tail = self.tail;
        self.tail += count;
        match self.slots.get_mut(start..start + count) {
            Some(slots) => slots.iter_mut().zip(burst.drain(..)).for_each(|(slot, buffer)| *slot = Some(buffer)),
            None => {
                for (number, buffer) in (tail..).zip(burst.drain(..)) {
                    if let Some(slot) = self.slot(number) {
                        *slot = Some(buffer);
                    }
                }
            }
        }
    }

    #[cold]
    fn fill_foreign(&mut self, burst: &mut Burst<FrameBuffer>) {
        for buffer in burst.iter_mut().filter(|buffer| buffer.is_foreign()) {
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

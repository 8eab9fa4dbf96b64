//! Frame buffers of the harness in memory, and the queue of those that are free.
//!
//! A buffer is handled as one pointer. Its start and length stand in a cache line of its own before the headroom, as in
//! DPDK's packets. Buffers live as long as the process, as DPDK's do, so a handle is an exclusive reference.
//!
//! **Invariant:** full bursts of free buffers are used in turn. Other buffers wait until a burst of them is full, or until
//! one is taken that is not.
//!
//! Not here: what is written into a buffer (`trace`).

use std::collections::VecDeque;

use dataplane::{BURST, Buffer, Burst};
use zerocopy::FromZeros;

use super::super::error::BenchError;
use super::super::trace::{FrameRoom, HEAD_BYTES, Pattern};

/// Headroom for tunnel headers and tags, bytes, equal to DPDK's.
const HEADROOM: usize = HEAD_BYTES;
/// Room for a frame, bytes, equal to DPDK's, so that nearly the same amount of memory is used.
const ROOM: usize = size_of::<Pattern>();
/// Maximum offset of a frame, and its maximum length, bytes. With both as masks, no access to a frame needs a check of bounds,
/// as with DPDK's packets.
const START_MAX: usize = 2 * HEADROOM - 1;
const LEN_MAX: usize = ROOM - 1;
/// The memory for both, in pieces of the size of both the headroom and a head.
const PIECES: usize = (2 * HEADROOM + ROOM) / HEAD_BYTES;
const BYTES: usize = PIECES * HEAD_BYTES;
const _: () = assert!(START_MAX + LEN_MAX <= BYTES && (START_MAX + 1).is_power_of_two() && (LEN_MAX + 1).is_power_of_two());

/// The memory of one buffer: 37 cache lines, an odd number, so that buffers spread over all sets of a cache.
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

const _: () = assert!(size_of::<BufferMemory>() == 37 * 64);

/// A buffer.
#[derive(Debug)]
pub(crate) struct FrameBuffer(&'static mut BufferMemory);

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
        (self.0.extent as usize & START_MAX, (self.0.extent >> 16) as usize & LEN_MAX)
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
        self.0.pieces.as_flattened_mut()[HEADROOM..HEADROOM + ROOM].copy_from_slice(pattern);
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
    /// Without a look at the length.
    #[inline(always)]
    fn prefetch(&self, offset: isize) {
        let start = self.0.pieces.as_flattened().as_ptr().wrapping_add(self.extent().0);
        dataplane::prefetch_to_write(start.wrapping_offset(offset));
    }

    #[inline(always)]
    fn prefetch_metadata(&self) {
        dataplane::prefetch_to_write((&raw const self.0.extent).cast());
    }

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
        let fits = len <= LEN_MAX;
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
        let fits = bytes <= start && len + bytes <= LEN_MAX;
        if fits {
            self.set_extent(start - bytes, len + bytes);
        }
        fits
    }

    #[inline]
    fn trim_front(&mut self, bytes: usize) {
        let (start, len) = self.extent();
        let bytes = bytes.min(len);
        if start + bytes <= START_MAX {
            return self.set_extent(start + bytes, len - bytes);
        }
        // No frame of the bench is trimmed so far: behind it the pattern ends earlier.
        self.0.pieces.as_flattened_mut().copy_within(start + bytes..start + len, start);
        self.set_extent(start, len - bytes);
    }
}

/// The free buffers.
#[derive(Debug)]
pub(super) struct FreeBuffers {
    /// Full bursts, the one that has been free for the longest first.
    bursts: VecDeque<Burst<FrameBuffer>>,
    /// What is left of a burst of which some were taken, and buffers that do not fill a burst yet.
    begun: Burst<FrameBuffer>,
    gathered: Burst<FrameBuffer>,
    pattern: Box<Pattern>,
    /// Buffers given out by `allocate` that have not been filled again.
    foreign: usize,
}

impl FreeBuffers {
    /// `count` new buffers in one piece of memory, in huge pages if they take several. `shares` workers exchange theirs.
    pub(super) fn new(count: usize, shares: usize, pattern: Pattern) -> Result<Self, BenchError> {
        let memory = BufferMemory::new_vec_zeroed(count).map_err(|_| BenchError::Buffers(count))?;
        let bursts = VecDeque::with_capacity((count * shares).div_ceil(BURST) + 1);
        let (begun, gathered, pattern) = (Burst::new(), Burst::new(), Box::new(pattern));
        let mut free = Self { bursts, begun, gathered, pattern, foreign: 0 };
        for buffer in memory.leak() {
            let mut buffer = FrameBuffer(buffer);
            buffer.fill(&free.pattern);
            free.gather(buffer);
        }
        Ok(free)
    }

    /// Adds up to `count` buffers to a burst.
    #[inline(always)]
    pub(super) fn take(&mut self, count: usize, burst: &mut Burst<FrameBuffer>) {
        if count == BURST
            && burst.is_empty()
            && let Some(full) = self.bursts.pop_front()
        {
            *burst = full;
        } else {
            self.take_some(count, burst);
        }
    }

    #[inline(never)]
    fn take_some(&mut self, count: usize, burst: &mut Burst<FrameBuffer>) {
        for _ in 0..count.min(burst.remaining_capacity()) {
            if self.begun.is_empty() {
                self.begun = self.bursts.pop_front().unwrap_or_else(|| std::mem::take(&mut self.gathered));
            }
            let Some(buffer) = self.begun.pop() else { break };
            burst.push(buffer);
        }
    }

    /// Puts the buffers of a burst back.
    #[inline(always)]
    pub(super) fn put(&mut self, burst: &mut Burst<FrameBuffer>) {
        if self.foreign > 0 {
            self.fill_foreign(burst);
        }
        if burst.is_full() {
            self.bursts.push_back(std::mem::take(burst));
        } else {
            burst.drain(..).for_each(|buffer| self.gather(buffer));
        }
    }

    #[inline(never)]
    fn gather(&mut self, buffer: FrameBuffer) {
        self.gathered.push(buffer);
        if self.gathered.is_full() {
            self.bursts.push_back(std::mem::take(&mut self.gathered));
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn free(count: usize) -> FreeBuffers {
        FreeBuffers::new(count, 1, [0; size_of::<Pattern>()]).unwrap()
    }

    fn taken(free: &mut FreeBuffers, count: usize) -> Burst<FrameBuffer> {
        let mut burst = Burst::new();
        free.take(count, &mut burst);
        burst
    }

    fn addresses(burst: &Burst<FrameBuffer>) -> Vec<usize> {
        burst.iter().map(|buffer| std::ptr::from_ref(&*buffer.0).addr()).collect()
    }

    #[test]
    fn full_bursts_are_used_in_turn() {
        let mut free = free(8 * BURST);
        let mut order: Vec<Vec<usize>> = Vec::new();
        for _ in 0..16 {
            let mut burst = taken(&mut free, BURST);
            assert_eq!(burst.len(), BURST);
            order.push(addresses(&burst));
            free.put(&mut burst);
        }
        let (first, second) = order.split_at(8);
        assert_eq!(first, second);
        assert!(!first[1..].contains(&first[0]));
    }

    proptest! {
        #[test]
        fn no_buffer_is_lost_or_given_out_twice(count in 1..300_usize, sizes in prop::collection::vec((0..=BURST, any::<bool>()), 0..60)) {
            let mut free = free(count);
            let mut out: Vec<Burst<FrameBuffer>> = Vec::new();
            for (size, is_put) in sizes {
                if is_put && !out.is_empty() {
                    let mut burst = out.remove(size % out.len());
                    free.put(&mut burst);
                    prop_assert!(burst.is_empty());
                } else {
                    let before: usize = out.iter().map(|burst| burst.len()).sum();
                    let burst = taken(&mut free, size);
                    prop_assert_eq!(burst.len(), size.min(count - before));
                    out.push(burst);
                }
            }
            out.extend(std::iter::from_fn(|| Some(taken(&mut free, BURST)).filter(|burst| !burst.is_empty())));
            let mut all: Vec<usize> = out.iter().flat_map(addresses).collect();
            all.sort_unstable();
            all.dedup();
            prop_assert_eq!(all.len(), count);
        }
    }
}

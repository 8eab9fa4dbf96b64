//! A port in memory, for tests, `replay` and `bench --io mem`.
//!
//! Not here: timing; a memory port neither waits nor loses frames unless `room` is limited.

use std::collections::VecDeque;

use super::io::{Burst, Port};
use crate::wire::Buffer;

/// A frame in memory.
#[derive(Clone, Debug, Default)]
pub struct MemoryBuffer {
    /// Headroom, and the frame after it.
    bytes: Vec<u8>,
    /// Where the frame begins.
    start: usize,
    /// An identifier for the owner's use; 0 for buffers that the engine allocated.
    pub id: u64,
    /// The hash that a network card would report.
    pub rss_hash: Option<u32>,
}

/// Capacity of a buffer, bytes: the largest jumbo frame of common NICs.
const ROOM: usize = 9216;
/// Room for headers in front of a frame, bytes, as in DPDK's packets.
const HEADROOM: usize = 128;

impl MemoryBuffer {
    /// A buffer with this frame.
    #[must_use]
    pub fn new(frame: &[u8], id: u64) -> Self {
        Self { bytes: [&[0; HEADROOM], frame].concat(), start: HEADROOM, id, rss_hash: None }
    }
}

impl MemoryBuffer {
    /// Makes room for this many bytes before a frame that has less.
    #[cold]
    fn grow_in_front(&mut self, len: usize) {
        self.bytes.splice(..0, std::iter::repeat_n(0, len - self.start));
        self.start = 0;
    }
}

/// Buffers are equal if their frames are, whatever room they have in front.
impl PartialEq for MemoryBuffer {
    fn eq(&self, other: &Self) -> bool {
        (self.bytes(), self.id, self.rss_hash) == (other.bytes(), other.id, other.rss_hash)
    }
}

impl Eq for MemoryBuffer {}

impl Buffer for MemoryBuffer {
    #[inline(always)]
    fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    #[inline(always)]
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..]
    }

    fn resize(&mut self, len: usize) -> bool {
        if len > ROOM {
            return false;
        }
        self.bytes.resize(self.start + len, 0);
        true
    }

    #[inline]
    fn truncate(&mut self, len: usize) {
        self.bytes.truncate(self.start + len);
    }

    #[inline(always)]
    fn prepend(&mut self, len: usize) -> bool {
        if self.bytes().len() + len > ROOM {
            return false;
        }
        match self.start.checked_sub(len) {
            Some(start) => self.start = start,
            None => self.grow_in_front(len),
        }
        true
    }

    fn rss_hash(&self) -> Option<u32> {
        self.rss_hash
    }

    fn trim_front(&mut self, len: usize) {
        self.start += len.min(self.bytes().len());
    }
}

/// A port of two queues of frames. `room` limits the frames in [`MemoryPort::sent`].
#[derive(Debug)]
pub struct MemoryPort {
    /// Frames that will be received, oldest first.
    pub arriving: VecDeque<MemoryBuffer>,
    /// Frames that were transmitted, oldest first.
    pub sent: VecDeque<MemoryBuffer>,
    /// Maximum number of frames in `sent`; further ones are refused.
    pub room: usize,
    /// Whether no buffer can be allocated.
    pub is_short: bool,
}

impl Default for MemoryPort {
    fn default() -> Self {
        Self { arriving: VecDeque::new(), sent: VecDeque::new(), room: usize::MAX, is_short: false }
    }
}

impl Port for MemoryPort {
    type Buffer = MemoryBuffer;

    fn receive(&mut self, burst: &mut Burst<MemoryBuffer>) {
        let n = burst.remaining_capacity().min(self.arriving.len());
        burst.extend(self.arriving.drain(..n));
    }

    fn transmit(&mut self, burst: &mut Burst<MemoryBuffer>) {
        let n = burst.len().min(self.room.saturating_sub(self.sent.len()));
        self.sent.extend(burst.drain(..n));
    }

    fn allocate(&mut self) -> Option<MemoryBuffer> {
        (!self.is_short).then(MemoryBuffer::default)
    }

    fn release(&mut self, burst: &mut Burst<MemoryBuffer>) {
        burst.clear();
    }
}

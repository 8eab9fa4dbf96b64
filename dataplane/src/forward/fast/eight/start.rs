//! The start of a frame: what recognising and rewriting a packet reads and writes.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::super::follow::PacketHead;
use super::super::record::{TAG, UNTAGGED};
use crate::wire::Buffer;
use crate::wire::processor::LANES;

/// Offset of the IP header of a frame with one VLAN tag.
pub(super) const TAGGED: usize = UNTAGGED + TAG;

/// The link header of `AT` bytes, and the head of the packet.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(in crate::forward::fast) struct Start<const AT: usize, H> {
    pub(super) link: [u8; AT],
    pub(super) head: H,
}

/// The starts of eight frames.
pub(in crate::forward::fast) type Starts<'b, const AT: usize, H> = [&'b mut Start<AT, H>; LANES];

impl<const AT: usize, H: PacketHead> Start<AT, H> {
    /// The start of a frame; `None` if the frame is shorter.
    #[inline(always)]
    pub(super) fn of(frame: &[u8]) -> Option<&Self> {
        Some(Self::ref_from_prefix(frame).ok()?.0)
    }

    /// The same, to be changed.
    #[inline(always)]
    pub(super) fn of_mut(frame: &mut [u8]) -> Option<&mut Self> {
        Some(Self::mut_from_prefix(frame).ok()?.0)
    }

    /// Sixteen bytes from an offset on.
    #[inline(always)]
    pub(super) fn bytes_at(&self, offset: usize) -> [u8; 16] {
        let mut row = [0; 16];
        row.copy_from_slice(&self.as_bytes()[offset..offset + 16]);
        row
    }
}

/// The starts of the frames of eight buffers, by a function for one frame. Written out, since the compiler may leave `map`
/// as a call.
macro_rules! starts_of {
    ($group:ident, $start:ident, $bytes:ident) => {{
        let [a, b, c, d, e, f, g, h] = $group;
        all([
            Start::$start(a.$bytes()),
            Start::$start(b.$bytes()),
            Start::$start(c.$bytes()),
            Start::$start(d.$bytes()),
            Start::$start(e.$bytes()),
            Start::$start(f.$bytes()),
            Start::$start(g.$bytes()),
            Start::$start(h.$bytes()),
        ])
    }};
}

/// The starts of eight frames, to be read; `None` if one of them is shorter.
#[inline(always)]
pub(super) fn starts_read<const AT: usize, H: PacketHead, B: Buffer>(group: &[B; LANES]) -> Option<[&Start<AT, H>; LANES]> {
    starts_of!(group, of, bytes)
}

/// The starts of eight frames; `None` if one of them is shorter.
#[inline(always)]
pub(super) fn starts<const AT: usize, H: PacketHead, B: Buffer>(group: &mut [B; LANES]) -> Option<Starts<'_, AT, H>> {
    starts_of!(group, of_mut, bytes_mut)
}

/// All values, or none.
#[inline(always)]
pub(super) fn all<T>(values: [Option<T>; LANES]) -> Option<[T; LANES]> {
    let [a, b, c, d, e, f, g, h] = values;
    Some([a?, b?, c?, d?, e?, f?, g?, h?])
}

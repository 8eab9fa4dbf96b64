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

/// The starts of eight frames, to be read; `None` if one of them is shorter.
#[inline(always)]
pub(super) fn starts_read<const AT: usize, H: PacketHead, B: Buffer>(group: &[B; LANES]) -> Option<[&Start<AT, H>; LANES]> {
    // Without `map`, which the compiler may leave as a call.
    let [a, b, c, d, e, f, g, h] = group;
    all([
        Start::of(a.bytes()),
        Start::of(b.bytes()),
        Start::of(c.bytes()),
        Start::of(d.bytes()),
        Start::of(e.bytes()),
        Start::of(f.bytes()),
        Start::of(g.bytes()),
        Start::of(h.bytes()),
    ])
}

/// The starts of eight frames; `None` if one of them is shorter.
#[inline(always)]
pub(super) fn starts<const AT: usize, H: PacketHead, B: Buffer>(group: &mut [B; LANES]) -> Option<Starts<'_, AT, H>> {
    // Without `map`, which the compiler may leave as a call.
    let [a, b, c, d, e, f, g, h] = group;
    all([
        Start::of_mut(a.bytes_mut()),
        Start::of_mut(b.bytes_mut()),
        Start::of_mut(c.bytes_mut()),
        Start::of_mut(d.bytes_mut()),
        Start::of_mut(e.bytes_mut()),
        Start::of_mut(f.bytes_mut()),
        Start::of_mut(g.bytes_mut()),
        Start::of_mut(h.bytes_mut()),
    ])
}

/// All values, or none.
#[inline(always)]
pub(super) fn all<T>(values: [Option<T>; LANES]) -> Option<[T; LANES]> {
    let [a, b, c, d, e, f, g, h] = values;
    Some([a?, b?, c?, d?, e?, f?, g?, h?])
}

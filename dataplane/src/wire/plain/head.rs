//! The heads of plain packets: IPv4 without options or IPv6 without extension headers, then at least twenty bytes of a TCP
//! or UDP header. Where each field stands in them, for one packet and for eight.
//!
//! **Invariant:** a head is a whole one, so no access to its fields can fail.
//!
//! Not here: whether a frame has a plain packet (`recognise`).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::shape::Shape;
use crate::wire::address::{Address, Tuple, TupleKey, WireKey};
use crate::wire::buffer::Buffer;
use crate::wire::ip::{Ipv4, Ipv6};
use crate::wire::link::{Ethernet, TAG_BYTES};
use crate::wire::processor::LANES;

/// Offset of the IP header in a frame without VLAN tags, and in one with a tag.
pub(crate) const UNTAGGED: usize = Ethernet::BYTES as usize;
pub(crate) const TAGGED: usize = UNTAGGED + TAG_BYTES as usize;

/// Bytes of the transport header in a head: those of a TCP header without options.
const TRANSPORT: usize = 20;

/// Offsets in a head of IPv4.
pub(crate) mod v4 {
    pub(crate) const IDENTIFICATION: usize = 4;
    /// TTL and protocol, then the checksum of the header.
    pub(crate) const HOPS: usize = 8;
    pub(crate) const CHECKSUM: usize = 10;
    /// Addresses and ports.
    pub(crate) const KEY: usize = 12;
    pub(crate) const TRANSPORT: usize = 20;
}

/// Offsets in a head of IPv6.
pub(crate) mod v6 {
    pub(crate) const HOP_LIMIT: usize = 7;
    /// Addresses and ports.
    pub(crate) const KEY: usize = 8;
    pub(crate) const TRANSPORT: usize = 40;
}

/// Offsets in a TCP header.
pub(crate) mod tcp {
    pub(crate) const SEQUENCE: usize = 4;
    pub(crate) const CHECKSUM: usize = 16;
}

/// Offsets in a UDP header.
pub(crate) mod udp {
    pub(crate) const CHECKSUM: usize = 6;
}

/// The head of a packet of IPv4.
pub(crate) type HeadV4 = [u8; v4::TRANSPORT + TRANSPORT];
/// The head of a packet of IPv6.
pub(crate) type HeadV6 = [u8; v6::TRANSPORT + TRANSPORT];

/// The head of a packet.
pub(crate) trait Head: FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned + Copy {
    /// Bytes of it.
    const BYTES: usize;
    /// The head of the packet at an offset of a frame; `None` if the frame is shorter.
    fn of(frame: &[u8], offset: usize) -> Option<&Self>;
    /// As [`Head::of`], to be changed.
    fn of_mut(frame: &mut [u8], offset: usize) -> Option<&mut Self>;
}

impl<const BYTES: usize> Head for [u8; BYTES] {
    const BYTES: usize = BYTES;

    #[inline(always)]
    fn of(frame: &[u8], offset: usize) -> Option<&Self> {
        frame.get(offset..)?.first_chunk()
    }

    #[inline(always)]
    fn of_mut(frame: &mut [u8], offset: usize) -> Option<&mut Self> {
        frame.get_mut(offset..)?.first_chunk_mut()
    }
}

/// A family and the heads of its plain packets.
pub(crate) trait PlainFamily: Address {
    /// The head of a packet.
    type Head: Head;
    /// Bytes of the IP header.
    const NETWORK: usize;
    /// [`Shape::V4`] or [`Shape::V6`].
    const KIND: u8;

    /// The addresses and ports in a head.
    fn key(head: &Self::Head) -> Self::Key;
    /// The sequence number of a TCP segment.
    fn sequence(head: &Self::Head) -> u32;
    /// The IP header and the transport header.
    fn parts(head: &mut Self::Head) -> (&mut [u8], &mut [u8]);

    /// Whether the addresses and ports in a head are those of a key.
    #[inline(always)]
    fn has_key(head: &Self::Head, key: &Self::Key) -> bool {
        Self::key(head) == *key
    }
}

impl PlainFamily for u32 {
    type Head = HeadV4;
    const NETWORK: usize = Ipv4::BYTES as usize;
    const KIND: u8 = Shape::V4;

    #[inline(always)]
    fn key(head: &HeadV4) -> WireKey<3> {
        WireKey::<3>::read_at(head, v4::KEY)
    }

    #[inline(always)]
    fn sequence(head: &HeadV4) -> u32 {
        number(head, v4::TRANSPORT + tcp::SEQUENCE)
    }

    #[inline(always)]
    fn parts(head: &mut HeadV4) -> (&mut [u8], &mut [u8]) {
        head.split_at_mut(v4::TRANSPORT)
    }
}

impl PlainFamily for u128 {
    type Head = HeadV6;
    const NETWORK: usize = Ipv6::BYTES as usize;
    const KIND: u8 = Shape::V6;

    #[inline(always)]
    fn key(head: &HeadV6) -> WireKey<9> {
        WireKey::<9>::read_at(head, v6::KEY)
    }

    #[inline(always)]
    fn sequence(head: &HeadV6) -> u32 {
        number(head, v6::TRANSPORT + tcp::SEQUENCE)
    }

    #[inline(always)]
    fn parts(head: &mut HeadV6) -> (&mut [u8], &mut [u8]) {
        head.split_at_mut(v6::TRANSPORT)
    }
}

/// The tuple of a plain packet at an offset of a frame; `None` if the frame is shorter.
#[inline(always)]
pub(crate) fn tuple_at<A: PlainFamily>(frame: &[u8], offset: usize, protocol: u8) -> Option<Tuple<A>> {
    Some(A::key(A::Head::of(frame, offset)?).tuple(protocol))
}

#[inline(always)]
fn number(head: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]])
}

/// The link header of `AT` bytes, and the head of the packet.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Start<const AT: usize, H> {
    pub(crate) link: [u8; AT],
    pub(crate) head: H,
}

/// The starts of eight frames.
pub(crate) type Starts<'b, const AT: usize, H> = [&'b mut Start<AT, H>; LANES];

impl<const AT: usize, H: Head> Start<AT, H> {
    /// The start of a frame; `None` if the frame is shorter.
    #[inline(always)]
    pub(crate) fn of(frame: &[u8]) -> Option<&Self> {
        Some(Self::ref_from_prefix(frame).ok()?.0)
    }

    /// The same, to be changed.
    #[inline(always)]
    fn of_mut(frame: &mut [u8]) -> Option<&mut Self> {
        Some(Self::mut_from_prefix(frame).ok()?.0)
    }

    /// Sixteen bytes from an offset on.
    #[inline(always)]
    pub(crate) fn bytes_at(&self, offset: usize) -> [u8; 16] {
        let mut row = [0; 16];
        row.copy_from_slice(&self.as_bytes()[offset..offset + 16]);
        row
    }
}

/// The starts of eight frames; `None` if one of them is shorter. Written out, since the compiler may leave `map` as a call.
#[inline(always)]
pub(crate) fn starts<const AT: usize, H: Head, B: Buffer>(group: &mut [B; LANES]) -> Option<Starts<'_, AT, H>> {
    let [a, b, c, d, e, f, g, h] = group;
    Some([
        Start::of_mut(a.bytes_mut())?,
        Start::of_mut(b.bytes_mut())?,
        Start::of_mut(c.bytes_mut())?,
        Start::of_mut(d.bytes_mut())?,
        Start::of_mut(e.bytes_mut())?,
        Start::of_mut(f.bytes_mut())?,
        Start::of_mut(g.bytes_mut())?,
        Start::of_mut(h.bytes_mut())?,
    ])
}

/// The starts of eight frames to be read. In place of one that its frame is too short for, that of the frame in `lane`; `None`
/// if that is too short itself.
#[inline(always)]
pub(crate) fn starts_read<const AT: usize, H: Head, B: Buffer>(
    group: &[B; LANES],
    lane: usize,
) -> Option<[&Start<AT, H>; LANES]> {
    let own = Start::of(group.get(lane)?.bytes())?;
    let [a, b, c, d, e, f, g, h] = group;
    Some([
        Start::of(a.bytes()).unwrap_or(own),
        Start::of(b.bytes()).unwrap_or(own),
        Start::of(c.bytes()).unwrap_or(own),
        Start::of(d.bytes()).unwrap_or(own),
        Start::of(e.bytes()).unwrap_or(own),
        Start::of(f.bytes()).unwrap_or(own),
        Start::of(g.bytes()).unwrap_or(own),
        Start::of(h.bytes()).unwrap_or(own),
    ])
}

//! The first loop of the fast path: recognises packets by a few comparisons, and hashes their addresses and ports as
//! they stand in the frame.
//!
//! **Invariant:** a recognised packet is one that `parse` accepts, with the same tuple, length, flags and offset.
//!
//! Not here: whether the packet has a flow.

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::flow::{Candidate, FlowTable, UDP_SIGNAL};
use crate::forward::decide::FlowTables;
use crate::port::{BURST, FrameFilter, Link, PortIndex};
use crate::snapshot::Snapshot;
use crate::wire::checksum::header_holds;
use crate::wire::processor::LANES;
use crate::wire::{Address, Buffer, Ipv4, TAG_BYTES, Tags, WireKey, protocol, tcp_flags};

/// Bytes of an IPv4 header without options and a TCP header without options.
pub(super) const HEAD_V4: usize = 40;
/// The start of an untagged frame of IPv4.
type StartV4 = [u8; UNTAGGED + HEAD_V4];
/// Bytes of an IPv6 header and a TCP header without options.
pub(super) const HEAD_V6: usize = 60;
/// Offset of the IP header of an untagged frame.
pub(super) const UNTAGGED: usize = 14;
/// Bytes of a VLAN tag.
pub(super) const TAG: usize = TAG_BYTES as usize;
/// Bytes of the EtherType, which is looked at together with the IP header.
const TYPE: usize = 2;

/// The first word after the addresses of a frame, or after its tags: the EtherType, then version and header length of IPv4
/// (the version of IPv6), then other bits that do not matter.
const V4_MASK: u32 = u32::from_ne_bytes([0xff, 0xff, 0xff, 0]);
const V4_START: u32 = u32::from_ne_bytes([0x08, 0x00, Ipv4::PLAIN, 0]);
const V6_MASK: u32 = u32::from_ne_bytes([0xff, 0xff, 0xf0, 0]);
const V6_START: u32 = u32::from_ne_bytes([0x86, 0xdd, 0x60, 0]);
/// The word of an IPv4 header with flags, fragment offset, TTL and protocol: of a whole packet, all of it but "do not
/// fragment", a reserved bit and the TTL is 0, apart from the protocol.
const WHOLE_MASK: u32 = u32::from_ne_bytes([0x3f, 0xff, 0, 0xff]);
const DONT_FRAGMENT: u8 = 0x40;

/// What the loops know of a packet. 24 bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(in crate::forward) struct Record {
    /// Hash of its addresses and ports.
    pub(super) hash: u64,
    /// What its headers say. Beside the hash, so that one store may set both.
    pub(super) shape: Shape,
    /// Its probable flow.
    pub(super) candidate: Candidate,
    /// The link on which it arrived.
    pub(super) link: Link,
}

/// What the loops know of the headers of a packet. 8 bytes, which are stored at once.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(in crate::forward) struct Shape {
    /// Bytes of the packet from its IP header on.
    pub(super) packet_len: u16,
    /// Offset of its IP header in the frame.
    pub(super) network_offset: u8,
    /// The port by which it leaves, or [`STAYS`].
    pub(super) way: u8,
    /// The lower five TCP flags or [`UDP_SIGNAL`]; [`Record::V4`] or [`Record::V6`]. 0 for a packet that is left.
    kind: u8,
    /// [`Shape::PADDED`] and [`Shape::FRAGMENTABLE`].
    more: u8,
    _unused: [u8; 2],
}

const _: () = assert!(size_of::<Record>() == 24);

/// Packets that each loop handles at a time, of a burst of `len`: equal parts of at most [`PART_MAX`], but for whole
/// vectors, and at least two. While one part is worked on, the memory arrives that others need.
#[inline(always)]
pub(super) fn part_len(len: usize) -> usize {
    len.div_ceil(len.div_ceil(PART_MAX).max(2)).next_multiple_of(LANES).max(LANES)
}

/// Maximum number of packets in a part. Positions in it are bits of a `u32`.
pub(super) const PART_MAX: usize = 32;
/// Maximum number of parts of a burst: by whole vectors, no part is smaller.
pub(super) const PARTS_MAX: usize = BURST / LANES;
const _: () = assert!(PART_MAX <= u32::BITS as usize && PART_MAX.is_multiple_of(LANES));

/// In place of a port: the packet stays in the burst, or goes to another worker. There are fewer ports.
pub(super) const STAYS: u8 = u8::MAX;

impl Shape {
    /// Bytes follow the packet, to be removed: with them it might exceed the MTU.
    pub(super) const PADDED: u8 = 1;
    /// Routers may fragment the packet.
    pub(super) const FRAGMENTABLE: u8 = 2;

    /// See [`Shape::PADDED`].
    #[inline(always)]
    pub(super) fn is_padded(self) -> bool {
        self.more & Self::PADDED != 0
    }

    /// See [`Shape::FRAGMENTABLE`].
    #[inline(always)]
    pub(super) fn may_fragment(self) -> bool {
        self.more & Self::FRAGMENTABLE != 0
    }
}

impl Record {
    pub(super) const V4: u8 = 0x40;
    pub(super) const V6: u8 = 0x80;
    pub(super) const FAMILY: u8 = Self::V4 | Self::V6;
    /// Set in the kinds of packets that open connections, and of the answers to them.
    pub(super) const SYN: u8 = tcp_flags::SYN;

    /// A packet that the fast path leaves.
    pub(super) fn left() -> Self {
        Self {
            hash: 0,
            candidate: Candidate::NONE,
            link: PortIndex(0).into(),
            shape: Shape { packet_len: 0, network_offset: 0, way: STAYS, kind: 0, more: 0, _unused: [0; 2] },
        }
    }

    /// The hash and the shape as bytes.
    #[inline(always)]
    pub(super) fn row(&self) -> [u8; 16] {
        let (hash, shape): ([u8; 8], [u8; 8]) = (self.hash.to_ne_bytes(), zerocopy::transmute!(self.shape));
        zerocopy::transmute!([hash, shape])
    }

    /// Sets the hash and the shape from their bytes, and the link.
    #[inline(always)]
    pub(super) fn set(&mut self, hash_and_shape: [u8; 16], link: Link) {
        let [hash, shape]: [[u8; 8]; 2] = zerocopy::transmute!(hash_and_shape);
        (self.hash, self.shape, self.link) = (u64::from_ne_bytes(hash), zerocopy::transmute!(shape), link);
    }

    /// Leaves the packet, as if it were not recognised.
    #[inline(always)]
    pub(super) fn leave(&mut self) {
        (self.shape.kind, self.shape.way) = (0, STAYS);
    }

    /// Whether the packet opens a TCP connection.
    #[inline(always)]
    pub(super) fn opens(&self) -> bool {
        const OTHERS: u8 = UDP_SIGNAL | tcp_flags::ACK | tcp_flags::RST | tcp_flags::FIN;
        self.shape.kind & (OTHERS | Self::SYN) == Self::SYN
    }

    /// [`Record::V4`], [`Record::V6`], or 0 for a packet that is left.
    #[inline(always)]
    pub(super) fn family(&self) -> u8 {
        self.shape.kind & Self::FAMILY
    }

    /// Whether the last packet of a burst was recognised and had one VLAN tag.
    pub(super) fn ends_tagged(burst: &[Self]) -> bool {
        let is_tagged = |last: &Self| last.family() != 0 && usize::from(last.shape.network_offset) == UNTAGGED + TAG;
        burst.last().is_some_and(is_tagged)
    }

    /// Whether the packet is recognised and of the family with this bit.
    #[inline(always)]
    pub(super) fn is_of(&self, family: u8) -> bool {
        self.shape.kind & family != 0
    }

    /// The lower five TCP flags or [`UDP_SIGNAL`].
    #[inline(always)]
    pub(super) fn signal(&self) -> u8 {
        self.shape.kind & !Self::FAMILY
    }

    #[inline(always)]
    pub(super) fn is_udp(&self) -> bool {
        self.shape.kind & UDP_SIGNAL != 0
    }

    /// The transport protocol number.
    #[inline(always)]
    pub(super) fn protocol(&self) -> u8 {
        protocol_of(self.shape.kind)
    }
}

/// The bit of a hash among those of flows of which a packet was left.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // the lower six bits
pub(super) fn bit_of(hash: u64) -> u64 {
    // As a rotation, so that compilers do not compute it ahead for packets that need only a test of the bit.
    1_u64.rotate_left((hash & 63) as u32)
}

#[inline(always)]
fn protocol_of(kind: u8) -> u8 {
    if kind & UDP_SIGNAL == 0 { protocol::TCP } else { protocol::UDP }
}

/// What is known of the frames of a burst so far: the tag of the last one with one known tag, which most tagged frames of a
/// burst share; and which kinds of frames there were.
#[derive(Clone, Copy, Debug)]
pub(super) struct FramesSoFar {
    /// As it stands in the frame, without priority. All bits are set if there was none: the mask leaves no tag all bits.
    tag: u32,
    link: Link,
    /// Whether there was any frame with tags of a known link.
    pub(super) any_tagged: bool,
    /// Whether there was any frame that is not recognised.
    pub(super) any_unrecognised: bool,
    /// The bit [`DONT_FRAGMENT`], if all IPv4 packets had it.
    all_unfragmentable: u8,
}

impl FramesSoFar {
    /// All of a tag but its priority.
    const MASK: u32 = u32::from_ne_bytes([0xff, 0xff, 0x0f, 0xff]);

    pub(super) fn nothing() -> Self {
        Self {
            tag: u32::MAX,
            link: PortIndex(0).into(),
            any_tagged: false,
            any_unrecognised: false,
            all_unfragmentable: DONT_FRAGMENT,
        }
    }

    /// Whether there was any frame with one known tag.
    #[inline(always)]
    pub(super) fn knows_tag(&self) -> bool {
        self.tag != u32::MAX
    }

    /// The tag as it stands in the frame, without priority, and the bits that count.
    #[inline(always)]
    pub(super) fn tag_and_mask(&self) -> [u32; 2] {
        [self.tag, Self::MASK].map(|word| u32::from_le_bytes(word.to_ne_bytes()))
    }

    /// The link of frames with that tag, or without one, whose packets begin at an offset.
    #[inline(always)]
    pub(super) fn link_of(&self, recognise: &Recognise<'_>, offset: usize) -> Link {
        if offset == UNTAGGED { recognise.link } else { self.link }
    }

    /// Notes whether any packet of some may be fragmented.
    #[inline(always)]
    pub(super) fn note_fragmentable(&mut self, any: bool) {
        self.all_unfragmentable &= if any { 0 } else { DONT_FRAGMENT };
    }

    /// Whether there was any packet that routers may fragment.
    pub(super) fn any_fragmentable(&self) -> bool {
        self.all_unfragmentable == 0
    }
}

/// What recognition depends on besides the frame.
#[derive(Clone, Copy)]
pub(super) struct Recognise<'s> {
    snapshot: &'s Snapshot,
    filter: FrameFilter,
    link: Link,
    prefetches_tags: bool,
}

impl<'s> Recognise<'s> {
    /// For frames that arrive on a port, or that did and whose tags of this link were removed. Lines of tags of their flows
    /// are prefetched.
    pub(super) fn new(snapshot: &'s Snapshot, link: Link) -> Self {
        Self { snapshot, filter: FrameFilter::new(snapshot.port(link.port()).mac), link, prefetches_tags: true }
    }

    /// The same without prefetching for eight packets at a time: many may be of flows of other workers.
    pub(super) fn without_tags(self) -> Self {
        Self { prefetches_tags: false, ..self }
    }

    #[inline(always)]
    pub(super) fn prefetches_tags(&self) -> bool {
        self.prefetches_tags
    }

    /// The first loop. Returns the kinds of all packets together: their families, and whether any has [`Record::SYN`].
    #[inline(never)]
    pub(super) fn burst<B: Buffer>(
        self,
        tables: &FlowTables,
        frames: &mut FramesSoFar,
        (burst, records): (&[B], &mut [Record]),
    ) -> u8 {
        burst.iter().zip(records).fold(0, |kinds, (buffer, record)| kinds | self.one(tables, frames, buffer.bytes(), record))
    }

    /// The same for one frame.
    #[inline(always)]
    pub(super) fn one(&self, tables: &FlowTables, frames: &mut FramesSoFar, frame: &[u8], record: &mut Record) -> u8 {
        let recognised = self.frame(tables, frames, frame, record).unwrap_or_else(|| {
            frames.any_unrecognised = true;
            0
        });
        (record.shape.kind, record.shape.way) = (recognised, STAYS);
        recognised
    }

    /// The destination of frames for the port: the first six bytes, in two words whose first byte is the lowest.
    #[inline(always)]
    pub(super) fn destination(&self) -> [u32; 2] {
        self.filter.destination()
    }

    /// Stores what is known of a frame but its kind, which it returns.
    #[inline(always)]
    fn frame(&self, tables: &FlowTables, frames: &mut FramesSoFar, frame: &[u8], record: &mut Record) -> Option<u8> {
        let start: &StartV4 = frame.first_chunk()?;
        if !self.filter.is_for_port(start) {
            return None;
        }
        let word = u32::from_ne_bytes(*start[UNTAGGED - TYPE..].first_chunk()?);
        if word & V4_MASK == V4_START {
            ipv4(&tables.v4, frames, start[UNTAGGED..].first_chunk()?, frame.len(), (self.link, UNTAGGED), record)
        } else if word & V6_MASK == V6_START {
            let start: &[u8; UNTAGGED + HEAD_V6] = frame.first_chunk()?;
            ipv6(&tables.v6, start[UNTAGGED..].first_chunk()?, frame.len(), (self.link, UNTAGGED), record)
        } else {
            self.tagged(tables, frames, frame, record)
        }
    }

    /// The same for a frame with VLAN tags, unless its link is unknown.
    #[inline(never)]
    fn tagged(&self, tables: &FlowTables, frames: &mut FramesSoFar, frame: &[u8], record: &mut Record) -> Option<u8> {
        let tag = word_at(frame, UNTAGGED)? & FramesSoFar::MASK;
        let is_ip = |word: u32| word & V4_MASK == V4_START || word & V6_MASK == V6_START;
        let (link, offset) = if tag == frames.tag && is_ip(word_at(frame, UNTAGGED + TAG)?) {
            (frames.link, UNTAGGED + TAG)
        } else {
            let (link, offset) = self.look_at_tags(frame)?;
            if offset == UNTAGGED + TAG {
                (frames.tag, frames.link) = (tag, link);
            }
            (link, offset)
        };
        frames.any_tagged = true;
        let from_type = frame.get(offset - TYPE..)?;
        let word = u32::from_ne_bytes(*from_type.first_chunk()?);
        if word & V4_MASK == V4_START {
            ipv4(&tables.v4, frames, from_type[TYPE..].first_chunk()?, frame.len(), (link, offset), record)
        } else if word & V6_MASK == V6_START {
            ipv6(&tables.v6, from_type[TYPE..].first_chunk()?, frame.len(), (link, offset), record)
        } else {
            None
        }
    }

    /// The link of a frame with VLAN tags, and the offset of what follows them; `None` if the link is unknown.
    #[inline(never)]
    fn look_at_tags(&self, frame: &[u8]) -> Option<(Link, usize)> {
        let tags = Tags::of(frame);
        let link = Link::new(self.link.port(), tags.vlan()?);
        let is_known = !tags.is_none() && !self.link.is_tagged() && self.snapshot.knows(link);
        is_known.then(|| (link, UNTAGGED + usize::from(tags.bytes())))
    }
}

/// The word that begins with the EtherType before the packet at an offset.
#[inline(always)]
fn word_at(frame: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*frame.get(offset - TYPE..)?.first_chunk()?))
}

/// Recognises an IPv4 packet without options by its head, which is at an offset of a frame of `frame_len` bytes; as
/// [`Recognise::frame`].
#[inline(always)]
fn ipv4(
    table: &FlowTable<u32>,
    frames: &mut FramesSoFar,
    head: &[u8; HEAD_V4],
    frame_len: usize,
    (link, offset): (Link, usize),
    record: &mut Record,
) -> Option<u8> {
    const TCP: u32 = u32::from_ne_bytes([0, 0, 0, protocol::TCP]);
    const UDP: u32 = u32::from_ne_bytes([0, 0, 0, protocol::UDP]);
    let len = u16::from_be_bytes([head[2], head[3]]);
    if head[8] <= 1 || offset + usize::from(len) > frame_len || !header_holds(&head[..20]) {
        return None;
    }
    frames.all_unfragmentable &= head[6];
    let more = if head[6] & DONT_FRAGMENT == 0 { Shape::FRAGMENTABLE } else { 0 };
    let (key, transport) = (WireKey::<3>::read_at(head, 12), head[20..].first_chunk()?);
    let (from, lens) = ((link, offset, more), (len, frame_len));
    // One copy for each protocol, which is a constant there.
    match u32::from_ne_bytes(*head[6..].first_chunk()?) & WHOLE_MASK {
        TCP => {
            let signal = tcp_signal(transport, usize::from(len), 20)?;
            store(table, (&key, protocol::TCP), lens, from, record);
            Some(signal | Record::V4)
        }
        UDP => {
            let signal = udp_signal(transport, usize::from(len), 20)?;
            store(table, (&key, protocol::UDP), lens, from, record);
            Some(signal | Record::V4)
        }
        _ => None,
    }
}

/// As [`ipv4`], for IPv6.
#[inline(always)]
fn ipv6(
    table: &FlowTable<u128>,
    head: &[u8; HEAD_V6],
    frame_len: usize,
    (link, offset): (Link, usize),
    record: &mut Record,
) -> Option<u8> {
    let len = u16::from_be_bytes([head[4], head[5]]).checked_add(40)?;
    if head[7] <= 1 || offset + usize::from(len) > frame_len {
        return None;
    }
    let (key, transport) = (WireKey::<9>::read_at(head, 8), head[40..].first_chunk()?);
    let (from, lens) = ((link, offset, 0), (len, frame_len));
    match head[6] {
        protocol::TCP => {
            let signal = tcp_signal(transport, usize::from(len), 40)?;
            store(table, (&key, protocol::TCP), lens, from, record);
            Some(signal | Record::V6)
        }
        protocol::UDP => {
            let signal = udp_signal(transport, usize::from(len), 40)?;
            store(table, (&key, protocol::UDP), lens, from, record);
            Some(signal | Record::V6)
        }
        _ => None,
    }
}

/// Hashes the tuple, prefetches its line of tags, and stores what is known.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // an offset of at most 22
fn store<A: Address>(
    table: &FlowTable<A>,
    (key, number): (&A::Key, u8),
    (len, frame_len): (u16, usize),
    (link, offset, more): (Link, usize, u8),
    record: &mut Record,
) {
    let hash = table.hash_key(key, number);
    table.prefetch(hash);
    (record.hash, record.link, record.shape.packet_len, record.shape.network_offset) = (hash, link, len, offset as u8);
    record.shape.more = if offset + usize::from(len) != frame_len { more | Shape::PADDED } else { more };
}

/// The lower five TCP flags of a packet of `len` bytes, whose TCP header begins at byte `at`. `None`: it is too short.
#[inline(always)]
fn tcp_signal(head: &[u8; 20], len: usize, at: usize) -> Option<u8> {
    let header_len = usize::from(head[12] >> 4) * 4;
    (header_len >= 20 && at + header_len <= len).then_some(head[13] & (UDP_SIGNAL - 1))
}

/// [`UDP_SIGNAL`], likewise.
#[inline(always)]
fn udp_signal(head: &[u8; 20], len: usize, at: usize) -> Option<u8> {
    let udp_len = usize::from(u16::from_be_bytes([head[4], head[5]]));
    (udp_len >= 8 && at + udp_len <= len).then_some(UDP_SIGNAL)
}

//! The first loop of the fast way: recognises packets by a few comparisons, and hashes their addresses and ports as they
//! stand in the frame.
//!
//! **Invariant:** a recognised packet is one that `parse` accepts, with the same tuple, length, flags and offset.
//!
//! Not here: whether the packet has a flow.

use crate::flow::{Candidate, FlowTable, UDP_SIGNAL};
use crate::forward::decide::FlowTables;
use crate::port::{FrameFilter, Link, PortIndex};
use crate::snapshot::Snapshot;
use crate::wire::checksum::header_holds;
use crate::wire::{Address, Buffer, Ipv4, Tags, WireKey, ether_type, protocol, tcp_flags};

/// Bytes of an IPv4 header without options and a TCP header without options.
pub(super) const HEAD_V4: usize = 40;
/// Bytes of an IPv6 header and a TCP header without options.
pub(super) const HEAD_V6: usize = 60;
/// Offset of the IP header of an untagged frame.
const UNTAGGED: usize = 14;

/// What the loops know of a packet. 32 bytes.
#[derive(Clone, Copy, Debug)]
pub(in crate::forward) struct Record {
    /// Hash of its addresses and ports.
    pub(super) hash: u64,
    /// Its probable flow; after the third loop, its flow.
    pub(super) candidate: Candidate,
    /// The link on which it arrived.
    pub(super) link: Link,
    /// The third loop: slot of its next hop.
    pub(super) exit: u32,
    /// The third loop: its backend ([`crate::flow::BackendId`], packed).
    pub(super) backend: u32,
    /// Bytes of the frame.
    pub(super) frame_len: u16,
    /// Bytes of the packet from its IP header on.
    pub(super) packet_len: u16,
    /// Offset of its IP header in the frame.
    pub(super) network_offset: u8,
    /// The lower five TCP flags or [`UDP_SIGNAL`]; [`Record::V4`] or [`Record::V6`]. 0 for a packet that is left.
    kind: u8,
}

const _: () = assert!(size_of::<Record>() == 32);

impl Record {
    pub(super) const V4: u8 = 0x40;
    pub(super) const V6: u8 = 0x80;
    const FAMILY: u8 = Self::V4 | Self::V6;
    /// Set in the kinds of packets that open connections, and of the answers to them.
    pub(super) const SYN: u8 = tcp_flags::SYN;

    /// A packet that the fast way leaves.
    pub(super) fn left() -> Self {
        Self {
            hash: 0,
            candidate: Candidate::NONE,
            link: PortIndex(0).into(),
            exit: 0,
            backend: 0,
            frame_len: 0,
            packet_len: 0,
            network_offset: 0,
            kind: 0,
        }
    }

    /// Leaves the packet.
    #[inline(always)]
    pub(super) fn leave(&mut self) {
        self.kind = 0;
    }

    /// Whether the packet opens a TCP connection.
    #[inline(always)]
    pub(super) fn opens(&self) -> bool {
        const OTHERS: u8 = UDP_SIGNAL | tcp_flags::ACK | tcp_flags::RST | tcp_flags::FIN;
        self.kind & (OTHERS | Self::SYN) == Self::SYN
    }

    /// Leaves the packet; [`Record::take_back`] undoes that.
    #[inline(always)]
    pub(super) fn set_aside(&mut self) -> RecordKind {
        RecordKind(std::mem::take(&mut self.kind))
    }

    #[inline(always)]
    pub(super) fn take_back(&mut self, kind: RecordKind) {
        self.kind = kind.0;
    }

    /// [`Record::V4`], [`Record::V6`], or 0 for a packet that is left.
    #[inline(always)]
    pub(super) fn family(&self) -> u8 {
        self.kind & Self::FAMILY
    }

    /// The lower five TCP flags or [`UDP_SIGNAL`].
    #[inline(always)]
    pub(super) fn signal(&self) -> u8 {
        self.kind & !Self::FAMILY
    }

    #[inline(always)]
    pub(super) fn is_udp(&self) -> bool {
        self.kind & UDP_SIGNAL != 0
    }

    /// The transport protocol number.
    #[inline(always)]
    pub(super) fn protocol(&self) -> u8 {
        protocol_of(self.kind)
    }
}

/// The kind of a packet that was set aside.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordKind(u8);

impl RecordKind {
    /// [`Record::V4`] or [`Record::V6`].
    #[inline(always)]
    pub(super) fn family(self) -> u8 {
        self.0 & Record::FAMILY
    }
}

#[inline(always)]
fn protocol_of(kind: u8) -> u8 {
    if kind & UDP_SIGNAL == 0 { protocol::TCP } else { protocol::UDP }
}

/// What recognition depends on besides the frame.
#[derive(Clone, Copy)]
pub(super) struct Recognise<'s> {
    snapshot: &'s Snapshot,
    filter: FrameFilter,
    link: Link,
}

impl<'s> Recognise<'s> {
    /// For frames that arrive on a port, or that did and whose tags of this link were removed.
    pub(super) fn new(snapshot: &'s Snapshot, link: Link) -> Self {
        Self { snapshot, filter: FrameFilter::new(snapshot.port(link.port()).mac), link }
    }

    /// The first loop. Returns the kinds of all packets together: their families, and whether any has [`Record::SYN`].
    #[inline(never)]
    pub(super) fn burst<B: Buffer>(self, tables: &FlowTables, burst: &[B], records: &mut [Record]) -> u8 {
        let mut kinds = 0;
        for (buffer, record) in burst.iter().zip(records) {
            let recognised = self.frame(tables, buffer.bytes(), record).unwrap_or(0);
            record.kind = recognised;
            kinds |= recognised;
        }
        kinds
    }

    /// Stores what is known of a frame but its kind, which it returns.
    #[inline(always)]
    fn frame(&self, tables: &FlowTables, frame: &[u8], record: &mut Record) -> Option<u8> {
        if !self.filter.is_for_port(frame) {
            return None;
        }
        record.frame_len = u16::try_from(frame.len()).ok()?;
        let number = u16::from_be_bytes(*frame.get(12..14)?.first_chunk()?);
        if number == ether_type::IPV4 {
            ipv4(&tables.v4, frame.get(UNTAGGED..)?, self.link, UNTAGGED, record)
        } else if number == ether_type::IPV6 {
            ipv6(&tables.v6, frame.get(UNTAGGED..)?, self.link, UNTAGGED, record)
        } else {
            self.tagged(tables, frame, record)
        }
    }

    /// The same for a frame with VLAN tags, unless its link is unknown.
    #[inline(never)]
    fn tagged(&self, tables: &FlowTables, frame: &[u8], record: &mut Record) -> Option<u8> {
        let tags = Tags::of(frame);
        let link = Link::new(self.link.port(), tags.vlan()?);
        let is_known = !tags.is_none() && !self.link.is_tagged() && self.snapshot.knows(link);
        let offset = UNTAGGED + usize::from(tags.bytes());
        let packet = frame.get(offset..).filter(|_| is_known)?;
        match u16::from_be_bytes(*frame.get(offset - 2..offset)?.first_chunk()?) {
            ether_type::IPV4 => ipv4(&tables.v4, packet, link, offset, record),
            ether_type::IPV6 => ipv6(&tables.v6, packet, link, offset, record),
            _ => None,
        }
    }
}

/// Recognises an IPv4 packet at the start of some bytes, as [`Recognise::frame`].
#[inline(always)]
fn ipv4(table: &FlowTable<u32>, packet: &[u8], link: Link, offset: usize, record: &mut Record) -> Option<u8> {
    let head: &[u8; HEAD_V4] = packet.first_chunk()?;
    let len = u16::from_be_bytes([head[2], head[3]]);
    // Neither a fragment nor at the end of its life; "do not fragment" does not matter.
    let is_plain = head[0] == Ipv4::PLAIN && (head[6] & 0x3f | head[7]) == 0 && head[8] > 1;
    if !is_plain || !header_holds(&head[..20]) || usize::from(len) > packet.len() {
        return None;
    }
    let signal = signal(head[9], head[20..].first_chunk()?, usize::from(len).checked_sub(20)?)?;
    let key = WireKey::<3>::read(*head[12..24].first_chunk()?);
    store(table, &key, (link, offset, len, signal), record);
    Some(signal | Record::V4)
}

/// As [`ipv4`], for IPv6.
#[inline(always)]
fn ipv6(table: &FlowTable<u128>, packet: &[u8], link: Link, offset: usize, record: &mut Record) -> Option<u8> {
    let head: &[u8; HEAD_V6] = packet.first_chunk()?;
    let payload_len = u16::from_be_bytes([head[4], head[5]]);
    let len = payload_len.checked_add(40)?;
    if head[0] >> 4 != 6 || head[7] <= 1 || usize::from(len) > packet.len() {
        return None;
    }
    let signal = signal(head[6], head[40..].first_chunk()?, payload_len.into())?;
    let key = WireKey::<9>::read(*head[8..44].first_chunk()?);
    store(table, &key, (link, offset, len, signal), record);
    Some(signal | Record::V6)
}

/// Hashes the tuple, prefetches its line of tags, and stores what is known.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // an offset of at most 22
fn store<A: Address>(
    table: &FlowTable<A>,
    key: &A::Key,
    (link, offset, len, signal): (Link, usize, u16, u8),
    record: &mut Record,
) {
    let hash = table.hash_key(key, protocol_of(signal));
    table.prefetch(hash);
    (record.hash, record.link, record.packet_len, record.network_offset) = (hash, link, len, offset as u8);
}

/// The lower five TCP flags, or [`UDP_SIGNAL`], of a packet with this protocol number and `len` bytes from its transport
/// header on.
#[inline(always)]
fn signal(number: u8, head: &[u8; 20], len: usize) -> Option<u8> {
    if number == protocol::TCP {
        let header_len = usize::from(head[12] >> 4) * 4;
        (header_len >= 20 && header_len <= len).then_some(head[13] & (UDP_SIGNAL - 1))
    } else if number == protocol::UDP {
        let udp_len = usize::from(u16::from_be_bytes([head[4], head[5]]));
        (udp_len >= 8 && udp_len <= len).then_some(UDP_SIGNAL)
    } else {
        None
    }
}

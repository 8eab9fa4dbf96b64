//! Recognises plain packets: those of which the fast path knows all that it needs from their heads (`head`). One packet by
//! the parser; eight packets of one family and link at a time by words of each in one register.
//!
//! **Invariant:** what eight at a time are recognised as, each of them is recognised as alone, unless `parse` drops it.
//!
//! Not here: whether a packet has a flow, and packets that are not plain (`parse`).

use super::head::{Head, PlainFamily, Start, UNTAGGED, v4};
use super::shape::Shape;
use crate::wire::address::Tuple;
use crate::wire::hash::TupleHash;
use crate::wire::headers::{Headers, Parsed, Transport};
use crate::wire::ip::{Ipv4, protocol};
use crate::wire::parse::parse;
use crate::wire::processor::{Avx2, LANES, Lanes, Row};

/// A packet that was recognised alone.
pub(crate) enum Plain {
    V4(Shape, Tuple<u32>),
    V6(Shape, Tuple<u128>),
}

/// Recognises one packet.
pub(crate) fn recognise(frame: &[u8]) -> Option<Plain> {
    match parse(frame).ok()? {
        Parsed::V4(headers) => Some(Plain::V4(shape(&headers, frame.len())?, headers.tuple)),
        Parsed::V6(headers) => Some(Plain::V6(shape(&headers, frame.len())?, headers.tuple)),
        Parsed::Arp | Parsed::Other => None,
    }
}

/// The shape of a parsed packet, if it is plain.
#[allow(clippy::cast_possible_truncation)] // an offset of at most 22
fn shape<A: PlainFamily>(headers: &Headers<A>, frame_len: usize) -> Option<Shape> {
    let signal = match headers.transport {
        Transport::Tcp { flags } => flags & (Shape::UDP - 1),
        Transport::Udp => Shape::UDP,
        _ => return None,
    };
    let Headers { packet_len, network_offset, hop_limit, dont_fragment, .. } = *headers;
    let offset = usize::from(network_offset);
    if hop_limit <= 1 || headers.group_frame || headers.has_options() || frame_len < offset + A::Head::BYTES {
        return None;
    }
    let padded = if frame_len == offset + usize::from(packet_len) { 0 } else { Shape::PADDED };
    let more = padded | if dont_fragment { 0 } else { Shape::FRAGMENTABLE };
    Some(Shape { packet_len, network_offset: offset as u8, kind: signal | A::KIND, more, ..Shape::UNKNOWN })
}

/// What the link headers of eight frames are to say.
#[derive(Clone, Copy)]
pub(crate) struct ExpectedLink {
    /// The Ethernet address of the port: the first six bytes of two words whose first byte is the lowest.
    pub(crate) port: [u32; 2],
    /// The EtherType and control word of the tag, and the bits of these that count.
    pub(crate) tag: u32,
    pub(crate) tag_mask: u32,
}

/// Eight frames that were looked at together.
pub(crate) struct Recognised {
    /// The hash and the [`Shape`] of each, then two bytes of the caller's.
    pub(crate) rows: [Row; LANES],
    /// The upper halves of the hashes.
    pub(crate) upper: Lanes,
    /// Which are recognised, as bits.
    pub(crate) known: u8,
}

/// Recognises those of eight frames that have a packet of this family at the offset `AT`. `lens` are the lengths of the frames,
/// `own` the last two bytes of each row.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // offsets and lengths of heads
pub(crate) fn recognise_eight<A: WideFamily, const AT: usize>(
    avx2: Avx2,
    hash: &TupleHash,
    starts: [&Start<AT, A::Head>; LANES],
    lens: [u32; LANES],
    link: ExpectedLink,
    own: [u8; 2],
) -> Recognised {
    let word = |value| avx2.splat(value);
    let room = avx2.lanes(lens) - word(AT as u32);
    let EightHeads { len, kind, fragmentable, hash: [lower, upper], known } = A::heads::<AT>(avx2, hash, starts);
    // A frame that is shorter than a head is looked at as another one.
    let is_here = unexpected(avx2, starts, link).equals(word(0)) & room.exceeds(word(A::Head::BYTES as u32 - 1));
    let known = known & is_here & (room + word(1)).exceeds(len);
    let padded = word(Shape::PADDED.into()) ^ room.equals(len) & word(Shape::PADDED.into());
    let more = fragmentable & word(Shape::FRAGMENTABLE.into()) | padded;
    let heads = len | kind.left::<24>() | word((AT as u32) << 16 | u32::from(A::KIND) << 24);
    let last = more | word(u32::from(u16::from_le_bytes(own)) << 16);
    Recognised { rows: Lanes::rows([lower, upper, heads, last]), upper, known: known.bits() }
}

/// Words that are 0 where frames are for the port and, if they have a tag, have the expected one.
#[inline(always)]
fn unexpected<const AT: usize, H: Head>(avx2: Avx2, starts: [&Start<AT, H>; LANES], link: ExpectedLink) -> Lanes {
    /// The end of the destination address, and the bit of group addresses in the source address.
    const STATION: u32 = u32::from_le_bytes([0xff, 0xff, 0x01, 0]);
    let [to, to_from, _, tag] = avx2.columns(starts.map(|start| start.bytes_at(0)));
    let unexpected = (to ^ avx2.splat(link.port[0])) | (to_from ^ avx2.splat(link.port[1])) & avx2.splat(STATION);
    if AT == UNTAGGED { unexpected } else { unexpected | tag & avx2.splat(link.tag_mask) ^ avx2.splat(link.tag) }
}

/// What the heads of eight packets say.
pub(crate) struct EightHeads {
    /// Bytes of the packets from their IP headers on.
    len: Lanes,
    /// The lower five TCP flags, or [`Shape::UDP`].
    kind: Lanes,
    /// All ones for packets that routers may fragment.
    fragmentable: Lanes,
    /// The lower and the upper halves of their hashes.
    hash: [Lanes; 2],
    /// All ones for plain packets.
    known: Lanes,
}

/// A family of which eight packets are recognised at a time.
pub(crate) trait WideFamily: PlainFamily {
    /// Reads the heads of eight packets.
    fn heads<const AT: usize>(avx2: Avx2, hash: &TupleHash, starts: [&Start<AT, Self::Head>; LANES]) -> EightHeads;
}

/// Bytes before the IP header that are read with it, of which the last two are the EtherType.
const BEFORE: usize = 4;
const _: () = assert!(UNTAGGED >= BEFORE);
/// The EtherTypes as the upper halves of words.
const TYPE_V4: u32 = u32::from_le_bytes([0, 0, 0x08, 0x00]);
const TYPE_V6: u32 = u32::from_le_bytes([0, 0, 0x86, 0xdd]);
/// "More fragments", and the fragment offset.
const PART_OF_DATAGRAM: u32 = u32::from_le_bytes([0, 0, 0x3f, 0xff]);
const DONT_FRAGMENT: u32 = u32::from_le_bytes([0, 0, 0x40, 0]);
/// The version of IPv6, and where it stands.
const VERSION_6: u32 = 0x60;
const VERSION: u32 = 0xf0;

impl WideFamily for u32 {
    #[inline(always)]
    fn heads<const AT: usize>(avx2: Avx2, hash: &TupleHash, starts: [&Start<AT, Self::Head>; LANES]) -> EightHeads {
        let word = |value| avx2.splat(value);
        let [before_type, first, fragment, hops_and_protocol] = avx2.columns(starts.map(|start| start.bytes_at(AT - BEFORE)));
        let [source, destination, ports, _] = avx2.columns(starts.map(|start| start.bytes_at(AT + v4::KEY)));
        let [udp, _, tcp, _] = avx2.columns(starts.map(|start| start.bytes_at(AT + v4::TRANSPORT + 4)));
        let is_other = (before_type ^ word(TYPE_V4)).right::<16>() | (first ^ word(Ipv4::PLAIN.into())) & word(0xff);
        let len = first.upper_number();
        let sum_holds = folded([first, fragment, hops_and_protocol, source, destination], avx2).equals(word(0xffff));
        let has_hops = (hops_and_protocol & word(0xff)).exceeds(word(1));
        let number = hops_and_protocol.right::<8>() & word(0xff);
        let transport = EightTransports::of(avx2, v4::TRANSPORT, number, len, [udp, tcp]);
        let wrong = is_other | fragment & word(PART_OF_DATAGRAM);
        EightHeads {
            known: wrong.equals(word(0)) & sum_holds & has_hops & transport.is_whole,
            kind: transport.kind,
            fragmentable: (fragment & word(DONT_FRAGMENT)).equals(word(0)),
            hash: hash.hash_eight(avx2, [source, destination, ports], number),
            len,
        }
    }
}

impl WideFamily for u128 {
    #[inline(always)]
    fn heads<const AT: usize>(avx2: Avx2, hash: &TupleHash, starts: [&Start<AT, Self::Head>; LANES]) -> EightHeads {
        let word = |value| avx2.splat(value);
        let [before_type, first, len_and_next, _] = avx2.columns(starts.map(|start| start.bytes_at(AT - BEFORE)));
        let [a, b, c, d] = avx2.columns(starts.map(|start| start.bytes_at(AT + 8)));
        let [e, f, g, h] = avx2.columns(starts.map(|start| start.bytes_at(AT + 24)));
        let [ports, udp, _, tcp] = avx2.columns(starts.map(|start| start.bytes_at(AT + 40)));
        let is_other = (before_type ^ word(TYPE_V6)).right::<16>() | (first ^ word(VERSION_6)) & word(VERSION);
        let len = len_and_next.lower_number() + word(40);
        let is_short = word(1 << 16).exceeds(len); // of 16 bits with the IPv6 header
        let has_hops = len_and_next.right::<24>().exceeds(word(1));
        let number = len_and_next.right::<16>() & word(0xff);
        let transport = EightTransports::of(avx2, 40, number, len, [udp, tcp]);
        EightHeads {
            known: is_other.equals(word(0)) & has_hops & is_short & transport.is_whole,
            kind: transport.kind,
            fragmentable: word(0),
            hash: hash.hash_eight(avx2, [a, b, c, d, e, f, g, h, ports], number),
            len,
        }
    }
}

/// What the headers of TCP or UDP say.
struct EightTransports {
    /// All ones where the header is one of them and the packet has all of it.
    is_whole: Lanes,
    kind: Lanes,
}

impl EightTransports {
    /// Of packets of `len` bytes with these protocol numbers. The header begins at an offset of a packet; `udp` is its second
    /// word, `tcp` its fourth.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // an offset of at most 40
    fn of(avx2: Avx2, offset: usize, number: Lanes, len: Lanes, [udp, tcp]: [Lanes; 2]) -> Self {
        let word = |value| avx2.splat(value);
        let ends = |header: Lanes| (len + word(1)).exceeds(header + word(offset as u32));
        let tcp_len = tcp.right::<2>() & word(0x3c);
        let is_tcp = number.equals(word(protocol::TCP.into())) & tcp_len.exceeds(word(19)) & ends(tcp_len);
        let udp_len = udp.lower_number();
        let is_udp = number.equals(word(protocol::UDP.into())) & udp_len.exceeds(word(7)) & ends(udp_len);
        let tcp_kind = tcp.right::<8>() & word(u32::from(Shape::UDP) - 1);
        Self { is_whole: is_tcp | is_udp, kind: tcp_kind.or_where(is_udp, word(Shape::UDP.into())) }
    }
}

/// The sums of the halves of some words, folded once: 0xffff where 0xffff divides a sum of few words that is not 0.
#[inline(always)]
fn folded<const WORDS: usize>(words: [Lanes; WORDS], avx2: Avx2) -> Lanes {
    let (zero, half) = (avx2.splat(0), avx2.splat(0xffff));
    let lower = words.iter().fold(zero, |sum, word| sum + (*word & half));
    let sum = words.iter().fold(lower, |sum, word| sum + word.right::<16>());
    (sum & half) + sum.right::<16>()
}

//! What the headers of eight packets of a family say.
//!
//! **Invariant:** a packet is known only if [`super::super::record::Recognise::frame`] recognises it.

use super::super::follow::FastFamily;
use super::super::record::UNTAGGED;
use super::start::Start;
use crate::flow::UDP_SIGNAL;
use crate::forward::decide::FlowTables;
use crate::wire::processor::{Avx2, LANES, Lanes};
use crate::wire::{Ipv4, protocol};

/// Eight frames, as far as it does not matter of which family their packets are.
pub(in crate::forward::fast) struct Arrived<'b, const AT: usize, H> {
    pub(super) starts: [&'b Start<AT, H>; LANES],
    /// Words that are not 0 where the frame is not for the port, or has another tag than the known one.
    pub(super) wrong: Lanes,
    /// Bytes from the IP header to the end of the frame.
    pub(super) room: Lanes,
}

/// What their headers say.
pub(in crate::forward::fast) struct EightHeaders {
    /// Bytes of the packets from their IP headers on.
    pub(super) len: Lanes,
    /// The lower five TCP flags, or [`UDP_SIGNAL`].
    pub(super) kind: Lanes,
    /// All ones for packets that routers may fragment.
    pub(super) fragmentable: Lanes,
    /// The lower and the upper halves of their hashes.
    pub(super) hash: [Lanes; 2],
    /// All ones for packets that are recognised.
    pub(super) known: Lanes,
}

/// A family of which eight packets are recognised at a time.
pub(in crate::forward::fast) trait HeadersOfEight: FastFamily {
    /// Reads eight packets.
    fn of_eight<const AT: usize>(avx2: Avx2, tables: &FlowTables, arrived: Arrived<'_, AT, Self::Head>) -> EightHeaders;
}

/// Bytes before the IP header that are looked at with it, of which the last two are the EtherType.
const BEFORE: usize = 4;
/// The EtherTypes as the upper halves of words.
const TYPE_V4: u32 = u32::from_le_bytes([0, 0, 0x08, 0x00]);
const TYPE_V6: u32 = u32::from_le_bytes([0, 0, 0x86, 0xdd]);
/// "More fragments", and the fragment offset.
const PART_OF_DATAGRAM: u32 = u32::from_le_bytes([0, 0, 0x3f, 0xff]);
const DONT_FRAGMENT: u32 = u32::from_le_bytes([0, 0, 0x40, 0]);
/// The version of IPv6, and where it stands.
const VERSION_6: u32 = 0x60;
const VERSION: u32 = 0xf0;

impl HeadersOfEight for u32 {
    #[inline(always)]
    fn of_eight<const AT: usize>(avx2: Avx2, tables: &FlowTables, arrived: Arrived<'_, AT, Self::Head>) -> EightHeaders {
        let word = |value| avx2.splat(value);
        let Arrived { starts, wrong, room } = arrived;
        let [before_type, first, fragment, hops_and_protocol] = avx2.columns(starts.map(|start| start.bytes_at(AT - BEFORE)));
        let [source, destination, ports, _] = avx2.columns(starts.map(|start| start.bytes_at(AT + 12)));
        let [udp, _, tcp, _] = avx2.columns(starts.map(|start| start.bytes_at(AT + 24)));
        let is_other = (before_type ^ word(TYPE_V4)).right::<16>() | (first ^ word(Ipv4::PLAIN.into())) & word(0xff);
        let len = first.upper_number();
        let sum_holds = folded([first, fragment, hops_and_protocol, source, destination], avx2).equals(word(0xffff));
        let has_hops = (hops_and_protocol & word(0xff)).exceeds(word(1));
        let number = hops_and_protocol.right::<8>() & word(0xff);
        let transport = EightTransports::of::<20>(avx2, number, len, [udp, tcp]);
        let wrong = wrong | is_other | fragment & word(PART_OF_DATAGRAM);
        EightHeaders {
            known: wrong.equals(word(0)) & sum_holds & has_hops & fits(avx2, len, room) & transport.is_whole,
            kind: transport.kind,
            fragmentable: (fragment & word(DONT_FRAGMENT)).equals(word(0)),
            hash: tables.v4.hash_eight(avx2, [source, destination, ports], number),
            len,
        }
    }
}

impl HeadersOfEight for u128 {
    #[inline(always)]
    fn of_eight<const AT: usize>(avx2: Avx2, tables: &FlowTables, arrived: Arrived<'_, AT, Self::Head>) -> EightHeaders {
        let word = |value| avx2.splat(value);
        let Arrived { starts, wrong, room } = arrived;
        let [before_type, first, len_and_next, _] = avx2.columns(starts.map(|start| start.bytes_at(AT - BEFORE)));
        let [a, b, c, d] = avx2.columns(starts.map(|start| start.bytes_at(AT + 8)));
        let [e, f, g, h] = avx2.columns(starts.map(|start| start.bytes_at(AT + 24)));
        let [ports, udp, _, tcp] = avx2.columns(starts.map(|start| start.bytes_at(AT + 40)));
        let is_other = (before_type ^ word(TYPE_V6)).right::<16>() | (first ^ word(VERSION_6)) & word(VERSION);
        let len = len_and_next.lower_number() + word(40);
        let is_short = word(1 << 16).exceeds(len); // of 16 bits with the IPv6 header
        let has_hops = len_and_next.right::<24>().exceeds(word(1));
        let number = len_and_next.right::<16>() & word(0xff);
        let transport = EightTransports::of::<40>(avx2, number, len, [udp, tcp]);
        EightHeaders {
            known: (wrong | is_other).equals(word(0)) & has_hops & fits(avx2, len, room) & is_short & transport.is_whole,
            kind: transport.kind,
            fragmentable: word(0),
            hash: tables.v6.hash_eight(avx2, [a, b, c, d, e, f, g, h, ports], number),
            len,
        }
    }
}

/// All ones for packets that their frames have room for.
#[inline(always)]
fn fits(avx2: Avx2, len: Lanes, room: Lanes) -> Lanes {
    (room + avx2.splat(1)).exceeds(len)
}

/// What the headers of TCP or UDP say.
struct EightTransports {
    /// All ones where the header is one of them and the packet has all of it.
    is_whole: Lanes,
    kind: Lanes,
}

impl EightTransports {
    /// Of packets of `len` bytes with these protocol numbers. The header begins at the offset `AT` of a packet; `udp` is its
    /// second word, `tcp` its fourth.
    #[inline(always)]
    fn of<const AT: u32>(avx2: Avx2, number: Lanes, len: Lanes, [udp, tcp]: [Lanes; 2]) -> Self {
        let word = |value| avx2.splat(value);
        let ends = |header: Lanes| (len + word(1)).exceeds(header + word(AT));
        let tcp_len = tcp.right::<2>() & word(0x3c);
        let is_tcp = number.equals(word(protocol::TCP.into())) & tcp_len.exceeds(word(19)) & ends(tcp_len);
        let udp_len = udp.lower_number();
        let is_udp = number.equals(word(protocol::UDP.into())) & udp_len.exceeds(word(7)) & ends(udp_len);
        let tcp_kind = tcp.right::<8>() & word(u32::from(UDP_SIGNAL) - 1);
        Self { is_whole: is_tcp | is_udp, kind: tcp_kind.or_where(is_udp, word(UDP_SIGNAL.into())) }
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

const _: () = assert!(UNTAGGED >= BEFORE);

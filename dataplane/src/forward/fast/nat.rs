//! Rewrites packets word by word. Sums are in the byte order of the machine: one's complement addition does not depend on
//! it (RFC 1071 section 2.B).
//!
//! **Invariant:** checksums equal those of a full computation bit for bit, and a wrong checksum stays wrong (see
//! `wire::checksum`).
//!
//! Not here: which addresses and ports.

use super::record::{HEAD_V4, HEAD_V6};
use zerocopy::IntoBytes;

use crate::wire::checksum::{HOP_DELTA, finish};
use crate::wire::{TupleKey, WireKey};

/// Offsets in an IPv4 header.
pub(super) const V4_IDENTIFICATION: usize = 4;
pub(super) const V4_TTL: usize = 8;
const V4_CHECKSUM: usize = 10;
const V4_KEY: usize = 12;
const V4_PORTS: usize = 20;
pub(super) const V4_TRANSPORT: usize = 20;
/// Offsets in an IPv6 header.
pub(super) const V6_HOP_LIMIT: usize = 7;
pub(super) const V6_KEY: usize = 8;
pub(super) const V6_TRANSPORT: usize = 40;
/// Offsets in a TCP and a UDP header.
pub(super) const TCP_CHECKSUM: usize = 16;
pub(super) const UDP_CHECKSUM: usize = 6;

/// The decrement of the hop limit, in the byte order of the machine.
pub(super) const HOP: u16 = u16::from_ne_bytes(HOP_DELTA.to_be_bytes());

/// The word at an offset, in the byte order of the machine.
#[inline(always)]
fn word(head: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([head[at], head[at + 1]])
}

#[inline(always)]
fn set_word(head: &mut [u8], at: usize, word: u16) {
    [head[at], head[at + 1]] = word.to_ne_bytes();
}

/// What a change of one word adds to a checksum's sum. A word of 32 bits counts as two of 16.
#[inline(always)]
fn change(from: u32, to: u32) -> u64 {
    u64::from(!from) + u64::from(to)
}

/// The sum of the halves of a sum.
#[inline(always)]
const fn folded(sum: u64) -> u64 {
    (sum & u32::MAX as u64) + (sum >> 32)
}

/// The sum in which the carry counts as 1.
#[inline(always)]
fn add(a: u64, b: u64) -> u64 {
    let (sum, carry) = a.overflowing_add(b);
    // After a carry the sum is below 2^64 - 1.
    sum + u64::from(carry)
}

/// Writes addresses and ports from an offset on.
#[inline(always)]
fn write_key<const WORDS: usize>(head: &mut [u8], at: usize, key: &WireKey<WORDS>)
where
    WireKey<WORDS>: TupleKey,
{
    let bytes = key.as_bytes();
    head[at..at + bytes.len()].copy_from_slice(bytes);
}

/// What a change of the hop limit and of the identification adds.
#[inline(always)]
fn header_change(head: &mut [u8; HEAD_V4], identification: Option<u16>) -> u64 {
    head[V4_TTL] = head[V4_TTL].wrapping_sub(1);
    let Some(identification) = identification else { return HOP.into() };
    let (old, new) = (word(head, V4_IDENTIFICATION), u16::from_ne_bytes(identification.to_be_bytes()));
    set_word(head, V4_IDENTIFICATION, new);
    u64::from(HOP) + u64::from(!old) + u64::from(new)
}

/// Decrements the hop limit of an IPv4 packet.
#[inline(always)]
pub(super) fn lower_ttl(head: &mut [u8; HEAD_V4]) {
    let change = header_change(head, None);
    let checksum = finish(change + u64::from(!word(head, V4_CHECKSUM)));
    set_word(head, V4_CHECKSUM, checksum);
}

/// Decrements the hop limit of an IPv6 packet.
#[inline(always)]
pub(super) fn lower_hop_limit(head: &mut [u8; HEAD_V6]) {
    head[V6_HOP_LIMIT] = head[V6_HOP_LIMIT].wrapping_sub(1);
}

/// Gives an IPv4 packet of TCP or UDP the addresses and ports of packets in the opposite direction to `replies`.
#[inline(always)]
pub(super) fn rewrite_v4(head: &mut [u8; HEAD_V4], replies: &WireKey<3>, is_udp: bool, identification: Option<u16>) {
    let (old, old_ports) = WireKey::<3>::read_at(head, V4_KEY).halves();
    let (new, new_ports) = replies.halves();
    let (new, new_ports) = (new.rotate_left(32), new_ports.rotate_left(16));
    let addresses = folded(add(!old, new));
    let network = addresses + header_change(head, identification) + u64::from(!word(head, V4_CHECKSUM));
    set_word(head, V4_CHECKSUM, finish(network));
    head[V4_KEY..V4_PORTS].copy_from_slice(&new.to_ne_bytes());
    head[V4_PORTS..V4_PORTS + 4].copy_from_slice(&new_ports.to_ne_bytes());
    rewrite_transport(&mut head[V4_TRANSPORT..], addresses + change(old_ports, new_ports), is_udp);
}

/// The same for an IPv6 packet, where this adds `change` to the sum of a TCP or UDP checksum.
#[inline(always)]
pub(super) fn rewrite_v6(head: &mut [u8; HEAD_V6], replies: &WireKey<9>, change: u64, is_udp: bool) {
    lower_hop_limit(head);
    write_key(head, V6_KEY, &replies.reversed());
    rewrite_transport(&mut head[V6_TRANSPORT..], change, is_udp);
}

/// Updates the checksum of TCP or UDP. A UDP checksum of 0 means "none" and stays; a computed 0 is sent as 0xffff (RFC
/// 768).
#[inline(always)]
fn rewrite_transport(head: &mut [u8], change: u64, is_udp: bool) {
    let updated = |old: u16| finish(change + u64::from(!old));
    if !is_udp {
        return set_word(head, TCP_CHECKSUM, updated(word(head, TCP_CHECKSUM)));
    }
    match word(head, UDP_CHECKSUM) {
        0 => {}
        old => set_word(
            head,
            UDP_CHECKSUM,
            match updated(old) {
                0 => 0xffff,
                new => new,
            },
        ),
    }
}

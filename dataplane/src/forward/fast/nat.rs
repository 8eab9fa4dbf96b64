//! Rewrites packets word by word. Sums are in the byte order of the machine: one's complement addition does not depend on
//! it (RFC 1071 section 2.B).
//!
//! **Invariant:** checksums equal those of a full computation bit for bit, and a wrong checksum stays wrong (see
//! `wire::checksum`).
//!
//! Not here: which addresses and ports.

use super::record::{HEAD_V4, HEAD_V6};
use crate::wire::checksum::{HOP_DELTA, finish};
use crate::wire::{TupleKey, WireKey};

/// Offsets in an IPv4 header.
const V4_IDENTIFICATION: usize = 4;
const V4_TTL: usize = 8;
const V4_CHECKSUM: usize = 10;
const V4_KEY: usize = 12;
const V4_TRANSPORT: usize = 20;
/// Offsets in an IPv6 header.
const V6_HOP_LIMIT: usize = 7;
const V6_KEY: usize = 8;
const V6_TRANSPORT: usize = 40;
/// Offsets in a TCP and a UDP header.
const TCP_CHECKSUM: usize = 16;
const UDP_CHECKSUM: usize = 6;

/// The decrement of the hop limit, in the byte order of the machine.
const HOP: u64 = u16::from_ne_bytes(HOP_DELTA.to_be_bytes()) as u64;

/// The word at an offset, in the byte order of the machine.
#[inline(always)]
fn word(head: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([head[at], head[at + 1]])
}

#[inline(always)]
fn set_word(head: &mut [u8], at: usize, word: u16) {
    [head[at], head[at + 1]] = word.to_ne_bytes();
}

/// Writes words one by one: a store of several, put together in memory from smaller ones, would stall the processor.
#[inline(always)]
fn write_words(bytes: &mut [u8], words: &[u32]) {
    for (place, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *place = word.to_ne_bytes();
    }
}

/// The sum of what a change of words adds to a checksum's sum. A word of 32 bits counts as two of 16.
#[inline(always)]
fn change(from: &[u32], to: &[u32]) -> u64 {
    from.iter().zip(to).map(|(from, to)| u64::from(!from) + u64::from(*to)).sum()
}

/// What a change of the hop limit and of the identification adds.
#[inline(always)]
fn header_change(head: &mut [u8; HEAD_V4], identification: Option<u16>) -> u64 {
    head[V4_TTL] = head[V4_TTL].wrapping_sub(1);
    let Some(identification) = identification else { return HOP };
    let (old, new) = (word(head, V4_IDENTIFICATION), u16::from_ne_bytes(identification.to_be_bytes()));
    set_word(head, V4_IDENTIFICATION, new);
    HOP + u64::from(!old) + u64::from(new)
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

/// Rewrites an IPv4 packet of TCP or UDP.
#[inline(always)]
pub(super) fn rewrite_v4(
    head: &mut [u8; HEAD_V4],
    from: &WireKey<3>,
    to: &WireKey<3>,
    is_udp: bool,
    identification: Option<u16>,
) {
    let ((old, old_ports), (new, new_ports)) = (from.words(), to.words());
    let addresses = change(old, new);
    let network = addresses + header_change(head, identification) + u64::from(!word(head, V4_CHECKSUM));
    set_word(head, V4_CHECKSUM, finish(network));
    write_words(&mut head[V4_KEY..V4_KEY + 8], new);
    head[V4_TRANSPORT..V4_TRANSPORT + 4].copy_from_slice(&new_ports.to_ne_bytes());
    rewrite_transport(&mut head[V4_TRANSPORT..], addresses + change(&[old_ports], &[new_ports]), is_udp);
}

/// Rewrites an IPv6 packet of TCP or UDP.
#[inline(always)]
pub(super) fn rewrite_v6(head: &mut [u8; HEAD_V6], from: &WireKey<9>, to: &WireKey<9>, is_udp: bool) {
    let ((old, old_ports), (new, new_ports)) = (from.words(), to.words());
    let change = change(old, new) + change(&[old_ports], &[new_ports]);
    lower_hop_limit(head);
    write_words(&mut head[V6_KEY..V6_KEY + 32], new);
    head[V6_TRANSPORT..V6_TRANSPORT + 4].copy_from_slice(&new_ports.to_ne_bytes());
    rewrite_transport(&mut head[V6_TRANSPORT..], change, is_udp);
}

/// Updates the checksum of TCP or UDP. A UDP checksum of 0 means "none" and stays; a computed 0 is sent as 0xffff (RFC
/// 768).
#[inline(always)]
fn rewrite_transport(head: &mut [u8], change: u64, is_udp: bool) {
    let at = if is_udp { UDP_CHECKSUM } else { TCP_CHECKSUM };
    let old = word(head, at);
    let new = finish(change + u64::from(!old));
    let new = match is_udp {
        true if old == 0 => 0,
        true if new == 0 => 0xffff,
        _ => new,
    };
    set_word(head, at, new);
}

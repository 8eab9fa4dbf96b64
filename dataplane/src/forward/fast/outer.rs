//! Outer headers of tunnels, word by word, for packets whose tunnels end at an address of their own family. Words and sums
//! are in the byte order of the machine, as in `nat`.
//!
//! **Invariant:** the bytes are those of `forward::rewrite::encapsulate` for the same packet, source and destination.
//!
//! Not here: Ethernet addresses, tags of VLANs, tunnels to the other family, packets that may be fragmented, and which
//! packets go into tunnels.

use zerocopy::{IntoBytes, transmute};

use super::nat;
use super::record::{HEAD_V4, HEAD_V6};
use crate::wire::checksum::finish;
use crate::wire::{Ethernet, HOP_LIMIT, Ipv4, Ipv6, Udp, ether_type, protocol};

const LINK: usize = Ethernet::BYTES as usize;
const V4: usize = Ipv4::BYTES as usize;
const V6: usize = Ipv6::BYTES as usize;
const UDP: usize = Udp::BYTES as usize;

/// What the outer headers of a packet say besides their addresses.
#[derive(Clone, Copy)]
pub(super) struct OuterFields {
    /// Bytes of the inner packet, from its IP header on.
    pub(super) packet_len: u16,
    /// UDP source and destination port; `None` in mode `ipip`.
    pub(super) ports: Option<[u16; 2]>,
    /// Of IPv6, 20 bits.
    pub(super) flow_label: u32,
    /// See [`crate::forward::rewrite::bytes_of_same_sum`]; of an IPv6 packet that is carried in UDP.
    pub(super) inner_sum: [u8; 8],
}

impl OuterFields {
    /// Bytes of the inner packet and of the UDP header, if there is one.
    #[inline(always)]
    fn carried_len(&self) -> u16 {
        self.packet_len.saturating_add(if self.ports.is_some() { Udp::BYTES } else { 0 })
    }
}

/// Bytes before the inner packet, with an IP header of this many.
#[inline(always)]
pub(super) const fn bytes_before(ip_header: usize, in_udp: bool) -> usize {
    LINK + ip_header + if in_udp { UDP } else { 0 }
}

/// The word of two numbers of 16 bits.
#[inline(always)]
pub(super) fn pair(first: u16, second: u16) -> u32 {
    (u32::from(first) << 16 | u32::from(second)).to_be()
}

/// The sum of words.
#[inline(always)]
fn sum(words: &[u32]) -> u64 {
    words.iter().map(|word| u64::from(*word)).sum()
}

/// The same in steps of 64 bits.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // parts of the sum
fn sum_of_pairs(pairs: &[u64; 4]) -> u64 {
    let sum: u128 = pairs.iter().map(|pair| u128::from(*pair)).sum();
    u64::from(sum as u32) + u64::from((sum >> 32) as u32) + (sum >> 64) as u64
}

/// Writes an EtherType at the end of the link header, and the words after it.
#[inline(always)]
fn write<const BYTES: usize>(before: &mut [u8], ether_type: u16, header: [u8; BYTES]) {
    before[LINK - 2..LINK].copy_from_slice(&ether_type.to_be_bytes());
    before[LINK..LINK + BYTES].copy_from_slice(&header);
}

/// Writes the outer headers before an IPv4 packet, and lowers its hop limit. The frame has an untagged link header, room
/// for the headers, and the packet; `None` if it is shorter.
#[inline(always)]
pub(super) fn write_v4(frame: &mut [u8], source: [u8; 4], destination: u32, fields: &OuterFields) -> Option<()> {
    match fields.ports {
        None => before_v4::<{ LINK + V4 }>(frame, source, destination, fields),
        Some(_) => before_v4::<{ LINK + V4 + UDP }>(frame, source, destination, fields),
    }
}

#[inline(always)]
fn before_v4<const BEFORE: usize>(frame: &mut [u8], source: [u8; 4], destination: u32, fields: &OuterFields) -> Option<()> {
    let (before, inner) = frame.split_first_chunk_mut::<BEFORE>()?;
    let inner: &mut [u8; HEAD_V4] = inner.first_chunk_mut()?;
    nat::lower_ttl(inner);
    let total_len = fields.carried_len().saturating_add(Ipv4::BYTES);
    let carried = if fields.ports.is_some() { protocol::UDP } else { protocol::IPV4 };
    let mut words = [
        pair(u16::from_be_bytes([Ipv4::PLAIN, inner[1]]), total_len),
        pair(0, Ipv4::DONT_FRAGMENT),
        u32::from_ne_bytes([HOP_LIMIT, carried, 0, 0]),
        u32::from_ne_bytes(source),
        destination,
    ];
    let [low, high] = finish(sum(&words)).to_ne_bytes();
    words[2] |= u32::from_ne_bytes([0, 0, low, high]);
    write::<V4>(before, ether_type::IPV4, transmute!(words));
    if let Some([from, to]) = fields.ports {
        // Without checksum: the inner packet has one.
        let udp: [u8; UDP] = transmute!([pair(from, to), pair(fields.carried_len(), 0)]);
        before[LINK + V4..].copy_from_slice(&udp);
    }
    Some(())
}

/// As [`write_v4`], for an IPv6 packet.
#[inline(always)]
pub(super) fn write_v6(frame: &mut [u8], source: [u8; 16], destination: [u8; 16], fields: &OuterFields) -> Option<()> {
    match fields.ports {
        None => before_v6::<{ LINK + V6 }>(frame, source, destination, fields),
        Some(_) => before_v6::<{ LINK + V6 + UDP }>(frame, source, destination, fields),
    }
}

#[inline(always)]
fn before_v6<const BEFORE: usize>(frame: &mut [u8], source: [u8; 16], destination: [u8; 16], fields: &OuterFields) -> Option<()> {
    let (before, inner) = frame.split_first_chunk_mut::<BEFORE>()?;
    let inner: &mut [u8; HEAD_V6] = inner.first_chunk_mut()?;
    nat::lower_hop_limit(inner);
    let carried = if fields.ports.is_some() { protocol::UDP } else { protocol::IPV6 };
    // Version and traffic class of the inner packet.
    let start = u32::from_be_bytes([inner[0], inner[1], inner[2], inner[3]]) & 0xfff0_0000 | fields.flow_label;
    let addresses: [u64; 4] = transmute!([source, destination]);
    let len = fields.carried_len();
    let words = [start.to_be(), pair(len, u16::from_be_bytes([carried, HOP_LIMIT]))];
    if let Some([from, to]) = fields.ports {
        let ports = pair(from, to);
        // The length is part of the pseudo header and of the UDP header.
        let lens = pair(len, len);
        let outer_sum = sum_of_pairs(&addresses) + sum(&[lens, pair(0, u16::from(protocol::UDP)), ports]);
        let [start, [protocol, _, c, d]]: [[u8; 4]; 2] = transmute!(fields.inner_sum);
        // The hop limit as it is now.
        let inner_sum = sum(&[u32::from_ne_bytes(start), u32::from_ne_bytes([protocol, inner[7], c, d])]);
        let checksum = match finish(outer_sum + inner_sum) {
            0 => 0xffff,
            checksum => checksum,
        };
        let [low, high] = checksum.to_ne_bytes();
        let udp: [u8; UDP] = transmute!([ports, pair(len, 0) | u32::from_ne_bytes([0, 0, low, high])]);
        before[LINK + V6..].copy_from_slice(&udp);
    }
    write::<8>(before, ether_type::IPV6, transmute!(words));
    before[LINK + 8..LINK + V6].copy_from_slice(addresses.as_bytes());
    Some(())
}

//! Mapping of ICMP errors about rewritten packets: the quoted packet is restored to what its sender sent.
//!
//! **Invariant:** an error is mapped completely or not at all, and a wrong checksum stays wrong.
//!
//! Not here: addresses of the error, which the decision gives.

use proto::Family;

use super::quote::{Quote, QuotedChecksum};
use crate::wire::checksum::{HOP_DELTA, apply, delta, difference, sum};
use crate::wire::low_half;
use crate::wire::{Address, Ethernet, Headers, Icmp, Ipv4, Ipv6, Mac, Tuple, Udp, crc32c, take_mut};

/// The new fields of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorRewrite<A> {
    /// New source address of the error.
    pub source: A,
    /// New destination address of the error.
    pub destination: A,
    /// The tuple of the quoted packet when it was sent.
    pub quoted: Tuple<A>,
    /// MAC of the outgoing port.
    pub source_mac: Mac,
    /// MAC of the next hop.
    pub destination_mac: Mac,
}

/// Rewrites an ICMP error; `headers` and `quote` are those found in `frame`. The hop limit must be at least 2. A frame
/// that does not match `headers` is not changed.
pub fn error<A: Address>(frame: &mut [u8], headers: &Headers<A>, quote: &Quote<A>, rewrite: &ErrorRewrite<A>) {
    let _ = try_error(frame, headers, quote, rewrite);
}

fn try_error<A: Address>(frame: &mut [u8], headers: &Headers<A>, quote: &Quote<A>, rewrite: &ErrorRewrite<A>) -> Option<()> {
    let (head, message) = frame.split_at_mut_checked(usize::from(headers.transport_offset))?;
    let (link, network) = head.split_at_mut_checked(usize::from(headers.network_offset))?;
    let (ethernet, _) = take_mut::<Ethernet>(link)?;
    let (icmp, quoted) = take_mut::<Icmp>(message)?;
    let quoted = quoted.get_mut(..quote.header_end.checked_sub(quote.network_offset)?)?;
    let outer_len = if A::FAMILY == Family::V4 { Ipv4::BYTES } else { Ipv6::BYTES };
    let fits =
        network.len() >= usize::from(outer_len) && quote.network_offset == usize::from(headers.transport_offset + Icmp::BYTES);
    fits.then_some(())?;

    let before = sum(quoted);
    restore(quoted, quote, &rewrite.quoted)?;
    // The quote begins at an even offset of the message, so its sums are sums of words of the whole.
    icmp.checksum.set(apply(icmp.checksum.get(), difference(before, sum(quoted))));
    let to = Tuple { source: rewrite.source, destination: rewrite.destination, ..headers.tuple };
    let addresses = delta(&headers.tuple, &to).l3;
    match A::FAMILY {
        Family::V4 => {
            let (ip, _) = take_mut::<Ipv4>(network)?;
            ip.source.set(low_half(rewrite.source));
            ip.destination.set(low_half(rewrite.destination));
            ip.ttl = ip.ttl.wrapping_sub(1);
            ip.checksum.set(apply(apply(ip.checksum.get(), addresses), HOP_DELTA));
        }
        Family::V6 => {
            let (ip, _) = take_mut::<Ipv6>(network)?;
            ip.source.set(rewrite.source.wide());
            ip.destination.set(rewrite.destination.wide());
            ip.hop_limit = ip.hop_limit.wrapping_sub(1);
            // ICMPv6 includes the addresses by a pseudo header (RFC 4443 section 2.3).
            icmp.checksum.set(apply(icmp.checksum.get(), addresses));
        }
    }
    ethernet.destination = rewrite.destination_mac.0;
    ethernet.source = rewrite.source_mac.0;
    Some(())
}

/// Sets the tuple of a quoted packet to `to` and updates the checksums that the quote includes.
fn restore<A: Address>(quoted: &mut [u8], quote: &Quote<A>, to: &Tuple<A>) -> Option<()> {
    let deltas = delta(&quote.tuple, to);
    let (network, transport) = quoted.split_at_mut_checked(quote.transport_offset.checked_sub(quote.network_offset)?)?;
    let (ports, _) = take_mut::<Udp>(transport)?; // ports are in the same place in TCP, UDP and SCTP
    match A::FAMILY {
        Family::V4 => {
            let (ip, _) = take_mut::<Ipv4>(network)?;
            ip.source.set(low_half(to.source));
            ip.destination.set(low_half(to.destination));
            ip.checksum.set(apply(ip.checksum.get(), deltas.l3));
        }
        Family::V6 => {
            let (ip, _) = take_mut::<Ipv6>(network)?;
            ip.source.set(to.source.wide());
            ip.destination.set(to.destination.wide());
        }
    }
    ports.source_port.set(to.source_port);
    ports.destination_port.set(to.destination_port);
    match quote.checksum {
        Some(QuotedChecksum::Internet { offset }) => {
            let checksum = field_at::<2>(transport, offset.checked_sub(quote.transport_offset)?)?;
            *checksum = restored_checksum(u16::from_be_bytes(*checksum), deltas.l4, quote.tuple.protocol).to_be_bytes();
        }
        Some(QuotedChecksum::Crc32c { offset, len }) => {
            let checksum = field_at::<4>(transport, offset.checked_sub(quote.transport_offset)?)?;
            let change = crc32c::difference(ports_of(&quote.tuple), ports_of(to), len);
            *checksum = (u32::from_le_bytes(*checksum) ^ change).to_le_bytes();
        }
        None => {}
    }
    Some(())
}

fn field_at<const N: usize>(bytes: &mut [u8], at: usize) -> Option<&mut [u8; N]> {
    bytes.get_mut(at..)?.first_chunk_mut()
}

/// The first four bytes of a transport header with ports.
fn ports_of<A>(tuple: &Tuple<A>) -> [u8; 4] {
    let [[a, b], [c, d]] = [tuple.source_port, tuple.destination_port].map(u16::to_be_bytes);
    [a, b, c, d]
}

/// In UDP, 0 means that no checksum was computed, and stays; a computed 0 is sent as 0xffff (RFC 768).
fn restored_checksum(checksum: u16, delta: u16, protocol: u8) -> u16 {
    match (protocol == crate::wire::protocol::UDP, checksum) {
        (true, 0) => 0,
        (true, _) => match apply(checksum, delta) {
            0 => 0xffff,
            changed => changed,
        },
        (false, _) => apply(checksum, delta),
    }
}

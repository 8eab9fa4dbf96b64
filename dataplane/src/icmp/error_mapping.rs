//! Mapping of ICMP errors about rewritten packets: the quoted packet is restored to what its sender sent.
//!
//! **Invariant:** an error is mapped completely or not at all, and a wrong checksum stays wrong.
//!
//! Not here: addresses of the error, which the decision gives.

use proto::Family;

use super::quote::{Quote, QuotedChecksum};
use crate::wire::checksum::{apply, apply_udp, delta, difference, sum};
use crate::wire::{
    Address, Ethernet, Headers, Icmp, Mac, Tuple, Udp, crc32c, forward_header, network_len, protocol, set_addresses, take_mut,
};

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
    let fits = network.len() >= usize::from(network_len::<A>())
        && quote.network_offset == usize::from(headers.transport_offset + Icmp::BYTES);
    fits.then_some(())?;

    let before = sum(quoted);
    restore(quoted, quote, &rewrite.quoted)?;
    // The quote begins at an even offset of the message, so its sums are sums of words of the whole.
    icmp.checksum.set(apply(icmp.checksum.get(), difference(before, sum(quoted))));
    let to = Tuple { source: rewrite.source, destination: rewrite.destination, ..headers.tuple };
    let addresses = delta(&headers.tuple, &to).l3;
    forward_header(network, rewrite.source, rewrite.destination, addresses)?;
    if A::FAMILY == Family::V6 {
        // ICMPv6 includes the addresses by a pseudo header (RFC 4443 section 2.3).
        icmp.checksum.set(apply(icmp.checksum.get(), addresses));
    }
    ethernet.set_addresses(rewrite.source_mac, rewrite.destination_mac);
    Some(())
}

/// Sets the tuple of a quoted packet to `to` and updates the checksums that the quote includes.
fn restore<A: Address>(quoted: &mut [u8], quote: &Quote<A>, to: &Tuple<A>) -> Option<()> {
    let deltas = delta(&quote.tuple, to);
    let (network, transport) = quoted.split_at_mut_checked(quote.transport_offset.checked_sub(quote.network_offset)?)?;
    let (ports, _) = take_mut::<Udp>(transport)?; // ports are in the same place in TCP, UDP and SCTP
    set_addresses(network, to.source, to.destination, deltas.l3)?;
    ports.source_port.set(to.source_port);
    ports.destination_port.set(to.destination_port);
    match quote.checksum {
        Some(QuotedChecksum::Internet { offset }) => {
            let apply_l4 = if quote.tuple.protocol == protocol::UDP { apply_udp } else { apply };
            let checksum = field_at::<2>(transport, offset.checked_sub(quote.transport_offset)?)?;
            *checksum = apply_l4(u16::from_be_bytes(*checksum), deltas.l4).to_be_bytes();
        }
        Some(QuotedChecksum::Crc32c { offset, len }) => {
            let checksum = field_at::<4>(transport, offset.checked_sub(quote.transport_offset)?)?;
            let ports = |tuple: &Tuple<A>| [tuple.source_port, tuple.destination_port];
            let change = crc32c::difference(ports(&quote.tuple), ports(to), len);
            *checksum = (u32::from_le_bytes(*checksum) ^ change).to_le_bytes();
        }
        None => {}
    }
    Some(())
}

fn field_at<const N: usize>(bytes: &mut [u8], at: usize) -> Option<&mut [u8; N]> {
    bytes.get_mut(at..)?.first_chunk_mut()
}

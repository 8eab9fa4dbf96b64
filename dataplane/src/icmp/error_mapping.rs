//! Mapping of ICMP errors about rewritten packets: the quoted packet is restored to what its sender sent.
//!
//! **Invariant:** an error is mapped completely or not at all, and a wrong checksum stays wrong.
//!
//! Not here: addresses of the error, which the decision gives.

use proto::Family;

use super::quote::{Quote, QuotedChecksum};
use crate::wire::checksum::{apply, apply_udp, delta, difference, sum};
use crate::wire::{
    Address, Ethernet, Headers, Icmp, Mac, Tuple, Udp, crc32c, forward_header, icmpv4, icmpv6, network_len, protocol,
    set_addresses, take_mut,
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

/// What the sender of a quoted packet knows otherwise, because the gateway has inserted bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuoteShift {
    /// The sequence number of the quoted TCP segment as its sender sent it.
    pub sequence: Option<u32>,
    /// Bytes that the gateway had inserted into the quoted packet: so much less than the MTU in the error may it have.
    pub inserted: u16,
}

/// Changes a mapped error about a packet of a shifted flow to what the sender of the quoted packet knows. A frame that
/// does not match `headers` and `quote` is not changed.
pub fn shift<A: Address>(frame: &mut [u8], headers: &Headers<A>, quote: &Quote<A>, change: QuoteShift) {
    let _ = try_shift(frame, headers, quote, change);
}

fn try_shift<A: Address>(frame: &mut [u8], headers: &Headers<A>, quote: &Quote<A>, change: QuoteShift) -> Option<()> {
    let start = usize::from(headers.transport_offset);
    let message = frame.get_mut(start..quote.header_end)?;
    let transport_at = quote.transport_offset.checked_sub(start)?;
    let checksum_at = match quote.checksum {
        Some(QuotedChecksum::Internet { offset }) => offset.checked_sub(start),
        _ => None,
    };
    let before = sum(message);
    let (icmp, _) = take_mut::<Icmp>(message)?;
    let (kind, code, checksum) = (icmp.kind, icmp.code, icmp.checksum.get());
    let rest = field_at::<4>(message, 4)?;
    *rest = less_mtu::<A>(kind, code, u32::from_be_bytes(*rest), change.inserted).to_be_bytes();
    if let Some(sequence) = change.sequence {
        let field = field_at::<4>(message, transport_at + 4)?;
        let difference = difference(sum(field), sum(&sequence.to_be_bytes()));
        *field = sequence.to_be_bytes();
        if let Some(quoted) = checksum_at.and_then(|at| field_at::<2>(message, at)) {
            *quoted = apply(u16::from_be_bytes(*quoted), difference).to_be_bytes();
        }
    }
    let after = sum(message);
    take_mut::<Icmp>(message)?.0.checksum.set(apply(checksum, difference(before, after)));
    Some(())
}

/// The second word of an error of this type and code, if the MTU in it counts `inserted` bytes that the sender does not
/// know.
fn less_mtu<A: Address>(kind: u8, code: u8, rest: u32, inserted: u16) -> u32 {
    match (A::FAMILY, kind, code) {
        // 0: unknown (RFC 1191).
        (Family::V4, icmpv4::UNREACHABLE, icmpv4::CODE_FRAGMENTATION_NEEDED) if rest & 0xffff != 0 => {
            rest & !0xffff | (rest & 0xffff).saturating_sub(inserted.into()).max(A::MTU_MIN.into())
        }
        (Family::V6, icmpv6::PACKET_TOO_BIG, _) => rest.saturating_sub(inserted.into()).max(A::MTU_MIN.into()),
        _ => rest,
    }
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

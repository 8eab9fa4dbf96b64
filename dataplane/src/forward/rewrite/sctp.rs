//! Rewriting of SCTP. Its checksum is a CRC over the SCTP packet alone: it covers the ports, but not the addresses.

use proto::Family;

use super::nat::{Rewrite, ipv4, ipv6};
use crate::wire::{Address, Ethernet, Headers, Ipv4, Ipv6, Sctp, crc32c, take_mut};

/// Rewrites an SCTP packet; only its headers are read. The verification tag stays: both ends know it.
#[inline(never)]
pub(super) fn try_sctp<A: Address>(frame: &mut [u8], headers: &Headers<A>, rewrite: &Rewrite<A>) -> Option<()> {
    let network_offset = usize::from(headers.network_offset);
    let network_len = headers.transport_offset.checked_sub(headers.network_offset)?;
    let sctp_len = headers.packet_len.checked_sub(network_len)?;
    let (link, packet) = frame.split_at_mut_checked(network_offset)?;
    let (network, transport) = packet.split_at_mut_checked(usize::from(network_len))?;
    let (ethernet, _) = take_mut::<Ethernet>(link)?;
    let (sctp, _) = take_mut::<Sctp>(transport)?;
    match A::FAMILY {
        Family::V4 => ipv4(take_mut::<Ipv4>(network)?.0, rewrite),
        Family::V6 => ipv6(take_mut::<Ipv6>(network)?.0, rewrite),
    }
    ethernet.destination = rewrite.destination_mac.0;
    ethernet.source = rewrite.source_mac.0;
    let old = ports(sctp);
    sctp.source_port.set(rewrite.source_port);
    sctp.destination_port.set(rewrite.destination_port);
    let change = crc32c::difference(old, ports(sctp), sctp_len);
    sctp.checksum.set(sctp.checksum.get() ^ change);
    Some(())
}

/// The first four bytes of the header.
fn ports(sctp: &Sctp) -> [u8; 4] {
    let [[a, b], [c, d]] = [sctp.source_port, sctp.destination_port].map(|port| port.get().to_be_bytes());
    [a, b, c, d]
}

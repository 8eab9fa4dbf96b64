//! Changes the bytes of a packet as a flow says: MACs, addresses, ports, hop limit, checksums.
//!
//! **Invariant:** all of it or nothing; checksums come out as a full computation would give them, and a wrong one stays
//! wrong. Whether and how to rewrite, and whether the hop limit allows another hop, was decided before.

use proto::Family;

use crate::checksum::{Deltas, HOP_DELTA, apply};
use crate::wire::{Ethernet, Ipv4, Ipv6, Tcp, Udp, take_mut};
use crate::{Address, Headers, Mac, Transport};

/// What a packet shall carry, and what that adds to its checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rewrite<A> {
    /// New source address.
    pub source: A,
    /// New destination address.
    pub destination: A,
    /// New source port.
    pub source_port: u16,
    /// New destination port.
    pub destination_port: u16,
    /// From the packet's addresses and ports to these.
    pub deltas: Deltas,
    /// MAC of the port it leaves by.
    pub source_mac: Mac,
    /// MAC of the next hop.
    pub destination_mac: Mac,
}

/// The part of the transport header that a rewrite touches.
enum Ports<'a> {
    Tcp(&'a mut Tcp),
    Udp(&'a mut Udp),
}

/// Rewrites a TCP or UDP packet; `headers` are those that `parse` found in `frame`. A hop limit of 0 or 1 must not come
/// here: its sender is told instead. Any other transport, or headers of another frame, is left alone.
#[inline]
pub fn nat<A: Address>(frame: &mut [u8], headers: &Headers<A>, rewrite: &Rewrite<A>) {
    let _ = try_nat(frame, headers, rewrite);
}

#[inline]
fn try_nat<A: Address>(frame: &mut [u8], headers: &Headers<A>, rewrite: &Rewrite<A>) -> Option<()> {
    let network_offset = usize::from(headers.network_offset);
    let network_len = usize::from(headers.transport_offset).checked_sub(network_offset)?;
    let (link, packet) = frame.split_at_mut_checked(network_offset)?;
    let (network, transport) = packet.split_at_mut_checked(network_len)?;
    let (ethernet, _) = take_mut::<Ethernet>(link)?;
    let ports = match headers.transport {
        Transport::Tcp { .. } => Ports::Tcp(take_mut::<Tcp>(transport)?.0),
        Transport::Udp => Ports::Udp(take_mut::<Udp>(transport)?.0),
        _ => return None,
    };
    match A::FAMILY {
        Family::V4 => ipv4(take_mut::<Ipv4>(network)?.0, rewrite),
        Family::V6 => ipv6(take_mut::<Ipv6>(network)?.0, rewrite),
    }
    ethernet.destination = rewrite.destination_mac.0;
    ethernet.source = rewrite.source_mac.0;
    match ports {
        Ports::Tcp(tcp) => {
            tcp.source_port.set(rewrite.source_port);
            tcp.destination_port.set(rewrite.destination_port);
            tcp.checksum.set(apply(tcp.checksum.get(), rewrite.deltas.l4));
        }
        Ports::Udp(udp) => {
            udp.source_port.set(rewrite.source_port);
            udp.destination_port.set(rewrite.destination_port);
            // 0 says "none computed" (RFC 768; RFC 6935 allows it to IPv6 tunnels) and stays; a computed 0 is sent as
            // 0xffff.
            let checksum = udp.checksum.get();
            if checksum != 0 {
                let changed = apply(checksum, rewrite.deltas.l4);
                udp.checksum.set(if changed == 0 { 0xffff } else { changed });
            }
        }
    }
    Some(())
}

#[inline]
fn ipv4<A: Address>(ip: &mut Ipv4, rewrite: &Rewrite<A>) {
    ip.source.set(low_half(rewrite.source));
    ip.destination.set(low_half(rewrite.destination));
    ip.ttl = ip.ttl.wrapping_sub(1);
    ip.checksum.set(apply(apply(ip.checksum.get(), rewrite.deltas.l3), HOP_DELTA));
}

#[inline]
fn ipv6<A: Address>(ip: &mut Ipv6, rewrite: &Rewrite<A>) {
    ip.source.set(rewrite.source.wide());
    ip.destination.set(rewrite.destination.wide());
    ip.hop_limit = ip.hop_limit.wrapping_sub(1);
}

/// An IPv4 address out of its widened form, which holds it in the low 32 bits.
#[inline]
fn low_half<A: Address>(address: A) -> u32 {
    (address.wide() & 0xffff_ffff) as u32
}

/// Gives a frame other Ethernet addresses and changes nothing else.
#[inline]
pub fn forward_macs(frame: &mut [u8], source: Mac, destination: Mac) {
    if let Some((ethernet, _)) = take_mut::<Ethernet>(frame) {
        ethernet.source = source.0;
        ethernet.destination = destination.0;
    }
}

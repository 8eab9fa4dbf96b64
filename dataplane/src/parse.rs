//! One pass over a frame's headers: what it is, where its parts are, or under which name it is dropped.
//!
//! **Invariant:** offsets and lengths of [`Headers`] lie within the frame; the fixed part of the transport header lies
//! within the packet, unless it is a fragment or [`Transport::Other`]. Checksums of TCP, UDP and ICMP are not verified:
//! a wrong one is passed on (FORWARDING section 9). Who owns an address is not known here.

use crate::checksum::header_holds;
use crate::wire::{
    Arp, Ethernet, Extension, FragmentHeader, Icmp, Ipv4, Ipv6, RoutingHeader, Tcp, Udp, VlanTag, ether_type, next_header,
    protocol, take,
};
use crate::{DropReason, Headers, Parsed, Transport, Tuple};

/// Where the IP header of an untagged frame begins.
const NETWORK_OFFSET: u16 = Ethernet::BYTES;

/// Extension headers that are walked over, at most. RFC 8200 section 4.1 has each of the 4 kinds once, destination
/// options twice: 5, and some room.
const EXTENSION_HEADERS_MAX: usize = 8;

/// Bytes of extension headers that are walked over, at most: 32 for each header.
const EXTENSION_BYTES_MAX: u16 = 256;

/// Parses a frame.
///
/// # Errors
/// The reason to drop it: `malformed`, `ipv4_checksum`, `source_route`, `martian_source`, `same_source_destination`.
#[inline]
pub fn parse(frame: &[u8]) -> Result<Parsed, DropReason> {
    let (ethernet, packet) = take::<Ethernet>(frame).ok_or(DropReason::Malformed)?;
    match ethernet.ether_type.get() {
        ether_type::IPV4 => ipv4(packet, ethernet.is_group()),
        ether_type::IPV6 => ipv6(packet, ethernet.is_group()),
        ether_type::ARP => {
            let (arp, _) = take::<Arp>(packet).ok_or(DropReason::Malformed)?;
            Ok(if arp.is_ipv4_over_ethernet() { Parsed::Arp } else { Parsed::Other })
        }
        ether_type::VLAN | ether_type::SERVICE_VLAN => {
            take::<VlanTag>(packet).map(|_| Parsed::Other).ok_or(DropReason::Malformed)
        }
        _ => Ok(Parsed::Other),
    }
}

#[inline]
fn ipv4(bytes: &[u8], group_frame: bool) -> Result<Parsed, DropReason> {
    let (ip, _) = take::<Ipv4>(bytes).ok_or(DropReason::Malformed)?;
    let (header_len, packet_len) = (ip.header_len(), ip.total_len.get());
    // A frame may be longer than its packet: Ethernet pads to 60 bytes.
    let packet = bytes.get(..usize::from(packet_len)).ok_or(DropReason::Malformed)?;
    let (header, payload) = packet.split_at_checked(usize::from(header_len)).ok_or(DropReason::Malformed)?;
    if ip.version_ihl == Ipv4::PLAIN {
        if !bytes.first_chunk::<20>().is_some_and(|h| header_holds(h)) {
            return Err(DropReason::Ipv4Checksum);
        }
    } else {
        ipv4_unusual(ip, header)?;
    }
    let (source, destination) = (ip.source.get(), ip.destination.get());
    if source == 0 {
        // A host that has no address yet (RFC 2131) may ask for one; Linux knows what to do with that.
        return Ok(Parsed::Other);
    }
    if is_martian_v4(source) {
        return Err(DropReason::MartianSource);
    }
    if source == destination {
        return Err(DropReason::SameSourceDestination);
    }
    let (transport, source_port, destination_port) =
        if ip.is_fragment() { (Transport::Fragment, 0, 0) } else { transport(ip.protocol, protocol::ICMP, payload)? };
    Ok(Parsed::V4(Headers {
        tuple: Tuple { source, destination, source_port, destination_port, protocol: ip.protocol },
        transport,
        network_offset: NETWORK_OFFSET,
        transport_offset: NETWORK_OFFSET + header_len,
        packet_len,
        hop_limit: ip.ttl,
        group_frame,
        dont_fragment: ip.fragmentation.get() & Ipv4::DONT_FRAGMENT != 0,
    }))
}

/// Headers that are no plain 20 bytes of IPv4: other versions, wrong lengths, options.
#[cold]
fn ipv4_unusual(ip: &Ipv4, header: &[u8]) -> Result<(), DropReason> {
    if ip.version() != 4 || header.len() < usize::from(Ipv4::BYTES) {
        return Err(DropReason::Malformed);
    }
    if !header_holds(header) {
        return Err(DropReason::Ipv4Checksum);
    }
    let mut options = header.get(usize::from(Ipv4::BYTES)..).unwrap_or_default();
    while let [kind, rest @ ..] = options {
        options = match kind {
            0 => return Ok(()), // end of options (RFC 791 section 3.1)
            1 => rest,          // no operation
            // Loose and strict source route: never forwarded (RFC 7126 sections 4.3 and 4.4).
            131 | 137 => return Err(DropReason::SourceRoute),
            _ => {
                let len = rest.first().map_or(0, |len| usize::from(*len));
                if len < 2 {
                    return Err(DropReason::Malformed);
                }
                options.get(len..).ok_or(DropReason::Malformed)?
            }
        };
    }
    Ok(())
}

/// RFC 6890: "this network", loopback, multicast, reserved and broadcast are nobody's source.
#[inline]
fn is_martian_v4(source: u32) -> bool {
    let top = source >> 24;
    top == 0 || top == 127 || top >= 224
}

#[inline]
fn ipv6(bytes: &[u8], group_frame: bool) -> Result<Parsed, DropReason> {
    let (ip, rest) = take::<Ipv6>(bytes).ok_or(DropReason::Malformed)?;
    if ip.version() != 6 {
        return Err(DropReason::Malformed);
    }
    // Payloads of more than 65,495 bytes fit no frame of ours (a packet is at most 65,535 bytes in `Headers`).
    let packet_len = ip.payload_len.get().checked_add(Ipv6::BYTES).ok_or(DropReason::Malformed)?;
    let payload = rest.get(..usize::from(ip.payload_len.get())).ok_or(DropReason::Malformed)?;
    let chain = match ip.next_header {
        protocol::TCP | protocol::UDP | protocol::ICMPV6 => {
            Chain { protocol: ip.next_header, extension_bytes: 0, end: ChainEnd::Transport }
        }
        first => walk(first, payload)?,
    };
    let (source, destination) = (ip.source.get(), ip.destination.get());
    if source == 0 {
        // Duplicate address detection, or a router solicitation (RFC 4861 sections 4.1 and 4.3): Linux's.
        return Ok(Parsed::Other);
    }
    if is_martian_v6(source) {
        return Err(DropReason::MartianSource);
    }
    if source == destination {
        return Err(DropReason::SameSourceDestination);
    }
    let (transport, source_port, destination_port) = match chain.end {
        ChainEnd::Transport => {
            transport(chain.protocol, protocol::ICMPV6, payload.get(usize::from(chain.extension_bytes)..).unwrap_or_default())?
        }
        ChainEnd::Fragment => (Transport::Fragment, 0, 0),
        ChainEnd::Opaque => (Transport::Other, 0, 0),
    };
    Ok(Parsed::V6(Headers {
        tuple: Tuple { source, destination, source_port, destination_port, protocol: chain.protocol },
        transport,
        network_offset: NETWORK_OFFSET,
        transport_offset: NETWORK_OFFSET + Ipv6::BYTES + chain.extension_bytes,
        packet_len,
        hop_limit: ip.hop_limit,
        group_frame,
        dont_fragment: true, // routers never fragment IPv6 (RFC 8200 section 5)
    }))
}

/// RFC 6890: loopback, IPv4-mapped (never on a wire) and multicast are nobody's source.
#[inline]
fn is_martian_v6(source: u128) -> bool {
    source == 1 || source >> 120 == 0xff || source >> 32 == 0xffff
}

/// Where the extension headers lead to.
struct Chain {
    protocol: u8,
    /// Bytes of extension headers before what `end` tells of.
    extension_bytes: u16,
    end: ChainEnd,
}

enum ChainEnd {
    /// A transport header, or any other protocol.
    Transport,
    /// A part of a datagram.
    Fragment,
    /// Something that must not be rewritten, whatever it is.
    Opaque,
}

/// Walks over IPv6 extension headers (RFC 8200 section 4).
fn walk(first: u8, payload: &[u8]) -> Result<Chain, DropReason> {
    let mut next = first;
    let mut end = ChainEnd::Transport;
    let mut offset: u16 = 0;
    for position in 0..=EXTENSION_HEADERS_MAX {
        let rest = payload.get(usize::from(offset)..).ok_or(DropReason::Malformed)?;
        let header_len = match next {
            // Only right after the IPv6 header (RFC 8200 section 4.1).
            next_header::HOP_BY_HOP if position > 0 => return Err(DropReason::Malformed),
            next_header::HOP_BY_HOP | next_header::DESTINATION_OPTIONS => {
                let (extension, _) = take::<Extension>(rest).ok_or(DropReason::Malformed)?;
                next = extension.next_header;
                extension.header_len()
            }
            next_header::ROUTING => {
                let (routing, _) = take::<RoutingHeader>(rest).ok_or(DropReason::Malformed)?;
                if routing.kind == 0 {
                    return Err(DropReason::SourceRoute); // RFC 5095
                }
                if routing.segments_left > 0 {
                    // Checksums count the last destination, and it is not in the IPv6 header yet (RFC 8200 section 8.1).
                    end = ChainEnd::Opaque;
                }
                next = routing.extension.next_header;
                routing.extension.header_len()
            }
            next_header::FRAGMENT => {
                let (fragment, _) = take::<FragmentHeader>(rest).ok_or(DropReason::Malformed)?;
                next = fragment.next_header;
                if !fragment.is_atomic() {
                    let extension_bytes = offset + FragmentHeader::BYTES;
                    return Ok(Chain { protocol: next, extension_bytes, end: ChainEnd::Fragment });
                }
                FragmentHeader::BYTES // RFC 6946: a whole datagram
            }
            _ => return Ok(Chain { protocol: next, extension_bytes: offset, end }),
        };
        offset += header_len;
        if offset > EXTENSION_BYTES_MAX {
            return Err(DropReason::Malformed);
        }
    }
    Err(DropReason::Malformed)
}

/// The transport and its ports. `icmp` is the number that ICMP has in the packet's family; the other family's is nothing
/// we know.
#[inline]
fn transport(number: u8, icmp: u8, payload: &[u8]) -> Result<(Transport, u16, u16), DropReason> {
    match number {
        protocol::TCP => {
            let (tcp, _) = take::<Tcp>(payload).ok_or(DropReason::Malformed)?;
            let header_len = tcp.header_len();
            if header_len < Tcp::BYTES || usize::from(header_len) > payload.len() {
                return Err(DropReason::Malformed);
            }
            Ok((Transport::Tcp { flags: tcp.flags }, tcp.source_port.get(), tcp.destination_port.get()))
        }
        protocol::UDP => {
            let (udp, _) = take::<Udp>(payload).ok_or(DropReason::Malformed)?;
            let len = udp.len.get();
            if len < Udp::BYTES || usize::from(len) > payload.len() {
                return Err(DropReason::Malformed);
            }
            Ok((Transport::Udp, udp.source_port.get(), udp.destination_port.get()))
        }
        protocol::SCTP => {
            // Ports, verification tag, checksum (RFC 9260 section 3.1).
            let header = payload.first_chunk::<12>().ok_or(DropReason::Malformed)?;
            let [a, b, c, d, ..] = *header;
            Ok((Transport::Sctp, u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])))
        }
        _ if number == icmp => {
            let (icmp, _) = take::<Icmp>(payload).ok_or(DropReason::Malformed)?;
            Ok((Transport::Icmp { kind: icmp.kind, code: icmp.code }, 0, 0))
        }
        _ => Ok((Transport::Other, 0, 0)),
    }
}

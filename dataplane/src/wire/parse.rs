//! The parser: one pass over a frame's headers. It returns the kind of frame with offsets, or why it cannot be.
//!
//! **Invariant:** offsets and lengths of [`Headers`] lie within the frame; the fixed part of the transport header lies
//! within the packet, unless it is a fragment or [`Transport::Other`].
//!
//! Not here: verification of TCP, UDP and ICMP checksums (wrong ones are passed on, FORWARDING section 9), and who owns
//! an address.

use std::net::IpAddr;

use proto::Family;

use super::address::{Address, Tuple, is_group_address};
use super::buffer::take;
use super::checksum::header_holds;
use super::headers::{Headers, Parsed, Transport, sctp_chunk};
use super::icmp::{Icmp, icmpv6};
use super::ip::{Chain, ChainEnd, ParseError, longer_than_frame, walk};
use super::ip::{Ipv4, Ipv6, protocol};
use super::link::{Arp, Ethernet, VlanTag, behind, ether_type};
use super::transport::{Chunk, Sctp, Tcp, Udp};

/// Offset of the IP header in an untagged frame.
const NETWORK_OFFSET: u16 = Ethernet::BYTES;

/// Bytes of an INIT chunk without parameters (RFC 9260 section 3.3.2).
const INIT_BYTES: u16 = 20;

/// The payload of an Ethernet frame, and whether the frame was sent to a group.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Carried<'f> {
    V4(&'f [u8], bool),
    V6(&'f [u8], bool),
    Arp,
    /// A frame with VLAN tags.
    Tagged,
    Other,
}

/// Parses a frame, through up to two VLAN tags. An ARP packet after tags is [`Parsed::Other`], since views of ARP begin
/// at a fixed offset.
///
/// # Errors
/// See [`ParseError`].
#[inline]
pub fn parse(frame: &[u8]) -> Result<Parsed, ParseError> {
    let is_group = take::<Ethernet>(frame).is_some_and(|(ethernet, _)| ethernet.is_group());
    Ok(match carried(frame, is_group)? {
        Carried::V4(packet, group_frame) => ipv4(packet, group_frame, Parsed::V4)?.unwrap_or(Parsed::Other),
        Carried::V6(packet, group_frame) => ipv6(packet, group_frame, Parsed::V6)?.unwrap_or(Parsed::Other),
        Carried::Arp => Parsed::Arp,
        Carried::Tagged => tagged(frame)?,
        Carried::Other => Parsed::Other,
    })
}

/// Parses the payload after the tags of a frame.
fn tagged(frame: &[u8]) -> Result<Parsed, ParseError> {
    let (ethernet, _) = take::<Ethernet>(frame).ok_or(ParseError::Malformed)?;
    let (ether_type, packet, tag_bytes) = behind(frame).ok_or(ParseError::Malformed)?;
    Ok(match carried_as(ether_type, packet, ethernet.is_group())? {
        Carried::V4(packet, group_frame) => {
            ipv4(packet, group_frame, |headers| Parsed::V4(moved(headers, tag_bytes)))?.unwrap_or(Parsed::Other)
        }
        Carried::V6(packet, group_frame) => {
            ipv6(packet, group_frame, |headers| Parsed::V6(moved(headers, tag_bytes)))?.unwrap_or(Parsed::Other)
        }
        Carried::Arp | Carried::Tagged | Carried::Other => Parsed::Other,
    })
}

/// The headers moved by up to 8 bytes towards the end of the frame.
fn moved<A>(mut headers: Headers<A>, bytes: u16) -> Headers<A> {
    headers.network_offset += bytes;
    headers.transport_offset += bytes;
    headers
}

/// Parses the Ethernet header of a frame; the caller knows whether it was sent to a group.
#[inline(always)]
pub(crate) fn carried(frame: &[u8], is_group: bool) -> Result<Carried<'_>, ParseError> {
    let (ethernet, packet) = take::<Ethernet>(frame).ok_or(ParseError::Malformed)?;
    carried_as(ethernet.ether_type.get(), packet, is_group)
}

#[inline(always)]
fn carried_as(ether_type: u16, packet: &[u8], is_group: bool) -> Result<Carried<'_>, ParseError> {
    match ether_type {
        ether_type::IPV4 => Ok(Carried::V4(packet, is_group)),
        ether_type::IPV6 => Ok(Carried::V6(packet, is_group)),
        ether_type::ARP => {
            let (arp, _) = take::<Arp>(packet).ok_or(ParseError::Malformed)?;
            Ok(if arp.is_ipv4_over_ethernet() { Carried::Arp } else { Carried::Other })
        }
        ether_type::VLAN | ether_type::SERVICE_VLAN => {
            take::<VlanTag>(packet).map(|_| Carried::Tagged).ok_or(ParseError::Malformed)
        }
        _ => Ok(Carried::Other),
    }
}

/// Parses an IPv4 packet and passes its headers to `found`; `None` if it goes to the kernel whatever it carries.
/// Inlined, so that headers are written where they stay: returned by value they are stored in small pieces and loaded
/// in large ones, which stalls the processor.
#[inline(always)]
pub(crate) fn ipv4<T>(bytes: &[u8], group_frame: bool, found: impl FnOnce(Headers<u32>) -> T) -> Result<Option<T>, ParseError> {
    let (ip, _) = take::<Ipv4>(bytes).ok_or(ParseError::Malformed)?;
    let (header_len, packet_len) = (ip.header_len(), ip.total_len.get());
    // A frame may be longer than its packet: Ethernet pads to 60 bytes.
    let packet = bytes.get(..usize::from(packet_len)).ok_or_else(|| longer_than_frame(bytes))?;
    let (header, payload) = packet.split_at_checked(usize::from(header_len)).ok_or(ParseError::Malformed)?;
    if ip.version_ihl == Ipv4::PLAIN {
        if !bytes.first_chunk::<20>().is_some_and(|h| header_holds(h)) {
            return Err(ParseError::Ipv4Checksum);
        }
    } else {
        ipv4_unusual(ip, header)?;
    }
    let (source, destination) = (ip.source.get(), ip.destination.get());
    if source == 0 && is_group_address(destination) {
        // A host without address may request one (RFC 2131); the kernel handles that.
        return Ok(None);
    }
    if is_martian_v4(source) {
        return Err(ParseError::MartianSource);
    }
    if source == destination {
        return Err(ParseError::SameSourceDestination);
    }
    let (transport, source_port, destination_port) =
        if ip.is_fragment() { (Transport::Fragment, 0, 0) } else { transport(ip.protocol, protocol::ICMP, payload)? };
    Ok(Some(found(Headers {
        tuple: Tuple { source, destination, source_port, destination_port, protocol: ip.protocol },
        transport,
        network_offset: NETWORK_OFFSET,
        transport_offset: NETWORK_OFFSET + header_len,
        packet_len,
        hop_limit: ip.ttl,
        group_frame,
        dont_fragment: ip.fragmentation.get() & Ipv4::DONT_FRAGMENT != 0,
    })))
}

/// IPv4 headers that are not the plain 20 bytes: other versions, wrong lengths, options.
#[cold]
fn ipv4_unusual(ip: &Ipv4, header: &[u8]) -> Result<(), ParseError> {
    if ip.version() != 4 || header.len() < usize::from(Ipv4::BYTES) {
        return Err(ParseError::Malformed);
    }
    if !header_holds(header) {
        return Err(ParseError::Ipv4Checksum);
    }
    let mut options = header.get(usize::from(Ipv4::BYTES)..).unwrap_or_default();
    while let [kind, rest @ ..] = options {
        options = match kind {
            0 => return Ok(()), // end of options (RFC 791 section 3.1)
            1 => rest,          // no operation
            // Loose and strict source route: never forwarded (RFC 7126 sections 4.3 and 4.4).
            131 | 137 => return Err(ParseError::SourceRoute),
            _ => {
                let len = rest.first().map_or(0, |len| usize::from(*len));
                if len < 2 {
                    return Err(ParseError::Malformed);
                }
                options.get(len..).ok_or(ParseError::Malformed)?
            }
        };
    }
    Ok(())
}

/// Invalid source addresses by RFC 6890: "this network", loopback, multicast and broadcast. The rest of the reserved
/// 240.0.0.0/4 is unicast, as in Linux.
#[inline]
fn is_martian_v4(source: u32) -> bool {
    let top = source >> 24;
    top == 0 || top == 127 || source >> 28 == 0xe || source == u32::MAX
}

/// As [`ipv4`], for IPv6.
#[inline(always)]
pub(crate) fn ipv6<T>(bytes: &[u8], group_frame: bool, found: impl FnOnce(Headers<u128>) -> T) -> Result<Option<T>, ParseError> {
    let (ip, rest) = take::<Ipv6>(bytes).ok_or(ParseError::Malformed)?;
    if ip.version() != 6 {
        return Err(ParseError::Malformed);
    }
    // Payloads of more than 65,495 bytes fit no frame of the engine (a packet has at most 65,535 bytes in `Headers`).
    let packet_len = ip.payload_len.get().checked_add(Ipv6::BYTES).ok_or(ParseError::Malformed)?;
    let payload = rest.get(..usize::from(ip.payload_len.get())).ok_or(ParseError::Truncated)?;
    let chain = match ip.next_header {
        protocol::TCP | protocol::UDP | protocol::ICMPV6 => {
            Chain { protocol: ip.next_header, extension_bytes: 0, end: ChainEnd::Transport }
        }
        first => walk(first, payload)?,
    };
    let (source, destination) = (ip.source.get(), ip.destination.get());
    if is_martian_v6(source) && !is_address_probe((source, destination), ip.hop_limit, &chain, payload)? {
        return Ok(None);
    }
    if source == destination {
        return Err(ParseError::SameSourceDestination);
    }
    let (transport, source_port, destination_port) = match chain.end {
        ChainEnd::Transport => {
            transport(chain.protocol, protocol::ICMPV6, payload.get(usize::from(chain.extension_bytes)..).unwrap_or_default())?
        }
        ChainEnd::Fragment => (Transport::Fragment, 0, 0),
        ChainEnd::Opaque => (Transport::Other, 0, 0),
    };
    if let Transport::Icmp { kind, .. } = transport
        && came_through_a_router(kind, ip.hop_limit)
    {
        return Err(ParseError::Malformed);
    }
    Ok(Some(found(Headers {
        tuple: Tuple { source, destination, source_port, destination_port, protocol: chain.protocol },
        transport,
        network_offset: NETWORK_OFFSET,
        transport_offset: NETWORK_OFFSET + Ipv6::BYTES + chain.extension_bytes,
        packet_len,
        hop_limit: ip.hop_limit,
        group_frame,
        dont_fragment: true, // routers never fragment IPv6 (RFC 8200 section 5)
    })))
}

/// Invalid source addresses by RFC 6890: loopback, IPv4-mapped (never on a wire), multicast, and, towards one host, the
/// unspecified address.
#[inline]
fn is_martian_v6(source: u128) -> bool {
    source <= 1 || source >> 120 == 0xff || source >> 32 == 0xffff
}

/// Whether a message of ICMPv6 is neighbour discovery that came through a router (RFC 4861 sections 6.1, 7.1 and 8.1).
fn came_through_a_router(kind: u8, hop_limit: u8) -> bool {
    icmpv6::NEIGHBOUR_DISCOVERY.contains(&kind) && hop_limit != icmpv6::NEIGHBOUR_HOP_LIMIT
}

/// Whether an address is link-local and must not be forwarded to another link (RFC 3927 section 2.7, RFC 4291 section
/// 2.5.6).
#[inline]
pub(crate) fn is_link_local<A: Address>(address: A) -> bool {
    match A::FAMILY {
        Family::V4 => address.wide() >> 16 == 0xa9fe,
        Family::V6 => address.wide() >> 118 == 0xfe80 >> 6,
    }
}

/// Whether no packet may have this source address.
pub(crate) fn is_martian<A: Address>(source: A) -> bool {
    match source.ip() {
        IpAddr::V4(source) => is_martian_v4(source.into()),
        IpAddr::V6(source) => is_martian_v6(source.into()),
    }
}

/// The addresses that no packet from another link may have as its source, as ranges of [`Address::wide`]: those of
/// [`is_martian`] and [`is_link_local`].
pub(crate) fn never_sources<A: Address>() -> impl Iterator<Item = (u128, u128)> {
    const V4: [(u128, u128); 5] = [
        (0, 0x00ff_ffff),
        (0x7f00_0000, 0x7fff_ffff),
        (0xa9fe_0000, 0xa9fe_ffff),
        (0xe000_0000, 0xefff_ffff),
        (0xffff_ffff, 0xffff_ffff),
    ];
    const V6: [(u128, u128); 4] =
        [(0, 1), (0xffff << 32, (0xffff << 32) + 0xffff_ffff), (0xfe80 << 112, (0xfec0 << 112) - 1), (0xff << 120, u128::MAX)];
    match A::FAMILY {
        Family::V4 => &V4[..],
        Family::V6 => &V6,
    }
    .iter()
    .copied()
}

/// For a packet with an invalid source: whether it is a duplicate address detection, which solicits its own future
/// address from the unspecified one. False is another packet of a host without address to a group, such as a router
/// solicitation (RFC 4861 sections 4.1 and 4.3), which goes to the kernel.
#[cold]
fn is_address_probe(ends: (u128, u128), hop_limit: u8, chain: &Chain, payload: &[u8]) -> Result<bool, ParseError> {
    let (source, destination) = ends;
    if source != 0 || !is_group_address(destination) {
        return Err(ParseError::MartianSource);
    }
    let is_icmp = chain.end == ChainEnd::Transport && chain.protocol == protocol::ICMPV6;
    let kind = payload.get(usize::from(chain.extension_bytes)).filter(|_| is_icmp);
    if kind.is_some_and(|kind| came_through_a_router(*kind, hop_limit)) {
        return Err(ParseError::Malformed);
    }
    Ok(kind == Some(&icmpv6::NEIGHBOUR_SOLICITATION))
}

/// The transport and its ports. `icmp` is the protocol number of ICMP in the packet's family; that of the other family
/// is an unknown protocol.
#[inline(always)]
fn transport(number: u8, icmp: u8, payload: &[u8]) -> Result<(Transport, u16, u16), ParseError> {
    match number {
        protocol::TCP => {
            let (tcp, _) = take::<Tcp>(payload).ok_or(ParseError::Malformed)?;
            let header_len = tcp.header_len();
            if header_len < Tcp::BYTES || usize::from(header_len) > payload.len() {
                return Err(ParseError::Malformed);
            }
            Ok((Transport::Tcp { flags: tcp.flags }, tcp.source_port.get(), tcp.destination_port.get()))
        }
        protocol::UDP => {
            let (udp, _) = take::<Udp>(payload).ok_or(ParseError::Malformed)?;
            let len = udp.len.get();
            if len < Udp::BYTES || usize::from(len) > payload.len() {
                return Err(ParseError::Malformed);
            }
            Ok((Transport::Udp, udp.source_port.get(), udp.destination_port.get()))
        }
        protocol::SCTP => {
            let chunk = sctp_chunk_kind(payload).ok_or(ParseError::Malformed)?;
            let (sctp, _) = take::<Sctp>(payload).ok_or(ParseError::Malformed)?;
            Ok((Transport::Sctp { chunk }, sctp.source_port.get(), sctp.destination_port.get()))
        }
        _ if number == icmp => {
            let (icmp, _) = take::<Icmp>(payload).ok_or(ParseError::Malformed)?;
            Ok((Transport::Icmp { kind: icmp.kind, code: icmp.code }, 0, 0))
        }
        _ => Ok((Transport::Other, 0, 0)),
    }
}

/// The kind of the first chunk of a whole SCTP packet. An INIT is the only chunk of its packet (RFC 9260 section
/// 8.5.1). The function returns one byte instead of the transport, so that the results for TCP and UDP stay in
/// registers.
#[inline(never)]
fn sctp_chunk_kind(payload: &[u8]) -> Option<u8> {
    let kind = sctp_first_chunk_kind(payload)?;
    if kind == sctp_chunk::INIT {
        let chunks = payload.get(usize::from(Sctp::BYTES)..)?;
        let behind = take::<Chunk>(chunks).and_then(|(init, _)| chunks.len().checked_sub(usize::from(init.len.get())))?;
        if behind >= usize::from(Chunk::BYTES) {
            return None;
        }
    }
    Some(kind)
}

/// The kind of the first chunk, which may be truncated. `None` without a chunk, for INIT with a tag other than 0, and
/// for anything else with tag 0 (RFC 9260 section 8.5): a receiver discards those.
pub(crate) fn sctp_first_chunk_kind(payload: &[u8]) -> Option<u8> {
    let (sctp, chunks) = take::<Sctp>(payload)?;
    let (first, _) = take::<Chunk>(chunks)?;
    let is_init = first.kind == sctp_chunk::INIT;
    let is_whole = first.len.get() >= if is_init { INIT_BYTES } else { Chunk::BYTES };
    (is_whole && is_init == (sctp.tag.get() == 0)).then_some(first.kind)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use proptest::prelude::*;

    use super::*;
    use crate::testing::{Packet, Segment, arp_request, neighbour_solicitation};
    use crate::wire::headers::tcp_flags;

    const CLIENT: &str = "198.51.100.7:5555";
    const VIP: &str = "192.0.2.100:80";
    const CLIENT6: &str = "[2001:db8::7]:5555";
    const VIP6: &str = "[2001:db8::1:100]:80";

    fn v4(frame: &[u8]) -> Headers<u32> {
        match parse(frame) {
            Ok(Parsed::V4(headers)) => headers,
            other => panic!("expected IPv4, found {other:?}"),
        }
    }

    fn v6(frame: &[u8]) -> Headers<u128> {
        match parse(frame) {
            Ok(Parsed::V6(headers)) => headers,
            other => panic!("expected IPv6, found {other:?}"),
        }
    }

    /// A TCP packet of IPv4 with its addresses replaced.
    fn from_v4(source: Ipv4Addr) -> Vec<u8> {
        Packet { source: source.into(), ..Packet::tcp(CLIENT, VIP) }.build()
    }

    fn from_v6(source: &str) -> Vec<u8> {
        let source: Ipv6Addr = source.parse().unwrap();
        Packet { source: source.into(), ..Packet::tcp(CLIENT6, VIP6) }.build()
    }

    fn with_options(options: &[u8]) -> Vec<u8> {
        Packet { options: options.to_vec(), ..Packet::tcp(CLIENT, VIP) }.build()
    }

    fn with_extensions(extensions: &[(u8, &[u8])]) -> Vec<u8> {
        let extensions = extensions.iter().map(|(number, bytes)| (*number, bytes.to_vec())).collect();
        Packet { extensions, ..Packet::tcp(CLIENT6, VIP6) }.build()
    }

    /// The frame with bytes replaced, and a correct checksum in a plain IPv4 header.
    fn patched(mut frame: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        if frame[12..14] == [8, 0] && frame.len() >= 34 {
            frame[24..26].fill(0);
            let checksum = crate::wire::checksum::finish(crate::wire::checksum::sum(&frame[14..34]));
            frame[24..26].copy_from_slice(&checksum.to_be_bytes());
        }
        frame
    }

    const OPTION_HEADER: &[u8] = &[0, 0, 1, 4, 0, 0, 0, 0];

    #[test]
    fn frames_that_are_dropped_with_their_reasons() {
        let tcp = || Packet::tcp(CLIENT, VIP).build();
        let udp = || Packet::udp(CLIENT, VIP).payload(b"hello").build();
        let tcp6 = || Packet::tcp(CLIENT6, VIP6).build();
        let tagged = [&tcp()[..12], &[0x81, 0, 0]].concat();
        let mut wrong_sum = tcp();
        wrong_sum[24] ^= 1;
        let rows: Vec<(&str, Vec<u8>, ParseError)> = vec![
            ("an empty frame", vec![], ParseError::Malformed),
            ("a frame shorter than Ethernet's header", tcp()[..13].to_vec(), ParseError::Malformed),
            ("a frame that ends in its VLAN tag", tagged, ParseError::Malformed),
            (
                "an ARP packet cut short",
                arp_request([10, 0, 0, 1].into(), [10, 0, 0, 2].into())[..41].to_vec(),
                ParseError::Malformed,
            ),
            ("an IPv4 header cut short", tcp()[..33].to_vec(), ParseError::Malformed),
            ("IPv4 of another version", patched(tcp(), 14, &[0x65]), ParseError::Malformed),
            ("an IPv4 header length below 20", patched(tcp(), 14, &[0x44]), ParseError::Malformed),
            ("an IPv4 header longer than the packet", patched(tcp(), 14, &[0x4f]), ParseError::Malformed),
            ("a total length below the header's", patched(tcp(), 16, &[0, 19]), ParseError::Malformed),
            ("a total length beyond the frame", patched(tcp(), 16, &[0, 41]), ParseError::Truncated),
            ("the same with a wrong checksum", [&tcp()[..16], &[0, 41], &tcp()[18..]].concat(), ParseError::Malformed),
            ("a TCP header cut short by the total length", patched(tcp(), 16, &[0, 39]), ParseError::Malformed),
            ("a TCP data offset below 20", patched(tcp(), 46, &[0x40]), ParseError::Malformed),
            ("a TCP data offset beyond the packet", patched(tcp(), 46, &[0x60]), ParseError::Malformed),
            ("a UDP length below 8", patched(udp(), 38, &[0, 7]), ParseError::Malformed),
            ("a UDP length beyond the packet", patched(udp(), 38, &[0, 14]), ParseError::Malformed),
            ("an ICMP message cut short", patched(tcp(), 16, &[0, 27, 0, 0, 0x40, 0, 9, 1]), ParseError::Malformed),
            ("an SCTP header cut short", patched(tcp(), 16, &[0, 31, 0, 0, 0x40, 0, 9, 132]), ParseError::Malformed),
            ("a wrong IPv4 header checksum", wrong_sum, ParseError::Ipv4Checksum),
            ("a loose source route", with_options(&[1, 131, 3, 4]), ParseError::SourceRoute),
            ("a strict source route", with_options(&[137, 3, 4, 0]), ParseError::SourceRoute),
            ("an option without length", with_options(&[1, 1, 1, 7]), ParseError::Malformed),
            ("an option of length 1", with_options(&[7, 1, 0, 0]), ParseError::Malformed),
            ("an option beyond the header", with_options(&[7, 5, 0, 0]), ParseError::Malformed),
            ("a source in this network", from_v4([0, 1, 2, 3].into()), ParseError::MartianSource),
            ("a loopback source", from_v4([127, 0, 0, 1].into()), ParseError::MartianSource),
            ("a multicast source", from_v4([224, 0, 0, 5].into()), ParseError::MartianSource),
            ("broadcast as source", from_v4([255; 4].into()), ParseError::MartianSource),
            ("source and destination equal", from_v4([192, 0, 2, 100].into()), ParseError::SameSourceDestination),
            ("an IPv6 header cut short", tcp6()[..53].to_vec(), ParseError::Malformed),
            ("IPv6 of another version", patched(tcp6(), 14, &[0x40]), ParseError::Malformed),
            ("a payload length beyond the frame", patched(tcp6(), 18, &[0, 21]), ParseError::Truncated),
            ("a payload longer than any packet", patched(tcp6(), 18, &[0xff, 0xff]), ParseError::Malformed),
            ("a TCP header cut short by the payload length", patched(tcp6(), 18, &[0, 19]), ParseError::Malformed),
            ("the IPv6 loopback as source", from_v6("::1"), ParseError::MartianSource),
            ("an IPv4-mapped source", from_v6("::ffff:192.0.2.1"), ParseError::MartianSource),
            ("an IPv6 multicast source", from_v6("ff02::1"), ParseError::MartianSource),
            ("IPv6 source and destination equal", from_v6("2001:db8::1:100"), ParseError::SameSourceDestination),
            ("a routing header of type 0", with_extensions(&[(43, &[0; 8])]), ParseError::SourceRoute),
            (
                "hop-by-hop options that are not first",
                with_extensions(&[(60, OPTION_HEADER), (0, OPTION_HEADER)]),
                ParseError::Malformed,
            ),
            ("an extension header beyond the packet", with_extensions(&[(60, &[0, 9, 0, 0, 0, 0, 0, 0])]), ParseError::Malformed),
            ("nine extension headers", with_extensions(&[(60, OPTION_HEADER); 9]), ParseError::Malformed),
            (
                "more than 256 bytes of extension headers",
                with_extensions(&[(60, &[&[0, 32][..], &[0; 262]].concat())]),
                ParseError::Malformed,
            ),
        ];
        for (sentence, frame, expected) in rows {
            assert_eq!(parse(&frame), Err(expected), "{sentence}");
        }
    }

    #[test]
    fn frames_for_the_kernel() {
        let ethernet = |ether_type: u16, rest: &[u8]| [&[2; 12][..], &ether_type.to_be_bytes(), rest].concat();
        let probe = || neighbour_solicitation(Ipv6Addr::UNSPECIFIED, Ipv6Addr::LOCALHOST);
        let mut other_arp = arp_request([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        other_arp[15] = 6;
        let rows: Vec<(&str, Vec<u8>)> = vec![
            ("a frame with three VLAN tags", ethernet(0x88a8, &[0, 5, 0x81, 0, 0, 6, 0x81, 0, 0, 7, 8, 0])),
            ("LLDP on a VLAN", ethernet(0x8100, &[0, 5, 0x88, 0xcc, 1])),
            (
                "ARP on a VLAN",
                ethernet(0x8100, &[&[0, 5][..], &arp_request([10, 0, 0, 1].into(), [10, 0, 0, 2].into())[12..]].concat()),
            ),
            ("LLDP", ethernet(0x88cc, &[1, 2, 3])),
            ("IEEE 802.3 with a length", ethernet(0x0026, &[0x42, 0x42, 3])),
            ("ARP for other hardware", other_arp),
            ("DHCP from a host without address", Packet::udp("0.0.0.0:68", "255.255.255.255:67").build()),
            ("a router solicitation", Packet { segment: Segment::Icmp { kind: 133, code: 0, rest: 0 }, ..probe() }.build()),
        ];
        for (sentence, frame) in rows {
            assert_eq!(parse(&frame), Ok(Parsed::Other), "{sentence}");
        }
        assert_eq!(parse(&arp_request([10, 0, 0, 1].into(), [10, 0, 0, 2].into())), Ok(Parsed::Arp));
        assert_eq!(
            v6(&probe().build()).transport,
            Transport::Icmp { kind: 135, code: 0 },
            "duplicate address detection is for us"
        );
    }

    #[test]
    fn up_to_two_vlan_tags_are_parsed_through() {
        for tags in [&[0x81, 0, 0, 5][..], &[0x88, 0xa8, 0xe0, 5, 0x81, 0, 0, 6]] {
            let behind = |frame: Vec<u8>| [&frame[..12], tags, &frame[12..]].concat();
            let bytes = u16::try_from(tags.len()).unwrap();
            let plain = Packet::tcp(CLIENT, VIP).build();
            assert_eq!(v4(&behind(plain.clone())), moved(v4(&plain), bytes));
            let plain = Packet::tcp(CLIENT6, VIP6).build();
            assert_eq!(v6(&behind(plain.clone())), moved(v6(&plain), bytes));
            for len in 12..54 + tags.len() {
                let has_header = len >= 34 + tags.len();
                let expected = if has_header { ParseError::Truncated } else { ParseError::Malformed };
                assert_eq!(parse(&behind(Packet::tcp(CLIENT, VIP).build())[..len]), Err(expected), "{len} bytes");
            }
        }
    }

    #[test]
    fn a_packet_is_clipped_out_of_a_padded_frame() {
        let frame = Packet { padding: 6, ..Packet::tcp(CLIENT, VIP) }.build();
        assert_eq!(v4(&frame).packet_len, 40);
        let frame = Packet { padding: 6, ..Packet::udp(CLIENT6, VIP6).payload(b"x") }.build();
        assert_eq!(v6(&frame).packet_len, 49);
    }

    #[test]
    fn harmless_options_are_skipped() {
        // No operation, router alert, end of options, and after it bytes that would be a source route.
        let frame = with_options(&[1, 148, 4, 0, 0, 0, 131, 3]);
        let headers = v4(&frame);
        assert_eq!((headers.transport_offset, headers.tuple.destination_port), (42, 80));
    }

    #[test]
    fn parts_of_datagrams_are_fragments_and_atomic_fragments_are_not() {
        let fragment = |fragmentation| v4(&Packet { fragmentation, ..Packet::udp(CLIENT, VIP).payload(&[0; 16]) }.build());
        for (fragmentation, whole) in [(0x4000, true), (0x8000, true), (0x2000, false), (0x0001, false), (0x2001, false)] {
            let headers = fragment(fragmentation);
            assert_eq!(headers.transport == Transport::Udp, whole, "{fragmentation:#06x}");
            assert_eq!(headers.transport == Transport::Fragment, !whole, "{fragmentation:#06x}");
            assert_eq!(headers.tuple.destination_port == 0, !whole);
            assert_eq!(headers.dont_fragment, fragmentation == 0x4000);
        }
        let first = v6(&with_extensions(&[(44, &[0, 0, 0, 1, 0, 0, 0, 9])]));
        assert_eq!((first.transport, first.transport_offset, first.tuple.protocol), (Transport::Fragment, 62, 6));
        let atomic = v6(&with_extensions(&[(44, &[0, 0, 0, 0, 0, 0, 0, 9])]));
        assert_eq!((atomic.transport, atomic.transport_offset), (Transport::Tcp { flags: tcp_flags::SYN }, 62));
    }

    #[test]
    fn extension_headers_lead_to_the_transport() {
        let routed = &[0, 0, 4, 0, 0, 0, 0, 0];
        let headers = v6(&with_extensions(&[(0, OPTION_HEADER), (43, routed), (60, OPTION_HEADER)]));
        assert_eq!((headers.transport_offset, headers.tuple.destination_port), (78, 80));
        assert_eq!(v6(&with_extensions(&[(60, OPTION_HEADER); 8])).tuple.destination_port, 80);
    }

    #[test]
    fn packets_that_must_not_be_rewritten_have_no_ports() {
        let on_its_way = &[0, 0, 4, 1, 0, 0, 0, 0];
        let rows: Vec<(&str, Headers<u128>, u8)> = vec![
            ("a segment route with hops left", v6(&with_extensions(&[(43, on_its_way)])), 6),
            ("AH", v6(&with_extensions(&[(51, OPTION_HEADER)])), 51),
            (
                "no next header",
                v6(&Packet { segment: Segment::Other { protocol: 59 }, ..Packet::tcp(CLIENT6, VIP6) }.build()),
                59,
            ),
            ("ICMP for IPv4", v6(&Packet { segment: Segment::Other { protocol: 1 }, ..Packet::tcp(CLIENT6, VIP6) }.build()), 1),
        ];
        for (sentence, headers, protocol) in rows {
            assert_eq!(headers.transport, Transport::Other, "{sentence}");
            assert_eq!((headers.tuple.source_port, headers.tuple.destination_port), (0, 0), "{sentence}");
            assert_eq!(headers.tuple.protocol, protocol, "{sentence}");
        }
    }

    #[test]
    fn icmp_shows_type_and_code_and_sctp_its_ports() {
        assert_eq!(
            v4(&Packet::echo_request("198.51.100.7", "192.0.2.100").build()).transport,
            Transport::Icmp { kind: 8, code: 0 }
        );
        let echo = v6(&Packet::echo_request("2001:db8::7", "2001:db8::8").build());
        assert_eq!(echo.transport, Transport::Icmp { kind: 128, code: 0 });
        let sctp = Packet { segment: Segment::Other { protocol: 132 }, ..Packet::tcp(CLIENT, VIP) };
        let headers = v4(&sctp.payload(&[0x13, 0x88, 0x0b, 0x59, 0, 0, 0, 1, 0, 0, 0, 0, 10, 0, 0, 4]).build());
        assert_eq!(headers.transport, Transport::Sctp { chunk: sctp_chunk::COOKIE_ECHO });
        assert_eq!((headers.tuple.source_port, headers.tuple.destination_port), (5000, 2905));
    }

    #[test]
    fn group_frames_are_recognised() {
        let mut frame = Packet::tcp(CLIENT, VIP).build();
        assert!(!v4(&frame).group_frame);
        frame[..6].fill(0xff);
        assert!(v4(&frame).group_frame);
    }

    fn segments() -> impl Strategy<Value = Segment> {
        let tcp =
            any::<([u16; 2], u8)>().prop_map(|(ports, flags)| Segment::Tcp { ports, flags, sequence: 1, acknowledgement: 2 });
        let udp = any::<([u16; 2], bool)>().prop_map(|(ports, checksum)| Segment::Udp { ports, checksum });
        let icmp = any::<(u8, u8)>().prop_map(|(kind, code)| Segment::Icmp { kind, code, rest: 0 });
        prop_oneof![tcp, udp, icmp]
    }

    /// The result that `parse` must give for a built packet.
    fn expected<A: Address>(packet: &Packet, source: A, destination: A, network_len: u16) -> Headers<A> {
        let (protocol, transport, [source_port, destination_port], header_len) = match packet.segment {
            Segment::Tcp { ports, flags, .. } => (6, Transport::Tcp { flags }, ports, 20),
            Segment::Udp { ports, .. } => (17, Transport::Udp, ports, 8),
            Segment::Sctp { ports, .. } => (132, Transport::Sctp { chunk: packet.payload[0] }, ports, 12),
            Segment::Icmp { kind, code, .. } => (if A::BYTES == 4 { 1 } else { 58 }, Transport::Icmp { kind, code }, [0, 0], 8),
            Segment::Other { protocol } => (protocol, Transport::Other, [0, 0], 0),
        };
        Headers {
            tuple: Tuple { source, destination, source_port, destination_port, protocol },
            transport,
            network_offset: 14,
            transport_offset: 14 + network_len,
            packet_len: network_len + header_len + u16::try_from(packet.payload.len()).unwrap(),
            hop_limit: packet.hop_limit,
            group_frame: false,
            dont_fragment: true,
        }
    }

    proptest! {
        #[test]
        fn any_bytes_parse_without_panic_and_within_the_frame(
            bytes in prop::collection::vec(any::<u8>(), 0..120), start in 0_usize..5, cut in 0_usize..120,
        ) {
            let mut frame = match start {
                0 => vec![],
                1 => Packet::tcp(CLIENT, VIP).build(),
                2 => with_options(&[1; 12]),
                3 => with_extensions(&[(0, OPTION_HEADER), (43, &[0, 0, 4, 0, 0, 0, 0, 0]), (60, OPTION_HEADER)]),
                _ => Packet::udp(CLIENT6, VIP6).build(),
            };
            // Noise over a valid frame: few bytes, so that most checks still pass.
            for (at, byte) in bytes.iter().enumerate() {
                match frame.get_mut(at) {
                    Some(old) if *byte < 12 && at >= 14 => *old ^= 1 << (byte & 7),
                    Some(_) => {}
                    None => frame.push(*byte),
                }
            }
            frame.truncate(cut);
            let within = match parse(&frame) {
                Ok(Parsed::V4(h)) => usize::from(h.network_offset + h.packet_len) <= frame.len() && h.transport_offset <= 14 + h.packet_len,
                Ok(Parsed::V6(h)) => usize::from(h.network_offset + h.packet_len) <= frame.len() && h.transport_offset <= 14 + h.packet_len,
                _ => true,
            };
            prop_assert!(within);
        }

        #[test]
        fn a_built_ipv4_packet_parses_to_its_description(
            (source, destination) in (0x0100_0000_u32..0x7f00_0000, any::<u32>()), segment in segments(), hop_limit: u8,
            payload in prop::collection::vec(any::<u8>(), 0..40), padding in 0_usize..20,
        ) {
            prop_assume!(source != destination);
            let mut packet = Packet::between(source.ip(), destination.ip(), segment).payload(&payload).hop_limit(hop_limit);
            packet.padding = padding;
            prop_assert_eq!(v4(&packet.build()), expected(&packet, source, destination, 20));
        }

        #[test]
        fn a_built_ipv6_packet_parses_to_its_description(
            (source, destination) in (1_u128 << 96..0xff_u128 << 120, any::<u128>()), segment in segments(), hop_limit: u8,
            payload in prop::collection::vec(any::<u8>(), 0..40), padding in 0_usize..20,
        ) {
            prop_assume!(source != destination);
            let (from, to): (IpAddr, IpAddr) = (source.ip(), destination.ip());
            let is_discovery = matches!(segment, Segment::Icmp { kind: 133..=137, .. });
            let hop_limit = if is_discovery { 255 } else { hop_limit };
            let mut packet = Packet::between(from, to, segment).payload(&payload).hop_limit(hop_limit);
            packet.padding = padding;
            prop_assert_eq!(v6(&packet.build()), expected(&packet, source, destination, 40));
        }
    }
}

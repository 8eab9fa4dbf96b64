//! Encapsulation: IP in IP (RFC 2003, RFC 2473, RFC 4213), and GUE variant 1, in which the inner packet directly
//! follows the UDP header (draft-ietf-intarea-gue section 4).
//!
//! **Invariant:** encapsulation is all or nothing. The gateway acts as a router of the inner packet: it decrements its
//! hop limit before the tunnel (RFC 2003 section 3.1). DSCP and ECN are copied to the outer header (RFC 6040, normal
//! mode). The outer packet may be fragmented only if the inner one is IPv4 and may be.
//!
//! The wide form writes the outer headers of eight packets, a word of each in one register (in the byte order of the machine),
//! for tunnels to addresses of the packets' own family over an untagged link. It writes the same bytes as the plain form.
//!
//! Not here: the ends of the tunnel, whether the packet fits, and which packets go into tunnels.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proto::Family;
use zerocopy::IntoBytes;
use zerocopy::network_endian::U16;

use super::translate::{TranslatedEight, finished, halves, sent};
use crate::flow::{Direction, FlowMode, HotFlow};
use crate::fragment::Identifications;
use crate::port::PortIndex;
use crate::snapshot::{Ends, Exit, Tunnels, source_of};
use crate::wire::checksum::{finish, pseudo_sum, sum};
use crate::wire::plain::head::{Head, HeadV4, HeadV6, Start, Starts, UNTAGGED, starts};
use crate::wire::processor::{Avx2, LANES, Lanes};
use crate::wire::{
    Address, Buffer, HOP_LIMIT, Ipv4, Ipv6, NetworkHeader, Udp, ether_type, lower_hop_limit, protocol, take, take_mut,
};

/// The outer headers of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outer {
    /// Outer source and destination.
    pub ends: Ends,
    /// UDP source and destination port; `None` in mode `ipip`.
    pub ports: Option<(u16, u16)>,
    /// IPv6 flow label, 20 bits, by which routers spread tunnels over their links (RFC 6438).
    pub flow_label: u32,
    /// Largest inner packet, bytes.
    pub mtu: u16,
}

impl Outer {
    /// The outer header for a packet with this hash to a backend, by its address, in mode `ipip` or `gue`; `None` if the
    /// gateway has no address of the backend's family.
    #[allow(clippy::cast_possible_truncation)] // some bits of a hash
    pub(crate) fn towards(backend: IpAddr, mode: FlowMode, exit: &Exit, hash: u64, tunnels: &Tunnels) -> Option<Self> {
        let entropy = (hash >> 32) as u32;
        Some(match mode {
            FlowMode::Gue => Self::gue(tunnels.ends(exit.port, backend, 0)?, tunnels.gue_destination_port, entropy, exit.mtu),
            _ => Self::ipip(tunnels.ends(exit.port, backend, entropy)?, entropy, exit.mtu),
        })
    }

    /// The identification of an outer IPv4 packet that may be fragmented on its way, as `inner_may_fragment` says; all of
    /// them come from a few addresses of the gateway. `protocol` is that of the inner packet.
    #[allow(clippy::cast_possible_truncation)] // of an IPv4 packet 16 bits
    pub(crate) fn identification(
        &self,
        inner_may_fragment: bool,
        protocol: u8,
        identifications: &mut Identifications,
    ) -> Option<u16> {
        match self.ends {
            Ends::V4(source, destination) if inner_may_fragment => {
                Some(identifications.next(source, destination, protocol) as u16)
            }
            _ => None,
        }
    }

    /// IP in IP, through a port with this MTU.
    #[must_use]
    pub const fn ipip(ends: Ends, entropy: u32, port_mtu: u16) -> Self {
        let mtu = port_mtu.saturating_sub(network_len(ends));
        Self { ends, ports: None, flow_label: entropy & 0xf_ffff, mtu }
    }

    /// GUE. The source port carries the flow's entropy, in the range of ephemeral ports (RFC 6335 section 6).
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // 14 bits
    pub const fn gue(ends: Ends, destination_port: u16, entropy: u32, port_mtu: u16) -> Self {
        let source_port = 0xc000 | (entropy >> 18) as u16;
        let mtu = port_mtu.saturating_sub(network_len(ends)).saturating_sub(Udp::BYTES);
        Self { ends, ports: Some((source_port, destination_port)), flow_label: entropy & 0xf_ffff, mtu }
    }

    /// Bytes before the inner packet, without the link header.
    #[must_use]
    pub const fn len(&self) -> u16 {
        network_len(self.ends) + if self.ports.is_some() { Udp::BYTES } else { 0 }
    }

    /// Always false; exists because of [`Outer::len`].
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        false
    }
}

const fn network_len(ends: Ends) -> u16 {
    match ends {
        Ends::V4(..) => Ipv4::BYTES,
        Ends::V6(..) => Ipv6::BYTES,
    }
}

/// A packet in a buffer that becomes the inner one.
#[derive(Clone, Copy, Debug)]
pub struct InnerPacket {
    /// Offset of its IP header in the frame, bytes.
    pub network_offset: u16,
    /// Bytes of the packet from its IP header on.
    pub packet_len: u16,
    /// The identification of an outer IPv4 packet, for inner packets that may be fragmented.
    pub identification: Option<u16>,
}

/// Puts the outer headers, and the link header of the exit with its tags, before a packet of the family; its hop limit must be at least 2. Returns false, with nothing
/// changed but padding removed, when the buffer has no room in front.
#[must_use]
pub fn encapsulate<A: Address>(buffer: &mut impl Buffer, inner: InnerPacket, outer: &Outer, exit: &Exit) -> bool {
    let inner_at = usize::from(inner.network_offset);
    let outer_len = exit.link_bytes() + usize::from(outer.len());
    if !buffer.resize(inner_at + usize::from(inner.packet_len)) {
        return false;
    }
    match outer_len.checked_sub(inner_at) {
        Some(more) if !buffer.prepend(more) => return false,
        Some(_) => {}
        None => buffer.trim_front(inner_at - outer_len),
    }
    write_outer::<A>(buffer.bytes_mut(), inner.identification, outer, exit).is_some()
}

fn write_outer<A: Address>(frame: &mut [u8], identification: Option<u16>, outer: &Outer, exit: &Exit) -> Option<()> {
    let (link, rest) = frame.split_at_mut_checked(exit.link_bytes())?;
    let (head, inner) = rest.split_at_mut_checked(usize::from(outer.len()))?;
    lower_hop_limit::<A>(inner)?;
    let traffic_class = traffic_class::<A>(inner)?;
    let inner_protocol = match A::FAMILY {
        Family::V4 => protocol::IPV4,
        Family::V6 => protocol::IPV6,
    };
    let udp_len = u16::try_from(inner.len()).ok()?.checked_add(if outer.ports.is_some() { Udp::BYTES } else { 0 })?;
    let carried = if outer.ports.is_some() { protocol::UDP } else { inner_protocol };
    let (udp_head, ether_type) = match outer.ends {
        Ends::V4(source, destination) => {
            let ip = NetworkHeader::new(source, destination, carried, udp_len);
            (NetworkHeader { traffic_class, identification, ..ip }.write(head)?, ether_type::IPV4)
        }
        Ends::V6(source, destination) => {
            let ip = NetworkHeader::new(source, destination, carried, udp_len);
            (NetworkHeader { traffic_class, flow_label: outer.flow_label, ..ip }.write(head)?, ether_type::IPV6)
        }
    };
    if let Some(ports) = outer.ports {
        *take_mut::<Udp>(udp_head)?.0 = udp_header(outer.ends, ports.into(), udp_len, inner);
    }
    exit.write_link(link);
    *link.last_chunk_mut()? = ether_type.to_be_bytes();
    Some(())
}

/// The UDP header. Over IPv4 it has no checksum, since the inner packet has one. Over IPv6 it has one, since a backend
/// need not accept 0 (RFC 6935 section 5 requires configuration at both ends).
fn udp_header(ends: Ends, ports: [u16; 2], len: u16, inner: &[u8]) -> Udp {
    let [source_port, destination_port] = ports.map(U16::new);
    let mut udp = Udp { source_port, destination_port, len: U16::new(len), checksum: U16::ZERO };
    if let Ends::V6(source, destination) = ends {
        let pseudo = pseudo_sum(source, destination, protocol::UDP, usize::from(len));
        let inner_sum = bytes_of_same_sum(inner).map_or_else(|| sum(inner), |bytes| sum(&bytes));
        let checksum = finish(pseudo + sum(udp.as_bytes()) + inner_sum);
        udp.checksum.set(if checksum == 0 { 0xffff } else { checksum });
    }
    udp
}

/// Eight bytes with the checksum's sum of a whole IPv6 packet, if its transport header is one of TCP or UDP with a checksum
/// over all of the rest. Such a rest sums to the opposite of its pseudo header, so addresses and length cancel out, and what
/// remains are version, traffic class, flow label, protocol, hop limit and the opposite of the protocol. Of a packet with a
/// wrong checksum the outer one becomes wrong too.
#[inline(always)]
fn bytes_of_same_sum(packet: &[u8]) -> Option<[u8; 8]> {
    let head: &[u8; 48] = packet.first_chunk()?;
    let [v, c, l, m, len @ .., protocol, hop_limit]: [u8; 8] = *head.first_chunk()?;
    let is_whole = match protocol {
        protocol::TCP => true,
        protocol::UDP => head[44..46] == len && head[46..48] != [0, 0],
        _ => false,
    };
    (is_whole && v >> 4 == 6).then_some([v, c, l, m, protocol, hop_limit, 0xff, !protocol])
}

/// DSCP and ECN.
fn traffic_class<A: Address>(packet: &[u8]) -> Option<u8> {
    Some(match A::FAMILY {
        Family::V4 => take::<Ipv4>(packet)?.0.traffic_class,
        Family::V6 => (take::<Ipv6>(packet)?.0.version_class_label.get() >> 20 & 0xff) as u8,
    })
}

const V4: usize = Ipv4::BYTES as usize;
const V6: usize = Ipv6::BYTES as usize;

/// Bytes before the inner packet, with an IP header of this many.
#[inline(always)]
pub(in crate::forward) const fn bytes_before(ip_header: usize, in_udp: bool) -> usize {
    UNTAGGED + ip_header + if in_udp { Udp::BYTES as usize } else { 0 }
}

/// What the outer headers of eight packets depend on.
pub(in crate::forward) struct EightOuters<'e, A: OuterFamily> {
    pub(in crate::forward) flows: [&'e HotFlow<A::Key>; LANES],
    pub(in crate::forward) read: A::Read,
    pub(in crate::forward) exits: [&'e Exit; LANES],
    /// Bytes of the inner packets.
    pub(in crate::forward) packet_lens: Lanes,
    /// The upper halves of the hashes of the packets.
    pub(in crate::forward) entropy: Lanes,
    /// Outer source addresses.
    pub(in crate::forward) sources: &'e [A::Source; LANES],
    /// Whether they are all the same.
    pub(in crate::forward) has_one_source: bool,
    /// The destination port of UDP headers.
    pub(in crate::forward) gue: u16,
}

/// A family of which the outer headers of eight packets are written at a time.
pub(in crate::forward) trait OuterFamily: TranslatedEight {
    /// An outer source address of a tunnel.
    type Source: Copy;
    /// Those of tunnels through a port, of which [`source_of`] selects one.
    fn tunnel_sources(tunnels: &Tunnels, port: PortIndex) -> &[Self::Source];
    /// Whether the outer checksum follows from the head of a packet, see [`bytes_of_same_sum`].
    fn has_inner_sum(head: &Self::Head) -> bool;
    /// Writes outer headers, with a UDP header if they are to have one, before eight packets, and lowers the hop limits of
    /// these. The frames begin where the link headers will, and have the heads of the packets.
    fn write_outers<const IN_UDP: bool>(avx2: Avx2, of: &EightOuters<'_, Self>, group: &mut [impl Buffer; LANES]);
}

/// The outer source addresses of eight packets, of those of a port. Ports vary in UDP, addresses otherwise.
#[inline(always)]
pub(in crate::forward) fn outer_sources<S: Copy>(of_port: &[S], entropy: Lanes, in_udp: bool) -> Option<[S; LANES]> {
    let mut sources = [*of_port.first()?; LANES];
    if of_port.len() > 1 && !in_udp {
        for (source, entropy) in sources.iter_mut().zip(entropy.to_array()) {
            *source = source_of(of_port, entropy)?;
        }
    }
    Some(sources)
}

/// Adds bytes before eight frames. Returns false, and leaves all as they are, if one has no room.
#[inline(always)]
pub(in crate::forward) fn prepend(group: &mut [impl Buffer; LANES], bytes: usize) -> bool {
    for lane in 0..LANES {
        if !group[lane].prepend(bytes) {
            group[..lane].iter_mut().for_each(|buffer| buffer.trim_front(bytes));
            return false;
        }
    }
    true
}

impl OuterFamily for u32 {
    type Source = Ipv4Addr;

    #[inline(always)]
    fn tunnel_sources(tunnels: &Tunnels, port: PortIndex) -> &[Ipv4Addr] {
        tunnels.sources_v4(port)
    }

    /// There is no outer checksum.
    #[inline(always)]
    fn has_inner_sum(_: &HeadV4) -> bool {
        true
    }

    #[inline(always)]
    fn write_outers<const IN_UDP: bool>(avx2: Avx2, of: &EightOuters<'_, u32>, group: &mut [impl Buffer; LANES]) {
        if IN_UDP {
            before_v4::<{ bytes_before(V4, true) }, IN_UDP>(avx2, of, group);
        } else {
            before_v4::<{ bytes_before(V4, false) }, IN_UDP>(avx2, of, group);
        }
    }
}

#[inline(always)]
fn before_v4<const BEFORE: usize, const IN_UDP: bool>(avx2: Avx2, of: &EightOuters<'_, u32>, group: &mut [impl Buffer; LANES]) {
    let Some(mut starts) = starts::<BEFORE, HeadV4, _>(group) else { return };
    let inner = avx2.lanes(starts.each_ref().map(|Start { head: [a, b, c, d, ..], .. }| u32::from_ne_bytes([*a, *b, *c, *d])));
    let source = avx2.lanes(of.sources.map(|source| u32::from_ne_bytes(source.octets())));
    let destination = avx2.lanes(of.flows.map(|flow| flow.key(Direction::ToClient).source()));
    let carried_len = carried_len::<IN_UDP>(avx2, of.packet_lens);
    let carried = if IN_UDP { protocol::UDP } else { protocol::IPV4 };
    // Version, header length and traffic class of the inner packet.
    let start = inner.with_upper((carried_len + avx2.splat(Ipv4::BYTES.into())).lower_number().left::<16>());
    let flags = avx2.splat(pair(0, Ipv4::DONT_FRAGMENT));
    let hops = avx2.splat(u32::from_ne_bytes([HOP_LIMIT, carried, 0, 0]));
    let sums = sums_of(avx2, [start, flags, hops, source]) + halves(avx2, destination);
    let hops = hops.with_upper(finished(avx2, sums).left::<16>());
    let rows = Lanes::rows([start, flags, hops, source]);
    for (lane, start) in starts.iter_mut().enumerate() {
        let destination = of.flows[lane].key(Direction::ToClient).source();
        write_link(&mut start.link, of.exits[lane], ether_type::IPV4);
        start.link[UNTAGGED..UNTAGGED + 16].copy_from_slice(&rows[lane].bytes());
        start.link[UNTAGGED + 16..UNTAGGED + V4].copy_from_slice(&destination.to_ne_bytes());
    }
    if IN_UDP {
        // Without checksum: the inner packet has one.
        write_udp(&mut starts, UNTAGGED + V4, [ports(avx2, of.entropy, of.gue), carried_len.lower_number()], avx2);
    }
    u32::lower_hop_limits(avx2, &of.read, &mut starts);
}

impl OuterFamily for u128 {
    type Source = Ipv6Addr;

    #[inline(always)]
    fn tunnel_sources(tunnels: &Tunnels, port: PortIndex) -> &[Ipv6Addr] {
        tunnels.sources_v6(port)
    }

    #[inline(always)]
    fn has_inner_sum(head: &HeadV6) -> bool {
        bytes_of_same_sum(head).is_some()
    }

    #[inline(always)]
    fn write_outers<const IN_UDP: bool>(avx2: Avx2, of: &EightOuters<'_, u128>, group: &mut [impl Buffer; LANES]) {
        if IN_UDP {
            before_v6::<{ bytes_before(V6, true) }, IN_UDP>(avx2, of, group);
        } else {
            before_v6::<{ bytes_before(V6, false) }, IN_UDP>(avx2, of, group);
        }
    }
}

#[inline(always)]
fn before_v6<const BEFORE: usize, const IN_UDP: bool>(avx2: Avx2, of: &EightOuters<'_, u128>, group: &mut [impl Buffer; LANES]) {
    const CLASS: u32 = u32::from_ne_bytes([0xff, 0xf0, 0, 0]);
    let Some(mut starts) = starts::<BEFORE, HeadV6, _>(group) else { return };
    let [inner, hops, _, _] = avx2.columns(starts.each_ref().map(|start| start.bytes_at(BEFORE)));
    // By loops, since the compiler may keep `map` as a call.
    let (mut destinations, mut sources) = ([[0; 16]; LANES], [[0; 16]; LANES]);
    for lane in 0..LANES {
        destinations[lane] = of.flows[lane].key(Direction::ToClient).source();
        sources[lane] = of.sources[lane].octets();
    }
    let carried_len = carried_len::<IN_UDP>(avx2, of.packet_lens);
    let carried = if IN_UDP { protocol::UDP } else { protocol::IPV6 };
    // Version and traffic class of the inner packet.
    let label = of.entropy & avx2.splat(0xf_ffff);
    let start = inner & avx2.splat(CLASS) | label.lower_number().left::<16>() | label.upper_number();
    let len = carried_len.lower_number().with_upper(avx2.splat(u32::from_ne_bytes([0, 0, carried, HOP_LIMIT])));
    if IN_UDP {
        let ports = ports(avx2, of.entropy, of.gue);
        let source = if of.has_one_source {
            let [a, b, c, d]: [u32; 4] = zerocopy::transmute!(sources[0]);
            [avx2.splat(a), avx2.splat(b), avx2.splat(c), avx2.splat(d)]
        } else {
            avx2.columns(sources)
        };
        let of_outer = sums_of(avx2, source) + sums_of(avx2, avx2.columns(destinations));
        // The length is part of the pseudo header and of the UDP header.
        let lens = carried_len.lower_number().left::<1>();
        let pseudo = lens + avx2.splat(pair(0, u16::from(protocol::UDP)) >> 16);
        // Of the inner packet, see `bytes_of_same_sum`: the hop limit is one less by then.
        let protocol_and_hops = hops.right::<16>() - avx2.splat(1 << 8);
        let protocol = protocol_and_hops & avx2.splat(0xff);
        let of_inner = halves(avx2, inner) + protocol_and_hops + (protocol.left::<8>() ^ avx2.splat(0xffff));
        let checksum = sent(avx2, finished(avx2, of_outer + pseudo + halves(avx2, ports) + of_inner));
        write_udp(&mut starts, UNTAGGED + V6, [ports, carried_len.lower_number() | checksum.left::<16>()], avx2);
    }
    let rows = Lanes::rows([start, len, avx2.splat(0), avx2.splat(0)]);
    for (lane, start) in starts.iter_mut().enumerate() {
        write_link(&mut start.link, of.exits[lane], ether_type::IPV6);
        start.link[UNTAGGED..UNTAGGED + 16].copy_from_slice(&rows[lane].bytes());
        start.link[UNTAGGED + 8..UNTAGGED + 24].copy_from_slice(&sources[lane]);
        start.link[UNTAGGED + 24..UNTAGGED + V6].copy_from_slice(&destinations[lane]);
    }
    u128::lower_hop_limits(avx2, &of.read, &mut starts);
}

/// The word of two numbers of 16 bits.
#[inline(always)]
fn pair(first: u16, second: u16) -> u32 {
    (u32::from(first) << 16 | u32::from(second)).to_be()
}

/// The sums of the halves of four words. Without a loop or `fold`, which the compiler may compile for any processor.
#[inline(always)]
fn sums_of(avx2: Avx2, [a, b, c, d]: [Lanes; 4]) -> Lanes {
    halves(avx2, a) + halves(avx2, b) + halves(avx2, c) + halves(avx2, d)
}

/// Bytes of the inner packets and of the UDP headers, if there are any.
#[inline(always)]
fn carried_len<const IN_UDP: bool>(avx2: Avx2, packet_lens: Lanes) -> Lanes {
    if IN_UDP { packet_lens + avx2.splat(Udp::BYTES.into()) } else { packet_lens }
}

/// Source ports from hashes, and the destination port.
#[inline(always)]
fn ports(avx2: Avx2, entropy: Lanes, destination: u16) -> Lanes {
    let source = entropy.right::<18>() | avx2.splat(0xc000);
    source.lower_number() | avx2.splat(pair(0, destination))
}

/// Writes UDP headers, of two words, at an offset of the frames.
#[inline(always)]
fn write_udp<const BEFORE: usize, H: Head>(starts: &mut Starts<'_, BEFORE, H>, at: usize, [ports, len]: [Lanes; 2], avx2: Avx2) {
    let rows = Lanes::rows([ports, len, avx2.splat(0), avx2.splat(0)]);
    for (start, row) in starts.iter_mut().zip(rows) {
        start.link[at..at + 8].copy_from_slice(&row.bytes()[..8]);
    }
}

/// Writes the Ethernet header.
#[inline(always)]
fn write_link(before: &mut [u8], exit: &Exit, ether_type: u16) {
    let _ = exit.write_addresses(before); // it is long enough
    before[UNTAGGED - 2..UNTAGGED].copy_from_slice(&ether_type.to_be_bytes());
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use crate::port::MemoryBuffer;
    use crate::testing::{Packet, Segment};

    const FROM: &str = "[2001:db8:1::7]:5001";
    const TO: &str = "[2001:db8::1:0]:80";

    #[test]
    fn eight_bytes_have_the_sum_of_a_packet_with_a_checksum() {
        for len in [0, 1, 2, 777, 1400] {
            let data: Vec<u8> = (0..len).map(|n: u16| n.to_le_bytes()[0] ^ 0x5a).collect();
            for packet in [Packet::tcp(FROM, TO), Packet::udp(FROM, TO)] {
                let frame = packet.payload(&data).build();
                let bytes = bytes_of_same_sum(&frame[14..]).unwrap();
                assert_eq!(finish(sum(&bytes)), finish(sum(&frame[14..])), "{len} bytes");
            }
        }
    }

    #[test]
    fn packets_without_a_checksum_over_all_of_them_are_summed_in_full() {
        let mut without = Packet::udp(FROM, TO).payload(b"data");
        if let Segment::Udp { checksum, .. } = &mut without.segment {
            *checksum = false;
        }
        assert_eq!(bytes_of_same_sum(&without.build()[14..]), None);
        let mut longer = Packet::udp(FROM, TO).payload(b"data").build();
        longer[14 + 45] = 8;
        assert_eq!(bytes_of_same_sum(&longer[14..]), None, "data after the datagram");
        let echo = Segment::Icmp { kind: 128, code: 0, rest: 1 };
        let ping = Packet { segment: echo, ..Packet::udp(FROM, TO) };
        assert_eq!(bytes_of_same_sum(&ping.build()[14..]), None);
        let v4 = Packet::tcp("198.51.100.7:5001", "192.0.2.100:80").payload(b"some more data");
        assert_eq!(bytes_of_same_sum(&v4.build()[14..]), None);
    }

    #[test]
    fn all_frames_get_room_or_none_does() {
        let group = |full: Option<usize>| -> [MemoryBuffer; LANES] {
            std::array::from_fn(|lane| MemoryBuffer::new(&vec![lane as u8; if full == Some(lane) { 9216 } else { 60 }], 0))
        };
        for full in 0..LANES {
            let mut frames = group(Some(full));
            assert!(!prepend(&mut frames, 20));
            assert_eq!(frames, group(Some(full)));
        }
        let mut frames = group(None);
        assert!(prepend(&mut frames, 20));
        assert!(frames.iter().all(|frame| frame.bytes().len() == 80));
    }
}

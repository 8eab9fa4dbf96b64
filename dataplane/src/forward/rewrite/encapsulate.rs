//! Encapsulation: IP in IP (RFC 2003, RFC 2473, RFC 4213), and GUE variant 1, in which the inner packet directly
//! follows the UDP header (draft-ietf-intarea-gue section 4).
//!
//! **Invariant:** encapsulation is all or nothing. The gateway acts as a router of the inner packet: it decrements its
//! hop limit before the tunnel (RFC 2003 section 3.1). DSCP and ECN are copied to the outer header (RFC 6040, normal
//! mode). The outer packet may be fragmented only if the inner one is IPv4 and may be.
//!
//! Not here: the ends of the tunnel, and whether the packet fits.

use std::net::IpAddr;

use proto::Family;
use zerocopy::IntoBytes;
use zerocopy::network_endian::U16;

use crate::flow::FlowMode;
use crate::fragment::Identifications;
use crate::snapshot::{Ends, Exit, Tunnels};
use crate::wire::checksum::{finish, pseudo_sum, sum};
use crate::wire::{Address, Buffer, Ipv4, Ipv6, NetworkHeader, Udp, ether_type, lower_hop_limit, protocol, take, take_mut};

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
    write::<A>(buffer.bytes_mut(), inner.identification, outer, exit).is_some()
}

fn write<A: Address>(frame: &mut [u8], identification: Option<u16>, outer: &Outer, exit: &Exit) -> Option<()> {
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
        *take_mut::<Udp>(udp_head)?.0 = udp(outer.ends, ports.into(), udp_len, inner);
    }
    exit.write_link(link);
    *link.last_chunk_mut()? = ether_type.to_be_bytes();
    Some(())
}

/// The UDP header. Over IPv4 it has no checksum, since the inner packet has one. Over IPv6 it has one, since a backend
/// need not accept 0 (RFC 6935 section 5 requires configuration at both ends).
fn udp(ends: Ends, ports: [u16; 2], len: u16, inner: &[u8]) -> Udp {
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
pub(crate) fn bytes_of_same_sum(packet: &[u8]) -> Option<[u8; 8]> {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
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
}

//! Frames: builds what clients and backends send, and parses what left the engine, by fixed offsets and with every
//! checksum computed in full. Shares no code with the engine. Deliberately not here: whether a frame is what should
//! have left.

use std::net::IpAddr;

use dataplane::Mac;

/// A TCP packet without options and data, inside a tunnel or not.
#[derive(Clone, Copy, Debug)]
pub(super) struct TcpFrame {
    pub(super) destination_mac: [u8; 6],
    pub(super) source_mac: [u8; 6],
    /// The headers that it was inside of.
    pub(super) tunnel: Option<TunnelHeaders>,
    pub(super) source: (IpAddr, u16),
    pub(super) destination: (IpAddr, u16),
    pub(super) hop_limit: u8,
    /// IPv6: the flow label.
    pub(super) label: u32,
    pub(super) sequence: u32,
    pub(super) reset: bool,
}

/// The headers in front of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TunnelHeaders {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    pub(super) hop_limit: u8,
    /// IPv6: the flow label.
    pub(super) label: u32,
    /// GUE: the UDP ports.
    pub(super) ports: Option<(u16, u16)>,
}

/// The smallest Ethernet frame, without frame check sequence; a TCP packet over IPv4 fits.
pub(super) const FRAME_BYTES_V4: usize = 60;
/// Ethernet, IPv6 and TCP headers.
pub(super) const FRAME_BYTES_V6: usize = 14 + 40 + 20;

/// A TCP segment without options and data, from one address and port to another of the same family.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) source: (IpAddr, u16),
    pub(super) destination: (IpAddr, u16),
    pub(super) flags: u8,
    pub(super) sequence: u32,
}

/// Hop limit of the frames that are built.
pub(super) const SENT_HOP_LIMIT: u8 = 63;
/// The Ethernet address that frames come from; nothing looks at it.
const SENDER_MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;

/// Builds the frame of a segment that acknowledges number 1. IPv4's identification is always the same: nothing is
/// fragmented.
pub(super) fn build(destination_mac: Mac, segment: &Segment) -> Vec<u8> {
    let Segment { source, destination, flags, sequence } = *segment;
    let mut tcp = [source.1.to_be_bytes(), destination.1.to_be_bytes()].concat();
    tcp.extend([sequence.to_be_bytes(), 1_u32.to_be_bytes()].concat());
    tcp.extend([0x50, flags, 0x20, 0, 0, 0, 0, 0]);
    let len = [0, 20];
    let addresses = [octets(source.0), octets(destination.0)].concat();
    let sum = !ones_sum(&[&addresses[..], &[0, TCP], &len, &tcp].concat());
    tcp[16..18].copy_from_slice(&sum.to_be_bytes());
    let is_v4 = source.0.is_ipv4();
    let mut ip = if is_v4 {
        vec![0x45, 0, 0, 40, 0x12, 0x34, 0x40, 0, SENT_HOP_LIMIT, TCP, 0, 0]
    } else {
        vec![0x60, 0, 0, 0, len[0], len[1], TCP, SENT_HOP_LIMIT]
    };
    ip.extend(&addresses);
    if is_v4 {
        let sum = !ones_sum(&ip);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
    }
    let ether_type = if is_v4 { IPV4 } else { IPV6 };
    [&destination_mac.0[..], &SENDER_MAC.0, &ether_type.to_be_bytes(), &ip, &tcp].concat()
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Parses a frame; none where it is not a whole TCP packet with right checksums.
pub(super) fn parse(frame: &[u8]) -> Option<TcpFrame> {
    let (packet, behind) = network(frame.get(14..)?)?;
    if word(frame, 12)? != packet.ether_type() || !(behind.is_empty() || frame.len() == FRAME_BYTES_V4) {
        return None;
    }
    let seen = match packet.protocol {
        TCP => tcp(&packet)?,
        UDP => parse_tunnel(&packet, Some(gue_ports(&packet)?), packet.payload.get(8..)?)?,
        _ => parse_tunnel(&packet, None, packet.payload)?,
    };
    Some(TcpFrame { destination_mac: frame.get(..6)?.try_into().ok()?, source_mac: frame.get(6..12)?.try_into().ok()?, ..seen })
}

const TCP: u8 = 6;
const UDP: u8 = 17;

/// An IP packet without options, whose own checksum, if it has one, is right.
struct Network<'f> {
    /// Source and destination.
    addresses: &'f [u8],
    hop_limit: u8,
    label: u32,
    protocol: u8,
    payload: &'f [u8],
}

/// Reads an IP packet; also gives what is behind it.
fn network(bytes: &[u8]) -> Option<(Network<'_>, &[u8])> {
    let is_v4 = bytes.first()? >> 4 == 4;
    let len = if is_v4 { usize::from(word(bytes, 2)?) } else { 40 + usize::from(word(bytes, 4)?) };
    let (packet, behind) = bytes.split_at_checked(len)?;
    let read = if is_v4 {
        if packet.get(..2)? != [0x45, 0] || ones_sum(packet.get(..20)?) != 0xffff {
            return None;
        }
        let (hop_limit, protocol) = (*packet.get(8)?, *packet.get(9)?);
        Network { addresses: packet.get(12..20)?, hop_limit, label: 0, protocol, payload: packet.get(20..)? }
    } else {
        let first = u32::from(word(packet, 0)?) << 16 | u32::from(word(packet, 2)?);
        if first >> 20 != 0x600 {
            return None;
        }
        let (protocol, hop_limit) = (*packet.get(6)?, *packet.get(7)?);
        Network { addresses: packet.get(8..40)?, hop_limit, label: first & 0xf_ffff, protocol, payload: packet.get(40..)? }
    };
    Some((read, behind))
}

impl Network<'_> {
    const fn is_v4(&self) -> bool {
        self.addresses.len() == 8
    }

    const fn ether_type(&self) -> u16 {
        if self.is_v4() { IPV4 } else { IPV6 }
    }

    /// The number that says "IP in IP" of such a packet.
    const fn number(&self) -> u8 {
        if self.is_v4() { 4 } else { 41 }
    }

    fn source_and_destination(&self) -> Option<(IpAddr, IpAddr)> {
        let (source, destination) = self.addresses.split_at(self.addresses.len() / 2);
        Some((address(source)?, address(destination)?))
    }

    /// Whether the checksum over pseudo header and payload is right.
    fn has_right_checksum(&self) -> bool {
        let Ok(len) = u16::try_from(self.payload.len()) else { return false };
        ones_sum(&[self.addresses, &[0, self.protocol], &len.to_be_bytes(), self.payload].concat()) == 0xffff
    }
}

fn tcp(packet: &Network<'_>) -> Option<TcpFrame> {
    let (source, destination) = packet.source_and_destination()?;
    let segment = packet.payload;
    let sequence = u32::from_be_bytes(segment.get(4..8)?.try_into().ok()?);
    let reset = *segment.get(13)? == dataplane::tcp_flags::RST;
    (packet.protocol == TCP && packet.has_right_checksum()).then_some(TcpFrame {
        destination_mac: [0; 6],
        source_mac: [0; 6],
        tunnel: None,
        source: (source, word(segment, 0)?),
        destination: (destination, word(segment, 2)?),
        hop_limit: packet.hop_limit,
        label: packet.label,
        sequence,
        reset,
    })
}

/// Ports of the UDP header in front of a packet. Over IPv4 it has no checksum, over IPv6 the right one.
fn gue_ports(outer: &Network<'_>) -> Option<(u16, u16)> {
    let udp = outer.payload;
    let sums = if outer.is_v4() { word(udp, 6)? == 0 } else { word(udp, 6)? != 0 && outer.has_right_checksum() };
    let whole = usize::from(word(udp, 4)?) == udp.len();
    Some((word(udp, 0)?, word(udp, 2)?)).filter(|_| sums && whole)
}

/// A TCP packet inside another.
fn parse_tunnel(outer: &Network<'_>, ports: Option<(u16, u16)>, inner: &[u8]) -> Option<TcpFrame> {
    let (packet, behind) = network(inner)?;
    let carried = if ports.is_some() { UDP } else { packet.number() };
    let (source, destination) = outer.source_and_destination()?;
    let tunnel = TunnelHeaders { source, destination, hop_limit: outer.hop_limit, label: outer.label, ports };
    let seen = tcp(&packet).filter(|_| behind.is_empty() && outer.protocol == carried)?;
    Some(TcpFrame { tunnel: Some(tunnel), ..seen })
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    <[u8; 4]>::try_from(bytes).map(IpAddr::from).or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

/// One's complement sum of 16-bit words (RFC 1071); 0xffff over what carries a right checksum.
fn ones_sum(bytes: &[u8]) -> u16 {
    let mut sum = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | pair.get(1).copied().map_or(0, u32::from)).sum::<u32>();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use dataplane::tcp_flags;
    use dataplane::testing::{Packet, Segment as TestSegment};

    use super::*;

    #[test]
    fn frames_are_those_of_the_engines_own_tests_and_parse_back() {
        for (source, destination) in [("192.0.2.9", "198.18.0.1"), ("2001:db8::9", "2001:200::1")] {
            let (source, destination): (IpAddr, IpAddr) = (source.parse().unwrap(), destination.parse().unwrap());
            let segment =
                Segment { source: (source, 1024), destination: (destination, 80), flags: tcp_flags::ACK, sequence: 0xfedc_ba98 };
            let mac = Mac([2, 0, 0, 0, 1, 0]);
            let ports = [1024, 80];
            let expected = TestSegment::Tcp { ports, flags: tcp_flags::ACK, sequence: 0xfedc_ba98, acknowledgement: 1 };
            let expected = Packet { destination_mac: mac, ..Packet::between(source, destination, expected) }.build();
            assert_eq!(build(mac, &segment), expected);
            let parsed = parse(&expected).unwrap();
            assert_eq!((parsed.source, parsed.destination), (segment.source, segment.destination));
            assert_eq!((parsed.sequence, parsed.hop_limit, parsed.reset), (segment.sequence, SENT_HOP_LIMIT, false));
        }
    }
}

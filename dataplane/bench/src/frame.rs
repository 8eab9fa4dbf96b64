//! Frames: writes what clients and backends send, and reads what left the engine, by fixed offsets and with every
//! checksum computed in full. Shares no code with the engine.
//!
//! **Invariant:** [`FrameFields::write`] determines every byte from the fields, and [`read`] reads every field. So a frame is
//! checked in full by reading it, writing what was read, and comparing both (see [`written_like`]).
//!
//! Not here: whether a frame is what should have left (`verify`).

use std::net::IpAddr;

use dataplane::Mac;

/// A TCP or UDP packet without options, inside a tunnel or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameFields {
    pub(super) destination_mac: Mac,
    pub(super) source_mac: Mac,
    /// Identifier of its VLAN, of a tag with priority 0.
    pub(super) vlan: Option<u16>,
    /// The headers that it is inside of.
    pub(super) tunnel: Option<TunnelHeaders>,
    pub(super) source: (IpAddr, u16),
    pub(super) destination: (IpAddr, u16),
    pub(super) hop: Hop,
    pub(super) content: Content,
    /// Bytes behind the transport header; of UDP at least four, which have the number of the flow.
    pub(super) data_len: usize,
}

/// The fields of an IP header that routers write or read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hop {
    pub(super) limit: u8,
    /// IPv4; otherwise 0.
    pub(super) identification: u16,
    /// IPv4; otherwise true.
    pub(super) dont_fragment: bool,
    /// The flow label of IPv6; otherwise 0.
    pub(super) label: u32,
}

/// The transport header, and the number of the flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    Tcp { flags: u8, sequence: u32, acknowledgement: u32, window: u16 },
    Udp { flow: u32 },
}

/// The headers in front of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TunnelHeaders {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    pub(super) hop: Hop,
    /// GUE: the UDP ports.
    pub(super) ports: Option<(u16, u16)>,
}

/// The smallest Ethernet frame without tag and frame check sequence, bytes.
const FRAME_BYTES_MIN: usize = 60;
/// Ethernet header, bytes.
pub(super) const ETHERNET: usize = 14;
/// VLAN tag, bytes.
pub(super) const TAG: usize = 4;
/// Bytes of the flow's number in UDP data.
const NUMBER: usize = 4;
const TCP_BYTES: usize = 20;
const UDP_BYTES: usize = 8;

const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const VLAN: u16 = 0x8100;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// The byte of data at a position, unless it is of the flow's number.
#[allow(clippy::cast_possible_truncation)] // the lowest byte
pub(super) const fn pattern(position: usize) -> u8 {
    (position as u8).wrapping_mul(29) ^ 0xa5
}

impl Content {
    const fn protocol(self) -> u8 {
        match self {
            Self::Tcp { .. } => TCP,
            Self::Udp { .. } => UDP,
        }
    }

    const fn header_bytes(self) -> usize {
        match self {
            Self::Tcp { .. } => TCP_BYTES,
            Self::Udp { .. } => UDP_BYTES,
        }
    }

    /// Fewest bytes of data.
    pub(super) const fn data_min(self) -> usize {
        match self {
            Self::Tcp { .. } => 0,
            Self::Udp { .. } => NUMBER,
        }
    }
}

/// Bytes of an IP header without options.
const fn ip_bytes(is_v4: bool) -> usize {
    if is_v4 { 20 } else { 40 }
}

/// Number that says "an IP packet" in the header in front of it.
const fn ip_number(is_v4: bool) -> u8 {
    if is_v4 { 4 } else { 41 }
}

impl FrameFields {
    /// Where the data begins.
    pub(super) fn data_at(&self) -> usize {
        let tag = if self.vlan.is_some() { TAG } else { 0 };
        let tunnel = self.tunnel.map_or(0, |tunnel| tunnel.bytes());
        ETHERNET + tag + tunnel + ip_bytes(self.source.0.is_ipv4()) + self.content.header_bytes()
    }

    /// Replaces `bytes` by the frame. Padding is zero.
    pub(super) fn write(&self, bytes: &mut Vec<u8>) {
        bytes.clear();
        bytes.extend(self.destination_mac.0);
        bytes.extend(self.source_mac.0);
        if let Some(vlan) = self.vlan {
            bytes.extend(VLAN.to_be_bytes());
            bytes.extend(vlan.to_be_bytes());
        }
        let shortest = FRAME_BYTES_MIN + bytes.len() - 12;
        let is_v4 = self.source.0.is_ipv4();
        let segment_len = self.content.header_bytes() + self.data_len;
        if let Some(tunnel) = &self.tunnel {
            let packet_len = ip_bytes(is_v4) + segment_len;
            bytes.extend(ether_type(tunnel.source.is_ipv4()).to_be_bytes());
            let carried = if tunnel.ports.is_some() { UDP } else { ip_number(is_v4) };
            let udp_len = if tunnel.ports.is_some() { UDP_BYTES } else { 0 };
            ip_header(bytes, (tunnel.source, tunnel.destination), &tunnel.hop, carried, udp_len + packet_len);
            let udp_at = bytes.len();
            if let Some(ports) = tunnel.ports {
                udp_header(bytes, ports, udp_len + packet_len);
            }
            self.packet(bytes, segment_len);
            if tunnel.ports.is_some() && !tunnel.source.is_ipv4() {
                let sum = transport_sum(tunnel.source, tunnel.destination, UDP, &bytes[udp_at..]);
                put_sum(bytes, udp_at + 6, never_zero(sum));
            }
        } else {
            bytes.extend(ether_type(is_v4).to_be_bytes());
            self.packet(bytes, segment_len);
        }
        bytes.resize(bytes.len().max(shortest), 0);
    }

    /// Appends the IP packet.
    fn packet(&self, bytes: &mut Vec<u8>, segment_len: usize) {
        let ((source, source_port), (destination, destination_port)) = (self.source, self.destination);
        ip_header(bytes, (source, destination), &self.hop, self.content.protocol(), segment_len);
        let at = bytes.len();
        let number = match self.content {
            Content::Tcp { flags, sequence, acknowledgement, window } => {
                bytes.extend(source_port.to_be_bytes());
                bytes.extend(destination_port.to_be_bytes());
                bytes.extend(sequence.to_be_bytes());
                bytes.extend(acknowledgement.to_be_bytes());
                bytes.extend([0x50, flags]);
                bytes.extend(window.to_be_bytes());
                bytes.extend([0; 4]);
                None
            }
            Content::Udp { flow } => {
                udp_header(bytes, (source_port, destination_port), segment_len);
                Some(flow)
            }
        };
        let data_at = bytes.len();
        bytes.extend((0..self.data_len).map(pattern));
        if let (Some(flow), Some(data)) = (number, bytes.get_mut(data_at..data_at + NUMBER)) {
            data.copy_from_slice(&flow.to_be_bytes());
        }
        let sum = transport_sum(source, destination, self.content.protocol(), &bytes[at..]);
        match self.content {
            Content::Tcp { .. } => put_sum(bytes, at + 16, sum),
            Content::Udp { .. } => put_sum(bytes, at + 6, never_zero(sum)),
        }
    }
}

impl TunnelHeaders {
    fn bytes(&self) -> usize {
        ip_bytes(self.source.is_ipv4()) + if self.ports.is_some() { UDP_BYTES } else { 0 }
    }
}

const fn ether_type(is_v4: bool) -> u16 {
    if is_v4 { IPV4 } else { IPV6 }
}

/// Appends an IP header.
#[allow(clippy::cast_possible_truncation)] // lengths of frames
fn ip_header(bytes: &mut Vec<u8>, (source, destination): (IpAddr, IpAddr), hop: &Hop, protocol: u8, len: usize) {
    let at = bytes.len();
    if source.is_ipv4() {
        bytes.extend([0x45, 0]);
        bytes.extend(((20 + len) as u16).to_be_bytes());
        bytes.extend(hop.identification.to_be_bytes());
        bytes.extend([if hop.dont_fragment { 0x40 } else { 0 }, 0, hop.limit, protocol, 0, 0]);
    } else {
        bytes.extend((0x6000_0000 | hop.label).to_be_bytes());
        bytes.extend((len as u16).to_be_bytes());
        bytes.extend([protocol, hop.limit]);
    }
    for address in [source, destination] {
        match address {
            IpAddr::V4(address) => bytes.extend(address.octets()),
            IpAddr::V6(address) => bytes.extend(address.octets()),
        }
    }
    if source.is_ipv4() {
        let sum = !fold(sum_of(&bytes[at..]));
        put_sum(bytes, at + 10, sum);
    }
}

/// Appends a UDP header without checksum.
#[allow(clippy::cast_possible_truncation)] // lengths of frames
fn udp_header(bytes: &mut Vec<u8>, (source, destination): (u16, u16), len: usize) {
    bytes.extend(source.to_be_bytes());
    bytes.extend(destination.to_be_bytes());
    bytes.extend((len as u16).to_be_bytes());
    bytes.extend([0; 2]);
}

fn put_sum(bytes: &mut [u8], at: usize, sum: u16) {
    if let Some(place) = bytes.get_mut(at..at + 2) {
        place.copy_from_slice(&sum.to_be_bytes());
    }
}

/// UDP's checksum 0 means that there is none (RFC 768).
const fn never_zero(sum: u16) -> u16 {
    if sum == 0 { 0xffff } else { sum }
}

/// Checksum of a segment or datagram whose checksum field is 0, with its pseudo header.
fn transport_sum(source: IpAddr, destination: IpAddr, protocol: u8, segment: &[u8]) -> u16 {
    let addresses: u64 = [source, destination]
        .iter()
        .map(|address| match address {
            IpAddr::V4(address) => sum_of(&address.octets()),
            IpAddr::V6(address) => sum_of(&address.octets()),
        })
        .sum();
    !fold(addresses + u64::from(protocol) + segment.len() as u64 + sum_of(segment))
}

/// Sum of 16-bit words (RFC 1071).
fn sum_of(bytes: &[u8]) -> u64 {
    let (words, odd) = bytes.as_chunks::<2>();
    let sum: u64 = words.iter().map(|word| u64::from(u16::from_be_bytes(*word))).sum();
    sum + odd.first().map_or(0, |last| u64::from(*last) << 8)
}

#[allow(clippy::cast_possible_truncation)] // at most 16 bits
const fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Reads a frame by the offsets of its headers; none where one is missing. Nothing else is checked, see
/// [`written_like`].
pub(super) fn read(bytes: &[u8]) -> Option<FrameFields> {
    let mac = |at: usize| Some(Mac(*bytes.get(at..)?.first_chunk()?));
    let vlan = if word(bytes, 12)? == VLAN { Some(word(bytes, 14)?) } else { None };
    let at = ETHERNET + if vlan.is_some() { TAG } else { 0 };
    let outer = ip(bytes, at)?;
    let (tunnel, packet) = match outer.protocol {
        4 | 41 => (Some((&outer, None)), ip(bytes, outer.payload_at)?),
        UDP if word(bytes, outer.payload_at + 2)? == dataplane::GUE_PORT => {
            let ports = (word(bytes, outer.payload_at)?, word(bytes, outer.payload_at + 2)?);
            (Some((&outer, Some(ports))), ip(bytes, outer.payload_at + UDP_BYTES)?)
        }
        _ => (None, ip(bytes, at)?),
    };
    let tunnel = tunnel.map(|(outer, ports)| TunnelHeaders {
        source: outer.source,
        destination: outer.destination,
        hop: outer.hop,
        ports,
    });
    let segment = packet.payload_at;
    let content = match packet.protocol {
        TCP => Content::Tcp {
            flags: *bytes.get(segment + 13)?,
            sequence: double_word(bytes, segment + 4)?,
            acknowledgement: double_word(bytes, segment + 8)?,
            window: word(bytes, segment + 14)?,
        },
        _ => Content::Udp { flow: double_word(bytes, segment + UDP_BYTES)? },
    };
    Some(FrameFields {
        destination_mac: mac(0)?,
        source_mac: mac(6)?,
        vlan,
        tunnel,
        source: (packet.source, word(bytes, segment)?),
        destination: (packet.destination, word(bytes, segment + 2)?),
        hop: packet.hop,
        content,
        data_len: packet.payload_len.checked_sub(content.header_bytes())?,
    })
}

/// An IP header as it was read.
struct IpHeader {
    source: IpAddr,
    destination: IpAddr,
    hop: Hop,
    protocol: u8,
    payload_at: usize,
    payload_len: usize,
}

fn ip(bytes: &[u8], at: usize) -> Option<IpHeader> {
    let header = bytes.get(at..)?;
    if header.first()? >> 4 == 4 {
        let address = |at: usize| Some(IpAddr::from(*header.get(at..)?.first_chunk::<4>()?));
        let dont_fragment = header.get(6)? & 0x40 != 0;
        let hop = Hop { limit: *header.get(8)?, identification: word(header, 4)?, dont_fragment, label: 0 };
        let payload_len = usize::from(word(header, 2)?).checked_sub(20)?;
        let protocol = *header.get(9)?;
        Some(IpHeader { source: address(12)?, destination: address(16)?, hop, protocol, payload_at: at + 20, payload_len })
    } else {
        let address = |at: usize| Some(IpAddr::from(*header.get(at..)?.first_chunk::<16>()?));
        let label = double_word(header, 0)? & 0xf_ffff;
        let hop = Hop { limit: *header.get(7)?, identification: 0, dont_fragment: true, label };
        let payload_len = word(header, 4)?.into();
        let protocol = *header.get(6)?;
        Some(IpHeader { source: address(8)?, destination: address(24)?, hop, protocol, payload_at: at + 40, payload_len })
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn double_word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Whether a frame that left is the one `written` in full. Padding may have any value or be missing.
pub(super) fn written_like(left: &[u8], frame: &FrameFields, written: &[u8]) -> bool {
    let end = frame.data_at() + frame.data_len;
    left.len() <= written.len() && left.get(..end).is_some_and(|bytes| written.get(..end) == Some(bytes))
}

#[cfg(test)]
mod tests {
    use dataplane::tcp_flags;
    use dataplane::testing::{Packet, Segment};

    use super::*;

    #[test]
    fn frames_are_those_of_the_engines_own_tests_and_read_back() {
        for (source, destination) in [("192.0.2.9", "198.18.0.1"), ("2001:db8::9", "2001:200::1")] {
            let (source, destination): (IpAddr, IpAddr) = (source.parse().unwrap(), destination.parse().unwrap());
            let mac = Mac([2, 0, 0, 0, 1, 0]);
            let segment = Segment::Tcp { ports: [1024, 80], flags: tcp_flags::ACK, sequence: 0xfedc_ba98, acknowledgement: 1 };
            let expected = Packet { destination_mac: mac, ..Packet::between(source, destination, segment) }.build();
            let frame = read(&expected).unwrap();
            assert_eq!((frame.source, frame.destination), ((source, 1024), (destination, 80)));
            assert_eq!((frame.destination_mac, frame.data_len, frame.vlan), (mac, 0, None));
            let Content::Tcp { flags, sequence, acknowledgement, .. } = frame.content else { panic!("not TCP") };
            assert_eq!((flags, sequence, acknowledgement), (tcp_flags::ACK, 0xfedc_ba98, 1));
            let mut written = Vec::new();
            frame.write(&mut written);
            assert!(written_like(&expected, &frame, &written), "{written:02x?}\n{expected:02x?}");
        }
    }
}

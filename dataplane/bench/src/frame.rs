//! Frames: writes what clients and backends send, and reads what left the engine, by fixed offsets and with every
//! checksum computed in full. Shares no code with the engine.
//!
//! **Invariant:** [`FrameFields::write`] determines every byte from the fields, and [`read`] reads every field. So a frame is
//! checked in full by reading it, writing what was read, and comparing both (see [`written_like`]).
//!
//! Not here: whether a frame is what should have left (`verify`).

use std::net::IpAddr;

use dataplane::Mac;

/// A TCP or UDP packet without options or a fragment of a TCP segment, inside a tunnel or not.
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
    /// Which fragment it is; none of a whole packet.
    pub(super) piece: Option<Piece>,
    pub(super) content: Content,
    /// Bytes behind the transport header; of UDP and of a later fragment at least four, which have the number of the flow.
    pub(super) data_len: usize,
}

/// A fragment of a TCP segment of [`FIRST_DATA`] and [`LATER_DATA`] bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// The TCP header and [`FIRST_DATA`].
    First,
    /// [`LATER_DATA`].
    Later,
}

impl Piece {
    const BOTH: [Self; 2] = [Self::First, Self::Later];

    #[allow(clippy::cast_possible_truncation)] // 3
    const fn position(self) -> Position {
        match self {
            Self::First => Position { offset: 0, more: true },
            Self::Later => Position { offset: (TCP_BYTES + FIRST_DATA) as u16 / 8, more: false },
        }
    }
}

/// The place of a fragment in its datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    /// In units of eight bytes.
    offset: u16,
    /// Whether others follow.
    more: bool,
}

impl Position {
    /// The fragment here; `None`: the bench sends no such fragment.
    fn piece(self) -> Option<Piece> {
        Piece::BOTH.into_iter().find(|piece| piece.position() == self)
    }
}

/// The fields of an IP header that routers write or read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hop {
    pub(super) limit: u8,
    /// IPv4, 16 bits, and of fragments of IPv6; otherwise 0.
    pub(super) identification: u32,
    /// IPv4, and false of fragments of IPv6; otherwise true.
    pub(super) dont_fragment: bool,
    /// The flow label of IPv6; otherwise 0.
    pub(super) label: u32,
}

/// The transport header, and the number of the flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    Tcp {
        flags: u8,
        sequence: u32,
        acknowledgement: u32,
        window: u16,
    },
    Udp {
        flow: u32,
    },
    /// A later fragment, without the header.
    Rest {
        flow: u32,
    },
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
/// Bytes of the flow's number in UDP data, and in later fragments.
const NUMBER: usize = 4;
const TCP_BYTES: usize = 20;
const UDP_BYTES: usize = 8;
/// The fragment header of IPv6 (RFC 8200 section 4.5), bytes.
const FRAGMENT_BYTES: usize = 8;
/// Data of the first fragment, bytes: with the TCP header a multiple of eight.
pub(super) const FIRST_DATA: usize = 4;
/// Data of the later fragment, bytes.
pub(super) const LATER_DATA: usize = 12;
const _: () = assert!((TCP_BYTES + FIRST_DATA).is_multiple_of(8));

const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const VLAN: u16 = 0x8100;
const TCP: u8 = 6;
const UDP: u8 = 17;
const FRAGMENT: u8 = 44;

/// The byte of data at a position, unless it is of the flow's number.
#[allow(clippy::cast_possible_truncation)] // the lowest byte
pub(super) const fn pattern(position: usize) -> u8 {
    (position as u8).wrapping_mul(29) ^ 0xa5
}

impl Content {
    const fn protocol(self) -> u8 {
        match self {
            Self::Tcp { .. } | Self::Rest { .. } => TCP,
            Self::Udp { .. } => UDP,
        }
    }

    const fn header_bytes(self) -> usize {
        match self {
            Self::Tcp { .. } => TCP_BYTES,
            Self::Udp { .. } => UDP_BYTES,
            Self::Rest { .. } => 0,
        }
    }

    /// Fewest bytes of data.
    pub(super) const fn data_min(self) -> usize {
        match self {
            Self::Tcp { .. } => 0,
            Self::Udp { .. } | Self::Rest { .. } => NUMBER,
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
        ETHERNET + tag + tunnel + self.ip_bytes() + self.content.header_bytes()
    }

    /// Bytes of the packet's IP header, with the fragment header.
    fn ip_bytes(&self) -> usize {
        let is_v4 = self.source.0.is_ipv4();
        ip_bytes(is_v4) + if self.piece.is_some() && !is_v4 { FRAGMENT_BYTES } else { 0 }
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
            let packet_len = self.ip_bytes() + segment_len;
            bytes.extend(ether_type(tunnel.source.is_ipv4()).to_be_bytes());
            let carried = if tunnel.ports.is_some() { UDP } else { ip_number(is_v4) };
            let udp_len = if tunnel.ports.is_some() { UDP_BYTES } else { 0 };
            let outer = IpHeader::new(tunnel.source, tunnel.destination, tunnel.hop, carried, udp_len + packet_len);
            outer.write(bytes);
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
        let (source, destination) = (self.source.0, self.destination.0);
        let header = IpHeader::new(source, destination, self.hop, self.content.protocol(), segment_len);
        IpHeader { piece: self.piece, ..header }.write(bytes);
        match (self.piece, self.content) {
            (None, _) => self.segment(bytes),
            (Some(Piece::First), _) => {
                let end = bytes.len() + segment_len;
                self.segment(bytes);
                bytes.truncate(end);
            }
            (Some(Piece::Later), Content::Rest { flow }) => rest(bytes, flow),
            (Some(Piece::Later), _) => {}
        }
    }

    /// Appends the segment or datagram: of a first fragment the whole one, which its checksum covers.
    fn segment(&self, bytes: &mut Vec<u8>) {
        let ((source, source_port), (destination, destination_port)) = (self.source, self.destination);
        let at = bytes.len();
        match self.content {
            Content::Tcp { flags, sequence, acknowledgement, window } => {
                bytes.extend(source_port.to_be_bytes());
                bytes.extend(destination_port.to_be_bytes());
                bytes.extend(sequence.to_be_bytes());
                bytes.extend(acknowledgement.to_be_bytes());
                bytes.extend([0x50, flags]);
                bytes.extend(window.to_be_bytes());
                bytes.extend([0; 4]);
                data(bytes, self.data_len, None);
                if self.piece.is_some() {
                    rest(bytes, sequence);
                }
            }
            Content::Udp { flow } => {
                udp_header(bytes, (source_port, destination_port), UDP_BYTES + self.data_len);
                data(bytes, self.data_len, Some(flow));
            }
            Content::Rest { .. } => {}
        }
        let sum = transport_sum(source, destination, self.content.protocol(), &bytes[at..]);
        match self.content {
            Content::Tcp { .. } => put_sum(bytes, at + 16, sum),
            Content::Udp { .. } => put_sum(bytes, at + 6, never_zero(sum)),
            Content::Rest { .. } => {}
        }
    }
}

/// Appends the data of a later fragment: the number of the flow and its complement, since no checksum of its own covers it.
fn rest(bytes: &mut Vec<u8>, flow: u32) {
    data(bytes, LATER_DATA - NUMBER, Some(flow));
    bytes.extend((!flow).to_be_bytes());
}

/// Appends data, which begins with the number of the flow if there is one.
fn data(bytes: &mut Vec<u8>, len: usize, flow: Option<u32>) {
    let at = bytes.len();
    bytes.extend((0..len).map(pattern));
    if let (Some(flow), Some(number)) = (flow, bytes.get_mut(at..at + NUMBER)) {
        number.copy_from_slice(&flow.to_be_bytes());
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

/// An IP header: what is written, or was read.
struct IpHeader {
    source: IpAddr,
    destination: IpAddr,
    hop: Hop,
    piece: Option<Piece>,
    protocol: u8,
    payload_at: usize,
    payload_len: usize,
}

impl IpHeader {
    /// That of a whole packet, to be written.
    const fn new(source: IpAddr, destination: IpAddr, hop: Hop, protocol: u8, payload_len: usize) -> Self {
        Self { source, destination, hop, piece: None, protocol, payload_at: 0, payload_len }
    }

    /// Appends it, of IPv6 with the fragment header.
    #[allow(clippy::cast_possible_truncation)] // lengths of frames, 16 bits of an IPv4 identification
    fn write(&self, bytes: &mut Vec<u8>) {
        let (at, hop) = (bytes.len(), &self.hop);
        let position = self.piece.map_or(Position { offset: 0, more: false }, Piece::position);
        let fragment_bytes = if self.piece.is_some() { FRAGMENT_BYTES } else { 0 };
        if self.source.is_ipv4() {
            let flags = u16::from(hop.dont_fragment) << 14 | u16::from(position.more) << 13;
            bytes.extend([0x45, 0]);
            bytes.extend(((20 + self.payload_len) as u16).to_be_bytes());
            bytes.extend((hop.identification as u16).to_be_bytes());
            bytes.extend((flags | position.offset).to_be_bytes());
            bytes.extend([hop.limit, self.protocol, 0, 0]);
        } else {
            bytes.extend((0x6000_0000 | hop.label).to_be_bytes());
            bytes.extend(((fragment_bytes + self.payload_len) as u16).to_be_bytes());
            bytes.extend([if self.piece.is_some() { FRAGMENT } else { self.protocol }, hop.limit]);
        }
        for address in [self.source, self.destination] {
            match address {
                IpAddr::V4(address) => bytes.extend(address.octets()),
                IpAddr::V6(address) => bytes.extend(address.octets()),
            }
        }
        if self.source.is_ipv4() {
            let sum = !fold(sum_of(&bytes[at..]));
            put_sum(bytes, at + 10, sum);
        } else if self.piece.is_some() {
            bytes.extend([self.protocol, 0]);
            bytes.extend((position.offset << 3 | u16::from(position.more)).to_be_bytes());
            bytes.extend(hop.identification.to_be_bytes());
        }
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
        _ if packet.piece == Some(Piece::Later) => Content::Rest { flow: double_word(bytes, segment)? },
        TCP => Content::Tcp {
            flags: *bytes.get(segment + 13)?,
            sequence: double_word(bytes, segment + 4)?,
            acknowledgement: double_word(bytes, segment + 8)?,
            window: word(bytes, segment + 14)?,
        },
        _ => Content::Udp { flow: double_word(bytes, segment + UDP_BYTES)? },
    };
    let port = |at: usize| if matches!(content, Content::Rest { .. }) { Some(0) } else { word(bytes, segment + at) };
    Some(FrameFields {
        destination_mac: mac(0)?,
        source_mac: mac(6)?,
        vlan,
        tunnel,
        source: (packet.source, port(0)?),
        destination: (packet.destination, port(2)?),
        hop: packet.hop,
        piece: packet.piece,
        content,
        data_len: packet.payload_len.checked_sub(content.header_bytes())?,
    })
}

/// Reads an IP header; none of a fragment that the bench does not send.
fn ip(bytes: &[u8], at: usize) -> Option<IpHeader> {
    let header = bytes.get(at..)?;
    if header.first()? >> 4 == 4 {
        let address = |at: usize| Some(IpAddr::from(*header.get(at..)?.first_chunk::<4>()?));
        let fragmentation = word(header, 6)?;
        let position = Position { offset: fragmentation & 0x1fff, more: fragmentation & 0x2000 != 0 };
        let dont_fragment = fragmentation & 0x4000 != 0;
        let hop = Hop { limit: *header.get(8)?, identification: word(header, 4)?.into(), dont_fragment, label: 0 };
        Some(IpHeader {
            source: address(12)?,
            destination: address(16)?,
            hop,
            piece: piece_at(position)?,
            protocol: *header.get(9)?,
            payload_at: at + 20,
            payload_len: usize::from(word(header, 2)?).checked_sub(20)?,
        })
    } else {
        let address = |at: usize| Some(IpAddr::from(*header.get(at..)?.first_chunk::<16>()?));
        let label = double_word(header, 0)? & 0xf_ffff;
        let hop = Hop { limit: *header.get(7)?, identification: 0, dont_fragment: true, label };
        let whole = IpHeader {
            payload_at: at + 40,
            ..IpHeader::new(address(8)?, address(24)?, hop, *header.get(6)?, word(header, 4)?.into())
        };
        if whole.protocol != FRAGMENT {
            return Some(whole);
        }
        let offset_more = word(header, 42)?;
        let hop = Hop { identification: double_word(header, 44)?, dont_fragment: false, ..hop };
        Some(IpHeader {
            hop,
            piece: Some(Position { offset: offset_more >> 3, more: offset_more & 1 != 0 }.piece()?),
            protocol: *header.get(40)?,
            payload_at: at + 40 + FRAGMENT_BYTES,
            payload_len: whole.payload_len.checked_sub(FRAGMENT_BYTES)?,
            ..whole
        })
    }
}

/// The fragment at a position of IPv4, or a whole packet.
fn piece_at(position: Position) -> Option<Option<Piece>> {
    if position == (Position { offset: 0, more: false }) { Some(None) } else { position.piece().map(Some) }
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

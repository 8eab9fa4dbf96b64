//! Reads what left the engine, by fixed offsets, and computes every checksum in full; shares no code with the engine.
//! Deliberately not here: whether it is what should have left.

use std::net::IpAddr;

use super::BenchError;

/// A TCP packet without options as it left, inside a tunnel or not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) destination_mac: [u8; 6],
    pub(super) source_mac: [u8; 6],
    /// What it was inside of.
    pub(super) tunnel: Option<Tunnel>,
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
pub(super) struct Tunnel {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    pub(super) hop_limit: u8,
    /// IPv6: the flow label.
    pub(super) label: u32,
    /// GUE: the UDP ports.
    pub(super) ports: Option<(u16, u16)>,
}

/// The smallest frame; what is longer has no padding.
const PADDED_BYTES: usize = 60;

/// Reads a frame.
pub(super) fn see(frame: &[u8]) -> Result<Seen, BenchError> {
    read(frame).ok_or_else(|| BenchError::Wrong(format!("no whole TCP packet with right checksums: {frame:02x?}")))
}

fn read(frame: &[u8]) -> Option<Seen> {
    let (packet, behind) = network(frame.get(14..)?)?;
    if word(frame, 12)? != packet.ether_type() || !(behind.is_empty() || frame.len() == PADDED_BYTES) {
        return None;
    }
    let seen = match packet.protocol {
        TCP => tcp(&packet)?,
        UDP => within(&packet, Some(gue_ports(&packet)?), packet.payload.get(8..)?)?,
        _ => within(&packet, None, packet.payload)?,
    };
    Some(Seen { destination_mac: frame.get(..6)?.try_into().ok()?, source_mac: frame.get(6..12)?.try_into().ok()?, ..seen })
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
        if self.is_v4() { 0x0800 } else { 0x86dd }
    }

    /// The number that says "IP in IP" of such a packet.
    const fn number(&self) -> u8 {
        if self.is_v4() { 4 } else { 41 }
    }

    fn ends(&self) -> Option<(IpAddr, IpAddr)> {
        let (source, destination) = self.addresses.split_at(self.addresses.len() / 2);
        Some((address(source)?, address(destination)?))
    }

    /// Whether the checksum over pseudo header and payload is right.
    fn holds(&self) -> bool {
        let Ok(len) = u16::try_from(self.payload.len()) else { return false };
        ones_sum(&[self.addresses, &[0, self.protocol], &len.to_be_bytes(), self.payload].concat()) == 0xffff
    }
}

fn tcp(packet: &Network<'_>) -> Option<Seen> {
    let (source, destination) = packet.ends()?;
    let segment = packet.payload;
    let sequence = u32::from_be_bytes(segment.get(4..8)?.try_into().ok()?);
    let reset = *segment.get(13)? == dataplane::tcp_flags::RST;
    (packet.protocol == TCP && packet.holds()).then_some(Seen {
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
    let sums = if outer.is_v4() { word(udp, 6)? == 0 } else { word(udp, 6)? != 0 && outer.holds() };
    let whole = usize::from(word(udp, 4)?) == udp.len();
    Some((word(udp, 0)?, word(udp, 2)?)).filter(|_| sums && whole)
}

/// A TCP packet inside another.
fn within(outer: &Network<'_>, ports: Option<(u16, u16)>, inner: &[u8]) -> Option<Seen> {
    let (packet, behind) = network(inner)?;
    let carried = if ports.is_some() { UDP } else { packet.number() };
    let (source, destination) = outer.ends()?;
    let tunnel = Tunnel { source, destination, hop_limit: outer.hop_limit, label: outer.label, ports };
    let seen = tcp(&packet).filter(|_| behind.is_empty() && outer.protocol == carried)?;
    Some(Seen { tunnel: Some(tunnel), ..seen })
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

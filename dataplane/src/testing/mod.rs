//! Frames for tests: complete frames built from a short description, with independently computed checksums.
//!
//! **Invariant:** shares no code with what it tests: neither views nor checksums.
//!
//! Not here: expectations, ports and buffers.
#![allow(clippy::expect_used, clippy::panic, reason = "a test that asks for an impossible frame shall fail there")]

#[cfg(test)]
mod buffer;
mod checksums;
mod fragments;
mod rss;

#[cfg(test)]
pub(crate) use buffer::{Bytes, v4, v6};
pub use checksums::{assert_checksums, slow_crc32c, transport_checksum};
pub use fragments::{fragments, identification, reassembled};
pub use rss::Rss;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::wire::{Mac, tcp_flags};
use checksums::{len16, slow_checksum};

/// Default source MAC of frames.
pub const PEER_MAC: Mac = Mac([0x02, 0, 0, 0, 0, 0x01]);
/// Default destination MAC of frames.
pub const OUR_MAC: Mac = Mac([0x02, 0, 0, 0, 0xaa, 0x01]);

/// An IP packet in an Ethernet frame. Change the fields that a test is about, then call [`Packet::build`].
#[derive(Clone, Debug)]
pub struct Packet {
    /// Ethernet source.
    pub source_mac: Mac,
    /// Ethernet destination.
    pub destination_mac: Mac,
    /// IP source.
    pub source: IpAddr,
    /// IP destination, of the same family.
    pub destination: IpAddr,
    /// Time to live or hop limit.
    pub hop_limit: u8,
    /// IPv4: identification.
    pub identification: u16,
    /// IPv4: flags and offset, as in the header; "don't fragment" by default.
    pub fragmentation: u16,
    /// IPv4: options, whole 32-bit words.
    pub options: Vec<u8>,
    /// IPv6: extension headers, each as number and bytes; the first byte of each is filled in.
    pub extensions: Vec<(u8, Vec<u8>)>,
    /// The transport header.
    pub segment: Segment,
    /// The data after the transport header.
    pub payload: Vec<u8>,
    /// Zero bytes after the packet.
    pub padding: usize,
}

/// A transport header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// TCP without options.
    Tcp {
        /// Source and destination port.
        ports: [u16; 2],
        /// See [`tcp_flags`].
        flags: u8,
        /// Sequence number.
        sequence: u32,
        /// Acknowledgement number.
        acknowledgement: u32,
    },
    /// UDP.
    Udp {
        /// Source and destination port.
        ports: [u16; 2],
        /// Whether to compute a checksum, or to send 0.
        checksum: bool,
    },
    /// SCTP's common header, with its CRC32c; chunks are the payload.
    Sctp {
        /// Source and destination port.
        ports: [u16; 2],
        /// Verification tag.
        tag: u32,
    },
    /// ICMP or ICMPv6, by the family of the addresses.
    Icmp {
        /// Type.
        kind: u8,
        /// Code.
        code: u8,
        /// The second 32-bit word.
        rest: u32,
    },
    /// No header: the payload is all.
    Other {
        /// The protocol number.
        protocol: u8,
    },
}

impl Packet {
    /// A TCP SYN between `ip:port` pairs.
    #[must_use]
    pub fn tcp(from: &str, to: &str) -> Self {
        let (from, to) = (socket(from), socket(to));
        let segment =
            Segment::Tcp { ports: [from.port(), to.port()], flags: tcp_flags::SYN, sequence: 1_000, acknowledgement: 0 };
        Self::between(from.ip(), to.ip(), segment)
    }

    /// A UDP datagram between `ip:port` pairs.
    #[must_use]
    pub fn udp(from: &str, to: &str) -> Self {
        let (from, to) = (socket(from), socket(to));
        Self::between(from.ip(), to.ip(), Segment::Udp { ports: [from.port(), to.port()], checksum: true })
    }

    /// An SCTP packet between `ip:port` pairs with an INIT, whose initiate tag is 0x0102_0304.
    #[must_use]
    pub fn sctp(from: &str, to: &str) -> Self {
        let (from, to) = (socket(from), socket(to));
        let segment = Segment::Sctp { ports: [from.port(), to.port()], tag: 0 };
        let init = [1, 0, 0, 20, 1, 2, 3, 4, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 9];
        Self::between(from.ip(), to.ip(), segment).payload(&init)
    }

    /// Sets another SCTP tag, and a chunk of this kind with 16 bytes of data instead of the INIT.
    #[must_use]
    pub fn chunk(mut self, new_tag: u32, kind: u8) -> Self {
        let Segment::Sctp { tag, .. } = &mut self.segment else { panic!("only SCTP has chunks") };
        *tag = new_tag;
        self.payload(&[&[kind, 0, 0, 20][..], b"sixteen bytes of"].concat())
    }

    /// An echo request between addresses.
    #[must_use]
    pub fn echo_request(from: &str, to: &str) -> Self {
        let from: IpAddr = from.parse().expect("an IP address");
        let kind = if from.is_ipv4() { 8 } else { 128 };
        let echo = Self::between(from, to.parse().expect("an IP address"), Segment::Icmp { kind, code: 0, rest: 0x0007_0001 });
        echo.payload(b"are you there?")
    }

    /// A packet with default fields.
    #[must_use]
    pub fn between(source: IpAddr, destination: IpAddr, segment: Segment) -> Self {
        assert_eq!(source.is_ipv4(), destination.is_ipv4(), "one family");
        Self {
            source_mac: PEER_MAC,
            destination_mac: OUR_MAC,
            source,
            destination,
            hop_limit: 63,
            identification: 0x1234,
            fragmentation: 0x4000,
            options: Vec::new(),
            extensions: Vec::new(),
            segment,
            payload: Vec::new(),
            padding: 0,
        }
    }

    /// Sets other TCP flags. With ACK it acknowledges a SYN of [`Packet::tcp`], whose sequence number is 1,000.
    #[must_use]
    pub fn flags(mut self, new: u8) -> Self {
        let Segment::Tcp { flags, acknowledgement, .. } = &mut self.segment else { panic!("only TCP has flags") };
        *flags = new;
        *acknowledgement = if new & tcp_flags::ACK != 0 { 1_001 } else { 0 };
        self
    }

    /// Sets other TCP sequence and acknowledgement numbers.
    #[must_use]
    pub fn numbers(mut self, new_sequence: u32, new_acknowledgement: u32) -> Self {
        let Segment::Tcp { sequence, acknowledgement, .. } = &mut self.segment else { panic!("only TCP has numbers") };
        (*sequence, *acknowledgement) = (new_sequence, new_acknowledgement);
        self
    }

    /// Sets the data.
    #[must_use]
    pub fn payload(mut self, payload: &[u8]) -> Self {
        self.payload = payload.to_vec();
        self
    }

    /// Sets another hop limit.
    #[must_use]
    pub fn hop_limit(mut self, hop_limit: u8) -> Self {
        self.hop_limit = hop_limit;
        self
    }

    /// The frame.
    #[must_use]
    pub fn build(&self) -> Vec<u8> {
        let mut frame = ethernet(self.destination_mac, self.source_mac, if self.source.is_ipv4() { 0x0800 } else { 0x86dd });
        let (protocol, transport) = self.transport();
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                frame.extend(self.ipv4(source, destination, protocol, transport.len()));
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                frame.extend(self.ipv6(source, destination, protocol, transport.len()));
            }
            _ => panic!("one family"),
        }
        frame.extend(transport);
        frame.resize(frame.len() + self.padding, 0);
        frame
    }

    fn transport(&self) -> (u8, Vec<u8>) {
        let payload_len = len16(self.payload.len());
        let (protocol, mut bytes, checksum_at) = match self.segment {
            Segment::Tcp { ports: [from, to], flags, sequence, acknowledgement } => {
                let mut b = [from.to_be_bytes(), to.to_be_bytes()].concat();
                b.extend(sequence.to_be_bytes());
                b.extend(acknowledgement.to_be_bytes());
                b.extend([0x50, flags, 0x20, 0, 0, 0, 0, 0]);
                (6, b, Some(16))
            }
            Segment::Udp { ports: [from, to], checksum } => {
                let b = [from, to, 8 + payload_len, 0].map(u16::to_be_bytes).concat();
                (17, b, checksum.then_some(6))
            }
            Segment::Sctp { ports: [from, to], tag } => {
                let ports = [from, to].map(u16::to_be_bytes).concat();
                (132, [&ports[..], &tag.to_be_bytes(), &[0; 4]].concat(), None)
            }
            Segment::Icmp { kind, code, rest } => {
                let mut b = vec![kind, code, 0, 0];
                b.extend(rest.to_be_bytes());
                (if self.source.is_ipv4() { 1 } else { 58 }, b, Some(2))
            }
            Segment::Other { protocol } => (protocol, Vec::new(), None),
        };
        bytes.extend(&self.payload);
        if let Segment::Sctp { .. } = self.segment {
            let crc = slow_crc32c(&bytes);
            bytes[8..12].copy_from_slice(&crc.to_le_bytes());
        }
        if let Some(at) = checksum_at {
            let sum = transport_checksum(self.source, self.destination, protocol, &bytes);
            let sum = if protocol == 17 && sum == 0 { 0xffff } else { sum };
            bytes[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        }
        (protocol, bytes)
    }

    fn ipv4(&self, source: Ipv4Addr, destination: Ipv4Addr, protocol: u8, transport_len: usize) -> Vec<u8> {
        let header_len = 20 + self.options.len();
        let words = u8::try_from(header_len / 4).expect("at most 40 bytes of options");
        let mut header = vec![0x40 | words, 0];
        header.extend(len16(header_len + transport_len).to_be_bytes());
        header.extend(self.identification.to_be_bytes());
        header.extend(self.fragmentation.to_be_bytes());
        header.extend([self.hop_limit, protocol, 0, 0]);
        header.extend(source.octets());
        header.extend(destination.octets());
        header.extend(&self.options);
        let sum = slow_checksum(&header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        header
    }

    fn ipv6(&self, source: Ipv6Addr, destination: Ipv6Addr, protocol: u8, transport_len: usize) -> Vec<u8> {
        let extensions_len: usize = self.extensions.iter().map(|(_, bytes)| bytes.len()).sum();
        let numbers: Vec<u8> = self.extensions.iter().map(|(number, _)| *number).chain([protocol]).collect();
        let mut header = vec![0x60, 0, 0, 0];
        header.extend(len16(extensions_len + transport_len).to_be_bytes());
        header.extend([numbers[0], self.hop_limit]);
        header.extend(source.octets());
        header.extend(destination.octets());
        for ((_, bytes), next) in self.extensions.iter().zip(&numbers[1..]) {
            header.push(*next);
            header.extend(&bytes[1..]);
        }
        header
    }
}

/// The frame as it arrives at the port with this address: the destination [`OUR_MAC`] is replaced by that of the port.
#[must_use]
pub fn arriving_at(port: Mac, frame: &[u8]) -> Vec<u8> {
    match frame.strip_prefix(&OUR_MAC.0) {
        Some(rest) => [&port.0, rest].concat(),
        None => frame.to_vec(),
    }
}

/// The frame of a TCP packet without data, with an option that announces this maximum segment size.
#[must_use]
pub fn with_segment_size(packet: &Packet, announced: u16) -> Vec<u8> {
    let (protocol, mut segment) = packet.transport();
    segment.truncate(20);
    segment[12] = 0x60;
    segment[16..18].fill(0);
    segment.extend([2, 4]);
    segment.extend(announced.to_be_bytes());
    let checksum = transport_checksum(packet.source, packet.destination, protocol, &segment);
    segment[16..18].copy_from_slice(&checksum.to_be_bytes());
    Packet { segment: Segment::Other { protocol }, payload: segment, ..packet.clone() }.build()
}

/// The maximum segment size that [`with_segment_size`] wrote, if a frame without IP options or extension headers has
/// it.
#[must_use]
pub fn segment_size(frame: &[u8]) -> Option<u16> {
    let tcp = frame.get(if frame[12..14] == [8, 0] { 34 } else { 54 }..)?;
    (tcp[12] == 0x60 && tcp[20..22] == [2, 4]).then(|| u16::from_be_bytes([tcp[22], tcp[23]]))
}

/// An ARP request for `target` to broadcast.
#[must_use]
pub fn arp_request(sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut frame = ethernet(Mac([0xff; 6]), PEER_MAC, 0x0806);
    frame.extend([0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(PEER_MAC.0);
    frame.extend(sender.octets());
    frame.extend([0; 6]);
    frame.extend(target.octets());
    frame
}

/// A neighbour solicitation for `target` to its solicited-node group, with the option that contains the sender's MAC.
#[must_use]
pub fn neighbour_solicitation(sender: Ipv6Addr, target: Ipv6Addr) -> Packet {
    let [.., a, b, c] = target.octets();
    let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), u16::from_be_bytes([b, c]));
    let mut packet = Packet::between(sender.into(), group.into(), Segment::Icmp { kind: 135, code: 0, rest: 0 }).hop_limit(255);
    packet.destination_mac = Mac([0x33, 0x33, 0xff, a, b, c]);
    packet.payload = [&target.octets()[..], &[1, 1], &PEER_MAC.0].concat();
    packet
}

fn ethernet(destination: Mac, source: Mac, ether_type: u16) -> Vec<u8> {
    let mut header = [destination.0, source.0].concat();
    header.extend(ether_type.to_be_bytes());
    header
}

fn socket(text: &str) -> SocketAddr {
    text.parse().expect("ip:port")
}

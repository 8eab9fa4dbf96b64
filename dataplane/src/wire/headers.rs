//! The result of parsing the headers of a frame: plain values; the bytes stay in the buffer.
//!
//! **Invariant:** offsets lie within the frame; `parse` guarantees it.
//!
//! Not here: parsing.

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::address::Address;

/// Bits of the TCP flags byte (RFC 9293 section 3.1).
pub mod tcp_flags {
    /// The sender has no more data.
    pub const FIN: u8 = 0x01;
    /// Synchronise sequence numbers.
    pub const SYN: u8 = 0x02;
    /// Reset the connection.
    pub const RST: u8 = 0x04;
    /// The sender's buffer is empty: end of a write.
    pub const PSH: u8 = 0x08;
    /// The acknowledgement field is valid.
    pub const ACK: u8 = 0x10;
}

/// Kinds of SCTP chunks that the engine distinguishes (RFC 9260 section 3.2).
pub mod sctp_chunk {
    /// User data.
    pub const DATA: u8 = 0;
    /// Requests an association: the only chunk of its packet, with verification tag 0.
    pub const INIT: u8 = 1;
    /// The answer to INIT, with a cookie instead of state.
    pub const INIT_ACK: u8 = 2;
    /// Acknowledges data.
    pub const SACK: u8 = 3;
    /// Checks whether the other end is reachable.
    pub const HEARTBEAT: u8 = 4;
    /// The answer to HEARTBEAT.
    pub const HEARTBEAT_ACK: u8 = 5;
    /// Aborts an association. Never answered.
    pub const ABORT: u8 = 6;
    /// The answer to SHUTDOWN: all data has arrived at both ends.
    pub const SHUTDOWN_ACK: u8 = 8;
    /// Reports an error in a packet.
    pub const ERROR: u8 = 9;
    /// Returns the cookie: the association is established.
    pub const COOKIE_ECHO: u8 = 10;
    /// The answer to COOKIE ECHO.
    pub const COOKIE_ACK: u8 = 11;
    /// The last packet of an association. Never answered.
    pub const SHUTDOWN_COMPLETE: u8 = 14;
    /// User data with interleaved messages (RFC 8260).
    pub const I_DATA: u8 = 64;
}

/// Source and destination of a packet, as in its headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tuple<A> {
    /// Source address.
    pub source: A,
    /// Destination address.
    pub destination: A,
    /// Source port; 0 where the transport has none.
    pub source_port: u16,
    /// Destination port; 0 where the transport has none.
    pub destination_port: u16,
    /// Transport protocol number (the last IPv6 next header).
    pub protocol: u8,
}

/// Addresses and ports of a packet as they stand in its headers: source and destination address, source and destination
/// port, in network byte order. 12 bytes for IPv4, 36 for IPv6. It is compared, hashed and rewritten a word at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(transparent)]
pub struct WireKey<const WORDS: usize>([u32; WORDS]);

/// The [`WireKey`] of one address family.
pub trait TupleKey: Copy + Eq + std::fmt::Debug + FromZeros + Send + Sync + 'static {
    /// The address type of the family.
    type Address;

    /// The key of a packet with this tuple; the protocol is not part of it.
    fn of(tuple: &Tuple<Self::Address>) -> Self;
    /// The tuple of packets with this key and protocol.
    fn tuple(&self, protocol: u8) -> Tuple<Self::Address>;
    /// The key of packets in the opposite direction.
    #[must_use]
    fn reversed(self) -> Self;
    /// The words of the addresses, source first, and the word of the ports.
    fn words(&self) -> (&[u32], u32);
}

impl WireKey<3> {
    /// The key in the bytes of an IPv4 header without options, from the source address on, and the ports after it.
    #[inline(always)]
    #[must_use]
    pub(crate) fn read(bytes: [u8; 12]) -> Self {
        zerocopy::transmute!(bytes)
    }
}

impl WireKey<9> {
    /// The key in the bytes of an IPv6 header, from the source address on, and the ports after it.
    #[inline(always)]
    #[must_use]
    pub(crate) fn read(bytes: [u8; 36]) -> Self {
        zerocopy::transmute!(bytes)
    }
}

/// The word of two ports in network byte order.
#[inline]
fn port_word(source: u16, destination: u16) -> u32 {
    (u32::from(source) << 16 | u32::from(destination)).to_be()
}

/// The two ports of a word.
#[inline]
fn ports_of(word: u32) -> (u16, u16) {
    let [a, b, c, d] = word.to_ne_bytes();
    (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]))
}

impl TupleKey for WireKey<3> {
    type Address = u32;

    #[inline]
    fn of(tuple: &Tuple<u32>) -> Self {
        Self([tuple.source.to_be(), tuple.destination.to_be(), port_word(tuple.source_port, tuple.destination_port)])
    }

    #[inline]
    fn tuple(&self, protocol: u8) -> Tuple<u32> {
        let [source, destination, ports] = self.0;
        let (source_port, destination_port) = ports_of(ports);
        let (source, destination) = (u32::from_be(source), u32::from_be(destination));
        Tuple { source, destination, source_port, destination_port, protocol }
    }

    #[inline(always)]
    fn reversed(self) -> Self {
        let [source, destination, ports] = self.0;
        Self([destination, source, ports.rotate_left(16)])
    }

    #[inline(always)]
    fn words(&self) -> (&[u32], u32) {
        (&self.0[..2], self.0[2])
    }
}

impl TupleKey for WireKey<9> {
    type Address = u128;

    #[inline]
    fn of(tuple: &Tuple<u128>) -> Self {
        let ports = port_word(tuple.source_port, tuple.destination_port);
        let bytes: [[u8; 16]; 2] = [tuple.source.to_be_bytes(), tuple.destination.to_be_bytes()];
        let [a, b, c, d, e, f, g, h]: [u32; 8] = zerocopy::transmute!(bytes);
        Self([a, b, c, d, e, f, g, h, ports])
    }

    #[inline]
    fn tuple(&self, protocol: u8) -> Tuple<u128> {
        let [a, b, c, d, e, f, g, h, ports] = self.0;
        let (source_port, destination_port) = ports_of(ports);
        let [source, destination]: [[u8; 16]; 2] = zerocopy::transmute!([a, b, c, d, e, f, g, h]);
        let (source, destination) = (u128::from_be_bytes(source), u128::from_be_bytes(destination));
        Tuple { source, destination, source_port, destination_port, protocol }
    }

    #[inline(always)]
    fn reversed(self) -> Self {
        let [a, b, c, d, e, f, g, h, ports] = self.0;
        Self([e, f, g, h, a, b, c, d, ports.rotate_left(16)])
    }

    #[inline(always)]
    fn words(&self) -> (&[u32], u32) {
        (&self.0[..8], self.0[8])
    }
}

/// The transport header after the IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP, with its flags byte.
    Tcp {
        /// See [`tcp_flags`].
        flags: u8,
    },
    /// UDP. A checksum of 0 (IPv4) is handled in the rewrite.
    Udp,
    /// SCTP, with the kind of its first chunk.
    Sctp {
        /// See [`sctp_chunk`].
        chunk: u8,
    },
    /// ICMP or ICMPv6, errors and queries, with type and code.
    Icmp {
        /// Message type.
        kind: u8,
        /// Code within the type.
        code: u8,
    },
    /// A fragment of a datagram, first or later. Ports are 0.
    Fragment,
    /// Any other protocol.
    Other,
}

/// A parsed IP packet. Offsets count bytes from the start of the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers<A> {
    /// Addresses, ports and protocol.
    pub tuple: Tuple<A>,
    /// The transport.
    pub transport: Transport,
    /// Start of the IP header.
    pub network_offset: u16,
    /// Start of the transport header (for a fragment: of its data).
    pub transport_offset: u16,
    /// Length of the IP packet, header included; the frame may be longer (padding).
    pub packet_len: u16,
    /// IPv4 time to live or IPv6 hop limit.
    pub hop_limit: u8,
    /// Whether the frame's destination MAC is a group address (broadcast or multicast).
    pub group_frame: bool,
    /// IPv4 "don't fragment"; always true for IPv6.
    pub dont_fragment: bool,
}

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// An IPv4 packet.
    V4(Headers<u32>),
    /// An IPv6 packet.
    V6(Headers<u128>),
    /// An ARP packet for IPv4 over Ethernet without VLAN tag, checked for length, so a view of it can be taken.
    Arp,
    /// Any other frame: other EtherTypes, more than two VLAN tags. The kernel may handle it.
    Other,
}

impl<A: Address> Tuple<A> {
    /// The tuple of a packet in the opposite direction.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            source_port: self.destination_port,
            destination_port: self.source_port,
            protocol: self.protocol,
        }
    }
}

/// The key by which a frontend is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FrontendKey<A> {
    pub(crate) address: A,
    pub(crate) port: u16,
    pub(crate) protocol: u8,
}

/// The transport header and data of a parsed packet, without the frame's padding.
pub(crate) fn transport_bytes<'a, A: Address>(frame: &'a [u8], headers: &Headers<A>) -> Option<&'a [u8]> {
    let end = usize::from(headers.network_offset) + usize::from(headers.packet_len);
    frame.get(usize::from(headers.transport_offset)..end)
}

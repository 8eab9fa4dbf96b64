//! The result of parsing the headers of a frame: plain values; the bytes stay in the buffer.
//!
//! **Invariant:** offsets lie within the frame; `parse` guarantees it.
//!
//! Not here: parsing.

use super::address::{Address, Tuple};
use super::ip::network_len;

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
    /// No chunk has this kind (it is reserved for extensions of the header). It stands for the unknown chunks of a later
    /// fragment.
    pub const RESERVED: u8 = 255;
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

impl<A: Address> Headers<A> {
    /// Whether anything stands between the IP header and the transport: options of IPv4, extension headers of IPv6.
    pub(crate) fn has_options(&self) -> bool {
        self.transport_offset > self.network_offset + network_len::<A>()
    }
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

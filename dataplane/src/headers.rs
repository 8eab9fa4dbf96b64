//! What one pass over a frame's headers finds out. Only values; the bytes stay in the buffer.

use crate::Address;

/// Bits of the TCP flags byte (RFC 9293 section 3.1).
pub mod tcp_flags {
    /// No more data from the sender.
    pub const FIN: u8 = 0x01;
    /// Synchronise sequence numbers.
    pub const SYN: u8 = 0x02;
    /// Reset the connection.
    pub const RST: u8 = 0x04;
    /// The sender's buffer is empty: the end of a write.
    pub const PSH: u8 = 0x08;
    /// The acknowledgement field counts.
    pub const ACK: u8 = 0x10;
}

/// Kinds of SCTP chunks that the engine tells apart (RFC 9260 section 3.2).
pub mod sctp_chunk {
    /// Data of a user.
    pub const DATA: u8 = 0;
    /// Asks for an association: alone in its packet, under the verification tag 0.
    pub const INIT: u8 = 1;
    /// The answer to that, with a cookie instead of state.
    pub const INIT_ACK: u8 = 2;
    /// Data has arrived.
    pub const SACK: u8 = 3;
    /// Asks whether the other end is there.
    pub const HEARTBEAT: u8 = 4;
    /// The answer to that.
    pub const HEARTBEAT_ACK: u8 = 5;
    /// Ends an association at once. Never answered.
    pub const ABORT: u8 = 6;
    /// All data has arrived at both ends.
    pub const SHUTDOWN_ACK: u8 = 8;
    /// Something is wrong with a packet.
    pub const ERROR: u8 = 9;
    /// The cookie comes back: the association stands.
    pub const COOKIE_ECHO: u8 = 10;
    /// The answer to that.
    pub const COOKIE_ACK: u8 = 11;
    /// The last packet of an association. Never answered.
    pub const SHUTDOWN_COMPLETE: u8 = 14;
    /// Data of a user in pieces of messages (RFC 8260).
    pub const I_DATA: u8 = 64;
}

/// Source and destination of a packet, as they stand in it.
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

/// What follows the IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP, with its flags byte.
    Tcp {
        /// See [`tcp_flags`].
        flags: u8,
    },
    /// UDP. A checksum of 0 (IPv4) is found at rewrite.
    Udp,
    /// SCTP, with the kind of its first chunk.
    Sctp {
        /// See [`sctp_chunk`].
        chunk: u8,
    },
    /// ICMP or ICMPv6, with its type and code. Errors and queries alike.
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
    /// What the transport is.
    pub transport: Transport,
    /// Start of the IP header.
    pub network_offset: u16,
    /// Start of the transport header (for a fragment: of its data).
    pub transport_offset: u16,
    /// Length of the IP packet, header included; the frame may be longer (padding).
    pub packet_len: u16,
    /// IPv4 time to live or IPv6 hop limit.
    pub hop_limit: u8,
    /// The frame's destination MAC is a group address (broadcast or multicast).
    pub group_frame: bool,
    /// IPv4 "don't fragment"; true for IPv6.
    pub dont_fragment: bool,
}

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// An IPv4 packet.
    V4(Headers<u32>),
    /// An IPv6 packet.
    V6(Headers<u128>),
    /// An ARP packet for IPv4 over Ethernet without VLAN tag, checked for length: the wire view can be taken of it.
    Arp,
    /// Anything else that is a frame: other EtherTypes, more than two VLAN tags. Linux may know it.
    Other,
}

impl<A: Address> Tuple<A> {
    /// The tuple of a packet that goes the other way.
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

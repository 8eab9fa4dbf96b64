//! The IPv4 header without options (RFC 791 section 3.1), the IPv6 header and the chain of its extension headers (RFC
//! 8200 sections 3 and 4), and the headers of packets that the engine writes.
//!
//! **Invariant:** the chain of extension headers is parsed up to a bound.
//!
//! Not here: the transport header after them, and the rules for addresses.

use proto::Family;
use zerocopy::network_endian::{U16, U32, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::address::{Address, low_half};
use super::buffer::{take, take_mut};
use super::link::{Ethernet, ether_type};
use crate::wire::checksum;

/// Next header numbers that `parse` skips. Every other number ends the chain, AH and ESP included: a packet that they
/// protect cannot be rewritten.
pub mod next_header {
    /// Hop-by-hop options; allowed only directly after the IPv6 header.
    pub const HOP_BY_HOP: u8 = 0;
    /// Routing header.
    pub const ROUTING: u8 = 43;
    /// Fragment header.
    pub const FRAGMENT: u8 = 44;
    /// Destination options.
    pub const DESTINATION_OPTIONS: u8 = 60;
}

/// The fixed 40 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Ipv6 {
    /// Version (4 bits), traffic class (8 bits), flow label (20 bits).
    pub version_class_label: U32,
    /// Bytes after this header, extension headers included.
    pub payload_len: U16,
    /// Protocol of the payload or type of the first extension header.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source address.
    pub source: U128,
    /// Destination address.
    pub destination: U128,
}

impl Ipv6 {
    /// Bytes of the header.
    pub const BYTES: u16 = 40;
    /// [`Ipv6::version_class_label`] of a packet without traffic class and flow label.
    pub const PLAIN: u32 = 0x6000_0000;

    /// The IP version, 6 in a valid header.
    #[inline]
    #[must_use]
    pub fn version(&self) -> u8 {
        (self.version_class_label.get() >> 28) as u8
    }

    #[inline(always)]
    fn set_addresses(&mut self, source: u128, destination: u128) {
        self.source.set(source);
        self.destination.set(destination);
    }

    #[inline(always)]
    fn lower_hop_limit(&mut self) {
        self.hop_limit = self.hop_limit.wrapping_sub(1);
    }
}

/// The first two bytes of hop-by-hop options, destination options and routing headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Extension {
    /// Type of the header that follows.
    pub next_header: u8,
    /// Length in 8-byte units, without the first 8 bytes.
    pub units: u8,
}

impl Extension {
    /// Bytes of the header; 8 to 2048.
    #[inline]
    #[must_use]
    pub fn header_len(&self) -> u16 {
        (u16::from(self.units) + 1) * 8
    }
}

/// The first four bytes of a routing header (RFC 8200 section 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RoutingHeader {
    /// Next header and length.
    pub extension: Extension,
    /// Routing type; 0 is forbidden (RFC 5095).
    pub kind: u8,
    /// Hops that remain before the packet reaches its final destination.
    pub segments_left: u8,
}

/// The fragment header (RFC 8200 section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct FragmentHeader {
    /// Protocol of the datagram's payload; meaningful in the first fragment.
    pub next_header: u8,
    /// Reserved.
    pub reserved: u8,
    /// Offset in 8-byte units (13 bits), reserved (2 bits), more fragments (1 bit).
    pub offset_more: U16,
    /// Identifies the datagram that a fragment belongs to.
    pub identification: U32,
}

impl FragmentHeader {
    /// Bytes of the header.
    pub const BYTES: u16 = 8;

    /// Whether this is an atomic fragment (RFC 6946): offset 0 and no further fragment.
    #[inline]
    #[must_use]
    pub fn is_atomic(&self) -> bool {
        self.offset_more.get() & 0xfff9 == 0
    }

    /// Whether this is the first fragment of its datagram: offset 0.
    #[inline]
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.offset_more.get() & 0xfff8 == 0
    }
}

/// The fixed 20 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Ipv4 {
    /// Version (4 bits) and header length in 32-bit words (4 bits).
    pub version_ihl: u8,
    /// DSCP (6 bits, RFC 2474) and ECN (2 bits, RFC 3168).
    pub traffic_class: u8,
    /// Bytes of the packet, header included.
    pub total_len: U16,
    /// Identifies the datagram that a fragment belongs to.
    pub identification: U16,
    /// Reserved, don't fragment, more fragments (1 bit each), offset in 8-byte units (13 bits).
    pub fragmentation: U16,
    /// Time to live.
    pub ttl: u8,
    /// Protocol of the payload.
    pub protocol: u8,
    /// One's complement over the header.
    pub checksum: U16,
    /// Source address.
    pub source: U32,
    /// Destination address.
    pub destination: U32,
}

impl Ipv4 {
    /// Bytes of the header without options.
    pub const BYTES: u16 = 20;
    /// [`Ipv4::version_ihl`] of a header without options.
    pub const PLAIN: u8 = 0x45;
    /// "More fragments" within [`Ipv4::fragmentation`].
    pub const MORE_FRAGMENTS: u16 = 0x2000;
    /// "Don't fragment" within [`Ipv4::fragmentation`].
    pub const DONT_FRAGMENT: u16 = 0x4000;

    /// The IP version, 4 in a valid header.
    #[inline]
    #[must_use]
    pub fn version(&self) -> u8 {
        self.version_ihl >> 4
    }

    /// Bytes of the header with options; 0 to 60.
    #[inline]
    #[must_use]
    pub fn header_len(&self) -> u16 {
        u16::from(self.version_ihl & 0x0f) * 4
    }

    /// Whether the packet is a fragment, the first or a later one: "more fragments" is set or the offset is not 0.
    #[inline]
    #[must_use]
    pub fn is_fragment(&self) -> bool {
        self.fragmentation.get() & 0x3fff != 0
    }

    #[inline(always)]
    fn set_addresses(&mut self, source: u32, destination: u32, delta: u16) {
        self.source.set(source);
        self.destination.set(destination);
        self.checksum.set(checksum::apply(self.checksum.get(), delta));
    }

    #[inline(always)]
    fn lower_ttl(&mut self) {
        self.ttl = self.ttl.wrapping_sub(1);
        self.checksum.set(checksum::apply(self.checksum.get(), checksum::HOP_DELTA));
    }
}

/// Maximum number of extension headers. RFC 8200 section 4.1 has each of the 4 kinds once, destination options twice:
/// 5, plus some room.
const EXTENSION_HEADERS_MAX: usize = 8;

/// Maximum length of all extension headers, bytes: 32 for each header.
const EXTENSION_BYTES_MAX: u16 = 256;

/// The end of a chain of extension headers.
pub(crate) struct Chain {
    pub(crate) protocol: u8,
    /// Bytes of extension headers before the end.
    pub(crate) extension_bytes: u16,
    pub(crate) end: ChainEnd,
}

#[derive(PartialEq, Eq)]
pub(crate) enum ChainEnd {
    /// A transport header, or any other protocol.
    Transport,
    /// A fragment header of a datagram.
    Fragment,
    /// A payload that must not be rewritten, whatever it is.
    Opaque,
}

/// Why a packet is no packet that is processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// A header does not fit into the packet, or contradicts itself.
    #[error("a header does not fit into the packet or contradicts itself")]
    Malformed,
    /// The packet is longer than its frame.
    #[error("the packet is longer than its frame")]
    Truncated,
    /// The checksum of the IPv4 header is wrong.
    #[error("the checksum of the IPv4 header is wrong")]
    Ipv4Checksum,
    /// The sender prescribes the route: an IPv4 option, or a routing header of type 0 (RFC 5095).
    #[error("the sender prescribes the route")]
    SourceRoute,
    /// No station has the source address.
    #[error("no station has the source address")]
    MartianSource,
    /// Source and destination address are the same.
    #[error("source and destination address are the same")]
    SameSourceDestination,
}

/// Why an IPv4 packet is refused whose length exceeds the frame: if its header holds, it was truncated on its way here.
#[cold]
pub(super) fn longer_than_frame(bytes: &[u8]) -> ParseError {
    let header = take::<Ipv4>(bytes).filter(|(ip, _)| ip.version() == 4 && ip.header_len() >= Ipv4::BYTES);
    let header = header.and_then(|(ip, _)| bytes.get(..usize::from(ip.header_len())));
    if header.is_some_and(checksum::header_holds) { ParseError::Truncated } else { ParseError::Malformed }
}

/// Parses the chain of IPv6 extension headers (RFC 8200 section 4).
pub(crate) fn walk(first: u8, payload: &[u8]) -> Result<Chain, ParseError> {
    let mut next = first;
    let mut end = ChainEnd::Transport;
    let mut offset: u16 = 0;
    for position in 0..=EXTENSION_HEADERS_MAX {
        let rest = payload.get(usize::from(offset)..).ok_or(ParseError::Malformed)?;
        let header_len = match next {
            // Allowed only directly after the IPv6 header (RFC 8200 section 4.1).
            next_header::HOP_BY_HOP if position > 0 => return Err(ParseError::Malformed),
            next_header::HOP_BY_HOP | next_header::DESTINATION_OPTIONS => {
                let (extension, _) = take::<Extension>(rest).ok_or(ParseError::Malformed)?;
                next = extension.next_header;
                extension.header_len()
            }
            next_header::ROUTING => {
                let (routing, _) = take::<RoutingHeader>(rest).ok_or(ParseError::Malformed)?;
                if routing.kind == 0 {
                    return Err(ParseError::SourceRoute); // RFC 5095
                }
                if routing.segments_left > 0 {
                    // Checksums cover the last destination, which is not in the IPv6 header yet (RFC 8200 section 8.1).
                    end = ChainEnd::Opaque;
                }
                next = routing.extension.next_header;
                routing.extension.header_len()
            }
            next_header::FRAGMENT => {
                let (fragment, _) = take::<FragmentHeader>(rest).ok_or(ParseError::Malformed)?;
                next = fragment.next_header;
                if !fragment.is_atomic() {
                    let extension_bytes = offset + FragmentHeader::BYTES;
                    let end = if end == ChainEnd::Opaque { end } else { ChainEnd::Fragment };
                    return Ok(Chain { protocol: next, extension_bytes, end });
                }
                FragmentHeader::BYTES // RFC 6946: a whole datagram
            }
            _ => return Ok(Chain { protocol: next, extension_bytes: offset, end }),
        };
        offset += header_len;
        if offset > EXTENSION_BYTES_MAX {
            return Err(ParseError::Malformed);
        }
    }
    Err(ParseError::Malformed)
}

/// IP protocol numbers that the engine distinguishes (IPv4's protocol, IPv6's last next header).
pub mod protocol {
    /// ICMP for IPv4.
    pub const ICMP: u8 = 1;
    /// IPv4 inside IP (RFC 2003).
    pub const IPV4: u8 = 4;
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// IPv6 inside IP (RFC 2473, RFC 4213).
    pub const IPV6: u8 = 41;
    /// ICMP for IPv6.
    pub const ICMPV6: u8 = 58;
    /// VRRP (RFC 9568).
    pub const VRRP: u8 = 112;
    /// SCTP.
    pub const SCTP: u8 = 132;
}

/// Hop limit of packets that the engine originates (RFC 1700: the recommended default).
pub(crate) const HOP_LIMIT: u8 = 64;

/// The IP header of a packet that the engine writes.
pub(crate) struct NetworkHeader<A> {
    pub(crate) source: A,
    pub(crate) destination: A,
    pub(crate) protocol: u8,
    /// Bytes after the header.
    pub(crate) payload_len: u16,
    /// DSCP and ECN.
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
    /// IPv6 flow label, 20 bits.
    pub(crate) flow_label: u32,
    /// IPv4 identification. `None` if the packet must not be fragmented and needs none (RFC 6864 section 4.1).
    pub(crate) identification: Option<u16>,
}

/// Bytes of an IP header without options and extension headers.
pub(crate) const fn network_len<A: Address>() -> u16 {
    match A::FAMILY {
        Family::V4 => Ipv4::BYTES,
        Family::V6 => Ipv6::BYTES,
    }
}

/// The EtherType of frames with packets of this family.
pub(crate) const fn ether_type_of<A: Address>() -> u16 {
    match A::FAMILY {
        Family::V4 => ether_type::IPV4,
        Family::V6 => ether_type::IPV6,
    }
}

impl<A: Address> NetworkHeader<A> {
    /// A header with the default hop limit and no traffic class, for a packet that must not be fragmented.
    pub(crate) const fn new(source: A, destination: A, protocol: u8, payload_len: u16) -> Self {
        let (traffic_class, hop_limit, flow_label, identification) = (0, HOP_LIMIT, 0, None);
        Self { source, destination, protocol, payload_len, traffic_class, hop_limit, flow_label, identification }
    }

    /// Writes the header at the start of `bytes` and returns the bytes after it.
    #[inline(always)]
    pub(crate) fn write<'a>(&self, bytes: &'a mut [u8]) -> Option<&'a mut [u8]> {
        match A::FAMILY {
            Family::V4 => {
                let (ip, rest) = take_mut(bytes)?;
                *ip = self.ipv4();
                Some(rest)
            }
            Family::V6 => {
                let (ip, rest) = take_mut(bytes)?;
                *ip = self.ipv6();
                Some(rest)
            }
        }
    }

    #[inline(always)]
    fn ipv4(&self) -> Ipv4 {
        let mut ip = Ipv4 {
            version_ihl: Ipv4::PLAIN,
            traffic_class: self.traffic_class,
            total_len: U16::new(Ipv4::BYTES.saturating_add(self.payload_len)),
            identification: U16::new(self.identification.unwrap_or(0)),
            fragmentation: U16::new(if self.identification.is_some() { 0 } else { Ipv4::DONT_FRAGMENT }),
            ttl: self.hop_limit,
            protocol: self.protocol,
            checksum: U16::ZERO,
            source: U32::new(low_half(self.source)),
            destination: U32::new(low_half(self.destination)),
        };
        ip.checksum.set(checksum::finish(checksum::sum(ip.as_bytes())));
        ip
    }

    #[inline(always)]
    fn ipv6(&self) -> Ipv6 {
        Ipv6 {
            version_class_label: U32::new(Ipv6::PLAIN | u32::from(self.traffic_class) << 20 | self.flow_label),
            payload_len: U16::new(self.payload_len),
            next_header: self.protocol,
            hop_limit: self.hop_limit,
            source: U128::new(self.source.wide()),
            destination: U128::new(self.destination.wide()),
        }
    }
}

/// Replaces the addresses of an IP packet; `delta` is the difference that this makes to the checksum of an IPv4 header.
/// `None`, and no change, when the packet is too short to be one.
#[inline(always)]
pub(crate) fn set_addresses<A: Address>(packet: &mut [u8], source: A, destination: A, delta: u16) -> Option<()> {
    match A::FAMILY {
        Family::V4 => take_mut::<Ipv4>(packet)?.0.set_addresses(low_half(source), low_half(destination), delta),
        Family::V6 => take_mut::<Ipv6>(packet)?.0.set_addresses(source.wide(), destination.wide()),
    }
    Some(())
}

/// Decrements the hop limit of an IP packet; `None` when it is too short to be one.
#[inline(always)]
pub(crate) fn lower_hop_limit<A: Address>(packet: &mut [u8]) -> Option<()> {
    match A::FAMILY {
        Family::V4 => take_mut::<Ipv4>(packet)?.0.lower_ttl(),
        Family::V6 => take_mut::<Ipv6>(packet)?.0.lower_hop_limit(),
    }
    Some(())
}

/// [`set_addresses`] and [`lower_hop_limit`] with one check of the length.
#[inline(always)]
pub(crate) fn forward_header<A: Address>(packet: &mut [u8], source: A, destination: A, delta: u16) -> Option<()> {
    match A::FAMILY {
        Family::V4 => {
            let (ip, _) = take_mut::<Ipv4>(packet)?;
            ip.set_addresses(low_half(source), low_half(destination), delta);
            ip.lower_ttl();
        }
        Family::V6 => {
            let (ip, _) = take_mut::<Ipv6>(packet)?;
            ip.set_addresses(source.wide(), destination.wide());
            ip.lower_hop_limit();
        }
    }
    Some(())
}

/// Offset of the transport header in a packet that the engine writes.
pub(crate) const fn written_transport_offset<A: Address>() -> usize {
    (Ethernet::BYTES + network_len::<A>()) as usize
}

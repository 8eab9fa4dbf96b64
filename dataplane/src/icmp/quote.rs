//! The packet that an ICMP error is about: the error quotes its first bytes (RFC 792, RFC 4443 section 3).
//!
//! **Invariant:** the IP header and the first 8 bytes of the transport header, which RFC 792 guarantees, lie within the
//! error.
//!
//! Not here: whether the gateway ever sent such a packet, which only the flow shows.

use proto::Family;

use crate::wire::{
    Address, ChainEnd, FragmentHeader, Headers, Icmp, Ipv4, Ipv6, Sctp, Transport, Tuple, Udp, icmpv4, icmpv6, protocol, take,
    walk,
};

/// Offset of TCP's checksum in its header (RFC 9293 section 3.1).
const TCP_CHECKSUM_AT: usize = 16;
/// Offset of UDP's checksum in its header (RFC 768).
const UDP_CHECKSUM_AT: usize = 6;
/// Offset of SCTP's checksum in its header (RFC 9260 section 3.1).
const SCTP_CHECKSUM_AT: usize = 8;

/// The checksum of a quoted transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotedChecksum {
    /// TCP's or UDP's, 2 bytes.
    Internet {
        /// Where it begins, bytes from the start of the frame.
        offset: usize,
    },
    /// SCTP's, 4 bytes.
    Crc32c {
        /// Where it begins, bytes from the start of the frame.
        offset: usize,
        /// Bytes of the SCTP packet that it covers, whether quoted or not.
        len: u16,
    },
}

/// A quoted TCP, UDP or SCTP packet. Offsets are in bytes from the start of the frame that contains the error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quote<A> {
    /// Its addresses, ports and protocol, as quoted.
    pub tuple: Tuple<A>,
    /// Start of its IP header.
    pub network_offset: usize,
    /// Start of its transport header.
    pub transport_offset: usize,
    /// The checksum of the transport header, if the quote includes it. `None` for SCTP in a fragment, which does not
    /// contain the length of the packet.
    pub checksum: Option<QuotedChecksum>,
    /// The end of the transport header, or of the quote if it is shorter.
    pub header_end: usize,
}

impl<A: Address> Quote<A> {
    /// The packet that the ICMP error in `frame` is about. `None` when the message is not an error about a packet of a
    /// flow (redirects concern only the neighbour; source quench is ignored, RFC 6633), or when the quote contains no
    /// ports: it is truncated, or quotes a later fragment.
    #[must_use]
    pub fn of(frame: &[u8], headers: &Headers<A>) -> Option<Self> {
        let Transport::Icmp { kind, .. } = headers.transport else { return None };
        if !is_about_a_packet::<A>(kind) {
            return None;
        }
        let end = usize::from(headers.network_offset) + usize::from(headers.packet_len);
        let network_offset = usize::from(headers.transport_offset) + usize::from(Icmp::BYTES);
        let quoted = frame.get(network_offset..end)?;
        let (tuple, header_len) = packet(quoted)?;
        let transport_offset = network_offset + header_len;
        let internet =
            |at| Some(QuotedChecksum::Internet { offset: transport_offset + at }).filter(|_| transport_offset + at + 2 <= end);
        let (header_bytes, checksum) = match tuple.protocol {
            protocol::TCP => (20, internet(TCP_CHECKSUM_AT)),
            protocol::UDP => (8, internet(UDP_CHECKSUM_AT)),
            protocol::SCTP => (12, sctp_checksum::<A>(quoted, header_len, transport_offset + SCTP_CHECKSUM_AT, end)),
            _ => return None,
        };
        Some(Self { tuple, network_offset, transport_offset, checksum, header_end: end.min(transport_offset + header_bytes) })
    }
}

/// The position of SCTP's checksum in a quote that ends at `end`.
fn sctp_checksum<A: Address>(quoted: &[u8], header_len: usize, offset: usize, end: usize) -> Option<QuotedChecksum> {
    let packet_len = match A::FAMILY {
        Family::V4 => {
            let (ip, _) = take::<Ipv4>(quoted).filter(|(ip, _)| !ip.is_fragment())?;
            ip.total_len.get()
        }
        Family::V6 => {
            let (ip, payload) = take::<Ipv6>(quoted)?;
            walk(ip.next_header, payload).ok().filter(|chain| chain.end == ChainEnd::Transport)?;
            ip.payload_len.get().checked_add(Ipv6::BYTES)?
        }
    };
    let len = packet_len.checked_sub(u16::try_from(header_len).ok()?).filter(|len| *len >= Sctp::BYTES)?;
    (offset + 4 <= end).then_some(QuotedChecksum::Crc32c { offset, len })
}

const fn is_about_a_packet<A: Address>(kind: u8) -> bool {
    match A::FAMILY {
        Family::V4 => matches!(kind, icmpv4::UNREACHABLE | icmpv4::TIME_EXCEEDED | icmpv4::PARAMETER_PROBLEM),
        Family::V6 => {
            matches!(kind, icmpv6::UNREACHABLE | icmpv6::PACKET_TOO_BIG | icmpv6::TIME_EXCEEDED | icmpv6::PARAMETER_PROBLEM)
        }
    }
}

/// The tuple of a quoted packet with ports, and the number of bytes before its transport header. `None` when fewer than
/// 8 bytes of that are quoted, for a later fragment, or for a protocol without ports.
pub(super) fn packet<A: Address>(quoted: &[u8]) -> Option<(Tuple<A>, usize)> {
    let (source, destination, protocol, header_len) = match A::FAMILY {
        Family::V4 => network_v4(quoted)?,
        Family::V6 => network_v6(quoted)?,
    };
    let (ports, _) = take::<Udp>(quoted.get(header_len..)?)?;
    let tuple = Tuple {
        source: A::from_wide(source),
        destination: A::from_wide(destination),
        source_port: ports.source_port.get(),
        destination_port: ports.destination_port.get(),
        protocol,
    };
    matches!(protocol, protocol::TCP | protocol::UDP | protocol::SCTP).then_some((tuple, header_len))
}

/// Source, destination, protocol, number of bytes before the transport header.
type QuotedNetwork = (u128, u128, u8, usize);

pub(super) fn network_v4(quoted: &[u8]) -> Option<QuotedNetwork> {
    let (ip, _) = take::<Ipv4>(quoted)?;
    let is_whole_or_first = ip.fragmentation.get() & 0x1fff == 0;
    let header_len = ip.header_len();
    (ip.version() == 4 && header_len >= Ipv4::BYTES && is_whole_or_first)
        .then(|| (u128::from(ip.source.get()), u128::from(ip.destination.get()), ip.protocol, usize::from(header_len)))
}

pub(super) fn network_v6(quoted: &[u8]) -> Option<QuotedNetwork> {
    let (ip, payload) = take::<Ipv6>(quoted)?;
    if ip.version() != 6 {
        return None;
    }
    let (protocol, extension_bytes) = transport_v6(ip.next_header, payload)?;
    Some((ip.source.get(), ip.destination.get(), protocol, usize::from(Ipv6::BYTES + extension_bytes)))
}

/// The transport protocol of a quoted packet, and the number of bytes of extension headers before it: in a first fragment,
/// before and behind the fragment header.
fn transport_v6(next_header: u8, payload: &[u8]) -> Option<(u8, u16)> {
    let chain = walk(next_header, payload).ok()?;
    match chain.end {
        ChainEnd::Transport => Some((chain.protocol, chain.extension_bytes)),
        ChainEnd::Opaque => None,
        ChainEnd::Fragment => {
            let header_at = usize::from(chain.extension_bytes.checked_sub(FragmentHeader::BYTES)?);
            let (fragment, data) = take::<FragmentHeader>(payload.get(header_at..)?)?;
            let inner = walk(chain.protocol, data).ok().filter(|_| fragment.is_first())?;
            (inner.end == ChainEnd::Transport).then_some((inner.protocol, chain.extension_bytes + inner.extension_bytes))
        }
    }
}

//! A fragment: the datagram that it belongs to, its position there, and the transport header of a first fragment.
//!
//! **Invariant:** a fragment that could hide a transport header from the gateway, or overwrite one, is malformed: a
//! first fragment without the whole header (RFC 1858 section 3.1, RFC 7112 for IPv6), or a later one that begins within
//! it (RFC 3128). So the ports that the decision uses are the ports that the receiver will see.
//!
//! Not here: overlaps beyond the transport header. The receiver, which alone sees the whole datagram, discards them
//! (RFC 5722, RFC 8200 section 4.5).

use proto::Family;

use crate::stats::DropReason;
use crate::wire::{
    Address, ChainEnd, Chunk, FragmentHeader, Headers, Ipv4, Sctp, Tcp, Transport, Tuple, Udp, next_header, protocol,
    sctp_first_chunk_kind, take, walk,
};

/// Identity of a datagram: the fields that its fragments have in common (RFC 791 section 3.2, RFC 8200 section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram<A> {
    /// Source address.
    pub source: A,
    /// Destination address.
    pub destination: A,
    /// The sender's identification: 16 bits in IPv4, 32 in IPv6.
    pub identification: u32,
    /// IPv4's protocol. 0 for IPv6, where only the first fragment carries it.
    pub protocol: u8,
}

impl<A: Address> Datagram<A> {
    /// A tuple that all fragments of the datagram share, whatever their order, to hash it (FORWARDING 10).
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // the two halves of the number
    pub fn tuple(&self) -> Tuple<A> {
        let &Self { source, destination, identification, protocol } = self;
        let (source_port, destination_port) = ((identification >> 16) as u16, identification as u16);
        Tuple { source, destination, source_port, destination_port, protocol }
    }
}

/// A fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment<A> {
    /// The datagram that it belongs to.
    pub datagram: Datagram<A>,
    /// Offset of the identification, in bytes from the start of the frame.
    pub identification_offset: u16,
    /// The transport, as far as the fragment shows it.
    pub part: Part<A>,
}

/// The transport of a datagram, as far as a fragment shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part<A> {
    /// The first fragment, with ports. The headers are those of a whole packet.
    First(Headers<A>),
    /// A later fragment, of a protocol that only the first one tells where it is one of IPv6.
    Later,
    /// The first fragment, of a protocol other than TCP, UDP and SCTP, of which later fragments do not tell that.
    FirstPortless,
    /// Any fragment of such a protocol that tells so itself.
    Portless,
}

impl<A: Address> Fragment<A> {
    /// The fragment in `frame`, of which `parse` found `headers` with [`Transport::Fragment`].
    ///
    /// [`DropReason::Malformed`].
    pub fn of(frame: &[u8], headers: &Headers<A>) -> Result<Self, DropReason> {
        Self::read(frame, headers).ok_or(DropReason::Malformed)
    }

    fn read(frame: &[u8], headers: &Headers<A>) -> Option<Self> {
        let end = usize::from(headers.network_offset) + usize::from(headers.packet_len);
        let data = frame.get(usize::from(headers.transport_offset)..end)?;
        let Numbers { identification, identification_offset, offset, more } = match A::FAMILY {
            Family::V4 => numbers_v4(frame, headers)?,
            Family::V6 => numbers_v6(frame, headers)?,
        };
        // All fragments but the last end where another can begin, and none ends beyond the longest datagram.
        let fits = usize::from(offset) + data.len() <= usize::from(u16::MAX);
        if data.is_empty() || more && data.len() % 8 != 0 || !fits {
            return None;
        }
        let &Tuple { source, destination, protocol, .. } = &headers.tuple;
        let (part, protocol) = match A::FAMILY {
            Family::V4 => (part_v4(headers, offset, data)?, protocol),
            Family::V6 => (part_v6(headers, offset, data)?, 0),
        };
        let datagram = Datagram { source, destination, identification, protocol };
        Some(Self { datagram, identification_offset, part })
    }
}

/// The fields that make a packet a fragment. Offset in bytes.
struct Numbers {
    identification: u32,
    identification_offset: u16,
    offset: u16,
    more: bool,
}

fn numbers_v4<A: Address>(frame: &[u8], headers: &Headers<A>) -> Option<Numbers> {
    let (ip, _) = take::<Ipv4>(frame.get(usize::from(headers.network_offset)..)?)?;
    let fragmentation = ip.fragmentation.get();
    Some(Numbers {
        identification: ip.identification.get().into(),
        identification_offset: headers.network_offset + 4,
        offset: fragmentation << 3, // the flags fall out
        more: fragmentation & Ipv4::MORE_FRAGMENTS != 0,
    })
}

/// The fragment header ends where the data begins.
fn numbers_v6<A: Address>(frame: &[u8], headers: &Headers<A>) -> Option<Numbers> {
    let header_at = headers.transport_offset.checked_sub(FragmentHeader::BYTES)?;
    let (header, _) = take::<FragmentHeader>(frame.get(usize::from(header_at)..)?)?;
    let offset_more = header.offset_more.get();
    Some(Numbers {
        identification: header.identification.get(),
        identification_offset: header_at + 4,
        offset: offset_more & 0xfff8,
        more: offset_more & 1 != 0,
    })
}

fn part_v4<A: Address>(headers: &Headers<A>, offset: u16, data: &[u8]) -> Option<Part<A>> {
    let number = headers.tuple.protocol;
    match (has_ports(number), offset) {
        (false, _) => Some(Part::Portless),
        (true, 0) => Some(Part::First(first(headers, number, 0, data)?)),
        (true, _) => (offset >= header_min(number)).then_some(Part::Later),
    }
}

fn part_v6<A: Address>(headers: &Headers<A>, offset: u16, data: &[u8]) -> Option<Part<A>> {
    let number = headers.tuple.protocol;
    if offset > 0 {
        // The next header here may differ from the one in the first fragment (RFC 8200 section 4.5).
        return match number {
            protocol::ICMPV6 => Some(Part::Portless),
            _ => (offset >= header_min(number)).then_some(Part::Later),
        };
    }
    let chain = match number {
        next_header::HOP_BY_HOP => return None, // allowed only directly after the IPv6 header
        protocol::ICMPV6 => return Some(Part::Portless),
        first => walk(first, data).ok()?,
    };
    let data = data.get(usize::from(chain.extension_bytes)..)?;
    match chain.end {
        ChainEnd::Fragment => None, // a fragment of a fragment
        ChainEnd::Transport if has_ports(chain.protocol) => {
            Some(Part::First(first(headers, chain.protocol, chain.extension_bytes, data)?))
        }
        ChainEnd::Transport | ChainEnd::Opaque => Some(Part::FirstPortless),
    }
}

const fn has_ports(number: u8) -> bool {
    matches!(number, protocol::TCP | protocol::UDP | protocol::SCTP)
}

/// Bytes of the transport header without options.
const fn header_min(number: u8) -> u16 {
    match number {
        protocol::TCP => Tcp::BYTES,
        // The common header, and the header of the first chunk.
        protocol::SCTP => Sctp::BYTES + Chunk::BYTES,
        _ => Udp::BYTES,
    }
}

/// The headers of a first fragment, as those of a whole packet. `None` when it does not contain the whole transport
/// header.
fn first<A: Address>(headers: &Headers<A>, number: u8, extension_bytes: u16, data: &[u8]) -> Option<Headers<A>> {
    if data.len() < usize::from(header_min(number)) {
        return None;
    }
    let (ports, _) = take::<Udp>(data)?; // ports are in the same place in all three protocols
    let transport = match number {
        protocol::TCP => {
            let (tcp, _) = take::<Tcp>(data)?;
            let header_len = tcp.header_len();
            (header_len >= Tcp::BYTES && usize::from(header_len) <= data.len()).then_some(())?;
            Transport::Tcp { flags: tcp.flags }
        }
        protocol::UDP => (ports.len.get() >= Udp::BYTES).then_some(Transport::Udp)?,
        _ => Transport::Sctp { chunk: sctp_first_chunk_kind(data)? },
    };
    let tuple = Tuple {
        source_port: ports.source_port.get(),
        destination_port: ports.destination_port.get(),
        protocol: number,
        ..headers.tuple
    };
    Some(Headers { tuple, transport, transport_offset: headers.transport_offset + extension_bytes, ..*headers })
}

//! The tunnel packet that an ICMP error quotes: the outer packet, and the inner one that it carried (RFC 2003 section
//! 4, RFC 2473 section 8).
//!
//! **Invariant:** the inner IP header and 8 bytes after it lie within the error, and the outer source is a tunnel
//! source of the gateway.
//!
//! Not here: whether such a packet was ever sent, and who receives the error.

use std::ops::Range;

use proto::Family;

use super::quote::{network_v4, network_v6, packet};
use crate::flow::FlowMode;
use crate::snapshot::Tunnels;
use crate::wire::{Address, Headers, Icmp, Ipv4, Ipv6, Transport, Tuple, Udp, icmpv4, icmpv6, protocol, take, tcp_flags};

/// Offset of the flags in TCP's header (RFC 9293 section 3.1).
const TCP_FLAGS_AT: usize = 13;

/// The error about a packet inside a tunnel, as its sender must learn of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunnelErrorKind {
    /// The packet does not fit.
    TooBig {
        /// Largest inner packet, bytes; at least the minimum MTU of its family. 0, for IPv4 only: the router gave no
        /// MTU, and the sender must guess (RFC 1191 section 5).
        mtu: u16,
    },
    /// The packet does not reach the far end.
    Unreachable,
}

/// The inner packet of a tunnel packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inner {
    /// An IPv4 packet.
    V4(Tuple<u32>),
    /// An IPv6 packet.
    V6(Tuple<u128>),
}

/// A quoted tunnel packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelQuote<A> {
    /// The outer source.
    pub source: A,
    /// The outer destination.
    pub destination: A,
    /// The mode that uses this encapsulation.
    pub mode: FlowMode,
    /// The error about it.
    pub trouble: TunnelErrorKind,
    /// Addresses, ports and protocol of the inner packet.
    pub inner: Inner,
    /// Range of the quoted part of the inner packet, bytes from the start of the frame.
    pub inner_range: Range<usize>,
}

impl<A: Address> TunnelQuote<A> {
    /// The tunnel packet that the ICMP error in `frame` is about. `None` for another error, an error about another
    /// packet, a quote with too little of the inner packet, or an inner RST, about which no error is sent (FORWARDING
    /// 8).
    #[must_use]
    pub(crate) fn of(frame: &[u8], headers: &Headers<A>, tunnels: &Tunnels) -> Option<Self> {
        let Transport::Icmp { kind, code } = headers.transport else { return None };
        let message_end = usize::from(headers.network_offset) + usize::from(headers.packet_len);
        let (icmp, _) = take::<Icmp>(frame.get(usize::from(headers.transport_offset)..message_end)?)?;
        let report = report::<A>(kind, code, icmp.rest.get())?;
        let outer_at = usize::from(headers.transport_offset + Icmp::BYTES);
        let quoted = frame.get(outer_at..message_end.min(outer_at.saturating_add(quoted_len_max::<A>(kind, icmp.rest.get()))))?;
        let (source, destination, carried, network_len) = match A::FAMILY {
            Family::V4 => network_v4(quoted)?,
            Family::V6 => network_v6(quoted)?,
        };
        let (source, destination) = (A::from_wide(source), A::from_wide(destination));
        let (mode, outer_len) = match carried {
            protocol::IPV4 | protocol::IPV6 => (FlowMode::Ipip, network_len),
            protocol::UDP => {
                let (udp, _) = take::<Udp>(quoted.get(network_len..)?)?;
                (udp.destination_port.get() == tunnels.gue_destination_port).then_some(())?;
                (FlowMode::Gue, network_len + usize::from(Udp::BYTES))
            }
            _ => return None,
        };
        if !tunnels.is_source(source.ip()) {
            return None;
        }
        let bytes = quoted.get(outer_len..)?;
        let (inner, inner_len) = match (bytes.first()? >> 4, carried) {
            (4, protocol::IPV4 | protocol::UDP) => {
                (Inner::V4(no_reset(bytes)?), usize::from(take::<Ipv4>(bytes)?.0.total_len.get()))
            }
            (6, protocol::IPV6 | protocol::UDP) => {
                let payload_len = take::<Ipv6>(bytes)?.0.payload_len.get();
                (Inner::V6(no_reset(bytes)?), usize::from(Ipv6::BYTES) + usize::from(payload_len))
            }
            _ => return None,
        };
        let inner_at = outer_at + outer_len;
        let inner_range = inner_at..inner_at + bytes.len().min(inner_len);
        let trouble = trouble(report, u32::try_from(outer_len).ok()?, inner);
        Some(Self { source, destination, mode, trouble, inner, inner_range })
    }
}

/// The tuple of an inner packet, unless it is a RST as far as it is quoted.
fn no_reset<A: Address>(bytes: &[u8]) -> Option<Tuple<A>> {
    let (tuple, header_len) = packet(bytes)?;
    let flags = bytes.get(header_len + TCP_FLAGS_AT).filter(|_| tuple.protocol == protocol::TCP);
    flags.is_none_or(|flags| flags & tcp_flags::RST == 0).then_some(tuple)
}

/// The report of a router about the outer packet.
enum Report {
    TooBig { mtu: u32 },
    Lost,
}

/// `None`: nothing that concerns the sender of the inner packet. A parameter problem concerns the gateway and the
/// router only (RFC 2003 section 4.5).
fn report<A: Address>(kind: u8, code: u8, rest: u32) -> Option<Report> {
    match (A::FAMILY, kind) {
        (Family::V4, icmpv4::UNREACHABLE) if code == icmpv4::CODE_FRAGMENTATION_NEEDED => {
            Some(Report::TooBig { mtu: rest & 0xffff })
        }
        (Family::V4, icmpv4::UNREACHABLE | icmpv4::TIME_EXCEEDED) => Some(Report::Lost),
        (Family::V6, icmpv6::PACKET_TOO_BIG) => Some(Report::TooBig { mtu: rest }),
        (Family::V6, icmpv6::UNREACHABLE | icmpv6::TIME_EXCEEDED) => Some(Report::Lost),
        _ => None,
    }
}

/// Maximum length of the quote: where extensions follow it, the message contains its length (RFC 4884 section 4).
fn quoted_len_max<A: Address>(kind: u8, rest: u32) -> usize {
    let [first, second, ..] = rest.to_be_bytes();
    let len = match (A::FAMILY, kind) {
        (Family::V4, _) => usize::from(second) * 4,
        (Family::V6, icmpv6::UNREACHABLE | icmpv6::TIME_EXCEEDED) => usize::from(first) * 8,
        (Family::V6, _) => 0,
    };
    if len == 0 { usize::MAX } else { len }
}

fn trouble(report: Report, outer_len: u32, inner: Inner) -> TunnelErrorKind {
    let Report::TooBig { mtu } = report else { return TunnelErrorKind::Unreachable };
    let rest = u16::try_from(mtu.saturating_sub(outer_len)).unwrap_or(u16::MAX);
    let mtu = match inner {
        Inner::V4(_) if mtu == 0 => 0,
        Inner::V4(_) => rest.max(u32::MTU_MIN),
        Inner::V6(_) => rest.max(u128::MTU_MIN),
    };
    TunnelErrorKind::TooBig { mtu }
}

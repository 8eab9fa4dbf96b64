//! Packets that are never forwarded (FORWARDING 9): those in frames to groups, and those from invalid or link-local
//! addresses.
//!
//! Not here: checks of a frame or header by itself, which `parse` does.

use super::input::Packet;
use super::verdict::{Answer, Verdict};
use crate::flow::{FlowTable, GroupHolder};
use crate::snapshot::{AddressRole, Frontend, RouteTo, Snapshot};
use crate::stats::{DropReason, FrontendNumber};
use crate::wire::{Address, Transport, is_group_address, is_link_local, sctp_chunk, tcp_flags};

/// The verdict on a packet in a frame to a group. A packet for a frontend, or of a flow, has a unicast address and is
/// dropped (RFC 1812 section 5.3.4).
#[cold]
pub(super) fn in_group_frame<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot, table: &FlowTable<A>) -> Verdict<'static> {
    let has_ports = matches!(packet.headers.transport, Transport::Tcp { .. } | Transport::Udp | Transport::Sctp { .. });
    let is_of_flow = || table.search(packet.hash, &packet.headers.tuple).is_some();
    if has_ports && (frontend_of(packet, snapshot).is_some() || is_of_flow()) {
        return Verdict::Drop(DropReason::Malformed);
    }
    no_frontend(packet, snapshot, table)
}

/// Why packets from this address are not forwarded; `None` if they are (FORWARDING 9).
pub(crate) fn refused_source<A: Address>(source: A, snapshot: &Snapshot) -> Option<DropReason> {
    match snapshot.role(source) {
        AddressRole::Elsewhere if !is_link_local(source) => None,
        AddressRole::Elsewhere | AddressRole::Broadcast => Some(DropReason::MartianSource),
        AddressRole::Vip | AddressRole::Snat | AddressRole::Twin(_) | AddressRole::PoolUnused => Some(DropReason::OwnSource),
    }
}

/// The frontend that a packet is addressed to, with its number. Frontends exist once there is a complete state.
pub(super) fn frontend_of<'s, A: Address>(
    packet: &Packet<'_, A>,
    snapshot: &'s Snapshot,
) -> Option<(&'s Frontend, FrontendNumber)> {
    let tuple = &packet.headers.tuple;
    snapshot.numbered_frontend(tuple.destination, tuple.protocol, tuple.destination_port)
}

/// A packet without frontend: for the engine, for the kernel, or to be dropped.
pub(super) fn no_frontend<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot, table: &FlowTable<A>) -> Verdict<'static> {
    let tuple = &packet.headers.tuple;
    let destination = snapshot.role(tuple.destination);
    let to_engine = match destination {
        AddressRole::Vip | AddressRole::Snat => true,
        AddressRole::Twin(port) => !snapshot.port(port).twin,
        AddressRole::Broadcast | AddressRole::PoolUnused | AddressRole::Elsewhere => false,
    };
    if to_engine && !snapshot.ready() {
        return Verdict::Drop(DropReason::UnknownVip); // answered once there is a complete state
    }
    match snapshot.role(tuple.source) {
        AddressRole::Vip if is_reply(packet, snapshot) => return answered(packet, snapshot),
        AddressRole::Vip | AddressRole::Snat => return Verdict::Drop(DropReason::OwnSource),
        AddressRole::Broadcast => return Verdict::Drop(DropReason::MartianSource),
        // An answer would go to an address of the gateway; the kernel handles such a packet.
        AddressRole::Twin(_) | AddressRole::PoolUnused if to_engine => return Verdict::Drop(DropReason::OwnSource),
        AddressRole::Twin(_) | AddressRole::PoolUnused | AddressRole::Elsewhere => {}
    }
    match destination {
        AddressRole::Vip => for_vip(packet),
        AddressRole::Snat if snapshot.is_owned_elsewhere(tuple.destination) => Verdict::Drop(DropReason::NoFlow),
        AddressRole::Snat => for_snat(packet, snapshot, table),
        AddressRole::PoolUnused => Verdict::Drop(DropReason::UnknownVip),
        AddressRole::Twin(_) if to_engine => for_vip(packet),
        AddressRole::Twin(_) => Verdict::Linux,
        AddressRole::Broadcast | AddressRole::Elsewhere => elsewhere(packet, snapshot),
    }
}

/// Packets that are not for the gateway go to the kernel. Before the first complete state, VIPs are unknown: unicast
/// packets are dropped until then, since the kernel might send them back to the router.
pub(super) fn elsewhere<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot) -> Verdict<'static> {
    let group = packet.headers.group_frame || is_group_address(packet.headers.tuple.destination);
    if !snapshot.port(packet.in_link.port()).twin {
        return Verdict::Drop(DropReason::NoRoute);
    }
    if snapshot.ready() || group { Verdict::Linux } else { Verdict::Drop(DropReason::UnknownVip) }
}

/// A packet without frontend for a VIP, or for an address of a port without twin.
pub(super) fn for_vip<A: Address>(packet: &Packet<'_, A>) -> Verdict<'static> {
    match packet.headers.transport {
        transport if is_last_word(transport) => Verdict::Drop(DropReason::NoFlow),
        transport @ (Transport::Tcp { .. } | Transport::Udp | Transport::Sctp { .. }) => Verdict::Reply(refusal(transport)),
        transport => for_us(transport, A::FAMILY),
    }
}

/// A packet for a SNAT address without flow: the backend gets a RST, so that it forgets the connection too.
fn for_snat<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot, table: &FlowTable<A>) -> Verdict<'static> {
    let transport = packet.headers.transport;
    match transport {
        Transport::Tcp { .. } | Transport::Sctp { .. } => {
            mid_stream(transport, packet.headers.tuple.destination, snapshot, table)
        }
        Transport::Udp => Verdict::Drop(DropReason::NoFlow),
        transport => for_us(transport, A::FAMILY),
    }
}

/// A packet of another protocol than TCP, UDP and SCTP for an address of the gateway.
fn for_us(transport: Transport, family: proto::Family) -> Verdict<'static> {
    let (echo_request, errors) = match family {
        proto::Family::V4 => (8, [3, 4, 5, 11, 12]),
        proto::Family::V6 => (128, [1, 2, 3, 4, 137]),
    };
    match transport {
        Transport::Icmp { kind, .. } if kind == echo_request => Verdict::Reply(Answer::Echo),
        Transport::Icmp { kind, .. } if errors.contains(&kind) => Verdict::Drop(DropReason::IcmpUnmatched),
        Transport::Fragment => Verdict::Drop(DropReason::FragmentUnsupported),
        _ => Verdict::Drop(DropReason::UnsupportedProtocol),
    }
}

/// The verdict when a frontend has no backend for a new flow: it is refused, but with `externalTrafficPolicy: Local`
/// another gateway may have a backend (FORWARDING 8).
pub(super) fn without_backend<A: Address>(packet: &Packet<'_, A>, frontend: &Frontend) -> Verdict<'static> {
    if frontend.is_local() {
        Verdict::Drop(DropReason::NoLocalBackend)
    } else {
        Verdict::Reply(refusal(packet.headers.transport))
    }
}

/// The answer of a closed port.
const fn refusal(transport: Transport) -> Answer {
    match transport {
        Transport::Tcp { .. } | Transport::Sctp { .. } => Answer::Reset,
        _ => Answer::PortUnreachable,
    }
}

/// A TCP or SCTP packet in mid-stream without a flow, in mode `nat`, or in `dnat` where the backend gets a PROXY header.
/// Both ends get a RST when they send next (FORWARDING 4), unless a partner may know the flow
/// (docs/internals/decisions/0068). `address`: the VIP or SNAT address that says to which group the flow belongs.
pub(super) fn mid_stream<A: Address>(
    transport: Transport,
    address: A,
    snapshot: &Snapshot,
    table: &FlowTable<A>,
) -> Verdict<'static> {
    match snapshot.group_of(address).map(|group| table.holder(group)) {
        None | Some(GroupHolder::Settled) => unknown(transport),
        Some(GroupHolder::JustTaken) => Verdict::Drop(DropReason::FlowAwaited),
        Some(GroupHolder::Other) => Verdict::Drop(DropReason::NoFlow),
    }
}

/// The answer to a packet of a connection that nobody knows.
pub(super) const fn unknown(transport: Transport) -> Verdict<'static> {
    if is_last_word(transport) { Verdict::Drop(DropReason::NoFlow) } else { Verdict::Reset(DropReason::NoFlow) }
}

/// Whether a packet is never answered by a RST or ABORT; otherwise two ends without a connection might answer each
/// other forever (RFC 9293 section 3.10.7.1, RFC 9260 section 8.4).
const fn is_last_word(transport: Transport) -> bool {
    match transport {
        Transport::Tcp { flags } => flags & tcp_flags::RST != 0,
        Transport::Sctp { chunk } => {
            matches!(chunk, sctp_chunk::ABORT | sctp_chunk::SHUTDOWN_COMPLETE | sctp_chunk::COOKIE_ACK)
        }
        _ => false,
    }
}

/// Whether a packet is the reply to a probe: it comes from a frontend of such a mode and goes to a port that stands for
/// a backend.
pub(super) fn is_reply<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot) -> bool {
    let tuple = &packet.headers.tuple;
    matches!(packet.headers.transport, Transport::Tcp { .. } | Transport::Udp)
        && !packet.headers.group_frame
        && snapshot.probe_tags.contains_key(&tuple.destination_port)
        && matches!(snapshot.role(tuple.destination), AddressRole::Twin(_))
        && snapshot
            .frontend(tuple.source, tuple.protocol, tuple.source_port)
            .is_some_and(|frontend| !frontend.mode().is_two_way())
}

/// The verdict on a reply to a probe: it goes to the twin that the probe came from. The kernel sends to the VIP on one
/// link, and the backend's reply often arrives on another, where a strict `rp_filter` would drop it.
pub(super) fn answered<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot) -> Verdict<'static> {
    match snapshot.route(packet.headers.tuple.source) {
        RouteTo::Unresolved { link } => Verdict::LinuxAt(link),
        RouteTo::NextHop(slot) => match snapshot.next_hop(snapshot.member(slot, packet.hash)) {
            Some(hop) => Verdict::LinuxAt(hop.link),
            None => Verdict::Linux,
        },
        RouteTo::None => Verdict::Linux,
    }
}

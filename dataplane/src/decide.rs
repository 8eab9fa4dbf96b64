//! What happens to a packet: the one place where it is decided. A function of the packet's headers, the snapshot, the
//! flows and the time; it reads no clock, touches no packet and does no I/O.
//!
//! Invariant: a packet for one of our addresses is never given to Linux, and nothing is answered before the first
//! complete state (FORWARDING 1). Rewriting bytes and moving packets happen elsewhere.

use crate::answer::is_group_address;
use crate::checksum::{Deltas, delta};
use crate::flow::{BackendId, Direction, Flow, FlowIndex, FlowState, FlowTable, IdleLimits, UNRESOLVED, next_state};
use crate::held::Awaited;
use crate::rewrite::Rewrite;
use crate::snapshot::{Backend, Frontend, NextHop, Place, RouteTo, Snapshot};
use crate::snat::{SnatLease, SnatPorts};
use crate::tick::Tick;
use crate::{Address, DropReason, Headers, Mac, PortIndex, Transport, Tuple, tcp_flags};

/// A packet as the decision sees it.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a, A> {
    /// Its headers.
    pub headers: &'a Headers<A>,
    /// [`FlowTable::hash`] of its tuple.
    pub hash: u64,
    /// The port it came in by.
    pub in_port: PortIndex,
}

/// The flows of one worker and family, and what new ones need.
#[derive(Debug)]
pub struct Flows<'a, A: Address> {
    /// The table.
    pub table: &'a mut FlowTable<A>,
    /// SNAT ports of both families.
    pub ports: &'a mut SnatPorts,
    /// Idle limits.
    pub limits: &'a IdleLimits,
    /// What the decision changed, for the counters.
    pub changes: &'a mut Changes,
    /// Room that both families share: flows that may still be made.
    pub room: u32,
}

/// What decisions changed besides their verdicts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// The packet's flow was known.
    pub hit: bool,
    /// The flow that was made.
    pub made: Option<BackendId>,
    /// The flow that was ended.
    pub ended: Option<BackendId>,
    /// A SNAT port was taken before it had rested.
    pub reused_early: bool,
    /// An on-link client of a new flow that Linux does not know yet.
    pub ask: Option<Awaited>,
}

/// How to answer a packet with itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// TCP RST (RFC 9293 section 3.10.7.1).
    Reset,
    /// ICMP port unreachable (RFC 792; RFC 4443 section 3.1).
    PortUnreachable,
    /// ICMP time exceeded in transit.
    TimeExceeded,
    /// Fragmentation needed, or packet too big, with the MTU of the way on.
    TooBig {
        /// Largest IP packet that would fit, bytes.
        mtu: u16,
    },
    /// ICMP echo reply.
    Echo,
}

/// Where a forwarded packet belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matched<A> {
    /// The frontend's address.
    pub vip: A,
    /// The frontend's port.
    pub vip_port: u16,
    /// The backend.
    pub backend: BackendId,
}

/// What happens to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Verdict<A> {
    /// Rewritten and sent.
    Forward {
        /// By this port.
        out: PortIndex,
        /// With these fields.
        rewrite: Rewrite<A>,
        /// For this flow.
        matched: Matched<A>,
    },
    /// Held until Linux knows the next hop.
    Wait(Awaited),
    /// Given to the Linux twin of the port it came in by.
    Linux,
    /// Turned into an answer.
    Reply(Answer),
    /// Dropped, and a RST sent to where it came from: mid-stream without a flow (FORWARDING 4).
    Reset(DropReason),
    /// Dropped.
    Drop(DropReason),
}

/// Decides what happens to `packet` at `now`.
pub fn decide<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot, flows: &mut Flows<'_, A>, now: Tick) -> Verdict<A> {
    if matches!(packet.headers.transport, Transport::Tcp { .. } | Transport::Udp) {
        if let Some((index, direction)) = flows.table.find(packet.hash, &packet.headers.tuple) {
            if let Some(verdict) = known(packet, snapshot, flows, now, index, direction) {
                flows.changes.hit = true;
                return verdict;
            }
            end(flows, index, now);
        }
        if let Some(frontend) = frontend_of(packet, snapshot) {
            return new_flow(packet, snapshot, flows, now, frontend);
        }
    }
    no_frontend(packet, snapshot)
}

/// The verdict on a packet of a flow; none when the flow has ended and the packet is to be decided anew.
#[inline]
fn known<A: Address>(
    packet: &Packet<'_, A>,
    snapshot: &Snapshot,
    flows: &mut Flows<'_, A>,
    now: Tick,
    index: FlowIndex,
    direction: Direction,
) -> Option<Verdict<A>> {
    let flow = flows.table.get(index);
    if flows.limits.expired(flow.state, flow.last_seen, now) {
        return None;
    }
    let backend = snapshot.backend(flow.backend)?;
    let state = next_state(flow.state, packet.headers.transport, direction);
    if direction == Direction::ToBackend && begins_anew(packet.headers.transport, flow.state, backend) {
        return None;
    }
    let back = snapshot.next_hop(backend.next_hop);
    if direction == Direction::ToClient && back.is_none_or(|hop| hop.port != packet.in_port) {
        return Some(Verdict::Drop(DropReason::SnatWrongPort));
    }
    if flow.last_seen != now || flow.state != state {
        let flow = flows.table.get_mut(index);
        flow.last_seen = now;
        flow.state = state;
    }
    let hop = match direction {
        Direction::ToBackend => hop_to_backend(snapshot, backend),
        Direction::ToClient => hop_to_client(snapshot, flows.table.get_mut(index)),
    };
    let flow = flows.table.get(index);
    Some(send(packet, snapshot, hop, flow, direction))
}

/// A SYN on a closing flow, a SYN that was never answered by a backend that takes no new flows any more, and any SYN or
/// UDP packet whose backend is gone make a new choice (FORWARDING 2): TCP that has begun goes on to a draining backend.
fn begins_anew(transport: Transport, state: FlowState, backend: &Backend) -> bool {
    let unanswered_in_vain = state == FlowState::TcpOpening && !backend.accepts_new;
    match transport {
        Transport::Tcp { flags } => {
            is_opening(flags) && (state == FlowState::TcpClosing || unanswered_in_vain || backend.removed)
        }
        _ => backend.removed,
    }
}

fn is_opening(flags: u8) -> bool {
    flags & (tcp_flags::SYN | tcp_flags::ACK | tcp_flags::RST | tcp_flags::FIN) == tcp_flags::SYN
}

/// Frontends are listened on once there is a complete state.
fn frontend_of<'s, A: Address>(packet: &Packet<'_, A>, snapshot: &'s Snapshot) -> Option<&'s Frontend> {
    let tuple = &packet.headers.tuple;
    snapshot.frontend(tuple.destination, tuple.protocol, tuple.destination_port)
}

fn new_flow<A: Address>(
    packet: &Packet<'_, A>,
    snapshot: &Snapshot,
    flows: &mut Flows<'_, A>,
    now: Tick,
    frontend: &Frontend,
) -> Verdict<A> {
    let tuple = &packet.headers.tuple;
    if !matches!(snapshot.place(tuple.source), Place::Elsewhere) {
        return Verdict::Drop(DropReason::OwnSource);
    }
    if let Transport::Tcp { flags } = packet.headers.transport
        && !is_opening(flags)
    {
        return mid_stream(flags);
    }
    let Some((id, backend)) = frontend.choose(tuple).and_then(|id| Some((id, snapshot.backend(id)?))) else {
        return Verdict::Reply(refusal(packet.headers.transport));
    };
    let Some(target) = A::from_ip(backend.address.ip()) else { return Verdict::Drop(DropReason::NoRoute) };
    if matches!(snapshot.place(target), Place::Vip | Place::Snat | Place::PoolUnused) {
        return Verdict::Drop(DropReason::VipLoop);
    }
    if flows.room == 0 {
        return Verdict::Drop(DropReason::FlowTableFull);
    }
    let hop = hop_to_backend(snapshot, backend);
    let Hop::Known { next, .. } = hop else { return unsent(hop) };
    if let Some(verdict) = obstacle(packet.headers, snapshot.port(next.port).mtu) {
        return verdict;
    }
    let addresses = snapshot.snat::<A>(next.port);
    let reused_early = flows.ports.reused_early();
    let Ok(lease) = flows.ports.allocate(backend.target, addresses, packet.hash >> 40, now) else {
        return Verdict::Drop(DropReason::SnatExhausted);
    };
    flows.changes.reused_early = flows.ports.reused_early() > reused_early;
    let mut flow = nat_flow(tuple, packet.headers.transport, target, backend, id, &lease, now);
    let to_client = hop_to_client(snapshot, &mut flow);
    if let Hop::Unresolved(awaited) = to_client {
        flows.changes.ask = Some(awaited);
    }
    let verdict = send(packet, snapshot, hop, &flow, Direction::ToBackend);
    if flows.table.insert(flow).is_err() {
        flows.ports.release(lease.pool, lease.port, now);
        return Verdict::Drop(DropReason::FlowTableFull);
    }
    flows.changes.made = Some(id);
    verdict
}

/// The entry of a new flow.
fn nat_flow<A: Address>(
    tuple: &Tuple<A>,
    transport: Transport,
    backend_address: A,
    backend: &Backend,
    id: BackendId,
    lease: &SnatLease<A>,
    now: Tick,
) -> Flow<A> {
    let sent = Tuple {
        source: lease.address,
        destination: backend_address,
        source_port: lease.port,
        destination_port: backend.address.port(),
        protocol: tuple.protocol,
    };
    let Deltas { l3, l4 } = delta(tuple, &sent);
    Flow {
        client: tuple.source,
        vip: tuple.destination,
        backend_address,
        snat: lease.address,
        client_port: tuple.source_port,
        vip_port: tuple.destination_port,
        backend_port: sent.destination_port,
        snat_port: lease.port,
        backend: id,
        last_seen: now,
        snat_pool: lease.pool,
        route_to_client: UNRESOLVED,
        route_epoch: 0,
        l3_delta: l3,
        l4_delta: l4,
        protocol: tuple.protocol,
        state: match transport {
            Transport::Tcp { .. } => FlowState::TcpOpening,
            _ => FlowState::UdpUnreplied,
        },
    }
}

/// Ends a flow: its SNAT port begins to rest.
fn end<A: Address>(flows: &mut Flows<'_, A>, index: FlowIndex, now: Tick) {
    let flow = flows.table.remove(index);
    flows.ports.release(flow.snat_pool, flow.snat_port, now);
    flows.changes.ended = Some(flow.backend);
}

/// A way on, or why there is none.
#[derive(Clone, Copy, Debug)]
enum Hop {
    Known { next: NextHop, mac: Mac },
    Unresolved(Awaited),
    NoRoute,
}

fn hop_to_backend(snapshot: &Snapshot, backend: &Backend) -> Hop {
    snapshot.next_hop(backend.next_hop).map_or(Hop::NoRoute, known_or_awaited)
}

fn known_or_awaited(next: &NextHop) -> Hop {
    match next.mac {
        Some(mac) => Hop::Known { next: *next, mac },
        None => Hop::Unresolved(Awaited { port: next.port, address: next.address }),
    }
}

/// The way back to the client. The flow remembers the slot of its next hop; when routes changed since, it is looked up
/// again, so that old flows follow (FORWARDING 2).
fn hop_to_client<A: Address>(snapshot: &Snapshot, flow: &mut Flow<A>) -> Hop {
    if flow.route_epoch == snapshot.route_epoch()
        && let Some(next) = snapshot.next_hop(flow.route_to_client)
    {
        return known_or_awaited(next);
    }
    match snapshot.route(flow.client) {
        RouteTo::NextHop(slot) => {
            flow.route_to_client = slot;
            flow.route_epoch = snapshot.route_epoch();
            snapshot.next_hop(slot).map_or(Hop::NoRoute, known_or_awaited)
        }
        RouteTo::Unresolved { port } => Hop::Unresolved(Awaited { port, address: flow.client.ip() }),
        RouteTo::None => Hop::NoRoute,
    }
}

/// The verdict when there is no way on yet.
fn unsent<A>(hop: Hop) -> Verdict<A> {
    match hop {
        Hop::Unresolved(awaited) => Verdict::Wait(awaited),
        Hop::NoRoute | Hop::Known { .. } => Verdict::Drop(DropReason::NoRoute),
    }
}

/// The verdict on a packet of a flow that has a way on.
#[inline]
fn send<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot, hop: Hop, flow: &Flow<A>, direction: Direction) -> Verdict<A> {
    let Hop::Known { next, mac } = hop else { return unsent(hop) };
    let out = snapshot.port(next.port);
    if let Some(verdict) = obstacle(packet.headers, out.mtu) {
        return verdict;
    }
    let matched = Matched { vip: flow.vip, vip_port: flow.vip_port, backend: flow.backend };
    Verdict::Forward { out: next.port, rewrite: rewrite_of(flow, direction, out.mac, mac), matched }
}

/// Why a packet goes no further although there is a way on.
#[inline]
fn obstacle<A: Address>(headers: &Headers<A>, mtu: u16) -> Option<Verdict<A>> {
    if headers.hop_limit <= 1 {
        return Some(Verdict::Reply(Answer::TimeExceeded));
    }
    (headers.packet_len > mtu).then_some(match headers.dont_fragment {
        true => Verdict::Reply(Answer::TooBig { mtu }),
        false => Verdict::Drop(DropReason::TooBig),
    })
}

/// What a packet of the flow carries when it leaves.
#[inline]
fn rewrite_of<A: Address>(flow: &Flow<A>, direction: Direction, source_mac: Mac, destination_mac: Mac) -> Rewrite<A> {
    let deltas = Deltas { l3: flow.l3_delta, l4: flow.l4_delta };
    match direction {
        Direction::ToBackend => Rewrite {
            source: flow.snat,
            destination: flow.backend_address,
            source_port: flow.snat_port,
            destination_port: flow.backend_port,
            deltas,
            source_mac,
            destination_mac,
        },
        Direction::ToClient => Rewrite {
            source: flow.vip,
            destination: flow.client,
            source_port: flow.vip_port,
            destination_port: flow.client_port,
            deltas: deltas.reversed(),
            source_mac,
            destination_mac,
        },
    }
}

/// A packet for none of the frontends: for us, for Linux, or for nobody.
fn no_frontend<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot) -> Verdict<A> {
    let tuple = &packet.headers.tuple;
    let destination = snapshot.place(tuple.destination);
    let to_engine = match destination {
        Place::Vip | Place::Snat => true,
        Place::Twin(port) => !snapshot.port(port).twin,
        Place::PoolUnused | Place::Elsewhere => false,
    };
    match snapshot.place(tuple.source) {
        Place::Vip | Place::Snat => return Verdict::Drop(DropReason::OwnSource),
        // An answer would go to an address of ours; Linux knows what to do with such a packet.
        Place::Twin(_) | Place::PoolUnused if to_engine => return Verdict::Drop(DropReason::OwnSource),
        Place::Twin(_) | Place::PoolUnused | Place::Elsewhere => {}
    }
    match destination {
        Place::Vip => for_vip(packet),
        Place::Snat => for_snat(packet, snapshot),
        Place::PoolUnused => Verdict::Drop(DropReason::UnknownVip),
        Place::Twin(_) if to_engine => for_vip(packet),
        Place::Twin(_) => Verdict::Linux,
        Place::Elsewhere => elsewhere(packet, snapshot),
    }
}

/// What is not for us is Linux's. Before the first complete state a VIP is not known as one: unicast waits until then,
/// for Linux might send it back to the router.
fn elsewhere<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot) -> Verdict<A> {
    let group = packet.headers.group_frame || is_group_address(packet.headers.tuple.destination);
    if !snapshot.port(packet.in_port).twin {
        return Verdict::Drop(DropReason::NoRoute);
    }
    if snapshot.ready() || group { Verdict::Linux } else { Verdict::Drop(DropReason::UnknownVip) }
}

/// A packet for a VIP, or for an address of a port without twin, without a frontend.
fn for_vip<A: Address>(packet: &Packet<'_, A>) -> Verdict<A> {
    match packet.headers.transport {
        Transport::Tcp { flags } if flags & tcp_flags::RST != 0 => Verdict::Drop(DropReason::NoFlow),
        transport @ (Transport::Tcp { .. } | Transport::Udp) => Verdict::Reply(refusal(transport)),
        transport => for_us(transport, A::FAMILY),
    }
}

/// A packet for a SNAT address that is of no flow: RST to the backend, so that it forgets too.
fn for_snat<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot) -> Verdict<A> {
    match packet.headers.transport {
        Transport::Tcp { flags } if snapshot.ready() => mid_stream(flags),
        Transport::Tcp { .. } | Transport::Udp => Verdict::Drop(DropReason::NoFlow),
        transport => for_us(transport, A::FAMILY),
    }
}

/// What is neither TCP nor UDP, for an address of ours.
fn for_us<A>(transport: Transport, family: proto::Family) -> Verdict<A> {
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

/// How a closed port says so.
const fn refusal(transport: Transport) -> Answer {
    match transport {
        Transport::Tcp { .. } => Answer::Reset,
        _ => Answer::PortUnreachable,
    }
}

/// TCP that is no beginning, without a flow (FORWARDING 4, mode `nat`). A RST is never answered.
const fn mid_stream<A>(flags: u8) -> Verdict<A> {
    if flags & tcp_flags::RST == 0 { Verdict::Reset(DropReason::NoFlow) } else { Verdict::Drop(DropReason::NoFlow) }
}

//! The decision: what happens to a packet. It is a function of the packet's headers, the snapshot, the flows and the
//! time; it reads no clock, touches no packet and does no I/O.
//!
//! **Invariant:** a packet for an address of the gateway is never passed to the kernel, and nothing is answered before
//! the first complete state (FORWARDING 1).
//!
//! Not here: rewriting bytes and moving packets.

mod dnat;
mod local;
mod one_way;
mod probe;
mod rechoose;
mod reclaim;
mod verdict;

pub use one_way::{Delivery, follow_one_way, follow_one_way_error};
pub use probe::follow_probe;
pub use reclaim::OtherFlows;
pub use verdict::{Answer, Changes, Obstacle, Passage, Stop, Verdict};

use local::in_group_frame;
pub(crate) use local::refused_source;

use crate::choose::Chooser;
use crate::flow::{
    BackendId, Candidate, Direction, Flow, FlowIndex, FlowState, FlowTable, IdleLimits, Segment, SnatLease, SnatPorts,
    SnatTarget, Tick, UNRESOLVED, Way, begins, is_mid_stream, is_opening, is_plain,
};
use crate::forward::rewrite::Rewrite;
use crate::icmp::Awaited;
use crate::port::Link;
use crate::snapshot::{Backend, Exit, Frontend, NextHop, Place, RouteTo, Snapshot};
use crate::stats::DropReason;
use crate::wire::checksum::{Deltas, delta};
use crate::wire::{Address, Headers, Transport, Tuple, is_group_address, sctp_chunk, split_mix, tcp_flags};

/// A packet as the decision sees it.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a, A> {
    /// Its headers.
    pub headers: &'a Headers<A>,
    /// [`FlowTable::hash`] of its tuple.
    pub hash: u64,
    /// [`FlowTable::candidate`] of that.
    pub candidate: Candidate,
    /// The link on which it arrived.
    pub in_link: Link,
}

/// The flows of one worker and family, and the resources for new ones.
#[derive(Debug)]
pub struct Flows<'a, A: Address> {
    /// The table.
    pub table: &'a mut FlowTable<A>,
    /// The flow table of the other family.
    pub others: OtherFlows<'a>,
    /// SNAT ports of both families.
    pub ports: &'a mut SnatPorts,
    /// The idle limits.
    pub limits: &'a IdleLimits,
    /// The changes that the decision made, for the counters.
    pub changes: &'a mut Changes,
    /// Number of flows that may still be created; both families share it.
    pub room: u32,
    /// Index of the worker that owns the flows.
    pub worker: usize,
}

/// The fast path: forwarding of a packet of a live flow that is only rewritten and sent, which is nearly every packet.
/// `None` means that [`follow`] must examine it; nothing was written then.
#[inline(always)]
pub fn follow_plain<'s, A: Address>(
    packet: &Packet<'_, A>,
    snapshot: &'s Snapshot,
    table: &mut FlowTable<A>,
    limits: &IdleLimits,
    now: Tick,
) -> Option<Passage<'s>> {
    let Headers { transport, hop_limit, packet_len, dont_fragment, group_frame, .. } = *packet.headers;
    if !matches!(transport, Transport::Tcp { .. } | Transport::Udp) || !dont_fragment || group_frame {
        return None;
    }
    let (index, direction) = table.find(packet.hash, &packet.headers.tuple, packet.candidate)?;
    let flow = table.get_mut(index);
    if !is_plain(flow.state, transport, direction)
        || limits.may_be_over(flow.state, flow.last_seen, now)
        || !flow.way.is_two_way()
    {
        return None;
    }
    let next_hop = snapshot.spot(flow.backend).filter(|backend| backend.steady)?.next_hop;
    let exit = match direction {
        Direction::ToBackend => snapshot.exit(next_hop)?,
        Direction::ToClient if flow.route_epoch == snapshot.route_epoch() => {
            snapshot.exit(next_hop).filter(|exit| exit.link == packet.in_link)?;
            snapshot.exit(flow.route_to_client)?
        }
        Direction::ToClient => return None,
    };
    if hop_limit <= 1 || packet_len > exit.plain_mtu {
        return None;
    }
    if flow.last_seen != now {
        flow.last_seen = now;
    }
    Some(Passage { flow: index, direction, exit })
}

/// Forwarding of a packet of a live flow, including those that [`follow_plain`] leaves. Everything else is left to
/// [`decide`].
///
/// Why the packet cannot simply follow a flow.
pub fn follow<'s, A: Address>(
    packet: &Packet<'_, A>,
    snapshot: &'s Snapshot,
    table: &mut FlowTable<A>,
    limits: &IdleLimits,
    now: Tick,
) -> Result<Passage<'s>, Obstacle<'s>> {
    let Headers { transport, group_frame, .. } = *packet.headers;
    if !matches!(transport, Transport::Tcp { .. } | Transport::Udp) || group_frame {
        return Err(Obstacle::NoFlow);
    }
    let (index, direction) = table.find(packet.hash, &packet.headers.tuple, packet.candidate).ok_or(Obstacle::NoFlow)?;
    let flow = table.get_mut(index);
    if !is_plain(flow.state, transport, direction) || limits.may_be_over(flow.state, flow.last_seen, now) {
        return Err(Obstacle::Event(index, direction));
    }
    if !flow.way.is_two_way() {
        return Err(Obstacle::OneWay(index));
    }
    match snapshot.spot(flow.backend) {
        Some(backend) if backend.steady => match pass(packet, snapshot, backend.next_hop, flow, direction, now) {
            Ok(exit) if packet.headers.hop_limit > 1 && packet.headers.packet_len <= exit.plain_mtu => {
                Ok(Passage { flow: index, direction, exit })
            }
            Ok(exit) => Err(not_plain(packet, Passage { flow: index, direction, exit })),
            Err(stop) => Err(Obstacle::Known(stop)),
        },
        _ => Err(Obstacle::Event(index, direction)),
    }
}

/// The exit of a packet of a flow; marks the flow as seen now. Whether the packet may leave unchanged is checked
/// elsewhere.
#[inline(always)]
fn pass<'s, A: Address>(
    packet: &Packet<'_, A>,
    snapshot: &'s Snapshot,
    next_hop: u32,
    flow: &mut Flow<A>,
    direction: Direction,
    now: Tick,
) -> Result<&'s Exit, Stop> {
    let exit = match direction {
        Direction::ToBackend => exit_by(snapshot, next_hop, packet.hash),
        Direction::ToClient if !arrives_from(snapshot, next_hop, packet.in_link) => return Err(Stop::WrongPort),
        Direction::ToClient => exit_to_client(snapshot, flow),
    };
    if flow.last_seen != now {
        flow.last_seen = now;
    }
    exit
}

/// Why a packet does not leave as it is: it must not leave, or leaves in fragments or with VLAN tags.
#[cold]
fn not_plain<'s, A: Address>(packet: &Packet<'_, A>, passage: Passage<'s>) -> Obstacle<'s> {
    match fits(packet, passage.exit) {
        Ok(_) => Obstacle::NotPlain(passage),
        Err(stop) => Obstacle::Known(stop),
    }
}

/// Decides on a packet that met an obstacle, at `now`.
pub fn decide<'s, A: Address>(
    packet: &Packet<'_, A>,
    segment: Segment,
    obstacle: Obstacle<'s>,
    snapshot: &'s Snapshot,
    flows: &mut Flows<'_, A>,
    now: Tick,
) -> Verdict<'s> {
    if packet.headers.group_frame {
        return in_group_frame(packet, snapshot, flows.table);
    }
    let obstacle = match obstacle {
        Obstacle::NoFlow if matches!(packet.headers.transport, Transport::Sctp { .. }) => association_of(packet, flows.table),
        Obstacle::OneWay(index) => match follow_one_way(packet, index, snapshot, flows.table, now) {
            Ok(delivery) => {
                flows.changes.hit = true;
                return Verdict::Deliver(delivery);
            }
            Err(obstacle) => obstacle,
        },
        obstacle => obstacle,
    };
    match obstacle {
        Obstacle::Known(stop) => {
            flows.changes.hit = true;
            return stopped(stop);
        }
        Obstacle::Event(index, direction) => match look_closer(packet, segment, snapshot, flows, (index, direction), now) {
            Some(verdict) => {
                flows.changes.hit = true;
                return verdict;
            }
            None => {
                if begins(packet.headers.transport) && direction == Direction::ToBackend {
                    let forgotten = reclaim::reset_to_backend(flows.table.get(index), packet.hash, snapshot);
                    flows.changes.resets.extend(forgotten);
                }
                let broken = breaks_off(packet, segment, snapshot, flows.table.get_mut(index), direction, flows.changes);
                flows.changes.ended = Some(end(flows, index, now));
                if let Some(verdict) = broken {
                    return verdict;
                }
            }
        },
        Obstacle::NotPlain(passage) => {
            flows.changes.hit = true;
            return Verdict::Forward(passage);
        }
        Obstacle::NoFlow | Obstacle::OneWay(_) => {}
    }
    match packet.headers.transport {
        Transport::Tcp { .. } | Transport::Udp | Transport::Sctp { .. } => match frontend_of(packet, snapshot) {
            Some(frontend) => new_flow(packet, segment, snapshot, flows, now, frontend),
            None => dnat::reply(packet, snapshot, flows, now).unwrap_or_else(|| no_frontend(packet, snapshot)),
        },
        _ => no_frontend(packet, snapshot),
    }
}

/// The flow of an SCTP packet, for which [`follow`] does not search: its checksum takes longer than the search, and
/// plain TCP and UDP packets save one more comparison of the protocol.
fn association_of<'s, A: Address>(packet: &Packet<'_, A>, table: &FlowTable<A>) -> Obstacle<'s> {
    match table.search(packet.hash, &packet.headers.tuple) {
        Some((index, direction)) => Obstacle::Event(index, direction),
        None => Obstacle::NoFlow,
    }
}

/// Applies a packet of a known flow to its state. `None`: the flow has ended, and the packet has no flow.
fn look_closer<'s, A: Address>(
    packet: &Packet<'_, A>,
    segment: Segment,
    snapshot: &'s Snapshot,
    flows: &mut Flows<'_, A>,
    (index, direction): (FlowIndex, Direction),
    now: Tick,
) -> Option<Verdict<'s>> {
    let transport = packet.headers.transport;
    let flow = flows.table.get_mut(index);
    let backend = snapshot.backend(flow.backend)?;
    let over = flows.limits.is_over(flow.state, backend.idle_timeout, flow.last_seen, now);
    if over || direction == Direction::ToBackend && rechoose::chooses_anew(flow, transport, segment, backend, now) {
        return None;
    }
    if direction == Direction::ToClient {
        if !arrives_from(snapshot, backend.next_hop, packet.in_link) {
            return Some(stopped(Stop::WrongPort));
        }
        flow.set_unanswered_since(None);
    }
    flows.table.advance(index, transport, direction, segment, now);
    let flow = flows.table.get_mut(index);
    if !flow.way.is_two_way() {
        flow.last_seen = now;
        return Some(one_way::verdict_of_flow(packet, flow, snapshot));
    }
    Some(match pass(packet, snapshot, backend.next_hop, flow, direction, now).and_then(|exit| fits(packet, exit)) {
        Ok(exit) => Verdict::Forward(Passage { flow: index, direction, exit }),
        Err(stop) => stopped(stop),
    })
}

/// A packet of a connection that ended without its two sides: both get a RST (FORWARDING 2). `None`: the packet opens a
/// connection, or its mode has a rule of its own for mid-stream packets.
fn breaks_off<A: Address>(
    packet: &Packet<'_, A>,
    segment: Segment,
    snapshot: &Snapshot,
    flow: &mut Flow<A>,
    direction: Direction,
    changes: &mut Changes,
) -> Option<Verdict<'static>> {
    let Transport::Tcp { flags } = packet.headers.transport else { return None };
    if is_opening(flags) || !flow.way.is_two_way() {
        return None;
    }
    if flags & tcp_flags::RST == 0 {
        changes.resets.extend(reclaim::reset_to_other_side(flow, direction, segment, packet, snapshot));
    }
    Some(mid_stream(packet.headers.transport))
}

/// Whether packets of a backend may arrive on this link (FORWARDING 9).
#[inline]
pub(crate) fn arrives_from(snapshot: &Snapshot, next_hop: u32, link: Link) -> bool {
    match snapshot.exit(next_hop) {
        Some(exit) => exit.link == link,
        None => arrives_from_other(snapshot, next_hop, link),
    }
}

/// The same for a next hop that is not resolved, or a group.
#[cold]
fn arrives_from_other(snapshot: &Snapshot, next_hop: u32, link: Link) -> bool {
    snapshot.next_hop(next_hop).is_some_and(|hop| hop.link == link) || snapshot.any_member_by(next_hop, link)
}

/// The frontend that a packet is addressed to. Frontends exist once there is a complete state.
pub(super) fn frontend_of<'s, A: Address>(packet: &Packet<'_, A>, snapshot: &'s Snapshot) -> Option<&'s Frontend> {
    let tuple = &packet.headers.tuple;
    snapshot.frontend(tuple.destination, tuple.protocol, tuple.destination_port)
}

fn new_flow<'s, A: Address>(
    packet: &Packet<'_, A>,
    segment: Segment,
    snapshot: &'s Snapshot,
    flows: &mut Flows<'_, A>,
    now: Tick,
    frontend: &Frontend,
) -> Verdict<'s> {
    let tuple = &packet.headers.tuple;
    if let Some(reason) = refused_source(tuple.source, snapshot) {
        return Verdict::Drop(reason);
    }
    if !frontend.allows(tuple.source) {
        return Verdict::Drop(DropReason::SourceRange);
    }
    if !frontend.way().is_two_way() {
        return one_way::new_flow(packet, snapshot, flows, now, frontend);
    }
    if is_mid_stream(packet.headers.transport) && frontend.way() == Way::Nat {
        return mid_stream(packet.headers.transport);
    }
    let Some((id, backend)) = choose(packet, frontend, flows.worker, now).and_then(|id| Some((id, snapshot.backend(id)?))) else {
        return without_backend(packet, frontend);
    };
    let Some(target) = A::from_ip(backend.address.ip()) else { return Verdict::Drop(DropReason::NoRoute) };
    if matches!(snapshot.place(target), Place::Vip | Place::Snat | Place::PoolUnused) {
        return Verdict::Drop(DropReason::VipLoop);
    }
    // A backend that is its own client would receive a packet from itself.
    if frontend.way() == Way::Dnat && target == tuple.source {
        return Verdict::Drop(DropReason::SameSourceDestination);
    }
    let exit = match exit_by(snapshot, backend.next_hop, packet.hash).and_then(|exit| fits(packet, exit)) {
        Ok(exit) => exit,
        Err(stop) => return stopped(stop),
    };
    let lease = match frontend.way() {
        Way::Dnat => dnat::own_port(tuple, (target, backend.address.port()), snapshot, flows, now),
        _ => {
            let (slot, port, protocol) = (backend.target, backend.address.port(), tuple.protocol);
            let towards = SnatTarget { slot, address: target, port, protocol };
            reclaim::lease(flows, snapshot, towards, snapshot.snat::<A>(exit.link), packet.hash >> 40, now)
        }
    };
    let Some(lease) = lease else { return Verdict::Drop(DropReason::SnatExhausted) };
    if flows.room == 0 && !reclaim::make_room(flows, snapshot, now) {
        flows.ports.release(lease.pool, lease.port, now);
        return Verdict::Drop(DropReason::FlowTableFull);
    }
    let mut flow = flow_of(tuple, packet.headers.transport, frontend.way(), target, backend, id, &lease, now);
    flow.initial_sequence = segment.sequence;
    if let Err(Stop::Unresolved(awaited)) = exit_to_client(snapshot, &mut flow) {
        flows.changes.ask = Some(awaited);
    }
    let Ok(index) = flows.table.insert(flow) else {
        flows.ports.release(lease.pool, lease.port, now);
        return Verdict::Drop(DropReason::FlowTableFull);
    };
    flows.changes.made = Some(id);
    Verdict::Forward(Passage { flow: index, direction: Direction::ToBackend, exit })
}

/// The backend for a new flow, or for a flow that began elsewhere: by the table alone, which is the same on every
/// gateway.
fn choose<A: Address>(packet: &Packet<'_, A>, frontend: &Frontend, worker: usize, now: Tick) -> Option<BackendId> {
    match packet.headers.transport {
        transport if is_mid_stream(transport) => frontend.choose_by_hash(&packet.headers.tuple),
        _ => frontend.choose(&packet.headers.tuple, Chooser { worker, now }),
    }
}

/// The entry of a new flow in a two-way mode.
#[allow(clippy::too_many_arguments, reason = "an entry is made of so many")]
pub(super) fn flow_of<A: Address>(
    tuple: &Tuple<A>,
    transport: Transport,
    way: Way,
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
        initial_sequence: 0,
        opened: now.0,
        way,
        packets: 0,
        protocol: tuple.protocol,
        state: FlowState::first(transport, way),
    }
}

/// Ends a flow and lets its SNAT port rest. Returns its backend.
pub(super) fn end<A: Address>(flows: &mut Flows<'_, A>, index: FlowIndex, now: Tick) -> BackendId {
    let flow = flows.table.remove(index);
    if let Some(lease) = flow.snat_lease() {
        flows.ports.release(lease.pool, lease.port, now);
    }
    flows.room += 1;
    flow.backend
}

/// The exit towards a next hop. `hash` is that of the flow, the same for all its packets of one direction.
#[inline]
pub(crate) fn exit_by(snapshot: &Snapshot, next_hop: u32, hash: u64) -> Result<&Exit, Stop> {
    match snapshot.exit(next_hop) {
        Some(exit) => Ok(exit),
        None => exit_by_member(snapshot, next_hop, hash),
    }
}

/// The exit by the flow's member of a group; otherwise the next hop is not resolved.
#[cold]
fn exit_by_member(snapshot: &Snapshot, next_hop: u32, hash: u64) -> Result<&Exit, Stop> {
    let slot = snapshot.member(next_hop, hash);
    snapshot.exit(slot).ok_or_else(|| no_exit(snapshot, slot))
}

/// The exit towards the client. The flow stores the slot of its next hop; when routes changed since, the slot is looked
/// up again, so existing flows follow the routes (FORWARDING 2).
#[inline]
pub(crate) fn exit_to_client<'s, A: Address>(snapshot: &'s Snapshot, flow: &mut Flow<A>) -> Result<&'s Exit, Stop> {
    if flow.route_epoch == snapshot.route_epoch()
        && let Some(exit) = snapshot.exit(flow.route_to_client)
    {
        return Ok(exit);
    }
    route_to_client(snapshot, flow)
}

#[cold]
fn route_to_client<'s, A: Address>(snapshot: &'s Snapshot, flow: &mut Flow<A>) -> Result<&'s Exit, Stop> {
    match snapshot.route(flow.client) {
        RouteTo::NextHop(next_hop) => {
            let slot = snapshot.member(next_hop, entropy(flow));
            flow.route_to_client = slot;
            flow.route_epoch = snapshot.route_epoch();
            snapshot.exit(slot).ok_or_else(|| no_exit(snapshot, slot))
        }
        RouteTo::Unresolved { link } => Err(Stop::Unresolved(Awaited { link, address: flow.client.ip() })),
        RouteTo::None => Err(Stop::NoRoute),
    }
}

/// The hash that chooses among the next hops towards the client: constant for the life of the flow.
#[allow(clippy::cast_possible_truncation)] // halves are folded
fn entropy<A: Address>(flow: &Flow<A>) -> u64 {
    let (client, vip) = (flow.client.wide(), flow.vip.wide());
    let ports = u64::from(flow.client_port) << 24 | u64::from(flow.vip_port) << 8 | u64::from(flow.protocol);
    split_mix(split_mix((client ^ client >> 64) as u64) ^ split_mix((vip ^ vip >> 64) as u64).rotate_left(32) ^ ports)
}

/// Why there is no exit towards this next hop.
#[cold]
fn no_exit(snapshot: &Snapshot, slot: u32) -> Stop {
    let awaited = |hop: &NextHop| Stop::Unresolved(Awaited { link: hop.link, address: hop.address });
    snapshot.next_hop(slot).map_or(Stop::NoRoute, awaited)
}

/// Whether the packet may leave by this exit. A packet that is too long is fragmented on its way out, if its sender
/// allows it.
#[inline]
pub(crate) fn fits<'s, A: Address>(packet: &Packet<'_, A>, exit: &'s Exit) -> Result<&'s Exit, Stop> {
    fits_in(packet, exit.mtu).map(|()| exit)
}

/// Whether the packet may leave with this MTU, in bytes.
#[inline]
pub(super) fn fits_in<A: Address>(packet: &Packet<'_, A>, mtu: u16) -> Result<(), Stop> {
    if packet.headers.hop_limit <= 1 {
        Err(Stop::HopLimit)
    } else if packet.headers.packet_len > mtu && packet.headers.dont_fragment {
        Err(Stop::TooBig { mtu })
    } else {
        Ok(())
    }
}

/// The verdict on a packet of a flow that cannot be forwarded.
pub(crate) fn stopped<'s>(stop: Stop) -> Verdict<'s> {
    match stop {
        Stop::WrongPort => Verdict::Drop(DropReason::SnatWrongPort),
        Stop::Unresolved(awaited) => Verdict::Wait(awaited),
        Stop::NoRoute => Verdict::Drop(DropReason::NoRoute),
        Stop::VipLoop => Verdict::Drop(DropReason::VipLoop),
        Stop::HopLimit => Verdict::Reply(Answer::TimeExceeded),
        Stop::TooBig { mtu } => Verdict::Reply(Answer::TooBig { mtu }),
    }
}

/// The fields that a packet of the flow has when it leaves.
#[inline(always)]
pub(crate) fn rewrite_of<A: Address>(flow: &Flow<A>, direction: Direction, exit: &Exit) -> Rewrite<A> {
    let (source_mac, destination_mac) = (exit.source_mac, exit.destination_mac);
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

/// A packet without frontend: for the engine, for the kernel, or to be dropped.
pub(super) fn no_frontend<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot) -> Verdict<'static> {
    let tuple = &packet.headers.tuple;
    let destination = snapshot.place(tuple.destination);
    let to_engine = match destination {
        Place::Vip | Place::Snat => true,
        Place::Twin(port) => !snapshot.port(port).twin,
        Place::Broadcast | Place::PoolUnused | Place::Elsewhere => false,
    };
    if to_engine && !snapshot.ready() {
        return Verdict::Drop(DropReason::UnknownVip); // answered once there is a complete state
    }
    match snapshot.place(tuple.source) {
        Place::Vip if probe::is_reply(packet, snapshot) => return probe::answered(packet, snapshot),
        Place::Vip | Place::Snat => return Verdict::Drop(DropReason::OwnSource),
        Place::Broadcast => return Verdict::Drop(DropReason::MartianSource),
        // An answer would go to an address of the gateway; the kernel handles such a packet.
        Place::Twin(_) | Place::PoolUnused if to_engine => return Verdict::Drop(DropReason::OwnSource),
        Place::Twin(_) | Place::PoolUnused | Place::Elsewhere => {}
    }
    match destination {
        Place::Vip => for_vip(packet),
        Place::Snat => for_snat(packet),
        Place::PoolUnused => Verdict::Drop(DropReason::UnknownVip),
        Place::Twin(_) if to_engine => for_vip(packet),
        Place::Twin(_) => Verdict::Linux,
        Place::Broadcast | Place::Elsewhere => elsewhere(packet, snapshot),
    }
}

/// Packets that are not for the gateway go to the kernel. Before the first complete state, VIPs are unknown: unicast
/// packets are dropped until then, since the kernel might send them back to the router.
fn elsewhere<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot) -> Verdict<'static> {
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
fn for_snat<A: Address>(packet: &Packet<'_, A>) -> Verdict<'static> {
    match packet.headers.transport {
        transport @ (Transport::Tcp { .. } | Transport::Sctp { .. }) => mid_stream(transport),
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

/// A TCP or SCTP packet in mid-stream without a flow (FORWARDING 4, mode `nat`).
const fn mid_stream(transport: Transport) -> Verdict<'static> {
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

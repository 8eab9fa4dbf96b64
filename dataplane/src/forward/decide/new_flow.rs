//! The decision on a packet that begins a flow: source, backend, exit, SNAT port, entry, in this order.
//!
//! **Invariant:** a packet that cannot be forwarded creates no flow and keeps no SNAT port.
//!
//! Not here: flows of one-way modes (`one_way`), and reclaiming (`reclaim`).

use super::exit::{exit_by, exit_to_client, fits};
use super::input::{DecisionContext, Packet};
use super::local::{mid_stream, refused_source, without_backend};
use super::verdict::{NatForward, NoExit, Verdict};
use super::{dnat, one_way, reclaim};
use crate::choose::Chooser;
use crate::flow::{
    BackendId, Direction, FlowBackend, FlowMode, Segment, Shift, SnatLease, SnatTarget, flow_of, is_mid_stream, tags_of_first,
};
use crate::forward::rewrite::shift_between;
use crate::snapshot::{AddressRole, Backend, Frontend, Snapshot};
use crate::stats::{DropReason, FrontendNumber};
use crate::wire::{Address, Transport};

/// Decides on a packet without flow for a frontend, and creates its flow.
pub(super) fn new_flow<'s, A: Address>(
    packet: &Packet<'_, A>,
    segment: Segment,
    context: &mut DecisionContext<'_, 's, A>,
    frontend: &Frontend,
    number: FrontendNumber,
) -> Verdict<'s> {
    let DecisionContext { snapshot, now, .. } = *context;
    let tuple = &packet.headers.tuple;
    if let Some(reason) = refused_source(tuple.source, snapshot) {
        return Verdict::Drop(reason);
    }
    if !frontend.allows(tuple.source) {
        return Verdict::Drop(DropReason::SourceRange);
    }
    if !frontend.mode().is_two_way() {
        return one_way::new_flow(packet, segment, context, frontend, number);
    }
    // The owner of the VIP knows the connection, or opens it when the client repeats its SYN there.
    if frontend.mode() == FlowMode::Nat && snapshot.is_owned_elsewhere(tuple.destination) {
        return Verdict::Drop(DropReason::NoFlow);
    }
    if is_mid_stream(packet.headers.transport) && (frontend.mode() == FlowMode::Nat || is_shifted(packet, frontend)) {
        return mid_stream(packet.headers.transport, tuple.destination, snapshot, context.table);
    }
    let chosen = choose(packet, frontend, context.chooser());
    let chosen = match frontend.mode() {
        FlowMode::Dnat => chosen.map(|id| dnat::with_free_port(packet, frontend, id, context)),
        _ => chosen,
    };
    let Some((id, backend)) = chosen.and_then(|id| Some((id, snapshot.backend(id)?))) else {
        return without_backend(packet, frontend);
    };
    let target: A = match backend_address(snapshot, backend) {
        Ok(address) => address,
        Err(reason) => return Verdict::Drop(reason),
    };
    // A backend that is its own client would receive a packet from itself.
    if frontend.mode() == FlowMode::Dnat && target == tuple.source {
        return Verdict::Drop(DropReason::SameSourceDestination);
    }
    let exit = match exit_by(snapshot, backend.next_hop, packet.hash).and_then(|exit| fits(packet, exit)) {
        Ok(exit) => exit,
        Err(none) => return none.into(),
    };
    let lease = match frontend.mode() {
        FlowMode::Dnat => dnat::own_port(tuple, target, backend.address.port(), context).ok_or(DropReason::DnatPortInUse),
        _ => {
            let (slot, port, protocol) = (backend.target, backend.address.port(), tuple.protocol);
            let towards = SnatTarget { slot, address: target, port, protocol };
            let addresses = snapshot.snat(exit.link, tuple.destination);
            reclaim::lease(context, tuple.source, towards, addresses, first_snat_address(packet.hash, addresses.len()))
        }
    };
    let lease = match lease {
        Ok(lease) => lease,
        Err(reason) => return Verdict::Drop(reason),
    };
    if let Err(reason) = reclaim::take_room(context, frontend.number, lease.pool, packet.hash) {
        give_back(context, &lease);
        return Verdict::Drop(reason);
    }
    let to = FlowBackend { id, address: target, port: backend.address.port() };
    let mut flow = flow_of(tuple, packet.headers.transport, frontend.mode(), to, &lease, now);
    (flow.frontend, flow.initial_sequence) = (number, segment.sequence);
    flow.tags = tags_of_first(packet.headers.transport, segment);
    flow.shift = shift_of(packet, frontend, segment.sequence);
    if let Err(NoExit::Unresolved(neighbour)) = exit_to_client(snapshot, &mut flow) {
        context.changes.ask = Some(neighbour);
    }
    let Ok(index) = context.table.insert(flow) else {
        give_back(context, &lease);
        return Verdict::Drop(DropReason::FlowTableFull);
    };
    (context.changes.made, context.changes.service) = (Some(flow.counter_slot()), frontend.number);
    Verdict::Forward(NatForward { flow: index, direction: Direction::ToBackend, exit })
}

/// Whether flows of a packet to a frontend are shifted.
fn is_shifted<A: Address>(packet: &Packet<'_, A>, frontend: &Frontend) -> bool {
    matches!(packet.headers.transport, Transport::Tcp { .. } | Transport::Udp) && frontend.proxy_protocol().is_some()
}

/// The shift of a flow of a frontend that this packet of the client begins, with this sequence number.
fn shift_of<A: Address>(packet: &Packet<'_, A>, frontend: &Frontend, initial_sequence: u32) -> Option<Shift> {
    let version = frontend.proxy_protocol().filter(|_| is_shifted(packet, frontend))?;
    Some(shift_between(version, &packet.headers.tuple, initial_sequence))
}

/// Gives back a port by which no packet left. It need not rest, or packets that are dropped for want of room would leave
/// none that has rested; unless it had not rested before.
#[cold]
fn give_back<A: Address>(context: &mut DecisionContext<'_, '_, A>, lease: &SnatLease<A>) {
    if context.changes.reused_early {
        context.ports.release(lease.pool, lease.port, context.now);
    } else {
        context.ports.release_clean(lease.pool, lease.port, context.now);
    }
}

/// The address of a backend of new flows.
///
/// `no_route`: it is of the other family. `vip_loop`: packets to it would return to the gateway.
pub(in crate::forward) fn backend_address<A: Address>(snapshot: &Snapshot, backend: &Backend) -> Result<A, DropReason> {
    let address = A::from_ip(backend.address.ip()).ok_or(DropReason::NoRoute)?;
    match snapshot.role(address) {
        AddressRole::Vip | AddressRole::Snat | AddressRole::PoolUnused => Err(DropReason::VipLoop),
        AddressRole::Twin(_) | AddressRole::Broadcast | AddressRole::Elsewhere => Ok(address),
    }
}

/// Which of this number of SNAT addresses is tried first for a flow with this hash.
#[inline(always)]
pub(in crate::forward) const fn first_snat_address(hash: u64, addresses: usize) -> usize {
    (((hash >> 40) * addresses as u64) >> 24) as usize
}

/// The backend for a new flow, or for a flow that began elsewhere: by the table alone, which is the same on every
/// gateway.
fn choose<A: Address>(packet: &Packet<'_, A>, frontend: &Frontend, chooser: Chooser) -> Option<BackendId> {
    match packet.headers.transport {
        transport if is_mid_stream(transport) => frontend.choose_by_hash(&packet.headers.tuple),
        _ => frontend.choose(&packet.headers.tuple, chooser),
    }
}

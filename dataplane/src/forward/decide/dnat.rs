//! Mode `dnat`: the backend sees the client's own address and port.
//!
//! What a backend begins is unconfirmed until its client sends, or a backend could fill the table with packets to invented
//! clients.
//!
//! **Invariant:** no two flows look the same to a backend. If a client uses one port through two frontends to one
//! backend, the backend could not distinguish the flows, nor the gateway their replies: the second flow gets another
//! backend.
//!
//! Not here: the rewrite of such packets, which is that of mode `nat`.

use super::exit::{arrives_from, exit_to_client, fits};
use super::input::{DecisionContext, Packet, end};
use super::local::{mid_stream, refused_source};
use super::reclaim::{reset_to_backend, take_room};
use super::verdict::{NatForward, Verdict};
use crate::flow::{
    BackendId, Direction, Flow, FlowBackend, FlowEnd, FlowIndex, FlowMode, FlowState, PoolId, SnatLease, begins, flow_of,
    is_mid_stream, next_state,
};
use crate::forward::rewrite::shift_between;
use crate::snapshot::{DnatFrontend, Frontend};
use crate::stats::DropReason;
use crate::wire::protocol::{TCP, UDP};
use crate::wire::{Address, Transport, Tuple, is_martian, tcp_flags};

/// Backends that are tried besides the chosen one, so that one packet costs at most twice as many searches: a client that uses one
/// port through so many frontends at once is none that we know of.
const BACKENDS_TRIED: usize = 64;

/// The backend for a new flow: the chosen one, or one of the others if the client uses its port towards that already,
/// through another frontend. A handshake under way gives way only where no backend is free: a stranger who sends in the
/// client's name to a second frontend does not end it.
pub(super) fn with_free_port<A: Address>(
    packet: &Packet<'_, A>,
    frontend: &Frontend,
    chosen: BackendId,
    context: &DecisionContext<'_, '_, A>,
) -> BackendId {
    let snapshot = context.snapshot;
    let is_free = |id: &BackendId, gives_way: &dyn Fn(&Flow<A>) -> bool| {
        let backend = snapshot.backend(*id).filter(|backend| backend.accepts_new || *id == chosen);
        let address = backend.and_then(|backend| Some((A::from_ip(backend.address.ip())?, backend.address.port())));
        address.is_some_and(|(address, port)| {
            let older = flow_towards(&packet.headers.tuple, address, port, context);
            address != packet.headers.tuple.source && older.is_none_or(|(_, older)| gives_way(&older))
        })
    };
    let has_ended = |older: &Flow<A>| has_ended(older, context);
    // What goes on elsewhere already must stay there.
    if is_mid_stream(packet.headers.transport) || is_free(&chosen, &has_ended) {
        return chosen;
    }
    let backends = &frontend.backends;
    let start = (packet.hash >> 32) as usize % backends.len().max(1);
    let others = || backends[start..].iter().chain(&backends[..start]).filter(|id| **id != chosen).take(BACKENDS_TRIED);
    let free = others().find(|id| is_free(id, &has_ended));
    let unconfirmed = || std::iter::once(&chosen).chain(others()).find(|id| is_free(id, &|older| gives_way(older, context)));
    free.or_else(unconfirmed).copied().unwrap_or(chosen)
}

/// The flow whose replies are those of a flow with this tuple to this backend.
fn flow_towards<A: Address>(
    tuple: &Tuple<A>,
    address: A,
    port: u16,
    context: &DecisionContext<'_, '_, A>,
) -> Option<(FlowIndex, Flow<A>)> {
    let reply = Tuple { destination: address, destination_port: port, ..*tuple }.reversed();
    let (index, _) = context.table.search(context.table.hash(&reply), &reply)?;
    Some((index, context.table.get(index)))
}

/// Whether a flow ends for a new one that would look the same to its backend. The last of two that are unconfirmed stays:
/// if the first did, a stranger could keep a client's port from it for the time of a handshake, while a client whose
/// handshake ends repeats its SYN.
fn gives_way<A: Address>(older: &Flow<A>, context: &DecisionContext<'_, '_, A>) -> bool {
    !older.state.is_confirmed() || has_ended(older, context)
}

/// Whether a flow is closing, over, or has lost its backend.
fn has_ended<A: Address>(older: &Flow<A>, context: &DecisionContext<'_, '_, A>) -> bool {
    let DecisionContext { snapshot, now, .. } = *context;
    older.state.is_closing()
        || snapshot
            .backend(older.backend)
            .is_none_or(|backend| backend.removed || context.limits.is_over(older, backend.idle_timeout, now))
}

/// The client's own address and port, in the role of a SNAT lease. `None` while another flow uses them; a flow that is
/// unconfirmed, closing or over gives way, unless the backend has to be told and there is no buffer for that.
pub(super) fn own_port<A: Address>(
    tuple: &Tuple<A>,
    address: A,
    port: u16,
    context: &mut DecisionContext<'_, '_, A>,
) -> Option<SnatLease<A>> {
    let snapshot = context.snapshot;
    if let Some((index, older)) = flow_towards(tuple, address, port, context) {
        if !gives_way(&older, context) {
            return None;
        }
        // The backend would not answer another SYN from this port during the handshake of the older flow.
        let hash = context.table.hash(&older.tuple(Direction::ToBackend));
        if let Some(forgotten) = reset_to_backend(&older, hash, snapshot)
            && !context.queue_reset(forgotten)
        {
            return None;
        }
        context.changes.displaced = Some(end(context, index, FlowEnd::Replaced));
    }
    Some(SnatLease { address: tuple.source, port: tuple.source_port, pool: PoolId::NONE })
}

/// A packet without flow from a backend of this mode to a foreign address: a reply to a packet that was forwarded
/// before this gateway started, or by another gateway. It is rewritten if only one frontend leads to that backend
/// (FORWARDING 4). `None` if it is not from such a backend, opens a connection of its own, or goes to no address that a
/// client can have.
pub(super) fn reply<'s, A: Address>(packet: &Packet<'_, A>, context: &mut DecisionContext<'_, 's, A>) -> Option<Verdict<'s>> {
    let snapshot = context.snapshot;
    let tuple = &packet.headers.tuple;
    let front = snapshot.dnat_frontend(tuple.source, tuple.protocol, tuple.source_port)?;
    let is_client = refused_source(tuple.destination, snapshot).is_none() && !is_martian(tuple.destination);
    if begins(packet.headers.transport) || !is_client {
        return None;
    }
    let is_reset = matches!(packet.headers.transport, Transport::Tcp { flags } if flags & tcp_flags::RST != 0);
    Some(match front.filter(|_| !is_reset) {
        Some(front) => by_front(packet, front, context),
        None => Verdict::Drop(DropReason::NoFlow),
    })
}

fn by_front<'s, A: Address>(
    packet: &Packet<'_, A>,
    front: DnatFrontend<A>,
    context: &mut DecisionContext<'_, 's, A>,
) -> Verdict<'s> {
    let DecisionContext { snapshot, now, .. } = *context;
    let Some(backend) = snapshot.backend(front.backend) else { return Verdict::Drop(DropReason::NoFlow) };
    if !arrives_from(snapshot, backend.next_hop, packet.in_link) {
        return Verdict::Drop(DropReason::SnatWrongPort);
    }
    let Tuple { source, destination, source_port, destination_port, protocol } = packet.headers.tuple;
    let asked = Tuple {
        source: destination,
        destination: front.vip,
        source_port: destination_port,
        destination_port: front.port,
        protocol,
    };
    let frontend = snapshot.numbered_frontend(asked.destination, protocol, front.port);
    let Some((frontend, number)) = frontend.filter(|(frontend, _)| frontend.allows(asked.source)) else {
        return Verdict::Drop(DropReason::SourceRange);
    };
    if frontend.proxy_protocol().is_some() && protocol == TCP {
        // This gateway does not know where its numbers are; a partner may.
        return mid_stream(packet.headers.transport, front.vip, snapshot, context.table);
    }
    // The client's flow may have moved to another backend meanwhile.
    if context.table.search(context.table.hash(&asked), &asked).is_some() {
        return Verdict::Drop(DropReason::NoFlow);
    }
    let lease = SnatLease { address: destination, port: destination_port, pool: PoolId::NONE };
    let to = FlowBackend { id: front.backend, address: source, port: source_port };
    let mut flow = flow_of(&asked, packet.headers.transport, FlowMode::Dnat, to, &lease, now);
    flow.frontend = number;
    let version = frontend.proxy_protocol().filter(|_| protocol == UDP);
    flow.shift = version.map(|version| shift_between(version, &asked, 0));
    // Anyone can be named as its client, so the client's packet confirms it.
    flow.state = next_state(FlowState::first_of_backend(packet.headers.transport), packet.headers.transport, Direction::ToClient);
    let exit = match exit_to_client(snapshot, &mut flow).and_then(|exit| fits(packet, exit)) {
        Ok(exit) => exit,
        Err(none) => return none.into(),
    };
    if let Err(reason) = take_room(context, frontend.number, PoolId::NONE, packet.hash) {
        return Verdict::Drop(reason);
    }
    let Ok(index) = context.table.insert(flow) else { return Verdict::Drop(DropReason::FlowTableFull) };
    (context.changes.made, context.changes.service) = (Some(flow.counter_slot()), frontend.number);
    Verdict::Forward(NatForward { flow: index, direction: Direction::ToClient, exit })
}

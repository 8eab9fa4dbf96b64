//! Mode `dnat`: the backend sees the client's own address and port.
//!
//! What a backend begins is unconfirmed until its client sends, or a backend could fill the table with packets to invented
//! clients.
//!
//! **Invariant:** no two flows look the same to a backend. If a client uses one port through two frontends to one
//! backend, the backend could not distinguish the flows, nor the gateway their replies.
//!
//! Not here: the rewrite of such packets, which is that of mode `nat`.

use super::exit::{arrives_from, exit_to_client, fits};
use super::input::{DecisionContext, Packet, end};
use super::local::refused_source;
use super::reclaim::{make_room, reset_to_backend};
use super::verdict::{NatForward, Verdict};
use crate::flow::{Direction, FlowEnd, FlowMode, FlowState, PoolId, SnatLease, begins, flow_of, next_state};
use crate::snapshot::Front;
use crate::stats::DropReason;
use crate::wire::{Address, Transport, Tuple, is_martian, tcp_flags};

/// The client's own address and port, in the role of a SNAT lease. `None` while another flow uses them; a flow that is
/// unconfirmed, closing or over gives way, unless the backend has to be told and there is no buffer for that.
pub(super) fn own_port<A: Address>(
    tuple: &Tuple<A>,
    (backend_address, backend_port): (A, u16),
    context: &mut DecisionContext<'_, '_, A>,
) -> Option<SnatLease<A>> {
    let DecisionContext { snapshot, now, .. } = *context;
    let reply = Tuple { destination: backend_address, destination_port: backend_port, ..*tuple }.reversed();
    if let Some((index, _)) = context.table.search(context.table.hash(&reply), &reply) {
        let older = context.table.get(index);
        let gives_way = !older.state.is_confirmed()
            || older.state.is_closing()
            || snapshot
                .backend(older.backend)
                .is_none_or(|backend| backend.removed || context.limits.is_over(&older, backend.idle_timeout, now));
        if !gives_way {
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
    let front = snapshot.front(tuple.source, tuple.protocol, tuple.source_port)?;
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

fn by_front<'s, A: Address>(packet: &Packet<'_, A>, front: Front<A>, context: &mut DecisionContext<'_, 's, A>) -> Verdict<'s> {
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
    let Some((_, number)) = frontend.filter(|(frontend, _)| frontend.allows(asked.source)) else {
        return Verdict::Drop(DropReason::SourceRange);
    };
    // The client's flow may have moved to another backend meanwhile.
    if context.table.search(context.table.hash(&asked), &asked).is_some() {
        return Verdict::Drop(DropReason::NoFlow);
    }
    let lease = SnatLease { address: destination, port: destination_port, pool: PoolId::NONE };
    let mut flow = flow_of(&asked, packet.headers.transport, FlowMode::Dnat, (source, source_port), front.backend, &lease, now);
    flow.frontend = number;
    // Anyone can be named as its client, so the client's packet confirms it.
    flow.state = next_state(FlowState::first_of_backend(packet.headers.transport), packet.headers.transport, Direction::ToClient);
    let exit = match exit_to_client(snapshot, &mut flow).and_then(|exit| fits(packet, exit)) {
        Ok(exit) => exit,
        Err(verdict) => return verdict,
    };
    if context.room == 0 && !make_room(context) {
        return Verdict::Drop(DropReason::FlowTableFull);
    }
    let Ok(index) = context.table.insert(flow) else { return Verdict::Drop(DropReason::FlowTableFull) };
    context.changes.made = Some(flow.counter_slot());
    Verdict::Forward(NatForward { flow: index, direction: Direction::ToClient, exit })
}

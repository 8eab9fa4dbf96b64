//! Mode `dnat`: the client's own address and port are what the backend sees.
//!
//! **Invariant:** no two flows look the same to a backend. Where a client speaks from one port through two frontends to
//! one backend, the backend could not tell the flows apart, and we not their replies.

use super::reclaim::{make_room, reset_to_backend};
use super::{Flows, Packet, Passage, Verdict, arrives_from, end, exit_to_client, fits, flow_of, stopped};
use crate::flow::{Direction, Way, begins, next_state};
use crate::snapshot::{Front, Frontend, Place, Snapshot};
use crate::snat::{PoolId, SnatLease};
use crate::tick::Tick;
use crate::{Address, DropReason, Transport, Tuple, tcp_flags};

/// The client's own address and port, as what a flow has towards the backend. None while another flow has them: one
/// that is not confirmed, closes or has ended gives way.
pub(super) fn own_port<A: Address>(
    tuple: &Tuple<A>,
    (backend_address, backend_port): (A, u16),
    snapshot: &Snapshot,
    flows: &mut Flows<'_, A>,
    now: Tick,
) -> Option<SnatLease<A>> {
    let reply = Tuple { destination: backend_address, destination_port: backend_port, ..*tuple }.reversed();
    if let Some((index, _)) = flows.table.search(flows.table.hash(&reply), &reply) {
        let older = flows.table.get(index);
        let gives_way = !older.state.is_confirmed()
            || older.state.is_closing()
            || snapshot.backend(older.backend).is_none_or(|backend| {
                backend.removed || flows.limits.is_over(older.state, backend.idle_timeout, older.last_seen, now)
            });
        if !gives_way {
            return None;
        }
        // The backend would not answer another SYN of this port while it is in the handshake of the older flow.
        let hash = flows.table.hash(&older.tuple(Direction::ToBackend));
        let forgotten = reset_to_backend(older, hash, snapshot);
        flows.changes.resets.extend(forgotten);
        flows.changes.displaced = Some(end(flows, index, now));
    }
    Some(SnatLease { address: tuple.source, port: tuple.source_port, pool: PoolId::NONE })
}

/// A packet from a backend of this mode without a flow, to no address of ours: a reply to what was forwarded before we
/// started, or by another gateway. Rewritten if only one frontend leads to that backend (FORWARDING 4). None if it comes
/// from no such backend, or begins a connection of its own.
pub(super) fn reply<'s, A: Address>(
    packet: &Packet<'_, A>,
    snapshot: &'s Snapshot,
    flows: &mut Flows<'_, A>,
    now: Tick,
) -> Option<Verdict<'s>> {
    let tuple = &packet.headers.tuple;
    let front = snapshot.front(tuple.source, tuple.protocol, tuple.source_port)?;
    if begins(packet.headers.transport) || snapshot.place(tuple.destination) != Place::Elsewhere {
        return None;
    }
    let is_reset = matches!(packet.headers.transport, Transport::Tcp { flags } if flags & tcp_flags::RST != 0);
    Some(match front.filter(|_| !is_reset) {
        Some(front) => by_front(packet, front, snapshot, flows, now),
        None => Verdict::Drop(DropReason::NoFlow),
    })
}

fn by_front<'s, A: Address>(
    packet: &Packet<'_, A>,
    front: Front<A>,
    snapshot: &'s Snapshot,
    flows: &mut Flows<'_, A>,
    now: Tick,
) -> Verdict<'s> {
    let Some(backend) = snapshot.backend(front.backend) else { return Verdict::Drop(DropReason::NoFlow) };
    if !arrives_from(snapshot, backend.next_hop, packet.in_link) {
        return Verdict::Drop(DropReason::SnatWrongPort);
    }
    let Tuple { source, destination, destination_port, protocol, .. } = packet.headers.tuple;
    let asked = Tuple {
        source: destination,
        destination: front.vip,
        source_port: destination_port,
        destination_port: front.port,
        protocol,
    };
    let allowed = |frontend: &Frontend| frontend.allows(asked.source);
    if !snapshot.frontend(asked.destination, protocol, front.port).is_some_and(allowed) {
        return Verdict::Drop(DropReason::SourceRange);
    }
    // The client's flow may have gone to another backend meanwhile.
    if flows.table.search(flows.table.hash(&asked), &asked).is_some() {
        return Verdict::Drop(DropReason::NoFlow);
    }
    if flows.room == 0 && !make_room(flows, snapshot, now) {
        return Verdict::Drop(DropReason::FlowTableFull);
    }
    let lease = SnatLease { address: destination, port: destination_port, pool: PoolId::NONE };
    let mut flow = flow_of(&asked, packet.headers.transport, Way::Dnat, source, backend, front.backend, &lease, now);
    flow.state = next_state(flow.state, packet.headers.transport, Direction::ToClient);
    let exit = match exit_to_client(snapshot, &mut flow).and_then(|exit| fits(packet, exit)) {
        Ok(exit) => exit,
        Err(stop) => return stopped(stop),
    };
    let Ok(index) = flows.table.insert(flow) else { return Verdict::Drop(DropReason::FlowTableFull) };
    flows.changes.made = Some(front.backend);
    Verdict::Forward(Passage { flow: index, direction: Direction::ToClient, exit })
}

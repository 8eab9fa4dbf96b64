//! Decides on packets in modes whose backends answer their clients directly: `dsr`, `ipip`, `gue`.
//!
//! **Invariant:** the destination of a packet follows from its tuple and the snapshot alone. A flow keeps it when the
//! tables change; a packet without room for a flow is forwarded without one (FORWARDING 3).
//!
//! Not here: encapsulation.

use zerocopy::FromZeros;

use super::local::refused_source;
use super::verdict::{Obstacle, Stop, Verdict};
use crate::choose::Chooser;
use crate::flow::{BackendId, Direction, Flow, FlowIndex, FlowState, FlowTable, PoolId, Tick, UNRESOLVED, Way, is_mid_stream};
use crate::forward::decide::{Flows, Packet, exit_by, fits_in, for_vip, stopped, without_backend};
use crate::forward::rewrite::Outer;
use crate::snapshot::{Backend, Exit, Frontend, Place, Snapshot};
use crate::stats::DropReason;
use crate::wire::{Address, Transport, Tuple, sctp_chunk, tcp_flags};

/// How a packet reaches a backend that answers its client directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery<'s> {
    /// The backend.
    pub backend: BackendId,
    /// The frontend's port.
    pub port: u16,
    /// The frontend's protocol number.
    pub protocol: u8,
    /// How the packet leaves.
    pub exit: &'s Exit,
    /// The outer header; `None` in mode `dsr`.
    pub outer: Option<Outer>,
}

/// Forwarding of a packet that does not change the state of its flow.
///
/// Why the packet cannot be forwarded.
pub fn follow_one_way<'s, A: Address>(
    packet: &Packet<'_, A>,
    index: FlowIndex,
    snapshot: &'s Snapshot,
    table: &mut FlowTable<A>,
    now: Tick,
) -> Result<Delivery<'s>, Obstacle<'s>> {
    let flow = table.get_mut(index);
    let Some(backend) = snapshot.backend(flow.backend).filter(|backend| backend.is_steady()) else {
        return Err(Obstacle::Event(index, Direction::ToBackend));
    };
    if flow.last_seen != now {
        flow.last_seen = now;
    }
    delivery(packet, &packet.headers.tuple, flow.way, (flow.backend, backend), snapshot).map_err(Obstacle::Known)
}

/// The verdict on a packet of a flow in such a mode.
pub(super) fn verdict_of_flow<'s, A: Address>(packet: &Packet<'_, A>, flow: &Flow<A>, snapshot: &'s Snapshot) -> Verdict<'s> {
    deliver(packet, &packet.headers.tuple, flow.way, flow.backend, snapshot)
}

/// The verdict on a packet to a backend in one of these modes, for the frontend of `asked`.
fn deliver<'s, A: Address>(
    packet: &Packet<'_, A>,
    asked: &Tuple<A>,
    way: Way,
    id: BackendId,
    snapshot: &'s Snapshot,
) -> Verdict<'s> {
    let Some(backend) = snapshot.backend(id) else { return Verdict::Drop(DropReason::NoFlow) };
    match delivery(packet, asked, way, (id, backend), snapshot) {
        Ok(delivery) => Verdict::Deliver(delivery),
        Err(stop) => stopped(stop),
    }
}

/// The verdict on a packet without flow for a frontend in such a mode.
pub(super) fn new_flow<'s, A: Address>(
    packet: &Packet<'_, A>,
    snapshot: &'s Snapshot,
    flows: &mut Flows<'_, A>,
    now: Tick,
    frontend: &Frontend,
) -> Verdict<'s> {
    let tuple = &packet.headers.tuple;
    let chosen = match packet.headers.transport {
        transport if is_mid_stream(transport) => frontend.choose_mid_stream(tuple, &snapshot.backends, now),
        // Without a flow only the hash determines the backend.
        _ if flows.room == 0 => frontend.choose_by_hash(tuple),
        _ => frontend.choose(tuple, Chooser { worker: flows.worker, now }),
    };
    let Some((id, backend)) = chosen.and_then(|id| Some((id, snapshot.backend(id)?))) else {
        return if is_reset(packet.headers.transport) { for_vip(packet) } else { without_backend(packet, frontend) };
    };
    if frontend.way() != Way::Dsr && is_ours(backend, snapshot) {
        return Verdict::Drop(DropReason::VipLoop);
    }
    let delivery = match delivery(packet, tuple, frontend.way(), (id, backend), snapshot) {
        Ok(delivery) => delivery,
        Err(stop) => return stopped(stop),
    };
    // A RST or ABORT of an unknown connection creates no flow.
    if flows.room > 0 && !is_reset(packet.headers.transport) {
        let flow = flow_to(tuple, packet.headers.transport, frontend.way(), id, now);
        flows.changes.made = flows.table.insert(flow).is_ok().then_some(id);
    }
    Verdict::Deliver(delivery)
}

/// An ICMP error about a packet that a backend sent from the VIP to its client directly. It goes unchanged to that
/// backend: by the flow of the client's packets, whose tuple is `asked`, or without one by their hash. `None`: not such
/// a mode.
pub fn follow_one_way_error<'s, A: Address>(
    packet: &Packet<'_, A>,
    asked: &Tuple<A>,
    snapshot: &'s Snapshot,
    table: &FlowTable<A>,
) -> Option<Verdict<'s>> {
    if asked.destination != packet.headers.tuple.destination || packet.headers.group_frame {
        return None;
    }
    let known = table.search(table.hash(asked), asked).map(|(index, _)| table.get(index));
    let (way, id) = match known {
        Some(flow) => (flow.way, flow.backend),
        None => {
            let frontend = snapshot.frontend(asked.destination, asked.protocol, asked.destination_port)?;
            (frontend.way(), frontend.choose_by_hash(asked)?)
        }
    };
    let may_pass = refused_source(packet.headers.tuple.source, snapshot).is_none();
    (!way.is_two_way() && may_pass).then(|| deliver(packet, asked, way, id, snapshot))
}

const fn is_reset(transport: Transport) -> bool {
    match transport {
        Transport::Tcp { flags } => flags & tcp_flags::RST != 0,
        Transport::Sctp { chunk } => chunk == sctp_chunk::ABORT,
        _ => false,
    }
}

/// Whether a tunnel to the backend would lead to the gateway itself.
fn is_ours(backend: &Backend, snapshot: &Snapshot) -> bool {
    let place = match backend.address.ip() {
        std::net::IpAddr::V4(address) => snapshot.place(u32::from(address)),
        std::net::IpAddr::V6(address) => snapshot.place(u128::from(address)),
    };
    matches!(place, Place::Vip | Place::Snat | Place::PoolUnused)
}

#[inline]
pub(super) fn delivery<'s, A: Address>(
    packet: &Packet<'_, A>,
    asked: &Tuple<A>,
    way: Way,
    (id, backend): (BackendId, &Backend),
    snapshot: &'s Snapshot,
) -> Result<Delivery<'s>, Stop> {
    let exit = exit_by(snapshot, backend.next_hop, packet.hash)?;
    let outer = if way == Way::Dsr {
        // A router would send a packet for a VIP back to the gateway.
        let on_link = snapshot.next_hop(backend.next_hop).is_some_and(|hop| hop.address == backend.address.ip());
        if !on_link {
            return Err(Stop::VipLoop);
        }
        fits_in(packet, exit.mtu)?;
        None
    } else {
        let outer = outer(packet.hash, way, exit, backend, snapshot).ok_or(Stop::NoRoute)?;
        fits_in(packet, outer.mtu)?;
        Some(outer)
    };
    Ok(Delivery { backend: id, port: asked.destination_port, protocol: asked.protocol, exit, outer })
}

/// The outer header for a packet to a backend; `None` if the gateway has no address of the backend's family.
#[inline]
#[allow(clippy::cast_possible_truncation)] // some bits of a hash
fn outer(hash: u64, way: Way, exit: &Exit, backend: &Backend, snapshot: &Snapshot) -> Option<Outer> {
    let entropy = (hash >> 32) as u32;
    let tunnels = &snapshot.tunnels;
    match way {
        Way::Gue => {
            let ends = tunnels.ends(exit.port, backend.address.ip(), 0)?;
            Some(Outer::gue(ends, tunnels.gue_destination_port, entropy, exit.mtu))
        }
        _ => Some(Outer::ipip(tunnels.ends(exit.port, backend.address.ip(), entropy)?, entropy, exit.mtu)),
    }
}

/// The entry of a new flow, indexed by its client's packets only.
fn flow_to<A: Address>(tuple: &Tuple<A>, transport: Transport, way: Way, id: BackendId, now: Tick) -> Flow<A> {
    Flow {
        client: tuple.source,
        vip: tuple.destination,
        client_port: tuple.source_port,
        vip_port: tuple.destination_port,
        protocol: tuple.protocol,
        backend: id,
        last_seen: now,
        opened: now.0,
        snat_pool: PoolId::NONE,
        route_to_client: UNRESOLVED,
        state: FlowState::first(transport, way),
        way,
        ..Flow::new_zeroed()
    }
}

//! Modes whose backends answer their clients directly: `dsr`, `ipip`, `gue`.
//!
//! **Invariant:** where a packet goes follows from its tuple and the snapshot alone. A flow keeps it there when the tables
//! change; a packet that finds no room for a flow goes on without (FORWARDING 3).

use zerocopy::FromZeros;

use super::{Flows, Obstacle, Packet, Stop, Verdict, exit_by, fits_in, for_vip, refused_source, stopped, without_backend};
use crate::encapsulate::Outer;
use crate::flow::{BackendId, Direction, Flow, FlowIndex, FlowState, FlowTable, UNRESOLVED, Way, is_mid_stream};
use crate::snapshot::{Backend, Exit, Frontend, Place, Snapshot};
use crate::snat::PoolId;
use crate::tick::Tick;
use crate::{Address, Chooser, DropReason, Transport, Tuple, sctp_chunk, tcp_flags};

/// How a packet gets to a backend that answers its client directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery<'s> {
    /// The backend.
    pub backend: BackendId,
    /// The frontend's port.
    pub port: u16,
    /// The frontend's protocol number.
    pub protocol: u8,
    /// How it leaves.
    pub exit: &'s Exit,
    /// What it is put into; none in mode `dsr`.
    pub outer: Option<Outer>,
}

/// The way on of a packet that leaves its flow where it is.
///
/// # Errors
/// What is in its way.
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

/// What happens to a packet of a flow of such a mode.
pub(super) fn verdict_of_flow<'s, A: Address>(packet: &Packet<'_, A>, flow: &Flow<A>, snapshot: &'s Snapshot) -> Verdict<'s> {
    deliver(packet, &packet.headers.tuple, flow.way, flow.backend, snapshot)
}

/// What happens to a packet that goes to a backend in one of these modes, to the frontend of `asked`.
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

/// A packet for a frontend of such a mode that has no flow.
pub(super) fn new_flow<'s, A: Address>(
    packet: &Packet<'_, A>,
    snapshot: &'s Snapshot,
    flows: &mut Flows<'_, A>,
    now: Tick,
    frontend: &Frontend,
) -> Verdict<'s> {
    let tuple = &packet.headers.tuple;
    let chosen = match packet.headers.transport {
        transport if is_mid_stream(transport) => frontend.choose_mid_stream(tuple, snapshot, now),
        // Without a flow only the hash remembers.
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
    // A RST or ABORT ends what we know nothing of.
    if flows.room > 0 && !is_reset(packet.headers.transport) {
        let flow = flow_to(tuple, packet.headers.transport, frontend.way(), id, now);
        flows.changes.made = flows.table.insert(flow).is_ok().then_some(id);
    }
    Verdict::Deliver(delivery)
}

/// An ICMP error about a packet that a backend sent from the VIP to its client itself. It goes to that backend as it is, by
/// the flow of the client's packets, whose tuple is `asked`, or without one by their hash. None: no such mode.
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

/// Whether a tunnel to the backend would lead to ourselves.
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
        // To a router, a packet for a VIP would only come back to us.
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

/// What a packet to a backend is put into; none where we have no address of the backend's family.
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

/// The entry of a new flow. It is found by its client's packets only.
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

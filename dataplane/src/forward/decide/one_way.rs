//! Decides on packets in modes whose backends answer their clients directly: `dsr`, `ipip`, `gue`.
//!
//! **Invariant:** the destination of a packet follows from its tuple and the snapshot alone. A flow keeps it when the
//! tables change; a packet without room for a flow is forwarded without one (FORWARDING 3).
//!
//! Not here: encapsulation.

use super::exit::{exit_by, fits_in};
use super::input::{DecisionContext, Packet};
use super::local::{for_vip, without_backend};
use super::reclaim::may_take_room;
use super::verdict::{DirectForward, NoExit, Verdict};
use crate::flow::{
    BackendId, Flow, FlowBackend, FlowMode, FlowState, PoolId, Segment, SnatLease, Tick, is_mid_stream, tags_of_first,
};
use crate::forward::rewrite::Outer;
use crate::snapshot::{AddressRole, Backend, Frontend, Snapshot};
use crate::stats::{DropReason, FrontendNumber};
use crate::wire::{Address, Transport, Tuple, sctp_chunk, tcp_flags};

/// Where packets of a one-way flow go.
#[derive(Clone, Copy)]
pub(in crate::forward) struct OneWayTarget {
    pub(in crate::forward) mode: FlowMode,
    /// For the counters.
    pub(in crate::forward) frontend: FrontendNumber,
    pub(in crate::forward) backend: BackendId,
}

/// The verdict on a packet that does not change the state of its flow to this backend.
pub(super) fn follow<'s, A: Address>(
    packet: &Packet<'_, A>,
    flow: &mut Flow<A>,
    backend: &Backend,
    snapshot: &'s Snapshot,
    now: Tick,
) -> Verdict<'s> {
    flow.last_seen = now;
    let to = OneWayTarget { mode: flow.mode, frontend: flow.frontend, backend: flow.backend };
    let direct = direct(packet, &packet.headers.tuple, to, backend, snapshot);
    direct.map_or_else(Verdict::from, Verdict::ForwardDirect)
}

/// The verdict on a packet to a backend in one of these modes, for the frontend of `asked`.
pub(in crate::forward) fn deliver<'s, A: Address>(
    packet: &Packet<'_, A>,
    asked: &Tuple<A>,
    to: OneWayTarget,
    snapshot: &'s Snapshot,
) -> Verdict<'s> {
    let Some(backend) = snapshot.backend(to.backend) else { return Verdict::Drop(DropReason::NoFlow) };
    direct(packet, asked, to, backend, snapshot).map_or_else(Verdict::from, Verdict::ForwardDirect)
}

/// The verdict on a packet without flow for a frontend in such a mode.
pub(super) fn new_flow<'s, A: Address>(
    packet: &Packet<'_, A>,
    segment: Segment,
    context: &mut DecisionContext<'_, 's, A>,
    frontend: &Frontend,
    number: FrontendNumber,
) -> Verdict<'s> {
    let DecisionContext { snapshot, now, .. } = *context;
    let tuple = &packet.headers.tuple;
    let has_room = context.room > 0 && may_take_room(context, frontend.number);
    let chosen = match packet.headers.transport {
        transport if is_mid_stream(transport) => frontend.choose_mid_stream(tuple, &snapshot.backends, now),
        // Without a flow only the hash determines the backend.
        _ if !has_room => frontend.choose_by_hash(tuple),
        _ => frontend.choose(tuple, context.chooser()),
    };
    let Some((id, backend)) = chosen.and_then(|id| Some((id, snapshot.backend(id)?))) else {
        return if is_reset(packet.headers.transport) { for_vip(packet) } else { without_backend(packet, frontend) };
    };
    if frontend.mode() != FlowMode::Dsr && is_ours(backend, snapshot) {
        return Verdict::Drop(DropReason::VipLoop);
    }
    let to = OneWayTarget { mode: frontend.mode(), frontend: number, backend: id };
    let direct = match direct(packet, tuple, to, backend, snapshot) {
        Ok(direct) => direct,
        Err(none) => return none.into(),
    };
    // A RST or ABORT of an unknown connection creates no flow.
    if has_room && !is_reset(packet.headers.transport) {
        let address = A::from_ip(backend.address.ip()).unwrap_or_default();
        let flow = flow_to(tuple, packet.headers.transport, frontend.mode(), FlowBackend { id, address, port: 0 }, now);
        let tags = tags_of_first(packet.headers.transport, segment);
        let flow = Flow { frontend: number, tags, ..flow };
        if let Ok(index) = context.table.insert(flow) {
            (context.changes.made, context.changes.service) = (Some(flow.counter_slot()), frontend.number);
            return Verdict::ForwardDirect(direct).of_flow(index);
        }
    }
    Verdict::ForwardDirect(direct)
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
        std::net::IpAddr::V4(address) => snapshot.role(u32::from(address)),
        std::net::IpAddr::V6(address) => snapshot.role(u128::from(address)),
    };
    matches!(place, AddressRole::Vip | AddressRole::Snat | AddressRole::PoolUnused)
}

#[inline]
pub(super) fn direct<'s, A: Address>(
    packet: &Packet<'_, A>,
    asked: &Tuple<A>,
    to: OneWayTarget,
    backend: &Backend,
    snapshot: &'s Snapshot,
) -> Result<DirectForward<'s>, NoExit> {
    let OneWayTarget { mode, frontend, backend: id } = to;
    let exit = exit_by(snapshot, backend.next_hop, packet.hash)?;
    let outer = if mode == FlowMode::Dsr {
        // A router would send a packet for a VIP back to the gateway.
        if !backend.on_link {
            return Err(NoExit::Dropped(DropReason::VipLoop));
        }
        fits_in(packet, exit.mtu)?;
        None
    } else {
        let outer = Outer::towards(backend.address.ip(), mode, exit, packet.hash, &snapshot.tunnels);
        let outer = outer.ok_or(NoExit::Dropped(DropReason::NoRoute))?;
        fits_in(packet, outer.mtu)?;
        Some(outer)
    };
    let (port, protocol) = (asked.destination_port, asked.protocol);
    Ok(DirectForward { backend: id, frontend, port, protocol, exit, outer, flow: None })
}

/// A new flow, indexed by its client's packets only.
fn flow_to<A: Address>(tuple: &Tuple<A>, transport: Transport, mode: FlowMode, backend: FlowBackend<A>, now: Tick) -> Flow<A> {
    let no_lease = SnatLease { address: A::default(), port: 0, pool: PoolId::NONE };
    Flow::new(tuple, FlowState::first(transport, mode), mode, backend, &no_lease, now)
}

/// Delivery of a packet that the kernel sends to a VIP; `None` if it is no probe.
pub(crate) fn follow_probe<'s, A: Address>(
    packet: &Packet<'_, A>,
    snapshot: &'s Snapshot,
) -> Option<Result<DirectForward<'s>, NoExit>> {
    let tuple = &packet.headers.tuple;
    let under_test = *snapshot.probe_tags.get(&tuple.source_port)?;
    let (frontend, number) = snapshot.numbered_frontend(tuple.destination, tuple.protocol, tuple.destination_port)?;
    let is_under_test =
        |id| snapshot.backend(id).filter(|backend| backend.address.ip() == under_test).map(|backend| (id, backend));
    let (id, backend) = frontend.backends.iter().copied().find_map(is_under_test)?;
    let to = OneWayTarget { mode: frontend.mode(), frontend: number, backend: id };
    (!frontend.mode().is_two_way()).then(|| direct(packet, tuple, to, backend, snapshot))
}

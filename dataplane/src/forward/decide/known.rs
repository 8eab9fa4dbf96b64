//! Decides on packets of known flows that the fast path leaves (`forward::fast`).
//!
//! Not here: packets that create flows (`new_flow`), and modes without replies through the gateway (`one_way`).

use super::exit::{arrives_from, exit_by, exit_to_client, fits};
use super::input::{DecisionContext, Packet, end};
use super::local::unknown;
use super::one_way::OneWayTarget;
use super::verdict::{NatForward, NoExit, Verdict};
use super::{one_way, rechoose, reclaim};
use crate::flow::{
    Direction, Flow, FlowEnd, FlowIndex, FlowState, FlowTable, IdleLimits, Segment, Tick, begins, is_opening, is_plain,
};
use crate::snapshot::{Backend, Exit, Snapshot};
use crate::stats::DropReason;
use crate::wire::{Address, Headers, Transport, tcp_flags};

/// A flow, and the direction of the packet in it.
pub(crate) type FlowMatch = (FlowIndex, Direction);

/// What [`follow`] came to.
pub(crate) enum Followed<'s> {
    /// The verdict: the packet does not change the state of its flow.
    Decided(Verdict<'s>),
    /// [`super::decide`] decides: on the flow whose state the packet may change, or on a packet without flow.
    Undecided(Option<FlowMatch>),
}

/// Decides on a packet that does not change the state of its flow, including those that the fast path leaves.
pub(crate) fn follow<'s, A: Address>(
    packet: &Packet<'_, A>,
    snapshot: &'s Snapshot,
    table: &mut FlowTable<A>,
    limits: &IdleLimits,
    now: Tick,
) -> Followed<'s> {
    let Headers { transport, group_frame, .. } = *packet.headers;
    if !matches!(transport, Transport::Tcp { .. } | Transport::Udp) || group_frame {
        return Followed::Undecided(None);
    }
    let found = table.find(packet.hash, &packet.headers.tuple, packet.candidate);
    let Some((index, direction)) = found else { return Followed::Undecided(None) };
    let mut flow = table.get(index);
    if !is_plain(flow.state, transport, direction) || limits.may_be_over(flow.state, flow.last_seen, now) {
        return Followed::Undecided(found);
    }
    let steady = snapshot.backend(flow.backend).filter(|backend| backend.is_steady());
    let Some(backend) = steady else { return Followed::Undecided(found) };
    let was_silent = is_long_silent(table, limits, &flow, backend, now);
    if !flow.mode.is_two_way() {
        let verdict = one_way::follow(packet, &mut flow, backend, snapshot, now);
        keep(table, index, &flow, was_silent);
        return Followed::Decided(verdict.of_flow(index));
    }
    let exit = pass(packet, snapshot, backend.next_hop, &mut flow, direction, now).and_then(|exit| fits(packet, exit));
    keep(table, index, &flow, was_silent);
    let forward = |exit| Verdict::Forward(NatForward { flow: index, direction, exit });
    Followed::Decided(exit.map_or_else(Verdict::from, forward))
}

/// Decides on a packet that may change the state of its flow. `None`: the flow has ended, and the packet has none.
pub(super) fn change<'s, A: Address>(
    packet: &Packet<'_, A>,
    segment: Segment,
    (index, direction): FlowMatch,
    context: &mut DecisionContext<'_, 's, A>,
) -> Option<Verdict<'s>> {
    let snapshot = context.snapshot;
    if let Some(verdict) = advance_flow(packet, segment, context, (index, direction)) {
        context.changes.hit = true;
        return Some(verdict);
    }
    let over = context.table.get(index);
    if !begins(packet.headers.transport) && over.mode.is_two_way() && snapshot.is_owned_elsewhere(over.vip) {
        // The owner of the VIP may know better, and tell it.
        return Some(Verdict::Drop(DropReason::NoFlow));
    }
    if begins(packet.headers.transport)
        && direction == Direction::ToBackend
        && let Some(forgotten) = reclaim::reset_to_backend(&over, packet.hash, snapshot)
    {
        context.queue_reset(forgotten);
    }
    let broken = break_off(packet, segment, &mut context.table.get(index), direction, context);
    let why = why_over(&context.table.get(index), context);
    context.changes.ended = Some(end(context, index, why));
    broken
}

/// Whether partners have to hear at once of the next packet of a flow, see [`IdleLimits::is_long_silent`].
fn is_long_silent<A: Address>(table: &FlowTable<A>, limits: &IdleLimits, flow: &Flow<A>, backend: &Backend, now: Tick) -> bool {
    table.is_replicated() && limits.is_long_silent(flow, backend.idle_timeout, now)
}

/// Stores a flow that has seen a packet; partners hear at once of one that was silent before.
fn keep<A: Address>(table: &mut FlowTable<A>, index: FlowIndex, flow: &Flow<A>, was_silent: bool) {
    table.set(index, flow);
    if was_silent {
        table.tell_again(index);
    }
}

/// Why a flow ends that a packet found over.
fn why_over<A: Address>(flow: &Flow<A>, context: &DecisionContext<'_, '_, A>) -> FlowEnd {
    match context.snapshot.backend(flow.backend) {
        None => FlowEnd::Drained,
        Some(backend) if context.limits.is_flow_over(flow, backend.idle_timeout, false, context.now) => FlowEnd::Idle,
        Some(_) => FlowEnd::Replaced,
    }
}

/// The exit of a packet of a flow; marks the flow as seen now. Whether the packet may leave unchanged is checked
/// elsewhere.
fn pass<'s, A: Address>(
    packet: &Packet<'_, A>,
    snapshot: &'s Snapshot,
    next_hop: u32,
    flow: &mut Flow<A>,
    direction: Direction,
    now: Tick,
) -> Result<&'s Exit, NoExit> {
    let exit = match direction {
        Direction::ToBackend => exit_by(snapshot, next_hop, packet.hash),
        Direction::ToClient if !arrives_from(snapshot, next_hop, packet.in_link) => {
            return Err(NoExit::Dropped(DropReason::SnatWrongPort));
        }
        Direction::ToClient => exit_to_client(snapshot, flow),
    };
    flow.last_seen = now;
    exit
}

/// The flow of an SCTP packet, for which [`follow`] does not search: its checksum takes longer than the search, and
/// plain TCP and UDP packets save one more comparison of the protocol.
pub(super) fn association<A: Address>(packet: &Packet<'_, A>, table: &FlowTable<A>) -> Option<FlowMatch> {
    match packet.headers.transport {
        Transport::Sctp { .. } => table.search(packet.hash, &packet.headers.tuple),
        _ => None,
    }
}

/// Whether the packet is a TCP RST.
const fn is_reset(transport: Transport) -> bool {
    matches!(transport, Transport::Tcp { flags } if flags & tcp_flags::RST != 0)
}

/// Applies a packet of a known flow to its state. `None`: the flow has ended, and the packet has no flow.
fn advance_flow<'s, A: Address>(
    packet: &Packet<'_, A>,
    segment: Segment,
    context: &mut DecisionContext<'_, 's, A>,
    (index, direction): FlowMatch,
) -> Option<Verdict<'s>> {
    let DecisionContext { snapshot, now, is_trial, .. } = *context;
    let transport = packet.headers.transport;
    let mut flow = context.table.get(index);
    let backend = snapshot.backend(flow.backend)?;
    let over = context.limits.is_flow_over(&flow, backend.idle_timeout, false, now);
    // A new flow would not know where the header stands.
    let is_late = begins(transport) && flow.shift.is_some_and(|shift| shift.is_late_syn(segment.sequence));
    if over || direction == Direction::ToBackend && !is_late && rechoose::rechooses(&mut flow, transport, backend, now) {
        return None;
    }
    if direction == Direction::ToClient {
        if !arrives_from(snapshot, backend.next_hop, packet.in_link) {
            return Some(Verdict::Drop(DropReason::SnatWrongPort));
        }
        flow.unanswered_since = None;
    }
    let was_silent = is_long_silent(context.table, context.limits, &flow, backend, now);
    context.table.set(index, &flow);
    let was_confirmed = flow.state.is_confirmed();
    let is_open = |state: FlowState| state.is_confirmed() && !state.is_closing() && !state.is_reset();
    let (shook_hands, was_open) = (flow.state.shakes_hands(), is_open(flow.state));
    let mut flow = context.table.advance(index, transport, direction, segment, now);
    if !was_confirmed && flow.state.is_confirmed() && !is_trial {
        remember_client(snapshot, &flow, now);
    }
    if was_open && !is_open(flow.state) && is_reset(transport) {
        context.changes.reset = Some(flow.counter_slot());
    }
    if shook_hands && !flow.state.shakes_hands() && direction == Direction::ToBackend {
        // The route is kept from now on; the next reply finds it.
        let _ = exit_to_client(snapshot, &mut flow);
    }
    if !flow.mode.is_two_way() {
        keep(context.table, index, &flow, was_silent);
        let to = OneWayTarget { mode: flow.mode, frontend: flow.frontend, backend: flow.backend };
        return Some(one_way::deliver(packet, &packet.headers.tuple, to, snapshot).of_flow(index));
    }
    let exit = pass(packet, snapshot, backend.next_hop, &mut flow, direction, now).and_then(|exit| fits(packet, exit));
    keep(context.table, index, &flow, was_silent);
    Some(exit.map_or_else(Verdict::from, |exit| Verdict::Forward(NatForward { flow: index, direction, exit })))
}

/// Remembers the backend of a client whose flow was confirmed, where session affinity is on.
fn remember_client<A: Address>(snapshot: &Snapshot, flow: &Flow<A>, now: Tick) {
    // Without any service with affinity there is no table.
    if snapshot.affinity.is_some()
        && let Some(frontend) = snapshot.frontend(flow.vip, flow.protocol, flow.vip_port)
    {
        frontend.confirmed(&flow.tuple(Direction::ToBackend), flow.backend, now);
    }
}

/// A packet of a connection that ended without its two sides: both get a RST (FORWARDING 2). `None`: the packet opens a
/// connection, or its mode has a rule of its own for mid-stream packets.
fn break_off<A: Address>(
    packet: &Packet<'_, A>,
    segment: Segment,
    flow: &mut Flow<A>,
    direction: Direction,
    context: &mut DecisionContext<'_, '_, A>,
) -> Option<Verdict<'static>> {
    let Transport::Tcp { flags } = packet.headers.transport else { return None };
    if is_opening(flags) || !flow.mode.is_two_way() {
        return None;
    }
    if flags & tcp_flags::RST == 0
        && let Some(reset) = reclaim::reset_to_other_side(flow, direction, segment, packet, context.snapshot)
    {
        context.queue_reset(reset);
    }
    Some(unknown(packet.headers.transport))
}

//! Reclaiming: makes room for a new flow when there is none. The oldest unconfirmed flow yields, then the oldest single
//! exchange, and its SNAT port with it (FORWARDING 3).
//!
//! A backend that still waits for the handshake of a yielding flow gets a RST, otherwise it would not answer the next
//! SYN from that port; the port is then clean. Any other port rests, since a late reply must not reach another client.
//!
//! **Invariant:** a confirmed flow never yields.
//!
//! Not here: the order of flows, which the table keeps, and sending (`forward::answers`).

use std::time::Duration;

use super::exit::{arrives_from, exit_by, exit_to_client};
use super::input::{DecisionContext, OtherFlows, Packet};
use crate::flow::{
    Direction, Flow, FlowEnd, FlowIndex, FlowState, FlowTable, PoolId, Segment, SnatAddress, SnatLease, SnatTarget, Ticks,
    YieldClass,
};
use crate::forward::rewrite::Reset;
use crate::snapshot::{RouteTo, Snapshot};
use crate::stats::CounterSlot;
use crate::wire::{Address, Tuple, protocol};

/// What a flow that yielded leaves to clean up.
struct Yielded {
    counted: CounterSlot,
    port: Option<(PoolId, u16)>,
    reset: Option<Reset>,
}

/// An unconfirmed flow of this age yields before any other; and a port that has not rested is reused only if no flow
/// has been in its class for this long. A handshake takes less, and a lost SYN is repeated after a second (RFC 6298
/// section 2). A port that has not rested may be dead at the backend, or receive a reply for another client.
const PATIENCE: Duration = Duration::from_secs(1);

/// Chooses the flow that yields from the oldest flow of each class, each with its time in the class. An unconfirmed
/// flow that may still be answered yields after older exchanges: if those fill the table, it would be the only flow of
/// its class, and each new flow would end the one created just before it.
fn first_to_yield<T>([unconfirmed, exchange]: [Option<(Ticks, T)>; 2]) -> Option<(Ticks, T)> {
    match (unconfirmed, exchange) {
        (Some((age, _)), Some(exchange)) if age < Ticks::from(PATIENCE) && exchange.0 > age => Some(exchange),
        (unconfirmed, exchange) => unconfirmed.or(exchange),
    }
}

/// Ends the flow of either family that yields first. Returns false when there is none.
#[cold]
pub(super) fn make_room<A: Address>(context: &mut DecisionContext<'_, '_, A>) -> bool {
    let snapshot = context.snapshot;
    let oldest = YieldClass::ALL.map(|class| oldest_of_both(context, class));
    let Some((_, (index, is_other))) = first_to_yield(oldest) else { return false };
    let yielded = match is_other {
        true => yield_other(&mut context.others, index, snapshot),
        false => yield_flow(context.table, index, snapshot),
    };
    settle(context, &yielded);
    true
}

/// The oldest flow of either family in a class, and whether it is of the other family.
fn oldest_of_both<A: Address>(context: &DecisionContext<'_, '_, A>, class: YieldClass) -> Option<(Ticks, (FlowIndex, bool))> {
    let now = context.now;
    let own = context.table.oldest(class).map(|(index, since)| (now.since(since), (index, false)));
    let other = match &context.others {
        OtherFlows::V4(table) => table.oldest(class),
        OtherFlows::V6(table) => table.oldest(class),
    };
    let other = other.map(|(index, since)| (now.since(since), (index, true)));
    match (own, other) {
        (Some(own), Some(other)) if other.0 > own.0 => Some(other),
        (own, other) => own.or(other),
    }
}

/// Ports that are tried for one new flow where shadow flows may have them: 64 searches take about 5 us. The next SYN goes
/// on with the port after these.
const PORTS_TRIED: usize = 64;

/// A SNAT port for a new flow: a free one, otherwise one that a yielding flow releases, otherwise one that has not
/// rested.
pub(super) fn lease<A: Address>(
    context: &mut DecisionContext<'_, '_, A>,
    target: SnatTarget<A>,
    addresses: &[SnatAddress<A>],
    start: u64,
) -> Option<SnatLease<A>> {
    let lease = match context.ports.allocate_rested(target, addresses, start, context.now) {
        Some(lease) => lease,
        None => scarce_lease(context, target, addresses, start)?,
    };
    if context.table.is_replicated() && is_taken(context.table, target, &lease) {
        return untaken_lease(context, target, addresses, start, lease);
    }
    Some(lease)
}

/// Whether a flow has this port although its pool does not know: a shadow flow, or one of the process before.
fn is_taken<A: Address>(table: &FlowTable<A>, target: SnatTarget<A>, lease: &SnatLease<A>) -> bool {
    let SnatTarget { address, port, protocol, .. } = target;
    let reply = Tuple { source: address, destination: lease.address, source_port: port, destination_port: lease.port, protocol };
    table.search(table.hash(&reply), &reply).is_some()
}

/// Lets a port that is taken rest, and tries others. No flow yields for them.
#[cold]
fn untaken_lease<A: Address>(
    context: &mut DecisionContext<'_, '_, A>,
    target: SnatTarget<A>,
    addresses: &[SnatAddress<A>],
    start: u64,
    mut lease: SnatLease<A>,
) -> Option<SnatLease<A>> {
    for _ in 0..PORTS_TRIED {
        context.ports.release(lease.pool, lease.port, context.now);
        let reused_early = context.ports.reused_early();
        lease = context.ports.allocate(target, addresses, start, context.now)?;
        if !is_taken(context.table, target, &lease) {
            context.changes.reused_early = context.ports.reused_early() > reused_early;
            return Some(lease);
        }
    }
    context.ports.release(lease.pool, lease.port, context.now);
    None
}

#[cold]
fn scarce_lease<A: Address>(
    context: &mut DecisionContext<'_, '_, A>,
    target: SnatTarget<A>,
    addresses: &[SnatAddress<A>],
    start: u64,
) -> Option<SnatLease<A>> {
    let DecisionContext { snapshot, now, .. } = *context;
    let oldest = YieldClass::ALL.map(|class| {
        let pools = addresses.iter().map(|address| PoolId::new(target.slot, address.index));
        let of_pool = |pool| context.table.oldest_of(class, pool).map(|(index, since)| (now.since(since), index));
        pools.filter_map(of_pool).max_by_key(|&(age, _)| age)
    });
    let take = |context: &mut DecisionContext<'_, '_, A>, yields: Option<FlowIndex>| {
        if let Some(index) = yields {
            let yielded = yield_flow(context.table, index, snapshot);
            settle(context, &yielded);
        }
        let reused_early = context.ports.reused_early();
        let lease = context.ports.allocate(target, addresses, start, now);
        context.changes.reused_early = context.ports.reused_early() > reused_early;
        lease
    };
    match first_to_yield(oldest) {
        Some((age, index)) if age >= Ticks::from(PATIENCE) => take(context, Some(index)),
        yields => take(context, None).or_else(|| take(context, Some(yields?.1))),
    }
}

/// Accounts for a flow that yielded: there is room for one more, and its port is free again.
fn settle<A: Address>(context: &mut DecisionContext<'_, '_, A>, yielded: &Yielded) {
    let now = context.now;
    match (yielded.port, yielded.reset) {
        (Some((pool, port)), Some(_)) => context.ports.release_clean(pool, port, now),
        (Some((pool, port)), None) => context.ports.release(pool, port, now),
        (None, _) => {}
    }
    context.room += 1;
    context.changes.reclaimed.push(yielded.counted);
    context.changes.resets.extend(yielded.reset);
}

fn yield_other(others: &mut OtherFlows<'_>, index: FlowIndex, snapshot: &Snapshot) -> Yielded {
    match others {
        OtherFlows::V4(table) => yield_flow(table, index, snapshot),
        OtherFlows::V6(table) => yield_flow(table, index, snapshot),
    }
}

fn yield_flow<A: Address>(table: &mut FlowTable<A>, index: FlowIndex, snapshot: &Snapshot) -> Yielded {
    let flow = table.remove(index, FlowEnd::Reclaimed);
    let hash = table.hash(&flow.tuple(Direction::ToBackend));
    Yielded {
        counted: flow.counter_slot(),
        port: flow.snat_lease().map(|lease| (lease.pool, lease.port)),
        reset: reset_to_backend(&flow, hash, snapshot),
    }
}

/// The RST that makes the backend forget a handshake: it expects the byte after the client's SYN.
pub(super) fn reset_to_backend<A: Address>(flow: &Flow<A>, hash: u64, snapshot: &Snapshot) -> Option<Reset> {
    let is_opening = matches!(flow.state, FlowState::TcpOpening | FlowState::TcpAnswered | FlowState::TcpRefused);
    if !is_opening || !flow.mode.is_two_way() {
        return None;
    }
    let exit = exit_by(snapshot, snapshot.backend(flow.backend)?.next_hop, hash).ok()?;
    Some(Reset::new(flow.tuple(Direction::ToClient).reversed(), flow.initial_sequence.wrapping_add(1), None, *exit))
}

/// The RST for the other side of a connection that ended without it, with the numbers of a late packet (FORWARDING 2),
/// which are valid for the receiver as the sender wrote them. `None`: the packet is no such packet, or there is no
/// exit.
pub(super) fn reset_to_other_side<A: Address>(
    flow: &mut Flow<A>,
    direction: Direction,
    segment: Segment,
    packet: &Packet<'_, A>,
    snapshot: &Snapshot,
) -> Option<Reset> {
    debug_assert!(flow.protocol == protocol::TCP && flow.mode.is_two_way());
    let to_backend = match (snapshot.backend(flow.backend), snapshot.route(flow.backend_address)) {
        (Some(backend), _) => backend.next_hop,
        (None, RouteTo::NextHop(slot)) => slot,
        (None, _) => return None,
    };
    let (tuple, exit) = match direction {
        Direction::ToBackend => {
            let tuple = flow.tuple(Direction::ToClient).reversed();
            (tuple, exit_by(snapshot, to_backend, packet.hash).ok()?)
        }
        Direction::ToClient if !arrives_from(snapshot, to_backend, packet.in_link) => return None,
        Direction::ToClient => {
            let tuple = flow.tuple(Direction::ToBackend).reversed();
            (tuple, exit_to_client(snapshot, flow).ok()?)
        }
    };
    Some(Reset::new(tuple, segment.sequence, Some(segment.acknowledgement), *exit))
}

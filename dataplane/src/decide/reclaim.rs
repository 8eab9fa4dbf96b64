//! Room for a new flow where there is none: the oldest unconfirmed flow yields, then the oldest single exchange, and its SNAT
//! port with it (FORWARDING 3).
//!
//! A backend that still waits for the handshake of a flow that yields is sent a RST, or it would not answer the next SYN
//! from that port; then the port is clean. Any other rests: a late reply must not reach another client. **Invariant:** a
//! confirmed flow never yields. Deliberately not here: the order of flows, which the table keeps, and sending
//! ([`crate::apply`]).

use std::net::SocketAddr;
use std::time::Duration;

use super::{Flows, Packet};
use crate::flow::{BackendId, Direction, Flow, FlowIndex, FlowState, FlowTable, Segment, YieldClass};
use crate::snapshot::{Exit, RouteTo, Snapshot};
use crate::snat::{PoolId, SnatAddress, SnatLease, SnatPorts, SnatTarget};
use crate::tick::{Tick, Ticks};
use crate::wire::protocol;
use crate::{Address, Tuple};

/// A TCP RST to be sent that no packet became.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reset {
    /// Source, as its receiver knows the sender.
    pub source: SocketAddr,
    /// Destination.
    pub destination: SocketAddr,
    /// The number that its receiver expects next.
    pub sequence: u32,
    /// The acknowledgement number; none: the flag ACK is not set.
    pub acknowledgement: Option<u32>,
    /// How it leaves.
    pub exit: Exit,
}

impl Reset {
    pub(super) fn new<A: Address>(tuple: Tuple<A>, sequence: u32, acknowledgement: Option<u32>, exit: Exit) -> Self {
        Self {
            source: SocketAddr::new(tuple.source.ip(), tuple.source_port),
            destination: SocketAddr::new(tuple.destination.ip(), tuple.destination_port),
            sequence,
            acknowledgement,
            exit,
        }
    }
}

/// Flows of the other family than the packet's: both families share `maxPerWorker`.
#[derive(Debug)]
pub enum OtherFlows<'a> {
    /// IPv4.
    V4(&'a mut FlowTable<u32>),
    /// IPv6.
    V6(&'a mut FlowTable<u128>),
}

/// What a flow that yielded leaves behind.
struct Yielded {
    backend: BackendId,
    port: Option<(PoolId, u16)>,
    reset: Option<Reset>,
}

/// An unconfirmed flow this old yields before anything else, and any flow that has been in its class for so long before a port is
/// used that has not rested. A handshake takes less, and a SYN that was lost is repeated after a second (RFC 6298 section 2); a
/// port that has not rested may be dead at the backend, or get a reply that is another's.
const PATIENCE: Duration = Duration::from_secs(1);

/// Of the oldest flows of both classes, each with the time that it has been in it, the one that yields. One that may still be
/// answered yields after exchanges that are older: where these fill the table, it would be the only one of its class, and
/// each flow would end the one made just before it.
fn first_to_yield<T>([unconfirmed, exchange]: [Option<(Ticks, T)>; 2]) -> Option<(Ticks, T)> {
    match (unconfirmed, exchange) {
        (Some((age, _)), Some(exchange)) if age < Ticks::from(PATIENCE) && exchange.0 > age => Some(exchange),
        (unconfirmed, exchange) => unconfirmed.or(exchange),
    }
}

/// Ends the flow of either family that yields first. False when there is none.
#[cold]
pub(super) fn make_room<A: Address>(flows: &mut Flows<'_, A>, snapshot: &Snapshot, now: Tick) -> bool {
    let oldest = YieldClass::ALL.map(|class| oldest_of_both(flows, class, now));
    let Some((_, (index, is_other))) = first_to_yield(oldest) else { return false };
    let yielded = match is_other {
        true => yield_other(&mut flows.others, index, snapshot),
        false => yield_flow(flows.table, index, snapshot),
    };
    settle(flows, &yielded, now);
    true
}

/// The oldest flow of either family in a class, and whether it is of the other one.
fn oldest_of_both<A: Address>(flows: &Flows<'_, A>, class: YieldClass, now: Tick) -> Option<(Ticks, (FlowIndex, bool))> {
    let own = flows.table.oldest(class).map(|(index, since)| (now.since(since), (index, false)));
    let other = match &flows.others {
        OtherFlows::V4(table) => table.oldest(class),
        OtherFlows::V6(table) => table.oldest(class),
    };
    let other = other.map(|(index, since)| (now.since(since), (index, true)));
    match (own, other) {
        (Some(own), Some(other)) if other.0 > own.0 => Some(other),
        (own, other) => own.or(other),
    }
}

/// A SNAT port for a new flow: a free one, else one that the oldest flow there that yields makes free, else one that has not
/// rested.
pub(super) fn lease<A: Address>(
    flows: &mut Flows<'_, A>,
    snapshot: &Snapshot,
    target: SnatTarget<A>,
    addresses: &[SnatAddress<A>],
    start: u64,
    now: Tick,
) -> Option<SnatLease<A>> {
    match flows.ports.allocate_rested(target, addresses, start, now) {
        Some(lease) => Some(lease),
        None => scarce_lease(flows, snapshot, target, addresses, start, now),
    }
}

#[cold]
fn scarce_lease<A: Address>(
    flows: &mut Flows<'_, A>,
    snapshot: &Snapshot,
    target: SnatTarget<A>,
    addresses: &[SnatAddress<A>],
    start: u64,
    now: Tick,
) -> Option<SnatLease<A>> {
    let oldest = YieldClass::ALL.map(|class| {
        let pools = addresses.iter().map(|address| SnatPorts::pool(target.slot, address.index));
        let of_pool = |pool| flows.table.oldest_of(class, pool).map(|(index, since)| (now.since(since), index));
        pools.filter_map(of_pool).max_by_key(|&(age, _)| age)
    });
    let take = |flows: &mut Flows<'_, A>, yields: Option<FlowIndex>| {
        if let Some(index) = yields {
            let yielded = yield_flow(flows.table, index, snapshot);
            settle(flows, &yielded, now);
        }
        let reused_early = flows.ports.reused_early();
        let lease = flows.ports.allocate(target, addresses, start, now).ok();
        flows.changes.reused_early = flows.ports.reused_early() > reused_early;
        lease
    };
    match first_to_yield(oldest) {
        Some((age, index)) if age >= Ticks::from(PATIENCE) => take(flows, Some(index)),
        yields => take(flows, None).or_else(|| take(flows, Some(yields?.1))),
    }
}

/// A flow has gone: there is room for one more, and its port is free again.
fn settle<A: Address>(flows: &mut Flows<'_, A>, yielded: &Yielded, now: Tick) {
    match (yielded.port, yielded.reset) {
        (Some((pool, port)), Some(_)) => flows.ports.release_clean(pool, port, now),
        (Some((pool, port)), None) => flows.ports.release(pool, port, now),
        (None, _) => {}
    }
    flows.room += 1;
    flows.changes.reclaimed.push(yielded.backend);
    flows.changes.resets.extend(yielded.reset);
}

fn yield_other(others: &mut OtherFlows<'_>, index: FlowIndex, snapshot: &Snapshot) -> Yielded {
    match others {
        OtherFlows::V4(table) => yield_flow(table, index, snapshot),
        OtherFlows::V6(table) => yield_flow(table, index, snapshot),
    }
}

fn yield_flow<A: Address>(table: &mut FlowTable<A>, index: FlowIndex, snapshot: &Snapshot) -> Yielded {
    let flow = table.remove(index);
    let hash = table.hash(&flow.tuple(Direction::ToBackend));
    Yielded {
        backend: flow.backend,
        port: flow.snat_lease().map(|lease| (lease.pool, lease.port)),
        reset: reset_to_backend(&flow, hash, snapshot),
    }
}

/// What makes the backend forget a handshake that it may be in: it expects the byte after the client's SYN.
pub(super) fn reset_to_backend<A: Address>(flow: &Flow<A>, hash: u64, snapshot: &Snapshot) -> Option<Reset> {
    let is_opening = matches!(flow.state, FlowState::TcpOpening | FlowState::TcpAnswered | FlowState::TcpRefused);
    if !is_opening || !flow.way.is_two_way() {
        return None;
    }
    let exit = super::exit_by(snapshot, snapshot.spot(flow.backend)?.next_hop, hash).ok()?;
    Some(Reset::new(flow.tuple(Direction::ToClient).reversed(), flow.initial_sequence.wrapping_add(1), None, *exit))
}

/// The RST for the other side of a connection that has ended without it, with the numbers of a packet that still came
/// (FORWARDING 2): the sender's own go on to the receiver. None: it is no such packet, or there is no way.
pub(super) fn reset_to_other_side<A: Address>(
    flow: &mut Flow<A>,
    direction: Direction,
    segment: Segment,
    packet: &Packet<'_, A>,
    snapshot: &Snapshot,
) -> Option<Reset> {
    debug_assert!(flow.protocol == protocol::TCP && flow.way.is_two_way());
    let to_backend = match (snapshot.spot(flow.backend), snapshot.route(flow.backend_address)) {
        (Some(spot), _) => spot.next_hop,
        (None, RouteTo::NextHop(slot)) => slot,
        (None, _) => return None,
    };
    let (tuple, exit) = match direction {
        Direction::ToBackend => {
            let tuple = flow.tuple(Direction::ToClient).reversed();
            (tuple, super::exit_by(snapshot, to_backend, packet.hash).ok()?)
        }
        Direction::ToClient if !super::arrives_from(snapshot, to_backend, packet.in_link) => return None,
        Direction::ToClient => {
            let tuple = flow.tuple(Direction::ToBackend).reversed();
            (tuple, super::exit_to_client(snapshot, flow).ok()?)
        }
    };
    Some(Reset::new(tuple, segment.sequence, Some(segment.acknowledgement), *exit))
}

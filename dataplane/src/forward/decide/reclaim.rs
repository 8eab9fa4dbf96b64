//! Reclaiming: makes room for a new flow when there is none. The oldest unconfirmed flow yields, then the oldest single
//! exchange, and its SNAT port with it (FORWARDING 3).
//!
//! A backend that still waits for the handshake of a yielding flow gets a RST, otherwise it would not answer the next
//! SYN from that port; once the RST is queued the port is clean. Any other port rests, since a late reply must not reach
//! another client.
//!
//! Where a table or the ports of a target are nearly all in use, who has his share of them gets no more
//! ([`crate::flow::may_grow`]): a Service of the table, a client of the ports.
//!
//! **Invariant:** a confirmed flow never yields.
//!
//! Not here: the order of flows, which the table keeps, and sending (`forward::execution`).

use std::time::Duration;

use super::exit::{arrives_from, exit_by, exit_to_client};
use super::input::{DecisionContext, OtherFlows, Packet};
use crate::flow::{
    Direction, FLOWS_FACTOR, Flow, FlowEnd, FlowIndex, FlowState, FlowTable, PORTS_FACTOR, PoolId, PortUse, Segment, SnatAddress,
    SnatLease, SnatPorts, SnatTarget, TargetSlot, Tick, Ticks, YieldClass, may_grow,
};
use crate::forward::rewrite::Reset;
use crate::snapshot::{RouteTo, Snapshot};
use crate::stats::{CounterSlot, DropReason, ServiceNumber, WorkerCounters};
use crate::wire::{Address, Tuple, TupleKey, protocol};

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

/// Oldest flows that are looked at for one that yields to a flow of somebody who has his share. Where somebody fills a table
/// with flows that yield, most of the oldest are his.
const LOOKED_AT: usize = 8;

/// Room for a flow of a Service, if the Service may have one more: free room within its share of the table, otherwise that
/// of a flow that yields and whose Service has at least as many.
///
/// `pool`: that of the flow's SNAT port; `hash`: that of its packet.
#[inline]
pub(super) fn take_room<A: Address>(
    context: &mut DecisionContext<'_, '_, A>,
    service: ServiceNumber,
    pool: PoolId,
    hash: u64,
) -> Result<(), DropReason> {
    match may_take_room(context, service) {
        false if yield_of_larger_service(context, service, pool, hash) => Ok(()),
        false if context.room > 0 => Err(DropReason::FlowShare),
        false => Err(DropReason::FlowTableFull),
        true if context.room > 0 || make_room(context) => Ok(()),
        true => Err(DropReason::FlowTableFull),
    }
}

/// Whether a Service has less than its share of the table. With a single Service there is nothing to share.
#[inline]
pub(super) fn may_take_room<A: Address>(context: &DecisionContext<'_, '_, A>, service: ServiceNumber) -> bool {
    let counters = context.counters.filter(|_| context.snapshot.has_many_services());
    counters.is_none_or(|counters| may_grow(counters.flows_of_service(service), context.room, FLOWS_FACTOR))
}

/// Entries of the table that are looked at where none of the oldest flows may yield. Whoever has his share of the table
/// holds most of its entries.
const SAMPLE: u32 = 32;

/// Ends one of the oldest flows that yield, of a Service with at least as many flows as this one. The oldest of all may be
/// of others for as long as they like, such as clients that send UDP and want no answer. Then it is one of those that hold
/// a port of this pool, most of which are of this Service; without ports, in mode `dnat`, one of a few anywhere in the table.
#[cold]
fn yield_of_larger_service<A: Address>(
    context: &mut DecisionContext<'_, '_, A>,
    service: ServiceNumber,
    pool: PoolId,
    hash: u64,
) -> bool {
    let (Some(counters), now) = (context.counters, context.now) else { return false };
    let held = counters.flows_of_service(service);
    let found = YieldClass::ALL.map(|class| {
        let own = larger_in(context.table, class, None, counters, held, now).map(|(age, index)| (age, (index, false)));
        let other = match &context.others {
            OtherFlows::V4(table) => larger_in(table, class, None, counters, held, now),
            OtherFlows::V6(table) => larger_in(table, class, None, counters, held, now),
        };
        let other = other.map(|(age, index)| (age, (index, true)));
        own.into_iter().chain(other).max_by_key(|(age, _)| *age)
    });
    let anywhere = || {
        context.table.sample(hash, SAMPLE).find(|index| {
            let flow = context.table.get(*index);
            !flow.state.is_confirmed() && counters.flows_of_same_service(flow.counter_slot()) >= held
        })
    };
    let of_pool = |class| larger_in(context.table, class, Some(pool), counters, held, now);
    let oldest = first_to_yield(found).map(|(_, oldest)| oldest).or_else(|| {
        let own =
            if pool == PoolId::NONE { anywhere() } else { first_to_yield(YieldClass::ALL.map(of_pool)).map(|(_, own)| own) };
        own.map(|index| (index, false))
    });
    let Some((index, is_other)) = oldest else { return false };
    yield_room(context, index, is_other);
    true
}

/// The first flow of a class of a Service with at least so many flows, with its time in the class.
fn larger_in<A: Address>(
    table: &FlowTable<A>,
    class: YieldClass,
    pool: Option<PoolId>,
    counters: &WorkerCounters,
    held: u32,
    now: Tick,
) -> Option<(Ticks, FlowIndex)> {
    table.oldest_first(class, pool).take(LOOKED_AT).find_map(|index| {
        let flow = table.get(index);
        (counters.flows_of_same_service(flow.counter_slot()) >= held).then(|| (now.since(flow.since), index))
    })
}

/// Ports of flows that yield, of which one counts as free: a flood from many addresses, which leaves nothing but such flows,
/// keeps nobody below half of the ports from connecting. If all of them counted, a client could open any number of
/// handshakes first and finish them later.
const YIELDING_AS_ONE: u32 = 8;

/// Whether a client may have one more SNAT port towards a target: three quarters of them are not in use, or it holds less
/// than its share. A client that holds all that are in use leaves a sixteenth.
pub(in crate::forward) fn may_lease<A: Address>(
    table: &FlowTable<A>,
    ports: &SnatPorts,
    client: A,
    target: TargetSlot,
    addresses: &[SnatAddress<A>],
) -> bool {
    let (in_use, all) = ports.use_towards(target, addresses);
    let (held, free) = (table.ports_of_client(client, PoolId::new(target, 0)), all.saturating_sub(in_use));
    let yielding: u32 = addresses.iter().map(|address| table.yielding(PoolId::new(target, address.index))).sum();
    let is_alone = held >= in_use && free > all / 16;
    in_use <= all / 4 * 3 || is_alone || may_grow(held, free + yielding / YIELDING_AS_ONE, PORTS_FACTOR)
}

/// Ends one of the oldest flows that yield with a port towards this target, of a client with at least as many such ports
/// as this one.
#[cold]
fn yield_of_larger_client<A: Address>(
    context: &mut DecisionContext<'_, '_, A>,
    client: A,
    target: TargetSlot,
    addresses: &[SnatAddress<A>],
) -> bool {
    let held = context.table.ports_of_client(client, PoolId::new(target, 0));
    let pools = addresses.iter().map(|address| PoolId::new(target, address.index));
    let (table, now) = (&*context.table, context.now);
    let found = YieldClass::ALL.map(|class| {
        let larger = |pool| {
            table.oldest_first(class, Some(pool)).take(LOOKED_AT).find_map(|index| {
                let flow = table.get(index);
                (table.ports_of_client(flow.client, pool) >= held).then(|| (now.since(flow.since), index))
            })
        };
        pools.clone().filter_map(larger).max_by_key(|(age, _)| *age)
    });
    first_to_yield(found).is_some_and(|(_, index)| yield_port(context, index))
}

/// Ends the flow of either family that yields first. Returns false when there is none.
#[cold]
fn make_room<A: Address>(context: &mut DecisionContext<'_, '_, A>) -> bool {
    let oldest = YieldClass::ALL.map(|class| oldest_of_both(context, class));
    let Some((_, (index, is_other))) = first_to_yield(oldest) else { return false };
    yield_room(context, index, is_other);
    true
}

/// Ends a flow for the room that it takes. Its port rests, unless its backend can be told.
fn yield_room<A: Address>(context: &mut DecisionContext<'_, '_, A>, index: FlowIndex, is_other: bool) {
    let yielded = match is_other {
        true => yield_other(&mut context.others, index, context.snapshot),
        false => yield_flow(context.table, index, context.snapshot),
    };
    let is_clean = yielded.reset.is_some_and(|reset| context.queue_reset(reset));
    settle(context, &yielded, is_clean);
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

/// A SNAT port for a new flow of a client: a free one, otherwise one that a yielding flow releases, otherwise one that has
/// not rested. A client that has its share gets one only for that of a flow that yields.
pub(super) fn lease<A: Address>(
    context: &mut DecisionContext<'_, '_, A>,
    client: A,
    target: SnatTarget<A>,
    addresses: &[SnatAddress<A>],
    start: usize,
) -> Result<SnatLease<A>, DropReason> {
    let slot = target.slot;
    let is_shared = addresses.iter().any(|address| context.ports.is_shared(PoolId::new(slot, address.index)));
    if is_shared
        && !may_lease(context.table, context.ports, client, slot, addresses)
        && !yield_of_larger_client(context, client, slot, addresses)
    {
        return Err(DropReason::SnatShare);
    }
    lease_any(context, target, addresses, start).ok_or(DropReason::SnatExhausted)
}

/// The same for any client.
fn lease_any<A: Address>(
    context: &mut DecisionContext<'_, '_, A>,
    target: SnatTarget<A>,
    addresses: &[SnatAddress<A>],
    start: usize,
) -> Option<SnatLease<A>> {
    let lease = match context.ports.allocate_rested(target, addresses, start, context.now) {
        Some(lease) => lease,
        None => scarce_lease(context, target, addresses, start)?,
    };
    match context.table.is_replicated().then(|| use_of(context.table, target, &lease)).flatten() {
        Some(port_use) => unused_lease(context, target, addresses, start, (lease, port_use)),
        None => Some(lease),
    }
}

/// Why this port is not free although its pool does not know: a shadow flow, or one of the process before, has it or had it
/// a moment ago.
fn use_of<A: Address>(table: &FlowTable<A>, target: SnatTarget<A>, lease: &SnatLease<A>) -> Option<PortUse> {
    let SnatTarget { address, port, protocol, .. } = target;
    let reply = Tuple { source: address, destination: lease.address, source_port: port, destination_port: lease.port, protocol };
    table.port_use(table.hash(&reply), &A::Key::of(&reply), protocol)
}

/// Lets a port that is not free rest, and tries others. No flow yields for them. While the pools have ports that were not
/// tried, the SYN is not served rather than by a port that rests. Otherwise the one that has rested longest is used early.
#[cold]
fn unused_lease<A: Address>(
    context: &mut DecisionContext<'_, '_, A>,
    target: SnatTarget<A>,
    addresses: &[SnatAddress<A>],
    start: usize,
    first: (SnatLease<A>, PortUse),
) -> Option<SnatLease<A>> {
    let now = context.now;
    let (mut early, mut next): (Option<(Ticks, SnatLease<A>)>, _) = (None, Some(first));
    let mut is_scarce = context.changes.reused_early;
    for _ in 0..PORTS_TRIED {
        let Some((lease, port_use)) = next else { break };
        let unwanted = match port_use {
            PortUse::Resting(age) if early.is_none_or(|(longest, _)| age > longest) => {
                early.replace((age, lease)).map(|(_, lease)| lease)
            }
            PortUse::Resting(_) | PortUse::Held => Some(lease),
        };
        unwanted.into_iter().for_each(|lease| context.ports.release(lease.pool, lease.port, now));
        let reused_early = context.ports.reused_early();
        let lease = context.ports.allocate(target, addresses, start, now);
        is_scarce = lease.is_none() || context.ports.reused_early() > reused_early;
        next = lease.and_then(|lease| Some((lease, use_of(context.table, target, &lease)?)));
        if let Some(lease) = lease.filter(|_| next.is_none()) {
            early.into_iter().for_each(|(_, lease)| context.ports.release(lease.pool, lease.port, now));
            context.changes.reused_early = is_scarce;
            return Some(lease);
        }
    }
    let (early, untried) = if is_scarce { (early, None) } else { (None, early) };
    for (lease, _) in next.into_iter().chain(untried.map(|(age, lease)| (lease, PortUse::Resting(age)))) {
        context.ports.release(lease.pool, lease.port, now);
    }
    context.changes.reused_early = early.is_some();
    early.map(|(_, lease)| lease)
}

#[cold]
fn scarce_lease<A: Address>(
    context: &mut DecisionContext<'_, '_, A>,
    target: SnatTarget<A>,
    addresses: &[SnatAddress<A>],
    start: usize,
) -> Option<SnatLease<A>> {
    let now = context.now;
    let oldest = YieldClass::ALL.map(|class| {
        let pools = addresses.iter().map(|address| PoolId::new(target.slot, address.index));
        let of_pool = |pool| context.table.oldest_of(class, pool).map(|(index, since)| (now.since(since), index));
        pools.filter_map(of_pool).max_by_key(|&(age, _)| age)
    });
    let take = |context: &mut DecisionContext<'_, '_, A>, yields: Option<FlowIndex>| {
        if yields.is_some_and(|index| !yield_port(context, index)) {
            return None;
        }
        let reused_early = context.ports.reused_early();
        let lease = context.ports.allocate(target, addresses, start, now);
        context.changes.reused_early = context.ports.reused_early() > reused_early;
        lease
    };
    match first_to_yield(oldest) {
        Some((age, index)) if age >= Ticks::from(PATIENCE) => take(context, Some(index)).or_else(|| take(context, None)),
        yields => take(context, None).or_else(|| take(context, Some(yields?.1))),
    }
}

/// Ends a flow, so that its port can be used at once. Returns false, and leaves the flow, if its backend has to be told and
/// there is no buffer for that: the backend would not answer another SYN from that port.
fn yield_port<A: Address>(context: &mut DecisionContext<'_, '_, A>, index: FlowIndex) -> bool {
    let flow = context.table.get(index);
    let reset = reset_to_backend(&flow, context.table.hash(&flow.tuple(Direction::ToBackend)), context.snapshot);
    if reset.is_some_and(|reset| !context.queue_reset(reset)) {
        return false;
    }
    let yielded = yield_flow(context.table, index, context.snapshot);
    settle(context, &yielded, reset.is_some());
    true
}

/// Accounts for a flow that yielded: there is room for one more, and its port is free again, `is_clean`: at once.
fn settle<A: Address>(context: &mut DecisionContext<'_, '_, A>, yielded: &Yielded, is_clean: bool) {
    let now = context.now;
    match yielded.port {
        Some((pool, port)) if is_clean => context.ports.release_clean(pool, port, now),
        Some((pool, port)) => context.ports.release(pool, port, now),
        None => {}
    }
    context.room += 1;
    context.changes.reclaimed.push(yielded.counted);
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
pub(in crate::forward) fn reset_to_backend<A: Address>(flow: &Flow<A>, hash: u64, snapshot: &Snapshot) -> Option<Reset> {
    let is_opening = matches!(flow.state, FlowState::TcpOpening | FlowState::TcpAnswered | FlowState::TcpRefused);
    if !is_opening || !flow.mode.is_two_way() {
        return None;
    }
    let exit = exit_by(snapshot, snapshot.backend(flow.backend)?.next_hop, hash).ok()?;
    Some(Reset::new(flow.tuple(Direction::ToClient).reversed(), flow.initial_sequence.wrapping_add(1), None, *exit))
}

/// The RST for the other side of a connection that ended without it, with the numbers of a late packet (FORWARDING 2),
/// which are valid for the receiver as the sender wrote them, but for a shift. `None`: the packet is no such packet, or
/// there is no exit.
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
    let seen = segment.seen_by_receiver(flow.shift.as_ref(), direction);
    Some(Reset::new(tuple, seen.sequence, Some(seen.acknowledgement), *exit))
}

#[cfg(test)]
mod tests {
    use crate::flow::{BackendId, FlowBackend};
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use super::super::input::{FlowTables, ResetBuffers};
    use super::super::verdict::Changes;
    use super::*;
    use crate::compiler::Compiler;
    use crate::flow::PortShare;
    use crate::flow::{FlowLimits, FlowMode, FlowReplication, IdleLimits};
    use crate::snapshot::Config;

    /// Eight ports towards each target.
    fn ports() -> SnatPorts {
        SnatPorts::new(64, PortShare::of_worker(1024, 8064)).unwrap()
    }

    fn snapshot() -> Snapshot {
        let config = Config {
            ports: Vec::new(),
            snat: Vec::new(),
            shared_snat: true,
            targets_max: crate::flow::TARGETS_MAX,
            tunnel: crate::snapshot::Tunnel::default(),
            node_port_addresses: Vec::new(),
            flows: FlowLimits::default(),
        };
        Compiler::new(config).initial()
    }

    fn at(seconds: u64) -> Tick {
        Tick::at(seconds * 1_000_000_000)
    }

    const SNAT: SnatAddress<u32> = SnatAddress { address: 0x0a00_0003, index: 0 };
    const TARGET: SnatTarget<u32> =
        SnatTarget { slot: TargetSlot { index: 0, generation: 0 }, address: 0x0a00_000b, port: 8080, protocol: protocol::TCP };

    /// A gateway that replicates, and its SNAT ports.
    struct Lab {
        tables: FlowTables,
        ports: SnatPorts,
        snapshot: Snapshot,
    }

    impl Lab {
        fn new() -> Self {
            let mut tables = FlowTables { v4: FlowTable::new(64, 7).unwrap(), v6: FlowTable::new(64, 7).unwrap() };
            tables.v4.replicate(Arc::new(FlowReplication::new(16, Duration::from_secs(1))));
            Self { tables, ports: ports(), snapshot: snapshot() }
        }

        fn lease(&mut self, now: Tick) -> (Option<u16>, bool) {
            self.tables.set_time(now);
            let FlowTables { v4, v6 } = &mut self.tables;
            let (limits, mut changes) = (IdleLimits::new(&FlowLimits::default()), Changes::default());
            let mut context = DecisionContext {
                snapshot: &self.snapshot,
                now,
                table: v4,
                others: OtherFlows::V6(v6),
                ports: &mut self.ports,
                limits: &limits,
                counters: None,
                changes: &mut changes,
                room: 64,
                worker: 0,
                is_trial: false,
                reset_buffers: ResetBuffers(&mut |_| true),
            };
            let lease = lease_any(&mut context, TARGET, &[SNAT], 0);
            (lease.map(|lease| lease.port), changes.reused_early)
        }

        /// A flow of a partner with this port begins, and ends.
        fn partner_uses(&mut self, port: u16, ends: Option<Tick>) {
            let client = Tuple {
                source: 0xc633_6401,
                destination: 0xc000_0264,
                source_port: port,
                destination_port: 80,
                protocol: protocol::TCP,
            };
            let snat = SnatLease { address: SNAT.address, port, pool: PoolId::NONE };
            let to = FlowBackend { id: BackendId::default(), address: TARGET.address, port: TARGET.port };
            let flow = Flow::new(&client, FlowState::TcpEstablished, FlowMode::Nat, to, &snat, at(0));
            let index = self.tables.v4.insert_shadow(flow).unwrap();
            if let Some(ends) = ends {
                self.tables.set_time(ends);
                self.tables.v4.remove(index, FlowEnd::Fin);
            }
        }
    }

    #[test]
    fn ports_of_partners_that_rest_are_used_last_and_early_use_is_counted() {
        let mut lab = Lab::new();
        let share = PortShare::of_worker(1024, 8064);
        let all: BTreeSet<u16> = (0..8).map(|n| share.port::<u32>(n, 0)).collect();
        assert_eq!(all.len(), 8);
        let mut partners = all.iter().copied();
        let (held, youngest) = (partners.next().unwrap(), partners.next().unwrap());
        lab.partner_uses(held, None);
        let resting: Vec<u16> = partners.by_ref().take(4).collect();
        for (seconds, port) in (10..).zip(&resting) {
            lab.partner_uses(*port, Some(at(seconds)));
        }
        lab.partner_uses(youngest, Some(at(20)));
        let free: BTreeSet<u16> = partners.collect();
        let given: BTreeSet<u16> = (0..free.len()).map(|_| lab.lease(at(30)).0.unwrap()).collect();
        assert_eq!(given, free, "those that neither rest nor are held");
        let early: Vec<_> = (0..5).map(|_| lab.lease(at(31))).collect();
        let expected = resting.iter().chain([&youngest]).map(|port| (Some(*port), true)).collect::<Vec<_>>();
        assert_eq!(early, expected, "the one that has rested longest first");
        assert_eq!(lab.lease(at(32)), (None, false), "a flow has the last one");
        // A minute later nothing rests any more.
        let mut lab = Lab::new();
        lab.partner_uses(held, Some(at(1)));
        let later: Vec<_> = (0..8).map(|_| lab.lease(at(62))).collect();
        assert!(later.iter().all(|(port, is_early)| port.is_some() && !is_early), "{later:?}");
    }
}

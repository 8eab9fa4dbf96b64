//! The worker: polls its ports and twins, decides burst by burst, and sends. It never waits, locks, allocates or logs.
//! It makes no system call of its own but the one that wakes a sleeping worker to which it hands packets.
//!
//! A burst first takes the fast path (`fast`). The packets that it leaves pass three stages (`burst`): parse all
//! packets and prefetch their flow buckets, prefetch the flows found there, then decide and rewrite. So the memory that
//! one packet needs is fetched while others are processed.
//!
//! With several workers, packets of other workers' flows are handed over by the fast path or after the first stage, and
//! packets that they hand to this worker pass the same stages here ([`crate::workers`]). After each poll the worker
//! sweeps a bounded number of flows and SNAT pools.
//!
//! **Invariant:** every packet ends in one counted verdict, and the account balances (see [`crate::WorkerCounters`]).
//!
//! Not here: the processing of a packet (`burst`, `decide`, `engine`).

mod ended_flows;
mod observed;
mod watching;

use std::cell::Cell;
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;

use super::engine::Engine;
use super::execution::linux::sent_by_linux;
use super::fast::state::FastPath;
use super::flow_transfer::{Owned, Replicating, SavedFlows, is_sent_by, save};
use super::observer::{Observe, PacketSource};
use super::output::Output;
use super::sort::Ingress;
use crate::flow::{
    BackendId, Direction, Fate, Flow, FlowEnd, FlowLimits, FlowMode, FlowRecords, FlowReplication, FlowState, FlowTable, HotFlow,
    IdleLimits, PoolId, PortShare, SnatPorts, SweepRules, Tick, Ticks, refresh_interval,
};
use crate::forward::decide::{FlowTables, Inquired, Inquiry, KnownFlows, Mailbox, WorkerFlows, why_without};
use crate::fragment::{Datagrams, Identifications};
use crate::icmp::AnswerLimiter;
use crate::neighbours::{Announcements, NeighbourRequest, QueuedPacket, VipOwnership, WorkerNeighbours};
use crate::port::{Arrival, BURST, Burst, Origin, Port, PortIndex, TwinQueues, TwinRate};
use crate::snapshot::{RouteTo, Snapshot, Subscriber};
use crate::stats::{CounterSlot, DropReason, Tally, WorkerCounters};
use crate::wire::{Address, Buffer, Tags, TupleKey, protocol, split_mix};
use crate::workers::{Egress, EgressPort, HandoverTask, PACKETS_PER_TURN, Peers};
use ended_flows::end_all;
use observed::{ObservedFrom, drop_waiting, observe_packet, observes, process, process_waited};
use watching::swap_watch;

/// A worker's queues of a port, with the rings of the port's twin if it has one.
pub type PortWithTwin<P, B> = (P, Option<Arc<TwinQueues<B>>>);

/// The parts that a worker is built from.
#[derive(Debug)]
pub struct Parts<P: Port, O> {
    /// Its queues of each port, in the order of the configuration, with the rings of the port's twin.
    pub ports: Vec<PortWithTwin<P, P::Buffer>>,
    /// The source of snapshots.
    pub subscriber: Subscriber,
    /// Limits of its flow tables.
    pub limits: FlowLimits,
    /// Its counters, shared with readers.
    pub counters: Arc<WorkerCounters>,
    /// Requests to the kernel to resolve neighbours.
    pub neighbour_requests: Arc<ArrayQueue<NeighbourRequest>>,
    /// The other workers of the gateway, if there are any.
    pub peers: Option<Peers<P::Buffer>>,
    /// Seed of the hashes of its tables, the same for all workers: random in a gateway, fixed in tests and `replay`.
    pub seed: u64,
    /// Observes the end of each packet.
    pub observer: O,
}

impl<P: Port, O> Parts<P, O> {
    /// The same parts with another observer.
    #[must_use]
    pub fn observed_by<N>(self, observer: N) -> Parts<P, N> {
        let Self { ports, subscriber, limits, counters, neighbour_requests, peers, seed, .. } = self;
        Parts { ports, subscriber, limits, counters, neighbour_requests, peers, seed, observer }
    }
}

/// The error that there is no memory for the tables of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no memory for {flows} flows per worker: lower `flows.maxPerWorker`")]
pub struct NoMemory {
    /// The configured number of flows.
    pub flows: u32,
}

/// A worker; see the module.
pub struct Worker<P: Port, O = ()> {
    engine: Engine<P, O>,
    subscriber: Subscriber,
    /// The limits of the snapshot, of which the engine holds the parts that it needs.
    limits: Arc<FlowLimits>,
    announcements: Announcements,
    sweep: Sweep,
    /// The flows of the process before, until the first complete snapshot.
    saved: Option<Arc<SavedFlows>>,
    /// Inquiries of the agent.
    mailbox: Option<Arc<Mailbox>>,
    /// The replication of flows with partners.
    replication: Option<Replicating>,
    /// Seed of the hashes of its tables.
    seed: u64,
}

impl<P: Port, O: Observe<P::Buffer>> Worker<P, O> {
    /// Builds a worker and allocates all memory that it will ever use.
    ///
    /// [`NoMemory`] when there is no memory for its tables.
    pub fn new(parts: Parts<P, O>) -> Result<Self, NoMemory> {
        let limits = &parts.limits;
        let flows = limits.max_per_worker;
        let (worker, workers) = parts.peers.as_ref().map_or((0, 1), Peers::position);
        let share = parts.peers.as_ref().map_or_else(PortShare::whole, Peers::snat_share);
        let blocks = parts.peers.as_ref().map(Peers::identifications).unwrap_or_default();
        let ports: Vec<_> = parts.ports.into_iter().map(|(port, twin)| EgressPort::new(port, twin)).collect();
        let fast = FastPath::new(ports.len());
        let engine = Engine {
            output: Output {
                worker: parts.subscriber.worker(),
                egress: Egress::new(ports, parts.peers),
                twin_rate: TwinRate::default(),
                tally: Tally::default(),
                counters: parts.counters,
                observer: parts.observer,
                watching: None,
            },
            flows: WorkerFlows {
                tables: FlowTables {
                    v4: FlowTable::new(flows, parts.seed).map_err(|_| NoMemory { flows })?,
                    v6: FlowTable::new(flows, parts.seed).map_err(|_| NoMemory { flows })?,
                },
                ports: SnatPorts::new(flows, share).map_err(|_| NoMemory { flows })?,
                max_flows: flows,
                limits: IdleLimits::new(limits),
            },
            neighbours: WorkerNeighbours::new(parts.neighbour_requests),
            datagrams: Datagrams::new(parts.seed),
            identifications: Identifications::new(parts.seed, worker, workers, blocks),
            limiter: AnswerLimiter::new(parts.seed),
            fast,
            capture: None,
            is_looked_at: false,
        };
        Ok(Self {
            engine,
            subscriber: parts.subscriber,
            limits: Arc::new(parts.limits),
            announcements: Announcements::new(),
            sweep: Sweep::default(),
            saved: None,
            mailbox: None,
            replication: None,
            seed: parts.seed,
        })
    }

    /// Gives the worker the flows of the process before, of which it restores its own with the first complete snapshot.
    /// To be called before the first poll.
    pub fn restore(&mut self, saved: Arc<SavedFlows>) {
        self.saved = Some(saved);
    }

    /// Records starts, traffic and ends of its flows from now on. Its observer must count packets for flows
    /// ([`Observe::METERS`]). To be called before the first poll.
    ///
    /// [`NoMemory`] when there is no memory for the meters.
    pub fn record(&mut self, records: &Arc<FlowRecords>) -> Result<(), NoMemory> {
        let WorkerFlows { tables, max_flows: flows, .. } = &mut self.engine.flows;
        tables.v4.record(Arc::clone(records)).map_err(|_| NoMemory { flows: *flows })?;
        tables.v6.record(Arc::clone(records)).map_err(|_| NoMemory { flows: *flows })
    }

    /// Sends its own flows to the agent, and keeps flows of partners as shadow flows. To be called before the first
    /// poll.
    ///
    /// Its pools of SNAT ports begin at a place that the seed chooses: a gateway that takes over SNAT addresses would
    /// otherwise begin with the ports that the one before used last, of flows too young to be sent.
    pub fn replicate(&mut self, replication: Arc<FlowReplication>) {
        let WorkerFlows { tables, ports, .. } = &mut self.engine.flows;
        tables.v4.replicate(Arc::clone(&replication));
        tables.v6.replicate(Arc::clone(&replication));
        ports.start_at(split_mix(self.seed));
        self.replication = Some(Replicating::new(replication));
    }

    /// Records the end of all flows at the end of the gateway, as far as there is room. To be called at `now_ns`
    /// (monotonic, ns), after the last poll.
    pub fn record_stop(&mut self, now_ns: u64) {
        if !O::METERS {
            return;
        }
        let tables = &mut self.engine.flows.tables;
        tables.set_time(Tick::at(now_ns));
        tables.set_recorder_time(now_ns);
        tables.v4.record_stop();
        tables.v6.record_stop();
    }

    /// Its flows for the next process: a part of [`SavedFlows`]. To be called at `now_ns` (monotonic, ns), after the
    /// last poll.
    #[must_use]
    pub fn save(&self, now_ns: u64) -> Vec<u8> {
        let Engine { flows, output, .. } = &self.engine;
        save(flows, output.owned(), &self.subscriber.newest(), Tick::at(now_ns), output.worker == 0)
    }

    /// The same worker, which answers inquiries: at most one at the end of each poll.
    #[must_use]
    pub fn answering(self, mailbox: Arc<Mailbox>) -> Self {
        Self { mailbox: Some(mailbox), ..self }
    }

    /// Lets the worker answer only for the VIPs of groups that the gateway owns, and note the claims of other stations.
    /// A packet that speaks for such a VIP leaves only if the lease is still valid by the clock of [`Self::poll`] at
    /// the end of the poll. To be called before the first poll.
    pub fn own_by(&mut self, ownership: Arc<VipOwnership>, clock: fn() -> u64) {
        self.engine.neighbours.ownership = ownership;
        self.engine.output.egress.set_clock(clock);
    }

    /// Its counters.
    #[must_use]
    pub fn counters(&self) -> &Arc<WorkerCounters> {
        &self.engine.output.counters
    }

    /// The port at a position, for tests and `replay`.
    pub fn port_mut(&mut self, index: PortIndex) -> Option<&mut P> {
        self.engine.output.egress.ports.get_mut(usize::from(index.0)).map(|port| &mut port.device)
    }

    /// Lets the fast path work on one packet at a time, as on processors without AVX2.
    #[cfg(feature = "testing")]
    pub fn forgo_vectors(&mut self) {
        self.engine.fast.forgo_avx2();
    }

    /// Lets its pools of SNAT ports have as few ports as if there were so many workers. To be called before the first
    /// flow.
    #[cfg(feature = "testing")]
    pub fn share_ports(&mut self, workers: u16) {
        if let Ok(ports) = SnatPorts::new(self.engine.flows.max_flows, PortShare::of_worker(0, workers)) {
            self.engine.flows.ports = ports;
        }
    }

    /// The observer.
    pub fn observer_mut(&mut self) -> &mut O {
        &mut self.engine.output.observer
    }

    /// The subscriber; a worker that goes to sleep reports it there.
    pub fn subscriber_mut(&mut self) -> &mut Subscriber {
        &mut self.subscriber
    }

    /// Processes the packets that have arrived, at `now_ns` (monotonic, ns). Returns their number, and that of flows of
    /// partners and for them: while there are any, the worker should not sleep.
    pub fn poll(&mut self, now_ns: u64) -> usize {
        let changed = self.subscriber.refresh();
        self.engine.flows.tables.set_time(Tick::at(now_ns));
        self.engine.identifications.set_time(Tick::at(now_ns));
        if O::METERS {
            self.engine.flows.tables.set_recorder_time(now_ns);
        }
        let snapshot = self.subscriber.snapshot();
        let engine = &mut self.engine;
        if let Some(watching) = &mut engine.output.watching {
            watching.begin_poll(now_ns);
        }
        if changed {
            if !Arc::ptr_eq(&self.limits, snapshot.limits()) {
                self.limits = Arc::clone(snapshot.limits());
                engine.flows.limits = IdleLimits::new(&self.limits);
            }
            engine.flows.limits.follow(snapshot.shortest_idle_timeout());
            if let Some(saved) = self.saved.take_if(|_| snapshot.ready()) {
                let Engine { flows, output, .. } = &mut *engine;
                output.receiving(flows).restore(snapshot, &saved, Tick::at(now_ns), output.worker == 0);
            }
            if engine.output.egress.peers.as_ref().is_none_or(Peers::announces) {
                self.announcements.wake();
            }
        }
        let replicated = match self.replication.as_mut().filter(|_| snapshot.ready()) {
            Some(replication) => {
                let Engine { flows, output, neighbours, .. } = &mut *engine;
                replication.run(output.receiving(flows), &neighbours.ownership, snapshot, changed, now_ns)
            }
            None => 0,
        };
        let mut handled = 0;
        // Before others are received, which must not overtake them.
        if engine.neighbours.queue.len() > 0 {
            engine.neighbours.have_changed |= changed;
            retry_queued(engine, snapshot, now_ns);
        }
        for index in 0..engine.output.egress.ports.len() {
            let in_port = PortIndex(u8::try_from(index).unwrap_or(u8::MAX));
            let mut burst = Burst::new();
            engine.output.egress.receive(in_port, &mut burst);
            handled += burst.len();
            engine.output.tally.received += burst.len() as u64;
            if !burst.is_empty() {
                let arrival = Arrival { link: in_port.into(), tags: Tags::NONE, now_ns, origin: Origin::Port };
                process(engine, Ingress { snapshot, arrival }, &mut burst);
            }
            handled += process_from_linux(engine, snapshot, in_port, now_ns);
        }
        if engine.output.egress.peers.is_some() {
            handled += process_from_peers(engine, snapshot, now_ns);
        }
        if engine.datagrams.waiting() > 0 {
            expire_fragments(engine, now_ns);
        }
        let Engine { output: Output { egress, tally, .. }, neighbours, .. } = &mut *engine;
        self.announcements.send(egress, snapshot, &neighbours.ownership, now_ns, tally);
        egress.flush(tally);
        self.sweep.run(engine, snapshot, Tick::at(now_ns));
        if let Some(replication) = &mut self.replication {
            replication.end_poll(handled, &engine.flows.tables);
        }
        engine.publish_counters();
        if let Some(mailbox) = self.mailbox.as_ref().filter(|mailbox| mailbox.is_asked()) {
            mailbox.answer_one(|inquiry| answer(engine, snapshot, inquiry, now_ns));
        }
        if let Some(capture) = &mut engine.capture {
            capture.end_poll(handled, now_ns);
        }
        handled + replicated
    }
}

/// Carries out an inquiry that changes something, and answers it.
fn answer<P: Port, O: Observe<P::Buffer>>(engine: &mut Engine<P, O>, snapshot: &Snapshot, inquiry: &mut Inquiry, now_ns: u64) {
    match &mut inquiry.inquired {
        Inquired::End(ends) => end_all(engine, snapshot, ends, now_ns),
        Inquired::Watch(watch) => *watch = swap_watch(engine, watch.take()),
        Inquired::V4(_) | Inquired::V6(_) | Inquired::Capture(_) => {}
    }
    let Engine { flows: WorkerFlows { tables, ports, max_flows, .. }, capture, .. } = &mut *engine;
    inquiry.answer(&KnownFlows { tables, ports, snapshot, max_flows: *max_flows }, capture, now_ns);
    engine.is_looked_at = engine.capture.is_some() || engine.output.watching.is_some();
}

/// Processes the packets that the kernel sends by the port.
fn process_from_linux<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &Snapshot,
    port: PortIndex,
    now_ns: u64,
) -> usize {
    let Some(burst) = engine.output.egress.burst_of_linux(port) else { return 0 };
    let count = burst.len();
    engine.output.tally.received += count as u64;
    let from = ObservedFrom { port, source: PacketSource::Linux, tags: Tags::NONE, now_ns };
    let observed = observes(engine, count, false, now_ns);
    for (number, buffer) in burst.into_iter().enumerate() {
        if number < observed {
            observe_packet(engine, from, buffer, |engine, buffer| sent_by_linux(engine, snapshot, port, buffer, now_ns));
        } else {
            sent_by_linux(engine, snapshot, port, buffer, now_ns);
        }
    }
    count
}

/// Processes packets from other workers: some to decide on, some to transmit.
fn process_from_peers<P: Port, O: Observe<P::Buffer>>(engine: &mut Engine<P, O>, snapshot: &Snapshot, now_ns: u64) -> usize {
    let mut count = 0;
    for other in 0..engine.output.egress.peers.as_ref().map_or(0, Peers::others) {
        let before = count;
        while count - before < PACKETS_PER_TURN {
            let wanted = PACKETS_PER_TURN - (count - before);
            let taken = engine.output.egress.peers.as_mut().and_then(|peers| peers.take(other, wanted));
            let Some((port, task, mut burst)) = taken else { break };
            count += burst.len();
            engine.output.tally.handed_in += burst.len() as u64;
            let origin = match task {
                HandoverTask::Decide => {
                    burst.iter().for_each(Buffer::prefetch_metadata);
                    Origin::Owned
                }
                HandoverTask::FindOwner => Origin::OwnerUnknown,
                HandoverTask::Begin => Origin::Begun,
                HandoverTask::Send => {
                    burst.into_iter().for_each(|buffer| engine.output.egress.send(port, buffer, &mut engine.output.tally));
                    continue;
                }
            };
            let arrival = Arrival { link: port.into(), tags: Tags::NONE, now_ns, origin };
            process(engine, Ingress { snapshot, arrival }, &mut burst);
        }
    }
    count
}

/// Decides held packets again whose next hop is now resolved, and drops those that waited for too long. Resolution
/// depends on the snapshot alone, so they are checked only when there is a new one.
fn retry_queued<P: Port, O: Observe<P::Buffer>>(engine: &mut Engine<P, O>, snapshot: &Snapshot, now_ns: u64) {
    while let Some(waiting) = engine.neighbours.queue.expired(now_ns) {
        let arrival = Arrival { now_ns, ..waiting.arrival };
        drop_waiting(engine, arrival, waiting.buffer, DropReason::NeighbourUnresolved);
    }
    if !engine.neighbours.have_changed {
        return;
    }
    // All are released now: later packets of their flows do not wait.
    for _ in 0..engine.neighbours.queue.len().div_ceil(BURST) {
        let released = engine.neighbours.queue.release(|neighbour| snapshot.resolves(neighbour.link, neighbour.address));
        engine.neighbours.have_changed = released.is_full();
        for QueuedPacket { buffer, arrival, .. } in released {
            let arrival = Arrival { now_ns, origin: Origin::Owned, ..arrival };
            process_waited(engine, Ingress { snapshot, arrival }, buffer);
        }
        if !engine.neighbours.have_changed {
            break;
        }
    }
}

/// Drops the fragments whose first fragment did not arrive in time.
fn expire_fragments<P: Port, O: Observe<P::Buffer>>(engine: &mut Engine<P, O>, now_ns: u64) {
    while let Some(early) = engine.datagrams.expired(now_ns) {
        drop_waiting(engine, Arrival { now_ns, ..early.arrival }, early.buffer, DropReason::FragmentTimeout);
    }
}

/// Time in which the sweep visits each flow once: about 8.6 s, below the shortest idle limit of 10 s.
pub const SWEEP_TICKS: Ticks = Ticks(64);
/// Maximum number of flows that the sweep visits per poll, so that a poll stays short: 128 * 5 ns. It is twice the
/// number that a burst can create, so that flows end as fast as others begin.
#[allow(clippy::cast_possible_truncation)] // far below 2^32
pub const SWEPT_PER_POLL: u32 = 2 * BURST as u32;

/// The sweep: expiry by bounded work. The tables are visited once every [`SWEEP_TICKS`], a few entries per poll.
#[derive(Debug, Default)]
struct Sweep {
    /// The time of its last run; the first poll only records the time.
    last: Option<Tick>,
    /// Number of entries that are due for a visit.
    owed: u32,
    /// Where the next sweeps of the flow tables and of the SNAT pools start.
    next_v4: u32,
    next_v6: u32,
    next_pool: u32,
}

impl Sweep {
    /// SNAT pools visited per tick: 65,536 in 34 s.
    const POOLS: u32 = 256;

    fn run<P: Port, O>(&mut self, engine: &mut Engine<P, O>, snapshot: &Snapshot, now: Tick) {
        let elapsed = now.since(*self.last.get_or_insert(now)).0.min(SWEEP_TICKS.0);
        if elapsed > 0 {
            self.last = Some(now);
            let entries = engine.flows.tables.v4.high_water().max(engine.flows.tables.v6.high_water());
            self.owed = (self.owed + entries.div_ceil(SWEEP_TICKS.0) * elapsed).min(entries);
            self.next_pool = engine.flows.ports.sweep(self.next_pool, Self::POOLS, now);
            if engine.output.worker == 0 {
                snapshot.sweep_affinity(now);
            }
        }
        let entries = self.owed.min(SWEPT_PER_POLL);
        if entries > 0 {
            self.owed -= entries;
            let Engine { flows: WorkerFlows { tables, ports, limits, .. }, output, neighbours, .. } = engine;
            let neighbour_requests = &neighbours.requests;
            let (owned, counters) = (output.owned(), &*output.counters);
            let clients_to_ask = Cell::new(HANDSHAKES_ASKED);
            let mut rules = IdleRules { limits, snapshot, neighbour_requests, ports, counters, owned, now, clients_to_ask };
            self.next_v4 = tables.v4.sweep_by(self.next_v4, entries, snapshot.route_epoch(), &mut rules);
            rules.clients_to_ask.set(HANDSHAKES_ASKED);
            self.next_v6 = tables.v6.sweep_by(self.next_v6, entries, snapshot.route_epoch(), &mut rules);
        }
    }
}

/// The rules of a sweep over flows: idle limits and drains.
struct IdleRules<'a> {
    limits: &'a IdleLimits,
    snapshot: &'a Snapshot,
    neighbour_requests: &'a ArrayQueue<NeighbourRequest>,
    ports: &'a mut SnatPorts,
    counters: &'a WorkerCounters,
    owned: Owned<'a>,
    now: Tick,
    /// Number of flows in a handshake whose clients may still be asked for.
    clients_to_ask: Cell<u32>,
}

impl<A: Address> SweepRules<A> for IdleRules<'_> {
    #[inline(always)]
    fn fate_of_handshake(&self, flow: &HotFlow<A::Key>, state: FlowState) -> Fate {
        match self.snapshot.backends.exits().get(flow.backend()) {
            None => Fate::Unknown,
            Some(_) if self.limits.is_handshake_over(state, flow.idle(self.now)) => Fate::Over,
            Some(_) => {
                if self.clients_to_ask.get() > 0 {
                    self.clients_to_ask.set(self.clients_to_ask.get() - 1);
                    self.keep_opening_client::<A>(flow);
                }
                Fate::Stays
            }
        }
    }

    fn is_over(&mut self, flow: &Flow<A>, is_shadow: bool) -> bool {
        let ended = self.has_ended(flow, is_shadow);
        if !ended {
            self.keep_client(flow);
        }
        ended
    }

    fn refresh(&self, flow: &Flow<A>) -> Option<Ticks> {
        let idle_timeout = self.snapshot.backend(flow.backend)?.idle_timeout;
        let is_sent = is_sent_by(self.owned, self.snapshot, flow);
        is_sent.then(|| refresh_interval(self.limits.of(flow, idle_timeout)))
    }

    fn why(&self, backend: BackendId) -> FlowEnd {
        self.snapshot.backend(backend).map_or_else(|| why_without(self.snapshot, backend), |_| FlowEnd::Idle)
    }

    fn ended(&mut self, mode: FlowMode, state: FlowState, counted: CounterSlot, port: Option<(PoolId, u16)>) {
        if let Some((pool, port)) = port {
            self.ports.release(pool, port, self.now);
        }
        self.counters.flow_ended(counted);
        // A connection that never came about.
        let has_failed = mode.is_two_way() && (state.shakes_hands() || state == FlowState::SctpOpening);
        if has_failed {
            self.counters.at(counted).failed.add(1);
        }
    }
}

impl IdleRules<'_> {
    /// Whether the flow exceeded its idle limit, or its backend's drain has ended. The owner of a shadow flow sends the
    /// time of its last packet up to one interval late.
    fn has_ended<A: Address>(&self, flow: &Flow<A>, is_shadow: bool) -> bool {
        let Some(backend) = self.snapshot.backend(flow.backend) else {
            // The sides of a connection that is still in use get a RST in answer to the next packet.
            return flow.protocol != protocol::TCP || self.limits.is_silent(flow.last_seen, self.now);
        };
        self.limits.is_flow_over(flow, backend.idle_timeout, is_shadow, self.now)
    }

    /// As [`IdleRules::keep_client`] for a flow in a handshake, which has no route yet.
    #[cold]
    fn keep_opening_client<A: Address>(&self, flow: &HotFlow<A::Key>) {
        let client = flow.key(Direction::ToBackend).tuple(protocol::TCP).source;
        if flow.mode().is_two_way()
            && flow.idle(self.now) <= USED_WITHIN
            && let RouteTo::NextHop(slot) = self.snapshot.route(client)
            && let Some(hop) = self.snapshot.next_hop(slot).filter(|hop| hop.address == client.ip())
        {
            let _ = self.neighbour_requests.push((hop.link, hop.address));
        }
    }

    /// Requests the resolution of an on-link client while its flow is in use; otherwise the kernel would forget the
    /// neighbour, since it sees none of its packets. The kernel side resolves each at most every 30 s; a request that
    /// finds the queue full is repeated by the next sweep.
    fn keep_client<A: Address>(&self, flow: &Flow<A>) {
        let is_used = self.now.since(flow.last_seen) <= USED_WITHIN;
        // Flows of SCTP keep a tag in place of the route.
        let slot = if flow.protocol == protocol::SCTP && flow.mode.is_two_way() && is_used {
            let RouteTo::NextHop(slot) = self.snapshot.route(flow.client) else { return };
            slot
        } else {
            flow.route_to_client
        };
        if let Some(hop) = self.snapshot.next_hop(slot).filter(|_| is_used)
            && hop.address == flow.client.ip()
        {
            let _ = self.neighbour_requests.push((hop.link, hop.address));
        }
    }
}

/// Flows in a handshake whose clients a sweep asks for, in each poll and family. The lookup of a route costs as much as
/// the visit of twenty flows. A handshake may stay open because its answers go to an Ethernet address that the client
/// no longer has; where more handshakes are open, the next poll begins with others.
const HANDSHAKES_ASKED: u32 = 2;

/// A flow is in use if its last packet is at most this old: 75 ticks are 10 s, a little more than a sweep takes.
const USED_WITHIN: Ticks = Ticks(75);

//! One worker: polls its ports and twins, decides burst by burst, and sends. It never waits, locks, allocates, logs or
//! makes a system call of its own.
//!
//! A burst goes through three passes: parse all and touch their flow buckets, touch the flows found there, then decide
//! and rewrite. So the memory that one packet waits for is fetched while others are worked on.
//!
//! Where there are more workers, packets of their flows are handed to them after the first pass, and those that they hand
//! to this one go through all passes here ([`crate::steering`], [`crate::Peers`]).
//!
//! Invariant: every packet ends in one counted verdict, and the account closes (see [`crate::WorkerCounters`]).

use std::net::IpAddr;
use std::sync::Arc;

use arrayvec::ArrayVec;
use crossbeam_queue::ArrayQueue;

use crate::announce::Announcements;
use crate::answer::is_group_address;
use crate::apply::{Arrival, Engine, Looked, Origin, Swept, Tables};
use crate::datagrams::Datagrams;
use crate::flow::{Candidate, FlowTable, IdleLimits};
use crate::frame_filter::{FrameFilter, SentTo};
use crate::held::{Held, Waiting};
use crate::identification::Identifications;
use crate::lanes::{Lane, Lanes};
use crate::limiter::AnswerLimiter;
use crate::observe::Observe;
use crate::parse::{Carried, carried, ipv4, ipv6, parse};
use crate::peers::{Errand, Handed, PACKETS_PER_TURN, Peers};
use crate::publish::Subscriber;
use crate::snapshot::{Place, Snapshot};
use crate::snat::{PortShare, SnatPorts};
use crate::steering::steer;
use crate::tags::Tags;
use crate::tally::Tally;
use crate::tick::Tick;
use crate::twin_rate::TwinRate;
use crate::{
    Address, BURST, Buffer, Burst, DropReason, FlowLimits, Headers, Link, Parsed, Port, PortIndex, Transport, Tuple, TwinQueues,
    WorkerCounters,
};

/// A neighbour that Linux is asked to resolve: the link and the address.
pub type Ask = (Link, IpAddr);

/// A worker's queues of a port, with the rings of the port's twin where it has one.
pub type PortWithTwin<P, B> = (P, Option<Arc<TwinQueues<B>>>);

/// What a worker is made of.
#[derive(Debug)]
pub struct Parts<P: Port, O> {
    /// Its queues of each port, in the order of the configuration, with the rings of the port's twin.
    pub ports: Vec<PortWithTwin<P, P::Buffer>>,
    /// Where snapshots come from.
    pub subscriber: Subscriber,
    /// Limits of its flow tables.
    pub limits: FlowLimits,
    /// Its counters, shared with readers.
    pub counters: Arc<WorkerCounters>,
    /// Neighbours that it wants Linux to ask for.
    pub asks: Arc<ArrayQueue<Ask>>,
    /// The other workers of the gateway, if there are any.
    pub peers: Option<Peers<P::Buffer>>,
    /// Seed of the hashes of its tables, the same for all workers: random in a gateway, fixed in tests and `replay`.
    pub seed: u64,
    /// Sees each packet's end.
    pub observer: O,
}

/// There is no memory for the tables of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no memory for {flows} flows per worker: lower `flows.maxPerWorker`")]
pub struct NoMemory {
    /// As configured.
    pub flows: u32,
}

/// A worker. See the module.
#[derive(Debug)]
pub struct Worker<P: Port, O = ()> {
    engine: Engine<P::Buffer, O>,
    lanes: Lanes<P>,
    subscriber: Subscriber,
    announcements: Announcements,
    sweep: Sweep,
}

impl<P: Port, O: Observe<P::Buffer>> Worker<P, O> {
    /// Allocates all that the worker will ever use.
    ///
    /// # Errors
    /// There is no memory for its tables.
    pub fn new(parts: Parts<P, O>) -> Result<Self, NoMemory> {
        let limits = &parts.limits;
        let flows = limits.max_per_worker;
        let (worker, workers) = parts.peers.as_ref().map_or((0, 1), Peers::position);
        let share = parts.peers.as_ref().map_or_else(PortShare::whole, Peers::snat_share);
        let lanes = parts.ports.into_iter().map(|(port, twin)| Lane::new(port, twin)).collect();
        let engine = Engine {
            worker: parts.subscriber.worker(),
            v4: FlowTable::new(flows, parts.seed).map_err(|_| NoMemory { flows })?,
            v6: FlowTable::new(flows, parts.seed).map_err(|_| NoMemory { flows })?,
            ports: SnatPorts::new(flows, share).map_err(|_| NoMemory { flows })?,
            max_flows: flows,
            limits: IdleLimits::new(limits),
            held: Held::new(),
            held_may_go: false,
            datagrams: Datagrams::new(parts.seed),
            identifications: Identifications::new(parts.seed, worker, workers),
            limiter: AnswerLimiter::new(parts.seed),
            asks: parts.asks,
            tally: Tally::default(),
            counters: parts.counters,
            observer: parts.observer,
            twin_rate: TwinRate::default(),
            swept: Swept::default(),
        };
        Ok(Self {
            engine,
            lanes: Lanes::new(lanes, parts.peers),
            subscriber: parts.subscriber,
            announcements: Announcements::new(),
            sweep: Sweep::default(),
        })
    }

    /// Its counters.
    #[must_use]
    pub fn counters(&self) -> &Arc<WorkerCounters> {
        &self.engine.counters
    }

    /// The port at a position, for tests and `replay`.
    pub fn port_mut(&mut self, index: PortIndex) -> Option<&mut P> {
        self.lanes.lanes.get_mut(usize::from(index.0)).map(|lane| &mut lane.port)
    }

    /// The observer.
    pub fn observer_mut(&mut self) -> &mut O {
        &mut self.engine.observer
    }

    /// How snapshots reach it; a sleeping worker says so here.
    pub fn subscriber_mut(&mut self) -> &mut Subscriber {
        &mut self.subscriber
    }

    /// Handles what has arrived, at `now_ns` (monotonic, ns). Returns how many packets that were.
    pub fn poll(&mut self, now_ns: u64) -> usize {
        let changed = self.subscriber.refresh();
        let snapshot = self.subscriber.snapshot();
        let (engine, lanes) = (&mut self.engine, &mut self.lanes);
        if changed {
            engine.limits.follow(snapshot.shortest_idle_timeout());
            if lanes.peers.as_ref().is_none_or(Peers::announces) {
                self.announcements.wake();
            }
        }
        let mut handled = 0;
        for index in 0..lanes.lanes.len() {
            let in_port = PortIndex(u8::try_from(index).unwrap_or(u8::MAX));
            let mut burst = Burst::new();
            lanes.receive(in_port, &mut burst);
            handled += burst.len();
            engine.tally.received += burst.len() as u64;
            if !burst.is_empty() {
                let arrival = Arrival { link: in_port.into(), tags: Tags::NONE, now_ns, origin: Origin::Port };
                process(engine, lanes, snapshot, arrival, &mut burst);
            }
            handled += from_linux(engine, lanes, snapshot, in_port);
        }
        if lanes.peers.is_some() {
            handled += from_peers(engine, lanes, snapshot, now_ns);
        }
        if engine.held.len() > 0 {
            engine.held_may_go |= changed;
            retry_held(engine, lanes, snapshot, now_ns);
        }
        if engine.datagrams.waiting() > 0 {
            engine.expire_fragments(lanes, now_ns);
        }
        self.announcements.send(lanes, snapshot, now_ns, &mut engine.tally);
        lanes.flush(&mut engine.tally);
        self.sweep.run(engine, snapshot, Tick::at(now_ns));
        engine.publish_counters();
        handled
    }
}

/// ICMPv6 neighbour solicitation (RFC 4861 section 4.3).
const NEIGHBOUR_SOLICITATION: u8 = 135;

/// What a packet of a burst is.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    V4,
    V6,
    /// Of IPv6, too.
    Solicitation,
    Arp,
    /// With VLAN tags.
    Tagged,
    Other,
    /// For another station.
    Foreign,
    Bad(DropReason),
}

type AllLooked<A> = ArrayVec<Looked<A>, BURST>;

/// What is known of a burst: the kinds of its packets; headers and hashes of each family by themselves, in the same order.
#[derive(Default)]
pub(crate) struct Sorted {
    pub(crate) kinds: ArrayVec<Kind, BURST>,
    pub(crate) v4: AllLooked<u32>,
    pub(crate) v6: AllLooked<u128>,
}

/// The three passes over a burst.
fn process<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P::Buffer, O>,
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    arrival: Arrival,
    burst: &mut Burst<P::Buffer>,
) {
    let mut sorted = Sorted { kinds: ArrayVec::new(), v4: AllLooked::new(), v6: AllLooked::new() };
    let filter = FrameFilter::new(snapshot.port(arrival.link.port()).mac);
    sort(engine, filter, burst, &mut sorted);
    if arrival.origin == Origin::Port && lanes.peers.is_some() {
        steer(lanes, snapshot, arrival, burst, &mut sorted, &mut engine.tally);
    }
    sorted.v4.iter_mut().for_each(|looked| looked.candidate = engine.v4.candidate(looked.hash));
    sorted.v6.iter_mut().for_each(|looked| looked.candidate = engine.v6.candidate(looked.hash));
    if sorted.v4.len() == burst.len() {
        return dispose_all(engine, lanes, snapshot, arrival, burst, &sorted.v4);
    }
    if sorted.kinds.iter().all(|kind| matches!(kind, Kind::V6)) {
        return dispose_all(engine, lanes, snapshot, arrival, burst, &sorted.v6);
    }
    let (mut v4, mut v6) = (sorted.v4.iter(), sorted.v6.iter());
    let mut tagged = Burst::new();
    for (buffer, kind) in burst.drain(..).zip(sorted.kinds) {
        match kind {
            Kind::V4 => {
                if let Some(looked) = v4.next() {
                    engine.dispose(lanes, snapshot, arrival, buffer, looked);
                }
            }
            Kind::V6 => {
                if let Some(looked) = v6.next() {
                    engine.dispose(lanes, snapshot, arrival, buffer, looked);
                }
            }
            Kind::Solicitation => {
                if let Some(looked) = v6.next() {
                    engine.solicited(lanes, snapshot, arrival, buffer, &looked.headers);
                }
            }
            Kind::Arp => engine.arp(lanes, snapshot, arrival, buffer),
            Kind::Tagged => tagged.push(buffer),
            Kind::Other => engine.give_to_linux(lanes, snapshot, arrival, buffer),
            Kind::Foreign => foreign(engine, lanes, snapshot, arrival, buffer),
            Kind::Bad(reason) => engine.drop(lanes, buffer, reason),
        }
    }
    if !tagged.is_empty() {
        process_tagged(engine, lanes, snapshot, arrival, &mut tagged);
    }
}

/// Takes the tags off frames, and processes those of one link after another as bursts of their own. Behind two tags a third
/// is Linux's: then no frame here comes again.
#[inline(never)]
fn process_tagged<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P::Buffer, O>,
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    arrival: Arrival,
    burst: &mut Burst<P::Buffer>,
) {
    let mut run = Burst::new();
    let mut at = arrival;
    for mut buffer in burst.drain(..) {
        if !arrival.tags.is_none() {
            engine.give_to_linux(lanes, snapshot, arrival, buffer);
            continue;
        }
        let tags = Tags::of(buffer.bytes());
        let Some(link) = tags.link(arrival.link.port()).filter(|link| snapshot.knows(*link)) else {
            unknown_link(engine, lanes, snapshot, arrival, buffer);
            continue;
        };
        if tags != at.tags {
            process_run(engine, lanes, snapshot, at, &mut run);
            at = Arrival { link, tags, ..arrival };
        }
        tags.take_off(&mut buffer);
        run.push(buffer);
    }
    process_run(engine, lanes, snapshot, at, &mut run);
}

fn process_run<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P::Buffer, O>,
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    arrival: Arrival,
    run: &mut Burst<P::Buffer>,
) {
    if !run.is_empty() {
        process(engine, lanes, snapshot, arrival, run);
    }
}

/// A frame of a VLAN that Linux has no interface for: Linux's as it is, but nothing for the engine's own addresses. It is
/// not known whose they are on that VLAN.
fn unknown_link<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P::Buffer, O>,
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    arrival: Arrival,
    buffer: P::Buffer,
) {
    match destination(buffer.bytes(), snapshot) {
        Ok(Some(Place::Vip | Place::PoolUnused)) => engine.drop(lanes, buffer, DropReason::UnknownVip),
        Ok(Some(Place::Snat)) => engine.drop(lanes, buffer, DropReason::SnatWrongPort),
        // As of untagged packets: what is a VIP is not known yet, nor which VLANs there are.
        Ok(Some(_)) if !snapshot.ready() => engine.drop(lanes, buffer, DropReason::UnknownVip),
        Ok(_) => engine.give_to_linux(lanes, snapshot, arrival, buffer),
        Err(reason) => engine.drop(lanes, buffer, reason),
    }
}

/// A frame for another station. Linux may have an interface with that address above the twin, or a bridge; then it takes
/// the frame, but nothing that is for one of our addresses or frontends.
#[cold]
fn foreign<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P::Buffer, O>,
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    arrival: Arrival,
    buffer: P::Buffer,
) {
    let may_be_linuxs = || match parse(buffer.bytes()) {
        Ok(Parsed::V4(headers)) => is_linuxs(&headers, snapshot),
        Ok(Parsed::V6(headers)) => is_linuxs(&headers, snapshot),
        Ok(Parsed::Arp | Parsed::Other) => true,
        Err(_) => false,
    };
    if snapshot.is_promiscuous(arrival.link.port()) && may_be_linuxs() {
        engine.give_to_linux(lanes, snapshot, arrival, buffer);
    } else {
        engine.drop(lanes, buffer, DropReason::NotOurMac);
    }
}

/// Whether a packet is for nothing that the engine has.
fn is_linuxs<A: Address>(headers: &Headers<A>, snapshot: &Snapshot) -> bool {
    let Tuple { destination, destination_port, protocol, .. } = headers.tuple;
    let is_frontend = || snapshot.frontend(destination, protocol, destination_port).is_some();
    is_group_address(destination)
        || match snapshot.place(destination) {
            Place::Elsewhere | Place::Broadcast => true,
            Place::Twin(_) => !is_frontend(),
            Place::Vip | Place::Snat | Place::PoolUnused => false,
        }
}

/// What the address that a frame goes to is to us. None for a group, and where it carries no IP.
fn destination(frame: &[u8], snapshot: &Snapshot) -> Result<Option<Place>, DropReason> {
    fn place<A: Address>(headers: &Headers<A>, snapshot: &Snapshot) -> Option<Place> {
        let address = headers.tuple.destination;
        (!is_group_address(address)).then(|| snapshot.place(address))
    }
    Ok(match parse(frame)? {
        Parsed::V4(headers) => place(&headers, snapshot),
        Parsed::V6(headers) => place(&headers, snapshot),
        Parsed::Arp | Parsed::Other => None,
    })
}

/// The first pass. A function of its own, as is each loop over a burst: together they would not fit the registers.
#[inline(never)]
fn sort<B: Buffer, O>(engine: &Engine<B, O>, filter: FrameFilter, burst: &Burst<B>, sorted: &mut Sorted) {
    let Sorted { kinds, v4, v6 } = sorted;
    for buffer in burst {
        let frame = buffer.bytes();
        if !filter.is_for_port(frame) {
            kinds.push(unusual(engine, filter, frame, v4, v6));
            continue;
        }
        let found = match carried(frame, false) {
            Ok(Carried::V4(packet, group)) => ipv4(packet, group, |headers| look(&engine.v4, headers, v4, |_| Kind::V4)),
            Ok(Carried::V6(packet, group)) => ipv6(packet, group, |headers| look(&engine.v6, headers, v6, kind_v6)),
            Ok(Carried::Arp) => Ok(Some(Kind::Arp)),
            Ok(Carried::Tagged) => Ok(Some(Kind::Tagged)),
            Ok(Carried::Other) => Ok(None),
            Err(reason) => Err(reason),
        };
        kinds.push(match found {
            Ok(Some(kind)) => kind,
            Ok(None) => Kind::Other,
            Err(reason) => Kind::Bad(reason),
        });
    }
}

/// The kind of a frame that does not go to the port alone. Kept out of the way of those that do.
#[cold]
#[inline(never)]
fn unusual<B: Buffer, O>(
    engine: &Engine<B, O>,
    filter: FrameFilter,
    frame: &[u8],
    v4: &mut AllLooked<u32>,
    v6: &mut AllLooked<u128>,
) -> Kind {
    match filter.sent_to(frame) {
        Ok(SentTo::OtherStation) => return Kind::Foreign,
        Ok(SentTo::Group | SentTo::Port) if !Tags::of(frame).is_none() => return Kind::Tagged,
        Ok(SentTo::Group | SentTo::Port) => {}
        Err(reason) => return Kind::Bad(reason),
    }
    match parse(frame) {
        Ok(Parsed::V4(headers)) => look(&engine.v4, headers, v4, |_| Kind::V4),
        Ok(Parsed::V6(headers)) => look(&engine.v6, headers, v6, kind_v6),
        Ok(Parsed::Arp) => Kind::Arp,
        Ok(Parsed::Other) => Kind::Other,
        Err(reason) => Kind::Bad(reason),
    }
}

/// The third pass over a burst of one family, as most are.
#[inline(never)]
fn dispose_all<A: Address, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P::Buffer, O>,
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    arrival: Arrival,
    burst: &mut Burst<P::Buffer>,
    looked: &AllLooked<A>,
) where
    Engine<P::Buffer, O>: Tables<A>,
{
    for (buffer, looked) in burst.drain(..).zip(looked) {
        engine.dispose(lanes, snapshot, arrival, buffer, looked);
    }
}

fn kind_v6(transport: Transport) -> Kind {
    match transport {
        Transport::Icmp { kind: NEIGHBOUR_SOLICITATION, .. } => Kind::Solicitation,
        _ => Kind::V6,
    }
}

/// Keeps the headers of a packet, hashes its tuple and asks for the memory that it is looked up in.
#[inline(always)]
fn look<A: Address>(table: &FlowTable<A>, headers: Headers<A>, looked: &mut AllLooked<A>, kind: fn(Transport) -> Kind) -> Kind {
    let hash = table.hash(&headers.tuple);
    table.prefetch(hash);
    looked.push(Looked { headers, hash, candidate: Candidate::NONE });
    kind(headers.transport)
}

/// Takes what Linux sends by the port.
fn from_linux<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P::Buffer, O>,
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    port: PortIndex,
) -> usize {
    let Some(burst) = lanes.burst_of_linux(port) else { return 0 };
    let count = burst.len();
    engine.tally.received += count as u64;
    burst.into_iter().for_each(|buffer| engine.sent_by_linux(lanes, snapshot, port, buffer));
    count
}

/// Takes what other workers hand over: packets to decide on, and finished ones to send.
fn from_peers<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P::Buffer, O>,
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    now_ns: u64,
) -> usize {
    let mut count = 0;
    for other in 0..lanes.peers.as_ref().map_or(0, Peers::others) {
        let before = count;
        while count - before < PACKETS_PER_TURN {
            let Some(Handed { port, errand, mut burst }) = lanes.peers.as_ref().and_then(|peers| peers.take(other)) else {
                break;
            };
            count += burst.len();
            engine.tally.handed_in += burst.len() as u64;
            let origin = match errand {
                Errand::Decide => Origin::Owned,
                Errand::Meet => Origin::Met,
                Errand::Send => {
                    burst.into_iter().for_each(|buffer| lanes.send(port, buffer, &mut engine.tally));
                    continue;
                }
            };
            let arrival = Arrival { link: port.into(), tags: Tags::NONE, now_ns, origin };
            process(engine, lanes, snapshot, arrival, &mut burst);
        }
    }
    count
}

/// Decides held packets again whose next hop is known now, and drops those that waited too long. Whose next hop is known
/// depends on the snapshot alone, so they are looked at when there is another one.
fn retry_held<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P::Buffer, O>,
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    now_ns: u64,
) {
    while let Some(waiting) = engine.held.expired(now_ns) {
        engine.drop(lanes, waiting.buffer, DropReason::NeighbourUnresolved);
    }
    if !engine.held_may_go {
        return;
    }
    let released = engine.held.release(|awaited| snapshot.resolves(awaited.link, awaited.address));
    engine.held_may_go = released.is_full();
    for Waiting { buffer, arrival, .. } in released {
        let mut burst = Burst::new();
        burst.push(buffer);
        process(engine, lanes, snapshot, Arrival { now_ns, origin: Origin::Owned, ..arrival }, &mut burst);
    }
}

/// Expiry by bounded work: the tables are looked at once every [`Sweep::TICKS`], a few entries per poll.
#[derive(Debug, Default)]
struct Sweep {
    /// When it ran last; at the first poll it only takes note of the time.
    last: Option<Tick>,
    /// Entries that are due to be looked at.
    owed: u32,
}

impl Sweep {
    /// Ticks in which each entry is looked at once: about 8.6 s, below the shortest idle limit of 10 s.
    const TICKS: u32 = 64;
    /// Entries per poll at most, so that a poll stays short: 64 * 5 ns.
    const ENTRIES: u32 = 64;
    /// SNAT pools looked at per tick: 65,536 in 34 s.
    const POOLS: u32 = 256;

    fn run<B: Buffer, O: Observe<B>>(&mut self, engine: &mut Engine<B, O>, snapshot: &Snapshot, now: Tick) {
        let elapsed = now.since(*self.last.get_or_insert(now)).0.min(Self::TICKS);
        if elapsed > 0 {
            self.last = Some(now);
            let entries = engine.entries_used();
            self.owed = (self.owed + entries.div_ceil(Self::TICKS) * elapsed).min(entries);
            engine.sweep_pools(Self::POOLS, now);
            if engine.worker == 0 {
                snapshot.sweep_affinity(now);
            }
        }
        let entries = self.owed.min(Self::ENTRIES);
        if entries > 0 {
            self.owed -= entries;
            engine.expire(entries, snapshot, now);
        }
    }
}

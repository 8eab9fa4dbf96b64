//! The loop of the fast way for packets that open connections: of those the index shows that they have no flow. It
//! takes what most of them are: SYNs to a frontend of mode `nat` that chooses backends by hash, while there is room
//! for their flows and a rested port. It creates the flow and rewrites the packet. All
//! other packets are left, and nothing is changed for them.
//!
//! The first half of the loop decides on each packet of a part and prefetches what the second half writes.
//!
//! **Invariant:** for each packet that it takes, `decide` would create the same flow and forward the same bytes
//! (`tests/flows/openings.rs`).
//!
//! Not here: packets that begin flows otherwise (`decide::new_flow`).

use arrayvec::ArrayVec;

use super::follow::{FastFamily, PacketHead};
use super::record::{Record, STAYS};
use super::rewrite::{Progress, Rewritten};
use crate::flow::{BegunFlow, Candidate, Direction, FlowMode, SnatTarget, Tick};
use crate::forward::decide::{refused_source, unresolved_client};
use crate::forward::engine::Engine;
use crate::forward::observer::Observe;
use crate::icmp::UnresolvedNeighbour;
use crate::port::{Arrival, BURST, Origin, Port, PortIndex};
use crate::snapshot::{AddressRole, Backend, Frontend, RouteTo, Snapshot};
use crate::stats::{CounterSlot, FrontendNumber};
use crate::wire::{Address, Buffer, Tuple, TupleKey, is_martian, protocol};

/// Positions, as bits, of the packets of a part that open connections and have no flow.
#[inline(never)]
pub(super) fn openings(records: &[Record]) -> u32 {
    let opens = |record: &Record| record.opens() && record.candidate == Candidate::NONE;
    (0..).zip(records).filter(|(_, record)| opens(record)).fold(0, |positions, (at, _)| positions | 1 << at)
}

/// What the loop depends on besides packets and flows, and what it knows of the burst.
pub(super) struct Opening<'s> {
    snapshot: &'s Snapshot,
    arrival: Arrival,
    /// Hashes of the packets that were taken, whose flows are not in the index when later packets are looked up; and a bit
    /// for each, by which almost all others are told apart.
    taken: ArrayVec<u64, BURST>,
    taken_bits: [u64; 16],
    /// The frontend of the packet before, which most often is that of the next.
    last: Option<(FrontendOf, NumberedFrontend<'s>)>,
    /// For each family, the first and the last address ([`Address::wide`]) of the last range of routes in which a client was
    /// that is behind a router with a known Ethernet address. Other clients in it need no look at the routes.
    behind_router: [(u128, u128); 2],
}

/// First and last address of no range.
const NO_RANGE: (u128, u128) = (1, 0);

/// Address, as [`Address::wide`], and port of a frontend.
type FrontendOf = (u128, u16);
/// A frontend, and its number for the counters.
type NumberedFrontend<'s> = (&'s Frontend, FrontendNumber);

/// A packet that will open a connection.
struct Opens<K> {
    at: usize,
    /// Slot of its next hop.
    exit: u32,
    flow: BegunFlow<K>,
    port: u16,
}

impl<'s> Opening<'s> {
    pub(super) fn new(snapshot: &'s Snapshot, arrival: Arrival) -> Self {
        Self { snapshot, arrival, taken: ArrayVec::new(), taken_bits: [0; 16], last: None, behind_router: [NO_RANGE; 2] }
    }

    #[inline(always)]
    fn frontend<A: Address>(&mut self, tuple: &Tuple<A>) -> Option<NumberedFrontend<'s>> {
        let of = (tuple.destination.wide(), tuple.destination_port);
        match self.last {
            Some((last, frontend)) if last == of => Some(frontend),
            _ => {
                let frontend = self.snapshot.numbered_frontend(tuple.destination, protocol::TCP, tuple.destination_port)?;
                self.last = Some((of, frontend));
                Some(frontend)
            }
        }
    }

    /// The neighbour towards the client of this tuple, if it is not resolved.
    #[inline(always)]
    fn unresolved_client<A: Address>(&mut self, tuple: &Tuple<A>) -> Option<UnresolvedNeighbour> {
        let (first, last) = self.behind_router[A::FAMILY as usize];
        let client = tuple.source.wide();
        if first <= client && client <= last { None } else { self.look_for_client(tuple) }
    }

    #[inline(never)]
    fn look_for_client<A: Address>(&mut self, tuple: &Tuple<A>) -> Option<UnresolvedNeighbour> {
        let (behind_router, route) = self.snapshot.routes().to_range(tuple.source);
        if let (Some((first, last)), RouteTo::NextHop(slot)) = (behind_router, route)
            && self.snapshot.exit(slot).is_some()
        {
            self.behind_router[A::FAMILY as usize] = (first.wide(), last.wide());
            return None;
        }
        unresolved_client(self.snapshot, route, tuple)
    }

    /// Whether no packet with this hash was taken before or, as far as some bits of it tell, left.
    #[inline(always)]
    fn is_first(&self, hash: u64, left: u64) -> bool {
        let is_taken = self.taken_bits[(hash >> 6 & 15) as usize] >> (hash & 63) & 1 == 1 && self.is_taken(hash);
        left >> (hash & 63) & 1 == 0 && !is_taken
    }

    #[cold]
    fn is_taken(&self, hash: u64) -> bool {
        self.taken.contains(&hash)
    }

    #[inline(always)]
    fn take(&mut self, hash: u64) {
        self.taken_bits[(hash >> 6 & 15) as usize] |= 1 << (hash & 63);
        // There is room for all packets of a burst.
        let _ = self.taken.try_push(hash);
    }
}

impl<P: Port, O: Observe<P::Buffer>> Engine<P, O> {
    /// The loop, for the packets of one family in a part of a burst at the positions that are bits of `openings`.
    #[inline(always)]
    pub(super) fn open_part<A: Rewritten>(
        &mut self,
        opening: &mut Opening<'_>,
        part: &mut [P::Buffer],
        (records, openings): (&mut [Record], u32),
        progress: &mut Progress,
    ) {
        if openings != 0 {
            self.open_each::<A>(opening, part, (records, openings), progress);
        }
    }

    #[inline(never)]
    fn open_each<A: Rewritten>(
        &mut self,
        opening: &mut Opening<'_>,
        part: &mut [P::Buffer],
        (records, openings): (&mut [Record], u32),
        progress: &mut Progress,
    ) {
        let room = self.max_flows.saturating_sub(self.tables.v4.len() + self.tables.v6.len());
        let mut opens: ArrayVec<Opens<A::Key>, BURST> = ArrayVec::new();
        for (at, (record, buffer)) in records.iter().zip(&*part).enumerate() {
            if openings >> at & 1 == 0 || record.family() != A::RECORD {
                continue;
            }
            let may_open = opens.len() < room as usize && opening.is_first(record.hash, progress.left);
            if may_open && self.decide_opening::<A>(at, buffer, record, opening, &mut opens).is_some() {
                opening.take(record.hash);
            } else {
                progress.left |= 1 << (record.hash & 63);
                progress.add_port(STAYS);
            }
        }
        for open in &opens {
            if let (Some(record), Some(buffer)) = (records.get_mut(open.at), part.get_mut(open.at)) {
                let port = self.begin::<A>(opening, open, buffer, record);
                progress.opened += u64::from(port.is_some());
                record.way = port.map_or(STAYS, |port| port.0);
                progress.add_port(record.way);
            }
        }
    }

    /// Creates a flow, and rewrites its first packet. Returns the port by which it leaves; `None` if it is left.
    fn begin<A: Rewritten>(
        &mut self,
        opening: &Opening<'_>,
        open: &Opens<A::Key>,
        buffer: &mut P::Buffer,
        record: &mut Record,
    ) -> Option<PortIndex> {
        let now = Tick::at(opening.arrival.now_ns);
        let Ok(candidate) = A::split(&mut self.tables).0.begin(&open.flow, now) else {
            // The index has no room: the slow way says so.
            self.ports.release(open.flow.pool, open.port, now);
            return None;
        };
        record.candidate = candidate;
        self.tally.new_flows += 1;
        let counters = self.counters.at(CounterSlot::new(open.flow.backend.slot, open.flow.frontend));
        counters.flows.add(1);
        counters.new_flows.add(1);
        self.forward_opened::<A>(opening.snapshot, buffer, record, open.exit)
    }

    /// Decides on one packet, takes a SNAT port for it and adds it to those that open connections. `None`: it is left.
    #[inline(always)]
    fn decide_opening<A: FastFamily>(
        &mut self,
        at: usize,
        buffer: &P::Buffer,
        record: &Record,
        opening: &mut Opening<'_>,
        opens: &mut ArrayVec<Opens<A::Key>, BURST>,
    ) -> Option<()> {
        let head = A::Head::of(buffer.bytes(), record.network_offset.into())?;
        let (key, snapshot) = (A::key(head), opening.snapshot);
        let tuple = key.tuple(protocol::TCP);
        if tuple.source == tuple.destination || is_martian(tuple.source) {
            return None;
        }
        let arrival = opening.arrival;
        if arrival.origin == Origin::Met || self.other_owner(snapshot, arrival, record, &tuple).is_some() {
            return None;
        }
        let (frontend, number) = opening.frontend(&tuple)?;
        if frontend.mode() != FlowMode::Nat || !frontend.is_hashed() || !frontend.allows(tuple.source) {
            return None;
        }
        let id = frontend.choose_by_hash(&tuple)?;
        let backend = snapshot.backend(id)?;
        let target = reachable::<A>(snapshot, backend)?;
        if refused_source(tuple.source, snapshot).is_some() {
            return None;
        }
        let exit = snapshot.routes().slot_of(backend.next_hop, record.hash);
        let way = snapshot.routes().exit(exit)?;
        if record.packet_len > way.mtu || snapshot.mtu(record.link) != way.mtu {
            return None;
        }
        let port = backend.address.port();
        let towards = SnatTarget { slot: backend.target, address: target, port, protocol: protocol::TCP };
        let now = Tick::at(arrival.now_ns);
        let lease = self.ports.allocate_rested(towards, snapshot.snat(way.link, tuple.destination), record.hash >> 40, now)?;
        if let Some(neighbour) = opening.unresolved_client(&tuple) {
            self.ask(neighbour);
        }
        let reply = Tuple {
            source: target,
            destination: lease.address,
            source_port: port,
            destination_port: lease.port,
            protocol: protocol::TCP,
        };
        let keys = [key, A::Key::of(&reply)];
        let table = A::split(&mut self.tables).0;
        let hashes = [record.hash, table.hash_key(&keys[Direction::ToClient as usize], protocol::TCP)];
        let reply_hash = hashes[Direction::ToClient as usize];
        if table.is_replicated() && table.port_use(reply_hash, &keys[Direction::ToClient as usize], protocol::TCP).is_some() {
            // A shadow flow has the port, or had it a moment ago: the slow way tries others.
            self.ports.release(lease.pool, lease.port, now);
            return None;
        }
        table.prefetch(reply_hash);
        self.check_queue(arrival, buffer, record, &tuple);
        let initial_sequence = A::sequence(head);
        let flow = BegunFlow { keys, hashes, backend: id, frontend: number, pool: lease.pool, initial_sequence };
        opens.try_push(Opens { at, exit, flow, port: lease.port }).ok()
    }
}

/// The address of a backend, unless packets to it would return to the gateway.
#[inline(always)]
fn reachable<A: Address>(snapshot: &Snapshot, backend: &Backend) -> Option<A> {
    let target = A::from_ip(backend.address.ip())?;
    match snapshot.role(target) {
        AddressRole::Vip | AddressRole::Snat | AddressRole::PoolUnused => None,
        AddressRole::Twin(_) | AddressRole::Broadcast | AddressRole::Elsewhere => Some(target),
    }
}

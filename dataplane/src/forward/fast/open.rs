//! The loop of the fast path for packets that open connections: of those the index shows that they have no flow. It
//! takes what most of them are: SYNs to a frontend of mode `nat` that chooses backends by hash, while there is room
//! for their flows and a rested port. It creates the flow and rewrites the packet. All other packets are left, and
//! nothing is changed for them.
//!
//! It consists of four loops over a part: the first chooses a backend for each packet and prefetches its oldest SNAT port,
//! the second takes that port and prefetches the line of tags of the replies, the third finds room in the index, and the
//! fourth creates the flows and rewrites the packets. What is the same for many packets is kept from one to the next, that
//! of backends from one burst to the next (`backends`).
//!
//! **Invariant:** for each packet that it takes, `decide` would create the same flow and forward the same bytes
//! (`tests/flows/openings.rs`).
//!
//! Not here: packets that begin flows otherwise (`decide::new_flow`).

mod backends;

use arrayvec::ArrayVec;

use super::follow::{FastFamily, PacketHead};
use super::progress::Progress;
use super::record::{PART_MAX, Record, STAYS};
use super::rewrite::{Rewritten, framed, identification};
use crate::flow::{
    BackendId, BegunFlow, Candidate, Direction, FLOWS_FACTOR, FlowMode, IndexSlot, PoolId, SnatAddress, SnatLease, SnatTarget,
    Tick, may_grow,
};
use crate::forward::decide::{first_snat_address, may_lease, unresolved_client};
use crate::forward::engine::Engine;
use crate::forward::observer::{Observe, PacketFlow, PacketOutcome};
use crate::port::{Arrival, BURST, Link, Origin, Port, PortIndex};
use crate::snapshot::{Exit, Frontend, RouteTo, Snapshot};
use crate::stats::{FrontendNumber, ServiceNumber};
use crate::wire::{Address, Buffer, Tuple, TupleKey, protocol};
pub(in crate::forward) use backends::OpeningBackends;

/// Packets of a part, as flows.
#[allow(clippy::cast_possible_truncation)] // 32
const PARTS_ROOM: u32 = PART_MAX as u32;

/// Positions, as bits, of the packets of a part that open connections and have no flow.
#[inline(never)]
pub(super) fn openings(records: &[Record]) -> u32 {
    let opens = |record: &Record| record.opens() && record.candidate == Candidate::NONE;
    (0..).zip(records).filter(|(_, record)| opens(record)).fold(0, |positions, (at, _)| positions | 1 << at)
}

/// What the loop depends on besides packets and flows, and what it knows of the burst: the packets of one family.
pub(super) struct Opening<'s, A> {
    snapshot: &'s Snapshot,
    arrival: Arrival,
    now: Tick,
    /// Whether the packets may be of flows that other workers own.
    may_be_of_others: bool,
    /// The link by which the packet before arrived, and its MTU.
    arrived: (Link, u16),
    /// Free room in the flow table, if it is so little that services have shares of it.
    scarce_room: Option<u32>,
    /// Hashes of the packets that were taken, whose flows are not in the index when later packets are looked up; and a bit
    /// for each, by which almost all others are told apart.
    taken: ArrayVec<u64, BURST>,
    taken_bits: [u64; 16],
    /// The frontend of the packet before, which most often is that of the next.
    front: Option<OpeningFrontend<'s, A>>,
    /// The first and the last address around a client that are behind the same router, with a known Ethernet address, and
    /// may be clients too. Of no client at first.
    behind_router: (A, A),
}

/// A frontend at one of its addresses.
#[derive(Clone, Copy)]
struct OpeningFrontend<'s, A> {
    /// Its address and port.
    at: (A, u16),
    frontend: &'s Frontend,
    /// Its number for the counters.
    number: FrontendNumber,
    /// Whether the loop takes packets for it.
    is_taken: bool,
    has_source_ranges: bool,
    /// The link towards the backend of the packet before, and the SNAT addresses for it.
    snat: Option<(Link, &'s [SnatAddress<A>])>,
}

/// Where a client is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Client {
    /// Behind a router with a known Ethernet address.
    BehindRouter,
    /// A route tells.
    Elsewhere,
}

/// What was chosen for a packet that may open a connection.
struct Chosen<'s, A> {
    at: usize,
    exit: &'s Exit,
    /// See [`BackendId::packed_with`].
    backend: u32,
    service: ServiceNumber,
    /// The backend, and the SNAT addresses for it.
    towards: SnatTarget<A>,
    addresses: &'s [SnatAddress<A>],
    /// The position of the address that is tried first, its value, and its pool.
    first: usize,
    address: A,
    pool: PoolId,
    client: Client,
}

/// A packet that will open a connection.
struct Opens<'s, K> {
    at: usize,
    exit: &'s Exit,
    /// See [`BackendId::packed_with`].
    backend: u32,
    service: ServiceNumber,
    /// The replies, and their hash.
    reply: K,
    reply_hash: u64,
    /// The pool of its SNAT port.
    pool: PoolId,
    /// Room in the index, see [`BegunFlow::rooms`].
    rooms: [IndexSlot; 2],
}

impl<'s, A: Address> OpeningFrontend<'s, A> {
    #[inline(always)]
    fn snat(&mut self, snapshot: &'s Snapshot, link: Link) -> &'s [SnatAddress<A>] {
        match self.snat {
            Some((last, addresses)) if last == link => addresses,
            _ => {
                let addresses = snapshot.snat(link, self.at.0);
                self.snat = Some((link, addresses));
                addresses
            }
        }
    }
}

impl<'s, A: Address> Opening<'s, A> {
    fn new(snapshot: &'s Snapshot, arrival: Arrival, has_peers: bool) -> Self {
        Self {
            snapshot,
            arrival,
            now: Tick::at(arrival.now_ns),
            may_be_of_others: has_peers && arrival.origin == Origin::Port,
            arrived: (arrival.link, snapshot.mtu(arrival.link)),
            scarce_room: None,
            taken: ArrayVec::new(),
            taken_bits: [0; 16],
            front: None,
            behind_router: (A::from_wide(1), A::from_wide(0)),
        }
    }

    /// The frontend of a packet, if the loop takes packets for it.
    #[inline(always)]
    fn front(&mut self, tuple: &Tuple<A>) -> Option<&mut OpeningFrontend<'s, A>> {
        let at = (tuple.destination, tuple.destination_port);
        if self.front.as_ref().is_none_or(|front| front.at != at) {
            self.front = self.look_up_front(at);
        }
        self.front.as_mut().filter(|front| front.is_taken)
    }

    #[inline(never)]
    fn look_up_front(&self, at: (A, u16)) -> Option<OpeningFrontend<'s, A>> {
        let (frontend, number) = self.snapshot.numbered_frontend(at.0, protocol::TCP, at.1)?;
        let is_taken = frontend.mode() == FlowMode::Nat && frontend.is_hashed();
        Some(OpeningFrontend { at, frontend, number, is_taken, has_source_ranges: frontend.has_source_ranges(), snat: None })
    }

    /// Where a client is; `None` if packets from this address are not forwarded.
    #[inline(always)]
    fn client(&mut self, client: A) -> Option<Client> {
        let (first, last) = self.behind_router;
        if first <= client && client <= last { Some(Client::BehindRouter) } else { self.look_for_client(client) }
    }

    #[inline(never)]
    fn look_for_client(&mut self, client: A) -> Option<Client> {
        let clients = self.snapshot.clients_around(client)?;
        let (behind_router, route) = self.snapshot.routes().to_range(client);
        if let (Some((first, last)), RouteTo::NextHop(slot)) = (behind_router, route)
            && self.snapshot.exit(slot).is_some()
        {
            self.behind_router = (first.max(clients.0), last.min(clients.1));
            return Some(Client::BehindRouter);
        }
        Some(Client::Elsewhere)
    }

    /// MTU of the link by which a packet arrived.
    #[inline(always)]
    fn mtu(&mut self, link: Link) -> u16 {
        if self.arrived.0 != link {
            self.arrived = (link, self.snapshot.mtu(link));
        }
        self.arrived.1
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
    pub(super) fn open_part<'s, A: Rewritten>(
        &mut self,
        (snapshot, arrival): (&'s Snapshot, Arrival),
        opening: &mut Option<Opening<'s, A>>,
        part: &mut [P::Buffer],
        (records, openings): (&mut [Record], u32),
        progress: &mut Progress,
    ) {
        if openings != 0 {
            let has_peers = self.egress.peers.is_some();
            let opening = opening.get_or_insert_with(|| Opening::new(snapshot, arrival, has_peers));
            self.open_each(opening, part, (records, openings), progress);
        }
    }

    #[inline(never)]
    fn open_each<A: Rewritten>(
        &mut self,
        opening: &mut Opening<'_, A>,
        part: &mut [P::Buffer],
        (records, openings): (&mut [Record], u32),
        progress: &mut Progress,
    ) {
        let room = self.max_flows.saturating_sub(self.tables.v4.len() + self.tables.v6.len());
        // Packets that met here may be of others, and those that begin anew here are.
        let is_left = matches!(opening.arrival.origin, Origin::OwnerUnknown | Origin::Begun);
        let room = if is_left { 0 } else { room };
        // Half as much again as binds: the packets of this part may use it up.
        let is_scarce = opening.snapshot.has_many_services() && room < (self.max_flows / 16 * 3).saturating_add(PARTS_ROOM);
        opening.scarce_room = is_scarce.then_some(room);
        let room = room as usize;
        let mut chosen: ArrayVec<Chosen<'_, A>, PART_MAX> = ArrayVec::new();
        for (at, (record, buffer)) in records.iter().zip(&*part).enumerate() {
            if openings >> at & 1 == 0 || record.family() != A::RECORD {
                continue;
            }
            let may_open = chosen.len() < room && opening.is_first(record.hash, progress.left);
            if may_open && self.choose::<A>((at, record), buffer, opening, &mut chosen).is_some() {
                opening.take(record.hash);
            } else {
                progress.leave_one(record.hash);
            }
        }
        let mut opens: ArrayVec<Opens<'_, A::Key>, PART_MAX> = ArrayVec::new();
        for one in &chosen {
            let (Some(record), Some(buffer)) = (records.get(one.at), part.get(one.at)) else { continue };
            if self.take_port::<A>(one, (record, buffer), opening, &mut opens).is_none() {
                progress.leave_one(record.hash);
            }
        }
        let table = A::table(&self.tables);
        for open in &mut opens {
            if let Some(record) = records.get(open.at) {
                open.rooms = [record.hash, open.reply_hash].map(|hash| table.room_for(hash));
            }
        }
        for open in &opens {
            if let (Some(record), Some(buffer)) = (records.get_mut(open.at), part.get_mut(open.at)) {
                let port = self.begin::<A>(opening, open, buffer, record);
                progress.opened += u64::from(port.is_some());
                record.shape.way = port.map_or(STAYS, |port| port.0);
                progress.add_port(record.shape.way);
            }
        }
    }

    /// Chooses backend and SNAT pool for one packet, and adds it to those that may open connections. `None`: it is left.
    #[inline(always)]
    fn choose<'s, A: FastFamily>(
        &mut self,
        (at, record): (usize, &Record),
        buffer: &P::Buffer,
        opening: &mut Opening<'s, A>,
        chosen: &mut ArrayVec<Chosen<'s, A>, PART_MAX>,
    ) -> Option<()> {
        let head = A::Head::of(buffer.bytes(), record.shape.network_offset.into())?;
        let tuple = A::key(head).tuple(protocol::TCP);
        let (snapshot, arrival) = (opening.snapshot, opening.arrival);
        let client = opening.client(tuple.source)?;
        if opening.may_be_of_others && self.other_owner(snapshot, arrival, record, &tuple).is_some() {
            return None;
        }
        let arrival_mtu = opening.mtu(record.link);
        let front = opening.front(&tuple)?;
        if front.has_source_ranges && !front.frontend.allows(tuple.source) {
            return None;
        }
        let (frontend, number) = (front.frontend, front.number);
        let id = frontend.hashed_backend(&tuple)?;
        let backend = self.opening_backends.get::<A>(snapshot, id)?;
        let exit = snapshot.routes().exit(snapshot.routes().slot_of(backend.next_hop, record.hash))?;
        if record.shape.packet_len > exit.mtu || arrival_mtu != exit.mtu {
            return None;
        }
        let addresses = front.snat(snapshot, exit.link);
        if let Some(room) = opening.scarce_room {
            // As if all that were chosen before were flows of this service.
            let before = u32::try_from(chosen.len()).unwrap_or(u32::MAX);
            let held = self.counters.flows_of_service(frontend.number).saturating_add(before);
            if !may_grow(held, room.saturating_sub(before), FLOWS_FACTOR) {
                return None;
            }
        }
        let first = first_snat_address(record.hash, addresses.len());
        let &SnatAddress { address, index } = addresses.get(first)?;
        let pool = PoolId::new(backend.target, index);
        self.ports.prefetch_oldest(pool);
        let towards =
            SnatTarget { slot: backend.target, address: backend.address(), port: backend.port, protocol: protocol::TCP };
        let (backend, service) = (id.packed_with(number), frontend.number);
        chosen.try_push(Chosen { at, exit, backend, service, towards, addresses, first, address, pool, client }).ok()
    }

    /// Takes a SNAT port for one packet and adds it to those that open connections. `None`: it is left.
    #[inline(always)]
    fn take_port<'s, A: FastFamily>(
        &mut self,
        one: &Chosen<'s, A>,
        (record, buffer): (&Record, &P::Buffer),
        opening: &Opening<'s, A>,
        opens: &mut ArrayVec<Opens<'s, A::Key>, PART_MAX>,
    ) -> Option<()> {
        let &Chosen { at, exit, backend, service, towards, addresses, first, address, pool, client } = one;
        let (snapshot, arrival, now) = (opening.snapshot, opening.arrival, opening.now);
        let tuple = || Some(A::key(A::Head::of(buffer.bytes(), record.shape.network_offset.into())?).tuple(protocol::TCP));
        if self.ports.is_shared(pool) {
            let table = A::split(&mut self.tables).0;
            if !may_lease((table, &self.ports), tuple()?.source, towards.slot, addresses) {
                return None;
            }
        }
        let port = self.ports.take_rested(pool, now).or_else(|| self.ports.take_unused(pool, &towards, address));
        let lease = match port {
            Some(port) => SnatLease { address, port, pool },
            None => self.ports.allocate_rested(towards, addresses, first, now)?,
        };
        if client == Client::Elsewhere
            && let Some(tuple) = tuple()
            && let Some(neighbour) = unresolved_client(snapshot, snapshot.route(tuple.source), &tuple)
        {
            self.ask(neighbour);
        }
        let reply = A::Key::of(&Tuple {
            source: towards.address,
            destination: lease.address,
            source_port: towards.port,
            destination_port: lease.port,
            protocol: protocol::TCP,
        });
        let table = A::split(&mut self.tables).0;
        let reply_hash = table.hash_key(&reply, protocol::TCP);
        if table.is_replicated() && table.port_use(reply_hash, &reply, protocol::TCP).is_some() {
            // A shadow flow has the port, or had it a moment ago: the slow path tries others.
            self.ports.release(lease.pool, lease.port, now);
            return None;
        }
        table.prefetch(reply_hash);
        if opening.may_be_of_others
            && let Some(tuple) = tuple()
        {
            self.observe_queue(arrival, buffer, record, &tuple);
        }
        opens
            .try_push(Opens { at, exit, backend, service, reply, reply_hash, pool: lease.pool, rooms: [IndexSlot::NONE; 2] })
            .ok()
    }

    /// Creates a flow, rewrites its first packet and counts both. Returns the port by which it leaves; `None` if it is left.
    #[inline(always)]
    fn begin<A: Rewritten>(
        &mut self,
        opening: &Opening<'_, A>,
        open: &Opens<'_, A::Key>,
        buffer: &mut P::Buffer,
        record: &mut Record,
    ) -> Option<PortIndex> {
        let head = A::Head::of(buffer.bytes(), record.shape.network_offset.into())?;
        let from = A::key(head);
        let flow = BegunFlow {
            keys: [&from, &open.reply],
            hashes: [record.hash, open.reply_hash],
            rooms: open.rooms,
            backend: open.backend,
            pool: open.pool,
            initial_sequence: A::sequence(head),
        };
        let table = A::split(&mut self.tables).0;
        let Ok(candidate) = table.begin(&flow, opening.now) else {
            // The index has no room: the slow path says so.
            let port = open.reply.tuple(protocol::TCP).destination_port;
            self.ports.release(open.pool, port, opening.now);
            return None;
        };
        record.candidate = candidate;
        self.tally.new_flows += 1;
        let slot = BackendId::counter_slot(open.backend);
        self.counters.flow_began(slot, open.service);
        let counters = self.counters.at(slot);
        let exit = open.exit;
        let identification = identification::<A>(&mut self.identifications, &open.reply, record);
        let begun = table.hot_parts(false).flows.get(candidate.entry().0);
        let change = || begun.map_or(0, |flow| flow.change_of_sum(Direction::ToBackend));
        A::rewrite(framed::<A>(buffer, exit, record)?, &open.reply, change, false, identification);
        if record.shape.is_padded() {
            buffer.truncate(exit.link_bytes() + usize::from(record.shape.packet_len));
        }
        counters.forwarded(false, record.shape.packet_len);
        self.observer.observe(buffer, PacketOutcome::Forward(exit.port), || {
            let Tuple { destination: vip, destination_port: port, protocol, .. } = from.tuple(protocol::TCP);
            Some(PacketFlow { vip: vip.ip(), port, protocol, backend: BackendId::unpacked(open.backend) })
        });
        if O::METERS {
            let meters = &mut table.hot_parts(true).meters;
            meters.count(candidate.entry().0, Direction::ToBackend, record.shape.packet_len);
        }
        Some(exit.port)
    }
}

//! Opens the flows of connections: of packets that have no flow by the index. It takes SYNs as most are: to a frontend of mode
//! `nat` that chooses backends by hash, while there is room for their flows and a rested port. It creates the flow, plans the
//! packet and has it written. All other packets are left, and nothing is changed for them. A packet is left with its flow
//! opened if its buffer has no room for the tags of its exit: the slow path finds the flow.
//!
//! Four loops over a part: the first chooses a backend for each packet and prefetches its oldest SNAT port, the second takes
//! that port and prefetches the line of tags of the replies, the third finds room in the index, and the fourth creates the
//! flows. Lookups that most packets share are kept from one packet to the next, backends from one burst to the next
//! (`backends`).
//!
//! Each step is decided on by the function that `decide` calls: the scheduler by hash, addresses of backends, exits, SNAT
//! addresses and ports, shares. The loops fetch ahead what these read, and leave packets whose step needs another flow to
//! yield (docs/internals/decisions/0165).
//!
//! **Invariant:** for each packet that it takes, `decide` would create the same flow and forward the same bytes
//! (`tests/flows/openings.rs`).
//!
//! Not here: packets that begin flows otherwise (`decide::new_flow`).

pub(super) mod backends;

use arrayvec::ArrayVec;

use super::execute::{ExecutedFamily, executor};
use super::hand_over::{observe_queue, owner_elsewhere};
use super::plan::{Plan, operation};
use super::turns::PART_MAX;
use crate::flow::{BackendId, BegunFlow, FLOWS_FACTOR, FlowMode, IndexSlot, PoolId, SnatAddress, SnatTarget, Tick, may_grow};
use crate::forward::decide::{WorkerFlows, exit_by, first_snat_address, may_lease, unresolved_client};
use crate::forward::engine::Engine;
use crate::forward::observer::Observe;
use crate::forward::sort::Ingress;
use crate::port::{BURST, Link, Origin, Port};
use crate::snapshot::{Exit, Frontend, RouteTo, Snapshot};
use crate::stats::{FrontendNumber, ServiceNumber};
use crate::wire::plain::head::{Head, tuple_at};
use crate::wire::processor::SetBits;
use crate::wire::{Address, Buffer, Shape, Tuple, TupleKey, protocol};

/// Packets of a part, as flows.
#[allow(clippy::cast_possible_truncation)] // 32
const PARTS_ROOM: u32 = PART_MAX as u32;

/// The packets of a burst that open connections, by family. Empty until there is one.
pub(super) struct Openings<'s> {
    at: Ingress<'s>,
    has_peers: bool,
    v4: Option<Opening<'s, u32>>,
    v6: Option<Opening<'s, u128>>,
    opened: u64,
}

impl<'s> Openings<'s> {
    pub(super) fn new(at: Ingress<'s>, has_peers: bool) -> Self {
        Self { at, has_peers, v4: None, v6: None, opened: 0 }
    }

    /// Number of connections that were opened.
    pub(super) fn opened(&self) -> u64 {
        self.opened
    }
}

/// What the opening of connections depends on besides packets and flows, and what it knows of the burst: the packets of one
/// family.
struct Opening<'s, A> {
    at: Ingress<'s>,
    now: Tick,
    /// Whether the packets may be of flows that other workers own.
    may_be_of_others: bool,
    /// The link by which the packet before arrived, and its MTU.
    arrived_by: Link,
    arrival_mtu: u16,
    /// Free room in the flow table, if it is so little that services have shares of it.
    scarce_room: Option<u32>,
    /// Hashes of the packets that were taken, whose flows are not in the index when later packets are looked up; and a bit
    /// for each, by which almost all others are told apart.
    taken: ArrayVec<u64, BURST>,
    taken_bits: [u64; 16],
    /// The frontend of the packet before, which most often is that of the next.
    frontend: Option<OpeningFrontend<'s, A>>,
    /// The first and the last address around a client that are behind the same router, with a known Ethernet address, and
    /// may be clients too. Of no client at first.
    behind_router: [A; 2],
}

/// A frontend at one of its addresses.
struct OpeningFrontend<'s, A> {
    address: A,
    port: u16,
    frontend: &'s Frontend,
    /// Its number for the counters.
    number: FrontendNumber,
    /// Whether packets for it are taken.
    is_taken: bool,
    has_source_ranges: bool,
    /// The link towards the backend of the packet before, and the SNAT addresses for it.
    snat_link: Option<Link>,
    snat: &'s [SnatAddress<A>],
}

impl<'s, A: Address> OpeningFrontend<'s, A> {
    #[inline(never)]
    fn of(snapshot: &'s Snapshot, address: A, port: u16) -> Option<Self> {
        let (frontend, number) = snapshot.numbered_frontend(address, protocol::TCP, port)?;
        let is_taken = frontend.mode() == FlowMode::Nat && frontend.is_hashed() && frontend.proxy_protocol().is_none();
        let has_source_ranges = frontend.has_source_ranges();
        Some(Self { address, port, frontend, number, is_taken, has_source_ranges, snat_link: None, snat: &[] })
    }

    #[inline(always)]
    fn snat(&mut self, snapshot: &'s Snapshot, link: Link) -> &'s [SnatAddress<A>] {
        if self.snat_link != Some(link) {
            (self.snat_link, self.snat) = (Some(link), snapshot.snat(link, self.address));
        }
        self.snat
    }
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
    position: usize,
    exit: &'s Exit,
    /// See [`BackendId::packed_with`].
    backend: u32,
    service: ServiceNumber,
    /// The backend, and the SNAT addresses for it.
    towards: SnatTarget<A>,
    addresses: &'s [SnatAddress<A>],
    /// The position of the address that is tried first, and its pool.
    first: usize,
    pool: PoolId,
    client: Client,
}

/// A packet that will open a connection.
struct Opens<'s, K> {
    position: usize,
    exit: &'s Exit,
    /// See [`BackendId::packed_with`].
    backend: u32,
    service: ServiceNumber,
    reply: K,
    reply_hash: u64,
    /// The pool of its SNAT port.
    pool: PoolId,
    /// Room in the index, see [`BegunFlow::rooms`].
    rooms: [IndexSlot; 2],
}

impl<'s, A: Address> Opening<'s, A> {
    fn new(at: Ingress<'s>, has_peers: bool) -> Self {
        let Ingress { snapshot, arrival } = at;
        Self {
            at,
            now: Tick::at(arrival.now_ns),
            may_be_of_others: has_peers && arrival.origin == Origin::Port,
            arrived_by: arrival.link,
            arrival_mtu: snapshot.mtu(arrival.link),
            scarce_room: None,
            taken: ArrayVec::new(),
            taken_bits: [0; 16],
            frontend: None,
            behind_router: [A::from_wide(1), A::from_wide(0)],
        }
    }

    /// The frontend of a packet, if packets for it are taken.
    #[inline(always)]
    fn frontend(&mut self, tuple: &Tuple<A>) -> Option<&mut OpeningFrontend<'s, A>> {
        let (address, port) = (tuple.destination, tuple.destination_port);
        if self.frontend.as_ref().is_none_or(|frontend| (frontend.address, frontend.port) != (address, port)) {
            self.frontend = OpeningFrontend::of(self.at.snapshot, address, port);
        }
        self.frontend.as_mut().filter(|frontend| frontend.is_taken)
    }

    /// Where a client is; `None` if packets from this address are not forwarded.
    #[inline(always)]
    fn client(&mut self, client: A) -> Option<Client> {
        let [first, last] = self.behind_router;
        if first <= client && client <= last { Some(Client::BehindRouter) } else { self.find_client(client) }
    }

    #[inline(never)]
    fn find_client(&mut self, client: A) -> Option<Client> {
        let snapshot = self.at.snapshot;
        let clients = snapshot.clients_around(client)?;
        let (behind_router, route) = snapshot.routes().to_range(client);
        if let (Some((first, last)), RouteTo::NextHop(slot)) = (behind_router, route)
            && snapshot.exit(slot).is_some()
        {
            self.behind_router = [first.max(clients.0), last.min(clients.1)];
            return Some(Client::BehindRouter);
        }
        Some(Client::Elsewhere)
    }

    /// MTU of the link by which a packet arrived.
    #[inline(always)]
    fn mtu(&mut self, link: Link) -> u16 {
        if self.arrived_by != link {
            (self.arrived_by, self.arrival_mtu) = (link, self.at.snapshot.mtu(link));
        }
        self.arrival_mtu
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

/// Opens the connections of packets at positions of a part, and writes these. The others are left.
#[inline(never)]
pub(super) fn open_part<'s, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    openings: &mut Openings<'s>,
    left: &mut u64,
    positions: u32,
    part: &mut [P::Buffer],
    plans: &mut [Plan],
) {
    let Openings { at, has_peers, v4, v6, opened } = openings;
    let is_v4 = |position: &usize| plans[*position].head.shape.family() == Shape::V4;
    let of_v4 = SetBits(positions).filter(is_v4).fold(0, |all, position| all | 1_u32 << position);
    if of_v4 != 0 {
        let opening = v4.get_or_insert_with(|| Opening::new(*at, *has_peers));
        *opened += open_family::<u32, _, _>(engine, opening, left, of_v4, part, plans);
    }
    if of_v4 != positions {
        let opening = v6.get_or_insert_with(|| Opening::new(*at, *has_peers));
        *opened += open_family::<u128, _, _>(engine, opening, left, positions & !of_v4, part, plans);
    }
}

/// The same for the packets of one family.
#[inline(never)]
fn open_family<'s, A: ExecutedFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    opening: &mut Opening<'s, A>,
    left: &mut u64,
    positions: u32,
    part: &mut [P::Buffer],
    plans: &mut [Plan],
) -> u64 {
    let room = engine.flows.room();
    // Packets that met here may be of others, and those that begin anew here are.
    let is_left = matches!(opening.at.arrival.origin, Origin::OwnerUnknown | Origin::Begun);
    let room = if is_left { 0 } else { room };
    // Half as much again as binds: the packets of this part may use it up.
    let is_scarce =
        opening.at.snapshot.has_many_services() && room < (engine.flows.max_flows / 16 * 3).saturating_add(PARTS_ROOM);
    opening.scarce_room = is_scarce.then_some(room);
    let room = room as usize;
    let mut chosen: ArrayVec<Chosen<'_, A>, PART_MAX> = ArrayVec::new();
    for position in SetBits(positions) {
        let (plan, buffer) = (&plans[position], &part[position]);
        let may_open = chosen.len() < room && opening.is_first(plan.head.hash, *left);
        if may_open && choose::<A, _, _>(engine, position, plan, buffer, opening, &mut chosen).is_some() {
            opening.take(plan.head.hash);
        } else {
            *left |= plan.flow_bit();
        }
    }
    let mut opens: ArrayVec<Opens<'_, A::Key>, PART_MAX> = ArrayVec::new();
    for one in &chosen {
        let (plan, buffer) = (&plans[one.position], &part[one.position]);
        if take_port::<A, _, _>(engine, one, plan, buffer, opening, &mut opens).is_none() {
            *left |= plan.flow_bit();
        }
    }
    let table = A::table(&engine.flows.tables);
    for open in &mut opens {
        open.rooms = [plans[open.position].head.hash, open.reply_hash].map(|hash| table.room_for(hash));
    }
    let (snapshot, mut opened) = (opening.at.snapshot, 0);
    for open in &opens {
        let (buffer, plan) = (&mut part[open.position], &mut plans[open.position]);
        if begin::<A, _, _>(engine, opening.now, open, buffer, plan).is_none() {
            *left |= plan.flow_bit();
        } else if executor(engine, snapshot).one::<A, _>(buffer, plan, open.exit).is_some() {
            opened += 1;
        } else {
            plan.stays();
            *left |= plan.flow_bit();
        }
    }
    opened
}

/// Chooses backend and SNAT pool for one packet, and adds it to those that may open connections. `None`: it is left.
#[inline(always)]
fn choose<'s, A: ExecutedFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    position: usize,
    plan: &Plan,
    buffer: &P::Buffer,
    opening: &mut Opening<'s, A>,
    chosen: &mut ArrayVec<Chosen<'s, A>, PART_MAX>,
) -> Option<()> {
    let tuple = tuple_at::<A>(buffer.bytes(), plan.head.shape.network_offset.into(), protocol::TCP)?;
    let at = opening.at;
    let snapshot = at.snapshot;
    let client = opening.client(tuple.source)?;
    if opening.may_be_of_others && owner_elsewhere(&mut engine.output.egress, at, plan, &tuple).is_some() {
        return None;
    }
    let arrival_mtu = opening.mtu(plan.link);
    let of = opening.frontend(&tuple)?;
    if of.has_source_ranges && !of.frontend.allows(tuple.source) {
        return None;
    }
    let (frontend, number) = (of.frontend, of.number);
    let id = frontend.hashed_backend(&tuple)?;
    let backend = engine.fast.backends.get::<A>(snapshot, id)?;
    let exit = exit_by(snapshot, backend.next_hop, plan.head.hash).ok()?;
    if plan.head.shape.packet_len > exit.mtu || arrival_mtu != exit.mtu {
        return None;
    }
    let addresses = of.snat(snapshot, exit.link);
    if let Some(room) = opening.scarce_room {
        // As if all that were chosen before were flows of this service.
        let before = u32::try_from(chosen.len()).unwrap_or(u32::MAX);
        let held = engine.output.counters.flows_of_service(frontend.number).saturating_add(before);
        if !may_grow(held, room.saturating_sub(before), FLOWS_FACTOR) {
            return None;
        }
    }
    let first = first_snat_address(plan.head.hash, addresses.len());
    let pool = PoolId::new(backend.target, addresses.get(first)?.index);
    engine.flows.ports.prefetch_oldest(pool);
    let towards = SnatTarget { slot: backend.target, address: backend.address(), port: backend.port, protocol: protocol::TCP };
    let (backend, service) = (id.packed_with(number), frontend.number);
    let one = Chosen { position, exit, backend, service, towards, addresses, first, pool, client };
    chosen.try_push(one).ok()
}

/// Takes a SNAT port for one packet and adds it to those that open connections. `None`: it is left.
#[inline(always)]
fn take_port<'s, A: ExecutedFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    one: &Chosen<'s, A>,
    plan: &Plan,
    buffer: &P::Buffer,
    opening: &Opening<'s, A>,
    opens: &mut ArrayVec<Opens<'s, A::Key>, PART_MAX>,
) -> Option<()> {
    let &Chosen { position, exit, backend, service, towards, addresses, first, pool, client } = one;
    let (snapshot, now) = (opening.at.snapshot, opening.now);
    let tuple = || tuple_at::<A>(buffer.bytes(), plan.head.shape.network_offset.into(), protocol::TCP);
    if engine.flows.ports.is_shared(pool) {
        let WorkerFlows { tables, ports, .. } = &mut engine.flows;
        if !may_lease(A::split(tables).0, ports, tuple()?.source, towards.slot, addresses) {
            return None;
        }
    }
    let lease = engine.flows.ports.allocate_rested(towards, addresses, first, now)?;
    if client == Client::Elsewhere
        && let Some(tuple) = tuple()
        && let Some(neighbour) = unresolved_client(snapshot, snapshot.route(tuple.source), &tuple)
    {
        engine.neighbours.ask(neighbour);
    }
    let reply = A::Key::of(&Tuple {
        source: towards.address,
        destination: lease.address,
        source_port: towards.port,
        destination_port: lease.port,
        protocol: protocol::TCP,
    });
    let table = engine.flows.table::<A>();
    let reply_hash = table.hash_key(&reply, protocol::TCP);
    if table.is_replicated() && table.port_use(reply_hash, &reply, protocol::TCP).is_some() {
        // A shadow flow has the port, or had it a moment ago: the slow path tries others.
        engine.flows.ports.release(lease.pool, lease.port, now);
        return None;
    }
    table.prefetch(reply_hash);
    if opening.may_be_of_others
        && let Some(tuple) = tuple()
    {
        observe_queue(&mut engine.output.egress, opening.at.arrival, buffer, plan, &tuple);
    }
    let rooms = [IndexSlot::NONE; 2];
    opens.try_push(Opens { position, exit, backend, service, reply, reply_hash, pool: lease.pool, rooms }).ok()
}

/// Creates a flow and plans its first packet. `None`: it is left.
#[inline(always)]
fn begin<'s, A: ExecutedFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    now: Tick,
    open: &Opens<'s, A::Key>,
    buffer: &P::Buffer,
    plan: &mut Plan,
) -> Option<()> {
    let head = A::Head::of(buffer.bytes(), plan.head.shape.network_offset.into())?;
    let from = A::key(head);
    let flow = BegunFlow {
        keys: [&from, &open.reply],
        hashes: [plan.head.hash, open.reply_hash],
        rooms: open.rooms,
        backend: open.backend,
        pool: open.pool,
        initial_sequence: A::sequence(head),
    };
    let Ok(candidate) = engine.flows.table::<A>().begin(&flow, now) else {
        // The index has no room: the slow path says so.
        let port = open.reply.tuple(protocol::TCP).destination_port;
        engine.flows.ports.release_clean(open.pool, port, now);
        return None;
    };
    plan.flow = candidate;
    plan.leaves(open.exit, operation::HOP | operation::TRANSLATE);
    engine.output.tally.new_flows += 1;
    engine.output.counters.flow_began(BackendId::counter_slot(open.backend), open.service);
    Some(())
}

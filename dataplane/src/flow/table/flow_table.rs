//! The flow table of one worker and one family: entries, and an index of both directions.
//!
//! **Invariant:** memory is reserved at construction and never later. Entries are first used in order, so unneeded
//! memory is never touched.
//!
//! Not here: time. The caller decides when to sweep and which flows to end.

use std::sync::Arc;

use arrayvec::ArrayVec;

use crate::flow::advance;
use crate::flow::entry::Flow;
use crate::flow::index::{Guess, Homes, Index, IndexSlot};
use crate::flow::shares::ClientPorts;
use crate::flow::snat::PoolId;
use crate::flow::state::{Direction, FlowState, Shift, YieldClass};
use crate::flow::storage::{
    AssociationNote, BegunFlow, FlowEnd, FlowRecords, FlowReplication, FlowWatch, GroupHolder, HotFlow, HotFlows, Replicator,
    Storage,
};
use crate::flow::tick::{Tick, Ticks};
use crate::flow::transitions::Segment;
use crate::flow::yield_order::{FLOWS_MAX, Order};
use crate::wire::processor::{AnyProcessor, Avx2, Compare, LANES, Lanes};
use crate::wire::{Address, Transport, Tuple, TupleHash, TupleKey, tcp_flags};

/// Largest number of flows that a worker looks at when a group was lost, all in one poll.
const HANDSHAKES_MAX: usize = 4096;

/// Position of a flow in its table, valid from its insertion to its removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowIndex(pub(super) u32);

/// The probable position of a tuple's flow, passed from the second pass over a burst to the third.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate(u32);

impl Candidate {
    /// No candidate: a table has at most 2^26 entries, so every valid value is lower.
    pub const NONE: Self = Self(u32::MAX);
    /// No candidate yet: see [`FlowTable::candidate_away`].
    pub const AWAY: Self = Self(u32::MAX - 1);

    /// Position and direction of the flow that it stands for.
    #[inline(always)]
    pub(crate) const fn entry(self) -> (usize, Direction) {
        let (index, direction) = entry_of(self.0);
        (index as usize, direction)
    }

    /// All ones for packets to the client.
    #[inline(always)]
    pub(crate) fn are_to_client(avx2: Avx2, [a, b, c, d, e, f, g, h]: [Self; LANES]) -> Lanes {
        let bit = avx2.splat(Direction::ToClient as u32);
        (avx2.lanes([a.0, b.0, c.0, d.0, e.0, f.0, g.0, h.0]) & bit).equals(bit)
    }
}

const _: () = assert!(Direction::ToBackend as u32 == 0 && Direction::ToClient as u32 == 1);

/// The second pass over many packets.
#[derive(Clone, Copy)]
pub(crate) struct CandidateSearch<'t, A: Address, C> {
    table: &'t FlowTable<A>,
    homes: Homes<'t>,
    compare: C,
    with_routes: bool,
}

impl<A: Address, C: Compare> CandidateSearch<'_, A, C> {
    /// As [`FlowTable::candidate`]. `None` stands for [`Candidate::AWAY`]: a loop needs no comparison to count it.
    #[inline(always)]
    pub(crate) fn of_hash(&self, hash: u64) -> Option<Candidate> {
        match self.homes.candidate(hash, self.compare) {
            Guess::At(position) => Some(self.table.prefetch_entry(position, self.with_routes)),
            Guess::Away => {
                self.table.index.prefetch_away(hash);
                None
            }
            Guess::Nowhere => Some(Candidate::NONE),
        }
    }
}

/// Why a SNAT port that its pool takes for free is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortUse {
    /// A flow has it.
    Held,
    /// A flow had it, and it has rested for this long only.
    Resting(Ticks),
}

/// The table has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the flow table is full")]
pub struct Full;

/// The flows of a worker, found by tuple.
#[derive(Debug)]
pub struct FlowTable<A: Address> {
    pub(super) hash: TupleHash,
    pub(super) index: Index,
    pub(super) storage: Storage<A>,
    pub(super) order: Order,
    pub(super) clients: ClientPorts,
    /// Entries below this position were used at least once.
    pub(super) high_water: u32,
    /// Head of the list of free entries, plus one; 0 ends it.
    pub(super) free: u32,
    pub(super) len: u32,
    /// The present, to complete times of 24 bits.
    pub(super) now: Tick,
}

/// An entry, and where the index has it: the hashes and the slots of both directions.
#[derive(Clone, Copy)]
pub(super) struct IndexedEntry {
    pub(super) index: u32,
    /// Whether the index has its second direction.
    pub(super) is_two_way: bool,
    pub(super) hashes: [u64; 2],
    pub(super) slots: [IndexSlot; 2],
}

/// The value stored in the index: the entry, and in the lowest bit the direction.
const fn position(index: u32, direction: Direction) -> u32 {
    match direction {
        Direction::ToBackend => index << 1,
        Direction::ToClient => index << 1 | 1,
    }
}

const fn entry_of(position: u32) -> (u32, Direction) {
    (position >> 1, if position & 1 == 0 { Direction::ToBackend } else { Direction::ToClient })
}

/// The pool of a flow's SNAT port, if it has one.
fn pool_of<A: Address>(flow: &Flow<A>) -> Option<PoolId> {
    flow.snat_lease().map(|lease| lease.pool)
}

/// The client in the key of a flow's packets to the backend.
#[inline(always)]
fn client_of<K: TupleKey>(key: &K) -> K::Address {
    key.tuple(0).source
}

impl<A: Address> FlowTable<A> {
    /// A table for `capacity` flows, at most 2^26 - 1. The seed must be secret, otherwise a client could choose tuples
    /// that all fall into one bucket.
    ///
    /// # Errors
    /// [`Full`] when there is no memory for it.
    pub fn new(capacity: u32, seed: u64) -> Result<Self, Full> {
        let capacity = capacity.clamp(1, FLOWS_MAX);
        let index = Index::new(2 * capacity as usize, 2 * capacity).ok_or(Full)?;
        let storage = Storage::new(capacity as usize).map_err(|_| Full)?;
        let order = Order::new(capacity as usize).ok_or(Full)?;
        let (clients, hash) = (ClientPorts::new(capacity, seed).ok_or(Full)?, TupleHash::new(seed));
        Ok(Self { hash, index, storage, order, clients, high_water: 0, free: 0, len: 0, now: Tick::default() })
    }

    /// Sets the present, by which times of flows are completed: entries store 24 bits of them. To be called at every
    /// poll, before anything else.
    pub fn set_time(&mut self, now: Tick) {
        self.now = now;
    }

    /// Meters all flows, and records their starts and ends from now on. To be called before the first flow.
    ///
    /// # Errors
    /// [`Full`] when there is no memory for it.
    pub fn record(&mut self, records: Arc<FlowRecords>) -> Result<(), Full> {
        self.storage.record(records).map_err(|_| Full)
    }

    /// Tells this watch of starts and ends of flows from now on, or none.
    pub(crate) fn watch(&mut self, watch: Option<Arc<FlowWatch>>) {
        self.storage.watch(watch);
    }

    /// Tells the agent about flows from now on. To be called before the first flow.
    pub(crate) fn replicate(&mut self, replication: Arc<FlowReplication>) {
        self.storage.replicate(replication);
    }

    /// Whether flows are replicated.
    #[inline]
    pub(crate) fn is_replicated(&self) -> bool {
        self.storage.replicator.is_some()
    }

    /// Number of flows that other gateways own, as the last sweep counted them; 0 where flows are not replicated.
    pub(crate) fn shadows(&self) -> u32 {
        self.storage.replicator.as_ref().map_or(0, |replicator| replicator.shadows())
    }

    /// Sends the flows of the table to the agent.
    pub(crate) fn replicator(&mut self) -> Option<&mut Replicator<A>> {
        self.storage.replicator.as_deref_mut()
    }

    /// Visits up to `flows` of the flows that are old enough now, and sends the flows for which `is_sent_here` returns
    /// true. Returns how many it visited.
    pub(crate) fn send_due(&mut self, flows: usize, is_sent_here: impl Fn(&Flow<A>) -> bool) -> usize {
        for visited in 0..flows {
            let now = self.now;
            let Some(index) = self.replicator().and_then(|replicator| replicator.take_due(now)) else { return visited };
            let flow = self.get(FlowIndex(index));
            if self.storage.is_used(index)
                && is_sent_here(&flow)
                && let Some(replicator) = &mut self.storage.replicator
            {
                replicator.send_first(index, &flow, self.now);
            }
        }
        flows
    }

    /// A group was lost: queues the handshakes that backends have answered, to be sent to partners. It finds those that
    /// began within `age_max`, among the [`HANDSHAKES_MAX`] youngest unconfirmed flows.
    pub(crate) fn send_handshakes(&mut self, age_max: Ticks) {
        let now = self.now;
        let mut next = self.order.youngest(YieldClass::Unconfirmed);
        for _ in 0..HANDSHAKES_MAX {
            let Some(index) = next.filter(|&index| now.since(self.order.since(index, now)) < age_max) else { return };
            next = self.order.before(index);
            let is_answered = self.storage.hot(index).and_then(|flow| flow.state()) == Some(FlowState::TcpAnswered);
            if let Some(replicator) = self.storage.replicator.as_mut().filter(|_| is_answered) {
                replicator.queue(index, now);
            }
        }
    }

    /// Tells a flow again that carries packets after a long silence, if partners know it.
    #[cold]
    pub(crate) fn tell_again(&mut self, index: FlowIndex) {
        let flow = self.get(index);
        if let Some(replicator) = &mut self.storage.replicator {
            replicator.carried_again(index.0, &flow, self.now);
        }
    }

    /// Notes that a partner has sent a flow, in its present state.
    pub(crate) fn note_received(&mut self, FlowIndex(index): FlowIndex, state: FlowState) {
        if let Some(replicator) = &mut self.storage.replicator {
            replicator.note_received(index as usize, state, self.now);
        }
    }

    /// Sets the time of records, monotonic ns.
    pub(crate) fn set_recorder_time(&mut self, now_ns: u64) {
        self.storage.set_recorder_time(now_ns);
    }

    /// Prefetches the meter of a flow.
    #[inline(always)]
    pub(crate) fn prefetch_meter(&self, index: usize) {
        self.storage.prefetch_meter(index);
    }

    /// Counts a forwarded packet of a flow, of this many bytes from its IP header on, if flows are metered.
    pub(crate) fn meter(&mut self, index: FlowIndex, direction: Direction, packet_len: u16) {
        self.storage.hot_parts(true).meters.count(index.0 as usize, direction, packet_len);
    }

    /// Records the end of all flows, since the gateway ends.
    pub(crate) fn record_stop(&mut self) {
        for index in 0..self.high_water {
            if self.storage.is_used(index) {
                self.storage.record_end(index, FlowEnd::Stopped, self.now);
            }
        }
    }

    /// The hash of a tuple, an argument of the other functions.
    #[must_use]
    #[inline]
    pub fn hash(&self, tuple: &Tuple<A>) -> u64 {
        self.hash_key(&A::Key::of(tuple), tuple.protocol)
    }

    /// The hash of addresses and ports in wire order.
    #[must_use]
    #[inline(always)]
    pub(crate) fn hash_key(&self, key: &A::Key, protocol: u8) -> u64 {
        self.hash.hash_key(key, protocol)
    }

    /// The function of [`FlowTable::hash`].
    #[inline(always)]
    pub(crate) fn tuple_hash(&self) -> &TupleHash {
        &self.hash
    }

    /// Prefetches the lines of tags of eight packets, by the upper halves of their hashes.
    #[inline(always)]
    pub(crate) fn prefetch_eight(&self, avx2: Avx2, upper: Lanes) {
        self.index.prefetch_eight(avx2, upper);
    }

    /// First pass over a burst: prefetches the line of tags.
    #[inline(always)]
    pub fn prefetch(&self, hash: u64) {
        self.index.prefetch(hash);
    }

    /// Second pass: reads the tags, prefetches the entry that probably holds the tuple, and returns its position. For
    /// [`Candidate::AWAY`] it prefetches another line of tags, see [`FlowTable::candidate_away`].
    #[inline(always)]
    pub fn candidate(&self, hash: u64) -> Candidate {
        self.candidates(AnyProcessor, true).of_hash(hash).unwrap_or(Candidate::AWAY)
    }

    /// The same for many packets, by these instructions; perhaps without the routes to clients of replies.
    #[inline(always)]
    pub(crate) fn candidates<C: Compare>(&self, compare: C, with_routes: bool) -> CandidateSearch<'_, A, C> {
        CandidateSearch { table: self, homes: self.index.homes(), compare, with_routes }
    }

    /// As [`FlowTable::candidate`], in the other line of tags.
    #[inline]
    pub fn candidate_away(&self, hash: u64) -> Candidate {
        self.index.candidate_away(hash).map_or(Candidate::NONE, |position| self.prefetch_entry(position, true))
    }

    #[inline(always)]
    fn prefetch_entry(&self, position: u32, with_route: bool) -> Candidate {
        let (index, direction) = entry_of(position);
        self.storage.prefetch(index, with_route && direction == Direction::ToClient);
        Candidate(position)
    }

    /// Third pass: the flow of a tuple, and the direction of the tuple in it. Compares the full key, with that of the
    /// candidate first; searches the tags again if it differs, since flows may have come and gone meanwhile.
    #[must_use]
    #[inline]
    pub fn find(&self, hash: u64, tuple: &Tuple<A>, candidate: Candidate) -> Option<(FlowIndex, Direction)> {
        let (index, direction) = entry_of(candidate.0);
        if self.matches(candidate.0, &A::Key::of(tuple), tuple.protocol) {
            return Some((FlowIndex(index), direction));
        }
        self.search(hash, tuple)
    }

    /// The flow of a tuple, searched by the tags of its buckets.
    #[must_use]
    #[inline(never)]
    pub fn search(&self, hash: u64, tuple: &Tuple<A>) -> Option<(FlowIndex, Direction)> {
        let Candidate(position) = self.search_key(hash, &A::Key::of(tuple), tuple.protocol)?;
        let (index, direction) = entry_of(position);
        Some((FlowIndex(index), direction))
    }

    /// As [`FlowTable::search`], by addresses and ports in wire order.
    pub(crate) fn search_key(&self, hash: u64, key: &A::Key, protocol: u8) -> Option<Candidate> {
        self.index.find(hash, |position| self.matches(position, key, protocol)).map(Candidate)
    }

    /// The use of a SNAT port that its pool does not know, by the hash of the replies: a flow of a partner or of the
    /// process before has the port, or had it until a moment ago. Not inlined, so that gateways that do not replicate
    /// do not pay for it.
    #[inline(never)]
    pub(crate) fn port_use(&self, reply_hash: u64, reply: &A::Key, protocol: u8) -> Option<PortUse> {
        let replicator = self.storage.replicator.as_ref()?;
        if self.search_key(reply_hash, reply, protocol).is_some() {
            return Some(PortUse::Held);
        }
        replicator.rest_of(reply_hash, self.now).map(PortUse::Resting)
    }

    /// Lets the SNAT port of these replies rest, which was freed then and is in no pool.
    pub(crate) fn rest_port(&mut self, reply: &Tuple<A>, freed: Tick) {
        let hash = self.hash(reply);
        if let Some(replicator) = &mut self.storage.replicator {
            replicator.rest(hash, freed, self.now);
        }
    }

    /// The owner of a VIP group: this gateway, where flows are not replicated.
    pub(crate) fn holder(&self, group: u8) -> GroupHolder {
        self.storage.replicator.as_ref().map_or(GroupHolder::Settled, |replicator| replicator.groups().holder(group))
    }

    /// Whether the entry and direction of a position are those of a key.
    fn matches(&self, position: u32, key: &A::Key, protocol: u8) -> bool {
        let (index, direction) = entry_of(position);
        self.storage
            .hot(index)
            .is_some_and(|flow| flow.key(direction) == key && flow.state().is_some_and(|state| state.protocol() == protocol))
    }

    /// Adds a flow. Its protocol must not be 0, and none of its tuples (one for a one-way flow) may be in the table.
    ///
    /// [`Full`]; the table is unchanged.
    pub fn insert(&mut self, flow: Flow<A>) -> Result<FlowIndex, Full> {
        self.insert_flow(flow, true)
    }

    /// Inserts a flow that has begun at another gateway.
    pub(crate) fn insert_shadow(&mut self, flow: Flow<A>) -> Result<FlowIndex, Full> {
        self.insert_flow(flow, false)
    }

    fn insert_flow(&mut self, flow: Flow<A>, begins: bool) -> Result<FlowIndex, Full> {
        let hashes = self.hashes(&flow);
        self.index.prefetch(hashes[Direction::ToClient as usize]); // its line is fetched while the other one is written
        let rooms = hashes.map(|hash| self.index.room_for(hash));
        let index = self.claim((hashes, rooms), flow.mode.is_two_way())?;
        self.storage.put(index, &flow, begins);
        if let Some(pool) = pool_of(&flow) {
            self.clients.add(flow.client, pool);
        }
        match flow.state.yield_class() {
            Some(class) => self.order.push(index, class, pool_of(&flow), flow.last_seen),
            None => {
                self.order.set_since(index, flow.last_seen);
                self.note(index, &flow);
            }
        }
        Ok(FlowIndex(index))
    }

    /// Inserts a flow that a SYN begins now. Returns its position in the direction of the SYN.
    ///
    /// [`Full`]; the table is unchanged.
    #[inline(always)]
    pub(crate) fn begin(&mut self, begun: &BegunFlow<'_, A::Key>, now: Tick) -> Result<Candidate, Full> {
        let index = self.claim((begun.hashes, begun.rooms), true)?;
        self.storage.begin(index, begun, now);
        self.clients.add(client_of(begun.keys[Direction::ToBackend as usize]), begun.pool);
        self.order.push(index, YieldClass::Unconfirmed, Some(begun.pool), now);
        Ok(Candidate(position(index, Direction::ToBackend)))
    }

    /// Room for a flow with this hash in the index, for as long as no other flow takes it.
    #[inline(always)]
    pub(crate) fn room_for(&self, hash: u64) -> IndexSlot {
        self.index.room_for(hash)
    }

    /// Finds a position for a flow with these hashes, and adds it to the index.
    #[inline(always)]
    fn claim(&mut self, ([to_backend, to_client], rooms): ([u64; 2], [IndexSlot; 2]), is_two_way: bool) -> Result<u32, Full> {
        let index = match self.free.checked_sub(1) {
            Some(index) => index,
            None if (self.high_water as usize) < self.storage.len() => self.high_water,
            None => return Err(Full),
        };
        if !self.index.insert_at(rooms[0], to_backend, position(index, Direction::ToBackend)) {
            return Err(Full);
        }
        if is_two_way && !self.index.insert_at(rooms[1], to_client, position(index, Direction::ToClient)) {
            self.index.remove(to_backend, position(index, Direction::ToBackend));
            return Err(Full);
        }
        if self.free == 0 {
            self.high_water += 1;
        } else {
            self.free = self.storage.next_free(index);
            // The next flow takes it.
            let next = self.free.wrapping_sub(1);
            self.storage.prefetch_all(next);
            self.order.prefetch(next);
        }
        self.len += 1;
        Ok(index)
    }

    /// Removes a flow, for this reason unless its sides closed it before. The caller releases its SNAT port.
    pub fn remove(&mut self, index: FlowIndex, why: FlowEnd) -> Flow<A> {
        let flow = self.get(index);
        if !self.storage.is_used(index.0) {
            return flow;
        }
        let hashes = self.hashes(&flow);
        self.index.prefetch(hashes[Direction::ToClient as usize]);
        self.storage.record_end(index.0, why, self.now);
        if let Some(replicator) = &mut self.storage.replicator {
            replicator.ended(index.0, &flow, hashes[Direction::ToClient as usize], self.now);
        }
        self.take_out_flow(index.0, &flow, hashes);
        flow
    }

    /// Removes a flow that is in the table with these hashes.
    pub(super) fn take_out_flow(&mut self, index: u32, flow: &Flow<A>, hashes: [u64; 2]) {
        let slots = self.slots_of(index, hashes);
        self.take_out(
            IndexedEntry { index, is_two_way: flow.mode.is_two_way(), hashes, slots },
            flow.state.yield_class(),
            pool_of(flow),
        );
    }

    /// The slots of a flow in the index.
    #[inline(always)]
    pub(super) fn slots_of(&self, index: u32, [to_backend, to_client]: [u64; 2]) -> [IndexSlot; 2] {
        let to_backend = self.index.slot_of(to_backend, position(index, Direction::ToBackend));
        [to_backend, self.index.slot_of(to_client, position(index, Direction::ToClient))]
    }

    /// Takes a flow out of the index and out of the list of its class, with the pool of its SNAT port if it has one.
    #[inline(always)]
    pub(super) fn take_out(&mut self, entry: IndexedEntry, class: Option<YieldClass>, pool: Option<PoolId>) {
        let IndexedEntry { index, is_two_way, hashes: [to_backend, to_client], slots } = entry;
        self.index.remove_at(slots[0], to_backend, position(index, Direction::ToBackend));
        if is_two_way {
            self.index.remove_at(slots[1], to_client, position(index, Direction::ToClient));
        }
        if let Some(class) = class {
            self.order.remove(index, class, pool);
        }
        if let (Some(pool), Some(flow)) = (pool, self.storage.hot(index)) {
            self.clients.remove(client_of(flow.key(Direction::ToBackend)), pool);
        }
        self.storage.free(index, self.free);
        self.free = index + 1;
        self.len -= 1;
    }

    /// Applies a packet to the state of its flow, see [`advance()`], marks the flow as seen, and keeps the yield lists
    /// up to date. Returns the flow as it is now.
    pub fn advance(
        &mut self,
        index: FlowIndex,
        transport: Transport,
        direction: Direction,
        segment: Segment,
        now: Tick,
    ) -> Flow<A> {
        let mut flow = Flow { last_seen: now, ..self.get(index) };
        let before = flow.state.yield_class();
        let segment = segment.seen_by_client(flow.shift.as_ref(), direction);
        if advance(&mut flow, transport, direction, segment, now) {
            let pool = pool_of(&flow);
            if let Some(class) = before {
                self.order.remove(index.0, class, pool);
            }
            match flow.state.yield_class() {
                Some(class) => self.order.push(index.0, class, pool, now),
                None => self.order.set_since(index.0, now),
            }
            flow.since = now;
        }
        self.storage.record_change(index.0, flow.state, transport);
        if let Some(replicator) = &mut self.storage.replicator {
            match before {
                Some(_) if flow.state.is_confirmed() => replicator.queue(index.0, now),
                // A SYN-ACK may begin a connection whose header is still owed; the next packet tells the change.
                _ if flow.shift.is_some() && matches!(transport, Transport::Tcp { flags } if flags & tcp_flags::SYN != 0) => {}
                _ => replicator.changed(index.0, &flow, now),
            }
        }
        self.set(index, &flow);
        flow
    }

    /// The flow that has been in this class the longest, and since when.
    #[must_use]
    pub fn oldest(&self, class: YieldClass) -> Option<(FlowIndex, Tick)> {
        self.order.oldest(class).map(|index| (FlowIndex(index), self.order.since(index, self.now)))
    }

    /// The flow among the holders of a port of this pool that has been in this class the longest, and since when.
    #[must_use]
    pub fn oldest_of(&self, class: YieldClass, pool: PoolId) -> Option<(FlowIndex, Tick)> {
        self.order.oldest_of(class, pool).map(|index| (FlowIndex(index), self.order.since(index, self.now)))
    }

    /// The flows of a class, the flow that has been in it the longest first; with a pool, only the holders of its
    /// ports.
    pub(crate) fn oldest_first(&self, class: YieldClass, pool: Option<PoolId>) -> impl Iterator<Item = FlowIndex> {
        self.order.oldest_first(class, pool).map(FlowIndex)
    }

    /// The flows in a run of entries that begins at a position that follows from `hash`.
    pub(crate) fn sample(&self, hash: u64, entries: u32) -> impl Iterator<Item = FlowIndex> {
        let all = self.high_water.max(1);
        let start = u32::try_from(hash >> 32).unwrap_or_default() % all;
        let run = (0..entries.min(self.high_water)).map(move |n| (start.wrapping_add(n)) % all);
        run.filter(|&index| self.storage.is_used(index)).map(FlowIndex)
    }

    /// The number of flows that yield and hold a port of this pool.
    #[must_use]
    pub(crate) fn yielding(&self, pool: PoolId) -> u32 {
        self.order.yielding(pool)
    }

    /// The SNAT ports that a client holds towards the target of this pool. An IPv6 client is a /64.
    #[must_use]
    pub(crate) fn ports_of_client(&self, client: A, pool: PoolId) -> u32 {
        self.clients.held(client, pool)
    }

    fn hashes(&self, flow: &Flow<A>) -> [u64; 2] {
        [Direction::ToBackend, Direction::ToClient].map(|direction| self.hash(&flow.tuple(direction)))
    }

    /// The flow.
    #[must_use]
    pub fn get(&self, index: FlowIndex) -> Flow<A> {
        let mut flow = self.storage.get(index.0, self.order.since(index.0, self.now), self.now);
        if AssociationNote::is_for(&flow) {
            AssociationNote::of_bits(self.order.note(index.0)).complete(&mut flow);
        }
        flow
    }

    /// Stores a flow that [`FlowTable::get`] returned, after changes of anything but its keys and its state
    /// ([`FlowTable::advance`]).
    pub fn set(&mut self, index: FlowIndex, flow: &Flow<A>) {
        self.storage.set(index.0, flow);
        self.note(index.0, flow);
    }

    /// Whether a flow has a shift.
    #[inline(always)]
    pub(crate) fn is_shifted(&self, FlowIndex(index): FlowIndex) -> bool {
        self.storage.hot(index).is_some_and(HotFlow::is_shifted)
    }

    /// Stores the shift of a flow that has one.
    pub(crate) fn set_shift(&mut self, FlowIndex(index): FlowIndex, shift: Shift) {
        self.storage.set_shift(index, shift);
    }

    /// Takes its backend from a flow, as if that had been removed now: its next packet ends it, or the sweep.
    pub(crate) fn abandon(&mut self, index: FlowIndex) {
        let flow = Flow { last_seen: self.now, ..self.get(index) };
        self.storage.abandon(index.0, &flow);
        self.set(index, &flow);
    }

    /// Keeps the note of a flow that is in no list.
    #[inline]
    fn note(&mut self, index: u32, flow: &Flow<A>) {
        if let Some(note) = AssociationNote::of(flow) {
            self.order.set_note(index, note.bits());
        }
    }

    /// The parts of its flows that packets read, and their meters, if they are wanted and there are any.
    #[inline(always)]
    pub(crate) fn hot_parts(&mut self, metered: bool) -> HotFlows<'_, A::Key> {
        self.storage.hot_parts(metered)
    }

    /// The flows, in no particular order.
    pub(crate) fn flows(&self) -> impl Iterator<Item = Flow<A>> {
        (0..self.high_water).filter(|&index| self.storage.is_used(index)).map(|index| self.get(FlowIndex(index)))
    }

    /// Number of flows in the table.
    #[must_use]
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// Whether the table has no flows.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Maximum number of flows.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.storage.len()
    }

    /// Number of entries ever used, which is what a full sweep visits.
    #[must_use]
    pub const fn high_water(&self) -> u32 {
        self.high_water
    }

    /// Copies flows from the entry `start` on until `into` has no room for the next entry. Visits as many entries as it
    /// has room for. Returns where to continue; `None` after the last entry. A flow keeps its entry, and entries that
    /// were never used are at the end.
    pub(crate) fn copy_from<const N: usize>(&self, start: u32, into: &mut ArrayVec<Flow<A>, N>) -> Option<u32> {
        let room = u32::try_from(into.remaining_capacity()).unwrap_or(u32::MAX);
        let end = start.saturating_add(room).min(self.high_water);
        let used = (start..end).filter(|&index| self.storage.is_used(index));
        into.extend(used.map(|index| self.get(FlowIndex(index))));
        (end < self.high_water).then_some(end)
    }
}

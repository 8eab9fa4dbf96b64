//! The storage of flows: the part that every packet of a flow reads has 32 bytes for IPv4 and 96 for IPv6, the rest
//! stands apart.
//!
//! Three arrays have the same positions: the part that a packet reads, in wire order, so that a packet is matched,
//! rewritten and hashed by words; the route to the client, which a reply reads; and the part that only changes of state
//! read. For IPv6 there is one array: the first part does not fill its lines, and the others fit into the rest. The
//! shifts of flows are in an array of their own, of which only flows that have one touch memory.
//!
//! **Invariant:** a hit reads one line of the index and one entry (two lines for IPv6), and a reply of IPv4 four bytes
//! more. It writes only the time of the last packet, and only when the tick changes.
//!
//! Not here: which position a flow has (`table`), and the order in which flows yield (`yield_order`).

mod association_note;
mod flow_groups;
mod recorder;
mod replicator;
mod resting_replies;
mod watched;

use std::sync::Arc;

use zerocopy::{AllocError, FromZeros};

use super::entry::{BackendId, Flow, FlowView, UNRESOLVED, VerificationTags};
use super::index::IndexSlot;
use super::snat::PoolId;
use super::state::{Direction, FlowMode, FlowState, STATE_BITS, Shift};
use super::tick::{Tick, Ticks};
use crate::wire::checksum::difference;
use crate::wire::processor;
use crate::wire::protocol::SCTP;
use crate::wire::{Address, Transport, TupleKey};
pub(super) use association_note::AssociationNote;
pub(crate) use flow_groups::{FlowGroups, GroupHolder, GroupHoldings};
pub(crate) use recorder::Meters;
use recorder::Recorder;
pub use recorder::{ACTIVE_TIMEOUT, FlowEnd, FlowEvent, FlowRecord, FlowRecords, FlowTraffic};
pub(crate) use replicator::Replicator;
pub use replicator::{FlowReplica, FlowReplication, ReplicaEvent, ShiftReplica};
pub(crate) use watched::WINDOW_NS as WATCH_WINDOW_NS;
pub use watched::{FlowWatch, SampledPacket, Watched, WatchedEnds, WatchedEvent};

/// The part of a flow that each of its packets reads. Half a cache line for IPv4, one and a half for IPv6, and never
/// more lines than its size requires.
#[derive(Clone, Copy, Debug, FromZeros)]
#[repr(C, align(32))]
pub(crate) struct HotFlow<K: TupleKey> {
    /// Packets as they arrive, by [`Direction`]. In one-way modes the second holds only the backend's address.
    keys: [K; 2],
    /// See [`BackendId::packed_with`].
    backend: u32,
    /// Last packet (upper 24 bits, in ticks), mode (3 bits), state (5 bits).
    seen: u32,
    /// The route to the client, the words of a [`ColdFlow`], and [`HotFlow::checksum_change`], if there is room.
    rest: K::Filler,
}

const _: () = assert!(size_of::<HotFlow<<u32 as Address>::Key>>() == 32);
const _: () = assert!(size_of::<HotFlow<<u128 as Address>::Key>>() == 96);

const STATE_MASK: u32 = (1 << STATE_BITS) - 1;
const SEEN_SHIFT: u32 = 8;
/// The bits below those of the time.
const BELOW_SEEN: u32 = (1 << SEEN_SHIFT) - 1;
/// The state of a free entry.
const FREE: u32 = STATE_MASK;
const _: () = assert!(FlowState::ALL.len() <= FREE as usize);

/// Times as they are stored with the last packet of a flow, to be compared without a [`HotFlow`].
pub(crate) struct SeenWords;

impl SeenWords {
    /// The bits below those of the time, which mean nothing in differences.
    pub(crate) const BELOW: u32 = BELOW_SEEN;

    /// The bits of the mode.
    pub(crate) const MODE: u32 = BELOW_SEEN & !STATE_MASK;

    /// From this, [`HotFlow::seen_word`] is subtracted: the time since the last packet.
    #[inline(always)]
    pub(crate) const fn minuend(now: Tick) -> u32 {
        // No borrow from the ticks: the bits below them are all ones.
        now.0 << SEEN_SHIFT | BELOW_SEEN
    }

    /// The largest difference that is below a limit of less than 2^24 ticks.
    #[inline(always)]
    pub(crate) const fn below(limit: Ticks) -> u32 {
        (limit.0 << SEEN_SHIFT).saturating_sub(1)
    }
}

/// A flow of mode `nat` that a SYN begins, as it is stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BegunFlow<'k, K> {
    /// Packets as they arrive, by [`Direction`].
    pub(crate) keys: [&'k K; 2],
    /// The hashes of both, and what [`super::FlowTable::room_for`] has found for them.
    pub(crate) hashes: [u64; 2],
    pub(crate) rooms: [IndexSlot; 2],
    /// The backend and the frontend, see [`BackendId::packed_with`].
    pub(crate) backend: u32,
    /// The pool of its SNAT port.
    pub(crate) pool: PoolId,
    /// The sequence number of the SYN.
    pub(crate) initial_sequence: u32,
}

impl<K: TupleKey> HotFlow<K> {
    /// Writes a flow of which nothing but these is known into the entry, see the fields. It is written in place: a load
    /// from a copy that was just stored in other pieces waits until these have left the processor's store buffer.
    #[inline(always)]
    fn begin(&mut self, [to_backend, to_client]: [&K; 2], backend: u32, seen: u32) {
        self.keys[0] = *to_backend;
        self.keys[1] = *to_client;
        (self.backend, self.seen, self.rest) = (backend, seen, FromZeros::new_zeroed());
        if let [_, _, _, change] = self.rest.as_mut() {
            let [from, to] = self.keys.each_ref().map(TupleKey::sum);
            *change = difference(from, to).into();
        }
    }

    /// A flow of these packets, by [`Direction`].
    #[cfg(test)]
    pub(crate) fn between(keys: [&K; 2]) -> Self {
        let mut flow = Self::new_zeroed();
        flow.begin(keys, 0, 0);
        flow
    }

    /// Change of the sum of a TCP or UDP checksum when a packet to the backend gets other addresses and ports: 16 bits
    /// in the byte order of the machine. For packets to the client it is the complement. Meaningless in one-way modes,
    /// 0 without room.
    #[inline(always)]
    pub(crate) fn checksum_change(&self) -> u32 {
        if let [_, _, _, change] = *self.rest.as_ref() { change } else { 0 }
    }

    /// The difference that other addresses and ports make to the sum of a TCP or UDP checksum of a packet in one
    /// direction; never 0. Meaningless in one-way modes.
    #[inline(always)]
    pub(crate) fn change_of_sum(&self, direction: Direction) -> u64 {
        let change = u64::from(self.checksum_change());
        0xffff + if direction == Direction::ToBackend { change } else { change ^ 0xffff }
    }

    /// The addresses and ports of packets in one direction, as they arrive.
    #[inline(always)]
    pub(crate) fn key(&self, direction: Direction) -> &K {
        &self.keys[direction as usize]
    }

    /// The last packet, the mode and the state, as they are stored.
    #[inline(always)]
    pub(crate) fn seen_word(&self) -> u32 {
        self.seen
    }

    /// The number of the mode.
    #[inline(always)]
    pub(crate) fn mode_number(&self) -> usize {
        usize::from(self.mode_and_state() >> STATE_BITS)
    }

    /// See [`BackendId::packed_with`].
    #[inline(always)]
    pub(crate) fn backend(&self) -> u32 {
        self.backend
    }

    /// The state; `None` of a free entry.
    #[inline]
    pub(crate) fn state(&self) -> Option<FlowState> {
        FlowState::ALL.get(self.state_number() as usize).copied()
    }

    /// The number of the state; of a free entry, one that no state has.
    #[inline(always)]
    pub(crate) fn state_number(&self) -> u32 {
        self.seen & STATE_MASK
    }

    /// Mode and state in one byte, see [`super::Admission`].
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // the lower byte
    pub(crate) fn mode_and_state(&self) -> u8 {
        self.seen as u8
    }

    /// Whether the flow has a [`Shift`].
    #[inline(always)]
    pub(crate) fn is_shifted(&self) -> bool {
        FlowMode::is_shifted_number(self.seen >> STATE_BITS)
    }

    /// How the flow's packets reach the backend.
    #[inline(always)]
    pub(crate) fn mode(&self) -> FlowMode {
        FlowMode::of_number(self.seen >> STATE_BITS)
    }

    /// Time since the last packet; 0 if that was later than `now`.
    #[inline]
    pub(crate) fn idle(&self, now: Tick) -> Ticks {
        Tick(now.0 << SEEN_SHIFT).since_scaled(Tick(self.seen & !BELOW_SEEN), SEEN_SHIFT)
    }

    /// Whether the last packet came less than `limit` ago, which must be below 2^24 ticks.
    #[inline(always)]
    pub(crate) fn is_seen_within(&self, limit: Ticks, now: Tick) -> bool {
        self.elapsed(now) < limit.0 << SEEN_SHIFT
    }

    /// Marks the flow as seen now.
    #[inline(always)]
    pub(crate) fn see(&mut self, now: Tick) {
        let elapsed = self.elapsed(now) & !BELOW_SEEN;
        if elapsed != 0 {
            self.seen = self.seen.wrapping_add(elapsed);
        }
    }

    /// Ticks since the last packet, in the bits in which it is stored. The bits below mean nothing.
    #[inline(always)]
    fn elapsed(&self, now: Tick) -> u32 {
        SeenWords::minuend(now).wrapping_sub(self.seen)
    }

    fn is_free(&self) -> bool {
        self.state_number() == FREE
    }

    /// Whether the entry has the route to the client and the [`ColdFlow`].
    const HAS_ROOM: bool = size_of::<K::Filler>() >= size_of::<u32>() + size_of::<ColdFlow>();

    /// The route to the client, if it is here.
    #[inline(always)]
    fn route(&self) -> Option<u32> {
        self.rest.as_ref().first().copied()
    }

    #[inline(always)]
    fn cold(&self) -> Option<ColdFlow> {
        if let [_, pool, number, ..] = *self.rest.as_ref() { Some(ColdFlow { pool: PoolId(pool), number }) } else { None }
    }

    /// Stores the route to the client, if it is here.
    #[inline(always)]
    fn set_route(&mut self, route: u32) -> bool {
        let word = self.rest.as_mut().first_mut();
        word.map(|word| *word = route).is_some()
    }

    #[inline(always)]
    fn set_number(&mut self, new: u32) -> bool {
        let [_, _, number, ..] = self.rest.as_mut() else { return false };
        *number = new;
        true
    }

    #[inline(always)]
    fn set_cold(&mut self, cold: ColdFlow) -> bool {
        let [_, pool, number, ..] = self.rest.as_mut() else { return false };
        (*pool, *number) = (cold.pool.0, cold.number);
        true
    }
}

/// The parts of the flows of a table that packets read, by position.
pub(crate) struct HotFlows<'a, K: TupleKey> {
    pub(crate) flows: &'a mut [HotFlow<K>],
    pub(crate) routes: ClientRoutes<'a>,
    pub(crate) meters: Meters<'a>,
}

/// The routes to the clients of flows, by position; none where flows have them.
#[derive(Clone, Copy)]
pub(crate) struct ClientRoutes<'a>(&'a [u32]);

impl ClientRoutes<'_> {
    /// The slot of the next hop towards the client of the flow at a position that was looked up in this route epoch;
    /// meaningless during the handshake of a flow. [`UNRESOLVED`] if there is none.
    #[inline(always)]
    pub(crate) fn slot<K: TupleKey>(self, flow: &HotFlow<K>, index: usize, epoch: u32) -> u32 {
        match flow.route().or_else(|| self.0.get(index).copied()) {
            // `NO_SLOT` is above every slot.
            Some(word) if word & EPOCH_MASK == epoch => word >> EPOCH_BITS,
            _ => UNRESOLVED,
        }
    }
}

/// The part of a flow that only changes of its state read. 8 bytes.
#[derive(Clone, Copy, Debug, FromZeros)]
#[repr(C)]
struct ColdFlow {
    /// The pool of the SNAT port.
    pool: PoolId,
    /// By state: the awaited number, the number of packets of an unconfirmed one-way flow, the verification tag of an
    /// SCTP backend, or since when a backend does not answer (0: it does). Of a free entry: the next free one, plus
    /// one.
    number: u32,
}

/// Bits of a route's epoch; the slot is in the others. During the handshake of a flow, its client's sequence number is
/// kept in place of the route; for SCTP always the client's verification tag.
const EPOCH_BITS: u32 = 12;
const EPOCH_MASK: u32 = (1 << EPOCH_BITS) - 1;
/// The slot of an unknown next hop, and of those that do not fit: they are looked up for each packet.
const NO_SLOT: u32 = u32::MAX >> EPOCH_BITS;
const _: () = assert!(super::entry::ROUTE_EPOCHS == EPOCH_MASK);

/// A route in one word.
fn route_word(slot: u32, epoch: u32) -> u32 {
    slot.min(NO_SLOT) << EPOCH_BITS | epoch & EPOCH_MASK
}

/// The flows of one table.
#[derive(Debug)]
pub(super) struct Storage<A: Address> {
    hot: Box<[HotFlow<A::Key>]>,
    /// Routes to clients, and the words of [`ColdFlow`]s; none where they are in `hot`.
    routes: Box<[u32]>,
    cold: Box<[ColdFlow]>,
    /// The shifts of flows that have one. The rest is never touched, so that it costs nothing.
    shifts: Box<[Shift]>,
    /// Only where flow records are wanted.
    recorder: Option<Box<Recorder>>,
    /// Only while somebody watches.
    watch: Option<Arc<FlowWatch>>,
    /// Whether starts and ends are of interest: there is a recorder or a watch.
    tells: bool,
    /// Only where flows are replicated.
    pub(super) replicator: Option<Box<Replicator<A>>>,
}

impl<A: Address> Storage<A> {
    /// Storage for this many flows; [`AllocError`] when there is no memory for it.
    pub(super) fn new(flows: usize) -> Result<Self, AllocError> {
        let apart = if HotFlow::<A::Key>::HAS_ROOM { 0 } else { flows };
        Ok(Self {
            hot: <[HotFlow<A::Key>]>::new_box_zeroed_with_elems(flows)?,
            routes: <[u32]>::new_box_zeroed_with_elems(apart)?,
            cold: <[ColdFlow]>::new_box_zeroed_with_elems(apart)?,
            shifts: <[Shift]>::new_box_zeroed_with_elems(flows)?,
            recorder: None,
            watch: None,
            tells: false,
            replicator: None,
        })
    }

    /// Tells the agent about flows from now on.
    pub(super) fn replicate(&mut self, replication: Arc<FlowReplication>) {
        self.replicator = Some(Box::new(Replicator::new(self.hot.len(), replication)));
    }

    /// Records starts and ends of flows from now on; [`AllocError`] when there is no memory for it.
    pub(super) fn record(&mut self, records: Arc<FlowRecords>) -> Result<(), AllocError> {
        self.recorder = Some(Box::new(Recorder::new(self.hot.len(), records)?));
        self.tells = true;
        Ok(())
    }

    /// Tells this watch of starts and ends of flows, or none.
    pub(super) fn watch(&mut self, watch: Option<Arc<FlowWatch>>) {
        self.tells = self.recorder.is_some() || watch.is_some();
        self.watch = watch;
    }

    /// Sets the time of records, monotonic ns.
    pub(super) fn set_recorder_time(&mut self, now_ns: u64) {
        if let Some(recorder) = &mut self.recorder {
            recorder.set_time(now_ns);
        }
    }

    /// Prefetches the meter of a flow, if there is one.
    #[inline(always)]
    pub(super) fn prefetch_meter(&self, index: usize) {
        if let Some(recorder) = &self.recorder {
            recorder.prefetch(index);
        }
    }

    /// Records that a flow has started now.
    #[cold]
    fn record_start(&mut self, index: u32, now: Tick) {
        let flow = FlowView::of(&self.get(index, now, now), now);
        if let Some(watch) = &self.watch {
            watch.started(flow);
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(index, flow);
        }
    }

    /// Records the traffic of a flow that lasts.
    #[inline(always)]
    pub(super) fn record_part(&mut self, index: u32, flow: &Flow<A>, now: Tick) {
        if let Some(recorder) = &mut self.recorder {
            recorder.look(index, || FlowView::of(flow, now));
        }
    }

    /// Records that a packet has changed the state of a flow, which is that of `flow` now.
    #[inline(always)]
    pub(super) fn record_change(&mut self, index: u32, state: FlowState, transport: Transport) {
        if let Some(recorder) = &mut self.recorder {
            recorder.advance(index, state, transport);
        }
    }

    /// Records the end of a flow that is still there. A watch is not told of flows of other gateways.
    #[inline(always)]
    pub(super) fn record_end(&mut self, index: u32, why: FlowEnd, now: Tick) {
        if self.tells {
            let flow = self.get(index, now, now);
            let is_own = || self.replicator.as_ref().is_none_or(|replicator| replicator.own(&flow));
            let view = FlowView::of(&flow, now);
            if let Some(watch) = self.watch.as_ref().filter(|_| is_own()) {
                watch.ended(why, view);
            }
            if let Some(recorder) = &mut self.recorder {
                recorder.end(index, why, view);
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.hot.len()
    }

    #[inline(always)]
    pub(super) fn hot(&self, index: u32) -> Option<&HotFlow<A::Key>> {
        self.hot.get(index as usize)
    }

    /// The pool of the SNAT port of a flow.
    pub(super) fn pool(&self, index: u32) -> PoolId {
        self.cold(index as usize).pool
    }

    /// The word with the route to the client of a flow, see [`route_word`].
    #[inline(always)]
    fn route(&self, index: usize) -> u32 {
        self.hot[index].route().unwrap_or_else(|| self.routes[index])
    }

    #[inline(always)]
    fn cold(&self, index: usize) -> ColdFlow {
        self.hot[index].cold().unwrap_or_else(|| self.cold[index])
    }

    #[inline(always)]
    fn set_route(&mut self, index: usize, route: u32) {
        if !self.hot[index].set_route(route) {
            self.routes[index] = route;
        }
    }

    #[inline(always)]
    fn set_cold(&mut self, index: usize, cold: ColdFlow) {
        if !self.hot[index].set_cold(cold) {
            self.cold[index] = cold;
        }
    }

    /// The parts of flows that packets read, by position, and their meters, if they are wanted and there are any.
    #[inline(always)]
    pub(super) fn hot_parts(&mut self, metered: bool) -> HotFlows<'_, A::Key> {
        let meters = if metered { Meters::of(self.recorder.as_deref_mut()) } else { Meters::of(None) };
        HotFlows { flows: &mut self.hot, routes: ClientRoutes(&self.routes), meters }
    }

    /// Prefetches what packets of a flow read; `reply`: in the direction to the client.
    #[inline(always)]
    pub(super) fn prefetch(&self, index: u32, reply: bool) {
        processor::prefetch_at(&self.hot, index as usize);
        if reply && !HotFlow::<A::Key>::HAS_ROOM {
            processor::prefetch_at(&self.routes, index as usize);
        }
    }

    /// Prefetches what the beginning of a flow writes at a position.
    #[inline(always)]
    pub(super) fn prefetch_all(&self, index: u32) {
        self.prefetch_first(index);
        if !HotFlow::<A::Key>::HAS_ROOM {
            processor::prefetch_at(&self.routes, index as usize);
            processor::prefetch_at(&self.cold, index as usize);
        }
    }

    /// Prefetches the first part of a flow.
    #[inline(always)]
    pub(super) fn prefetch_first(&self, index: u32) {
        processor::prefetch_at(&self.hot, index as usize);
    }

    /// Prefetches what the end of a flow reads besides its first part.
    #[inline(always)]
    pub(super) fn prefetch_rest(&self, index: u32) {
        if !HotFlow::<A::Key>::HAS_ROOM {
            processor::prefetch_at(&self.cold, index as usize);
        }
    }

    /// Whether there is a flow at this position.
    pub(super) fn is_used(&self, index: u32) -> bool {
        !self.hot[index as usize].is_free()
    }

    /// The flow at a position, which is `since` then in its class. `now` completes the time of its last packet. Without
    /// what an [`AssociationNote`] has.
    pub(super) fn get(&self, index: u32, since: Tick, now: Tick) -> Flow<A> {
        let (hot, cold) = (&self.hot[index as usize], self.cold(index as usize));
        let word = self.route(index as usize);
        let state = hot.state().unwrap_or(FlowState::TcpClosing);
        let (protocol, mode) = (state.protocol(), hot.mode());
        let (there, back) = (hot.keys[0].tuple(protocol), hot.keys[1].tuple(protocol));
        let number = NumberUse::of(state, mode);
        let handshake = state.shakes_hands();
        let is_sctp = protocol == SCTP;
        let has_route = !handshake && !is_sctp;
        let slot = word >> EPOCH_BITS;
        Flow {
            client: there.source,
            vip: there.destination,
            backend_address: back.source,
            snat: back.destination,
            client_port: there.source_port,
            vip_port: there.destination_port,
            backend_port: back.source_port,
            snat_port: back.destination_port,
            backend: BackendId::unpacked(hot.backend),
            frontend: BackendId::frontend_of(hot.backend),
            last_seen: Tick(now.0.wrapping_sub(hot.idle(now).0)),
            since,
            snat_pool: cold.pool,
            route_to_client: if !has_route || slot == NO_SLOT { UNRESOLVED } else { slot },
            route_epoch: if has_route { word & EPOCH_MASK } else { 0 },
            initial_sequence: if handshake { word } else { 0 },
            acknowledgement: if number == NumberUse::Acknowledgement { cold.number } else { 0 },
            unanswered_since: (number == NumberUse::Unanswered && cold.number != 0).then_some(Tick(cold.number)),
            tags: VerificationTags {
                client: if is_sctp { word } else { 0 },
                backend: if number == NumberUse::Tag { cold.number } else { 0 },
                proven: false,
            },
            shift: self.shift(index),
            protocol,
            state,
            mode,
            packets: if number == NumberUse::Packets { (cold.number & 0xff) as u8 } else { 0 },
        }
    }

    /// The shift of the flow at a position.
    #[inline(always)]
    pub(super) fn shift(&self, index: u32) -> Option<Shift> {
        let is_shifted = self.hot[index as usize].is_shifted();
        if is_shifted { self.shifts.get(index as usize).copied() } else { None }
    }

    /// Stores the shift of a flow that has one.
    pub(super) fn set_shift(&mut self, index: u32, new: Shift) {
        if let Some(shift) = self.shifts.get_mut(index as usize) {
            *shift = new;
        }
    }

    /// Stores a new flow at a position; `begins`: it begins now, rather than at another gateway.
    pub(super) fn put(&mut self, index: u32, flow: &Flow<A>, begins: bool) {
        let keys = [Direction::ToBackend, Direction::ToClient].map(|direction| A::Key::of(&flow.tuple(direction)));
        self.hot[index as usize].begin(keys.each_ref(), flow.backend.packed_with(flow.frontend), 0);
        self.set(index, flow);
        if begins && self.tells {
            self.record_start(index, flow.last_seen);
        } else if let Some(recorder) = &mut self.recorder {
            recorder.begin_elsewhere(index);
        }
    }

    /// Stores a flow that has just begun at a position.
    #[inline(always)]
    pub(super) fn begin(&mut self, number: u32, begun: &BegunFlow<'_, A::Key>, now: Tick) {
        const STATE: u32 = (FlowMode::Nat as u32) << STATE_BITS | FlowState::TcpOpening as u32;
        let index = number as usize;
        let hot = &mut self.hot[index];
        hot.begin(begun.keys, begun.backend, now.0 << SEEN_SHIFT | STATE);
        let (route, cold) = (begun.initial_sequence, ColdFlow { pool: begun.pool, number: 0 });
        if !(hot.set_route(route) && hot.set_cold(cold)) {
            (self.routes[index], self.cold[index]) = (route, cold);
        }
        if self.tells {
            self.record_start(number, now);
        }
    }

    /// Takes the backend from the flow at a position, see [`BackendId::gone`].
    pub(super) fn abandon(&mut self, index: u32, flow: &Flow<A>) {
        self.hot[index as usize].backend = flow.backend.gone().packed_with(flow.frontend);
    }

    /// Stores what may change of the flow at a position.
    pub(super) fn set(&mut self, index: u32, flow: &Flow<A>) {
        let mode = flow.mode.number(flow.shift.is_some());
        let seen = flow.last_seen.0 << SEEN_SHIFT | mode << STATE_BITS | flow.state as u32;
        self.hot[index as usize].seen = seen;
        if let Some(shift) = flow.shift {
            self.set_shift(index, shift);
        }
        let route = match flow.state {
            state if state.shakes_hands() => flow.initial_sequence,
            state if state.protocol() == SCTP => flow.tags.client,
            _ => route_word(flow.route_to_client, flow.route_epoch),
        };
        self.set_route(index as usize, route);
        let number = match NumberUse::of(flow.state, flow.mode) {
            NumberUse::Acknowledgement => flow.acknowledgement,
            NumberUse::Packets => flow.packets.into(),
            NumberUse::Tag => flow.tags.backend,
            // A tick later than 0 is as good: 134 ms.
            NumberUse::Unanswered => flow.unanswered_since.map_or(0, |since| since.0.max(1)),
        };
        self.set_cold(index as usize, ColdFlow { pool: flow.snat_pool, number });
    }

    /// Forgets a route that was looked up in another epoch.
    pub(super) fn forget_route(&mut self, index: u32, flow: &Flow<A>, epoch: u32) {
        if flow.route_epoch != 0 && flow.route_epoch != epoch {
            self.set_route(index as usize, route_word(UNRESOLVED, 0));
        }
    }

    /// Marks the entry as free; `next` is the next free one, plus one.
    pub(super) fn free(&mut self, index: u32, next: u32) {
        let hot = &mut self.hot[index as usize];
        hot.seen = FREE;
        if !hot.set_number(next) {
            self.cold[index as usize].number = next;
        }
    }

    /// The next free entry after a free one, plus one.
    pub(super) fn next_free(&self, index: u32) -> u32 {
        self.cold(index as usize).number
    }
}

/// The meaning of [`ColdFlow::number`].
#[derive(Clone, Copy, PartialEq, Eq)]
enum NumberUse {
    Acknowledgement,
    Packets,
    Tag,
    Unanswered,
}

impl NumberUse {
    fn of(state: FlowState, mode: FlowMode) -> Self {
        match state {
            state if state.awaits_number() => Self::Acknowledgement,
            FlowState::SctpOpening if !mode.is_two_way() => Self::Packets,
            state if state.protocol() == SCTP => Self::Tag,
            _ if mode.is_two_way() => Self::Unanswered,
            _ => Self::Packets,
        }
    }
}

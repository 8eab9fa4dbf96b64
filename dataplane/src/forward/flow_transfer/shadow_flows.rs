//! Shadow flows: the flows of partners in this worker's tables, and the flows that this worker sends to partners
//! (docs/internals/decisions/0060-shadow-flows.md).
//!
//! A shadow is an ordinary flow whose VIP group another gateway owns. It holds no SNAT port: new flows that would get
//! the port find it by its replies and take another one.
//!
//! **Invariants:** no event of a partner changes a flow that this gateway owns and knows. A worker applies and sends a
//! bounded number of events in a poll. Of a flow whose directions two workers own, each has its half, as after a
//! restart (`restore`).
//!
//! Not here: the flows that partners have, and the times at which they are sent again (`flow::storage`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use proto::limits::{SNAT_PORT_FIRST, SNAT_PORT_LAST, VIP_GROUPS_MAX};

use crate::flow::{
    BackendId, Direction, Flow, FlowBackend, FlowEnd, FlowGroups, FlowIndex, FlowMode, FlowReplica, FlowReplication, FlowState,
    GroupHoldings, HeaderStage, PoolId, ReplicaEvent, Shift, ShiftReplica, SnatLease, Tick, Ticks,
};
use crate::forward::decide::{FlowFamily, FlowTables, WorkerFlows};
use crate::forward::rewrite::proxy_header;
use crate::forward::sort::owner_of_first;
use crate::neighbours::VipOwnership;
use crate::snapshot::{OwnedGroups, RemovedBackend, Snapshot};
use crate::stats::WorkerCounters;
use crate::wire::{Address, Tuple, protocol};
use crate::workers::{Steering, WorkerId};

/// Events of partners that a worker applies in a poll.
const APPLIED_PER_POLL: usize = 32;
/// Events that a worker applies in a tick while it has packets to process: 4,096 x 1 us are 3 % of it.
const APPLIED_PER_TICK: usize = 4096;
/// Newly confirmed flows of a family that a worker sends in a poll. A poll may confirm more; they wait for polls with
/// fewer.
const SENT_PER_POLL: usize = 16;
/// Time after a takeover in which partners may send flows that this gateway does not know: a lost event is repeated
/// within 400 ms, and TCP repeats a packet that is dropped after 200 ms at the earliest. Also the time after the loss
/// of a group in which its flows are sent that were too young before.
const HANDOVER: Duration = Duration::from_secs(2);

/// The owner function and a worker, which owns some packets by it; `None`: the worker owns all packets.
pub(in crate::forward) type Owned<'a> = Option<(&'a Steering, WorkerId)>;

/// Whether this worker sends a flow to partners. Of a flow that two workers share, the owner of the replies does. A
/// flow of a one-way mode goes on through any gateway by the hash, unless affinity has chosen its backend.
pub(in crate::forward) fn is_sent_by<A: Address>(owned: Owned<'_>, snapshot: &Snapshot, flow: &Flow<A>) -> bool {
    // A header on its way concerns both directions, packet by packet.
    if flow.shift.is_some_and(|shift| !shift.is_taken()) {
        return false;
    }
    match flow.mode {
        FlowMode::Nat => !flow.has_foreign_port() || is_owned(owned, snapshot, &flow.tuple(Direction::ToClient)),
        FlowMode::Dnat => true,
        FlowMode::Dsr | FlowMode::Ipip | FlowMode::Gue => {
            snapshot.frontend(flow.vip, flow.protocol, flow.vip_port).is_some_and(|frontend| frontend.has_affinity())
        }
    }
}

/// Whether packets with this tuple are the worker's.
pub(super) fn is_owned<A: Address>(owned: Owned<'_>, snapshot: &Snapshot, tuple: &Tuple<A>) -> bool {
    owned.is_none_or(|(steering, me)| owner_of_first(steering, snapshot, tuple) == me)
}

/// The replication of one worker.
pub(in crate::forward) struct Replicating {
    queues: Arc<FlowReplication>,
    /// The groups that the gateway owned at the last poll.
    groups: Option<OwnedGroups>,
    /// When it took each group over from a partner, or lost it, within [`HANDOVER`].
    moved: [Option<Tick>; VIP_GROUPS_MAX as usize],
    /// The tick of the last poll.
    last_tick: Option<Tick>,
    /// How many events may be applied in this tick while there are packets.
    left: usize,
    /// Whether the last poll processed no packets.
    is_idle: bool,
}

impl Replicating {
    pub(in crate::forward) const fn new(queues: Arc<FlowReplication>) -> Self {
        Self { queues, groups: None, moved: [None; VIP_GROUPS_MAX as usize], last_tick: None, left: 0, is_idle: true }
    }

    /// Applies events of partners, and sends them flows that have been confirmed for long enough. To be called at each
    /// poll; `changed`: with a new snapshot. Returns the number of events in both directions: more may wait.
    #[inline(never)]
    pub(in crate::forward) fn run(
        &mut self,
        mut of: ReceivingFlows<'_>,
        ownership: &VipOwnership,
        snapshot: &Snapshot,
        changed: bool,
        now_ns: u64,
    ) -> usize {
        let now = Tick::at(now_ns);
        if self.last_tick.replace(now) != Some(now) {
            self.left = APPLIED_PER_TICK;
            self.follow_groups(&mut of, ownership, snapshot, now_ns);
        } else if changed {
            self.follow_groups(&mut of, ownership, snapshot, now_ns);
        }
        let events = if self.is_idle { APPLIED_PER_POLL } else { APPLIED_PER_POLL.min(self.left) };
        let applied = of.apply_events(&self.queues, events, snapshot, now);
        self.left = self.left.saturating_sub(applied);
        applied + of.send_due(snapshot)
    }

    /// Takes over which VIP groups this gateway owns now. A lease that has expired counts as another gateway's.
    ///
    /// Events that wait are applied first, by the groups that this gateway owned before and owns now: they may be from
    /// the owner of before, or, if this gateway was stopped for a while, from the present owner.
    fn follow_groups(&mut self, of: &mut ReceivingFlows<'_>, ownership: &VipOwnership, snapshot: &Snapshot, now_ns: u64) {
        let valid = ownership.valid_groups(now_ns);
        let (groups, now) = (snapshot.groups.map(|owned| OwnedGroups { owned: owned.owned & valid, ..owned }), Tick::at(now_ns));
        let owned = groups.map(|groups| groups.owned);
        if groups != self.groups {
            let before = self.groups.map_or(0, |groups| groups.owned);
            let still_owned = before & owned.unwrap_or(0);
            let taken = self.moved_lately(now) & still_owned;
            of.set_groups(snapshot, owned.map(|_| GroupHoldings { owned: still_owned, taken, lost: 0 }));
            of.apply_events(&self.queues, self.queues.given(), snapshot, now);
            self.note_moves(before ^ owned.unwrap_or(0), now);
            if before & !owned.unwrap_or(0) != 0 && self.queues.has_partners() {
                of.flows.tables.v4.send_handshakes(HANDOVER.into());
                of.flows.tables.v6.send_handshakes(HANDOVER.into());
            }
        }
        self.groups = groups;
        let moved = self.moved_lately(now);
        of.set_groups(snapshot, owned.map(|owned| GroupHoldings { owned, taken: moved & owned, lost: moved & !owned }));
    }

    /// Groups have moved, to or from this gateway. Without a partner nobody else knows their flows.
    fn note_moves(&mut self, groups: u64, now: Tick) {
        let at = self.queues.has_partners().then_some(now);
        let moved = self.moved.iter_mut().enumerate().filter(|(group, _)| groups >> group & 1 == 1);
        moved.for_each(|(_, moved)| *moved = at);
    }

    /// The groups that have moved within [`HANDOVER`].
    fn moved_lately(&mut self, now: Tick) -> u64 {
        let of_group = |(group, moved): (usize, &mut Option<Tick>)| {
            *moved = moved.filter(|at| now.since(*at) < Ticks::from(HANDOVER));
            u64::from(moved.is_some()) << group
        };
        self.moved.iter_mut().enumerate().map(of_group).sum()
    }

    /// Ends a poll that has processed this many packets, and publishes the number of shadow flows.
    #[inline(never)]
    pub(in crate::forward) fn end_poll(&mut self, packets: usize, tables: &FlowTables) {
        self.is_idle = packets == 0;
        self.queues.set_shadows(tables.shadows());
    }
}

/// The flows of a worker that receives others: of the process before, or of partners.
pub(in crate::forward) struct ReceivingFlows<'e> {
    pub(in crate::forward) flows: &'e mut WorkerFlows,
    pub(in crate::forward) counters: &'e WorkerCounters,
    pub(in crate::forward) owned: Owned<'e>,
}

/// The result of applying an event.
enum Applied {
    Done,
    Refused,
    /// The flow is another worker's.
    OfOther,
}

impl ReceivingFlows<'_> {
    fn set_groups(&mut self, snapshot: &Snapshot, holdings: Option<GroupHoldings>) {
        set_groups::<u32>(&mut self.flows.tables, snapshot, holdings);
        set_groups::<u128>(&mut self.flows.tables, snapshot, holdings);
    }

    /// Sends flows that have been confirmed for long enough. Returns how many there were.
    fn send_due(&mut self, snapshot: &Snapshot) -> usize {
        let (owned, FlowTables { v4, v6 }) = (self.owned, &mut self.flows.tables);
        let of_v4 = v4.send_due(SENT_PER_POLL, |flow| is_sent_by(owned, snapshot, flow));
        of_v4 + v6.send_due(SENT_PER_POLL, |flow| is_sent_by(owned, snapshot, flow))
    }

    /// Applies up to this many events. Returns how many there were.
    fn apply_events(&mut self, replication: &FlowReplication, events: usize, snapshot: &Snapshot, now: Tick) -> usize {
        for count in 0..events {
            let Some(event) = replication.next_given() else { return count };
            let applied = match event.flow().client {
                SocketAddr::V4(_) => self.apply_event::<u32>(event, snapshot, now),
                SocketAddr::V6(_) => self.apply_event::<u128>(event, snapshot, now),
            };
            match applied {
                Applied::Done => replication.count_given(true),
                Applied::Refused => replication.count_given(false),
                Applied::OfOther => {}
            }
        }
        events
    }

    fn apply_event<A: FlowFamily>(&mut self, event: ReplicaEvent, snapshot: &Snapshot, now: Tick) -> Applied {
        let Some(flow) = flow_of::<A>(event.flow(), now) else { return Applied::Refused };
        let is_mine = |direction| is_owned(self.owned, snapshot, &flow.tuple(direction));
        let has_replies = flow.mode.is_two_way() && is_mine(Direction::ToClient);
        if !has_replies && !is_mine(Direction::ToBackend) {
            return Applied::OfOther;
        }
        let has_snat = flow.mode != FlowMode::Nat || snapshot.group_of_snat(flow.snat).is_some();
        if !has_snat || self.is_own(&flow) && !self.is_awaited(&event, &flow) {
            return Applied::Refused;
        }
        match event {
            ReplicaEvent::Holds(_) => match backend_of(snapshot, &flow) {
                Some(backend) => {
                    let frontend = snapshot.number_of(flow.vip, flow.protocol, flow.vip_port);
                    self.keep_shadow(Flow { backend, frontend, ..flow }, snapshot, now)
                }
                None => Applied::Refused,
            },
            ReplicaEvent::Ended(_) => {
                if let Some((index, _)) = self.same_flow(&flow) {
                    self.end_shadow::<A>(index, now);
                }
                Applied::Done
            }
        }
    }

    /// Whether this gateway owns a flow.
    fn is_own<A: FlowFamily>(&mut self, flow: &Flow<A>) -> bool {
        self.flows.table::<A>().replicator().is_none_or(|replicator| replicator.own(flow))
    }

    /// Whether this is a late event of a flow that this gateway does not know and whose group it has just taken over.
    fn is_awaited<A: FlowFamily>(&mut self, event: &ReplicaEvent, flow: &Flow<A>) -> bool {
        let replicator = self.flows.table::<A>().replicator();
        matches!(event, ReplicaEvent::Holds(_))
            && replicator.is_some_and(|replicator| replicator.awaits_news_of(flow))
            && self.same_flow(flow).is_none()
    }

    /// The flow with the same addresses and ports in both directions.
    fn same_flow<A: FlowFamily>(&self, flow: &Flow<A>) -> Option<(FlowIndex, Flow<A>)> {
        let (table, tuple) = (A::table(&self.flows.tables), flow.tuple(Direction::ToBackend));
        let (index, direction) = table.search(table.hash(&tuple), &tuple)?;
        let known = table.get(index);
        let is_same = direction == Direction::ToBackend
            && known.mode == flow.mode
            && (!flow.mode.is_two_way() || known.tuple(Direction::ToClient) == flow.tuple(Direction::ToClient));
        is_same.then_some((index, known))
    }

    /// Inserts or updates the flow of a partner.
    fn keep_shadow<A: FlowFamily>(&mut self, flow: Flow<A>, snapshot: &Snapshot, now: Tick) -> Applied {
        let idle_timeout = snapshot.backend(flow.backend).and_then(|backend| backend.idle_timeout);
        if self.flows.limits.is_over(&flow, idle_timeout, now) {
            return Applied::Refused;
        }
        let is_sent_here = is_sent_by(self.owned, snapshot, &flow);
        // With another header it is another connection by the same ports.
        let header = |flow: &Flow<A>| flow.shift.map(|shift| (shift.version(), shift.header_len()));
        let is_it =
            |known: &Flow<A>| known.backend == flow.backend && known.state.is_confirmed() && header(known) == header(&flow);
        let known = self.same_flow(&flow).filter(|(_, known)| is_it(known));
        let index = match known {
            // It was confirmed after this event.
            Some(_) if !flow.state.is_confirmed() => return Applied::Refused,
            Some((index, known)) => {
                let last_seen =
                    if now.since(known.last_seen) < now.since(flow.last_seen) { known.last_seen } else { flow.last_seen };
                // The stream may have gone so far through the partner that a number behind the header looks like one before.
                self.flows.table::<A>().set(index, &Flow { state: flow.state, last_seen, shift: flow.shift, ..known });
                index
            }
            None => {
                let Some(index) = self.insert_shadow(&flow, now) else { return Applied::Refused };
                if let Some(frontend) = snapshot.frontend(flow.vip, flow.protocol, flow.vip_port) {
                    frontend.remember(&flow.tuple(Direction::ToBackend), flow.backend, now);
                }
                index
            }
        };
        if is_sent_here && flow.state.is_confirmed() {
            self.flows.table::<A>().note_received(index, flow.state);
        }
        Applied::Done
    }

    /// Inserts the flow of a partner in place of flows that it excludes. `None`: one of them is this gateway's own, or
    /// there is no room.
    fn insert_shadow<A: FlowFamily>(&mut self, flow: &Flow<A>, now: Tick) -> Option<FlowIndex> {
        let tuples = [Direction::ToBackend, Direction::ToClient].map(|direction| flow.tuple(direction));
        let tuples = if flow.mode.is_two_way() { &tuples[..] } else { &tuples[..1] };
        for tuple in tuples {
            let table = self.flows.table::<A>();
            if let Some((index, _)) = table.search(table.hash(tuple), tuple) {
                let other = table.get(index);
                if self.is_own(&other) {
                    return None;
                }
                self.end_shadow::<A>(index, now);
            }
        }
        // The last eighth of the table is for new flows of this gateway.
        if self.flows.len() >= self.flows.max_flows - self.flows.max_flows.div_ceil(8) {
            return None;
        }
        let index = self.flows.table::<A>().insert_shadow(*flow).ok()?;
        self.counters.flow_joined(flow.counter_slot());
        Some(index)
    }

    /// Ends a flow because its owner has no such flow.
    pub(super) fn end_shadow<A: FlowFamily>(&mut self, index: FlowIndex, now: Tick) {
        let flow = self.flows.table::<A>().remove(index, FlowEnd::Replaced);
        if let Some(lease) = flow.snat_lease() {
            self.flows.ports.release(lease.pool, lease.port, now);
        }
        self.counters.flow_ended(flow.counter_slot());
    }
}

fn set_groups<A: FlowFamily>(tables: &mut FlowTables, snapshot: &Snapshot, holdings: Option<GroupHoldings>) {
    let groups = match (holdings, &A::of(snapshot).snat_groups) {
        (Some(holdings), Some(snat)) => snat.flows().holding(holdings),
        _ => FlowGroups::none(),
    };
    if let Some(replicator) = A::split(tables).0.replicator() {
        replicator.set_groups(groups);
    }
}

/// A replica as a flow without backend; `None` if no gateway sends such a flow. Of the flows that may yield, only
/// handshakes are sent. A replica has no sequence numbers, so the backend confirms a handshake by its next packet, as
/// it does with a flow that was found in mid-stream.
fn flow_of<A: Address>(replica: &FlowReplica, now: Tick) -> Option<Flow<A>> {
    let FlowReplica { protocol, mode, state, client, frontend, backend, snat, idle, shift } = *replica;
    let state = if state == FlowState::TcpAnswered { FlowState::TcpAdopted } else { state };
    let address = |of: SocketAddr| A::from_ip(of.ip());
    let is_one_way_state =
        matches!(state, FlowState::TcpOneWay | FlowState::TcpOneWayHalfClosed | FlowState::TcpOneWayReset | FlowState::UdpOneWay);
    let is_possible = protocol == protocol::SCTP || is_one_way_state != mode.is_two_way();
    let is_sent = state.is_confirmed() || state == FlowState::TcpAdopted;
    if state.protocol() != protocol || !is_sent || !is_possible {
        return None;
    }
    let lease = match (mode, snat) {
        (FlowMode::Nat, Some(snat)) if (SNAT_PORT_FIRST..=SNAT_PORT_LAST).contains(&snat.port()) => snat,
        (FlowMode::Nat, _) => return None,
        _ => client,
    };
    let backend_port = if mode.is_two_way() { backend.port() } else { 0 };
    let lease = if mode.is_two_way() {
        SnatLease { address: address(lease)?, port: lease.port(), pool: PoolId::NONE }
    } else {
        SnatLease { address: A::default(), port: 0, pool: PoolId::NONE }
    };
    let tuple = Tuple {
        source: address(client)?,
        destination: address(frontend)?,
        source_port: client.port(),
        destination_port: frontend.port(),
        protocol,
    };
    let to_backend = FlowBackend { id: BackendId::default(), address: address(backend)?, port: backend_port };
    let last_seen = Tick(now.0.wrapping_sub(Ticks::from(idle).0));
    let mut flow = Flow::new(&tuple, state, mode, to_backend, &lease, last_seen);
    if let Some(shift) = shift {
        flow.shift = Some(settled_shift(&shift, mode, &tuple)?);
    }
    // One flow cannot have the same packets in both directions.
    (flow.tuple(Direction::ToBackend) != flow.tuple(Direction::ToClient)).then_some(flow)
}

/// The shift of a replica whose client's packets have this tuple; `None` if no gateway sends such a replica.
fn settled_shift<A: Address>(replica: &ShiftReplica, mode: FlowMode, tuple: &Tuple<A>) -> Option<Shift> {
    let ShiftReplica { version, header_len } = *replica;
    let is_possible = mode.is_two_way() && matches!(tuple.protocol, protocol::TCP | protocol::UDP);
    let is_same = usize::from(header_len) == proxy_header(version, tuple).len();
    (is_possible && is_same).then(|| Shift::new(version, header_len, HeaderStage::Settled, 0))
}

/// The backend of a flow among those of its Service, also one that drains.
fn backend_of<A: Address>(snapshot: &Snapshot, flow: &Flow<A>) -> Option<BackendId> {
    let service = &snapshot.frontend(flow.vip, flow.protocol, flow.vip_port)?.service;
    let (at, wanted) =
        (SocketAddr::new(flow.vip.ip(), flow.vip_port), SocketAddr::new(flow.backend_address.ip(), flow.backend_port));
    let is_it = |address: SocketAddr| address.ip() == wanted.ip() && (!flow.mode.is_two_way() || address.port() == wanted.port());
    let ports = &snapshot.services().get(service)?.ports;
    let port = ports.iter().find(|port| port.protocol.number() == flow.protocol && port.frontends.contains(&at))?;
    // Sorted by address; in one-way modes the port of the wanted one is 0.
    let listed = port.backends.get(port.backends.partition_point(|backend| backend.address < wanted));
    if let Some(backend) = listed.filter(|backend| is_it(backend.address)) {
        return Some(backend.id);
    }
    let from = RemovedBackend { service: service.clone(), address: wanted, protocol: port.protocol };
    let mut removed =
        snapshot.removed().range(from..).take_while(|(removed, _)| removed.service == *service && is_it(removed.address));
    let (_, slot) = removed.find(|(removed, _)| removed.protocol == port.protocol)?;
    let generation = snapshot.backends.in_slot(*slot)?.generation;
    Some(BackendId { slot: *slot, generation })
}

//! Replication of flows between gateways: the queues between a worker and the agent.
//!
//! A gateway owns the flows whose VIP group it owns (of mode `nat`: the group of the SNAT address). It sends its
//! partners the flows that last; partners keep them as *shadow flows* in their own tables, so that they forward from
//! the first packet after a takeover. No flow is marked as shadow: the owner of the group at any time sends, the others
//! receive (docs/internals/decisions/0059-replicated-flows.md).
//!
//! A flow is sent when it has been confirmed for long enough, when its state changes, and again while it carries
//! packets (docs/internals/decisions/0060-shadow-flows.md). A table that replicates has one word for each flow, with
//! the last event that partners have; other tables have none. Handshakes are sent only when their group was lost, and
//! no later event of them (docs/internals/decisions/0068-no-reset-while-a-partner-may-know.md).
//!
//! **Invariant:** a full queue costs replicas, which are counted, never packets.
//!
//! Not here: the owner of a flow (`flow_groups`), the flows of partners in a worker (`forward::flow_transfer`), formats
//! and partners (the agent).

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use proto::ProxyProtocol;

use super::flow_groups::FlowGroups;
use super::resting_replies::RestingReplies;
use crate::flow::entry::{Flow, FlowView};
use crate::flow::state::{FlowMode, FlowState};
use crate::flow::tick::{Tick, Ticks};
use crate::stats::Counter;
use crate::wire::Address;

/// A flow as gateways send it to each other. The backend and its Service follow from `frontend`, `protocol` and
/// `backend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowReplica {
    /// Transport protocol number.
    pub protocol: u8,
    /// Mode of the flow.
    pub mode: FlowMode,
    /// State of the flow.
    pub state: FlowState,
    /// The client.
    pub client: SocketAddr,
    /// The frontend.
    pub frontend: SocketAddr,
    /// The backend's address and port as packets to it have them; in one-way modes the port is 0.
    pub backend: SocketAddr,
    /// The gateway's source towards the backend, in mode `nat`.
    pub snat: Option<SocketAddr>,
    /// Time since its last packet.
    pub idle: Duration,
    /// The PROXY header that its backend has, or that each of its datagrams gets.
    pub shift: Option<ShiftReplica>,
}

/// What gateways tell each other of a shift that is settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShiftReplica {
    /// The version of the header.
    pub version: ProxyProtocol,
    /// Its length in bytes.
    pub header_len: u8,
}

impl FlowReplica {
    /// The flow as it is now.
    #[must_use]
    pub fn of(flow: &FlowView) -> Self {
        let FlowView { protocol, mode, state, client, frontend, backend_address: backend, snat, idle, shift, .. } = *flow;
        let shift = shift.map(|shift| ShiftReplica { version: shift.version(), header_len: shift.header_len() });
        let idle = Duration::from_nanos(idle.nanoseconds());
        Self { protocol, mode, state, client, frontend, backend, snat, idle, shift }
    }
}

/// An event of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaEvent {
    /// It lasts, as it is described here.
    Holds(FlowReplica),
    /// It has ended.
    Ended(FlowReplica),
}

impl ReplicaEvent {
    /// The flow.
    #[must_use]
    pub const fn flow(&self) -> &FlowReplica {
        match self {
            Self::Holds(flow) | Self::Ended(flow) => flow,
        }
    }
}

/// The queues between one worker and the agent. A copy of all flows that last is a listing by inquiries
/// (`forward::decide::inquiry`), not part of this.
#[derive(Debug)]
pub struct FlowReplication {
    after: Duration,
    outgoing: ArrayQueue<ReplicaEvent>,
    incoming: ArrayQueue<ReplicaEvent>,
    sent: Counter,
    dropped: Counter,
    applied: Counter,
    refused: Counter,
    shadows: Counter,
    has_partners: AtomicBool,
}

impl FlowReplication {
    /// Queues with room for this many events in each direction. A flow is sent once it is confirmed and older than
    /// `after`.
    #[must_use]
    pub fn new(events: usize, after: Duration) -> Self {
        Self {
            after,
            outgoing: ArrayQueue::new(events.max(1)),
            incoming: ArrayQueue::new(events.max(1)),
            sent: Counter::default(),
            dropped: Counter::default(),
            applied: Counter::default(),
            refused: Counter::default(),
            shadows: Counter::default(),
            has_partners: AtomicBool::new(false),
        }
    }

    /// Sets whether there is a partner, or was until a moment ago: it may know flows of a group that this gateway takes
    /// over.
    pub fn set_partners(&self, has_partners: bool) {
        self.has_partners.store(has_partners, Ordering::Relaxed);
    }

    /// Whether there is a partner.
    pub(crate) fn has_partners(&self) -> bool {
        self.has_partners.load(Ordering::Relaxed)
    }

    /// How old a flow must be before it is sent.
    #[must_use]
    pub const fn after(&self) -> Duration {
        self.after
    }

    /// The oldest event of own flows, for the agent.
    #[must_use]
    pub fn take(&self) -> Option<ReplicaEvent> {
        self.outgoing.pop()
    }

    /// Gives the worker an event of a partner's flow; false when there is no room. The worker applies a bounded number
    /// of events a poll, and leaves out flows of other workers: the agent gives each event to every worker.
    pub fn give(&self, event: ReplicaEvent) -> bool {
        self.incoming.push(event).is_ok()
    }

    /// The oldest event of partners' flows.
    pub(crate) fn next_given(&self) -> Option<ReplicaEvent> {
        self.incoming.pop()
    }

    /// Number of events of partners' flows that wait.
    pub(crate) fn given(&self) -> usize {
        self.incoming.len()
    }

    /// Sends an event to the agent. Returns false when there is no room.
    fn send(&self, event: ReplicaEvent) -> bool {
        let is_sent = self.outgoing.push(event).is_ok();
        if is_sent {
            self.sent.add(1);
        }
        is_sent
    }

    /// Counts an event of a partner's flow that this worker applied, or could not apply.
    pub(crate) fn count_given(&self, is_applied: bool) {
        (if is_applied { &self.applied } else { &self.refused }).add(1);
    }

    /// Sets the number of shadow flows.
    pub(crate) fn set_shadows(&self, shadows: u32) {
        self.shadows.set(shadows.into());
    }

    /// Number of events that the worker sent.
    #[must_use]
    pub const fn sent(&self) -> &Counter {
        &self.sent
    }

    /// Number of events that the worker could not send for want of room.
    #[must_use]
    pub const fn dropped(&self) -> &Counter {
        &self.dropped
    }

    /// Number of events of partners that the worker applied.
    #[must_use]
    pub const fn applied(&self) -> &Counter {
        &self.applied
    }

    /// Number of events of partners that it could not apply: the backend is unknown, the table is full, or the flow is
    /// this gateway's own and known, or its group was not taken over just now.
    #[must_use]
    pub const fn refused(&self) -> &Counter {
        &self.refused
    }

    /// Present number of shadow flows, as the sweep counted them last.
    #[must_use]
    pub const fn shadows(&self) -> &Counter {
        &self.shadows
    }
}

/// Flows that wait until they are sent, most of them newly confirmed, per table: more than a worker opens in a second.
/// The sweep sends the flows that find no room, within 8.6 s more.
const YOUNG_MAX: usize = 1 << 16;

/// Flows that have ended whose events wait for room in the queue, per table: a worker that was offered 16,384 resets
/// while the agent took none. Further events are lost, and partners keep the flows until their idle limits.
const ENDED_MAX: usize = 1 << 14;
/// The part of them that is sent at once.
const ENDED_AT_ONCE: usize = 64;

/// The last event of a flow that partners have: time (24 bits, in ticks), and state. Never 0.
#[derive(Clone, Copy, PartialEq, Eq)]
struct LastSent(u32);

impl LastSent {
    const TIME_SHIFT: u32 = 8;
    const IS_SET: u32 = 1 << 7;

    fn at(now: Tick, state: FlowState) -> Self {
        Self(now.0 << Self::TIME_SHIFT | Self::IS_SET | state as u32)
    }

    fn has(self, state: FlowState) -> bool {
        self.0 & (Self::IS_SET - 1) == state as u32
    }

    fn age(self, now: Tick) -> Ticks {
        Ticks((now.0 << Self::TIME_SHIFT).wrapping_sub(self.0 & !0xff) >> Self::TIME_SHIFT)
    }
}

/// Sends the flows of one table to the agent.
#[derive(Debug)]
pub(crate) struct Replicator<A> {
    replication: Arc<FlowReplication>,
    after: Ticks,
    groups: FlowGroups<A>,
    /// By position, [`LastSent`]; 0: partners do not know the flow.
    last_sent: Box<[u32]>,
    /// Flows that were confirmed then, in this order, and handshakes of lost groups.
    young: VecDeque<(u32, Tick)>,
    /// Flows that have ended since the queue was full, in this order. Nothing else is sent before them: a new flow may
    /// have the same addresses and ports.
    ended: VecDeque<FlowReplica>,
    /// Flows of other gateways that the present sweep has visited so far, and that the last sweep visited.
    visited_shadows: u32,
    shadows: u32,
    /// Replies of flows that have ended whose ports no pool lets rest.
    resting: RestingReplies,
}

impl<A: Address> Replicator<A> {
    /// For a table with room for this many flows.
    pub(super) fn new(flows: usize, replication: Arc<FlowReplication>) -> Self {
        Self {
            after: replication.after().into(),
            replication,
            groups: FlowGroups::none(),
            last_sent: vec![0; flows].into(),
            young: VecDeque::with_capacity(YOUNG_MAX.min(flows)),
            ended: VecDeque::with_capacity(ENDED_MAX.min(flows)),
            visited_shadows: 0,
            shadows: 0,
            resting: RestingReplies::new(flows),
        }
    }

    /// The groups of flows.
    pub(crate) const fn groups(&self) -> &FlowGroups<A> {
        &self.groups
    }

    /// For how long the SNAT port of replies with this hash has rested; `None`: it need not rest.
    pub(in crate::flow) fn rest_of(&self, reply_hash: u64, now: Tick) -> Option<Ticks> {
        self.resting.age(reply_hash, now)
    }

    /// Lets the SNAT port of replies with this hash rest from `freed` on.
    pub(in crate::flow) fn rest(&mut self, reply_hash: u64, freed: Tick, now: Tick) {
        self.resting.add(reply_hash, freed, now);
    }

    /// Sets which groups this gateway owns.
    pub(crate) fn set_groups(&mut self, groups: FlowGroups<A>) {
        self.groups = groups;
    }

    /// Whether this gateway took over the group of a flow so recently that partners may still send it.
    pub(crate) fn awaits_news_of(&self, flow: &Flow<A>) -> bool {
        self.groups.await_news_of(flow)
    }

    /// Whether this gateway owns a flow.
    #[inline(never)]
    pub(crate) fn own(&self, flow: &Flow<A>) -> bool {
        self.groups.own(flow)
    }

    /// Number of flows that other gateways own, as the last sweep counted them.
    pub(crate) const fn shadows(&self) -> u32 {
        self.shadows
    }

    fn last_sent(&self, index: u32) -> Option<LastSent> {
        Some(LastSent(self.last_sent[index as usize])).filter(|last| last.0 != 0)
    }

    /// Queues a flow that was confirmed, or a handshake of a group that was lost. It is sent once it is due.
    #[cold]
    pub(in crate::flow) fn queue(&mut self, index: u32, now: Tick) {
        if self.young.len() < self.young.capacity() {
            self.young.push_back((index, now));
        }
    }

    /// The position of a flow that was confirmed long enough ago to be sent. Ends that wait are sent first. When a
    /// group was lost, all flows that wait are due at once: the next owner cannot learn them later.
    pub(in crate::flow) fn take_due(&mut self, now: Tick) -> Option<u32> {
        self.send_ended();
        let is_due = |(_, confirmed): &&(u32, Tick)| now.since(*confirmed) >= self.after || self.groups.have_lost();
        let (index, _) = *self.young.front().filter(is_due)?;
        self.young.pop_front();
        Some(index)
    }

    /// Sends a flow that was never sent, if it is old enough and this gateway's own, or was until just now. Sends a
    /// handshake of a group that it has just lost.
    pub(in crate::flow) fn send_first(&mut self, index: u32, flow: &Flow<A>, now: Tick) {
        let is_due = match flow.state {
            FlowState::TcpAnswered => self.groups.lost_group_of(flow),
            state if state.is_confirmed() => now.since(flow.since) >= self.after || self.groups.have_lost(),
            _ => false,
        };
        // A backend of the other family has no address here, by which partners could find it.
        let is_known = flow.backend_address != A::default();
        if self.last_sent(index).is_none() && is_due && is_known && self.groups.share_first(flow) {
            self.send(index, flow, now);
        }
    }

    /// Sends a flow, unless its header is on its way: partners could not go on with it. They may know it as the
    /// connection by the same ports before.
    fn send(&mut self, index: u32, flow: &Flow<A>, now: Tick) {
        if flow.shift.is_some_and(|shift| !shift.is_taken()) {
            return;
        }
        let is_sent = self.send_ended() && self.replication.send(ReplicaEvent::Holds(FlowReplica::of(&FlowView::of(flow, now))));
        if !is_sent {
            self.replication.dropped.add(1);
        } else if flow.state.is_confirmed() {
            self.last_sent[index as usize] = LastSent::at(now, flow.state).0;
        }
    }

    /// Sends the ends of flows that have ended while the queue was full. Returns whether none is left.
    fn send_ended(&mut self) -> bool {
        for _ in 0..ENDED_AT_ONCE {
            let Some(flow) = self.ended.front() else { return true };
            if !self.replication.send(ReplicaEvent::Ended(*flow)) {
                return false;
            }
            self.ended.pop_front();
        }
        self.ended.is_empty()
    }

    /// A packet has been applied to the state of a flow. A change is sent once a tick; the sweep sends the last one. A
    /// handshake that a backend answers just after its group was lost is sent, too: its client goes on at the next
    /// owner.
    #[cold]
    pub(in crate::flow) fn changed(&mut self, index: u32, flow: &Flow<A>, now: Tick) {
        if flow.state == FlowState::TcpAnswered && self.groups.have_lost() {
            return self.queue(index, now);
        }
        let is_changed = |last: LastSent| !last.has(flow.state) && last.age(now) > Ticks(0);
        if self.last_sent(index).is_some_and(is_changed) && self.groups.share(flow) {
            self.send(index, flow, now);
        }
    }

    /// A flow has carried a packet after a long silence. Partners would take it for over before the sweep sends it.
    pub(in crate::flow) fn carried_again(&mut self, index: u32, flow: &Flow<A>, now: Tick) {
        if self.last_sent(index).is_some_and(|last| last.age(now) > Ticks(0)) && self.groups.share(flow) {
            self.send(index, flow, now);
        }
    }

    /// The sweep visits a flow that lasts. Own flows are sent again after `refresh` if they carried packets; `None`:
    /// another worker sends the flow.
    #[inline(never)]
    pub(in crate::flow) fn visit(&mut self, index: u32, flow: &Flow<A>, refresh: Option<Ticks>, now: Tick) {
        if !self.groups.own(flow) {
            self.visited_shadows += 1;
            return;
        }
        let Some(refresh) = refresh.filter(|_| self.groups.share(flow)) else { return };
        match self.last_sent(index) {
            None => self.send_first(index, flow, now),
            Some(last) => {
                let has_carried = now.since(flow.last_seen) < last.age(now);
                if !last.has(flow.state) || has_carried && last.age(now) >= refresh {
                    self.send(index, flow, now);
                }
            }
        }
    }

    /// The sweep has visited all flows.
    pub(in crate::flow) fn end_sweep(&mut self) {
        self.shadows = std::mem::take(&mut self.visited_shadows);
    }

    /// A flow ends, whose replies have this hash. The port of a flow without a pool rests here.
    #[cold]
    pub(in crate::flow) fn ended(&mut self, index: u32, flow: &Flow<A>, reply_hash: u64, now: Tick) {
        if flow.has_foreign_port() {
            self.rest(reply_hash, now, now);
        }
        if std::mem::take(&mut self.last_sent[index as usize]) != 0 && self.groups.share(flow) {
            let replica = FlowReplica::of(&FlowView::of(flow, now));
            if self.send_ended() && self.replication.send(ReplicaEvent::Ended(replica)) {
                return;
            }
            if self.ended.len() < self.ended.capacity() {
                self.ended.push_back(replica);
            } else {
                self.replication.dropped.add(1);
            }
        }
    }

    /// A partner has sent this flow, to all its partners.
    pub(crate) fn note_received(&mut self, index: usize, state: FlowState, now: Tick) {
        if let Some(last) = self.last_sent.get_mut(index) {
            *last = LastSent::at(now, state).0;
        }
    }
}

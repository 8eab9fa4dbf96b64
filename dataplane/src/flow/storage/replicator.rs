//! Replication of flows between gateways: the queues between a worker and the agent.
//!
//! A gateway owns the flows whose VIP group it owns (of mode `nat`: the group of the SNAT address). It tells its partners
//! which of them last; partners keep them as *shadow flows* in their own tables, so that they forward from the first
//! packet after a takeover. No flow is marked as shadow: who owns the group decides at any time which side tells and which
//! side listens (docs/internals/decisions/0059-replicated-flows.md).
//!
//! A flow is told when it has been confirmed for long enough, when its state changes, and again while it carries packets
//! (docs/internals/decisions/0060-shadow-flows.md). What was told stands in one word beside each flow, in tables that
//! replicate; the others have none. Handshakes are told only when their group was lost, and no news of them follows
//! (docs/internals/decisions/0068-no-reset-while-a-partner-may-know.md).
//!
//! **Invariant:** a full queue costs replicas, which are counted, never packets.
//!
//! Not here: who owns a flow (`flow_groups`), what becomes of the flows of partners (`forward::worker`), formats and partners
//! (the agent).

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_queue::ArrayQueue;

use super::flow_groups::FlowGroups;
use super::resting_replies::RestingReplies;
use crate::flow::entry::{Flow, FlowView};
use crate::flow::state::{FlowMode, FlowState};
use crate::flow::tick::{Tick, Ticks};
use crate::stats::Counter;
use crate::wire::Address;

/// A flow as gateways tell each other about it. Which backend of which Service it has follows from `frontend`, `protocol`
/// and `backend`.
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
}

impl FlowReplica {
    /// The flow as it is now.
    #[must_use]
    pub fn of(flow: &FlowView) -> Self {
        let FlowView { protocol, mode, state, client, frontend, backend_address: backend, snat, idle, .. } = *flow;
        Self { protocol, mode, state, client, frontend, backend, snat, idle: Duration::from_nanos(idle.nanoseconds()) }
    }
}

/// News of a flow.
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
    told: Counter,
    dropped: Counter,
    applied: Counter,
    refused: Counter,
    shadows: Counter,
    has_partners: AtomicBool,
}

impl FlowReplication {
    /// Queues with room for this many events in each direction. A flow is told once it is confirmed and older than
    /// `after`.
    #[must_use]
    pub fn new(events: usize, after: Duration) -> Self {
        Self {
            after,
            outgoing: ArrayQueue::new(events.max(1)),
            incoming: ArrayQueue::new(events.max(1)),
            told: Counter::default(),
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

    /// How old a flow must be before it is told.
    #[must_use]
    pub const fn after(&self) -> Duration {
        self.after
    }

    /// The oldest news of own flows, for the agent.
    #[must_use]
    pub fn take(&self) -> Option<ReplicaEvent> {
        self.outgoing.pop()
    }

    /// Gives the worker news of a partner's flow; false when there is no room. The worker applies a bounded number of
    /// events a poll, and leaves out flows of other workers: the agent gives each event to every worker.
    pub fn give(&self, event: ReplicaEvent) -> bool {
        self.incoming.push(event).is_ok()
    }

    /// The oldest news of partners' flows.
    pub(crate) fn next_given(&self) -> Option<ReplicaEvent> {
        self.incoming.pop()
    }

    /// Number of news of partners' flows that wait.
    pub(crate) fn given(&self) -> usize {
        self.incoming.len()
    }

    /// Tells the agent. Returns false when there is no room.
    fn tell(&self, event: ReplicaEvent) -> bool {
        let is_told = self.outgoing.push(event).is_ok();
        if is_told {
            self.told.add(1);
        }
        is_told
    }

    /// Counts news of a partner's flow that this worker applied, or could not apply.
    pub(crate) fn count_given(&self, is_applied: bool) {
        (if is_applied { &self.applied } else { &self.refused }).add(1);
    }

    /// Sets the number of shadow flows.
    pub(crate) fn set_shadows(&self, shadows: u32) {
        self.shadows.set(shadows.into());
    }

    /// Number of events that the worker told.
    #[must_use]
    pub const fn told(&self) -> &Counter {
        &self.told
    }

    /// Number of events that the worker could not tell for want of room.
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

/// Flows that wait until they are told, most of them newly confirmed, per table: more than a worker opens in a second.
/// Those that find no room are told by the sweep, within 8.6 s more.
const YOUNG_MAX: usize = 1 << 16;

/// Flows that have ended whose news wait for room in the queue, per table: a worker that was offered 16,384 resets while
/// the agent took none. News of those beyond are lost, and partners keep the flows until their idle limits.
const ENDED_MAX: usize = 1 << 14;
/// Of these, how many are told at once.
const ENDED_AT_ONCE: usize = 64;

/// The news of a flow that partners have: time (24 bits, in ticks), and state. Never 0.
#[derive(Clone, Copy, PartialEq, Eq)]
struct News(u32);

impl News {
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

/// Tells the agent about the flows of one table.
#[derive(Debug)]
pub(crate) struct Replicator<A> {
    replication: Arc<FlowReplication>,
    after: Ticks,
    groups: FlowGroups<A>,
    /// By position, [`News`]; 0: partners have none of the flow.
    news: Box<[u32]>,
    /// Flows that were confirmed then, in this order, and handshakes of lost groups.
    young: VecDeque<(u32, Tick)>,
    /// Flows that have ended since the queue was full, in this order. Until they are told nothing else is: a new flow may
    /// have the same addresses and ports.
    ended: VecDeque<FlowReplica>,
    /// Flows of other gateways that the present sweep has met, and that the last one has.
    met_shadows: u32,
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
            news: vec![0; flows].into(),
            young: VecDeque::with_capacity(YOUNG_MAX.min(flows)),
            ended: VecDeque::with_capacity(ENDED_MAX.min(flows)),
            met_shadows: 0,
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

    /// Whether this gateway took over the group of a flow so recently that partners may still tell it.
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

    fn news(&self, index: u32) -> Option<News> {
        Some(News(self.news[index as usize])).filter(|news| news.0 != 0)
    }

    /// Queues a flow that was confirmed, or a handshake of a group that was lost. It is told once it is due.
    #[cold]
    pub(in crate::flow) fn will_tell(&mut self, index: u32, now: Tick) {
        if self.young.len() < self.young.capacity() {
            self.young.push_back((index, now));
        }
    }

    /// The position of a flow that was confirmed long enough ago to be told. News that wait are told first. When a group
    /// was lost, all flows that wait are told at once: the next owner cannot learn them later.
    pub(in crate::flow) fn take_due(&mut self, now: Tick) -> Option<u32> {
        self.tell_ended();
        let is_due = |(_, confirmed): &&(u32, Tick)| now.since(*confirmed) >= self.after || self.groups.have_lost();
        let (index, _) = *self.young.front().filter(is_due)?;
        self.young.pop_front();
        Some(index)
    }

    /// Tells a flow that was never told, if it is old enough and this gateway's own, or was until just now. Tells a
    /// handshake of a group that it has just lost.
    pub(in crate::flow) fn tell_first(&mut self, index: u32, flow: &Flow<A>, now: Tick) {
        let is_due = match flow.state {
            FlowState::TcpAnswered => self.groups.lost_group_of(flow),
            state if state.is_confirmed() => now.since(flow.since) >= self.after || self.groups.have_lost(),
            _ => false,
        };
        // A backend of the other family has no address here, by which partners could find it.
        let is_known = flow.backend_address != A::default();
        if self.news(index).is_none() && is_due && is_known && self.groups.share_first(flow) {
            self.tell(index, flow, now);
        }
    }

    fn tell(&mut self, index: u32, flow: &Flow<A>, now: Tick) {
        let is_told = self.tell_ended() && self.replication.tell(ReplicaEvent::Holds(FlowReplica::of(&FlowView::of(flow, now))));
        if !is_told {
            self.replication.dropped.add(1);
        } else if flow.state.is_confirmed() {
            self.news[index as usize] = News::at(now, flow.state).0;
        }
    }

    /// Tells flows that have ended while the queue was full. Returns whether none is left.
    fn tell_ended(&mut self) -> bool {
        for _ in 0..ENDED_AT_ONCE {
            let Some(flow) = self.ended.front() else { return true };
            if !self.replication.tell(ReplicaEvent::Ended(*flow)) {
                return false;
            }
            self.ended.pop_front();
        }
        self.ended.is_empty()
    }

    /// A packet has been applied to the state of a flow. A change is told once a tick; the sweep tells the last one. A
    /// handshake that a backend answers just after its group was lost is told, too: its client goes on at the next owner.
    #[cold]
    pub(in crate::flow) fn changed(&mut self, index: u32, flow: &Flow<A>, now: Tick) {
        if flow.state == FlowState::TcpAnswered && self.groups.have_lost() {
            return self.will_tell(index, now);
        }
        let is_news = |news: News| !news.has(flow.state) && news.age(now) > Ticks(0);
        if self.news(index).is_some_and(is_news) && self.groups.share(flow) {
            self.tell(index, flow, now);
        }
    }

    /// A flow has carried a packet after a long silence. Partners would take it for over before the sweep tells it.
    pub(in crate::flow) fn carried_again(&mut self, index: u32, flow: &Flow<A>, now: Tick) {
        if self.news(index).is_some_and(|news| news.age(now) > Ticks(0)) && self.groups.share(flow) {
            self.tell(index, flow, now);
        }
    }

    /// The sweep meets a flow that lasts. Own flows are told again after `refresh` if they carried packets; `None`: the
    /// flow is not for this worker to tell.
    #[inline(never)]
    pub(in crate::flow) fn meet(&mut self, index: u32, flow: &Flow<A>, refresh: Option<Ticks>, now: Tick) {
        if !self.groups.own(flow) {
            self.met_shadows += 1;
            return;
        }
        let Some(refresh) = refresh.filter(|_| self.groups.share(flow)) else { return };
        match self.news(index) {
            None => self.tell_first(index, flow, now),
            Some(news) => {
                let has_carried = now.since(flow.last_seen) < news.age(now);
                if !news.has(flow.state) || has_carried && news.age(now) >= refresh {
                    self.tell(index, flow, now);
                }
            }
        }
    }

    /// The sweep has met all flows.
    pub(in crate::flow) fn end_sweep(&mut self) {
        self.shadows = std::mem::take(&mut self.met_shadows);
    }

    /// A flow ends, whose replies have this hash. The port of a flow without a pool rests here.
    #[cold]
    pub(in crate::flow) fn ended(&mut self, index: u32, flow: &Flow<A>, reply_hash: u64, now: Tick) {
        if flow.has_foreign_port() {
            self.rest(reply_hash, now, now);
        }
        if std::mem::take(&mut self.news[index as usize]) != 0 && self.groups.share(flow) {
            let replica = FlowReplica::of(&FlowView::of(flow, now));
            if self.tell_ended() && self.replication.tell(ReplicaEvent::Ended(replica)) {
                return;
            }
            if self.ended.len() < self.ended.capacity() {
                self.ended.push_back(replica);
            } else {
                self.replication.dropped.add(1);
            }
        }
    }

    /// A partner has told this flow, and so all partners.
    pub(crate) fn hear(&mut self, index: usize, state: FlowState, now: Tick) {
        if let Some(news) = self.news.get_mut(index) {
            *news = News::at(now, state).0;
        }
    }
}

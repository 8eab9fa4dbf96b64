//! Carries verdicts out: rewrites, answers, holds, hands to Linux, drops, and counts each once.

mod deliver;
mod error;
mod fragment;
mod from_linux;
mod originate;
mod tunnel;

use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use proto::Family;

use crate::answer::IcmpError;
use crate::cut::cut;
use crate::datagrams::Datagrams;
use crate::decide::{
    Answer, Changes, Flows, Obstacle, OtherFlows, Packet, Passage, Verdict, decide, follow, follow_one_way, follow_plain,
    rewrite_of,
};
use crate::flow::{Candidate, Flow, FlowTable, IdleLimits, Segment};
use crate::held::{Awaited, Held};
use crate::identification::Identifications;
use crate::lanes::Lanes;
use crate::limiter::AnswerLimiter;
use crate::observe::{Belongs, Fate, Observe};
use crate::snapshot::{Exit, Place, Snapshot};
use crate::snat::SnatPorts;
use crate::tags::Tags;
use crate::tally::Tally;
use crate::tick::{Tick, Ticks};
use crate::twin_rate::TwinRate;
use crate::wire::{Ethernet, protocol, take_mut};
use crate::worker::Ask;
use crate::{Address, Buffer, Burst, DropReason, Headers, Link, Port, Transport, WorkerCounters, answer, mss, rewrite};

/// All of a worker but its ports.
#[derive(Debug)]
pub(crate) struct Engine<B, O> {
    /// Which of the gateway's workers it is, from 0.
    pub(crate) worker: usize,
    pub(crate) v4: FlowTable<u32>,
    pub(crate) v6: FlowTable<u128>,
    pub(crate) ports: SnatPorts,
    pub(crate) max_flows: u32,
    pub(crate) limits: IdleLimits,
    pub(crate) held: Held<B>,
    /// Neighbours of held packets may be resolved by now.
    pub(crate) held_may_go: bool,
    pub(crate) datagrams: Datagrams<B>,
    pub(crate) identifications: Identifications,
    pub(crate) limiter: AnswerLimiter,
    pub(crate) twin_rate: TwinRate,
    pub(crate) asks: Arc<ArrayQueue<Ask>>,
    pub(crate) tally: Tally,
    pub(crate) counters: Arc<WorkerCounters>,
    pub(crate) observer: O,
    pub(crate) swept: Swept,
}

/// Where the sweeps go on.
#[derive(Debug, Default)]
pub(crate) struct Swept {
    v4: u32,
    v6: u32,
    pools: u32,
}

/// Where packets come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A port's receive queue: some may be other workers'.
    Port,
    /// Other workers: fragments, whose owner is to be found out here.
    Met,
    /// Other workers, or those that waited here: this worker's.
    Owned,
}

/// Where a packet stands: by which link it came in, with which tags, when, and from where. The tags are not in the frame any
/// more: what goes back, or to Linux, gets them again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) link: Link,
    pub(crate) tags: Tags,
    pub(crate) now_ns: u64,
    pub(crate) origin: Origin,
}

/// What the first two passes over a burst found out about a packet.
pub(crate) struct Looked<A> {
    pub(crate) headers: Headers<A>,
    pub(crate) hash: u64,
    pub(crate) candidate: Candidate,
}

/// The tables of a family.
pub(crate) trait Tables<A: Address> {
    /// The flows of the family, and the idle limits.
    fn flows(&mut self) -> (&mut FlowTable<A>, &IdleLimits);
    /// What decisions on new flows need.
    fn new_flows<'a>(&'a mut self, changes: &'a mut Changes) -> Flows<'a, A>;
}

impl<B, O> Tables<u32> for Engine<B, O> {
    #[inline]
    fn flows(&mut self) -> (&mut FlowTable<u32>, &IdleLimits) {
        (&mut self.v4, &self.limits)
    }

    fn new_flows<'a>(&'a mut self, changes: &'a mut Changes) -> Flows<'a, u32> {
        let (room, worker) = (self.room(), self.worker);
        let Self { v4: table, v6, ports, limits, .. } = self;
        Flows { table, others: OtherFlows::V6(v6), ports, limits, changes, room, worker }
    }
}

impl<B, O> Tables<u128> for Engine<B, O> {
    #[inline]
    fn flows(&mut self) -> (&mut FlowTable<u128>, &IdleLimits) {
        (&mut self.v6, &self.limits)
    }

    fn new_flows<'a>(&'a mut self, changes: &'a mut Changes) -> Flows<'a, u128> {
        let (room, worker) = (self.room(), self.worker);
        let Self { v6: table, v4, ports, limits, .. } = self;
        Flows { table, others: OtherFlows::V4(v4), ports, limits, changes, room, worker }
    }
}

impl<B, O> Engine<B, O> {
    /// Flows that may still be made, of either family.
    fn room(&self) -> u32 {
        self.max_flows.saturating_sub(self.v4.len() + self.v6.len())
    }
}

impl<B: Buffer, O: Observe<B>> Engine<B, O> {
    /// Ends one packet of IPv4 or IPv6.
    #[inline(always)]
    pub(crate) fn dispose<A: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        snapshot: &Snapshot,
        arrival: Arrival,
        buffer: B,
        looked: &Looked<A>,
    ) where
        Self: Tables<A>,
    {
        let Looked { headers, hash, candidate } = looked;
        let packet = Packet { headers, hash: *hash, candidate: *candidate, in_link: arrival.link };
        let (table, limits) = self.flows();
        match follow_plain(&packet, snapshot, table, limits, Tick::at(arrival.now_ns)) {
            Some(passage) => {
                self.tally.hits += 1;
                self.forward(lanes, buffer, headers, passage);
            }
            None => self.obstructed(lanes, snapshot, arrival, buffer, &packet),
        }
    }

    /// Ends a packet that does not just follow a flow. Kept out of the way of those that do.
    #[inline(never)]
    fn obstructed<A: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        snapshot: &Snapshot,
        arrival: Arrival,
        buffer: B,
        packet: &Packet<'_, A>,
    ) where
        Self: Tables<A>,
    {
        let now = Tick::at(arrival.now_ns);
        let (table, limits) = self.flows();
        let obstacle = match follow(packet, snapshot, table, limits, now) {
            Ok(passage) => {
                self.tally.hits += 1;
                return self.depart(lanes, buffer, packet.headers, passage);
            }
            Err(obstacle) => obstacle,
        };
        if let Obstacle::OneWay(index) = obstacle
            && let Ok(delivery) = follow_one_way(packet, index, snapshot, self.flows().0, now)
        {
            self.tally.hits += 1;
            return self.deliver(lanes, buffer, packet.headers, &delivery);
        }
        match packet.headers.transport {
            Transport::Fragment => self.fragment(lanes, snapshot, arrival, buffer, packet),
            Transport::Icmp { .. } => {
                if let Err((buffer, obstacle)) = self.error(lanes, snapshot, arrival, buffer, packet) {
                    self.decided(lanes, snapshot, arrival, buffer, packet, obstacle);
                }
            }
            _ => self.decided(lanes, snapshot, arrival, buffer, packet, obstacle),
        }
    }

    /// Ends a packet by [`decide`].
    fn decided<A: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        snapshot: &Snapshot,
        arrival: Arrival,
        buffer: B,
        packet: &Packet<'_, A>,
        obstacle: Obstacle,
    ) where
        Self: Tables<A>,
    {
        let segment = Segment::of(buffer.bytes(), packet.headers);
        let verdict = self.verdict(lanes, snapshot, arrival, packet, segment, obstacle);
        self.apply(lanes, snapshot, arrival, buffer, packet.headers, verdict);
    }

    /// What [`decide`] says, with what it changed counted, and what it resets told so.
    #[inline(always)]
    fn verdict<'s, A: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        snapshot: &'s Snapshot,
        arrival: Arrival,
        packet: &Packet<'_, A>,
        segment: Segment,
        obstacle: Obstacle<'s>,
    ) -> Verdict<'s>
    where
        Self: Tables<A>,
    {
        let mut changes = Changes::default();
        let verdict = decide(packet, segment, obstacle, snapshot, &mut self.new_flows(&mut changes), Tick::at(arrival.now_ns));
        self.count_changes(&changes);
        if !changes.resets.is_empty() {
            self.originate(lanes, arrival, &changes.resets, matches!(verdict, Verdict::Reset(_)));
        }
        verdict
    }

    fn count_changes(&mut self, changes: &Changes) {
        if changes.hit {
            self.tally.hits += 1;
            return;
        }
        self.tally.misses += 1;
        self.tally.reused_early += u64::from(changes.reused_early);
        for backend in changes.ended.into_iter().chain(changes.displaced) {
            self.counters.flow_ended(backend.slot);
        }
        for backend in &changes.reclaimed {
            self.tally.reclaimed += 1;
            self.counters.flow_ended(backend.slot);
        }
        if let Some(backend) = changes.made {
            self.tally.new_flows += 1;
            if let Some(counters) = self.counters.backend(backend.slot) {
                counters.flows.add(1);
                counters.new_flows.add(1);
            }
        }
        if let Some(awaited) = changes.ask {
            self.ask(awaited);
        }
    }

    /// Asks Linux for a neighbour. When the queue is full others are asked for already, and a later packet asks again.
    fn ask(&self, awaited: Awaited) {
        let _ = self.asks.push((awaited.link, awaited.address));
    }

    fn apply<A: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        snapshot: &Snapshot,
        arrival: Arrival,
        mut buffer: B,
        headers: &Headers<A>,
        verdict: Verdict<'_>,
    ) where
        Self: Tables<A>,
    {
        if let Verdict::Forward(passage) = &verdict {
            let mtus = [snapshot.mtu(arrival.link), passage.exit.mtu];
            mss::clamp_between(buffer.bytes_mut(), headers, mtus);
        }
        match verdict {
            Verdict::Forward(passage)
                if headers.dont_fragment
                    && headers.packet_len <= passage.exit.plain_mtu
                    && !matches!(headers.transport, Transport::Sctp { .. }) =>
            {
                self.forward(lanes, buffer, headers, passage);
            }
            Verdict::Forward(passage) => self.depart(lanes, buffer, headers, passage),
            Verdict::Deliver(delivery) => self.deliver(lanes, buffer, headers, &delivery),
            Verdict::Wait(awaited) => self.hold(lanes, arrival, buffer, awaited),
            Verdict::Linux => self.give_to_linux(lanes, snapshot, arrival, buffer),
            Verdict::LinuxAt(link) => self.give_to_linux_at(lanes, snapshot, arrival, link, buffer),
            Verdict::Reply(answer) => self.reply(lanes, snapshot, arrival, buffer, headers, answer),
            Verdict::Reset(reason) => self.reset(lanes, snapshot, arrival, buffer, headers, reason),
            Verdict::Drop(reason) => self.drop(lanes, buffer, reason),
        }
    }

    /// Rewrites a packet as its flow says, and sends it.
    #[inline(always)]
    fn forward<A: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        mut buffer: B,
        headers: &Headers<A>,
        passage: Passage<'_>,
    ) where
        Self: Tables<A>,
    {
        let Passage { flow, direction, exit } = passage;
        let flow = self.flows().0.get(flow);
        let id = flow.backend;
        let belongs = Belongs { vip: flow.vip.ip(), port: flow.vip_port, protocol: flow.protocol, backend: id };
        rewrite::nat(buffer.bytes_mut(), headers, &rewrite_of(flow, direction, exit));
        trim(&mut buffer, headers);
        self.counters.forwarded(id.slot, headers.packet_len);
        self.observer.observe(&buffer, Fate::Forward(exit.port), || Some(belongs));
        lanes.send(exit.port, buffer, &mut self.tally);
    }

    /// As [`Self::forward`], for any packet. An IPv4 packet that may be fragmented gets a number of ours, and is cut if it
    /// must be; on a link with tags it gets those.
    #[inline(never)]
    fn depart<A: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        mut buffer: B,
        headers: &Headers<A>,
        passage: Passage<'_>,
    ) where
        Self: Tables<A>,
    {
        let Passage { flow, direction, exit } = passage;
        let flow = *self.flows().0.get(flow);
        rewrite::whole(buffer.bytes_mut(), headers, &rewrite_of(&flow, direction, exit));
        if A::FAMILY == Family::V4 && !headers.dont_fragment {
            self.renumber(&mut buffer, headers);
        }
        self.send_of_flow(lanes, buffer, headers, &flow, exit);
    }

    /// Sends what was rewritten as its flow says, in pieces if it does not fit; apart from the plain packets that
    /// [`Self::forward`] sends. Pieces after the first are originated: the packet became the first.
    fn send_of_flow<A: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        mut buffer: B,
        headers: &Headers<A>,
        flow: &Flow<A>,
        exit: &Exit,
    ) {
        let mut rest = Burst::new();
        trim(&mut buffer, headers);
        if headers.packet_len > exit.mtu {
            match cut(&mut buffer, usize::from(headers.network_offset), exit.mtu, || lanes.allocate(exit.port)) {
                Some(pieces) => rest = pieces,
                None => return self.drop(lanes, buffer, DropReason::TooBig),
            }
        }
        let belongs = Belongs { vip: flow.vip.ip(), port: flow.vip_port, protocol: flow.protocol, backend: flow.backend };
        self.counters.forwarded(flow.backend.slot, headers.packet_len);
        self.observer.observe(&buffer, Fate::Forward(exit.port), || Some(belongs));
        let tags = Tags::on(exit.link);
        lanes.leave(exit.port, tags, buffer, &mut self.tally);
        for piece in rest {
            self.tally.originated += 1;
            lanes.leave(exit.port, tags, piece, &mut self.tally);
        }
    }

    fn hold<P: Port<Buffer = B>>(&mut self, lanes: &mut Lanes<P>, arrival: Arrival, buffer: B, awaited: Awaited) {
        match self.held.keep(buffer, arrival, awaited) {
            Ok(true) => self.ask(awaited),
            Ok(false) => {}
            Err(buffer) => self.drop(lanes, buffer, DropReason::NeighbourUnresolved),
        }
    }

    /// Drops a packet under a reason.
    pub(crate) fn drop<P: Port<Buffer = B>>(&mut self, lanes: &mut Lanes<P>, buffer: B, reason: DropReason) {
        self.observer.observe(&buffer, Fate::Drop(reason), || None);
        self.tally.drop(reason);
        lanes.discard(buffer);
    }

    pub(crate) fn give_to_linux<P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        snapshot: &Snapshot,
        arrival: Arrival,
        mut buffer: B,
    ) {
        let port = arrival.link.port();
        if !snapshot.port(port).twin {
            self.drop(lanes, buffer, DropReason::NoRoute);
        } else if !self.twin_rate.allow(lanes.class(port, buffer.bytes()), arrival.now_ns) {
            self.drop(lanes, buffer, DropReason::TwinRate);
        } else if !arrival.tags.put_on(&mut buffer) {
            self.drop(lanes, buffer, DropReason::TwinFull);
        } else {
            self.observer.observe(&buffer, Fate::Linux(port), || None);
            lanes.queue_for_linux(port, buffer, &mut self.tally);
        }
    }

    /// Gives a packet to Linux as if it had come in by another link, to that port's Ethernet address.
    #[cold]
    fn give_to_linux_at<P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        snapshot: &Snapshot,
        arrival: Arrival,
        link: Link,
        mut buffer: B,
    ) {
        if let Some((ethernet, _)) = take_mut::<Ethernet>(buffer.bytes_mut()) {
            ethernet.destination = snapshot.port(link.port()).mac.0;
        }
        self.give_to_linux(lanes, snapshot, Arrival { link, tags: Tags::on(link), ..arrival }, buffer);
    }

    /// ARP and neighbour discovery are answered without a limit (docs/adr/0013).
    pub(crate) fn arp<P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        snapshot: &Snapshot,
        arrival: Arrival,
        mut buffer: B,
    ) {
        let asked = answer::arp_question(buffer.bytes());
        if !asked.is_some_and(|target| snapshot.ready() && snapshot.answers_for(arrival.link, target)) {
            return self.give_to_linux(lanes, snapshot, arrival, buffer);
        }
        if answer::arp_reply(&mut buffer, snapshot.port(arrival.link.port()).mac) {
            self.answered(lanes, arrival, buffer);
        } else {
            self.drop(lanes, buffer, DropReason::Malformed);
        }
    }

    pub(crate) fn solicited<P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        snapshot: &Snapshot,
        arrival: Arrival,
        mut buffer: B,
        headers: &Headers<u128>,
    ) {
        let asked = answer::neighbour_question(buffer.bytes(), headers);
        if !asked.is_some_and(|target| snapshot.ready() && snapshot.answers_for(arrival.link, target)) {
            return match snapshot.place(headers.tuple.destination) {
                Place::Elsewhere | Place::Broadcast | Place::Twin(_) => self.give_to_linux(lanes, snapshot, arrival, buffer),
                Place::Vip | Place::Snat | Place::PoolUnused => self.drop(lanes, buffer, DropReason::UnsupportedProtocol),
            };
        }
        if snapshot.place(headers.tuple.source) != Place::Elsewhere {
            return self.drop(lanes, buffer, DropReason::OwnSource);
        }
        if answer::neighbour_advertisement(&mut buffer, headers, snapshot.port(arrival.link.port()).mac) {
            self.answered(lanes, arrival, buffer);
        } else {
            self.drop(lanes, buffer, DropReason::Malformed);
        }
    }

    /// Turns the packet into its answer, where the rules and the rate allow one (FORWARDING 8).
    fn reply<A: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        snapshot: &Snapshot,
        arrival: Arrival,
        mut buffer: B,
        headers: &Headers<A>,
        reply: Answer,
    ) {
        let allowed = answer::may_answer(headers) && self.limiter.allow(headers.tuple.source, arrival.now_ns);
        let source = answer_source(snapshot, arrival.link.port(), headers.tuple.destination).filter(|_| allowed);
        let mac = snapshot.port(arrival.link.port()).mac;
        let done = source.is_some_and(|source| match reply {
            Answer::Reset => answer::reset(&mut buffer, headers, mac),
            Answer::PortUnreachable => answer::icmp_error(&mut buffer, headers, source, IcmpError::PortUnreachable, mac),
            Answer::TimeExceeded => answer::icmp_error(&mut buffer, headers, source, IcmpError::TimeExceeded, mac),
            Answer::TooBig { mtu } => answer::icmp_error(&mut buffer, headers, source, IcmpError::TooBig { mtu }, mac),
            Answer::Echo => answer::echo_reply(&mut buffer, headers, mac),
        });
        if done {
            self.answered(lanes, arrival, buffer);
        } else {
            self.drop(lanes, buffer, DropReason::AnswerLimited);
        }
    }

    fn answered<P: Port<Buffer = B>>(&mut self, lanes: &mut Lanes<P>, arrival: Arrival, buffer: B) {
        self.observer.observe(&buffer, Fate::Reply(arrival.link.port()), || None);
        self.tally.replies += 1;
        lanes.leave(arrival.link.port(), arrival.tags, buffer, &mut self.tally);
    }

    /// Drops a packet of no flow and, as far as the rate allows, sends a RST or ABORT back. The RST is originated: its cause is
    /// the drop (DESIGN 3.5). It is written over the packet, which is not needed any more.
    fn reset<A: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        snapshot: &Snapshot,
        arrival: Arrival,
        mut buffer: B,
        headers: &Headers<A>,
        reason: DropReason,
    ) {
        self.observer.observe(&buffer, Fate::Drop(reason), || None);
        self.tally.drop(reason);
        let allowed = answer::may_answer(headers) && self.limiter.allow(headers.tuple.source, arrival.now_ns);
        if allowed && answer::reset(&mut buffer, headers, snapshot.port(arrival.link.port()).mac) {
            self.tally.originated += 1;
            lanes.leave(arrival.link.port(), arrival.tags, buffer, &mut self.tally);
        } else {
            lanes.discard(buffer);
        }
    }

    /// The larger table's entries, used and free, as far as they were ever used.
    pub(crate) fn entries_used(&self) -> u32 {
        self.v4.high_water().max(self.v6.high_water())
    }

    /// Looks at the next entries of both tables and ends the flows that have been idle too long, or whose backend's drain
    /// is over: its SNAT ports are another's soon.
    pub(crate) fn expire(&mut self, entries: u32, snapshot: &Snapshot, now: Tick) {
        let Self { v4, v6, ports, limits, counters, swept, asks, .. } = self;
        let look = Look { limits, snapshot, asks, now };
        swept.v4 = sweep(v4, swept.v4, entries, ports, counters, &look);
        swept.v6 = sweep(v6, swept.v6, entries, ports, counters, &look);
    }

    /// Looks at the next SNAT pools, to take back the memory of idle ones.
    pub(crate) fn sweep_pools(&mut self, pools: u32, now: Tick) {
        self.swept.pools = self.ports.sweep(self.swept.pools, pools, now);
    }

    pub(crate) fn publish_counters(&mut self) {
        self.tally.publish(&self.counters);
        self.counters.held.set((self.held.len() + self.datagrams.waiting()) as u64);
        self.counters.flows.set(u64::from(self.v4.len() + self.v6.len()));
    }
}

/// Takes off what stands behind the packet in its frame: with it a frame may be longer than the link that it leaves by takes.
#[inline(always)]
fn trim<A: Address>(buffer: &mut impl Buffer, headers: &Headers<A>) {
    let frame_len = usize::from(headers.network_offset) + usize::from(headers.packet_len);
    if buffer.bytes().len() > frame_len {
        let _ = buffer.resize(frame_len); // shorter than it was: there is room
    }
}

/// The address that an answer about a packet comes from: the one that it was sent to, or, where that is not ours (a reply of
/// mode `dnat` to its client), the port's own.
fn answer_source<A: Address>(snapshot: &Snapshot, in_port: crate::PortIndex, destination: A) -> Option<A> {
    match snapshot.place(destination) {
        Place::Elsewhere | Place::Broadcast => snapshot.port(in_port).addresses.iter().find_map(|net| A::from_ip(net.addr())),
        Place::Vip | Place::Snat | Place::Twin(_) | Place::PoolUnused => Some(destination),
    }
}

/// What a sweep looks at flows with.
struct Look<'a> {
    limits: &'a IdleLimits,
    snapshot: &'a Snapshot,
    asks: &'a ArrayQueue<Ask>,
    now: Tick,
}

impl Look<'_> {
    /// It has been silent for too long, or its backend's drain is over.
    fn ended<A: Address>(&self, flow: &Flow<A>) -> bool {
        let Some(backend) = self.snapshot.backend(flow.backend) else {
            // A connection that goes on is told so by a RST, in answer to its next packet.
            return flow.protocol != protocol::TCP || self.limits.is_silent(flow.last_seen, self.now);
        };
        self.limits.is_over(flow.state, backend.idle_timeout, flow.last_seen, self.now)
    }

    /// A client that is its own next hop is asked for while its flow is in use, or Linux would forget it: Linux sees none
    /// of its packets. Linux's side asks each at most every 30 s; what finds no room here is asked for by the next sweep.
    fn keep_client<A: Address>(&self, flow: &Flow<A>) {
        let is_used = self.now.since(flow.last_seen) <= USED_WITHIN;
        if let Some(hop) = self.snapshot.next_hop(flow.route_to_client).filter(|_| is_used)
            && hop.address == flow.client.ip()
        {
            let _ = self.asks.push((hop.link, hop.address));
        }
    }
}

/// A flow counts as used if a packet was seen this recently: 75 ticks are 10 s, a little more than a sweep takes.
const USED_WITHIN: Ticks = Ticks(75);

/// Looks at the `entries` from `start` on. Returns where to go on.
fn sweep<A: Address>(
    table: &mut FlowTable<A>,
    start: u32,
    entries: u32,
    ports: &mut SnatPorts,
    counters: &WorkerCounters,
    look: &Look<'_>,
) -> u32 {
    table.sweep(start, entries, |flow| {
        let ended = look.ended(flow);
        if ended {
            if let Some(lease) = flow.snat_lease() {
                ports.release(lease.pool, lease.port, look.now);
            }
            counters.flow_ended(flow.backend.slot);
        } else {
            look.keep_client(flow);
        }
        ended
    })
}

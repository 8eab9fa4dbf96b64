//! Carries out verdicts: rewrites, answers, holds or drops packets, or passes them to the kernel, and counts each
//! packet once.
//!
//! **Invariant:** every packet that enters leaves by exactly one counted verdict.
//!
//! Not here: the decision itself.

use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use proto::Family;

use super::burst::Looked;
use super::observer::{Belongs, Fate, Observe};
use super::sweep::Swept;
use crate::flow::{Flow, FlowTable, IdleLimits, Segment, SnatPorts, Tick};
use crate::forward::decide::{
    Answer, Changes, Flows, Obstacle, OtherFlows, Packet, Passage, Verdict, decide, follow, follow_one_way, follow_plain,
    rewrite_of,
};
use crate::forward::rewrite;
use crate::forward::rewrite::mss;
use crate::fragment::{Datagrams, Identifications, cut};
use crate::icmp;
use crate::icmp::{AnswerLimiter, Ask, Awaited, Held, IcmpError};
use crate::port::{Arrival, Burst, Link, Port, TwinRate};
use crate::snapshot::{Exit, Place, Snapshot};
use crate::stats::{DropReason, Tally, WorkerCounters};
use crate::wire::{Address, Buffer, Ethernet, Headers, Transport, take_mut};
use crate::workers::Lanes;

/// The state of a worker except for its ports.
#[derive(Debug)]
pub(crate) struct Engine<B, O> {
    /// Index of the worker within the gateway, from 0.
    pub(crate) worker: usize,
    pub(crate) v4: FlowTable<u32>,
    pub(crate) v6: FlowTable<u128>,
    pub(crate) ports: SnatPorts,
    pub(crate) max_flows: u32,
    pub(crate) limits: IdleLimits,
    pub(crate) held: Held<B>,
    /// Whether neighbours of held packets may have been resolved since the last check.
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

/// Access to the tables of one family.
pub(crate) trait Tables<A: Address> {
    /// The flow table of the family, and the idle limits.
    fn flows(&mut self) -> (&mut FlowTable<A>, &IdleLimits);
    /// The context for decisions on new flows.
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
    /// Number of flows that may still be created, in both families together.
    fn room(&self) -> u32 {
        self.max_flows.saturating_sub(self.v4.len() + self.v6.len())
    }
}

impl<B: Buffer, O: Observe<B>> Engine<B, O> {
    /// Processes one IPv4 or IPv6 packet to its end.
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

    /// Processes a packet that does not simply follow a flow. Not inlined, to keep it out of the fast path.
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

    /// Processes a packet by [`decide`].
    pub(super) fn decided<A: Address, P: Port<Buffer = B>>(
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

    /// The verdict of [`decide`]; counts its changes and sends the resets that it asks for.
    #[inline(always)]
    pub(super) fn verdict<'s, A: Address, P: Port<Buffer = B>>(
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

    pub(super) fn count_changes(&mut self, changes: &Changes) {
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

    /// Requests the resolution of a neighbour from the kernel. When the queue is full, others are already requested,
    /// and a later packet requests it again.
    pub(super) fn ask(&self, awaited: Awaited) {
        let _ = self.asks.push((awaited.link, awaited.address));
    }

    pub(super) fn apply<A: Address, P: Port<Buffer = B>>(
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

    /// Rewrites a packet by its flow and sends it: the fast path.
    #[inline(always)]
    pub(super) fn forward<A: Address, P: Port<Buffer = B>>(
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

    /// As [`Self::forward`], for any packet. An IPv4 packet that may be fragmented gets an identification of the
    /// gateway and is fragmented if necessary; on a tagged link the tags are added.
    #[inline(never)]
    pub(super) fn depart<A: Address, P: Port<Buffer = B>>(
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

    /// Sends a rewritten packet, in fragments if it does not fit; [`Self::forward`] sends the plain ones. Fragments
    /// after the first count as originated, since the packet became the first.
    pub(super) fn send_of_flow<A: Address, P: Port<Buffer = B>>(
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
        let tags = exit.link.tags();
        lanes.leave(exit.port, tags, buffer, &mut self.tally);
        for piece in rest {
            self.tally.originated += 1;
            lanes.leave(exit.port, tags, piece, &mut self.tally);
        }
    }

    pub(super) fn hold<P: Port<Buffer = B>>(&mut self, lanes: &mut Lanes<P>, arrival: Arrival, buffer: B, awaited: Awaited) {
        match self.held.keep(buffer, arrival, awaited) {
            Ok(true) => self.ask(awaited),
            Ok(false) => {}
            Err(buffer) => self.drop(lanes, buffer, DropReason::NeighbourUnresolved),
        }
    }

    /// Drops a packet and counts the reason.
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

    /// Passes a packet to the kernel as if it had arrived on another link, addressed to that port's Ethernet address.
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
        self.give_to_linux(lanes, snapshot, Arrival { link, tags: link.tags(), ..arrival }, buffer);
    }

    /// Answers ARP. Answers to ARP and neighbour discovery have no rate limit (docs/adr/0013).
    pub(crate) fn arp<P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        snapshot: &Snapshot,
        arrival: Arrival,
        mut buffer: B,
    ) {
        let asked = icmp::arp_question(buffer.bytes());
        if !asked.is_some_and(|target| snapshot.ready() && snapshot.answers_for(arrival.link, target)) {
            return self.give_to_linux(lanes, snapshot, arrival, buffer);
        }
        if icmp::arp_reply(&mut buffer, snapshot.port(arrival.link.port()).mac) {
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
        let asked = icmp::neighbour_question(buffer.bytes(), headers);
        if !asked.is_some_and(|target| snapshot.ready() && snapshot.answers_for(arrival.link, target)) {
            return match snapshot.place(headers.tuple.destination) {
                Place::Elsewhere | Place::Broadcast | Place::Twin(_) => self.give_to_linux(lanes, snapshot, arrival, buffer),
                Place::Vip | Place::Snat | Place::PoolUnused => self.drop(lanes, buffer, DropReason::UnsupportedProtocol),
            };
        }
        if snapshot.place(headers.tuple.source) != Place::Elsewhere {
            return self.drop(lanes, buffer, DropReason::OwnSource);
        }
        if icmp::neighbour_advertisement(&mut buffer, headers, snapshot.port(arrival.link.port()).mac) {
            self.answered(lanes, arrival, buffer);
        } else {
            self.drop(lanes, buffer, DropReason::Malformed);
        }
    }

    /// Turns the packet into its answer, if the rules and the rate limit allow one (FORWARDING 8).
    pub(super) fn reply<A: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        snapshot: &Snapshot,
        arrival: Arrival,
        mut buffer: B,
        headers: &Headers<A>,
        reply: Answer,
    ) {
        let allowed = icmp::may_answer(headers) && self.limiter.allow(headers.tuple.source, arrival.now_ns);
        let source = answer_source(snapshot, arrival.link.port(), headers.tuple.destination).filter(|_| allowed);
        let mac = snapshot.port(arrival.link.port()).mac;
        let done = source.is_some_and(|source| match reply {
            Answer::Reset => rewrite::reset(&mut buffer, headers, mac),
            Answer::PortUnreachable => icmp::icmp_error(&mut buffer, headers, source, IcmpError::PortUnreachable, mac),
            Answer::TimeExceeded => icmp::icmp_error(&mut buffer, headers, source, IcmpError::TimeExceeded, mac),
            Answer::TooBig { mtu } => icmp::icmp_error(&mut buffer, headers, source, IcmpError::TooBig { mtu }, mac),
            Answer::Echo => icmp::echo_reply(&mut buffer, headers, mac),
        });
        if done {
            self.answered(lanes, arrival, buffer);
        } else {
            self.drop(lanes, buffer, DropReason::AnswerLimited);
        }
    }

    pub(super) fn answered<P: Port<Buffer = B>>(&mut self, lanes: &mut Lanes<P>, arrival: Arrival, buffer: B) {
        self.observer.observe(&buffer, Fate::Reply(arrival.link.port()), || None);
        self.tally.replies += 1;
        lanes.leave(arrival.link.port(), arrival.tags, buffer, &mut self.tally);
    }

    /// Drops a packet without flow and, within the rate limit, sends a RST or ABORT back. The RST counts as originated:
    /// its cause is the drop (DESIGN 3.5). It is written over the packet, which is no longer needed.
    pub(super) fn reset<A: Address, P: Port<Buffer = B>>(
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
        let allowed = icmp::may_answer(headers) && self.limiter.allow(headers.tuple.source, arrival.now_ns);
        if allowed && rewrite::reset(&mut buffer, headers, snapshot.port(arrival.link.port()).mac) {
            self.tally.originated += 1;
            lanes.leave(arrival.link.port(), arrival.tags, buffer, &mut self.tally);
        } else {
            lanes.discard(buffer);
        }
    }

    pub(crate) fn publish_counters(&mut self) {
        self.tally.publish(&self.counters);
        self.counters.held.set((self.held.len() + self.datagrams.waiting()) as u64);
        self.counters.flows.set(u64::from(self.v4.len() + self.v6.len()));
    }
}

/// Removes the bytes after the packet from its frame; with them it might exceed the MTU of its outgoing link.
#[inline(always)]
pub(super) fn trim<A: Address>(buffer: &mut impl Buffer, headers: &Headers<A>) {
    let frame_len = usize::from(headers.network_offset) + usize::from(headers.packet_len);
    if buffer.bytes().len() > frame_len {
        let _ = buffer.resize(frame_len); // it gets shorter, so there is room
    }
}

/// The source address of an answer about a packet: the destination of the packet, or the port's own address if that
/// destination is not the gateway's (a reply of mode `dnat` to its client).
fn answer_source<A: Address>(snapshot: &Snapshot, in_port: crate::port::PortIndex, destination: A) -> Option<A> {
    match snapshot.place(destination) {
        Place::Elsewhere | Place::Broadcast => snapshot.port(in_port).addresses.iter().find_map(|net| A::from_ip(net.addr())),
        Place::Vip | Place::Snat | Place::Twin(_) | Place::PoolUnused => Some(destination),
    }
}

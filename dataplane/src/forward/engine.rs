//! Carries out verdicts: rewrites and sends packets, in fragments if they do not fit, holds or drops them, or passes
//! them on to answers and to the kernel. Each packet is counted once.
//!
//! **Invariant:** every packet that enters leaves by exactly one counted verdict.
//!
//! Not here: the decision itself.

use std::sync::Arc;

use arrayvec::ArrayVec;
use proto::Family;

use super::fast::state::FastPath;
use super::observer::{Observe, PacketFlow, PacketOutcome, Watching, WorkerCapture};
use super::rewrite;
use super::sort::{Ingress, Lookup};
use crate::flow::{Direction, Flow, FlowIndex, FlowTable, IdleLimits, Segment, SnatPorts, Tick};
use crate::forward::decide::{
    Changes, DecisionContext, DirectForward, FlowFamily, FlowMatch, FlowTables, Followed, NatForward, Packet, RESETS_MAX,
    ResetBuffers, Verdict, decide, follow,
};
use crate::forward::rewrite::{InnerPacket, encapsulate, mss, rewrite_of};
use crate::fragment::{Datagrams, Identifications, split};
use crate::icmp::AnswerLimiter;
use crate::neighbours::{UnresolvedNeighbour, WorkerNeighbours};
use crate::port::{Arrival, Burst, Port, TwinRate};
use crate::snapshot::{Exit, Snapshot};
use crate::stats::{CounterSlot, DropReason, Tally, WorkerCounters};
use crate::wire::{Address, Buffer, Headers, Tags, Transport};
use crate::workers::Egress;

/// How a packet leaves that was decided on.
struct Departure<'s> {
    exit: &'s Exit,
    /// Tags that the frame gets; none if it has those of the exit.
    tags: Tags,
    counter: CounterSlot,
    /// The flow that it is a packet of.
    metered: Option<FlowIndex>,
    direction: Direction,
    belongs: PacketFlow,
}

/// The state of a worker.
pub(super) struct Engine<P: Port, O> {
    /// Index of the worker within the gateway, from 0.
    pub(super) worker: usize,
    pub(super) egress: Egress<P>,
    pub(super) tables: FlowTables,
    pub(super) ports: SnatPorts,
    pub(super) max_flows: u32,
    pub(super) limits: IdleLimits,
    pub(super) neighbours: WorkerNeighbours<P::Buffer>,
    pub(super) datagrams: Datagrams<P::Buffer>,
    pub(super) identifications: Identifications,
    pub(super) limiter: AnswerLimiter,
    pub(super) twin_rate: TwinRate,
    pub(super) fast: FastPath,
    pub(super) tally: Tally,
    pub(super) counters: Arc<WorkerCounters>,
    pub(super) observer: O,
    /// The capture that runs, if any.
    pub(super) capture: Option<Box<WorkerCapture>>,
    /// The watch, while somebody watches.
    pub(super) watching: Option<Watching>,
    /// Whether there is a capture or a watch.
    pub(super) is_looked_at: bool,
}

impl<P: Port, O: Observe<P::Buffer>> Engine<P, O> {
    /// The flow table of a family, and the idle limits.
    #[inline(always)]
    pub(super) fn flows<A: FlowFamily>(&mut self) -> (&mut FlowTable<A>, &IdleLimits) {
        (A::split(&mut self.tables).0, &self.limits)
    }

    /// Processes one IPv4 or IPv6 packet to its end.
    pub(super) fn handle<A: FlowFamily>(&mut self, at: Ingress<'_>, buffer: P::Buffer, lookup: &Lookup<A>) {
        let Lookup { headers, hash, candidate } = lookup;
        let packet = &Packet { headers, hash: *hash, candidate: *candidate, in_link: at.arrival.link };
        let now = Tick::at(at.arrival.now_ns);
        let (table, limits) = self.flows();
        let found = match follow(packet, at.snapshot, table, limits, now) {
            Followed::Decided(verdict) => {
                self.tally.hits += 1;
                return match verdict {
                    Verdict::ForwardDirect(direct) => self.forward_direct(at.snapshot, buffer, packet.headers, &direct),
                    verdict => self.apply(at, buffer, packet.headers, verdict),
                };
            }
            Followed::Undecided(found) => found,
        };
        match packet.headers.transport {
            Transport::Fragment => self.fragment(at, buffer, packet),
            Transport::Icmp { .. } => {
                self.note_advertisement(at, &buffer, packet.headers);
                if let Some(buffer) = self.error(at, buffer, packet) {
                    self.handle_by_decision(at, buffer, packet, None);
                }
            }
            _ => self.handle_by_decision(at, buffer, packet, found),
        }
    }

    /// Processes a packet by [`decide`].
    pub(super) fn handle_by_decision<A: FlowFamily>(
        &mut self,
        at: Ingress<'_>,
        buffer: P::Buffer,
        packet: &Packet<'_, A>,
        found: Option<FlowMatch>,
    ) {
        let segment = Segment::of(buffer.bytes(), packet.headers);
        if let Some((worker, task)) = self.visit_halves(at, packet, segment, found) {
            return self.egress.hand_over(worker, task, at.arrival, buffer, &mut self.tally);
        }
        let verdict = self.verdict(at, packet, segment, found);
        self.apply(at, buffer, packet.headers, verdict);
    }

    /// The verdict of [`decide`]; counts its changes and sends the resets that it requests.
    #[inline(always)]
    pub(super) fn verdict<'s, A: FlowFamily>(
        &mut self,
        at: Ingress<'s>,
        packet: &Packet<'_, A>,
        segment: Segment,
        found: Option<FlowMatch>,
    ) -> Verdict<'s> {
        let mut changes = Changes::default();
        let room = self.max_flows.saturating_sub(self.tables.v4.len() + self.tables.v6.len());
        let (table, others) = A::split(&mut self.tables);
        let Self { ports, limits, counters, worker, egress, .. } = self;
        let (now, worker) = (Tick::at(at.arrival.now_ns), *worker);
        let mut buffers = ArrayVec::<P::Buffer, RESETS_MAX>::new();
        let mut reserve = |port| egress.allocate(port).is_some_and(|buffer| buffers.try_push(buffer).is_ok());
        let mut context = DecisionContext {
            snapshot: at.snapshot,
            now,
            table,
            others,
            ports,
            limits,
            counters: Some(counters),
            changes: &mut changes,
            room,
            worker,
            is_trial: false,
            reset_buffers: ResetBuffers(&mut reserve),
        };
        let verdict = decide(packet, segment, found, &mut context);
        self.count_changes(&changes);
        let tuple = &packet.headers.tuple;
        if changes.reused_early
            && let Some(frontend) = at.snapshot.frontend(tuple.destination, tuple.protocol, tuple.destination_port)
        {
            frontend.drops.count_early(self.worker);
        }
        if !changes.resets.is_empty() {
            self.originate(at.arrival, &changes.resets, buffers, matches!(verdict, Verdict::Reset(_)));
        }
        verdict
    }

    pub(super) fn count_changes(&mut self, changes: &Changes) {
        if changes.hit {
            self.tally.hits += 1;
            if let Some(slot) = changes.reset {
                self.counters.at(slot).reset.add(1);
            }
            return;
        }
        self.tally.misses += 1;
        self.tally.reused_early += u64::from(changes.reused_early);
        for slot in changes.ended.into_iter().chain(changes.displaced) {
            self.counters.flow_ended(slot);
        }
        for slot in &changes.reclaimed {
            self.tally.reclaimed += 1;
            self.counters.flow_ended(*slot);
        }
        if let Some(slot) = changes.made {
            self.tally.new_flows += 1;
            self.counters.flow_began(slot, changes.service);
        }
        if let Some(neighbour) = changes.ask {
            self.neighbours.ask(neighbour);
        }
    }

    pub(super) fn apply<A: FlowFamily>(
        &mut self,
        at: Ingress<'_>,
        mut buffer: P::Buffer,
        headers: &Headers<A>,
        verdict: Verdict<'_>,
    ) {
        if let Verdict::Forward(nat) = &verdict {
            let mtus = [at.snapshot.mtu(at.arrival.link), nat.exit.mtu];
            mss::clamp_between(buffer.bytes_mut(), headers, mtus);
        }
        match verdict {
            Verdict::Forward(nat) => self.forward_nat(at.snapshot, buffer, headers, nat),
            Verdict::ForwardDirect(direct) => self.forward_direct(at.snapshot, buffer, headers, &direct),
            Verdict::Wait(neighbour) => self.hold(at.arrival, buffer, neighbour),
            Verdict::Linux => self.give_to_linux(at, buffer),
            Verdict::LinuxAt(link) => self.give_to_linux_at(at, link, buffer),
            Verdict::Reply(answer) => self.reply(at, buffer, headers, answer),
            Verdict::Reset(reason) => self.reset(at, buffer, headers, reason),
            Verdict::Drop(reason) => self.drop_of_service(at.snapshot, buffer, headers, reason),
        }
    }

    /// Rewrites a packet by its flow and sends it. An IPv4 packet that may be fragmented gets an identification of the
    /// gateway and is fragmented if necessary; on a tagged link the tags are added.
    #[inline(never)]
    pub(super) fn forward_nat<A: FlowFamily>(
        &mut self,
        snapshot: &Snapshot,
        mut buffer: P::Buffer,
        headers: &Headers<A>,
        nat: NatForward<'_>,
    ) {
        let flow = self.flows::<A>().0.get(nat.flow);
        rewrite::whole(buffer.bytes_mut(), headers, &rewrite_of(&flow, nat.direction, nat.exit));
        let hidden = rewrite::hide_addresses(buffer.bytes_mut(), headers);
        if hidden > 0 {
            self.counters.sctp_hidden_addresses.add(hidden.into());
        }
        if A::FAMILY == Family::V4 && !headers.dont_fragment {
            self.renumber(&mut buffer, headers);
        }
        self.send_split(snapshot, buffer, headers, &flow, nat);
    }

    /// Sends a rewritten packet, in fragments if it does not fit. Fragments after the first count as originated, since
    /// the packet became the first.
    pub(super) fn send_split<A: FlowFamily>(
        &mut self,
        snapshot: &Snapshot,
        mut buffer: P::Buffer,
        headers: &Headers<A>,
        flow: &Flow<A>,
        nat: NatForward<'_>,
    ) {
        let NatForward { direction, exit, flow: index } = nat;
        let mut rest = Burst::new();
        trim(&mut buffer, headers);
        if headers.packet_len > exit.mtu {
            match split(&mut buffer, usize::from(headers.network_offset), exit.mtu, || self.egress.allocate(exit.port)) {
                Some(pieces) => rest = pieces,
                None => return self.drop_of_service(snapshot, buffer, headers, DropReason::TooBig),
            }
        }
        let belongs = PacketFlow { vip: flow.vip.ip(), port: flow.vip_port, protocol: flow.protocol, backend: flow.backend };
        // An ICMP error concerns a flow and is not a packet of it.
        let metered = Some(index).filter(|_| !matches!(headers.transport, Transport::Icmp { .. }));
        let tags = exit.link.tags();
        let departure = Departure { exit, tags, counter: flow.counter_slot(), metered, direction, belongs };
        self.depart::<A>(buffer, headers.packet_len, &departure);
        for piece in rest {
            self.tally.originated += 1;
            self.egress.send_tagged(exit.port, tags, piece, &mut self.tally);
        }
    }

    /// Lets a packet leave that was decided on and written: counts it, meters its flow, shows it to the observer and sends it.
    fn depart<A: FlowFamily>(&mut self, buffer: P::Buffer, packet_len: u16, departure: &Departure<'_>) {
        let &Departure { exit, tags, counter, metered, direction, belongs } = departure;
        self.counters.forwarded(counter, direction == Direction::ToClient, packet_len);
        if O::METERS
            && let Some(index) = metered
        {
            self.flows::<A>().0.meter(index, direction, packet_len);
        }
        self.observer.observe(&buffer, PacketOutcome::Forward(exit.port), || Some(belongs));
        self.egress.send_tagged(exit.port, tags, buffer, &mut self.tally);
    }

    /// Sends a packet as it is, or encapsulated.
    pub(super) fn forward_direct<A: FlowFamily>(
        &mut self,
        snapshot: &Snapshot,
        mut buffer: P::Buffer,
        headers: &Headers<A>,
        direct: &DirectForward<'_>,
    ) {
        let &DirectForward { backend, frontend, port, protocol, exit, outer, flow } = direct;
        let mtu = outer.map_or(exit.mtu, |outer| outer.mtu);
        let mut rest = Burst::new();
        if headers.packet_len > mtu {
            match split(&mut buffer, usize::from(headers.network_offset), mtu, || self.egress.allocate(exit.port)) {
                Some(pieces) => rest = pieces,
                None => return self.drop_of_service(snapshot, buffer, headers, DropReason::TooBig),
            }
        }
        if !self.prepare_direct(&mut buffer, headers, direct) {
            rest.into_iter().for_each(|piece| self.egress.discard(piece));
            return self.drop_of_service(snapshot, buffer, headers, DropReason::TooBig);
        }
        // Outer headers begin with the tags of the link.
        let tags = if outer.is_some() { Tags::NONE } else { exit.link.tags() };
        let belongs = PacketFlow { vip: headers.tuple.destination.ip(), port, protocol, backend };
        let counter = CounterSlot::new(backend.slot, frontend);
        let departure = Departure { exit, tags, counter, metered: flow, direction: Direction::ToBackend, belongs };
        self.depart::<A>(buffer, headers.packet_len, &departure);
        for mut piece in rest {
            if self.prepare_direct(&mut piece, headers, direct) {
                self.tally.originated += 1;
                self.egress.send_tagged(exit.port, tags, piece, &mut self.tally);
            } else {
                self.egress.discard(piece);
            }
        }
    }

    /// Prepares a packet, or a fragment of it, for sending. Returns false when there is no room for the headers of a
    /// tunnel.
    fn prepare_direct<A: Address>(&mut self, buffer: &mut P::Buffer, headers: &Headers<A>, direct: &DirectForward<'_>) -> bool {
        let exit = direct.exit;
        let Some(outer) = direct.outer else {
            trim(buffer, headers);
            rewrite::hop(buffer.bytes_mut(), headers, exit);
            return true;
        };
        let identification = outer.identification(!headers.dont_fragment, headers.tuple.protocol, &mut self.identifications);
        let len = buffer.bytes().len().saturating_sub(usize::from(headers.network_offset));
        let packet_len = u16::try_from(len).map_or(headers.packet_len, |len| headers.packet_len.min(len));
        let inner = InnerPacket { network_offset: headers.network_offset, packet_len, identification };
        encapsulate::<A>(buffer, inner, &outer, exit)
    }

    pub(super) fn hold(&mut self, arrival: Arrival, buffer: P::Buffer, neighbour: UnresolvedNeighbour) {
        match self.neighbours.queue.keep(buffer, arrival, neighbour) {
            Ok(true) => self.neighbours.ask(neighbour),
            Ok(false) => {}
            Err(buffer) => self.drop(buffer, DropReason::NeighbourUnresolved),
        }
    }

    /// Drops a packet and counts the reason.
    pub(super) fn drop(&mut self, buffer: P::Buffer, reason: DropReason) {
        self.observer.observe(&buffer, PacketOutcome::Drop(reason), || None);
        if let Some(watching) = &self.watching {
            watching.dropped(reason, &buffer);
        }
        self.tally.drop(reason);
        self.egress.discard(buffer);
    }

    /// Drops a packet and counts the reason, also for the service that it was sent to, if any.
    pub(super) fn drop_of_service<A: Address>(
        &mut self,
        snapshot: &Snapshot,
        buffer: P::Buffer,
        headers: &Headers<A>,
        reason: DropReason,
    ) {
        self.count_service_drop(snapshot, headers, reason);
        self.drop(buffer, reason);
    }

    /// Counts a dropped packet for the service that it was sent to, if any.
    pub(super) fn count_service_drop<A: Address>(&self, snapshot: &Snapshot, headers: &Headers<A>, reason: DropReason) {
        let tuple = &headers.tuple;
        if let Some(frontend) = snapshot.frontend(tuple.destination, tuple.protocol, tuple.destination_port) {
            frontend.drops.count(self.worker, reason);
            if reason == DropReason::SnatShare {
                frontend.drops.note_client(self.worker, tuple.source.site(), A::FAMILY == proto::Family::V6);
            }
        }
    }

    pub(super) fn publish_counters(&mut self) {
        self.tally.publish(&self.counters);
        let held = self.neighbours.queue.len() + self.datagrams.waiting();
        let flows = self.tables.v4.len() + self.tables.v6.len();
        self.counters.set_use(flows.into(), self.ports.in_use().into(), held as u64);
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

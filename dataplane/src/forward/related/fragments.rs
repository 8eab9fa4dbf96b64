//! Forwarding of fragments: the first one is decided on like any packet, the others follow it, and those that arrive
//! before it wait (FORWARDING 10).
//!
//! Not here: the memory of datagrams and waiting fragments (`fragment`).

use crate::flow::{Candidate, Direction, FlowMode, FlowTable, Segment, Tick};
use crate::forward::decide::{FlowFamily, Followed, NatForward, Packet, Verdict, follow};
use crate::forward::engine::Engine;
use crate::forward::observer::Observe;
use crate::forward::rewrite;
use crate::forward::rewrite::rewrite_of;
use crate::forward::sort::Ingress;
use crate::forward::sort::{may_have_flow, owner_of_first};
use crate::fragment::{EarlyFragment, Fragment, LaterFragments, Part, Slot};
use crate::port::{Arrival, Origin, Port};
use crate::snapshot::Snapshot;
use crate::stats::DropReason;
use crate::wire::{Address, Buffer, Headers, Ipv4, Transport, Tuple, parse, sctp_chunk, take};
use crate::workers::{Egress, HandoverTask, WorkerId};

/// A fragment with the entry of its datagram.
struct FragmentOf<'a, A> {
    fragment: &'a Fragment<A>,
    /// The headers that `parse` found.
    headers: &'a Headers<A>,
    slot: Slot,
}

impl<P: Port, O: Observe<P::Buffer>> Engine<P, O> {
    /// Processes a fragment, or queues it until the first one arrives.
    pub(in crate::forward) fn fragment<A: FlowFamily>(&mut self, at: Ingress<'_>, buffer: P::Buffer, packet: &Packet<'_, A>) {
        let headers = packet.headers;
        let fragment = match Fragment::of(buffer.bytes(), headers) {
            Ok(fragment) => fragment,
            Err(reason) => return self.drop(buffer, reason),
        };
        if headers.group_frame || !may_have_flow(&fragment, at.snapshot) {
            return self.handle_by_decision(at, buffer, packet, None);
        }
        let slot = self.slot_of(at.arrival, &fragment);
        if let Part::First(first) = &fragment.part
            && let Some(owner) = owner_elsewhere(&self.egress, at, first)
        {
            return self.pass_on(at.arrival, buffer, slot, owner);
        }
        let placed = FragmentOf { fragment: &fragment, headers, slot };
        match (&fragment.part, self.datagrams.later(slot)) {
            (Part::First(first), _) => self.first(at, buffer, &placed, first),
            (Part::FirstPortless, _) => self.first(at, buffer, &placed, headers),
            (_, Some(later)) => self.later(at, buffer, &placed, later),
            (_, None) => {
                if let Some(buffer) = self.datagrams.keep(buffer, at.arrival, slot) {
                    self.drop(buffer, DropReason::FragmentTableFull);
                }
            }
        }
    }

    /// Hands over a first fragment and those that waited for it to their owner; later ones follow them there.
    #[cold]
    fn pass_on(&mut self, arrival: Arrival, buffer: P::Buffer, slot: Slot, owner: WorkerId) {
        self.datagrams.decide(slot, LaterFragments::Elsewhere(owner));
        self.egress.hand_over(owner, HandoverTask::Decide, arrival, buffer, &mut self.tally);
        while let Some(early) = self.datagrams.release(slot) {
            self.egress.hand_over(owner, HandoverTask::Decide, early.arrival, early.buffer, &mut self.tally);
        }
    }

    /// The entry of its datagram; created if there is none.
    fn slot_of<A: Address>(&mut self, arrival: Arrival, fragment: &Fragment<A>) -> Slot {
        self.datagrams.find(&fragment.datagram, arrival.now_ns).unwrap_or_else(|slot| {
            let reason = self.datagrams.reason_to_go(slot, arrival.now_ns);
            while let Some(early) = self.datagrams.release(slot) {
                self.drop(early.buffer, reason);
            }
            self.datagrams.take(slot, &fragment.datagram, arrival.now_ns);
            slot
        })
    }

    /// Decides on a first fragment like on any packet, by these headers, stores the decision, and processes the
    /// fragments that waited for it.
    fn first<A: FlowFamily>(&mut self, at: Ingress<'_>, buffer: P::Buffer, placed: &FragmentOf<'_, A>, first: &Headers<A>) {
        let segment = Segment::of(buffer.bytes(), first);
        let verdict = if begins_translated(at.snapshot, first) {
            self.tally.misses += 1;
            Verdict::Drop(DropReason::SctpFragment)
        } else {
            self.verdict_alone(at, first, segment)
        };
        let later = match verdict {
            Verdict::Forward(nat) => self.forward_first(at.snapshot, buffer, placed, first, nat),
            Verdict::ForwardDirect(_) => {
                self.apply(at, buffer, first, verdict);
                // The packet is not changed in a way that would require another identification.
                follow_by(first, 0)
            }
            Verdict::Wait(_) => return self.apply(at, buffer, first, verdict),
            _ => {
                self.apply(at, buffer, first, verdict);
                later_after(verdict)
            }
        };
        self.datagrams.decide(placed.slot, later);
        while let Some(early) = self.datagrams.release(placed.slot) {
            self.released::<A>(at, early, placed.slot, later);
        }
    }

    /// Rewrites a first fragment by its flow, with an identification of the gateway, and sends it.
    fn forward_first<A: FlowFamily>(
        &mut self,
        snapshot: &Snapshot,
        mut buffer: P::Buffer,
        placed: &FragmentOf<'_, A>,
        first: &Headers<A>,
        nat: NatForward<'_>,
    ) -> LaterFragments {
        let flow = self.flows().0.get(nat.flow);
        let rewrite = rewrite_of(&flow, nat.direction, nat.exit);
        let Tuple { source_port, destination_port, .. } = first.tuple;
        if matches!(first.transport, Transport::Sctp { .. })
            && (source_port, destination_port) != (rewrite.source_port, rewrite.destination_port)
        {
            // Its checksum covers the ports by a CRC over all fragments (RFC 9260 section 6.8).
            self.drop_of_service(snapshot, buffer, first, DropReason::SctpFragment);
            return LaterFragments::Drop(DropReason::SctpFragment);
        }
        let identification = match self.datagrams.later(placed.slot) {
            // The fragment arrived twice: a duplicate, or the sender reuses its identifications.
            Some(LaterFragments::Follow { source_port: from, destination_port: to, identification, .. })
                if (from, to) == (source_port, destination_port) =>
            {
                identification
            }
            _ => {
                let of_protocol = placed.fragment.datagram.protocol;
                self.identifications.next(rewrite.source, rewrite.destination, of_protocol)
            }
        };
        rewrite::whole(buffer.bytes_mut(), first, &rewrite);
        rewrite::renumber(buffer.bytes_mut(), first, placed.fragment.identification_offset, identification);
        self.send_split(snapshot, buffer, first, &flow, nat);
        follow_by(first, identification)
    }

    /// Processes a fragment that waited for the first one.
    fn released<A: FlowFamily>(&mut self, at: Ingress<'_>, early: EarlyFragment<P::Buffer>, slot: Slot, later: LaterFragments) {
        let EarlyFragment { buffer, arrival: came, .. } = early;
        let Some(headers) = parse(buffer.bytes()).ok().and_then(A::headers) else {
            return self.drop(buffer, DropReason::Malformed);
        };
        match Fragment::of(buffer.bytes(), &headers) {
            Ok(fragment) => {
                let placed = FragmentOf { fragment: &fragment, headers: &headers, slot };
                let arrival = Arrival { now_ns: at.arrival.now_ns, ..came };
                self.later(Ingress { arrival, ..at }, buffer, &placed, later);
            }
            Err(reason) => self.drop(buffer, reason),
        }
    }

    /// Processes a later fragment by the decision on the first one.
    fn later<A: FlowFamily>(&mut self, at: Ingress<'_>, buffer: P::Buffer, placed: &FragmentOf<'_, A>, later: LaterFragments) {
        let (source_port, destination_port, protocol, transport, identification) = match later {
            LaterFragments::Follow { source_port, destination_port, protocol, transport, identification } => {
                (source_port, destination_port, protocol, transport, identification)
            }
            LaterFragments::Elsewhere(owner) => {
                return self.egress.hand_over(owner, HandoverTask::Decide, at.arrival, buffer, &mut self.tally);
            }
            LaterFragments::Linux => {
                self.tally.misses += 1;
                return self.give_to_linux(at, buffer);
            }
            LaterFragments::Drop(reason) => {
                self.tally.misses += 1;
                return self.drop(buffer, reason);
            }
        };
        let tuple = Tuple { source_port, destination_port, protocol, ..placed.headers.tuple };
        let headers = Headers { tuple, transport, ..*placed.headers };
        match self.verdict_alone(at, &headers, Segment::default()) {
            Verdict::Forward(nat) => self.forward_later(at.snapshot, buffer, placed, identification, nat),
            // With the headers of the fragment: only first fragments may be answered.
            verdict => self.apply(at, buffer, placed.headers, verdict),
        }
    }

    /// The verdict on a single packet outside a burst. RSTs that its decision asks for are sent before it.
    fn verdict_alone<'s, A: FlowFamily>(&mut self, at: Ingress<'s>, headers: &Headers<A>, segment: Segment) -> Verdict<'s> {
        let (table, limits) = self.flows();
        let hash = table.hash(&headers.tuple);
        let packet = Packet { headers, hash, candidate: Candidate::NONE, in_link: at.arrival.link };
        let now = Tick::at(at.arrival.now_ns);
        let verdict = match follow(&packet, at.snapshot, table, limits, now) {
            Followed::Decided(verdict) => {
                self.tally.hits += 1;
                verdict
            }
            Followed::Undecided(found) => self.verdict(at, &packet, segment, found),
        };
        match verdict {
            Verdict::Forward(nat) if is_changed(self.flows::<A>().0, &nat, headers.transport) => {
                Verdict::Drop(DropReason::FragmentUnsupported)
            }
            verdict => verdict,
        }
    }

    /// Rewrites a later fragment by its flow, with the identification of the first one, and sends it.
    fn forward_later<A: FlowFamily>(
        &mut self,
        snapshot: &Snapshot,
        mut buffer: P::Buffer,
        placed: &FragmentOf<'_, A>,
        identification: u32,
        nat: NatForward<'_>,
    ) {
        let flow = self.flows().0.get(nat.flow);
        let rewrite = rewrite_of(&flow, nat.direction, nat.exit);
        rewrite::later_fragment(buffer.bytes_mut(), placed.headers, &rewrite);
        rewrite::renumber(buffer.bytes_mut(), placed.headers, placed.fragment.identification_offset, identification);
        self.send_split(snapshot, buffer, placed.headers, &flow, nat);
    }

    /// Gives an IPv4 packet that may be fragmented on its way an identification of the gateway (RFC 6864 section 5.3).
    /// It is chosen by the packet's addresses, so this follows the rewrite.
    #[cold]
    pub(in crate::forward) fn renumber<A: Address>(&mut self, buffer: &mut P::Buffer, headers: &Headers<A>) {
        let frame = buffer.bytes_mut();
        let Some((source, destination, protocol)) = ends(frame, headers) else { return };
        let identification = self.identifications.next(source, destination, protocol);
        rewrite::renumber(frame, headers, 0, identification);
    }

    /// Drops the fragments whose first fragment did not arrive in time.
    pub(crate) fn expire_fragments(&mut self, now_ns: u64) {
        while let Some(early) = self.datagrams.expired(now_ns) {
            self.drop_waiting(Arrival { now_ns, ..early.arrival }, early.buffer, DropReason::FragmentTimeout);
        }
    }
}

/// The owner of a datagram whose fragments met here, if that is another worker.
fn owner_elsewhere<A: Address, P: Port>(egress: &Egress<P>, at: Ingress<'_>, first: &Headers<A>) -> Option<WorkerId> {
    let peers = egress.peers.as_ref().filter(|_| at.arrival.origin != Origin::Owned)?;
    let owner = owner_of_first(peers.owner_function(), at.snapshot, &first.tuple);
    (owner != peers.me()).then_some(owner)
}

/// Whether a packet needs changes that no fragment can get: of a datagram the header in front of it, which moves all that
/// follows by a number of bytes that is no multiple of 8; of TCP also new numbers.
fn is_changed<A: Address>(table: &FlowTable<A>, nat: &NatForward<'_>, transport: Transport) -> bool {
    table.is_shifted(nat.flow) && (nat.direction == Direction::ToBackend || matches!(transport, Transport::Tcp { .. }))
}

/// Whether a first fragment would begin an association whose ports are rewritten, which no fragment can pass
/// ([`DropReason::SctpFragment`]).
fn begins_translated<A: Address>(snapshot: &Snapshot, first: &Headers<A>) -> bool {
    let Tuple { destination, destination_port, protocol, .. } = first.tuple;
    let is_init = first.transport == Transport::Sctp { chunk: sctp_chunk::INIT };
    is_init && snapshot.frontend(destination, protocol, destination_port).is_some_and(|front| front.mode() == FlowMode::Nat)
}

/// The decision for the fragments after a first one. The meaning of a later fragment for the connection is
/// unknown, so it gets transport fields that change no state of TCP or SCTP. UDP has no such fields; each fragment
/// counts as a packet of its flow.
const fn follow_by<A: Address>(first: &Headers<A>, identification: u32) -> LaterFragments {
    let Tuple { source_port, destination_port, protocol, .. } = first.tuple;
    let transport = match first.transport {
        Transport::Tcp { .. } => Transport::Tcp { flags: 0 },
        Transport::Sctp { .. } => Transport::Sctp { chunk: sctp_chunk::RESERVED },
        other => other,
    };
    LaterFragments::Follow { source_port, destination_port, protocol, transport, identification }
}

/// The decision for the fragments after a first one with this verdict. An answer concerns the whole datagram, so there
/// is one answer only.
const fn later_after(verdict: Verdict<'_>) -> LaterFragments {
    match verdict {
        Verdict::Linux | Verdict::LinuxAt(_) => LaterFragments::Linux,
        Verdict::Drop(reason) | Verdict::Reset(reason) => LaterFragments::Drop(reason),
        Verdict::Reply(_) | Verdict::Wait(_) | Verdict::Forward(_) | Verdict::ForwardDirect(_) => {
            LaterFragments::Drop(DropReason::AnswerLimited)
        }
    }
}

/// Source, destination and protocol of an IPv4 packet.
fn ends<A: Address>(frame: &[u8], headers: &Headers<A>) -> Option<(A, A, u8)> {
    let (ip, _) = take::<Ipv4>(frame.get(usize::from(headers.network_offset)..)?)?;
    Some((A::from_wide(ip.source.get().into()), A::from_wide(ip.destination.get().into()), ip.protocol))
}

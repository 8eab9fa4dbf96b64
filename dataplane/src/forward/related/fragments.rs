//! Forwarding of fragments: the first one is decided on like any packet, the others follow it, and those that arrive
//! before it wait (FORWARDING 10).
//!
//! Not here: the memory of datagrams and waiting fragments (`fragment`).

use crate::flow::{Candidate, Direction, FlowMode, FlowTable, Segment, Tick};
use crate::forward::decide::{FlowFamily, Followed, NatForward, Packet, Verdict, follow};
use crate::forward::engine::Engine;
use crate::forward::execution::departure::send_split;
use crate::forward::execution::linux::give_to_linux;
use crate::forward::execution::{apply, handle_by_decision, verdict};
use crate::forward::observer::Observe;
use crate::forward::rewrite;
use crate::forward::rewrite::rewrite_of;
use crate::forward::sort::Ingress;
use crate::forward::sort::{may_have_flow, owner_of_first};
use crate::fragment::{EarlyFragment, Fragment, LaterFragments, Part, Slot};
use crate::port::{Arrival, Origin, Port};
use crate::snapshot::Snapshot;
use crate::stats::DropReason;
use crate::wire::{Address, Buffer, Headers, Transport, Tuple, parse, sctp_chunk};
use crate::workers::{Egress, HandoverTask, WorkerId};

/// A fragment with the entry of its datagram.
struct FragmentOf<'a, A> {
    fragment: &'a Fragment<A>,
    /// The headers that `parse` found.
    headers: &'a Headers<A>,
    slot: Slot,
}

/// Processes a fragment, or queues it until the first one arrives.
pub(in crate::forward) fn handle_fragment<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    buffer: P::Buffer,
    packet: &Packet<'_, A>,
) {
    let headers = packet.headers;
    let fragment = match Fragment::of(buffer.bytes(), headers) {
        Ok(fragment) => fragment,
        Err(reason) => return engine.output.drop(buffer, reason),
    };
    if headers.group_frame || !may_have_flow(&fragment, at.snapshot) {
        return handle_by_decision(engine, at, buffer, packet, None);
    }
    let slot = slot_of(engine, at.arrival, &fragment);
    if let Part::First(first) = &fragment.part
        && let Some(owner) = owner_elsewhere(&engine.output.egress, at, first)
    {
        return pass_on(engine, at.arrival, buffer, slot, owner);
    }
    let placed = FragmentOf { fragment: &fragment, headers, slot };
    match (&fragment.part, engine.datagrams.later(slot)) {
        (Part::First(first), _) => first_fragment(engine, at, buffer, &placed, first),
        (Part::FirstPortless, _) => first_fragment(engine, at, buffer, &placed, headers),
        (_, Some(later)) => later_fragment(engine, at, buffer, &placed, later),
        (_, None) => {
            if let Some(buffer) = engine.datagrams.keep(buffer, at.arrival, slot) {
                engine.output.drop(buffer, DropReason::FragmentTableFull);
            }
        }
    }
}

/// Hands over a first fragment and those that waited for it to their owner; later ones follow them there.
#[cold]
fn pass_on<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    arrival: Arrival,
    buffer: P::Buffer,
    slot: Slot,
    owner: WorkerId,
) {
    engine.datagrams.decide(slot, LaterFragments::Elsewhere(owner));
    engine.output.hand_over(owner, HandoverTask::Decide, arrival, buffer);
    while let Some(early) = engine.datagrams.release(slot) {
        engine.output.hand_over(owner, HandoverTask::Decide, early.arrival, early.buffer);
    }
}

/// The entry of its datagram; created if there is none.
fn slot_of<A: Address, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    arrival: Arrival,
    fragment: &Fragment<A>,
) -> Slot {
    engine.datagrams.find(&fragment.datagram, arrival.now_ns).unwrap_or_else(|slot| {
        let reason = engine.datagrams.reason_to_go(slot, arrival.now_ns);
        while let Some(early) = engine.datagrams.release(slot) {
            engine.output.drop(early.buffer, reason);
        }
        engine.datagrams.take(slot, &fragment.datagram, arrival.now_ns);
        slot
    })
}

/// Decides on a first fragment like on any packet, by these headers, stores the decision, and processes the
/// fragments that waited for it.
fn first_fragment<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    buffer: P::Buffer,
    placed: &FragmentOf<'_, A>,
    first: &Headers<A>,
) {
    let segment = Segment::of(buffer.bytes(), first);
    let verdict = if begins_translated(at.snapshot, first) {
        engine.output.tally.misses += 1;
        Verdict::Drop(DropReason::SctpFragment)
    } else {
        verdict_alone(engine, at, first, segment)
    };
    let later = match verdict {
        Verdict::Forward(nat) => forward_first(engine, at.snapshot, buffer, placed, first, nat),
        Verdict::ForwardDirect(_) => {
            apply(engine, at, buffer, first, verdict);
            // The packet is not changed in a way that would require another identification.
            follow_by(first, 0)
        }
        Verdict::Wait(_) => return apply(engine, at, buffer, first, verdict),
        _ => {
            apply(engine, at, buffer, first, verdict);
            later_after(verdict)
        }
    };
    engine.datagrams.decide(placed.slot, later);
    while let Some(early) = engine.datagrams.release(placed.slot) {
        released_fragment::<A, _, _>(engine, at, early, placed.slot, later);
    }
}

/// Rewrites a first fragment by its flow, with an identification of the gateway, and sends it.
fn forward_first<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &Snapshot,
    mut buffer: P::Buffer,
    placed: &FragmentOf<'_, A>,
    first: &Headers<A>,
    nat: NatForward<'_>,
) -> LaterFragments {
    let flow = engine.flows.table().get(nat.flow);
    let rewrite = rewrite_of(&flow, nat.direction, nat.exit);
    let Tuple { source_port, destination_port, .. } = first.tuple;
    if matches!(first.transport, Transport::Sctp { .. })
        && (source_port, destination_port) != (rewrite.source_port, rewrite.destination_port)
    {
        // Its checksum covers the ports by a CRC over all fragments (RFC 9260 section 6.8).
        engine.output.drop_of_service(snapshot, buffer, first, DropReason::SctpFragment);
        return LaterFragments::Drop(DropReason::SctpFragment);
    }
    let identification = match engine.datagrams.later(placed.slot) {
        // The fragment arrived twice: a duplicate, or the sender reuses its identifications.
        Some(LaterFragments::Follow { source_port: from, destination_port: to, identification, .. })
            if (from, to) == (source_port, destination_port) =>
        {
            identification
        }
        _ => {
            let of_protocol = placed.fragment.datagram.protocol;
            engine.identifications.next(rewrite.source, rewrite.destination, of_protocol)
        }
    };
    rewrite::whole(buffer.bytes_mut(), first, &rewrite);
    rewrite::renumber(buffer.bytes_mut(), first, placed.fragment.identification_offset, identification);
    send_split(engine, snapshot, buffer, first, &flow, nat);
    follow_by(first, identification)
}

/// Processes a fragment that waited for the first one.
fn released_fragment<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    early: EarlyFragment<P::Buffer>,
    slot: Slot,
    later: LaterFragments,
) {
    let EarlyFragment { buffer, arrival: came, .. } = early;
    let Some(headers) = parse(buffer.bytes()).ok().and_then(A::headers) else {
        return engine.output.drop(buffer, DropReason::Malformed);
    };
    match Fragment::of(buffer.bytes(), &headers) {
        Ok(fragment) => {
            let placed = FragmentOf { fragment: &fragment, headers: &headers, slot };
            let arrival = Arrival { now_ns: at.arrival.now_ns, ..came };
            later_fragment(engine, Ingress { arrival, ..at }, buffer, &placed, later);
        }
        Err(reason) => engine.output.drop(buffer, reason),
    }
}

/// Processes a later fragment by the decision on the first one.
fn later_fragment<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    buffer: P::Buffer,
    placed: &FragmentOf<'_, A>,
    later: LaterFragments,
) {
    let (source_port, destination_port, protocol, transport, identification) = match later {
        LaterFragments::Follow { source_port, destination_port, protocol, transport, identification } => {
            (source_port, destination_port, protocol, transport, identification)
        }
        LaterFragments::Elsewhere(owner) => {
            return engine.output.hand_over(owner, HandoverTask::Decide, at.arrival, buffer);
        }
        LaterFragments::Linux => {
            engine.output.tally.misses += 1;
            return give_to_linux(&mut engine.output, at, buffer);
        }
        LaterFragments::Drop(reason) => {
            engine.output.tally.misses += 1;
            return engine.output.drop(buffer, reason);
        }
    };
    let tuple = Tuple { source_port, destination_port, protocol, ..placed.headers.tuple };
    let headers = Headers { tuple, transport, ..*placed.headers };
    match verdict_alone(engine, at, &headers, Segment::default()) {
        Verdict::Forward(nat) => forward_later(engine, at.snapshot, buffer, placed, identification, nat),
        // With the headers of the fragment: only first fragments may be answered.
        verdict => apply(engine, at, buffer, placed.headers, verdict),
    }
}

/// The verdict on a single packet outside a burst. RSTs that its decision asks for are sent before it.
fn verdict_alone<'s, A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'s>,
    headers: &Headers<A>,
    segment: Segment,
) -> Verdict<'s> {
    let (table, limits) = engine.flows.table_and_limits();
    let hash = table.hash(&headers.tuple);
    let packet = Packet { headers, hash, candidate: Candidate::NONE, in_link: at.arrival.link };
    let now = Tick::at(at.arrival.now_ns);
    let verdict = match follow(&packet, at.snapshot, table, limits, now) {
        Followed::Decided(verdict) => {
            engine.output.tally.hits += 1;
            verdict
        }
        Followed::Undecided(found) => verdict(engine, at, &packet, segment, found),
    };
    match verdict {
        Verdict::Forward(nat) if is_changed(engine.flows.table::<A>(), &nat, headers.transport) => {
            Verdict::Drop(DropReason::FragmentUnsupported)
        }
        verdict => verdict,
    }
}

/// Rewrites a later fragment by its flow, with the identification of the first one, and sends it.
fn forward_later<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &Snapshot,
    mut buffer: P::Buffer,
    placed: &FragmentOf<'_, A>,
    identification: u32,
    nat: NatForward<'_>,
) {
    let flow = engine.flows.table().get(nat.flow);
    let rewrite = rewrite_of(&flow, nat.direction, nat.exit);
    rewrite::later_fragment(buffer.bytes_mut(), placed.headers, &rewrite);
    rewrite::renumber(buffer.bytes_mut(), placed.headers, placed.fragment.identification_offset, identification);
    send_split(engine, snapshot, buffer, placed.headers, &flow, nat);
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

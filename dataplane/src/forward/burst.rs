//! The stages of a burst: the fast path; then, for what it leaves, parse, sort by kind, look up flows, and process
//! packet by packet. Bursts of tagged frames return here without their tags.
//!
//! **Invariant:** a burst is empty afterwards; every packet went to one function of the engine, or to another worker.
//! Packets of a flow and direction went there in the order of the burst.
//!
//! Not here: the verdict on a packet.

use arrayvec::ArrayVec;

use super::engine::Engine;
use super::execution::answers::{arp, note_advertisement, solicited};
use super::execution::departure::forward_direct;
use super::execution::linux::give_to_linux;
use super::execution::{apply, handle_by_decision};
use super::fast::forward_known;
use super::observer::Observe;
use super::related::{handle_error, handle_fragment};
use super::sort::{Ingress, Kind, Lookup, Lookups, RunKind, Sorted, sort, steer};
use crate::flow::Tick;
use crate::forward::decide::{FlowFamily, Followed, Packet, Verdict, follow};
use crate::port::{Arrival, Burst, FrameFilter, Link, Origin, Port};
use crate::snapshot::{AddressRole, Snapshot};
use crate::stats::DropReason;
use crate::wire::{Address, Buffer, Headers, Parsed, Tags, Transport, Tuple, is_group_address, parse};

/// Processes a burst: the fast path first, then the stages for what it leaves.
#[inline(always)]
pub(super) fn process_unobserved<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    burst: &mut Burst<P::Buffer>,
) {
    forward_known(engine, at, burst);
    if !burst.is_empty() {
        process_left(engine, at, burst);
    }
}

/// The stages of a burst of packets that the fast path leaves.
#[inline(never)]
pub(super) fn process_left<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    burst: &mut Burst<P::Buffer>,
) {
    let mut sorted = Sorted { kinds: ArrayVec::new(), v4: Lookups::new(), v6: Lookups::new() };
    let filter = FrameFilter::new(at.snapshot.port(at.arrival.link.port()).mac);
    sort(&engine.flows.tables, filter, burst, &mut sorted);
    if sorted.is_mixed(engine.output.egress.peers.is_some()) {
        return process_in_order(engine, at, burst, &sorted);
    }
    if matches!(at.arrival.origin, Origin::Port | Origin::OwnerUnknown) && engine.output.egress.peers.is_some() {
        steer(&mut engine.output.egress, at, burst, &mut sorted, &mut engine.output.tally);
    }
    sorted.v4.iter_mut().for_each(|lookup| lookup.candidate = engine.flows.tables.v4.candidate(lookup.hash));
    sorted.v6.iter_mut().for_each(|lookup| lookup.candidate = engine.flows.tables.v6.candidate(lookup.hash));
    if sorted.v4.len() == burst.len() {
        return handle_all(engine, at, burst, &sorted.v4);
    }
    if sorted.kinds.iter().all(|kind| matches!(kind, Kind::V6)) {
        return handle_all(engine, at, burst, &sorted.v6);
    }
    let (mut v4, mut v6) = (sorted.v4.iter(), sorted.v6.iter());
    for (buffer, kind) in burst.drain(..).zip(sorted.kinds) {
        match kind {
            Kind::V4 => {
                if let Some(lookup) = v4.next() {
                    handle(engine, at, buffer, lookup);
                }
            }
            Kind::V6 => {
                if let Some(lookup) = v6.next() {
                    handle(engine, at, buffer, lookup);
                }
            }
            Kind::Solicitation => {
                if let Some(lookup) = v6.next() {
                    solicited(engine, at, buffer, &lookup.headers);
                }
            }
            Kind::Arp => arp(engine, at, buffer),
            // Taken out by `process_in_order`.
            Kind::Tagged | Kind::Other => give_to_linux(&mut engine.output, at, buffer),
            Kind::Foreign => foreign(engine, at, buffer),
            Kind::Bad(reason) => engine.output.drop(buffer, reason),
        }
    }
}

/// Processes the frames of a mixed burst in runs: those with VLAN tags, fragments, and others. Packets of a flow may be
/// in all of them, and a run is handed over or sent before the next one begins.
#[inline(never)]
fn process_in_order<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    burst: &mut Burst<P::Buffer>,
    sorted: &Sorted,
) {
    let (mut run, mut of_run) = (Burst::new(), RunKind::Others);
    for (buffer, kind) in burst.drain(..).zip(sorted.runs()) {
        if kind != of_run {
            process_run(engine, at, of_run, &mut run);
            of_run = kind;
        }
        run.push(buffer);
    }
    process_run(engine, at, of_run, &mut run);
}

fn process_run<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    kind: RunKind,
    run: &mut Burst<P::Buffer>,
) {
    match kind {
        _ if run.is_empty() => {}
        RunKind::Tagged => process_tagged(engine, at, run),
        RunKind::Fragments | RunKind::Others => process_left(engine, at, run),
    }
}

/// Removes the VLAN tags from frames, and processes the frames of one link after another as bursts of their own.
/// Frames with a third tag go to the kernel, so the recursion ends.
#[inline(never)]
fn process_tagged<P: Port, O: Observe<P::Buffer>>(engine: &mut Engine<P, O>, at: Ingress<'_>, burst: &mut Burst<P::Buffer>) {
    let mut run = Burst::new();
    let mut of_run = at;
    for mut buffer in burst.drain(..) {
        if !at.arrival.tags.is_none() {
            give_to_linux(&mut engine.output, at, buffer);
            continue;
        }
        let tags = Tags::of(buffer.bytes());
        let link = tags.vlan().map(|vlan| Link::new(at.arrival.link.port(), vlan));
        let Some(link) = link.filter(|link| at.snapshot.knows(*link)) else {
            unknown_link(engine, at, buffer);
            continue;
        };
        if tags != of_run.arrival.tags {
            if !run.is_empty() {
                process_left(engine, of_run, &mut run);
            }
            of_run = Ingress { arrival: Arrival { link, tags, ..at.arrival }, ..at };
        }
        tags.take_off(&mut buffer);
        run.push(buffer);
    }
    if !run.is_empty() {
        process_left(engine, of_run, &mut run);
    }
}

/// A frame of a VLAN that the kernel has no interface for. It goes to the kernel unchanged, unless it is for an
/// address of the engine: on that VLAN the owner of the address is unknown.
fn unknown_link<P: Port, O: Observe<P::Buffer>>(engine: &mut Engine<P, O>, at: Ingress<'_>, buffer: P::Buffer) {
    match destination(buffer.bytes(), at.snapshot) {
        Ok(Some(AddressRole::Vip | AddressRole::PoolUnused)) => engine.output.drop(buffer, DropReason::UnknownVip),
        Ok(Some(AddressRole::Snat)) => engine.output.drop(buffer, DropReason::SnatWrongPort),
        // As for untagged packets: VIPs are not known yet, nor the set of VLANs.
        Ok(Some(_)) if !at.snapshot.ready() => engine.output.drop(buffer, DropReason::UnknownVip),
        Ok(_) => give_to_linux(&mut engine.output, at, buffer),
        Err(reason) => engine.output.drop(buffer, reason),
    }
}

/// A frame for another station. The kernel may have an interface with that address on top of the twin, or a bridge;
/// then it gets the frame, unless it is for an address or frontend of the gateway.
#[cold]
fn foreign<P: Port, O: Observe<P::Buffer>>(engine: &mut Engine<P, O>, at: Ingress<'_>, buffer: P::Buffer) {
    let may_be_for_kernel = || match parse(buffer.bytes()) {
        Ok(Parsed::V4(headers)) => is_for_kernel(&headers, at.snapshot),
        Ok(Parsed::V6(headers)) => is_for_kernel(&headers, at.snapshot),
        Ok(Parsed::Arp | Parsed::Other) => true,
        Err(_) => false,
    };
    if at.snapshot.is_promiscuous(at.arrival.link.port()) && may_be_for_kernel() {
        give_to_linux(&mut engine.output, at, buffer);
    } else {
        engine.output.drop(buffer, DropReason::NotOurMac);
    }
}

/// The third stage for a burst of one family, which most bursts are.
#[inline(never)]
fn handle_all<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    burst: &mut Burst<P::Buffer>,
    lookups: &Lookups<A>,
) {
    for (buffer, lookup) in burst.drain(..).zip(lookups) {
        handle(engine, at, buffer, lookup);
    }
}

/// Processes one IPv4 or IPv6 packet to its end.
fn handle<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    buffer: P::Buffer,
    lookup: &Lookup<A>,
) {
    let Lookup { headers, hash, candidate } = lookup;
    let packet = &Packet { headers, hash: *hash, candidate: *candidate, in_link: at.arrival.link };
    let now = Tick::at(at.arrival.now_ns);
    let (table, limits) = engine.flows.table_and_limits();
    let found = match follow(packet, at.snapshot, table, limits, now) {
        Followed::Decided(verdict) => {
            engine.output.tally.hits += 1;
            return match verdict {
                Verdict::ForwardDirect(direct) => forward_direct(engine, at.snapshot, buffer, packet.headers, &direct),
                verdict => apply(engine, at, buffer, packet.headers, verdict),
            };
        }
        Followed::Undecided(found) => found,
    };
    match packet.headers.transport {
        Transport::Fragment => handle_fragment(engine, at, buffer, packet),
        Transport::Icmp { .. } => {
            note_advertisement(&engine.neighbours.ownership, at, buffer.bytes(), packet.headers);
            if let Some(buffer) = handle_error(engine, at, buffer, packet) {
                handle_by_decision(engine, at, buffer, packet, None);
            }
        }
        _ => handle_by_decision(engine, at, buffer, packet, found),
    }
}

/// Whether a packet is for no address or frontend of the engine.
fn is_for_kernel<A: Address>(headers: &Headers<A>, snapshot: &Snapshot) -> bool {
    let Tuple { destination, destination_port, protocol, .. } = headers.tuple;
    let is_frontend = || snapshot.frontend(destination, protocol, destination_port).is_some();
    is_group_address(destination)
        || match snapshot.role(destination) {
            AddressRole::Elsewhere | AddressRole::Broadcast => true,
            AddressRole::Twin(_) => !is_frontend(),
            AddressRole::Vip | AddressRole::Snat | AddressRole::PoolUnused => false,
        }
}

/// The role of a frame's destination address; `None` for a group, and for frames without IP.
fn destination(frame: &[u8], snapshot: &Snapshot) -> Result<Option<AddressRole>, DropReason> {
    fn role<A: Address>(headers: &Headers<A>, snapshot: &Snapshot) -> Option<AddressRole> {
        let address = headers.tuple.destination;
        (!is_group_address(address)).then(|| snapshot.role(address))
    }
    Ok(match parse(frame)? {
        Parsed::V4(headers) => role(&headers, snapshot),
        Parsed::V6(headers) => role(&headers, snapshot),
        Parsed::Arp | Parsed::Other => None,
    })
}

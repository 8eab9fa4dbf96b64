//! Packets to the kernel, within the rate limit, and packets that the kernel sends out of a twin. The latter leave by
//! its port, except those to a VIP or a pool address, which a router would send back to the gateway.
//!
//! The kernel can still reach a VIP when a probe needs to (FORWARDING 12): the engine answers its ARP request or
//! solicitation for the VIP and sends a probe to the backend under test.
//!
//! **Invariant:** neither request nor answer appears on the wire.
//!
//! Not here: the decision which packets go to the kernel.

use super::departure::forward_direct;
use crate::flow::Candidate;
use crate::forward::decide::{FlowFamily, NoExit, Packet, follow_probe};
use crate::forward::engine::Engine;
use crate::forward::observer::{Observe, PacketOutcome};
use crate::forward::output::Output;
use crate::forward::sort::Ingress;
use crate::neighbours;
use crate::port::{Arrival, Link, Port, PortIndex};
use crate::snapshot::{AddressRole, Snapshot};
use crate::stats::DropReason;
use crate::wire::{Buffer, Ethernet, Headers, Mac, Parsed, Tags, parse, take, take_mut};

/// The twin that a packet came from, its VLAN tags, and when.
#[derive(Clone, Copy)]
struct Twin {
    port: PortIndex,
    tags: Tags,
    now_ns: u64,
}

pub(in crate::forward) fn give_to_linux<P: Port, O: Observe<P::Buffer>>(
    output: &mut Output<P, O>,
    at: Ingress<'_>,
    mut buffer: P::Buffer,
) {
    let port = at.arrival.link.port();
    if !at.snapshot.port(port).twin {
        return output.drop(buffer, DropReason::NoRoute);
    }
    let mac = take::<Ethernet>(buffer.bytes()).map_or(Mac::default(), |(ethernet, _)| Mac(ethernet.source));
    let is_from_link = |source| at.snapshot.is_on_link(at.arrival.link, source, mac);
    let (class, heard) = output.egress.class(port, buffer.bytes(), is_from_link);
    if !output.twin_rate.allow(class, at.arrival.now_ns) {
        return output.drop(buffer, DropReason::TwinRate);
    }
    if let Some(exchange) = heard {
        output.egress.heard(port, exchange);
    }
    if !at.arrival.tags.put_on(&mut buffer) {
        output.drop(buffer, DropReason::TwinFull);
    } else {
        output.observer.observe(&buffer, PacketOutcome::Linux(port), || None);
        output.egress.queue_for_linux(port, buffer, &mut output.tally);
    }
}

/// Passes a packet to the kernel as if it had arrived on another link, addressed to that port's Ethernet address.
#[cold]
pub(in crate::forward) fn give_to_linux_at<P: Port, O: Observe<P::Buffer>>(
    output: &mut Output<P, O>,
    at: Ingress<'_>,
    link: Link,
    mut buffer: P::Buffer,
) {
    if let Some((ethernet, _)) = take_mut::<Ethernet>(buffer.bytes_mut()) {
        ethernet.destination = at.snapshot.port(link.port()).mac.0;
    }
    let arrival = Arrival { link, tags: link.tags(), ..at.arrival };
    give_to_linux(output, Ingress { arrival, ..at }, buffer);
}

/// Processes a packet that the kernel sends by this port. Packets that cannot be parsed are dropped, since they
/// might be for a VIP.
pub(in crate::forward) fn sent_by_linux<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &Snapshot,
    port: PortIndex,
    mut buffer: P::Buffer,
    now_ns: u64,
) {
    let tags = Tags::of(buffer.bytes());
    tags.take_off(&mut buffer);
    let twin = Twin { port, tags, now_ns };
    match parse(buffer.bytes()) {
        Ok(Parsed::V4(headers)) => packet_of_linux(engine, snapshot, twin, buffer, &headers),
        Ok(Parsed::V6(headers)) => {
            let asked = neighbours::neighbour_question(buffer.bytes(), &headers);
            // An answer to an address of the engine would go to the kernel, which must not receive packets for
            // those.
            let is_from_kernel = matches!(snapshot.role(headers.tuple.source), AddressRole::Twin(_) | AddressRole::Elsewhere);
            if !is_from_kernel || !asked.is_some_and(|target| snapshot.role(target) == AddressRole::Vip) {
                return packet_of_linux(engine, snapshot, twin, buffer, &headers);
            }
            let done = neighbours::neighbour_advertisement(&mut buffer, &headers, snapshot.port(port).mac);
            answer_linux(&mut engine.output, twin, buffer, done);
        }
        Ok(Parsed::Arp) => {
            let asked = neighbours::arp_question(buffer.bytes());
            if !asked.is_some_and(|target| snapshot.role(target) == AddressRole::Vip) {
                return engine.output.send_tagged(port, tags, buffer);
            }
            let done = neighbours::arp_reply(&mut buffer, snapshot.port(port).mac);
            answer_linux(&mut engine.output, twin, buffer, done);
        }
        Ok(Parsed::Other) => engine.output.send_tagged(port, tags, buffer),
        Err(reason) => engine.output.drop(buffer, reason),
    }
}

/// Passes the answer to its request to the kernel. The answer contains the port's own address: the kernel then
/// sends by the twin, and the engine accepts the packet whatever its Ethernet addresses.
fn answer_linux<P: Port, O: Observe<P::Buffer>>(output: &mut Output<P, O>, twin: Twin, mut buffer: P::Buffer, done: bool) {
    if done && twin.tags.put_on(&mut buffer) {
        output.tally.replies += 1;
        output.egress.queue_for_linux(twin.port, buffer, &mut output.tally);
    } else {
        output.drop(buffer, DropReason::Malformed);
    }
}

fn packet_of_linux<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &Snapshot,
    twin: Twin,
    buffer: P::Buffer,
    headers: &Headers<A>,
) {
    let Some(permission) = engine.neighbours.ownership.may_pass(buffer.bytes(), headers, twin.now_ns) else {
        return engine.output.drop(buffer, DropReason::StaleAdvertisement);
    };
    engine.output.egress.sent_by_linux(twin.port, buffer.bytes(), headers);
    match snapshot.role(headers.tuple.destination) {
        AddressRole::Vip => probe(engine, snapshot, buffer, headers),
        AddressRole::PoolUnused => engine.output.drop(buffer, DropReason::VipLoop),
        AddressRole::Snat | AddressRole::Twin(_) | AddressRole::Broadcast | AddressRole::Elsewhere => {
            permission.send(&mut engine.output.egress, twin.port, twin.tags, buffer, &mut engine.output.tally);
        }
    }
}

/// Processes a packet that the kernel sends to a VIP: a probe goes to the backend that its source port stands for;
/// any other packet would only come back and is dropped.
fn probe<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &Snapshot,
    buffer: P::Buffer,
    headers: &Headers<A>,
) {
    let hash = engine.flows.table::<A>().hash(&headers.tuple);
    let packet = Packet { headers, hash, candidate: Candidate::NONE, in_link: PortIndex(0).into() };
    match follow_probe(&packet, snapshot) {
        Some(Ok(direct)) => forward_direct(engine, snapshot, buffer, headers, &direct),
        Some(Err(NoExit::Unresolved(neighbour))) => {
            engine.neighbours.ask(neighbour);
            engine.output.drop(buffer, DropReason::NeighbourUnresolved);
        }
        Some(Err(NoExit::Dropped(reason))) => engine.output.drop(buffer, reason),
        Some(Err(NoExit::Refused(_))) | None => engine.output.drop(buffer, DropReason::VipLoop),
    }
}

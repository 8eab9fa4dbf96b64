//! Observation of packets while a capture runs: each packet of an observed burst passes the engine alone and without
//! the fast path, and the worker compares its counts and its outputs before and after (docs/internals/decisions/0053).
//!
//! **Invariant:** an observed packet leaves as the same bytes by the same port as any other. Without a capture nothing
//! here runs.
//!
//! Not here: which bursts are observed, and the copies (`observer::capture`).

use std::net::SocketAddr;

use super::watching::sample;
use crate::forward::burst::{process_left, process_unobserved};
use crate::forward::decide::FlowFamily;
use crate::forward::engine::Engine;
use crate::forward::observer::{
    CapturedFlow, FlowUse, Observe, ObservedEnd, ObservedPacket, PacketEnds, PacketFlow, PacketOutcome, PacketSource,
};
use crate::forward::sort::{Ingress, sample_queue};
use crate::port::{Arrival, Burst, Origin, Port, PortIndex};
use crate::stats::{DropReason, Tally};
use crate::wire::{Address, Buffer, Headers, Parsed, Tags, parse};

/// Where an observed packet comes from.
#[derive(Clone, Copy)]
pub(super) struct ObservedFrom {
    pub(super) port: PortIndex,
    pub(super) source: PacketSource,
    /// Tags that were taken off its frame.
    pub(super) tags: Tags,
    pub(super) now_ns: u64,
}

impl From<Arrival> for ObservedFrom {
    fn from(arrival: Arrival) -> Self {
        let source = match arrival.origin {
            Origin::Port => PacketSource::Port,
            Origin::OwnerUnknown | Origin::Begun | Origin::Owned => PacketSource::Worker,
        };
        Self { port: arrival.link.port(), source, tags: arrival.tags, now_ns: arrival.now_ns }
    }
}

/// Processes a burst. While a capture runs, or somebody watches, its packets may be observed.
pub(super) fn process<P: Port, O: Observe<P::Buffer>>(engine: &mut Engine<P, O>, at: Ingress<'_>, burst: &mut Burst<P::Buffer>) {
    if let (Some(peers), Origin::Port) = (&mut engine.output.egress.peers, at.arrival.origin) {
        sample_queue(peers, at.arrival.link.port(), burst);
    }
    if engine.is_looked_at {
        return process_captured(engine, at, burst);
    }
    process_unobserved(engine, at, burst);
}

/// Processes a burst while a capture runs or somebody watches.
#[cold]
#[inline(never)]
fn process_captured<P: Port, O: Observe<P::Buffer>>(engine: &mut Engine<P, O>, at: Ingress<'_>, burst: &mut Burst<P::Buffer>) {
    sample(engine, at.arrival, burst);
    let observed = observes(engine, burst.len(), burst.is_full(), at.arrival.now_ns);
    for buffer in burst.drain(..observed) {
        observe_packet(engine, at.arrival.into(), buffer, |engine, buffer| process_alone(engine, at, buffer));
    }
    if !burst.is_empty() {
        process_unobserved(engine, at, burst);
    }
}

/// Processes a packet that has waited until its next hop was resolved.
pub(super) fn process_waited<P: Port, O: Observe<P::Buffer>>(engine: &mut Engine<P, O>, at: Ingress<'_>, buffer: P::Buffer) {
    if observes(engine, 1, false, at.arrival.now_ns) > 0 {
        let from = ObservedFrom { source: PacketSource::Waited, ..at.arrival.into() };
        observe_packet(engine, from, buffer, |engine, buffer| process_alone(engine, at, buffer));
    } else {
        let mut alone = Burst::new();
        alone.push(buffer);
        process_unobserved(engine, at, &mut alone);
    }
}

/// Processes one packet without the fast path, which would send it before anybody could look at it.
fn process_alone<P: Port, O: Observe<P::Buffer>>(engine: &mut Engine<P, O>, at: Ingress<'_>, buffer: P::Buffer) {
    let mut alone = Burst::new();
    alone.push(buffer);
    process_left(engine, at, &mut alone);
}

/// How many of the first packets of a burst are observed; none without a capture.
pub(super) fn observes<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    packets: usize,
    is_full: bool,
    now_ns: u64,
) -> usize {
    engine.capture.as_mut().map_or(0, |capture| capture.observes(packets, is_full, now_ns))
}

/// Processes one packet by `process`, and reports it to the capture.
#[cold]
pub(super) fn observe_packet<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    from: ObservedFrom,
    mut buffer: P::Buffer,
    process: impl FnOnce(&mut Engine<P, O>, P::Buffer),
) {
    let Some(mut capture) = engine.capture.take() else { return process(engine, buffer) };
    // Frames of earlier packets leave now, so that all frames that are collected afterwards are of this packet.
    engine.output.egress.flush_ports(&mut engine.output.tally);
    let parsed = with_tags(&mut buffer, from.tags, |frame| capture.received(frame));
    let (before, held) = (engine.output.tally.clone(), engine.held());
    process(engine, buffer);
    engine.output.egress.for_each_collected(|port, is_to_linux, buffer| capture.sends(port, is_to_linux, buffer.bytes()));
    let sending = capture.sending();
    let collected = engine.output.tally.clone();
    engine.output.egress.flush_ports(&mut engine.output.tally);
    let is_refused = engine.output.tally.dropped_since(&collected);
    let outcome = match is_refused {
        Some(reason) => Some(ObservedEnd::Outcome(PacketOutcome::Drop(reason))),
        None => outcome(&before, &collected, sending, || capture.last_sent())
            .map(ObservedEnd::Outcome)
            .or_else(|| (engine.held() > held).then_some(ObservedEnd::Waits)),
    };
    match outcome {
        None => capture.leaves_to_owner(),
        Some(end) if capture.matches() => {
            let flow_use = match (collected.new_flows > before.new_flows, collected.hits > before.hits) {
                (true, _) => FlowUse::New,
                (false, true) => FlowUse::Known,
                (false, false) => FlowUse::None,
            };
            let (ends, flow) = match &parsed {
                Some(Parsed::V4(headers)) => (Some(ends(headers)), flow_of(engine, headers)),
                Some(Parsed::V6(headers)) => (Some(ends(headers)), flow_of(engine, headers)),
                Some(Parsed::Arp | Parsed::Other) | None => (None, None),
            };
            let ObservedFrom { port, source, now_ns: time_ns, .. } = from;
            let packet = ObservedPacket { time_ns, port, source, ends, flow_use, flow, end };
            capture.ended(packet, is_refused.is_none());
        }
        Some(_) => {}
    }
    engine.capture = Some(capture);
}

/// Drops a packet that waited in vain.
pub(super) fn drop_waiting<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    arrival: Arrival,
    buffer: P::Buffer,
    reason: DropReason,
) {
    if observes(engine, 1, false, arrival.now_ns) > 0 {
        let from = ObservedFrom { source: PacketSource::Waited, ..arrival.into() };
        observe_packet(engine, from, buffer, |engine, buffer| engine.output.drop(buffer, reason));
    } else {
        engine.output.drop(buffer, reason);
    }
}

/// The flow of a packet, as it is now.
fn flow_of<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(engine: &Engine<P, O>, headers: &Headers<A>) -> Option<CapturedFlow> {
    let table = A::table(&engine.flows.tables);
    let (index, _) = table.search(table.hash(&headers.tuple), &headers.tuple)?;
    let flow = table.get(index);
    let belongs = PacketFlow { vip: flow.vip.ip(), port: flow.vip_port, protocol: flow.protocol, backend: flow.backend };
    Some(CapturedFlow { belongs, shift: flow.shift })
}

/// Shows the frame of a packet as it arrived, with all its tags, and parses it without them.
fn with_tags<B: Buffer>(buffer: &mut B, taken_off: Tags, show: impl FnOnce(&[u8])) -> Option<Parsed> {
    let is_put_on = !taken_off.is_none() && taken_off.put_on(buffer);
    show(buffer.bytes());
    let tags = Tags::of(buffer.bytes());
    tags.take_off(buffer);
    let parsed = parse(buffer.bytes()).ok();
    if !is_put_on {
        // There is room: they have just been taken off.
        let _ = tags.put_on(buffer);
    }
    parsed
}

fn ends<A: Address>(headers: &Headers<A>) -> PacketEnds {
    let tuple = &headers.tuple;
    let end = |address: A, port| SocketAddr::new(address.ip(), port);
    (end(tuple.source, tuple.source_port), end(tuple.destination, tuple.destination_port), tuple.protocol)
}

/// The outcome of a packet, from the counts before and after; `None` if it waits or went to another worker. Resets that
/// are sent because of a packet are no outcome of it.
fn outcome(
    before: &Tally,
    after: &Tally,
    sending: usize,
    last: impl FnOnce() -> Option<(PortIndex, bool)>,
) -> Option<PacketOutcome> {
    let originated = after.originated - before.originated;
    if let Some(reason) = after.dropped_since(before).filter(|_| sending as u64 <= originated) {
        return Some(PacketOutcome::Drop(reason));
    }
    let (port, is_to_linux) = last()?;
    Some(match (is_to_linux, after.replies > before.replies) {
        (true, _) => PacketOutcome::Linux(port),
        (false, true) => PacketOutcome::Reply(port),
        (false, false) => PacketOutcome::Forward(port),
    })
}

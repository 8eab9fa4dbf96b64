//! Observation of packets while a capture runs: each packet of an observed burst passes the engine alone and without
//! the fast path, and the worker compares its counts and its outputs before and after (docs/internals/decisions/0053).
//!
//! **Invariant:** an observed packet leaves as the same bytes by the same port as any other. Without a capture nothing
//! here runs.
//!
//! Not here: which bursts are observed, and the copies (`observer::capture`).

use std::net::SocketAddr;

use crate::forward::decide::FlowFamily;
use crate::forward::engine::Engine;
use crate::forward::observer::{
    FlowUse, Observe, ObservedEnd, ObservedPacket, PacketEnds, PacketFlow, PacketOutcome, PacketSource,
};
use crate::forward::sort::Ingress;
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

impl<P: Port, O: Observe<P::Buffer>> Engine<P, O> {
    /// Processes a burst while a capture runs or somebody watches.
    #[cold]
    #[inline(never)]
    pub(in crate::forward) fn process_captured(&mut self, at: Ingress<'_>, burst: &mut Burst<P::Buffer>) {
        self.sample(at.arrival, burst);
        let observed = self.observes(burst.len(), burst.is_full(), at.arrival.now_ns);
        for buffer in burst.drain(..observed) {
            self.observed(at.arrival.into(), buffer, |engine, buffer| engine.process_alone(at, buffer));
        }
        if !burst.is_empty() {
            self.process_unobserved(at, burst);
        }
    }

    /// Processes a packet that has waited until its next hop was resolved.
    pub(super) fn process_waited(&mut self, at: Ingress<'_>, buffer: P::Buffer) {
        if self.observes(1, false, at.arrival.now_ns) > 0 {
            let from = ObservedFrom { source: PacketSource::Waited, ..at.arrival.into() };
            self.observed(from, buffer, |engine, buffer| engine.process_alone(at, buffer));
        } else {
            let mut alone = Burst::new();
            alone.push(buffer);
            self.process_unobserved(at, &mut alone);
        }
    }

    /// Processes one packet without the fast path, which would send it before anybody could look at it.
    fn process_alone(&mut self, at: Ingress<'_>, buffer: P::Buffer) {
        let mut alone = Burst::new();
        alone.push(buffer);
        self.process_left(at, &mut alone);
    }

    /// How many of the first packets of a burst are observed; none without a capture.
    pub(super) fn observes(&mut self, packets: usize, is_full: bool, now_ns: u64) -> usize {
        self.capture.as_mut().map_or(0, |capture| capture.observes(packets, is_full, now_ns))
    }

    /// Processes one packet by `process`, and reports it to the capture.
    #[cold]
    pub(super) fn observed(&mut self, from: ObservedFrom, mut buffer: P::Buffer, process: impl FnOnce(&mut Self, P::Buffer)) {
        let Some(mut capture) = self.capture.take() else { return process(self, buffer) };
        // Frames of earlier packets leave now, so that all frames that are collected afterwards are of this packet.
        self.egress.flush_ports(&mut self.tally);
        let parsed = with_tags(&mut buffer, from.tags, |frame| capture.received(frame));
        let (before, held) = (self.tally.clone(), self.held());
        process(self, buffer);
        self.egress.for_each_collected(|port, is_to_linux, buffer| capture.sends(port, is_to_linux, buffer.bytes()));
        let sending = capture.sending();
        let collected = self.tally.clone();
        self.egress.flush_ports(&mut self.tally);
        let is_refused = self.tally.dropped_since(&collected);
        let outcome = match is_refused {
            Some(reason) => Some(ObservedEnd::Outcome(PacketOutcome::Drop(reason))),
            None => outcome(&before, &collected, sending, || capture.last_sent())
                .map(ObservedEnd::Outcome)
                .or_else(|| (self.held() > held).then_some(ObservedEnd::Waits)),
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
                    Some(Parsed::V4(headers)) => (Some(ends(headers)), self.flow_of(headers)),
                    Some(Parsed::V6(headers)) => (Some(ends(headers)), self.flow_of(headers)),
                    Some(Parsed::Arp | Parsed::Other) | None => (None, None),
                };
                let ObservedFrom { port, source, now_ns: time_ns, .. } = from;
                let packet = ObservedPacket { time_ns, port, source, ends, flow_use, flow, end };
                capture.ended(packet, is_refused.is_none());
            }
            Some(_) => {}
        }
        self.capture = Some(capture);
    }

    /// Drops a packet that waited in vain.
    pub(in crate::forward) fn drop_waiting(&mut self, arrival: Arrival, buffer: P::Buffer, reason: DropReason) {
        if self.observes(1, false, arrival.now_ns) > 0 {
            let from = ObservedFrom { source: PacketSource::Waited, ..arrival.into() };
            self.observed(from, buffer, |engine, buffer| engine.drop(buffer, reason));
        } else {
            self.drop(buffer, reason);
        }
    }

    /// Packets that wait.
    fn held(&self) -> usize {
        self.neighbours.queue.len() + self.datagrams.waiting()
    }

    /// The flow of a packet, as it is now.
    fn flow_of<A: FlowFamily>(&self, headers: &Headers<A>) -> Option<PacketFlow> {
        let table = A::table(&self.tables);
        let (index, _) = table.search(table.hash(&headers.tuple), &headers.tuple)?;
        let flow = table.get(index);
        Some(PacketFlow { vip: flow.vip.ip(), port: flow.vip_port, protocol: flow.protocol, backend: flow.backend })
    }
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

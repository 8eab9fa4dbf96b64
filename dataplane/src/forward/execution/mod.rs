//! Carries out verdicts: packets are sent, held, dropped, or passed on to answers and to the kernel.
//!
//! **Invariant:** every packet that enters leaves by exactly one counted verdict.
//!
//! Not here: the decision itself (`decide`).

pub(super) mod answers;
pub(super) mod departure;
pub(super) mod linux;
mod shifted;

use arrayvec::ArrayVec;

use super::decide::{
    Changes, DecisionContext, FlowFamily, FlowMatch, Packet, RESETS_MAX, ResetBuffers, Verdict, WorkerFlows, decide,
};
use super::engine::Engine;
use super::flow_transfer::visit_halves;
use super::observer::Observe;
use super::output::Output;
use super::rewrite::mss;
use super::sort::Ingress;
use crate::flow::{Segment, Tick};
use crate::neighbours::UnresolvedNeighbour;
use crate::port::{Arrival, Port};
use crate::stats::DropReason;
use crate::wire::{Buffer, Headers};
use answers::{originate, reply, reset};
use departure::{forward_direct, forward_nat};
use linux::{give_to_linux, give_to_linux_at};
use shifted::forward_shifted;

/// Processes a packet by [`decide`].
pub(in crate::forward) fn handle_by_decision<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    buffer: P::Buffer,
    packet: &Packet<'_, A>,
    found: Option<FlowMatch>,
) {
    let segment = Segment::of(buffer.bytes(), packet.headers);
    if let Some((worker, task)) = visit_halves(engine.output.receiving(&mut engine.flows), at, packet, segment, found) {
        return engine.output.hand_over(worker, task, at.arrival, buffer);
    }
    let verdict = verdict(engine, at, packet, segment, found);
    apply(engine, at, buffer, packet.headers, verdict);
}

/// The verdict of [`decide`]; counts its changes and sends the resets that it requests.
#[inline(always)]
pub(in crate::forward) fn verdict<'s, A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'s>,
    packet: &Packet<'_, A>,
    segment: Segment,
    found: Option<FlowMatch>,
) -> Verdict<'s> {
    let mut changes = Changes::default();
    let room = engine.flows.room();
    let WorkerFlows { tables, ports, limits, .. } = &mut engine.flows;
    let Output { worker, egress, counters, .. } = &mut engine.output;
    let (now, worker, (table, others)) = (Tick::at(at.arrival.now_ns), *worker, A::split(tables));
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
    count_changes(engine, &changes);
    let tuple = &packet.headers.tuple;
    if changes.reused_early
        && let Some(frontend) = at.snapshot.frontend(tuple.destination, tuple.protocol, tuple.destination_port)
    {
        frontend.drops.count_early(engine.output.worker);
    }
    if !changes.resets.is_empty() {
        originate(engine, at.arrival, &changes.resets, buffers, matches!(verdict, Verdict::Reset(_)));
    }
    verdict
}

fn count_changes<P: Port, O: Observe<P::Buffer>>(engine: &mut Engine<P, O>, changes: &Changes) {
    if changes.hit {
        engine.output.tally.hits += 1;
        if let Some(slot) = changes.reset {
            engine.output.counters.at(slot).reset.add(1);
        }
        return;
    }
    engine.output.tally.misses += 1;
    engine.output.tally.reused_early += u64::from(changes.reused_early);
    for slot in changes.ended.into_iter().chain(changes.displaced) {
        engine.output.counters.flow_ended(slot);
    }
    for slot in &changes.reclaimed {
        engine.output.tally.reclaimed += 1;
        engine.output.counters.flow_ended(*slot);
    }
    if let Some(slot) = changes.made {
        engine.output.tally.new_flows += 1;
        engine.output.counters.flow_began(slot, changes.service);
    }
    if let Some(neighbour) = changes.ask {
        engine.neighbours.ask(neighbour);
    }
}

/// Carries out a verdict on a packet.
pub(in crate::forward) fn apply<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
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
        Verdict::Forward(nat) if engine.flows.table::<A>().is_shifted(nat.flow) => {
            forward_shifted(engine, at, buffer, headers, nat);
        }
        Verdict::Forward(nat) => forward_nat(engine, at.snapshot, buffer, headers, nat),
        Verdict::ForwardDirect(direct) => forward_direct(engine, at.snapshot, buffer, headers, &direct),
        Verdict::Wait(neighbour) => hold(engine, at.arrival, buffer, neighbour),
        Verdict::Linux => give_to_linux(&mut engine.output, at, buffer),
        Verdict::LinuxAt(link) => give_to_linux_at(&mut engine.output, at, link, buffer),
        Verdict::Reply(answer) => reply(engine, at, buffer, headers, answer),
        Verdict::Reset(reason) => reset(engine, at, buffer, headers, reason),
        Verdict::Drop(reason) => engine.output.drop_of_service(at.snapshot, buffer, headers, reason),
    }
}

fn hold<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    arrival: Arrival,
    buffer: P::Buffer,
    neighbour: UnresolvedNeighbour,
) {
    match engine.neighbours.queue.keep(buffer, arrival, neighbour) {
        Ok(true) => engine.neighbours.ask(neighbour),
        Ok(false) => {}
        Err(buffer) => engine.output.drop(buffer, DropReason::NeighbourUnresolved),
    }
}

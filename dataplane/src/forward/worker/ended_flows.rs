//! Flows that an operator ends (docs/internals/decisions/0168).
//!
//! A connection gets a RST at both ends. Their sequence numbers are not kept, so the worker sends each end a bare ACK with
//! numbers that mean nothing there, and takes the backend from the flow. Each end answers by an ACK with its own numbers
//! (RFC 9293 section 3.10.7.4). The first packet that arrives, an answer or another one, ends the flow as that of a
//! removed backend, by a RST both ways. A handshake needs no answer: its numbers are known. Flows without RSTs end at once.
//!
//! **Invariant:** only flows that this gateway owns end here; their partners hear of it as of any other end.
//!
//! Not here: which flows end (`sluicectl flows end`), and the RSTs that a packet causes (`decide`).

use crate::flow::{Direction, Flow, FlowEnd, FlowIndex, FlowState, Tick};
use crate::forward::decide::{EndedFlow, FlowEnds, FlowFamily, FlowTables, exit_by, exit_to_client, reset_to_backend};
use crate::forward::engine::Engine;
use crate::forward::observer::Observe;
use crate::forward::rewrite::{Reset, write_probe, write_reset};
use crate::port::Port;
use crate::snapshot::Snapshot;
use crate::wire::{Tuple, protocol};

/// Ends flows.
pub(super) fn end_all<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &Snapshot,
    ends: &mut FlowEnds,
    now_ns: u64,
) {
    let ended = ends.flows.iter().filter(|flow| match flow.client.is_ipv4() {
        true => end::<u32, P, O>(engine, snapshot, flow, now_ns),
        false => end::<u128, P, O>(engine, snapshot, flow, now_ns),
    });
    let ended = ended.count();
    ends.ended = u32::try_from(ended).unwrap_or(u32::MAX);
    engine.output.tally.ended_on_request += ended as u64;
    engine.output.egress.flush(&mut engine.output.tally);
    engine.publish_counters();
}

/// Ends a flow. Returns false if it is not here, or is not to end here.
fn end<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &Snapshot,
    ended: &EndedFlow,
    now_ns: u64,
) -> bool {
    let Some((index, mut flow)) = find::<A>(&engine.flows.tables, ended) else { return false };
    if snapshot.backend(flow.backend).is_none() || snapshot.is_owned_elsewhere(flow.vip) {
        return false;
    }
    if flow.protocol == protocol::TCP && flow.mode.is_two_way() {
        if flow.state.shakes_hands() {
            break_handshake(engine, snapshot, &mut flow);
        } else if !flow.state.is_closing() {
            provoke(engine, snapshot, &mut flow);
            A::split(&mut engine.flows.tables).0.abandon(index);
            return true;
        }
    }
    A::split(&mut engine.flows.tables).0.remove(index, FlowEnd::Requested);
    if let Some(lease) = flow.snat_lease() {
        engine.flows.ports.release(lease.pool, lease.port, Tick::at(now_ns));
    }
    engine.output.counters.flow_ended(flow.counter_slot());
    true
}

/// The flow, if it is still that of this backend.
fn find<A: FlowFamily>(tables: &FlowTables, ended: &EndedFlow) -> Option<(FlowIndex, Flow<A>)> {
    let EndedFlow { protocol, client, frontend, backend } = *ended;
    let tuple = Tuple {
        source: A::from_ip(client.ip())?,
        destination: A::from_ip(frontend.ip())?,
        source_port: client.port(),
        destination_port: frontend.port(),
        protocol,
    };
    let table = A::table(tables);
    let (index, _) = table.search(table.hash(&tuple), &tuple)?;
    let flow = table.get(index);
    (flow.backend == backend).then_some((index, flow))
}

/// Sends RSTs to both ends of a handshake. The client takes its by the number of its SYN.
fn break_handshake<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &Snapshot,
    flow: &mut Flow<A>,
) {
    let hash = A::table(&engine.flows.tables).hash(&flow.tuple(Direction::ToBackend));
    if let Some(reset) = reset_to_backend(flow, hash, snapshot) {
        engine.output.originate_by(&reset.exit, |buffer| write_reset(buffer, &reset));
    }
    let sequence = if flow.state == FlowState::TcpAnswered { flow.acknowledgement } else { 0 };
    let acknowledgement = flow.initial_sequence.wrapping_add(1);
    if let Ok(exit) = exit_to_client(snapshot, flow) {
        let tuple = flow.tuple(Direction::ToBackend).reversed();
        let reset = Reset::new(tuple, sequence, Some(acknowledgement), *exit);
        engine.output.originate_by(&reset.exit, |buffer| write_reset(buffer, &reset));
    }
}

/// Sends both ends of a connection an ACK that they answer. Its numbers come from the secret hash: few of all numbers
/// are within a window.
fn provoke<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(engine: &mut Engine<P, O>, snapshot: &Snapshot, flow: &mut Flow<A>) {
    let hash = A::table(&engine.flows.tables).hash(&flow.tuple(Direction::ToBackend));
    #[allow(clippy::cast_possible_truncation)] // halves
    let (sequence, acknowledgement) = (hash as u32, (hash >> 32) as u32);
    let probe = |tuple, exit| Reset::new(tuple, sequence, Some(acknowledgement), exit);
    let next_hop = snapshot.backend(flow.backend).map(|backend| backend.next_hop);
    if let Some(Ok(exit)) = next_hop.map(|next_hop| exit_by(snapshot, next_hop, hash)) {
        let segment = probe(flow.tuple(Direction::ToClient).reversed(), *exit);
        engine.output.originate_by(exit, |buffer| write_probe(buffer, &segment));
    }
    if let Ok(exit) = exit_to_client(snapshot, flow) {
        let segment = probe(flow.tuple(Direction::ToBackend).reversed(), *exit);
        engine.output.originate_by(exit, |buffer| write_probe(buffer, &segment));
    }
}

//! Explanation of a decision: what would happen to a packet with given addresses and ports, found without sending one
//! (docs/internals/decisions/0047).
//!
//! The agent builds the packet, parses it as a worker does, and calls `follow` and `decide` on tables of its own that
//! hold only the flows that matter. Those flows, and the SNAT port that a new flow would get, come from the worker that
//! owns the packet.
//!
//! **Invariant:** no rule of the decision is written here a second time, and nothing that workers use changes.
//!
//! Not here: how the worker is asked (`inquiry`, and the agent).

mod explanation;
mod frame;
mod trial;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

pub use explanation::{
    ExplainError, ExplainedFrontend, ExplainedPacket, Explanation, FlowEffect, Leaves, Outcome, PacketKind, TunnelEnds,
};

use super::inquiry::{About, FamilyInquiry, Inquired, Inquiry};
use super::local::refused_source;
use super::new_flow::first_snat_address;
use crate::choose::Chooser;
use crate::flow::{BackendId, Direction, Flow, FlowMode, FlowView, Segment, SnatTarget, Tick};
use crate::port::{Link, PortIndex};
use crate::snapshot::{Frontend, RouteTo, Snapshot};
use crate::stats::DropReason;
use crate::wire::{Address, Tuple, parse};
use crate::workers::Steering;
use trial::{Trial, TrialFamily, TrialTables, Tried};

/// Explains the decisions of a gateway.
#[derive(Debug)]
pub struct Explainer {
    steering: Steering,
    seed: u64,
    /// Reserved by the first explanation.
    tables: Option<TrialTables>,
}

impl Explainer {
    /// Of a gateway with this function of owners, and this seed of the workers' tables.
    #[must_use]
    pub const fn new(steering: Steering, seed: u64) -> Self {
        Self { steering, seed, tables: None }
    }

    /// Explains a packet. `ask` carries an inquiry to a worker and returns it with the answer.
    ///
    /// # Errors
    /// If the worker does not answer, or the addresses are of different families.
    pub fn explain<E>(
        &mut self,
        packet: &ExplainedPacket,
        snapshot: &Snapshot,
        mut ask: impl FnMut(usize, Inquired) -> Result<Box<Inquiry>, E>,
    ) -> Result<Explanation, ExplainError<E>> {
        match (packet.source.ip(), packet.destination.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                self.of::<u32, E>(packet, source.into(), destination.into(), snapshot, &mut ask)
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                self.of::<u128, E>(packet, source.into(), destination.into(), snapshot, &mut ask)
            }
            _ => Err(ExplainError::Families),
        }
    }

    fn of<A: TrialFamily, E>(
        &mut self,
        packet: &ExplainedPacket,
        source: A,
        destination: A,
        snapshot: &Snapshot,
        ask: &mut impl FnMut(usize, Inquired) -> Result<Box<Inquiry>, E>,
    ) -> Result<Explanation, ExplainError<E>> {
        let tables = match &mut self.tables {
            Some(tables) => tables,
            none => none.insert(TrialTables::new(self.seed).ok_or(ExplainError::NoMemory)?),
        };
        let (source_port, destination_port) = (packet.source.port(), packet.destination.port());
        let tuple = Tuple { source, destination, source_port, destination_port, protocol: packet.protocol.number() };
        let worker = usize::from(self.steering.owner(&tuple, snapshot.packet_target(&tuple)).0);
        let mut ask = |about| ask(worker, A::inquiry(FamilyInquiry::new(about))).map_err(ExplainError::Asking);
        let answer = ask(About::Flow(tuple))?;
        let now = Tick::at(answer.now_ns);
        let flows: Vec<Flow<A>> = flows_of(&answer);
        let flow = flows.first().copied();
        let kind = packet.kind.unwrap_or(if flow.is_some() { PacketKind::Later } else { PacketKind::First });
        let link = packet.link.unwrap_or_else(|| link_towards(snapshot, source));
        // A packet that repeats the SYN of a handshake in progress.
        let sequence = flow.map_or(0, |flow| flow.initial_sequence);
        let segment = Segment { sequence, acknowledgement: 0, end: sequence };
        let frame = frame::frame(packet, kind, segment, snapshot.port(link.port()).mac);
        let frontend = |tried: Option<&Tried<A>>| {
            let asked = flow.as_ref().map_or(tuple, |flow| flow.tuple(Direction::ToBackend));
            let frontend = snapshot.frontend(asked.destination, asked.protocol, asked.destination_port)?;
            let chosen = || frontend.choose(&asked, Chooser { worker, now, is_trial: true });
            let backend = tried.and_then(|tried| tried.leaves).map(|leaves| leaves.backend);
            Some(explained(frontend, &asked, backend.or_else(|| Some(flow.as_ref()?.backend)).or_else(chosen), snapshot, now))
        };
        let flow_view = flow.as_ref().map(|flow| FlowView::of(flow, now));
        let explanation = |outcome, tried: Option<&Tried<A>>| Explanation {
            kind,
            link,
            worker,
            frontend: frontend(tried),
            flow: flow_view,
            outcome,
            leaves: tried.and_then(|tried| tried.leaves),
            effect: tried.map_or(FlowEffect::None, |tried| tried.effect),
        };
        let headers = match parse(&frame) {
            Ok(parsed) => A::headers(parsed),
            Err(error) => return Ok(explanation(Outcome::Drop(error.into()), None)),
        };
        let Some(headers) = headers else { return Ok(explanation(Outcome::Drop(DropReason::Malformed), None)) };
        let mut trial = Trial { snapshot, headers: &headers, segment, link, now, worker, flows, seed: self.seed };
        let room = trial.room(answer.room, answer.yields);
        let tried = trial.run_with_any_port(room, tables).ok_or(ExplainError::NoMemory)?;
        let tried = try_with_answers(&mut trial, tried, room, tables, &mut ask)?;
        Ok(explanation(tried.outcome, Some(&tried)))
    }
}

/// Repeats a trial in which a flow began, with what its worker knows about the tuples and the SNAT port of that flow.
fn try_with_answers<A: TrialFamily, E>(
    trial: &mut Trial<'_, A>,
    tried: Tried<A>,
    room: u32,
    tables: &mut TrialTables,
    ask: &mut impl FnMut(About<A>) -> Result<Box<Inquiry>, ExplainError<E>>,
) -> Result<Tried<A>, ExplainError<E>> {
    let (Some(made), Some(leaves)) = (tried.made, tried.leaves) else { return Ok(tried) };
    let snapshot = trial.snapshot;
    if made.mode == FlowMode::Nat {
        let Some(target) = target_of(&made, snapshot) else { return Ok(tried) };
        let (link, vip) = (leaves.link, made.vip);
        let addresses = snapshot.snat(link, vip);
        let start = first_snat_address(trial.hash(), addresses.len());
        let answer = ask(About::Lease { target, link, vip, start })?;
        let offer = A::answered(&answer.inquired).and_then(|inquiry| inquiry.offer);
        return trial.run_with_offer(room, target, addresses, offer, tables).ok_or(ExplainError::NoMemory);
    }
    // In `dnat` another flow may look the same to the backend, or have the client's tuple.
    for other in [made.tuple(Direction::ToBackend), made.tuple(Direction::ToClient)] {
        if other != trial.headers.tuple {
            let flows = flows_of(&*ask(About::Flow(other))?);
            trial.add(&flows);
        }
    }
    trial.run_with_any_port(room, tables).ok_or(ExplainError::NoMemory)
}

/// The flows of an answer.
fn flows_of<A: TrialFamily>(answer: &Inquiry) -> Vec<Flow<A>> {
    A::answered(&answer.inquired).map(|inquiry| inquiry.flows.to_vec()).unwrap_or_default()
}

/// The target of the SNAT port of a new flow.
fn target_of<A: TrialFamily>(made: &Flow<A>, snapshot: &Snapshot) -> Option<SnatTarget<A>> {
    let slot = snapshot.backend(made.backend)?.target;
    Some(SnatTarget { slot, address: made.backend_address, port: made.backend_port, protocol: made.protocol })
}

/// The link on which packets from an address most likely arrive.
fn link_towards<A: Address>(snapshot: &Snapshot, source: A) -> Link {
    match snapshot.route(source) {
        RouteTo::Unresolved { link } => link,
        RouteTo::NextHop(slot) => snapshot.next_hop(snapshot.member(slot, 0)).map_or(PortIndex(0).into(), |hop| hop.link),
        RouteTo::None => PortIndex(0).into(),
    }
}

fn explained<A: Address>(
    frontend: &Frontend,
    asked: &Tuple<A>,
    backend: Option<BackendId>,
    snapshot: &Snapshot,
    now: Tick,
) -> ExplainedFrontend {
    ExplainedFrontend {
        service: Arc::clone(&frontend.service),
        address: SocketAddr::new(asked.destination.ip(), asked.destination_port),
        mode: frontend.mode(),
        scheduler: frontend.scheduler(),
        refused_source: refused_source(asked.source, snapshot),
        has_source_ranges: frontend.has_source_ranges(),
        is_allowed: frontend.allows(asked.source),
        has_affinity: frontend.has_affinity(),
        remembered: frontend.remembered(asked, now),
        entry: frontend.table_entry(asked),
        backend,
        proxy_protocol: frontend.proxy_protocol(),
    }
}

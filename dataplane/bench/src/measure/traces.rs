//! The traces of a run: which frames are fed, and in which order.
//!
//! **Invariant:** the frames that open flows, or complete their handshakes, come once for each flow before any comes again.
//!
//! Not here: frames in memory (`trace`), and when a trace is fed (`measure`).

use super::super::error::BenchError;
use super::super::frame::{FrameFields, Piece};
use super::super::scenario::{Part, RARE_ONE_IN, Side};
use super::super::trace::{self, Mixture, Source, Trace};
use super::super::traffic::{self, Stage};
use super::worker_flows::PartFlows;
use super::{Bench, Polled, Session};
use crate::harness::Harness;

/// Frames of the only source at least: those of few flows are repeated, since no burst goes beyond its end.
const FRAMES_MIN: usize = 4096;
/// Packets of a part of `--mix`, for each of its shares, before the order repeats. All parts together have 64,000: the order
/// takes 64 KB.
const MIXED_PACKETS: usize = 3200;
const _: () = assert!(MIXED_PACKETS.is_multiple_of(2 * RARE_ONE_IN));
/// Seeds of what is measured.
const CLIENTS_SEED: u64 = 1;
const BACKENDS_SEED: u64 = 4;
const RARE_SEED: u64 = 6;

impl Bench<'_> {
    /// A source of a frame for each of these flows, in an order given by `seed`.
    fn source(
        &self,
        part: &Part,
        flows: &[u32],
        seed: u64,
        frame: impl Fn(u32) -> Result<FrameFields, BenchError>,
    ) -> Result<Source, BenchError> {
        let order = in_random_order(flows, seed);
        let is_only = self.scenario.parts.len() == 1;
        let frames = if is_only { order.len() * FRAMES_MIN.div_ceil(order.len().max(1)) } else { order.len() };
        let order: Vec<u32> = order.into_iter().cycle().take(frames).collect();
        Source::new(part, &order, frame)
    }

    fn trace_of(&self, mixture: Mixture, seed: u64) -> Option<Trace> {
        self.scenario.parts.first().map(|part| mixture.into_trace(seed, trace::pattern(part)))
    }

    /// A packet of each client of these flows of all parts.
    pub(super) fn clients_trace<'f>(
        &self,
        flows: &'f [PartFlows],
        of_part: impl Fn(&'f PartFlows) -> &'f [u32],
        stage: Stage,
        seed: u64,
    ) -> Result<Option<Trace>, BenchError> {
        let mut mixture = Mixture::default();
        for (part, flows) in self.scenario.parts.iter().zip(flows).map(|(part, flows)| (part, of_part(flows))) {
            mixture.add(self.source(part, flows, seed, |flow| Ok(traffic::from_client(part, stage, flow)))?, flows.len());
        }
        Ok(self.trace_of(mixture, seed))
    }

    /// The replies of the backends to what they got, in parts whose replies pass the gateway.
    pub(super) fn backends_trace(&self, flows: &[PartFlows], stage: Stage, seed: u64) -> Result<Option<Trace>, BenchError> {
        let mut mixture = Mixture::default();
        for (number, (part, flows)) in self.scenario.parts.iter().zip(flows).enumerate() {
            if part.is_two_way() {
                mixture.add(self.replies(number, part, &flows.staying, stage, seed)?, flows.staying.len());
            }
        }
        Ok(self.trace_of(mixture, seed))
    }

    fn replies(&self, number: usize, part: &Part, flows: &[u32], stage: Stage, seed: u64) -> Result<Source, BenchError> {
        let guard = self.verifiers();
        let missing = || BenchError::Wrong("the first packets of some flows did not leave".into());
        let reply = |flow| guard.as_ref().and_then(|verifiers| verifiers.reply(number, stage, flow)).ok_or_else(missing);
        self.source(part, flows, seed, reply)
    }

    /// What is measured with `--mix`: packets of all parts and both directions, SYNs that open flows, the FINs that follow
    /// them, and fragments.
    fn mixed_trace(&self, flows: &[PartFlows]) -> Result<Option<Trace>, BenchError> {
        let mut mixture = Mixture::default();
        for (number, (part, flows)) in self.scenario.parts.iter().zip(flows).enumerate() {
            let packets = MIXED_PACKETS * part.share as usize;
            let rare = packets / RARE_ONE_IN;
            let of_client = |stage| move |flow| Ok(traffic::from_client(part, stage, flow));
            let (next, live) = flows.short_halves();
            let short_order = [next, live].map(|half| in_random_order(half, RARE_SEED)).concat();
            let short = |stage| Source::new(part, &short_order, of_client(stage));
            mixture.add_in_turn([short(Stage::Syn)?, short(Stage::Fin)?], rare);
            let fragmented: Vec<u32> = part.fragmented.clone().collect();
            let piece =
                |piece| Source::whole(&fragmented, |flow| traffic::fragment(traffic::from_client(part, Stage::Ack, flow), piece));
            mixture.add_in_turn([Piece::First, Piece::Later].map(piece), rare / 2);
            let common = packets - 3 * rare;
            let replies = if part.is_two_way() { common / 2 } else { 0 };
            mixture.add(self.source(part, &flows.staying, CLIENTS_SEED, of_client(Stage::Ack))?, common - replies);
            if part.is_two_way() {
                mixture.add(self.replies(number, part, &flows.staying, Stage::Ack, BACKENDS_SEED)?, replies);
            }
        }
        Ok(self.trace_of(mixture, RARE_SEED))
    }
}

fn in_random_order(flows: &[u32], seed: u64) -> Vec<u32> {
    let mut order = flows.to_vec();
    trace::shuffle(&mut order, seed);
    order
}

impl<H: Harness, E: Polled> Session<'_, H, E> {
    /// Loads a trace for a side.
    pub(super) fn load(&mut self, side: Side, trace: Option<Trace>) {
        if let Some(trace) = trace {
            self.harness.load(self.bench.scenario.feeds(side), trace);
        }
    }

    /// Loads what is measured.
    pub(super) fn load_measured(&mut self, flows: &[PartFlows]) -> Result<(), BenchError> {
        if self.bench.scenario.options.mix {
            let mixed = self.bench.mixed_trace(flows)?;
            self.load(Side::Uplink, mixed);
            return Ok(());
        }
        let clients = self.bench.clients_trace(flows, |flows| &flows.staying, Stage::Ack, CLIENTS_SEED)?;
        self.load(Side::Uplink, clients);
        if self.bench.scenario.sides().contains(&Side::Cluster) {
            let replies = self.bench.backends_trace(flows, Stage::Ack, BACKENDS_SEED)?;
            self.load(Side::Cluster, replies);
        }
        Ok(())
    }
}

//! The frames: one per flow, in random order. They are contiguous in memory, so that copying them streams, and the
//! measurement shows the memory accesses of the engine rather than of the trace.

use proto::Family;
use zerocopy::{Immutable, IntoBytes};

use super::frame::{self, FRAME_BYTES_V4, FRAME_BYTES_V6, Segment};
use super::scenario::{self, client, vip};
use super::worker_flows::WorkerFlows;
use crate::cli::BenchArgs;

/// A cache line of a trace. The alignment puts a large trace into huge pages, so that the harness does not measure the
/// TLB.
#[derive(Clone, Copy, IntoBytes, Immutable)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

/// Frames of equal length, each aligned to a cache line.
pub(super) struct Trace {
    lines: Vec<CacheLine>,
    frames: usize,
    frame_len: usize,
    lines_per_frame: usize,
    next: std::cell::Cell<usize>,
}

/// TCP flags of a trace.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TraceKind {
    /// The first packet of each flow.
    Syn,
    /// A later packet of each flow.
    Ack,
}

impl Trace {
    /// One frame for each flow of a worker, in an order given by `seed`.
    pub(super) fn new(options: &BenchArgs, family: Family, kind: TraceKind, seed: u64, own: &WorkerFlows) -> Self {
        let is_own = |flow: &u32| own.own(options, family, *flow);
        let mut flows: Vec<u32> = (0..options.flows).filter(is_own).collect();
        shuffle(&mut flows, seed);
        let frame_len = if family == Family::V4 { FRAME_BYTES_V4 } else { FRAME_BYTES_V6 };
        let lines_per_frame = frame_len.div_ceil(size_of::<CacheLine>());
        let mut lines = vec![CacheLine([0; 64]); flows.len() * lines_per_frame];
        for (lines, &flow) in lines.chunks_exact_mut(lines_per_frame).zip(&flows) {
            let frame = flow_frame(options, family, flow, kind);
            for (line, bytes) in lines.iter_mut().zip(frame.chunks(size_of::<CacheLine>())) {
                line.0[..bytes.len()].copy_from_slice(bytes);
            }
        }
        Self { lines, frames: flows.len(), frame_len, lines_per_frame, next: std::cell::Cell::new(0) }
    }

    /// Number of frames.
    pub(super) fn len(&self) -> usize {
        self.frames
    }

    /// The next frame, cyclically.
    #[inline]
    pub(super) fn next(&self) -> &[u8] {
        let n = self.next.get();
        self.next.set(if n + 1 == self.frames { 0 } else { n + 1 });
        let start = n * self.lines_per_frame * size_of::<CacheLine>();
        self.lines.as_bytes().get(start..start + self.frame_len).unwrap_or(&[])
    }
}

/// The frame that a client sends on a flow. Its sequence number identifies the flow.
pub(super) fn flow_frame(options: &BenchArgs, family: Family, flow: u32, kind: TraceKind) -> Vec<u8> {
    let flags = match kind {
        TraceKind::Syn => dataplane::tcp_flags::SYN,
        TraceKind::Ack => dataplane::tcp_flags::ACK,
    };
    let destination = (vip(family, flow % options.services), scenario::VIP_PORT);
    let segment = Segment { source: client(family, flow), destination, flags, sequence: flow };
    let mut bytes = frame::build(scenario::UPLINK_MAC, &segment);
    bytes.resize(bytes.len().max(FRAME_BYTES_V4), 0);
    bytes
}

/// Fisher-Yates shuffle with a 64-bit linear congruential generator (Knuth's MMIX): repeatable, and random enough to
/// defeat prefetching.
fn shuffle(items: &mut [u32], seed: u64) {
    let mut state = seed | 1;
    for i in (1..items.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let j = usize::try_from((state >> 33) % (i as u64 + 1)).unwrap_or(0);
        items.swap(i, j);
    }
}

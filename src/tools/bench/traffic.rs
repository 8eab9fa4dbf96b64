//! The frames: one per flow, ready to be copied, in random order. Laid out one after another, so that the copy streams
//! and what is measured is the engine's memory, not the trace's.

use dataplane::testing::{Packet, Segment};
use proto::Family;
use zerocopy::{Immutable, IntoBytes};

use super::scenario;
use super::scenario::{client, vip};
use super::share::Flows;
use crate::cli::BenchArgs;

/// The smallest Ethernet frame, without its checksum; a TCP packet of IPv4 is no longer.
pub(super) const FRAME_BYTES_V4: usize = 60;
/// Ethernet, IPv6 and TCP headers.
pub(super) const FRAME_BYTES_V6: usize = 14 + 40 + 20;

/// A cache line of a trace. Aligned as one, a large trace lies in huge pages, so that the floor does not measure the TLB.
#[derive(Clone, Copy, IntoBytes, Immutable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Frames of equal length, each from the beginning of a cache line on.
pub(super) struct Trace {
    lines: Vec<Line>,
    frames: usize,
    frame_len: usize,
    lines_per_frame: usize,
    next: std::cell::Cell<usize>,
}

/// TCP flags of a trace.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The first packet of each flow.
    Syn,
    /// A packet within each flow.
    Ack,
}

impl Trace {
    /// One frame for each of the flows that are a worker's own, in an order that `seed` decides.
    pub(super) fn new(options: &BenchArgs, family: Family, kind: Kind, seed: u64, own: &Flows) -> Self {
        let is_own = |flow: &u32| own.own(options, family, *flow);
        let mut flows: Vec<u32> = (0..options.flows).filter(is_own).collect();
        shuffle(&mut flows, seed);
        let frame_len = if family == Family::V4 { FRAME_BYTES_V4 } else { FRAME_BYTES_V6 };
        let lines_per_frame = frame_len.div_ceil(size_of::<Line>());
        let mut lines = vec![Line([0; 64]); flows.len() * lines_per_frame];
        for (lines, &flow) in lines.chunks_exact_mut(lines_per_frame).zip(&flows) {
            let frame = flow_frame(options, family, flow, kind);
            for (line, bytes) in lines.iter_mut().zip(frame.chunks(size_of::<Line>())) {
                line.0[..bytes.len()].copy_from_slice(bytes);
            }
        }
        Self { lines, frames: flows.len(), frame_len, lines_per_frame, next: std::cell::Cell::new(0) }
    }

    /// How many frames there are.
    pub(super) fn len(&self) -> usize {
        self.frames
    }

    /// The next frame; after the last one the first again.
    #[inline]
    pub(super) fn next(&self) -> &[u8] {
        let n = self.next.get();
        self.next.set(if n + 1 == self.frames { 0 } else { n + 1 });
        let start = n * self.lines_per_frame * size_of::<Line>();
        self.lines.as_bytes().get(start..start + self.frame_len).unwrap_or(&[])
    }
}

/// The frame that a client sends on a flow. Its sequence number is the flow's, so that whoever sees it knows.
pub(super) fn flow_frame(options: &BenchArgs, family: Family, flow: u32, kind: Kind) -> Vec<u8> {
    let (source, source_port) = client(family, flow);
    let flags = match kind {
        Kind::Syn => dataplane::tcp_flags::SYN,
        Kind::Ack => dataplane::tcp_flags::ACK,
    };
    let ports = [source_port, scenario::VIP_PORT];
    let segment = Segment::Tcp { ports, flags, sequence: flow, acknowledgement: 1 };
    let packet = Packet::between(source, vip(family, flow % options.services), segment);
    let mut bytes = Packet { destination_mac: scenario::UPLINK_MAC, ..packet }.build();
    bytes.resize(bytes.len().max(FRAME_BYTES_V4), 0);
    bytes
}

/// Fisher-Yates, with a 64-bit linear congruential generator (Knuth's MMIX): repeatable, and random enough to defeat
/// prefetching.
fn shuffle(items: &mut [u32], seed: u64) {
    let mut state = seed | 1;
    for i in (1..items.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let j = usize::try_from((state >> 33) % (i as u64 + 1)).unwrap_or(0);
        items.swap(i, j);
    }
}

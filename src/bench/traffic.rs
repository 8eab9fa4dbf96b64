//! The frames: one per flow, ready to be copied, in random order. Laid out one after another, so that the copy streams
//! and what is measured is the engine's memory, not the trace's.

use dataplane::testing::{Packet, Segment};
use proto::Family;

use super::scenario;
use super::scenario::{client, vip};
use crate::cli::BenchArgs;

/// Frames of equal length.
pub(super) struct Trace {
    bytes: Vec<u8>,
    frames: usize,
    frame_len: usize,
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
    /// One frame for each of the flows, in an order that `seed` decides.
    pub(super) fn new(options: &BenchArgs, family: Family, kind: Kind, seed: u64) -> Self {
        let mut flows: Vec<u32> = (0..options.flows).collect();
        shuffle(&mut flows, seed);
        let mut bytes = Vec::new();
        let mut frame_len = 0;
        for &flow in &flows {
            let one = flow_frame(options, family, flow, kind);
            frame_len = one.len();
            bytes.extend_from_slice(&one);
        }
        Self { bytes, frames: flows.len(), frame_len, next: std::cell::Cell::new(0) }
    }

    /// The next frame; after the last one the first again.
    #[inline]
    pub(super) fn next(&self) -> &[u8] {
        let n = self.next.get();
        self.next.set(if n + 1 == self.frames { 0 } else { n + 1 });
        let start = n * self.frame_len;
        self.bytes.get(start..start + self.frame_len).unwrap_or(&[])
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
    let mut bytes = Packet::between(source, vip(family, flow % options.services), segment).build();
    bytes.resize(bytes.len().max(60), 0); // the smallest Ethernet frame, without its checksum
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

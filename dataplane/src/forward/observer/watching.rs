//! The worker's end of a watch: drops, and which packets are a sample (docs/internals/decisions/0169).
//!
//! One packet in n is sampled, so that [`SAMPLES_PER_WINDOW`] are in 10 ms, as far as the traffic of the 10 ms before
//! tells. Each stands for n packets. The distance between two is random, 1 to 2n - 1, so that packets that come in turns
//! are all sampled. When traffic rises, no more than [`SAMPLES_MAX`] are taken in 10 ms; the rates of these 10 ms are then
//! too low.
//!
//! **Invariant:** a packet is only looked at.
//!
//! Not here: the flow of a sampled packet (`worker::watching`), and the events and their queue (`flow::storage`).

use std::net::SocketAddr;
use std::sync::Arc;

use crate::flow::{Direction, FlowView, FlowWatch, SampledPacket, WATCH_WINDOW_NS, WatchedEnds};
use crate::stats::DropReason;
use crate::wire::{Address, Buffer, Headers, Parsed, parse, split_mix};

/// Packets sampled in 10 ms: 20,000 a second. A sample costs a parse and a search in the flow table, 0.3 us: 0.6 % of a
/// core.
const SAMPLES_PER_WINDOW: u32 = 200;

/// Packets sampled in 10 ms whatever arrives, as when a watch begins, before any traffic is known: 120 us.
const SAMPLES_MAX: u32 = 2 * SAMPLES_PER_WINDOW;

/// One packet in this many at least: 100 Mpps have 98 samples in 10 ms.
const EVERY_MAX: u32 = 10_000;

/// See the module.
#[derive(Debug)]
pub(in crate::forward) struct Watching {
    watch: Arc<FlowWatch>,
    /// One packet in so many is sampled.
    every: u32,
    /// Packets before the next sample.
    until_next: u32,
    /// Packets in the present window.
    packets: u32,
    /// Samples in the present window.
    samples: u32,
    window: u64,
    random: u64,
}

impl Watching {
    /// The end of this watch.
    pub(in crate::forward) const fn new(watch: Arc<FlowWatch>, seed: u64) -> Self {
        Self { watch, every: 1, until_next: 0, packets: 0, samples: 0, window: 0, random: seed }
    }

    /// Its watch.
    pub(in crate::forward) fn into_watch(self) -> Arc<FlowWatch> {
        self.watch
    }

    /// A poll begins.
    pub(in crate::forward) fn begin_poll(&mut self, now_ns: u64) {
        self.watch.begin_poll(now_ns);
        let window = now_ns / WATCH_WINDOW_NS;
        if window != self.window {
            self.every = self.packets.div_ceil(SAMPLES_PER_WINDOW).clamp(1, EVERY_MAX);
            (self.window, self.packets, self.samples) = (window, 0, 0);
        }
    }

    /// The position of the next packet to sample in a burst of `len` packets, to be asked until there is none.
    pub(in crate::forward) fn next_sample(&mut self, len: usize) -> Option<usize> {
        let at = self.until_next as usize;
        if at < len && self.samples < SAMPLES_MAX && self.watch.wants_packets_now() {
            self.samples += 1;
            self.random = split_mix(self.random);
            #[allow(clippy::cast_possible_truncation)] // the lower half
            let random = self.random as u32;
            self.until_next += 1 + random % (2 * self.every - 1);
            return Some(at);
        }
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        self.packets = self.packets.saturating_add(len);
        self.until_next = self.until_next.saturating_sub(len);
        None
    }

    /// A packet is one of the sample.
    pub(in crate::forward) fn sampled(&self, direction: Direction, packet_len: u16, flow: FlowView) {
        self.watch.sampled(SampledPacket { direction, packet_len, stands_for: self.every }, flow);
    }

    /// A packet is dropped.
    #[cold]
    pub(in crate::forward) fn dropped(&self, reason: DropReason, buffer: &impl Buffer) {
        self.watch.dropped(reason, || match parse(buffer.bytes()).ok()? {
            Parsed::V4(headers) => Some(ends(&headers)),
            Parsed::V6(headers) => Some(ends(&headers)),
            Parsed::Arp | Parsed::Other => None,
        });
    }
}

fn ends<A: Address>(headers: &Headers<A>) -> WatchedEnds {
    let tuple = &headers.tuple;
    WatchedEnds {
        source: SocketAddr::new(tuple.source.ip(), tuple.source_port),
        destination: SocketAddr::new(tuple.destination.ip(), tuple.destination_port),
        protocol: tuple.protocol,
    }
}

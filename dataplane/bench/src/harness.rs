//! The harness: feeds frames into the two sides of a gateway, and collects what leaves. There are two, one in memory and
//! one over DPDK's rings.
//!
//! **Invariant:** no packet is lost or counted twice here: those fed are those transmitted, released and held by the
//! engine.
//!
//! Not here: what is measured (`measure`).

mod arrivals;
mod buffer;
mod memory;
mod rings;
mod sample;

use dataplane::Port;

pub(super) use arrivals::{Latencies, Pace};
pub(super) use memory::Memory;
pub(super) use rings::Rings;
pub(super) use sample::KEPT_ONE_IN;

use super::error::BenchError;
use super::scenario::Side;
use super::trace::Trace;

/// What a harness saw of the packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Traffic {
    /// Packets that it fed.
    pub(super) fed: u64,
    /// Packets that left.
    pub(super) transmitted: u64,
    /// Buffers that the engine took for packets of its own, and those that it gave back; unknown over rings.
    pub(super) buffers: Option<Buffers>,
}

impl Traffic {
    /// What was seen since then.
    pub(super) fn since(self, then: Self) -> Self {
        let buffers = self
            .buffers
            .zip(then.buffers)
            .map(|(now, then)| Buffers { allocated: now.allocated - then.allocated, released: now.released - then.released });
        Self { fed: self.fed - then.fed, transmitted: self.transmitted - then.transmitted, buffers }
    }
}

/// See [`Traffic::buffers`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Buffers {
    pub(super) allocated: u64,
    pub(super) released: u64,
}

/// What is to be fed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Feeding {
    /// The sides whose traces are fed, a burst of each in turn.
    pub(super) sides: &'static [Side],
    /// Number of frames after which it ends; otherwise [`Harness::end`] ends it.
    pub(super) frames: Option<u64>,
    /// One transmitted packet in this many is kept.
    pub(super) keep_one_in: u32,
}

/// Two ports of a worker, and their peers.
pub(super) trait Harness {
    /// The port type.
    type Port: Port;

    /// Whether a poll may find no packets because they are still made elsewhere. Then the time of such polls does not
    /// count.
    const WAITS: bool;

    /// The ports, uplink first; none while they are given out.
    fn ports(&mut self) -> Option<[Self::Port; 2]>;

    /// Takes back ports that were given out.
    fn give_back(&mut self, ports: [Self::Port; 2]);

    /// Sets the frames that are fed into a side. They begin anew.
    fn load(&mut self, side: Side, trace: Trace);

    /// Begins to feed.
    fn begin(&mut self, feeding: Feeding);

    /// From now on packets arrive at a pace; with none, bursts are always full. To be called before the feeding. Only the
    /// harness in memory can do it.
    fn pace(&mut self, _pace: Option<Pace>) {}

    /// What was measured at a pace since this was last called.
    fn take_latencies(&mut self) -> Latencies {
        Latencies::default()
    }

    /// Is called before each poll, which begins at this cycle.
    fn turn(&mut self, now: u64);

    /// Ends the feeding.
    fn end(&mut self);

    /// Whether feeding has ended, and all packets that left were collected. Packets may still be in the engine.
    fn has_ended(&mut self) -> bool;

    /// Whether so many packets are kept that feeding should end, for them to be taken.
    fn is_full(&self) -> bool;

    /// Passes on the kept packets, after the end of feeding. The first error ends it.
    fn take_kept(&mut self, see: impl FnMut(Side, &[u8]) -> Result<(), BenchError>) -> Result<(), BenchError>;

    /// What it saw since it was made, after the end of feeding.
    fn traffic(&self) -> Traffic;
}

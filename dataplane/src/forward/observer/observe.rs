//! Observation of each packet's end: `replay` prints it; for workers in production the observer is `()`, which costs
//! nothing.
//!
//! **Invariant:** an observer sees each packet once, with its final outcome.

use super::outcome::{PacketFlow, PacketOutcome};

/// Receives the final outcome of each packet, once.
pub trait Observe<B> {
    /// Whether packets are counted for their flows, which a worker with [`crate::flow::FlowRecords`] needs.
    const METERS: bool = false;
    /// Whether it looks at packets at all.
    const OBSERVES: bool = true;

    /// The packet in `buffer` ended with `outcome`. Its bytes may have been rewritten.
    fn observe(&mut self, buffer: &B, outcome: PacketOutcome, belongs: impl FnOnce() -> Option<PacketFlow>);
}

/// Ignores all packets.
impl<B> Observe<B> for () {
    const OBSERVES: bool = false;

    #[inline]
    fn observe(&mut self, _: &B, _: PacketOutcome, _: impl FnOnce() -> Option<PacketFlow>) {}
}

/// Ignores all packets, like `()`, for a worker whose flows are recorded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Metered;

impl<B> Observe<B> for Metered {
    const METERS: bool = true;
    const OBSERVES: bool = false;

    #[inline]
    fn observe(&mut self, _: &B, _: PacketOutcome, _: impl FnOnce() -> Option<PacketFlow>) {}
}

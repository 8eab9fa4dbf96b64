//! Observation of each packet's end: `replay` prints it; for workers in production the observer is `()`, which costs
//! nothing.
//!
//! A capture is no such observer: it looks at a worker from outside while it runs (`capture`).
//!
//! **Invariant:** an observer sees each packet once, with its final outcome.

mod capture;

pub(in crate::forward) use capture::ObservedPacket;
pub use capture::{
    CAPTURE_BATCHES, COPIES_PER_SECOND, CaptureBatch, CaptureCounts, CaptureQueue, CapturedPacket, FlowUse, FrameCopy,
    ObservedEnd, PacketEnds, PacketSource, SentFrame, WorkerCapture,
};

use std::net::IpAddr;

use crate::flow::BackendId;
use crate::port::PortIndex;
use crate::stats::DropReason;

/// The final outcome of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketOutcome {
    /// Forwarded by this port.
    Forward(PortIndex),
    /// Passed to the Linux twin of this port.
    Linux(PortIndex),
    /// Turned into an answer that leaves by this port.
    Reply(PortIndex),
    /// Dropped.
    Drop(DropReason),
}

/// The flow that a packet belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketFlow {
    /// The frontend's address.
    pub vip: IpAddr,
    /// The frontend's port.
    pub port: u16,
    /// The frontend's protocol number.
    pub protocol: u8,
    /// The backend.
    pub backend: BackendId,
}

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

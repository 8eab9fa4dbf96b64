//! Observers of packets: the observer of a worker, which sees the end of each packet; a capture, which looks at a worker
//! from outside while it runs; and a watch, which sees drops and a sample of packets.
//!
//! Not here: how a captured packet passes the engine (`worker::observed`), and capture filters (`port`).

mod capture;
mod observe;
mod outcome;
mod watching;

pub(in crate::forward) use capture::ObservedPacket;
pub use capture::{
    CAPTURE_BATCHES, COPIES_PER_SECOND, CaptureBatch, CaptureCounts, CaptureQueue, CapturedFlow, CapturedPacket, FlowUse,
    FrameCopy, ObservedEnd, PacketEnds, PacketSource, SentFrame, WorkerCapture,
};
pub use observe::{Metered, Observe};
pub use outcome::{PacketFlow, PacketOutcome};
pub(in crate::forward) use watching::Watching;

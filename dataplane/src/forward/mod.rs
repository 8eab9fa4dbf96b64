//! The path of a packet through a worker. Reading order: `worker` polls, `burst` runs the stages over a burst, `fast`
//! forwards packets of known flows, `sort` parses the others and hands over those of other workers, `decide` gives the
//! verdict, `engine` carries it out, `rewrite` changes the bytes.
//!
//! Special cases have files of their own: `related` (fragments and ICMP errors, which follow the flow of another
//! packet), `answers` (ARP, resets, replies), `linux` (packets of the kernel). `flow_transfer` takes over flows of the
//! process before and of other gateways.

mod answers;
mod burst;
mod decide;
mod engine;
mod fast;
mod flow_transfer;
mod linux;
mod observer;
mod related;
pub mod rewrite;
mod sort;
mod worker;

pub use decide::explain::{
    ExplainError, ExplainedFrontend, ExplainedPacket, Explainer, Explanation, FlowEffect, Leaves, Outcome, PacketKind, TunnelEnds,
};
pub use decide::{
    About, ENDS_PER_INQUIRY, EndedFlow, FLOWS_PER_INQUIRY, FamilyInquiry, FlowEnds, INQUIRIES_MAX, Inquired, Inquiry, Mailbox,
};
pub use flow_transfer::{FlowFate, RestoreReport, SavedAt, SavedFlows, SavedFlowsError};
pub use observer::{
    CAPTURE_BATCHES, COPIES_PER_SECOND, CaptureBatch, CaptureCounts, CaptureQueue, CapturedPacket, FlowUse, FrameCopy, Metered,
    Observe, ObservedEnd, PacketEnds, PacketFlow, PacketOutcome, PacketSource, SentFrame, WorkerCapture,
};
pub use worker::{NoMemory, Parts, PortWithTwin, SWEEP_TICKS, SWEPT_PER_POLL, Worker};

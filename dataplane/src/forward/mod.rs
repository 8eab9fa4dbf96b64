//! The path of a packet through a worker. Reading order: `worker` polls, `burst` runs the stages over a burst, `fast`
//! forwards packets of known flows, `sort` parses the others and hands over those of other workers, `decide` gives the
//! verdict, `engine` carries it out, `rewrite` changes the bytes.
//!
//! Special cases have files of their own: `fragments`, `icmp_errors`, `answers` (ARP, resets, replies), `linux`
//! (packets of the kernel).

mod answers;
mod burst;
mod decide;
mod engine;
mod execute;
mod fast;
mod fragments;
mod icmp_errors;
mod linux;
mod observer;
mod plan;
pub mod rewrite;
mod sort;
mod worker;

pub use decide::explain::{
    ExplainError, ExplainedFrontend, ExplainedPacket, Explainer, Explanation, FlowEffect, Leaves, Outcome, PacketKind, TunnelEnds,
};
pub use decide::{About, FLOWS_PER_INQUIRY, FamilyInquiry, INQUIRIES_MAX, Inquired, Inquiry, Mailbox};
pub use observer::{
    CAPTURE_BATCHES, COPIES_PER_SECOND, CaptureBatch, CaptureCounts, CaptureQueue, CapturedPacket, FILTER_INSTRUCTIONS_MAX,
    FilterError, FilterInstruction, FlowUse, FrameCopy, Metered, Observe, ObservedEnd, PacketEnds, PacketFilter, PacketFlow,
    PacketOutcome, PacketSource, SentFrame, WorkerCapture,
};
pub use worker::{
    FlowFate, NoMemory, Parts, PortWithTwin, RestoreReport, SWEEP_TICKS, SWEPT_PER_POLL, SavedAt, SavedFlows, SavedFlowsError,
    Worker,
};

//! The path of a packet through a worker. Reading order: `worker` polls, `burst` runs the stages over a burst, `fast`
//! forwards packets of known flows, `sort` parses the others and hands over those of other workers, `decide` gives the
//! verdict, `execution` carries it out, `rewrite` changes the bytes, `output` sends and counts. All of them work on the
//! `engine`, the state of the worker.
//!
//! Special cases have files of their own: `related` (fragments and ICMP errors, which follow the flow of another
//! packet), `execution::answers` (ARP, resets, replies), `execution::linux` (packets of the kernel). `flow_transfer`
//! takes over flows of the process before and of other gateways.

mod burst;
mod decide;
mod engine;
mod execution;
mod fast;
mod flow_transfer;
mod observer;
mod output;
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
    CAPTURE_BATCHES, COPIES_PER_SECOND, CaptureBatch, CaptureCounts, CaptureQueue, CapturedFlow, CapturedPacket, FlowUse,
    FrameCopy, Metered, Observe, ObservedEnd, PacketEnds, PacketFlow, PacketOutcome, PacketSource, SentFrame, WorkerCapture,
};
pub use worker::{NoMemory, Parts, PortWithTwin, SWEEP_TICKS, SWEPT_PER_POLL, Worker};

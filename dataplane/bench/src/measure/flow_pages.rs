//! What a caller gives to list the flows of a worker.
//!
//! Not here: when they are listed (`listing`), and the inquiries (the caller).

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use dataplane::forward::{Explainer, Mailbox};
use dataplane::snapshot::SnapshotReader;

/// A worker whose flows are listed.
#[derive(Debug)]
pub struct ListedWorker {
    /// By which it answers.
    pub mailbox: Arc<Mailbox>,
    /// What explains its answers.
    pub explainer: Explainer,
    /// Its snapshots.
    pub snapshots: SnapshotReader,
}

/// Lists the flows of a worker: each call lists the next page, from the first flow on again after the last one, and counts
/// the flows of the page.
pub type FlowPages = Box<dyn FnMut(&AtomicU64) + Send>;

/// Begins a listing by the inquiries and at the pace of `sluicectl flows`.
pub type ListFlows = fn(ListedWorker) -> FlowPages;

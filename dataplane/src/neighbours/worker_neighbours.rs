//! What a worker keeps of neighbours: packets that wait for them, questions for the kernel, and the VIPs that it may speak for.
//!
//! Not here: answers to neighbours (`arp_ndp`).

use std::sync::Arc;

use crossbeam_queue::ArrayQueue;

use super::neighbour_queue::{NeighbourQueue, NeighbourRequest, UnresolvedNeighbour};
use super::vip_ownership::VipOwnership;

/// See the module.
#[derive(Debug)]
pub(crate) struct WorkerNeighbours<B> {
    pub(crate) queue: NeighbourQueue<B>,
    /// Whether neighbours of queued packets may have been resolved since the last check.
    pub(crate) have_changed: bool,
    /// The VIP groups that this gateway owns.
    pub(crate) ownership: Arc<VipOwnership>,
    pub(crate) requests: Arc<ArrayQueue<NeighbourRequest>>,
}

impl<B> WorkerNeighbours<B> {
    /// No packet waits.
    pub(crate) fn new(requests: Arc<ArrayQueue<NeighbourRequest>>) -> Self {
        Self { queue: NeighbourQueue::new(), have_changed: false, ownership: Arc::default(), requests }
    }

    /// Requests the resolution of a neighbour from the kernel. When the queue is full, others are already requested,
    /// and a later packet requests it again.
    pub(crate) fn ask(&self, neighbour: UnresolvedNeighbour) {
        let _ = self.requests.push((neighbour.link, neighbour.address));
    }
}

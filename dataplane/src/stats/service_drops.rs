//! Dropped packets of one service, by reason.
//!
//! **Invariant:** each worker writes only its own part, so that no two workers share a cache line.
//!
//! Not here: the counts over all services, which are those of a worker (`counters`).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::counters::Counter;
use super::drop_reason::{ByReason, DropReason};

/// Counts of one worker. Padded, so that no worker writes into another's cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct WorkerPart {
    drops: ByReason<Counter>,
    /// Flows on SNAT ports that had not rested.
    early: Counter,
    /// The client that had its share of SNAT ports last, and its family: 4, 6, or 0 without one.
    client: Counter,
    client_family: Counter,
}

/// Drops of packets to the frontends of one service, by reason: 384 bytes per worker. They begin at 0 when the service
/// is added.
#[derive(Debug, Default)]
pub struct ServiceDrops(Box<[WorkerPart]>);

impl ServiceDrops {
    /// For this many workers.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self((0..workers).map(|_| WorkerPart::default()).collect())
    }

    /// Counts a packet that a worker dropped.
    pub(crate) fn count(&self, worker: usize, reason: DropReason) {
        if let Some(part) = self.0.get(worker) {
            part.drops.of(reason).add(1);
        }
    }

    /// Counts a dropped packet, for tests of readers.
    #[cfg(feature = "testing")]
    pub fn count_for_tests(&self, worker: usize, reason: DropReason) {
        self.count(worker, reason);
    }

    /// Counts a flow on a SNAT port that had not rested.
    pub(crate) fn count_early(&self, worker: usize) {
        if let Some(part) = self.0.get(worker) {
            part.early.add(1);
        }
    }

    /// Notes a client that has its share of SNAT ports, by `Address::site`.
    pub(crate) fn note_client(&self, worker: usize, site: u64, is_v6: bool) {
        if let Some(part) = self.0.get(worker) {
            part.client.set(site);
            part.client_family.set(if is_v6 { 6 } else { 4 });
        }
    }

    /// Flows on SNAT ports that had not rested, on all workers.
    #[must_use]
    pub fn reused_early(&self) -> u64 {
        self.0.iter().map(|part| part.early.get()).sum()
    }

    /// A client of each worker that has its share of SNAT ports: the last one. Of IPv6 it is the first address of its
    /// /64.
    pub fn limited_clients(&self) -> impl Iterator<Item = IpAddr> {
        self.0.iter().filter_map(|part| match part.client_family.get() {
            4 => Some(Ipv4Addr::from(u32::try_from(part.client.get()).ok()?).into()),
            6 => Some(Ipv6Addr::from(u128::from(part.client.get()) << 64).into()),
            _ => None,
        })
    }

    /// Drops for one reason, by all workers.
    #[must_use]
    pub fn sum(&self, reason: DropReason) -> u64 {
        self.0.iter().map(|part| part.drops.of(reason).get()).sum()
    }
}

/// Counters are equal only to themselves.
impl PartialEq for ServiceDrops {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for ServiceDrops {}

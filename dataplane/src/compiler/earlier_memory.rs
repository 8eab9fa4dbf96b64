//! The memory of the earlier tables of all services.
//!
//! **Invariant:** above [`BYTES_MAX`] the tables that were replaced first are forgotten.
//!
//! Not here: which tables a frontend keeps (`snapshot::EarlierTables`).

use std::collections::BTreeSet;
use std::sync::Arc;

use proto::ServiceName;

/// Memory of all earlier tables. 10,000 services of ten backends have tables of 2,039 entries of 2 bytes: four earlier
/// ones of each are 163 MB. Of the tables of 65,537 entries, which services of 300 backends have, it is enough for 2,000.
const BYTES_MAX: usize = 256 << 20;

/// The sum of the memory, and the services in the order in which their oldest tables were replaced.
#[derive(Debug)]
pub(super) struct EarlierMemory {
    bytes: usize,
    pub(super) bytes_max: usize,
    oldest: BTreeSet<(u64, Arc<ServiceName>)>,
}

/// The earlier tables of one service: their memory, and when the oldest was replaced.
pub(super) type EarlierSize = (usize, Option<u64>);

impl EarlierMemory {
    pub(super) const fn new() -> Self {
        Self { bytes: 0, bytes_max: BYTES_MAX, oldest: BTreeSet::new() }
    }

    /// Counts the tables of a service that it has `now` instead of those `before`.
    pub(super) fn count(&mut self, service: &Arc<ServiceName>, before: EarlierSize, now: EarlierSize) {
        if before == now {
            return;
        }
        self.bytes = self.bytes - before.0 + now.0;
        before.1.map(|oldest_ns| self.oldest.remove(&(oldest_ns, service.clone())));
        self.oldest.extend(now.1.map(|oldest_ns| (oldest_ns, service.clone())));
    }

    /// The service that must forget its tables that were replaced by then, if they take too much memory.
    pub(super) fn excess(&mut self) -> Option<(u64, Arc<ServiceName>)> {
        if self.bytes > self.bytes_max { self.oldest.pop_first() } else { None }
    }
}

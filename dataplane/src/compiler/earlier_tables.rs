//! Earlier tables of backends that the controller sends to a gateway that did not see them, and the memory of the
//! earlier tables of all services.
//!
//! **Invariant:** above [`BYTES_MAX`] the tables that were replaced first are forgotten.
//!
//! Not here: which tables a frontend keeps (`snapshot::EarlierTables`).

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use proto::limits::EARLIER_TABLES_HORIZON;
use proto::{Backend, BackendState, EarlierBackends, ServiceName, ServicePort};

use super::port_table::PortTable;
use super::targets::nanoseconds;
use crate::flow::BackendId;
use crate::snapshot::EarlierTable;

/// Memory of all earlier tables. 10,000 services of ten backends have tables of 2,039 entries of 2 bytes: four earlier
/// ones of each are 163 MB. Of the tables of 65,537 entries, which services of 300 backends have, it is enough for
/// 2,000.
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

/// The tables of the earlier backends of a port, at Unix time `unix_ns` and monotonic time `now_ns`. Backends that the
/// port no longer lists have no slot: `id` is `None`. Times before the start of the machine wrap, as ticks do.
pub(super) fn received(
    port: &ServicePort,
    port_table: PortTable,
    id: impl Fn(SocketAddr) -> Option<BackendId>,
    unix_ns: u64,
    now_ns: u64,
) -> Vec<EarlierTable> {
    let age_ns = |until_s: u64| unix_ns.saturating_sub(until_s.saturating_mul(1_000_000_000));
    let horizon_ns = nanoseconds(EARLIER_TABLES_HORIZON);
    let recent: Vec<_> = port.earlier.iter().filter(|one| age_ns(one.until_s) < horizon_ns).collect();
    let begun = recent.iter().skip(1).map(|older| age_ns(older.until_s)).chain([horizon_ns]);
    let weight = |backend: &Backend| if backend.state == BackendState::Active { backend.weight } else { 0 };
    let table = |(one, begun_ns): (&&EarlierBackends, u64)| {
        let weights: Vec<_> = one.backends.iter().map(|backend| (backend.address, weight(backend))).collect();
        EarlierTable {
            table: Arc::new(port_table.with_size(one.maglev_size).build(&weights)),
            backends: one.backends.iter().map(|backend| id(backend.address).unwrap_or_default()).collect(),
            since_ns: now_ns.wrapping_sub(begun_ns),
            until_ns: now_ns.wrapping_sub(age_ns(one.until_s)),
        }
    };
    recent.iter().zip(begun).map(table).collect()
}

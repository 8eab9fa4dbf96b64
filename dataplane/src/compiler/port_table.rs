//! The inputs of the table of a port: addresses and ports of its backends, or their addresses alone, where a
//! client is to meet one address on all ports of a Service.
//!
//! **Invariant:** it follows from the Service alone, so every gateway builds the same table.
//!
//! Not here: which backends take new flows (`services`).

use std::net::SocketAddr;

use proto::{AffinityScope, MaglevSpec, Scheduler, Service, ServicePort};

use crate::choose::MaglevTable;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PortTable {
    spec: MaglevSpec,
    /// Whether the ports of backends do not matter.
    is_by_address: bool,
}

/// Whether the ports of a Service share the affinity of a client.
pub(super) fn shares_affinity(service: &Service) -> bool {
    service.affinity.is_some() && service.affinity_scope == AffinityScope::Service
}

impl PortTable {
    pub(super) fn of(service: &Service, port: &ServicePort) -> Self {
        let by_source = service.affinity.is_none() && service.scheduler == Scheduler::SourceHash;
        if !by_source && !shares_affinity(service) {
            return Self { spec: port.maglev, is_by_address: false };
        }
        // Tables of different sizes lead a client to different backends.
        let of_family = service.ports.iter().filter(|other| other.family == port.family);
        let size = of_family.map(|other| other.maglev.size).max().unwrap_or(port.maglev.size);
        Self { spec: MaglevSpec { size, ..port.maglev }, is_by_address: true }
    }

    /// The inputs of a table with another number of entries, in which the port had other backends.
    pub(super) fn with_size(self, size: u32) -> Self {
        Self { spec: MaglevSpec { size, ..self.spec }, ..self }
    }

    /// The table for these backends.
    pub(super) fn build(self, weights: &[(SocketAddr, u16)]) -> MaglevTable {
        if !self.is_by_address {
            return MaglevTable::build(self.spec, weights);
        }
        let addresses: Vec<_> = weights.iter().map(|&(at, weight)| (SocketAddr::new(at.ip(), 0), weight)).collect();
        MaglevTable::build(self.spec, &addresses)
    }
}

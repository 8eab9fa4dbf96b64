//! Maglev tables of many new services, built by several threads before the services are compiled one after another:
//! they take most of the time when a gateway gets its first state.
//!
//! **Invariant:** a table is used only in place of an equal one, for the same spec and the same weights.
//!
//! Not here: which weights backends get (`services`).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::num::NonZero;
use std::sync::Arc;
use std::thread;

use proto::{Backend, BackendState, Family, Protocol, Service, ServiceName, ServicePort};

use super::port_table::PortTable;
use crate::choose::MaglevTable;

/// Fewer tables are built where they are needed. 256 of 2,039 entries take 6 ms, which nobody notices at a start.
pub(super) const TABLES_MIN: usize = 256;
/// Maximum number of threads that build tables. Where one thread needs 240 ms for 10,000 tables, eight need 30 ms, less
/// than the rest of the compilation takes.
const THREADS_MAX: usize = 8;

/// Tables by service and port.
#[derive(Debug, Default)]
pub(super) struct TablesAhead<'s>(HashMap<PortKey<'s>, (Arc<MaglevTable>, Inputs)>);

type PortKey<'s> = (&'s ServiceName, Protocol, Family, u16);

/// The inputs of a table.
type Inputs = (PortTable, Vec<(SocketAddr, u16)>);

impl<'s> TablesAhead<'s> {
    /// The tables of these services, if they are many: built by a thread for each core that the calling thread may use,
    /// at most [`THREADS_MAX`].
    pub(super) fn of(services: impl Iterator<Item = &'s Service>) -> Self {
        let served = services.filter(|service| service.refusal.is_none());
        let ports: Vec<_> = served.flat_map(|service| service.ports.iter().map(move |port| (service, port))).collect();
        if ports.len() < TABLES_MIN {
            return Self::default();
        }
        Self::by(thread::available_parallelism().map_or(1, NonZero::get).min(THREADS_MAX), &ports)
    }

    pub(super) fn by(threads: usize, ports: &[(&'s Service, &'s ServicePort)]) -> Self {
        if threads < 2 {
            return Self::default();
        }
        let part =
            |first: usize| ports.iter().skip(first).step_by(threads).map(|&(service, port)| built(service, port)).collect();
        let tables = thread::scope(|scope| {
            let start = |first| thread::Builder::new().name("tables".to_owned()).spawn_scoped(scope, move || part(first));
            let others: Vec<_> = (1..threads).map_while(|first| start(first).ok()).collect();
            let own: Vec<_> = part(0);
            others.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).chain(own).collect()
        });
        Self(tables)
    }

    /// The table of a port with these weights, if it was built.
    pub(super) fn get(&self, service: &Service, port: &ServicePort, weights: &[(SocketAddr, u16)]) -> Option<Arc<MaglevTable>> {
        let (table, (built, of_table)) = self.0.get(&key(&service.name, port))?;
        (*built == PortTable::of(service, port) && of_table == weights).then(|| Arc::clone(table))
    }
}

const fn key<'s>(service: &'s ServiceName, port: &ServicePort) -> PortKey<'s> {
    (service, port.protocol, port.family, port.port)
}

/// The table of a port whose active backends all take new flows.
fn built<'s>(service: &'s Service, port: &ServicePort) -> (PortKey<'s>, (Arc<MaglevTable>, Inputs)) {
    let weight = |backend: &Backend| if backend.state == BackendState::Active { backend.weight } else { 0 };
    let weights: Vec<_> = port.all_backends().map(|backend| (backend.address, weight(&backend))).collect();
    let of_port = PortTable::of(service, port);
    let table = Arc::new(of_port.build(&weights));
    (key(&service.name, port), (table, (of_port, weights)))
}

#[cfg(test)]
mod tests {
    use proto::MaglevSpec;

    use super::*;

    #[test]
    fn tables_of_several_threads_are_those_of_their_ports() {
        let spec = MaglevSpec { size: 251, seed: 7, hash_version: 1 };
        let backend = |n: u16| Backend { address: ([10, 0, 0, 1], n).into(), weight: 1, state: BackendState::Active };
        let port = |n: u16| ServicePort {
            backends: (1..=n % 5).map(backend).collect(),
            ..ServicePort::new(Protocol::Tcp, Family::V4, n, spec)
        };
        let service = Service::new(ServiceName::new("a", "b"), (0..50).map(port).collect());
        let all: Vec<_> = service.ports.iter().map(|port| (&service, port)).collect();
        let ahead = TablesAhead::by(3, &all);
        for port in &service.ports {
            let weights: Vec<_> = port.backends.iter().map(|backend| (backend.address, backend.weight)).collect();
            let table = ahead.get(&service, port, &weights).unwrap();
            assert_eq!(*table, MaglevTable::build(spec, &weights));
            let others: Vec<_> = weights.iter().map(|(address, weight)| (*address, weight + 1)).collect();
            assert!(weights.is_empty() || ahead.get(&service, port, &others).is_none(), "other weights");
            let resized = ServicePort { maglev: MaglevSpec { size: 509, ..spec }, ..port.clone() };
            assert!(ahead.get(&service, &resized, &weights).is_none(), "another size");
        }
        assert!(TablesAhead::by(1, &all).0.is_empty(), "one thread builds them where they are needed");
    }
}

//! Compiles the tables of mode `dnat`: frontends and backends whose packets are steered by the client's address, while
//! they exist and as long after their removal as their flows may live; and the map from backends to the frontends that
//! they answer for, by which a reply without a flow is rewritten (FORWARDING 4).
//!
//! **Invariant:** a removed frontend or backend stays in the steering tables until its drain ends.
//!
//! Not here: the owner function (`workers`).

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::services::{CompiledPort, CompiledService};
use super::snat::SnatByLink;
use super::targets::{TargetKey, nanoseconds};
use crate::flow::BackendId;
use crate::snapshot::DnatFrontend;
use crate::wire::{Address, FrontendKey, TableHash};
use crate::workers::SteeringTable;

/// A frontend or backend of mode `dnat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DnatEntry {
    /// How long its flows may live after its removal.
    drain_ns: u64,
    /// Set when it was removed: the end of its drain time.
    until_ns: Option<u64>,
}

type Entries = HashMap<TargetKey, DnatEntry, TableHash>;

/// Frontends and backends of mode `dnat`, present or draining.
#[derive(Debug, Default)]
pub(super) struct DnatSteering {
    frontends: Entries,
    backends: Entries,
    /// When the first removed entry expires.
    due_ns: Option<u64>,
}

impl DnatSteering {
    /// Whether [`DnatSteering::follow`] may find a change although no service of mode `dnat` changed.
    /// `listens_changed`: another service changed, and may now have a frontend that is still steered by address.
    pub(super) fn is_due(&self, listens_changed: bool, now_ns: u64) -> bool {
        (listens_changed && !self.frontends.is_empty()) || self.due_ns.is_some_and(|due_ns| due_ns <= now_ns)
    }

    /// Updates the entries from the services. `listens` says whether a service has a frontend there. Returns true when
    /// anything changed.
    pub(super) fn follow<'s>(
        &mut self,
        services: impl Iterator<Item = &'s CompiledService>,
        listens: impl Fn(&TargetKey) -> bool,
        now_ns: u64,
    ) -> bool {
        let (mut frontends, mut backends) = (Entries::default(), Entries::default());
        for served in services.filter(|served| served.is_dnat()) {
            let entry = DnatEntry { drain_ns: nanoseconds(served.source.drain_timeout), until_ns: None };
            let listens = served.ports.iter().flat_map(|port| port.listens.iter().map(|at| (port.protocol, *at)));
            frontends.extend(listens.map(|key| (key, entry)));
            backends.extend(served.backends.keys().map(|key| (*key, entry)));
        }
        // A frontend that now has another mode is steered by that mode.
        keep_gone(&self.frontends, &mut frontends, now_ns, listens);
        keep_gone(&self.backends, &mut backends, now_ns, |_| false);
        let changed = frontends != self.frontends || backends != self.backends;
        (self.frontends, self.backends) = (frontends, backends);
        self.due_ns = self.frontends.values().chain(self.backends.values()).filter_map(|entry| entry.until_ns).min();
        changed
    }

    /// The steering table of a family.
    pub(super) fn table<A: Address>(&self, snat: &SnatByLink<A>) -> SteeringTable<A> {
        let backends: HashSet<FrontendKey<A>, TableHash> = keys(&self.backends);
        let backend_addresses = backends.iter().map(|key| key.address).collect();
        let snat = snat.iter().flatten().map(|snat| snat.address);
        SteeringTable { frontends: keys(&self.frontends), backends, backend_addresses, ..SteeringTable::new(snat) }
    }
}

/// Adds the previous entries that may still have flows to the present ones.
fn keep_gone(before: &Entries, now: &mut Entries, now_ns: u64, is_another: impl Fn(&TargetKey) -> bool) {
    for (key, entry) in before.iter().filter(|(key, _)| !is_another(key)) {
        let until_ns = entry.until_ns.unwrap_or_else(|| now_ns.saturating_add(entry.drain_ns));
        if now_ns < until_ns {
            now.entry(*key).or_insert(DnatEntry { until_ns: Some(until_ns), ..*entry });
        }
    }
}

fn keys<A: Address>(entries: &Entries) -> HashSet<FrontendKey<A>, TableHash> {
    let key = |(protocol, at): &(proto::Protocol, SocketAddr)| {
        Some(FrontendKey { address: A::from_ip(at.ip())?, port: at.port(), protocol: protocol.number() })
    };
    entries.keys().filter_map(key).collect()
}

type DnatFrontends<A> = HashMap<FrontendKey<A>, Option<DnatFrontend<A>>, TableHash>;

/// The maps of both families. A backend behind several frontends, of one service or several, maps to `None`, and so
/// does one whose flows were ended: its replies must not begin them again.
pub(super) fn frontends<'a>(
    services: impl Iterator<Item = &'a CompiledService>,
) -> (Arc<DnatFrontends<u32>>, Arc<DnatFrontends<u128>>) {
    let (mut v4, mut v6) = (DnatFrontends::default(), DnatFrontends::default());
    let services = services.filter(|served| served.is_dnat());
    for (served, port) in services.flat_map(|served| served.ports.iter().map(move |port| (served, port))) {
        for (backend, id) in port.backends() {
            let id = Some(id).filter(|_| !served.has_ended_flows(&(port.protocol, backend)));
            match backend.ip() {
                IpAddr::V4(_) => put(&mut v4, port, backend, id),
                IpAddr::V6(_) => put(&mut v6, port, backend, id),
            }
        }
    }
    (Arc::new(v4), Arc::new(v6))
}

fn put<A: Address>(frontends: &mut DnatFrontends<A>, port: &CompiledPort, backend: SocketAddr, id: Option<BackendId>) {
    let Some(address) = A::from_ip(backend.ip()) else { return };
    for at in &port.listens {
        let Some(vip) = A::from_ip(at.ip()) else { continue };
        let key = FrontendKey { address, port: backend.port(), protocol: port.protocol.number() };
        let frontend = id.map(|backend| DnatFrontend { vip, port: at.port(), backend });
        frontends.entry(key).and_modify(|known| *known = None).or_insert(frontend);
    }
}

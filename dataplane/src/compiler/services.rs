//! Compiles one service: its backends, which of them take new flows, and the addresses and ports of its frontends.
//!
//! **Invariant:** a port whose inputs did not change keeps its frontend, and a table whose inputs did not change is not
//! rebuilt.
//!
//! Not here: which service gets an address that two of them claim, and routes.

use std::hash::{BuildHasher, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hashbrown::{HashMap, HashSet};
use proto::limits::MAGLEV_HASH_VERSION;
use proto::{BackendState, Family, InitialHealth, Mode, Probe, Protocol, Reason, Refusal, Service, ServiceName, ServicePort};

use super::backend_drain::Backends;
use super::earlier_tables::{EarlierSize, received};
use super::frontend_numbers::{FrontendNumbers, PortFrontends, addresses_of};
use super::network::RouteBook;
use super::port_table::{PortTable, shares_affinity};
use super::room::NoRoom;
use super::snat::SnatTables;
use super::tables_ahead::TablesAhead;
use super::targets::{Reach, TargetKey, nanoseconds};
use crate::choose::{HashedBy, MaglevTable, Schedule, SourceRanges};
use crate::flow::{AffinityTable, BackendId, Tick, UNRESOLVED};
use crate::port::Link;
use crate::snapshot::{
    Affinity, BackendView, EarlierTable, EarlierTables, Frontend, FrontendView, Health, Policy, PortView, ServiceView, Tunnels,
};
use crate::stats::{FrontendNumber, ServiceDrops, ServiceNumber, WorkerCounters};
use crate::wire::{TableHash, TupleHash};

/// The inputs that services are compiled against.
pub(super) struct CompileContext<'a> {
    pub(super) routes: &'a mut RouteBook,
    pub(super) snat: &'a SnatTables,
    pub(super) tunnels: &'a Tunnels,
    pub(super) tables: &'a TablesAhead<'a>,
    pub(super) health: &'a Health,
    pub(super) node_port_addresses: &'a [IpAddr],
    /// Counters of each worker.
    pub(super) counters: &'a Arc<[Arc<WorkerCounters>]>,
    /// The affinity table; `None` while no service uses it, or without memory.
    pub(super) affinity: Option<Arc<AffinityTable>>,
    /// How long a removed backend still gets mid-stream packets.
    pub(super) grace: Duration,
    /// Tables that were replaced by then are forgotten, because their memory is needed.
    pub(super) forgotten_ns: Option<u64>,
    /// Unix time at monotonic time 0, modulo 2^64 ns.
    pub(super) unix_at_zero_ns: Option<u64>,
    pub(super) now_ns: u64,
}

/// How a target is currently reached.
pub(super) fn reach(address: SocketAddr, routes: &mut RouteBook, snat: &SnatTables, tunnels: &Tunnels) -> Reach {
    let next_hop = routes.next_hop_to(address.ip());
    let (family, link) = (Family::of(address.ip()), routes.link_of(next_hop));
    Reach {
        next_hop,
        snat: snat.serves(family, link),
        on_link: next_hop == UNRESOLVED || routes.is_on_link(address.ip(), next_hop),
        tunnel_source: tunnels.serves(family, link.map(Link::port)),
        device: routes.device_to(address.ip()),
    }
}

/// A service as it was last compiled.
#[derive(Debug)]
pub(super) struct CompiledService {
    pub(super) source: Arc<Service>,
    pub(super) name: Arc<ServiceName>,
    drops: Arc<ServiceDrops>,
    pub(super) number: ServiceNumber,
    pub(super) backends: HashMap<TargetKey, BackendId, TableHash>,
    pub(super) ports: Vec<CompiledPort>,
    pub(super) frontends: FrontendNumbers,
    pub(super) view: Arc<ServiceView>,
    /// The refusal by this gateway, not by the controller.
    pub(super) refusal: Option<Refusal>,
    /// A message for each port whose backends all fail and are all used.
    pub(super) failing_open: Vec<String>,
    /// Clients that may connect to its VIPs, rebuilt only when they change.
    sources: Option<Arc<SourceRanges>>,
    /// Copied from its source for quick access, as is the next field.
    mode: Mode,
    pub(super) idle_timeout: Option<Duration>,
    /// When a replaced table is no longer asked and its memory is freed, or the drain of a listed backend ends.
    pub(super) due_ns: Option<u64>,
    /// Since when listed backends take no new flows because they drain.
    draining_since_ns: HashMap<TargetKey, u64, TableHash>,
    /// Since when listed backends take no new flows because their probes fail; `None` once their flows were ended.
    failing_since_ns: HashMap<TargetKey, Option<u64>, TableHash>,
    /// Whether some backends found no place, and wait for one.
    pub(super) waits: bool,
    /// The first backend at each address, if its ports share their clients: what is remembered of a client.
    first_at: HashMap<IpAddr, (TargetKey, BackendId), TableHash>,
    /// Position of the frontend of its first port.
    pub(super) first_frontend: usize,
}

/// One port of a service. The table is kept together with its inputs.
#[derive(Debug)]
pub(super) struct CompiledPort {
    pub(super) protocol: Protocol,
    family: Family,
    /// The port of the service.
    number: u16,
    /// Addresses and ports of the frontends, VIPs first.
    pub(super) listens: Vec<SocketAddr>,
    /// Number of `listens` that are at VIPs.
    pub(super) vips: usize,
    /// The numbers of the frontends at `listens`, for the counters.
    pub(super) numbers: Vec<FrontendNumber>,
    pub(super) frontend: Arc<Frontend>,
    table: PortTable,
    pub(super) weights: Vec<(SocketAddr, u16)>,
}

impl CompiledPort {
    /// The backends, each with its slot.
    pub(super) fn backends(&self) -> impl Iterator<Item = (SocketAddr, BackendId)> {
        self.weights.iter().map(|(address, _)| *address).zip(self.frontend.backends.iter().copied())
    }
}

/// Why this release cannot serve a service. The controller of another release may not refuse such a service.
fn unsupported(service: &Service) -> Option<Refusal> {
    let port = service.ports.iter().find(|port| port.maglev.hash_version != MAGLEV_HASH_VERSION)?;
    let found = port.maglev.hash_version;
    let message = format!(
        "expected hash version {MAGLEV_HASH_VERSION}, found {found}; controller and gateway are too far apart: update the older"
    );
    Some(Refusal { reason: Reason::Unsupported, message })
}

impl CompiledService {
    /// A service that is not compiled yet, with this number, on a gateway with this many workers.
    pub(super) fn new(source: &Arc<Service>, number: ServiceNumber, workers: usize) -> Self {
        let name = Arc::new(source.name.clone());
        let drops = Arc::new(ServiceDrops::new(workers));
        let view = view_of(source, &name, number, &drops, None, Vec::new(), Vec::new());
        let (backends, ports) = (HashMap::default(), Vec::new());
        Self {
            source: source.clone(),
            name,
            drops,
            number,
            backends,
            ports,
            frontends: FrontendNumbers::default(),
            view: Arc::new(view),
            refusal: None,
            failing_open: Vec::new(),
            sources: source_ranges(source),
            mode: source.mode,
            idle_timeout: source.idle_timeout,
            due_ns: None,
            draining_since_ns: HashMap::default(),
            failing_since_ns: HashMap::default(),
            waits: false,
            first_at: HashMap::default(),
            first_frontend: 0,
        }
    }

    /// Compiles the service. Returns true when its addresses or ports have changed.
    pub(super) fn compile(&mut self, source: &Arc<Service>, backends: &mut Backends, context: &mut CompileContext<'_>) -> bool {
        if self.source.source_ranges != source.source_ranges {
            self.sources = source_ranges(source);
        }
        self.source = source.clone();
        (self.mode, self.idle_timeout) = (source.mode, source.idle_timeout);
        self.refusal = unsupported(source);
        self.failing_open.clear();
        let serves = source.refusal.is_none() && self.refusal.is_none();
        let ports: &[ServicePort] = if serves { &source.ports } else { &[] };
        self.follow_draining(ports, context.now_ns);
        let no_room = self.take_backends(ports, backends, context);
        self.follow_frontends(ports, context);
        if source.affinity.is_some() && context.affinity.is_none() {
            context.affinity = AffinityTable::new().map(Arc::new);
        }
        let mut old = std::mem::take(&mut self.ports).into_iter();
        let mut listens_before = Vec::new();
        let mut views = Vec::new();
        let (mut accepting, mut failing) = (HashSet::<_, TableHash>::default(), HashSet::<_, TableHash>::default());
        let mut listed: Vec<_> = ports.iter().map(|port| self.listed(port, backends, context)).collect();
        self.follow_failing(ports, &mut listed, backends, context.now_ns);
        self.refusal = self.refusal.take().or_else(|| by_no_port(&listed, context.routes));
        self.follow_addresses(&listed);
        for (port, listed) in ports.iter().zip(&listed) {
            let before = old.next();
            listens_before.extend(before.as_ref().map(|port| (port.protocol, port.listens.clone())));
            self.failing_open.extend(failing_open(&self.name, port, listed, source.health.fail_open));
            let unreachable = !listed.is_empty() && listed.iter().all(|b| !b.is_reachable);
            let (served, view) = self.serve_port(port, listed, before, unreachable, context);
            accepting.extend(view.backends.iter().filter(|b| b.accepts_new).map(|b| b.id));
            failing.extend(view.backends.iter().filter(|b| !b.healthy).map(|b| b.id));
            if unreachable {
                self.refusal.get_or_insert_with(|| no_way(source.mode, port));
            }
            views.push(view);
            self.ports.push(served);
        }
        if !self.ports.is_empty()
            && self.ports.iter().zip(ports).all(|(served, port)| served.listens.is_empty() && is_node_port(port))
        {
            self.refusal.get_or_insert_with(no_node_port_addresses);
        }
        self.waits = no_room.is_some();
        if let Some(no_room) = no_room {
            let refusal = || Refusal { reason: Reason::Exhausted, message: no_room.message(&source.name.namespace) };
            self.refusal.get_or_insert_with(refusal);
        }
        let (idle_timeout, now) = (source.idle_timeout.map(Into::into), Tick::at(context.now_ns));
        for &id in self.backends.values() {
            backends.set_policy(id, accepting.contains(&id), failing.contains(&id), idle_timeout, now);
        }
        listens_before.extend(old.map(|port| (port.protocol, port.listens)));
        let tables_over_ns = self.earlier_tables().map(EarlierTable::over_ns).min();
        self.due_ns = tables_over_ns.into_iter().chain(self.drain_due_ns(context.now_ns)).min();
        let refusal = self.refusal.clone();
        let view = view_of(source, &self.name, self.number, &self.drops, refusal, views, self.frontends.views());
        let not_served = view.refusal.as_ref().map(|_| self.not_served(context.node_port_addresses)).unwrap_or_default();
        self.view = Arc::new(ServiceView { not_served, ..view });
        !listens_before.iter().map(|(p, l)| (p, l)).eq(self.ports.iter().map(|port| (&port.protocol, &port.listens)))
    }

    /// The addresses and ports at which it would be reached if it were not refused.
    fn not_served(&self, node_port_addresses: &[IpAddr]) -> Vec<(Protocol, SocketAddr)> {
        let all = self.source.ports.iter().flat_map(|port| {
            let (listens, _) = listens_of(port, node_port_addresses);
            listens.into_iter().map(|at| (port.protocol, at))
        });
        let is_served = |(protocol, at): &(Protocol, SocketAddr)| {
            self.ports.iter().any(|port| port.protocol == *protocol && port.listens.contains(at))
        };
        all.filter(|at| !is_served(at)).collect()
    }

    /// The part of the service in what the snapshot summarises over all services.
    pub(super) fn summary(&self) -> (Option<Refusal>, Vec<String>, Option<Duration>) {
        (self.refusal.clone(), self.failing_open.clone(), self.idle_timeout)
    }

    /// Whether any port has a table with backends.
    pub(super) fn has_tables(&self) -> bool {
        self.ports.iter().any(|port| port.frontend.table.size() > 0)
    }

    /// Whether backends see the clients' addresses and reply through the gateway.
    pub(super) fn is_dnat(&self) -> bool {
        self.mode == Mode::Dnat
    }

    /// Gives each frontend of these ports its number, and the backends that they have now.
    fn follow_frontends(&mut self, ports: &[ServicePort], context: &CompileContext<'_>) {
        let port = |port: &ServicePort| {
            let (listens, vips) = listens_of(port, context.node_port_addresses);
            let mut addresses: Vec<_> = addresses_of(&listens, vips).collect();
            addresses.dedup();
            let slot = |backend: proto::Backend| self.backends.get(&(port.protocol, backend.address)).map(|id| id.slot);
            let backends = port.all_backends().filter_map(slot).collect();
            PortFrontends { protocol: port.protocol, number: port.port, addresses, backends }
        };
        let ports: Vec<_> = ports.iter().map(port).collect();
        self.frontends.follow(&ports, context.counters);
    }

    /// Assigns a slot to each listed backend and lets the others drain. Backends without room come after these drains
    /// have begun, which end early then. Returns why there was no room for some backends.
    fn take_backends(
        &mut self,
        ports: &[ServicePort],
        backends: &mut Backends,
        context: &mut CompileContext<'_>,
    ) -> Option<NoRoom> {
        let mut old = std::mem::take(&mut self.backends);
        let mut waiting = Vec::new();
        for (protocol, address) in ports.iter().flat_map(|p| p.all_backends().map(|b| (p.protocol, b.address))) {
            let key = (protocol, address);
            if self.backends.contains_key(&key) || self.is_drained(&key, context.now_ns) {
                continue;
            }
            let reach = |address| reach(address, context.routes, context.snat, context.tunnels);
            match old.remove(&key).map_or_else(|| backends.add(&self.name, key, false, context.now_ns, reach), Ok) {
                Ok(id) => drop(self.backends.insert(key, id)),
                Err(_) => waiting.push(key),
            }
        }
        for (key, id) in old {
            let until_ns =
                if self.is_drained(&key, context.now_ns) { context.now_ns } else { self.drain_ends_ns(context.now_ns) };
            backends.remove(id, context.now_ns, until_ns);
        }
        let mut no_room = None;
        for key in waiting.into_iter().filter(|key| !self.backends.contains_key(key)).collect::<Vec<_>>() {
            let reach = |address| reach(address, context.routes, context.snat, context.tunnels);
            match backends.add(&self.name, key, true, context.now_ns, reach) {
                Ok(id) => drop(self.backends.insert(key, id)),
                Err(why) => {
                    // The others would not find any either, and looking for it takes long.
                    no_room = Some(why);
                    break;
                }
            }
        }
        for (_, slot) in backends.freed_early.extract_if(.., |(service, _)| *service == self.name) {
            self.frontends.leave(slot, context.counters);
        }
        no_room
    }

    /// Records since when backends drain on every port that lists them.
    fn follow_draining(&mut self, ports: &[ServicePort], now_ns: u64) {
        let before = std::mem::take(&mut self.draining_since_ns);
        let listed =
            || ports.iter().flat_map(|port| port.all_backends().map(|backend| ((port.protocol, backend.address), backend.state)));
        for (key, _) in listed().filter(|(_, state)| *state == BackendState::Draining) {
            let since_ns = before.get(&key).copied().unwrap_or(now_ns);
            self.draining_since_ns.insert(key, since_ns);
        }
        if !self.draining_since_ns.is_empty() {
            for (key, _) in listed().filter(|(_, state)| *state != BackendState::Draining) {
                self.draining_since_ns.remove(&key);
            }
        }
    }

    /// Whether the drain of a listed backend has ended: it is as if it were not listed.
    fn is_drained(&self, key: &TargetKey, now_ns: u64) -> bool {
        self.draining_since_ns.get(key).is_some_and(|since_ns| self.drain_ends_ns(*since_ns) <= now_ns)
    }

    /// Ends the flows of backends whose probes have failed as long as a drain lasts, while others were used. A backend
    /// that is used because all fail keeps its flows: a wrong probe is then more likely than the loss of them all.
    fn follow_failing(&mut self, ports: &[ServicePort], listed: &mut [Vec<Listed>], backends: &mut Backends, now_ns: u64) {
        let before = std::mem::take(&mut self.failing_since_ns);
        let (fail_open, mut used) = (self.source.health.fail_open, Vec::new());
        for (port, listed) in ports.iter().zip(&*listed) {
            let use_all = fail_open && all_fail(listed);
            for key in listed.iter().filter(|b| !b.healthy).map(|b| (port.protocol, b.address)) {
                if use_all {
                    used.push(key);
                } else {
                    self.failing_since_ns.insert(key, before.get(&key).copied().unwrap_or(Some(now_ns)));
                }
            }
        }
        for key in &used {
            self.failing_since_ns.remove(key);
        }
        let over = self.failing_since_ns.iter().filter(|(_, since)| since.is_some_and(|ns| self.drain_ends_ns(ns) <= now_ns));
        for key in over.map(|(key, _)| *key).collect::<Vec<_>>() {
            self.failing_since_ns.insert(key, None);
            let Some(id) = self.backends.get_mut(&key) else { continue };
            *id = backends.end_flows(*id);
            let of_protocol = ports.iter().zip(&mut *listed).filter(|(port, _)| port.protocol == key.0);
            of_protocol.flat_map(|(_, listed)| listed).filter(|b| b.address == key.1).for_each(|b| b.id = *id);
        }
    }

    /// Whether the flows of a listed backend were ended because its probes fail.
    pub(super) fn has_ended_flows(&self, key: &TargetKey) -> bool {
        self.failing_since_ns.get(key).is_some_and(Option::is_none)
    }

    /// When the next drain of a listed backend ends.
    fn drain_due_ns(&self, now_ns: u64) -> Option<u64> {
        let since_ns = self.draining_since_ns.values().chain(self.failing_since_ns.values().flatten());
        since_ns.map(|since_ns| self.drain_ends_ns(*since_ns)).filter(|due_ns| *due_ns > now_ns).min()
    }

    /// When a drain that begins then ends.
    fn drain_ends_ns(&self, since_ns: u64) -> u64 {
        since_ns.saturating_add(nanoseconds(self.source.drain_timeout))
    }

    /// Lets all backends of a removed service drain.
    pub(super) fn end(&self, backends: &mut Backends, now_ns: u64) {
        self.backends.values().for_each(|&id| backends.remove(id, now_ns, self.drain_ends_ns(now_ns)));
    }

    fn listed(&self, port: &ServicePort, backends: &Backends, context: &CompileContext<'_>) -> Vec<Listed> {
        let probed = self.source.health.probe != Probe::None;
        let failing_here = context.health.failing_for.get(&*self.name);
        let proven_here = context.health.proven_for.get(&*self.name);
        let needs_proof = self.source.health.initial == InitialHealth::Unhealthy && self.source.health.probes(port.protocol);
        let fails = |key: &TargetKey| {
            let fails_for_all = probed && context.health.failing.contains(key);
            let fails_here = failing_here.is_some_and(|failing| failing.contains(key));
            fails_for_all || fails_here || (needs_proof && proven_here.is_none_or(|proven| !proven.contains(key)))
        };
        let listed = |backend: proto::Backend| {
            let key = (port.protocol, backend.address);
            let id = *self.backends.get(&key)?;
            Some(Listed {
                id,
                address: backend.address,
                weight: backend.weight,
                draining: backend.state == BackendState::Draining,
                healthy: !fails(&key),
                is_reachable: backends.serves(id, self.source.mode),
                device: backends.device_to(id),
            })
        };
        port.all_backends().filter_map(listed).collect()
    }

    fn serve_port(
        &self,
        port: &ServicePort,
        listed: &[Listed],
        before: Option<CompiledPort>,
        unreachable: bool,
        context: &CompileContext<'_>,
    ) -> (CompiledPort, PortView) {
        let weights = weights(listed, self.source.health.fail_open);
        let (listens, vips) = if unreachable { (Vec::new(), 0) } else { listens_of(port, context.node_port_addresses) };
        let backends = listed.iter().zip(&weights).map(|(b, &(_, weight))| BackendView {
            address: b.address,
            id: b.id,
            weight: b.weight,
            healthy: b.healthy,
            draining: b.draining,
            accepts_new: weight > 0,
        });
        let view = PortView {
            protocol: port.protocol,
            family: port.family,
            frontends: listens.clone(),
            backends: backends.collect(),
            app_protocol: port.app_protocol.clone(),
            proxy_protocol: port.proxy_protocol,
        };
        let frontend = self.frontend(port, &weights, listed.iter().map(|b| b.id).collect(), before, context);
        let compiled = CompiledPort {
            protocol: port.protocol,
            family: port.family,
            number: port.port,
            numbers: self.frontends.of(port.protocol, &listens, vips),
            listens,
            vips,
            frontend,
            table: PortTable::of(&self.source, port),
            weights,
        };
        (compiled, view)
    }

    /// The frontend of a port: the previous one if nothing about it changed, otherwise a new one, with the previous
    /// table if that did not change.
    fn frontend(
        &self,
        port: &ServicePort,
        weights: &[(SocketAddr, u16)],
        backends: Box<[BackendId]>,
        before: Option<CompiledPort>,
        context: &CompileContext<'_>,
    ) -> Arc<Frontend> {
        let port_table = PortTable::of(&self.source, port);
        let table = before.as_ref().filter(|old| old.table == port_table && old.weights == weights);
        let table = table.map(|old| old.frontend.table.clone()).or_else(|| context.tables.get(&self.source, port, weights));
        let (table, policy) = (table.unwrap_or_else(|| Arc::new(port_table.build(weights))), self.policy(port));
        let is_same = |old: &CompiledPort| (old.protocol, old.family, old.number) == (port.protocol, port.family, port.port);
        let same = before.as_ref().filter(|old| is_same(old)).map(|old| old.frontend.clone());
        let earlier = self.earlier(port, same.as_ref(), &table, context);
        let since_ns = match &same {
            Some(old) if Arc::ptr_eq(&old.table, &table) => old.since_ns,
            Some(_) => context.now_ns,
            None => earlier.iter().next().map_or(context.now_ns, |table| table.until_ns),
        };
        let before = before.map(|old| old.frontend);
        let affinity = policy.affinity.zip(context.affinity.as_ref());
        let affinity = affinity.map(|(timeout, table)| Affinity::new(table.clone(), timeout, self.taking(&backends, weights)));
        let is_as = |old: &Arc<Frontend>| {
            Arc::ptr_eq(&old.table, &table)
                && old.backends == backends
                && old.policy.is_as(&policy)
                && Affinity::are_as(old.affinity.as_ref(), affinity.as_ref())
                && old.earlier.is_as(&earlier)
        };
        if let Some(old) = before.as_ref().filter(|old| is_as(old)) {
            return old.clone();
        }
        let weighted: Vec<_> = backends.iter().zip(weights).map(|(&id, &(_, weight))| (id, weight)).collect();
        let before = before.as_ref().map(|old| &old.schedule);
        let schedule = match policy.affinity {
            Some(_) => Schedule::Hash,
            None => Schedule::new(policy.scheduler, &weighted, context.counters, self.frontends.in_use(), before),
        };
        let hash = TupleHash::new(if policy.affinity.is_some() { self.seed(port) } else { port.maglev.seed });
        let (service, number, drops) = (self.name.clone(), self.number, self.drops.clone());
        Arc::new(Frontend { service, number, drops, hash, table, backends, policy, schedule, affinity, since_ns, earlier })
    }

    /// The backends of a port that take new flows, each behind what is remembered for it: itself, or the first of the
    /// Service at its address, if ports share their clients; then those that only other ports have.
    fn taking(&self, backends: &[BackendId], weights: &[(SocketAddr, u16)]) -> Vec<(BackendId, Option<BackendId>)> {
        let all = backends.iter().zip(weights).filter(|(_, (_, weight))| *weight > 0);
        let remembered = |id: BackendId, at: &SocketAddr| self.first_at.get(&at.ip()).map_or(id, |(_, first)| *first);
        let own = all.map(|(&id, (at, _))| (remembered(id, at), Some(id)));
        own.chain(self.first_at.values().map(|(_, first)| (*first, None))).collect()
    }

    /// Notes for each address the first backend that takes new flows, if ports share their clients.
    fn follow_addresses(&mut self, listed: &[Vec<Listed>]) {
        self.first_at.clear();
        if shares_affinity(&self.source) {
            let fail_open = self.source.health.fail_open;
            let weights = listed.iter().flat_map(|listed| weights(listed, fail_open));
            let taking: HashSet<_, TableHash> = weights.filter(|(_, weight)| *weight > 0).map(|(at, _)| at.ip()).collect();
            for (&key, &id) in self.backends.iter().filter(|((_, at), _)| taking.contains(&at.ip())) {
                let first = self.first_at.entry(key.1.ip()).or_insert((key, id));
                if key < first.0 {
                    *first = (key, id);
                }
            }
        }
    }

    /// The earlier tables, in modes in which an unknown flow may continue by them: the tables that this gateway saw,
    /// and for a new port the tables that the controller sends. Empty tables are left out.
    fn earlier(
        &self,
        port: &ServicePort,
        before: Option<&Arc<Frontend>>,
        table: &Arc<MaglevTable>,
        context: &CompileContext<'_>,
    ) -> EarlierTables {
        let &CompileContext { grace, forgotten_ns, unix_at_zero_ns, now_ns, .. } = context;
        let Some(before) = before.filter(|_| !self.source.mode.is_two_way()) else {
            let id = |address| self.backends.get(&(port.protocol, address)).copied();
            let unix_ns = unix_at_zero_ns.filter(|_| !self.source.mode.is_two_way()).map(|at_zero| at_zero.wrapping_add(now_ns));
            return EarlierTables::new(
                unix_ns.map(|unix_ns| received(port, PortTable::of(&self.source, port), id, unix_ns, now_ns)).unwrap_or_default(),
                grace,
            );
        };
        if before.mode().is_two_way() {
            return EarlierTables::new(Vec::new(), grace);
        }
        let is_replaced = !Arc::ptr_eq(&before.table, table) && before.is_usable();
        let replaced = is_replaced.then(|| EarlierTable {
            table: before.table.clone(),
            backends: before.backends.clone(),
            since_ns: before.since_ns,
            until_ns: now_ns,
        });
        before.earlier.with(replaced, forgotten_ns, grace, now_ns)
    }

    fn earlier_tables(&self) -> impl Iterator<Item = &EarlierTable> {
        self.ports.iter().flat_map(|port| port.frontend.earlier.iter())
    }

    /// The memory of its earlier tables, bytes, and when the oldest of them was replaced.
    pub(super) fn earlier_size(&self) -> EarlierSize {
        let bytes = self.earlier_tables().map(EarlierTable::bytes).sum();
        (bytes, self.earlier_tables().map(|table| table.until_ns).min())
    }

    fn policy(&self, port: &ServicePort) -> Policy {
        let &Service { mode, scheduler, local, affinity, .. } = &*self.source;
        // Source ranges never apply to node ports (CONTROL 2).
        let sources = self.sources.clone().filter(|_| !is_node_port(port));
        let (hashed_by, proxy_protocol) = (HashedBy::of(scheduler, affinity.is_some()), port.proxy_protocol);
        Policy { mode: mode.into(), scheduler, hashed_by, sources, local, affinity, proxy_protocol }
    }

    /// With affinity, clients are hashed together with the service port, so that the affinity table distinguishes them
    /// per port, or with the service alone, if its ports share them. The seed is the same on every gateway.
    fn seed(&self, port: &ServicePort) -> u64 {
        let mut hasher = TableHash.build_hasher();
        match shares_affinity(&self.source) {
            true => hasher.write(self.name.to_string().as_bytes()),
            false => hasher.write(format!("{} {} {}", self.name, port.protocol, port.port).as_bytes()),
        }
        hasher.finish() ^ port.maglev.seed
    }
}

fn source_ranges(service: &Service) -> Option<Arc<SourceRanges>> {
    service.source_ranges.as_deref().map(|prefixes| Arc::new(SourceRanges::new(prefixes)))
}

/// A backend of a port, with the facts that decide whether it takes new flows.
struct Listed {
    id: BackendId,
    address: SocketAddr,
    weight: u16,
    draining: bool,
    healthy: bool,
    /// Whether packets of the service's mode can be sent to it.
    is_reachable: bool,
    /// The device by which Linux sends to it, if packets of the gateway cannot take that.
    device: Option<u32>,
}

/// The input of the table: backends that take no new flows have weight 0. If all backends fail and the service fails
/// open, all count as healthy.
fn weights(listed: &[Listed], fail_open: bool) -> Vec<(SocketAddr, u16)> {
    let use_all = fail_open && all_fail(listed);
    let counts = |b: &Listed| b.is_usable() && (b.healthy || use_all);
    listed.iter().map(|b| (b.address, if counts(b) { b.weight } else { 0 })).collect()
}

impl Listed {
    /// Whether it takes new flows if its probes pass.
    fn is_usable(&self) -> bool {
        self.weight > 0 && !self.draining && self.is_reachable
    }
}

fn all_fail(listed: &[Listed]) -> bool {
    !listed.iter().any(|b| b.is_usable() && b.healthy)
}

fn failing_open(name: &ServiceName, port: &ServicePort, listed: &[Listed], fail_open: bool) -> Option<String> {
    let count = listed.iter().filter(|b| b.is_usable()).count();
    let (protocol, number, family) = (port.protocol, port.port, port.family);
    (fail_open && count > 0 && all_fail(listed)).then(|| {
        format!("{name} {protocol} {number}: every {family} backend ({count}) fails its probes; all are used (fail open)")
    })
}

/// The addresses and ports at which a port is served, and how many of them are at VIPs, which come first.
fn listens_of(port: &ServicePort, node_port_addresses: &[IpAddr]) -> (Vec<SocketAddr>, usize) {
    let at = |addresses: &[IpAddr], number: u16| -> Vec<SocketAddr> {
        let of_family = addresses.iter().filter(|address| Family::of(**address) == port.family);
        of_family.map(|&address| SocketAddr::new(address, number)).collect()
    };
    let mut listens = at(&port.vips, port.port);
    let vips = listens.len();
    listens.extend(port.node_port.map(|number| at(node_port_addresses, number)).unwrap_or_default());
    (listens, vips)
}

/// Whether the port is served on `nodePortAddresses` only.
fn is_node_port(port: &ServicePort) -> bool {
    port.vips.is_empty() && port.node_port.is_some()
}

fn no_node_port_addresses() -> Refusal {
    let message =
        "no `nodePortAddresses` of its family are configured on this gateway; add one there to serve node ports".to_owned();
    Refusal { reason: Reason::Refused, message }
}

/// The refusal of a port none of whose backends can be reached in its mode.
fn no_way(mode: Mode, port: &ServicePort) -> Refusal {
    let ServicePort { family, protocol, port: number, .. } = port;
    let message = match mode {
        // `dnat` needs no address of the gateway, so it never fails here.
        Mode::Nat | Mode::Dnat => format!(
            "no SNAT address for {family} serves the port that the backends of {protocol} {number} are reached by; add one under \
             `snat.addresses`"
        ),
        Mode::Dsr => format!(
            "the backends of {protocol} {number} ({family}) are behind a router, and mode dsr changes only MAC addresses; put the \
             gateway into their subnet, or use mode ipip or gue"
        ),
        Mode::Ipip | Mode::Gue => format!(
            "the port that the backends of {protocol} {number} are reached by has no address of their family to send tunnels from; \
             give it one, or add one under `tunnel.sources`"
        ),
    };
    Refusal { reason: Reason::Refused, message }
}

/// The refusal, in part, of a service with a backend to which Linux sends by a device that is no port.
fn by_no_port(listed: &[Vec<Listed>], routes: &RouteBook) -> Option<Refusal> {
    let (address, device) = listed.iter().flatten().find_map(|b| Some((b.address.ip(), b.device?)))?;
    Some(Refusal { reason: Reason::Refused, message: routes.no_route(address, device) })
}

fn view_of(
    service: &Service,
    name: &Arc<ServiceName>,
    number: ServiceNumber,
    drops: &Arc<ServiceDrops>,
    refusal: Option<Refusal>,
    ports: Vec<PortView>,
    frontends: Vec<FrontendView>,
) -> ServiceView {
    ServiceView {
        name: name.clone(),
        mode: service.mode,
        target: service.target,
        scheduler: service.scheduler,
        refusal: service.refusal.clone().or(refusal),
        ports,
        not_served: Vec::new(),
        frontends,
        drops: drops.clone(),
        number,
    }
}

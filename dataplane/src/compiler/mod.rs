//! The compiler: builds the snapshot that workers forward by from the controller's state, the network and the health of
//! backends.
//!
//! **Invariant:** what a flow may hold keeps its meaning: a backend keeps its slot until its drain ends, a target for
//! two minutes longer, a next hop while anything refers to it. A service that did not change is not visited; its tables
//! are shared with the previous snapshot. After a panic nothing half-finished is reused, only the slots of the last
//! finished snapshot, which flows hold.
//!
//! Not here: when to compile (the agent decides), and packets.

mod addresses;
mod backend_drain;
mod dnat;
mod earlier_tables;
mod frontend_numbers;
mod network;
mod port_table;
mod room;
mod services;
mod snat;
mod tables_ahead;
mod targets;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use addresses::AnnouncedAddresses;
pub use addresses::unanswered;
use backend_drain::Backends;
use dnat::DnatSteering;
use earlier_tables::EarlierMemory;
use frontend_numbers::ServiceNumbers;
use hashbrown::HashMap;
use imbl::ordmap::DiffItem;
use network::{NetworkChange, RouteBook};
use proto::{Generation, Mode, Pool, ProbeTags, Service, ServiceName, Services, State};
use room::waiting::Waiting;
use services::{CompileContext, CompiledService, reach};
use snat::SnatTables;
use tables_ahead::TablesAhead;
use targets::TargetKey;

use crate::flow::FlowLimits;
use crate::snapshot::{
    BackendsByService, Config, FamilyTables, FrontendAt, Health, Network, Pieces, RemovedBackends, Snapshot, SnatGroups,
    TargetUse, Tunables, Tunnels, Views, VipAnswers,
};
use crate::stats::WorkerCounters;
use crate::wire::{Address, FrontendKey, TableHash};

/// Builds snapshots, and remembers what must stay the same from one to the next.
#[derive(Debug)]
pub struct Compiler {
    config: Config,
    /// Counters of each worker.
    counters: Arc<[Arc<WorkerCounters>]>,
    snat: SnatTables,
    tunnels: Arc<Tunnels>,
    routes: RouteBook,
    backends: Backends,
    /// In the order of the services in the state.
    services: BTreeMap<ServiceName, CompiledService>,
    service_numbers: ServiceNumbers,
    failing: HashSet<TargetKey>,
    failing_for: Arc<BackendsByService>,
    proven_for: Arc<BackendsByService>,
    pools: Vec<Pool>,
    announced_addresses: AnnouncedAddresses,
    /// The VIPs that are answered for, and whether that has changed since the last compilation.
    vip_answers: VipAnswers,
    answers_changed: bool,
    dnat_steering: DnatSteering,
    conflicts: Vec<String>,
    failing_open: Vec<String>,
    /// When services must be compiled again although nothing changes.
    due: BTreeSet<(u64, Arc<ServiceName>)>,
    earlier_memory: EarlierMemory,
    /// Services some of whose backends found no room.
    waiting: Waiting,
    /// Unix time at monotonic time 0, modulo 2^64 ns.
    unix_at_zero_ns: Option<u64>,
    /// The services that were compiled last.
    state: Services,
    /// Whether the last compilation finished.
    is_whole: bool,
    /// Whether this is the first compilation, or the first after an unfinished one.
    is_first: bool,
    /// Whether the configuration has changed since the last compilation.
    is_tuned: bool,
    last: Snapshot,
    /// The last finished snapshot, which workers may hold.
    finished: Snapshot,
}

impl Compiler {
    /// A compiler for a gateway with this configuration.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let ports: Arc<[_]> = config.ports.clone().into();
        let network = Network::default();
        let snat = SnatTables::new(&config, &network);
        let tunnels = Arc::new(Tunnels::new(&config));
        let mut routes = RouteBook::new(ports.clone());
        let mut announced_addresses = AnnouncedAddresses::default();
        let last = Snapshot {
            sequence: 0,
            generation: Generation::default(),
            ready: false,
            ports,
            v4: FamilyTables::new(addresses::roles(&config, &network, &[], &[]), snat.v4.clone()),
            v6: FamilyTables::new(addresses::roles(&config, &network, &[], &[]), snat.v6.clone()),
            frontends: Pieces::default(),
            affinity: None,
            backends: crate::snapshot::BackendTable::default(),
            routes: routes.share(),
            interfaces: None,
            tunnels: tunnels.clone(),
            probe_tags: Arc::default(),
            services: Views::new(),
            removed: RemovedBackends::new(),
            vlans: snat.vlans.clone(),
            groups: None,
            promiscuous: Arc::default(),
            vlan_mtus: Arc::default(),
            vlan_addresses: Arc::default(),
            announced: announced_addresses.update(&config, &[], &[], &network, &VipAnswers::default(), 1),
            lost: announced_addresses.lost(),
            routed: Arc::default(),
            managed: Arc::default(),
            shortest_idle_timeout: None,
            limits: Arc::new(config.flows.clone()),
            refused: Arc::default(),
            target_use: TargetUse { limit: config.targets_max, ..TargetUse::default() },
            problems: Arc::default(),
            prefixes: addresses::all_prefixes(&config, &network).into(),
        };
        Self {
            snat,
            tunnels,
            routes,
            announced_addresses,
            finished: last.clone(),
            backends: Backends::new(config.targets_max, Arc::default()),
            last,
            config,
            counters: Arc::default(),
            services: BTreeMap::new(),
            service_numbers: ServiceNumbers::default(),
            failing: HashSet::new(),
            failing_for: Arc::default(),
            proven_for: Arc::default(),
            pools: Vec::new(),
            vip_answers: VipAnswers::default(),
            answers_changed: false,
            dnat_steering: DnatSteering::default(),
            conflicts: Vec::new(),
            failing_open: Vec::new(),
            due: BTreeSet::new(),
            earlier_memory: EarlierMemory::new(),
            waiting: Waiting::default(),
            unix_at_zero_ns: None,
            state: Services::new(),
            is_whole: true,
            is_first: true,
            is_tuned: false,
        }
    }

    /// Sets the counters of the workers, in their order. Schedulers keep state for each worker, and some use the
    /// numbers of flows of all workers. Without this call there is one worker, which is taken to have no flows.
    #[must_use]
    pub fn counting(self, counters: Vec<Arc<WorkerCounters>>) -> Self {
        let counters: Arc<[_]> = counters.into();
        Self { backends: Backends::new(self.config.targets_max, counters.clone()), counters, ..self }
    }

    /// Changes the configuration from the next snapshot on, if it differs. Flows keep their SNAT addresses.
    pub fn tune(&mut self, tunables: &Tunables) {
        let flows = FlowLimits { max_per_worker: self.config.flows.max_per_worker, ..tunables.flows.clone() };
        let new = Tunables { flows, ..tunables.clone() };
        if self.config.tunables() != new {
            let Tunables { snat, node_port_addresses, flows, targets_max } = new;
            self.config.targets_max = targets_max;
            self.backends.room.set_limit(targets_max);
            (self.config.snat, self.config.node_port_addresses, self.config.flows) = (snat, node_port_addresses, flows);
            self.is_tuned = true;
        }
    }

    /// Sets, from the next snapshot on, for which VIPs of `l2` pools ARP and NDP are answered.
    pub fn answer_for(&mut self, vips: &VipAnswers) {
        if self.vip_answers != *vips {
            self.vip_answers.clone_from(vips);
            self.answers_changed = true;
        }
    }

    /// Sets the time of day at `now_ns`. The controller tells by it when backends were replaced; without it only tables
    /// that this gateway saw count as earlier ones.
    pub const fn set_time_of_day(&mut self, unix_ns: u64, now_ns: u64) {
        self.unix_at_zero_ns = Some(unix_ns.wrapping_sub(now_ns));
    }

    /// The initial snapshot, before any state; not ready.
    #[must_use]
    pub fn initial(&self) -> Snapshot {
        self.last.clone()
    }

    /// Compiles a complete state. `now_ns` is monotonic and only measures drains and the age of tables.
    pub fn compile(&mut self, state: &State, network: &Network, health: &Health, now_ns: u64) -> Snapshot {
        if !std::mem::replace(&mut self.is_whole, false) {
            self.restart(now_ns);
        }
        self.last.sequence += 1;
        self.routes.forget_excess(self.backends.targets.next_hops());
        for (service, slot) in self.backends.expire(now_ns) {
            if let Some(served) = self.services.get(&*service) {
                served.frontends.leave(slot, &self.counters);
            }
        }
        let before = self.routes.network();
        let ours_changed = before.addresses != network.addresses || before.down != network.down || before.moves != network.moves;
        let is_tuned = std::mem::take(&mut self.is_tuned);
        if is_tuned {
            self.last.limits = Arc::new(self.config.flows.clone());
        }
        let links_changed = self.follow_links(network, is_tuned);
        let all = self.follow_network(network, links_changed) || is_tuned;
        let changes = self.follow_services(state, health, all, now_ns);
        let listens_changed = changes.listens;
        if listens_changed {
            self.index_frontends();
        }
        let answers_changed = std::mem::take(&mut self.answers_changed);
        let pools_changed = self.pools != state.pools;
        if pools_changed {
            self.pools.clone_from(&state.pools);
        }
        if answers_changed || links_changed || pools_changed || self.is_first {
            self.update_snat_groups();
        }
        if listens_changed || links_changed || ours_changed || pools_changed {
            self.update_roles(network);
        } else if answers_changed {
            self.update_announced(network, &self.vips());
        }
        let all_steering = self.is_first || is_tuned;
        if changes.dnat || all_steering || self.dnat_steering.is_due(listens_changed, now_ns) {
            self.update_steering(all_steering, now_ns);
        }
        let last = &mut self.last;
        last.generation = state.generation.clone();
        last.ready = true;
        if *last.promiscuous != *network.promiscuous {
            last.promiscuous = network.promiscuous.as_slice().into();
        }
        if last.interfaces.as_deref() != network.interfaces.as_deref() {
            last.interfaces = network.interfaces.as_deref().map(Into::into);
        }
        last.routes = self.routes.share();
        self.backends.table.follow(&last.routes);
        last.backends = self.backends.table.clone();
        last.removed = self.backends.removed.clone();
        last.target_use = self.backends.target_use(self.waiting.len());
        last.managed = self.routes.managed(self.backends.targets.next_hops());
        let problems = self.announced_addresses.problems.iter().chain(&self.conflicts).chain(&self.failing_open).cloned();
        let of_snat = last.groups.map_or_else(Vec::new, |groups| self.snat.problems(groups.groups, &self.config));
        last.problems = problems.chain(self.routes.problem()).chain(of_snat).collect();
        self.finished = last.clone();
        (self.is_whole, self.is_first) = (true, false);
        self.finished.clone()
    }

    /// Restarts with the whole state after a panic. Flows hold slots of backends, targets and next hops: slots of
    /// backends and targets stay, next hops are looked up again. Earlier tables are forgotten, except those that the
    /// controller sends.
    fn restart(&mut self, now_ns: u64) {
        let (counters, vip_answers) = (self.counters.clone(), self.vip_answers.clone());
        let unix_at_zero_ns = self.unix_at_zero_ns;
        let mut fresh = Self { counters, vip_answers, unix_at_zero_ns, ..Self::new(self.config.clone()) };
        fresh.routes.follow_epoch(&self.finished.routes);
        fresh.backends = Backends::taken_over(self.finished.backends.clone(), &self.backends, now_ns);
        fresh.dnat_steering = std::mem::take(&mut self.dnat_steering);
        fresh.last.sequence = self.last.sequence;
        fresh.last.affinity = self.finished.affinity.clone();
        fresh.last.probe_tags = self.last.probe_tags.clone();
        fresh.finished = self.finished.clone();
        *self = Self { is_whole: false, ..fresh };
    }

    /// Sets, from the next snapshot on, which backend is probed through its VIP from which source port.
    pub fn probe_by(&mut self, tags: ProbeTags) {
        self.last.probe_tags = Arc::new(tags);
    }

    /// When the next snapshot is due although nothing changes: a drain ends then, an earlier table is over, or backends
    /// that found no room are tried again.
    #[must_use]
    pub fn next_due_ns(&self) -> Option<u64> {
        let service_due_ns = self.due.first().map(|(due_ns, _)| *due_ns);
        let waiting_due_ns = self.waiting.next_due_ns(self.backends.room.released(), self.backends.targets.due_ns());
        self.backends.due_ns().into_iter().chain(service_due_ns).chain(waiting_due_ns).min()
    }

    /// Takes over the VLAN devices, and the SNAT addresses of all links. Returns true when any may have changed.
    fn follow_links(&mut self, network: &Network, is_tuned: bool) -> bool {
        if self.routes.network().vlans == network.vlans && !is_tuned {
            return false;
        }
        self.snat = SnatTables::new(&self.config, network);
        let last = &mut self.last;
        (last.v4.snat, last.v6.snat) = (self.snat.v4.clone(), self.snat.v6.clone());
        last.vlans = self.snat.vlans.clone();
        last.vlan_mtus = network.vlans.iter().map(|vlan| vlan.mtu).collect();
        last.vlan_addresses = network.vlans.iter().map(|vlan| vlan.addresses.clone()).collect();
        last.prefixes = addresses::all_prefixes(&self.config, network).into();
        true
    }

    /// Takes over routes and neighbours. Returns true when every service must be recompiled.
    fn follow_network(&mut self, network: &Network, links_changed: bool) -> bool {
        self.follow_macs(network);
        let news = self.routes.follow(network);
        let must_resolve = news == NetworkChange::Routes || links_changed || self.is_first;
        if news == NetworkChange::Nothing && !must_resolve {
            return false;
        }
        let mut all = false;
        if must_resolve {
            all = self.backends.targets.resolve(|address| reach(address, &mut self.routes, &self.snat, &self.tunnels));
            self.backends.follow_targets();
        }
        self.routes.forget(self.backends.targets.next_hops());
        all
    }

    /// Takes over the MAC addresses of ports whose devices appeared since.
    fn follow_macs(&mut self, network: &Network) {
        let mut changed = false;
        for &(port, mac) in &network.macs {
            let known = self.config.ports.get_mut(usize::from(port.0)).filter(|known| known.mac != mac);
            changed |= known.map(|known| known.mac = mac).is_some();
        }
        if changed {
            let ports: Arc<[_]> = self.config.ports.clone().into();
            self.routes.set_ports(ports.clone());
            self.last.ports = ports;
        }
    }

    /// Of some services those that have no table yet: new ones, and those whose backends were not proven until now.
    fn without_tables<'s>(&self, names: &BTreeSet<ServiceName>, state: &'s State) -> impl Iterator<Item = &'s Service> {
        let has_none = |name: &&ServiceName| self.services.get(*name).is_some_and(|served| !served.has_tables());
        names.iter().filter(has_none).filter_map(|name| state.services.get(name)).map(Arc::as_ref)
    }

    /// Compiles the services that changed. No other service is visited: the names of 10,000 services alone exceed a
    /// cache.
    fn follow_services(&mut self, state: &State, health: &Health, all: bool, now_ns: u64) -> ServiceChanges {
        let (changed, mut changes) = self.follow_names(state, now_ns);
        let changed = if all { self.services.keys().cloned().collect() } else { changed };
        let changed = self.affected_by(health, changed);
        let mut changed = self.due_at(changed, now_ns);
        changed.extend(self.waiting.take_due(self.backends.room.released(), now_ns));
        let tables = TablesAhead::of(self.without_tables(&changed, state));
        let mut context = CompileContext {
            affinity: self.last.affinity.clone(),
            routes: &mut self.routes,
            snat: &self.snat,
            tunnels: &self.tunnels,
            tables: &tables,
            health,
            node_port_addresses: &self.config.node_port_addresses,
            counters: &self.counters,
            grace: self.config.flows.table_grace,
            forgotten_ns: None,
            unix_at_zero_ns: self.unix_at_zero_ns,
            now_ns,
        };
        let mut batch = changed.clone();
        while !batch.is_empty() {
            for name in std::mem::take(&mut batch) {
                let Some((service, served)) = state.services.get(&name).zip(self.services.get_mut(&name)) else { continue };
                let (before, due_before, size_before) = (served.summary(), served.due_ns, served.earlier_size());
                changes.dnat |= served.is_dnat() || service.mode == Mode::Dnat;
                changes.listens |= served.compile(service, &mut self.backends, &mut context);
                changes.summary |= before != served.summary();
                self.waiting.set(&name, served.waits);
                due_before.map(|due_ns| self.due.remove(&(due_ns, served.name.clone())));
                self.due.extend(served.due_ns.map(|due_ns| (due_ns, served.name.clone())));
                self.earlier_memory.count(&served.name, size_before, served.earlier_size());
                self.last.services.insert(served.name.clone(), served.view.clone());
                for (service, slot) in std::mem::take(&mut self.backends.freed_early) {
                    let served = self.services.get(&*service);
                    served.inspect(|served| served.frontends.leave(slot, &self.counters));
                }
            }
            if let Some((until_ns, name)) = self.earlier_memory.excess() {
                context.forgotten_ns = Some(until_ns);
                batch.insert(ServiceName::clone(&name));
                changed.insert(ServiceName::clone(&name));
            }
        }
        self.last.affinity = context.affinity;
        self.place_frontends(&changed, changes.listens);
        if changes.summary || changes.listens {
            self.sum_up();
        }
        if changes.dnat {
            (self.last.v4.dnat_frontends, self.last.v6.dnat_frontends) = dnat::frontends(self.services.values());
        }
        self.state = state.services.clone();
        changes
    }

    /// Adds new services and ends removed ones. Returns the services that are new or changed.
    fn follow_names(&mut self, state: &State, now_ns: u64) -> (BTreeSet<ServiceName>, ServiceChanges) {
        let (mut changed, mut changes) = (BTreeSet::new(), ServiceChanges::default());
        for item in self.state.diff(&state.services) {
            match item {
                DiffItem::Add(name, service) => {
                    changed.insert(name.clone());
                    changes.listens = true;
                    self.backends.room.want(service);
                    let (workers, numbers) = (self.counters.len().max(1), &mut self.service_numbers);
                    let new = || CompiledService::new(service, numbers.take(), workers);
                    self.services.entry(name.clone()).or_insert_with(new);
                }
                DiffItem::Update { old: (_, old), new: (name, new) } => {
                    self.backends.room.want_no_more(old);
                    self.backends.room.want(new);
                    changed.insert(name.clone());
                }
                DiffItem::Remove(name, old) => {
                    changes.listens = true;
                    self.backends.room.want_no_more(old);
                    self.waiting.set(name, false);
                    let Some(served) = self.services.remove(name) else { continue };
                    changes.dnat |= served.is_dnat();
                    self.service_numbers.free(served.number);
                    served.end(&mut self.backends, now_ns);
                    served.due_ns.map(|due_ns| self.due.remove(&(due_ns, served.name.clone())));
                    self.earlier_memory.count(&served.name, served.earlier_size(), (0, None));
                    self.last.services.remove(name);
                }
            }
        }
        (changed, changes)
    }

    /// Adds the services with backends whose probe results changed.
    fn affected_by(&mut self, health: &Health, mut changed: BTreeSet<ServiceName>) -> BTreeSet<ServiceName> {
        let turned: Vec<TargetKey> = self.failing.symmetric_difference(&health.failing).copied().collect();
        if !turned.is_empty() {
            self.failing.clone_from(&health.failing);
            let is_affected = |served: &&CompiledService| turned.iter().any(|key| served.backends.contains_key(key));
            changed.extend(self.services.values().filter(is_affected).map(|served| ServiceName::clone(&served.name)));
        }
        for (known, new) in [(&mut self.failing_for, &health.failing_for), (&mut self.proven_for, &health.proven_for)] {
            if known != new {
                let before = std::mem::replace(known, new.clone());
                let names = before.keys().chain(new.keys());
                changed.extend(names.filter(|name| before.get(*name) != new.get(*name)).cloned());
            }
        }
        changed
    }

    /// Adds the services that are due.
    fn due_at(&self, mut changed: BTreeSet<ServiceName>, now_ns: u64) -> BTreeSet<ServiceName> {
        let due = self.due.iter().take_while(|(due_ns, _)| *due_ns <= now_ns);
        changed.extend(due.map(|(_, name)| ServiceName::clone(name)));
        changed
    }

    /// Stores the frontends at their positions: all of them when any service changed its addresses, since their number
    /// may have changed.
    fn place_frontends(&mut self, changed: &BTreeSet<ServiceName>, listens_changed: bool) {
        if listens_changed {
            let mut all = Vec::new();
            for served in self.services.values_mut() {
                served.first_frontend = all.len();
                all.extend(served.ports.iter().map(|port| port.frontend.clone()));
            }
            self.last.frontends = Pieces::new(&all);
            return;
        }
        for served in changed.iter().filter_map(|name| self.services.get(name)) {
            for (position, port) in (served.first_frontend..).zip(&served.ports) {
                self.last.frontends.set(position, port.frontend.clone());
            }
        }
    }

    /// Updates the parts of the snapshot that summarise all services.
    fn sum_up(&mut self) {
        let refused = self.services.iter().filter_map(|(name, served)| Some((name.clone(), served.refusal.clone()?)));
        self.last.refused = refused.collect();
        self.failing_open = self.services.values().flat_map(|served| &served.failing_open).cloned().collect();
        let shortest = self.services.values().filter_map(|served| served.idle_timeout).min();
        self.last.shortest_idle_timeout = shortest.map(Into::into);
    }

    /// Builds the map from address, protocol and port to `frontends`. If two services claim the same
    /// place, the first by name gets it.
    fn index_frontends(&mut self) {
        self.conflicts.clear();
        let (mut v4, mut v6) = (HashMap::default(), HashMap::default());
        let mut position = 0;
        for served in self.services.values() {
            for port in &served.ports {
                for (at, &number) in port.listens.iter().zip(&port.numbers) {
                    let (protocol, frontend) = (port.protocol.number(), FrontendAt { position, number });
                    let free = match at.ip() {
                        IpAddr::V4(address) => claim(&mut v4, u32::from(address), at.port(), protocol, frontend),
                        IpAddr::V6(address) => claim(&mut v6, u128::from(address), at.port(), protocol, frontend),
                    };
                    if !free {
                        let (name, protocol) = (&served.name, port.protocol);
                        self.conflicts.push(format!("{name} does not get {protocol} {at}: another service has it"));
                    }
                }
                position += 1;
            }
        }
        (self.last.v4.frontends, self.last.v6.frontends) = (Arc::new(v4), Arc::new(v6));
    }

    /// Updates the tables of packets that are steered by the client's address.
    fn update_steering(&mut self, all: bool, now_ns: u64) {
        let last = &mut self.last;
        let listens = |(protocol, at): &TargetKey| match at.ip() {
            IpAddr::V4(address) => last.frontend(u32::from(address), protocol.number(), at.port()).is_some(),
            IpAddr::V6(address) => last.frontend(u128::from(address), protocol.number(), at.port()).is_some(),
        };
        if self.dnat_steering.follow(self.services.values(), listens, now_ns) || all {
            last.v4.steering = Arc::new(self.dnat_steering.table(&self.snat.v4));
            last.v6.steering = Arc::new(self.dnat_steering.table(&self.snat.v6));
        }
    }

    /// The VIPs in use, sorted.
    fn vips(&self) -> Vec<IpAddr> {
        let ports = self.services.values().flat_map(|served| &served.ports);
        let vips: BTreeSet<IpAddr> = ports.flat_map(|port| port.listens[..port.vips].iter().map(|at| at.ip())).collect();
        vips.into_iter().collect()
    }

    /// Updates which SNAT addresses new flows use, where these belong to VIP groups.
    fn update_snat_groups(&mut self) {
        let groups = self.vip_answers.groups.filter(|_| self.config.shared_snat);
        let Self { last, snat, config, pools, .. } = self;
        last.groups = groups;
        last.v4.snat_groups = groups.map(|owned| Arc::new(SnatGroups::new(&snat.v4, owned, addresses::unelected(config, pools))));
        last.v6.snat_groups = groups.map(|owned| Arc::new(SnatGroups::new(&snat.v6, owned, addresses::unelected(config, pools))));
    }

    fn update_announced(&mut self, network: &Network, vips: &[IpAddr]) {
        let Self { config, pools, vip_answers, last, announced_addresses, .. } = self;
        last.announced = announced_addresses.update(config, pools, vips, network, vip_answers, last.sequence);
        last.lost = announced_addresses.lost();
    }

    fn update_roles(&mut self, network: &Network) {
        let vips = self.vips();
        let last = &mut self.last;
        last.v4.roles = Arc::new(addresses::roles(&self.config, network, &self.pools, &vips));
        last.v6.roles = Arc::new(addresses::roles(&self.config, network, &self.pools, &vips));
        last.routed = addresses::routed(&self.pools, &vips).collect();
        self.update_announced(network, &vips);
    }
}

/// The changes that the compilation of the services found.
#[derive(Clone, Copy, Debug, Default)]
struct ServiceChanges {
    /// The set of services, or the addresses and ports of any.
    listens: bool,
    /// Any service of mode `dnat`.
    dnat: bool,
    /// Anything that the snapshot summarises over all services.
    summary: bool,
}

fn claim<A: Address>(
    frontends: &mut HashMap<FrontendKey<A>, FrontendAt, TableHash>,
    address: A,
    port: u16,
    protocol: u8,
    at: FrontendAt,
) -> bool {
    frontends.try_insert(FrontendKey { address, port, protocol }, at).is_ok()
}

#[cfg(test)]
mod tests;

//! State, network and health become the snapshot that workers forward by.
//!
//! **Invariant:** what a flow may hold keeps its meaning: a backend keeps its slot until its drain is over, a target for
//! two minutes more, a next hop while anything names it. A service that did not change is not looked into: its tables
//! are shared with the snapshot before. Deliberately not here: when to compile (the agent's matter), and packets.

mod fronts;
mod network;
mod places;
mod services;
mod slots;
mod snat;
mod steering;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use hashbrown::HashMap;
use proto::{Generation, Mode, Pool, ProbeTags, Service, ServiceName, State};

use crate::hash::TableHash;
use crate::snapshot::{FamilyTables, FrontendKey, Snapshot, Tunnels};
use crate::{Address, Config, Health, Network, PortIndex, VlanLink, WorkerCounters};
use network::{News, Ways};
use places::Answers;
use services::{Served, Surroundings};
use slots::{Backends, TargetKey};
use snat::SnatTables;
use steering::ByAddress;

/// Makes snapshots, and remembers what must stay the same from one to the next.
#[derive(Debug)]
pub struct Compiler {
    config: Config,
    /// What each worker counts.
    counters: Arc<[Arc<WorkerCounters>]>,
    snat: SnatTables,
    tunnels: Arc<Tunnels>,
    ways: Ways,
    backends: Backends,
    /// In the order of the state's.
    services: BTreeMap<ServiceName, Served>,
    failing: HashSet<TargetKey>,
    failing_for: BTreeMap<ServiceName, HashSet<TargetKey>>,
    pools: Vec<Pool>,
    addresses: Vec<IpAddr>,
    down: Vec<PortIndex>,
    moves: Vec<u64>,
    vlans: Vec<VlanLink>,
    answers: Answers,
    by_address: ByAddress,
    conflicts: Vec<String>,
    failing_open: Vec<String>,
    /// When the grace of a table that was replaced is over next.
    grace_due_ns: Option<u64>,
    last: Snapshot,
}

impl Compiler {
    /// A compiler for a gateway with this configuration.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let ports: Arc<[_]> = config.ports.clone().into();
        let network = Network::default();
        let snat = SnatTables::new(&config, &network);
        let tunnels = Arc::new(Tunnels::new(&config));
        let mut ways = Ways::new(ports.clone());
        let mut answers = Answers::default();
        let last = Snapshot {
            sequence: 0,
            generation: Generation::default(),
            ready: false,
            ports,
            v4: FamilyTables::new(places::places(&config, &network, &[], &[]), snat.v4.clone()),
            v6: FamilyTables::new(places::places(&config, &network, &[], &[]), snat.v6.clone()),
            frontends: Vec::new(),
            affinity: None,
            backends: crate::snapshot::BackendTable::default(),
            routes: ways.share(),
            tunnels: tunnels.clone(),
            probe_tags: Arc::default(),
            services: Vec::new(),
            vlans: snat.vlans.clone(),
            announced: answers.update(&config, &[], &[], &network, 1),
            routed: Arc::default(),
            managed: Arc::default(),
            shortest_idle_timeout: None,
            refused: Vec::new(),
            problems: Vec::new(),
        };
        Self {
            snat,
            tunnels,
            ways,
            answers,
            last,
            config,
            counters: Arc::default(),
            backends: Backends::default(),
            services: BTreeMap::new(),
            failing: HashSet::new(),
            failing_for: BTreeMap::new(),
            pools: Vec::new(),
            addresses: Vec::new(),
            down: Vec::new(),
            moves: Vec::new(),
            by_address: ByAddress::default(),
            vlans: Vec::new(),
            conflicts: Vec::new(),
            failing_open: Vec::new(),
            grace_due_ns: None,
        }
    }

    /// The same for workers that count by these, in their order: schedulers keep something for each worker, and some go by
    /// the flows that all of them have. Without, there is one worker, and it is taken to have no flows.
    #[must_use]
    pub fn counting(self, counters: Vec<Arc<WorkerCounters>>) -> Self {
        Self { counters: counters.into(), ..self }
    }

    /// The snapshot to begin with, before any state: not ready.
    #[must_use]
    pub fn initial(&self) -> Snapshot {
        self.last.clone()
    }

    /// The snapshot of a complete state. `now_ns` is monotonic and only measures drains.
    pub fn compile(&mut self, state: &State, network: &Network, health: &Health, now_ns: u64) -> Snapshot {
        self.last.sequence += 1;
        self.backends.expire(now_ns);
        let vlans_changed = self.follow_vlans(network);
        let all = self.follow_network(network, health, vlans_changed, now_ns);
        let listens_changed = self.follow_services(state, health, all, now_ns);
        if listens_changed {
            self.index_frontends();
        }
        let links_changed = self.down != network.down || self.moves != network.moves;
        let ours_changed = vlans_changed || self.addresses != network.addresses || links_changed;
        if listens_changed || ours_changed || self.pools != state.pools {
            self.pools.clone_from(&state.pools);
            self.addresses.clone_from(&network.addresses);
            self.down.clone_from(&network.down);
            self.moves.clone_from(&network.moves);
            self.update_places(network);
        }
        self.update_steering(now_ns);
        let last = &mut self.last;
        last.generation = state.generation.clone();
        last.ready = true;
        last.backends = self.backends.table.clone();
        last.routes = self.ways.share();
        last.managed = self.ways.managed(self.backends.targets.next_hops());
        let problems = self.answers.problems.iter().chain(&self.conflicts).chain(&self.failing_open).cloned();
        last.problems = problems.chain(self.ways.problem()).collect();
        last.clone()
    }

    /// From the next snapshot on, which backend is probed through its VIP from which source port.
    pub fn probe_by(&mut self, tags: ProbeTags) {
        self.last.probe_tags = Arc::new(tags);
    }

    /// When the next snapshot is due although nothing changes: a drain is over then, or the grace of a table.
    #[must_use]
    pub fn next_due_ns(&self) -> Option<u64> {
        self.backends.due_ns().into_iter().chain(self.grace_due_ns).min()
    }

    /// VLAN devices. True when any came, went or changed.
    fn follow_vlans(&mut self, network: &Network) -> bool {
        if self.vlans == network.vlans {
            return false;
        }
        self.vlans.clone_from(&network.vlans);
        self.snat = SnatTables::new(&self.config, network);
        let last = &mut self.last;
        (last.v4.snat, last.v6.snat) = (self.snat.v4.clone(), self.snat.v6.clone());
        last.vlans = self.snat.vlans.clone();
        true
    }

    /// Routes and neighbours. True when every service must be looked into.
    fn follow_network(&mut self, network: &Network, health: &Health, vlans_changed: bool, now_ns: u64) -> bool {
        self.follow_macs(network);
        let news = self.ways.follow(network);
        if news == News::Nothing {
            return false;
        }
        let mut all = false;
        if news == News::Routes || vlans_changed {
            let mut around = Surroundings {
                ways: &mut self.ways,
                snat: &self.snat,
                tunnels: &self.tunnels,
                health,
                node_port_addresses: &[],
                counters: &self.counters,
                affinity: None,
                grace: self.config.flows.table_grace,
                now_ns,
            };
            all = self.backends.targets.resolve(|address| around.reach(address));
            self.backends.follow_targets();
        }
        self.ways.forget(self.backends.targets.next_hops());
        all
    }

    /// Ports whose devices have come since.
    fn follow_macs(&mut self, network: &Network) {
        let mut changed = false;
        for &(port, mac) in &network.macs {
            let known = self.config.ports.get_mut(usize::from(port.0)).filter(|known| known.mac != mac);
            changed |= known.map(|known| known.mac = mac).is_some();
        }
        if changed {
            let ports: Arc<[_]> = self.config.ports.clone().into();
            self.ways.set_ports(ports.clone());
            self.last.ports = ports;
        }
    }

    /// Looks into the services that changed. True when any listens elsewhere than before.
    fn follow_services(&mut self, state: &State, health: &Health, all: bool, now_ns: u64) -> bool {
        let changed: Vec<TargetKey> = self.failing.symmetric_difference(&health.failing).copied().collect();
        if !changed.is_empty() {
            self.failing.clone_from(&health.failing);
        }
        let failed_before = (self.failing_for != health.failing_for).then(|| self.failing_for.clone());
        if failed_before.is_some() {
            self.failing_for.clone_from(&health.failing_for);
        }
        let (mut listens_changed, gone_dnat) = self.follow_names(state, now_ns);
        let mut around = Surroundings {
            affinity: self.last.affinity.clone(),
            ways: &mut self.ways,
            snat: &self.snat,
            tunnels: &self.tunnels,
            health,
            node_port_addresses: &self.config.node_port_addresses,
            counters: &self.counters,
            grace: self.config.flows.table_grace,
            now_ns,
        };
        self.grace_due_ns = None;
        let mut dnat_changed = gone_dnat;
        self.last.services.clear();
        self.last.frontends.clear();
        self.last.refused.clear();
        self.failing_open.clear();
        let mut shortest_idle_timeout = None;
        for ((name, service), served) in state.services.iter().zip(self.services.values_mut()) {
            let affected_alone = || failed_before.as_ref().is_some_and(|old| old.get(name) != health.failing_for.get(name));
            let affected = || changed.iter().any(|key| served.backends.contains_key(key)) || affected_alone();
            let over = served.grace_due_ns.is_some_and(|due_ns| due_ns <= now_ns);
            if served.is_new || all || over || is_other(&served.source, service) || affected() {
                dnat_changed |= served.is_dnat() || service.mode == Mode::Dnat;
                listens_changed |= served.compile(service, &mut self.backends, &mut around);
            } else if !Arc::ptr_eq(&served.source, service) {
                // Equal, and the next look will see so without comparing.
                served.source = service.clone();
            }
            shortest_idle_timeout = [shortest_idle_timeout, served.idle_timeout].into_iter().flatten().min();
            self.grace_due_ns = [self.grace_due_ns, served.grace_due_ns].into_iter().flatten().min();
            self.last.services.push(served.view.clone());
            self.last.frontends.extend(served.ports.iter().map(|port| port.frontend.clone()));
            self.failing_open.extend_from_slice(&served.failing_open);
            self.last.refused.extend(served.refusal.clone().map(|refusal| (name.clone(), refusal)));
        }
        self.last.affinity = around.affinity;
        self.last.shortest_idle_timeout = shortest_idle_timeout.map(Into::into);
        if dnat_changed {
            (self.last.v4.fronts, self.last.v6.fronts) = fronts::fronts(self.services.values());
        }
        listens_changed
    }

    /// Makes room for the services that came, and ends those that went: as a rule none did. What did not change is not looked
    /// into, for the names of 10,000 services alone are more than a cache holds. True when any went, and when one of
    /// mode `dnat` did.
    fn follow_names(&mut self, state: &State, now_ns: u64) -> (bool, bool) {
        let same = |((old, served), (name, service)): ((&ServiceName, &Served), (&ServiceName, &Arc<Service>))| {
            Arc::ptr_eq(&served.source, service) || old == name
        };
        if self.services.len() == state.services.len() && self.services.iter().zip(&state.services).all(same) {
            return (false, false);
        }
        let gone: Vec<ServiceName> = self.services.keys().filter(|name| !state.services.contains_key(*name)).cloned().collect();
        let mut any_dnat = false;
        for served in gone.iter().filter_map(|name| self.services.remove(name)) {
            any_dnat |= served.is_dnat();
            served.end(&mut self.backends, now_ns);
        }
        for (name, service) in &state.services {
            if !self.services.contains_key(name) {
                self.services.insert(name.clone(), Served::new(service));
            }
        }
        (!gone.is_empty(), any_dnat)
    }

    /// Addresses, protocols and ports to positions in `frontends`. Of two services at one place the first by name has it.
    fn index_frontends(&mut self) {
        self.conflicts.clear();
        let (mut v4, mut v6) = (HashMap::default(), HashMap::default());
        let mut position = 0;
        for served in self.services.values() {
            for port in &served.ports {
                for at in &port.listens {
                    let protocol = port.protocol.number();
                    let free = match at.ip() {
                        IpAddr::V4(address) => claim(&mut v4, u32::from(address), at.port(), protocol, position),
                        IpAddr::V6(address) => claim(&mut v6, u128::from(address), at.port(), protocol, position),
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

    /// What is steered by the client's address.
    fn update_steering(&mut self, now_ns: u64) {
        let last = &mut self.last;
        let listens = |(protocol, at): &TargetKey| match at.ip() {
            IpAddr::V4(address) => last.frontend(u32::from(address), protocol.number(), at.port()).is_some(),
            IpAddr::V6(address) => last.frontend(u128::from(address), protocol.number(), at.port()).is_some(),
        };
        if self.by_address.follow(self.services.values(), listens, now_ns) {
            last.v4.steering = Arc::new(self.by_address.table(&self.snat.v4));
            last.v6.steering = Arc::new(self.by_address.table(&self.snat.v6));
        }
    }

    fn update_places(&mut self, network: &Network) {
        let ports = self.services.values().flat_map(|served| &served.ports);
        let vips: BTreeSet<IpAddr> = ports.flat_map(|port| port.listens[..port.vips].iter().map(|at| at.ip())).collect();
        let vips: Vec<IpAddr> = vips.into_iter().collect();
        let last = &mut self.last;
        last.v4.places = Arc::new(places::places(&self.config, network, &self.pools, &vips));
        last.v6.places = Arc::new(places::places(&self.config, network, &self.pools, &vips));
        last.routed = places::routed(&self.pools, &vips).collect();
        last.announced = self.answers.update(&self.config, &self.pools, &vips, network, last.sequence);
    }
}

/// Whether a service is another one than before. Mostly it is the very same.
fn is_other(before: &Arc<Service>, now: &Arc<Service>) -> bool {
    !Arc::ptr_eq(before, now) && before != now
}

fn claim<A: Address>(
    frontends: &mut HashMap<FrontendKey<A>, u32, TableHash>,
    address: A,
    port: u16,
    protocol: u8,
    position: u32,
) -> bool {
    frontends.try_insert(FrontendKey { address, port, protocol }, position).is_ok()
}

#[cfg(test)]
mod tests;

//! Time to choose a backend, and to build the tables for it: `cargo bench -p dataplane --bench choosing`. Prints the
//! shortest of many runs, which other load on the machine disturbs the least.
#![allow(clippy::unwrap_used, reason = "a wrong figure is worse than none")]

use std::hint::black_box;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane::choose::MaglevTable;
use dataplane::flow::Tick;
use dataplane::{
    Chooser, Compiler, Config, FlowLimits, Health, Mac, Network, PortConfig, PortIndex, Route, SourceRanges, Tunnel, Tuple,
    WorkerCounters,
};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use proto::limits::MAGLEV_HASH_VERSION;
use proto::{Backend, BackendState, Family, MaglevSpec, Protocol, Scheduler, Service, ServiceName, ServicePort, State};

/// Number of small tables that are built in turn.
const TABLES: u64 = 200;
/// Choices per run: their keys do not fit the L2 cache.
const CHOICES: u32 = 1 << 17;

fn shortest(runs: u32, mut run: impl FnMut()) -> Duration {
    let time = |()| {
        let start = Instant::now();
        run();
        start.elapsed()
    };
    (0..runs).map(|_| ()).map(time).min().unwrap_or_default()
}

fn per_choice(name: &str, mut choose: impl FnMut(u32)) {
    let time = shortest(30, || (0..CHOICES).for_each(&mut choose));
    println!("{name:50} {:8.1} ns", time.as_secs_f64() * 1e9 / f64::from(CHOICES));
}

fn each(name: &str, runs: u32, run: impl FnMut()) {
    println!("{name:50} {:8.1} us", shortest(runs, run).as_secs_f64() * 1e6);
}

/// A pseudorandom permutation of numbers.
const fn scatter(n: u32) -> u32 {
    (n ^ n >> 15).wrapping_mul(0x9e37_79b1) ^ n.wrapping_mul(0x85eb_ca77) >> 13
}

fn backend(n: u32) -> SocketAddr {
    SocketAddr::new(IpAddr::V4((0x0a00_000b + n).into()), 8080)
}

fn maglev() {
    let sizes =
        [(65_537, 1000, false), (65_537, 1000, true), (262_139, 1000, false), (655_373, 1000, false), (655_373, 6553, false)];
    for (size, count, uneven) in sizes {
        let weight = |n: u32| if uneven { u16::try_from(n % 7 + 1).unwrap() } else { 1 };
        let backends: Vec<_> = (0..count).map(|n| (backend(n), weight(n))).collect();
        let spec = MaglevSpec { size, seed: 42, hash_version: MAGLEV_HASH_VERSION };
        let name = format!("Maglev, {count} backends{}, {size} entries", if uneven { " of 7 weights" } else { "" });
        each(&name, 50, || drop(black_box(MaglevTable::build(spec, black_box(&backends)))));
    }
    // Small tables, all different: the processor would learn a table that is built again and again.
    for (size, count) in [(251, 2), (1021, 3), (2039, 10), (4093, 20)] {
        let backends: Vec<_> = (0..count).map(|n| (backend(n), 1)).collect();
        each(&format!("Maglev, {TABLES} tables for {count} backends, {size} entries"), 20, || {
            for seed in 0..TABLES {
                let spec = MaglevSpec { size, seed, hash_version: MAGLEV_HASH_VERSION };
                black_box(MaglevTable::build(spec, black_box(&backends)));
            }
        });
    }
}

fn source_ranges() {
    let v4 = |n| IpNet::from(Ipv4Net::new(scatter(n).into(), 24).unwrap());
    let v6 = |n| {
        let address = 0x2001_0db8_u128 << 96 | u128::from(scatter(n)) << 64;
        IpNet::from(Ipv6Net::new(address.into(), 64).unwrap())
    };
    for count in [10, 10_000, 1_000_000] {
        let ranges = SourceRanges::new(&(0..count).flat_map(|n| [v4(n), v6(n)]).collect::<Vec<_>>());
        per_choice(&format!("source ranges, {count} prefixes, IPv4"), |n| {
            black_box(ranges.allow(scatter(n)));
        });
        per_choice(&format!("source ranges, {count} prefixes, IPv6"), |n| {
            black_box(ranges.allow(0x2001_0db8_u128 << 96 | u128::from(scatter(n)) << 64));
        });
    }
}

fn config() -> Config {
    let port =
        PortConfig { name: "p".into(), mac: Mac([2; 6]), mtu: 1500, addresses: vec!["10.0.0.2/8".parse().unwrap()], twin: true };
    Config {
        ports: vec![port],
        snat: vec!["10.255.0.3".parse().unwrap()],
        node_port_addresses: vec![],
        flows: FlowLimits::default(),
        shared_snat: false,
        targets_max: dataplane::flow::TARGETS_MAX,
        tunnel: Tunnel::default(),
    }
}

fn service(name: u32, backends: impl Iterator<Item = u32>, size: u32) -> Service {
    let backend = |n| Backend { address: backend(n), weight: 1, state: BackendState::Active };
    let port = ServicePort {
        vips: vec![IpAddr::V4((0xc000_0200 + name).into())],
        backends: backends.map(backend).collect(),
        ..ServicePort::new(Protocol::Tcp, Family::V4, 80, MaglevSpec { size, seed: 42, hash_version: MAGLEV_HASH_VERSION })
    };
    Service::new(ServiceName::new("default", &format!("s{name}")), vec![port])
}

struct Rig {
    compiler: Compiler,
    state: State,
    network: Network,
}

impl Rig {
    fn new() -> Self {
        let compiler = Compiler::new(config()).counting(vec![Arc::new(WorkerCounters::default())]);
        let route = Route { to: "10.0.0.0/8".parse().unwrap(), via: None, link: PortIndex(0).into(), weight: 1 };
        Self { compiler, state: State::default(), network: Network { routes: vec![route], ..Network::default() } }
    }

    fn put(&mut self, service: Service) {
        self.state.services.insert(service.name.clone(), Arc::new(service));
    }

    fn compile(&mut self) -> dataplane::Snapshot {
        self.compiler.compile(&self.state, &self.network, &Health::default(), 1)
    }
}

fn choices() {
    let mut rows: Vec<_> = Scheduler::ALL.iter().map(|&scheduler| (scheduler, None)).collect();
    rows.push((Scheduler::Maglev, Some(Duration::from_secs(10_800))));
    for (scheduler, affinity) in rows {
        let mut rig = Rig::new();
        rig.put(Service { scheduler, affinity, ..service(0, 0..1000, 65_537) });
        let snapshot = rig.compile();
        let frontend = snapshot.frontend(0xc000_0200_u32, 6, 80).unwrap();
        let chooser = Chooser { worker: 0, now: Tick(1), is_trial: false };
        let name = affinity.map_or_else(|| scheduler.to_string(), |_| format!("affinity, {CHOICES} clients"));
        per_choice(&format!("{name}, 1000 backends"), |n| {
            let tuple =
                Tuple { source: scatter(n), destination: 0xc000_0200_u32, source_port: 5555, destination_port: 80, protocol: 6 };
            black_box(frontend.choose(&tuple, chooser));
        });
    }
}

/// One endpoint is added or removed, among 10,000 services with ten each.
fn changes() {
    for scheduler in [Scheduler::Maglev, Scheduler::LeastConnections] {
        let mut rig = Rig::new();
        for name in 0..10_000 {
            rig.put(Service { scheduler, ..service(name, name * 10..name * 10 + 10, 2039) });
        }
        rig.compile();
        let mut more = 0;
        each(&format!("an endpoint of 10,000 services changes, {scheduler}"), 50, || {
            more = 1 - more;
            rig.put(Service { scheduler, ..service(77, 770..779 + more, 2039) });
            black_box(rig.compile());
        });
    }
}

fn main() {
    maglev();
    source_ranges();
    choices();
    changes();
}

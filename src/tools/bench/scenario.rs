//! The measured gateway: two ports, services with backends behind a router, enough SNAT addresses for the flows.
//! Addresses are those that RFC 2544 and RFC 5180 reserve for benchmarks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use dataplane::{Config, FlowLimits, Mac, Neighbour, Network, PortConfig, PortIndex, Route, Tunnel};
use proto::limits::{MAGLEV_ENTRIES_AT_CREATION, MAGLEV_HASH_VERSION, MAGLEV_SIZES};
use proto::{Backend, BackendState, Family, Generation, MaglevSpec, Mode, Protocol, Service, ServiceName, ServicePort, State};

use crate::cli::{BenchArgs, BenchMode};

/// Seed of the workers' tables: figures repeat.
pub(super) const SEED: u64 = 0x5bd1_e995_9e37_79b9;
pub(super) const UPLINK: PortIndex = PortIndex(0);
pub(super) const CLUSTER: PortIndex = PortIndex(1);
pub(super) const ROUTER_MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
pub(super) const UPLINK_MAC: Mac = Mac([2, 0, 0, 0, 1, 0]);
pub(super) const CLUSTER_MAC: Mac = Mac([2, 0, 0, 0, 1, 1]);
/// Port of the backends in modes that rewrite the destination.
pub(super) const BACKEND_PORT: u16 = 8080;
pub(super) const VIP_PORT: u16 = 80;

/// The VIP of a service.
pub(super) fn vip(family: Family, service: u32) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::from(0xc612_0000 + service + 1).into(), // 198.18.0.0/16
        Family::V6 => Ipv6Addr::from((0x2001_0200u128 << 96) + u128::from(service) + 1).into(),
    }
}

/// Index of a backend among those of all services.
const fn backend_index(service: u32, n: u32, backends: u32) -> u32 {
    service * backends + n
}

/// Ethernet address of a backend on the link.
pub(super) fn backend_mac(service: u32, n: u32, backends: u32) -> Mac {
    let [a, b, c, d] = backend_index(service, n, backends).to_be_bytes();
    Mac([2, 1, a, b, c, d])
}

/// A backend of a service.
pub(super) fn backend(family: Family, service: u32, n: u32, backends: u32) -> IpAddr {
    let index = backend_index(service, n, backends);
    match family {
        Family::V4 => Ipv4Addr::from(0xac10_0000 + index).into(), // 172.16.0.0/12
        Family::V6 => Ipv6Addr::from((0xfd00u128 << 112) + (1u128 << 64) + u128::from(index)).into(),
    }
}

/// The client of a flow: a unique address and port.
pub(super) fn client(family: Family, flow: u32) -> (IpAddr, u16) {
    let port = 1024 + (flow % 60_000) as u16; // below 61,024
    let host = flow / 60_000 * 251 + flow % 251;
    match family {
        Family::V4 => (Ipv4Addr::from(0x0a00_0000 + (host & 0x00ff_ffff)).into(), port),
        Family::V6 => (Ipv6Addr::from((0x2001_0db8u128 << 96) + u128::from(host)).into(), port),
    }
}

/// The gateway's own address on the cluster's side, with the prefix of its link. In mode `dsr`, that of the backends.
fn cluster_net(mode: BenchMode, family: Family) -> &'static str {
    match (family, mode) {
        (Family::V4, BenchMode::Dsr) => "172.31.255.254/12",
        (Family::V4, _) => "192.168.0.2/16",
        (Family::V6, BenchMode::Dsr) => "fd00:0:0:1:ffff::2/64",
        (Family::V6, _) => "fd00::2/64",
    }
}

/// Source of tunnels: the gateway's own address.
pub(super) fn tunnel_source(mode: BenchMode, family: Family) -> Option<IpAddr> {
    cluster_net(mode, family).split('/').next().and_then(|address| address.parse().ok())
}

/// SNAT addresses, only for mode `nat`: each gives 64,512 ports per backend, of which half may be in use.
pub(super) fn snat_addresses(options: &BenchArgs, family: Family) -> Vec<IpAddr> {
    if options.mode != BenchMode::Nat {
        return Vec::new();
    }
    let per_address = 32_256 * u64::from(options.services) * u64::from(options.backends);
    let count = u64::from(options.flows).div_ceil(per_address).max(1);
    (0..u32::try_from(count).unwrap_or(u32::MAX))
        .map(|n| match family {
            Family::V4 => IpAddr::from(Ipv4Addr::from(0xc0a8_0100 + n)), // 192.168.1.0
            Family::V6 => Ipv6Addr::from((0xfd00u128 << 112) + 0x100 + u128::from(n)).into(),
        })
        .collect()
}

/// The configuration of the gateway.
pub(super) fn config(options: &BenchArgs, family: Family) -> Config {
    let port = |name: &str, mac: Mac, address: &str| PortConfig {
        name: name.into(),
        mac,
        mtu: 1500,
        addresses: address.parse().into_iter().collect(),
        twin: false,
    };
    let uplink = if family == Family::V4 { "192.0.2.2/24" } else { "2001:db8:ffff::2/64" };
    Config {
        ports: vec![port("uplink", UPLINK_MAC, uplink), port("cluster", CLUSTER_MAC, cluster_net(options.mode, family))],
        snat: snat_addresses(options, family),
        node_port_addresses: Vec::new(),
        flows: FlowLimits { max_per_worker: options.flows.max(1024), ..FlowLimits::default() },
        tunnel: Tunnel::default(),
    }
}

/// The network: both ports have a router; clients are behind one, backends behind the other. In mode `dsr` backends are
/// on the link.
pub(super) fn network(options: &BenchArgs, family: Family) -> Network {
    let (clients, uplink, backends, cluster) = match family {
        Family::V4 => ("0.0.0.0/0", "192.0.2.1", "172.16.0.0/12", "192.168.0.1"),
        Family::V6 => ("::/0", "2001:db8:ffff::1", "fd00:0:0:1::/64", "fd00::1"),
    };
    let route = |to: &str, via: &str, port: PortIndex| {
        Some((
            Route { to: to.parse().ok()?, via: via.parse().ok(), link: port.into(), weight: 1 },
            Neighbour { link: port.into(), address: via.parse().ok()?, mac: ROUTER_MAC },
        ))
    };
    let to_clients = route(clients, uplink, UPLINK);
    let (routes, neighbours) = if options.mode == BenchMode::Dsr {
        let (routes, routers): (Vec<_>, Vec<_>) = to_clients.into_iter().unzip();
        (routes, routers.into_iter().chain(on_link(options, family)).collect())
    } else {
        [to_clients, route(backends, cluster, CLUSTER)].into_iter().flatten().unzip()
    };
    Network { routes, neighbours, ..Network::default() }
}

/// All backends, as neighbours.
fn on_link(options: &BenchArgs, family: Family) -> impl Iterator<Item = Neighbour> {
    let each = options.backends;
    let all = (0..options.services).flat_map(move |service| (0..each).map(move |n| (service, n)));
    all.map(move |(service, n)| Neighbour {
        link: CLUSTER.into(),
        address: backend(family, service, n, each),
        mac: backend_mac(service, n, each),
    })
}

/// The services.
pub(super) fn state(options: &BenchArgs, family: Family) -> State {
    let services = (0..options.services).map(|n| {
        let name = ServiceName::new("bench", &format!("service-{n:05}"));
        (name.clone(), Arc::new(service(options, family, n, name)))
    });
    State { generation: Generation { epoch: "bench".into(), counter: 1 }, services: services.collect(), pools: Vec::new() }
}

fn service(options: &BenchArgs, family: Family, n: u32, name: ServiceName) -> Service {
    let wanted = options.backends.saturating_mul(MAGLEV_ENTRIES_AT_CREATION);
    let size = MAGLEV_SIZES.into_iter().find(|size| *size >= wanted).unwrap_or(655_373);
    let mode = options.mode.of_services().unwrap_or(Mode::Nat);
    let backend_port = if mode.is_two_way() { BACKEND_PORT } else { VIP_PORT };
    let backend = |b| Backend {
        address: SocketAddr::new(backend(family, n, b, options.backends), backend_port),
        weight: 1,
        state: BackendState::Active,
    };
    let port = ServicePort {
        vips: vec![vip(family, n)],
        backends: (0..options.backends).map(backend).collect(),
        ..ServicePort::new(Protocol::Tcp, family, VIP_PORT, MaglevSpec { size, seed: 0, hash_version: MAGLEV_HASH_VERSION })
    };
    Service { mode, ..Service::new(name, vec![port]) }
}

//! The measured gateway: two ports, services with backends behind a router, enough SNAT addresses for the flows.
//! Addresses are those that RFC 2544 and RFC 5180 reserve for benchmarks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use dataplane::{
    Config, FlowLimits, Link, Mac, Neighbour, Network, PortConfig, PortIndex, Route, TagKind, Tunnel, Vlan, VlanLink,
};
use proto::limits::{MAGLEV_ENTRIES_AT_CREATION, MAGLEV_HASH_VERSION, MAGLEV_SIZES};
use proto::{Backend, BackendState, Family, Generation, MaglevSpec, Mode, Protocol, Service, ServiceName, ServicePort, State};

use super::error::BenchError;
use crate::args::{BenchArgs, BenchDirection, BenchFamily, BenchIo, BenchMode, BenchProtocol, BenchState};

/// Seed of the workers' tables: figures repeat.
pub(super) const SEED: u64 = 0x5bd1_e995_9e37_79b9;
const UPLINK: PortIndex = PortIndex(0);
const CLUSTER: PortIndex = PortIndex(1);
pub(super) const UPLINK_MAC: Mac = Mac([2, 0, 0, 0, 1, 0]);
pub(super) const CLUSTER_MAC: Mac = Mac([2, 0, 0, 0, 1, 1]);
/// VLANs of the two sides, with `--vlan`.
pub(super) const UPLINK_VLAN: u16 = 100;
pub(super) const CLUSTER_VLAN: u16 = 200;
/// Port of the backends in modes that rewrite the destination.
pub(super) const BACKEND_PORT: u16 = 8080;
pub(super) const VIP_PORT: u16 = 80;

/// SNAT ports of one address towards one backend: all but the privileged ones.
const SNAT_PORTS: u64 = 64_512;
/// SNAT addresses that the engine takes of one family.
const SNAT_ADDRESSES_MAX: u64 = 8;

/// Ethernet address of a router: each side has as many as there are next hops.
pub(super) const fn router_mac(n: u8) -> Mac {
    Mac([2, 0, 0, 0, n, 1])
}

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
        (Family::V4, _) => "192.168.0.254/16",
        (Family::V6, BenchMode::Dsr) => "fd00:0:0:1:ffff::2/64",
        (Family::V6, _) => "fd00::fffe/64",
    }
}

/// Source of tunnels: the gateway's own address.
pub(super) fn tunnel_source(mode: BenchMode, family: Family) -> Option<IpAddr> {
    cluster_net(mode, family).split('/').next().and_then(|address| address.parse().ok())
}

/// Ports that the flows of a run need, per hundred flows: twice as many, so that none of many pools runs out. With
/// `--new-flows` 60 flows are live, and their ports rest for longer than the flows live (`timing`).
const fn ports_for_100_flows(options: &BenchArgs) -> u64 {
    match (options.new_flows, options.snat_load) {
        (_, Some(load)) => 10_000 / load as u64,
        (true, None) => 360,
        (false, None) => 200,
    }
}

/// SNAT addresses, only for mode `nat`.
pub(super) fn snat_addresses(options: &BenchArgs, family: Family) -> Vec<IpAddr> {
    if options.mode != BenchMode::Nat {
        return Vec::new();
    }
    let per_address = SNAT_PORTS * u64::from(options.services) * u64::from(options.backends);
    let wanted = u64::from(options.flows) * ports_for_100_flows(options) / 100;
    // With a load, the flows that hold ports are as many as the ports ask for, so the nearest number will do.
    let count = if options.snat_load.is_some() { (wanted + per_address / 2) / per_address } else { wanted.div_ceil(per_address) };
    (0..)
        .take(usize::try_from(count.clamp(1, SNAT_ADDRESSES_MAX)).unwrap_or(1))
        .map(|n: u32| match family {
            Family::V4 => IpAddr::from(Ipv4Addr::from(0xc0a8_0100 + n)), // 192.168.1.0
            Family::V6 => Ipv6Addr::from((0xfd00u128 << 112) + 0x100 + u128::from(n)).into(),
        })
        .collect()
}

/// Number of SNAT ports towards all backends.
pub(super) fn snat_ports(options: &BenchArgs, family: Family) -> u64 {
    snat_addresses(options, family).len() as u64 * SNAT_PORTS * u64::from(options.services) * u64::from(options.backends)
}

/// The options with as many live flows as `--snat-load` asks for.
pub(super) fn with_load(options: &BenchArgs) -> BenchArgs {
    let Some(load) = options.snat_load else { return options.clone() };
    let family = if options.family == BenchFamily::V4 { Family::V4 } else { Family::V6 };
    let flows = snat_ports(options, family) * u64::from(load) / 100;
    BenchArgs { flows: u32::try_from(flows).unwrap_or(u32::MAX), ..options.clone() }
}

/// The core beside that of the worker: of the generator, or of a listing.
pub(super) fn second_core(options: &BenchArgs) -> usize {
    options.generator_core.unwrap_or(if options.core > 0 { options.core - 1 } else { 1 })
}

/// Refuses what contradicts itself.
pub(super) fn validate(options: &BenchArgs) -> Result<(), BenchError> {
    let mode = options.mode.of_services();
    let one_way = mode.is_some_and(|mode| !mode.is_two_way());
    let replies = matches!(options.direction, Some(BenchDirection::ToClient | BenchDirection::Both));
    let comes_and_goes = options.new_flows || options.flood;
    let wrong = [
        (options.io == BenchIo::Ring && options.workers > 1, "--io ring measures one worker; take --io mem"),
        (one_way && replies, "in modes dsr, ipip and gue replies do not pass the gateway; take --direction to-backend"),
        (
            replies && options.state == BenchState::Opening,
            "--state opening means that nobody replied; take --direction to-backend",
        ),
        (replies && comes_and_goes, "--new-flows and --flood have no replies; take --direction to-backend"),
        (options.handover && options.workers < 2, "--handover needs --workers 2 or more"),
        (options.handover && mode.is_none(), "--handover needs a mode with services; `none` has none"),
        (options.ecmp > 1 && options.mode == BenchMode::Dsr, "--ecmp does nothing in mode dsr: backends are on the link"),
        (options.snat_load.is_some() && options.mode != BenchMode::Nat, "--snat-load needs --mode nat"),
        (options.latency && mode.is_none(), "--latency needs a mode; none has no engine"),
        (options.latency && options.io == BenchIo::Ring, "--latency needs --io mem"),
        (options.latency && (comes_and_goes || options.workers > 1), "--latency measures one worker and known flows"),
        (options.listing && mode.is_none(), "--listing needs a mode; none has no flows"),
        (options.listing && (comes_and_goes || options.workers > 1), "--listing measures one worker and known flows"),
        (options.snat_load.is_some() && options.workers > 1, "--snat-load measures one worker"),
        (options.no_df && options.family == BenchFamily::V6, "--no-df needs --family v4: IPv6 has no flag DF"),
    ];
    match wrong.into_iter().find(|(is_wrong, _)| *is_wrong) {
        Some((_, what)) => Err(BenchError::Options(what)),
        None => Ok(()),
    }
}

/// The link of a side.
fn link(options: &BenchArgs, port: PortIndex) -> Link {
    let id = if port == UPLINK { UPLINK_VLAN } else { CLUSTER_VLAN };
    let tagged = Vlan::NONE.with(TagKind::Customer, id).filter(|_| options.vlan);
    tagged.map_or(port.into(), |vlan| Link::new(port, vlan))
}

/// The gateway's address on the side of the clients, with the prefix of its link.
fn uplink_net(family: Family) -> &'static str {
    if family == Family::V4 { "192.0.2.254/24" } else { "2001:db8:ffff::fffe/64" }
}

/// MTU of the side of the backends: in tunnel modes the largest frames of clients fit with the headers in front.
const fn cluster_mtu(mode: BenchMode) -> u16 {
    if matches!(mode, BenchMode::Ipip | BenchMode::Gue) { 1600 } else { 1500 }
}

/// How many flows the table takes so that each service gets its part of these: where several share it, one with eight times
/// as many as are free gets no more (docs/internals/decisions/0087-fair-shares.md).
const fn with_room(options: &BenchArgs, flows: u32) -> u32 {
    if options.services > 1 { flows.saturating_add(flows / (8 * options.services)) } else { flows }
}

/// The configuration of the gateway.
pub(super) fn config(options: &BenchArgs, family: Family) -> Config {
    let port = |name: &str, mac: Mac, mtu: u16, address: &str| PortConfig {
        name: name.into(),
        mac,
        mtu,
        addresses: if options.vlan { Vec::new() } else { address.parse().into_iter().collect() },
        twin: false,
    };
    let mtu = cluster_mtu(options.mode);
    let flows = if options.snat_load.is_some() {
        // Live flows stay, however much time is simulated.
        let max_per_worker = with_room(options, u32::try_from(snat_ports(options, family)).unwrap_or(u32::MAX));
        let life = Duration::from_secs(1 << 25);
        FlowLimits { max_per_worker: max_per_worker.max(1024), tcp_established: life, udp: life, ..FlowLimits::default() }
    } else {
        // With `--new-flows` enough of the table stays free, and `--flood` is to fill it.
        let all = if options.new_flows || options.flood { options.flows } else { with_room(options, options.flows) };
        FlowLimits { max_per_worker: all.max(1024), ..FlowLimits::default() }
    };
    Config {
        ports: vec![
            port("uplink", UPLINK_MAC, 1500, uplink_net(family)),
            port("cluster", CLUSTER_MAC, mtu, cluster_net(options.mode, family)),
        ],
        snat: snat_addresses(options, family),
        node_port_addresses: Vec::new(),
        flows,
        shared_snat: false,
        targets_max: dataplane::flow::TARGETS_MAX,
        tunnel: Tunnel { sources: tunnel_source(options.mode, family).into_iter().collect(), ..Tunnel::default() },
    }
}

/// The network: clients are behind the routers of one side, backends behind those of the other. In mode `dsr` backends
/// are on the link.
pub(super) fn network(options: &BenchArgs, family: Family) -> Network {
    let (clients, uplink, backends, cluster) = match family {
        Family::V4 => ("0.0.0.0/0", "192.0.2.0", "172.16.0.0/12", "192.168.0.0"),
        Family::V6 => ("::/0", "2001:db8:ffff::", "fd00:0:0:1::/64", "fd00::"),
    };
    let routes = |to: &str, net: &str, port: PortIndex| -> Vec<(Route, Neighbour)> {
        let route = |n: u8| {
            let (link, via) = (link(options, port), router(net, n)?);
            let neighbour = Neighbour { link, address: via, mac: router_mac(n) };
            Some((Route { to: to.parse().ok()?, via: Some(via), link, weight: 1 }, neighbour))
        };
        (0..options.ecmp).filter_map(route).collect()
    };
    let to_clients = routes(clients, uplink, UPLINK);
    let (routes, neighbours) = if options.mode == BenchMode::Dsr {
        let (mut routes, routers): (Vec<_>, Vec<_>) = to_clients.into_iter().unzip();
        routes.extend(backends.parse().ok().map(|to| Route { to, via: None, link: link(options, CLUSTER), weight: 1 }));
        (routes, routers.into_iter().chain(on_link(options, family)).collect())
    } else {
        to_clients.into_iter().chain(routes(backends, cluster, CLUSTER)).unzip()
    };
    let vlan = |port: PortIndex, mtu: u16, address: &str| VlanLink {
        link: link(options, port),
        mtu,
        addresses: address.parse().into_iter().collect(),
    };
    let vlans = if options.vlan {
        let mtu = cluster_mtu(options.mode);
        vec![vlan(UPLINK, 1500, uplink_net(family)), vlan(CLUSTER, mtu, cluster_net(options.mode, family))]
    } else {
        Vec::new()
    };
    Network { routes, neighbours, vlans, ..Network::default() }
}

/// Address of a router in the network of its side.
fn router(net: &str, n: u8) -> Option<IpAddr> {
    Some(match net.parse().ok()? {
        IpAddr::V4(net) => Ipv4Addr::from(u32::from(net) + 1 + u32::from(n)).into(),
        IpAddr::V6(net) => Ipv6Addr::from(u128::from(net) + 1 + u128::from(n)).into(),
    })
}

/// All backends, as neighbours.
fn on_link(options: &BenchArgs, family: Family) -> impl Iterator<Item = Neighbour> {
    let (each, link) = (options.backends, link(options, CLUSTER));
    let all = (0..options.services).flat_map(move |service| (0..each).map(move |n| (service, n)));
    all.map(move |(service, n)| Neighbour {
        link,
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
    let protocol = match options.protocol {
        BenchProtocol::Tcp => Protocol::Tcp,
        BenchProtocol::Udp => Protocol::Udp,
    };
    let backend = |b| Backend {
        address: SocketAddr::new(backend(family, n, b, options.backends), backend_port),
        weight: 1,
        state: BackendState::Active,
    };
    let port = ServicePort {
        vips: vec![vip(family, n)],
        backends: (0..options.backends).map(backend).collect(),
        ..ServicePort::new(protocol, family, VIP_PORT, MaglevSpec { size, seed: 0, hash_version: MAGLEV_HASH_VERSION })
    };
    Service { mode, ..Service::new(name, vec![port]) }
}

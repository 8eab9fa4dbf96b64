//! The measured gateway: two ports, Services with backends behind a router, enough SNAT addresses for the flows. With
//! `--mix` one of the ports has all the traffic. Addresses of frontends are those that RFC 2544 and RFC 5180 reserve for
//! benchmarks.
//!
//! Not here: addresses of flows, Services and routers (`part`).

mod part;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use dataplane::{
    BURST, Config, FlowLimits, Link, Mac, Neighbour, Network, PortConfig, PortIndex, Route, TagKind, Tunnel, Vlan, VlanLink,
};
use proto::limits::{MAGLEV_ENTRIES_AT_CREATION, MAGLEV_HASH_VERSION, MAGLEV_SIZES};
use proto::{Backend, BackendState, Family, Generation, MaglevSpec, Mode, Protocol, Service, ServiceName, ServicePort, State};

use super::error::BenchError;
use crate::args::{BenchArgs, BenchDirection, BenchFamily, BenchIo, BenchMode, BenchProtocol, BenchState};
pub(super) use part::{Part, RARE_ONE_IN, Side};
use part::{VIP_PORT, port_mac};

/// Seed of the workers' tables: figures repeat.
pub(super) const SEED: u64 = 0x5bd1_e995_9e37_79b9;
/// Port of the backends in modes that rewrite the destination.
pub(super) const BACKEND_PORT: u16 = 8080;

/// SNAT ports of one address towards one backend: all but the privileged ones.
const SNAT_PORTS: u64 = 64_512;
/// SNAT addresses that the engine takes of one family.
const SNAT_ADDRESSES_MAX: u64 = 8;

/// Ethernet address of a router: each side has as many as there are next hops.
pub(super) const fn router_mac(n: u8) -> Mac {
    Mac([2, 0, 0, 0, n, 1])
}

/// The gateway of a run, and the parts of its traffic.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    /// As asked for; with `--snat-load` the number of flows follows from the SNAT ports.
    pub(super) options: BenchArgs,
    pub(super) parts: Vec<Part>,
}

/// A new flow of `--snat-load` takes one SNAT port in this many, in each batch.
const BATCH_OF_PORTS: u64 = 100;
/// Batches of `--snat-load` after which tuples are used again.
const BATCHES_OF_TUPLES: u64 = 4;

impl Scenario {
    pub(super) fn new(options: &BenchArgs) -> Self {
        let mut scenario = Self { options: options.clone(), parts: Part::all(options) };
        if let Some(load) = options.snat_load {
            let flows = scenario.snat_ports() * u64::from(load) / 100;
            scenario.options.flows = u32::try_from(flows).unwrap_or(u32::MAX);
            scenario.parts = Part::all(&scenario.options);
            let tuples = u32::try_from(scenario.batch() * BATCHES_OF_TUPLES).unwrap_or(u32::MAX);
            for part in &mut scenario.parts {
                part.short_flows = part.flows.end..part.flows.end.saturating_add(tuples);
            }
        }
        scenario
    }

    /// The part of a flow.
    pub(super) fn part_of(&self, flow: u32) -> Option<usize> {
        self.parts.iter().position(|part| part.flows.contains(&flow) || part.short_flows.contains(&flow))
    }

    /// Whether there are Services: in mode `none` the harness is alone.
    pub(super) fn has_services(&self) -> bool {
        self.parts.iter().any(|part| part.mode_of_services().is_some())
    }

    /// Whether flows come and go in some part while none of them stays.
    pub(super) fn comes_and_goes(&self) -> bool {
        comes_and_goes(&self.options)
    }

    /// How many flows that come and go there is room for.
    pub(super) fn room_for_short_flows(&self) -> u32 {
        match (self.comes_and_goes(), self.options.mix) {
            (true, _) => self.options.flows,
            (_, true) => part::short_flows_of_mix(&self.options),
            _ => 0,
        }
    }

    /// The side that packets from this side are fed into: with one port it has both.
    pub(super) fn feeds(&self, side: Side) -> Side {
        if self.options.mix { Side::Uplink } else { side }
    }

    /// The sides that are fed, in turn.
    pub(super) fn sides(&self) -> &'static [Side] {
        match direction(&self.options) {
            _ if self.options.mix => &[Side::Uplink],
            BenchDirection::ToBackend => &[Side::Uplink],
            BenchDirection::ToClient => &[Side::Cluster],
            BenchDirection::Both => &Side::BOTH,
        }
    }

    /// SNAT addresses of a family, only for mode `nat`. All parts have the same ones.
    pub(super) fn snat_addresses(&self, family: Family) -> Vec<IpAddr> {
        let of_parts = self.parts.iter().filter(|part| part.mode == BenchMode::Nat && part.family == family);
        let Some(count) = of_parts.map(|part| snat_addresses_of(&self.options, part)).max() else { return Vec::new() };
        (0..)
            .take(usize::try_from(count.clamp(1, SNAT_ADDRESSES_MAX)).unwrap_or(1))
            .map(|n: u32| match family {
                Family::V4 => IpAddr::from(Ipv4Addr::from(0xc613_0100 + n)), // 198.19.1.0
                Family::V6 => Ipv6Addr::from((0xfd00_0000_0000_000a_u128 << 64) + u128::from(n)).into(),
            })
            .collect()
    }

    /// Number of SNAT ports towards all backends of the only part.
    fn snat_ports(&self) -> u64 {
        let of_part = |part: &Part| self.snat_addresses(part.family).len() as u64 * SNAT_PORTS * backends_of(part);
        self.parts.iter().map(of_part).sum()
    }

    /// New flows of a batch of `--snat-load`.
    pub(super) fn batch(&self) -> u64 {
        (self.snat_ports() / BATCH_OF_PORTS).max(BURST as u64)
    }

    /// Source of tunnels of a family: an own address of the gateway, without a tag where there is one.
    pub(super) fn tunnel_source(&self, family: Family) -> Option<IpAddr> {
        let of_family = self.parts.iter().filter(|part| part.family == family && !part.is_on_link);
        let (address, _) = of_family.min_by_key(|part| part.is_tagged)?.own_net(Side::Cluster).split_once('/')?;
        address.parse().ok()
    }
}

/// Backends of all Services of a part.
fn backends_of(part: &Part) -> u64 {
    u64::from(part.services.end - part.services.start) * u64::from(part.backends)
}

/// SNAT addresses that the flows of a part need: with twice as many ports as flows that stay, none of many pools runs out.
/// Of 100 flows that come and go 60 are live, and their ports rest for longer than the flows live (`timing`).
fn snat_addresses_of(options: &BenchArgs, part: &Part) -> u64 {
    let per_address = SNAT_PORTS * backends_of(part);
    if let Some(load) = options.snat_load {
        // The flows that hold ports are as many as the ports ask for, so the nearest number will do.
        return (u64::from(options.flows) * 100 / u64::from(load) + per_address / 2) / per_address;
    }
    // Tuples of flows that come and go are twice as many as such flows.
    let ports_for_100_tuples = if options.flood { 100 } else { 180 };
    let wanted = part.flows.len() as u64 * 2 + part.short_flows.len() as u64 * ports_for_100_tuples / 100;
    wanted.div_ceil(per_address)
}

/// The directions that are measured.
pub(super) fn direction(options: &BenchArgs) -> BenchDirection {
    let is_two_way = options.mode.of_services().is_none_or(Mode::is_two_way);
    let have_replies = is_two_way && options.state == BenchState::Established && !comes_and_goes(options);
    options.direction.unwrap_or(if have_replies { BenchDirection::Both } else { BenchDirection::ToBackend })
}

/// Whether all flows are opened and reclaimed all the time, but for those of `--snat-load`.
const fn comes_and_goes(options: &BenchArgs) -> bool {
    options.new_flows || options.flood
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
    let comes_and_goes = comes_and_goes(options);
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

/// The link of a part on a side.
fn link(part: &Part, side: Side) -> Link {
    let port = part.port(side);
    let vlan = part.vlan(side).and_then(|id| Vlan::NONE.with(TagKind::Customer, id));
    vlan.map_or(port.into(), |vlan| Link::new(port, vlan))
}

/// MTU of a side: in tunnel modes the largest frames of clients fit with the headers in front. The frames of `--mix` are
/// short.
fn mtu(part: &Part, side: Side) -> u16 {
    let is_longer = matches!(part.mode, BenchMode::Ipip | BenchMode::Gue) && side == Side::Cluster && !part.is_one_port;
    if is_longer { 1600 } else { 1500 }
}

/// How many flows the table takes so that each service gets its part of these: where several share it, one with eight times
/// as many as are free gets no more (docs/internals/decisions/0087-fair-shares.md).
const fn with_room(options: &BenchArgs, flows: u32) -> u32 {
    if options.services > 1 { flows.saturating_add(flows / (8 * options.services)) } else { flows }
}

/// The configuration of the gateway.
pub(super) fn config(scenario: &Scenario) -> Config {
    let port = |side: Side| {
        let index = PortIndex(side as u8);
        let of_parts = || scenario.parts.iter().flat_map(|part| Side::BOTH.map(|side| (part, side)));
        let of_port = || of_parts().filter(|(part, side)| part.port(*side) == index);
        let untagged = of_port().filter(|(part, _)| !part.is_tagged);
        let mut addresses: Vec<_> = untagged.filter_map(|(part, side)| part.own_net(side).parse().ok()).collect();
        addresses.sort_unstable();
        addresses.dedup();
        PortConfig {
            name: if side == Side::Uplink { "uplink" } else { "cluster" }.into(),
            mac: port_mac(index),
            mtu: of_port().map(|(part, side)| mtu(part, side)).max().unwrap_or(1500),
            addresses,
            twin: false,
        }
    };
    let families = [Family::V4, Family::V6];
    Config {
        ports: Side::BOTH.map(port).into(),
        snat: families.into_iter().flat_map(|family| scenario.snat_addresses(family)).collect(),
        node_port_addresses: Vec::new(),
        flows: flow_limits(scenario),
        shared_snat: false,
        targets_max: dataplane::flow::TARGETS_MAX,
        tunnel: Tunnel {
            sources: families.into_iter().filter_map(|family| scenario.tunnel_source(family)).collect(),
            ..Tunnel::default()
        },
    }
}

fn flow_limits(scenario: &Scenario) -> FlowLimits {
    let options = &scenario.options;
    if options.snat_load.is_some() {
        // Live flows stay, however much time is simulated.
        let max_per_worker = with_room(options, u32::try_from(scenario.snat_ports()).unwrap_or(u32::MAX));
        let life = Duration::from_secs(1 << 25);
        return FlowLimits {
            max_per_worker: max_per_worker.max(1024),
            tcp_established: life,
            udp: life,
            ..FlowLimits::default()
        };
    }
    // With `--new-flows` and `--mix` enough of the table stays free, and `--flood` is to fill it.
    let all = match scenario.room_for_short_flows() {
        0 => with_room(options, options.flows),
        short if options.mix => options.flows.saturating_add(short),
        short => short,
    };
    FlowLimits { max_per_worker: all.max(1024), ..FlowLimits::default() }
}

/// The network: clients are behind the routers of one side, backends behind those of the other. In mode `dsr` backends
/// are on the link.
pub(super) fn network(scenario: &Scenario) -> Network {
    let mut network = Network::default();
    for part in &scenario.parts {
        for side in Side::BOTH {
            add_routes(&mut network, part, side);
            if part.is_tagged
                && let Ok(address) = part.own_net(side).parse()
            {
                add_vlan(&mut network, VlanLink { link: link(part, side), mtu: mtu(part, side), addresses: vec![address] });
            }
        }
    }
    network.routes.sort_unstable();
    network.routes.dedup();
    network.neighbours.sort_unstable();
    network.neighbours.dedup();
    network
}

/// Adds the routes of a part on a side, with the routers or backends that are their next hops.
fn add_routes(network: &mut Network, part: &Part, side: Side) {
    let link = link(part, side);
    let Ok(to) = part.destination(side).parse() else { return };
    if side == Side::Cluster && part.is_on_link {
        network.routes.push(Route { to, via: None, link, weight: 1 });
        let all = part.services.clone().flat_map(|service| (0..part.backends).map(move |n| (service, n)));
        network.neighbours.extend(all.map(|(service, n)| Neighbour {
            link,
            address: part.backend(service, n),
            mac: part.backend_mac(service, n),
        }));
        return;
    }
    for n in 0..part.next_hops {
        let Some(address) = part.router(side, n) else { continue };
        network.routes.push(Route { to, via: Some(address), link, weight: 1 });
        network.neighbours.push(Neighbour { link, address, mac: router_mac(n) });
    }
}

/// Adds a VLAN, or its addresses where it exists.
fn add_vlan(network: &mut Network, vlan: VlanLink) {
    match network.vlans.iter_mut().find(|known| known.link == vlan.link) {
        Some(known) => {
            known.addresses.extend(vlan.addresses);
            known.addresses.sort_unstable();
            known.addresses.dedup();
        }
        None => network.vlans.push(vlan),
    }
}

/// The services.
pub(super) fn state(scenario: &Scenario) -> State {
    let services = scenario.parts.iter().flat_map(|part| {
        part.services.clone().map(move |n| {
            let name = ServiceName::new("bench", &format!("service-{n:05}"));
            (name.clone(), Arc::new(service(part, n, name)))
        })
    });
    State { generation: Generation { epoch: "bench".into(), counter: 1 }, services: services.collect(), pools: Vec::new() }
}

fn service(part: &Part, n: u32, name: ServiceName) -> Service {
    let wanted = part.backends.saturating_mul(MAGLEV_ENTRIES_AT_CREATION);
    let size = MAGLEV_SIZES.into_iter().find(|size| *size >= wanted).unwrap_or(655_373);
    let mode = part.mode_of_services().unwrap_or(Mode::Nat);
    let backend_port = if mode.is_two_way() { BACKEND_PORT } else { VIP_PORT };
    let protocol = match part.protocol {
        BenchProtocol::Tcp => Protocol::Tcp,
        BenchProtocol::Udp => Protocol::Udp,
    };
    let backend =
        |b| Backend { address: SocketAddr::new(part.backend(n, b), backend_port), weight: 1, state: BackendState::Active };
    let port = ServicePort {
        vips: vec![part::vip(part.family, n)],
        backends: (0..part.backends).map(backend).collect(),
        ..ServicePort::new(protocol, part.family, VIP_PORT, MaglevSpec { size, seed: 0, hash_version: MAGLEV_HASH_VERSION })
    };
    Service { mode, ..Service::new(name, vec![port]) }
}

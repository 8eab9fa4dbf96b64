//! A part of the traffic: flows of one mode and family, with Services of their own. A run has one part, with `--mix` fourteen
//! that differ by mode, family and where backends are.
//!
//! **Invariant:** no two parts share a flow number or the number of a Service. Addresses follow from these numbers, so each
//! address tells its part.
//!
//! Not here: the gateway that forwards them (`scenario`), and what their packets say (`traffic`).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use dataplane::{Mac, PortIndex};
use proto::{Family, Mode};

use crate::args::{BenchArgs, BenchFamily, BenchMode, BenchProtocol, FrameSize};

/// VLANs of the two sides, where frames carry tags.
const UPLINK_VLAN: u16 = 100;
const CLUSTER_VLAN: u16 = 200;
/// Port of the frontends.
pub(super) const VIP_PORT: u16 = 80;

/// Ethernet address of a port of the gateway.
pub(super) const fn port_mac(port: PortIndex) -> Mac {
    Mac([2, 0, 0, 0, 1, port.0])
}

/// A side of the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The side of the clients.
    Uplink,
    /// The side of the backends.
    Cluster,
}

impl Side {
    pub(crate) const BOTH: [Self; 2] = [Self::Uplink, Self::Cluster];
}

/// A part of the traffic.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) mode: BenchMode,
    pub(crate) family: Family,
    /// Whether frames carry a VLAN tag on both sides.
    pub(crate) is_tagged: bool,
    /// Whether backends are on the link, without a router.
    pub(crate) is_on_link: bool,
    /// Next hops of equal cost to clients, and to backends that are not on the link.
    pub(crate) next_hops: u8,
    pub(crate) protocol: BenchProtocol,
    pub(crate) size: FrameSize,
    pub(crate) dont_fragment: bool,
    /// Whether one port of the gateway has both sides.
    pub(crate) is_one_port: bool,
    /// Numbers of the flows that exist all the time.
    pub(crate) flows: Range<u32>,
    /// Numbers of the flows that come and go.
    pub(crate) short_flows: Range<u32>,
    /// Numbers of the flows of which datagrams arrive in fragments.
    pub(crate) fragmented: Range<u32>,
    /// Numbers of the Services.
    pub(crate) services: Range<u32>,
    /// Backends of each Service.
    pub(crate) backends: u32,
    /// Of [`SHARES`] packets of the run, those of this part.
    pub(crate) share: u32,
}

/// A part of `--mix`.
struct MixedPart {
    mode: BenchMode,
    family: BenchFamily,
    backends: BackendsAt,
    share: u32,
}

/// Where the backends of a part are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BackendsAt {
    Link,
    Routers,
    /// Behind a router in a VLAN; clients are in another VLAN.
    Vlan,
}

/// The sum of the shares.
const SHARES: u32 = 20;
/// Of so many packets of `--mix` one is a SYN, one a FIN, and one a fragment.
pub(crate) const RARE_ONE_IN: usize = 100;

const fn mixed(mode: BenchMode, family: BenchFamily, backends: BackendsAt, share: u32) -> MixedPart {
    MixedPart { mode, family, backends, share }
}

/// The parts of `--mix`, in the shares of stage `mixed` of `.ci/bench-guard`: 60 % `nat` and 10 % of each other mode, 60 %
/// IPv4, a quarter with VLAN tags.
const MIX: [MixedPart; 14] = [
    mixed(BenchMode::Nat, BenchFamily::V4, BackendsAt::Link, 3),
    mixed(BenchMode::Nat, BenchFamily::V4, BackendsAt::Routers, 3),
    mixed(BenchMode::Nat, BenchFamily::V4, BackendsAt::Vlan, 2),
    mixed(BenchMode::Nat, BenchFamily::V6, BackendsAt::Link, 1),
    mixed(BenchMode::Nat, BenchFamily::V6, BackendsAt::Routers, 2),
    mixed(BenchMode::Nat, BenchFamily::V6, BackendsAt::Vlan, 1),
    mixed(BenchMode::Dnat, BenchFamily::V4, BackendsAt::Link, 1),
    mixed(BenchMode::Dnat, BenchFamily::V6, BackendsAt::Vlan, 1),
    mixed(BenchMode::Dsr, BenchFamily::V4, BackendsAt::Link, 1),
    mixed(BenchMode::Dsr, BenchFamily::V6, BackendsAt::Link, 1),
    mixed(BenchMode::Ipip, BenchFamily::V4, BackendsAt::Vlan, 1),
    mixed(BenchMode::Ipip, BenchFamily::V6, BackendsAt::Routers, 1),
    mixed(BenchMode::Gue, BenchFamily::V4, BackendsAt::Routers, 1),
    mixed(BenchMode::Gue, BenchFamily::V6, BackendsAt::Routers, 1),
];
/// Next hops of `--mix` where frames carry no tag.
const MIX_NEXT_HOPS: u8 = 4;
/// Flows that come and go with `--mix`, at least: with fewer, seconds of the simulated time would pass between the two
/// fragments of a datagram, and the engine forgets a datagram after two (`dataplane::fragment`).
const SHORT_FLOWS_MIN: u32 = 4096;
/// Flows of a part of `--mix` with fragments at most: consecutive flows have as many different clients, so no two
/// datagrams have the same addresses and identification.
const FRAGMENTED_MAX: u32 = CLIENTS_OF_A_PORT;

/// Clients that share a port number.
const CLIENTS_OF_A_PORT: u32 = 251;
/// Port numbers of clients, from 1024 on.
const CLIENT_PORTS: u32 = 60_000;

const fn family(family: BenchFamily) -> Family {
    match family {
        BenchFamily::V4 => Family::V4,
        BenchFamily::V6 => Family::V6,
    }
}

impl Part {
    /// The parts of a run.
    pub(super) fn all(options: &BenchArgs) -> Vec<Self> {
        if options.mix { Self::mix(options) } else { vec![Self::single(options)] }
    }

    /// The only part. With `--new-flows` and `--flood` there are twice as many tuples as flows that may live, so that each
    /// is new again when it is next used. The other flows of `--snat-load` depend on the SNAT ports (`scenario`).
    fn single(options: &BenchArgs) -> Self {
        let come_and_go = (options.new_flows || options.flood) && options.snat_load.is_none();
        let [flows, short_flows] = if come_and_go { [0, options.flows.saturating_mul(2)] } else { [options.flows, 0] };
        Self {
            mode: options.mode,
            family: family(options.family),
            is_tagged: options.vlan,
            is_on_link: options.mode == BenchMode::Dsr,
            next_hops: options.ecmp,
            protocol: options.protocol,
            size: options.size,
            dont_fragment: !options.no_df,
            is_one_port: false,
            flows: 0..flows,
            short_flows: flows..flows.saturating_add(short_flows),
            fragmented: 0..0,
            services: 0..options.services,
            backends: options.backends,
            share: SHARES,
        }
    }

    fn mix(options: &BenchArgs) -> Vec<Self> {
        let part_of =
            |flows: u32, share: u32| u32::try_from(u64::from(flows) * u64::from(share) / u64::from(SHARES)).unwrap_or(0).max(1);
        let (all_short, mut services, mut next) = (short_flows_of_mix(options) * 2, 0, 0);
        let mut parts: Vec<Self> = Vec::new();
        for MixedPart { mode, family: of_part, backends, share } in &MIX {
            let is_tagged = *backends == BackendsAt::Vlan;
            let flows = next..next + part_of(options.flows, *share);
            next = flows.end;
            parts.push(Self {
                mode: *mode,
                family: family(*of_part),
                is_tagged,
                is_on_link: *backends == BackendsAt::Link,
                next_hops: if is_tagged { 1 } else { MIX_NEXT_HOPS },
                is_one_port: true,
                fragmented: flows.start..flows.end.min(flows.start + FRAGMENTED_MAX),
                flows,
                services: services..services + options.services,
                share: *share,
                ..Self::single(options)
            });
            services += options.services;
        }
        for part in &mut parts {
            part.short_flows = next..next + part_of(all_short, part.share);
            next = part.short_flows.end;
        }
        parts
    }

    /// The mode of its Services; none for the harness alone.
    pub(crate) fn mode_of_services(&self) -> Option<Mode> {
        self.mode.of_services()
    }

    /// Whether replies pass the gateway.
    pub(crate) fn is_two_way(&self) -> bool {
        self.mode_of_services().is_none_or(Mode::is_two_way)
    }

    /// The Service of a flow.
    pub(crate) fn service_of(&self, flow: u32) -> u32 {
        self.services.start + flow % (self.services.end - self.services.start)
    }

    /// The frontend of a flow.
    pub(crate) fn frontend(&self, flow: u32) -> (IpAddr, u16) {
        (vip(self.family, self.service_of(flow)), VIP_PORT)
    }

    /// The client of a flow: a unique address and port.
    pub(crate) fn client(&self, flow: u32) -> (IpAddr, u16) {
        let port = 1024 + (flow % CLIENT_PORTS) as u16; // below 61,024
        let host = flow / CLIENT_PORTS * CLIENTS_OF_A_PORT + flow % CLIENTS_OF_A_PORT; // below 2^23: at most 2^30 numbers
        let address = match (self.family, self.is_tagged) {
            (Family::V4, false) => Ipv4Addr::from(0x0a00_0000 + host).into(), // 10.0.0.0/9
            (Family::V4, true) => Ipv4Addr::from(0x0a80_0000 + host).into(),  // 10.128.0.0/9
            (Family::V6, false) => Ipv6Addr::from((0x2001_0db8u128 << 96) + u128::from(host)).into(),
            (Family::V6, true) => Ipv6Addr::from((0x2001_0db8_4000u128 << 80) + u128::from(host)).into(),
        };
        (address, port)
    }

    /// Index of a backend among those of all Services.
    fn backend_index(&self, service: u32, n: u32) -> u32 {
        service * self.backends + n
    }

    /// A backend of a Service.
    pub(crate) fn backend(&self, service: u32, n: u32) -> IpAddr {
        let index = self.backend_index(service, n);
        let subnet = match (self.is_on_link, self.is_tagged) {
            (false, false) => 1_u128,
            (true, _) => 2,
            (false, true) => 3,
        };
        match (self.family, subnet) {
            (Family::V4, 1) => Ipv4Addr::from(0xac10_0000 + index).into(), // 172.16.0.0/12
            (Family::V4, 2) => Ipv4Addr::from(0x6440_0000 + index).into(), // 100.64.0.0/11
            (Family::V4, _) => Ipv4Addr::from(0x6460_0000 + index).into(), // 100.96.0.0/11
            (Family::V6, _) => Ipv6Addr::from((0xfd00u128 << 112) + (subnet << 64) + u128::from(index)).into(),
        }
    }

    /// Ethernet address of a backend on the link.
    pub(crate) fn backend_mac(&self, service: u32, n: u32) -> Mac {
        let [a, b, c, d] = self.backend_index(service, n).to_be_bytes();
        Mac([2, 1, a, b, c, d])
    }

    /// The networks that clients and backends are in, other than those of the links.
    pub(super) fn destination(&self, side: Side) -> &'static str {
        match (side, self.family, self.is_tagged, self.is_on_link) {
            (Side::Uplink, Family::V4, false, _) => "0.0.0.0/0",
            (Side::Uplink, Family::V4, true, _) => "10.128.0.0/9",
            (Side::Uplink, Family::V6, false, _) => "::/0",
            (Side::Uplink, Family::V6, true, _) => "2001:db8:4000::/48",
            (Side::Cluster, Family::V4, _, true) => "100.64.0.0/11",
            (Side::Cluster, Family::V4, true, false) => "100.96.0.0/11",
            (Side::Cluster, Family::V4, false, false) => "172.16.0.0/12",
            (Side::Cluster, Family::V6, _, true) => "fd00:0:0:2::/64",
            (Side::Cluster, Family::V6, true, false) => "fd00:0:0:3::/64",
            (Side::Cluster, Family::V6, false, false) => "fd00:0:0:1::/64",
        }
    }

    /// The gateway's own address on a side, with the prefix of its link; on a link
    /// of backends that of theirs.
    pub(super) fn own_net(&self, side: Side) -> &'static str {
        match (side, self.family, self.is_tagged, self.is_on_link) {
            (Side::Uplink, Family::V4, false, _) => "192.0.2.254/24",
            (Side::Uplink, Family::V4, true, _) => "198.51.100.254/24",
            (Side::Uplink, Family::V6, false, _) => "2001:db8:ffff::fffe/64",
            (Side::Uplink, Family::V6, true, _) => "2001:db8:fffe::fffe/64",
            (Side::Cluster, Family::V4, _, true) => "100.95.255.254/11",
            (Side::Cluster, Family::V4, false, false) => "192.168.0.254/16",
            (Side::Cluster, Family::V4, true, false) => "198.19.128.254/24",
            (Side::Cluster, Family::V6, _, true) => "fd00:0:0:2:ffff::2/64",
            (Side::Cluster, Family::V6, false, false) => "fd00::fffe/64",
            (Side::Cluster, Family::V6, true, false) => "fd00:0:0:f::fffe/64",
        }
    }

    /// A router on a side: the first ones of the gateway's own network there.
    pub(super) fn router(&self, side: Side, n: u8) -> Option<IpAddr> {
        let (own, _) = self.own_net(side).split_once('/')?;
        let first = |host: u32| host + 1 + u32::from(n);
        Some(match own.parse().ok()? {
            IpAddr::V4(own) => Ipv4Addr::from(first(u32::from(own) & 0xffff_ff00)).into(),
            IpAddr::V6(own) => Ipv6Addr::from((u128::from(own) >> 64 << 64) + u128::from(first(0))).into(),
        })
    }

    /// The port of a side.
    pub(crate) fn port(&self, side: Side) -> PortIndex {
        PortIndex(u8::from(side == Side::Cluster && !self.is_one_port))
    }

    /// Ethernet address of the gateway on a side.
    pub(crate) fn own_mac(&self, side: Side) -> Mac {
        port_mac(self.port(side))
    }

    /// The VLAN of a side.
    pub(crate) fn vlan(&self, side: Side) -> Option<u16> {
        self.is_tagged.then_some(if side == Side::Uplink { UPLINK_VLAN } else { CLUSTER_VLAN })
    }
}

/// Flows that come and go with `--mix` for which there is room: as many as stay, so that not much more time is simulated
/// for a packet than one takes.
pub(super) fn short_flows_of_mix(options: &BenchArgs) -> u32 {
    options.flows.max(SHORT_FLOWS_MIN)
}

/// The VIP of a Service.
pub(super) fn vip(family: Family, service: u32) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::from(0xc612_0000 + service + 1).into(), // 198.18.0.0/16
        Family::V6 => Ipv6Addr::from((0x2001_0200u128 << 96) + u128::from(service) + 1).into(),
    }
}

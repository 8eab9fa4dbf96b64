//! Writes the configuration of a routing daemon that announces the VIPs of `routed` pools by BGP, out of the settings
//! of a live gateway.
//!
//! Invariant: only routes of the gateway leave, and none comes in. The texts were tried with BIRD 2.0.12 and FRR 8.4
//! (tests/routers.rs). Not here: how VIPs become routes of Linux (`netlink` of the gateway).

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};

use clap::{Args, Subcommand};
use ipnet::IpNet;
use objects::documents::from_yaml;
use proto::limits::{VIP_ROUTE_DRAIN_METRIC, VIP_ROUTE_METRIC};
use serde::Deserialize;

/// Linux's table `main`.
const MAIN_TABLE: u32 = 254;

/// The routing daemons.
#[derive(Clone, Debug, Subcommand)]
pub enum RoutingDaemon {
    /// Print a configuration of BIRD 2 that announces the gateway's VIPs of `routed` pools by BGP.
    Bird(BgpArguments),
    /// Print a configuration of FRR that does the same. The gateway needs `announce: {routeTable: 254}`.
    Frr(BgpArguments),
}

/// What the gateway does not know.
#[derive(Clone, Debug, Args)]
pub struct BgpArguments {
    /// The number of the gateway's autonomous system.
    #[arg(long, value_name = "AS", value_parser = as_number)]
    pub local_as: u32,
    /// A router and its autonomous system; once for each router and family.
    #[arg(long = "peer", value_name = "ADDRESS=AS", required = true, value_parser = peer)]
    pub peers: Vec<BgpNeighbour>,
    /// The router ID. Default: the first IPv4 address of the gateway's ports.
    #[arg(long, value_name = "IPV4")]
    pub router_id: Option<Ipv4Addr>,
    /// The gateway's address towards the routers, if sessions use an interface that is not the gateway's; once for each
    /// family.
    #[arg(long = "next-hop", value_name = "ADDRESS")]
    pub next_hops: Vec<IpAddr>,
    /// A BGP community of all VIPs, A:B; once for each.
    #[arg(long = "community", value_name = "A:B", value_parser = community)]
    pub communities: Vec<(u16, u16)>,
    /// The multi-exit discriminator (MED) of all VIPs.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub med: u32,
    /// Watch the routers by BFD; they must do the same.
    #[arg(long)]
    pub bfd: bool,
    /// Interval of BFD, milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 300, requires = "bfd", value_parser = clap::value_parser!(u32).range(10..=60_000))]
    pub bfd_interval: u32,
    /// Number of intervals without a packet after which BFD takes a router for dead.
    #[arg(long, value_name = "N", default_value_t = 3, requires = "bfd", value_parser = clap::value_parser!(u8).range(2..))]
    pub bfd_multiplier: u8,
}

/// A BGP neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BgpNeighbour {
    address: IpAddr,
    remote_as: u32,
}

/// The gateway's settings do not fit: exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum RoutingError {
    /// The answer is not that of a gateway.
    #[error(
        "the answer has no `announce`, so it is not a gateway's: run this on the gateway, or name its socket with \
         --server unix:PATH ({0})"
    )]
    NotAGateway(String),
    /// FRR needs another table.
    #[error(
        "the gateway puts its routes into table {0}, where FRR does not notice that they go: set \
         `announce: {{routeTable: {MAIN_TABLE}}}` in its configuration and restart it, or use BIRD"
    )]
    NotMain(u32),
    /// Two next hops of one family.
    #[error("found next hops {0} and {1}, expected one for each family")]
    TwoNextHops(IpAddr, IpAddr),
    /// There is no router ID.
    #[error("no port of the gateway has an IPv4 address that could be the router ID: add --router-id IPV4")]
    NoRouterId,
}

impl BgpArguments {
    /// The next hop for VIPs of a family, other than the address of the session.
    fn next_hop(&self, is_ipv4: bool) -> Option<IpAddr> {
        self.next_hops.iter().copied().find(|hop| hop.is_ipv4() == is_ipv4)
    }
}

/// The settings of a gateway that matter here.
#[derive(Deserialize)]
struct GatewaySettings {
    name: String,
    ports: Vec<PortAddresses>,
    announce: AnnounceSettings,
}

#[derive(Deserialize)]
struct PortAddresses {
    #[serde(default)]
    addresses: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AnnounceSettings {
    route_table: u32,
    route_protocol: u8,
}

/// The configuration of a routing daemon beside the gateway with the settings `yaml`.
pub(super) fn configuration(daemon: &RoutingDaemon, yaml: &str) -> Result<String, RoutingError> {
    let gateway: GatewaySettings = from_yaml(yaml, 1).map_err(|(_, message)| RoutingError::NotAGateway(message))?;
    let (RoutingDaemon::Bird(bgp) | RoutingDaemon::Frr(bgp)) = daemon;
    let addresses = gateway.ports.iter().flat_map(|port| &port.addresses).filter_map(|text| text.parse::<IpNet>().ok());
    let first = addresses.map(|net| net.addr()).find_map(|ip| if let IpAddr::V4(ip) = ip { Some(ip) } else { None });
    let router_id = bgp.router_id.or(first).ok_or(RoutingError::NoRouterId)?;
    for (n, hop) in bgp.next_hops.iter().enumerate() {
        if let Some(other) = bgp.next_hops[..n].iter().find(|other| other.is_ipv4() == hop.is_ipv4()) {
            return Err(RoutingError::TwoNextHops(*other, *hop));
        }
    }
    let AnnounceSettings { route_table, route_protocol } = gateway.announce;
    let comment = |mark: char, daemon: &str| {
        format!(
            "{mark} {daemon} beside gateway {}: announces its VIPs of `routed` pools (Linux table {route_table}, protocol \
             {route_protocol}) by BGP.\n{mark} Written by sluicectl {}.\n",
            gateway.name,
            env!("CARGO_PKG_VERSION")
        )
    };
    match daemon {
        RoutingDaemon::Bird(bgp) => Ok(comment('#', "BIRD 2") + &bird(bgp, router_id, route_table, route_protocol)),
        RoutingDaemon::Frr(_) if route_table != MAIN_TABLE => Err(RoutingError::NotMain(route_table)),
        RoutingDaemon::Frr(bgp) => Ok(comment('!', "FRR") + &frr(bgp, router_id)),
    }
}

fn bird(bgp: &BgpArguments, router_id: Ipv4Addr, table: u32, protocol: u8) -> String {
    let communities: String = bgp.communities.iter().map(|(a, b)| format!("  bgp_community.add(({a}, {b}));\n")).collect();
    let mut text = format!(
        "router id {router_id};
ipv4 table vips4;
ipv6 table vips6;
protocol device {{ }}

# Routes with metric {VIP_ROUTE_DRAIN_METRIC} are those of a gateway that drains: GRACEFUL_SHUTDOWN (RFC 8326).
filter vips {{
  if krt_source != {protocol} then reject;
  if krt_metric = {VIP_ROUTE_DRAIN_METRIC} then bgp_community.add((65535, 0));
{communities}  bgp_med = {};
  accept;
}}
",
        bgp.med
    );
    for family in [4, 6] {
        let _ = write!(
            text,
            "protocol kernel vips{family}_kernel {{
  kernel table {table};
  learn;
  ipv{family} {{ table vips{family}; import filter vips; export none; }};
}}
"
        );
    }
    if bgp.bfd {
        let (interval, multiplier) = (bgp.bfd_interval, bgp.bfd_multiplier);
        let times = format!("min rx interval {interval} ms; min tx interval {interval} ms; multiplier {multiplier};");
        let _ = writeln!(text, "\nprotocol bfd {{\n  interface \"*\" {{ {times} }};\n}}");
    }
    for (n, BgpNeighbour { address, remote_as }) in (1..).zip(&bgp.peers) {
        let next_hop = bgp.next_hop(address.is_ipv4()).map_or_else(|| "self".to_owned(), |hop| format!("address {hop}"));
        let (family, bfd) = (if address.is_ipv4() { 4 } else { 6 }, if bgp.bfd { "  bfd on;\n" } else { "" });
        let _ = write!(
            text,
            "
protocol bgp router{n} {{
  local as {};
  neighbor {address} as {remote_as};
  connect delay time 2; error wait time 2, 30;
{bfd}  ipv{family} {{ table vips{family}; import none; export all; next hop {next_hop}; }};
}}
",
            bgp.local_as
        );
    }
    text
}

fn frr(bgp: &BgpArguments, router_id: Ipv4Addr) -> String {
    let mut text = "! In /etc/frr/daemons: bgpd=yes, and bfdd=yes for BFD.\n".to_owned();
    if bgp.bfd {
        let (interval, multiplier) = (bgp.bfd_interval, bgp.bfd_multiplier);
        let _ = write!(
            text,
            "bfd
 profile sluice
  receive-interval {interval}
  transmit-interval {interval}
  detect-multiplier {multiplier}
 exit
exit
"
        );
    }
    let local_as = bgp.local_as;
    let _ = write!(
        text,
        "router bgp {local_as}\n bgp router-id {router_id}\n no bgp ebgp-requires-policy\n no bgp default ipv4-unicast\n"
    );
    for BgpNeighbour { address, remote_as } in &bgp.peers {
        let _ = writeln!(text, " neighbor {address} remote-as {remote_as}");
        if bgp.bfd {
            let _ = writeln!(text, " neighbor {address} bfd profile sluice");
        }
    }
    for family in [4, 6] {
        let _ = write!(text, " address-family ipv{family} unicast\n  redistribute kernel route-map SLUICE-VIPS\n");
        for BgpNeighbour { address, .. } in bgp.peers.iter().filter(|peer| peer.address.is_ipv4() == (family == 4)) {
            let _ = write!(text, "  neighbor {address} activate\n  neighbor {address} route-map SLUICE-NONE in\n");
            if bgp.next_hop(address.is_ipv4()).is_some() {
                let _ = writeln!(text, "  neighbor {address} route-map SLUICE-OUT out");
            }
        }
        text.push_str(" exit-address-family\n");
    }
    let given: String = bgp.communities.iter().map(|(a, b)| format!(" {a}:{b}")).collect();
    let med = bgp.med;
    let _ = write!(
        text,
        "exit
! Routes with metric {VIP_ROUTE_DRAIN_METRIC} are those of a gateway that drains: GRACEFUL_SHUTDOWN (RFC 8326).
route-map SLUICE-VIPS permit 10
 match metric {VIP_ROUTE_DRAIN_METRIC}
 set community{given} graceful-shutdown
 set metric {med}
 set origin igp
exit
route-map SLUICE-VIPS permit 20
 match metric {VIP_ROUTE_METRIC}
"
    );
    if !given.is_empty() {
        let _ = writeln!(text, " set community{given}");
    }
    let _ = write!(text, " set metric {med}\n set origin igp\nexit\nroute-map SLUICE-NONE deny 10\nexit\n");
    if !bgp.next_hops.is_empty() {
        text.push_str("route-map SLUICE-OUT permit 10\n");
        for hop in &bgp.next_hops {
            let _ = writeln!(text, " set {} {hop}", if hop.is_ipv4() { "ip next-hop" } else { "ipv6 next-hop global" });
        }
        text.push_str("exit\n");
    }
    text
}

fn as_number(text: &str) -> Result<u32, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "expected a number from 1 to 4294967295".to_owned())
}

fn peer(text: &str) -> Result<BgpNeighbour, String> {
    let parsed = text.split_once('=').and_then(|(address, number)| {
        let remote_as = as_number(number).ok()?;
        Some(BgpNeighbour { address: address.parse().ok()?, remote_as })
    });
    parsed.ok_or_else(|| "expected ADDRESS=AS, such as 192.0.2.1=64513".to_owned())
}

fn community(text: &str) -> Result<(u16, u16), String> {
    let parsed = text.split_once(':').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    parsed.ok_or_else(|| "expected A:B, two numbers up to 65535, such as 64512:100".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::{Arguments, Command};

    const GATEWAY: &str = "name: edge-1\nports:\n  - {name: uplink, addresses: ['2001:db8::2/64', 192.0.2.2/24], mtu: 1500}\n";

    /// What the command line prints for a gateway with these settings in `announce`.
    fn printed(announce: &str, line: &str) -> Result<String, String> {
        let words = ["sluicectl", "config"].into_iter().chain(line.split_whitespace());
        let arguments = Arguments::try_parse_from(words).map_err(|error| error.to_string())?;
        let Command::Config { daemon: Some(daemon) } = arguments.command else { panic!("{line}") };
        configuration(&daemon, &format!("{GATEWAY}{announce}")).map_err(|error| error.to_string())
    }

    const OWN: &str = "announce: {routeTable: 151, routeProtocol: 99, withoutBackends: withdraw}\n";
    const MAIN: &str = "announce: {routeTable: 254, routeProtocol: 150, withoutBackends: withdraw}\n";

    #[test]
    fn bird_reads_the_table_and_protocol_of_the_gateway() {
        let text =
            printed(OWN, "bird --local-as 64512 --peer 192.0.2.1=64513 --peer 2001:db8::1=64513 --community 64512:7").unwrap();
        for part in [
            "router id 192.0.2.2;",
            "kernel table 151;",
            "if krt_source != 99 then reject;",
            "if krt_metric = 65535 then bgp_community.add((65535, 0));",
            "bgp_community.add((64512, 7));",
            "neighbor 192.0.2.1 as 64513;\n",
            "  ipv4 { table vips4; import none; export all; next hop self; };",
            "neighbor 2001:db8::1 as 64513;\n",
            "  ipv6 { table vips6;",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains("bfd"));
        let text = printed(OWN, "bird --local-as 1 --peer 192.0.2.1=2 --bfd --bfd-interval 100 --router-id 10.0.0.1").unwrap();
        assert!(
            text.contains("min rx interval 100 ms; min tx interval 100 ms; multiplier 3;") && text.contains("bfd on;"),
            "{text}"
        );
        assert!(text.contains("router id 10.0.0.1;"), "{text}");
        let text = printed(OWN, "bird --local-as 1 --peer 10.1.0.1=2 --peer fd01::1=2 --next-hop 192.0.2.2").unwrap();
        assert!(text.contains("next hop address 192.0.2.2;") && text.contains("next hop self;"), "{text}");
    }

    #[test]
    fn frr_needs_the_main_table() {
        let line = "frr --local-as 64512 --peer 192.0.2.1=64513 --peer 2001:db8::1=64513 --bfd --med 5";
        let refused = printed(OWN, line).unwrap_err();
        assert!(refused.contains("table 151") && refused.contains("announce: {routeTable: 254}"), "{refused}");
        let text = printed(MAIN, line).unwrap();
        assert_eq!(text.matches("neighbor 2001:db8::1 activate").count(), 1, "{text}");
        assert!(text.contains("neighbor 192.0.2.1 bfd profile sluice") && text.contains(" set metric 5"), "{text}");
        let text = printed(MAIN, "frr --local-as 1 --peer 10.1.0.1=2 --peer fd01::1=2 --next-hop 192.0.2.2").unwrap();
        assert!(
            text.contains("neighbor 10.1.0.1 route-map SLUICE-OUT out") && text.contains("set ip next-hop 192.0.2.2"),
            "{text}"
        );
        assert!(!text.contains("neighbor fd01::1 route-map SLUICE-OUT out"), "{text}");
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let rows = [
            ("bird --peer 192.0.2.1=64513", "--local-as <AS>"),
            ("bird --local-as 64512", "--peer <ADDRESS=AS>"),
            ("bird --local-as 0 --peer 192.0.2.1=64513", "expected a number from 1"),
            ("frr --local-as 64512 --peer 192.0.2.1", "expected ADDRESS=AS"),
            ("frr --local-as 64512 --peer 192.0.2.1=1 --community 70000:1", "expected A:B"),
            ("bird --local-as 1 --peer 192.0.2.1=1 --next-hop 10.0.0.1 --next-hop 10.0.0.2", "one for each family"),
            ("frr --local-as 64512 --peer 192.0.2.1=1 --bfd-interval 100", "--bfd"),
        ];
        for (line, part) in rows {
            let error = printed(MAIN, line).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
        let error = printed("", "bird --local-as 1 --peer 192.0.2.1=2").unwrap_err();
        assert!(error.contains("not a gateway's") && error.contains("--server unix:PATH"), "{error}");
    }
}

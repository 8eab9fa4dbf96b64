//! Writes the configuration of a routing daemon that announces the VIPs of `routed` pools by BGP, out of the settings
//! and the pools of a live gateway.
//!
//! Invariant: only routes of the gateway leave, and none comes in. The texts were tried with BIRD 2.0.12 and FRR 8.4
//! (tests/routers.rs). Not here: how VIPs become routes of Linux (`netlink` of the gateway).

mod bgp;
mod bird;
mod frr;

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use ipnet::IpNet;
use objects::documents::from_yaml;
use proto::convert::ConvertError;
use proto::{Announce, Pool, v1};
use serde::Deserialize;

use bgp::BgpArguments;

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

/// The gateway's settings do not fit: exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum RoutingError {
    /// The answer is not that of a gateway.
    #[error(
        "the answer has no `announce`, so it is not a gateway's: run this on the gateway, or name its socket with \
         --server unix:PATH ({0})"
    )]
    NotAGateway(String),
    /// The gateway knows pools that this program does not.
    #[error("{0}; this program is older than the gateway: update it")]
    Pool(ConvertError),
    /// The gateway does not know its pools.
    #[error(
        "gateway {0} has received nothing from a controller yet, so it does not know its pools: its log says why; repeat this \
         when it follows a controller"
    )]
    NoState(String),
    /// FRR needs another table.
    #[error(
        "the gateway puts its routes into table {0}, where FRR does not notice that they go: set \
         `announce: {{routeTable: {MAIN_TABLE}}}` in its configuration and restart it, or use BIRD"
    )]
    NotMain(u32),
    /// Two next hops of one family.
    #[error("found next hops {0} and {1}, expected one for each family")]
    TwoNextHops(IpAddr, IpAddr),
    /// The daemon uses another configuration.
    #[error(
        "{} is not what this command prints now: found {found}, expected {expected}; write the file again with the same options \
         and without --check, and have the daemon read it", file.display()
    )]
    Lags {
        /// The file.
        file: PathBuf,
        /// Its first line that differs.
        found: String,
        /// The line in its place.
        expected: String,
    },
    /// There is no router ID.
    #[error("no port of the gateway has an IPv4 address that could be the router ID: add --router-id IPV4")]
    NoRouterId,
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

/// The configuration of a routing daemon beside a gateway that answers with `config`.
pub(super) fn configuration(daemon: &RoutingDaemon, config: v1::GetConfigResponse) -> Result<String, RoutingError> {
    let gateway: GatewaySettings = from_yaml(&config.yaml, 1).map_err(|(_, message)| RoutingError::NotAGateway(message))?;
    let (RoutingDaemon::Bird(bgp) | RoutingDaemon::Frr(bgp)) = daemon;
    let addresses = gateway.ports.iter().flat_map(|port| &port.addresses).filter_map(|text| text.parse::<IpNet>().ok());
    let first = addresses.map(|net| net.addr()).find_map(|ip| if let IpAddr::V4(ip) = ip { Some(ip) } else { None });
    let router_id = bgp.router_id.or(first).ok_or(RoutingError::NoRouterId)?;
    for (n, hop) in bgp.next_hops.iter().enumerate() {
        if let Some(other) = bgp.next_hops[..n].iter().find(|other| other.is_ipv4() == hop.is_ipv4()) {
            return Err(RoutingError::TwoNextHops(*other, *hop));
        }
    }
    if !config.has_state {
        return Err(RoutingError::NoState(gateway.name));
    }
    let AnnounceSettings { route_table, route_protocol } = gateway.announce;
    let pools: Vec<Pool> = config.pools.into_iter().map(Pool::try_from).collect::<Result<_, _>>().map_err(RoutingError::Pool)?;
    let comment = |mark: char, daemon: &str| {
        format!(
            "{mark} {daemon} beside gateway {}: announces its VIPs of `routed` pools (Linux table {route_table}, protocol \
             {route_protocol}) by BGP.\n{mark} {}\n{mark} Written by sluicectl {}.\n",
            gateway.name,
            routed_pools(&pools),
            env!("CARGO_PKG_VERSION")
        )
    };
    let special = bgp.special(&pools);
    match daemon {
        RoutingDaemon::Bird(bgp) => {
            Ok(comment('#', "BIRD 2") + &bird::configuration(bgp, &special, router_id, route_table, route_protocol))
        }
        RoutingDaemon::Frr(_) if route_table != MAIN_TABLE => Err(RoutingError::NotMain(route_table)),
        RoutingDaemon::Frr(bgp) => Ok(comment('!', "FRR") + &frr::configuration(bgp, &special, router_id)),
    }
}

impl RoutingDaemon {
    /// The file that the configuration is compared with.
    pub(super) fn checked_file(&self) -> Option<&Path> {
        let (Self::Bird(bgp) | Self::Frr(bgp)) = self;
        bgp.check.as_deref()
    }
}

/// Compares the file that a daemon uses with the configuration that it should use. Comments, empty lines and blanks at the
/// ends of lines do not count.
pub(super) fn check(file: &Path, used: &str, wanted: &str) -> Result<(), RoutingError> {
    let lines = |text: &str| -> Vec<String> {
        let lines = text.lines().map(str::trim_end).filter(|line| !line.trim().is_empty() && !line.starts_with(['#', '!']));
        lines.map(str::to_owned).collect()
    };
    let (used, wanted) = (lines(used), lines(wanted));
    let differs = used.iter().zip(&wanted).position(|(used, wanted)| used != wanted);
    let Some(at) = differs.or((used.len() != wanted.len()).then(|| used.len().min(wanted.len()))) else { return Ok(()) };
    let line = |lines: &[String]| lines.get(at).map_or_else(|| "no further line".to_owned(), |line| format!("`{}`", line.trim()));
    Err(RoutingError::Lags { file: file.to_owned(), found: line(&used), expected: line(&wanted) })
}

/// A line about the pools that the configuration was written for.
fn routed_pools(pools: &[Pool]) -> String {
    let routed = pools.iter().filter(|pool| pool.announce == Announce::Routed);
    let names: Vec<&str> = routed.map(|pool| pool.name.as_str()).collect();
    let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    format!("Pools now: {names}. Write this file again after a change of `bgp` or of addresses of a pool with `bgp`.")
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use proto::PoolBgp;

    use super::*;
    use crate::{Arguments, Command};

    const GATEWAY: &str = "name: edge-1\nports:\n  - {name: uplink, addresses: ['2001:db8::2/64', 192.0.2.2/24], mtu: 1500}\n";

    /// What the command line prints for a gateway with these settings in `announce`, and without pools.
    fn printed(announce: &str, line: &str) -> Result<String, String> {
        printed_with(announce, Vec::new(), line)
    }

    fn printed_with(announce: &str, pools: Vec<v1::Pool>, line: &str) -> Result<String, String> {
        let config = v1::GetConfigResponse { yaml: format!("{GATEWAY}{announce}"), pools, has_state: true };
        configured(config, line)
    }

    fn configured(config: v1::GetConfigResponse, line: &str) -> Result<String, String> {
        let words = ["sluicectl", "config"].into_iter().chain(line.split_whitespace());
        let arguments = Arguments::try_parse_from(words).map_err(|error| error.to_string())?;
        let Command::Config { daemon: Some(daemon) } = arguments.command else { panic!("{line}") };
        configuration(&daemon, config).map_err(|error| error.to_string())
    }

    const OWN: &str = "announce: {routeTable: 151, routeProtocol: 99, withoutBackends: withdraw}\n";
    const MAIN: &str = "announce: {routeTable: 254, routeProtocol: 150, withoutBackends: withdraw}\n";

    #[test]
    fn a_file_that_was_written_before_a_change_of_a_pool_is_told() {
        let range = "203.0.113.0-203.0.113.255".parse().unwrap();
        let bgp = PoolBgp { med: Some(7), ..PoolBgp::default() };
        let pool = Pool { name: "far".to_owned(), ranges: vec![range], announce: Announce::Routed, bgp };
        for daemon in ["bird", "frr"] {
            let line = format!("{daemon} --local-as 64512 --peer 192.0.2.1=64513");
            let before = printed(MAIN, &line).unwrap();
            let now = printed_with(MAIN, vec![v1::Pool::from(&pool)], &line).unwrap();
            let file = Path::new("/etc/daemon.conf");
            assert!(check(file, &now, &now).is_ok());
            let with_remarks = format!("# written by hand\n! a remark\n\n{}", now.replace('\n', "  \n"));
            assert!(check(file, &with_remarks, &now).is_ok(), "{daemon}");
            let error = check(file, &before, &now).unwrap_err().to_string();
            assert!(error.contains("/etc/daemon.conf is not what this command prints now"), "{error}");
            assert!(check(file, &now[..now.len() / 2], &now).is_err() && check(file, "", &now).is_err());
        }
    }

    #[test]
    fn bird_reads_the_table_and_protocol_of_the_gateway() {
        let text =
            printed(OWN, "bird --local-as 64512 --peer 192.0.2.1=64513 --peer 2001:db8::1=64513 --community 64512:7").unwrap();
        for part in [
            "router id 192.0.2.2;",
            "kernel table 151;",
            "ipv4 { table vips4; import where krt_source = 99; export none; };",
            "if krt_metric = 65535 then { bgp_community.add((65535, 0)); bgp_local_pref = 0; }",
            "bgp_community.add((64512, 7));",
            "neighbor 192.0.2.1 as 64513;\n",
            "  ipv4 { table vips4; import none; export filter vips; next hop self; };",
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

    /// Runs a program that checks a configuration, if it is installed: its name, the arguments before the file.
    fn accepts(program: &str, arguments: &[&str], text: &str) {
        if !std::path::Path::new(program).exists() {
            if let Some(path) = std::env::var_os("SLUICE_SKIPPED") {
                let mut file = std::fs::OpenOptions::new().append(true).open(path).unwrap();
                std::io::Write::write_all(
                    &mut file,
                    format!("routing daemons check what is printed: no {program} here\n").as_bytes(),
                )
                .unwrap();
            }
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("daemon.conf");
        std::fs::write(&file, text).unwrap();
        let output = std::process::Command::new(program).args(arguments).arg(&file).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !said.contains("% "), "{program}: {said}\n{text}");
    }

    #[test]
    fn sessions_outlive_a_gateway_that_restarts_and_the_daemons_accept_the_lines_for_it() {
        let peers = "--local-as 64512 --peer 192.0.2.1=64513 --peer 2001:db8::1=64513 --bfd --community 64512:7";
        let text = printed_with(OWN, pools(), &format!("bird {peers}")).unwrap();
        assert_eq!(text.matches("protocol bgp").count(), text.matches("  check link off;\n").count(), "{text}");
        accepts("/usr/sbin/bird", &["-p", "-c"], &text);
        let text = printed_with(MAIN, pools(), &format!("frr {peers}")).unwrap();
        assert!(text.contains("\n no bgp fast-external-failover\n"), "{text}");
        accepts("/usr/bin/vtysh", &["-C", "-f"], &text);
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

    /// A pool with communities and a MED, one with local preference and aggregation, one without settings, and one that is
    /// not announced by BGP.
    fn pools() -> Vec<v1::Pool> {
        let pool = |name: &str, ranges: &[&str], announce, bgp: PoolBgp| {
            let ranges = ranges.iter().map(|text| text.parse().unwrap()).collect();
            v1::Pool::from(&Pool { name: name.to_owned(), ranges, announce, bgp })
        };
        let communities = ["65000:100", "65000:1:2", "no-export"].map(|text| text.parse().unwrap()).to_vec();
        let tenants = PoolBgp { communities, med: Some(50), ..PoolBgp::default() };
        let dns = PoolBgp { local_pref: Some(200), aggregation_length: 24, ..PoolBgp::default() };
        vec![
            pool("tenants", &["203.0.113.0-203.0.113.191", "203.0.113.200", "2001:db8:1::/64"], Announce::Routed, tenants),
            pool("dns", &["198.51.100.0/24"], Announce::Routed, dns),
            pool("plain", &["192.0.2.128/25"], Announce::Routed, PoolBgp::default()),
            pool("lan", &["192.0.2.100"], Announce::L2, PoolBgp::default()),
        ]
    }

    const WITH_POOLS: &str = "--local-as 64512 --peer 192.0.2.1=64513 --community 64512:7 --med 5";

    #[test]
    fn settings_of_a_pool_replace_the_options_in_bird() {
        let text = printed_with(OWN, pools(), &format!("bird {WITH_POOLS}")).unwrap();
        assert!(text.contains("# Pools now: tenants, dns, plain. Write this file again after"), "{text}");
        let filter = "filter vips {
  bgp_community.add((64512, 7));
  bgp_med = 5;
  # Pool tenants.
  if net.type = NET_IP4 then if net ~ [ 203.0.113.0/25+, 203.0.113.128/26+, 203.0.113.200/32+ ] then {
    bgp_community.empty; bgp_large_community.empty;
    bgp_community.add((65000, 100));
    bgp_large_community.add((65000, 1, 2));
    bgp_community.add((65535, 65281));
    bgp_med = 50;
  }
  if net.type = NET_IP6 then if net ~ [ 2001:db8:1::/64+ ] then {
    bgp_community.empty; bgp_large_community.empty;
    bgp_community.add((65000, 100));
    bgp_large_community.add((65000, 1, 2));
    bgp_community.add((65535, 65281));
    bgp_med = 50;
  }
  # Pool dns.
  if net.type = NET_IP4 then if net ~ [ 198.51.100.0/24+ ] then {
    bgp_community.empty; bgp_large_community.empty;
    bgp_community.add((64512, 7));
    bgp_med = 5;
    bgp_local_pref = 200;
  }
  if krt_metric = 65535 then { bgp_community.add((65535, 0)); bgp_local_pref = 0; }
  accept;
}
";
        assert!(text.contains(filter), "{text}");
    }

    #[test]
    fn settings_of_a_pool_replace_the_options_in_frr() {
        let text = printed_with(MAIN, pools(), &format!("frr {WITH_POOLS}")).unwrap();
        let lists = "! Pool tenants.
ip prefix-list SLUICE-POOL-1 permit 203.0.113.0/25 le 32
ip prefix-list SLUICE-POOL-1 permit 203.0.113.128/26 le 32
ip prefix-list SLUICE-POOL-1 permit 203.0.113.200/32
ipv6 prefix-list SLUICE-POOL-1 permit 2001:db8:1::/64 le 128
! Pool dns.
ip prefix-list SLUICE-POOL-2 permit 198.51.100.0/24 le 32
";
        assert!(text.contains(lists), "{text}");
        let maps = text.split_once("(RFC 8326).\n").unwrap().1.split_once("route-map SLUICE-NONE").unwrap().0;
        let entry = |number: u32, list: &str, metric: u32, set: &str| {
            let list = if list.is_empty() { String::new() } else { format!(" match {list}\n") };
            format!("route-map SLUICE-VIPS permit {number}\n{list} match metric {metric}\n{set} set origin igp\nexit\n")
        };
        let tenants = " set large-community 65000:1:2\n set metric 50\n";
        let of_tenants = |draining: &str| format!(" set community 65000:100 65535:65281{draining}\n{tenants}");
        let draining = format!("{} set local-preference 0\n", of_tenants(" graceful-shutdown"));
        let others = " set community 64512:7\n set metric 5\n";
        let leaving = " set community 64512:7 graceful-shutdown\n set metric 5\n set local-preference 0\n";
        let wanted = [
            entry(10, "ip address prefix-list SLUICE-POOL-1", 65535, &draining),
            entry(20, "ip address prefix-list SLUICE-POOL-1", 15000, &of_tenants("")),
            entry(30, "ipv6 address prefix-list SLUICE-POOL-1", 65535, &draining),
            entry(40, "ipv6 address prefix-list SLUICE-POOL-1", 15000, &of_tenants("")),
            entry(50, "ip address prefix-list SLUICE-POOL-2", 65535, leaving),
            entry(60, "ip address prefix-list SLUICE-POOL-2", 15000, &format!("{others} set local-preference 200\n")),
            entry(70, "", 65535, leaving),
            entry(80, "", 15000, others),
        ];
        assert_eq!(maps, wanted.concat());
    }

    #[test]
    fn a_gateway_without_pools_and_a_pool_of_a_newer_version_are_named() {
        let text = printed(OWN, &format!("bird {WITH_POOLS}")).unwrap();
        assert!(text.contains("# Pools now: none.") && !text.contains("# Pool "), "{text}");
        let mut newer = pools();
        newer[0].bgp.as_mut().unwrap().communities.push("65000:1:2:3".to_owned());
        let error = printed_with(OWN, newer, &format!("bird {WITH_POOLS}")).unwrap_err();
        assert!(error.contains("pool tenants: community \"65000:1:2:3\"") && error.contains("update it"), "{error}");
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let rows = [
            ("bird --peer 192.0.2.1=64513", "--local-as <AS>"),
            ("bird --local-as 64512", "--peer <ADDRESS=AS>"),
            ("bird --local-as 0 --peer 192.0.2.1=64513", "expected a number from 1"),
            ("frr --local-as 64512 --peer 192.0.2.1", "expected ADDRESS=AS"),
            ("frr --local-as 64512 --peer 192.0.2.1=1 --community 70000:1", "expected A:B"),
            ("bird --local-as 64512 --peer 192.0.2.1=1 --community graceful-shutdown", "only while it drains"),
            ("bird --local-as 1 --peer 192.0.2.1=1 --next-hop 10.0.0.1 --next-hop 10.0.0.2", "one for each family"),
            ("frr --local-as 64512 --peer 192.0.2.1=1 --bfd-interval 100", "--bfd"),
        ];
        for (line, part) in rows {
            let error = printed(MAIN, line).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
        let config = v1::GetConfigResponse { yaml: format!("{GATEWAY}{OWN}"), ..Default::default() };
        let error = configured(config, "bird --local-as 1 --peer 192.0.2.1=2").unwrap_err();
        assert!(error.contains("gateway edge-1 has received nothing from a controller"), "{error}");
        let error = printed("", "bird --local-as 1 --peer 192.0.2.1=2").unwrap_err();
        assert!(error.contains("not a gateway's") && error.contains("--server unix:PATH"), "{error}");
    }
}

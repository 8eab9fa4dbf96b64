//! The keys of section `announce`: the Linux table of routes to VIPs, which VIPs have one, the election of the owners of
//! VIPs, and the routing daemon whose sessions are shown.
//!
//! Not here: what follows from them (`netlink::announce`, `fleet`).

use std::path::PathBuf;
use std::time::Duration;

use control::config::scalar::DurationText;
use control::config::{Section, alternatives};
use proto::limits::VIP_GROUPS_MAX;
use serde::Serialize;

use super::keys::WithoutBackends;
use super::port::{LocatedPort, Twin};
use crate::netlink::RouteTable;

/// Linux route table and protocol unless configured; both unassigned in iproute2's files.
const ROUTE_NUMBER: u8 = 150;
/// 0 to 4 are the kernel's and the administrator's (rtnetlink(7)).
const PROTOCOL_MIN: u8 = 5;
/// Tables `default` and `local` (rtnetlink(7)): Linux's own.
const LINUX_TABLES: [u32; 2] = [253, 255];
/// Default number of groups: among three gateways, the loss of one moves a third of the VIPs in five pieces.
const GROUPS: u8 = 16;
/// Default VRID of group 0. Routers that use VRRP themselves mostly have low numbers.
const FIRST_VRID: u8 = 101;
/// Default interval of advertisements: others take over after 300 to 400 ms.
const ADVERTISEMENT: Duration = Duration::from_millis(100);
/// A shorter interval would lose VIPs whenever a machine is busy for a moment.
const ADVERTISEMENT_MIN: Duration = Duration::from_millis(50);
/// VRRP counts in 12 bits of centiseconds (RFC 9568 section 5.2.7).
const ADVERTISEMENT_MAX: Duration = Duration::from_secs(40);
const ADVERTISEMENT_UNIT_MS: u128 = 10;

/// Who elects the owners of VIPs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Elector {
    /// Nobody: this gateway answers for all.
    #[default]
    None,
    /// VRRP, by keepalived.
    Keepalived,
}

/// Which routing daemon is asked for its sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RoutingDaemon {
    /// Whichever is there, while a pool is `routed`.
    #[default]
    Auto,
    /// None.
    None,
    /// BIRD.
    Bird,
    /// FRR.
    Frr,
}

/// Where the routing daemon beside the gateway is asked for its sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DaemonSockets {
    /// The daemon.
    pub daemon: RoutingDaemon,
    /// The control socket of BIRD, or the directory of FRR's sockets; `None`: where Debian has them.
    pub socket: Option<PathBuf>,
}

/// How gateways elect the owners of VIPs of `l2` pools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Election {
    /// By whom.
    pub elector: Elector,
    /// Number of groups of VIPs.
    pub groups: u8,
    /// The port on which gateways hear each other: an index in the list of ports.
    pub port: usize,
    /// VRID of group 0; the others follow.
    pub first_vrid: u8,
    /// Interval of advertisements.
    pub advertisement: Duration,
    /// Whether a gateway takes its groups back from one of lower priority.
    pub preempt: bool,
}

/// Reads key `announce`.
pub(super) fn announce(top: &mut Section<'_>, ports: &[LocatedPort]) -> (RouteTable, WithoutBackends, Election, DaemonSockets) {
    let mut section = top.section("announce");
    let expected = "the number of a table of its own, not 253 or 255, or 254 for FRR";
    let legal = |table: &u32| *table > 0 && !LINUX_TABLES.contains(table);
    let table = section.parse("routeTable", expected, |text| text.parse().ok().filter(legal));
    let protocol = section.number("routeProtocol", PROTOCOL_MIN..=u8::MAX, ROUTE_NUMBER);
    let values = [WithoutBackends::Withdraw, WithoutBackends::Keep];
    let without_backends = section.one_of("withoutBackends", &values, WithoutBackends::default());
    let election = election(&mut section, ports);
    let sockets = daemon_sockets(&mut section);
    section.finish();
    (RouteTable { table: table.unwrap_or(ROUTE_NUMBER.into()), protocol }, without_backends, election, sockets)
}

fn daemon_sockets(section: &mut Section<'_>) -> DaemonSockets {
    let daemons = [RoutingDaemon::Auto, RoutingDaemon::None, RoutingDaemon::Bird, RoutingDaemon::Frr];
    let daemon = section.one_of("daemon", &daemons, RoutingDaemon::default());
    let is_set = section.field("daemonSocket").is_some_and(|field| !field.is_empty());
    let socket = if is_set { section.path_of("daemonSocket") } else { None };
    if let Some(path) = socket.as_ref().filter(|_| matches!(daemon, RoutingDaemon::Auto | RoutingDaemon::None)) {
        let message = format!("found {}; say whose it is by `daemon: bird` or `daemon: frr`", path.display());
        section.problem_of("daemonSocket", message);
    }
    DaemonSockets { daemon, socket }
}

fn election(section: &mut Section<'_>, ports: &[LocatedPort]) -> Election {
    let elector = section.one_of("election", &[Elector::None, Elector::Keepalived], Elector::default());
    let groups = section.number("groups", 1..=VIP_GROUPS_MAX, GROUPS);
    let names = || alternatives(&ports.iter().map(|port| port.settings.name.as_str()).collect::<Vec<_>>());
    let position = |text: &str| ports.iter().position(|port| port.settings.name == text);
    let port = section.parse("port", format!("the name of a port: {}", names()), position).unwrap_or(0);
    let first_vrid = section.number("firstVrid", 1..=u8::MAX, FIRST_VRID);
    let advertisement = section.duration("advertisement", ADVERTISEMENT_MIN..=ADVERTISEMENT_MAX, ADVERTISEMENT);
    let preempt = section.flag("preempt", false);
    let last_vrid = u16::from(first_vrid) + u16::from(groups) - 1;
    if last_vrid > u8::MAX.into() {
        let message =
            format!("found {first_vrid} for {groups} groups; their VRIDs would end at {last_vrid}, expected at most 255");
        section.problem_of("firstVrid", message);
    }
    if !advertisement.as_millis().is_multiple_of(ADVERTISEMENT_UNIT_MS) {
        let found = DurationText(advertisement);
        section.problem_of("advertisement", format!("found {found}, expected a multiple of 10ms, in which VRRP counts"));
    }
    if elector == Elector::Keepalived
        && let Some(used) = ports.get(port)
        && (used.settings.twin != Twin::Tap || used.settings.addresses.is_empty())
        && !section.reader.has_problem_below("ports")
    {
        let name = &used.settings.name;
        section.problem_of("election", format!("found keepalived on port {name}, which needs `twin: tap` and an address"));
    }
    Election { elector, groups, port, first_vrid, advertisement, preempt }
}

//! The keys of the gateway, except `ports`, `static.links` and the source.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::config::scalar::is_label_value;
use control::config::{Field, Located, Section};
use dataplane::flow::{SNAT_ADDRESSES_MAX, TARGETS_MAX};
use dataplane::workers::WORKERS_MAX;
use dataplane::{FlowLimits, GUE_PORT, Neighbour, Route};
use ipnet::IpNet;
use proto::NetworkError;
use serde::Serialize;

use super::links::{self, LocatedLink};
use super::port::{self, LocatedPort};
use super::record_target::{EXPECTED, RecordTarget};

/// How a worker waits for packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Poll {
    /// It never sleeps.
    #[default]
    Busy,
    /// After empty polls it yields, then sleeps until something arrives (FORWARDING section 13).
    Adaptive,
}

/// The memory of packet buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Hugepages {
    /// Hugepages if there are any; PCI devices need them.
    #[default]
    Auto,
    /// Hugepages; without them the gateway does not start.
    Require,
    /// Ordinary pages.
    Off,
}

/// What becomes of a VIP of a `routed` pool while none of its ports has a backend that takes new flows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WithoutBackends {
    /// Its route is withdrawn, so that routers send to gateways that have one.
    #[default]
    Withdraw,
    /// Its route stays, and clients are refused.
    Keep,
}

/// Default of key `stateDir`.
const STATE_DIR: &str = "/var/lib/sluice";
/// Maximum flows of one worker: 2^26 of 64 bytes are 4 GiB of tables, 16 times the largest number that DESIGN section
/// 11 measures.
const FLOWS_PER_WORKER_MAX: u32 = 1 << 26;
/// Default core of the only worker: core 0 handles most interrupts.
const CORE: usize = 1;
/// Highest core: `CPU_SETSIZE` of Linux is 1024.
const CORE_MAX: usize = 1023;

/// Default of key `metrics.listen`.
const METRICS_LISTEN: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9435));

/// Default time for routers to choose other routes: BGP informs its neighbours within milliseconds, and OSPF
/// recalculates its routes after 5 to 10 s at most.
const DRAIN_ON_STOP: Duration = Duration::from_secs(10);
const DRAIN_ON_STOP_MAX: Duration = Duration::from_secs(3600);

const SECOND: Duration = Duration::from_secs(1);
/// Maximum idle limit: limits are counted in 32-bit ticks of a few milliseconds, which wrap after several weeks.
const WEEK: Duration = Duration::from_secs(7 * 86_400);

/// Reads key `name`; the host's name if it is absent.
pub(super) fn name(top: &mut Section<'_>) -> String {
    let expected = "a name of letters, digits, `-`, `_` and `.`, at most 63";
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    let is_name = |text: &str| (1..=63).contains(&text.len()) && text.bytes().all(legal);
    if top.field("name").is_some() {
        return top.text("name", expected, is_name).unwrap_or_default();
    }
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if !is_name(&host) {
        top.problem_of("name", format!("missing, expected {expected}; the host's name, `{host}`, is none"));
    }
    host
}

/// Reads key `workers`.
pub(super) fn workers(top: &mut Section<'_>) -> (Vec<usize>, Poll) {
    let mut section = top.section("workers");
    let poll = section.one_of("poll", &[Poll::Busy, Poll::Adaptive], Poll::default());
    let mut cores: Vec<usize> = Vec::new();
    if let Some(field) = section.field("cores") {
        for item in field.items("core numbers") {
            let expected = format!("the number of a core, from 0 to {CORE_MAX}");
            let Some(core) = item.parse(expected, |text| text.parse().ok().filter(|core| *core <= CORE_MAX)) else { continue };
            if cores.contains(&core) {
                item.problem(format!("found core {core} a second time; a core runs one worker"));
            }
            cores.push(core);
        }
        if field.is_empty() {
            field.unexpected("core numbers, such as [1, 2]");
        }
        if cores.len() > usize::from(WORKERS_MAX) {
            field.problem(format!("found {} cores, expected at most {WORKERS_MAX}", cores.len()));
        }
    }
    section.finish();
    if cores.is_empty() {
        cores.push(CORE);
    }
    (cores, poll)
}

/// Reads key `memory`.
pub(super) fn hugepages(top: &mut Section<'_>) -> Hugepages {
    let mut section = top.section("memory");
    let values = [Hugepages::Auto, Hugepages::Require, Hugepages::Off];
    let hugepages = section.one_of("hugepages", &values, Hugepages::default());
    section.finish();
    hugepages
}

/// Reads key `snat`.
pub(super) fn snat(top: &mut Section<'_>) -> Vec<Located<IpAddr>> {
    let mut section = top.section("snat");
    let addresses = hosts(&mut section, "addresses", "an address of its own, such as 10.0.0.3");
    for (family, is_v4) in [("IPv4", true), ("IPv6", false)] {
        let count = addresses.iter().filter(|located| located.value.is_ipv4() == is_v4).count();
        if count > usize::from(SNAT_ADDRESSES_MAX) {
            section.problem_of("addresses", format!("found {count} {family} addresses, expected at most {SNAT_ADDRESSES_MAX}"));
        }
    }
    section.finish();
    addresses
}

/// Reads key `tunnel`.
pub(super) fn tunnel(top: &mut Section<'_>) -> (Vec<Located<IpAddr>>, u16) {
    let mut section = top.section("tunnel");
    let sources = hosts(&mut section, "sources", "an address, such as 10.0.0.2");
    let gue_destination_port = section.number("gueDestinationPort", 1..=u16::MAX, GUE_PORT);
    section.finish();
    (sources, gue_destination_port)
}

/// Reads a list of addresses that a machine can have.
fn hosts(section: &mut Section<'_>, key: &'static str, expected: &str) -> Vec<Located<IpAddr>> {
    let mut addresses = Vec::new();
    for item in section.items(key, "addresses") {
        if let Some(value) = item.parse(expected, port::host) {
            push_once(&mut addresses, &item, value);
        }
    }
    addresses
}

/// Reads key `nodePortAddresses`. A CIDR means all port addresses within it.
pub(super) fn node_port_addresses(top: &mut Section<'_>, ports: &[LocatedPort]) -> Vec<Located<IpAddr>> {
    let own: Vec<IpAddr> = ports.iter().flat_map(|port| &port.settings.addresses).map(IpNet::addr).collect();
    let mut addresses = Vec::new();
    for item in top.items("nodePortAddresses", "addresses or CIDRs") {
        let net_of = |text: &str| match text.parse::<IpAddr>() {
            Ok(address) => Ok(IpNet::from(address)),
            Err(_) => proto::network(text).map_err(|error| match error {
                NetworkError::Malformed => "expected an address or a CIDR".to_owned(),
                error @ NetworkError::HostBits { .. } => error.to_string(),
            }),
        };
        let Some(net) = item.try_parse("an address or a CIDR", net_of) else { continue };
        let matching: Vec<_> = own.iter().filter(|address| net.contains(*address)).collect();
        if matching.is_empty() && !top.reader.has_problem_below("ports") {
            item.problem(format!("found {net}, which holds no port's address; node ports are served on `ports[].addresses`"));
        }
        for address in matching {
            push_once(&mut addresses, &item, *address);
        }
    }
    addresses
}

fn push_once(addresses: &mut Vec<Located<IpAddr>>, item: &Field<'_>, value: IpAddr) {
    if addresses.iter().any(|located| located.value == value) {
        item.problem(format!("found {value} a second time; name it once"));
    } else {
        addresses.push(Located { location: item.location.clone(), value });
    }
}

/// Reads key `flows`.
pub(super) fn flows(top: &mut Section<'_>) -> FlowLimits {
    let mut section = top.section("flows");
    let built = FlowLimits::default();
    let mut limit = |key, default| section.duration(key, SECOND..=WEEK, default);
    let flows = FlowLimits {
        tcp_established: limit("tcpEstablished", built.tcp_established),
        tcp_opening: limit("tcpOpening", built.tcp_opening),
        tcp_half_closed: limit("tcpHalfClosed", built.tcp_half_closed),
        tcp_reset: limit("tcpReset", built.tcp_reset),
        tcp_closing: limit("tcpClosing", built.tcp_closing),
        tcp_one_way: limit("tcpOneWay", built.tcp_one_way),
        udp: limit("udp", built.udp),
        udp_exchange: limit("udpExchange", built.udp_exchange),
        udp_unreplied: limit("udpUnreplied", built.udp_unreplied),
        sctp: limit("sctp", built.sctp),
        table_grace: limit("tableGrace", built.table_grace),
        max_per_worker: section.number("maxPerWorker", 1..=FLOWS_PER_WORKER_MAX, built.max_per_worker),
    };
    section.finish();
    flows
}

/// Fewer would leave a namespace nothing of the last sixteenth, which is for those that hold few.
const TARGETS_LEAST: u32 = 64;

/// Reads key `limits`.
pub(super) fn targets(top: &mut Section<'_>) -> u32 {
    let mut section = top.section("limits");
    let targets = section.number("targets", TARGETS_LEAST..=TARGETS_MAX, TARGETS_MAX);
    section.finish();
    targets
}

/// Reads keys `stateDir` and `maxStateAge`.
pub(super) fn persistence(top: &mut Section<'_>) -> (PathBuf, Duration) {
    let dir = top.path_of("stateDir").unwrap_or_else(|| STATE_DIR.into());
    let year = Duration::from_secs(365 * 86_400);
    (dir, top.duration("maxStateAge", SECOND..=year, proto::limits::MAX_STATE_AGE))
}

/// Reads key `metrics`; an empty address turns metrics off.
pub(super) fn metrics(top: &mut Section<'_>) -> Option<SocketAddr> {
    let mut section = top.section("metrics");
    let listen = if section.field("listen").is_some() {
        section.listen_tcp("listen").map(|located| located.value)
    } else {
        Some(METRICS_LISTEN)
    };
    section.finish();
    listen
}

/// Reads key `static`.
pub(super) fn fixed_network(
    top: &mut Section<'_>,
    ports: &[LocatedPort],
) -> (Vec<LocatedLink>, Vec<Located<Route>>, Vec<Neighbour>) {
    let mut section = top.section("static");
    let links = links::take(&mut section, ports);
    let mut routes: Vec<Located<Route>> = Vec::new();
    for item in section.items("routes", "routes") {
        let Some(value) = route(&item, ports, &links) else { continue };
        if routes.iter().any(|other| (other.value.to, other.value.via, other.value.link) == (value.to, value.via, value.link)) {
            item.problem(format!("found the route to {} by this next hop a second time; keep one", value.to));
        }
        routes.push(Located { location: item.location, value });
    }
    let mut neighbours: Vec<Neighbour> = Vec::new();
    for item in section.items("neighbours", "neighbours") {
        let Some(value) = neighbour(&item, ports, &links) else { continue };
        if neighbours.iter().any(|other| (other.address, other.link) == (value.address, value.link)) {
            item.problem(format!("found {} at this port a second time; keep one", value.address));
        }
        neighbours.push(value);
    }
    section.finish();
    (links, routes, neighbours)
}

fn route(item: &Field<'_>, ports: &[LocatedPort], links: &[LocatedLink]) -> Option<Route> {
    let mut section = item.section();
    let expected = "a CIDR such as 0.0.0.0/0";
    let to = section.required("to", expected).and_then(|field| field.try_parse(expected, proto::network));
    let via_field = section.field("via");
    let via = via_field.as_ref().and_then(|field| field.parse("the address of a next hop", port::host));
    let link = links::link_of(&mut section, ports, links);
    section.finish();
    if let (Some(to), Some(via), Some(field)) = (to, via, &via_field)
        && to.addr().is_ipv4() != via.is_ipv4()
    {
        field.problem(format!("found {via}, expected an address of the family of {to}"));
    }
    Some(Route { to: to?, via, link: link?, weight: 1 })
}

fn neighbour(item: &Field<'_>, ports: &[LocatedPort], links: &[LocatedLink]) -> Option<Neighbour> {
    let mut section = item.section();
    let expected = "the address of a neighbour";
    let address = section.parse_required("address", expected, port::host);
    let expected = "the Ethernet address of one interface, such as 02:00:00:00:00:01";
    let mac = section.parse_required("mac", expected, port::mac);
    let link = links::link_of(&mut section, ports, links);
    section.finish();
    Some(Neighbour { link: link?, address: address?, mac: mac? })
}

/// Reads key `drainOnStop`: the time between the withdrawal of the routes to VIPs and the end of the process.
pub(super) fn drain_on_stop(top: &mut Section<'_>) -> Duration {
    top.duration("drainOnStop", Duration::ZERO..=DRAIN_ON_STOP_MAX, DRAIN_ON_STOP)
}

/// Reads key `zone`: a value that a Node's label `topology.kubernetes.io/zone` can have.
pub(super) fn zone(top: &mut Section<'_>) -> Option<String> {
    let field = top.field("zone").filter(|field| !field.is_empty())?;
    let expected =
        "a zone as Nodes have it in their label topology.kubernetes.io/zone: letters, digits, `-`, `_` and `.`, at most 63";
    field.parse(expected, |text| is_label_value(text).then(|| text.to_owned()))
}

/// Reads key `flowRecords`: where records of flows go.
pub(super) fn flow_records(top: &mut Section<'_>, base: &Path) -> Option<RecordTarget> {
    let mut section = top.section("flowRecords");
    let field = section.field("to").filter(|field| !field.is_empty());
    let target = field.and_then(|field| field.try_parse(EXPECTED, |text| RecordTarget::parse(text, base)));
    section.finish();
    target
}

//! The configuration of BIRD 2.
//!
//! Invariant: one filter sets the attributes of every route of the gateway. Those of all VIPs come first, those of a pool
//! replace them, and a drain comes last. It is the filter of the export to the routers, because BIRD removes a MED that was
//! set before from routes to other autonomous systems. A session outlives the second in which a restart of the gateway
//! leaves its interface without carrier: BIRD would otherwise end it at once.

use std::fmt::Write as _;
use std::net::Ipv4Addr;

use proto::Community;
use proto::limits::VIP_ROUTE_DRAIN_METRIC;

use super::bgp::{Attributes, BgpArguments, BgpNeighbour, SpecialPool};

/// The whole file, without its head.
pub(super) fn configuration(bgp: &BgpArguments, pools: &[SpecialPool], router_id: Ipv4Addr, table: u32, protocol: u8) -> String {
    let mut text = format!(
        "router id {router_id};
ipv4 table vips4;
ipv6 table vips6;
protocol device {{ }}

# Routes with metric {VIP_ROUTE_DRAIN_METRIC} are those of a gateway that drains: GRACEFUL_SHUTDOWN (RFC 8326).
filter vips {{
{}{}  if krt_metric = {VIP_ROUTE_DRAIN_METRIC} then {{ bgp_community.add((65535, 0)); bgp_local_pref = 0; }}
  accept;
}}
",
        set(&bgp.attributes(), "  "),
        pools.iter().map(of_pool).collect::<String>()
    );
    for family in [4, 6] {
        let _ = write!(
            text,
            "protocol kernel vips{family}_kernel {{
  kernel table {table};
  learn;
  ipv{family} {{ table vips{family}; import where krt_source = {protocol}; export none; }};
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
  connect delay time 1; error wait time 1, 8; error forget time 60;
  check link off;
{bfd}  ipv{family} {{ table vips{family}; import none; export filter vips; next hop {next_hop}; }};
}}
",
            bgp.local_as
        );
    }
    text
}

/// The part of the filter for the VIPs of a pool.
fn of_pool(pool: &SpecialPool) -> String {
    let SpecialPool { name, prefixes, attributes } = pool;
    let mut text = format!("  # Pool {name}.\n");
    // A set of prefixes has one family.
    for is_ipv4 in [true, false] {
        let of_family = prefixes.iter().filter(|net| net.addr().is_ipv4() == is_ipv4);
        let set_of: Vec<_> = of_family.map(|net| format!("{net}+")).collect();
        if !set_of.is_empty() {
            let kind = if is_ipv4 { "NET_IP4" } else { "NET_IP6" };
            let _ = write!(
                text,
                "  if net.type = {kind} then if net ~ [ {} ] then {{
    bgp_community.empty; bgp_large_community.empty;
{}  }}
",
                set_of.join(", "),
                set(attributes, "    ")
            );
        }
    }
    text
}

/// Statements that set the attributes.
fn set(attributes: &Attributes, indent: &str) -> String {
    let mut text: String = attributes
        .communities
        .iter()
        .map(|community| match community {
            Community::Standard(a, b) => format!("{indent}bgp_community.add(({a}, {b}));\n"),
            Community::Large(a, b, c) => format!("{indent}bgp_large_community.add(({a}, {b}, {c}));\n"),
        })
        .collect();
    let _ = writeln!(text, "{indent}bgp_med = {};", attributes.med);
    if let Some(preference) = attributes.local_pref {
        let _ = writeln!(text, "{indent}bgp_local_pref = {preference};");
    }
    text
}

//! The configuration of FRR.
//!
//! Invariant: one route map decides about every route of the gateway. Its entries for pools come first, and each has one
//! for gateways that drain before the one for others. A session outlives the second in which a restart of the gateway
//! leaves its interface without carrier: FRR would otherwise end it at once.

use std::fmt::Write as _;
use std::net::Ipv4Addr;

use proto::Community;
use proto::limits::{VIP_ROUTE_DRAIN_METRIC, VIP_ROUTE_METRIC};

use super::bgp::{Attributes, BgpArguments, BgpNeighbour, SpecialPool};

/// Distance between the numbers of two entries of the route map: 1,024 pools of both families have 4,096 entries, and
/// numbers end at 65,535.
const STEP: usize = 10;

/// The whole file, without its head.
pub(super) fn configuration(bgp: &BgpArguments, pools: &[SpecialPool], router_id: Ipv4Addr) -> String {
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
        "router bgp {local_as}\n bgp router-id {router_id}\n no bgp ebgp-requires-policy\n no bgp default ipv4-unicast\n \
         no bgp fast-external-failover\n"
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
    text.push_str("exit\n");
    route_map(bgp, pools, &mut text);
    text.push_str("route-map SLUICE-NONE deny 10\nexit\n");
    if !bgp.next_hops.is_empty() {
        text.push_str("route-map SLUICE-OUT permit 10\n");
        for hop in &bgp.next_hops {
            let _ = writeln!(text, " set {} {hop}", if hop.is_ipv4() { "ip next-hop" } else { "ipv6 next-hop global" });
        }
        text.push_str("exit\n");
    }
    text
}

/// The route map of VIPs, and the prefix lists of pools with attributes of their own.
fn route_map(bgp: &BgpArguments, pools: &[SpecialPool], text: &mut String) {
    // What an entry matches, and what it sets.
    let mut entries: Vec<(String, &Attributes)> = Vec::new();
    for (n, SpecialPool { name, prefixes, attributes }) in (1..).zip(pools) {
        let list = format!("SLUICE-POOL-{n}");
        let _ = writeln!(text, "! Pool {name}.");
        for (family, is_ipv4) in [("ip", true), ("ipv6", false)] {
            let of_family = || prefixes.iter().filter(|net| net.addr().is_ipv4() == is_ipv4);
            for net in of_family() {
                let longer =
                    if net.prefix_len() < net.max_prefix_len() { format!(" le {}", net.max_prefix_len()) } else { String::new() };
                let _ = writeln!(text, "{family} prefix-list {list} permit {net}{longer}");
            }
            if of_family().next().is_some() {
                entries.push((format!(" match {family} address prefix-list {list}\n"), attributes));
            }
        }
    }
    let others = bgp.attributes();
    entries.push((String::new(), &others));
    let _ = writeln!(
        text,
        "! Routes with metric {VIP_ROUTE_DRAIN_METRIC} are those of a gateway that drains: GRACEFUL_SHUTDOWN (RFC 8326)."
    );
    let with_metric = entries.iter().flat_map(|entry| [(entry, true), (entry, false)]);
    for (n, ((matches, attributes), is_draining)) in (1..).zip(with_metric) {
        let metric = if is_draining { VIP_ROUTE_DRAIN_METRIC } else { VIP_ROUTE_METRIC };
        let _ = write!(
            text,
            "route-map SLUICE-VIPS permit {}
{matches} match metric {metric}
{} set origin igp
exit
",
            n * STEP,
            set(attributes, is_draining)
        );
    }
}

/// Statements that set the attributes.
fn set(attributes: &Attributes, is_draining: bool) -> String {
    let (mut standard, mut large) = (Vec::new(), Vec::new());
    for community in &attributes.communities {
        match community {
            Community::Standard(..) => standard.push(community.to_string()),
            Community::Large(..) => large.push(community.to_string()),
        }
    }
    if is_draining {
        standard.push("graceful-shutdown".to_owned());
    }
    let mut text = String::new();
    for (kind, list) in [("community", standard), ("large-community", large)] {
        if !list.is_empty() {
            let _ = writeln!(text, " set {kind} {}", list.join(" "));
        }
    }
    let _ = writeln!(text, " set metric {}", attributes.med);
    if let Some(preference) = if is_draining { Some(0) } else { attributes.local_pref } {
        let _ = writeln!(text, " set local-preference {preference}");
    }
    text
}

//! What several keys must agree on: no address has two owners, and devices get the memory they need.

use std::net::IpAddr;

use control::config::{Place, Placed, PlacedRange, Reader};
use dataplane::Route;
use ipnet::IpNet;
use proto::Announce;
use proto::limits::RESERVED_MAX;

use super::keys::Hugepages;
use super::links::PlacedLink;
use super::port::{PlacedPort, Twin};

/// The addresses that the gateway itself uses, and who uses them.
pub(super) struct UsedAddresses<'a> {
    pub(super) ports: &'a [PlacedPort],
    pub(super) links: &'a [PlacedLink],
    pub(super) snat: &'a [Placed<IpAddr>],
    pub(super) tunnel: &'a [Placed<IpAddr>],
    pub(super) node_ports: &'a [Placed<IpAddr>],
    pub(super) routes: &'a [Placed<Route>],
}

impl UsedAddresses<'_> {
    /// Each address with the words for it. Node ports are served on port addresses, so they are in already.
    fn named(&self) -> impl Iterator<Item = (IpAddr, String)> {
        let ports = self.ports.iter().flat_map(|port| {
            port.settings.addresses.iter().map(|net| (net.addr(), format!("an address of port `{}`", port.settings.name)))
        });
        let of_links = self.links.iter().flat_map(|link| &link.settings.addresses);
        let links = of_links.map(|net| (net.addr(), "an address of a link in `static.links`".to_owned()));
        let snat = self.snat.iter().map(|placed| (placed.value, "a SNAT address".to_owned()));
        let next_hops =
            self.routes.iter().filter_map(|placed| Some((placed.value.via?, format!("the next hop of `{}`", placed.place.key))));
        ports.chain(links).chain(snat).chain(next_hops)
    }

    /// The addresses that are never a VIP and never a backend, in order.
    pub(super) fn reserved(&self) -> Vec<IpAddr> {
        let mut reserved: Vec<_> = self.named().map(|(address, _)| address).collect();
        reserved.extend(self.node_ports.iter().chain(self.tunnel).map(|placed| placed.value));
        reserved.sort_unstable();
        reserved.dedup();
        reserved
    }
}

/// Runs every check.
pub(super) fn run(reader: &Reader, used: &UsedAddresses<'_>, hugepages: Hugepages, pools: &[PlacedRange]) {
    check_address_count(reader, used);
    check_snat(reader, used);
    check_pool_addresses(reader, used, pools);
    check_pool_links(reader, used, pools);
    check_device_memory(reader, used.ports, hugepages);
    check_twin_names(reader, used.ports);
}

fn check_address_count(reader: &Reader, used: &UsedAddresses<'_>) {
    let count = used.reserved().len();
    if let Some(port) = used.ports.first().filter(|_| count > RESERVED_MAX) {
        let place = Place { line: port.device_place.line, key: "ports".to_owned() };
        let message = format!("found {count} addresses of ports, next hops, SNAT and tunnels, expected at most {RESERVED_MAX}");
        reader.problem(&place, format!("{message}; give the gateway fewer"));
    }
}

fn check_snat(reader: &Reader, used: &UsedAddresses<'_>) {
    for snat in used.snat {
        let owner = used.ports.iter().find_map(|port| {
            let index = port.settings.addresses.iter().position(|net| net.addr() == snat.value)?;
            Some((port, port.address_places.get(index)?))
        });
        if let Some((port, place)) = owner {
            reader.problem(
                &snat.place,
                format!(
                    "found {}, which is an address of port `{}` (line {}) and so Linux's; give the engine an address of its own",
                    snat.value, port.settings.name, place.line
                ),
            );
        }
        let of_link = used.links.iter().find_map(|link| {
            let index = link.settings.addresses.iter().position(|net| net.addr() == snat.value)?;
            link.address_places.get(index)
        });
        if let Some(place) = of_link {
            let message = format!(
                "found {}, which is an address of a link in `static.links` (line {}); give the engine an address of its own",
                snat.value, place.line
            );
            reader.problem(&snat.place, message);
        }
    }
}

fn check_pool_addresses(reader: &Reader, used: &UsedAddresses<'_>, pools: &[PlacedRange]) {
    for pool in pools {
        for (address, owner) in used.named().filter(|(address, _)| pool.range.contains(*address)) {
            let message = format!("found {}, which holds {address}, {owner}; take a range without it", pool.range);
            reader.problem(&pool.place, message);
        }
    }
}

/// FORWARDING section 8: a VIP of an `l2` pool is answered for on the port whose prefix holds it.
fn check_pool_links(reader: &Reader, used: &UsedAddresses<'_>, pools: &[PlacedRange]) {
    let of_ports = used.ports.iter().flat_map(|port| &port.settings.addresses);
    let prefixes: Vec<&IpNet> = of_ports.chain(used.links.iter().flat_map(|link| &link.settings.addresses)).collect();
    let on_link =
        |pool: &PlacedRange| prefixes.iter().any(|net| net.contains(&pool.range.first()) && net.contains(&pool.range.last()));
    for pool in pools.iter().filter(|pool| pool.announce == Announce::L2 && !on_link(pool)) {
        let message = format!(
            "found {}, which lies in no port's prefix, so that nobody could reach it (`announce: l2`); \
             take addresses of a port's subnet, give a port an address in theirs, or set `announce: routed`",
            pool.range
        );
        reader.problem(&pool.place, message);
    }
}

fn check_device_memory(reader: &Reader, ports: &[PlacedPort], hugepages: Hugepages) {
    for port in ports.iter().filter(|_| hugepages == Hugepages::Off) {
        let parts = port.settings.device.parts();
        let Some(pci) = parts.iter().find(|part| part.is_pci()) else { continue };
        let message = format!("found {pci}, a PCI device, which needs hugepages; set `memory.hugepages` to auto");
        reader.problem(&port.device_place, message);
    }
}

fn check_twin_names(reader: &Reader, ports: &[PlacedPort]) {
    let with_parts = ports.iter().flat_map(|port| port.settings.device.parts().into_iter().map(move |part| (port, part)));
    for (port, part) in with_parts {
        let Some(interface) = part.named_interface() else { continue };
        if ports.iter().any(|other| other.settings.twin == Twin::Tap && other.settings.name == interface) {
            reader.problem(
                &port.device_place,
                format!(
                    "uses interface {interface}, and a port's Linux twin would have that name too; name the port differently"
                ),
            );
        }
    }
}

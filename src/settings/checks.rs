//! Checks across keys: no address has two owners, and devices get the memory that they need.

use std::collections::BTreeMap;
use std::net::IpAddr;

use control::config::{Located, LocatedRange, Location, Reader};
use dataplane::compiler::unanswered;
use dataplane::{Route, VlanLink};
use ipnet::IpNet;
use proto::limits::RESERVED_MAX;
use proto::{Announce, GatewayProfile, LinkEdge};

use super::keys::Hugepages;
use super::links::{LocatedLink, tag_texts};
use super::port::{LocatedPort, Twin};

/// The addresses that the gateway itself uses, by use.
pub(super) struct UsedAddresses<'a> {
    pub(super) ports: &'a [LocatedPort],
    pub(super) links: &'a [LocatedLink],
    pub(super) snat: &'a [Located<IpAddr>],
    pub(super) tunnel: &'a [Located<IpAddr>],
    pub(super) node_ports: &'a [Located<IpAddr>],
    pub(super) routes: &'a [Located<Route>],
    /// Number of VIP groups, to each of which the first SNAT addresses of a family belong; `None`: they belong to none.
    pub(super) snat_groups: Option<u8>,
}

impl UsedAddresses<'_> {
    /// Each address of ports, links and SNAT with a description. Node ports are served on port addresses.
    fn own(&self) -> impl Iterator<Item = (IpAddr, String)> {
        let ports = self.ports.iter().flat_map(|port| {
            port.settings.addresses.iter().map(|net| (net.addr(), format!("an address of port `{}`", port.settings.name)))
        });
        let of_links = self.links.iter().flat_map(|link| &link.settings.addresses);
        let links = of_links.map(|net| (net.addr(), "an address of a link in `static.links`".to_owned()));
        let snat = self.snat.iter().map(|located| (located.value, "a SNAT address".to_owned()));
        ports.chain(links).chain(snat)
    }

    /// The same, and next hops.
    fn named(&self) -> impl Iterator<Item = (IpAddr, String)> {
        let next_hop = |route: &Located<Route>| Some((route.value.via?, format!("the next hop of `{}`", route.location.key)));
        self.own().chain(self.routes.iter().filter_map(next_hop))
    }

    /// The ports and links with a prefix that holds an address, by name.
    fn links_of(&self, address: IpAddr) -> Vec<String> {
        let holds = |nets: &[IpNet]| nets.iter().any(|net| net.contains(&address));
        let ports = self.ports.iter().map(|port| &port.settings).filter(|port| holds(&port.addresses));
        let links = self.links.iter().map(|link| &link.settings).filter(|link| holds(&link.addresses));
        let name_of = |link: &VlanLink| {
            let port = self.ports.get(usize::from(link.link.port().0)).map_or("", |port| &port.settings.name);
            format!("VLAN {} of port `{port}`", tag_texts(link.link).join("."))
        };
        ports.map(|port| format!("port `{}`", port.name)).chain(links.map(name_of)).collect()
    }

    /// What the gateway says about itself.
    pub(super) fn profile(&self) -> GatewayProfile {
        let of_engine = self.node_ports.iter().chain(self.tunnel).map(|located| located.value);
        let own = self.own().map(|(address, _)| address).chain(of_engine);
        GatewayProfile {
            prefixes: self.prefixes().copied().collect(),
            serves_node_ports: Some(!self.node_ports.is_empty()),
            ..GatewayProfile::new(own, self.routes.iter().filter_map(|located| located.value.via))
        }
    }

    /// The prefixes of ports and links.
    fn prefixes(&self) -> impl Iterator<Item = &IpNet> {
        let of_ports = self.ports.iter().flat_map(|port| &port.settings.addresses);
        of_ports.chain(self.links.iter().flat_map(|link| &link.settings.addresses))
    }
}

/// Runs every check.
pub(super) fn run(reader: &Reader, used: &UsedAddresses<'_>, hugepages: Hugepages, pools: &[LocatedRange]) {
    check_address_count(reader, used);
    snat_addresses_are_exclusive(reader, used);
    for is_v4 in [true, false] {
        groups_have_addresses_on_the_same_links(reader, used, is_v4);
    }
    pools_contain_no_used_address(reader, used, pools);
    pools_are_on_link(reader, used, pools);
    pools_have_edges(reader, used, pools);
    devices_have_memory(reader, used.ports, hugepages);
    twin_names_are_exclusive(reader, used.ports);
}

fn check_address_count(reader: &Reader, used: &UsedAddresses<'_>) {
    let count = used.profile().reserved().len();
    if let Some(port) = used.ports.first().filter(|_| count > RESERVED_MAX) {
        let location = Location { line: port.device_location.line, key: "ports".to_owned() };
        let message = format!("found {count} addresses of ports, next hops, SNAT and tunnels, expected at most {RESERVED_MAX}");
        reader.problem(&location, format!("{message}; give the gateway fewer"));
    }
}

fn snat_addresses_are_exclusive(reader: &Reader, used: &UsedAddresses<'_>) {
    for snat in used.snat {
        let of_port = used.ports.iter().find_map(|port| {
            let line = line_of(snat.value, &port.settings.addresses, &port.address_locations)?;
            Some(format!("an address of port `{}` (line {line}) and so Linux's", port.settings.name))
        });
        let of_link = used.links.iter().find_map(|link| {
            let line = line_of(snat.value, &link.settings.addresses, &link.address_locations)?;
            Some(format!("an address of a link in `static.links` (line {line})"))
        });
        for owner in of_port.into_iter().chain(of_link) {
            let message = format!("found {}, which is {owner}; give the engine an address of its own", snat.value);
            reader.problem(&snat.location, message);
        }
    }
}

/// A group of VIPs has one SNAT address of a family. Inside the prefix of a port or link it serves that one only, so the
/// addresses of all groups lie in the same prefixes, or in none: backends behind a link are backends of every group.
fn groups_have_addresses_on_the_same_links(reader: &Reader, used: &UsedAddresses<'_>, is_v4: bool) {
    let Some(groups) = used.snat_groups.filter(|_| !reader.has_problem_below("ports")) else { return };
    let of_family = used.snat.iter().filter(|snat| snat.value.is_ipv4() == is_v4);
    let mut of_groups = of_family.take(groups.into()).enumerate().map(|(group, snat)| (group, snat, used.links_of(snat.value)));
    let Some((first, first_snat, expected)) = of_groups.next() else { return };
    let names = |links: &[String]| if links.is_empty() { "every link".to_owned() } else { links.join(", ") };
    for (group, snat, links) in of_groups.filter(|(.., links)| *links != expected) {
        let (found, address, wanted, other) = (names(&links), snat.value, names(&expected), first_snat.value);
        let message = format!(
            "found {address}, which belongs to VIP group {group} and serves {found}, while {other} of group {first} serves {wanted}: \
             towards backends behind one link only some groups would have an address (`snat_exhausted`); take addresses for all \
             groups from the prefix of one port or link, or from none"
        );
        reader.problem(&snat.location, message);
    }
}

/// The line of an address among those of a port or a link.
fn line_of(address: IpAddr, addresses: &[IpNet], locations: &[Location]) -> Option<usize> {
    let index = addresses.iter().position(|net| net.addr() == address)?;
    locations.get(index).map(|location| location.line)
}

fn pools_contain_no_used_address(reader: &Reader, used: &UsedAddresses<'_>, pools: &[LocatedRange]) {
    for pool in pools {
        for (address, owner) in used.named().filter(|(address, _)| pool.range.contains(*address)) {
            let message = format!("found {}, which holds {address}, {owner}; take a range without it", pool.range);
            reader.problem(&pool.location, message);
        }
    }
}

/// Warns of `l2` pools that no prefix of the configuration contains. A VLAN device of Linux may have one that does: it is
/// known only where the gateway runs.
fn pools_are_on_link(reader: &Reader, used: &UsedAddresses<'_>, pools: &[LocatedRange]) {
    let prefixes: Vec<&IpNet> = used.prefixes().collect();
    for pool in pools.iter().filter(|pool| pool.announce == Announce::L2) {
        let what = format_args!("found {}, which", pool.range);
        let problem = unanswered(what, pool.range.first(), pool.range.last(), prefixes.iter().copied());
        if let Some(problem) = problem {
            let known = "the file does not show the VLAN devices of Linux: with such an address on one, all is well";
            reader.warning(&pool.location, format!("{problem} ({known})"));
        }
    }
}

/// Warns of pools with addresses that no host of a link has: the controller leaves them out.
fn pools_have_edges(reader: &Reader, used: &UsedAddresses<'_>, pools: &[LocatedRange]) {
    let edges: BTreeMap<IpAddr, LinkEdge> = used.profile().edges().map(|edge| (edge.address, edge)).collect();
    for pool in pools {
        for (address, edge) in edges.range(pool.range.first()..=pool.range.last()) {
            let message = format!("found {}, which holds {address}, {edge}; no Service gets this address", pool.range);
            reader.warning(&pool.location, message);
        }
    }
}

fn devices_have_memory(reader: &Reader, ports: &[LocatedPort], hugepages: Hugepages) {
    for port in ports.iter().filter(|_| hugepages == Hugepages::Off) {
        let parts = port.settings.device.parts();
        let Some(pci) = parts.iter().find(|part| part.is_pci()) else { continue };
        let message = format!("found {pci}, a PCI device, which needs hugepages; set `memory.hugepages` to auto");
        reader.problem(&port.device_location, message);
    }
}

fn twin_names_are_exclusive(reader: &Reader, ports: &[LocatedPort]) {
    let with_parts = ports.iter().flat_map(|port| port.settings.device.parts().into_iter().map(move |part| (port, part)));
    for (port, part) in with_parts {
        let Some(interface) = part.named_interface() else { continue };
        if ports.iter().any(|other| other.settings.twin == Twin::Tap && other.settings.name == interface) {
            reader.problem(
                &port.device_location,
                format!(
                    "uses interface {interface}, and a port's Linux twin would have that name too; name the port differently"
                ),
            );
        }
    }
}

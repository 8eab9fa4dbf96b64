//! Builds tables from the kernel's messages. Pure: no socket, no clock.
//!
//! Invariant: a dump, and every later message applied to it in order, give the kernel's state. Where the kernel changes
//! something without a message, [`Effect::Stale`] says that a new dump is needed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use dataplane::{Link, Mac, Neighbour, Network, VlanLink};
use ipnet::IpNet;
use netlink_packet_core::NLM_F_REPLACE;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::LinkMessage;
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourExtFlags, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::RouteProtocol;

use super::followed_routes::{FollowedRoute, insert_position};
use super::interfaces::{Interfaces, LinkChange, interface_address};
use super::neighbours::{NeighbourEntry, NeighbourKey, OUR_PROTOCOL};
use super::routes::{InsertPosition, Routes};

/// Effect of a message on the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Effect {
    /// None.
    Nothing,
    /// The tables changed.
    Changed,
    /// The kernel changed more than the message says: a link was added, went up or down, or lost an address.
    Stale,
}

/// Linux's tables, restricted to our ports.
#[derive(Debug)]
pub(super) struct Tables {
    interfaces: Interfaces,
    addresses: BTreeSet<(Link, IpNet)>,
    routes: Routes,
    neighbours: BTreeMap<NeighbourKey, NeighbourEntry>,
}

impl Tables {
    /// Empty tables for the twins with these names, in the order of [`dataplane::PortIndex`].
    pub(super) fn new(names: &[String]) -> Self {
        Self {
            interfaces: Interfaces::new(names),
            addresses: BTreeSet::new(),
            routes: Routes::default(),
            neighbours: BTreeMap::new(),
        }
    }

    /// Applies a message with the flags of its header.
    pub(super) fn apply(&mut self, message: &RouteNetlinkMessage, flags: u16) -> Effect {
        let changed = match message {
            // Entries on an interface that was unknown until now have been ignored. When an interface goes down or up,
            // Linux removes and restores IPv4 routes without a message.
            RouteNetlinkMessage::NewLink(m) => return self.interface(m),
            RouteNetlinkMessage::DelLink(m) => {
                let index = m.header.index;
                return if self.interfaces.remove(index) || self.routes.leave_by(index) {
                    Effect::Stale
                } else {
                    Effect::Nothing
                };
            }
            RouteNetlinkMessage::NewAddress(m) => self.address(m).is_some_and(|a| self.addresses.insert(a)),
            RouteNetlinkMessage::DelAddress(m) => {
                let gone = self.address(m).is_some_and(|a| self.addresses.remove(&a));
                // Linux removes routes that prefer a lost source address without a message.
                return if gone || self.routes.leave_by(m.header.index) { Effect::Stale } else { Effect::Nothing };
            }
            RouteNetlinkMessage::NewRoute(m) => {
                let Some(route) = FollowedRoute::of(m, &self.interfaces) else { return Effect::Nothing };
                return self.new_route(route, insert_position(m, flags), flags & NLM_F_REPLACE != 0);
            }
            RouteNetlinkMessage::DelRoute(m) => {
                let Some(FollowedRoute { to, metric, next_hops, elsewhere }) = FollowedRoute::of(m, &self.interfaces) else {
                    return Effect::Nothing;
                };
                let gone = elsewhere.into_iter().filter(|hop| self.routes.remove_elsewhere(to, metric, *hop)).count();
                self.routes.remove(to, metric, next_hops.as_ref()) || gone > 0
            }
            RouteNetlinkMessage::NewNeighbour(m) => {
                self.neighbour(m).is_some_and(|(key, entry)| self.neighbours.insert(key, entry) != Some(entry))
            }
            RouteNetlinkMessage::DelNeighbour(m) => {
                self.neighbour(m).is_some_and(|(key, _)| self.neighbours.remove(&key).is_some())
            }
            _ => false,
        };
        if changed { Effect::Changed } else { Effect::Nothing }
    }

    /// Applies a message about an interface.
    fn interface(&mut self, message: &LinkMessage) -> Effect {
        let changed = match self.interfaces.apply(message) {
            LinkChange::Nothing => Effect::Nothing,
            LinkChange::Promiscuity => Effect::Changed,
            LinkChange::Link => Effect::Stale,
        };
        let lost_or_renamed = self.interfaces.rename(message) && self.routes.leave_by(message.header.index);
        if lost_or_renamed { Effect::Stale } else { changed }
    }

    /// Inserts a route. `replaces`: the message says that it replaces one.
    fn new_route(&mut self, route: FollowedRoute, position: InsertPosition, replaces: bool) -> Effect {
        let FollowedRoute { to, metric, next_hops, elsewhere } = route;
        // Linux replaces only the first of several routes with one metric, which may be that of another device. The order
        // among links and other devices is not known here.
        let unclear = replaces && self.routes.are_several(to, metric);
        let mut changed = replaces && self.routes.clear_elsewhere(to, metric);
        // Only a message about a route by our links, or one that replaces, says anything about the routes by our links.
        if replaces || next_hops.is_some() || elsewhere.is_empty() {
            changed |= self.routes.insert(to, metric, next_hops, position);
        }
        for hop in elsewhere {
            changed |= self.routes.insert_elsewhere(to, metric, hop);
        }
        match (unclear, changed) {
            (true, _) => Effect::Stale,
            (false, true) => Effect::Changed,
            (false, false) => Effect::Nothing,
        }
    }

    /// The interface index of a link, while its interface exists.
    pub(super) fn index_of(&self, link: Link) -> Option<u32> {
        self.interfaces.index_of(link)
    }

    /// The interface indices of the twins.
    pub(super) fn twins(&self) -> Vec<u32> {
        self.interfaces.twins()
    }

    /// Linux's neighbour entries, resolved or not.
    pub(super) fn neighbours(&self) -> &BTreeMap<NeighbourKey, NeighbourEntry> {
        &self.neighbours
    }

    /// The routes.
    pub(super) fn routes(&self) -> &Routes {
        &self.routes
    }

    /// The network as the engine needs it.
    pub(super) fn network(&self) -> Network {
        Network {
            routes: self.routes.used().collect(),
            unreachable: self.routes.unreachable().collect(),
            elsewhere: self.routes.elsewhere().collect(),
            devices: self.routes.devices().map(|index| (index, self.interfaces.name(index))).collect(),
            neighbours: self
                .neighbours
                .iter()
                .filter_map(|(&(link, address), entry)| entry.mac.map(|mac| Neighbour { link, address, mac }))
                .collect(),
            vlans: self.vlans(),
            addresses: self.addresses.iter().map(|(_, net)| net.addr()).collect(),
            promiscuous: self.interfaces.promiscuous(),
            interfaces: Some(self.interfaces.indices()),
            ..Network::default()
        }
    }

    /// The links of VLAN devices.
    fn vlans(&self) -> Vec<VlanLink> {
        let nets = |link: Link| self.addresses.iter().filter(move |(on, _)| *on == link).map(|(_, net)| *net).collect();
        let mut vlans: Vec<_> =
            self.interfaces.vlans().map(|(link, mtu)| VlanLink { link, mtu, addresses: nets(link) }).collect();
        // Linux allows two devices with the same tags only if the kinds of the tags differ; the kind is part of the
        // link.
        vlans.sort_unstable_by_key(|vlan| vlan.link);
        vlans
    }

    fn address(&self, message: &AddressMessage) -> Option<(Link, IpNet)> {
        let link = self.interfaces.link(message.header.index)?;
        Some((link, interface_address(message)?))
    }

    fn neighbour(&self, message: &NeighbourMessage) -> Option<(NeighbourKey, NeighbourEntry)> {
        let link = self.interfaces.link(message.header.ifindex)?;
        if message.header.flags.contains(NeighbourFlags::Proxy) {
            return None;
        }
        let (mut address, mut mac, mut entry) = (None, None, NeighbourEntry::default());
        for attribute in &message.attributes {
            match attribute {
                NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => address = Some(IpAddr::V4(*ip)),
                NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => address = Some(IpAddr::V6(*ip)),
                NeighbourAttribute::LinkLayerAddress(bytes) => mac = bytes.as_slice().try_into().ok().map(Mac),
                NeighbourAttribute::ExtFlags(flags) => entry.managed = flags.contains(NeighbourExtFlags::Managed),
                NeighbourAttribute::Protocol(protocol) => entry.ours = *protocol == RouteProtocol::Other(OUR_PROTOCOL),
                _ => {}
            }
        }
        let address = address.filter(|ip| !ip.is_multicast())?;
        let state = message.header.state;
        entry.permanent = state == NeighbourState::Permanent;
        entry.mac = mac.filter(|mac| usable(state) && mac.0[0] & 1 == 0);
        Some(((link, address), entry))
    }
}

/// Whether Linux itself would send to a neighbour in this state (FORWARDING section 7).
fn usable(state: NeighbourState) -> bool {
    use NeighbourState as S;
    matches!(state, S::Reachable | S::Stale | S::Delay | S::Probe | S::Permanent | S::Noarp)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use dataplane::{PortIndex, TagKind, Vlan};
    use netlink_packet_route::AddressFamily;
    use netlink_packet_route::address::AddressAttribute;
    use netlink_packet_route::link::{InfoData, InfoKind, InfoVlan, LinkAttribute, LinkFlags, LinkInfo, VlanProtocol};
    use netlink_packet_route::route::{
        RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteLwEnCapType, RouteMessage, RouteNextHop, RouteNextHopFlags,
        RouteType,
    };

    use super::*;

    const UPLINK: u32 = 7;
    const CLUSTER: u32 = 8;
    const FOREIGN: u32 = 2;

    fn tables() -> Tables {
        let mut tables = Tables::new(&["uplink".to_owned(), "cluster".to_owned()]);
        for (index, name) in [(FOREIGN, "eth0"), (UPLINK, "uplink"), (CLUSTER, "cluster")] {
            tables.apply(&link(index, name, true), 0);
        }
        tables
    }

    fn link(index: u32, name: &str, up: bool) -> RouteNetlinkMessage {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.flags = if up { LinkFlags::Up } else { LinkFlags::empty() };
        message.attributes.push(LinkAttribute::IfName(name.to_owned()));
        RouteNetlinkMessage::NewLink(message)
    }

    fn v4(text: &str) -> Ipv4Addr {
        text.parse().unwrap()
    }

    #[test]
    fn a_twin_that_somebody_wants_all_frames_of_is_promiscuous() {
        let mut tables = tables();
        let wanted_by = |index, name, count| {
            let RouteNetlinkMessage::NewLink(mut message) = link(index, name, true) else { unreachable!() };
            message.attributes.push(LinkAttribute::Promiscuity(count));
            RouteNetlinkMessage::NewLink(message)
        };
        assert_eq!(tables.apply(&wanted_by(FOREIGN, "eth0", 1), 0), Effect::Nothing, "no twin");
        assert_eq!(tables.apply(&wanted_by(CLUSTER, "cluster", 1), 0), Effect::Changed);
        assert_eq!(tables.apply(&wanted_by(UPLINK, "uplink", 2), 0), Effect::Changed);
        assert_eq!(tables.network().promiscuous, [PortIndex(0), PortIndex(1)]);
        assert_eq!(tables.apply(&wanted_by(UPLINK, "uplink", 1), 0), Effect::Nothing);
        assert_eq!(tables.apply(&wanted_by(UPLINK, "uplink", 0), 0), Effect::Changed);
        assert_eq!(tables.network().promiscuous, [PortIndex(1)]);
        assert_eq!(tables.twins(), [UPLINK, CLUSTER]);
    }

    fn route(to: &str, via: Option<&str>, index: u32, metric: u32) -> RouteMessage {
        let to: IpNet = to.parse().unwrap();
        let mut message = RouteMessage::default();
        message.header.address_family = if to.addr().is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        message.header.destination_prefix_length = to.prefix_len();
        message.header.kind = RouteType::Unicast;
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.attributes.push(RouteAttribute::Destination(to.addr().into()));
        message.attributes.push(RouteAttribute::Oif(index));
        message.attributes.push(RouteAttribute::Priority(metric));
        if let Some(via) = via {
            message.attributes.push(RouteAttribute::Gateway(via.parse::<IpAddr>().unwrap().into()));
        }
        message
    }

    fn neighbour(address: &str, index: u32, state: NeighbourState, mac: Option<[u8; 6]>) -> RouteNetlinkMessage {
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.ifindex = index;
        message.header.state = state;
        message.attributes.push(NeighbourAttribute::Destination(NeighbourAddress::Inet(v4(address))));
        if let Some(mac) = mac {
            message.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.to_vec()));
        }
        RouteNetlinkMessage::NewNeighbour(message)
    }

    fn routes(tables: &Tables) -> Vec<String> {
        let hop = |via: Option<IpAddr>| via.map_or("link".to_owned(), |ip| ip.to_string());
        tables.network().routes.iter().map(|r| format!("{} {} {}", r.to, hop(r.via), r.link.port().0)).collect()
    }

    #[test]
    fn routes_of_both_families_come_and_go() {
        let mut tables = tables();
        for (to, via, index) in
            [("0.0.0.0/0", Some("192.0.2.1"), UPLINK), ("10.0.0.0/24", None, CLUSTER), ("::/0", Some("2001:db8::1"), UPLINK)]
        {
            assert_eq!(tables.apply(&RouteNetlinkMessage::NewRoute(route(to, via, index, 0)), 0), Effect::Changed);
        }
        assert_eq!(routes(&tables), ["0.0.0.0/0 192.0.2.1 0", "10.0.0.0/24 link 1", "::/0 2001:db8::1 0"]);
        let gone = RouteNetlinkMessage::DelRoute(route("10.0.0.0/24", None, CLUSTER, 0));
        assert_eq!(tables.apply(&gone, 0), Effect::Changed);
        assert_eq!(tables.apply(&gone, 0), Effect::Nothing);
        assert_eq!(routes(&tables), ["0.0.0.0/0 192.0.2.1 0", "::/0 2001:db8::1 0"]);
    }

    #[test]
    fn a_default_route_has_no_destination_attribute() {
        let mut tables = tables();
        let mut message = route("0.0.0.0/0", Some("192.0.2.1"), UPLINK, 0);
        message.attributes.retain(|a| !matches!(a, RouteAttribute::Destination(_)));
        tables.apply(&RouteNetlinkMessage::NewRoute(message), 0);
        assert_eq!(routes(&tables), ["0.0.0.0/0 192.0.2.1 0"]);
    }

    #[test]
    fn what_is_not_a_plain_route_of_ours_is_ignored() {
        let base = || route("198.51.100.0/24", Some("192.0.2.1"), UPLINK, 0);
        let change = |f: &dyn Fn(&mut RouteMessage)| {
            let mut message = base();
            f(&mut message);
            message
        };
        let rows = [
            ("the default route of another device", route("0.0.0.0/0", None, FOREIGN, 0)),
            ("our own address", change(&|m| m.header.kind = RouteType::Local)),
            ("another table", change(&|m| m.attributes.push(RouteAttribute::Table(150)))),
            ("for a type of service", change(&|m| m.header.tos = 16)),
            ("for a source", change(&|m| m.header.source_prefix_length = 8)),
            ("dead", change(&|m| m.header.flags = RouteFlags::Dead)),
            ("a cached clone", change(&|m| m.header.flags = RouteFlags::Cloned)),
            ("link-local", route("fe80::/64", None, UPLINK, 256)),
        ];
        for (what, message) in rows {
            let mut tables = tables();
            assert_eq!(tables.apply(&RouteNetlinkMessage::NewRoute(message), 0), Effect::Nothing, "{what}");
            assert!(tables.network().routes.is_empty() && tables.network().elsewhere.is_empty(), "{what}");
        }
    }

    /// Destinations of routes by devices that are no links, with the names of these.
    fn elsewhere(tables: &Tables) -> Vec<String> {
        let network = tables.network();
        network.elsewhere.iter().map(|(to, device)| format!("{to} {}", network.devices[device])).collect()
    }

    #[test]
    fn a_destination_whose_longest_prefix_is_by_another_device_is_elsewhere_in_both_families() {
        let mut tables = tables();
        for (to, via, index) in [
            ("0.0.0.0/0", Some("192.0.2.1"), UPLINK),
            ("10.244.1.0/24", None, FOREIGN),
            ("::/0", Some("2001:db8::1"), UPLINK),
            ("fd00:244::/64", Some("fe80::1"), FOREIGN),
        ] {
            assert_eq!(tables.apply(&RouteNetlinkMessage::NewRoute(route(to, via, index, 0)), 0), Effect::Changed, "{to}");
        }
        assert_eq!(elsewhere(&tables), ["10.244.1.0/24 eth0", "fd00:244::/64 eth0"]);
        assert_eq!(routes(&tables).len(), 2);
        let gone = RouteNetlinkMessage::DelRoute(route("10.244.1.0/24", None, FOREIGN, 0));
        assert_eq!(tables.apply(&gone, 0), Effect::Changed);
        assert_eq!(tables.apply(&gone, 0), Effect::Nothing);
        assert_eq!(elsewhere(&tables), ["fd00:244::/64 eth0"]);
    }

    #[test]
    fn local_addresses_of_other_devices_and_encapsulated_routes_are_elsewhere_as_well() {
        let local = |to, index| {
            let mut message = route(to, None, index, 0);
            (message.header.kind, message.header.table) = (RouteType::Local, 255);
            message
        };
        let mut encapsulated = route("10.1.0.0/16", Some("192.0.2.1"), UPLINK, 0);
        encapsulated.attributes.push(RouteAttribute::EncapType(RouteLwEnCapType::Ip));
        let mut thrown = route("10.2.0.0/16", None, FOREIGN, 0);
        thrown.header.kind = RouteType::Throw;
        let mut tables = tables();
        for message in [local("203.0.113.7/32", FOREIGN), local("192.0.2.2/32", UPLINK), encapsulated, thrown] {
            tables.apply(&RouteNetlinkMessage::NewRoute(message), 0);
        }
        assert_eq!(elsewhere(&tables), ["10.1.0.0/16 uplink", "203.0.113.7/32 eth0"]);
        assert_eq!(tables.network().unreachable, ["10.2.0.0/16".parse::<IpNet>().unwrap()]);
    }

    #[test]
    fn a_route_that_moves_between_a_link_and_another_device_is_followed() {
        let new = |index, flags, tables: &mut Tables| {
            tables.apply(&RouteNetlinkMessage::NewRoute(route("10.244.1.0/24", None, index, 0)), flags)
        };
        let mut tables = tables();
        assert_eq!(new(CLUSTER, 0, &mut tables), Effect::Changed);
        assert_eq!(new(FOREIGN, NLM_F_REPLACE, &mut tables), Effect::Changed);
        assert_eq!((routes(&tables).len(), elsewhere(&tables).len()), (0, 1));
        assert_eq!(new(CLUSTER, NLM_F_REPLACE, &mut tables), Effect::Changed);
        assert_eq!((routes(&tables).len(), elsewhere(&tables).len()), (1, 0));
        assert_eq!(new(FOREIGN, 0, &mut tables), Effect::Changed);
        assert_eq!((routes(&tables).len(), elsewhere(&tables).len()), (1, 0), "of the same metric that of the link counts");
        assert_eq!(new(FOREIGN, NLM_F_REPLACE, &mut tables), Effect::Stale, "which of two was replaced is not known");
        let mut v6 = self::tables();
        let connected = |index| RouteNetlinkMessage::NewRoute(route("fd00::/64", None, index, 256));
        v6.apply(&connected(CLUSTER), 0);
        v6.apply(&connected(FOREIGN), 0);
        assert_eq!(routes(&v6), ["fd00::/64 link 1"], "another device with the same prefix takes nothing away");
    }

    #[test]
    fn a_device_with_routes_that_goes_down_changes_name_or_loses_an_address_makes_the_tables_stale() {
        let mut tables = tables();
        assert_eq!(tables.apply(&link(FOREIGN, "eth0", false), 0), Effect::Nothing, "no route leaves by it");
        tables.apply(&link(FOREIGN, "eth0", true), 0);
        tables.apply(&RouteNetlinkMessage::NewRoute(route("10.244.1.0/24", None, FOREIGN, 0)), 0);
        assert_eq!(tables.apply(&link(FOREIGN, "eth0", true), 0), Effect::Nothing);
        assert_eq!(tables.apply(&link(FOREIGN, "over0", true), 0), Effect::Stale);
        assert_eq!(elsewhere(&tables), ["10.244.1.0/24 over0"]);
        let RouteNetlinkMessage::NewAddress(lost) = address(FOREIGN, "203.0.113.7", 24) else { unreachable!() };
        assert_eq!(tables.apply(&RouteNetlinkMessage::DelAddress(lost), 0), Effect::Stale);
        assert_eq!(tables.apply(&link(FOREIGN, "over0", false), 0), Effect::Stale);
    }

    #[test]
    fn a_replaced_route_has_only_its_new_next_hop() {
        let mut tables = tables();
        tables.apply(&RouteNetlinkMessage::NewRoute(route("0.0.0.0/0", Some("192.0.2.1"), UPLINK, 0)), 0);
        let new = RouteNetlinkMessage::NewRoute(route("0.0.0.0/0", Some("192.0.2.254"), UPLINK, 0));
        tables.apply(&new, NLM_F_REPLACE);
        tables.apply(&RouteNetlinkMessage::DelRoute(route("0.0.0.0/0", Some("192.0.2.254"), UPLINK, 0)), 0);
        assert!(tables.network().routes.is_empty());
    }

    #[test]
    fn of_a_multipath_route_all_live_next_hops_by_our_ports_are_used() {
        let mut tables = tables();
        let mut message = route("0.0.0.0/0", None, 0, 0);
        message.attributes.retain(|a| !matches!(a, RouteAttribute::Oif(_)));
        let hop = |index, via: &str, flags, weight: u8| {
            let mut hop = RouteNextHop::default();
            hop.interface_index = index;
            hop.flags = flags;
            hop.hops = weight - 1;
            hop.attributes.push(RouteAttribute::Gateway(RouteAddress::Inet(v4(via))));
            hop
        };
        message.attributes.push(RouteAttribute::MultiPath(vec![
            hop(FOREIGN, "203.0.113.1", RouteNextHopFlags::empty(), 1),
            hop(UPLINK, "192.0.2.1", RouteNextHopFlags::Dead, 1),
            hop(UPLINK, "192.0.2.2", RouteNextHopFlags::empty(), 3),
            hop(CLUSTER, "10.0.0.1", RouteNextHopFlags::empty(), 1),
        ]));
        tables.apply(&RouteNetlinkMessage::NewRoute(message.clone()), 0);
        assert_eq!(routes(&tables), ["0.0.0.0/0 192.0.2.2 0", "0.0.0.0/0 10.0.0.1 1"]);
        assert_eq!(tables.network().routes.iter().map(|r| r.weight).collect::<Vec<_>>(), [3, 1]);
        tables.apply(&RouteNetlinkMessage::DelRoute(message), 0);
        assert!(routes(&tables).is_empty());
    }

    #[test]
    fn there_is_no_way_to_blackholes_whatever_a_wider_route_says() {
        for kind in [RouteType::BlackHole, RouteType::Unreachable, RouteType::Prohibit] {
            let mut tables = tables();
            let mut message = route("198.51.100.0/24", None, FOREIGN, 0);
            message.header.kind = kind;
            assert_eq!(tables.apply(&RouteNetlinkMessage::NewRoute(message.clone()), 0), Effect::Changed, "{kind:?}");
            assert_eq!(tables.network().unreachable, ["198.51.100.0/24".parse::<IpNet>().unwrap()]);
            tables.apply(&RouteNetlinkMessage::DelRoute(message), 0);
            assert!(tables.network().unreachable.is_empty());
        }
    }

    #[test]
    fn a_neighbour_counts_while_linux_would_send_to_it() {
        use NeighbourState as S;
        let rows = [
            (S::Reachable, true),
            (S::Stale, true),
            (S::Delay, true),
            (S::Probe, true),
            (S::Permanent, true),
            (S::Noarp, true),
            (S::Incomplete, false),
            (S::Failed, false),
            (S::None, false),
        ];
        for (state, counts) in rows {
            let mut tables = tables();
            tables.apply(&neighbour("192.0.2.1", UPLINK, S::Reachable, Some([2, 0, 0, 0, 0, 9])), 0);
            tables.apply(&neighbour("192.0.2.1", UPLINK, state, Some([2, 0, 0, 0, 0, 1])), 0);
            let expected: Vec<_> = counts.then_some(Mac([2, 0, 0, 0, 0, 1])).into_iter().collect();
            assert_eq!(tables.network().neighbours.iter().map(|n| n.mac).collect::<Vec<_>>(), expected, "{state}");
        }
    }

    #[test]
    fn multicast_neighbours_and_those_of_foreign_interfaces_do_not_count() {
        let mut tables = tables();
        let group = Some([1, 0, 0x5e, 0, 0, 0x16]);
        tables.apply(&neighbour("224.0.0.22", UPLINK, NeighbourState::Noarp, group), 0);
        tables.apply(&neighbour("192.0.2.9", UPLINK, NeighbourState::Permanent, group), 0);
        tables.apply(&neighbour("192.0.2.9", FOREIGN, NeighbourState::Reachable, Some([2; 6])), 0);
        assert!(tables.network().neighbours.is_empty());
    }

    #[test]
    fn an_interface_of_ours_that_appears_moves_or_goes_makes_the_tables_stale() {
        let mut tables = tables();
        assert_eq!(tables.apply(&link(UPLINK, "uplink", true), 0), Effect::Nothing);
        assert_eq!(tables.apply(&link(UPLINK, "uplink", false), 0), Effect::Stale);
        assert_eq!(tables.apply(&link(UPLINK, "other", true), 0), Effect::Stale);
        assert_eq!(tables.index_of(PortIndex(0).into()), None);
        assert_eq!(tables.apply(&link(11, "uplink", true), 0), Effect::Stale);
        assert_eq!(tables.index_of(PortIndex(0).into()), Some(11));
        let mut gone = LinkMessage::default();
        gone.header.index = 11;
        assert_eq!(tables.apply(&RouteNetlinkMessage::DelLink(gone), 0), Effect::Stale);
    }

    /// A VLAN device with an index, above another interface.
    fn vlan(index: u32, lower: u32, id: u16, service: bool) -> LinkMessage {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.flags = LinkFlags::Up;
        let protocol = if service { VlanProtocol::Ieee8021Ad } else { VlanProtocol::Ieee8021Q };
        message.attributes.extend([
            LinkAttribute::IfName(format!("vlan{index}")),
            LinkAttribute::Mtu(1496),
            LinkAttribute::Link(lower),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Vlan),
                LinkInfo::Data(InfoData::Vlan(vec![InfoVlan::Id(id), InfoVlan::Protocol(protocol)])),
            ]),
        ]);
        message
    }

    fn address(index: u32, ip: &str, prefix_len: u8) -> RouteNetlinkMessage {
        let mut message = AddressMessage::default();
        (message.header.index, message.header.prefix_len) = (index, prefix_len);
        message.attributes.push(AddressAttribute::Address(ip.parse().unwrap()));
        RouteNetlinkMessage::NewAddress(message)
    }

    fn tagged(port: u8, tags: &[(TagKind, u16)]) -> Link {
        let vlan = tags.iter().fold(Vlan::NONE, |vlan, &(kind, id)| vlan.with(kind, id).unwrap());
        Link::new(PortIndex(port), vlan)
    }

    #[test]
    fn vlan_devices_above_a_twin_are_links_with_addresses_routes_and_neighbours() {
        let mut tables = tables();
        for message in [vlan(20, UPLINK, 100, false), vlan(21, CLUSTER, 7, true), vlan(22, 21, 200, false)] {
            assert_eq!(tables.apply(&RouteNetlinkMessage::NewLink(message.clone()), 0), Effect::Stale, "new");
            assert_eq!(tables.apply(&RouteNetlinkMessage::NewLink(message), 0), Effect::Nothing, "the same");
        }
        tables.apply(&address(20, "192.0.2.2", 24), 0);
        tables.apply(&RouteNetlinkMessage::NewRoute(route("198.51.100.0/24", Some("192.0.2.1"), 20, 0)), 0);
        tables.apply(&neighbour("10.0.0.11", 22, NeighbourState::Reachable, Some([2; 6])), 0);
        let single = tagged(0, &[(TagKind::Customer, 100)]);
        let (outer, double) =
            (tagged(1, &[(TagKind::Service, 7)]), tagged(1, &[(TagKind::Service, 7), (TagKind::Customer, 200)]));
        let network = tables.network();
        assert_eq!(
            network.vlans.iter().map(|v| (v.link, v.mtu)).collect::<Vec<_>>(),
            [(single, 1496), (outer, 1496), (double, 1496)]
        );
        assert_eq!(network.vlans[0].addresses, ["192.0.2.2/24".parse().unwrap()]);
        assert_eq!((network.routes[0].link, network.neighbours[0].link), (single, double));
        assert_eq!(network.addresses, ["192.0.2.2".parse::<IpAddr>().unwrap()]);
        assert_eq!((tables.index_of(single), tables.index_of(double)), (Some(20), Some(22)));
        let mut gone = LinkMessage::default();
        gone.header.index = 21;
        assert_eq!(tables.apply(&RouteNetlinkMessage::DelLink(gone), 0), Effect::Stale);
        assert_eq!(tables.network().vlans.len(), 1, "a device stacked on it is no longer a link");
    }

    #[test]
    fn what_is_no_vlan_device_of_ours_is_no_link() {
        let mut down = vlan(20, UPLINK, 100, false);
        down.header.flags = LinkFlags::empty();
        let mut elsewhere = vlan(20, UPLINK, 100, false);
        elsewhere.attributes.push(LinkAttribute::LinkNetNsId(1));
        let mut bridge = vlan(20, UPLINK, 100, false);
        bridge.attributes.retain(|a| !matches!(a, LinkAttribute::LinkInfo(_)));
        bridge.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Bridge)]));
        let rows = [
            ("above a foreign interface", vec![vlan(20, FOREIGN, 100, false)]),
            ("down", vec![down]),
            ("above an interface of another namespace", vec![elsewhere]),
            ("a bridge", vec![bridge]),
            ("of the reserved identifier", vec![vlan(20, UPLINK, 4095, false)]),
        ];
        for (sentence, messages) in rows {
            let mut tables = tables();
            for message in messages {
                tables.apply(&RouteNetlinkMessage::NewLink(message), 0);
            }
            assert!(tables.network().vlans.is_empty(), "{sentence}");
        }
        let mut deep = tables();
        for message in [vlan(20, UPLINK, 1, true), vlan(21, 20, 2, false), vlan(22, 21, 3, false), vlan(23, 23, 4, false)] {
            deep.apply(&RouteNetlinkMessage::NewLink(message), 0);
        }
        assert_eq!(deep.network().vlans.len(), 2, "three tags, and a device stacked on itself");
    }

    #[test]
    fn a_vlan_device_that_is_reported_before_its_lower_interface_is_a_link_as_well() {
        let mut tables = tables();
        assert_eq!(tables.apply(&RouteNetlinkMessage::NewLink(vlan(5, 6, 200, false)), 0), Effect::Nothing);
        assert_eq!(tables.apply(&RouteNetlinkMessage::NewLink(vlan(6, UPLINK, 7, true)), 0), Effect::Stale);
        assert_eq!(tables.network().vlans.len(), 2);
    }

    #[test]
    fn a_lost_address_makes_the_tables_stale() {
        let mut tables = tables();
        let mut message = AddressMessage::default();
        message.header.index = UPLINK;
        message.attributes.push(AddressAttribute::Address("192.0.2.99".parse().unwrap()));
        message.attributes.push(AddressAttribute::Local("192.0.2.2".parse().unwrap()));
        assert_eq!(tables.apply(&RouteNetlinkMessage::NewAddress(message.clone()), 0), Effect::Changed);
        assert_eq!(tables.network().addresses, ["192.0.2.2".parse::<IpAddr>().unwrap()]);
        assert_eq!(tables.apply(&RouteNetlinkMessage::DelAddress(message), 0), Effect::Stale);
        assert!(tables.network().addresses.is_empty());
    }
}

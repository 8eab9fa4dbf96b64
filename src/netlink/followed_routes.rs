//! Reads a route of Linux as far as the gateway follows it: its next hops by our links, and the other devices that it
//! leaves by.
//!
//! Invariant: a route that packets of the gateway cannot take is never left out, apart from default routes, since a
//! shorter prefix would get its packets. Not here: the order of routes.

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_APPEND, NLM_F_MULTIPART, NLM_F_REPLACE};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteLwEnCapType, RouteMessage, RouteNextHop, RouteNextHopFlags,
    RouteType, RouteVia,
};
use smallvec::SmallVec;

use super::interfaces::Interfaces;
use super::routes::{ForeignHop, InsertPosition, NextHop, NextHops};

/// Table "local": addresses of the machine itself.
const TABLE_LOCAL: u32 = 255;

/// A route of table main, or an address of the machine.
#[derive(Debug)]
pub(super) struct FollowedRoute {
    /// Its destination.
    pub(super) to: IpNet,
    /// Its metric.
    pub(super) metric: u32,
    /// The live next hops by our links. Empty ones: the destination is unreachable.
    pub(super) next_hops: Option<NextHops>,
    /// The live next hops that packets of the gateway cannot take: their devices are no links, or the route encapsulates.
    pub(super) elsewhere: SmallVec<[ForeignHop; 1]>,
}

impl FollowedRoute {
    /// The route of a message, if it is of a kind that is followed.
    pub(super) fn of(message: &RouteMessage, interfaces: &Interfaces) -> Option<Self> {
        let header = &message.header;
        if header.tos != 0 || header.source_prefix_length != 0 || header.flags.contains(RouteFlags::Cloned) {
            return None;
        }
        let (mut table, mut metric) = (u32::from(header.table), 0);
        let mut destination = unspecified(header.address_family)?;
        for attribute in &message.attributes {
            match attribute {
                RouteAttribute::Table(t) => table = *t,
                RouteAttribute::Priority(p) => metric = *p,
                RouteAttribute::Destination(to) => destination = ip(to)?,
                _ => {}
            }
        }
        let to = IpNet::new(destination, header.destination_prefix_length).ok()?;
        // A link-local destination exists on every link, and packets to it are never forwarded (RFC 4291 section
        // 2.5.6). Neither are those to the loopback.
        let link_local = matches!(destination, IpAddr::V6(ip) if ip.is_unicast_link_local());
        if link_local || destination.is_loopback() {
            return None;
        }
        let is_main = table == u32::from(RouteHeader::RT_TABLE_MAIN);
        let (next_hops, elsewhere) = match header.kind {
            RouteType::Unicast if is_main => hops(message, interfaces),
            // `throw` continues with tables that are not followed.
            RouteType::BlackHole | RouteType::Unreachable | RouteType::Prohibit | RouteType::Throw if is_main => {
                (Some(NextHops::none()), SmallVec::new())
            }
            // The roles of our own addresses do not come from routes.
            RouteType::Local if is_main || table == TABLE_LOCAL => (None, hops(message, interfaces).1),
            _ => return None,
        };
        Some(Self { to, metric, next_hops, elsewhere })
    }
}

/// The live next hops by our links, and the others.
fn hops(message: &RouteMessage, interfaces: &Interfaces) -> (Option<NextHops>, SmallVec<[ForeignHop; 1]>) {
    let (mut device, mut via, mut several, mut encapsulates) = (None, None, None, false);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(index) => device = Some(*index),
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => via = gateway(attribute),
            RouteAttribute::MultiPath(hops) => several = Some(hops),
            attribute => encapsulates |= is_encapsulation(attribute),
        }
    }
    let mut elsewhere = SmallVec::new();
    let mut hop = |device: u32, via: Option<IpAddr>, weight, encapsulates: bool| {
        let link = interfaces.link(device).filter(|_| !encapsulates);
        let foreign = ForeignHop { device, via };
        if link.is_none() && !elsewhere.contains(&foreign) {
            elsewhere.push(foreign);
        }
        Some(NextHop { via, link: link?, weight })
    };
    let ours = match several {
        Some(hops) => {
            let alive = hops.iter().filter(|hop| !hop.flags.contains(RouteNextHopFlags::Dead));
            NextHops::new(alive.filter_map(|one: &RouteNextHop| {
                let via = one.attributes.iter().find_map(gateway);
                let encapsulates = one.attributes.iter().any(is_encapsulation);
                // The field `hops` is the weight less one (rtnetlink(7)).
                hop(one.interface_index, via, u16::from(one.hops) + 1, encapsulates)
            }))
        }
        None if message.header.flags.contains(RouteFlags::Dead) => None,
        None => device.and_then(|device| NextHops::new(hop(device, via, 1, encapsulates))),
    };
    (ours, elsewhere)
}

fn is_encapsulation(attribute: &RouteAttribute) -> bool {
    match attribute {
        RouteAttribute::Encap(_) => true,
        RouteAttribute::EncapType(kind) => *kind != RouteLwEnCapType::None,
        _ => false,
    }
}

/// Position of a new route. A message about an IPv6 route lists all its next hops. Several IPv4 routes may have one
/// metric: a dump lists them in order, and a change appends, prepends, or replaces the first one.
pub(super) fn insert_position(message: &RouteMessage, flags: u16) -> InsertPosition {
    if message.header.address_family == AddressFamily::Inet6 || flags & NLM_F_REPLACE != 0 {
        InsertPosition::Replace
    } else if flags & (NLM_F_APPEND | NLM_F_MULTIPART) != 0 {
        InsertPosition::Last
    } else {
        InsertPosition::First
    }
}

fn unspecified(family: AddressFamily) -> Option<IpAddr> {
    match family {
        AddressFamily::Inet => Some(IpAddr::from([0; 4])),
        AddressFamily::Inet6 => Some(IpAddr::from([0; 16])),
        _ => None,
    }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some(IpAddr::V4(*ip)),
        RouteAddress::Inet6(ip) => Some(IpAddr::V6(*ip)),
        _ => None,
    }
}

/// The next hop in an attribute; it may be of the other address family (RFC 5549).
fn gateway(attribute: &RouteAttribute) -> Option<IpAddr> {
    match attribute {
        RouteAttribute::Gateway(address) => ip(address),
        RouteAttribute::Via(RouteVia::Inet(ip)) => Some(IpAddr::V4(*ip)),
        RouteAttribute::Via(RouteVia::Inet6(ip)) => Some(IpAddr::V6(*ip)),
        _ => None,
    }
}

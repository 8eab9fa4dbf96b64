//! The VIPs of `routed` pools in a Linux table, for a routing daemon to redistribute (FORWARDING section 8).
//!
//! Each VIP is a blackhole route to its /32 or /128: no rule leads into the table, so Linux itself never uses it, and it
//! hangs on no interface that might go down.
//!
//! Invariant: in our table, the routes that carry our protocol number are those of the VIPs served now. What a predecessor
//! left behind goes at the start, before any is added; others' routes there are not touched. Deliberately not here: which
//! VIPs those are (the compiler), and telling routers (FRR or BIRD).

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::IpAddr;
use std::time::Duration;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::io::Errno;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::socket::{Dump, NetlinkError, Socket};

/// How often all routes are put again, should somebody have flushed the table.
const AGAIN: Duration = Duration::from_secs(30);
/// Dumps of the routes at the start, at most, while the kernel's tables change under them.
const DUMPS_MAX: usize = 8;

/// Where the routes stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteTable {
    /// The table: one that nothing else of the gateway reads.
    pub table: u32,
    /// The protocol number that our routes carry.
    pub protocol: u8,
}

/// Keeps the table as the VIPs are. Never returns but with an error.
///
/// # Errors
/// The kernel refuses.
pub async fn announce(at: RouteTable, mut vips: watch::Receiver<BTreeSet<IpAddr>>) -> Result<Infallible, NetlinkError> {
    let mut socket = Socket::open(0)?;
    let mut standing = standing(&mut socket, at).await?;
    let mut again = interval(AGAIN);
    again.set_missed_tick_behavior(MissedTickBehavior::Delay);
    again.tick().await;
    let mut all = false;
    loop {
        let wanted = vips.borrow_and_update().clone();
        let changes = Changes::between(&standing, &wanted, all);
        for vip in changes.remove {
            remove(&mut socket, at, vip).await?;
        }
        for vip in changes.put {
            put(&mut socket, at, vip).await?;
        }
        standing = wanted;
        all = tokio::select! {
            changed = vips.changed() => {
                if changed.is_err() {
                    std::future::pending::<()>().await;
                }
                false
            }
            _ = again.tick() => true,
        };
    }
}

/// What makes the table hold the wanted routes.
#[derive(Debug, PartialEq, Eq)]
struct Changes {
    remove: Vec<IpAddr>,
    put: Vec<IpAddr>,
}

impl Changes {
    /// `all`: those that should stand already are put again.
    fn between(standing: &BTreeSet<IpAddr>, wanted: &BTreeSet<IpAddr>, all: bool) -> Self {
        Self {
            remove: standing.difference(wanted).copied().collect(),
            put: wanted.iter().filter(|vip| all || !standing.contains(vip)).copied().collect(),
        }
    }
}

/// Takes all our routes out of the table: the gateway ends.
///
/// # Errors
/// The kernel refuses.
pub async fn withdraw(at: RouteTable) -> Result<(), NetlinkError> {
    let mut socket = Socket::open(0)?;
    for vip in standing(&mut socket, at).await? {
        remove(&mut socket, at, vip).await?;
    }
    Ok(())
}

/// The destinations of our routes in the table.
async fn standing(socket: &mut Socket, at: RouteTable) -> Result<BTreeSet<IpAddr>, NetlinkError> {
    let mut found = BTreeSet::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        // A dump that was interrupted may miss a route of ours, which then would stay for ever.
        for _ in 0..DUMPS_MAX {
            let mut request = RouteMessage::default();
            request.header.address_family = family;
            let dump = socket.dump(RouteNetlinkMessage::GetRoute(request), "list routes", |message| {
                if let RouteNetlinkMessage::NewRoute(route) = message {
                    found.extend(ours(route, at));
                }
            });
            if dump.await? == Dump::Consistent {
                break;
            }
        }
    }
    Ok(found)
}

async fn put(socket: &mut Socket, at: RouteTable, vip: IpAddr) -> Result<(), NetlinkError> {
    let what = format!("put the route to {vip} into table {}", at.table);
    let request = RouteNetlinkMessage::NewRoute(route(at, vip));
    match socket.request(request, NLM_F_CREATE | NLM_F_REPLACE, &what).await {
        // A kernel without the family cannot have a VIP of it; the others are not to wait for this one.
        Err(NetlinkError::Refused { what, source }) => {
            tracing::warn!(%vip, %source, "the kernel refused to {what}; no router learns the way to it");
            Ok(())
        }
        outcome => outcome,
    }
}

async fn remove(socket: &mut Socket, at: RouteTable, vip: IpAddr) -> Result<(), NetlinkError> {
    let what = format!("remove the route to {vip} from table {}", at.table);
    match socket.request(RouteNetlinkMessage::DelRoute(route(at, vip)), 0, &what).await {
        // Somebody was quicker.
        Err(NetlinkError::Refused { source, .. }) if source.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => Ok(()),
        outcome => outcome,
    }
}

fn route(at: RouteTable, vip: IpAddr) -> RouteMessage {
    let mut message = RouteMessage::default();
    let (family, destination, length) = match vip {
        IpAddr::V4(ip) => (AddressFamily::Inet, RouteAddress::Inet(ip), 32),
        IpAddr::V6(ip) => (AddressFamily::Inet6, RouteAddress::Inet6(ip), 128),
    };
    message.header.address_family = family;
    message.header.destination_prefix_length = length;
    // A table beyond a byte is named by the attribute alone.
    message.header.table = u8::try_from(at.table).unwrap_or(RouteHeader::RT_TABLE_UNSPEC);
    message.header.protocol = RouteProtocol::from(at.protocol);
    message.header.scope = RouteScope::Universe;
    message.header.kind = RouteType::BlackHole;
    message.attributes.push(RouteAttribute::Destination(destination));
    message.attributes.push(RouteAttribute::Table(at.table));
    message
}

/// The destination, if it is a host route of ours in the table.
fn ours(route: &RouteMessage, at: RouteTable) -> Option<IpAddr> {
    let table = route.attributes.iter().find_map(|a| if let RouteAttribute::Table(table) = a { Some(*table) } else { None });
    let is_ours = table.unwrap_or(route.header.table.into()) == at.table
        && u8::from(route.header.protocol) == at.protocol
        && route.header.kind == RouteType::BlackHole;
    let host = |length| route.header.destination_prefix_length == length;
    route.attributes.iter().filter(|_| is_ours).find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(ip)) if host(32) => Some(IpAddr::V4(*ip)),
        RouteAttribute::Destination(RouteAddress::Inet6(ip)) if host(128) => Some(IpAddr::V6(*ip)),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: RouteTable = RouteTable { table: 150, protocol: 150 };

    #[test]
    fn a_vip_withdrawn_in_the_turn_of_the_repetition_is_removed() {
        let [gone, stays, new] = ["203.0.113.7", "203.0.113.8", "2001:db8::7"].map(|text| text.parse::<IpAddr>().unwrap());
        let (standing, wanted) = (BTreeSet::from([gone, stays]), BTreeSet::from([stays, new]));
        let again = Changes::between(&standing, &wanted, true);
        assert_eq!(again, Changes { remove: vec![gone], put: vec![stays, new] });
        let once = Changes::between(&standing, &wanted, false);
        assert_eq!(once, Changes { remove: vec![gone], put: vec![new] });
    }

    #[test]
    fn our_routes_are_known_again_and_no_others() {
        for vip in ["203.0.113.7", "2001:db8::7"].map(|text| text.parse::<IpAddr>().unwrap()) {
            let sent = route(AT, vip);
            assert_eq!(ours(&sent, AT), Some(vip));
            assert_eq!(ours(&sent, RouteTable { table: 151, ..AT }), None, "another table");
            assert_eq!(ours(&sent, RouteTable { protocol: 151, ..AT }), None, "another's route");
            let mut wider = sent.clone();
            wider.header.destination_prefix_length -= 8;
            assert_eq!(ours(&wider, AT), None, "no host route");
            let large = RouteTable { table: 70_000, ..AT };
            assert_eq!(ours(&route(large, vip), large), Some(vip), "a table beyond a byte");
        }
    }
}

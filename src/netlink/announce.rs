//! Announces the VIPs of `routed` pools as routes in a Linux table, for a routing daemon to redistribute (FORWARDING
//! section 8).
//!
//! Each VIP is a blackhole route to its /32 or /128. No rule refers to the table, so Linux itself never uses the route,
//! and the route depends on no interface that may go down.
//!
//! Invariant: the routes in our table with our protocol number are those of the VIPs served now. Routes that a previous
//! process left are removed at the start, before any is added; routes of others are not touched. Not here: the choice
//! of the VIPs (the compiler), and the announcement to routers (FRR or BIRD).

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

use super::socket::{DumpOutcome, NetlinkError, Socket};

/// Interval at which all routes are added again, in case another program flushed the table.
const AGAIN: Duration = Duration::from_secs(30);
/// Maximum number of dumps at the start while the kernel's tables change.
const DUMPS_MAX: usize = 8;

/// The table and protocol of our routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteTable {
    /// The table. Nothing else in the gateway reads it.
    pub table: u32,
    /// The protocol number of our routes.
    pub protocol: u8,
}

/// Keeps the routes equal to the VIPs. Returns only with an error.
///
/// # Errors
/// When the kernel refuses.
pub async fn announce(at: RouteTable, mut vips: watch::Receiver<BTreeSet<IpAddr>>) -> Result<Infallible, NetlinkError> {
    let mut socket = Socket::open(0)?;
    let mut installed = installed(&mut socket, at).await?;
    let mut again = interval(AGAIN);
    again.set_missed_tick_behavior(MissedTickBehavior::Delay);
    again.tick().await;
    let mut all = false;
    loop {
        let wanted = vips.borrow_and_update().clone();
        for vip in installed.difference(&wanted) {
            remove(&mut socket, at, *vip).await?;
        }
        for vip in to_add(&installed, &wanted, all) {
            add(&mut socket, at, vip).await?;
        }
        installed = wanted;
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

/// The routes to add: those missing, or with `all` every wanted one.
fn to_add(installed: &BTreeSet<IpAddr>, wanted: &BTreeSet<IpAddr>, all: bool) -> Vec<IpAddr> {
    wanted.iter().filter(|vip| all || !installed.contains(vip)).copied().collect()
}

/// Removes all our routes from the table when the gateway stops.
///
/// # Errors
/// When the kernel refuses.
pub async fn withdraw(at: RouteTable) -> Result<(), NetlinkError> {
    let mut socket = Socket::open(0)?;
    for vip in installed(&mut socket, at).await? {
        remove(&mut socket, at, vip).await?;
    }
    Ok(())
}

/// The destinations of our routes in the table.
async fn installed(socket: &mut Socket, at: RouteTable) -> Result<BTreeSet<IpAddr>, NetlinkError> {
    let mut found = BTreeSet::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        // An interrupted dump may miss a route of ours, which would then remain forever.
        for _ in 0..DUMPS_MAX {
            let mut request = RouteMessage::default();
            request.header.address_family = family;
            let dump = socket.dump(RouteNetlinkMessage::GetRoute(request), "list routes", |message| {
                if let RouteNetlinkMessage::NewRoute(route) = message {
                    found.extend(our_vip(route, at));
                }
            });
            if dump.await? == DumpOutcome::Consistent {
                break;
            }
        }
    }
    Ok(found)
}

async fn add(socket: &mut Socket, at: RouteTable, vip: IpAddr) -> Result<(), NetlinkError> {
    let what = format!("put the route to {vip} into table {}", at.table);
    let request = RouteNetlinkMessage::NewRoute(route(at, vip));
    match socket.request(request, NLM_F_CREATE | NLM_F_REPLACE, &what).await {
        // A kernel without the address family refuses its VIPs; the other VIPs must not wait for them.
        Err(NetlinkError::Refused { what, source }) => {
            tracing::warn!(%vip, %source, "the kernel refused to {what}; routers do not learn a route to it");
            Ok(())
        }
        outcome => outcome,
    }
}

async fn remove(socket: &mut Socket, at: RouteTable, vip: IpAddr) -> Result<(), NetlinkError> {
    let what = format!("remove the route to {vip} from table {}", at.table);
    match socket.request(RouteNetlinkMessage::DelRoute(route(at, vip)), 0, &what).await {
        // Another program has removed it.
        Err(error) if error.is_refusal(Errno::SRCH) => Ok(()),
        outcome => outcome,
    }
}

fn route(at: RouteTable, vip: IpAddr) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = vip.into();
    message.header.destination_prefix_length = if vip.is_ipv4() { 32 } else { 128 };
    // A table number above 255 is in the attribute only.
    message.header.table = u8::try_from(at.table).unwrap_or(RouteHeader::RT_TABLE_UNSPEC);
    message.header.protocol = RouteProtocol::from(at.protocol);
    message.header.scope = RouteScope::Universe;
    message.header.kind = RouteType::BlackHole;
    message.attributes.push(RouteAttribute::Destination(vip.into()));
    message.attributes.push(RouteAttribute::Table(at.table));
    message
}

/// The destination, if it is a host route of ours in the table.
fn our_vip(route: &RouteMessage, at: RouteTable) -> Option<IpAddr> {
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
    fn the_repetition_adds_all_wanted_routes_and_a_change_only_the_new_ones() {
        let [gone, stays, new] = ["203.0.113.7", "203.0.113.8", "2001:db8::7"].map(|text| text.parse::<IpAddr>().unwrap());
        let (installed, wanted) = (BTreeSet::from([gone, stays]), BTreeSet::from([stays, new]));
        assert_eq!(to_add(&installed, &wanted, true), [stays, new]);
        assert_eq!(to_add(&installed, &wanted, false), [new]);
    }

    #[test]
    fn our_routes_are_recognised_and_no_others() {
        for vip in ["203.0.113.7", "2001:db8::7"].map(|text| text.parse::<IpAddr>().unwrap()) {
            let sent = route(AT, vip);
            assert_eq!(our_vip(&sent, AT), Some(vip));
            assert_eq!(our_vip(&sent, RouteTable { table: 151, ..AT }), None, "another table");
            assert_eq!(our_vip(&sent, RouteTable { protocol: 151, ..AT }), None, "another's route");
            let mut wider = sent.clone();
            wider.header.destination_prefix_length -= 8;
            assert_eq!(our_vip(&wider, AT), None, "no host route");
            let large = RouteTable { table: 70_000, ..AT };
            assert_eq!(our_vip(&route(large, vip), large), Some(vip), "a table above 255");
        }
    }
}

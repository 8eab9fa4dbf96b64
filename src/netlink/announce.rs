//! Announces the VIPs of `routed` pools as routes in a Linux table, for a routing daemon to redistribute (FORWARDING
//! section 8).
//!
//! Each prefix, the /32 or /128 of a VIP or the aggregate of several, is a route through an interface that the kernel
//! removes when the process ends (`vip_device`), so that no route outlives the process that forwards for it. A planned
//! restart is the exception: its routes become blackhole routes, which need no interface, until the next process has its
//! own (docs/internals/decisions/0057). While the gateway drains, the routes have a higher metric, which tells routing
//! daemons to send GRACEFUL_SHUTDOWN (RFC 8326).
//!
//! Invariant: the routes in our table with our protocol number are those of the prefixes announced now. Routes that a
//! previous process left are replaced or removed at the start; routes of others are not touched. A route is added before
//! the one that it replaces is removed. Not here: the choice of the prefixes (`fleet::gateway_drain`), and the announcement to
//! routers (FRR or BIRD).

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use proto::limits::{VIP_ROUTE_DRAIN_METRIC, VIP_ROUTE_METRIC};
use rustix::io::Errno;
use tokio::sync::{Mutex, watch};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::socket::{DumpOutcome, NetlinkError, Socket};
use super::vip_device::{VipDevice, VipDeviceError};

/// Interval at which all routes are added again, in case another program flushed the table.
const AGAIN: Duration = Duration::from_secs(30);
/// Maximum number of dumps at the start while the kernel's tables change.
const DUMPS_MAX: usize = 8;

/// How long routes of the last process stay after a restart while no VIP is announced.
const ROUTES_KEPT: Duration = Duration::from_secs(5);

/// The table and protocol of our routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteTable {
    /// The table. Nothing else in the gateway reads it.
    pub table: u32,
    /// The protocol number of our routes.
    pub protocol: u8,
}

/// What routers are to learn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Announcement {
    /// Prefixes with a route: VIPs, and aggregates of VIPs.
    pub prefixes: BTreeSet<IpNet>,
    /// Routers shall send elsewhere if they can: the routes will be withdrawn soon.
    pub is_draining: bool,
}

/// The task that writes routes to VIPs. Cloned for each start.
#[derive(Clone, Debug)]
pub struct RouteAnnouncer {
    /// The routes.
    pub routes: VipRoutes,
    /// What routers are to learn.
    pub announced: watch::Receiver<Announcement>,
    /// Whether routes of the last process stand.
    pub is_restart: bool,
}

impl RouteAnnouncer {
    /// Runs until its future is dropped.
    ///
    /// # Errors
    /// When a request to Linux fails. A new start is safe.
    pub async fn run(mut self) -> Result<Infallible, VipDeviceError> {
        if self.is_restart {
            // Routers go on sending while the routes that the last process left stand; no VIP within the time is right, too.
            let is_announced = self.announced.wait_for(|announcement| !announcement.prefixes.is_empty());
            let _ = timeout(ROUTES_KEPT, is_announced).await;
        }
        self.routes.announce(self.announced).await
    }
}

/// A route of ours: its prefix and metric.
type VipRoute = (IpNet, u32);

impl Announcement {
    fn routes(&self) -> BTreeSet<VipRoute> {
        let metric = if self.is_draining { VIP_ROUTE_DRAIN_METRIC } else { VIP_ROUTE_METRIC };
        self.prefixes.iter().map(|prefix| (*prefix, metric)).collect()
    }
}

/// The routes to VIPs of this process. A copy refers to the same routes; they vanish with the last copy.
#[derive(Clone, Debug)]
pub struct VipRoutes {
    at: RouteTable,
    /// Created with the first route.
    device: Arc<Mutex<Option<VipDevice>>>,
}

impl VipRoutes {
    /// No routes yet.
    #[must_use]
    pub fn new(at: RouteTable) -> Self {
        Self { at, device: Arc::default() }
    }

    /// Keeps the routes equal to the announcement. Returns only with an error.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn announce(&self, mut announcement: watch::Receiver<Announcement>) -> Result<Infallible, VipDeviceError> {
        let mut device = self.device.lock().await;
        let mut socket = Socket::open(0).map_err(|source| self.failed(source))?;
        let mut installed = installed(&mut socket, self.at).await.map_err(|source| self.failed(source))?;
        let mut again = interval(AGAIN);
        again.set_missed_tick_behavior(MissedTickBehavior::Delay);
        again.tick().await;
        // At first too: the routes of the last process are blackholes, which are replaced.
        let mut all = true;
        loop {
            let wanted = announcement.borrow_and_update().routes();
            for route in to_add(&installed, &wanted, all) {
                let device = opened(&mut device, &mut socket, self.at.table).await?;
                add(&mut socket, self.at, route, Some(device)).await.map_err(|source| self.failed(source))?;
            }
            for route in installed.difference(&wanted) {
                remove(&mut socket, self.at, *route).await.map_err(|source| self.failed(source))?;
            }
            installed = wanted;
            all = tokio::select! {
                changed = announcement.changed() => {
                    if changed.is_err() {
                        std::future::pending::<()>().await;
                    }
                    false
                }
                _ = again.tick() => true,
            };
        }
    }

    /// Removes all our routes from the table when the gateway stops, or after a start that failed.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn withdraw(&self) -> Result<(), NetlinkError> {
        let mut socket = Socket::open(0)?;
        for route in installed(&mut socket, self.at).await? {
            remove(&mut socket, self.at, route).await?;
        }
        Ok(())
    }

    /// Makes the routes outlive this process, for the next one to replace. Afterwards nothing may announce.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn leave_to_next_process(&self) -> Result<(), NetlinkError> {
        let mut socket = Socket::open(0)?;
        for route in installed(&mut socket, self.at).await? {
            add(&mut socket, self.at, route, None).await?;
        }
        Ok(())
    }

    fn failed(&self, source: NetlinkError) -> VipDeviceError {
        VipDeviceError::Netlink { name: VipDevice::name(self.at.table), source }
    }
}

/// The index of the interface, which is created if there is none.
async fn opened(device: &mut Option<VipDevice>, socket: &mut Socket, table: u32) -> Result<u32, VipDeviceError> {
    if let Some(device) = device.take_if(|device| !device.exists(socket)) {
        tracing::warn!(?device, "another program removed the interface of the routes to VIPs; it is created again");
    }
    match device {
        Some(device) => Ok(device.index),
        None => Ok(device.insert(VipDevice::open(socket, table).await?).index),
    }
}

/// The routes to add: those missing, or with `all` every wanted one.
fn to_add(installed: &BTreeSet<VipRoute>, wanted: &BTreeSet<VipRoute>, all: bool) -> Vec<VipRoute> {
    wanted.iter().filter(|route| all || !installed.contains(route)).copied().collect()
}

/// Our routes in the table.
async fn installed(socket: &mut Socket, at: RouteTable) -> Result<BTreeSet<VipRoute>, NetlinkError> {
    let mut found = BTreeSet::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        // An interrupted dump may miss a route of ours, which would then remain forever.
        for _ in 0..DUMPS_MAX {
            let mut request = RouteMessage::default();
            request.header.address_family = family;
            let dump = socket.dump(RouteNetlinkMessage::GetRoute(request), "list routes", |message| {
                if let RouteNetlinkMessage::NewRoute(route) = message {
                    found.extend(our_route(route, at));
                }
            });
            if dump.await? == DumpOutcome::Consistent {
                break;
            }
        }
    }
    Ok(found)
}

/// Adds a route, or replaces the one to the same prefix with the same metric. Without `device` it is a blackhole.
async fn add(socket: &mut Socket, at: RouteTable, (prefix, metric): VipRoute, device: Option<u32>) -> Result<(), NetlinkError> {
    let what = format!("put the route to {prefix} into table {}", at.table);
    let mut message = route(at, (prefix, metric));
    match device {
        Some(index) => {
            message.header.kind = RouteType::Unicast;
            message.header.scope = if prefix.addr().is_ipv4() { RouteScope::Link } else { RouteScope::Universe };
            message.attributes.push(RouteAttribute::Oif(index));
        }
        None => message.header.kind = RouteType::BlackHole,
    }
    match socket.request(RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | NLM_F_REPLACE, &what).await {
        // A kernel without the address family refuses its routes; the others must not wait for them.
        Err(NetlinkError::Refused { what, source }) => {
            tracing::warn!(%prefix, %source, "the kernel refused to {what}; routers do not learn a route to it");
            Ok(())
        }
        outcome => outcome,
    }
}

/// Removes a route of either kind.
async fn remove(socket: &mut Socket, at: RouteTable, (prefix, metric): VipRoute) -> Result<(), NetlinkError> {
    let what = format!("remove the route to {prefix} from table {}", at.table);
    match socket.request(RouteNetlinkMessage::DelRoute(route(at, (prefix, metric))), 0, &what).await {
        // Another program has removed it.
        Err(error) if error.is_refusal(Errno::SRCH) => Ok(()),
        outcome => outcome,
    }
}

/// The route to a prefix, of any kind.
fn route(at: RouteTable, (prefix, metric): VipRoute) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = prefix.network().into();
    message.header.destination_prefix_length = prefix.prefix_len();
    // A table number above 255 is in the attribute only.
    message.header.table = u8::try_from(at.table).unwrap_or(RouteHeader::RT_TABLE_UNSPEC);
    message.header.protocol = RouteProtocol::from(at.protocol);
    message.header.scope = RouteScope::NoWhere;
    message.header.kind = RouteType::Unspec;
    message.attributes.push(RouteAttribute::Destination(prefix.network().into()));
    message.attributes.push(RouteAttribute::Table(at.table));
    message.attributes.push(RouteAttribute::Priority(metric));
    message
}

/// Prefix and metric, if it is a route of ours in the table. Linux shows no metric 0.
fn our_route(route: &RouteMessage, at: RouteTable) -> Option<VipRoute> {
    let table = route.attributes.iter().find_map(|a| if let RouteAttribute::Table(table) = a { Some(*table) } else { None });
    let metric =
        route.attributes.iter().find_map(|a| if let RouteAttribute::Priority(metric) = a { Some(*metric) } else { None });
    let is_ours = table.unwrap_or(route.header.table.into()) == at.table && u8::from(route.header.protocol) == at.protocol;
    let network = route.attributes.iter().filter(|_| is_ours).find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(ip)) => Some(IpAddr::V4(*ip)),
        RouteAttribute::Destination(RouteAddress::Inet6(ip)) => Some(IpAddr::V6(*ip)),
        _ => None,
    });
    let prefix = IpNet::new(network?, route.header.destination_prefix_length).ok()?;
    Some((prefix, metric.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: RouteTable = RouteTable { table: 150, protocol: 150 };

    #[test]
    fn the_repetition_adds_all_wanted_routes_and_a_change_only_the_new_ones() {
        let [gone, stays, new] = ["203.0.113.7/32", "203.0.113.8/32", "2001:db8::7/128"]
            .map(|text| (text.parse::<IpNet>().unwrap(), VIP_ROUTE_METRIC));
        let (installed, wanted) = (BTreeSet::from([gone, stays]), BTreeSet::from([stays, new]));
        assert_eq!(to_add(&installed, &wanted, true), [stays, new]);
        assert_eq!(to_add(&installed, &wanted, false), [new]);
    }

    #[test]
    fn a_drain_is_other_routes_to_the_same_prefixes() {
        let prefixes = BTreeSet::from(["203.0.113.0/24".parse().unwrap()]);
        let normal = Announcement { prefixes, is_draining: false };
        let draining = Announcement { is_draining: true, ..normal.clone() };
        assert_eq!(to_add(&normal.routes(), &draining.routes(), false).len(), 1);
        assert!(draining.routes().is_disjoint(&normal.routes()));
    }

    #[test]
    fn our_routes_are_recognised_and_no_others() {
        let prefixes = ["203.0.113.7/32", "203.0.113.0/24", "2001:db8::7/128", "2001:db8::/64"];
        for prefix in prefixes.map(|text| text.parse::<IpNet>().unwrap()) {
            let ours = (prefix, VIP_ROUTE_METRIC);
            let sent = route(AT, ours);
            assert_eq!(our_route(&sent, AT), Some(ours));
            assert_eq!(our_route(&sent, RouteTable { table: 151, ..AT }), None, "another table");
            assert_eq!(our_route(&sent, RouteTable { protocol: 151, ..AT }), None, "another's route");
            let mut default = sent.clone();
            default.header.destination_prefix_length = 0;
            default.attributes.retain(|attribute| !matches!(attribute, RouteAttribute::Destination(_)));
            assert_eq!(our_route(&default, AT), None, "a default route");
            let large = RouteTable { table: 70_000, ..AT };
            assert_eq!(our_route(&route(large, ours), large), Some(ours), "a table above 255");
            let mut of_an_older_version = sent.clone();
            of_an_older_version.attributes.retain(|attribute| !matches!(attribute, RouteAttribute::Priority(_)));
            assert_eq!(our_route(&of_an_older_version, AT), Some((prefix, 0)));
        }
    }
}

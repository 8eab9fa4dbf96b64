//! Keys `announce`, the Linux table of the routes to VIPs of `routed` pools, and `drainOnStop`, the time between the
//! withdrawal of these routes and the end of the process.

use std::time::Duration;

use control::config::Section;

use crate::netlink::RouteTable;

/// Linux route table and protocol unless configured; both unassigned in iproute2's files.
const ROUTE_NUMBER: u8 = 150;
/// 0 to 4 are the kernel's and the administrator's (rtnetlink(7)).
const PROTOCOL_MIN: u8 = 5;
/// Tables `default`, `main` and `local` (rtnetlink(7)): Linux routes by them, and the gateway follows them.
const LINUX_TABLES: std::ops::RangeInclusive<u32> = 253..=255;

/// Default time for routers to choose other routes: BGP informs its neighbours within milliseconds, and OSPF
/// recalculates its routes after 5 to 10 s at most.
const DRAIN_ON_STOP: Duration = Duration::from_secs(10);
const DRAIN_ON_STOP_MAX: Duration = Duration::from_secs(3600);

/// Reads key `drainOnStop`.
pub(super) fn drain_on_stop(top: &mut Section<'_>) -> Duration {
    top.duration("drainOnStop", Duration::ZERO..=DRAIN_ON_STOP_MAX, DRAIN_ON_STOP)
}

/// Reads key `announce`.
pub(super) fn take(top: &mut Section<'_>) -> RouteTable {
    let mut section = top.section("announce");
    let expected = "the number of a table of its own, not 253 to 255";
    let legal = |table: &u32| *table > 0 && !LINUX_TABLES.contains(table);
    let table = section.parse("routeTable", expected, |text| text.parse().ok().filter(legal));
    let protocol = section.number("routeProtocol", PROTOCOL_MIN..=u8::MAX, ROUTE_NUMBER);
    section.finish();
    RouteTable { table: table.unwrap_or(ROUTE_NUMBER.into()), protocol }
}

//! Follows Linux's addresses, routes and neighbours on the twins of our ports by rtnetlink, and announces VIPs as
//! routes.
//!
//! Pure code turns netlink messages into tables, and the tables into one [`dataplane::Network`], which is published as
//! a whole. Linux decides: the gateway never resolves a next hop itself. It asks Linux to do so (managed neighbours,
//! and requests for on-link clients), and to join the multicast groups in which neighbours ask for our addresses.
//!
//! Invariant: the published network is Linux's state, at most a few milliseconds old; after lost messages all tables
//! are read again. Not here: routing rules, and tables other than main and local.

mod announce;
mod follow;
mod followed_routes;
mod groups;
mod interfaces;
mod neighbours;
mod route_query;
mod routes;
mod socket;
mod tables;
mod vip_device;

pub use announce::{Announcement, RouteAnnouncer, RouteTable, VipRoutes};
pub use follow::{NetlinkFollower, REQUESTS_MAX};
pub(crate) use interfaces::{interface_address, link_named};
pub(crate) use neighbours::OUR_PROTOCOL;
pub use route_query::RouteQuery;
pub use socket::NetlinkError;
pub(crate) use socket::Socket;
pub use vip_device::VipDeviceError;

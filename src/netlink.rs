//! Linux's addresses, routes and neighbours, as far as they concern the twins of our ports, followed by rtnetlink.
//!
//! Messages become tables in pure code, and the tables a [`dataplane::Network`] that is published whole. Linux
//! decides: the gateway resolves no next hop of its own, it only asks Linux to (managed neighbours, and requests for
//! on-link clients), and to be a member of the multicast groups in which neighbours ask for our addresses.
//!
//! Invariant: what is published is what Linux holds, at most a few milliseconds old; after lost messages everything is
//! read anew. Deliberately not here: rules, and every table but main.

mod announce;
mod follow;
mod groups;
mod interfaces;
mod neighbours;
mod routes;
mod socket;
mod tables;

pub use announce::{RouteTable, announce, withdraw};
pub use follow::{Answered, Follow, REQUESTS_MAX, follow};
pub(crate) use neighbours::OUR_PROTOCOL;
pub use socket::NetlinkError;
pub(crate) use socket::Socket;

//! From a VIP to a backend: addresses that are announced, frontends, the choice of a backend, the next hop to it, and
//! the modes. Deliberately not here: mode `nat`, which most tests of `packets` and `flows` use.

#![allow(clippy::unwrap_used, clippy::panic)]

mod announcements;
mod choosing;
mod dnat;
mod ecmp;
mod frontends;
mod next_hops;
mod one_way;
#[path = "../rig/mod.rs"]
mod rig;
mod tunnel_errors;

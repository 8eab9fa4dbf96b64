//! Gateways as a whole: several workers, the kernel beside them, restarts, changes of settings, and several gateways
//! that share VIPs and flows. Deliberately not here: what a gateway with one worker does with packets and flows.

#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic)]

#[path = "../fleet/mod.rs"]
mod fleet;
mod little_traffic;
mod moved_neighbours;
mod restart;
#[path = "../rig/mod.rs"]
mod rig;
mod shadow_flow_model;
mod shadow_flows;
mod shifted;
mod steering;
mod takeovers;
#[path = "../team/mod.rs"]
mod team;
mod tuning;
mod twin_classes;
mod vip_ownership;
mod workers;
mod workers_over_time;

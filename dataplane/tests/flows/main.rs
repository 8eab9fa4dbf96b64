//! Flows over time: how they begin, last, yield and end, by protocol, under floods, in lists and in records.
//! Deliberately not here: flows of several workers, and flows that outlive their gateway (`gateways`).

#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod ended;
mod floods;
mod flow_model;
mod flow_records;
mod flows;
mod listing;
mod off_path;
mod off_path_property;
mod off_path_sctp;
mod openings;
#[path = "../peers/mod.rs"]
mod peers;
mod port_reuse;
mod reclaim;
#[path = "../rig/mod.rs"]
mod rig;
mod sctp;
mod shares;
mod tick_wrap;
mod udp;

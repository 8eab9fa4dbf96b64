//! The gateway program: the forwarding engine over DPDK, the Linux twins of its ports, and the agent that feeds them.

pub mod admin;
pub mod af_packet;
pub mod agent;
pub mod bench;
pub mod berth;
pub mod check;
pub mod cli;
pub mod doctor;
pub mod dpdk;
pub mod hardware;
pub mod netlink;
pub mod reload;
pub mod replay;
pub mod run;
pub mod settings;
pub mod twin;
pub mod workers;

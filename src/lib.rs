//! The gateway program: the forwarding engine over DPDK, the Linux twins of its ports, and the agent that feeds them.

pub mod admin;
pub mod agent;
pub mod cli;
pub mod machine;
pub mod metrics;
pub mod netlink;
pub mod ports;
pub mod reload;
pub mod run;
pub mod settings;
pub mod tools;
mod watch;
pub mod worker_threads;

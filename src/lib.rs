//! The gateway program: the forwarding engine over DPDK, the Linux twins of its ports, and the tasks beside it.

pub mod admin;
pub mod agent;
pub mod commands;
pub mod controller_client;
pub mod fleet;
pub mod flow_records;
pub mod health;
pub mod machine;
pub mod netlink;
pub mod ports;
pub mod settings;
pub mod worker_threads;

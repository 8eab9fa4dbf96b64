//! The gateway program: the forwarding engine over DPDK, the Linux twins of its ports, and the agent that feeds them.

pub mod admin;
pub mod agent;
pub mod controller_client;
pub mod fleet;
pub mod flow_records;
pub mod health;
pub mod machine;
pub mod netlink;
pub mod ports;
pub mod run;
pub mod settings;
pub mod tools;
pub mod worker_threads;

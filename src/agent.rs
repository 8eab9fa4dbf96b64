//! The agent: everything of the gateway that is not a worker. It follows the controller, keeps the state on disk, turns
//! state, network and health into snapshots, and says how the gateway is.
//!
//! Invariant: workers never wait for it. Every task here is an async function with explicit inputs and outputs (watch
//! channels), runs under the [`supervisor`], and may fail, panic and start again while packets go on (FORWARDING 14).
//! Deliberately not here: the tasks' composition (`run`), probes (`crate::agent::probe`), netlink (`netlink`).

pub mod compile_loop;
pub mod config_client;
pub mod drain;
pub mod persist;
pub mod probe;
pub mod served;
pub mod supervisor;
pub mod usable;
pub mod zone;

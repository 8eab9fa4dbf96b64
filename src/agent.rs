//! The agent: everything in the gateway except workers. It follows the controller, stores the state on disk, compiles
//! state, network and health into snapshots, and reports the status of the gateway.
//!
//! Invariant: workers never wait for it. Every task is an async function with explicit inputs and outputs (watch
//! channels), runs under the [`supervisor`], and may fail, panic and restart while forwarding continues (FORWARDING
//! 14). Deliberately not here: the composition of the tasks (`run`), and netlink.

pub mod compile_loop;
pub mod controller_client;
pub mod fleet;
pub mod flow_records;
pub mod gateway_drain;
pub mod inquiries;
pub mod persist;
pub mod probe;
pub mod served;
pub mod supervisor;
pub mod usable;
pub mod zone;

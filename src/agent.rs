//! The agent: compiles state, network and health into snapshots, stores the state on disk, and supervises the tasks of
//! the gateway.
//!
//! Invariant: workers never wait for it. Every task is an async function with explicit inputs and outputs (watch
//! channels), runs under the [`supervisor`], and may fail, panic and restart while forwarding continues (FORWARDING
//! 14). Rooms at its edge fill its inputs (`controller_client`, `health`, `netlink`) and read its outputs (`fleet`,
//! `admin`); it imports none of them. Not here: the composition of the tasks (`commands::run`).

pub mod backend_health;
pub mod backend_history;
pub mod compile_loop;
pub mod persist;
pub mod served;
pub mod state_age;
pub mod supervisor;
pub mod usable;
pub(crate) mod watch;
pub mod zone;

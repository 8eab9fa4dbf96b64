//! The Linux twins of the ports: persistent taps that hold the ports' addresses, and the thread that moves frames
//! between them and the workers.
//!
//! If a twin is deleted, the hotplug task creates it again and gives the thread the new tap.
//!
//! A twin and its addresses outlive the process, so that routes and BGP sessions survive a restart of the gateway. The
//! next start removes the addresses that sluice added and that the configuration no longer contains. Not here: routes,
//! which belong to the operator, and the rate of frames to Linux, which the worker limits.

mod interface;
mod reconciler;
mod thread;

pub use interface::{Interface, TwinConfig, TwinError};
pub(super) use reconciler::TwinReconciler;
pub use thread::{NewTap, TwinCounters, TwinPort, TwinThread};

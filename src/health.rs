//! Health probes: targets, schedule and results. Each gateway probes for itself, and results change only its own tables
//! (CONTROL section 2).
//!
//! Invariant: each distinct target is probed once, however many services share it, and concurrent probes are limited by
//! file descriptors. A probe goes only where packets go: by a port of the gateway. Targets, schedule and health are
//! plain values with time as an argument; only [`run`] waits, and only a [`Prober`] uses the network. A change is
//! applied to the targets that it concerns, not to all of them.
//! Deliberately not here: the case that all backends of a service fail (the compiler decides), and how a probe to a VIP
//! reaches its backend (the engine sends it there).

mod connections;
mod grpc;
mod history;
mod http_request;
mod icmp;
mod prober;
mod schedule;
mod source_ports;
mod target;
mod task;
mod tls;
mod tracker;

pub use connections::ConnectionWatch;
#[cfg(test)]
pub(crate) use history::tests::saved as saved_health;
pub use history::{SavedHealth, UnusableHealth};
pub use prober::{Prober, concurrency};
pub use target::{Changes, GrpcQuestion, HttpQuestion, Outcome, ProbeSettings, Question, Subjects, Target, TargetTable, Trust};
pub use task::{Findings, ProbeInputs, run};
pub use tracker::HealthTracker;

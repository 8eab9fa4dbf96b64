//! The control plane of sluice: changes of Kubernetes objects become a `World`, the pure `plan` derives from it the
//! state of the gateways and the statuses to write, and thin tasks apply the result.
//!
//! Modules import one way, lower first: `world`; `kubernetes` and `manifests` (sources); `store`; `config`; `gateways`;
//! `plan`; `status`; `admin` and `healthz`; `metrics`; `controller`.
//! Deliberately not here: parsing of objects (package `objects`), the command line (package `sluicectl`), probes (the
//! gateway) and the forwarding engine. Of our packages this crate depends only on `proto` and
//! `objects`.

pub mod admin;
pub mod config;
pub mod controller;
pub mod gateways;
pub mod healthz;
pub mod kubernetes;
pub mod manifests;
pub mod metrics;
pub mod plan;
pub mod status;
pub mod store;
pub mod world;

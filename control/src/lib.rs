//! The control plane of sluice: Kubernetes objects become specs, specs a `World`, the pure `plan` makes of it what the
//! gateways forward by and what is written back, and thin tasks apply it. Also what of it runs elsewhere: probes and
//! their state machine (in the gateway), and the command-line client.
//!
//! Deliberately not here: anything of the forwarding engine. This crate knows `proto` and nothing else of ours.

pub mod admin;
pub mod config;
pub mod controller;
pub mod gateways;
pub mod healthz;
pub mod kubernetes;
pub mod manifests;
pub mod plan;
pub mod status;
pub mod store;
pub mod world;

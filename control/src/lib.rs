//! The control plane of sluice: Kubernetes objects become specs, specs a `World`, the pure `plan` makes of it what the
//! gateways forward by and what is written back, and thin tasks apply it. Also what of it runs elsewhere: probes and
//! their state machine (in the gateway), and the command-line client.
//!
//! Deliberately not here: anything of the forwarding engine. This crate knows `proto` and nothing else of ours.

pub mod addresses;
pub mod admin;
pub mod checkpoint;
pub mod config;
pub mod controller;
pub mod convert;
pub mod crd;
pub mod ctl;
pub mod dial;
pub mod externals;
pub mod fleet;
pub mod gateways;
mod gathering;
pub mod healthz;
pub mod incoming;
pub mod kubernetes;
pub mod lease;
pub mod logging;
pub mod manifests;
pub mod note;
pub mod notebook;
pub mod overrides;
pub mod ownership;
pub mod plan;
pub mod policy;
pub mod publish;
pub mod selection;
pub mod server;
pub mod settings;
pub mod socket;
pub mod source;
pub mod spec;
pub mod status;
pub mod tls;
mod unallowed;
pub mod world;

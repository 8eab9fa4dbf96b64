//! The Kubernetes side of the controller, against an API server: the test server, and where that makes sense a real
//! cluster (`SLUICE_TEST_KUBECONFIG`).

#![allow(unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../api_server/mod.rs"]
mod api_server;
mod controller;
mod following;
mod gateway;
mod recordings;
mod status;
mod user;

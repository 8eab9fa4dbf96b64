//! The Kubernetes side of the controller, against an API server: the test server, and where that makes sense a real
//! cluster (`SLUICE_TEST_KUBECONFIG`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../api_server/mod.rs"]
mod api_server;
mod following;
mod recordings;
mod status;

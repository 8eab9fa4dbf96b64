//! The Kubernetes side of the controller against an API server: the test server, and where possible a real cluster
//! (`SLUICE_TEST_KUBECONFIG`).

#![allow(unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../api_server/mod.rs"]
mod api_server;
mod controller;
mod following;
mod gateway;
mod installation;
mod link;
mod overrides;
mod recordings;
mod replay;
mod replicas;
mod role;
mod scenarios;
mod server;
#[path = "../../../tests/edge/skip.rs"]
#[allow(dead_code)] // its functions for network namespaces are used by other tests
mod skip;
mod status;
mod telling;
mod user;

//! The Kubernetes side of the controller against an API server: the test server, and where possible a real cluster
//! (`SLUICE_TEST_KUBECONFIG`).

#![allow(unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod api_proxy;
#[path = "../api_server/mod.rs"]
mod api_server;
mod checkpoints;
mod conditions;
mod controller;
mod credentials;
mod edge_gateways;
mod events;
mod finalizers;
mod gateway;
mod groups;
mod installation;
mod leader_election;
mod overrides;
mod replay;
mod scenarios;
#[path = "../settings/mod.rs"]
mod settings;
mod shipped_role;
#[path = "../../../tests/edge/skip.rs"]
#[allow(dead_code)] // its functions for network namespaces are used by other tests
mod skip;
mod status_writer;
mod test_server;
mod user;
mod watches;

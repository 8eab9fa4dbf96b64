//! The cluster that the controller follows: an API server in the process of the test, with a Service for each VIP.

use std::path::Path;

use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::api_server::{ApiServer, Availability, Kind};
use super::bed::{DNS, HTTP, QUIC, Target};

/// The server. Dropping it ends it.
pub(crate) struct Cluster {
    runtime: Runtime,
    api: ApiServer,
}

impl Cluster {
    /// Starts it, and writes a kubeconfig for it.
    pub(crate) fn start(targets: &[Target], kubeconfig: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let api = runtime.block_on(ApiServer::start());
        api.write_kubeconfig(kubeconfig);
        let cluster = Self { runtime, api };
        targets.iter().for_each(|target| cluster.create(target));
        cluster
    }

    /// Creates the Service of a VIP. iperf3 has one server for each: its connections belong together.
    pub(crate) fn create(&self, target: &Target) {
        let Target { name, mode, vip, bulk_port, .. } = target;
        let annotations = json!({
            "sluice.dev/addresses": vip, "sluice.dev/mode": mode, "sluice.dev/target": "endpoint",
            "sluice.dev/health-check": "tcp", "sluice.dev/health-check-port": HTTP.to_string(),
        });
        let port = |name: &str, protocol: &str, port: u16| json!({"name": name, "protocol": protocol, "port": port});
        let spread = [port("http", "TCP", HTTP), port("dns", "UDP", DNS), port("quic", "UDP", QUIC)];
        let bulk = [port("bulk", "TCP", *bulk_port)];
        let all = [&spread[..], &bulk].concat();
        let spec = json!({"type": "LoadBalancer", "loadBalancerClass": "sluice.dev/gateway", "ports": all});
        let metadata = json!({"namespace": "demo", "name": name, "annotations": annotations});
        self.api.create(Kind::Service, json!({"metadata": metadata, "spec": spec}));
        for (part, ports, servers) in [("spread", &spread[..], &[11, 12, 13][..]), ("bulk", &bulk, &[11])] {
            let labels = json!({"kubernetes.io/service-name": name});
            let endpoint = |n: &u8| json!({"addresses": [format!("10.0.0.{n}")], "conditions": {"ready": true}});
            let slice = json!({
                "metadata": {"namespace": "demo", "name": format!("{name}-{part}"), "labels": labels},
                "addressType": "IPv4", "ports": ports, "endpoints": servers.iter().map(endpoint).collect::<Value>(),
            });
            self.api.create(Kind::EndpointSlice, slice);
        }
    }

    /// Deletes the Service of a VIP.
    pub(crate) fn delete(&self, target: &Target) {
        for part in ["spread", "bulk"] {
            self.api.delete(Kind::EndpointSlice, "demo", &format!("{}-{part}", target.name));
        }
        self.api.delete(Kind::Service, "demo", &target.name);
    }

    /// Takes the server away, or brings it back.
    pub(crate) fn be(&self, availability: Availability) {
        self.runtime.block_on(self.api.set_availability(availability));
    }
}

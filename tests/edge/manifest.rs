//! Manifests of Services for tests.

/// A Service of type LoadBalancer in namespace `demo`, and its EndpointSlice.
pub struct ServiceManifest<'a> {
    pub name: &'a str,
    /// The requested VIP. The demo's Services never get the default one.
    pub address: &'a str,
    /// Each protocol has a port of the same number.
    pub protocols: &'a [&'a str],
    pub port: u16,
    pub target_port: u16,
    /// A line for the spec, for example `sessionAffinity: ClientIP`.
    pub spec: &'a str,
    /// Servers of the demo, by the last octet of their addresses.
    pub servers: &'a [u8],
}

impl Default for ServiceManifest<'_> {
    fn default() -> Self {
        Self {
            name: "own",
            address: "192.0.2.110",
            protocols: &["TCP"],
            port: 90,
            target_port: 9000,
            spec: "",
            servers: &[11, 12, 13],
        }
    }
}

impl ServiceManifest<'_> {
    pub fn yaml(&self) -> String {
        let Self { name, address, port, target_port, spec, .. } = self;
        let join = |entry: &dyn Fn(&str) -> String| self.protocols.iter().map(|p| entry(p)).collect::<Vec<_>>().join(", ");
        let ports = join(&|protocol| {
            let port_name = protocol.to_lowercase();
            format!("{{name: {port_name}, port: {port}, protocol: {protocol}, targetPort: {target_port}}}")
        });
        let slice_ports =
            join(&|protocol| format!("{{name: {}, port: {target_port}, protocol: {protocol}}}", protocol.to_lowercase()));
        let endpoints: Vec<_> = self.servers.iter().map(|n| format!("{{addresses: [10.0.0.{n}]}}")).collect();
        format!(
            "apiVersion: v1
kind: Service
metadata: {{namespace: demo, name: {name}, annotations: {{sluice.dev/addresses: {address}}}}}
spec:
  type: LoadBalancer
  loadBalancerClass: sluice.dev/gateway
  ports: [{ports}]
  {spec}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{namespace: demo, name: {name}-1, labels: {{kubernetes.io/service-name: {name}}}}}
addressType: IPv4
ports: [{slice_ports}]
endpoints: [{}]
",
            endpoints.join(", ")
        )
    }
}

/// A Node that is ready, with this address.
pub fn node_manifest(name: &str, address: &str) -> String {
    format!(
        "---
apiVersion: v1
kind: Node
metadata: {{name: {name}}}
status: {{addresses: [{{type: InternalIP, address: '{address}'}}], conditions: [{{type: Ready, status: 'True'}}]}}
"
    )
}

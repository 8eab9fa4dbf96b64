//! The cluster: Services with written statuses, and their endpoints. Also measures the API server's share of a change.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::api_server::{ApiServer, Kind};
use crate::stamp::{Spread, Stamp};

/// The pool, 100.64.0.0/16, and the first of its addresses.
const FIRST_VIP: u32 = 0x6440_0100;
const NAMESPACES: usize = 100;
/// The annotation by which the controller marks its Services.
const GROUP: &str = "sluice.dev/group";

pub struct Cluster<'a> {
    api: &'a ApiServer,
    endpoints_each: usize,
    services: usize,
    /// Metadata and status that the controller wrote to the first Service.
    template: Value,
    changes: u32,
    changed: usize,
    /// Target of the Services: `endpoint` or `node`.
    target: &'static str,
    nodes: usize,
}

impl<'a> Cluster<'a> {
    /// Creates a cluster with one Service.
    pub fn new(api: &'a ApiServer, endpoints_each: usize, target: &'static str) -> Self {
        let template = Value::Null;
        let cluster = Self { api, endpoints_each, services: 1, template, changes: 0, changed: 0, target, nodes: 0 };
        api.create(Kind::Namespace, json!({"metadata": {"name": "sluice"}}));
        for n in 0..NAMESPACES {
            api.create(Kind::Namespace, json!({"metadata": {"name": format!("team-{n:02}")}}));
        }
        api.create(Kind::Service, cluster.service(0));
        api.create(Kind::EndpointSlice, cluster.slice(0));
        cluster
    }

    /// Creates one more Node.
    pub fn add_node(&mut self) {
        self.nodes += 1;
        let address = Ipv4Addr::from(0xac14_0000 + u32::try_from(self.nodes).unwrap()).to_string();
        let status = json!({"addresses": [{"type": "InternalIP", "address": address}]});
        self.api.create(Kind::Node, json!({"metadata": {"name": format!("node-{:04}", self.nodes)}, "status": status}));
    }

    /// Waits until the controller has finished the first Service: it has an address, and has not changed for a second.
    pub fn wait_for_status(&mut self) {
        let (namespace, name) = names(0);
        let (mut since, start) = (Instant::now(), Instant::now());
        while since.elapsed() < Duration::from_secs(1) || self.template["status"]["loadBalancer"]["ingress"][0].is_null() {
            assert!(start.elapsed() < Duration::from_secs(30), "no status: {}", self.template);
            let now = self.api.get(Kind::Service, &namespace, &name).unwrap();
            if now != self.template {
                (since, self.template) = (Instant::now(), now);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Creates all other Services, each with what the controller wrote to the first.
    pub fn fill(&mut self, services: usize) {
        for n in 1..services {
            let mut object = self.api.create(Kind::Service, self.service(n));
            for part in ["finalizers", "managedFields"] {
                object["metadata"][part] = self.template["metadata"][part].clone();
            }
            object["metadata"]["annotations"][GROUP] = self.template["metadata"]["annotations"][GROUP].clone();
            object["status"] = self.template["status"].clone();
            object["status"]["loadBalancer"]["ingress"][0]["ip"] = vip(n).to_string().into();
            self.api.put_raw(Kind::Service, object);
            self.api.create(Kind::EndpointSlice, self.slice(n));
        }
        self.services = services;
        self.api.compact();
    }

    /// Changes the address of one endpoint of a Service. Successive `n` select Services that are far apart by name.
    pub fn change(&mut self, n: usize) {
        let service = n * 7919 % self.services;
        self.changes += 1;
        self.changed = service;
        let (namespace, name) = names(service);
        let patch = json!({"endpoints": self.endpoints(service, Some(Ipv4Addr::from(0x0ac8_0000 + self.changes)))});
        self.api.update(Kind::EndpointSlice, &namespace, &format!("{name}-1"), &patch);
    }

    /// Changes how long a Service drains.
    pub fn change_service(&mut self, n: usize) {
        let (namespace, name) = names(n % self.services);
        self.changes += 1;
        let drain = format!("{}s", 100 + self.changes);
        let patch = json!({"metadata": {"annotations": {"sluice.dev/drain-timeout": drain}}});
        self.api.update(Kind::Service, &namespace, &name, &patch);
    }

    /// When the event of the last change of a kind was sent to the controller.
    pub fn event_at(&self, kind: Kind) -> Stamp {
        self.api.event_sent_at(kind).expect("the controller watches the kind").into()
    }

    /// The Service that was changed last, and its new backend.
    pub fn last_changed(&self) -> (String, String) {
        let (namespace, name) = names(self.changed);
        (format!("{namespace}/{name}"), format!("{}:8080", Ipv4Addr::from(0x0ac8_0000 + self.changes)))
    }

    /// Time from a change until a watcher has read it: the API server's share.
    pub fn watch_lag(&mut self) -> Spread {
        let path = "/apis/discovery.k8s.io/v1/endpointslices?watch=1&resourceVersion=";
        let mut reader = request(self.api, &format!("{path}{}", self.version()));
        skip_head(&mut reader);
        let mut line = String::new();
        let times = (0..100).map(|n| {
            std::thread::sleep(Duration::from_millis(10));
            let at = Instant::now();
            self.change(n);
            loop {
                line.clear();
                reader.read_line(&mut line).unwrap();
                if line.starts_with('{') {
                    return at.elapsed();
                }
            }
        });
        Spread::of(&times.collect::<Vec<_>>())
    }

    fn version(&self) -> String {
        let (namespace, name) = names(self.changed);
        let slice = self.api.get(Kind::EndpointSlice, &namespace, &format!("{name}-1")).unwrap();
        slice["metadata"]["resourceVersion"].as_str().unwrap().to_owned()
    }

    fn service(&self, n: usize) -> Value {
        let (namespace, name) = names(n);
        json!({
            "metadata": {"name": name, "namespace": namespace, "labels": {"app": name},
                "annotations": {"sluice.dev/health-check": "none", "sluice.dev/addresses": vip(n).to_string(),
                    "sluice.dev/target": self.target}},
            "spec": {"type": "LoadBalancer", "loadBalancerClass": "sluice.dev/gateway", "selector": {"app": name},
                "ports": [{"name": "web", "port": 80, "targetPort": 8080, "nodePort": 30_000 + n % 32_768}]},
        })
    }

    fn slice(&self, n: usize) -> Value {
        let (namespace, name) = names(n);
        json!({
            "metadata": {"name": format!("{name}-1"), "namespace": namespace, "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv4", "ports": [{"name": "web", "port": 8080, "protocol": "TCP"}],
            "endpoints": self.endpoints(n, None),
        })
    }

    fn endpoints(&self, n: usize, first: Option<Ipv4Addr>) -> Value {
        let endpoint = |k: usize| {
            let number = u32::try_from(n * self.endpoints_each + k).unwrap();
            // 10.0.0.0 to 10.199.255.255: 200 nodes of a /16 each.
            let own = Ipv4Addr::from(0x0a00_0000 + (number % 200) * 0x1_0000 + number / 200 + 1);
            let address = first.filter(|_| k == 0).unwrap_or(own);
            json!({"addresses": [address.to_string()], "nodeName": format!("node-{}", number % 200), "zone": "a",
                "conditions": {"ready": true, "serving": true, "terminating": false},
                "targetRef": {"kind": "Pod", "name": format!("pod-{number}"), "namespace": names(n).0}})
        };
        (0..self.endpoints_each).map(endpoint).collect()
    }
}

/// Namespace and name of a Service.
pub fn names(n: usize) -> (String, String) {
    (format!("team-{:02}", n % NAMESPACES), format!("service-{n:05}"))
}

fn vip(n: usize) -> Ipv4Addr {
    Ipv4Addr::from(FIRST_VIP + u32::try_from(n).unwrap())
}

/// Time that the API server takes to send all Services and all slices to a client that does not parse them.
pub fn list_time(api: &ApiServer) -> Duration {
    let start = Instant::now();
    for path in ["/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices"] {
        let mut reader = request(api, path);
        let length = skip_head(&mut reader).expect("a list has a length");
        reader.read_exact(&mut vec![0; length]).unwrap();
    }
    start.elapsed()
}

fn request(api: &ApiServer, path: &str) -> BufReader<TcpStream> {
    let url = api.url();
    let mut stream = TcpStream::connect(url.strip_prefix("http://").unwrap()).unwrap();
    let token = crate::api_server::ADMIN;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {token}\r\n\r\n").unwrap();
    BufReader::new(stream)
}

/// Skips the head of a response; returns the length of the body if the head contains it.
fn skip_head(reader: &mut impl BufRead) -> Option<usize> {
    let mut length = None;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if line.trim().is_empty() {
            return length;
        }
        let line = line.to_lowercase();
        length = length.or_else(|| line.strip_prefix("content-length:")?.trim().parse().ok());
    }
}

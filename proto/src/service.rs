//! A Kubernetes Service in the form that sluice uses: frontends, policy, backends.

mod status_ranges;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{Family, Protocol, limits};
pub use status_ranges::StatusRanges;

/// Namespace and name of a Service. Written `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceName {
    /// The namespace.
    pub namespace: String,
    /// The name within it.
    pub name: String,
}

impl ServiceName {
    /// A name from its two parts.
    #[must_use]
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned() }
    }
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Declares an enum whose values have one stable text each.
macro_rules! named {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            /// Every value, in the order of declaration.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The stable text of this value.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str(self.as_str()) }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Self::ALL.iter().copied().find(|v| v.as_str() == text).ok_or_else(|| {
                    let allowed: Vec<_> = Self::ALL.iter().map(|v| v.as_str()).collect();
                    format!("found {text:?}, expected one of {}", allowed.join(", "))
                })
            }
        }
    };
}

named! {
    /// How a packet reaches the backend (DESIGN section 5).
    Mode {
        /// Destination and source rewritten; replies come back through the gateway.
        Nat = "nat",
        /// Destination rewritten.
        Dnat = "dnat",
        /// Only the MAC addresses rewritten.
        Dsr = "dsr",
        /// IP in IP.
        Ipip = "ipip",
        /// Generic UDP encapsulation, variant 1.
        Gue = "gue",
    }
}

named! {
    /// Destination of the packets of a Service.
    Target {
        /// Address and target port of an EndpointSlice.
        Endpoint = "endpoint",
        /// Nodes.
        Node = "node",
    }
}

named! {
    /// How a backend is chosen for a new flow.
    Scheduler {
        /// Maglev hashing (NSDI'16).
        Maglev = "maglev",
        /// Each backend in turn.
        RoundRobin = "round-robin",
        /// The backend with the fewest flows.
        LeastConnections = "least-connections",
        /// By a hash of the client's address.
        SourceHash = "source-hash",
        /// By a hash of the frontend's address.
        DestinationHash = "destination-hash",
        /// The backend with the smallest (flows + 1) / weight.
        ShortestExpectedDelay = "shortest-expected-delay",
        /// An idle backend, or else the one with the shortest expected delay.
        NeverQueue = "never-queue",
    }
}

named! {
    /// Over what a client's affinity is shared.
    #[derive(Default)]
    AffinityScope {
        /// Each port remembers its clients separately.
        #[default]
        Port = "port",
        /// All ports of a Service remember them together.
        Service = "service",
    }
}

named! {
    /// Version of the PROXY protocol: the header in front of what a client sends, with the client's address
    /// (haproxy, doc/proxy-protocol.txt).
    ProxyProtocol {
        /// A line of text; TCP only.
        V1 = "v1",
        /// Binary; TCP, and UDP with a header in each datagram.
        V2 = "v2",
    }
}

named! {
    /// Protocol of a probe.
    Probe {
        /// No probe: the backend is always healthy.
        None = "none",
        /// A TCP connection.
        Tcp = "tcp",
        /// An HTTP/1.1 request.
        Http = "http",
        /// An HTTP/1.1 request over TLS.
        Https = "https",
        /// `grpc.health.v1.Health/Check`, without TLS.
        Grpc = "grpc",
        /// An ICMP echo request.
        Icmp = "icmp",
    }
}

named! {
    /// Health of a backend before its first probe.
    InitialHealth {
        /// It is used at once.
        Healthy = "healthy",
        /// It is used once it has passed a probe.
        Unhealthy = "unhealthy",
    }
}

named! {
    /// Reason why a Service is not served yet, or not at all (DESIGN section 9).
    Reason {
        /// No gateway is connected.
        NoGateway = "NoGateway",
        /// Another program keeps writing its status.
        ForeignStatusWriter = "ForeignStatusWriter",
        /// Its address is no longer in a pool.
        OutsidePools = "OutsidePools",
        /// It requests a feature that is not implemented.
        Unsupported = "Unsupported",
        /// It requests something that is not allowed.
        Refused = "Refused",
        /// No node can take its traffic.
        NoEligibleNode = "NoEligibleNode",
        /// Another Service holds what it requests.
        Conflict = "Conflict",
        /// It requests an address that gateways may still forward for another Service.
        AddressReleasing = "AddressReleasing",
        /// No address is free.
        Exhausted = "Exhausted",
    }
}

/// Why a Service is not served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The reason as a stable word.
    pub reason: Reason,
    /// The message: what, where, what to do.
    pub message: String,
}

/// Health check of the backends of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// Protocol of the probe.
    pub probe: Probe,
    /// Port to probe instead of that of the backend.
    pub port: Option<u16>,
    /// `http` and `https`: path and query of the request, `/` if absent. `grpc`: the service to ask about, the whole
    /// server if absent.
    pub path: Option<String>,
    /// `http`, `https` and `grpc`: the host to ask for, and the name in the certificate; the address if absent.
    pub host: Option<String>,
    /// `http` and `https`: the statuses that pass.
    pub status: StatusRanges,
    /// `https`: whether the certificate must be valid for the host and signed by an authority that the gateway's
    /// machine trusts.
    pub tls_verify: bool,
    /// Port at which a node must answer `GET /healthz` with 200, in addition to passing the probe:
    /// `healthCheckNodePort` of Kubernetes, where kube-proxy reports whether the node has ready endpoints, or
    /// [`crate::limits::KUBE_PROXY_HEALTH_PORT`], which counts only while some node passes it.
    pub node_health_port: Option<u16>,
    /// Time between the starts of two probes of one target.
    pub interval: Duration,
    /// Maximum duration of a probe; a longer one has failed.
    pub timeout: Duration,
    /// Consecutive passed probes that make an unhealthy target healthy; at least 1.
    pub rise: u32,
    /// Consecutive failed probes that make a healthy target unhealthy; at least 1.
    pub fall: u32,
    /// If all backends fail: use all of them (true), or none.
    pub fail_open: bool,
    /// Health of a new backend until its first probe, if it is probed.
    pub initial: InitialHealth,
}

impl HealthCheck {
    /// Whether backends of a port of this protocol are probed, apart from what nodes say of themselves. Nothing says that
    /// TCP is served at the port of another protocol: that takes a port, or an owner who names a protocol over TCP.
    #[must_use]
    pub fn probes(&self, protocol: Protocol) -> bool {
        match self.probe {
            Probe::None => false,
            Probe::Tcp => protocol == Protocol::Tcp || self.port.is_some(),
            Probe::Http | Probe::Https | Probe::Grpc | Probe::Icmp => true,
        }
    }
}

impl Default for HealthCheck {
    /// DESIGN section 7, key `health`.
    fn default() -> Self {
        Self {
            probe: Probe::Tcp,
            port: None,
            path: None,
            host: None,
            status: StatusRanges::default(),
            tls_verify: false,
            node_health_port: None,
            interval: Duration::from_secs(1),
            timeout: Duration::from_millis(500),
            rise: 2,
            fall: 3,
            fail_open: true,
            initial: InitialHealth::Healthy,
        }
    }
}

/// Parameters on which all gateways must agree to build the same Maglev table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MaglevSpec {
    /// Number of entries; one of [`crate::limits::MAGLEV_SIZES`].
    pub size: u32,
    /// Seed of the hashes.
    pub seed: u64,
    /// Version of the hashes.
    pub hash_version: u32,
}

/// Packets that a backend may receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BackendState {
    /// New flows, if healthy.
    Active,
    /// Only packets of existing flows.
    Draining,
}

/// An address and port that can receive the flows of a frontend.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Backend {
    /// Destination of its packets.
    pub address: SocketAddr,
    /// Share of new flows, relative to the other backends; 0: none.
    pub weight: u16,
    /// Packets that it may receive.
    pub state: BackendState,
}

/// The backends of a port that Kubernetes recommends to clients of one zone (`hints.forZones`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneBackends {
    /// The zone.
    pub zone: String,
    /// Indices in [`ServicePort::backends`], ascending; at least one.
    pub backends: Vec<u32>,
}

/// A node that receives flows. The port is that of the frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeBackend {
    /// Destination of its packets.
    pub address: IpAddr,
    /// Share of new flows, relative to the other nodes; 0: none.
    pub weight: u16,
    /// Packets that it may receive.
    pub state: BackendState,
}

/// Nodes that are the backends of many ports: thousands of Services with a thousand nodes share one set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSet {
    /// Its name, unique in a state.
    pub name: String,
    /// The family of all nodes. None: any, as inside tunnels.
    pub family: Option<Family>,
    /// Ordered by address, without duplicates.
    pub nodes: Vec<NodeBackend>,
}

/// Node sets by name.
pub type NodeSets = BTreeMap<String, Arc<NodeSet>>;

/// The nodes of a set, at one port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodesAt {
    /// The nodes.
    pub set: Arc<NodeSet>,
    /// Port at which each of them receives the flows.
    pub port: u16,
}

/// The backends that a port had until they were replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EarlierBackends {
    /// When they were replaced: seconds of Unix time. They were in use since the time at which the next list ends.
    pub until_s: u64,
    /// Number of entries of their Maglev table; seed and version are those of the port.
    pub maglev_size: u32,
    /// Ordered by address, without duplicates.
    pub backends: Vec<Backend>,
}

/// One port of a Service in one address family: the frontend and its backends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Name of the port; may be empty.
    pub name: String,
    /// Protocol of the frontend and of the backends.
    pub protocol: Protocol,
    /// Family of the VIPs and the node port addresses, and of the backends except with a tunnel (`ipip`, `gue`).
    pub family: Family,
    /// Load balancer addresses that listen on `port`. Empty for type NodePort.
    pub vips: Vec<IpAddr>,
    /// Port at the VIPs.
    pub port: u16,
    /// Port at the gateway's `nodePortAddresses`; set for type NodePort only.
    pub node_port: Option<u16>,
    /// The Maglev table.
    pub maglev: MaglevSpec,
    /// Ordered by address, without duplicates.
    pub backends: Vec<Backend>,
    /// The backends, if they are the nodes of a set; then `backends` is empty.
    pub nodes: Option<NodesAt>,
    /// The backends that a gateway with a configured zone uses. A gateway in a zone that is not listed uses all
    /// backends: zones without backends are not listed, and no zone is while any ready endpoint has no hint.
    pub zones: Vec<ZoneBackends>,
    /// Application protocol (`appProtocol`); only reported.
    pub app_protocol: Option<String>,
    /// The backends that it had before, the newest first; only in one-way modes.
    pub earlier: Vec<EarlierBackends>,
    /// The header that its backends expect in front of a flow (TCP) or of each datagram (UDP). Only in `nat` and
    /// `dnat`; UDP: only [`ProxyProtocol::V2`]; never on SCTP.
    pub proxy_protocol: Option<ProxyProtocol>,
}

/// One of our Services. A Service that is not served has a refusal and no ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its name.
    pub name: ServiceName,
    /// How packets reach the backends.
    pub mode: Mode,
    /// Kind of the backends.
    pub target: Target,
    /// How backends are chosen.
    pub scheduler: Scheduler,
    /// Health check of the backends.
    pub health: HealthCheck,
    /// Time for which flows of a removed backend may continue.
    pub drain_timeout: Duration,
    /// `sessionAffinity: ClientIP`: time for which a client keeps its backend after its last new flow. None: no
    /// affinity.
    pub affinity: Option<Duration>,
    /// Over what the affinity is shared.
    pub affinity_scope: AffinityScope,
    /// Clients that may connect to the VIPs; not applied to node ports. None: all. Some: a family without a prefix is
    /// denied, and a prefix of length 0 allows its family (CONTROL section 2).
    pub source_ranges: Option<Vec<IpNet>>,
    /// Idle limit of all flows that carry data, instead of the gateway's limits.
    pub idle_timeout: Option<Duration>,
    /// `externalTrafficPolicy: Local`: a frontend without any backend drops `no_local_backend` instead of refusing.
    pub local: bool,
    /// Why it is not served.
    pub refusal: Option<Refusal>,
    /// One per port and family.
    pub ports: Vec<ServicePort>,
}

impl Probe {
    /// Whether it is an HTTP request.
    #[must_use]
    pub const fn is_http(self) -> bool {
        matches!(self, Self::Http | Self::Https)
    }
}

impl Mode {
    /// Whether replies return through the gateway, so that it sees both directions of a flow.
    #[must_use]
    pub const fn is_two_way(self) -> bool {
        matches!(self, Self::Nat | Self::Dnat)
    }

    /// Whether packets reach the backend inside other packets, which may be of the other family.
    #[must_use]
    pub const fn is_tunnel(self) -> bool {
        matches!(self, Self::Ipip | Self::Gue)
    }
}

impl ProxyProtocol {
    /// Whether ports of this protocol can have its header.
    #[must_use]
    pub const fn fits(self, protocol: Protocol) -> bool {
        match protocol {
            Protocol::Tcp => true,
            Protocol::Udp => matches!(self, Self::V2),
            Protocol::Sctp => false,
        }
    }
}

impl NodesAt {
    /// The nodes as backends, ordered by address.
    pub fn backends(&self) -> impl Iterator<Item = Backend> {
        let backend = |node: &NodeBackend| Backend {
            address: SocketAddr::new(node.address, self.port),
            weight: node.weight,
            state: node.state,
        };
        self.set.nodes.iter().map(backend)
    }
}

impl ServicePort {
    /// A port with no name, address, backend or zone.
    #[must_use]
    pub const fn new(protocol: Protocol, family: Family, port: u16, maglev: MaglevSpec) -> Self {
        Self {
            name: String::new(),
            protocol,
            family,
            vips: Vec::new(),
            port,
            node_port: None,
            maglev,
            backends: Vec::new(),
            nodes: None,
            zones: Vec::new(),
            app_protocol: None,
            earlier: Vec::new(),
            proxy_protocol: None,
        }
    }

    /// All backends, listed or nodes of a set, ordered by address.
    pub fn all_backends(&self) -> impl Iterator<Item = Backend> {
        self.backends.iter().cloned().chain(self.nodes.iter().flat_map(NodesAt::backends))
    }

    /// The number of backends.
    #[must_use]
    pub fn backend_count(&self) -> usize {
        self.backends.len() + self.nodes.as_ref().map_or(0, |at| at.set.nodes.len())
    }

    /// The port as a gateway in `zone` uses it; none if that is the same. The backends of other zones are left out only
    /// if one in this zone takes new flows; those that take none keep their flows in all zones, and so do those that were
    /// `used` until now. Earlier backends have no zones, so they do not count then.
    fn in_zone(&self, zone: &str, used: &HashSet<SocketAddr>) -> Option<Self> {
        let hinted = self.zones.iter().find(|hinted| hinted.zone == zone)?;
        let is_near = |index, backend: &Backend| backend.state == BackendState::Draining || hinted.backends.contains(&index);
        let near: Vec<bool> = (0..).zip(&self.backends).map(|(index, backend)| is_near(index, backend)).collect();
        let all = || self.backends.iter().zip(&near);
        let takes_new = |backend: &Backend| backend.state == BackendState::Active && backend.weight > 0;
        if !near.contains(&false) || !all().any(|(backend, near)| *near && takes_new(backend)) {
            return None;
        }
        let backends = all().filter(|(backend, near)| **near || used.contains(&backend.address));
        let state = |backend: &Backend, near| if near { backend.state } else { BackendState::Draining };
        let backends = backends.map(|(backend, near)| Backend { state: state(backend, *near), ..backend.clone() }).collect();
        Some(Self { backends, zones: Vec::new(), earlier: Vec::new(), ..self.clone() })
    }
}

impl Service {
    /// The Service as a gateway in `zone` uses it; none if that is the same. Backends of other zones to which the gateway
    /// has sent flows until now, those of the Service `before`, drain.
    #[must_use]
    pub fn in_zone(&self, zone: &str, before: Option<&Self>) -> Option<Self> {
        let backends = before.into_iter().flat_map(|before| &before.ports).flat_map(|port| &port.backends);
        let used = backends.map(|backend| backend.address).collect();
        let narrowed: Vec<Option<ServicePort>> = self.ports.iter().map(|port| port.in_zone(zone, &used)).collect();
        narrowed.iter().any(Option::is_some).then(|| {
            let ports = narrowed.into_iter().zip(&self.ports).map(|(near, port)| near.unwrap_or_else(|| port.clone()));
            Self { ports: ports.collect(), ..self.clone() }
        })
    }

    /// The node sets to which its ports refer.
    pub fn node_sets(&self) -> impl Iterator<Item = &Arc<NodeSet>> {
        self.ports.iter().filter_map(|port| port.nodes.as_ref()).map(|at| &at.set)
    }

    /// The Service with its node sets replaced by those of the same names; none if nothing changes.
    #[must_use]
    pub fn with_sets(&self, sets: &NodeSets) -> Option<Self> {
        let newer = |set: &Arc<NodeSet>| sets.get(&set.name).filter(|newer| !Arc::ptr_eq(newer, set));
        self.node_sets().any(|set| newer(set).is_some()).then(|| {
            let mut with = self.clone();
            for at in with.ports.iter_mut().filter_map(|port| port.nodes.as_mut()) {
                at.set = newer(&at.set).cloned().unwrap_or_else(|| Arc::clone(&at.set));
            }
            with
        })
    }

    /// The Service with all backends listed, for a gateway that does not know node sets.
    #[must_use]
    pub fn listed(&self) -> Cow<'_, Self> {
        if self.node_sets().next().is_none() {
            return Cow::Borrowed(self);
        }
        let listed = |port: &ServicePort| ServicePort { backends: port.all_backends().collect(), nodes: None, ..port.clone() };
        Cow::Owned(Self { ports: self.ports.iter().map(listed).collect(), ..self.clone() })
    }

    /// A Service with these ports and defaults for everything else.
    #[must_use]
    pub fn new(name: ServiceName, ports: Vec<ServicePort>) -> Self {
        Self {
            name,
            mode: Mode::Nat,
            target: Target::Endpoint,
            scheduler: Scheduler::Maglev,
            health: HealthCheck::default(),
            drain_timeout: limits::DRAIN_TIMEOUT,
            affinity: None,
            affinity_scope: AffinityScope::Port,
            source_ranges: None,
            idle_timeout: None,
            local: false,
            refusal: None,
            ports,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateway_uses_the_backends_of_its_zone_where_one_of_them_takes_new_flows() {
        let backend = |(last, weight, state)| Backend { address: ([10, 0, 0, last], 80).into(), weight, state };
        let all = [
            (1, 1, BackendState::Active),
            (2, 1, BackendState::Active),
            (3, 0, BackendState::Active),
            (4, 1, BackendState::Draining),
        ];
        let zone = |name: &str, backends: &[u32]| ZoneBackends { zone: name.to_owned(), backends: backends.to_vec() };
        let port = ServicePort {
            backends: all.map(backend).into(),
            zones: vec![zone("a", &[0, 3]), zone("off", &[2, 3]), zone("all", &[0, 1, 2, 3])],
            ..ServicePort::new(Protocol::Tcp, Family::V4, 80, MaglevSpec { size: 251, seed: 0, hash_version: 1 })
        };
        let service = Service::new(ServiceName::new("shop", "web"), vec![port]);
        let near = service.in_zone("a", None).unwrap();
        let listed = |service: &Service| -> Vec<(String, BackendState)> {
            service.ports[0].backends.iter().map(|backend| (backend.address.to_string(), backend.state)).collect()
        };
        let of_zone = [("10.0.0.1:80".to_owned(), BackendState::Active), ("10.0.0.4:80".to_owned(), BackendState::Draining)];
        assert_eq!(listed(&near), of_zone);
        assert!(near.ports[0].zones.is_empty());
        for zone in ["off", "all", "unknown", ""] {
            assert_eq!(service.in_zone(zone, Some(&near)), None, "{zone:?}");
        }
        let mut two = service.clone();
        two.ports[0].backends.truncate(2);
        let after = service.in_zone("a", Some(&two)).unwrap();
        let was_used = ("10.0.0.2:80".to_owned(), BackendState::Draining);
        assert_eq!(listed(&after), [&of_zone[..1], &[was_used], &of_zone[1..]].concat());
        assert_eq!(service.in_zone("a", Some(&after)), Some(after), "it drains for as long as it is listed");
    }
}

//! A Kubernetes Service as sluice sees it: frontends, policy, backends.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{Family, Protocol, limits};

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
                    format!("{text:?} is none of {}", allowed.join(", "))
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
    /// Where a service's packets are sent.
    Target {
        /// To the EndpointSlice's address and target port.
        Endpoint = "endpoint",
        /// To nodes.
        Node = "node",
    }
}

named! {
    /// How a backend is chosen for a new flow.
    Scheduler {
        /// Maglev hashing (NSDI'16).
        Maglev = "maglev",
        /// Each in turn.
        RoundRobin = "round-robin",
        /// The one with the fewest flows.
        LeastConnections = "least-connections",
        /// By the client's address.
        SourceHash = "source-hash",
        /// By the frontend's address.
        DestinationHash = "destination-hash",
        /// The smallest (flows + 1) / weight.
        ShortestExpectedDelay = "shortest-expected-delay",
        /// An idle one, else the shortest expected delay.
        NeverQueue = "never-queue",
    }
}

named! {
    /// What a probe speaks.
    Probe {
        /// No probe: always healthy.
        None = "none",
        /// A TCP connection.
        Tcp = "tcp",
    }
}

named! {
    /// Why a Service is not served, or waits (DESIGN section 9).
    Reason {
        /// No gateway is connected.
        NoGateway = "NoGateway",
        /// Somebody else keeps writing its status.
        ForeignStatusWriter = "ForeignStatusWriter",
        /// Its address lies in no pool any more.
        OutsidePools = "OutsidePools",
        /// It asks for something that is not built.
        Unsupported = "Unsupported",
        /// It asks for something that is not allowed.
        Refused = "Refused",
        /// No node can take its traffic.
        NoEligibleNode = "NoEligibleNode",
        /// Another Service holds what it asks for.
        Conflict = "Conflict",
        /// No address is left.
        Exhausted = "Exhausted",
    }
}

/// Why a Service is not served, in a word and in a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The word, stable.
    pub reason: Reason,
    /// The sentence: what, where, what to do.
    pub message: String,
}

/// How the health of a service's backends is found out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// What the probe speaks.
    pub probe: Probe,
    /// Port to probe instead of the backend's own.
    pub port: Option<u16>,
    /// Port at which the backend, a node, must answer `GET /healthz` by 200, besides passing the probe: Kubernetes'
    /// `healthCheckNodePort`, where kube-proxy says whether the node has ready endpoints.
    pub node_health_port: Option<u16>,
    /// Time between the starts of two probes of one target.
    pub interval: Duration,
    /// A probe that takes longer has failed.
    pub timeout: Duration,
    /// Passed probes in a row that make an unhealthy target healthy; at least 1.
    pub rise: u32,
    /// Failed probes in a row that make a healthy target unhealthy; at least 1.
    pub fall: u32,
    /// With all backends failing: use all of them (true), or none.
    pub fail_open: bool,
}

impl Default for HealthCheck {
    /// DESIGN section 7, key `health`.
    fn default() -> Self {
        Self {
            probe: Probe::Tcp,
            port: None,
            node_health_port: None,
            interval: Duration::from_secs(1),
            timeout: Duration::from_millis(500),
            rise: 2,
            fall: 3,
            fail_open: true,
        }
    }
}

/// What every gateway must agree on to build the same Maglev table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MaglevSpec {
    /// Entries; one of [`crate::limits::MAGLEV_SIZES`].
    pub size: u32,
    /// Seed of the hashes.
    pub seed: u64,
    /// Version of the hashes.
    pub hash_version: u32,
}

/// What a backend may receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BackendState {
    /// New flows, if healthy.
    Active,
    /// Only what its flows already carry.
    Draining,
}

/// One address and port that can take a frontend's flows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Backend {
    /// Where its packets go.
    pub address: SocketAddr,
    /// Share of new flows, relative to the other backends; 0 takes none.
    pub weight: u16,
    /// What it may receive.
    pub state: BackendState,
}

/// The backends of a port that Kubernetes hints to clients of one zone (`hints.forZones`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneBackends {
    /// The zone.
    pub zone: String,
    /// Places in [`ServicePort::backends`], ascending; at least one.
    pub backends: Vec<u32>,
}

/// A node that takes flows, at a port that each frontend has of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeBackend {
    /// Where its packets go.
    pub address: IpAddr,
    /// Share of new flows, relative to the other nodes; 0 takes none.
    pub weight: u16,
    /// What it may receive.
    pub state: BackendState,
}

/// Nodes that many ports have as backends: thousands of Services that are sent to a thousand nodes hold them once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSet {
    /// Its name; within a state no two sets have the same.
    pub name: String,
    /// The family of all nodes. None: of any, as inside tunnels.
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
    /// Where each of them takes the flows.
    pub port: u16,
}

/// One port of a Service in one family: what is listened on, and who takes the flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Name of the port; may be empty.
    pub name: String,
    /// Protocol of the frontend and of the backends.
    pub protocol: Protocol,
    /// Family of the VIPs and the node port addresses, and of the backends unless a tunnel leads to them (`ipip`, `gue`).
    pub family: Family,
    /// Load balancer addresses that listen on `port`. Empty for type NodePort.
    pub vips: Vec<IpAddr>,
    /// Port at the VIPs.
    pub port: u16,
    /// Port at the gateway's `nodePortAddresses`; set for type NodePort only.
    pub node_port: Option<u16>,
    /// The table to choose by.
    pub maglev: MaglevSpec,
    /// Ordered by address, without duplicates.
    pub backends: Vec<Backend>,
    /// The backends, where they are nodes of a set: then `backends` is empty.
    pub nodes: Option<NodesAt>,
    /// Which of them a gateway with a configured zone uses. Zones that have none, and all zones while any ready endpoint has
    /// no hint, are not here: all backends are used there.
    pub zones: Vec<ZoneBackends>,
    /// What clients and backends speak (`appProtocol`); only told on.
    pub app_protocol: Option<String>,
}

/// A Service that is ours. One that is not served carries the refusal and no ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its name.
    pub name: ServiceName,
    /// How packets reach backends.
    pub mode: Mode,
    /// Where packets are sent.
    pub target: Target,
    /// How backends are chosen.
    pub scheduler: Scheduler,
    /// How health is found out.
    pub health: HealthCheck,
    /// How long flows of a removed backend may go on.
    pub drain_timeout: Duration,
    /// `sessionAffinity: ClientIP`: how long a client keeps its backend after its last new flow. None: no affinity.
    pub affinity: Option<Duration>,
    /// Clients that may connect to the VIPs; never asked of node ports. None: all. Some: a family without a prefix in it
    /// is denied, a prefix of length 0 allows its family (CONTROL section 2).
    pub source_ranges: Option<Vec<IpNet>>,
    /// How long an established flow may be silent, instead of the gateway's limit for its protocol and mode.
    pub idle_timeout: Option<Duration>,
    /// `externalTrafficPolicy: Local`: a frontend without any backend drops `no_local_backend` instead of refusing.
    pub local: bool,
    /// Why it is not served.
    pub refusal: Option<Refusal>,
    /// One per port and family.
    pub ports: Vec<ServicePort>,
}

impl Mode {
    /// Replies come back through the gateway, which sees both directions of a flow.
    #[must_use]
    pub const fn is_two_way(self) -> bool {
        matches!(self, Self::Nat | Self::Dnat)
    }

    /// Packets reach the backend inside others, which may be of the other family.
    #[must_use]
    pub const fn is_tunnel(self) -> bool {
        matches!(self, Self::Ipip | Self::Gue)
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
    /// The backends, listed or nodes of a set, ordered by address.
    pub fn all_backends(&self) -> impl Iterator<Item = Backend> {
        self.backends.iter().cloned().chain(self.nodes.iter().flat_map(NodesAt::backends))
    }

    /// How many backends there are.
    #[must_use]
    pub fn backend_count(&self) -> usize {
        self.backends.len() + self.nodes.as_ref().map_or(0, |at| at.set.nodes.len())
    }

    /// The port as a gateway in `zone` uses it; none where that is no other. Backends that take no new flows by somebody's
    /// wish are no reason to leave those of other zones out.
    fn in_zone(&self, zone: &str) -> Option<Self> {
        let hinted = self.zones.iter().find(|hinted| hinted.zone == zone)?;
        let places = hinted.backends.iter().filter_map(|place| usize::try_from(*place).ok());
        let backends: Vec<Backend> = places.filter_map(|place| self.backends.get(place).cloned()).collect();
        let takes_new = |backend: &Backend| backend.state == BackendState::Active && backend.weight > 0;
        let is_enough = backends.len() < self.backends.len() && backends.iter().any(takes_new);
        is_enough.then(|| Self { backends, zones: Vec::new(), ..self.clone() })
    }
}

impl Service {
    /// The Service as a gateway in `zone` uses it; none where that is no other.
    #[must_use]
    pub fn in_zone(&self, zone: &str) -> Option<Self> {
        let narrowed: Vec<Option<ServicePort>> = self.ports.iter().map(|port| port.in_zone(zone)).collect();
        narrowed.iter().any(Option::is_some).then(|| {
            let ports = narrowed.into_iter().zip(&self.ports).map(|(near, port)| near.unwrap_or_else(|| port.clone()));
            Self { ports: ports.collect(), ..self.clone() }
        })
    }

    /// The sets of nodes that its ports name.
    pub fn node_sets(&self) -> impl Iterator<Item = &Arc<NodeSet>> {
        self.ports.iter().filter_map(|port| port.nodes.as_ref()).map(|at| &at.set)
    }

    /// The Service with the sets of these names in place of its own; none where that changes nothing.
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

    /// The Service with all backends listed, for who knows no sets.
    #[must_use]
    pub fn listed(&self) -> Cow<'_, Self> {
        if self.node_sets().next().is_none() {
            return Cow::Borrowed(self);
        }
        let listed = |port: &ServicePort| ServicePort { backends: port.all_backends().collect(), nodes: None, ..port.clone() };
        Cow::Owned(Self { ports: self.ports.iter().map(listed).collect(), ..self.clone() })
    }

    /// A Service with these ports, and the defaults for all else.
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
            name: String::new(),
            protocol: Protocol::Tcp,
            family: Family::V4,
            vips: Vec::new(),
            port: 80,
            node_port: None,
            maglev: MaglevSpec { size: 251, seed: 0, hash_version: 1 },
            backends: all.map(backend).into(),
            zones: vec![zone("a", &[0, 3]), zone("off", &[2, 3]), zone("all", &[0, 1, 2, 3])],
            app_protocol: None,
            nodes: None,
        };
        let service = Service::new(ServiceName::new("shop", "web"), vec![port]);
        let near = service.in_zone("a").unwrap();
        assert_eq!(
            near.ports[0].backends.iter().map(|b| b.address.to_string()).collect::<Vec<_>>(),
            ["10.0.0.1:80", "10.0.0.4:80"]
        );
        assert!(near.ports[0].zones.is_empty());
        for zone in ["off", "all", "unknown", ""] {
            assert_eq!(service.in_zone(zone), None, "{zone:?}");
        }
    }
}

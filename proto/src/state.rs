//! The complete state that a gateway receives.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use imbl::OrdMap;
use serde::{Deserialize, Serialize};

use crate::{AddressRange, Generation, NodeSets, PoolBgp, Service, ServiceName};

/// How the VIPs of a pool become reachable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Announce {
    /// The gateway answers ARP and neighbour discovery for them.
    #[default]
    L2,
    /// The gateway adds routes to a Linux table, which a routing daemon redistributes.
    Routed,
}

/// The addresses from which VIPs are allocated. A gateway needs them to recognise unused ones as ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// Its addresses, without overlaps.
    pub ranges: Vec<AddressRange>,
    /// How its VIPs become reachable.
    pub announce: Announce,
    /// How routers learn them, if it is `routed`.
    pub bgp: PoolBgp,
}

/// Services by name. Successive states share unchanged parts: a copy costs nothing, and a comparison visits only the
/// differences.
pub type Services = OrdMap<ServiceName, Arc<Service>>;

/// The state that a controller sends to a gateway. Successive states share Services and never copy them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// Version of the state.
    pub generation: Generation,
    /// Our Services, served or refused.
    pub services: Services,
    /// The pools.
    pub pools: Vec<Pool>,
}

impl State {
    /// The node sets to which Services refer.
    #[must_use]
    pub fn node_sets(&self) -> NodeSets {
        self.services.values().flat_map(|service| service.node_sets()).map(|set| (set.name.clone(), Arc::clone(set))).collect()
    }

    /// The same state with all backends listed, for a gateway that does not know node sets.
    #[must_use]
    pub fn listed(&self) -> Self {
        let mut listed = self.clone();
        for (name, service) in self.services.iter().filter(|(_, service)| service.node_sets().next().is_some()) {
            listed.services.insert(name.clone(), Arc::new(service.listed().into_owned()));
        }
        listed
    }
}

/// The backend of a probe to a VIP, by the probe's source port, from [`crate::limits::PROBE_PORT_FIRST`] to
/// [`crate::limits::PROBE_PORT_LAST`]. Any backend of the frontend would accept the probe; the engine sends it to this
/// one, according to the frontend's mode (FORWARDING 12).
pub type ProbeTags = BTreeMap<u16, IpAddr>;

/// Origin of the state of a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// A controller sent it to this process.
    Controller,
    /// The process before stored it on disk. It has ended just now and had it from a controller, so it is used like one
    /// from a controller. It does not count as newly confirmed.
    LastProcess,
    /// An earlier process stored it on disk. Pod addresses may belong to other pods by now, so a backend of target
    /// `endpoint` must pass one probe before it is used (CONTROL section 2).
    Disk,
    /// It was not confirmed as current for longer than key `maxStateAge`, on disk or while this process ran without a
    /// controller: a pod address may belong to any pod. Only targets `node` are used (CONTROL section 7).
    Expired,
}

impl Origin {
    /// Whether a pod address in the state belongs to the pod that the state says.
    #[must_use]
    pub const fn is_current(self) -> bool {
        matches!(self, Self::Controller | Self::LastProcess)
    }
}

/// The state that a gateway uses, with its origin.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayState {
    /// The complete state.
    pub state: Arc<State>,
    /// Its origin.
    pub origin: Origin,
}

//! The whole state that a gateway is given.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use imbl::OrdMap;
use serde::{Deserialize, Serialize};

use crate::{AddressRange, Generation, NodeSets, Service, ServiceName};

/// How VIPs of a pool become reachable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Announce {
    /// The gateway answers ARP and NDP for them.
    #[default]
    L2,
    /// Routes stand in a Linux table for a routing daemon to redistribute.
    Routed,
}

/// Addresses that VIPs are taken from. A gateway needs them to know that an unused one is still ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// Its addresses, without overlaps.
    pub ranges: Vec<AddressRange>,
    /// How they become reachable.
    pub announce: Announce,
}

/// Services by name. Successive states share what did not change: a copy costs nothing, and what differs between two of them
/// is found without looking at the rest.
pub type Services = OrdMap<ServiceName, Arc<Service>>;

/// All that a controller tells a gateway. Services are shared, never copied, between one state and the next.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// Which version this is.
    pub generation: Generation,
    /// The Services that are ours, served or refused.
    pub services: Services,
    /// The pools.
    pub pools: Vec<Pool>,
}

impl State {
    /// The sets of nodes that Services name.
    #[must_use]
    pub fn node_sets(&self) -> NodeSets {
        self.services.values().flat_map(|service| service.node_sets()).map(|set| (set.name.clone(), Arc::clone(set))).collect()
    }

    /// The same with all backends listed, for who knows no sets.
    #[must_use]
    pub fn listed(&self) -> Self {
        let mut listed = self.clone();
        for (name, service) in self.services.iter().filter(|(_, service)| service.node_sets().next().is_some()) {
            listed.services.insert(name.clone(), Arc::new(service.listed().into_owned()));
        }
        listed
    }
}

/// The backend that a probe to a VIP is for, by its source port, which is from [`crate::limits::PROBE_PORT_FIRST`] to
/// [`crate::limits::PROBE_PORT_LAST`]. Every backend of the VIP's frontend would take it; the engine sends it to this one, in
/// the way of the frontend's mode (FORWARDING 12).
pub type ProbeTags = BTreeMap<u16, IpAddr>;

/// Where a gateway has its state from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// A controller sent it to this run of the gateway.
    Controller,
    /// An earlier run left it on disk. Pod addresses may belong to somebody else by now, so a backend of target
    /// `endpoint` must pass one probe before it is used (CONTROL section 2).
    Disk,
    /// The same, and nobody knew it to be current for longer than key `maxStateAge`: whoever answers at an address of a pod is
    /// somebody else's. Only targets `node` are used (CONTROL section 7).
    OldDisk,
}

/// The state that a gateway goes by.
#[derive(Clone, Debug, PartialEq)]
pub struct Known {
    /// The state, complete.
    pub state: Arc<State>,
    /// Where it is from.
    pub origin: Origin,
}

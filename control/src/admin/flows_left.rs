//! Flows that are left at drained backends, nodes and gateways, as gateways count them.
//!
//! Invariant: a number is given only if every gateway that may have such flows applies the drain and has told its part;
//! otherwise an operator would switch a machine off too early. Deliberately not here: the flows themselves (`fleet`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use proto::v1::{answer::Reply, question::Query};
use proto::{FleetStatus, v1};

use super::gateway_rows::written;
use crate::gateways::fleet_queries::Fleet;
use crate::gateways::registry::{Gateway, Gateways};
use crate::world::drained_nodes::DrainedNodes;
use crate::world::overrides::{DrainTarget, Overrides};
use crate::world::planned_drains::PlannedDrains;

/// How long a disconnected gateway may have flows of a drain: as long as the longest drain. It forwards by its last
/// state, and does not know what was drained since.
const GONE_AFTER: Duration = Duration::from_secs(24 * 3600);

/// The drains that the newest state was planned with, and its epoch; `None`: there is no state yet.
pub(super) struct PlannedState {
    pub(super) epoch: Option<String>,
    pub(super) drains: Arc<PlannedDrains>,
}

impl PlannedState {
    /// The generation that gateways must apply before the drain is in effect; `None` before it is published.
    fn counter(&self, what: &DrainTarget) -> Option<u64> {
        self.drains.counter(what, self.epoch.as_deref()?)
    }
}

/// The flows of backends at the addresses of all drains, and of gateways.
pub(super) struct FlowsLeft {
    planned: PlannedState,
    /// Counter of the newest generation that all gateways had applied before they were asked.
    reached: Option<u64>,
    at_backends: BTreeMap<SocketAddr, u64>,
    at_gateways: BTreeMap<String, u64>,
    /// Gateways whose flows at backends are not known.
    pub(super) silent: Vec<v1::Silent>,
}

impl FlowsLeft {
    /// Asks all gateways, if any backend or node is drained.
    pub(super) async fn ask(fleet: &Fleet, gateways: &Gateways, overrides: &Overrides, planned: PlannedState) -> Self {
        let own_flows = |gateway: &Gateway| own_flows(gateway.flows, gateway.fleet.as_deref());
        let at_gateways: BTreeMap<_, _> = gateways.iter().map(|gateway| (gateway.name.clone(), own_flows(gateway))).collect();
        let addresses: BTreeSet<IpAddr> =
            overrides.drains().keys().flat_map(|what| addresses(what, planned.drains.nodes())).collect();
        let reached = gateways.reached_by_all();
        let mut left = Self { planned, reached, at_backends: BTreeMap::new(), at_gateways, silent: Vec::new() };
        if addresses.is_empty() {
            return left;
        }
        left.silent.extend(gateways.disconnected().iter().filter_map(|(name, seen)| disconnected(name, *seen)));
        let addresses = addresses.iter().map(ToString::to_string).collect();
        let query = Query::Backends(v1::ListBackendsRequest { counters: false, addresses, history: false });
        for (gateway, answer) in fleet.ask(left.at_gateways.keys().cloned().collect(), &query).await {
            match answer {
                Ok(Reply::Backends(answer)) => answer.backends.iter().for_each(|backend| left.add(backend)),
                Ok(_) => left.silent.push(v1::Silent { gateway, reason: "its answer belongs to another request".to_owned() }),
                Err(error) => left.silent.push(v1::Silent { gateway, reason: error.to_string() }),
            }
        }
        left
    }

    fn add(&mut self, backend: &v1::BackendStatus) {
        if let Ok(address) = backend.address.parse() {
            *self.at_backends.entry(address).or_default() += backend.flows;
        }
    }

    /// The flows that are left there; `None` if that is not known. While a gateway does not apply the drain, none left at
    /// this moment does not mean that none will begin.
    pub(super) fn at(&self, what: &DrainTarget) -> Option<u64> {
        let counter = self.planned.counter(what)?;
        if let DrainTarget::Gateway(name) = what {
            return self.at_gateways.get(name).copied();
        }
        let addresses: BTreeSet<IpAddr> = addresses(what, self.planned.drains.nodes()).into_iter().collect();
        let is_there = |at: &SocketAddr| match what {
            DrainTarget::Backend(backend) => at == backend,
            _ => addresses.contains(&at.ip()),
        };
        let flows = self.at_backends.iter().filter(|(at, _)| is_there(at)).map(|(_, flows)| flows).sum();
        (self.silent.is_empty() && self.reached >= Some(counter)).then_some(flows)
    }
}

/// The flows that a gateway carries itself. It goes on hearing those of its partners while it is drained.
fn own_flows(flows: u64, fleet: Option<&FleetStatus>) -> u64 {
    flows.saturating_sub(fleet.map_or(0, |fleet| fleet.shadow_flows))
}

/// The addresses of the backends that a drain concerns.
fn addresses(what: &DrainTarget, nodes: &DrainedNodes) -> Vec<IpAddr> {
    match what {
        DrainTarget::Backend(backend) => vec![backend.ip()],
        DrainTarget::Address(address) => vec![*address],
        DrainTarget::Node(name) => nodes.addresses_of(name).collect(),
        DrainTarget::Gateway(_) => Vec::new(),
    }
}

fn disconnected(name: &str, seen: SystemTime) -> Option<v1::Silent> {
    let is_gone = seen.elapsed().is_ok_and(|away| away >= GONE_AFTER);
    let reason = || format!("it has been disconnected since {}; it may still have flows", written(seen));
    (!is_gone).then(|| v1::Silent { gateway: name.to_owned(), reason: reason() })
}

#[cfg(test)]
mod tests {
    use proto::Generation;
    use tokio::sync::watch;

    use super::*;
    use crate::gateways::registry::Connection;
    use crate::world::overrides::tests::drained;

    #[tokio::test]
    async fn flows_at_a_drain_are_unknown_until_it_is_planned_and_every_gateway_applies_it() {
        let [node, gateway]: [DrainTarget; 2] = ["node/a", "gateway/edge-1"].map(|text| text.parse().unwrap());
        let (overrides, gateways) = (drained(&["node/a", "gateway/edge-1"]), watch::Sender::new(Gateways::default()));
        let connections = ["edge-1", "edge-2"].map(|name| Connection::open(&gateways, name, "", Vec::new()));
        let at = async |epoch: &str, drains: &PlannedDrains| {
            let planned = PlannedState { epoch: Some(epoch.to_owned()), drains: Arc::new(drains.clone()) };
            let gateways = gateways.borrow().clone();
            let left = FlowsLeft::ask(&Fleet::default(), &gateways, &overrides, planned).await;
            [&node, &gateway].map(|what| left.at(what))
        };
        connections.iter().for_each(|connection| connection.acknowledge(6));
        assert_eq!(at("e", &PlannedDrains::default()).await, [None, None], "stored, and not planned yet");
        let generation = Generation { epoch: "e".to_owned(), counter: 7 };
        let planned = PlannedDrains::default().after(&overrides, &Arc::default(), &generation).unwrap();
        assert_eq!(at("e", &planned).await, [None, Some(0)], "published, and not applied yet");
        connections[0].acknowledge(7);
        assert_eq!(at("e", &planned).await, [None, Some(0)], "edge-2 still begins flows there");
        connections[1].acknowledge(8);
        assert_eq!(at("e", &planned).await, [Some(0), Some(0)]);
        assert_eq!(at("f", &planned).await, [None, None], "counters of an earlier term");
    }

    #[test]
    fn flows_of_partners_are_not_left_at_a_gateway() {
        let fleet = |shadow_flows| FleetStatus { shadow_flows, ..FleetStatus::default() };
        assert_eq!([own_flows(7, None), own_flows(7, Some(&fleet(4))), own_flows(7, Some(&fleet(9)))], [7, 3, 0]);
    }
}

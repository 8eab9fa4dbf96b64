//! The received state: applies the messages of a controller.
//!
//! Invariant: a Service that a message does not change keeps its `Arc`, so that it is not compiled again. A Service
//! that this version cannot decode is stored as refused, with the reason; it is not served, and all others are.

use std::collections::BTreeMap;
use std::sync::Arc;

use proto::convert::{self, ConvertError, refused_service, service_name};
use proto::{GatewayState, Generation, NodeSets, Origin, Pool, Service, Services, State, v1};

/// Why a message is unusable. The stream is opened again.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum ReceivedError {
    /// It does not name the resulting generation.
    #[error("the controller sent a state without a generation")]
    NoGeneration,
    /// It is a difference, but there is no state.
    #[error("the controller sent changes, and there is no state to change")]
    NothingToChange,
    /// A pool is invalid: without it, the gateway would treat its own VIPs as foreign addresses.
    #[error("the controller sent a pool that cannot be used: {0}")]
    Pool(#[from] ConvertError),
}

/// The state as received, and each Service's content hash as the controller sent it.
#[derive(Debug, Default)]
pub(super) struct Received {
    state: Option<Arc<State>>,
    hashes: BTreeMap<String, Vec<u8>>,
    /// The node sets to which ports may refer.
    node_sets: NodeSets,
}

impl Received {
    /// Starts from the state of an earlier run of this task or of the program.
    pub(super) fn resuming(known: Option<&GatewayState>) -> Self {
        let Some(known) = known else { return Self::default() };
        let hash = |service: &Arc<Service>| (service.name.to_string(), v1::Service::from(&**service).hash);
        let (state, node_sets) = (Arc::clone(&known.state), known.state.node_sets());
        Self { state: Some(state), hashes: known.state.services.values().map(hash).collect(), node_sets }
    }

    /// The first message to a controller.
    pub(super) fn hello(&self, gateway: &str, version: &str) -> v1::Hello {
        let have = self.state.as_ref().map(|state| &state.generation).filter(|generation| **generation != Generation::default());
        v1::Hello {
            gateway: gateway.to_owned(),
            version: version.to_owned(),
            have: have.map(v1::Generation::from),
            hashes: if have.is_some() { self.hashes.clone() } else { BTreeMap::new() },
            node_sets: true,
            ..v1::Hello::default()
        }
    }

    /// Applies a message.
    pub(super) fn apply(&mut self, response: v1::WatchResponse) -> Result<GatewayState, ReceivedError> {
        let generation: Generation = response.generation.ok_or(ReceivedError::NoGeneration)?.into();
        let before = match &self.state {
            Some(state) => Arc::clone(state),
            None if response.full => Arc::default(),
            None => return Err(ReceivedError::NothingToChange),
        };
        let pools: Vec<Pool> = response.pools.into_iter().map(Pool::try_from).collect::<Result<_, _>>()?;
        let mut services = if response.full { Services::new() } else { before.services.clone() };
        if response.full {
            self.hashes.clear();
        }
        self.take_sets(response.node_sets, &mut services);
        for name in &response.removed {
            self.hashes.remove(name);
            match service_name(name) {
                Ok(name) => _ = services.remove(&name),
                Err(error) => tracing::error!(%error, "the controller removed a Service that has no name; ignored"),
            }
        }
        for message in response.services {
            let Some((service, hash)) = read(message, &self.node_sets) else { continue };
            self.hashes.insert(service.name.to_string(), hash);
            let unchanged = before.services.get(&service.name).filter(|old| ***old == service);
            let service = unchanged.cloned().unwrap_or_else(|| Arc::new(service));
            services.insert(service.name.clone(), service);
        }
        let state = State { generation, services, pools };
        let state = if *before == state { before } else { Arc::new(state) };
        self.state = Some(Arc::clone(&state));
        Ok(GatewayState { state, origin: Origin::Controller })
    }

    /// Applies node sets: Services that refer to one get its newest version, whether or not they were sent again. A set
    /// that cannot be decoded counts as missing.
    fn take_sets(&mut self, messages: Vec<v1::NodeSet>, services: &mut Services) {
        if messages.is_empty() {
            return;
        }
        let (sets, errors) = convert::node_sets(messages, &self.node_sets);
        for error in errors {
            tracing::error!(%error, "this gateway cannot use a set of nodes; Services that name it stay as they are, or are refused");
        }
        let with = services.values().filter_map(|service| service.with_sets(&sets));
        for service in with.collect::<Vec<_>>() {
            services.insert(service.name.clone(), Arc::new(service));
        }
        self.node_sets = sets;
    }
}

/// A Service and its hash; `None` if it has no name.
fn read(message: v1::Service, sets: &NodeSets) -> Option<(Service, Vec<u8>)> {
    let name = match service_name(&format!("{}/{}", message.namespace, message.name)) {
        Ok(name) => name,
        Err(error) => {
            tracing::error!(%error, "the controller sent a Service without a name; ignored");
            return None;
        }
    };
    let hash = message.hash.clone();
    let service = convert::service(message, sets).unwrap_or_else(|error| {
        tracing::error!(service = %name, %error, "this gateway cannot serve the Service");
        refused_service(name, &error)
    });
    Some((service, hash))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::net::SocketAddr;

    use proto::convert::{difference, full};
    use proto::{
        Backend, BackendState, Family, MaglevSpec, NodeBackend, NodeSet, NodesAt, Protocol, Reason, ServiceName, ServicePort,
    };

    use super::*;

    pub(crate) fn service(name: &str, backends: &[&str]) -> Arc<Service> {
        let backend =
            |text: &&str| Backend { address: text.parse::<SocketAddr>().unwrap(), weight: 1, state: BackendState::Active };
        Arc::new(Service::new(
            ServiceName::new("default", name),
            vec![ServicePort {
                vips: vec!["192.0.2.100".parse().unwrap()],
                backends: backends.iter().map(backend).collect(),
                ..ServicePort::new(Protocol::Tcp, Family::V4, 80, MaglevSpec { size: 251, seed: 0, hash_version: 1 })
            }],
        ))
    }

    pub(crate) fn state(epoch: &str, counter: u64, services: &[Arc<Service>]) -> State {
        let services = services.iter().map(|s| (s.name.clone(), Arc::clone(s))).collect();
        State { generation: Generation { epoch: epoch.to_owned(), counter }, services, pools: Vec::new() }
    }

    #[test]
    fn what_a_message_does_not_change_keeps_its_arc() {
        let first = state("e", 1, &[service("a", &["10.0.0.1:80"]), service("b", &["10.0.0.2:80"])]);
        let second = state("e", 2, &[service("a", &["10.0.0.1:80"]), service("b", &["10.0.0.3:80"])]);
        let mut received = Received::default();
        let one = received.apply(full(&first)).unwrap().state;
        for message in [difference(&first, &second), full(&second)] {
            let two = received.apply(message).unwrap().state;
            assert_eq!(*two, second);
            let name = ServiceName::new("default", "a");
            assert!(Arc::ptr_eq(&one.services[&name], &two.services[&name]));
        }
    }

    #[test]
    fn nodes_that_come_reach_the_services_that_name_their_set_and_no_others() {
        let to_nodes = |name: &str, nodes: &[&str]| {
            let node = |text: &&str| NodeBackend { address: text.parse().unwrap(), weight: 1, state: BackendState::Active };
            let nodes = nodes.iter().map(node).collect();
            let set = Arc::new(NodeSet { name: "v4".to_owned(), family: Some(Family::V4), nodes });
            let mut one = Service::clone(&service(name, &[]));
            one.ports[0].nodes = Some(NodesAt { set, port: 30_080 });
            Arc::new(one)
        };
        let pods = service("pods", &["10.0.0.1:80"]);
        let first = state("e", 1, &[Arc::clone(&pods), to_nodes("web", &["10.0.1.1"])]);
        let second = state("e", 2, &[Arc::clone(&pods), to_nodes("web", &["10.0.1.1", "10.0.1.2"])]);
        let mut received = Received::default();
        assert!(received.hello("edge-1", "1").node_sets);
        let one = received.apply(full(&first)).unwrap().state;
        let message = v1::WatchResponse { services: Vec::new(), ..difference(&first, &second) };
        let two = received.apply(message.clone()).unwrap().state;
        assert_eq!(*two, second);
        assert!(Arc::ptr_eq(&one.services[&pods.name], &two.services[&pods.name]));
        // A set that cannot be decoded leaves its Services unchanged; only a new Service that refers to it is refused.
        let mut bad = message;
        bad.node_sets[0].nodes.reverse();
        bad.services = full(&state("e", 3, &[to_nodes("late", &["10.0.1.1"])])).services;
        let three = received.apply(bad).unwrap().state;
        let [web, late] = ["web", "late"].map(|name| &three.services[&ServiceName::new("default", name)]);
        assert_eq!(
            (web.ports[0].backend_count(), late.refusal.as_ref().map(|refusal| refusal.reason)),
            (2, Some(Reason::Unsupported))
        );
        // The state survives a restart of the task.
        let known = GatewayState { state: Arc::clone(&two), origin: Origin::Disk };
        let mut resumed = Received::resuming(Some(&known));
        let named = v1::WatchResponse {
            node_sets: Vec::new(),
            ..difference(&state("e", 2, &[]), &state("e", 3, &[to_nodes("new", &[])]))
        };
        let four = resumed.apply(named).unwrap().state;
        assert_eq!(four.services[&ServiceName::new("default", "new")].ports[0].backend_count(), 2);
    }

    #[test]
    fn a_service_that_cannot_be_read_is_refused_alone() {
        let mut message = full(&state("e", 1, &[service("a", &["10.0.0.1:80"]), service("b", &["10.0.0.2:80"])]));
        "teleport".clone_into(&mut message.services[0].mode);
        let mut received = Received::default();
        let known = received.apply(message).unwrap();
        let [a, b] = ["a", "b"].map(|name| Arc::clone(&known.state.services[&ServiceName::new("default", name)]));
        let refusal = a.refusal.as_ref().unwrap();
        assert_eq!(refusal.reason, Reason::Unsupported);
        assert!(refusal.message.contains("found \"teleport\", expected one of nat"), "{}", refusal.message);
        assert!(a.ports.is_empty());
        assert_eq!(b, service("b", &["10.0.0.2:80"]));
        assert_eq!(received.hello("edge-1", "1").hashes.len(), 2);
    }

    #[test]
    fn messages_that_lead_nowhere_are_refused_and_change_nothing() {
        let mut received = Received::default();
        let first = state("e", 1, &[service("a", &[])]);
        assert_eq!(received.apply(v1::WatchResponse::default()), Err(ReceivedError::NoGeneration));
        assert_eq!(received.apply(difference(&State::default(), &first)), Err(ReceivedError::NothingToChange));
        received.apply(full(&first)).unwrap();
        let mut bad_pool = full(&state("e", 2, &[]));
        bad_pool.pools.push(v1::Pool::default());
        assert!(matches!(received.apply(bad_pool), Err(ReceivedError::Pool(_))));
        assert_eq!(received.state.as_deref(), Some(&first));
        assert_eq!(received.hashes.len(), 1);
    }

    #[test]
    fn hello_tells_what_is_there_and_nothing_when_it_may_not_be_relied_on() {
        assert_eq!(Received::default().hello("edge-1", "1").have, None);
        let state = state("e", 7, &[service("a", &[])]);
        let of = |state: State| {
            let known = GatewayState { state: Arc::new(state), origin: Origin::Disk };
            Received::resuming(Some(&known)).hello("edge-1", "1")
        };
        let hello = of(state.clone());
        assert_eq!(hello.have, Some(v1::Generation { epoch: "e".to_owned(), counter: 7 }));
        assert_eq!(hello.hashes["default/a"], full(&state).services[0].hash);
        let undated = of(State { generation: Generation::default(), ..state });
        assert_eq!((undated.have, undated.hashes.len()), (None, 0));
    }
}

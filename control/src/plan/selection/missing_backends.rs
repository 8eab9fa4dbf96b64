//! Why a Service has no backends according to its objects: no endpoints, or no endpoint port that matches.
//!
//! Deliberately not here: the grace time before this is reported, because slices arrive after their Service (`status`),
//! and health.

use std::collections::BTreeSet;

use proto::{BackendState, Protocol, Service, ServicePort};

use objects::text::shortened;
use objects::{PortSpec, SlicePort, SliceSpec};

/// Maximum number of slice ports named in a message.
const NAMED_MAX: usize = 8;

/// What a Service lacks to have backends; nothing by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MissingBackends {
    /// No port has a backend that accepts new connections.
    pub is_whole: bool,
    /// Ports that no EndpointSlice has, although there are endpoints.
    pub unmatched: BTreeSet<(Protocol, u16)>,
    /// Message for the owner: the missing ports, and those that the slices have.
    pub sentence: String,
}

impl MissingBackends {
    /// Examines a Service that is served, with its ports and slices. If nodes are the backends, kube-proxy there knows
    /// the ports of endpoints, and `slices` is empty.
    #[must_use]
    pub fn of<'a>(service: &Service, wanted: &[PortSpec], slices: impl Iterator<Item = &'a SliceSpec>) -> Self {
        let takes_flows = |backend: &proto::Backend| backend.state == BackendState::Active && backend.weight > 0;
        let is_whole = !service.ports.iter().flat_map(ServicePort::all_backends).any(|backend| takes_flows(&backend));
        let offered: Vec<&SlicePort> = {
            let mut with_endpoints = slices.filter(|slice| !slice.endpoints.is_empty()).peekable();
            if with_endpoints.peek().is_none() {
                return Self { is_whole, ..Self::default() };
            }
            with_endpoints.flat_map(|slice| &slice.ports).collect()
        };
        let is_offered = |port: &&PortSpec| offered.iter().any(|of| of.name == port.name && of.protocol == port.protocol);
        let missing: Vec<&PortSpec> = wanted.iter().filter(|port| !is_offered(port)).collect();
        let unmatched = missing.iter().map(|port| (port.protocol, port.port)).collect();
        let sentence = if missing.is_empty() { String::new() } else { sentence(&missing, &offered) };
        Self { is_whole, unmatched, sentence }
    }

    /// Whether anything is missing.
    #[must_use]
    pub fn is_any(&self) -> bool {
        self.is_whole || !self.unmatched.is_empty()
    }
}

fn sentence(missing: &[&PortSpec], offered: &[&SlicePort]) -> String {
    let text = |name: &str, protocol: Protocol, port: u16| {
        format!("{} ({protocol} {port})", if name.is_empty() { "without name" } else { name })
    };
    let listed = |ports: BTreeSet<String>| shortened(ports, NAMED_MAX, ", ", ", ");
    let missing = listed(missing.iter().map(|port| text(&port.name, port.protocol, port.port)).collect());
    let have = if offered.is_empty() {
        "no port at all".to_owned()
    } else {
        listed(offered.iter().map(|port| text(&port.name, port.protocol, port.port)).collect())
    };
    format!(
        "No EndpointSlice has a port of the name and protocol of {missing}; they have {have}; make ports[].name and targetPort \
         of the Service fit its Pods"
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proto::{Backend, Family, NodeBackend, NodeSet, NodesAt, ServiceName};

    use super::*;
    use crate::plan::selection::tests::{endpoint, port, service_port, slice};

    fn missing(backends: &[BackendState], slices: &[SliceSpec]) -> MissingBackends {
        let backend = |state: &BackendState| Backend { address: "10.0.0.1:8080".parse().unwrap(), weight: 1, state: *state };
        let ports = vec![service_port(Family::V4, backends.iter().map(backend).collect())];
        MissingBackends::of(&Service::new(ServiceName::new("shop", "web"), ports), &[port()], slices.iter())
    }

    #[test]
    fn missing_endpoints_a_port_without_match_and_drained_backends_are_distinguished() {
        let good = slice(&[("http", Protocol::Tcp, 8080)], &[endpoint(1, "rs")]);
        assert!(!missing(&[BackendState::Active], std::slice::from_ref(&good)).is_any());
        assert_eq!(missing(&[BackendState::Draining], &[good]), MissingBackends { is_whole: true, ..MissingBackends::default() });
        assert_eq!(missing(&[], &[]), MissingBackends { is_whole: true, ..MissingBackends::default() });
        let empty = slice(&[("web", Protocol::Tcp, 8080)], &[]);
        assert_eq!(
            missing(&[], &[empty]),
            MissingBackends { is_whole: true, ..MissingBackends::default() },
            "an emptied slice has no port"
        );
        let other = slice(&[("web", Protocol::Tcp, 8080), ("http", Protocol::Udp, 53)], &[endpoint(1, "rs")]);
        let found = missing(&[], &[other]);
        assert!(found.is_whole && found.unmatched == [(Protocol::Tcp, 80)].into());
        assert!(
            found.sentence.contains("http (tcp 80)") && found.sentence.contains("http (udp 53), web (tcp 8080)"),
            "{found:?}"
        );
        let without = missing(&[], &[slice(&[], &[endpoint(1, "rs")])]);
        assert!(without.sentence.contains("no port at all"), "{without:?}");
    }

    #[test]
    fn nodes_of_a_set_are_backends() {
        let lacks = |nodes: Vec<NodeBackend>| {
            let set = Arc::new(NodeSet { name: "v4".to_owned(), family: Some(Family::V4), nodes });
            let nodes = Some(NodesAt { set, port: 30_080 });
            let ports = vec![ServicePort { nodes, ..service_port(Family::V4, Vec::new()) }];
            MissingBackends::of(&Service::new(ServiceName::new("shop", "web"), ports), &[port()], [].into_iter()).is_whole
        };
        let node = |state| NodeBackend { address: "10.0.0.1".parse().unwrap(), weight: 1, state };
        assert!(!lacks(vec![node(BackendState::Active)]));
        assert!(lacks(vec![node(BackendState::Draining)]) && lacks(Vec::new()));
    }

    #[test]
    fn a_sentence_names_some_of_three_hundred_ports() {
        let ports: Vec<PortSpec> = (100..400).map(|number| PortSpec { name: number.to_string(), ..port() }).collect();
        let text = sentence(&ports.iter().collect::<Vec<_>>(), &[]);
        assert!(text.contains("107 (tcp 80), 292 more; they have no port at all"), "{text}");
    }
}

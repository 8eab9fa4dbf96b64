//! Which nodes take the flows of a Service's port: kube-proxy there passes them on to endpoints.
//!
//! Invariant: under `externalTrafficPolicy: Local` a node without an endpoint of the port is never a backend, since it
//! would drop what it gets. Elsewhere every node counts alike, whatever runs on it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use proto::Family;

use super::{Fence, Selection, admit, endpoints};
use crate::spec::{EndpointSpec, NodeSpec, PortSpec, SliceSpec};

/// Nodes that are named in a refusal; of more, only the number is told.
const NODES_NAMED_MAX: usize = 3;

/// How nodes of one Service are chosen.
#[derive(Clone, Copy, Debug)]
pub struct NodeChoice<'a> {
    /// All nodes, by name.
    pub nodes: &'a BTreeMap<String, NodeSpec>,
    /// `externalTrafficPolicy: Local`.
    pub local: bool,
    /// Packets reach a node inside others, which may be of the other family.
    pub is_tunnel: bool,
}

impl NodeChoice<'_> {
    /// The backends of `port` in `family`: nodes, at `port_at_nodes`.
    pub fn select<'s>(
        &self,
        slices: impl Iterator<Item = &'s SliceSpec>,
        port: &PortSpec,
        port_at_nodes: u16,
        family: Family,
        fence: &Fence<'_>,
    ) -> Selection {
        let mut reasons = Vec::new();
        let mut eligible: BTreeMap<&str, SocketAddr> = BTreeMap::new();
        for node in self.nodes.values() {
            match self.address(node, family) {
                Ok(address) => drop(eligible.insert(&node.name, SocketAddr::new(address, port_at_nodes))),
                Err(why) => reasons.push(format!("node {} {why}", node.name)),
            }
        }
        let (weights, is_elsewhere) = if self.local {
            let endpoints = endpoints(slices, port, family);
            let endpoints: Vec<_> = endpoints.iter().map(|(address, endpoint)| (address.ip(), *endpoint)).collect();
            let is_used = |endpoint: &EndpointSpec| endpoint.ready || (endpoint.serving && endpoint.terminating);
            let ready = counts(&endpoints, &eligible, |endpoint| endpoint.ready);
            let weights = if ready.is_empty() { counts(&endpoints, &eligible, is_used) } else { ready };
            let is_elsewhere = weights.is_empty() && endpoints.iter().any(|(_, endpoint)| is_used(endpoint));
            (weights, is_elsewhere)
        } else {
            (eligible.keys().map(|name| (*name, 1)).collect(), false)
        };
        // Two nodes may have one address, behind which only one of them can be.
        let mut candidates: BTreeMap<SocketAddr, u16> = BTreeMap::new();
        for (name, weight) in weights {
            if let Some(address) = eligible.get(name) {
                let sum = candidates.entry(*address).or_default();
                *sum = sum.saturating_add(weight);
            }
        }
        let ineligible = (eligible.is_empty() || is_elsewhere).then(|| self.ineligible(&reasons, is_elsewhere));
        Selection { ineligible, ..admit(candidates.into_iter(), port, fence) }
    }

    fn address(&self, node: &NodeSpec, family: Family) -> Result<IpAddr, String> {
        if let Some(why) = &node.excluded {
            return Err(why.clone());
        }
        let other = || node.addresses.first().copied().filter(|_| self.is_tunnel);
        node.address(family).or_else(other).ok_or_else(|| format!("has no InternalIP of family {family}"))
    }

    /// Why there is no node to send to.
    fn ineligible(&self, reasons: &[String], is_elsewhere: bool) -> String {
        if self.nodes.is_empty() {
            return "no Node is known; among manifests, add one with its InternalIP".to_owned();
        }
        let mut text = if is_elsewhere {
            "externalTrafficPolicy is Local, and no endpoint is on a node that may be sent to".to_owned()
        } else {
            "no node may be sent to".to_owned()
        };
        for (index, reason) in reasons.iter().take(NODES_NAMED_MAX).enumerate() {
            text.push_str(if index == 0 { ": " } else { "; " });
            text.push_str(reason);
        }
        if reasons.len() > NODES_NAMED_MAX {
            text.push_str(&format!("; and {} more", reasons.len() - NODES_NAMED_MAX));
        }
        text
    }
}

/// How many addresses of wanted endpoints each eligible node has; nodes without any are left out.
fn counts<'e>(
    endpoints: &[(IpAddr, &EndpointSpec)],
    eligible: &BTreeMap<&'e str, SocketAddr>,
    is_wanted: impl Fn(&EndpointSpec) -> bool,
) -> BTreeMap<&'e str, u16> {
    let mut of: BTreeMap<&str, BTreeSet<IpAddr>> = BTreeMap::new();
    for (address, endpoint) in endpoints.iter().filter(|(_, endpoint)| is_wanted(endpoint)) {
        let name = endpoint.node.as_deref().and_then(|node| eligible.get_key_value(node));
        if let Some((name, _)) = name {
            of.entry(name).or_default().insert(*address);
        }
    }
    of.into_iter().map(|(name, addresses)| (name, u16::try_from(addresses.len()).unwrap_or(u16::MAX))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Fenced, endpoint, port, slice};
    use super::*;
    use crate::plan::tests::settings;

    /// Nodes by name: `a 10.0.1.1 fd00::1` or `b - excluded`.
    fn nodes(lines: &[&str]) -> BTreeMap<String, NodeSpec> {
        let node = |line: &&str| {
            let mut words = line.split(' ');
            let name = words.next().unwrap().to_owned();
            let excluded = line.contains("excluded").then(|| "has the label x".to_owned());
            let addresses = words.filter_map(|word| word.parse().ok()).collect();
            (name.clone(), NodeSpec { name, addresses, excluded, ..NodeSpec::default() })
        };
        lines.iter().map(node).collect()
    }

    /// `1 rs a`: endpoint 10.0.0.1, ready and serving, on node a.
    fn slices(texts: &[&str]) -> Vec<SliceSpec> {
        let one = |text: &&str| {
            let words: Vec<_> = text.split(' ').collect();
            let node = words.get(2).map(|node| Box::from(*node));
            EndpointSpec { node, ..endpoint(words[0].parse().unwrap(), words[1]) }
        };
        let list: Vec<_> = texts.iter().map(one).collect();
        vec![slice(&[("http", proto::Protocol::Tcp, 8080)], &list)]
    }

    fn selected(choice: &NodeChoice<'_>, endpoints: &[&str], family: Family) -> Selection {
        let settings = settings();
        choice.select(slices(endpoints).iter(), &port(), 30_080, family, &Fenced::of(&settings).fence(&settings, &[]))
    }

    fn texts(selection: &Selection) -> Vec<String> {
        selection.backends.iter().map(|backend| format!("{} x{}", backend.address, backend.weight)).collect()
    }

    #[test]
    fn under_cluster_every_node_that_is_not_excluded_counts_alike() {
        let nodes = nodes(&["a 10.0.1.1", "b 10.0.1.2 excluded", "c 10.0.1.3"]);
        let choice = NodeChoice { nodes: &nodes, local: false, is_tunnel: false };
        let selection = selected(&choice, &["1 rs b"], Family::V4);
        assert_eq!(texts(&selection), ["10.0.1.1:30080 x1", "10.0.1.3:30080 x1"]);
        assert_eq!(selection.ineligible, None);
    }

    #[test]
    fn under_local_nodes_count_by_their_endpoints_and_one_without_never() {
        let nodes = nodes(&["a 10.0.1.1", "b 10.0.1.2", "c 10.0.1.3", "d 10.0.1.4 excluded"]);
        let choice = NodeChoice { nodes: &nodes, local: true, is_tunnel: false };
        let rows: [(&str, &[&str], &[&str]); 7] = [
            ("by count of ready ones", &["1 rs a", "2 rs a", "3 rs b"], &["10.0.1.1:30080 x2", "10.0.1.2:30080 x1"]),
            ("ready ones keep terminating ones out", &["1 rs a", "2 st b"], &["10.0.1.1:30080 x1"]),
            ("without a ready one, those that serve while they terminate", &["1 st b", "2 t a"], &["10.0.1.2:30080 x1"]),
            ("not even when nothing else is there", &["1 s a", "2 - b"], &[]),
            ("none", &[], &[]),
            ("on no node", &["1 rs", "2 rs b"], &["10.0.1.2:30080 x1"]),
            ("a ready one on an excluded node leaves the others", &["1 rs d", "2 st c"], &["10.0.1.3:30080 x1"]),
        ];
        for (sentence, endpoints, expected) in rows {
            let selection = selected(&choice, endpoints, Family::V4);
            assert_eq!(texts(&selection), expected, "{sentence}");
            assert_eq!(selection.ineligible, None, "{sentence}");
        }
    }

    #[test]
    fn a_family_has_its_own_addresses_unless_a_tunnel_leads_there() {
        let nodes = nodes(&["a fd00::1 10.0.1.1", "b fd00::2"]);
        let plain = NodeChoice { nodes: &nodes, local: false, is_tunnel: false };
        assert_eq!(texts(&selected(&plain, &[], Family::V4)), ["10.0.1.1:30080 x1"]);
        assert_eq!(texts(&selected(&plain, &[], Family::V6)), ["[fd00::1]:30080 x1", "[fd00::2]:30080 x1"]);
        let tunnel = NodeChoice { is_tunnel: true, ..plain };
        assert_eq!(texts(&selected(&tunnel, &[], Family::V4)), ["10.0.1.1:30080 x1", "[fd00::2]:30080 x1"]);
    }

    #[test]
    fn that_no_node_is_eligible_is_said_with_the_reason_of_each() {
        let rows: [(&[&str], bool, &str); 5] = [
            (&[], false, "no Node is known"),
            (&["a 10.0.1.1 excluded"], false, "node a has the label x"),
            (&["a fd00::1"], false, "node a has no InternalIP of family IPv4"),
            (&["a 10.0.1.1 excluded", "b 10.0.1.2"], true, "Local"),
            (&["a - excluded", "b - excluded", "c - excluded", "d - excluded", "e - excluded"], false, "and 2 more"),
        ];
        for (lines, local, expected) in rows {
            let nodes = nodes(lines);
            let choice = NodeChoice { nodes: &nodes, local, is_tunnel: false };
            let selection = selected(&choice, &["1 rs a"], Family::V4);
            assert!(selection.backends.is_empty());
            let why = selection.ineligible.unwrap();
            assert!(why.contains(expected), "{lines:?}: {why}");
        }
    }

    #[test]
    fn two_nodes_of_one_address_are_one_backend_and_the_fence_holds_for_nodes() {
        let nodes = nodes(&["a 10.0.1.1", "b 10.0.1.1", "c 192.0.2.150"]);
        let choice = NodeChoice { nodes: &nodes, local: false, is_tunnel: false };
        let selection = selected(&choice, &[], Family::V4);
        assert_eq!(texts(&selection), ["10.0.1.1:30080 x2"]);
        assert!(selection.fenced == 1 && selection.notes[0].text.contains("192.0.2.150:30080"), "{:?}", selection.notes);
    }
}

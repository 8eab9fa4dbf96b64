//! Selection of the nodes that serve a port of a Service; kube-proxy on a node forwards to endpoints.
//!
//! Invariant: under `externalTrafficPolicy: Local` a node without an endpoint of the port is never a backend, because
//! it would drop the packets. Otherwise all nodes count the same, whatever runs on them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use proto::{Backend, BackendState, Family, NodeBackend, NodeSet, NodeSets, NodesAt, limits};

use super::{Fence, Selection, admit, endpoints};
use crate::world::overrides::Overrides;
use objects::text::shortened;
use objects::{EndpointSpec, NodeSpec, PortSpec, SliceSpec};

/// Maximum number of nodes named in a refusal; beyond it the message has only their number.
const NODES_NAMED_MAX: usize = 3;

/// The eligible nodes, computed once for all Services.
#[derive(Clone, Debug, Default)]
pub struct Nodes {
    /// By family, and by whether a tunnel carries the packets, whose outer packets may have the other family.
    of: BTreeMap<(Family, bool), NodesOfFamily>,
}

/// The eligible nodes of one family.
#[derive(Clone, Debug)]
pub struct NodesOfFamily {
    /// By name.
    addresses: BTreeMap<String, IpAddr>,
    /// All of them as backends, without forbidden ones.
    set: Arc<NodeSet>,
    /// Forbidden nodes, each with the reason.
    refused: Vec<(IpAddr, String)>,
    /// Number of permitted nodes; the set contains at most as many as one table can hold.
    found: usize,
    /// Why other nodes are excluded.
    reasons: Vec<String>,
    /// Whether any node is known.
    is_any_known: bool,
}

impl Nodes {
    /// Examines all nodes. A set that equals the one `before` keeps its `Arc`.
    #[must_use]
    pub fn new(nodes: &BTreeMap<String, NodeSpec>, fence: &Fence<'_>, overrides: &Overrides, before: &Self) -> Self {
        let drained = overrides.drained_nodes(nodes);
        let mut of = BTreeMap::new();
        for key @ (family, is_tunnel) in [Family::V4, Family::V6].into_iter().flat_map(|f| [(f, false), (f, true)]) {
            let mut one = NodesOfFamily::new(nodes, (family, is_tunnel), fence, &drained);
            if let Some(same) = before.of.get(&key).map(|old| &old.set).filter(|set| **set == one.set) {
                one.set = Arc::clone(same);
            }
            of.insert(key, one);
        }
        Self { of }
    }

    /// The nodes of one family; `None` before nodes were examined.
    #[must_use]
    pub fn of(&self, family: Family, is_tunnel: bool) -> Option<&NodesOfFamily> {
        self.of.get(&(family, is_tunnel))
    }

    /// All sets by name.
    #[must_use]
    pub fn sets(&self) -> NodeSets {
        self.of.values().map(|one| (one.set.name.clone(), Arc::clone(&one.set))).collect()
    }
}

impl NodesOfFamily {
    fn new(
        nodes: &BTreeMap<String, NodeSpec>,
        (family, is_tunnel): (Family, bool),
        fence: &Fence<'_>,
        drained: &BTreeSet<IpAddr>,
    ) -> Self {
        let (mut addresses, mut reasons) = (BTreeMap::new(), Vec::new());
        for node in nodes.values() {
            match address(node, family, is_tunnel) {
                Ok(address) => drop(addresses.insert(node.name.clone(), address)),
                Err(why) => reasons.push(format!("node {} {why}", node.name)),
            }
        }
        // Two nodes may report the same address, but only one of them can own it.
        let mut weights: BTreeMap<IpAddr, u16> = BTreeMap::new();
        addresses.values().for_each(|address| *weights.entry(*address).or_default() += 1);
        let (mut refused, mut backends) = (Vec::new(), Vec::new());
        for (address, weight) in weights {
            let state = if drained.contains(&address) { BackendState::Draining } else { BackendState::Active };
            match fence.refuses(address) {
                Some(why) => refused.push((address, why)),
                None => backends.push(NodeBackend { address, weight, state }),
            }
        }
        let found = backends.len();
        backends.truncate(limits::BACKENDS_PER_PORT_MAX);
        let name = format!("{}{}", if family == Family::V4 { "v4" } else { "v6" }, if is_tunnel { "-tunnel" } else { "" });
        let set = Arc::new(NodeSet { name, family: (!is_tunnel).then_some(family), nodes: backends });
        Self { addresses, set, refused, found, reasons, is_any_known: !nodes.is_empty() }
    }

    /// The backends of `port`: all eligible nodes, at `port_at_nodes`.
    #[must_use]
    pub fn all(&self, port: &PortSpec, port_at_nodes: u16) -> Selection {
        let at = NodesAt { set: Arc::clone(&self.set), port: port_at_nodes };
        let mut selection = Selection { nodes: Some(at).filter(|at| !at.set.nodes.is_empty()), ..Selection::default() };
        let refused = self.refused.iter().map(|(address, why)| (SocketAddr::new(*address, port_at_nodes), why.as_str()));
        selection.note_excluded(refused, self.found, port);
        selection.ineligible = self.addresses.is_empty().then(|| self.ineligible(false));
        selection
    }

    /// The backends of `port` under `externalTrafficPolicy: Local`: nodes that have endpoints in `family`, at
    /// `port_at_nodes`.
    pub fn local<'s>(
        &self,
        slices: impl Iterator<Item = &'s SliceSpec>,
        port: &PortSpec,
        port_at_nodes: u16,
        family: Family,
        fence: &Fence<'_>,
    ) -> Selection {
        let endpoints = endpoints(slices, port, family);
        let endpoints: Vec<_> = endpoints.iter().map(|(address, endpoint)| (address.ip(), *endpoint)).collect();
        let is_used = |endpoint: &EndpointSpec| endpoint.ready || (endpoint.serving && endpoint.terminating);
        let ready = counts(&endpoints, &self.addresses, |endpoint| endpoint.ready);
        let used = counts(&endpoints, &self.addresses, is_used);
        let is_elsewhere = used.is_empty() && endpoints.iter().any(|(_, endpoint)| is_used(endpoint));
        // Two nodes may report the same address, but only one of them can own it.
        let mut candidates: BTreeMap<SocketAddr, Backend> = BTreeMap::new();
        for (name, of_used) in used {
            let Some(node) = self.addresses.get(name) else { continue };
            let address = SocketAddr::new(*node, port_at_nodes);
            let candidate = candidates.entry(address).or_insert(Backend { address, weight: 0, state: BackendState::Draining });
            if let Some(weight) = ready.get(name).copied().or_else(|| ready.is_empty().then_some(of_used)) {
                candidate.weight = candidate.weight.saturating_add(weight);
                candidate.state = BackendState::Active;
            }
        }
        let ineligible = (self.addresses.is_empty() || is_elsewhere).then(|| self.ineligible(is_elsewhere));
        Selection { ineligible, ..admit(candidates.into_values(), port, fence) }
    }

    /// Why no node is eligible.
    fn ineligible(&self, is_elsewhere: bool) -> String {
        if !self.is_any_known {
            return "no Node is known; among manifests, add one with its InternalIP".to_owned();
        }
        let mut text = if is_elsewhere {
            "externalTrafficPolicy is Local, and no endpoint is on an eligible node".to_owned()
        } else {
            "no node is eligible".to_owned()
        };
        if !self.reasons.is_empty() {
            text = format!("{text}: {}", shortened(&self.reasons, NODES_NAMED_MAX, "; ", "; and "));
        }
        text
    }
}

fn address(node: &NodeSpec, family: Family, is_tunnel: bool) -> Result<IpAddr, String> {
    if let Some(why) = &node.excluded {
        return Err(why.clone());
    }
    let other = || node.addresses.first().copied().filter(|_| is_tunnel);
    node.address(family).or_else(other).ok_or_else(|| format!("has no InternalIP of family {family}"))
}

/// Number of endpoint addresses on each eligible node, without nodes that have none.
fn counts<'e>(
    endpoints: &[(IpAddr, &EndpointSpec)],
    eligible: &'e BTreeMap<String, IpAddr>,
    is_wanted: impl Fn(&EndpointSpec) -> bool,
) -> BTreeMap<&'e str, u16> {
    let mut of: BTreeMap<&'e str, BTreeSet<IpAddr>> = BTreeMap::new();
    for (address, endpoint) in endpoints.iter().filter(|(_, endpoint)| is_wanted(endpoint)) {
        let name = endpoint.node.as_deref().and_then(|node| eligible.get_key_value(node));
        if let Some((name, _)) = name {
            of.entry(name.as_str()).or_default().insert(*address);
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

    /// How nodes are chosen for one Service.
    #[derive(Clone, Copy)]
    struct NodeChoice<'a> {
        nodes: &'a BTreeMap<String, NodeSpec>,
        local: bool,
        is_tunnel: bool,
    }

    /// The selection, with the nodes of a set listed.
    fn selected(choice: &NodeChoice<'_>, endpoints: &[&str], family: Family) -> Selection {
        let settings = settings();
        let fenced = Fenced::of(&settings);
        let fence = fenced.fence(&settings, &[]);
        let nodes = Nodes::new(choice.nodes, &fence, &Overrides::default(), &Nodes::default());
        let of = nodes.of(family, choice.is_tunnel).unwrap();
        let mut selection = match choice.local {
            true => of.local(slices(endpoints).iter(), &port(), 30_080, family, &fence),
            false => of.all(&port(), 30_080),
        };
        selection.backends.extend(selection.nodes.take().iter().flat_map(NodesAt::backends));
        selection
    }

    fn texts(selection: &Selection) -> Vec<String> {
        let state = |backend: &Backend| if backend.state == BackendState::Draining { " draining" } else { "" };
        let text = |backend: &Backend| format!("{} x{}{}", backend.address, backend.weight, state(backend));
        selection.backends.iter().map(text).collect()
    }

    #[test]
    fn under_cluster_all_nodes_that_are_not_excluded_count_the_same() {
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
        let rows: [(&str, &[&str], &[&str]); 8] = [
            ("by count of ready ones", &["1 rs a", "2 rs a", "3 rs b"], &["10.0.1.1:30080 x2", "10.0.1.2:30080 x1"]),
            (
                "beside ready ones, those that terminate only keep their flows",
                &["1 rs a", "2 st b"],
                &["10.0.1.1:30080 x1", "10.0.1.2:30080 x0 draining"],
            ),
            ("ready and terminating on one node", &["1 rs a", "2 st a"], &["10.0.1.1:30080 x1"]),
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
    fn if_no_node_is_eligible_the_message_has_the_reason_for_each() {
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

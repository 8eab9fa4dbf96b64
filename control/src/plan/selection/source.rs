//! The source of a frontend's backends: the endpoints of one Service, or the nodes on which kube-proxy serves it.
//!
//! Deliberately not here: which endpoints and nodes are eligible (`selection`, `nodes`).

use objects::SliceSpec;
use proto::{Family, NodesAt, ServiceName, Target};

use super::nodes::Nodes;
use super::{Fence, Selection, select};
use crate::plan::frontend::FrontendPort;
use crate::world::World;
use crate::world::checkpoint::Policy;

/// Where the backends of a frontend come from.
#[derive(Clone)]
pub struct BackendSource<'a> {
    /// The Service that has the endpoints, and to which overrides of weights apply.
    pub service: &'a ServiceName,
    /// Its slices, with deleted ones that still count.
    pub slices: Vec<&'a SliceSpec>,
    /// Whether only nodes with endpoints count (`externalTrafficPolicy: Local`).
    pub local: bool,
    /// All objects.
    pub world: &'a World,
    /// The eligible nodes.
    pub nodes: &'a Nodes,
    /// The addresses that must not be backends.
    pub fence: &'a Fence<'a>,
}

/// The backends of one port of a frontend.
#[derive(Clone, Debug)]
pub struct SelectedPort<'a> {
    /// The port.
    pub port: FrontendPort<'a>,
    /// Its backends, after overrides.
    pub selection: Selection,
    /// Number of backends that take new flows, before overrides.
    pub count: usize,
}

impl SelectedPort<'_> {
    /// Whether it has no backend.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.selection.backends.is_empty() && self.selection.nodes.as_ref().is_none_or(|at| at.set.nodes.is_empty())
    }

    /// Whether it has none because all of them are forbidden.
    #[must_use]
    pub const fn is_fenced(&self) -> bool {
        self.selection.fenced > 0 && self.count == 0
    }
}

impl<'a> BackendSource<'a> {
    /// The backends of one port, as overrides weight them.
    #[must_use]
    pub fn select<'p>(&self, port: FrontendPort<'p>, policy: &Policy) -> SelectedPort<'p> {
        let mut selection = self.unweighted(&port, policy);
        let overrides = self.world.overrides();
        // With a manual override of one backend this port gets a separate list.
        let overridden = selection.nodes.take_if(|nodes| overrides.concern(self.service, nodes));
        selection.backends.extend(overridden.iter().flat_map(NodesAt::backends));
        let count = selection.count();
        overrides.apply(self.service, &self.slices, self.world.nodes(), &mut selection.backends);
        SelectedPort { port, selection, count }
    }

    /// In tunnel modes, endpoints of the other family are used if this family has none.
    fn unweighted(&self, port: &FrontendPort<'_>, policy: &Policy) -> Selection {
        let is_tunnel = policy.mode.is_tunnel();
        let endpoints = |family| select(self.slices(), port.spec, family, self.fence);
        match policy.target {
            Target::Endpoint => {
                let own = endpoints(port.family);
                let other = if port.family == Family::V4 { Family::V6 } else { Family::V4 };
                let has_none = own.backends.is_empty() && own.fenced == 0;
                if is_tunnel && has_none { endpoints(other) } else { own }
            }
            Target::Node => {
                let Some(nodes) = self.nodes.of(port.family, is_tunnel) else { return Selection::default() };
                let port_at_nodes = policy.port_at_nodes(port.spec);
                if self.local {
                    nodes.local(self.slices(), port.spec, port_at_nodes, port.family, self.fence)
                } else {
                    nodes.all(port.spec, port_at_nodes)
                }
            }
        }
    }

    fn slices(&self) -> impl Iterator<Item = &'a SliceSpec> {
        self.slices.iter().copied()
    }
}

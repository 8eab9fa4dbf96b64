//! A lookup of routes for tasks beside the workers, which must not keep a snapshot alive.
//!
//! Not here: whether the Ethernet address of a next hop is known, which changes more often than routes.

use std::net::IpAddr;
use std::sync::Arc;

use super::{RouteTarget, Routes};
use crate::snapshot::Prefixes;

/// The routes of a snapshot, without next hops. A copy is free.
#[derive(Clone, Debug)]
pub struct RouteLookup {
    v4: Arc<Prefixes<u32, RouteTarget>>,
    v6: Arc<Prefixes<u128, RouteTarget>>,
    interfaces: Arc<[u32]>,
}

impl RouteLookup {
    pub(crate) fn new(routes: &Routes, interfaces: Arc<[u32]>) -> Self {
        Self { v4: routes.v4.clone(), v6: routes.v6.clone(), interfaces }
    }

    /// Whether packets to an address leave by a port.
    #[must_use]
    pub fn has_route(&self, to: IpAddr) -> bool {
        let target = match to {
            IpAddr::V4(to) => self.v4.get(to.into()),
            IpAddr::V6(to) => self.v6.get(to.into()),
        };
        matches!(target, Some(RouteTarget::OnLink(_) | RouteTarget::Via(_)))
    }

    /// The kernel's indices of the interfaces behind the ports, ascending.
    #[must_use]
    pub fn interfaces(&self) -> &[u32] {
        &self.interfaces
    }

    /// Whether both are of the same routes and interfaces. Two lookups with equal routes may count as different.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.v4, &other.v4) && Arc::ptr_eq(&self.v6, &other.v6) && self.interfaces == other.interfaces
    }
}

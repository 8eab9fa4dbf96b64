//! Frontends, and services as commands show them.

use std::net::SocketAddr;
use std::sync::Arc;

use proto::{Family, Mode, Protocol, Refusal, Scheduler, ServiceName, Target};

use crate::flow::BackendId;
use crate::maglev::MaglevTable;
use crate::schedule::{HashedBy, Schedule};
use crate::{Address, Chooser, SourceRanges, Tuple, TupleHash};

/// One port of a service in one family, at all its addresses.
#[derive(Debug)]
pub struct Frontend {
    /// The service.
    pub service: Arc<ServiceName>,
    pub(crate) hash: TupleHash,
    pub(crate) table: Arc<MaglevTable>,
    /// What the positions of the table stand for.
    pub(crate) backends: Box<[BackendId]>,
    pub(crate) policy: Policy,
    pub(crate) schedule: Schedule,
}

/// What a service asks for besides its backends.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    pub(crate) scheduler: Scheduler,
    pub(crate) hashed_by: HashedBy,
    /// Clients that may connect; none: all.
    pub(crate) sources: Option<Arc<SourceRanges>>,
    /// `externalTrafficPolicy: Local`: without a backend it is silent instead of refusing.
    pub(crate) local: bool,
}

impl Policy {
    /// Whether two ask for the same. Source ranges are shared while they do not change.
    pub(crate) fn is_as(&self, other: &Self) -> bool {
        let sources = match (&self.sources, &other.sources) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, None) => true,
            _ => false,
        };
        sources && self.scheduler == other.scheduler && self.hashed_by == other.hashed_by && self.local == other.local
    }
}

impl Frontend {
    /// Whether this client may begin a flow.
    #[must_use]
    #[inline]
    pub fn allows<A: Address>(&self, client: A) -> bool {
        self.policy.sources.as_ref().is_none_or(|sources| sources.allow(client))
    }

    /// The backend for a new flow with this tuple, as the service's scheduler has it; none when none is usable.
    #[must_use]
    pub fn choose<A: Address>(&self, tuple: &Tuple<A>, chooser: Chooser) -> Option<BackendId> {
        let position = match &self.schedule {
            Schedule::Hash => None,
            Schedule::Turns(robin) => robin.next(chooser.worker),
            Schedule::Loads(loads) => loads.lightest(chooser.worker),
        };
        match position {
            Some(position) => self.backends.get(usize::from(position)).copied(),
            None => self.choose_by_hash(tuple),
        }
    }

    /// The backend that the Maglev table has for this tuple, the same on every gateway, whatever the scheduler: for
    /// packets that have no flow and get none.
    #[must_use]
    #[inline]
    pub fn choose_by_hash<A: Address>(&self, tuple: &Tuple<A>) -> Option<BackendId> {
        let position = self.table.choose(self.policy.hashed_by.hash(&self.hash, tuple))?;
        self.backends.get(usize::from(position)).copied()
    }

    /// Whether it is silent, instead of refusing, where it has no backend (`externalTrafficPolicy: Local`).
    #[must_use]
    pub const fn is_local(&self) -> bool {
        self.policy.local
    }

    /// Whether a new flow finds a backend.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        !self.table.entries().is_empty()
    }
}

/// A service as commands show it.
#[derive(Clone, Debug)]
pub struct ServiceView {
    /// Its name.
    pub name: Arc<ServiceName>,
    /// Its mode.
    pub mode: Mode,
    /// Where its packets are sent.
    pub target: Target,
    /// How backends are chosen.
    pub scheduler: Scheduler,
    /// Why it is not served, or not wholly: as the controller said, or this gateway found.
    pub refusal: Option<Refusal>,
    /// Its ports, those that are not served included.
    pub ports: Vec<PortView>,
}

/// One port of a service in one family.
#[derive(Clone, Debug)]
pub struct PortView {
    /// Its protocol.
    pub protocol: Protocol,
    /// Its family.
    pub family: Family,
    /// Where it listens; empty when it is not served.
    pub frontends: Vec<SocketAddr>,
    /// Its backends, ordered by address.
    pub backends: Vec<BackendView>,
}

/// One backend of a port.
#[derive(Clone, Copy, Debug)]
pub struct BackendView {
    /// Where its packets go.
    pub address: SocketAddr,
    /// Its slot, which counters are kept by.
    pub id: BackendId,
    /// Its weight.
    pub weight: u16,
    /// Whether its probes pass.
    pub healthy: bool,
    /// It takes no new flows and is to go.
    pub draining: bool,
    /// Whether new flows are sent to it.
    pub accepts_new: bool,
}

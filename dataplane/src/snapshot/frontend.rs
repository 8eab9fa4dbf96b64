//! Frontends, and services as commands show them.

use std::net::SocketAddr;
use std::sync::Arc;

use proto::{Family, Mode, Protocol, Refusal, Scheduler, ServiceName, Target};

use crate::flow::BackendId;
use crate::maglev::MaglevTable;
use crate::{Address, Tuple, TupleHash};

/// One port of a service in one family, at all its addresses.
#[derive(Debug)]
pub struct Frontend {
    /// The service.
    pub service: Arc<ServiceName>,
    pub(crate) hash: TupleHash,
    pub(crate) table: Arc<MaglevTable>,
    /// What the positions of the table stand for.
    pub(crate) backends: Box<[BackendId]>,
}

impl Frontend {
    /// The backend for a new flow with this tuple, the same on every gateway; none when none is usable.
    #[must_use]
    #[inline]
    pub fn choose<A: Address>(&self, tuple: &Tuple<A>) -> Option<BackendId> {
        let position = self.table.choose(self.hash.hash(tuple))?;
        self.backends.get(usize::from(position)).copied()
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

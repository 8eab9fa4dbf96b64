//! Frontends: their policy, tables and the choice of a backend; and the views of services for commands.
//!
//! Not here: which addresses a frontend has; the tables of the family map them to frontends.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use proto::{Family, Mode, Protocol, ProxyProtocol, Refusal, Scheduler, ServiceName, Target};

use super::backends::BackendTable;
use super::earlier::EarlierTables;
use crate::choose::{Chooser, HashedBy, MaglevTable, Schedule, SourceRanges};
use crate::flow::{AffinityTable, BackendId, FlowMode, Tick, Ticks};
use crate::stats::{FrontendCounters, ServiceDrops, ServiceNumber};
use crate::wire::{Address, Tuple, TupleHash};

/// One port of a service in one family, with all its addresses.
#[derive(Debug)]
pub struct Frontend {
    /// The service.
    pub service: Arc<ServiceName>,
    /// The number of the service, by which its flows are counted.
    pub(crate) number: ServiceNumber,
    /// Dropped packets of the service.
    pub(crate) drops: Arc<ServiceDrops>,
    pub(crate) hash: TupleHash,
    pub(crate) table: Arc<MaglevTable>,
    /// Backends by position of the table.
    pub(crate) backends: Box<[BackendId]>,
    pub(crate) policy: Policy,
    pub(crate) schedule: Schedule,
    pub(crate) affinity: Option<Affinity>,
    /// When `table` became the current table.
    pub(crate) since_ns: u64,
    pub(crate) earlier: EarlierTables,
}

/// `sessionAffinity: ClientIP` of a frontend.
#[derive(Debug)]
pub(crate) struct Affinity {
    table: Arc<AffinityTable>,
    timeout: Ticks,
    /// Backends that take new flows, each behind the one that is remembered for it, by the slots of these. Where the
    /// ports of a service share their clients, that is the service's first backend at the same address, otherwise
    /// itself. `None`: only other ports have one at the address.
    taking: Box<[Taking]>,
}

/// The backend that is remembered of a client, and the backend that its new flows go to.
type Taking = (BackendId, Option<BackendId>);

impl Affinity {
    /// `taking`: pairs of what is remembered for a backend and the backend.
    pub(crate) fn new(table: Arc<AffinityTable>, timeout: Duration, mut taking: Vec<Taking>) -> Self {
        // Of several at one address the first.
        taking.sort_by_key(|(remembered, _)| remembered.slot);
        taking.dedup_by_key(|(remembered, _)| remembered.slot);
        Self { table, timeout: timeout.into(), taking: taking.into() }
    }

    /// Whether two affinities remember the same backends of clients.
    pub(crate) fn are_as(one: Option<&Self>, other: Option<&Self>) -> bool {
        one.map(|affinity| &affinity.taking) == other.map(|affinity| &affinity.taking)
    }

    /// The remembered backend with its full generation, of which the affinity table stores only some bits, and the
    /// backend of new flows.
    fn find(&self, remembered: BackendId) -> Option<Taking> {
        let at = self.taking.binary_search_by_key(&remembered.slot, |(known, _)| known.slot).ok()?;
        self.taking.get(at).copied().filter(|(known, _)| AffinityTable::is(remembered, *known))
    }

    /// The backend of a client of which this backend is remembered.
    fn keeps(&self, remembered: BackendId) -> Option<BackendId> {
        self.find(remembered).and_then(|(_, backend)| backend)
    }

    /// The backend to remember of a client with this backend, if the backend takes new flows.
    fn remembers(&self, backend: BackendId) -> Option<BackendId> {
        let itself = self.find(backend).filter(|(_, own)| *own == Some(backend));
        let found = itself.or_else(|| self.taking.iter().find(|(_, own)| *own == Some(backend)).copied());
        found.map(|(remembered, _)| remembered)
    }
}

/// The settings of a service other than its backends.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    pub(crate) mode: FlowMode,
    pub(crate) scheduler: Scheduler,
    pub(crate) hashed_by: HashedBy,
    /// Clients that may connect; `None`: all.
    pub(crate) sources: Option<Arc<SourceRanges>>,
    /// `externalTrafficPolicy: Local`: without a backend, packets are dropped silently instead of refused.
    pub(crate) local: bool,
    /// How long a client keeps its backend after its last flow was confirmed.
    pub(crate) affinity: Option<Duration>,
    /// The header that backends get in front of new flows, or of each datagram.
    pub(crate) proxy_protocol: Option<ProxyProtocol>,
}

impl Policy {
    /// Whether two policies are equal. Source ranges are shared while they do not change.
    pub(crate) fn is_as(&self, other: &Self) -> bool {
        let sources = match (&self.sources, &other.sources) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, None) => true,
            _ => false,
        };
        let of = |policy: &Self| (policy.mode, policy.scheduler, policy.hashed_by, policy.local, policy.affinity);
        sources && of(self) == of(other) && self.proxy_protocol == other.proxy_protocol
    }
}

impl Frontend {
    /// How packets of the frontend reach backends.
    #[must_use]
    #[inline]
    pub const fn mode(&self) -> FlowMode {
        self.policy.mode
    }

    /// The PROXY header that its backends expect; of new flows, or of each datagram.
    #[must_use]
    #[inline]
    pub const fn proxy_protocol(&self) -> Option<ProxyProtocol> {
        self.policy.proxy_protocol
    }

    /// Whether this client may begin a flow.
    #[must_use]
    #[inline]
    pub fn allows<A: Address>(&self, client: A) -> bool {
        self.policy.sources.as_ref().is_none_or(|sources| sources.allow(client))
    }

    /// The backend for a new flow with this tuple, by affinity or by the service's scheduler; `None` when none is
    /// usable.
    #[must_use]
    pub fn choose<A: Address>(&self, tuple: &Tuple<A>, chooser: Chooser) -> Option<BackendId> {
        if let Some(affinity) = &self.affinity {
            let client = self.hash_of(tuple);
            return affinity.table.kept(client, chooser.now, |id| affinity.keeps(id)).or_else(|| self.hashed(client));
        }
        let position = match &self.schedule {
            Schedule::Hash => None,
            Schedule::Turns(robin) if chooser.is_trial => robin.preview(chooser.worker),
            Schedule::Turns(robin) => robin.next(chooser.worker),
            Schedule::Loads(loads) if chooser.is_trial => loads.preview(chooser.worker),
            Schedule::Loads(loads) => loads.lightest(chooser.worker),
        };
        match position {
            Some(position) => self.backends.get(usize::from(position)).copied(),
            None => self.hashed(self.hash_of(tuple)),
        }
    }

    /// Whether [`Frontend::choose`] depends on the tuple alone, as [`Frontend::choose_by_hash`] then does.
    #[must_use]
    #[inline]
    pub fn is_hashed(&self) -> bool {
        self.affinity.is_none() && matches!(self.schedule, Schedule::Hash)
    }

    /// The backend for a packet that has no flow and does not create one: the backend that affinity remembers,
    /// otherwise the choice of the Maglev table, which is the same on every gateway, whatever the scheduler.
    #[must_use]
    #[inline]
    pub fn choose_by_hash<A: Address>(&self, tuple: &Tuple<A>) -> Option<BackendId> {
        let hash = self.hash_of(tuple);
        self.recalled(hash).or_else(|| self.hashed(hash))
    }

    /// As [`Frontend::choose_by_hash`], of a frontend without affinity.
    #[inline(always)]
    pub(crate) fn hashed_backend<A: Address>(&self, tuple: &Tuple<A>) -> Option<BackendId> {
        self.hashed(self.hash_of(tuple))
    }

    /// The backend for a packet of a flow that began before this gateway knew it, in a mode in which that flow may
    /// continue (FORWARDING 4): the backend that affinity remembers, otherwise the choice among the current and earlier
    /// tables.
    #[must_use]
    pub(crate) fn choose_mid_stream<A: Address>(
        &self,
        tuple: &Tuple<A>,
        backends: &BackendTable,
        now: Tick,
    ) -> Option<BackendId> {
        let hash = self.hash_of(tuple);
        let current = || self.hashed(hash).map(|id| (id, Tick::at(self.since_ns)));
        self.recalled(hash).or_else(|| self.earlier.choose(hash, current(), backends, now))
    }

    /// The backend that affinity remembers for the client of this tuple and still accepts. `None` without affinity.
    #[must_use]
    pub fn remembered<A: Address>(&self, tuple: &Tuple<A>, now: Tick) -> Option<BackendId> {
        let affinity = self.affinity.as_ref()?;
        affinity.table.kept(self.hash_of(tuple), now, |id| affinity.keeps(id))
    }

    /// Remembers the backend of a flow that was confirmed, and whose client's packets have this tuple, unless the
    /// client has another one that takes new flows, perhaps on other ports; either is kept for the timeout from now on.
    /// Without affinity it does nothing.
    pub(crate) fn confirmed<A: Address>(&self, tuple: &Tuple<A>, backend: BackendId, now: Tick) {
        if let Some(affinity) = &self.affinity {
            let (keeps, new) = (|id| affinity.find(id).map(|(known, _)| known), || affinity.remembers(backend));
            affinity.table.choose(self.hash_of(tuple), now, affinity.timeout, keeps, new);
        }
    }

    /// Remembers the backend of a flow that the client of this tuple has begun through another gateway. Without
    /// affinity it does nothing.
    pub(crate) fn remember<A: Address>(&self, tuple: &Tuple<A>, backend: BackendId, now: Tick) {
        if let Some(affinity) = &self.affinity {
            let known = affinity.remembers(backend).unwrap_or(backend);
            let is_same = |remembered| AffinityTable::is(remembered, known).then_some(known);
            affinity.table.choose(self.hash_of(tuple), now, affinity.timeout, is_same, || Some(known));
        }
    }

    /// Whether `sessionAffinity: ClientIP` is on.
    #[must_use]
    pub const fn has_affinity(&self) -> bool {
        self.affinity.is_some()
    }

    /// The entry of the Maglev table for a tuple, the number of entries, and the backend of the entry. `None` while no
    /// backend takes new flows.
    #[must_use]
    pub fn table_entry<A: Address>(&self, tuple: &Tuple<A>) -> Option<(u32, u32, BackendId)> {
        let hash = self.hash_of(tuple);
        Some((self.table.entry(hash), self.table.size(), self.hashed(hash)?))
    }

    /// Whether only some clients may connect.
    #[must_use]
    pub const fn has_source_ranges(&self) -> bool {
        self.policy.sources.is_some()
    }

    /// The scheduler.
    #[must_use]
    pub const fn scheduler(&self) -> Scheduler {
        self.policy.scheduler
    }

    #[inline]
    fn hash_of<A: Address>(&self, tuple: &Tuple<A>) -> u64 {
        self.policy.hashed_by.hash(&self.hash, tuple)
    }

    /// The backend that affinity remembers for this hash of a client.
    #[inline]
    fn recalled(&self, hash: u64) -> Option<BackendId> {
        let recalled = |affinity: &Affinity| affinity.table.recall(hash).and_then(|id| affinity.keeps(id));
        self.affinity.as_ref().and_then(recalled)
    }

    #[inline]
    fn hashed(&self, hash: u64) -> Option<BackendId> {
        let position = self.table.choose(hash)?;
        self.backends.get(usize::from(position)).copied()
    }

    /// Whether packets are dropped silently instead of refused when there is no backend (`externalTrafficPolicy:
    /// Local`).
    #[must_use]
    pub const fn is_local(&self) -> bool {
        self.policy.local
    }

    /// Whether a new flow gets a backend.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        !self.table.entries().is_empty()
    }
}

/// A service as commands show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceView {
    /// Its name.
    pub name: Arc<ServiceName>,
    /// Its mode.
    pub mode: Mode,
    /// Whether its packets are sent to endpoints or nodes.
    pub target: Target,
    /// The scheduler that chooses backends.
    pub scheduler: Scheduler,
    /// Why it is not served, or only in part: by the controller, or by this gateway.
    pub refusal: Option<Refusal>,
    /// Its ports, including those that are not served.
    pub ports: Vec<PortView>,
    /// Where it would be reached if this gateway did not refuse it.
    pub not_served: Vec<(Protocol, SocketAddr)>,
    /// Its frontends, with their traffic.
    pub frontends: Vec<FrontendView>,
    /// Dropped packets to its frontends.
    pub drops: Arc<ServiceDrops>,
    /// Its number, by which workers count its flows.
    pub number: ServiceNumber,
}

/// A frontend whose traffic is counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontendView {
    /// Its protocol.
    pub protocol: Protocol,
    /// The address at which clients reach it.
    pub address: FrontendAddress,
    /// The port of the Service.
    pub port: u16,
    /// Its traffic.
    pub counters: Arc<FrontendCounters>,
}

/// The address at which clients reach a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FrontendAddress {
    /// At a VIP and a port.
    Vip(SocketAddr),
    /// At this port of every address for node ports, of both families.
    NodePort(u16),
}

impl fmt::Display for FrontendAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vip(at) => write!(f, "{at}"),
            Self::NodePort(port) => write!(f, "node port {port}"),
        }
    }
}

/// One port of a service in one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortView {
    /// Its protocol.
    pub protocol: Protocol,
    /// Its family.
    pub family: Family,
    /// Addresses and ports of its frontends; empty when it is not served.
    pub frontends: Vec<SocketAddr>,
    /// Its backends, sorted by address.
    pub backends: Vec<BackendView>,
    /// The application protocol, if the Service names one (`appProtocol`).
    pub app_protocol: Option<String>,
    /// The PROXY header that its backends get.
    pub proxy_protocol: Option<ProxyProtocol>,
}

/// One backend of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendView {
    /// Address and port that its packets are sent to.
    pub address: SocketAddr,
    /// Its slot, by which counters are indexed.
    pub id: BackendId,
    /// Its weight.
    pub weight: u16,
    /// Whether its probes pass.
    pub healthy: bool,
    /// It takes no new flows and will be removed.
    pub draining: bool,
    /// Whether new flows are sent to it.
    pub accepts_new: bool,
}

//! Input and output of an allocation: what a Service claims, on which sharing terms, by which rules, and what it gets.
//!
//! Invariant: a pool gives nothing to a Service that its selectors leave out.

use std::net::IpAddr;
use std::time::Instant;

use kube::core::SelectorExt as _;
use objects::note::Remark;
use objects::{Namespaces, PoolSpec, Sharing};
use proto::{Family, Protocol, Refusal, ServiceName};

use crate::plan::externals::Externals;
use crate::plan::forbidden::Forbidden;
use crate::plan::pools::Pools;
use crate::world::Labels;
use objects::text::shortened;

/// Maximum number of gateways named in a message.
const ABSENT_NAMED_MAX: usize = 8;

/// Ports on which a Service listens at its addresses.
pub(super) type Port = (Protocol, u16);

/// Whether another installation that a Service names exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherInstallation {
    /// It has `EdgeGateway`s and pools with the Service's addresses, which only administrators of the cluster write.
    Proven,
    /// Only the Service says so, and its owner may have rights on one namespace only.
    Alleged,
}

/// The addresses that one Service requests, and those that it held before.
#[derive(Clone, Debug)]
pub struct Claim {
    /// The Service.
    pub service: ServiceName,
    /// Creation time; `None` for manifests, which are ordered by name.
    pub created_s: Option<i64>,
    /// Families in order. Empty if the Service cannot be served but keeps its addresses.
    pub families: Vec<Family>,
    /// Whether the second family is optional.
    pub second_family_optional: bool,
    /// The ports on which it listens.
    pub ports: Vec<Port>,
    /// Whether and with whom it shares its addresses.
    pub sharing: Option<Sharing>,
    /// Requested addresses.
    pub requested: Vec<IpAddr>,
    /// Why its request for an address or a pool cannot be read. It gets none before that is corrected.
    pub unread_request: Option<String>,
    /// Requested pool.
    pub pool: Option<String>,
    /// Whether it requests an address from a pool that is marked internal.
    pub internal: bool,
    /// Whether an address outside the requested pool or list is to be exchanged.
    pub readdress: bool,
    /// Its labels.
    pub labels: Labels,
    /// Labels of its namespace.
    pub namespace_labels: Labels,
    /// Addresses in its status.
    pub in_status: Vec<IpAddr>,
    /// Whether sluice wrote that status. If so, its addresses count even outside the pools.
    pub status_is_ours: bool,
    /// The installation that serves it at the addresses in its status; `None`: this one.
    pub of_another: Option<OtherInstallation>,
    /// Another field manager that wrote the status.
    pub status_writer: Option<String>,
    /// Addresses that a previous leader allocated to it.
    pub recalled: Vec<IpAddr>,
}

impl Claim {
    /// A claim that requests nothing and keeps what the Service holds.
    #[must_use]
    pub const fn new(service: ServiceName) -> Self {
        Self {
            service,
            created_s: None,
            families: Vec::new(),
            second_family_optional: false,
            ports: Vec::new(),
            sharing: None,
            requested: Vec::new(),
            unread_request: None,
            pool: None,
            internal: false,
            readdress: false,
            labels: Labels::new(),
            namespace_labels: Labels::new(),
            in_status: Vec::new(),
            status_is_ours: false,
            of_another: None,
            status_writer: None,
            recalled: Vec::new(),
        }
    }

    pub(super) fn terms(&self) -> Terms {
        Terms { namespace: self.service.namespace.clone(), sharing: self.sharing.clone() }
    }

    /// Whether only the Service says that another installation serves it.
    pub(super) fn is_alleged(&self) -> bool {
        self.of_another == Some(OtherInstallation::Alleged)
    }

    /// Whether the specification of the Service could be parsed.
    pub(super) const fn is_readable(&self) -> bool {
        !self.families.is_empty()
    }

    /// Whether it is served in all of its families or, while it is new, in none.
    pub(super) const fn requires_all(&self) -> bool {
        self.families.len() > 1 && !self.second_family_optional
    }
}

/// What a Service has in one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FamilyAddress {
    /// Its address, at which it is served.
    Held(IpAddr),
    /// Why it has none.
    Missing(Refusal),
}

/// The result of an allocation for one Service. What is held is served, unless `refusal` says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allocation {
    /// An entry for each of its families, in their order. A Service that cannot be parsed has those that it holds.
    pub families: Vec<FamilyAddress>,
    /// Whether it lacks no address that it requires.
    pub is_complete: bool,
    /// Why nothing of it is served, whatever it holds.
    pub refusal: Option<Refusal>,
    /// Warnings for the owner of a Service that is served.
    pub notes: Vec<Remark>,
    /// Those of its `externalIPs` that it may use.
    pub externals: Externals,
    /// Its node ports are not served, because its namespace is not selected.
    pub withholds_node_ports: bool,
    /// Reasons found so far why a family has no address.
    pending: Vec<(Family, Refusal)>,
}

impl Allocation {
    /// The result for a Service of which nothing is served.
    #[must_use]
    pub fn refused(refusal: Refusal) -> Self {
        Self { refusal: Some(refusal), ..Self::default() }
    }

    /// The addresses that it holds, in family order.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.families.iter().filter_map(|of| match of {
            FamilyAddress::Held(address) => Some(*address),
            FamilyAddress::Missing(_) => None,
        })
    }

    /// Why it lacks the address of a family, of several families the first one.
    #[must_use]
    pub fn missing(&self) -> Option<&Refusal> {
        let settled = self.families.iter().find_map(|of| match of {
            FamilyAddress::Held(_) => None,
            FamilyAddress::Missing(refusal) => Some(refusal),
        });
        settled.or_else(|| self.pending.first().map(|(_, refusal)| refusal))
    }

    /// Why nothing of it is served; `None` if anything is.
    #[must_use]
    pub fn refusal(&self) -> Option<&Refusal> {
        let has_none = self.addresses().next().is_none();
        self.refusal.as_ref().or_else(|| self.missing().filter(|_| has_none))
    }

    /// Records why a family gets no address.
    pub(super) fn miss(&mut self, family: Family, refusal: Refusal) {
        self.pending.push((family, refusal));
    }

    /// Whether there is a reason why a family gets no address.
    pub(super) fn misses(&self, family: Family) -> bool {
        self.pending.iter().any(|(of, _)| *of == family)
    }

    /// Reports the addresses that it holds in the end, and why the other families have none.
    pub(super) fn settle(&mut self, families: &[Family], held: &[IpAddr]) {
        let pending = std::mem::take(&mut self.pending);
        if families.is_empty() {
            self.families = held.iter().copied().map(FamilyAddress::Held).collect();
            return;
        }
        // A family without a reason of its own was given back for that of another one.
        let why = |family: &Family| pending.iter().find(|(of, _)| of == family).or_else(|| pending.first());
        let of = |family: &Family| match held.iter().find(|address| Family::of(**address) == *family) {
            Some(address) => Some(FamilyAddress::Held(*address)),
            None => Some(FamilyAddress::Missing(why(family)?.1.clone())),
        };
        self.families = families.iter().filter_map(of).collect();
    }
}

/// The inputs of an allocation.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// The pools in use.
    pub pools: &'a Pools,
    /// Addresses that must not become VIPs.
    pub forbidden: &'a Forbidden,
    /// Counter of the state that every gateway has applied that may forward an earlier one; `None` if there is none.
    pub reached: Option<u64>,
    /// The gateways that may forward an earlier one and are not connected.
    pub absent: &'a [AbsentGateway],
    /// Current time.
    pub now: Instant,
}

/// A gateway that is not connected and may forward VIPs of the state that it applied last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbsentGateway {
    /// Its name.
    pub name: String,
    /// Counter of that state; 0: none of this term.
    pub acknowledged: u64,
}

/// Part of a message: disconnected gateways for which a freed address waits; empty if there are none.
#[must_use]
pub fn absence(absent: &[String]) -> String {
    match shortened(absent, ABSENT_NAMED_MAX, ", ", " and ") {
        none if none.is_empty() => none,
        names => format!("; not connected: {names} (delete the EdgeGateway of one that is gone for good)"),
    }
}

/// Sharing terms of one Service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Terms {
    pub(super) namespace: String,
    /// `None`: it does not share.
    pub(super) sharing: Option<Sharing>,
}

impl Terms {
    /// Why `self` and `other` cannot share an address of `pool`; `None` if they can.
    pub(super) fn refuses(&self, other: &Self, pool: Option<&PoolSpec>) -> Option<String> {
        let (Some(ours), Some(theirs)) = (&self.sharing, &other.sharing) else {
            return Some("sharing needs the same sharing-key on both".to_owned());
        };
        if ours.key != theirs.key {
            return Some(format!("its sharing-key is {:?}, not {:?}", theirs.key, ours.key));
        }
        if self.namespace == other.namespace {
            return None;
        }
        let pool_allows = pool.is_some_and(|pool| pool.allow_cross_namespace_sharing);
        let consents = |sharing: &Sharing, to: &str| {
            let named = match &sharing.namespaces {
                Namespaces::All => true,
                Namespaces::Named(names) => names.contains(to),
            };
            named || (sharing.is_metallb && pool_allows)
        };
        let lacking = if !consents(ours, &other.namespace) {
            (&self.namespace, &other.namespace)
        } else if !consents(theirs, &self.namespace) {
            (&other.namespace, &self.namespace)
        } else {
            return None;
        };
        let (who, whom) = lacking;
        Some(format!("the sharing-namespaces of the Service in namespace {who} do not name namespace {whom}"))
    }
}

/// Why a pool does not serve a Service; `None` if it does.
pub(super) fn refuses(pool: &PoolSpec, claim: &Claim) -> Option<String> {
    if claim.internal && !pool.internal {
        return Some(format!("an internal load balancer is asked for, and pool {} is not marked internal", pool.name));
    }
    if !pool.namespaces.matches(&claim.namespace_labels) {
        let (name, namespace, wanted) = (&pool.name, &claim.service.namespace, &pool.namespaces);
        return Some(format!("pool {name} is for namespaces with {wanted}, and {namespace} is none of them"));
    }
    if !pool.services.matches(&claim.labels) {
        return Some(format!("pool {} is for Services with {}, and this is none of them", pool.name, pool.services));
    }
    None
}

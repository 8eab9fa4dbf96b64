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

/// Ports on which a Service listens at its addresses.
pub(super) type Port = (Protocol, u16);

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
            pool: None,
            internal: false,
            readdress: false,
            labels: Labels::new(),
            namespace_labels: Labels::new(),
            in_status: Vec::new(),
            status_is_ours: false,
            status_writer: None,
            recalled: Vec::new(),
        }
    }

    pub(super) fn terms(&self) -> Terms {
        Terms { namespace: self.service.namespace.clone(), sharing: self.sharing.clone() }
    }

    /// Whether the specification of the Service could be parsed.
    pub(super) const fn is_readable(&self) -> bool {
        !self.families.is_empty()
    }
}

/// The result of an allocation for one Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allocation {
    /// In family order.
    pub addresses: Vec<IpAddr>,
    /// Why it got fewer addresses than it needs.
    pub refusal: Option<Refusal>,
    /// Warnings for the owner of a Service that is served.
    pub notes: Vec<Remark>,
    /// Those of its `externalIPs` that it may use.
    pub externals: Externals,
    /// Its node ports are not served, because its namespace is not selected.
    pub withholds_node_ports: bool,
}

/// The inputs of an allocation.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// The pools in use.
    pub pools: &'a Pools,
    /// Addresses that must not become VIPs.
    pub forbidden: &'a Forbidden,
    /// Counter of the state that all connected gateways have applied; `None` if no gateway is connected.
    pub reached: Option<u64>,
    /// Current time.
    pub now: Instant,
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

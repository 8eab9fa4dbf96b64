//! Under which terms Services have one address together (CONTROL section 6).

use std::collections::BTreeSet;

use crate::spec::PoolSpec;

/// What a Service says about sharing its address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sharing {
    /// `sharing-key`: those with an equal one share.
    pub key: String,
    /// Whether it is said by MetalLB's annotation, beside which nobody names namespaces.
    pub is_metallb: bool,
    /// `sharing-namespaces`: other namespaces that it shares with.
    pub namespaces: Namespaces,
}

/// Which other namespaces a Service shares an address with.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Namespaces {
    /// These; none by default.
    Named(BTreeSet<String>),
    /// `*`: all.
    All,
}

/// The terms of one Service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Terms {
    pub(super) namespace: String,
    /// None: it shares with nobody.
    pub(super) sharing: Option<Sharing>,
}

impl Terms {
    /// Why `self` and `other` do not share an address of `pool`; none where they do.
    pub(super) fn refuses(&self, other: &Self, pool: Option<&PoolSpec>) -> Option<String> {
        let (Some(ours), Some(theirs)) = (&self.sharing, &other.sharing) else {
            return Some("sharing takes one sharing-key on both".to_owned());
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

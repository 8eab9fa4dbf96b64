//! The tables that exist once per address family: frontends, roles of addresses, SNAT addresses, steering.
//!
//! Not here: routes, which are in one table for both families.

use std::sync::Arc;

use hashbrown::HashMap;

use super::snat_groups::SnatGroups;
use crate::flow::{BackendId, SnatAddress};
use crate::port::PortIndex;
use crate::stats::FrontendNumber;
use crate::wire::{Address, FrontendKey, TableHash, never_sources};
use crate::workers::SteeringTable;

/// The tables of one family.
#[derive(Clone, Debug)]
pub struct FamilyTables<A> {
    /// The frontends by address, port and protocol.
    pub(crate) frontends: Arc<HashMap<FrontendKey<A>, FrontendAt, TableHash>>,
    pub(crate) roles: Arc<AddressRoles<A>>,
    /// The frontend that a backend of mode `dnat` answers for, by the backend's address, port and protocol; `None` for
    /// a backend behind more than one.
    pub(crate) dnat_frontends: Arc<HashMap<FrontendKey<A>, Option<DnatFrontend<A>>, TableHash>>,
    /// SNAT addresses by port, then by VLAN link.
    pub(crate) snat: Arc<[Box<[SnatAddress<A>]>]>,
    /// SNAT addresses by VIP group; `None` where this gateway has all of them for itself.
    pub(crate) snat_groups: Option<Arc<SnatGroups<A>>>,
    /// The tables that determine the owners of packets.
    pub(crate) steering: Arc<SteeringTable<A>>,
}

impl<A: Address> FamilyTables<A> {
    /// Tables without frontends.
    pub(crate) fn new(roles: AddressRoles<A>, snat: Arc<[Box<[SnatAddress<A>]>]>) -> Self {
        let steering = Arc::new(SteeringTable::new(snat.iter().flatten().map(|snat| snat.address)));
        Self {
            frontends: Arc::default(),
            dnat_frontends: Arc::default(),
            roles: Arc::new(roles),
            snat,
            snat_groups: None,
            steering,
        }
    }
}

/// A frontend at one of its addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrontendAt {
    /// Position in the snapshot's frontends.
    pub(crate) position: u32,
    /// The number by which flows are counted that begin at this address.
    pub(crate) number: FrontendNumber,
}

/// The frontend that a backend of mode `dnat` answers for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DnatFrontend<A> {
    /// The frontend's address.
    pub vip: A,
    /// The frontend's port.
    pub port: u16,
    /// The backend.
    pub backend: BackendId,
}

/// The role of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressRole {
    /// A VIP of some frontend.
    Vip,
    /// A SNAT address, or a tunnel source that is not an address of a port.
    Snat,
    /// An address of a port or its twin, addresses for node ports included.
    Twin(PortIndex),
    /// The directed broadcast address of a prefix of the gateway.
    Broadcast,
    /// An address in a pool that no frontend uses.
    PoolUnused,
    /// Not an address of the gateway.
    Elsewhere,
}

/// The roles of all addresses.
#[derive(Clone, Debug)]
pub(crate) struct AddressRoles<A> {
    exact: HashMap<A, AddressRole, TableHash>,
    /// Ranges of the pools as first and last address, sorted, without overlaps.
    pools: Vec<(A, A)>,
    /// Ranges of addresses that packets from outside may not have as their source, sorted by first addresses.
    refused: Box<[(A, A)]>,
}

impl<A: Address> AddressRoles<A> {
    /// The roles of single addresses, and the ranges of the pools.
    pub(crate) fn new(exact: HashMap<A, AddressRole, TableHash>, mut pools: Vec<(A, A)>) -> Self {
        pools.sort_unstable();
        let mut refused: Vec<(A, A)> = exact.keys().map(|&address| (address, address)).collect();
        refused.extend(&pools);
        refused.extend(never_sources::<A>().map(|(first, last)| (A::from_wide(first), A::from_wide(last))));
        refused.sort_unstable();
        refused.dedup_by(|next, before| {
            let is_within = next.0 <= before.1;
            before.1 = if is_within { before.1.max(next.1) } else { before.1 };
            is_within
        });
        Self { exact, pools, refused: refused.into() }
    }

    #[inline]
    pub(crate) fn of(&self, address: A) -> AddressRole {
        if let Some(&role) = self.exact.get(&address) {
            return role;
        }
        let after = self.pools.partition_point(|&(first, _)| first <= address);
        match after.checked_sub(1).map(|at| self.pools[at]) {
            Some((_, last)) if address <= last => AddressRole::PoolUnused,
            _ => AddressRole::Elsewhere,
        }
    }

    /// The first and the last address around this one that are of clients: with no role, and neither martian nor
    /// link-local. `None` if this one is not.
    pub(crate) fn clients_around(&self, address: A) -> Option<(A, A)> {
        let after = self.refused.partition_point(|&(first, _)| first <= address);
        let first = match after.checked_sub(1).and_then(|before| self.refused.get(before)) {
            Some(&(_, last)) if address <= last => return None,
            Some(&(_, last)) => A::from_wide(last.wide() + 1),
            None => A::default(),
        };
        let last = self.refused.get(after).map_or(A::from_wide(u128::MAX), |&(first, _)| A::from_wide(first.wide() - 1));
        Some((first, last))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::{is_link_local, is_martian};

    /// Addresses at the edges of those that have a meaning, and others.
    fn address<A: Address>() -> impl Strategy<Value = A> {
        let edges: Vec<u128> = never_sources::<A>().flat_map(<[u128; 2]>::from).collect();
        (prop_oneof![2 => proptest::sample::select(edges), 1 => Just(0x0a00_0000), 1 => any::<u128>()], 0..6u128)
            .prop_map(|(edge, more)| A::from_wide(edge.wrapping_add(more).wrapping_sub(3)))
    }

    fn agrees_with_roles<A: Address>(single: Vec<A>, pools: Vec<(A, A)>, asked: &[A]) -> Result<(), TestCaseError> {
        let exact = single.into_iter().map(|address| (address, AddressRole::Vip)).collect();
        let pools = pools.into_iter().map(|(a, b)| (a.min(b), a.max(b))).take(1).collect();
        let roles = AddressRoles::new(exact, pools);
        let is_client =
            |address: A| roles.of(address) == AddressRole::Elsewhere && !is_martian(address) && !is_link_local(address);
        for &address in asked {
            let around = roles.clients_around(address);
            prop_assert_eq!(around.is_some(), is_client(address), "{:?}", address);
            if let Some((first, last)) = around {
                prop_assert!(first <= address && address <= last);
                prop_assert!(is_client(first) && is_client(last));
                prop_assert!(asked.iter().filter(|other| (first..=last).contains(other)).all(|other| is_client(*other)));
                let outside = [first.wide().checked_sub(1), last.wide().checked_add(1)];
                let outside = outside.into_iter().flatten().map(A::from_wide).filter(|other| !(first..=last).contains(other));
                prop_assert!(outside.into_iter().all(|other| !is_client(other)), "{:?} around {:?}", around, address);
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn clients_are_those_without_a_role_or_a_meaning(
            single_v4 in proptest::collection::vec(address::<u32>(), 0..8),
            pool_v4 in (address::<u32>(), address::<u32>()),
            asked_v4 in proptest::collection::vec(address::<u32>(), 0..40),
            single_v6 in proptest::collection::vec(address::<u128>(), 0..8),
            pool_v6 in (address::<u128>(), address::<u128>()),
            asked_v6 in proptest::collection::vec(address::<u128>(), 0..40),
        ) {
            agrees_with_roles(single_v4, vec![pool_v4], &asked_v4)?;
            agrees_with_roles(single_v6, vec![pool_v6], &asked_v6)?;
        }
    }
}

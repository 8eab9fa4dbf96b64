//! The tables that exist once per address family: frontends, roles of addresses, SNAT addresses, steering.
//!
//! Not here: routes, which are in one table for both families.

use std::sync::Arc;

use hashbrown::HashMap;

use super::snat_groups::SnatGroups;
use crate::flow::{BackendId, SnatAddress};
use crate::port::PortIndex;
use crate::stats::FrontendNumber;
use crate::wire::{Address, FrontendKey, TableHash};
use crate::workers::SteeringTable;

/// The tables of one family.
#[derive(Clone, Debug)]
pub struct FamilyTables<A> {
    /// The frontends by address, port and protocol.
    pub(crate) frontends: Arc<HashMap<FrontendKey<A>, FrontendAt, TableHash>>,
    pub(crate) roles: Arc<AddressRoles<A>>,
    /// The frontend that a backend of mode `dnat` answers for, by the backend's address, port and protocol; `None` for
    /// a backend behind more than one.
    pub(crate) fronts: Arc<HashMap<FrontendKey<A>, Option<Front<A>>, TableHash>>,
    /// Indexed by port, then by VLAN link.
    pub(crate) snat: Arc<[Box<[SnatAddress<A>]>]>,
    /// The same by VIP group; `None` where this gateway has all of them for itself.
    pub(crate) snat_groups: Option<Arc<SnatGroups<A>>>,
    /// The tables that determine the owners of packets.
    pub(crate) steering: Arc<SteeringTable<A>>,
}

impl<A: Address> FamilyTables<A> {
    /// Tables without frontends.
    pub(crate) fn new(roles: AddressRoles<A>, snat: Arc<[Box<[SnatAddress<A>]>]>) -> Self {
        let steering = Arc::new(SteeringTable::new(snat.iter().flatten().map(|snat| snat.address)));
        Self { frontends: Arc::default(), fronts: Arc::default(), roles: Arc::new(roles), snat, snat_groups: None, steering }
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
pub struct Front<A> {
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
    pub(crate) exact: HashMap<A, AddressRole, TableHash>,
    /// Ranges of the pools as first and last address, sorted, without overlaps.
    pub(crate) pools: Vec<(A, A)>,
}

impl<A: Address> AddressRoles<A> {
    #[inline]
    pub(crate) fn of(&self, address: A) -> AddressRole {
        if let Some(&place) = self.exact.get(&address) {
            return place;
        }
        let after = self.pools.partition_point(|&(first, _)| first <= address);
        match after.checked_sub(1).map(|at| self.pools[at]) {
            Some((_, last)) if address <= last => AddressRole::PoolUnused,
            _ => AddressRole::Elsewhere,
        }
    }
}

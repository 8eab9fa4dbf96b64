//! What exists once for each address family: frontends, places, SNAT addresses.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::hash::TableHash;
use crate::snat::SnatAddress;
use crate::steering::SteeringTable;
use crate::{Address, PortIndex};

/// What a frontend is found by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FrontendKey<A> {
    pub(crate) address: A,
    pub(crate) port: u16,
    pub(crate) protocol: u8,
}

/// The tables of one family.
#[derive(Clone, Debug)]
pub struct FamilyTables<A> {
    /// Positions in the snapshot's frontends.
    pub(crate) frontends: Arc<HashMap<FrontendKey<A>, u32, TableHash>>,
    pub(crate) places: Arc<Places<A>>,
    /// By port.
    pub(crate) snat: Arc<[Box<[SnatAddress<A>]>]>,
    /// What packets' owners depend on.
    pub(crate) steering: Arc<SteeringTable<A>>,
}

impl<A: Address> FamilyTables<A> {
    /// Without frontends.
    pub(crate) fn new(places: Places<A>, snat: Arc<[Box<[SnatAddress<A>]>]>) -> Self {
        let steering = Arc::new(SteeringTable::new(&snat));
        Self { frontends: Arc::default(), places: Arc::new(places), snat, steering }
    }
}

/// What an address is to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A VIP that some frontend uses.
    Vip,
    /// A SNAT address.
    Snat,
    /// An address of a port or its twin, an address that node ports are served on included.
    Twin(PortIndex),
    /// In a pool, and no frontend uses it.
    PoolUnused,
    /// None of ours.
    Elsewhere,
}

/// Places by address.
#[derive(Clone, Debug)]
pub(crate) struct Places<A> {
    pub(crate) exact: HashMap<A, Place, TableHash>,
    /// Ranges of pools, first and last address, ordered and without overlaps.
    pub(crate) pools: Vec<(A, A)>,
}

impl<A: Address> Places<A> {
    #[inline]
    pub(crate) fn of(&self, address: A) -> Place {
        if let Some(&place) = self.exact.get(&address) {
            return place;
        }
        let after = self.pools.partition_point(|&(first, _)| first <= address);
        match after.checked_sub(1).map(|at| self.pools[at]) {
            Some((_, last)) if address <= last => Place::PoolUnused,
            _ => Place::Elsewhere,
        }
    }
}

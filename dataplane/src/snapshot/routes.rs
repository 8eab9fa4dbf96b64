//! The way to an address: longest prefix, then next hop.

use std::net::IpAddr;
use std::sync::Arc;

use hashbrown::HashMap;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use prefix_trie::PrefixMap;

use crate::hash::TableHash;
use crate::{Mac, PortIndex};

/// What a next hop is known by.
pub(crate) type NextHopKey = (PortIndex, IpAddr);

/// A neighbour that packets are sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// The port it is reached by.
    pub port: PortIndex,
    /// Its Ethernet address, if it is known.
    pub mac: Option<Mac>,
    /// Its address.
    pub address: IpAddr,
}

/// How packets leave towards a next hop whose Ethernet address is known: all that a hit needs of next hop and port, in a
/// quarter of a cache line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// The next hop's.
    pub destination_mac: Mac,
    /// The port's.
    pub source_mac: Mac,
    /// The port's, bytes.
    pub mtu: u16,
    /// The port.
    pub port: PortIndex,
}

/// The result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteTo {
    /// By the next hop in this slot.
    NextHop(u32),
    /// The destination is on-link on this port, and nothing is known of it yet.
    Unresolved {
        /// The port.
        port: PortIndex,
    },
    /// There is no route.
    None,
}

/// Where a route leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    /// Slot of the router; none when the destination is on-link.
    pub(crate) via: Option<u32>,
    pub(crate) port: PortIndex,
}

/// Routes and next hops.
#[derive(Clone, Debug)]
pub(crate) struct Routes {
    pub(crate) epoch: u32,
    pub(crate) v4: Arc<PrefixMap<Ipv4Net, Way>>,
    pub(crate) v6: Arc<PrefixMap<Ipv6Net, Way>>,
    /// By slot; none where the slot is free.
    pub(crate) next_hops: Vec<Option<NextHop>>,
    /// By slot; none where the slot is free or the Ethernet address unknown.
    pub(crate) exits: Vec<Option<Exit>>,
    pub(crate) slots: HashMap<NextHopKey, u32, TableHash>,
}

impl Routes {
    pub(crate) fn way(&self, address: IpAddr) -> Option<Way> {
        match IpNet::from(address) {
            IpNet::V4(host) => self.v4.get_lpm(&host).map(|(_, way)| *way),
            IpNet::V6(host) => self.v6.get_lpm(&host).map(|(_, way)| *way),
        }
    }

    pub(crate) fn to(&self, address: IpAddr) -> RouteTo {
        let Some(Way { via, port }) = self.way(address) else { return RouteTo::None };
        match via.or_else(|| self.slots.get(&(port, address)).copied()) {
            Some(slot) => RouteTo::NextHop(slot),
            None => RouteTo::Unresolved { port },
        }
    }

    #[inline]
    pub(crate) fn next_hop(&self, slot: u32) -> Option<&NextHop> {
        self.next_hops.get(slot as usize)?.as_ref()
    }

    #[inline]
    pub(crate) fn exit(&self, slot: u32) -> Option<&Exit> {
        self.exits.get(slot as usize)?.as_ref()
    }

    pub(crate) fn resolves(&self, port: PortIndex, address: IpAddr) -> bool {
        self.slots.get(&(port, address)).and_then(|&slot| self.next_hop(slot)).is_some_and(|hop| hop.mac.is_some())
    }
}

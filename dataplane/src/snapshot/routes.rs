//! The way to an address: longest prefix, then next hop, or a group of next hops among which each flow has its own.
//!
//! **Invariant:** a group's number is beyond every slot's, so that a lookup of a slot, which is all that a flow with one next
//! hop needs, finds nothing for it. Numbers of groups mean something within one snapshot only: no flow holds one.

use std::net::IpAddr;
use std::sync::Arc;

use hashbrown::HashMap;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use prefix_trie::PrefixMap;

use crate::hash::{TableHash, split_mix};
use crate::maglev::MaglevTable;
use crate::{Link, Mac, PortIndex};

/// What a next hop is known by.
pub(crate) type NextHopKey = (Link, IpAddr);

/// A neighbour that packets are sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// The link it is reached by.
    pub link: Link,
    /// Its Ethernet address, if it is known.
    pub mac: Option<Mac>,
    /// Its address.
    pub address: IpAddr,
}

/// How packets leave towards a next hop whose Ethernet address is known: all that a hit needs of next hop and port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// The next hop's.
    pub destination_mac: Mac,
    /// The port's.
    pub source_mac: Mac,
    /// The link's, bytes.
    pub mtu: u16,
    /// The same of an untagged link. Of a tagged one 0, so that the comparison that each packet meets anyway keeps those
    /// out of the way of packets without tags.
    pub plain_mtu: u16,
    /// The link.
    pub link: Link,
    /// The link's.
    pub port: PortIndex,
}

/// The result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteTo {
    /// By the next hop in this slot, or by one of a group ([`crate::Snapshot::member`]).
    NextHop(u32),
    /// The destination is on this link, and nothing is known of it yet.
    Unresolved {
        /// The link.
        link: Link,
    },
    /// There is no route.
    None,
}

/// Where a route leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// The destination is on this link.
    OnLink(Link),
    /// By the router in this slot, or by one of this group.
    Via(u32),
    /// Nowhere: a blackhole, an unreachable or a prohibited destination.
    Nowhere,
}

/// Set in the numbers of groups. There are fewer slots: routes, neighbours and targets together.
const GROUP: u32 = 1 << 31;
/// Entries of a group's table: prime, and fine enough for the weights of a few dozen routers.
pub(crate) const GROUP_TABLE: u32 = 1021;
/// Times that a flow whose router is unusable chooses anew before the first usable one is taken.
const CHOICES: u64 = 8;

/// Several next hops of one route. A flow chooses by its hash through a Maglev table, so that a change of the set moves
/// few flows besides those of the next hops that went.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    /// Their slots, by which the table counts.
    pub(crate) members: Box<[u32]>,
    pub(crate) table: MaglevTable,
}

impl Group {
    /// The number of the group in this position.
    pub(crate) fn number(position: usize) -> Option<u32> {
        u32::try_from(position).ok().filter(|&n| n < GROUP - 1).map(|n| n | GROUP)
    }

    fn chosen(&self, hash: u64) -> Option<u32> {
        self.members.get(usize::from(self.table.choose(hash)?)).copied()
    }
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
    pub(crate) groups: Arc<[Group]>,
    /// Ports without link: no member of a group is chosen there while another is usable.
    pub(crate) down: Vec<PortIndex>,
}

impl Routes {
    pub(crate) fn way(&self, address: IpAddr) -> Option<Way> {
        match IpNet::from(address) {
            IpNet::V4(host) => self.v4.get_lpm(&host).map(|(_, way)| *way),
            IpNet::V6(host) => self.v6.get_lpm(&host).map(|(_, way)| *way),
        }
    }

    pub(crate) fn to(&self, address: IpAddr) -> RouteTo {
        match self.way(address) {
            Some(Way::Via(next_hop)) => RouteTo::NextHop(next_hop),
            Some(Way::OnLink(link)) => {
                self.slots.get(&(link, address)).map_or(RouteTo::Unresolved { link }, |&slot| RouteTo::NextHop(slot))
            }
            Some(Way::Nowhere) | None => RouteTo::None,
        }
    }

    /// The slots of a group, by its number; none for a slot.
    pub(crate) fn members(&self, next_hop: u32) -> &[u32] {
        self.group(next_hop).map_or(&[], |group| &group.members)
    }

    fn group(&self, next_hop: u32) -> Option<&Group> {
        // UNRESOLVED is beyond every group.
        (next_hop & GROUP != 0).then(|| self.groups.get((next_hop & !GROUP) as usize)).flatten()
    }

    /// The slot that a flow of this hash takes: the same one while the set of usable ones is the same. When none is usable,
    /// the one that it would take.
    pub(crate) fn member(&self, next_hop: u32, hash: u64) -> u32 {
        let Some(group) = self.group(next_hop) else { return next_hop };
        let usable = |slot: &u32| self.exit(*slot).is_some_and(|exit| !self.down.contains(&exit.port));
        let choices = (0..CHOICES).filter_map(|n| group.chosen(if n == 0 { hash } else { split_mix(hash.wrapping_add(n)) }));
        let any = choices.chain(group.members.iter().copied()).find(usable);
        any.or_else(|| group.chosen(hash)).unwrap_or(next_hop)
    }

    #[inline]
    pub(crate) fn next_hop(&self, slot: u32) -> Option<&NextHop> {
        self.next_hops.get(slot as usize)?.as_ref()
    }

    #[inline]
    pub(crate) fn exit(&self, slot: u32) -> Option<&Exit> {
        self.exits.get(slot as usize)?.as_ref()
    }

    pub(crate) fn resolves(&self, link: Link, address: IpAddr) -> bool {
        self.slots.get(&(link, address)).and_then(|&slot| self.next_hop(slot)).is_some_and(|hop| hop.mac.is_some())
    }
}

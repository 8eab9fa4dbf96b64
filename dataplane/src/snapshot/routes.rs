//! Routing: longest prefix match, then a next hop, or a group of next hops among which each flow has one.
//!
//! **Invariant:** numbers of groups are above those of slots, so a lookup of a slot, which is all that a flow with one
//! next hop needs, finds nothing for a group. Numbers of groups are valid within one snapshot only; no flow holds one.
//!
//! Not here: the routes of the kernel, from which the compiler builds these tables.

mod client_routers;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use hashbrown::HashMap;

use super::prefixes::Prefixes;
use crate::choose::{MaglevTable, reduce};
use crate::flow::UNRESOLVED;
use crate::port::{Link, PortIndex};
use crate::wire::{Address, ByFamily, Ethernet, Mac, TAG_BYTES, TableHash, is_link_local, split_mix};
use client_routers::{ClientRouters, NUMBERS, RouterNumbers};

/// Identifies a next hop.
pub(crate) type NextHopKey = (Link, IpAddr);

/// A neighbour that packets are sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// The link on which it is reached.
    pub link: Link,
    /// Its Ethernet address, if it is known.
    pub mac: Option<Mac>,
    /// Its address.
    pub address: IpAddr,
}

/// How packets leave towards a next hop with a known Ethernet address: all that a hit needs of next hop and port, and
/// of the backend behind it. 32 bytes, half a cache line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(32))]
pub struct Exit {
    /// Ethernet addresses as they stand in a frame: that of the next hop, then that of the port. Behind a group of next
    /// hops instead the number of the group, in the first four bytes.
    addresses: [u8; 12],
    /// MTU of the link, bytes.
    pub mtu: u16,
    /// Port of the link.
    pub port: PortIndex,
    /// Bytes of the Ethernet header with the tags of the link.
    link_bytes: u8,
    /// The VLAN tags of the link, as they stand in a frame after the Ethernet addresses.
    tags: [u8; 8],
    /// The link.
    pub link: Link,
    /// Of the exit towards a backend, see [`super::backends`]: [`crate::flow::BackendId::without_frontend`], with
    /// [`Exit::ON_LINK`] and [`Exit::BEHIND_GROUP`] in the bits that this leaves. Otherwise 0.
    backend: u32,
}

const _: () = assert!(size_of::<Option<Exit>>() == 32);

impl Exit {
    /// An exit that no packet takes, since the MTU is 0. Nothing arrives by its link.
    pub(crate) const NOWHERE: Self =
        Self { addresses: [0; 12], mtu: 0, port: PortIndex(0), link_bytes: 0, tags: [0; 8], link: Link::NONE, backend: 0 };
    /// The backend is its own next hop.
    const ON_LINK: u32 = 1;
    /// The backend is behind a group of next hops. No packet takes the exit; [`Exit::group`] is the group.
    const BEHIND_GROUP: u32 = 2;

    /// The exit by a link of a port, towards the next hop with this Ethernet address.
    #[allow(clippy::cast_possible_truncation)] // 14 bytes
    pub(crate) fn new(link: Link, mtu: u16, source_mac: Mac, destination_mac: Mac) -> Self {
        let (tags, tag_bytes) = link.tags().to_bytes();
        let ([a, b, c, d, e, f], [g, h, i, j, k, l]) = (destination_mac.0, source_mac.0);
        let addresses = [a, b, c, d, e, f, g, h, i, j, k, l];
        Self { addresses, mtu, port: link.port(), link_bytes: Ethernet::BYTES as u8 + tag_bytes, tags, link, backend: 0 }
    }

    /// The bits of [`Exit::backend`] that are not the backend's.
    pub(super) const BACKEND_FLAGS: u32 = Self::ON_LINK | Self::BEHIND_GROUP;

    /// The exit towards a steady backend, by its [`crate::flow::BackendId::without_frontend`].
    pub(super) fn of_backend(routes: &Routes, backend: u32, next_hop: u32, on_link: bool) -> Self {
        if routes.group(next_hop).is_some() {
            let mut addresses = Self::NOWHERE.addresses;
            addresses[..4].copy_from_slice(&next_hop.to_ne_bytes());
            return Self { addresses, backend: backend | Self::BEHIND_GROUP, ..Self::NOWHERE };
        }
        routes.exit(next_hop).unwrap_or(&Self::NOWHERE).towards(backend, on_link)
    }

    /// The same exit towards a backend.
    pub(super) fn towards(self, backend: u32, on_link: bool) -> Self {
        Self { backend: backend | if on_link { Self::ON_LINK } else { 0 }, ..self }
    }

    /// Whether it is that towards a backend, by [`crate::flow::BackendId::without_frontend`].
    #[inline(always)]
    pub(super) fn is_of(&self, backend: u32) -> bool {
        self.backend ^ backend <= Self::BACKEND_FLAGS
    }

    /// The number of the group of next hops that the backend is behind.
    #[inline(always)]
    pub(crate) fn group(&self) -> Option<u32> {
        let [a, b, c, d, ..] = self.addresses;
        (self.backend & Self::BEHIND_GROUP != 0).then_some(u32::from_ne_bytes([a, b, c, d]))
    }

    /// Whether the backend is its own next hop.
    #[inline(always)]
    pub(crate) fn is_on_link(&self) -> bool {
        self.backend & Self::ON_LINK != 0
    }

    /// The bits of the port in [`Exit::measures`].
    pub(crate) const PORT: u32 = 0xff << 16;

    /// The MTU (bits 0 to 15), the port (16 to 23) and the bytes of the Ethernet header (24 to 31), which one load
    /// reads.
    #[inline(always)]
    pub(crate) fn measures(&self) -> u32 {
        u32::from(self.mtu) | u32::from(self.port.0) << 16 | u32::from(self.link_bytes) << 24
    }

    /// Ethernet address of the next hop.
    #[must_use]
    pub fn destination_mac(&self) -> Mac {
        let [a, b, c, d, e, f, ..] = self.addresses;
        Mac([a, b, c, d, e, f])
    }

    /// Ethernet address of the port.
    #[must_use]
    pub fn source_mac(&self) -> Mac {
        let [.., a, b, c, d, e, f] = self.addresses;
        Mac([a, b, c, d, e, f])
    }

    /// Bytes of the Ethernet header with the tags of the link.
    #[inline(always)]
    #[must_use]
    pub(crate) fn link_bytes(&self) -> usize {
        usize::from(self.link_bytes)
    }

    /// Writes addresses at the start of a frame; the EtherType of the packet stays. `None` if the frame is too short.
    #[inline(always)]
    pub(crate) fn write_addresses(&self, frame: &mut [u8]) -> Option<()> {
        *frame.first_chunk_mut::<12>()? = self.addresses;
        Some(())
    }

    /// Writes addresses and tags at the start of a frame that has room for [`Exit::link_bytes`]; the EtherType of the
    /// packet stays.
    #[inline(always)]
    pub(crate) fn write_link(&self, frame: &mut [u8]) {
        if self.write_addresses(frame).is_none() || u16::from(self.link_bytes) == Ethernet::BYTES {
            return;
        }
        let [a, b, c, d, ..] = self.tags;
        match frame.get_mut(12..).and_then(|rest| rest.first_chunk_mut()) {
            Some(tag) if u16::from(self.link_bytes) == Ethernet::BYTES + TAG_BYTES => *tag = [a, b, c, d],
            _ => self.write_tags(frame),
        }
    }

    #[inline(never)]
    fn write_tags(&self, frame: &mut [u8]) {
        let tags = self.link_bytes().saturating_sub(Ethernet::BYTES.into()).min(self.tags.len());
        if let Some(bytes) = frame.get_mut(12..12 + tags) {
            bytes.copy_from_slice(&self.tags[..tags]);
        }
    }
}

/// The result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteTo {
    /// The next hop in this slot, or a member of this group ([`super::tables::Snapshot::member`]).
    NextHop(u32),
    /// The destination is on this link and has no slot yet.
    Unresolved {
        /// The link.
        link: Link,
    },
    /// There is no route.
    None,
}

/// The target of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteTarget {
    /// The destination is on this link.
    OnLink(Link),
    /// Via the router in this slot, or via a member of this group.
    Via(u32),
    /// A blackhole, unreachable or prohibited destination.
    Nowhere,
    /// Linux sends there by the device with this index, which packets of the gateway cannot take.
    Elsewhere(u32),
}

/// Bit that is set in the numbers of groups. There are fewer slots: routes, neighbours and targets together.
pub(super) const GROUP: u32 = 1 << 31;
/// Entries of a group's table: a prime, and large enough for the weights of a few dozen routers.
pub(crate) const GROUP_TABLE: u32 = 1021;
/// How often a flow whose router is unusable chooses again before the first usable one is taken.
const CHOICES: u64 = 8;

/// Several next hops of one route. A flow chooses by its hash through a Maglev table, so that a change of the set moves
/// few flows besides those of the removed next hops.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    /// Slots of the members, in the order of the table's positions.
    pub(crate) members: Box<[u32]>,
    pub(crate) table: MaglevTable,
}

impl Group {
    /// The number of the group at this position.
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
    pub(crate) v4: Arc<Prefixes<u32, RouteTarget>>,
    pub(crate) v6: Arc<Prefixes<u128, RouteTarget>>,
    /// The routers of clients by the routes of `v4`.
    pub(crate) client_routers: Arc<ClientRouters>,
    /// The exits towards `client_routers`, see [`Routes::find_router_exits`].
    pub(crate) router_exits: Arc<RouterExits>,
    /// Indexed by slot; `None` where the slot is free.
    pub(crate) next_hops: Vec<Option<NextHop>>,
    /// Indexed by slot; `None` where the slot is free or the Ethernet address unknown.
    pub(crate) exits: Vec<Option<Exit>>,
    pub(crate) slots: HashMap<NextHopKey, u32, TableHash>,
    pub(crate) groups: Arc<[Group]>,
    /// Ports without link: no group member behind them is chosen while another is usable.
    pub(crate) down: Vec<PortIndex>,
    /// Names of the devices of [`RouteTarget::Elsewhere`].
    pub(crate) devices: Arc<BTreeMap<u32, String>>,
    /// The first choices in all groups, see [`Routes::find_first_choices`].
    pub(crate) first_choices: Arc<FirstChoices>,
}

/// The first choices of flows in all groups, for the fast path, which does not look for a second choice.
#[derive(Debug, Default)]
pub(crate) struct FirstChoices {
    /// For each group and entry of its table: the slot, or [`UNRESOLVED`] where the member is not usable.
    slots: Box<[u32]>,
    /// For each group: the links of its members, as far as their exits are known, each once.
    links: Box<[Box<[Link]>]>,
}

impl FirstChoices {
    /// The slot of the member of a group that a flow with this hash takes first; [`UNRESOLVED`] when the member is not
    /// usable, and for a next hop that is no group.
    #[inline(always)]
    pub(crate) fn slot(&self, next_hop: u32, hash: u64) -> u32 {
        let entry = (next_hop ^ GROUP) as usize * GROUP_TABLE as usize + reduce(hash, GROUP_TABLE) as usize;
        self.slots.get(entry).copied().unwrap_or(UNRESOLVED)
    }

    /// Whether packets from behind a member of a group may arrive on a link, as far as known exits tell.
    #[inline(always)]
    pub(crate) fn arrive_from(&self, next_hop: u32, link: Link) -> bool {
        self.links.get((next_hop ^ GROUP) as usize).is_some_and(|links| links.contains(&link))
    }
}

/// The exits of all slots.
#[derive(Clone, Copy)]
pub(crate) struct Exits<'s>(&'s [Option<Exit>]);

impl<'s> Exits<'s> {
    /// The exit towards the next hop in a slot; `None` while its Ethernet address is unknown.
    #[inline(always)]
    pub(crate) fn get(self, slot: u32) -> Option<&'s Exit> {
        self.0.get(slot as usize)?.as_ref()
    }
}

/// The exits towards routers of clients, by their numbers; [`Exit::NOWHERE`] of one whose Ethernet address is unknown.
#[derive(Clone, Debug)]
pub(crate) struct RouterExits([Exit; NUMBERS]);

impl Default for RouterExits {
    fn default() -> Self {
        Self([Exit::NOWHERE; NUMBERS])
    }
}

/// The exits towards clients that are behind one router.
#[derive(Clone, Copy)]
pub(crate) struct ClientExits<'s> {
    numbers: RouterNumbers<'s>,
    exits: &'s [Exit; NUMBERS],
}

impl<'s> ClientExits<'s> {
    /// The exit towards a client, by its address in wire order; `None` if its router is not known here.
    #[inline(always)]
    pub(crate) fn get(self, client: u32) -> Option<&'s Exit> {
        match self.numbers.of(client) {
            0 => None,
            number => Some(&self.exits[usize::from(number)]),
        }
    }
}

impl ByFamily for Routes {
    type Of<A: Address> = Prefixes<A, RouteTarget>;

    #[inline(always)]
    fn v4(&self) -> &Prefixes<u32, RouteTarget> {
        &self.v4
    }

    #[inline(always)]
    fn v6(&self) -> &Prefixes<u128, RouteTarget> {
        &self.v6
    }
}

impl Routes {
    /// The target for an address of one family.
    #[inline]
    fn target_of<A: Address>(&self, address: A) -> Option<RouteTarget> {
        A::of(self).get(address)
    }

    pub(crate) fn target(&self, address: IpAddr) -> Option<RouteTarget> {
        match address {
            IpAddr::V4(address) => self.v4.get(address.into()),
            IpAddr::V6(address) => self.v6.get(address.into()),
        }
    }

    #[inline]
    pub(crate) fn to<A: Address>(&self, address: A) -> RouteTo {
        self.by(self.target_of(address), address)
    }

    /// As [`Routes::to`], with the first and the last address around this one that are behind the same router or
    /// routers, if it is behind any.
    #[inline]
    pub(crate) fn to_range<A: Address>(&self, address: A) -> (Option<(A, A)>, RouteTo) {
        let (range, target) = A::of(self).get_range(address).unzip();
        (range.filter(|_| matches!(target, Some(RouteTarget::Via(_)))), self.by(target, address))
    }

    #[inline]
    fn by<A: Address>(&self, target: Option<RouteTarget>, address: A) -> RouteTo {
        match target {
            Some(RouteTarget::Via(next_hop)) => RouteTo::NextHop(next_hop),
            Some(RouteTarget::OnLink(link)) => {
                self.slots.get(&(link, address.ip())).map_or(RouteTo::Unresolved { link }, |&slot| RouteTo::NextHop(slot))
            }
            Some(RouteTarget::Nowhere | RouteTarget::Elsewhere(_)) | None => RouteTo::None,
        }
    }

    /// The index of the device by which Linux sends to an address, if packets of the gateway cannot take it.
    pub(crate) fn device_to(&self, address: IpAddr) -> Option<u32> {
        if let Some(RouteTarget::Elsewhere(device)) = self.target(address) { Some(device) } else { None }
    }

    /// A device of [`Routes::device_to`], for messages.
    pub(crate) fn device_name(&self, device: u32) -> &str {
        self.devices.get(&device).map_or("another device", String::as_str)
    }

    /// The slots of a group; empty if `next_hop` is a slot.
    pub(crate) fn members(&self, next_hop: u32) -> &[u32] {
        self.group(next_hop).map_or(&[], |group| &group.members)
    }

    fn group(&self, next_hop: u32) -> Option<&Group> {
        // `UNRESOLVED` is above every group number.
        (next_hop & GROUP != 0).then(|| self.groups.get((next_hop & !GROUP) as usize)).flatten()
    }

    /// The slot for a flow with this hash: the same while the set of usable members is the same. If none is usable, the
    /// slot that it would otherwise take.
    pub(crate) fn member(&self, next_hop: u32, hash: u64) -> u32 {
        let Some(group) = self.group(next_hop) else { return next_hop };
        let usable = |slot: &u32| self.is_usable(*slot);
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
        self.exits().get(slot)
    }

    /// Finds out which clients are behind one router, after a change of `v4`.
    pub(crate) fn find_client_routers(&mut self) {
        let behind = self.v4.ranges().filter_map(|(range, target)| match target {
            Some(RouteTarget::Via(slot)) if slot & GROUP == 0 => Some((range, slot)),
            _ => None,
        });
        self.client_routers = Arc::new(ClientRouters::new(behind));
    }

    /// The exits towards clients that are behind one router.
    pub(crate) fn client_exits(&self) -> ClientExits<'_> {
        ClientExits { numbers: self.client_routers.numbers(), exits: &self.router_exits.0 }
    }

    /// The exits of all slots.
    #[inline(always)]
    pub(crate) fn exits(&self) -> Exits<'_> {
        Exits(&self.exits)
    }

    /// Whether the member of a group in this slot can be used.
    fn is_usable(&self, slot: u32) -> bool {
        self.exit(slot).is_some_and(|exit| !self.down.contains(&exit.port))
    }

    /// Works out the exits towards the routers of clients, from the exits.
    pub(crate) fn find_router_exits(&mut self) {
        let exits = self.client_routers.slots().map(|slot| *self.exit(slot).unwrap_or(&Exit::NOWHERE));
        self.router_exits = Arc::new(RouterExits(exits));
    }

    /// Works out the first choices in all groups, from the exits and ports without link.
    pub(crate) fn find_first_choices(&mut self) {
        let usable = |slot: Option<&u32>| slot.copied().filter(|slot| self.is_usable(*slot)).unwrap_or(UNRESOLVED);
        let slots = self.groups.iter().flat_map(|group| {
            let member = |entry: u32| group.members.get(usize::from(*group.table.entries().get(entry as usize)?));
            (0..GROUP_TABLE).map(move |entry| usable(member(entry)))
        });
        let links = self.groups.iter().map(|group| {
            let links: BTreeSet<_> = group.members.iter().filter_map(|slot| Some(self.exit(*slot)?.link)).collect();
            links.into_iter().collect()
        });
        self.first_choices = Arc::new(FirstChoices { slots: slots.collect(), links: links.collect() });
    }

    /// The Ethernet address of a neighbour, if it is known.
    pub(crate) fn mac_of(&self, link: Link, address: IpAddr) -> Option<Mac> {
        self.slots.get(&(link, address)).and_then(|&slot| self.next_hop(slot))?.mac
    }

    /// Whether an address is in a prefix of a link, or link-local.
    pub(crate) fn is_on_link(&self, link: Link, address: IpAddr) -> bool {
        let is_link_local = match address {
            IpAddr::V4(address) => is_link_local(u32::from(address)),
            IpAddr::V6(address) => is_link_local(u128::from(address)),
        };
        is_link_local || self.target(address) == Some(RouteTarget::OnLink(link))
    }

    pub(crate) fn resolves(&self, link: Link, address: IpAddr) -> bool {
        self.mac_of(link, address).is_some()
    }
}

/// The routes of a snapshot without next hops, for tasks beside the workers, which must not keep a snapshot alive. A
/// copy is free. Whether the Ethernet address of a next hop is known changes more often, and is not in it.
#[derive(Clone, Debug)]
pub struct RouteLookup {
    v4: Arc<Prefixes<u32, RouteTarget>>,
    v6: Arc<Prefixes<u128, RouteTarget>>,
    interfaces: Arc<[u32]>,
}

impl RouteLookup {
    pub(crate) fn new(routes: &Routes, interfaces: Arc<[u32]>) -> Self {
        Self { v4: routes.v4.clone(), v6: routes.v6.clone(), interfaces }
    }

    /// Whether packets to an address leave by a port.
    #[must_use]
    pub fn has_route(&self, to: IpAddr) -> bool {
        let target = match to {
            IpAddr::V4(to) => self.v4.get(to.into()),
            IpAddr::V6(to) => self.v6.get(to.into()),
        };
        matches!(target, Some(RouteTarget::OnLink(_) | RouteTarget::Via(_)))
    }

    /// The kernel's indices of the interfaces behind the ports, ascending.
    #[must_use]
    pub fn interfaces(&self) -> &[u32] {
        &self.interfaces
    }

    /// Whether both are of the same routes and interfaces. Two lookups with equal routes may count as different.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.v4, &other.v4) && Arc::ptr_eq(&self.v6, &other.v6) && self.interfaces == other.interfaces
    }
}

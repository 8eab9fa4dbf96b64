//! The tables that a worker forwards by: immutable, built by [`crate::Compiler`], shared by all workers.
//!
//! **Invariant:** a slot (of a backend or a next hop) means the same in successive snapshots for as long as a flow may
//! hold it: a backend's slot carries a generation, and `route_epoch` increases when the slot of a next hop is
//! reassigned. Unchanged parts are shared with the previous snapshot, not copied.
//!
//! Not here: how the tables are built, and anything that a worker writes.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use imbl::OrdMap;
use ipnet::IpNet;
use proto::{Generation, ProbeTags, Protocol, Refusal, ServiceName};

use super::backends::{Backend, BackendTable};
use super::family::{AddressRole, DnatFrontend, FamilyTables};
use super::frontend::{Frontend, PortView, ServiceView};
use super::input::{OwnedGroups, PortConfig};
use super::routes::{Exit, NextHop, RouteLookup, RouteTo, Routes};
use super::shared_chunks::Pieces;
use super::tunnels::Tunnels;
use crate::flow::{AffinityTable, BackendId, FlowLimits, SnatAddress, Tick, Ticks};
use crate::port::{Link, PortIndex};
use crate::stats::FrontendNumber;
use crate::wire::FrontendKey;
use crate::wire::{Address, ByFamily, Mac, Tuple};
use crate::workers::PacketTarget;

/// Services as commands show them, by name. A copy is free, and differences between two copies are found without
/// visiting the rest.
pub type Views = OrdMap<Arc<ServiceName>, Arc<ServiceView>>;

/// Backends whose flows continue although their Service no longer lists them, each with the slot in which its flows are
/// counted. A copy is free.
pub type RemovedBackends = OrdMap<RemovedBackend, u32>;

/// A backend that its Service no longer lists.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RemovedBackend {
    /// The Service, which may be deleted.
    pub service: Arc<ServiceName>,
    /// Its address and port.
    pub address: SocketAddr,
    /// The protocol of its flows.
    pub protocol: Protocol,
}

/// How much of the room for backends and their targets is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TargetUse {
    /// Places in all (key `limits.targets`).
    pub limit: u32,
    /// Places of backends that Services list.
    pub listed: u32,
    /// Places of removed backends that drain.
    pub draining: u32,
    /// Places of targets without backends, whose SNAT ports rest.
    pub resting: u32,
    /// Services some of whose backends have found no place.
    pub refused_services: u32,
}

/// All tables at one point in time.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub(crate) sequence: u64,
    pub(crate) generation: Generation,
    pub(crate) ready: bool,
    pub(crate) ports: Arc<[PortConfig]>,
    pub(crate) v4: FamilyTables<u32>,
    pub(crate) v6: FamilyTables<u128>,
    pub(crate) frontends: Pieces<Arc<Frontend>>,
    /// The affinity table; present from the first service with affinity on.
    pub(crate) affinity: Option<Arc<AffinityTable>>,
    pub(crate) backends: BackendTable,
    pub(crate) routes: Arc<Routes>,
    /// See [`super::Network::interfaces`].
    pub(crate) interfaces: Option<Arc<[u32]>>,
    pub(crate) tunnels: Arc<Tunnels>,
    pub(crate) probe_tags: Arc<ProbeTags>,
    pub(crate) services: Views,
    pub(crate) removed: RemovedBackends,
    pub(crate) vlans: Arc<[Link]>,
    /// The VIP groups that this gateway owns, where SNAT addresses belong to groups.
    pub(crate) groups: Option<OwnedGroups>,
    /// MTUs of `vlans`, in their order.
    pub(crate) vlan_mtus: Arc<[u16]>,
    /// Addresses of `vlans`, in their order.
    pub(crate) vlan_addresses: Arc<[Vec<IpNet>]>,
    pub(crate) promiscuous: Arc<[PortIndex]>,
    pub(crate) announced: Announced,
    /// The addresses of VIP groups that this gateway has lost, since which snapshot.
    pub(crate) lost: Announced,
    pub(crate) routed: Arc<[(IpAddr, IpNet)]>,
    pub(crate) managed: Arc<[(Link, IpAddr)]>,
    pub(crate) shortest_idle_timeout: Option<Ticks>,
    pub(crate) limits: Arc<FlowLimits>,
    pub(crate) refused: Arc<[(ServiceName, Refusal)]>,
    pub(crate) target_use: TargetUse,
    pub(crate) problems: Arc<[String]>,
    pub(crate) prefixes: Arc<[IpNet]>,
}

/// The addresses for which ARP and NDP are answered, each with the sequence of the first snapshot that has answered
/// without interruption.
#[derive(Clone, Debug)]
pub(crate) struct Announced {
    /// Sorted by link and address.
    by_address: Arc<[(Link, IpAddr, u64)]>,
    /// Positions in `by_address`, oldest first.
    by_age: Arc<[u32]>,
}

impl Announced {
    /// `all` must be sorted by link and address.
    pub(crate) fn new(all: impl Iterator<Item = (Link, IpAddr, u64)>) -> Self {
        let by_address: Arc<[_]> = all.collect();
        let mut by_age: Vec<u32> = (0..).take(by_address.len()).collect();
        // Stable: addresses added together stay sorted by link and address.
        by_age.sort_by_key(|&position| by_address[position as usize].2);
        Self { by_address, by_age: by_age.into() }
    }

    fn aged(&self, position: u32) -> (u64, Link, IpAddr) {
        let (link, address, since) = self.by_address[position as usize];
        (since, link, address)
    }

    /// The first entry after `last` in the order of age; without `last`, the first of all.
    pub(crate) fn after(&self, last: Option<(u64, Link, IpAddr)>) -> Option<(u64, Link, IpAddr)> {
        let passed = self.by_age.partition_point(|&position| Some(self.aged(position)) <= last);
        self.by_age.get(passed).map(|&position| self.aged(position))
    }

    /// The last entry in the order of age.
    pub(crate) fn newest(&self) -> Option<(u64, Link, IpAddr)> {
        self.by_age.last().map(|&position| self.aged(position))
    }
}

impl ByFamily for Snapshot {
    type Of<A: Address> = FamilyTables<A>;

    #[inline(always)]
    fn v4(&self) -> &FamilyTables<u32> {
        &self.v4
    }

    #[inline(always)]
    fn v6(&self) -> &FamilyTables<u128> {
        &self.v6
    }
}

impl Snapshot {
    /// Increases by one with every snapshot of a compiler.
    #[must_use]
    pub const fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The generation of the state that it was compiled from.
    #[must_use]
    pub const fn generation(&self) -> &Generation {
        &self.generation
    }

    /// Whether it was compiled from a complete state. Until then the gateway announces, answers and resets nothing.
    #[must_use]
    pub const fn ready(&self) -> bool {
        self.ready
    }

    /// A port. An index that is not in the configuration gives the first port.
    #[must_use]
    #[inline]
    pub fn port(&self, index: PortIndex) -> &PortConfig {
        self.ports.get(usize::from(index.0)).unwrap_or(&self.ports[0])
    }

    /// All ports.
    #[must_use]
    pub fn ports(&self) -> &[PortConfig] {
        &self.ports
    }

    /// The frontend at this address, transport protocol number and port.
    #[must_use]
    #[inline]
    pub fn frontend<A: Address>(&self, address: A, protocol: u8, port: u16) -> Option<&Frontend> {
        self.numbered_frontend(address, protocol, port).map(|(frontend, _)| frontend)
    }

    /// As [`Snapshot::frontend`], with the number by which its flows are counted.
    #[must_use]
    #[inline]
    pub fn numbered_frontend<A: Address>(&self, address: A, protocol: u8, port: u16) -> Option<(&Frontend, FrontendNumber)> {
        let at = *A::of(self).frontends.get(&FrontendKey { address, port, protocol })?;
        Some((self.frontends.get(at.position as usize)?, at.number))
    }

    /// The number of the frontend at this address, transport protocol number and port.
    #[must_use]
    pub fn number_of<A: Address>(&self, address: A, protocol: u8, port: u16) -> FrontendNumber {
        self.numbered_frontend(address, protocol, port).map_or(FrontendNumber::NONE, |(_, number)| number)
    }

    /// The frontend that a backend of mode `dnat` answers for. Outer `None`: the address is no such backend. Inner
    /// `None`: it may answer for one of several frontends.
    #[must_use]
    #[inline]
    pub fn dnat_frontend<A: Address>(&self, address: A, protocol: u8, port: u16) -> Option<Option<DnatFrontend<A>>> {
        let frontends = &A::of(self).dnat_frontends;
        if frontends.is_empty() { None } else { frontends.get(&FrontendKey { address, port, protocol }).copied() }
    }

    /// The backend, if it still exists: alive or draining.
    #[must_use]
    #[inline]
    pub fn backend(&self, id: BackendId) -> Option<&Backend> {
        self.backends.get(id)
    }

    /// Removes expired clients from the next part of the affinity table. One worker calls this once per tick.
    pub(crate) fn sweep_affinity(&self, now: Tick) {
        if let Some(table) = &self.affinity {
            table.sweep(now);
        }
    }

    /// The role of an address.
    #[must_use]
    #[inline]
    pub fn role<A: Address>(&self, address: A) -> AddressRole {
        A::of(self).roles.of(address)
    }

    /// The first and the last address around this one that are of clients: without a role, neither martian nor
    /// link-local. `None` if this one is not.
    #[must_use]
    pub(crate) fn clients_around<A: Address>(&self, address: A) -> Option<(A, A)> {
        A::of(self).roles.clients_around(address)
    }

    /// The kind of destination of a packet with this tuple, on which its owner depends.
    #[must_use]
    #[inline]
    pub fn packet_target<A: Address>(&self, tuple: &Tuple<A>) -> PacketTarget {
        A::of(self).steering.towards(tuple, |address| self.role(address) != AddressRole::Elsewhere)
    }

    /// Routes and next hops.
    #[inline(always)]
    pub(crate) fn routes(&self) -> &Routes {
        &self.routes
    }

    /// The route to an address.
    #[must_use]
    pub fn route<A: Address>(&self, address: A) -> RouteTo {
        self.routes.to(address)
    }

    /// Whether a station with these addresses is on this link: its address is in a prefix of the link or link-local,
    /// and Linux knows it by this Ethernet address. A packet that a router passed on carries that of the router, also
    /// if a stranger forged an address of the link that nobody has.
    pub(crate) fn is_on_link(&self, link: Link, address: IpAddr, mac: Mac) -> bool {
        self.routes.is_on_link(link, address) && self.routes.mac_of(link, address) == Some(mac)
    }

    /// The name of the device by which Linux sends to an address, if its longest prefix is a route that packets of the
    /// gateway cannot take: by a device that is no port, or with an encapsulation.
    #[must_use]
    pub fn device_to(&self, address: IpAddr) -> Option<&str> {
        self.routes.device_to(address).map(|device| self.routes.device_name(device))
    }

    /// The slot of the next hop for a flow with this hash. `next_hop` comes from [`Snapshot::route`] or a backend: of a
    /// group, a usable member if there is one; otherwise it is the slot itself.
    #[must_use]
    pub fn member(&self, next_hop: u32, hash: u64) -> u32 {
        self.routes.member(next_hop, hash)
    }

    /// Whether a member of a group is reached by this link.
    #[must_use]
    pub(crate) fn any_member_by(&self, next_hop: u32, link: Link) -> bool {
        self.routes.members(next_hop).iter().any(|&slot| self.next_hop(slot).is_some_and(|hop| hop.link == link))
    }

    /// A next hop by its slot.
    #[must_use]
    #[inline]
    pub fn next_hop(&self, slot: u32) -> Option<&NextHop> {
        self.routes.next_hop(slot)
    }

    /// The exit towards the next hop in a slot; `None` while its Ethernet address is unknown.
    #[must_use]
    #[inline]
    pub fn exit(&self, slot: u32) -> Option<&Exit> {
        self.routes.exit(slot)
    }

    /// Increases when a next hop that was looked up earlier may no longer be right. At least 1.
    #[must_use]
    #[inline]
    pub fn route_epoch(&self) -> u32 {
        self.routes.epoch
    }

    /// Whether the Ethernet address of this neighbour is known.
    #[must_use]
    pub fn resolves(&self, link: Link, address: IpAddr) -> bool {
        self.routes.resolves(link, address)
    }

    /// Whether the kernel has an interface for this link.
    #[must_use]
    pub fn knows(&self, link: Link) -> bool {
        !link.is_tagged() || self.vlans.binary_search(&link).is_ok()
    }

    /// Whether the kernel accepts frames for other stations at the twin of this port.
    #[must_use]
    pub(crate) fn is_promiscuous(&self, port: PortIndex) -> bool {
        self.promiscuous.contains(&port)
    }

    /// MTU of a link in bytes; of an unknown link, that of its port.
    #[must_use]
    #[inline(always)]
    pub fn mtu(&self, link: Link) -> u16 {
        let of_port = self.port(link.port()).mtu;
        if link.is_tagged() { self.mtu_of_vlan(link).map_or(of_port, |mtu| mtu.min(of_port)) } else { of_port }
    }

    #[inline(never)]
    fn mtu_of_vlan(&self, link: Link) -> Option<u16> {
        self.vlan_mtus.get(self.vlans.binary_search(&link).ok()?).copied()
    }

    /// Addresses of the gateway from which it answers what arrives by a link: those of the link, then others.
    pub(crate) fn own_addresses(&self, link: Link) -> impl Iterator<Item = IpAddr> {
        let vlan = self.vlans.binary_search(&link).ok().and_then(|at| self.vlan_addresses.get(at));
        let of_link = vlan.into_iter().flatten();
        let of_ports = std::iter::once(self.port(link.port())).chain(self.ports.iter()).flat_map(|port| &port.addresses);
        of_link.chain(of_ports).map(IpNet::addr)
    }

    /// The SNAT addresses for new flows to this VIP, towards backends reached by this link.
    #[must_use]
    #[inline(always)]
    pub fn snat<A: Address>(&self, link: Link, vip: A) -> &[SnatAddress<A>] {
        let tables = A::of(self);
        if tables.snat_groups.is_none() && !link.is_tagged() {
            tables.snat.get(usize::from(link.port().0)).map_or(&[], AsRef::as_ref)
        } else {
            self.snat_of_group(link, vip)
        }
    }

    /// As [`Snapshot::snat`], where SNAT addresses belong to groups, or for a VLAN. Not inlined, so that other gateways
    /// do not pay for it.
    #[inline(never)]
    fn snat_of_group<A: Address>(&self, link: Link, vip: A) -> &[SnatAddress<A>] {
        let position = match link.is_tagged() {
            true => self.vlans.binary_search(&link).ok().map(|position| self.ports.len() + position),
            false => Some(usize::from(link.port().0)),
        };
        let (Some(position), tables) = (position, A::of(self)) else { return &[] };
        match &tables.snat_groups {
            None => tables.snat.get(position).map_or(&[], AsRef::as_ref),
            Some(groups) => groups.of(position, self.group_of_vip(vip)),
        }
    }

    /// The VIP group of an address, if gateways elect its owner: a VIP that is not announced to routers. `None` where
    /// SNAT addresses do not belong to groups.
    fn group_of_vip<A: Address>(&self, address: A) -> Option<u8> {
        let groups = A::of(self).snat_groups.as_ref()?;
        if self.role(address) == AddressRole::Vip { groups.flows().group_of_vip(address) } else { None }
    }

    /// Whether an election moves flows to this VIP: it is neither announced to routers nor an address of node ports.
    /// False where SNAT addresses do not belong to groups.
    #[must_use]
    pub fn is_elected(&self, vip: IpAddr) -> bool {
        fn is_elected<A: Address>(snapshot: &Snapshot, vip: A) -> bool {
            A::of(snapshot).snat_groups.as_ref().is_some_and(|groups| groups.flows().group_of_vip(vip).is_some())
        }
        match vip {
            IpAddr::V4(vip) => is_elected(self, u32::from(vip)),
            IpAddr::V6(vip) => is_elected(self, u128::from(vip)),
        }
    }

    /// The VIP group of a SNAT address. `None` where SNAT addresses do not belong to groups, and for one of this
    /// gateway's own.
    #[must_use]
    pub(crate) fn group_of_snat<A: Address>(&self, address: A) -> Option<u8> {
        A::of(self).snat_groups.as_ref()?.flows().group_of_snat(address)
    }

    /// Whether another gateway owns a VIP or a SNAT address, where SNAT addresses belong to groups.
    #[must_use]
    pub(crate) fn is_owned_elsewhere<A: Address>(&self, address: A) -> bool {
        self.groups.is_some_and(|owned| self.group_of(address).is_some_and(|group| !owned.has(group)))
    }

    /// The VIP group of a VIP or a SNAT address. `None` where SNAT addresses do not belong to groups, and where no
    /// election moves the address.
    pub(crate) fn group_of<A: Address>(&self, address: A) -> Option<u8> {
        self.group_of_snat(address).or_else(|| self.group_of_vip(address))
    }

    /// Whether ARP or NDP for the address is answered on this link.
    #[must_use]
    pub fn answers_for<A: Address>(&self, link: Link, address: A) -> bool {
        self.answers_for_ip(link, address.ip())
    }

    /// [`Snapshot::answers_for`], for an address of either family.
    #[must_use]
    pub fn answers_for_ip(&self, link: Link, address: IpAddr) -> bool {
        self.announced.by_address.binary_search_by_key(&(link, address), |&(link, address, _)| (link, address)).is_ok()
    }

    /// The addresses for which [`Snapshot::answers_for`] is true, each with the sequence of the first snapshot that has
    /// answered without interruption. Sorted by link and address; the same list while nothing changes.
    #[must_use]
    pub fn announced(&self) -> &Arc<[(Link, IpAddr, u64)]> {
        &self.announced.by_address
    }

    /// The announced addresses with their order by age.
    pub(crate) const fn all_announced(&self) -> &Announced {
        &self.announced
    }

    /// Addresses of VIP groups that this gateway has lost, by age.
    pub(crate) const fn lost(&self) -> &Announced {
        &self.lost
    }

    /// VIPs of `routed` pools, which a routing daemon announces to routers, each with the prefix by which it is
    /// announced. Sorted.
    #[must_use]
    pub fn routed(&self) -> &[(IpAddr, IpNet)] {
        &self.routed
    }

    /// The routes alone, for tasks that outlive the snapshot. `None`: the kernel's routes have not been read yet.
    #[must_use]
    pub fn route_lookup(&self) -> Option<RouteLookup> {
        Some(RouteLookup::new(&self.routes, self.interfaces.clone()?))
    }

    /// Routers in use and on-link backends, which the kernel should keep resolved.
    #[must_use]
    pub fn managed_next_hops(&self) -> &[(Link, IpAddr)] {
        &self.managed
    }

    /// The shortest idle timeout that a service sets.
    #[must_use]
    pub const fn shortest_idle_timeout(&self) -> Option<Ticks> {
        self.shortest_idle_timeout
    }

    /// The limits of flows, by which workers end them.
    #[must_use]
    pub(crate) const fn limits(&self) -> &Arc<FlowLimits> {
        &self.limits
    }

    /// Whether several services share the flow tables.
    #[inline]
    pub(crate) fn has_many_services(&self) -> bool {
        self.services.len() > 1
    }

    /// The services, by name.
    #[must_use]
    pub const fn services(&self) -> &Views {
        &self.services
    }

    /// The removed backends whose drain has not ended.
    #[must_use]
    pub const fn removed(&self) -> &RemovedBackends {
        &self.removed
    }

    /// Services that this gateway does not serve, or serves only in part, with the reason.
    #[must_use]
    pub fn refused(&self) -> &[(ServiceName, Refusal)] {
        &self.refused
    }

    /// The service that is refused, wholly or in part, of those that are or would be reached here. The one that is
    /// comes first.
    #[must_use]
    pub fn refused_at(&self, protocol: Protocol, at: SocketAddr) -> Option<&Arc<ServiceView>> {
        let is_served = |port: &PortView| port.protocol == protocol && port.frontends.contains(&at);
        let served = self.services.values().find(|view| view.ports.iter().any(is_served));
        let view = served.or_else(|| self.services.values().find(|view| view.not_served.contains(&(protocol, at))))?;
        view.refusal.is_some().then_some(view)
    }

    /// How much of the room for backends and their targets is held.
    #[must_use]
    pub const fn target_use(&self) -> TargetUse {
        self.target_use
    }

    /// The networks of its ports and VLAN devices, in which it can answer ARP and NDP; each once, in order.
    #[must_use]
    pub const fn prefixes(&self) -> &Arc<[IpNet]> {
        &self.prefixes
    }

    /// Messages about conflicts between configuration and state.
    #[must_use]
    pub fn problems(&self) -> &[String] {
        &self.problems
    }
}

//! Maps Linux's interfaces to links: twins, and VLAN devices stacked one or two deep on them.
//!
//! Invariant: a VLAN device is a link only while its lower interface is one; the order of the kernel's messages does
//! not matter. Not here: the tables of addresses, routes and neighbours. Bridges, bonds and macvlans above a twin are
//! not links; Linux alone uses them. Of all interfaces that are not links only the names are kept, for messages.

use std::collections::BTreeMap;

use dataplane::{Link, PortIndex, TagKind};
use ipnet::IpNet;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{InfoData, InfoKind, InfoVlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, VlanProtocol};

use super::socket::{NetlinkError, Socket};

/// Maximum number of VLAN devices followed: all identifiers of one port. Frames of further devices go to Linux.
const VLANS_MAX: usize = 4096;
/// Maximum number of interfaces whose names are kept: 1 MB. A node with 250 Pods has some 300. Others have a number.
const NAMES_MAX: usize = 16_384;
/// Maximum number of tags of a link.
const TAGS_MAX: u8 = 2;

/// Kind of a followed interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InterfaceKind {
    Twin(PortIndex),
    /// A VLAN device, and the index of its lower interface.
    Vlan {
        lower: u32,
        tag: TagKind,
        id: u16,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct InterfaceState {
    kind: InterfaceKind,
    up: bool,
    mtu: u16,
    /// The interface accepts frames for other stations: IFLA_PROMISCUITY, the number of its requesters, is not 0.
    promiscuous: bool,
}

/// Change by a message about an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkChange {
    /// No change of a link.
    Nothing,
    /// A change of the promiscuous mode only.
    Promiscuity,
    /// A link was added, removed or changed.
    Link,
}

/// The twins and all VLAN devices, by interface index.
#[derive(Debug)]
pub(super) struct Interfaces {
    names: Vec<String>,
    by_index: BTreeMap<u32, InterfaceState>,
    /// Names of interfaces that are up, whatever they are.
    up: BTreeMap<u32, String>,
}

impl Interfaces {
    /// No interfaces yet. `names` are those of the twins in the order of [`PortIndex`].
    pub(super) fn new(names: &[String]) -> Self {
        Self { names: names.to_vec(), by_index: BTreeMap::new(), up: BTreeMap::new() }
    }

    /// Takes over the name of an interface. True if the interface went down or has another name now.
    pub(super) fn rename(&mut self, message: &LinkMessage) -> bool {
        let index = message.header.index;
        if !message.header.flags.contains(LinkFlags::Up) {
            return self.up.remove(&index).is_some();
        }
        let name = message.attributes.iter().find_map(|a| if let LinkAttribute::IfName(name) = a { Some(name) } else { None });
        let Some(name) = name.filter(|_| self.up.len() < NAMES_MAX || self.up.contains_key(&index)) else { return false };
        if self.up.get(&index) == Some(name) {
            return false;
        }
        self.up.insert(index, name.clone()).is_some()
    }

    /// The name of an interface, for messages.
    pub(super) fn name(&self, index: u32) -> String {
        self.up.get(&index).cloned().unwrap_or_else(|| format!("interface {index}"))
    }

    /// Applies a message about an interface.
    pub(super) fn apply(&mut self, message: &LinkMessage) -> LinkChange {
        let index = message.header.index;
        let new = self.interface(message);
        let (old, link_before) = (self.by_index.get(&index).copied(), self.link(index));
        match new {
            Some(_) if old.is_none() && self.by_index.len() >= VLANS_MAX + self.names.len() => return LinkChange::Nothing,
            Some(interface) => self.by_index.insert(index, interface),
            None => self.by_index.remove(&index),
        };
        let is_link = link_before.is_some() || self.link(index).is_some();
        let alike = |a: InterfaceState, b: InterfaceState| InterfaceState { promiscuous: b.promiscuous, ..a } == b;
        match (old, new) {
            _ if old == new || !is_link => LinkChange::Nothing,
            (Some(old), Some(new)) if alike(old, new) => LinkChange::Promiscuity,
            _ => LinkChange::Link,
        }
    }

    /// The ports with a promiscuous twin, in order.
    pub(super) fn promiscuous(&self) -> Vec<PortIndex> {
        let port = |interface: &InterfaceState| match interface.kind {
            InterfaceKind::Twin(port) if interface.promiscuous => Some(port),
            InterfaceKind::Twin(_) | InterfaceKind::Vlan { .. } => None,
        };
        let mut ports: Vec<_> = self.by_index.values().filter_map(port).collect();
        ports.sort_unstable();
        ports
    }

    /// The indices of the twins.
    pub(super) fn twins(&self) -> Vec<u32> {
        let is_twin = |interface: &InterfaceState| matches!(interface.kind, InterfaceKind::Twin(_));
        self.by_index.iter().filter(|(_, interface)| is_twin(interface)).map(|(&index, _)| index).collect()
    }

    /// Removes an interface. True if it was a link.
    pub(super) fn remove(&mut self, index: u32) -> bool {
        let was_link = self.link(index).is_some();
        self.by_index.remove(&index);
        self.up.remove(&index);
        was_link
    }

    /// The indices of the interfaces of all links, ascending.
    pub(super) fn indices(&self) -> Vec<u32> {
        self.by_index.keys().copied().filter(|&index| self.link(index).is_some()).collect()
    }

    /// The link of an interface.
    pub(super) fn link(&self, index: u32) -> Option<Link> {
        self.link_with_tags(index, TAGS_MAX)
    }

    /// The link of an interface if it has at most `tags_max` tags, which also ends the search if VLAN devices refer to
    /// each other.
    fn link_with_tags(&self, index: u32, tags_max: u8) -> Option<Link> {
        match self.by_index.get(&index)?.kind {
            InterfaceKind::Twin(port) => Some(port.into()),
            InterfaceKind::Vlan { lower, tag, id } => {
                let lower = self.link_with_tags(lower, tags_max.checked_sub(1)?)?;
                Some(Link::new(lower.port(), lower.vlan().with(tag, id)?))
            }
        }
    }

    /// The index of the interface of a link.
    pub(super) fn index_of(&self, link: Link) -> Option<u32> {
        self.by_index.keys().copied().find(|&index| self.link(index) == Some(link))
    }

    /// The VLAN devices that are links and up, with their MTU in bytes.
    pub(super) fn vlans(&self) -> impl Iterator<Item = (Link, u16)> {
        let up = self.by_index.iter().filter(|(_, interface)| interface.up);
        up.filter_map(|(&index, interface)| Some((self.link(index).filter(|link| link.is_tagged())?, interface.mtu)))
    }

    fn interface(&self, message: &LinkMessage) -> Option<InterfaceState> {
        let up = message.header.flags.contains(LinkFlags::Up);
        let (mut name, mut lower, mut mtu, mut elsewhere, mut vlan) = (None, None, u16::MAX, false, None);
        let mut promiscuous = false;
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(text) => name = Some(text),
                LinkAttribute::Link(index) => lower = Some(*index),
                LinkAttribute::Mtu(bytes) => mtu = u16::try_from(*bytes).unwrap_or(u16::MAX),
                // The lower interface is in another namespace, and its index is valid only there.
                LinkAttribute::LinkNetNsId(_) => elsewhere = true,
                LinkAttribute::LinkInfo(infos) => vlan = vlan_of(infos),
                LinkAttribute::Promiscuity(wanted_by) => promiscuous = *wanted_by > 0,
                _ => {}
            }
        }
        let twin = name.and_then(|name| self.names.iter().position(|n| n == name)).and_then(|n| u8::try_from(n).ok());
        let kind = match (twin, vlan, lower) {
            (Some(port), ..) => InterfaceKind::Twin(PortIndex(port)),
            (None, Some((tag, id)), Some(lower)) if !elsewhere => InterfaceKind::Vlan { lower, tag, id },
            _ => return None,
        };
        // The MTU of a twin is that of its port and not read here.
        let mtu = if twin.is_some() { 0 } else { mtu };
        Some(InterfaceState { kind, up, mtu, promiscuous: promiscuous && twin.is_some() })
    }
}

/// The tag of a VLAN device.
fn vlan_of(infos: &[LinkInfo]) -> Option<(TagKind, u16)> {
    let is_vlan = infos.iter().any(|info| matches!(info, LinkInfo::Kind(InfoKind::Vlan)));
    let data = infos.iter().find_map(|info| if let LinkInfo::Data(InfoData::Vlan(data)) = info { Some(data) } else { None });
    let data = data.filter(|_| is_vlan)?;
    // Kernels before 3.10 send no protocol, because they know only one.
    let (mut tag, mut id) = (TagKind::Customer, None);
    for info in data {
        match info {
            InfoVlan::Id(number) => id = Some(*number),
            InfoVlan::Protocol(VlanProtocol::Ieee8021Ad) => tag = TagKind::Service,
            _ => {}
        }
    }
    Some((tag, id?))
}

/// The interface with this name, if it exists.
pub(crate) async fn link_named(socket: &mut Socket, name: &str) -> Result<Option<LinkMessage>, NetlinkError> {
    let is_named = |link: &LinkMessage| link.attributes.iter().any(|a| matches!(a, LinkAttribute::IfName(n) if n == name));
    let all = RouteNetlinkMessage::GetLink(LinkMessage::default());
    let found = socket.list(all, "list interfaces", |message| match message {
        RouteNetlinkMessage::NewLink(link) if is_named(link) => Some(link.clone()),
        _ => None,
    });
    Ok(found.await?.pop())
}

/// The address of an interface with its prefix length.
pub(crate) fn interface_address(message: &AddressMessage) -> Option<IpNet> {
    // On a point-to-point interface `Address` is that of the peer.
    let local = message.attributes.iter().find_map(|a| if let AddressAttribute::Local(ip) = a { Some(*ip) } else { None });
    let address = message.attributes.iter().find_map(|a| if let AddressAttribute::Address(ip) = a { Some(*ip) } else { None });
    IpNet::new(local.or(address)?, message.header.prefix_len).ok()
}

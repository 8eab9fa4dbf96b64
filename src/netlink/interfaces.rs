//! Which of Linux's interfaces is which link: twins, and VLAN devices above them, one or two deep.
//!
//! Invariant: a VLAN device is a link only while what it stands on is one; which of them the kernel told of first does not
//! matter. Deliberately not here: what lies on interfaces, and bridges, bonds and macvlans above a twin: they are Linux's own.

use std::collections::BTreeMap;

use dataplane::{Link, PortIndex, TagKind};
use netlink_packet_route::link::{InfoData, InfoKind, InfoVlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, VlanProtocol};

/// VLAN devices followed, at most: all identifiers of one port, beside the twins. Frames of those beyond are Linux's.
const VLANS_MAX: usize = 4096;

/// What an interface is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Twin(PortIndex),
    /// A VLAN device, and the index of the interface that it stands on.
    Vlan {
        lower: u32,
        tag: TagKind,
        id: u16,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Interface {
    kind: Kind,
    up: bool,
    mtu: u16,
    /// It takes frames for other stations: IFLA_PROMISCUITY counts who wants them.
    promiscuous: bool,
}

/// What a message about an interface changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkChange {
    /// Nothing of a link.
    Nothing,
    /// Only whether it takes frames for other stations.
    Promiscuity,
    /// A link came, went, or is another.
    Link,
}

/// Twins, and all VLAN devices.
#[derive(Debug)]
pub(super) struct Interfaces {
    names: Vec<String>,
    known: BTreeMap<u32, Interface>,
}

impl Interfaces {
    /// None yet; the names are those of the twins, which [`PortIndex`] counts.
    pub(super) fn new(names: &[String]) -> Self {
        Self { names: names.to_vec(), known: BTreeMap::new() }
    }

    /// Takes over what an interface is now.
    pub(super) fn apply(&mut self, message: &LinkMessage) -> LinkChange {
        let index = message.header.index;
        let new = self.interface(message);
        let (old, link_before) = (self.known.get(&index).copied(), self.link(index));
        match new {
            Some(_) if old.is_none() && self.known.len() >= VLANS_MAX + self.names.len() => return LinkChange::Nothing,
            Some(interface) => self.known.insert(index, interface),
            None => self.known.remove(&index),
        };
        let is_link = link_before.is_some() || self.link(index).is_some();
        let alike = |a: Interface, b: Interface| Interface { promiscuous: b.promiscuous, ..a } == b;
        match (old, new) {
            _ if old == new || !is_link => LinkChange::Nothing,
            (Some(old), Some(new)) if alike(old, new) => LinkChange::Promiscuity,
            _ => LinkChange::Link,
        }
    }

    /// The ports whose twins take frames for other stations, ordered.
    pub(super) fn promiscuous(&self) -> Vec<PortIndex> {
        let port = |interface: &Interface| match interface.kind {
            Kind::Twin(port) if interface.promiscuous => Some(port),
            Kind::Twin(_) | Kind::Vlan { .. } => None,
        };
        let mut ports: Vec<_> = self.known.values().filter_map(port).collect();
        ports.sort_unstable();
        ports
    }

    /// The indices of the twins.
    pub(super) fn twins(&self) -> Vec<u32> {
        let is_twin = |interface: &Interface| matches!(interface.kind, Kind::Twin(_));
        self.known.iter().filter(|(_, interface)| is_twin(interface)).map(|(&index, _)| index).collect()
    }

    /// An interface is gone. True when it was a link.
    pub(super) fn remove(&mut self, index: u32) -> bool {
        let was_link = self.link(index).is_some();
        self.known.remove(&index);
        was_link
    }

    /// The link that an interface is.
    pub(super) fn link(&self, index: u32) -> Option<Link> {
        let interface = self.known.get(&index)?;
        match interface.kind {
            Kind::Twin(port) => Some(port.into()),
            Kind::Vlan { lower, tag, id } => {
                let lower = self.tagged_once(lower)?;
                Some(Link::new(lower.port(), lower.vlan().with(tag, id)?))
            }
        }
    }

    /// As [`Interfaces::link`], of what a VLAN device may stand on: a twin, or one VLAN device above one.
    fn tagged_once(&self, index: u32) -> Option<Link> {
        match self.known.get(&index)?.kind {
            Kind::Twin(port) => Some(port.into()),
            Kind::Vlan { lower, tag, id } => match self.known.get(&lower)?.kind {
                Kind::Twin(port) => Some(Link::new(port, Link::from(port).vlan().with(tag, id)?)),
                Kind::Vlan { .. } => None,
            },
        }
    }

    /// The index of the interface of a link.
    pub(super) fn index_of(&self, link: Link) -> Option<u32> {
        self.known.keys().copied().find(|&index| self.link(index) == Some(link))
    }

    /// The VLAN devices that are links and up, with their MTU in bytes.
    pub(super) fn vlans(&self) -> impl Iterator<Item = (Link, u16)> {
        let up = self.known.iter().filter(|(_, interface)| interface.up);
        up.filter_map(|(&index, interface)| Some((self.link(index).filter(|link| link.is_tagged())?, interface.mtu)))
    }

    fn interface(&self, message: &LinkMessage) -> Option<Interface> {
        let up = message.header.flags.contains(LinkFlags::Up);
        let (mut name, mut lower, mut mtu, mut elsewhere, mut vlan) = (None, None, u16::MAX, false, None);
        let mut promiscuous = false;
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(text) => name = Some(text),
                LinkAttribute::Link(index) => lower = Some(*index),
                LinkAttribute::Mtu(bytes) => mtu = u16::try_from(*bytes).unwrap_or(u16::MAX),
                // What it stands on is in another namespace, and the index is of there.
                LinkAttribute::LinkNetNsId(_) => elsewhere = true,
                LinkAttribute::LinkInfo(infos) => vlan = vlan_of(infos),
                LinkAttribute::Promiscuity(wanted_by) => promiscuous = *wanted_by > 0,
                _ => {}
            }
        }
        let twin = name.and_then(|name| self.names.iter().position(|n| n == name)).and_then(|n| u8::try_from(n).ok());
        let kind = match (twin, vlan, lower) {
            (Some(port), ..) => Kind::Twin(PortIndex(port)),
            (None, Some((tag, id)), Some(lower)) if !elsewhere => Kind::Vlan { lower, tag, id },
            _ => return None,
        };
        // Nothing is read of a twin's MTU: it is the port's. A VLAN device has what is above it asked of its twin.
        let mtu = if twin.is_some() { 0 } else { mtu };
        Some(Interface { kind, up, mtu, promiscuous: promiscuous && twin.is_some() })
    }
}

/// The tag of a VLAN device.
fn vlan_of(infos: &[LinkInfo]) -> Option<(TagKind, u16)> {
    let is_vlan = infos.iter().any(|info| matches!(info, LinkInfo::Kind(InfoKind::Vlan)));
    let data = infos.iter().find_map(|info| if let LinkInfo::Data(InfoData::Vlan(data)) = info { Some(data) } else { None });
    let data = data.filter(|_| is_vlan)?;
    // Kernels name the protocol since 3.10; before there was but one.
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

//! Links: a port, and the VLAN tags that frames of the link carry there (IEEE 802.1Q, QinQ by IEEE 802.1ad).
//!
//! **Invariant:** what a neighbour, a route or an address is on is a link, never a port alone: the same address may mean
//! different machines on two VLANs of one port. Tags as they stand in frames are in `tags`.

use std::fmt;
use std::num::NonZeroU32;

use crate::PortIndex;
use crate::wire::ether_type;

/// The two kinds of tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TagKind {
    /// A customer tag, EtherType 0x8100 (IEEE 802.1Q).
    Customer,
    /// A service tag, EtherType 0x88a8 (IEEE 802.1ad).
    Service,
}

impl TagKind {
    /// The EtherType before the tag.
    #[must_use]
    pub const fn ether_type(self) -> u16 {
        match self {
            Self::Customer => ether_type::VLAN,
            Self::Service => ether_type::SERVICE_VLAN,
        }
    }

    /// The kind of tag that this EtherType announces.
    #[must_use]
    pub const fn of(ether_type: u16) -> Option<Self> {
        match ether_type {
            ether_type::VLAN => Some(Self::Customer),
            ether_type::SERVICE_VLAN => Some(Self::Service),
            _ => None,
        }
    }
}

/// Bits of one tag: identifier (12) and kind (1). 0 is no tag: identifier 0 names no VLAN (IEEE 802.1Q table 9-2).
const TAG_BITS: u32 = 13;
const SERVICE: u32 = 1 << 12;
const TAG: u32 = (1 << TAG_BITS) - 1;
/// Identifiers that name a VLAN, at most; 4095 is reserved.
const ID_MAX: u16 = 4094;

/// No tag, one, or two: the outer in the high bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Vlan(u32);

impl Vlan {
    /// Untagged.
    pub const NONE: Self = Self(0);

    /// With one more tag inside those there are. None when there are two, or when the identifier is not in 1-4094.
    #[must_use]
    pub const fn with(self, kind: TagKind, id: u16) -> Option<Self> {
        if id == 0 || id > ID_MAX {
            return None;
        }
        let tag = match kind {
            TagKind::Customer => id as u32,
            TagKind::Service => SERVICE | id as u32,
        };
        match (self.0 >> TAG_BITS, self.0 & TAG) {
            (0, _) => Some(Self(tag << TAG_BITS)),
            (outer, 0) => Some(Self(outer << TAG_BITS | tag)),
            _ => None,
        }
    }

    /// The tags, the outer first.
    pub fn tags(self) -> impl Iterator<Item = (TagKind, u16)> {
        [self.0 >> TAG_BITS, self.0 & TAG].into_iter().filter(|tag| *tag != 0).map(|tag| {
            let kind = if tag & SERVICE == 0 { TagKind::Customer } else { TagKind::Service };
            (kind, (tag & (SERVICE - 1)) as u16)
        })
    }
}

/// As Linux's tools show it: `100`, or `100.7` for a tag within a tag.
impl fmt::Display for Vlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tags().enumerate().try_for_each(|(n, (_, id))| if n == 0 { write!(f, "{id}") } else { write!(f, ".{id}") })
    }
}

/// A port and VLAN tags, in one word that is compared at once: port (5 bits: DPDK has 32), tags (26 bits), and a 1.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Link(NonZeroU32);

const PORT_SHIFT: u32 = 2 * TAG_BITS + 1;

impl Link {
    /// The frames of a port that carry these tags.
    #[must_use]
    pub fn new(port: PortIndex, vlan: Vlan) -> Self {
        Self(NonZeroU32::MIN | u32::from(port.0) << PORT_SHIFT | vlan.0 << 1)
    }

    /// The port.
    #[must_use]
    pub fn port(self) -> PortIndex {
        PortIndex((self.0.get() >> PORT_SHIFT) as u8)
    }

    /// The tags.
    #[must_use]
    pub fn vlan(self) -> Vlan {
        Vlan(self.0.get() >> 1 & ((1 << (2 * TAG_BITS)) - 1))
    }

    /// In 16 bits, to tell links apart where a rare mistake does no harm.
    #[must_use]
    pub(crate) fn folded(self) -> u16 {
        let [a, b, c, d] = self.0.get().to_be_bytes();
        u16::from_be_bytes([a, b]) ^ u16::from_be_bytes([c, d])
    }

    /// Whether its frames carry tags.
    #[must_use]
    pub fn is_tagged(self) -> bool {
        self.vlan() != Vlan::NONE
    }
}

/// The port's untagged frames.
impl From<PortIndex> for Link {
    fn from(port: PortIndex) -> Self {
        Self::new(port, Vlan::NONE)
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Link({}", self.port().0)?;
        if self.is_tagged() { write!(f, " vlan {})", self.vlan()) } else { f.write_str(")") }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_link_has_at_most_two_tags_of_valid_identifiers() {
        let outer = Vlan::NONE.with(TagKind::Service, 7).unwrap();
        let both = outer.with(TagKind::Customer, 100).unwrap();
        assert_eq!(both.tags().collect::<Vec<_>>(), [(TagKind::Service, 7), (TagKind::Customer, 100)]);
        assert_eq!((both.with(TagKind::Customer, 1), outer.with(TagKind::Customer, 0)), (None, None));
        assert_eq!(Vlan::NONE.with(TagKind::Customer, 4095), None);
        assert_eq!((outer.to_string(), both.to_string()), ("7".to_owned(), "7.100".to_owned()));
        assert_eq!(size_of::<Option<Link>>(), 4);
    }

    proptest! {
        #[test]
        fn links_are_equal_when_port_and_tags_are(
            ports in any::<[bool; 2]>(), ids in any::<[[bool; 2]; 2]>(), kinds in any::<[[bool; 2]; 2]>(),
        ) {
            let kind = |service| if service { TagKind::Service } else { TagKind::Customer };
            let link = |n: usize| {
                let tags = [0, 1].map(|t| (kind(kinds[n][t]), if ids[n][t] { 4094 } else { 1 }));
                let vlan = Vlan::NONE.with(tags[0].0, tags[0].1).unwrap().with(tags[1].0, tags[1].1).unwrap();
                (Link::new(PortIndex(u8::from(ports[n]) * 31), vlan), ports[n], tags)
            };
            let (a, b) = (link(0), link(1));
            prop_assert_eq!(a.0 == b.0, (a.1, a.2) == (b.1, b.2));
            prop_assert_eq!(a.0.port(), PortIndex(u8::from(ports[0]) * 31));
            prop_assert_eq!(a.0.vlan().tags().collect::<Vec<_>>(), a.2);
        }
    }
}

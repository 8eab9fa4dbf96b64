//! Links: a port, and the VLAN tags that frames of the link carry there (IEEE 802.1Q, QinQ by IEEE 802.1ad).
//!
//! **Invariant:** neighbours, routes and addresses belong to a link, never to a port alone: the same address may be
//! different machines on two VLANs of one port.
//!
//! Not here: tags in the bytes of a frame (`wire`).

use std::fmt;
use std::num::NonZeroU32;

use crate::wire::{Tags, Vlan};

/// Position of a port in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortIndex(pub u8);

/// A port and its VLAN tags in one word, so that links compare in one operation: port (5 bits, since DPDK has 32), tags
/// (26 bits), and a 1.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Link(NonZeroU32);

const PORT_SHIFT: u32 = Vlan::BITS + 1;

impl Link {
    /// The link of no frame: its tags would have the identifier 4095, which is not valid.
    pub(crate) const NONE: Self = Self(NonZeroU32::MAX);

    /// The link of frames with these tags on a port.
    #[must_use]
    pub fn new(port: PortIndex, vlan: Vlan) -> Self {
        Self(NonZeroU32::MIN | u32::from(port.0) << PORT_SHIFT | vlan.bits() << 1)
    }

    /// The port.
    #[must_use]
    pub fn port(self) -> PortIndex {
        PortIndex((self.0.get() >> PORT_SHIFT) as u8)
    }

    /// The tags.
    #[must_use]
    pub fn vlan(self) -> Vlan {
        Vlan::from_bits(self.0.get() >> 1)
    }

    /// The link folded to 16 bits, for uses in which a rare collision does no harm.
    #[must_use]
    pub(crate) fn folded(self) -> u16 {
        let [a, b, c, d] = self.0.get().to_be_bytes();
        u16::from_be_bytes([a, b]) ^ u16::from_be_bytes([c, d])
    }

    /// The tags of frames that leave by it. Their priority is 0, as in frames of the kernel: the priority belongs to
    /// one link, and what is passed from link to link is the DSCP.
    #[must_use]
    pub(crate) fn tags(self) -> Tags {
        Tags::of_vlan(self.vlan())
    }

    /// Whether its frames carry tags.
    #[must_use]
    pub fn is_tagged(self) -> bool {
        self.vlan() != Vlan::NONE
    }
}

/// The link of a port's untagged frames.
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
    use crate::wire::TagKind;

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

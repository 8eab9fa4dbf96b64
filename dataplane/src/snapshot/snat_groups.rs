//! The SNAT addresses of one family where each belongs to a VIP group (docs/internals/decisions/0060-shadow-flows.md).
//!
//! **Invariant:** a new flow to a VIP of a group gets a SNAT address of the same group, so that both move together to
//! another gateway.
//!
//! Not here: which groups this gateway owns.

use super::input::OwnedGroups;
use crate::flow::SnatAddress;

/// Which SNAT addresses belong to which group, and those that this gateway owns.
#[derive(Clone, Debug)]
pub(crate) struct SnatGroups<A> {
    /// All addresses, each with its group.
    addresses: Box<[(A, u8)]>,
    /// By link as in [`super::FamilyTables`].
    by_link: Box<[AddressesOfLink<A>]>,
}

/// The owned addresses that serve one link.
#[derive(Clone, Debug)]
struct AddressesOfLink<A> {
    all: Box<[SnatAddress<A>]>,
    /// By group; none of groups that other gateways own.
    by_group: Box<[Box<[SnatAddress<A>]>]>,
}

impl<A: Copy + Ord> SnatGroups<A> {
    pub(crate) fn new(by_link: &[Box<[SnatAddress<A>]>], owned: OwnedGroups) -> Self {
        let groups = owned.groups.max(1);
        let mut addresses: Vec<(A, u8)> =
            by_link.iter().flatten().map(|snat| (snat.address, snat_group(snat.index, groups))).collect();
        addresses.sort_unstable();
        addresses.dedup();
        let of_link = |addresses: &[SnatAddress<A>]| {
            let of = |wanted: u8| {
                let is_of = |snat: &&SnatAddress<A>| owned.has(wanted) && snat_group(snat.index, groups) == wanted;
                addresses.iter().filter(is_of).copied().collect::<Box<[_]>>()
            };
            let all = addresses.iter().filter(|snat| owned.has(snat_group(snat.index, groups)));
            AddressesOfLink { all: all.copied().collect(), by_group: (0..groups).map(of).collect() }
        };
        Self { addresses: addresses.into(), by_link: by_link.iter().map(|addresses| of_link(addresses)).collect() }
    }

    /// All SNAT addresses, each with its group.
    pub(crate) fn addresses(&self) -> &[(A, u8)] {
        &self.addresses
    }

    /// The owned addresses of a group that serve a link; without a group those of all groups.
    pub(crate) fn of(&self, link: usize, group: Option<u8>) -> &[SnatAddress<A>] {
        let Some(of_link) = self.by_link.get(link) else { return &[] };
        match group {
            Some(group) => of_link.by_group.get(usize::from(group)).map_or(&[], AsRef::as_ref),
            None => &of_link.all,
        }
    }

    /// The group of an address; `None` if it is no SNAT address.
    pub(crate) fn group_of(&self, address: A) -> Option<u8> {
        self.addresses.iter().find(|(snat, _)| *snat == address).map(|(_, group)| *group)
    }
}

/// The group of the SNAT address at this position of its family.
pub(crate) fn snat_group(index: u16, groups: u8) -> u8 {
    u8::try_from(index % u16::from(groups.max(1))).unwrap_or(0)
}

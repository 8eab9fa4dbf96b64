//! The SNAT addresses of one family where the first ones belong to VIP groups, one to each
//! (docs/internals/decisions/0060-shadow-flows.md). Further addresses are the gateway's own, and never move.
//!
//! **Invariant:** a new flow to a VIP of a group gets a SNAT address of the same group, so that both move together to
//! another gateway.
//!
//! Not here: the groups that this gateway owns.

use std::sync::Arc;

use super::input::OwnedGroups;
use crate::flow::{FlowGroups, SnatAddress};
use crate::wire::Address;

/// Which SNAT addresses belong to which group, and those that this gateway uses.
#[derive(Clone, Debug)]
pub(crate) struct SnatGroups<A> {
    /// The groups of all flows.
    flows: FlowGroups<A>,
    /// By link as in [`super::FamilyTables`].
    by_link: Box<[AddressesOfLink<A>]>,
}

/// The addresses that serve one link.
#[derive(Clone, Debug)]
struct AddressesOfLink<A> {
    /// For VIPs that no election moves: this gateway's own addresses, or without one those of all groups that it owns.
    unelected: Box<[SnatAddress<A>]>,
    /// By group; none of groups that other gateways own.
    by_group: Box<[Box<[SnatAddress<A>]>]>,
}

impl<A: Address + Ord> SnatGroups<A> {
    /// `unelected`: ranges of the VIPs that no election moves, sorted, without overlaps.
    pub(crate) fn new(by_link: &[Box<[SnatAddress<A>]>], owned: OwnedGroups, unelected: Arc<[(A, A)]>) -> Self {
        let groups = owned.groups.max(1);
        let group = |snat: &SnatAddress<A>| snat_group(snat.index, groups);
        let of_groups = by_link.iter().flatten().filter_map(|snat| Some((snat.address, group(snat)?)));
        let mut addresses: Vec<(A, u8)> = of_groups.collect();
        addresses.sort_unstable();
        addresses.dedup();
        let of_link = |addresses: &[SnatAddress<A>]| {
            let those = |is_wanted: &dyn Fn(Option<u8>) -> bool| {
                addresses.iter().filter(|snat| is_wanted(group(snat))).copied().collect::<Box<[_]>>()
            };
            let own = those(&|group| group.is_none());
            let unelected = if own.is_empty() { those(&|group| group.is_some_and(|group| owned.has(group))) } else { own };
            let of = |wanted: u8| those(&|group| group == Some(wanted) && owned.has(wanted));
            AddressesOfLink { unelected, by_group: (0..groups).map(of).collect() }
        };
        let by_link = by_link.iter().map(|addresses| of_link(addresses)).collect();
        Self { flows: FlowGroups::new(groups, &addresses, unelected), by_link }
    }

    /// The groups of flows.
    pub(crate) const fn flows(&self) -> &FlowGroups<A> {
        &self.flows
    }

    /// The addresses for new flows to a VIP of this group that serve a link; `None`: no election moves the VIP.
    pub(crate) fn of(&self, link: usize, group: Option<u8>) -> &[SnatAddress<A>] {
        let Some(of_link) = self.by_link.get(link) else { return &[] };
        match group {
            Some(group) => of_link.by_group.get(usize::from(group)).map_or(&[], AsRef::as_ref),
            None => &of_link.unelected,
        }
    }
}

/// The group of the SNAT address at this position of its family; `None`: it is the gateway's own.
pub(crate) fn snat_group(index: u16, groups: u8) -> Option<u8> {
    u8::try_from(index).ok().filter(|group| *group < groups.max(1))
}

//! The VIP groups of flows, and which of them this gateway owns, has just taken over, or has just lost.
//!
//! **Invariant:** a flow belongs to one group: in mode `nat` to that of its SNAT address, otherwise to that of its VIP.
//!
//! Not here: leases, and for how long a group counts as just taken over (`forward::worker`).

use std::sync::Arc;

use proto::vip_group;

use crate::flow::entry::Flow;
use crate::flow::snat::SNAT_ADDRESSES_MAX;
use crate::flow::state::FlowMode;
use crate::wire::Address;

/// Groups as bits: bit n stands for group n.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupHoldings {
    /// The groups that this gateway owns.
    pub(crate) owned: u64,
    /// The part of them that it took over so recently that partners may still send flows of them.
    pub(crate) taken: u64,
    /// The groups that it lost so recently that the next owner may not know all flows yet.
    pub(crate) lost: u64,
}

/// The owner of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupHolder {
    /// This gateway, and no partner knows its flows.
    Settled,
    /// This gateway, since a moment ago: partners may still send flows.
    JustTaken,
    /// Another gateway.
    Other,
}

const fn has(groups: u64, group: u8) -> bool {
    matches!(groups.checked_shr(group as u32), Some(bits) if bits & 1 == 1)
}

/// The VIP groups of flows, and which of them this gateway owns at present.
#[derive(Clone, Debug)]
pub(crate) struct FlowGroups<A> {
    /// Number of groups; 0: there are none, and every flow is this gateway's own.
    groups: u8,
    holdings: GroupHoldings,
    /// The SNAT addresses that belong to groups, each with its group.
    snat: arrayvec::ArrayVec<(A, u8), { SNAT_ADDRESSES_MAX as usize }>,
    /// Ranges of the VIPs that no election moves, as first and last address, sorted, without overlaps.
    unelected: Arc<[(A, A)]>,
}

impl<A: Address> FlowGroups<A> {
    /// No groups: every flow is this gateway's own.
    pub(crate) fn none() -> Self {
        Self { groups: 0, holdings: GroupHoldings::default(), snat: arrayvec::ArrayVec::new_const(), unelected: Arc::default() }
    }

    /// These groups, with the SNAT addresses that belong to them, and the VIPs that no election moves. It owns none
    /// yet.
    pub(crate) fn new(groups: u8, snat: &[(A, u8)], unelected: Arc<[(A, A)]>) -> Self {
        let snat = snat.iter().copied().take(SNAT_ADDRESSES_MAX.into()).collect();
        Self { groups, holdings: GroupHoldings::default(), snat, unelected }
    }

    /// The same groups while this gateway holds some of them.
    pub(crate) fn holding(&self, holdings: GroupHoldings) -> Self {
        Self { holdings, ..self.clone() }
    }

    /// The group of a SNAT address; `None`: it belongs to no group.
    pub(crate) fn group_of_snat(&self, snat: A) -> Option<u8> {
        self.snat.iter().find(|(address, _)| *address == snat).map(|(_, group)| *group)
    }

    /// The group of a VIP; `None`: no election moves it.
    pub(crate) fn group_of_vip(&self, vip: A) -> Option<u8> {
        let after = self.unelected.partition_point(|(first, _)| *first <= vip);
        let is_unelected = after.checked_sub(1).is_some_and(|at| vip <= self.unelected[at].1);
        (!is_unelected).then(|| vip_group(vip.ip(), self.groups))
    }

    /// The owner of a group.
    pub(crate) fn holder(&self, group: u8) -> GroupHolder {
        match (self.groups, self.holdings) {
            (0, _) => GroupHolder::Settled,
            (_, GroupHoldings { owned, .. }) if !has(owned, group) => GroupHolder::Other,
            (_, GroupHoldings { taken, .. }) if has(taken, group) => GroupHolder::JustTaken,
            _ => GroupHolder::Settled,
        }
    }

    /// The group of a flow; `None`: no election moves the flow, so that each gateway has its own.
    fn group_of(&self, flow: &Flow<A>) -> Option<u8> {
        if flow.mode == FlowMode::Nat { self.group_of_snat(flow.snat) } else { self.group_of_vip(flow.vip) }
    }

    /// Whether this gateway owns a flow.
    pub(super) fn own(&self, flow: &Flow<A>) -> bool {
        self.groups == 0 || self.group_of(flow).is_none_or(|group| has(self.holdings.owned, group))
    }

    /// Whether partners are sent a flow: this gateway owns it, and another one could take it over.
    pub(super) fn share(&self, flow: &Flow<A>) -> bool {
        self.groups == 0 || self.group_of(flow).is_some_and(|group| has(self.holdings.owned, group))
    }

    /// Whether partners are sent a flow that they do not know: also a flow of a group that this gateway has just lost.
    pub(super) fn share_first(&self, flow: &Flow<A>) -> bool {
        self.share(flow) || self.lost_group_of(flow)
    }

    /// Whether this gateway has just lost the group of a flow.
    pub(super) fn lost_group_of(&self, flow: &Flow<A>) -> bool {
        self.group_of(flow).is_some_and(|group| has(self.holdings.lost, group))
    }

    /// Whether this gateway took over the group of a flow a moment ago.
    pub(super) fn await_news_of(&self, flow: &Flow<A>) -> bool {
        self.group_of(flow).is_some_and(|group| self.holder(group) == GroupHolder::JustTaken)
    }

    /// Whether this gateway has just lost a group.
    pub(super) const fn have_lost(&self) -> bool {
        self.holdings.lost != 0
    }
}

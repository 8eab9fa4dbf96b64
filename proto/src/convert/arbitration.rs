//! Messages about VIP groups that several gateways claim.

use crate::{Arbitration, GroupClaims, v1};

impl From<GroupClaims> for v1::GroupClaims {
    fn from(GroupClaims { groups, link, hears_link, rank, keeps, number }: GroupClaims) -> Self {
        Self { groups, link, hears_link, rank: rank.into(), keeps, number }
    }
}

impl From<v1::GroupClaims> for GroupClaims {
    fn from(v1::GroupClaims { groups, link, hears_link, rank, keeps, number }: v1::GroupClaims) -> Self {
        Self { groups, link, hears_link, rank: u8::try_from(rank).unwrap_or(u8::MAX), keeps, number }
    }
}

impl From<Arbitration> for v1::Arbitration {
    fn from(Arbitration { contested, keeps, yields, answers }: Arbitration) -> Self {
        Self { contested, keeps, yields, answers }
    }
}

impl From<v1::Arbitration> for Arbitration {
    fn from(v1::Arbitration { contested, keeps, yields, answers }: v1::Arbitration) -> Self {
        Self { contested, keeps, yields, answers }
    }
}

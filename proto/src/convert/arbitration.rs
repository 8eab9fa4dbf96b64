//! Messages about VIP groups that several gateways claim.

use crate::{Arbitration, GroupClaims, v1};

impl From<GroupClaims> for v1::GroupClaims {
    fn from(GroupClaims { groups, link, hears_link }: GroupClaims) -> Self {
        Self { groups, link, hears_link }
    }
}

impl From<v1::GroupClaims> for GroupClaims {
    fn from(v1::GroupClaims { groups, link, hears_link }: v1::GroupClaims) -> Self {
        Self { groups, link, hears_link }
    }
}

impl From<Arbitration> for v1::Arbitration {
    fn from(Arbitration { contested, keeps, yields }: Arbitration) -> Self {
        Self { contested, keeps, yields }
    }
}

impl From<v1::Arbitration> for Arbitration {
    fn from(v1::Arbitration { contested, keeps, yields }: v1::Arbitration) -> Self {
        Self { contested, keeps, yields }
    }
}

//! Messages about who replicates flows with whom.

use crate::limits::PARTNERS_MAX;
use crate::{GroupKey, Member, Membership, v1};

impl From<&Membership> for v1::Membership {
    fn from(membership: &Membership) -> Self {
        let member = |one: &Member| v1::Member { gateway: one.gateway.clone(), replication: one.replication.to_string() };
        Self {
            key: Some(v1::GroupKey { key: membership.key.bytes().to_vec() }),
            others: membership.others.iter().map(member).collect(),
        }
    }
}

/// Reads a message; `None` without a key of this version. Addresses of a form that only a newer version knows are left
/// out.
#[must_use]
pub fn membership(message: v1::Membership) -> Option<Membership> {
    let key = GroupKey::new(message.key?.key.try_into().ok()?);
    let member = |one: v1::Member| Some(Member { replication: one.replication.parse().ok()?, gateway: one.gateway });
    Some(Membership { key, others: message.others.into_iter().filter_map(member).take(PARTNERS_MAX).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_membership_reads_back_and_a_key_of_another_length_is_none() {
        let others = vec![Member { gateway: "edge-2".to_owned(), replication: "192.0.2.3:9437".parse().unwrap() }];
        let known = Membership { key: GroupKey::new([251; 32]), others };
        let message = v1::Membership::from(&known);
        assert!(!format!("{message:?}").contains("251"), "{message:?}");
        assert_eq!(membership(message.clone()), Some(known.clone()));
        let unknown = v1::Member { gateway: "edge-3".to_owned(), replication: "somewhere".to_owned() };
        let newer = v1::Membership { others: message.others.iter().cloned().chain([unknown]).collect(), ..message.clone() };
        assert_eq!(membership(newer), Some(known));
        assert_eq!(membership(v1::Membership { key: Some(v1::GroupKey { key: vec![251; 31] }), ..message }), None);
    }
}

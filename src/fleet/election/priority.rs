//! The VRRP priority of this gateway in each group.
//!
//! | gateway | priority |
//! |---|---|
//! | owns the group and keeps it | 200 to 249 |
//! | is fit | 150 to 199 |
//! | is unfit: without link or healthy backends | 100 to 149 |
//! | leaves: drained, or about to end | 50 to 99 |
//! | joins: waits for a state, for neighbours or for the flows of its partners | 1 to 50 |
//!
//! One that joins comes last: a drained gateway still forwards, and one that ends resigns in the end.
//!
//! Within a row a hash of the gateway's name and the group decides, so the groups spread over gateways that start
//! together. An owner keeps its groups by its priority, not by keepalived's `nopreempt`, with which a fit gateway would
//! leave them to an unfit owner.
//!
//! Invariant: priorities are 1 to 254, as VRRP has them for gateways that do not own the address (RFC 9568 section
//! 5.2.4). Not here: who wins (keepalived).

use proto::fnv1a;

/// Lowest priority of a fit gateway.
const FIT: u8 = 150;
/// Number of priorities in a row of the table.
const STEPS: u64 = 50;
/// Added for groups that this gateway owns and keeps.
const KEEPS: i16 = 50;
/// Added for an unfit gateway.
const UNFIT: i16 = -50;
/// Added for a gateway that leaves: any other one that has joined is better.
const LEAVES: i16 = -100;
/// Added for a gateway that joins.
const JOINS: i16 = -149;

/// Whether a gateway should own VIPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fitness {
    Fit,
    /// It lacks something; the reason.
    Unfit(&'static str),
    /// It is drained, and gives its groups away one after another.
    Drained,
    /// It gives all groups away at once; the reason.
    Leaves(&'static str),
    /// It does not yet have what it forwards by; the reason.
    Joins(&'static str),
}

impl Fitness {
    /// Why it should own none, if it should not.
    pub(super) const fn problem(self) -> Option<&'static str> {
        match self {
            Self::Fit => None,
            Self::Drained => Some("it is drained"),
            Self::Unfit(why) | Self::Leaves(why) | Self::Joins(why) => Some(why),
        }
    }
}

/// The priority of a fit gateway that does not own the group.
pub(super) fn base(gateway: &str, group: u8) -> u8 {
    let mut name = gateway.as_bytes().to_vec();
    name.push(group);
    // The low bits of FNV-1a depend on the low bits of the last byte only.
    FIT + u8::try_from((fnv1a(&name) >> 32) % STEPS).unwrap_or(0)
}

/// What is added to [`base`].
pub(super) const fn addition(fitness: Fitness, keeps: bool) -> i16 {
    match (fitness, keeps) {
        (Fitness::Joins(_), _) => JOINS,
        (Fitness::Leaves(_) | Fitness::Drained, _) => LEAVES,
        (Fitness::Unfit(_), _) => UNFIT,
        (Fitness::Fit, true) => KEEPS,
        (Fitness::Fit, false) => 0,
    }
}

/// How fit a gateway is, whatever the group: the lowest priority of its row.
pub(super) fn rank(fitness: Fitness) -> u8 {
    u8::try_from(i16::from(FIT) + addition(fitness, false)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_keeps_its_groups_unless_it_is_unfit_and_one_that_leaves_gives_them_to_any_that_has_joined() {
        let (unfit, leaves, joins) = (Fitness::Unfit("no link"), Fitness::Leaves("it ends"), Fitness::Joins("no state"));
        for group in 0..64 {
            let of = |name, fitness, keeps| i16::from(base(name, group)) + addition(fitness, keeps);
            for (one, other) in [("a", "b"), ("b", "a"), ("edge-1", "edge-2")] {
                assert!(of(one, Fitness::Fit, true) > of(other, Fitness::Fit, false));
                assert!(of(one, Fitness::Fit, false) > of(other, unfit, true));
                assert!(of(one, unfit, false) > of(other, leaves, true));
                assert!(of(one, unfit, false) > of(other, Fitness::Drained, true));
                assert!(of(one, leaves, false) >= of(other, joins, true) && of(one, unfit, true) > of(other, joins, false));
                assert!((1..=254).contains(&of(one, joins, false)) && (1..=254).contains(&of(one, Fitness::Fit, true)));
            }
        }
    }

    #[test]
    fn ranks_have_the_order_of_the_priorities() {
        let worse = [Fitness::Fit, Fitness::Unfit("no link"), Fitness::Leaves("it ends"), Fitness::Joins("no state")];
        assert_eq!(worse.map(rank), [150, 100, 50, 1]);
        assert_eq!(rank(Fitness::Drained), 50);
    }

    #[test]
    fn groups_spread_over_the_gateways() {
        for count in 2..=8_usize {
            let names: Vec<_> = (1..=count).map(|n| format!("edge-{n}")).collect();
            let mut owned = vec![0_usize; count];
            for group in 0..64 {
                let winner = (0..count).max_by_key(|&n| base(&names[n], group)).unwrap();
                owned[winner] += 1;
            }
            assert!(owned.iter().all(|&groups| groups >= 64 / count / 3), "{count} gateways: {owned:?}");
        }
    }
}

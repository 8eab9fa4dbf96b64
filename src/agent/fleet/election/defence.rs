//! What other gateways claimed although this one owns it: addresses that they announced, and groups that they
//! advertised with a lower priority. This gateway announces them again, because switches, clients and backends may send to
//! the others now, until their neighbour entries expire.
//!
//! Two gateways own a group while they do not hear each other: in a partition, or when one has just lost its link. The
//! loser ends without a word, so nobody else corrects what it announced.
//!
//! Invariant: nothing is announced before the wait is over, by when the next owner has the group if it is a takeover, and
//! no claim is answered more than once in [`DEFENCE`]. Not here: whether this gateway still owns what was claimed (the
//! snapshot), and gateways without an election (`duplicates`).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use dataplane::VipAnswers;

/// Minimum time between two defences.
const DEFENCE: Duration = Duration::from_secs(10);

/// What another gateway claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Claimed {
    /// It announced this address.
    Address(IpAddr),
    /// It advertised this group.
    Group(u8),
}

/// Claims to be answered, and those that were.
#[derive(Debug, Default)]
pub(super) struct Defence {
    /// When each is due, ns.
    due: BTreeMap<Claimed, u64>,
    /// When each was answered last, ns.
    answered: BTreeMap<Claimed, u64>,
}

impl Defence {
    /// Notes a claim, to be answered after a wait.
    pub(super) fn note(&mut self, claimed: Claimed, now_ns: u64, wait_ns: u64) {
        let pause_ns = u64::try_from(DEFENCE.as_nanos()).unwrap_or(u64::MAX);
        let earliest = self.answered.get(&claimed).map_or(0, |answered| answered.saturating_add(pause_ns));
        self.due.entry(claimed).or_insert_with(|| earliest.max(now_ns.saturating_add(wait_ns)));
        self.answered.retain(|_, answered| now_ns.saturating_sub(*answered) < pause_ns);
    }

    /// Whether something is to be announced again.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        self.due.values().any(|due| *due <= now_ns)
    }

    /// Has what is due announced again.
    pub(super) fn apply(&mut self, answers: &mut VipAnswers, now_ns: u64) {
        let due: Vec<_> = self.due.iter().filter(|(_, due)| **due <= now_ns).map(|(claimed, _)| *claimed).collect();
        for claimed in &due {
            self.due.remove(claimed);
            self.answered.insert(*claimed, now_ns);
            let count = match claimed {
                Claimed::Address(address) => answers.defended.entry(*address).or_default(),
                Claimed::Group(group) => answers.defended_groups.entry(*group).or_default(),
            };
            *count += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn a_claim_is_answered_after_the_wait_and_then_once_in_ten_seconds() {
        let (mut defence, mut answers) = (Defence::default(), VipAnswers::default());
        let claimed = [Claimed::Address("192.0.2.100".parse().unwrap()), Claimed::Group(3)];
        claimed.into_iter().for_each(|claimed| defence.note(claimed, 0, 300));
        assert!(!defence.is_due(299));
        defence.note(claimed[1], 299, 300);
        assert!(defence.is_due(300), "the first claim counts");
        defence.apply(&mut answers, 300);
        assert_eq!((answers.defended.values().sum::<u64>(), answers.defended_groups[&3]), (1, 1));
        assert!(!defence.is_due(SECOND_NS));
        defence.note(claimed[1], SECOND_NS, 300);
        assert!(!defence.is_due(9 * SECOND_NS));
        defence.apply(&mut answers, 10 * SECOND_NS + 300);
        let counts = (answers.defended.values().sum::<u64>(), answers.defended_groups[&3]);
        assert_eq!(counts, (1, 2), "a claim within the pause is not forgotten");
    }
}

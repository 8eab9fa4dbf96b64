//! The defence of groups that another gateway claimed although this one owns them: it announced one of their addresses,
//! asked for one because it has lost it, or advertised the group with a lower priority. This gateway announces them
//! again, because switches, clients and backends may send to the other one now, until their neighbour entries expire.
//!
//! Two gateways own a group while they do not hear each other: in a partition, or when one has just lost its link. The
//! loser ends without a word, so nobody else corrects what it announced.
//!
//! Invariant: nothing is announced before the wait is over, by when the next owner has the group if it is a takeover, and
//! no claim is answered more than once in [`DEFENCE`]. Two owners that hear each other's announcements, but no VRRP, do
//! not go on for ever: once an announcement was answered, further ones are left alone for [`CONFLICT`] (RFC 5227 section
//! 2.4 (c)). A decision of the controller ends the conflict, and is announced at once.
//! Not here: whether this gateway still owns what was claimed (the snapshot), and gateways without an election
//! (`duplicates`).

use std::collections::BTreeMap;
use std::time::Duration;

use dataplane::VipAnswers;
use proto::limits::VIP_GROUPS_MAX;

/// Minimum time between two defences.
const DEFENCE: Duration = Duration::from_secs(10);
/// Minimum time between a defence and one against an announcement, whose sender may believe to own the group, too.
const CONFLICT: Duration = Duration::from_secs(60);

/// Claims to be answered, and those that were.
#[derive(Debug, Default)]
pub(super) struct Defence {
    /// When each group is due, ns.
    due: BTreeMap<u8, u64>,
    /// When each was defended last, ns.
    answered: BTreeMap<u8, u64>,
    /// Contested groups that this gateway keeps, as decided.
    kept: u64,
}

impl Defence {
    /// Notes that another gateway asked for an address of a group, or advertised the group with a lower priority. The
    /// group is announced after a wait.
    pub(super) fn note(&mut self, group: u8, now_ns: u64, wait_ns: u64) {
        let earliest = self.answered.get(&group).map_or(0, |answered| answered.saturating_add(ns(DEFENCE)));
        self.due.entry(group).or_insert_with(|| earliest.max(now_ns.saturating_add(wait_ns)));
        self.answered.retain(|_, answered| now_ns.saturating_sub(*answered) < ns(CONFLICT));
    }

    /// Notes that another gateway announced an address of a group.
    pub(super) fn note_announcement(&mut self, group: u8, now_ns: u64, wait_ns: u64) {
        if self.answered.get(&group).is_none_or(|answered| now_ns.saturating_sub(*answered) >= ns(CONFLICT)) {
            self.note(group, now_ns, wait_ns);
        }
    }

    /// Takes what the controller lets this gateway keep. What is new is announced after one wait, whatever was announced
    /// before: the others have announced it meanwhile.
    pub(super) fn keep(&mut self, groups: u64, now_ns: u64, wait_ns: u64) {
        let at_ns = now_ns.saturating_add(wait_ns);
        for group in each(groups & !self.kept) {
            self.due.entry(group).and_modify(|due| *due = at_ns.min(*due)).or_insert(at_ns);
        }
        self.kept = groups;
    }

    /// Whether something is to be announced again.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        self.due.values().any(|due| *due <= now_ns)
    }

    /// Has what is due announced again.
    pub(super) fn apply(&mut self, answers: &mut VipAnswers, now_ns: u64) {
        let due: Vec<_> = self.due.iter().filter(|(_, due)| **due <= now_ns).map(|(group, _)| *group).collect();
        for group in due {
            self.due.remove(&group);
            self.answered.insert(group, now_ns);
            *answers.defended_groups.entry(group).or_default() += 1;
        }
    }
}

/// The groups of a set.
pub(super) fn each(groups: u64) -> impl Iterator<Item = u8> {
    (0..VIP_GROUPS_MAX).filter(move |group| groups & 1 << group != 0)
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;
    const WAIT_NS: u64 = 300;

    /// How often a group was defended by then.
    fn defended(defence: &mut Defence, answers: &mut VipAnswers, now_ns: u64) -> u64 {
        defence.apply(answers, now_ns);
        answers.defended_groups.values().sum()
    }

    #[test]
    fn a_claim_is_answered_after_the_wait_and_then_once_in_ten_seconds() {
        let (mut defence, mut answers) = (Defence::default(), VipAnswers::default());
        defence.note(3, 0, WAIT_NS);
        assert!(!defence.is_due(WAIT_NS - 1));
        defence.note(3, WAIT_NS - 1, WAIT_NS);
        assert!(defence.is_due(WAIT_NS), "the first claim counts");
        assert_eq!(defended(&mut defence, &mut answers, WAIT_NS), 1);
        assert!(!defence.is_due(SECOND_NS));
        defence.note(3, SECOND_NS, WAIT_NS);
        assert!(!defence.is_due(9 * SECOND_NS));
        assert_eq!(defended(&mut defence, &mut answers, 10 * SECOND_NS + WAIT_NS), 2, "it was not forgotten");
    }

    #[test]
    fn a_decision_is_announced_although_the_group_was_announced_just_before() {
        let (mut defence, mut answers) = (Defence::default(), VipAnswers::default());
        defence.note(3, 0, WAIT_NS);
        assert_eq!(defended(&mut defence, &mut answers, WAIT_NS), 1);
        defence.note(3, SECOND_NS, WAIT_NS);
        defence.keep(1 << 3, SECOND_NS, WAIT_NS);
        assert_eq!(defended(&mut defence, &mut answers, SECOND_NS + WAIT_NS), 2);
        defence.keep(1 << 3, 2 * SECOND_NS, WAIT_NS);
        assert_eq!(defended(&mut defence, &mut answers, 3 * SECOND_NS), 2, "the same decision");
        defence.keep(0, 3 * SECOND_NS, WAIT_NS);
        defence.keep(1 << 3, 4 * SECOND_NS, WAIT_NS);
        assert_eq!(defended(&mut defence, &mut answers, 4 * SECOND_NS + WAIT_NS), 3, "a second one");
    }

    #[test]
    fn two_owners_that_hear_each_others_announcements_end_it_after_one_answer_each() {
        let mut owners = [Defence::default(), Defence::default()];
        let mut counts = [VipAnswers::default(), VipAnswers::default()];
        owners[0].note_announcement(3, 0, WAIT_NS);
        for second in 0..50 {
            for (owner, other) in [(0, 1), (1, 0)] {
                let now_ns = second * SECOND_NS + WAIT_NS;
                let before: u64 = counts[owner].defended_groups.values().sum();
                if defended(&mut owners[owner], &mut counts[owner], now_ns) > before {
                    owners[other].note_announcement(3, now_ns, WAIT_NS);
                }
            }
        }
        assert_eq!(counts.map(|answers| answers.defended_groups[&3]), [1, 1]);
        owners[0].note(3, 50 * SECOND_NS, WAIT_NS);
        assert!(owners[0].is_due(51 * SECOND_NS), "one that has given up asks");
        owners[1].note_announcement(3, 70 * SECOND_NS, WAIT_NS);
        assert!(owners[1].is_due(71 * SECOND_NS), "after a minute");
    }
}

//! What follows from the controller's decisions about groups that other gateways claim, too; and when the addresses of
//! this gateway are announced again.
//!
//! Gateways that do not hear each other all announce the same addresses, and the last one to do so is believed. So the
//! owner announces them again when it keeps a group by decision, and when it hears the other one at last.
//!
//! Not here: the decision (the controller), and the announcement (`dataplane`).

use super::Candidacy;

/// Between two announcements: a second, ns. The second one comes when the others have surely fallen silent.
const AGAIN_NS: u64 = 1_000_000_000;

/// When the addresses of owned groups are announced again.
#[derive(Debug, Default)]
pub(super) struct Confirmation {
    /// Times of the announcements that are due, ns.
    due_ns: Vec<u64>,
}

impl Confirmation {
    /// Announces at once and once more a second later; nothing changes while that is under way.
    pub(super) fn begin(&mut self, now_ns: u64) {
        if self.due_ns.is_empty() {
            self.due_ns = vec![now_ns.saturating_add(AGAIN_NS), now_ns];
        }
    }

    /// Whether to announce now. Each time is returned once.
    pub(super) fn is_due(&mut self, now_ns: u64) -> bool {
        self.due_ns.pop_if(|due_ns| *due_ns <= now_ns).is_some()
    }
}

impl Candidacy {
    /// Gives groups away, and takes them back, as decided.
    pub(super) fn obey(&mut self, confirmation: &mut Confirmation, now_ns: u64) {
        if !self.arbitration.has_changed().unwrap_or(false) {
            return;
        }
        let decided = *self.arbitration.borrow_and_update();
        let claimed = *self.claimed.borrow();
        for group in (0..self.settings.election.groups).filter(|group| claimed & 1 << group != 0) {
            let (may, owns) = (decided.yields & 1 << group == 0, self.answers.borrow().groups.is_some_and(|all| all.has(group)));
            if may != owns {
                self.own(group, may, now_ns);
            }
        }
        let contested = decided.contested & claimed;
        if self.status.borrow().contested != contested {
            self.status.send_modify(|status| status.contested = contested);
            if contested != 0 {
                tracing::warn!(
                    groups = contested.count_ones(),
                    yields = decided.yields.count_ones(),
                    "other gateways claim the same groups of VIPs, and are not heard; does something between the gateways drop \
                     VRRP (IP protocol 112)?"
                );
            }
        }
        if decided.keeps & claimed != 0 {
            confirmation.begin(now_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_announced_twice_however_often_the_owner_is_challenged() {
        let mut confirmation = Confirmation::default();
        assert!(!confirmation.is_due(0));
        confirmation.begin(5);
        assert!(confirmation.is_due(5) && !confirmation.is_due(5));
        confirmation.begin(6);
        assert!(!confirmation.is_due(6) && confirmation.is_due(5 + AGAIN_NS) && !confirmation.is_due(u64::MAX));
        confirmation.begin(7 + AGAIN_NS);
        assert!(confirmation.is_due(7 + AGAIN_NS));
    }
}

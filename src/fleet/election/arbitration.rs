//! Arbitration: the controller decides about groups that other gateways claim, too, and this gateway gives and takes.
//!
//! Gateways that do not hear each other all announce the same addresses, and the last one to do so is believed. So the
//! one that keeps a group announces them again (`defence`).
//!
//! Not here: the decision (the controller).

use super::Candidacy;
use super::defence::Defence;

impl Candidacy {
    /// Gives groups away, and takes them back, as decided.
    pub(super) fn apply_arbitration(&mut self, defence: &mut Defence, now_ns: u64) {
        if !self.arbitration.has_changed().unwrap_or(false) {
            return;
        }
        let decided = *self.arbitration.borrow_and_update();
        let claimed = self.claimed.borrow().groups;
        for group in (0..self.settings.election.groups).filter(|group| claimed & 1 << group != 0) {
            let (may, owns) = (decided.yields & 1 << group == 0, self.answers.borrow().groups.is_some_and(|all| all.has(group)));
            if may != owns {
                self.own(group, may, now_ns);
            }
        }
        defence.keep(decided.keeps & claimed, now_ns, self.lease_ns());
        let contested = decided.contested & claimed;
        if self.status.borrow().contested != contested {
            self.status.send_modify(|status| status.contested = contested);
            if contested != 0 {
                tracing::warn!(
                    groups = contested.count_ones(),
                    "other gateways claim the same groups of VIPs, and are not heard; does something between the gateways drop \
                     VRRP (IP protocol 112)?"
                );
            }
        }
    }
}

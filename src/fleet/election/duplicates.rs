//! Duplicate address detection without an election: another station on the link announces VIPs of this gateway.
//!
//! The gateway with the lower Ethernet address leaves the VIP to the other one; ARP and NDP carry no names. The one with
//! the higher address goes on, and announces the VIP again, to the other one too. Both report it.
//!
//! Invariant: a VIP is announced again at most once in [`DEFENCE`], so that two stations do not flood the link.
//! Not here: the packets of the others (`dataplane`).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use dataplane::{VipAnswers, VipClaim, VipOwnership};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::ElectionStatus;
use crate::agent::supervisor::Failure;

/// How often claims are taken from the workers.
const TICK: Duration = Duration::from_millis(100);
/// How long a VIP is left to another station after its last announcement. Then this gateway answers again, unless the
/// other defends the VIP.
const YIELDED: Duration = Duration::from_secs(600);
/// Minimum time between two defences of a VIP.
const DEFENCE: Duration = Duration::from_secs(10);

/// What another station announces, and what this gateway does about it.
#[derive(Debug, Default)]
struct Duplicates {
    /// When each VIP that is left to others was announced last.
    yielded: BTreeMap<IpAddr, Instant>,
    /// When each VIP was defended last, and how often.
    defended: BTreeMap<IpAddr, (Instant, u64)>,
}

/// The task that follows claims of other stations where there is no election. Cloned for each start.
#[derive(Clone, Debug)]
pub struct DuplicateWatch {
    /// Where workers report claims.
    pub ownership: Arc<VipOwnership>,
    /// Output: for which VIPs the next snapshot answers.
    pub answers: watch::Sender<VipAnswers>,
    /// Output, for operators.
    pub status: watch::Sender<ElectionStatus>,
}

impl DuplicateWatch {
    /// Follows claims of other stations. Returns only with an error.
    ///
    /// # Errors
    /// Never: it is an endless loop.
    pub async fn run(self) -> Result<(), Failure> {
        let Self { ownership, answers, status } = self;
        let mut duplicates = Duplicates::default();
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            let now = Instant::now();
            while let Some(claim) = ownership.take_claim() {
                let is_new = status.borrow().duplicates.get(&claim.vip) != Some(&claim.other);
                duplicates.note(claim, now);
                status.send_modify(|status| {
                    status.claims += 1;
                    status.duplicates.insert(claim.vip, claim.other);
                });
                if is_new {
                    let VipClaim { vip, other, own, .. } = claim;
                    let does = if own < other { "this gateway stops answering for it" } else { "this gateway goes on answering" };
                    tracing::error!(
                        %vip, %other, %own, does,
                        "another station announces a VIP of this gateway; several gateways on a link need `announce: {{election: \
                         keepalived}}`"
                    );
                }
            }
            for vip in duplicates.expire(now) {
                status.send_modify(|status| {
                    status.duplicates.remove(&vip);
                });
                tracing::info!(%vip, "nobody else has announced the VIP for a while");
            }
            answers.send_if_modified(|answers| duplicates.apply(answers));
        }
    }
}

impl Duplicates {
    fn note(&mut self, claim: VipClaim, now: Instant) {
        let VipClaim { vip, other, own, .. } = claim;
        if own < other {
            self.yielded.insert(vip, now);
        } else {
            let (at, count) = self.defended.get(&vip).copied().unwrap_or((now, 0));
            if count == 0 || now.duration_since(at) >= DEFENCE {
                self.defended.insert(vip, (now, count + 1));
            }
        }
    }

    /// Forgets what is old, and returns it.
    fn expire(&mut self, now: Instant) -> Vec<IpAddr> {
        let is_old = |at: &Instant| now.duration_since(*at) >= YIELDED;
        let yielded = self.yielded.iter().filter(|(_, at)| is_old(at)).map(|(vip, _)| *vip);
        let defended = self.defended.iter().filter(|(_, (at, _))| is_old(at)).map(|(vip, _)| *vip);
        let gone: Vec<_> = yielded.chain(defended).collect();
        self.yielded.retain(|_, at| !is_old(at));
        self.defended.retain(|_, (at, _)| !is_old(at));
        gone
    }

    /// Returns whether the answers have changed.
    fn apply(&self, answers: &mut VipAnswers) -> bool {
        let yielded = self.yielded.keys().copied().collect();
        let defended = self.defended.iter().map(|(vip, (_, count))| (*vip, *count)).collect();
        let is_changed = answers.yielded != yielded || answers.defended != defended;
        (answers.yielded, answers.defended) = (yielded, defended);
        is_changed
    }
}

#[cfg(test)]
mod tests {
    use dataplane::{Mac, PortIndex};

    use super::*;

    const LOW: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const HIGH: Mac = Mac([2, 0, 0, 0, 0, 2]);

    fn claim(own: Mac, other: Mac) -> VipClaim {
        VipClaim { link: PortIndex(0).into(), vip: "192.0.2.100".parse().unwrap(), other, own }
    }

    #[test]
    fn of_two_gateways_one_answers() {
        let now = Instant::now();
        let (mut low, mut high) = (Duplicates::default(), Duplicates::default());
        low.note(claim(LOW, HIGH), now);
        high.note(claim(HIGH, LOW), now);
        let (mut of_low, mut of_high) = (VipAnswers::default(), VipAnswers::default());
        assert!(low.apply(&mut of_low) && high.apply(&mut of_high));
        assert_eq!((of_low.yielded.len(), of_high.yielded.len()), (1, 0));
        assert!(!low.apply(&mut of_low), "nothing has changed");
        let later = now + YIELDED;
        assert_eq!((low.expire(later).len(), high.expire(later).len()), (1, 1));
        assert!(low.apply(&mut of_low) && of_low == VipAnswers::default());
    }

    #[test]
    fn a_vip_is_not_announced_again_and_again() {
        let now = Instant::now();
        let mut high = Duplicates::default();
        let mut count = |after: Duration| {
            high.note(claim(HIGH, LOW), now + after);
            let mut answers = VipAnswers::default();
            high.apply(&mut answers);
            answers.defended.values().sum::<u64>()
        };
        assert_eq!([0, 1, 9].map(|seconds| count(Duration::from_secs(seconds))), [1, 1, 1]);
        assert_eq!(count(DEFENCE), 2);
    }
}

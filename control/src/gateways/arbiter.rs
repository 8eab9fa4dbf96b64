//! The arbiter of VIP groups that several gateways of a link claim at once, because something between them drops the
//! advertisements of VRRP.
//!
//! A gateway claims the groups that VRRP gives it. Of those that claim a group the arbiter lets the first one keep it that
//! has spoken since the contest began and hears its link; all others yield. Without such a gateway nothing is decided.
//!
//! Invariant: nobody yields to a gateway that is stopped, is cut off from the controller, or hears nothing of its link.
//! Time is needed only while gateways speak, so there is no timer: each claim is a reason to look.
//! Not here: VRRP, and what gateways do when they yield (the gateway's agent). Decision 70 has the reasons.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use proto::limits::VIP_GROUPS_MAX;
use proto::{Arbitration, GroupClaims};
use tokio::sync::watch;
use tokio::time::Instant;

/// A contest is decided after this long: every gateway that is there has spoken, and one that hands a group over has
/// released it.
const CONSIDERS: Duration = Duration::from_millis(300);
/// What a gateway has said counts for this long. While its claims are contested it speaks four times a second.
const COUNTS: Duration = Duration::from_secs(2);

/// What is decided, by name of the gateway. Gateways without a contested claim are left out.
pub type Rulings = BTreeMap<String, Arbitration>;

/// The arbiter. Copies share their state.
#[derive(Clone, Debug, Default)]
pub struct Arbiter {
    contests: Arc<Mutex<Contests>>,
    rulings: watch::Sender<Rulings>,
}

/// Who claims what.
#[derive(Debug, Default)]
struct Contests {
    claimants: BTreeMap<String, Claimant>,
    /// When the contests of each link and group began.
    since: BTreeMap<(String, u8), Instant>,
    /// What is decided of each.
    decided: BTreeMap<(String, u8), String>,
    /// Number of claims that have begun.
    begun: u64,
}

#[derive(Debug)]
struct Claimant {
    connection: u64,
    claims: GroupClaims,
    /// When it spoke last.
    at: Instant,
    /// The claims in the order in which they began.
    first: BTreeMap<u8, u64>,
}

/// A connected gateway. Dropping it releases what the gateway claims.
#[derive(Debug)]
pub struct Party {
    arbiter: Arbiter,
    gateway: String,
    connection: u64,
}

impl Arbiter {
    /// Adds a connection of a gateway. A newer one of the same gateway replaces it.
    #[must_use]
    pub fn admit(&self, gateway: &str, connection: u64) -> Party {
        Party { arbiter: self.clone(), gateway: gateway.to_owned(), connection }
    }

    /// What is decided, with every change.
    #[must_use]
    pub fn rulings(&self) -> watch::Receiver<Rulings> {
        self.rulings.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, Contests> {
        self.contests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn decide(&self, contests: &mut Contests, now: Instant) {
        let rulings = contests.decide(now);
        self.rulings.send_if_modified(|before| {
            let is_news = *before != rulings;
            *before = rulings;
            is_news
        });
    }
}

impl Party {
    /// Takes what the gateway claims now.
    pub fn claims(&self, claims: GroupClaims) {
        let now = Instant::now();
        let mut contests = self.arbiter.lock();
        contests.hear(&self.gateway, self.connection, claims, now);
        self.arbiter.decide(&mut contests, now);
    }
}

impl Drop for Party {
    fn drop(&mut self) {
        let mut contests = self.arbiter.lock();
        if contests.claimants.get(&self.gateway).is_some_and(|claimant| claimant.connection == self.connection) {
            contests.claimants.remove(&self.gateway);
            self.arbiter.decide(&mut contests, Instant::now());
        }
    }
}

impl Contests {
    fn hear(&mut self, gateway: &str, connection: u64, claims: GroupClaims, now: Instant) {
        let mut first = self.claimants.remove(gateway).map(|before| before.first).unwrap_or_default();
        first.retain(|group, _| has(claims.groups, *group));
        for group in (0..VIP_GROUPS_MAX).filter(|group| has(claims.groups, *group)) {
            first.entry(group).or_insert_with(|| {
                self.begun += 1;
                self.begun
            });
        }
        self.claimants.insert(gateway.to_owned(), Claimant { connection, claims, at: now, first });
    }

    /// Looks at all claims.
    fn decide(&mut self, now: Instant) -> Rulings {
        let mut claimed: BTreeMap<(&str, u8), Vec<(&String, &Claimant)>> = BTreeMap::new();
        for (gateway, claimant) in &self.claimants {
            for group in claimant.first.keys() {
                claimed.entry((&claimant.claims.link, *group)).or_default().push((gateway, claimant));
            }
        }
        claimed.retain(|_, claimants| claimants.len() > 1);
        let is_contested = |(link, group): &(String, u8)| claimed.contains_key(&(link.as_str(), *group));
        self.since.retain(|contest, _| is_contested(contest));
        self.decided.retain(|contest, _| is_contested(contest));
        let mut rulings = Rulings::new();
        for ((link, group), claimants) in claimed {
            let contest = (link.to_owned(), group);
            let since = *self.since.entry(contest.clone()).or_insert(now);
            let counts = |claimant: &Claimant| {
                claimant.at > since && now.duration_since(claimant.at) < COUNTS && claimant.claims.hears_link
            };
            let candidates = claimants.iter().filter(|(_, claimant)| counts(claimant));
            let keeper = candidates.min_by_key(|(_, claimant)| claimant.first.get(&group)).map(|(gateway, _)| *gateway);
            let keeper = keeper.filter(|_| now.duration_since(since) >= CONSIDERS);
            for (gateway, _) in &claimants {
                let of_gateway = rulings.entry((*gateway).clone()).or_default();
                let bit = 1_u64.checked_shl(group.into()).unwrap_or(0);
                of_gateway.contested |= bit;
                match keeper {
                    Some(keeper) if keeper == *gateway => of_gateway.keeps |= bit,
                    Some(_) => of_gateway.yields |= bit,
                    None => {}
                }
            }
            if let Some(keeper) = keeper
                && self.decided.insert(contest, keeper.clone()).as_ref() != Some(keeper)
            {
                let others = claimants.iter().filter(|(gateway, _)| *gateway != keeper).map(|(gateway, _)| gateway.as_str());
                let others = others.collect::<Vec<_>>().join(", ");
                tracing::warn!(
                    group,
                    keeper,
                    others,
                    "gateways on a link do not hear each other's VRRP, and claim the same group of VIPs; one keeps it"
                );
            }
        }
        rulings
    }
}

fn has(groups: u64, group: u8) -> bool {
    groups.checked_shr(group.into()).is_some_and(|groups| groups & 1 == 1)
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn claims(groups: u64, hears_link: bool) -> GroupClaims {
        GroupClaims { groups, link: "192.0.2.0/24 vrid 51".to_owned(), hears_link }
    }

    fn of(rulings: &watch::Receiver<Rulings>, gateway: &str) -> (u64, u64, u64) {
        let Arbitration { contested, keeps, yields } = rulings.borrow().get(gateway).copied().unwrap_or_default();
        (contested, keeps, yields)
    }

    /// Lets the parties speak for as long as a decision takes.
    async fn speak(parties: &[(&Party, &GroupClaims)]) {
        for _ in 0..3 {
            advance(CONSIDERS / 2).await;
            for (party, claims) in parties {
                party.claims((*claims).clone());
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_keeps_a_group_until_the_gateways_hear_each_other_again() {
        let arbiter = Arbiter::default();
        let (one, two, rulings) = (arbiter.admit("edge-1", 1), arbiter.admit("edge-2", 2), arbiter.rulings());
        two.claims(claims(0b10, true));
        one.claims(claims(0b01, true));
        assert!(rulings.borrow().is_empty(), "each has a group of its own");
        let both = claims(0b11, true);
        speak(&[(&one, &both)]).await;
        assert_eq!((of(&rulings, "edge-1"), of(&rulings, "edge-2")), ((0b10, 0b10, 0), (0b10, 0, 0b10)), "two is silent");
        speak(&[(&one, &both), (&two, &both)]).await;
        assert_eq!((of(&rulings, "edge-1"), of(&rulings, "edge-2")), ((0b11, 0b01, 0b10), (0b11, 0b10, 0b01)));
        one.claims(claims(0b01, true));
        two.claims(claims(0b10, true));
        assert!(rulings.borrow().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_yields_to_a_gateway_that_is_stopped_or_hears_nothing() {
        let arbiter = Arbiter::default();
        let (one, two, rulings) = (arbiter.admit("edge-1", 1), arbiter.admit("edge-2", 2), arbiter.rulings());
        let (hears, is_deaf) = (claims(1, true), claims(1, false));
        one.claims(hears.clone());
        speak(&[(&two, &hears)]).await;
        assert_eq!(of(&rulings, "edge-2"), (1, 1, 0), "edge-1 has said nothing since the contest began");
        speak(&[(&one, &is_deaf), (&two, &hears)]).await;
        assert_eq!((of(&rulings, "edge-1"), of(&rulings, "edge-2")), ((1, 0, 1), (1, 1, 0)));
        speak(&[(&one, &is_deaf), (&two, &is_deaf)]).await;
        assert_eq!((of(&rulings, "edge-1"), of(&rulings, "edge-2")), ((1, 0, 0), (1, 0, 0)), "nothing speaks for either");
        speak(&[(&one, &hears), (&two, &hears)]).await;
        assert_eq!(of(&rulings, "edge-1"), (1, 1, 0));
        advance(COUNTS).await;
        speak(&[(&two, &hears)]).await;
        assert_eq!(of(&rulings, "edge-2"), (1, 1, 0), "edge-1 was stopped");
    }

    #[tokio::test(start_paused = true)]
    async fn links_are_apart_and_what_a_gateway_claims_ends_with_its_connection() {
        let arbiter = Arbiter::default();
        let (one, two, rulings) = (arbiter.admit("edge-1", 1), arbiter.admit("edge-2", 2), arbiter.rulings());
        let here = claims(1, true);
        let elsewhere = GroupClaims { link: "198.51.100.0/24 vrid 51".to_owned(), ..here.clone() };
        speak(&[(&one, &here), (&two, &elsewhere)]).await;
        assert!(rulings.borrow().is_empty());
        speak(&[(&one, &here), (&two, &here)]).await;
        assert_eq!(of(&rulings, "edge-2"), (1, 0, 1));
        let again = arbiter.admit("edge-1", 3);
        again.claims(here.clone());
        drop(one);
        speak(&[(&again, &here), (&two, &here)]).await;
        assert_eq!(of(&rulings, "edge-2"), (1, 0, 1), "a gateway that dials again has not lost its turn");
        drop(again);
        assert!(rulings.borrow().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_takeover_is_no_contest() {
        let arbiter = Arbiter::default();
        let (one, two, rulings) = (arbiter.admit("edge-1", 1), arbiter.admit("edge-2", 2), arbiter.rulings());
        one.claims(claims(1, true));
        advance(COUNTS).await;
        two.claims(claims(1, true));
        assert_eq!(of(&rulings, "edge-2"), (1, 0, 0));
        advance(CONSIDERS / 3).await;
        one.claims(claims(0, true));
        advance(CONSIDERS).await;
        two.claims(claims(1, true));
        assert!(rulings.borrow().is_empty());
    }
}

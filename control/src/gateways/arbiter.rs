//! The arbiter of VIP groups that several gateways of a link claim at once, because something between them drops the
//! advertisements of VRRP.
//!
//! A gateway claims the groups that VRRP gives it. Of those that claim a group one keeps it, and all others yield. It must
//! have spoken since the contest began, and hear its link. Of several such gateways the fittest keeps the group; of
//! equally fit ones the one that has kept it so far, by this controller's decision or by that of an earlier one; at first
//! the one that claimed first. Without such a gateway nothing is decided.
//!
//! Invariant: nobody yields to a gateway that is stopped, is cut off from the controller, or hears nothing of its link,
//! and none that is unfit keeps a group while a fit one claims it. A connection that ends for less than two seconds
//! changes nothing.
//! Time is needed only while gateways speak, so there is no timer: each claim is a reason to look.
//! Not here: VRRP, how fit a gateway is, and what gateways do when they yield (the gateway's agent). Decision 70 has the
//! reasons.

use std::cmp::Reverse;
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
/// What a gateway has said counts for this long, also if its connection has ended. While its claims are contested it speaks
/// four times a second.
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
    /// When its connection ended.
    left: Option<Instant>,
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

    /// A ruling as the answer to what this gateway has said last.
    #[must_use]
    pub fn answer(&self, ruling: Arbitration) -> Arbitration {
        let contests = self.arbiter.lock();
        let claimant = contests.claimants.get(&self.gateway).filter(|claimant| claimant.connection == self.connection);
        Arbitration { answers: claimant.map_or(0, |claimant| claimant.claims.number), ..ruling }
    }
}

impl Drop for Party {
    fn drop(&mut self) {
        let (mut contests, now) = (self.arbiter.lock(), Instant::now());
        let claimant = contests.claimants.get_mut(&self.gateway);
        if let Some(claimant) = claimant.filter(|claimant| claimant.connection == self.connection) {
            claimant.left = Some(now);
            self.arbiter.decide(&mut contests, now);
        }
    }
}

impl Claimant {
    fn is_gone(&self, now: Instant) -> bool {
        self.left.is_some_and(|left| now.duration_since(left) >= COUNTS)
    }

    /// Whether it says that it was told to keep a group.
    const fn says_it_keeps(&self, group: u8) -> bool {
        has(self.claims.keeps, group)
    }

    /// Whether it may keep a group whose contest began at `since`.
    fn may_keep(&self, group: u8, since: Instant, now: Instant) -> bool {
        let has_spoken = self.at > since || self.says_it_keeps(group);
        has_spoken && now.duration_since(self.at) < COUNTS && self.claims.hears_link
    }
}

impl Contests {
    fn hear(&mut self, gateway: &str, connection: u64, claims: GroupClaims, now: Instant) {
        if self.claimants.get(gateway).is_some_and(|known| known.connection > connection) {
            // The last words of a connection that a newer one has replaced.
            return;
        }
        let mut first = self.claimants.remove(gateway).map(|before| before.first).unwrap_or_default();
        first.retain(|group, _| has(claims.groups, *group));
        for group in (0..VIP_GROUPS_MAX).filter(|group| has(claims.groups, *group)) {
            first.entry(group).or_insert_with(|| {
                self.begun += 1;
                self.begun
            });
        }
        self.claimants.insert(gateway.to_owned(), Claimant { connection, claims, at: now, left: None, first });
    }

    /// Looks at all claims.
    fn decide(&mut self, now: Instant) -> Rulings {
        self.claimants.retain(|_, claimant| !claimant.is_gone(now));
        let mut claimed: BTreeMap<(&str, u8), Vec<(&String, &Claimant)>> = BTreeMap::new();
        for (gateway, claimant) in &self.claimants {
            for group in claimant.first.keys() {
                claimed.entry((&claimant.claims.link, *group)).or_default().push((gateway, claimant));
            }
        }
        claimed.retain(|(link, group), claimants| {
            // A gateway that has left begins no contest: another one takes over.
            let begins = claimants.iter().filter(|(_, claimant)| claimant.left.is_none()).count() > 1;
            claimants.len() > 1 && (begins || self.since.contains_key(&((*link).to_owned(), *group)))
        });
        let is_contested = |(link, group): &(String, u8)| claimed.contains_key(&(link.as_str(), *group));
        self.since.retain(|contest, _| is_contested(contest));
        self.decided.retain(|contest, _| is_contested(contest));
        let mut rulings = Rulings::new();
        for ((link, group), claimants) in claimed {
            let contest = (link.to_owned(), group);
            let since = *self.since.entry(contest.clone()).or_insert(now);
            let keeper = keeper(group, &claimants, self.decided.get(&contest), since, now);
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

/// Who keeps a group that several claim; `None`: nothing is decided.
fn keeper<'a>(
    group: u8,
    claimants: &[(&'a String, &Claimant)],
    incumbent: Option<&String>,
    since: Instant,
    now: Instant,
) -> Option<&'a String> {
    let candidates = claimants.iter().filter(|(_, claimant)| claimant.may_keep(group, since, now));
    let (gateway, claimant) = candidates.min_by_key(|(gateway, claimant)| {
        let is_incumbent = Some(*gateway) == incumbent;
        (Reverse(claimant.claims.rank), !is_incumbent, !claimant.says_it_keeps(group), claimant.first.get(&group))
    })?;
    let is_considered = now.duration_since(since) >= CONSIDERS || claimant.says_it_keeps(group);
    is_considered.then_some(*gateway)
}

const fn has(groups: u64, group: u8) -> bool {
    group < VIP_GROUPS_MAX && groups >> group & 1 == 1
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn claims(groups: u64, hears_link: bool) -> GroupClaims {
        GroupClaims { groups, link: "192.0.2.0/24 vrid 51".to_owned(), hears_link, rank: 150, ..GroupClaims::default() }
    }

    fn of(rulings: &watch::Receiver<Rulings>, gateway: &str) -> (u64, u64, u64) {
        let Arbitration { contested, keeps, yields, .. } = rulings.borrow().get(gateway).copied().unwrap_or_default();
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
        one.claims(both.clone());
        assert_eq!((of(&rulings, "edge-1"), of(&rulings, "edge-2")), ((0b10, 0, 0), (0b10, 0, 0)), "nothing is decided yet");
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
        speak(&[(&two, &hears), (&one, &hears)]).await;
        assert_eq!(of(&rulings, "edge-2"), (1, 1, 0), "edge-2 was decided on last");
        advance(COUNTS).await;
        speak(&[(&one, &hears)]).await;
        assert_eq!(of(&rulings, "edge-1"), (1, 1, 0), "edge-2 was stopped");
        speak(&[(&one, &hears), (&two, &hears)]).await;
        assert_eq!(of(&rulings, "edge-1"), (1, 1, 0), "it does not take the group back");
    }

    #[tokio::test(start_paused = true)]
    async fn the_fittest_keeps_a_group_and_of_equally_fit_ones_the_one_that_has_it() {
        let arbiter = Arbiter::default();
        let (one, two, rulings) = (arbiter.admit("edge-1", 1), arbiter.admit("edge-2", 2), arbiter.rulings());
        let (fit, unfit) = (claims(1, true), GroupClaims { rank: 100, ..claims(1, true) });
        speak(&[(&one, &fit), (&two, &fit)]).await;
        assert_eq!(of(&rulings, "edge-1"), (1, 1, 0));
        one.claims(unfit.clone());
        assert_eq!((of(&rulings, "edge-1"), of(&rulings, "edge-2")), ((1, 0, 1), (1, 1, 0)), "at once");
        speak(&[(&one, &fit), (&two, &fit)]).await;
        assert_eq!(of(&rulings, "edge-2"), (1, 1, 0), "one that has recovered does not take the group back");
        speak(&[(&one, &unfit), (&two, &unfit)]).await;
        assert_eq!(of(&rulings, "edge-2"), (1, 1, 0));
        speak(&[(&one, &unfit), (&two, &GroupClaims { hears_link: false, ..fit })]).await;
        assert_eq!(of(&rulings, "edge-1"), (1, 1, 0), "who hears nothing is worse than an unfit one");
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_leader_goes_on_with_what_gateways_were_told() {
        let arbiter = Arbiter::default();
        let (one, two, rulings) = (arbiter.admit("edge-1", 1), arbiter.admit("edge-2", 2), arbiter.rulings());
        let kept = GroupClaims { keeps: 1, ..claims(1, true) };
        one.claims(claims(1, true));
        two.claims(kept.clone());
        assert_eq!((of(&rulings, "edge-1"), of(&rulings, "edge-2")), ((1, 0, 1), (1, 1, 0)), "at once");
        speak(&[(&one, &claims(1, true)), (&two, &kept)]).await;
        assert_eq!(of(&rulings, "edge-2"), (1, 1, 0), "although edge-1 has dialled first");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_ends_for_a_moment_changes_nothing_and_its_last_words_neither() {
        let arbiter = Arbiter::default();
        let (one, two, rulings) = (arbiter.admit("edge-1", 1), arbiter.admit("edge-2", 2), arbiter.rulings());
        let both = claims(1, true);
        speak(&[(&one, &both), (&two, &both)]).await;
        drop(one);
        advance(CONSIDERS).await;
        speak(&[(&two, &both)]).await;
        assert_eq!(of(&rulings, "edge-2"), (1, 0, 1));
        let again = arbiter.admit("edge-1", 3);
        let late = arbiter.admit("edge-1", 1);
        again.claims(GroupClaims { number: 7, ..both.clone() });
        late.claims(claims(0, true));
        speak(&[(&two, &both)]).await;
        assert_eq!((of(&rulings, "edge-1"), of(&rulings, "edge-2")), ((1, 1, 0), (1, 0, 1)));
        let answers = [&again, &late].map(|party| party.answer(Arbitration::default()).answers);
        assert_eq!(answers, [7, 0], "each connection is answered what it has said");
        drop(late);
        drop(again);
        advance(COUNTS).await;
        two.claims(both);
        assert!(rulings.borrow().is_empty(), "it has gone");
    }

    #[tokio::test(start_paused = true)]
    async fn a_gateway_that_has_left_begins_no_contest() {
        let arbiter = Arbiter::default();
        let (one, two, rulings) = (arbiter.admit("edge-1", 1), arbiter.admit("edge-2", 2), arbiter.rulings());
        one.claims(claims(1, true));
        drop(one);
        speak(&[(&two, &claims(1, true))]).await;
        assert!(rulings.borrow().is_empty(), "it was killed, and the other one takes over");
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
        assert_eq!(of(&rulings, "edge-2"), (1, 0, 1), "not yet");
        advance(COUNTS).await;
        two.claims(here);
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

//! Claims of this gateway to VIP groups, for the arbiter in the controller: the groups that VRRP gives it, its rank, and
//! whether frames arrive from its link. The decisions of the arbiter go to the election.
//!
//! Invariant: while the controller says that a claim is contested, it hears from this gateway every quarter of a second;
//! a gateway that is stopped is silent. What is decided lasts two seconds longer than the controller answers, so that
//! nobody yields for a controller that has gone, and a stream that is opened again changes nothing.
//! Not here: what follows from a decision (`fleet::election`).

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use proto::v1::watch_request::Message;
use proto::{Arbitration, GroupClaims};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

use crate::agent::watch::send_if_changed;
use crate::fleet::election::VrrpClaims;

/// How often contested claims are repeated, and how often frames are looked for.
const REPEATS: Duration = Duration::from_millis(250);
/// How often other claims are repeated: whatever was lost is said again.
const REPEATS_UNCONTESTED: Duration = Duration::from_secs(10);
/// The link counts as active for this long after a frame. Routers and switches send something more often.
const ACTIVE_FOR: Duration = Duration::from_secs(5);
/// What is decided lasts for this long after the last answer of the controller.
const LASTS: Duration = Duration::from_secs(2);

/// A gateway that stands for election.
#[derive(Clone)]
pub struct Contender {
    claimed: watch::Receiver<VrrpClaims>,
    link: String,
    frames: Arc<dyn Fn() -> u64 + Send + Sync>,
    arbitration: watch::Sender<Arbitration>,
    /// Outlives the streams, as a link does.
    activity: Arc<Mutex<LinkActivity>>,
}

/// When frames arrived from the link.
#[derive(Debug)]
struct LinkActivity {
    /// Their number, and when it was read.
    frames: (u64, Instant),
    /// When the number had grown last.
    last_frame: Option<Instant>,
}

impl fmt::Debug for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Contender").field("link", &self.link).finish_non_exhaustive()
    }
}

impl Contender {
    /// One that VRRP gives the groups `claimed`. `link` names the link and its election, in the same words by all gateways
    /// on it; `frames` is the number of frames that have arrived from it. `arbitration` is what the controller decides.
    pub fn new(
        claimed: watch::Receiver<VrrpClaims>,
        link: String,
        frames: impl Fn() -> u64 + Send + Sync + 'static,
        arbitration: watch::Sender<Arbitration>,
    ) -> Self {
        let activity = LinkActivity { frames: (frames(), Instant::now()), last_frame: None };
        Self { claimed, link, frames: Arc::new(frames), arbitration, activity: Arc::new(Mutex::new(activity)) }
    }

    /// Publishes what the controller has decided.
    pub(super) fn decided(&self, arbitration: Arbitration) {
        send_if_changed(&self.arbitration, arbitration);
    }

    /// Whether frames have arrived from the link lately.
    fn is_link_active(&self) -> bool {
        let (frames, now) = ((self.frames)(), Instant::now());
        self.activity.lock().unwrap_or_else(PoisonError::into_inner).update(frames, now)
    }
}

impl LinkActivity {
    /// Notes the number of frames. Returns whether the link is active.
    fn update(&mut self, frames: u64, now: Instant) -> bool {
        let (before, at) = std::mem::replace(&mut self.frames, (frames, now));
        // After a pause nobody knows when they arrived.
        if frames > before && now.duration_since(at) < ACTIVE_FOR {
            self.last_frame = Some(now);
        }
        self.last_frame.is_some_and(|frame| now.duration_since(frame) < ACTIVE_FOR)
    }
}

/// Ends what was decided when the controller no longer answers. It never returns.
pub(super) async fn lapse(contender: Contender) {
    let mut decided = contender.arbitration.subscribe();
    loop {
        let lasts = *decided.borrow_and_update() != Arbitration::default();
        let limit = if lasts { LASTS } else { Duration::MAX };
        if timeout(limit, decided.changed()).await.is_err() {
            tracing::warn!("the controller no longer answers claims of VIP groups; this gateway yields to nobody");
            contender.decided(Arbitration::default());
        }
    }
}

/// Speaks on one stream until it is closed.
pub(super) async fn run(mut contender: Contender, messages: mpsc::Sender<Message>) {
    let mut arbitration = contender.arbitration.subscribe();
    let mut looks = interval(REPEATS);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut said: Option<(GroupClaims, Instant)> = None;
    let mut number = 0;
    loop {
        let decided = *arbitration.borrow_and_update();
        let VrrpClaims { groups, rank } = *contender.claimed.borrow_and_update();
        let (link, hears_link, keeps) = (contender.link.clone(), contender.is_link_active(), decided.keeps & groups);
        let claims = GroupClaims { groups, link, hears_link, rank, keeps, number };
        let pause = if decided.contested == 0 { REPEATS_UNCONTESTED } else { REPEATS };
        let due = said.as_ref().filter(|(said, _)| *said == claims).map(|(_, at)| *at + pause);
        if due.is_none_or(|due| due <= Instant::now()) {
            number += 1;
            let claims = GroupClaims { number, ..claims };
            if messages.send(Message::Claims(claims.clone().into())).await.is_err() {
                return;
            }
            said = Some((claims, Instant::now()));
            continue;
        }
        tokio::select! {
            () = messages.closed() => return,
            changed = contender.claimed.changed() => if changed.is_err() { return },
            changed = arbitration.changed() => if changed.is_err() { return },
            _ = looks.tick() => {}
            () = sleep_until(due.unwrap_or_else(Instant::now)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use proto::v1;
    use tokio::time::{sleep, timeout};

    use super::*;

    const LONG: Duration = Duration::from_secs(120);

    async fn next(said: &mut mpsc::Receiver<Message>) -> v1::GroupClaims {
        match timeout(LONG, said.recv()).await.unwrap().unwrap() {
            Message::Claims(claims) => claims,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn claims_are_said_when_they_change_and_repeated_often_while_they_are_contested() {
        let (claimed, frames) = (watch::Sender::new(VrrpClaims::default()), Arc::new(AtomicU64::new(0)));
        let arbitration = watch::Sender::default();
        let counted = Arc::clone(&frames);
        let count = move || counted.load(Ordering::SeqCst);
        let contender = Contender::new(claimed.subscribe(), "192.0.2.0/24".to_owned(), count, arbitration.clone());
        let (messages, mut said) = mpsc::channel(1);
        let task = tokio::spawn(run(contender, messages));
        assert_eq!((next(&mut said).await.groups, next(&mut said).await.number), (0, 2), "said again without a change");
        claimed.send_replace(VrrpClaims { groups: 0b101, rank: 150 });
        let at = Instant::now();
        let claims = next(&mut said).await;
        assert_eq!((claims.groups, claims.link.as_str(), claims.rank, claims.hears_link), (0b101, "192.0.2.0/24", 150, false));
        claimed.send_replace(VrrpClaims { groups: 0b101, rank: 100 });
        assert_eq!((next(&mut said).await.rank, at.elapsed()), (100, Duration::ZERO));
        assert_eq!((next(&mut said).await.rank, at.elapsed()), (100, REPEATS_UNCONTESTED));
        arbitration.send_replace(Arbitration { contested: 0b101, keeps: 0b111, ..Arbitration::default() });
        assert_eq!(next(&mut said).await.keeps, 0b101);
        let at = Instant::now();
        for _ in 0..20 {
            let answers = next(&mut said).await.number;
            arbitration.send_modify(|arbitration| arbitration.answers = answers);
        }
        assert!(at.elapsed() >= 20 * REPEATS && at.elapsed() <= 21 * REPEATS, "answers make it speak no more often");
        frames.store(7, Ordering::SeqCst);
        while !next(&mut said).await.hears_link {}
        let at = Instant::now();
        while next(&mut said).await.hears_link {}
        assert!(at.elapsed() > ACTIVE_FOR - 2 * REPEATS, "few frames are enough");
        drop(said);
        timeout(LONG, task).await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_decided_ends_when_the_controller_no_longer_answers() {
        let arbitration = watch::Sender::default();
        let claimed = watch::Sender::new(VrrpClaims::default());
        let contender = Contender::new(claimed.subscribe(), String::new(), || 0, arbitration.clone());
        let task = tokio::spawn(lapse(contender.clone()));
        let decided = Arbitration { contested: 1, yields: 1, ..Arbitration::default() };
        for answers in 0..8 {
            contender.decided(Arbitration { answers, ..decided });
            sleep(LASTS / 2).await;
            assert_eq!(arbitration.borrow().yields, 1);
        }
        sleep(LASTS).await;
        assert_eq!(*arbitration.borrow(), Arbitration::default());
        task.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn frames_that_came_while_nobody_looked_prove_nothing() {
        let mut activity = LinkActivity { frames: (0, Instant::now()), last_frame: None };
        sleep(ACTIVE_FOR).await;
        assert!(!activity.update(100, Instant::now()));
        sleep(REPEATS).await;
        assert!(activity.update(101, Instant::now()));
        sleep(ACTIVE_FOR - REPEATS).await;
        assert!(activity.update(101, Instant::now()), "and it is not forgotten at once");
        sleep(REPEATS).await;
        assert!(!activity.update(101, Instant::now()));
    }
}

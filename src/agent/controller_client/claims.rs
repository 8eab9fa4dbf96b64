//! What this gateway says to the arbiter in the controller: the VIP groups that VRRP gives it, and whether it hears its
//! link.
//!
//! Invariant: while the controller says that a claim is contested, it hears from this gateway every quarter of a second;
//! a gateway that is stopped is silent. Not here: what follows from a decision (`agent::fleet::election`).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use proto::v1::watch_request::Message;
use proto::{Arbitration, GroupClaims};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};

/// How often contested claims are repeated.
const REPEATS: Duration = Duration::from_millis(250);
/// The link is heard if frames have arrived within the last one to two of these times.
const LISTENS: Duration = Duration::from_secs(1);

/// A gateway that stands for election.
#[derive(Clone)]
pub struct Contender {
    /// The groups that VRRP gives it: bit N is group N.
    pub claimed: watch::Receiver<u64>,
    /// The link and its election, in the same words by all gateways on it.
    pub link: String,
    /// Number of frames that have arrived from the link.
    pub frames: Arc<dyn Fn() -> u64 + Send + Sync>,
    /// What the controller decides.
    pub arbitration: watch::Sender<Arbitration>,
}

impl fmt::Debug for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Contender").field("link", &self.link).finish_non_exhaustive()
    }
}

/// Speaks on one stream until it is closed.
pub(super) async fn run(mut contender: Contender, messages: mpsc::Sender<Message>) {
    let mut arbitration = contender.arbitration.subscribe();
    let mut repeats = interval(REPEATS);
    repeats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut said = 0;
    let first = (Instant::now(), (contender.frames)());
    let (mut earlier, mut later) = (first, first);
    loop {
        let is_contested = arbitration.borrow_and_update().contested != 0;
        let groups = *contender.claimed.borrow_and_update();
        let frames = (contender.frames)();
        if later.0.elapsed() >= LISTENS {
            (earlier, later) = (later, (Instant::now(), frames));
        }
        if is_contested || groups != said {
            let claims = GroupClaims { groups, link: contender.link.clone(), hears_link: frames > earlier.1 };
            if messages.send(Message::Claims(claims.into())).await.is_err() {
                return;
            }
            said = groups;
        }
        tokio::select! {
            () = messages.closed() => return,
            changed = contender.claimed.changed() => if changed.is_err() { return },
            changed = arbitration.changed() => if changed.is_err() { return },
            _ = repeats.tick() => {}
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
    async fn claims_are_said_when_they_change_and_repeated_while_they_are_contested() {
        let (claimed, frames) = (watch::Sender::new(0), Arc::new(AtomicU64::new(0)));
        let arbitration = watch::Sender::default();
        let counted = Arc::clone(&frames);
        let contender = Contender {
            claimed: claimed.subscribe(),
            link: "192.0.2.0/24".to_owned(),
            frames: Arc::new(move || counted.load(Ordering::SeqCst)),
            arbitration: arbitration.clone(),
        };
        let (messages, mut said) = mpsc::channel(1);
        let task = tokio::spawn(run(contender, messages));
        sleep(10 * REPEATS).await;
        assert!(said.is_empty(), "it claims nothing");
        claimed.send_replace(0b101);
        let claims = next(&mut said).await;
        assert_eq!((claims.groups, claims.link.as_str(), claims.hears_link), (0b101, "192.0.2.0/24", false));
        sleep(10 * REPEATS).await;
        assert!(said.is_empty());
        frames.store(7, Ordering::SeqCst);
        arbitration.send_replace(Arbitration { contested: 1, ..Arbitration::default() });
        assert!(next(&mut said).await.hears_link && next(&mut said).await.hears_link);
        while next(&mut said).await.hears_link {}
        drop(said);
        timeout(LONG, task).await.unwrap().unwrap();
    }
}

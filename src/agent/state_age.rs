//! The age of the state in use: how long ago a controller last confirmed it.
//!
//! Invariant: the age counts while the gateway runs, too, suspended time included, and survives restarts: it begins with the
//! time in the state file. Past `maxStateAge` the state counts as expired, as one on disk does at a start, until a
//! controller speaks again. Deliberately not here: which parts of an expired state are used (`usable`).

use std::time::Duration;

use proto::{GatewayState, Origin};
use tokio::sync::watch;
use tokio::time::sleep;

use super::persist::StateFile;
use super::persist::sealed::{Age, Moment};
use crate::agent::supervisor::Failure;

/// Longest sleep: timers stand still while the machine is suspended, and the age does not.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// The task that has a state expire. Cloned for each start.
#[derive(Clone, Debug)]
pub struct StateAge {
    /// The file of the state, whose time is that of the last confirmation.
    pub file: StateFile,
    /// Input and output: the current state.
    pub state: watch::Sender<Option<GatewayState>>,
    /// Whether a controller is connected.
    pub connected: watch::Receiver<bool>,
    /// Key `maxStateAge`.
    pub max_age: Duration,
}

impl StateAge {
    /// Has the state expire `max_age` after a controller last confirmed it, as long as none is `connected`.
    ///
    /// # Errors
    /// If `connected` is closed.
    pub async fn run(self) -> Result<(), Failure> {
        let Self { file, state, mut connected, max_age } = self;
        let mut confirmed = tokio::task::spawn_blocking(move || file.written()).await?.unwrap_or_else(Moment::now);
        let mut has_changed = false;
        loop {
            let now = Moment::now();
            // A stream that has ended confirmed the state until now, however short it was.
            if *connected.borrow_and_update() || std::mem::take(&mut has_changed) {
                confirmed = now;
            }
            let left = max_age.saturating_sub(age(&now, &mut confirmed));
            if left.is_zero() {
                if expire(&state, &connected) {
                    tracing::error!(
                        max_state_age_s = max_age.as_secs(),
                        "no controller has confirmed the state for longer than `maxStateAge`: only nodes are used of it until one does"
                    );
                }
                connected.changed().await?;
                has_changed = true;
                continue;
            }
            tokio::select! {
                changed = connected.changed() => {
                    changed?;
                    has_changed = true;
                }
                () = sleep(left.min(LONGEST_SLEEP)) => {}
            }
        }
    }
}

/// The time since `confirmed`. One that lies ahead, because the clock was set back, counts from now on.
fn age(now: &Moment, confirmed: &mut Moment) -> Duration {
    match now.age_of(confirmed) {
        Age::OfThisBoot(age) | Age::ByTimeOfDay(age) => age,
        Age::Unknown(_) => {
            *confirmed = *now;
            Duration::ZERO
        }
    }
}

/// Marks the state as expired, unless a controller has spoken meanwhile, which says so before it sends its state. Returns
/// whether it is news.
fn expire(state: &watch::Sender<Option<GatewayState>>, connected: &watch::Receiver<bool>) -> bool {
    state.send_if_modified(|state| {
        // Under the lock of the state: the state of the controller comes after this, or came before.
        let Some(state) = state.as_mut().filter(|_| !*connected.borrow()) else { return false };
        std::mem::replace(&mut state.origin, Origin::Expired) != Origin::Expired
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::time::timeout;

    use super::super::persist::sealed::tests::moment;
    use super::*;
    use crate::agent::persist::directories::StateDirs;
    use crate::agent::usable::usable;
    use crate::controller_client::received::tests::{service, state};

    const LONG: Duration = Duration::from_secs(120);

    fn known(origin: Origin) -> Option<GatewayState> {
        Some(GatewayState { state: Arc::new(state("e", 1, &[service("web", &["10.0.0.1:80"])])), origin })
    }

    /// Number of endpoints that are used of a state.
    fn endpoints(known: &Option<GatewayState>) -> usize {
        let usable = usable(known.as_ref().unwrap(), &Default::default());
        usable.services.values().flat_map(|service| &service.ports).map(|port| port.backends.len()).sum()
    }

    #[tokio::test]
    async fn a_running_gateway_without_a_controller_stops_using_endpoints_until_one_speaks_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::new(StateDirs::with_runtime(dir.path(), None));
        let (sender, mut seen) = watch::channel(known(Origin::Controller));
        let (link, connected) = watch::channel(true);
        let task = tokio::spawn(StateAge { file, state: sender.clone(), connected, max_age: Duration::from_millis(20) }.run());
        assert_eq!(
            (seen.borrow().as_ref().unwrap().origin, endpoints(&seen.borrow())),
            (Origin::Controller, 1),
            "it is connected"
        );
        for _ in 0..2 {
            link.send_replace(false);
            let has_expired = |known: &Option<GatewayState>| known.as_ref().unwrap().origin == Origin::Expired;
            timeout(LONG, seen.wait_for(has_expired)).await.unwrap().unwrap();
            assert_eq!(endpoints(&seen.borrow()), 0);
            link.send_replace(true);
            sender.send_replace(known(Origin::Controller));
            assert_eq!(endpoints(&seen.borrow()), 1, "a controller speaks again");
        }
        drop(link);
        assert!(task.await.unwrap().is_err());
    }

    #[test]
    fn a_state_does_not_expire_once_a_controller_is_connected() {
        let (sender, link) = (watch::Sender::new(known(Origin::Controller)), watch::Sender::new(true));
        assert!(!expire(&sender, &link.subscribe()));
        assert_eq!(sender.borrow().as_ref().unwrap().origin, Origin::Controller);
        link.send_replace(false);
        assert!(expire(&sender, &link.subscribe()) && !expire(&sender, &link.subscribe()));
        assert_eq!(sender.borrow().as_ref().unwrap().origin, Origin::Expired);
    }

    #[tokio::test]
    async fn the_age_at_the_start_is_that_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::new(StateDirs::with_runtime(dir.path(), None));
        let now = Moment::now();
        let written = Moment { uptime: None, time_of_day: now.time_of_day - Duration::from_secs(3600) };
        file.save(&known(Origin::Disk).unwrap().state, false, written).unwrap();
        let age_of_file = now.age_of(&file.written().unwrap());
        assert!(age_of_file >= Age::ByTimeOfDay(Duration::from_secs(3599)), "{age_of_file:?}");
        let (sender, mut seen) = watch::channel(known(Origin::Disk));
        let (_link, connected) = watch::channel(false);
        let task = tokio::spawn(StateAge { file, state: sender, connected, max_age: Duration::from_secs(3000) }.run());
        let has_expired = |known: &Option<GatewayState>| known.as_ref().unwrap().origin == Origin::Expired;
        timeout(LONG, seen.wait_for(has_expired)).await.unwrap().unwrap();
        task.abort();
    }

    #[tokio::test]
    async fn a_controller_that_spoke_for_a_moment_has_confirmed_the_state() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::new(StateDirs::with_runtime(dir.path(), None));
        let now = Moment::now();
        let written = Moment { uptime: None, time_of_day: now.time_of_day - Duration::from_secs(3600) };
        file.save(&known(Origin::Disk).unwrap().state, false, written).unwrap();
        let (sender, mut seen) = watch::channel(known(Origin::Disk));
        let (link, connected) = watch::channel(false);
        let task = tokio::spawn(StateAge { file, state: sender.clone(), connected, max_age: Duration::from_secs(3000) }.run());
        let has_expired = |known: &Option<GatewayState>| known.as_ref().unwrap().origin == Origin::Expired;
        timeout(LONG, seen.wait_for(has_expired)).await.unwrap().unwrap();
        link.send_replace(true);
        sender.send_replace(known(Origin::Controller));
        link.send_replace(false);
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!(sender.borrow().as_ref().unwrap().origin, Origin::Controller);
        task.abort();
    }

    #[test]
    fn suspended_time_counts_and_a_clock_that_is_set_does_not() {
        let mut confirmed = moment(1, 100, 0);
        assert_eq!(age(&moment(1, 160, 400 * 86_400), &mut confirmed), Duration::from_secs(60));
        assert_eq!(age(&moment(2, 5, 90), &mut confirmed), Duration::from_secs(90));
        let ahead = moment(2, 5, 0);
        let mut confirmed = moment(1, 100, 50);
        assert_eq!((age(&ahead, &mut confirmed), confirmed), (Duration::ZERO, ahead));
    }
}

//! The probe task: follows the state, starts probes when they are due, publishes health.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use dataplane::Tunables;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use proto::limits::{PROBE_PORT_FIRST, PROBE_PORT_LAST};
use proto::{GatewayState, Origin, ProbeTags};
use tokio::sync::watch;
use tokio::sync::watch::error::RecvError;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::connections::{ConnectionWatch, LOOK_EVERY};
use super::schedule::Schedule;
use super::source_ports::Tags;
use super::target::{Changes, TargetTable};
use super::tracker::{Causes, Health, HealthChange, HealthTracker};
use super::{Outcome, Target};
use crate::watch::send_if_changed;

/// Minimum time between two evaluations of the state: the first state of 100,000 backends takes about 100 ms of a core,
/// later ones as much as their changes. A new backend is usable before its first probe, so nothing waits for this.
const FOLLOWED_EVERY: Duration = Duration::from_millis(200);

/// Output of the task, from which it continues after a restart.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// Health of backends.
    pub health: watch::Sender<Health>,
    /// Why backends fail, for operators.
    pub causes: watch::Sender<Causes>,
    /// Backends of probes that are sent to a VIP.
    pub tags: watch::Sender<ProbeTags>,
}

/// Probes the targets of the state in `known` until its sender is dropped, at most `concurrency` at once. Beyond that
/// limit probes are delayed, never skipped. Ports of NodePort Services are probed if this gateway serves their family
/// at its addresses for node ports, part of `tunables`. Backends whose connections fail in a row, by `connections`, are probed earlier.
pub async fn run<F: Future<Output = Outcome>>(
    probe: impl Fn(Target, Option<u16>, Duration) -> F,
    mut known: watch::Receiver<Option<GatewayState>>,
    findings: &Findings,
    concurrency: usize,
    mut tunables: watch::Receiver<Tunables>,
    mut connections: ConnectionWatch,
) {
    let mut following = ProbeState::resuming(findings, &tunables.borrow_and_update().node_port_addresses);
    let mut under_way = FuturesUnordered::new();
    known.mark_changed();
    let mut not_before = Instant::now();
    let mut looks = interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let room = under_way.len() < concurrency;
        tokio::select! {
            changed = changed_after(&mut known, not_before) => {
                if changed.is_err() {
                    return;
                }
                let newest = known.borrow_and_update().clone();
                if let Some(newest) = newest {
                    following.follow(&newest, findings);
                }
                not_before = Instant::now() + FOLLOWED_EVERY;
            }
            Ok(()) = tunables.changed() => {
                // Without a state there are no targets.
                let origin = known.borrow().as_ref().map_or(Origin::Disk, |known| known.origin);
                following.serve_node_ports_at(&tunables.borrow_and_update().node_port_addresses, origin, findings);
            }
            Some((target, started, outcome)) = under_way.next() => {
                following.take(&target, outcome);
                let next = following.tracker.check(&target).map(|check| started + check.interval);
                following.schedule.finished(target, next);
                following.publish(findings);
            }
            () = until(following.schedule.next()), if room => {
                let now = Instant::now();
                let target = following.schedule.start(now);
                if let Some((target, check)) = target.and_then(|t| Some((t.clone(), following.tracker.check(&t)?))) {
                    let (source_port, timeout) = (following.tags.of(&target), check.timeout);
                    let outcome = probe(target.clone(), source_port, timeout);
                    under_way.push(async move { (target, now, outcome.await) });
                }
            }
            _ = looks.tick(), if !following.slow.is_empty() => following.bring_forward(&mut connections),
        }
    }
}

async fn changed_after(known: &mut watch::Receiver<Option<GatewayState>>, not_before: Instant) -> Result<(), RecvError> {
    sleep_until(not_before).await;
    known.changed().await
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Targets, schedule and health.
struct ProbeState {
    table: TargetTable,
    tracker: HealthTracker,
    schedule: Schedule,
    tags: Tags,
    untagged: usize,
    /// Targets with an interval longer than the time between two looks at connections; no other can be brought forward.
    slow: HashSet<Target>,
    /// Targets whose last probe could not be made, and why.
    not_asked: HashMap<Target, String>,
}

impl ProbeState {
    fn resuming(findings: &Findings, node_port_addresses: &[IpAddr]) -> Self {
        Self {
            table: TargetTable::new(node_port_addresses),
            tracker: HealthTracker::resuming(findings.health.borrow().clone()),
            schedule: Schedule::default(),
            tags: Tags::resuming(findings.tags.borrow().clone()),
            untagged: 0,
            slow: HashSet::new(),
            not_asked: HashMap::new(),
        }
    }

    fn follow(&mut self, known: &GatewayState, findings: &Findings) {
        let changes = self.table.follow(&known.state.services);
        self.take_over(changes, known.origin, findings);
    }

    fn serve_node_ports_at(&mut self, addresses: &[IpAddr], origin: Origin, findings: &Findings) {
        let changes = self.table.serve_node_ports_at(addresses);
        self.take_over(changes, origin, findings);
    }

    fn take_over(&mut self, mut changes: Changes, origin: Origin, findings: &Findings) {
        let untagged = self.tags.follow(&mut changes);
        if untagged > 0 && self.untagged == 0 {
            tracing::warn!(
                untagged,
                "more backends to probe through VIPs than source ports {PROBE_PORT_FIRST} to {PROBE_PORT_LAST}; the rest is \
                 not probed and counts as healthy: set a health-check-port, or serve them by more gateways"
            );
        }
        self.untagged = untagged;
        // The engine must know a tag before a probe uses it.
        send_if_changed(&findings.tags, self.tags.table().clone());
        self.schedule.follow(&changes, Instant::now());
        for (target, check) in &changes {
            if check.as_ref().is_some_and(|check| check.interval > LOOK_EVERY) {
                self.slow.insert(target.clone());
            } else {
                self.slow.remove(target);
            }
            if check.is_none() {
                self.not_asked.remove(target);
            }
        }
        self.tracker.follow(changes, origin);
        self.publish(findings);
    }

    /// Applies `outcome`. A probe that could not be made is logged once for each reason, not at every interval.
    fn take(&mut self, target: &Target, outcome: Outcome) {
        match outcome {
            Outcome::NotAsked(why) if self.is_new(target, &why) => {
                tracing::warn!(%target, why, "could not probe; the target keeps its health");
            }
            Outcome::NotAsked(_) => {}
            Outcome::Passed => self.observe(target, Ok(())),
            Outcome::Failed(why) => self.observe(target, Err(format!("{target} {why}"))),
        }
    }

    /// Whether the last probe of a target could be made, or could not for another reason. A target that has gone
    /// meanwhile is not remembered.
    fn is_new(&mut self, target: &Target, why: &str) -> bool {
        let is_new = self.tracker.check(target).is_some() && self.not_asked.get(target).is_none_or(|last| last != why);
        if is_new {
            self.not_asked.insert(target.clone(), why.to_owned());
        }
        is_new
    }

    fn observe(&mut self, target: &Target, result: Result<(), String>) {
        self.not_asked.remove(target);
        observe(&mut self.tracker, target, result);
    }

    fn publish(&mut self, findings: &Findings) {
        let unpublished = self.tracker.take_unpublished();
        if unpublished.health {
            findings.health.send_replace(self.tracker.health().clone());
        }
        if unpublished.causes {
            findings.causes.send_replace(self.tracker.causes().clone());
        }
    }

    fn bring_forward(&mut self, connections: &mut ConnectionWatch) {
        for subject in connections.suspects() {
            for target in self.tracker.targets_of(&subject) {
                if self.schedule.bring_forward(target, Instant::now()) {
                    tracing::debug!(%target, "connections fail in a row; the next probe is brought forward");
                }
            }
        }
    }
}

/// Applies the result of a probe that was made, and logs a change of the health of the target.
fn observe(tracker: &mut HealthTracker, target: &Target, result: Result<(), String>) {
    let change = tracker.observe(target, result.as_ref().map_err(String::as_str).copied(), Instant::now());
    let why = result.err().unwrap_or_default();
    match change {
        Some(HealthChange::Failing(_)) if !tracker.counts(target) => {
            tracing::info!(%target, why, "no node passes this check of kube-proxy, so it does not count");
        }
        Some(HealthChange::Failing(passes)) => {
            tracing::warn!(%target, why, passes_to_return = passes, "target fails its probes; its backends get no new flows");
        }
        Some(HealthChange::Healthy) => tracing::info!(%target, "target passes its probes again"),
        Some(HealthChange::Proven) => tracing::info!(%target, "target from the persisted state passed its first probe"),
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::{Arc, Mutex};

    use dataplane::FlowLimits;
    use proto::{HealthCheck, Protocol, State};

    use super::super::Subject;
    use super::super::target::tests::{service, services, subject, tcp};
    use super::*;
    use crate::agent::served::Served;

    /// A prober with a script: the results of each target in order, then its last one for ever. Counts probes.
    #[derive(Default)]
    struct Scripted {
        results: HashMap<Target, Vec<bool>>,
        takes: Duration,
        asked: Mutex<HashMap<Target, usize>>,
        at_once: Mutex<(usize, usize)>,
    }

    impl Scripted {
        fn new(results: &[(&str, &[bool])]) -> Self {
            let results = results.iter().map(|(target, r)| (tcp(target), r.to_vec())).collect();
            Self { results, ..Self::default() }
        }

        fn asked(&self, target: &str) -> usize {
            self.asked.lock().unwrap().get(&tcp(target)).copied().unwrap_or(0)
        }

        async fn run(&self, known: watch::Receiver<Option<GatewayState>>, findings: &Findings, concurrency: usize) {
            let connections = ConnectionWatch::new(watch::channel(Served::default()).1, Vec::new());
            let tunables = Tunables {
                snat: Vec::new(),
                node_port_addresses: Vec::new(),
                flows: FlowLimits::default(),
                targets_max: dataplane::flow::TARGETS_MAX,
            };
            let tunables = watch::channel(tunables).1;
            run(|target, _, _| self.probe(target), known, findings, concurrency, tunables, connections).await;
        }

        async fn probe(&self, target: Target) -> Outcome {
            let result = {
                let mut asked = self.asked.lock().unwrap();
                let asked = asked.entry(target.clone()).or_default();
                *asked += 1;
                self.results[&target].get(*asked - 1).or(self.results[&target].last()).copied().unwrap()
            };
            {
                let mut at_once = self.at_once.lock().unwrap();
                at_once.0 += 1;
                at_once.1 = at_once.1.max(at_once.0);
            }
            tokio::time::sleep(self.takes).await;
            self.at_once.lock().unwrap().0 -= 1;
            if result { Outcome::Passed } else { Outcome::Failed("scripted".to_owned()) }
        }
    }

    fn known(origin: Origin, backends: &[&str]) -> Option<GatewayState> {
        let web = service("web", Protocol::Tcp, backends, HealthCheck::default());
        Some(GatewayState { state: Arc::new(State { services: services(vec![web]), ..State::default() }), origin })
    }

    fn backends(addresses: &[&str]) -> imbl::HashSet<Subject> {
        addresses.iter().map(|a| subject(None, Protocol::Tcp, a)).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_backend_leaves_after_fall_failures_and_returns_after_rise_successes() {
        let prober = Scripted::new(&[("10.0.0.1:80", &[true, false, false, false, true, true]), ("10.0.0.2:80", &[true])]);
        let (_known, receiver) = watch::channel(known(Origin::Controller, &["10.0.0.1:80", "10.0.0.2:80"]));
        let findings = Findings::default();
        let mut health = findings.health.subscribe();
        let script = async {
            health.wait_for(|h| h.failing == backends(&["10.0.0.1:80"])).await.unwrap();
            assert_eq!(prober.asked("10.0.0.1:80"), 4);
            let causes = findings.causes.borrow().clone();
            assert_eq!(causes[&subject(None, Protocol::Tcp, "10.0.0.1:80")].as_ref(), "tcp 10.0.0.1:80 scripted");
            health.wait_for(|h| h.failing.is_empty()).await.unwrap();
            assert_eq!(prober.asked("10.0.0.1:80"), 6);
            assert!(findings.causes.borrow().is_empty());
        };
        tokio::select! {
            () = prober.run(receiver, &findings, 16) => unreachable!("the state is still followed"),
            () = script => {}
        }
    }

    #[tokio::test]
    async fn a_probe_that_cannot_be_made_is_news_once_for_each_reason() {
        let findings = Findings::default();
        let mut following = ProbeState::resuming(&findings, &[]);
        following.follow(&known(Origin::Controller, &["10.0.0.1:80"]).unwrap(), &findings);
        let target = tcp("10.0.0.1:80");
        let news = |following: &mut ProbeState, why| following.is_new(&target, why);
        assert_eq!(["a", "a", "b", "b"].map(|why| news(&mut following, why)), [true, false, true, false]);
        for outcome in [Outcome::Passed, Outcome::Failed("late".to_owned())] {
            following.take(&target, outcome);
            assert_eq!(["b", "b"].map(|why| news(&mut following, why)), [true, false]);
        }
        assert!(!following.is_new(&tcp("10.0.0.2:80"), "a"), "it is not followed");
        following.follow(&known(Origin::Controller, &[]).unwrap(), &findings);
        assert!(following.not_asked.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn under_a_state_from_disk_each_backend_is_proven_by_one_probe() {
        let prober = Scripted::new(&[("10.0.0.1:80", &[true]), ("10.0.0.2:80", &[false])]);
        let (_known, receiver) = watch::channel(known(Origin::Disk, &["10.0.0.1:80", "10.0.0.2:80"]));
        let findings = Findings::default();
        let mut health = findings.health.subscribe();
        let script = async {
            health.wait_for(|h| h.proven == backends(&["10.0.0.1:80"])).await.unwrap();
            assert_eq!(prober.asked("10.0.0.1:80"), 1);
            let last = health.wait_for(|h| !h.failing.is_empty()).await.unwrap();
            assert_eq!((&last.failing, &last.proven), (&backends(&["10.0.0.2:80"]), &backends(&["10.0.0.1:80"])));
        };
        tokio::select! {
            () = prober.run(receiver, &findings, 16) => unreachable!("the state is still followed"),
            () = script => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_probes_at_once_than_allowed_and_none_left_out() {
        let addresses: Vec<String> = (0..20).map(|i| format!("10.0.0.{i}:80")).collect();
        let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
        let results: Vec<(&str, &[bool])> = addresses.iter().map(|a| (*a, &[false][..])).collect();
        let prober = Scripted { takes: Duration::from_millis(400), ..Scripted::new(&results) };
        let (_known, receiver) = watch::channel(known(Origin::Controller, &addresses));
        let findings = Findings::default();
        let mut health = findings.health.subscribe();
        let script = async {
            health.wait_for(|h| h.failing.len() == 20).await.unwrap();
        };
        tokio::select! {
            () = prober.run(receiver, &findings, 3) => unreachable!("the state is still followed"),
            () = script => {}
        }
        assert_eq!(prober.at_once.lock().unwrap().1, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_removed_target_is_asked_no_more_and_the_task_ends_with_its_input() {
        let prober = Scripted::new(&[("10.0.0.1:80", &[false]), ("10.0.0.2:80", &[true])]);
        let (sender_of_state, receiver) = watch::channel(known(Origin::Controller, &["10.0.0.1:80", "10.0.0.2:80"]));
        let findings = Findings::default();
        let mut health = findings.health.subscribe();
        let script = async {
            health.wait_for(|h| !h.failing.is_empty()).await.unwrap();
            sender_of_state.send_replace(known(Origin::Controller, &["10.0.0.2:80"]));
            health.wait_for(|h| h.failing.is_empty()).await.unwrap();
            let (gone, stays) = (prober.asked("10.0.0.1:80"), prober.asked("10.0.0.2:80"));
            while prober.asked("10.0.0.2:80") < stays + 3 {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            assert_eq!(prober.asked("10.0.0.1:80"), gone);
            drop(sender_of_state);
        };
        tokio::join!(prober.run(receiver, &findings, 16), script);
    }
}

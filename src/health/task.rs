//! The probe task: follows the state, starts probes when they are due, publishes health.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use dataplane::{RouteLookup, Tunables};
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use proto::limits::{PROBE_PORT_FIRST, PROBE_PORT_LAST};
use proto::{GatewayState, Origin, ProbeTags};
use tokio::sync::watch;
use tokio::sync::watch::error::RecvError;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tokio_util::sync::CancellationToken;

use super::connections::{ConnectionWatch, LOOK_EVERY};
use super::history::{HealthChange, SavedHealth};
use super::schedule::Schedule;
use super::source_ports::Tags;
use super::target::{Changes, TargetTable};
use super::tracker::HealthTracker;
use super::{Outcome, Target};
use crate::agent::backend_health::{Causes, Health};
use crate::agent::backend_history::{BackendHistories, LastCheck, now_s};
use crate::agent::persist::sealed::Moment;
use crate::agent::watch::send_if_changed;

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
    /// Output: the last check of each backend.
    pub histories: BackendHistories,
    /// The health of all targets in the form in which it is saved, once the gateway ends. Empty if no state has been
    /// followed: then the health that the process before has saved is still that of the next one.
    pub saved: watch::Sender<Option<Arc<[u8]>>>,
}

/// Inputs of the task.
#[derive(Debug)]
pub struct ProbeInputs {
    /// The state. The task ends with its sender.
    pub state: watch::Receiver<Option<GatewayState>>,
    /// The routes of the gateway; nothing is probed before they are known.
    pub routes: watch::Receiver<Option<RouteLookup>>,
    /// The configuration. Ports of NodePort Services are probed if this gateway serves their family at its addresses for
    /// node ports.
    pub tunables: watch::Receiver<Tunables>,
    /// Backends whose connections fail in a row are probed earlier.
    pub connections: ConnectionWatch,
    /// The health that the process before has saved.
    pub saved: SavedHealth,
    /// Output: cancelled once targets have taken over what was saved of them.
    pub taken_over: CancellationToken,
    /// Cancelled when the gateway is about to end: the health of all targets is published for the next process.
    pub terminating: CancellationToken,
}

/// Probes the targets of the state, at most `concurrency` at once. Beyond that limit probes are delayed, never skipped.
pub async fn run<F: Future<Output = Outcome>>(
    probe: impl Fn(Target, Option<u16>) -> F,
    ProbeInputs { mut state, mut routes, mut tunables, mut connections, saved, taken_over, terminating }: ProbeInputs,
    findings: &Findings,
    concurrency: usize,
) {
    let mut following = ProbeState::resuming(findings, saved, &tunables.borrow_and_update().node_port_addresses);
    let mut under_way = FuturesUnordered::new();
    state.mark_changed();
    routes.mark_changed();
    let (mut not_before, mut look_at_routes) = (Instant::now(), Instant::now());
    let mut looks = interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let may_start = under_way.len() < concurrency && following.routes.is_some();
        tokio::select! {
            changed = changed_after(&mut state, not_before) => {
                if changed.is_err() {
                    return;
                }
                let newest = state.borrow_and_update().clone();
                if let Some(newest) = newest {
                    following.follow(&newest, findings);
                }
                if following.tracker.has_begun() {
                    taken_over.cancel();
                }
                not_before = Instant::now() + FOLLOWED_EVERY;
            }
            Ok(()) = tunables.changed() => {
                // Without a state there are no targets.
                let origin = state.borrow().as_ref().map_or(Origin::Disk, |current| current.origin);
                following.serve_node_ports_at(&tunables.borrow_and_update().node_port_addresses, origin, findings);
            }
            Ok(()) = changed_after(&mut routes, look_at_routes) => {
                following.route_by(routes.borrow_and_update().clone(), findings);
                look_at_routes = Instant::now() + FOLLOWED_EVERY;
            }
            Some((target, started, outcome)) = under_way.next() => {
                following.take(&target, outcome, Instant::now() - started, findings);
                let next = following.tracker.follows(&target).then(|| started + target.settings.interval);
                following.schedule.finished(target, next);
                following.publish(findings);
            }
            () = until(following.schedule.next()), if may_start => {
                let now = Instant::now();
                let Some(target) = following.schedule.start(now) else { continue };
                // The newest routes, which the others of its targets may learn of later.
                if following.may_ask(&target, routes.borrow().as_ref(), findings) {
                    let outcome = probe(target.clone(), following.tags.of(&target));
                    under_way.push(async move { (target, now, outcome.await) });
                } else {
                    let next = now + target.settings.interval;
                    following.schedule.finished(target, Some(next));
                }
            }
            () = terminating.cancelled(), if findings.saved.borrow().is_none() => {
                let saved = following.saved();
                findings.saved.send_replace(Some(saved));
            }
            _ = looks.tick(), if !following.slow.is_empty() => following.bring_forward(&mut connections),
        }
    }
}

async fn changed_after<T>(input: &mut watch::Receiver<T>, not_before: Instant) -> Result<(), RecvError> {
    sleep_until(not_before).await;
    input.changed().await
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
    routes: Option<RouteLookup>,
}

impl ProbeState {
    fn resuming(findings: &Findings, saved: SavedHealth, node_port_addresses: &[IpAddr]) -> Self {
        Self {
            table: TargetTable::new(node_port_addresses),
            tracker: HealthTracker::resuming(findings.health.borrow().clone(), saved),
            schedule: Schedule::default(),
            tags: Tags::resuming(findings.tags.borrow().clone()),
            untagged: 0,
            slow: HashSet::new(),
            not_asked: HashMap::new(),
            routes: None,
        }
    }

    fn follow(&mut self, current: &GatewayState, findings: &Findings) {
        let changes = self.table.follow(&current.state.services);
        self.take_over(changes, current.origin, findings);
    }

    fn serve_node_ports_at(&mut self, addresses: &[IpAddr], origin: Origin, findings: &Findings) {
        let changes = self.table.serve_node_ports_at(addresses);
        if changes.is_empty() {
            return;
        }
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
        for (target, subjects) in &changes {
            if subjects.is_none() {
                self.slow.remove(target);
                self.not_asked.remove(target);
            } else if target.settings.interval > LOOK_EVERY {
                self.slow.insert(target.clone());
            }
        }
        let followed: Vec<_> = changes.iter().filter(|(_, new)| new.is_some()).map(|(target, _)| target.clone()).collect();
        let has_removed = changes.iter().any(|(_, new)| new.is_none());
        self.tracker.follow(changes, origin);
        if has_removed {
            findings.histories.retain_checks(|backend| self.tracker.targets_of(backend).next().is_some());
        }
        self.look_at_routes(followed);
        self.publish(findings);
    }

    /// Takes over other routes.
    fn route_by(&mut self, routes: Option<RouteLookup>, findings: &Findings) {
        let has_none = |routes: &Option<RouteLookup>| routes.as_ref().is_some_and(|routes| routes.interfaces().is_empty());
        if has_none(&routes) && !has_none(&self.routes) {
            tracing::warn!("no port has an interface in Linux, so backends are not probed and count as healthy");
        }
        self.routes = routes;
        let all = self.tracker.targets().cloned().collect();
        self.look_at_routes(all);
        self.publish(findings);
    }

    fn look_at_routes(&mut self, targets: Vec<Target>) {
        let Some(routes) = &self.routes else { return };
        for target in targets {
            self.tracker.set_routed(&target, routes.has_route(target.backend()));
        }
    }

    /// Whether a target may be probed now: a probe to an address that no port leads to would go somewhere else.
    fn may_ask(&mut self, target: &Target, routes: Option<&RouteLookup>, findings: &Findings) -> bool {
        let Some(routes) = routes else { return false };
        let routed = routes.has_route(target.backend());
        self.tracker.set_routed(target, routed);
        self.publish(findings);
        routed && !routes.interfaces().is_empty()
    }

    /// Applies `outcome`. A probe that could not be made is logged once for each reason, not at every interval. Of the
    /// targets of a backend the check of the one that fails is its last one.
    fn take(&mut self, target: &Target, outcome: Outcome, took: Duration, findings: &Findings) {
        let found = match &outcome {
            Outcome::NotAsked(_) => None,
            Outcome::Passed => Some(Ok(())),
            Outcome::Failed(why) => Some(Err(format!("{target} {why}").into())),
        };
        self.apply(target, outcome);
        let Some((found, (contrary, needed))) = found.zip(self.tracker.contrary(target)) else { return };
        let concerned = self.tracker.subjects_of(target).filter(|backend| !self.tracker.is_outweighed(backend, target));
        findings.histories.check(concerned, &LastCheck { at_s: now_s(), took, found, contrary, needed });
    }

    fn apply(&mut self, target: &Target, outcome: Outcome) {
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
        let is_new = self.tracker.follows(target) && self.not_asked.get(target).is_none_or(|last| last != why);
        if is_new {
            self.not_asked.insert(target.clone(), why.to_owned());
        }
        is_new
    }

    fn observe(&mut self, target: &Target, result: Result<(), String>) {
        self.not_asked.remove(target);
        observe(&mut self.tracker, target, result);
    }

    /// The health of all targets, for the next process.
    fn saved(&self) -> Arc<[u8]> {
        if !self.tracker.has_begun() {
            return Arc::default();
        }
        SavedHealth::encode(self.tracker.histories(), Instant::now(), Moment::now()).into()
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
    use std::sync::Mutex;

    use dataplane::{Compiler, Config, FlowLimits, Mac, Network, PortConfig, Tunnel};
    use proto::{HealthCheck, Protocol, State};

    use super::super::target::tests::{node_health, service, services, subject, tcp};
    use super::*;
    use crate::agent::backend_health::Subject;
    use crate::agent::served::Served;

    /// A prober with a script: the results of each target in order, then its last one for ever. Counts probes.
    #[derive(Default)]
    struct Scripted {
        results: HashMap<Target, Vec<bool>>,
        takes: Duration,
        asked: Mutex<HashMap<Target, usize>>,
        at_once: Mutex<(usize, usize)>,
        routes: watch::Sender<Option<RouteLookup>>,
        saved: Mutex<Option<SavedHealth>>,
        taken: CancellationToken,
        ends: CancellationToken,
    }

    /// The routes of a gateway with one port of this prefix.
    fn routes(prefix: &str) -> Option<RouteLookup> {
        let port = PortConfig {
            name: "cluster".to_owned(),
            mac: Mac::default(),
            mtu: 1500,
            addresses: vec![prefix.parse().unwrap()],
            twin: true,
        };
        let config = Config {
            ports: vec![port],
            snat: Vec::new(),
            shared_snat: false,
            node_port_addresses: Vec::new(),
            flows: FlowLimits::default(),
            targets_max: dataplane::flow::TARGETS_MAX,
            tunnel: Tunnel::default(),
        };
        let network = Network { interfaces: Some(vec![7]), ..Network::default() };
        Compiler::new(config).compile(&State::default(), &network, &dataplane::Health::default(), 0).route_lookup()
    }

    impl Scripted {
        fn new(results: &[(&str, &[bool])]) -> Self {
            let results = results.iter().map(|(target, r)| (tcp(target), r.to_vec())).collect();
            Self { results, routes: watch::Sender::new(routes("10.0.0.254/24")), ..Self::default() }
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
            let (tunables, routes) = (watch::channel(tunables).1, self.routes.subscribe());
            let (saved, ends) = (self.saved.lock().unwrap().take().unwrap_or_default(), self.ends.clone());
            let taken = self.taken.clone();
            let inputs = ProbeInputs { state: known, routes, tunables, connections, saved, taken_over: taken, terminating: ends };
            run(|target, _| self.probe(target), inputs, findings, concurrency).await;
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
        addresses.iter().map(|a| subject("web", Protocol::Tcp, a)).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_ends_before_a_state_leaves_what_the_process_before_has_saved() {
        let (prober, findings) = (Scripted::new(&[]), Findings::default());
        let (_known, receiver) = watch::channel(None);
        let mut saved = findings.saved.subscribe();
        prober.ends.cancel();
        let ended = async { saved.wait_for(Option::is_some).await.unwrap().clone().unwrap() };
        tokio::select! {
            () = prober.run(receiver, &findings, 16) => unreachable!("the state is still followed"),
            saved = ended => assert!(saved.is_empty() && !prober.taken.is_cancelled()),
        }
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
            assert_eq!(causes[&subject("web", Protocol::Tcp, "10.0.0.1:80")].as_ref(), "tcp 10.0.0.1:80 scripted");
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
        let mut following = ProbeState::resuming(&findings, SavedHealth::default(), &[]);
        following.follow(&known(Origin::Controller, &["10.0.0.1:80"]).unwrap(), &findings);
        let target = tcp("10.0.0.1:80");
        let news = |following: &mut ProbeState, why| following.is_new(&target, why);
        assert_eq!(["a", "a", "b", "b"].map(|why| news(&mut following, why)), [true, false, true, false]);
        for outcome in [Outcome::Passed, Outcome::Failed("late".to_owned())] {
            following.take(&target, outcome, Duration::ZERO, &Findings::default());
            assert_eq!(["b", "b"].map(|why| news(&mut following, why)), [true, false]);
        }
        assert!(!following.is_new(&tcp("10.0.0.2:80"), "a"), "it is not followed");
        following.follow(&known(Origin::Controller, &[]).unwrap(), &findings);
        assert!(following.not_asked.is_empty());
    }

    #[tokio::test]
    async fn the_last_check_of_a_backend_is_that_of_its_failing_target() {
        let findings = Findings::default();
        let mut following = ProbeState::resuming(&findings, SavedHealth::default(), &[]);
        let health = HealthCheck { node_health_port: Some(31_000), ..HealthCheck::default() };
        let web = service("web", Protocol::Tcp, &["10.0.0.1:80"], health);
        let state = Arc::new(State { services: services(vec![web]), ..State::default() });
        following.follow(&GatewayState { state, origin: Origin::Controller }, &findings);
        let backend = subject("web", Protocol::Tcp, "10.0.0.1:80");
        let mut last = |target: &Target, passes: bool| {
            let outcome = if passes { Outcome::Passed } else { Outcome::Failed("late".to_owned()) };
            following.take(target, outcome, Duration::ZERO, &findings);
            findings.histories.of([&backend]).remove(0).1.unwrap().found.err().as_deref().map(str::to_owned)
        };
        let (pod, node) = (tcp("10.0.0.1:80"), node_health("10.0.0.1:31000"));
        let of_node = Some("GET http://10.0.0.1:31000/healthz late".to_owned());
        assert_eq!((last(&pod, true), last(&node, false), last(&pod, true)), (None, of_node.clone(), of_node));
        assert_eq!((last(&node, true), last(&pod, true)), (None, None));
        assert_eq!(last(&pod, false), Some("tcp 10.0.0.1:80 late".to_owned()));
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
    async fn a_backend_that_no_port_leads_to_is_not_probed_and_has_no_route_until_one_does() {
        let addresses = ["10.0.0.1:80", "10.99.0.1:80"];
        let prober = Scripted::new(&[("10.0.0.1:80", &[true]), ("10.99.0.1:80", &[true])]);
        prober.routes.send_replace(None);
        let udp = service("dns", Protocol::Udp, &["10.0.0.1:53", "10.99.0.1:53"], HealthCheck::default());
        let web = service("web", Protocol::Tcp, &addresses, HealthCheck::default());
        let state = State { services: services(vec![web, udp]), ..State::default() };
        let (_known, receiver) = watch::channel(Some(GatewayState { state: Arc::new(state), origin: Origin::Controller }));
        let findings = Findings::default();
        let mut health = findings.health.subscribe();
        let [web, dns] = [("web", Protocol::Tcp, "10.99.0.1:80"), ("dns", Protocol::Udp, "10.99.0.1:53")]
            .map(|(service, protocol, address)| subject(service, protocol, address));
        let script = async {
            tokio::time::sleep(Duration::from_secs(60)).await;
            assert_eq!((prober.asked(addresses[0]), health.borrow().failing.len()), (0, 0), "no routes are known yet");
            prober.routes.send_replace(routes("10.0.0.254/24"));
            let unrouted = imbl::HashSet::from_iter([web.clone(), dns.clone()]);
            health.wait_for(|h| h.failing == unrouted).await.unwrap();
            for subject in [&web, &dns] {
                assert_eq!(findings.causes.borrow()[subject].as_ref(), "no route by a port");
            }
            tokio::time::sleep(Duration::from_secs(60)).await;
            assert!(prober.asked(addresses[0]) >= 59 && prober.asked(addresses[1]) == 0);
            prober.routes.send_replace(routes("10.0.0.254/8"));
            health.wait_for(|h| h.failing.is_empty()).await.unwrap();
            while prober.asked(addresses[1]) < 2 {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            prober.routes.send_replace(routes("10.0.0.254/24"));
            health.wait_for(|h| h.failing.len() == 2).await.unwrap();
            let asked = prober.asked(addresses[1]);
            tokio::time::sleep(Duration::from_secs(60)).await;
            assert_eq!(prober.asked(addresses[1]), asked);
        };
        tokio::select! {
            () = prober.run(receiver, &findings, 16) => unreachable!("the state is still followed"),
            () = script => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn health_is_saved_when_the_gateway_ends_and_the_next_process_begins_with_it() {
        let state = || watch::channel(known(Origin::Controller, &["10.0.0.1:80", "10.0.0.2:80"]));
        let script = [("10.0.0.1:80", &[false][..]), ("10.0.0.2:80", &[true])];
        let (prober, findings) = (Scripted::new(&script), Findings::default());
        let (mut health, mut saved) = (findings.health.subscribe(), findings.saved.subscribe());
        let (_known, receiver) = state();
        let last = async {
            health.wait_for(|h| h.failing == backends(&["10.0.0.1:80"])).await.unwrap();
            assert!(saved.borrow().is_none());
            prober.ends.cancel();
            saved.wait_for(Option::is_some).await.unwrap().clone().unwrap()
        };
        let saved = tokio::select! {
            () = prober.run(receiver, &findings, 16) => unreachable!("the state is still followed"),
            saved = last => saved,
        };
        let (prober, findings) = (Scripted::new(&script), Findings::default());
        *prober.saved.lock().unwrap() = Some(SavedHealth::decode(&saved, Instant::now(), Moment::now()).unwrap());
        let mut health = findings.health.subscribe();
        let (_known, receiver) = state();
        let next = async {
            health.wait_for(|h| h.failing == backends(&["10.0.0.1:80"])).await.unwrap();
            assert_eq!(prober.asked("10.0.0.1:80"), 0, "it is known without a probe");
            assert!(prober.taken.is_cancelled());
        };
        tokio::select! {
            () = prober.run(receiver, &findings, 16) => unreachable!("the state is still followed"),
            () = next => {}
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

//! The compile loop: state, network and health in, snapshots out.
//!
//! Invariant: each snapshot contains the newest value of every input; changes that arrive faster than workers apply
//! snapshots are coalesced. A generation counts as applied once every worker uses it or a later one. Before the first
//! state, from a controller or from disk, nothing is published, and workers keep the initial snapshot, which is not
//! ready. Deliberately not here: how a snapshot is compiled ([`dataplane::Compiler`]) and freed
//! ([`dataplane::Publisher`]).

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dataplane::{Compiler, Health, Link, Network, Publisher, RouteLookup, Snapshot, Tunables, VipAnswers};
use ipnet::IpNet;
use proto::{GatewayState, Generation, ProbeTags, ServiceName};
use tokio::sync::{Mutex, watch};
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::backend_health;
use super::served::Served;
use super::supervisor::Failure;
use super::usable::usable;
use super::watch::send_if_changed;

/// Minimum time between two snapshots, and polling interval of the workers while a snapshot is pending. The first
/// change after a pause is not delayed.
const STEP: Duration = Duration::from_millis(1);
/// Workers that poll take a snapshot within a burst or two, so the first look does not wait for a step.
const FIRST_LOOK: Duration = Duration::from_micros(50);
/// Maximum number of generations that workers have not applied yet; beyond it, changes wait.
const AWAITED_MAX: usize = 8;

/// State that survives a failure of the task: flows hold slots, and the compiler knows their owners.
#[derive(Debug)]
pub struct SnapshotPipeline {
    /// Compiles snapshots.
    pub compiler: Compiler,
    /// Publishes them to the workers.
    pub publisher: Publisher,
}

/// Inputs of snapshots.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// The current state.
    pub state: watch::Receiver<Option<GatewayState>>,
    /// The network as Linux has it.
    pub network: watch::Receiver<Network>,
    /// Results of the probes.
    pub health: watch::Receiver<backend_health::Health>,
    /// Backends of probes that are sent to a VIP.
    pub tags: watch::Receiver<ProbeTags>,
    /// The configuration as far as it changes while the gateway runs.
    pub tunables: watch::Receiver<Tunables>,
    /// The VIPs for which the gateway answers.
    pub answers: watch::Receiver<VipAnswers>,
    /// Monotonic time, ns; the workers' own.
    pub clock: fn() -> u64,
}

/// Links and addresses for which the engine answers, in the form of [`dataplane::Snapshot::announced`].
pub type AnsweredAddresses = Arc<[(Link, IpAddr, u64)]>;

/// What snapshots say to other tasks. A clone has the same channels.
#[derive(Clone, Debug, Default)]
pub struct Outputs {
    /// Next hops that Linux shall keep resolved.
    pub next_hops: watch::Sender<BTreeSet<(Link, IpAddr)>>,
    /// Addresses for which the gateway answers, by port.
    pub answered: watch::Sender<AnsweredAddresses>,
    /// VIPs for the route table that routing daemons announce, each with the prefix by which it is announced.
    pub routed: watch::Sender<BTreeMap<IpAddr, IpNet>>,
    /// Data for the admin API.
    pub served: watch::Sender<Served>,
    /// The routes, for the probes.
    pub routes: watch::Sender<Option<RouteLookup>>,
    /// The generation that every worker has applied.
    pub applied: watch::Sender<Option<Generation>>,
}

/// The compile loop. Cloned for each start.
#[derive(Clone, Debug)]
pub struct CompileLoop {
    /// What survives a failure of the task.
    pub pipeline: Arc<Mutex<SnapshotPipeline>>,
    /// Inputs of snapshots.
    pub inputs: Inputs,
    /// What other tasks read of snapshots.
    pub outputs: Outputs,
}

impl CompileLoop {
    /// Compiles and publishes snapshots until an input is closed.
    ///
    /// # Errors
    /// Never. The supervisor handles a panic of the compiler.
    pub async fn run(self) -> Result<(), Failure> {
        let Self { pipeline, mut inputs, outputs } = self;
        let mut pipeline = pipeline.lock().await;
        let mut step = interval(STEP);
        step.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let clock = inputs.clock;
        let mut due = true;
        let mut awaited = VecDeque::new();
        let (mut problems, mut engine) = (Vec::new(), None);
        loop {
            tokio::select! {
                changed = inputs.changed() => {
                    let Some(is_of_probes) = changed else { return Ok(()) };
                    due = true;
                    if is_of_probes {
                        engine = None;
                    }
                }
                () = until(pipeline.compiler.next_due_ns(), clock), if !due => due = true,
                _ = step.tick(), if due || !awaited.is_empty() => {
                    if due && awaited.len() < AWAITED_MAX {
                        due = false;
                        let start = Instant::now();
                        if let Some(snapshot) = inputs.compile(&mut pipeline.compiler, &mut engine) {
                            let compile_us = start.elapsed().as_micros();
                            log_problems(&snapshot, &mut problems);
                            outputs.publish(&snapshot);
                            let generation = snapshot.generation().clone();
                            let sequence = pipeline.publisher.publish(snapshot);
                            tracing::debug!(%generation, compile_us, "published");
                            awaited.push_back((sequence, generation));
                            look(&pipeline.publisher, sequence);
                        }
                    }
                    pipeline.publisher.advance();
                    let applied = awaited.iter().take_while(|(sequence, _)| pipeline.publisher.reached(*sequence)).count();
                    if let Some((_, generation)) = awaited.drain(..applied).next_back() {
                        tracing::debug!(%generation, "every worker has applied the generation");
                        send_if_changed(&outputs.applied, Some(generation));
                        pipeline.publisher.advance();
                    }
                }
            }
        }
    }
}

impl Inputs {
    /// Waits for a change; returns whether it came from the probes, or `None` if an input is closed.
    async fn changed(&mut self) -> Option<bool> {
        let (changed, is_of_probes) = tokio::select! {
            changed = self.state.changed() => (changed, false),
            changed = self.network.changed() => (changed, false),
            changed = self.health.changed() => (changed, true),
            changed = self.tags.changed() => (changed, true),
            changed = self.tunables.changed() => (changed, false),
            changed = self.answers.changed() => (changed, false),
        };
        changed.is_ok().then_some(is_of_probes)
    }

    /// `None` while there is no state. `engine` is the cached health in the engine's terms; `None` if it may have
    /// changed.
    fn compile(&mut self, compiler: &mut Compiler, engine: &mut Option<Health>) -> Option<Snapshot> {
        let state = self.state.borrow_and_update().clone()?;
        if self.health.has_changed().unwrap_or(true) || self.tags.has_changed().unwrap_or(true) {
            *engine = None;
        }
        let health = self.health.borrow_and_update();
        if engine.is_none() {
            compiler.probe_by(self.tags.borrow_and_update().clone());
        }
        let engine = engine.get_or_insert_with(|| engine_health(&health));
        compiler.tune(&self.tunables.borrow_and_update());
        compiler.answer_for(&self.answers.borrow_and_update());
        let network = self.network.borrow_and_update();
        let state = usable(&state, &health);
        let now_ns = (self.clock)();
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        compiler.set_time_of_day(u64::try_from(unix.as_nanos()).unwrap_or(u64::MAX), now_ns);
        Some(compiler.compile(&state, &network, engine, now_ns))
    }
}

/// The results of the probes in the engine's terms.
fn engine_health(health: &backend_health::Health) -> Health {
    let by_service = |subjects: &imbl::HashSet<backend_health::Subject>| {
        // The name of a service is copied once, not for each of its backends.
        let mut all = HashMap::<_, HashSet<_>>::new();
        for subject in subjects {
            all.entry(&subject.service).or_default().insert((subject.protocol, subject.address));
        }
        Arc::new(all.into_iter().map(|(service, backends)| (ServiceName::clone(service), backends)).collect())
    };
    Health { failing_for: by_service(&health.failing), proven_for: by_service(&health.proven), ..Health::default() }
}

impl Outputs {
    fn publish(&self, snapshot: &Snapshot) {
        send_if_changed(&self.next_hops, snapshot.managed_next_hops().iter().copied().collect());
        self.answered.send_if_modified(|last| {
            let is_other = !Arc::ptr_eq(last, snapshot.announced());
            last.clone_from(snapshot.announced());
            is_other
        });
        send_if_changed(&self.routed, snapshot.routed().iter().copied().collect());
        self.served.send_replace(Served::from(snapshot));
        let routes = snapshot.route_lookup();
        self.routes.send_if_modified(|last| {
            let is_same = last.as_ref().zip(routes.as_ref()).is_some_and(|(last, new)| last.is_same(new));
            if !is_same {
                *last = routes;
            }
            !is_same
        });
    }
}

/// Waits for [`FIRST_LOOK`] at most until every worker has a snapshot.
fn look(publisher: &Publisher, sequence: u64) {
    let start = Instant::now();
    while !publisher.reached(sequence) && start.elapsed() < FIRST_LOOK {
        std::hint::spin_loop();
    }
}

/// Waits until `at_ns` of `clock`; for ever if it is `None`.
async fn until(at_ns: Option<u64>, clock: fn() -> u64) {
    match at_ns {
        Some(at_ns) => sleep(Duration::from_nanos(at_ns.saturating_sub(clock()))).await,
        None => std::future::pending().await,
    }
}

/// Logs problems of a snapshot, once each: conflicts between configuration and state, and Services that fail open.
fn log_problems(snapshot: &Snapshot, logged: &mut Vec<String>) {
    for problem in snapshot.problems().iter().filter(|problem| !logged.contains(problem)) {
        tracing::warn!(generation = %snapshot.generation(), "{problem}");
    }
    if *logged != snapshot.problems() {
        *logged = snapshot.problems().to_vec();
    }
}

#[cfg(test)]
mod tests {
    use dataplane::{Config, FlowLimits, Mac, Neighbour, PortConfig, PortIndex, Subscriber, Tunnel};
    use proto::{Origin, Protocol, State};
    use tokio::task::JoinHandle;
    use tokio::time::timeout;

    use super::*;
    use crate::controller_client::received::tests::{service, state};

    const LONG: Duration = Duration::from_secs(120);

    fn config() -> Config {
        let second = Duration::from_secs(1);
        let port = PortConfig {
            name: "cluster".to_owned(),
            mac: Mac([2, 0, 0, 0, 0, 1]),
            mtu: 1500,
            addresses: vec!["10.0.0.254/24".parse().unwrap()],
            twin: true,
        };
        Config {
            ports: vec![port],
            snat: vec!["10.0.0.253".parse().unwrap()],
            node_port_addresses: Vec::new(),
            flows: FlowLimits {
                max_per_worker: 16,
                tcp_established: second,
                tcp_opening: second,
                tcp_closing: second,
                udp: second,
                udp_unreplied: second,
                ..FlowLimits::default()
            },
            shared_snat: false,
            targets_max: dataplane::flow::TARGETS_MAX,
            tunnel: Tunnel::default(),
        }
    }

    /// The loop with its channels, and the worker's side of it.
    struct Gateway {
        pipeline: Arc<Mutex<SnapshotPipeline>>,
        inputs: Inputs,
        outputs: Outputs,
        worker: Subscriber,
        state: watch::Sender<Option<GatewayState>>,
        network: watch::Sender<Network>,
        health: watch::Sender<backend_health::Health>,
        /// Open as long as the gateway runs.
        _tags: watch::Sender<ProbeTags>,
        tunables: watch::Sender<Tunables>,
        /// Open as long as the gateway runs.
        _answers: watch::Sender<VipAnswers>,
        next_hops: watch::Receiver<BTreeSet<(Link, IpAddr)>>,
        served: watch::Receiver<Served>,
        applied: watch::Receiver<Option<Generation>>,
        task: JoinHandle<Result<(), Failure>>,
    }

    impl Gateway {
        fn start() -> Self {
            let compiler = Compiler::new(config());
            let (publisher, mut workers) = Publisher::new(compiler.initial(), 1);
            let pipeline = Arc::new(Mutex::new(SnapshotPipeline { compiler, publisher }));
            let (state, state_in) = watch::channel(None);
            let (network, network_in) = watch::channel(Network::default());
            let (health, health_in) = watch::channel(backend_health::Health::default());
            let (next_hops_out, next_hops) = watch::channel(BTreeSet::new());
            let (served_out, served) = watch::channel(Served::default());
            let (applied_out, applied) = watch::channel(None);
            let (_tags, tags_in) = watch::channel(ProbeTags::new());
            let (tunables, tunables_in) = watch::channel(config().tunables());
            let (_answers, answers_in) = watch::channel(VipAnswers::default());
            let inputs = Inputs {
                state: state_in,
                network: network_in,
                health: health_in,
                tags: tags_in,
                tunables: tunables_in,
                answers: answers_in,
                clock: || 0,
            };
            let outputs = Outputs {
                next_hops: next_hops_out,
                answered: watch::Sender::default(),
                routed: watch::Sender::default(),
                served: served_out,
                routes: watch::Sender::default(),
                applied: applied_out,
            };
            let task = tokio::spawn(
                CompileLoop { pipeline: Arc::clone(&pipeline), inputs: inputs.clone(), outputs: outputs.clone() }.run(),
            );
            let worker = workers.remove(0);
            Self {
                pipeline,
                inputs,
                outputs,
                worker,
                state,
                network,
                health,
                _tags,
                tunables,
                _answers,
                next_hops,
                served,
                applied,
                task,
            }
        }

        fn know(&self, origin: Origin, state: State) {
            self.state.send_replace(Some(GatewayState { state: Arc::new(state), origin }));
        }

        /// Waits until the backends of web that get new flows are `wanted`.
        async fn takes(&mut self, wanted: &[&str]) {
            let right = |served: &Served| {
                let web = served.services.values().find(|s| *s.name == ServiceName::new("default", "web"));
                let backends = web.into_iter().flat_map(|s| &s.ports).flat_map(|p| &p.backends);
                let taking: Vec<_> = backends.filter(|b| b.accepts_new).map(|b| b.address.to_string()).collect();
                served.ready && taking == wanted
            };
            let arrived = timeout(LONG, self.served.wait_for(right)).await.is_ok();
            assert!(arrived, "expected {wanted:?}, found {:?}", self.served.borrow());
        }
    }

    fn web(counter: u64, backends: &[&str]) -> State {
        state("e", counter, &[service("web", backends)])
    }

    #[tokio::test]
    async fn a_generation_is_reached_when_the_worker_took_it_and_not_before() {
        let mut gateway = Gateway::start();
        gateway.know(Origin::Controller, web(1, &["10.0.0.1:80"]));
        gateway.takes(&["10.0.0.1:80"]).await;
        assert_eq!(*gateway.applied.borrow(), None);
        let deadline = std::time::Instant::now() + LONG;
        while !gateway.worker.refresh() {
            assert!(std::time::Instant::now() < deadline);
            tokio::task::yield_now().await;
        }
        let generation = Generation { epoch: "e".to_owned(), counter: 1 };
        timeout(LONG, gateway.applied.wait_for(|g| g.as_ref() == Some(&generation))).await.unwrap().unwrap();
        assert!(gateway.worker.snapshot().ready());
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_published_before_the_first_state() {
        let mut gateway = Gateway::start();
        let neighbour = Neighbour { link: PortIndex(0).into(), address: "10.0.0.1".parse().unwrap(), mac: Mac([2; 6]) };
        gateway.network.send_replace(Network { neighbours: vec![neighbour], ..Network::default() });
        tokio::time::sleep(10 * STEP).await;
        assert!(!gateway.worker.refresh() && !gateway.served.borrow().ready);
        gateway.know(Origin::Controller, web(1, &["10.0.0.1:80"]));
        gateway.takes(&["10.0.0.1:80"]).await;
        let wanted = BTreeSet::from([(PortIndex(0).into(), "10.0.0.1".parse().unwrap())]);
        timeout(LONG, gateway.next_hops.wait_for(|hops| *hops == wanted)).await.unwrap().unwrap();
    }

    fn subject(service: &str, address: &str) -> backend_health::Subject {
        let service = Arc::new(ServiceName::new("default", service));
        backend_health::Subject { service, protocol: Protocol::Tcp, address: address.parse().unwrap() }
    }

    #[tokio::test]
    async fn what_fails_for_one_service_alone_takes_no_backend_from_another() {
        let mut gateway = Gateway::start();
        gateway.know(Origin::Controller, web(1, &["10.0.0.1:80", "10.0.0.2:80"]));
        gateway.takes(&["10.0.0.1:80", "10.0.0.2:80"]).await;
        let failing = |service| imbl::HashSet::from_iter([subject(service, "10.0.0.2:80"), subject("other", "10.0.0.1:80")]);
        gateway.health.send_replace(backend_health::Health { failing: failing("web"), ..backend_health::Health::default() });
        gateway.takes(&["10.0.0.1:80"]).await;
        gateway.health.send_replace(backend_health::Health { failing: failing("third"), ..backend_health::Health::default() });
        gateway.takes(&["10.0.0.1:80", "10.0.0.2:80"]).await;
    }

    #[tokio::test]
    async fn a_change_of_the_configuration_reaches_the_workers_without_a_change_of_state() {
        let mut gateway = Gateway::start();
        gateway.know(Origin::Controller, web(1, &["10.0.0.1:80"]));
        gateway.takes(&["10.0.0.1:80"]).await;
        gateway.worker.refresh();
        let answers =
            |gateway: &Gateway| gateway.worker.snapshot().answers_for_ip(PortIndex(0).into(), "10.0.0.252".parse().unwrap());
        assert!(!answers(&gateway));
        gateway.tunables.send_modify(|tunables| tunables.snat.push("10.0.0.252".parse().unwrap()));
        let deadline = std::time::Instant::now() + LONG;
        while !answers(&gateway) {
            assert!(std::time::Instant::now() < deadline);
            gateway.worker.refresh();
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn health_takes_a_backend_out_and_from_disk_proof_brings_it_in() {
        let mut gateway = Gateway::start();
        let backends = ["10.0.0.1:80", "10.0.0.2:80"];
        let set = |address: &str| imbl::HashSet::unit(subject("web", address));
        gateway.know(Origin::Disk, web(1, &backends));
        gateway.takes(&[]).await;
        gateway.health.send_replace(backend_health::Health { proven: set("10.0.0.2:80"), ..backend_health::Health::default() });
        gateway.takes(&["10.0.0.2:80"]).await;
        gateway.know(Origin::Controller, web(1, &backends));
        gateway.takes(&backends).await;
        gateway.health.send_replace(backend_health::Health { failing: set("10.0.0.2:80"), ..backend_health::Health::default() });
        gateway.takes(&["10.0.0.1:80"]).await;
    }

    #[tokio::test]
    async fn a_worker_that_does_not_move_on_holds_up_no_change_and_gets_the_newest() {
        let mut gateway = Gateway::start();
        for counter in 1..=AWAITED_MAX as u64 {
            gateway.know(Origin::Controller, web(counter, &["10.0.0.1:80"]));
            timeout(LONG, gateway.served.changed()).await.unwrap().unwrap();
        }
        for counter in 9..30 {
            gateway.know(Origin::Controller, web(counter, &["10.0.0.1:80"]));
            tokio::task::yield_now().await;
        }
        gateway.know(Origin::Controller, web(30, &["10.0.0.9:80"]));
        let deadline = std::time::Instant::now() + LONG;
        while gateway.applied.borrow().as_ref().is_none_or(|g| g.counter < 30) {
            assert!(std::time::Instant::now() < deadline);
            gateway.worker.refresh();
            tokio::task::yield_now().await;
        }
        assert_eq!(gateway.worker.snapshot().generation().counter, 30);
    }

    #[tokio::test]
    async fn after_a_restart_of_the_task_backends_keep_their_slots() {
        let mut gateway = Gateway::start();
        let slots = |served: &Served| -> Vec<_> {
            served.services.values().flat_map(|s| &s.ports).flat_map(|p| &p.backends).map(|b| (b.address, b.id)).collect()
        };
        gateway.know(Origin::Controller, web(1, &["10.0.0.1:80", "10.0.0.2:80"]));
        gateway.takes(&["10.0.0.1:80", "10.0.0.2:80"]).await;
        let before = slots(&gateway.served.borrow());
        gateway.task.abort();
        gateway.task = {
            let (pipeline, inputs, outputs) = (Arc::clone(&gateway.pipeline), gateway.inputs.clone(), gateway.outputs.clone());
            tokio::spawn(CompileLoop { pipeline, inputs, outputs }.run())
        };
        gateway.know(Origin::Controller, web(2, &["10.0.0.0:80", "10.0.0.1:80", "10.0.0.2:80"]));
        gateway.takes(&["10.0.0.0:80", "10.0.0.1:80", "10.0.0.2:80"]).await;
        let after = slots(&gateway.served.borrow());
        assert!(before.iter().all(|slot| after.contains(slot)), "{before:?} {after:?}");
    }
}

//! Measures the time until every worker forwards by a change of the cluster, the time of the first sync, and the CPU
//! time and memory of controller and gateway. A test API server runs in this process; `sluice-controller` and `sluiced`
//! run beside it, with ports without traffic.
//!
//! A change begins when the API server sends its event to the controller, so the server's own time is not included. It
//! ends when the gateway logs that every worker forwards by its generation, which is when it acknowledges it to the
//! controller. Everything but the workers runs on the other cores, as with `isolcpus`; on a machine with fewer than four
//! cores the workers sleep while nothing arrives, and everything may use all cores.
//! Deliberately not here: packets (`sluiced bench`), and probes (no backend exists).

#![allow(unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../control/tests/api_server/mod.rs"]
mod api_server;
mod cluster;
mod gateway;
mod programs;
mod report;
mod stamp;

use std::time::{Duration, Instant};

use api_server::{ApiServer, Kind};
use cluster::Cluster;
use gateway::Gateway;
use programs::{CpuTimes, Programs};
use proto::v1::ServiceHealth;
use report::{Endpoints, FirstSync, Nodes, Report, Sets};
use stamp::{Stages, Stamp};

/// Pause between two single changes, so that each change is handled alone.
const PAUSE: Duration = Duration::from_millis(10);
/// After this silence a batch of changes counts as complete.
const SILENCE: Duration = Duration::from_millis(500);
/// Longest wait for one change.
const PATIENCE: Duration = Duration::from_secs(60);
/// Number of reports of one Service, and of new Nodes, whose cost is measured.
const REPORTS: u32 = 200;
const NODES_MORE: u32 = 100;
/// Number of new Nodes in the cluster of target `node`.
const NODES_ADDED: usize = 20;
/// Time over which CPU time at rest is measured.
const REST: Duration = Duration::from_secs(5);

/// What is measured, and whether the limits are checked.
struct Options {
    services: usize,
    endpoints_each: usize,
    changes: usize,
    /// Number of Nodes in the clusters of target `node`.
    nodes: usize,
    /// Number of Services there that a gateway serves, and that the controller alone plans.
    services_to_nodes: usize,
    services_planned: usize,
    /// The only target that is measured, if one is given.
    target: Option<String>,
    check: bool,
}

impl Options {
    /// Reads the arguments; `cargo bench` adds `--bench`.
    fn read() -> Self {
        let check = std::env::args().any(|word| word == "--check");
        let number = |name: &str, default| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default);
        let (services, changes, nodes) = if check { (2_000, 200, 100) } else { (10_000, 1_000, 1_000) };
        let target = std::env::args().skip_while(|word| word != "--target").nth(1);
        let given = std::env::args().skip_while(|word| word != "--nodes").nth(1);
        Self {
            services: number("SERVICES", services),
            endpoints_each: 10,
            changes: number("CHANGES", changes),
            nodes: given.and_then(|text| text.parse().ok()).unwrap_or_else(|| number("NODES", nodes)),
            services_to_nodes: number("SERVICES_TO_NODES", 100),
            services_planned: number("SERVICES_PLANNED", services / 5),
            target,
            check,
        }
    }

    fn measures(&self, target: &str) -> bool {
        self.target.as_deref().is_none_or(|only| only == target)
    }
}

/// CPU time of the controller for a report of one Service, and for a new Node.
fn costs(programs: &Programs, cluster: &mut Cluster<'_>, services: usize) -> (Duration, Duration) {
    let gateway = Gateway::start(&programs.socket());
    let health = |n: usize, backends: u32| {
        let (namespace, name) = cluster::names(n);
        ServiceHealth { service: format!("{namespace}/{name}"), backends, healthy: 1, refusal: None }
    };
    gateway.report((0..services).map(|n| health(n, 1)).collect());
    gateway.settle(SILENCE);
    let report = programs.controller_time(REPORTS, |n| gateway.report(vec![health(7, n + 2)]));
    (report, programs.controller_time(NODES_MORE, |_| cluster.add_node()))
}

/// Fills a cluster whose statuses are already written: all Services get what the controller wrote to the first.
fn fill(cluster: &mut Cluster<'_>, api: &ApiServer, services: usize) {
    let mut first = Programs::start(api);
    first.wait_for_generation(PATIENCE);
    cluster.wait_for_status();
    drop(first);
    cluster.fill(services);
}

/// Starts both programs; returns them after the first sync.
fn first_sync(api: &ApiServer) -> (Programs, FirstSync) {
    let (start, cpu) = (Stamp::now(), CpuTimes::of(std::process::id()));
    let mut programs = Programs::start(api);
    let trace = programs.wait_for_generation(PATIENCE);
    let api_server = CpuTimes::of(std::process::id()).since(&cpu);
    let plan = programs.first_plan().map(|at| at.since(start));
    let sync = FirstSync { whole: trace.reached().since(start), plan, compile: trace.compiling, api_server };
    programs.drain(SILENCE);
    (programs, sync)
}

/// Makes single changes of objects of a kind, and waits after each until every worker forwards by it.
fn change_singly<'a>(
    programs: &mut Programs,
    cluster: &mut Cluster<'a>,
    (kind, count): (Kind, usize),
    change: impl Fn(&mut Cluster<'a>, usize),
) -> Stages {
    let mut stages = Stages::default();
    for n in 0..count {
        change(cluster, n);
        let trace = programs.wait_for_generation(PATIENCE);
        stages.add(cluster.event_at(kind), &trace);
        std::thread::sleep(PAUSE);
    }
    stages
}

/// Measures a cluster whose Services are sent to their endpoints.
fn to_endpoints(api: &ApiServer, options: &Options) -> Endpoints {
    let mut cluster = Cluster::new(api, options.endpoints_each, "endpoint");
    fill(&mut cluster, api, options.services);
    let list_time = cluster::list_time(api);
    let (mut programs, first_sync) = first_sync(api);
    let change = change_singly(&mut programs, &mut cluster, (Kind::EndpointSlice, options.changes), Cluster::change);
    let (at, start) = (Stamp::now(), Instant::now());
    for n in 0..options.changes {
        cluster.change(n);
    }
    let at_once_written = start.elapsed();
    let (reached, generations) = programs.drain(SILENCE).expect("the changes arrive");
    programs.assert_serves(&cluster.last_changed());
    let rest = programs.cpu_at_rest(REST);
    let watch_lag = cluster.watch_lag();
    let memory = programs.memory();
    let (report_cost, node_cost) = costs(&programs, &mut cluster, options.services);
    Endpoints {
        services: options.services,
        endpoints: options.services * options.endpoints_each,
        list_time,
        first_sync,
        watch_lag,
        change,
        at_once: (reached.since(at), generations),
        at_once_written,
        memory,
        rest,
        report_cost,
        node_cost,
    }
}

/// Measures a cluster whose Services are sent to all its Nodes.
fn to_nodes(api: &ApiServer, options: &Options) -> Nodes {
    let mut cluster = Cluster::new(api, 1, "node");
    (0..options.nodes).for_each(|_| cluster.add_node());
    fill(&mut cluster, api, options.services_to_nodes);
    let (mut programs, first_sync) = first_sync(api);
    let memory = programs.memory();
    let changes = options.changes / 5;
    let service = change_singly(&mut programs, &mut cluster, (Kind::Service, changes), Cluster::change_service);
    let node = change_singly(&mut programs, &mut cluster, (Kind::Node, NODES_ADDED), |cluster, _| cluster.add_node());
    Nodes { services: options.services_to_nodes, nodes: options.nodes, first_sync, memory, service, node }
}

/// Measures the controller alone with more Services than one gateway has backends for.
fn planned_to_nodes(api: &ApiServer, options: &Options) -> Sets {
    let mut cluster = Cluster::new(api, 1, "node");
    (0..options.nodes).for_each(|_| cluster.add_node());
    let first = Programs::start_controller(api);
    let gateway = Gateway::start(&first.socket());
    cluster.wait_for_status();
    drop((gateway, first));
    cluster.fill(options.services_planned);
    let start = Instant::now();
    let programs = Programs::start_controller(api);
    let gateway = Gateway::start(&programs.socket());
    let first = gateway.next();
    gateway.settle(SILENCE);
    let memory = programs.memory()[0];
    let at = Instant::now();
    cluster.add_node();
    let change = gateway.next();
    Sets {
        services: options.services_planned,
        nodes: options.nodes,
        first_sync: first.at - start,
        first_bytes: first.bytes,
        controller_bytes: memory,
        change: change.at - at,
        change_bytes: change.bytes,
        changed_services: change.services.len(),
    }
}

/// Keeps this process and the programs that it starts off the workers' cores, if workers poll all the time and there are
/// other cores. Workers pin themselves.
fn keep_off_worker_cores() {
    if programs::workers_sleep() {
        return;
    }
    let mut mask = rustix::thread::sched_getaffinity(None).unwrap();
    programs::WORKER_CORES.iter().for_each(|core| mask.unset(*core));
    if mask.count() > 0 {
        rustix::thread::sched_setaffinity(None, &mask).unwrap();
    }
}

fn main() {
    let options = Options::read();
    keep_off_worker_cores();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let server = || runtime.block_on(ApiServer::start());
    let report = Report {
        to_endpoints: options.measures("endpoint").then(|| to_endpoints(&server(), &options)),
        to_nodes: options.measures("node").then(|| to_nodes(&server(), &options)),
        sets: options.measures("node").then(|| planned_to_nodes(&server(), &options)),
    };
    report.print();
    if options.check && !report.is_good() {
        std::process::exit(1);
    }
}

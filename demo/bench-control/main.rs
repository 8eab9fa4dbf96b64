//! Measures the time until every worker forwards by a change of the cluster, the time of the first sync, and the CPU
//! time and memory of controller and gateway. A test API server runs in this process; `sluice-controller` and `sluiced`
//! run beside it, and their workers poll ports without traffic.
//!
//! A generation counts as reached when the gateway logs it, which is when it acknowledges it to the controller.
//! Deliberately not here: packets (`sluiced bench`), and probes (no backend exists).

#![allow(unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../control/tests/api_server/mod.rs"]
mod api_server;
mod cluster;
mod gateway;
mod programs;
mod report;

use std::time::{Duration, Instant};

use api_server::ApiServer;
use cluster::Cluster;
use gateway::Gateway;
use programs::Programs;
use proto::v1::ServiceHealth;
use report::{Nodes, Report, Spread};

/// Pause between two single changes, so that each change is handled alone.
const PAUSE: Duration = Duration::from_millis(10);
/// After this silence a batch of changes counts as complete.
const SILENCE: Duration = Duration::from_millis(500);
/// Number of reports of one Service, and of new Nodes, whose cost is measured.
const REPORTS: u32 = 200;
const NODES_MORE: u32 = 100;
/// Time over which CPU time at rest is measured.
const REST: Duration = Duration::from_secs(5);

/// What is measured, and whether the limits are checked.
struct Options {
    services: usize,
    endpoints_each: usize,
    changes: usize,
    /// Number of Nodes, and of Services with target `node`, in the second cluster.
    nodes: usize,
    services_to_nodes: usize,
    check: bool,
}

impl Options {
    /// Reads the arguments; `cargo bench` adds `--bench`.
    fn read() -> Self {
        let check = std::env::args().any(|word| word == "--check");
        let number = |name: &str, default| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default);
        let (services, changes, nodes) = if check { (2_000, 200, 100) } else { (10_000, 1_000, 1_000) };
        Self {
            services: number("SERVICES", services),
            endpoints_each: 10,
            changes: number("CHANGES", changes),
            nodes: number("NODES", nodes),
            services_to_nodes: number("SERVICES_TO_NODES", services / 5),
            check,
        }
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

/// Measures the controller alone, with Services of target `node`.
fn to_nodes(runtime: &tokio::runtime::Runtime, options: &Options) -> Nodes {
    let api = runtime.block_on(ApiServer::start());
    let mut cluster = Cluster::new(&api, 1, "node");
    (0..options.nodes).for_each(|_| cluster.add_node());
    let first = Programs::start_controller(&api);
    let gateway = Gateway::start(&first.socket());
    cluster.wait_for_status();
    drop((gateway, first));
    cluster.fill(options.services_to_nodes);
    let start = Instant::now();
    let programs = Programs::start_controller(&api);
    let gateway = Gateway::start(&programs.socket());
    let first = gateway.next();
    gateway.settle(SILENCE);
    let memory = programs.memory()[0];
    let at = Instant::now();
    cluster.add_node();
    let change = gateway.next();
    Nodes {
        services: options.services_to_nodes,
        nodes: options.nodes,
        first_sync: first.at - start,
        first_bytes: first.bytes,
        controller_bytes: memory,
        change: change.at - at,
        change_bytes: change.bytes,
        changed_services: change.services.len(),
    }
}

fn main() {
    let options = Options::read();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let api = runtime.block_on(ApiServer::start());
    let mut cluster = Cluster::new(&api, options.endpoints_each, "endpoint");
    // All Services get what the controller wrote to the first: a cluster whose statuses are already written.
    let mut first = Programs::start(&api);
    first.wait_for_generation(0, Duration::from_secs(30));
    cluster.wait_for_status();
    drop(first);
    cluster.fill(options.services);
    let listed = cluster::list_time(&api);

    let start = Instant::now();
    let mut programs = Programs::start(&api);
    let (reached, mut last) = programs.wait_for_generation(0, Duration::from_secs(120));
    let first_sync = reached - start;
    let planned = programs.first_plan().map(|at| at - start);
    last = programs.drain(SILENCE, last).map_or(last, |(_, counter)| counter);

    let mut times = Vec::new();
    for n in 0..options.changes {
        let at = Instant::now();
        cluster.change(n);
        let (reached, counter) = programs.wait_for_generation(last, Duration::from_secs(30));
        times.push(reached - at);
        last = counter;
        std::thread::sleep(PAUSE);
    }
    let at = Instant::now();
    for n in 0..options.changes {
        cluster.change(n);
    }
    let written = at.elapsed();
    let burst = programs.drain(SILENCE, last).map(|(reached, counter)| (reached - at, counter - last));
    programs.assert_serves(&cluster.last_changed());
    let rest = programs.cpu_at_rest(REST);
    let watch_lag = cluster.watch_lag();
    let memory = programs.memory();
    let (report_cost, node_cost) = costs(&programs, &mut cluster, options.services);
    drop(programs);

    let report = Report {
        services: options.services,
        endpoints: options.services * options.endpoints_each,
        list_time: listed,
        first_plan: planned,
        first_sync,
        watch_lag,
        change: Spread::of(times),
        at_once: burst.expect("the changes arrive"),
        at_once_written: written,
        changes: options.changes,
        memory,
        rest,
        report_cost,
        node_cost,
        to_nodes: to_nodes(&runtime, &options),
    };
    report.print();
    if options.check && !report.is_good() {
        std::process::exit(1);
    }
}

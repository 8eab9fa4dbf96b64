//! How long a change of the cluster takes until every worker forwards by it, how long the first state takes, and what
//! controller and gateway need for it: a test API server in this process, and the programs `sluice-controller` and `sluiced`
//! beside it, whose workers poll ports at which nothing arrives.
//!
//! When a generation is reached is what the gateway says of it, which is what it acknowledges to the controller, taken from
//! its log the moment it is written. Deliberately not here: packets (`sluiced bench`), and probes (no backend exists).

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

/// Between two single changes: each comes after a silence, as [`Cluster::change`] of a few services a second does.
const PAUSE: Duration = Duration::from_millis(10);
/// After which nothing more is expected of a swarm.
const SILENCE: Duration = Duration::from_millis(500);
/// Reports of one Service, and Nodes that come, whose cost is measured.
const REPORTS: u32 = 200;
const NODES_MORE: u32 = 100;
/// CPU time at rest is taken over this time.
const REST: Duration = Duration::from_secs(5);

/// What is measured, and what must hold.
struct Options {
    services: usize,
    endpoints_each: usize,
    changes: usize,
    /// In the cluster whose Services are sent to nodes, and how many Services that are.
    nodes: usize,
    services_to_nodes: usize,
    check: bool,
}

impl Options {
    /// `cargo bench` gives `--bench`, too.
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

/// CPU time of the controller for a report of one Service, and for a Node that comes.
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

/// The controller alone, with Services that are sent to every node.
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
    // What the controller leaves of one Service is what all have from before: a cluster whose statuses are written.
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
    let swarm = programs.drain(SILENCE, last).map(|(reached, counter)| (reached - at, counter - last));
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
        at_once: swarm.expect("the swarm arrives"),
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

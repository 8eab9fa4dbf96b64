//! The figures, with the targets of DESIGN section 11.

use std::time::Duration;

use serde_json::{Value, json};

use crate::programs::workers_sleep;
use crate::stamp::{Spread, Stages};

const MB: f64 = 1_000_000.0;
/// Loose limits for `--check`. A debug build on two cores under a load of 14 reached 5, 3 and 1.3 when changes included
/// the API server's own time.
const FIRST_SYNC_MAX: f64 = 100.0;
const CHANGE_MAX: f64 = 100.0;
const AT_ONCE_MAX: f64 = 20.0;

/// What was measured.
pub struct Report {
    pub to_endpoints: Option<Endpoints>,
    pub to_nodes: Option<Nodes>,
    pub sets: Option<Sets>,
}

/// The first sync, from the start of both programs until every worker forwards by the whole state.
pub struct FirstSync {
    pub whole: Duration,
    /// The part until the controller's first plan.
    pub plan: Option<Duration>,
    /// The compiler's part.
    pub compile: Option<Duration>,
    /// CPU time of the API server meanwhile, which the programs wait for where cores are few.
    pub api_server: Duration,
}

/// Figures for Services of target `endpoint`.
pub struct Endpoints {
    pub services: usize,
    pub endpoints: usize,
    /// Time of the API server alone to send both lists once: its share of the first sync.
    pub list_time: Duration,
    pub first_sync: FirstSync,
    /// The API server's share of a change.
    pub watch_lag: Spread,
    pub change: Stages,
    /// Time of all changes at once, and the number of generations.
    pub at_once: (Duration, u64),
    /// The part of it that writing to the API server takes.
    pub at_once_written: Duration,
    /// Resident memory of controller and gateway, in bytes.
    pub memory: Vec<u64>,
    /// CPU use at rest of controller and gateway, in cores.
    pub rest: Vec<f64>,
    /// CPU time of the controller for a gateway's report about one Service.
    pub report_cost: Duration,
    /// CPU time of the controller for a new Node that no Service uses.
    pub node_cost: Duration,
}

/// Figures for Services of target `node`.
pub struct Nodes {
    pub services: usize,
    pub nodes: usize,
    pub first_sync: FirstSync,
    /// Resident memory of controller and gateway, in bytes.
    pub memory: Vec<u64>,
    /// A change of one Service.
    pub service: Stages,
    /// One more Node.
    pub node: Stages,
}

/// Figures of the controller for more Services of target `node` than one gateway has backends for.
pub struct Sets {
    pub services: usize,
    pub nodes: usize,
    /// Time from the controller's start until a gateway has the whole state, and the size of that state.
    pub first_sync: Duration,
    pub first_bytes: usize,
    pub controller_bytes: u64,
    /// Time from the creation of a Node until a gateway has the change.
    pub change: Duration,
    pub change_bytes: usize,
    pub changed_services: usize,
}

impl Report {
    /// Prints tables on standard error, and JSON on standard output.
    pub fn print(&self) {
        if let Some(endpoints) = &self.to_endpoints {
            endpoints.print();
        }
        if let Some(nodes) = &self.to_nodes {
            nodes.print();
        }
        if let Some(sets) = &self.sets {
            sets.print();
        }
        let to_endpoints = self.to_endpoints.as_ref().map(Endpoints::json);
        let (to_nodes, sets) = (self.to_nodes.as_ref().map(Nodes::json), self.sets.as_ref().map(Sets::json));
        println!("{}", json!({"to_endpoints": to_endpoints, "to_nodes": to_nodes, "node_sets": sets}));
    }

    /// Checks the limits. Times are relative to those of the API server alone in the same run, because load on the
    /// machine slows both. Memory is compared with its targets, CPU time at rest with fixed limits.
    pub fn is_good(&self) -> bool {
        let ratio = |time: Duration, floor: Duration| time.as_secs_f64() / floor.as_secs_f64();
        let mut limits = Vec::new();
        if let Some(of) = &self.to_endpoints {
            let change = Spread::of(&of.change.whole);
            limits.extend([
                ("first sync", ratio(of.first_sync.whole, of.list_time), FIRST_SYNC_MAX, "times the API server's lists"),
                ("one change, p50", ratio(change.p50, of.watch_lag.p50), CHANGE_MAX, "times the delay of a watcher"),
                ("changes at once", ratio(of.at_once.0, of.at_once_written), AT_ONCE_MAX, "times the time to write them"),
                ("CPU at rest of the controller", of.rest[0], 0.5, "cores"),
                ("CPU at rest of the gateway", of.rest[1], 0.5, "cores"),
            ]);
        }
        for memory in self.to_endpoints.iter().map(|of| &of.memory).chain(self.to_nodes.iter().map(|of| &of.memory)) {
            limits.push(("memory of the controller", memory[0] as f64 / MB, 400.0, "MB"));
            limits.push(("memory of the gateway", memory[1] as f64 / MB, 512.0, "MB"));
        }
        let mut is_good = true;
        for (what, found, limit, unit) in limits.into_iter().filter(|(_, found, limit, _)| found > limit) {
            eprintln!("bench-control: {what}: expected at most {limit} {unit}, found {found:.2}");
            is_good = false;
        }
        is_good
    }
}

impl Endpoints {
    fn print(&self) {
        let (burst, generations) = self.at_once;
        let changes = self.change.whole.len();
        let workers = if workers_sleep() { "workers sleep" } else { "workers poll" };
        let (services, endpoints) = (self.services, self.endpoints);
        eprintln!("{services} Services, {endpoints} endpoints, {workers}; p50 / p99 / max of {changes} changes");
        self.first_sync.print();
        row("  the API server alone, both lists", ms(self.list_time), "");
        print_change("one endpoint, from its event to every worker", &self.change, "p99 <= 5 ms");
        row("  before that, in the API server", spread(self.watch_lag), "");
        let at_once = format!("{} in {generations} generations", ms(burst));
        row(&format!("{changes} changes at once to every worker"), at_once, "");
        row("  writing them to the API server", ms(self.at_once_written), "");
        print_memory(&self.memory);
        row("CPU at rest, controller", format!("{:.2} cores", self.rest[0]), "");
        row("CPU at rest, gateway without workers", format!("{:.2} cores", self.rest[1]), "");
        row("CPU of the controller for a report of one Service", ms(self.report_cost), "");
        row("CPU of the controller for a new Node", ms(self.node_cost), "");
    }

    fn json(&self) -> Value {
        json!({
            "services": self.services, "endpoints": self.endpoints, "workers_sleep": workers_sleep(), "changes": self.change.whole.len(),
            "list_ms": millis(self.list_time), "first_sync": self.first_sync.json(),
            "watch_lag_ms": spread_json(self.watch_lag), "change": self.change.json(),
            "at_once_ms": millis(self.at_once.0), "at_once_generations": self.at_once.1,
            "at_once_written_ms": millis(self.at_once_written),
            "controller_bytes": self.memory[0], "gateway_bytes": self.memory[1],
            "controller_cores_at_rest": self.rest[0], "gateway_cores_at_rest": self.rest[1],
            "report_cost_ms": millis(self.report_cost), "node_cost_ms": millis(self.node_cost),
        })
    }
}

impl Nodes {
    fn print(&self) {
        eprintln!("{} Services with target node, {} Nodes", self.services, self.nodes);
        self.first_sync.print();
        print_change("one Service, from its event to every worker", &self.service, "p99 <= 5 ms");
        print_change("one more Node, from its event to every worker", &self.node, "");
        print_memory(&self.memory);
    }

    fn json(&self) -> Value {
        json!({
            "services": self.services, "nodes": self.nodes, "first_sync": self.first_sync.json(),
            "service": self.service.json(), "node": self.node.json(),
            "controller_bytes": self.memory[0], "gateway_bytes": self.memory[1],
        })
    }
}

impl Sets {
    fn print(&self) {
        eprintln!("{} Services with target node, {} Nodes, the controller alone", self.services, self.nodes);
        let sized = |time: Duration, bytes: usize| format!("{}, {:.2} MB", ms(time), bytes as f64 / MB);
        row("first sync: its start until a gateway has all of it", sized(self.first_sync, self.first_bytes), "<= 1 s");
        row("memory of the controller", format!("{:.0} MB", self.controller_bytes as f64 / MB), "<= 400 MB");
        row("one more Node until a gateway has it", sized(self.change, self.change_bytes), "");
        row("  Services that are sent again for that", self.changed_services.to_string(), "");
    }

    fn json(&self) -> Value {
        json!({
            "services": self.services, "nodes": self.nodes,
            "first_sync_ms": millis(self.first_sync), "first_bytes": self.first_bytes,
            "controller_bytes": self.controller_bytes, "change_ms": millis(self.change),
            "change_bytes": self.change_bytes, "changed_services": self.changed_services,
        })
    }
}

impl FirstSync {
    fn print(&self) {
        let or_none = |time: Option<Duration>| time.map_or_else(|| "-".to_owned(), ms);
        row("first sync: start of both programs to every worker", ms(self.whole), "<= 1 s");
        row("  of it, until the controller's first plan", or_none(self.plan), "");
        row("  of it, compiler of the gateway", or_none(self.compile), "");
        row("  CPU time of the API server meanwhile", ms(self.api_server), "");
    }

    fn json(&self) -> Value {
        json!({
            "ms": millis(self.whole), "first_plan_ms": self.plan.map(millis), "compile_ms": self.compile.map(millis),
            "api_server_cpu_ms": millis(self.api_server),
        })
    }
}

impl Stages {
    fn json(&self) -> Value {
        let stages = self.rows().map(|(name, of)| json!({"stage": name.trim(), "ms": spread_json(of)}));
        json!({"ms": spread_json(Spread::of(&self.whole)), "stages": stages})
    }
}

fn print_change(what: &str, change: &Stages, target: &str) {
    row(what, spread(Spread::of(&change.whole)), target);
    for (stage, of) in change.rows() {
        row(&format!("  {stage}"), spread(of), "");
    }
}

fn print_memory(memory: &[u64]) {
    row("memory of the controller", format!("{:.0} MB", memory[0] as f64 / MB), "<= 400 MB");
    row("memory of the gateway", format!("{:.0} MB", memory[1] as f64 / MB), "<= 512 MB + flows");
}

fn row(what: &str, found: String, target: &str) {
    eprintln!("{what:<58} {found:>28}   {target}");
}

fn ms(time: Duration) -> String {
    let ms = time.as_secs_f64() * 1e3;
    if ms < 10.0 { format!("{ms:.2} ms") } else { format!("{ms:.1} ms") }
}

fn spread(of: Spread) -> String {
    format!("{} / {} / {}", ms(of.p50), ms(of.p99), ms(of.max))
}

fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e5).round() / 1e2
}

fn spread_json(of: Spread) -> Value {
    json!({"p50": millis(of.p50), "p99": millis(of.p99), "max": millis(of.max)})
}

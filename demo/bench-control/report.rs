//! The figures, with the targets of DESIGN section 11.

use std::time::Duration;

use serde_json::json;

const MB: f64 = 1_000_000.0;
/// Loose limits for `--check`. A debug build on two cores under a load of 14 reached 5, 3 and 1.3.
const FIRST_SYNC_MAX: f64 = 100.0;
const CHANGE_MAX: f64 = 100.0;
const AT_ONCE_MAX: f64 = 20.0;

/// Percentiles of many times.
#[derive(Clone, Copy)]
pub struct Spread {
    pub p50: Duration,
    pub p99: Duration,
    pub max: Duration,
}

impl Spread {
    pub fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let at = |percent: usize| times[(times.len() * percent / 100).min(times.len() - 1)];
        Self { p50: at(50), p99: at(99), max: at(100) }
    }
}

pub struct Report {
    pub services: usize,
    pub endpoints: usize,
    /// Time of the API server alone to send both lists once: its share of the first sync.
    pub list_time: Duration,
    pub first_plan: Option<Duration>,
    pub first_sync: Duration,
    /// The API server's share of a change.
    pub watch_lag: Spread,
    pub change: Spread,
    /// Time of all changes at once, and the number of generations.
    pub at_once: (Duration, u64),
    /// The part of it that writing to the API server takes.
    pub at_once_written: Duration,
    pub changes: usize,
    /// Resident memory of controller and gateway, in bytes.
    pub memory: Vec<u64>,
    /// CPU use at rest of controller and gateway, in cores.
    pub rest: Vec<f64>,
    /// CPU time of the controller for a gateway's report about one Service.
    pub report_cost: Duration,
    /// CPU time of the controller for a new Node that no Service uses.
    pub node_cost: Duration,
    pub to_nodes: Nodes,
}

/// Figures of the controller for Services of target `node`.
pub struct Nodes {
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
    /// Prints a table on standard error, and JSON on standard output.
    pub fn print(&self) {
        let ms = |time: Duration| format!("{:.1} ms", time.as_secs_f64() * 1e3);
        let row = |what: &str, found: String, target: &str| eprintln!("{what:<58} {found:>28}   {target}");
        let spread = |s: &Spread| format!("{} / {} / {}", ms(s.p50), ms(s.p99), ms(s.max));
        let (burst, generations) = self.at_once;
        eprintln!("{} Services, {} endpoints, p50 / p99 / max of {} changes", self.services, self.endpoints, self.changes);
        row("first sync: start of both programs to every worker", ms(self.first_sync), "<= 1 s");
        row("  of it, until the controller's first plan", self.first_plan.map_or_else(|| "-".to_owned(), ms), "");
        row("  the API server alone, both lists", ms(self.list_time), "");
        row("one endpoint to every worker", spread(&self.change), "p99 <= 5 ms");
        row("  the API server alone, to a watcher", spread(&self.watch_lag), "");
        let at_once = format!("{} in {generations} generations", ms(burst));
        row(&format!("{} changes at once to every worker", self.changes), at_once, "");
        row("  writing them to the API server", ms(self.at_once_written), "");
        row("memory of the controller", format!("{:.0} MB", self.memory[0] as f64 / MB), "<= 400 MB");
        row("memory of the gateway", format!("{:.0} MB", self.memory[1] as f64 / MB), "<= 512 MB + flows");
        row("CPU at rest, controller", format!("{:.2} cores", self.rest[0]), "");
        row("CPU at rest, gateway without workers", format!("{:.2} cores", self.rest[1]), "");
        row("CPU of the controller for a report of one Service", ms(self.report_cost), "");
        row("CPU of the controller for a new Node", ms(self.node_cost), "");
        let Nodes { services, nodes, first_sync, first_bytes, controller_bytes, change, change_bytes, changed_services } =
            self.to_nodes;
        eprintln!("{services} Services with target node, {nodes} Nodes, the controller alone");
        let sized = |time: Duration, bytes: usize| format!("{}, {:.2} MB", ms(time), bytes as f64 / MB);
        row("first sync: its start until a gateway has all of it", sized(first_sync, first_bytes), "");
        row("memory of the controller", format!("{:.0} MB", controller_bytes as f64 / MB), "");
        row("one more Node until a gateway has it", sized(change, change_bytes), "");
        row("  Services that are sent again for that", changed_services.to_string(), "");
        println!("{}", self.json());
    }

    fn json(&self) -> serde_json::Value {
        let ms = |time: Duration| (time.as_secs_f64() * 1e5).round() / 1e2;
        let spread = |s: &Spread| json!({"p50": ms(s.p50), "p99": ms(s.p99), "max": ms(s.max)});
        json!({
            "services": self.services, "endpoints": self.endpoints, "changes": self.changes,
            "list_ms": ms(self.list_time), "first_plan_ms": self.first_plan.map(ms), "first_sync_ms": ms(self.first_sync),
            "watch_lag_ms": spread(&self.watch_lag), "change_ms": spread(&self.change),
            "at_once_ms": ms(self.at_once.0), "at_once_generations": self.at_once.1, "at_once_written_ms": ms(self.at_once_written),
            "controller_bytes": self.memory[0], "gateway_bytes": self.memory[1],
            "controller_cores_at_rest": self.rest[0], "gateway_cores_at_rest": self.rest[1],
            "report_cost_ms": ms(self.report_cost), "node_cost_ms": ms(self.node_cost),
            "to_nodes": {
                "services": self.to_nodes.services, "nodes": self.to_nodes.nodes,
                "first_sync_ms": ms(self.to_nodes.first_sync), "first_bytes": self.to_nodes.first_bytes,
                "controller_bytes": self.to_nodes.controller_bytes, "change_ms": ms(self.to_nodes.change),
                "change_bytes": self.to_nodes.change_bytes, "changed_services": self.to_nodes.changed_services,
            },
        })
    }

    /// Checks the limits. Times are relative to those of the API server alone in the same run, because load on the
    /// machine slows both. Memory is compared with its targets, CPU time at rest with fixed limits.
    pub fn is_good(&self) -> bool {
        let ratio = |time: Duration, floor: Duration| time.as_secs_f64() / floor.as_secs_f64();
        let limits = [
            ("first sync", ratio(self.first_sync, self.list_time), FIRST_SYNC_MAX, "times the API server's lists"),
            ("one change, p50", ratio(self.change.p50, self.watch_lag.p50), CHANGE_MAX, "times the delay of a watcher"),
            ("changes at once", ratio(self.at_once.0, self.at_once_written), AT_ONCE_MAX, "times the time to write them"),
            ("memory of the controller", self.memory[0] as f64 / MB, 400.0, "MB"),
            ("memory of the gateway", self.memory[1] as f64 / MB, 512.0, "MB"),
            ("CPU at rest of the controller", self.rest[0], 0.5, "cores"),
            ("CPU at rest of the gateway", self.rest[1], 0.5, "cores"),
        ];
        let mut is_good = true;
        for (what, found, limit, unit) in limits.into_iter().filter(|(_, found, limit, _)| found > limit) {
            eprintln!("bench-control: {what}: expected at most {limit} {unit}, found {found:.2}");
            is_good = false;
        }
        is_good
    }
}

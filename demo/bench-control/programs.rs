//! The two programs, the stages of a change in their logs, and their figures from `/proc`.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use proto::v1::ListBackendsRequest;
use proto::v1::admin_client::AdminClient;
use serde_json::Value;

use crate::api_server::ApiServer;
use crate::stamp::{Stamp, Trace};
use crate::{PAUSE, SILENCE};

/// A gateway with ports without traffic. Its routes lead to 200 nodes with their own pod prefixes behind the second
/// port.
const GATEWAY: &str = "\
name: bench
ports:
  - {name: uplink, device: 'net_null0,no-rx=1', addresses: [100.64.0.2/16], twin: none}
  - {name: cluster, device: 'net_null1,no-rx=1', addresses: [172.16.0.2/16], twin: none}
memory: {hugepages: off}
flows: {maxPerWorker: 1024}
snat: {addresses: [172.16.0.3, 172.16.0.4]}
stateDir: state
admin: {listen: 'unix:admin.sock'}
logs: {format: json}
";
const CONTROLLER: &str = "\
kubernetes: {kubeconfig: kubeconfig, namespace: sluice}
listen: unix:config.sock
pools: [{name: default, addresses: [100.64.1.0-100.64.255.0]}]
logs: {format: json}
";
/// Routes to Pods outside the prefixes of nodes, and to Nodes.
const MORE_ROUTES: &str =
    "{to: 10.200.0.0/16, via: 172.16.2.1, port: cluster}, {to: 172.20.0.0/16, via: 172.16.2.1, port: cluster}";

/// A stage of a change, from a log line.
struct LogEvent {
    message: String,
    at: Stamp,
    counter: u64,
    /// Time that the stage itself took, if it says so.
    took: Option<Duration>,
}

pub struct Programs {
    dir: tempfile::TempDir,
    controller: Child,
    /// `None` if the controller is measured alone.
    gateway: Option<Child>,
    events: Receiver<LogEvent>,
    /// By counter of the generation.
    traces: BTreeMap<u64, Trace>,
    first_plan: Option<Stamp>,
    last_reached: u64,
}

impl Programs {
    /// Starts both programs.
    pub fn start(api: &ApiServer) -> Self {
        Self::start_some(api, true)
    }

    /// Starts the controller alone.
    pub fn start_controller(api: &ApiServer) -> Self {
        Self::start_some(api, false)
    }

    fn start_some(api: &ApiServer, with_gateway: bool) -> Self {
        let dir = tempfile::Builder::new().prefix("sluice-bench-").tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        api.write_kubeconfig(&path("kubeconfig"));
        fs::write(path("controller.yaml"), CONTROLLER).unwrap();
        let routes: Vec<String> =
            (0..200).map(|n| format!("{{to: 10.{n}.0.0/16, via: 172.16.1.{}, port: cluster}}", n + 1)).collect();
        let static_network = format!("static: {{routes: [{MORE_ROUTES}, {}]}}\n", routes.join(", "));
        let cores: Vec<String> = WORKER_CORES.iter().map(ToString::to_string).collect();
        let poll = if workers_sleep() { "adaptive" } else { "busy" };
        let workers = format!("workers: {{cores: [{}], poll: {poll}}}\n", cores.join(","));
        let controller = format!("controller: {{urls: ['unix:{}']}}\n", path("config.sock").display());
        fs::write(path("sluice.yaml"), [GATEWAY, &static_network, &workers, &controller].concat()).unwrap();
        let (sender, events) = mpsc::channel();
        let sluiced = Path::new(env!("CARGO_BIN_EXE_sluiced"));
        let start = |program: PathBuf, config: &str, debug: &str| {
            let mut child = Command::new(program)
                .args(["run", "--config"])
                .arg(path(config))
                .env("RUST_LOG", format!("warn,{debug},kube_client=off,kube_runtime=off"))
                .stdin(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .expect("built by `make bench-control`");
            let lines = BufReader::new(child.stderr.take().unwrap()).lines();
            let sender = sender.clone();
            std::thread::spawn(move || {
                for line in lines.map_while(Result::ok) {
                    match read(&line) {
                        Some(event) => drop(sender.send(event)),
                        None => eprintln!("{line}"),
                    }
                }
            });
            child
        };
        let controller = start(sluiced.with_file_name("sluice-controller"), "controller.yaml", "control::controller=debug");
        let debug = "sluice::agent::compile_loop=debug,sluice::controller_client=debug";
        let gateway = with_gateway.then(|| start(sluiced.to_owned(), "sluice.yaml", debug));
        Self { dir, controller, gateway, events, traces: BTreeMap::new(), first_plan: None, last_reached: 0 }
    }

    /// Waits until the workers reach a generation that is later than all that they reached before.
    pub fn wait_for_generation(&mut self, patience: Duration) -> Trace {
        let (deadline, before) = (Instant::now() + patience, self.last_reached);
        loop {
            // The lines of the controller may be read after those of the gateway.
            if let Some((&counter, trace)) = self.traces.range(before + 1..).find(|(_, trace)| trace.is_complete()) {
                let trace = trace.clone();
                self.last_reached = counter;
                self.traces = self.traces.split_off(&(counter + 1));
                return trace;
            }
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(event) => self.record(event),
                Err(_) => panic!("no generation after {before} within {patience:?}"),
            }
        }
    }

    /// Waits for a silence; returns when the last generation before it was reached, and the number of generations.
    pub fn drain(&mut self, silence: Duration) -> Option<(Stamp, u64)> {
        let before = self.last_reached;
        while let Ok(event) = self.events.recv_timeout(silence) {
            self.record(event);
        }
        let (counter, at) = self.traces.iter().rev().find_map(|(counter, trace)| Some((*counter, trace.reached?)))?;
        self.traces.clear();
        self.last_reached = counter.max(before);
        (counter > before).then(|| (at, counter - before))
    }

    fn record(&mut self, LogEvent { message, at, counter, took }: LogEvent) {
        if message == "planned" {
            self.first_plan.get_or_insert(at);
        }
        if counter <= self.last_reached {
            return;
        }
        let trace = self.traces.entry(counter).or_default();
        match message.as_str() {
            "planned" => {
                trace.planned.get_or_insert(at);
                trace.planning = trace.planning.or(took);
            }
            "received" => _ = trace.received.get_or_insert(at),
            "published" => {
                trace.published.get_or_insert(at);
                trace.compiling = trace.compiling.or(took);
            }
            _ => _ = trace.reached.get_or_insert(at),
        }
    }

    pub fn first_plan(&self) -> Option<Stamp> {
        self.first_plan
    }

    /// Asserts that a backend is served: the last change was not lost.
    pub fn assert_serves(&self, (service, backend): &(String, String)) {
        let socket = format!("unix:{}", self.dir.path().join("admin.sock").display());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listed = runtime.block_on(async {
            let channel = tonic::transport::Endpoint::try_from(socket).unwrap().connect().await.unwrap();
            let mut admin = AdminClient::new(channel).max_decoding_message_size(proto::limits::MESSAGE_BYTES_MAX);
            admin.list_backends(ListBackendsRequest::default()).await.unwrap().into_inner()
        });
        let there = listed.backends.iter().any(|b| b.service == *service && b.address == *backend);
        assert!(there, "expected {backend} among the backends of {service}");
    }

    /// Socket on which the controller serves gateways.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("config.sock")
    }

    /// Resident memory of controller and gateway, bytes.
    pub fn memory(&self) -> Vec<u64> {
        let resident = |child: &Child| {
            let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
        };
        self.children().map(resident).collect()
    }

    /// Cores that controller and gateway use while nothing changes, without the workers.
    pub fn cpu_at_rest(&self, time: Duration) -> Vec<f64> {
        let of_all = || self.children().map(|child| CpuTimes::of(child.id())).collect::<Vec<_>>();
        let before = of_all();
        std::thread::sleep(time);
        let after = of_all();
        after.iter().zip(before).map(|(after, before)| after.since(&before).as_secs_f64() / time.as_secs_f64()).collect()
    }

    /// CPU time of the controller for each of `count` successive events.
    pub fn controller_time(&self, count: u32, mut happens: impl FnMut(u32)) -> Duration {
        let before = CpuTimes::of(self.controller.id());
        for n in 0..count {
            happens(n);
            std::thread::sleep(PAUSE);
        }
        std::thread::sleep(SILENCE);
        CpuTimes::of(self.controller.id()).since(&before) / count
    }

    fn children(&self) -> impl Iterator<Item = &Child> {
        std::iter::once(&self.controller).chain(&self.gateway)
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        // SIGTERM, so that the controller releases its Lease.
        for child in self.gateway.iter_mut().chain([&mut self.controller]) {
            let _ = rustix::process::kill_process(rustix::process::Pid::from_child(child), rustix::process::Signal::TERM);
            let _ = child.wait();
        }
    }
}

/// The cores of the workers: `CORES`, otherwise the last of those that this process could use at first.
pub static WORKER_CORES: LazyLock<Vec<usize>> = LazyLock::new(|| {
    let given = std::env::var("CORES").ok().map(|text| text.split(',').filter_map(|core| core.trim().parse().ok()).collect());
    given.unwrap_or_else(|| vec![*CORES - 1])
});

/// Whether workers sleep while nothing arrives: the three programs need the cores of a machine that has fewer than four.
pub fn workers_sleep() -> bool {
    *CORES < 4
}

/// Number of cores that this process could use at first.
static CORES: LazyLock<usize> = LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));

fn read(line: &str) -> Option<LogEvent> {
    let line: Value = serde_json::from_str(line).ok()?;
    let fields = &line["fields"];
    let counter = fields["generation"].as_str()?.rsplit('/').next()?.parse().ok()?;
    let message = fields["message"].as_str()?.to_owned();
    let is_stage = ["planned", "received", "published", "every worker has applied the generation"].contains(&message.as_str());
    // Integers of 128 bits are strings in the log.
    let took = ["plan_us", "compile_us"].iter().find_map(|field| fields[field].as_str()?.parse().ok());
    let took = took.map(Duration::from_micros);
    let at = Stamp::parse(line["timestamp"].as_str()?)?;
    is_stage.then_some(LogEvent { message, at, counter, took })
}

/// CPU time of each thread of a process but its workers, ns.
pub struct CpuTimes(HashMap<OsString, u64>);

impl CpuTimes {
    /// Those of a process until now.
    pub fn of(process: u32) -> Self {
        let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap();
        let of_thread = |thread: fs::DirEntry| {
            let text = |file: &str| fs::read_to_string(thread.path().join(file)).unwrap_or_default();
            // The first field is the time on a core.
            let time = text("schedstat").split_whitespace().next().and_then(|field| field.parse().ok());
            time.filter(|_| !text("comm").starts_with("sluice-worker")).map(|time| (thread.file_name(), time))
        };
        Self(threads.flatten().filter_map(of_thread).collect())
    }

    /// All CPU time since then; that of threads which ended meanwhile is not known.
    pub fn since(&self, before: &Self) -> Duration {
        let of_thread = |(thread, now): (&OsString, &u64)| now.saturating_sub(before.0.get(thread).copied().unwrap_or_default());
        Duration::from_nanos(self.0.iter().map(of_thread).sum())
    }
}

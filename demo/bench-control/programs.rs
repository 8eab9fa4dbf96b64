//! The two programs, their logs, and their figures from `/proc`.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use proto::v1::ListBackendsRequest;
use proto::v1::admin_client::AdminClient;
use serde_json::Value;

use crate::api_server::ApiServer;
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

/// A log line that the benchmark uses.
enum LogEvent {
    /// The controller computed a plan, changed or not.
    Planned(Instant),
    /// Every worker forwards by the generation of this counter.
    Reached(Instant, u64),
}

pub struct Programs {
    dir: tempfile::TempDir,
    controller: Child,
    /// `None` if the controller is measured alone.
    gateway: Option<Child>,
    events: Receiver<LogEvent>,
    first_plan: Option<Instant>,
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
        let static_network =
            format!("static: {{routes: [{{to: 10.200.0.0/16, via: 172.16.2.1, port: cluster}}, {}]}}\n", routes.join(", "));
        let cores = std::env::var("CORES").unwrap_or_else(|_| last_core().to_string());
        let workers = format!("workers: {{cores: [{cores}], poll: busy}}\n");
        let controller = format!("controller: {{urls: ['unix:{}']}}\n", path("config.sock").display());
        fs::write(path("sluice.yaml"), [GATEWAY, &static_network, &workers, &controller].concat()).unwrap();
        let (sender, events) = mpsc::channel();
        let sluiced = Path::new(env!("CARGO_BIN_EXE_sluiced"));
        let start = |program: PathBuf, config: &str, debug: &str| {
            let mut child = Command::new(program)
                .args(["run", "--config"])
                .arg(path(config))
                .env("RUST_LOG", format!("warn,{debug}=debug,kube_client=off,kube_runtime=off"))
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
        let controller = start(sluiced.with_file_name("sluice-controller"), "controller.yaml", "control::controller");
        let gateway = with_gateway.then(|| start(sluiced.to_owned(), "sluice.yaml", "sluice::agent::compile_loop"));
        Self { dir, controller, gateway, events, first_plan: None }
    }

    /// Waits until the workers reach a generation later than `after`; returns the time and its counter.
    pub fn wait_for_generation(&mut self, after: u64, patience: Duration) -> (Instant, u64) {
        let deadline = Instant::now() + patience;
        loop {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(LogEvent::Reached(at, counter)) if counter > after => return (at, counter),
                Ok(LogEvent::Planned(at)) => _ = self.first_plan.get_or_insert(at),
                Ok(LogEvent::Reached(..)) => {}
                Err(_) => panic!("no generation after {after} within {patience:?}"),
            }
        }
    }

    /// The last generation after `after` before a silence, if there was one.
    pub fn drain(&mut self, silence: Duration, after: u64) -> Option<(Instant, u64)> {
        let mut last = None;
        while let Ok(event) = self.events.recv_timeout(silence) {
            if let LogEvent::Reached(at, counter) = event
                && counter > after
            {
                last = Some((at, counter));
            }
        }
        last
    }

    pub fn first_plan(&self) -> Option<Instant> {
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

    /// Cores that controller and gateway use while nothing changes, without the workers, which poll.
    pub fn cpu_at_rest(&self, time: Duration) -> Vec<f64> {
        let of_all = || self.children().map(|child| cpu_time(child.id())).collect::<Vec<_>>();
        let before = of_all();
        std::thread::sleep(time);
        let after = of_all();
        after.iter().zip(before).map(|(after, before)| (*after - before).as_secs_f64() / time.as_secs_f64()).collect()
    }

    /// CPU time of the controller for each of `count` successive events.
    pub fn controller_time(&self, count: u32, mut happens: impl FnMut(u32)) -> Duration {
        let before = cpu_time(self.controller.id());
        for n in 0..count {
            happens(n);
            std::thread::sleep(PAUSE);
        }
        std::thread::sleep(SILENCE);
        (cpu_time(self.controller.id()) - before) / count
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

fn last_core() -> usize {
    std::thread::available_parallelism().map_or(0, |count| count.get() - 1)
}

fn read(line: &str) -> Option<LogEvent> {
    let now = Instant::now();
    let line: Value = serde_json::from_str(line).ok()?;
    let fields = &line["fields"];
    let counter = fields["generation"].as_str()?.rsplit('/').next()?.parse().ok()?;
    match fields["message"].as_str()? {
        "planned" => Some(LogEvent::Planned(now)),
        "every worker has applied the generation" => Some(LogEvent::Reached(now, counter)),
        _ => None,
    }
}

/// CPU time of a process, without its workers.
fn cpu_time(process: u32) -> Duration {
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let of_thread = |thread: fs::DirEntry| {
        let text = |file: &str| fs::read_to_string(thread.path().join(file)).unwrap_or_default();
        if text("comm").starts_with("sluice-worker") {
            return 0;
        }
        // The first field is the time on a core, in ns.
        text("schedstat").split_whitespace().next().and_then(|field| field.parse::<u64>().ok()).unwrap_or_default()
    };
    Duration::from_nanos(threads.flatten().map(of_thread).sum())
}

//! A gateway between a client and three HTTP servers, in their own network namespaces. `demo/network.sh` creates these;
//! this module starts `sluiced` in them and queries it. Dropping [`Edge`] removes everything.

#![allow(unreachable_pub, dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, clippy::panic)]

mod controller_program;
mod manifest;
pub mod peers;
mod skip;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use proto::v1::admin_client::AdminClient;
use proto::v1::{
    GetStatusRequest, GetStatusResponse, ListBackendsRequest, ListDropsRequest, ListPortsRequest, ListServicesRequest,
    PortStatus, ReloadRequest, ServiceStatus,
};

#[allow(unused_imports, reason = "each test file uses a part of it")]
pub use controller_program::{built_program, controller_program};
#[allow(unused_imports, reason = "each test file uses a part of it")]
pub use manifest::{ServiceManifest, node_manifest};
#[allow(unused_imports, reason = "each test file uses a part of it")]
pub use skip::{can_create_namespaces, missing_capabilities, skip};

/// Timeout of every wait. Tests assert nothing about how soon something happens, because the machine may be busy.
pub const DEADLINE: Duration = Duration::from_secs(120);
/// Timeout of a request, in seconds: longer than four retransmissions of a SYN (after 1, 3, 7 and 15 s).
pub const REQUEST_S: &str = "20";

/// The af_packet devices of the two ports.
pub const AF_PACKET: [&str; 2] = ["net_af_packet0,iface=uplink0", "net_af_packet1,iface=cluster0"];

/// Waits until `condition` returns `Some`, and returns its value.
pub fn until<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    until_within(DEADLINE, what, condition)
}

/// The same, with another timeout.
pub fn until_within<T>(deadline: Duration, what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(start.elapsed() < deadline, "{what}: timeout after {deadline:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs shell code with the functions of `demo/network.sh` for the namespaces of `id`, and returns its output.
pub fn script(id: &str, work: &Path, code: &str) -> String {
    let prelude = format!("id={id} work={}; . demo/network.sh; {code}", work.display());
    let output = Command::new("bash").args(["-c", &prelude]).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{code}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// The namespaces, and the gateway in one of them.
pub struct Edge {
    id: String,
    pub dir: tempfile::TempDir,
    /// Environment of the gateway.
    pub environment: Vec<(&'static str, PathBuf)>,
    gateway: Option<Child>,
    runtime: tokio::runtime::Runtime,
}

impl Edge {
    /// The network of the demo, with its servers. `None` if this process cannot create namespaces: then it reports
    /// `test` as skipped.
    pub fn new(test: &str, name: &str) -> Option<Self> {
        if !can_create_namespaces(test) {
            return None;
        }
        let edge = Self {
            id: format!("{name}{}", std::process::id() % 100_000),
            dir: tempfile::Builder::new().prefix("sluice-").tempdir().unwrap(),
            environment: Vec::new(),
            gateway: None,
            runtime: tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap(),
        };
        edge.script("set -e; make_network; for n in 11 12 13; do start_server $n; done");
        Some(edge)
    }

    /// The same, with a configuration over af_packet.
    pub fn with_af_packet(test: &str, name: &str) -> Option<Self> {
        let edge = Self::new(test, name)?;
        edge.configure_af_packet("");
        Some(edge)
    }

    /// Runs shell code with the functions of `demo/network.sh`, and returns its output.
    pub fn script(&self, code: &str) -> String {
        script(&self.id, self.dir.path(), code)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a configuration over af_packet with the lines `more`.
    pub fn configure_af_packet(&self, more: &str) {
        self.configure(AF_PACKET[0], AF_PACKET[1], more);
    }

    /// Writes a configuration with these two devices and the lines `more`.
    pub fn configure(&self, uplink: &str, cluster: &str, more: &str) {
        let core = std::thread::available_parallelism().unwrap().get() - 1;
        self.configure_on(&[core], uplink, cluster, more);
    }

    /// Like [`Self::configure`], with a worker on each of the cores.
    pub fn configure_on(&self, cores: &[usize], uplink: &str, cluster: &str, more: &str) {
        let dir = self.dir.path().display();
        let text = format!(
            r#"name: test
ports:
  - {{name: uplink, device: "{uplink}", addresses: [192.0.2.2/24, "2001:db8::2/64"]}}
  - {{name: cluster, device: "{cluster}", addresses: [10.0.0.2/24, "fd00::2/64"]}}
workers: {{cores: {cores:?}, poll: adaptive}}
memory: {{hugepages: off}}
flows: {{maxPerWorker: 16384}}
snat: {{addresses: [10.0.0.3, "fd00::3"]}}
nodePortAddresses: [192.0.2.2]
pools: [{{name: default, addresses: [192.0.2.100-192.0.2.119, "2001:db8::1:0/112"]}}]
manifests: {dir}/manifests
statusDir: {dir}/status
stateDir: {dir}/state
listen: unix:{dir}/config.sock
admin: {{listen: "unix:{dir}/admin.sock"}}
{more}"#
        );
        fs::write(self.path("sluice.yaml"), text).unwrap();
    }

    /// Writes a manifest to the directory that the gateway watches.
    pub fn write_manifest(&self, file: &str, text: &str) {
        fs::create_dir_all(self.path("manifests")).unwrap();
        let hidden = self.path(&format!("manifests/.{file}"));
        fs::write(&hidden, text).unwrap();
        fs::rename(hidden, self.path(&format!("manifests/{file}"))).unwrap();
    }

    /// Writes the Services of the demo, dual-stack.
    pub fn write_demo_manifests(&self) {
        self.write_manifest("web.yaml", include_str!("web.yaml"));
        self.write_manifest("node-port.yaml", include_str!("../../demo/manifests/web-nodeport.yaml"));
    }

    /// Starts the gateway and waits until it serves.
    pub fn start(&mut self) {
        self.spawn();
        until("the gateway serves", || self.status().filter(|s| s.ready));
    }

    pub fn spawn(&mut self) {
        self.spawn_with(&[]);
    }

    /// Starts the gateway with more variables in its environment.
    pub fn spawn_with(&mut self, environment: &[(&str, &str)]) {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("sluiced.log")).unwrap();
        self.spawn_logging_to(log, environment);
    }

    /// Starts the gateway with its output to another place than the log of the test.
    pub fn spawn_logging_to(&mut self, log: impl Into<std::os::fd::OwnedFd>, environment: &[(&str, &str)]) {
        let log: std::os::fd::OwnedFd = log.into();
        let child = Command::new("ip")
            .args(["netns", "exec", &format!("{}-gw", self.id), env!("CARGO_BIN_EXE_sluiced"), "run", "--config"])
            .arg(self.path("sluice.yaml"))
            .env("XDG_RUNTIME_DIR", self.dir.path())
            .envs(self.environment.iter().map(|(key, value)| (key, value)))
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        self.gateway = Some(child);
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.path("sluiced.log")).unwrap_or_default()
    }

    /// Stops the gateway by SIGTERM, or by SIGKILL if `kill`, and returns its exit code.
    pub fn stop(&mut self, kill: bool) -> Option<i32> {
        self.signal(if kill { rustix::process::Signal::KILL } else { rustix::process::Signal::TERM });
        self.wait_for_exit()
    }

    /// Process ID of the gateway: `ip netns exec` replaces itself by the program.
    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(self.gateway.as_ref().unwrap())
    }

    /// Sends the gateway a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(self.pid(), signal).unwrap();
    }

    /// Whether the gateway's process runs.
    pub fn is_running(&mut self) -> bool {
        self.gateway.as_mut().is_some_and(|child| child.try_wait().unwrap().is_none())
    }

    /// Waits until the gateway has ended, and returns its exit code; `None` if a signal ended it.
    pub fn wait_for_exit(&mut self) -> Option<i32> {
        let mut child = self.gateway.take()?;
        let start = Instant::now();
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status.code();
            }
            if start.elapsed() > DEADLINE {
                self.gateway = Some(child);
                panic!("the gateway does not stop:\n{}", self.log());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Runs a command in a namespace.
    pub fn run(&self, namespace: &str, command: &[&str]) -> Output {
        let namespace = format!("{}-{namespace}", self.id);
        Command::new("ip").args(["netns", "exec", &namespace]).args(command).output().unwrap()
    }

    /// The server that answers a request from the client, if one does.
    pub fn curl(&self, url: &str) -> Option<String> {
        let output = self.run("client", &["curl", "-sg", "--max-time", REQUEST_S, url]);
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Requests `url` at least 30 times and until all three servers have answered. No request may fail.
    pub fn assert_all_servers_answer(&self, url: &str) {
        let mut answers: BTreeMap<String, u32> = BTreeMap::new();
        for n in 0..120 {
            let server = self.curl(url).unwrap_or_else(|| panic!("{url}: request {n} failed; drops {:?}", self.drops()));
            *answers.entry(server).or_default() += 1;
            if n >= 30 && answers.len() == 3 {
                return;
            }
        }
        panic!("{url}: not all three servers answered: {answers:?}");
    }

    /// Starts a script of `tests/edge` in a namespace, and waits until it prints `ready`. Dropping the value ends it.
    pub fn start_script(&self, namespace: &str, script: &str, arguments: &[&str]) -> Program {
        Program::start_script(&self.namespace(namespace), script, arguments)
    }

    /// Starts a program in a namespace, and returns the first line of its output. Dropping the value ends it.
    pub fn start_program(&self, namespace: &str, command: &[&str]) -> (Program, String) {
        Program::start(&self.namespace(namespace), command)
    }

    /// Calls the gateway's admin API.
    pub fn admin<T>(&self, call: impl AsyncFnOnce(AdminClient<tonic::transport::Channel>) -> Option<T>) -> Option<T> {
        let uri = format!("unix:{}", self.path("admin.sock").display());
        self.runtime.block_on(async {
            let channel = tonic::transport::Endpoint::from_shared(uri).ok()?.connect().await.ok()?;
            call(AdminClient::new(channel)).await
        })
    }

    pub fn status(&self) -> Option<GetStatusResponse> {
        self.admin(async |mut client| Some(client.get_status(GetStatusRequest {}).await.ok()?.into_inner()))
    }

    /// Number of healthy backends of a Service.
    pub fn healthy(&self, service: &str) -> Option<usize> {
        let backends = self.admin(async |mut client| {
            Some(client.list_backends(ListBackendsRequest::default()).await.ok()?.into_inner().backends)
        })?;
        Some(backends.iter().filter(|b| b.service == service && b.healthy).count())
    }

    /// Status of a Service, by its name in namespace `demo`.
    pub fn service(&self, name: &str) -> Option<ServiceStatus> {
        let call = async |mut client: AdminClient<_>| client.list_services(ListServicesRequest::default()).await.ok();
        self.admin(call)?.into_inner().services.into_iter().find(|service| service.namespace == "demo" && service.name == name)
    }

    /// Reloads the gateway's configuration, and returns its summary or the error.
    pub fn reload(&self) -> Result<String, String> {
        let uri = format!("unix:{}", self.path("admin.sock").display());
        self.runtime.block_on(async {
            let channel = tonic::transport::Endpoint::from_shared(uri).unwrap().connect().await.unwrap();
            let answer = AdminClient::new(channel).reload(ReloadRequest {}).await;
            answer.map(|answer| answer.into_inner().summary).map_err(|status| status.message().to_owned())
        })
    }

    pub fn ports(&self) -> Option<Vec<PortStatus>> {
        self.admin(async |mut client| Some(client.list_ports(ListPortsRequest {}).await.ok()?.into_inner().ports))
    }

    /// How each port steers packets to workers.
    pub fn steering(&self) -> Option<Vec<String>> {
        Some(self.ports()?.into_iter().map(|port| port.steering).collect())
    }

    pub fn drops(&self) -> Vec<(String, u64)> {
        let drops = self.admin(async |mut client| Some(client.list_drops(ListDropsRequest {}).await.ok()?.into_inner().drops));
        drops.unwrap_or_default().into_iter().filter(|d| d.packets > 0).map(|d| (d.reason, d.packets)).collect()
    }

    /// Asserts that every packet is counted once: the account closes when the workers are idle.
    pub fn assert_account(&self) {
        until("the account closes", || {
            let status = self.status()?;
            let closes = status.accounts.iter().all(|a| a.received + a.originated == a.transmitted + a.dropped + a.held);
            (closes && status.accounts.iter().all(|a| a.received > 0)).then_some(())
        });
    }

    /// Full name of a namespace.
    pub fn namespace(&self, name: &str) -> String {
        format!("{}-{name}", self.id)
    }
}

/// A program that a test started.
pub struct Program {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// Starts a program in a namespace, and returns the first line of its output.
    pub fn start(namespace: &str, command: &[&str]) -> (Self, String) {
        let mut child = Command::new("ip")
            .args(["netns", "exec", namespace])
            .args(command)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        (Self { child, output }, line)
    }

    /// Starts a script of `tests/edge` in a namespace, and waits until it prints `ready`.
    pub fn start_script(namespace: &str, script: &str, arguments: &[&str]) -> Self {
        let script = format!("{}/tests/edge/{script}", env!("CARGO_MANIFEST_DIR"));
        let (program, line) = Self::start(namespace, &[&["/usr/bin/python3", &script][..], arguments].concat());
        assert_eq!(line.trim(), "ready", "{script}");
        program
    }

    /// The next line of its output.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Kills the program.
    pub fn end(&mut self) {
        // `ip netns exec` replaces itself by the program, so this kills the program.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.end();
    }
}

impl Drop for Edge {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the gateway's log:\n{}", self.log());
        }
        if let Some(mut child) = self.gateway.take() {
            let _ = rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::TERM);
            let start = Instant::now();
            while matches!(child.try_wait(), Ok(None)) && start.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        let code = format!("id={} work={}; . demo/network.sh; remove_network", self.id, self.dir.path().display());
        let _ = Command::new("bash").args(["-c", &code]).current_dir(env!("CARGO_MANIFEST_DIR")).status();
    }
}

//! A gateway between a client and three HTTP servers, in network namespaces of its own: `demo/network.sh` makes them, this
//! starts `sluiced` in them and asks it, and everything goes with the value.

#![allow(unreachable_pub, dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, clippy::panic)]

pub mod peers;
mod skip;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use proto::v1::admin_client::AdminClient;
use proto::v1::{
    GetStatusRequest, GetStatusResponse, ListBackendsRequest, ListDropsRequest, ListPortsRequest, ListServicesRequest,
    PortStatus, ReloadRequest, ServiceStatus,
};

#[allow(unused_imports, reason = "each test file uses a part of it")]
pub use skip::{lacks, may_make_namespaces as may_run, skip};

/// Longest wait for anything that is to happen: nothing is said about how soon it does, for the machine may be busy.
pub const DEADLINE: Duration = Duration::from_secs(120);
/// How long a request may take, seconds: longer than four SYNs that are sent again take (after 1, 3, 7 and 15 s).
pub const REQUEST_S: &str = "20";

/// Waits until `condition` gives something.
pub fn until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(start.elapsed() < DEADLINE, "{what}: not within {DEADLINE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The namespaces, and the gateway in one of them.
pub struct Edge {
    id: String,
    pub dir: tempfile::TempDir,
    gateway: Option<Child>,
    runtime: tokio::runtime::Runtime,
}

impl Edge {
    /// The network of the demo, with its servers.
    pub fn new(name: &str) -> Self {
        let edge = Self {
            id: format!("{name}{}", std::process::id() % 100_000),
            dir: tempfile::Builder::new().prefix("sluice-").tempdir().unwrap(),
            gateway: None,
            runtime: tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap(),
        };
        edge.script("set -e; make_network; for n in 11 12 13; do start_server $n; done");
        edge
    }

    /// Runs shell code with the functions of the demo's network.
    pub fn script(&self, code: &str) -> String {
        let prelude = format!("id={} work={}; . demo/network.sh; {code}", self.id, self.dir.path().display());
        let output = Command::new("bash").args(["-c", &prelude]).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{code}: {text}{}", String::from_utf8_lossy(&output.stderr));
        text
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A configuration over these two devices; `more` are further lines.
    pub fn configure(&self, uplink: &str, cluster: &str, more: &str) {
        let core = std::thread::available_parallelism().unwrap().get() - 1;
        self.configure_on(&[core], uplink, cluster, more);
    }

    /// The same with a worker on each of the cores.
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

    /// Puts a manifest into the directory that the gateway follows.
    pub fn manifest(&self, file: &str, text: &str) {
        fs::create_dir_all(self.path("manifests")).unwrap();
        let hidden = self.path(&format!("manifests/.{file}"));
        fs::write(&hidden, text).unwrap();
        fs::rename(hidden, self.path(&format!("manifests/{file}"))).unwrap();
    }

    /// The services of the demo, dual-stack.
    pub fn manifests_of_the_demo(&self) {
        self.manifest("web.yaml", include_str!("web.yaml"));
        self.manifest("node-port.yaml", include_str!("../../demo/manifests/web-nodeport.yaml"));
    }

    /// Starts the gateway and waits until it serves.
    pub fn start(&mut self) {
        self.spawn();
        until("the gateway serves", || self.status().filter(|s| s.ready));
    }

    pub fn spawn(&mut self) {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("sluiced.log")).unwrap();
        let child = Command::new("ip")
            .args(["netns", "exec", &format!("{}-gw", self.id), env!("CARGO_BIN_EXE_sluiced"), "run", "--config"])
            .arg(self.path("sluice.yaml"))
            .env("XDG_RUNTIME_DIR", self.dir.path())
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

    /// Ends the gateway by SIGTERM (or SIGKILL) and gives its exit code.
    pub fn stop(&mut self, kill: bool) -> Option<i32> {
        self.signal(if kill { rustix::process::Signal::KILL } else { rustix::process::Signal::TERM });
        self.ended()
    }

    /// The gateway's process. `ip netns exec` becomes the program, so this is its pid.
    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(self.gateway.as_ref().unwrap())
    }

    /// Sends the gateway a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(self.pid(), signal).unwrap();
    }

    /// Whether the gateway's process is there.
    pub fn is_running(&mut self) -> bool {
        self.gateway.as_mut().is_some_and(|child| child.try_wait().unwrap().is_none())
    }

    /// Waits until the gateway has ended, and gives its exit code; none when a signal ended it.
    pub fn ended(&mut self) -> Option<i32> {
        let mut child = self.gateway.take()?;
        let start = Instant::now();
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status.code();
            }
            if start.elapsed() > DEADLINE {
                self.gateway = Some(child);
                panic!("the gateway does not end:\n{}", self.log());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Runs a command in a namespace.
    pub fn run(&self, namespace: &str, command: &[&str]) -> Output {
        let namespace = format!("{}-{namespace}", self.id);
        Command::new("ip").args(["netns", "exec", &namespace]).args(command).output().unwrap()
    }

    /// Who answers a request from the client, if anybody.
    pub fn curl(&self, url: &str) -> Option<String> {
        let output = self.run("client", &["curl", "-sg", "--max-time", REQUEST_S, url]);
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Requests `url` until all three servers have answered, and at least 30 times; none may fail.
    pub fn all_answer(&self, url: &str) {
        let mut answers: BTreeMap<String, u32> = BTreeMap::new();
        for n in 0..120 {
            let who = self.curl(url).unwrap_or_else(|| panic!("{url}: request {n} failed; drops {:?}", self.drops()));
            *answers.entry(who).or_default() += 1;
            if n >= 30 && answers.len() == 3 {
                return;
            }
        }
        panic!("{url}: not all three answered: {answers:?}");
    }

    /// Starts a helper of the test's own in a namespace, and waits until it says `ready`. It ends with the value.
    pub fn helper(&self, namespace: &str, script: &str, arguments: &[&str]) -> Helper {
        let script = format!("{}/tests/edge/{script}", env!("CARGO_MANIFEST_DIR"));
        let (helper, line) = self.program(namespace, &[&["/usr/bin/python3", &script][..], arguments].concat());
        assert_eq!(line.trim(), "ready", "{script}");
        helper
    }

    /// Starts a program in a namespace, and gives the first line that it says. It ends with the value.
    pub fn program(&self, namespace: &str, command: &[&str]) -> (Helper, String) {
        let mut child = Command::new("ip")
            .args(["netns", "exec", &self.namespace(namespace)])
            .args(command)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        (Helper { child, output }, line)
    }

    /// Asks the gateway's admin API.
    pub fn admin<T>(&self, ask: impl AsyncFnOnce(AdminClient<tonic::transport::Channel>) -> Option<T>) -> Option<T> {
        let uri = format!("unix:{}", self.path("admin.sock").display());
        self.runtime.block_on(async {
            let channel = tonic::transport::Endpoint::from_shared(uri).ok()?.connect().await.ok()?;
            ask(AdminClient::new(channel)).await
        })
    }

    pub fn status(&self) -> Option<GetStatusResponse> {
        self.admin(async |mut client| Some(client.get_status(GetStatusRequest {}).await.ok()?.into_inner()))
    }

    /// Healthy backends of a service.
    pub fn healthy(&self, service: &str) -> Option<usize> {
        let backends =
            self.admin(async |mut client| Some(client.list_backends(ListBackendsRequest {}).await.ok()?.into_inner().backends))?;
        Some(backends.iter().filter(|b| b.service == service && b.healthy).count())
    }

    /// What the gateway says of a service, by its name in namespace `demo`.
    pub fn service(&self, name: &str) -> Option<ServiceStatus> {
        let ask = async |mut client: AdminClient<_>| client.list_services(ListServicesRequest {}).await.ok();
        self.admin(ask)?.into_inner().services.into_iter().find(|service| service.namespace == "demo" && service.name == name)
    }

    /// Has the gateway read its configuration again: what it says, or what it refuses.
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

    /// How each port's packets come to their workers.
    pub fn steering(&self) -> Option<Vec<String>> {
        let ports = self.admin(async |mut client| client.list_ports(ListPortsRequest {}).await.ok())?.into_inner().ports;
        Some(ports.into_iter().map(|port| port.steering).collect())
    }

    pub fn drops(&self) -> Vec<(String, u64)> {
        let drops = self.admin(async |mut client| Some(client.list_drops(ListDropsRequest {}).await.ok()?.into_inner().drops));
        drops.unwrap_or_default().into_iter().filter(|d| d.packets > 0).map(|d| (d.reason, d.packets)).collect()
    }

    /// Every packet was counted once: the account closes once the worker is at rest.
    pub fn assert_account(&self) {
        until("the account closes", || {
            let status = self.status()?;
            let closes = status.accounts.iter().all(|a| a.received + a.originated == a.transmitted + a.dropped + a.held);
            (closes && status.accounts.iter().all(|a| a.received > 0)).then_some(())
        });
    }

    /// Where the gateway lives.
    pub fn namespace(&self, name: &str) -> String {
        format!("{}-{name}", self.id)
    }
}

/// A program of the test's own.
pub struct Helper {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Helper {
    /// The next line that it says.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Ends it.
    pub fn end(&mut self) {
        // `ip netns exec` becomes the program, so this is its pid.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Helper {
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

//! Two gateways and a client on one bridge, in their own network namespaces. Dropping [`Pair`] removes everything.

#![allow(dead_code, unreachable_pub, reason = "each test file is a crate of its own")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../edge/controller_program.rs"]
#[allow(dead_code, reason = "each test file uses some of it")]
mod controller_program;
#[path = "../edge/skip.rs"]
mod skip;
mod stalls;
#[path = "../edge/vip_owners.rs"]
mod vip_owners;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use stalls::Stalls;
use vip_owners::{Watch, has_joined};

/// Timeout of every wait. Tests assert nothing about how soon something happens, because the machine may be busy.
const DEADLINE: Duration = Duration::from_secs(120);
/// VIPs, one in each of 16 groups.
pub const VIPS: usize = 16;
const INTERVAL_MS: &str = "10";

/// Waits until `condition` returns `Some`, and returns its value.
pub fn until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(start.elapsed() < DEADLINE, "{what}: timeout after {DEADLINE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Gateways 0 and 1, the client that asks for the VIPs and serves as their backend, and the bridge.
pub struct Pair {
    id: String,
    dir: tempfile::TempDir,
    gateways: [Option<Child>; 2],
    backend: Option<Child>,
    pub watch: Watch,
    stalls: Stalls,
    began: Instant,
}

impl Pair {
    /// The network, and configurations with `announce: {announce}`. `None` if this process cannot create namespaces.
    pub fn new(test: &str, name: &str, announce: &str) -> Option<Self> {
        Self::with_lines(test, name, announce, |n| {
            format!("snat: {{addresses: [192.0.2.{}]}}\nmetrics: {{listen: \"\"}}\n", n + 20)
        })
    }

    /// The same, with lines of configuration of each gateway: at least SNAT addresses and metrics.
    pub fn with_lines(test: &str, name: &str, announce: &str, lines: impl Fn(usize) -> String) -> Option<Self> {
        if !skip::can_create_namespaces(test) {
            return None;
        }
        if announce.contains("keepalived") && Command::new("keepalived").arg("--version").output().is_err() {
            skip::skip(test, "needs keepalived (.ci/install test)");
            return None;
        }
        let mut pair = Self {
            id: format!("{name}{}", std::process::id() % 10_000),
            dir: tempfile::Builder::new().prefix("sluice-").tempdir().unwrap(),
            gateways: [None, None],
            backend: None,
            watch: Watch::default(),
            stalls: Stalls::watch(),
            began: Instant::now(),
        };
        pair.make_network();
        for n in 0..2 {
            pair.configure(n, announce, &lines(n));
        }
        let serve = [
            "python3",
            "-m",
            "http.server",
            "8080",
            "--protocol",
            "HTTP/1.1",
            "--bind",
            "192.0.2.10",
            "--directory",
            "/sys/class/net/lo",
        ];
        pair.backend = Some(pair.command("client", &serve).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        let vips: Vec<_> = (100..100 + VIPS).map(|n| format!("192.0.2.{n}")).collect();
        pair.watch = Watch::start(&format!("{}-client", pair.id), "eth0", INTERVAL_MS, &vips);
        Some(pair)
    }

    /// The Ethernet address of a gateway; that of gateway 1 is higher.
    pub fn mac(n: usize) -> String {
        format!("02:00:00:00:aa:0{n}")
    }

    pub fn path(&self, n: usize, name: &str) -> PathBuf {
        self.dir.path().join(format!("gw{n}")).join(name)
    }

    pub fn log(&self, n: usize) -> String {
        fs::read_to_string(self.path(n, "log")).unwrap_or_default()
    }

    /// Whether the machine stood still since the test began.
    pub fn was_stalled(&self) -> bool {
        self.was_stalled_since(self.began)
    }

    /// Whether it stood still since then.
    pub fn was_stalled_since(&self, since: Instant) -> bool {
        self.stalls.since(since)
    }

    fn ip(arguments: &str) {
        let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
        assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// A command in one of the namespaces `client`, `gw0`, `gw1` and `sw`.
    pub fn command(&self, namespace: &str, command: &[&str]) -> Command {
        let mut ip = Command::new("ip");
        ip.args(["netns", "exec", &format!("{}-{namespace}", self.id)]).args(command).stdin(Stdio::null());
        ip
    }

    fn make_network(&self) {
        let id = &self.id;
        for namespace in ["sw", "client", "gw0", "gw1"] {
            Self::ip(&format!("netns add {id}-{namespace}"));
            Self::ip(&format!("-n {id}-{namespace} link set lo up"));
        }
        Self::ip(&format!("-n {id}-sw link add bridge type bridge mcast_snooping 0"));
        Self::ip(&format!("-n {id}-sw link set bridge up"));
        for (namespace, mac) in [("client", "02:00:00:00:cc:01"), ("gw0", &Self::mac(0)), ("gw1", &Self::mac(1))] {
            Self::ip(&format!(
                "link add eth0 netns {id}-{namespace} address {mac} type veth peer name {namespace} netns {id}-sw"
            ));
            for (place, interface) in [(namespace, "eth0"), ("sw", namespace)] {
                let off = ["ethtool", "-K", interface, "tx", "off", "rx", "off", "tso", "off", "gso", "off", "gro", "off"];
                self.command(place, &off).output().unwrap();
                Self::ip(&format!("-n {id}-{place} link set {interface} up"));
            }
            Self::ip(&format!("-n {id}-sw link set {namespace} master bridge"));
        }
        Self::ip(&format!("-n {id}-client addr add 192.0.2.10/24 dev eth0"));
    }

    fn configure(&self, n: usize, announce: &str, lines: &str) {
        let dir = self.path(n, "");
        fs::create_dir_all(dir.join("manifests")).unwrap();
        let core = std::thread::available_parallelism().unwrap().get() - 1;
        let (at, host) = (dir.display(), n + 2);
        let text = format!(
            "name: edge-{n}
ports: [{{name: uplink, device: \"net_af_packet{n},iface=eth0\", addresses: [192.0.2.{host}/24]}}]
workers: {{cores: [{core}], poll: adaptive}}
memory: {{hugepages: off}}
flows: {{maxPerWorker: 16384}}
announce: {{{announce}}}
logs: {{level: debug}}
pools: [{{name: default, addresses: [192.0.2.100-192.0.2.115]}}]
manifests: {at}/manifests
statusDir: {at}/status
stateDir: {at}/state
listen: unix:{at}/config.sock
admin: {{listen: \"unix:{at}/admin.sock\"}}
{lines}"
        );
        fs::write(dir.join("sluice.yaml"), text).unwrap();
        let mut manifest = String::new();
        for vip in 100..100 + VIPS {
            write!(
                manifest,
                "---
apiVersion: v1
kind: Service
metadata: {{namespace: demo, name: web-{vip}, annotations: {{sluice.dev/addresses: 192.0.2.{vip}}}}}
spec: {{type: LoadBalancer, loadBalancerClass: sluice.dev/gateway, ports: [{{name: http, port: 80, targetPort: 8080}}, {{name: dns, protocol: UDP, port: 53, targetPort: 5353}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{namespace: demo, name: web-{vip}, labels: {{kubernetes.io/service-name: web-{vip}}}}}
addressType: IPv4
ports: [{{name: http, protocol: TCP, port: 8080}}, {{name: dns, protocol: UDP, port: 5353}}]
endpoints: [{{addresses: [192.0.2.10]}}]
"
            )
            .unwrap();
        }
        fs::write(dir.join("manifests/web.yaml"), manifest).unwrap();
    }

    /// Starts a gateway.
    pub fn spawn(&mut self, n: usize) {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path(n, "log")).unwrap();
        let config = self.path(n, "sluice.yaml");
        let mut command = self.command(&format!("gw{n}"), &[env!("CARGO_BIN_EXE_sluiced"), "run", "--config"]);
        command.arg(config).env("XDG_RUNTIME_DIR", self.path(n, "")).stdout(log.try_clone().unwrap()).stderr(log);
        self.gateways[n] = Some(command.spawn().unwrap());
    }

    /// Sends a gateway a signal: `ip netns exec` replaces itself by the program.
    pub fn signal(&self, n: usize, signal: Signal) {
        kill_process(Pid::from_child(self.gateways[n].as_ref().unwrap()), signal).unwrap();
    }

    /// Kills a gateway at once.
    pub fn kill(&mut self, n: usize) {
        self.signal(n, Signal::KILL);
        self.gateways[n].take().unwrap().wait().unwrap();
        fs::rename(self.path(n, "log"), self.path(n, "log-before")).unwrap();
    }

    /// Ends a gateway by SIGTERM, and returns its exit code.
    pub fn stop(&mut self, n: usize) -> Option<i32> {
        self.signal(n, Signal::TERM);
        let mut child = self.gateways[n].take().unwrap();
        until("the gateway ends", || child.try_wait().unwrap()).code()
    }

    /// Number of VIPs that only this gateway answers for.
    pub fn owned(&self, n: usize) -> usize {
        self.watch.owners().values().filter(|macs| **macs == BTreeSet::from([Self::mac(n)])).count()
    }

    /// Whether every VIP is answered by one gateway, which has decided to keep it. Until then groups, here of equal size,
    /// move between gateways that start together.
    pub fn has_settled(&self, groups: usize) -> Option<()> {
        let owners = self.watch.owners();
        let keeps = |n: usize| {
            let files = (0..groups).map(|group| self.path(n, &format!("state/keepalived/group-{group}")));
            files.filter(|file| fs::read_to_string(file).is_ok_and(|text| text.trim() == "50")).count()
        };
        let have_one = owners.len() == VIPS && owners.values().all(|macs| macs.len() == 1);
        (have_one && (0..2).all(|n| self.owned(n) == 0 || self.owned(n) * groups == keeps(n) * VIPS)).then_some(())
    }

    /// Whether keepalived of this process of the gateway has heard the others in every group.
    pub fn has_joined(&self, n: usize) -> bool {
        has_joined(&self.log(n), 16)
    }

    /// What `sluicectl LIST -o json` prints at a gateway, once it answers.
    pub fn listed(&self, n: usize, list: &str) -> Vec<serde_json::Value> {
        let program = controller_program::built_program("sluicectl", "sluicectl");
        let server = format!("--server=unix:{}", self.path(n, "admin.sock").display());
        until(&format!("gateway {n} lists {list}"), || {
            let output = Command::new(&program).arg(&server).args([list, "-o", "json"]).output().unwrap();
            output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
        })
    }

    /// A field of the row of a gateway at its own controller.
    pub fn field(&self, n: usize, field: &str) -> serde_json::Value {
        self.listed(n, "gateways")[0][field].clone()
    }

    /// Whether a gateway has recorded an Event of this reason.
    pub fn has_event(&self, n: usize, reason: &str) -> bool {
        self.listed(n, "events").iter().any(|event| event["reason"] == reason)
    }

    /// Drains or undrains a gateway by its own controller.
    pub fn drain(&self, n: usize, drained: bool) {
        let at = format!("http://unix:{}", self.path(n, "admin.sock").display());
        let at = at.trim_start_matches("http://").to_owned();
        let name = format!("edge-{n}");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let done = runtime.block_on(async {
            let channel = tonic::transport::Endpoint::from_shared(at).unwrap().connect().await.unwrap();
            let mut client = proto::v1::admin_client::AdminClient::new(channel);
            if drained {
                let request = proto::v1::DrainRequest { target: name, ..Default::default() };
                client.drain(request).await.map(drop)
            } else {
                let request = proto::v1::UndrainRequest { target: name };
                client.undrain(request).await.map(drop)
            }
        });
        done.unwrap();
    }

    /// Runs a command in the namespace of a gateway (`gw0`, `gw1`) or of the client, and returns its output.
    pub fn run(&self, namespace: &str, command: &[&str]) -> String {
        let output = self.command(namespace, command).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Starts a command in the namespace of the client, whose output is read.
    pub fn start_client(&self, command: &[&str]) -> Child {
        self.command("client", command).stdout(Stdio::piped()).spawn().unwrap()
    }

    /// Takes a gateway's cable out, or puts it back.
    pub fn cable(&self, n: usize, in_place: bool) {
        Self::ip(&format!("-n {}-sw link set gw{n} {}", self.id, if in_place { "up" } else { "down" }));
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for n in 0..2 {
                let log = self.log(n);
                let lines: Vec<_> = log.lines().collect();
                eprintln!("--- the log of gateway {n}:\n{}", lines[lines.len().saturating_sub(150)..].join("\n"));
            }
            eprintln!("--- who answered:\n{}", self.watch.since(0).join("\n"));
        }
        self.watch = Watch::default();
        let programs = self.gateways.iter_mut().chain([&mut self.backend]);
        for mut child in programs.filter_map(Option::take) {
            let _ = child.kill();
            let _ = child.wait();
        }
        for namespace in ["client", "gw0", "gw1", "sw"] {
            let _ = Command::new("ip").args(["netns", "del", &format!("{}-{namespace}", self.id)]).status();
        }
    }
}

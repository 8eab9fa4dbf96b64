//! Three gateways with real keepalived and BIRD, a router with real FRR, a controller apart from them, servers, and a
//! client on the link and behind the router, in their own network namespaces (`demo/fleet-network.sh`). Dropping
//! [`Bed`] removes everything.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::cluster::Cluster;
use super::edge::{DEADLINE, Program, built_program, can_create_namespaces, controller_program, script, skip, until};
use super::quic_like;
use super::vip_owners::{Watch, has_joined};

/// Number of gateways.
pub(crate) const GATEWAYS: usize = 3;
/// Number of groups of VIPs, and of VIPs on the link: one in each group.
pub(crate) const GROUPS: usize = 4;
/// Ports of the servers, and of the VIPs.
pub(crate) const HTTP: u16 = 8080;
pub(crate) const DNS: u16 = 5300;
pub(crate) const QUIC: u16 = 4433;
/// Port of iperf3 of the first VIP; each VIP has its own server, because one serves one client.
const FIRST_BULK: u16 = 5201;
const BACKENDS: [&str; 3] = ["b11", "b12", "b13"];

/// How clients find a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    /// By ARP on the link: keepalived elects the owner of the VIP. Mode `nat`.
    Link,
    /// By a router with ECMP. Modes `dsr`, `gue` and `ipip`.
    Router,
}

/// A VIP with its Service.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) way: Way,
    pub(crate) mode: &'static str,
    pub(crate) vip: String,
    pub(crate) bulk_port: u16,
}

/// The Services: one in `nat` for each group of VIPs, and one for each mode without state.
pub(crate) fn targets() -> Vec<Target> {
    let nat = (0..GROUPS).map(|n| (Way::Link, "nat", format!("192.0.2.{}", 100 + n)));
    let others = ["dsr", "gue", "ipip"].into_iter().zip(1..).map(|(mode, n)| (Way::Router, mode, format!("203.0.113.{n}")));
    let all = nat.chain(others).zip(FIRST_BULK..);
    all.map(|((way, mode, vip), bulk_port)| Target { name: format!("{mode}-{bulk_port}"), way, mode, vip, bulk_port }).collect()
}

/// A Service that comes and goes.
pub(crate) fn late_target() -> Target {
    let (name, vip) = ("late".to_owned(), "203.0.113.9".to_owned());
    Target { name, way: Way::Router, mode: "dsr", vip, bulk_port: FIRST_BULK }
}

/// How fast failures are noticed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Interval of VRRP advertisements.
    pub(crate) advertisement_ms: u32,
    /// Interval and multiplier of BFD.
    pub(crate) bfd: (u32, u8),
    /// Interval of health probes.
    pub(crate) probe_ms: u32,
    /// A connection without an answer for this long is broken. TCP repeats a segment after 13 s, then after 25 s and 51 s.
    pub(crate) stalled: Duration,
}

/// The programs and their network.
pub(crate) struct Bed {
    id: String,
    dir: tempfile::TempDir,
    pub(crate) pace: Pace,
    pub(crate) targets: Vec<Target>,
    sluicectl: PathBuf,
    sluice_controller: PathBuf,
    gateways: [Option<Child>; GATEWAYS],
    pub(crate) cluster: Cluster,
    controller: Option<Child>,
    servers: Vec<Program>,
    /// iperf3.
    downloads: Vec<Program>,
    pub(crate) watch: Watch,
}

impl Bed {
    /// Starts everything and waits until clients reach every VIP by its gateways. `None` if this machine cannot.
    pub(crate) fn start(test: &str, name: &str, pace: Pace) -> Option<Self> {
        if !can_create_namespaces(test) {
            return None;
        }
        for program in ["/usr/sbin/keepalived", "/usr/sbin/bird", "/usr/lib/frr/bgpd", "/usr/bin/iperf3", "/usr/bin/tcpdump"] {
            if !Path::new(program).exists() {
                skip(test, &format!("needs {program} (.ci/install test)"));
                return None;
            }
        }
        let dir = tempfile::Builder::new().prefix("sluice-").tempdir().unwrap();
        let mut bed = Self {
            id: format!("{name}{}", std::process::id() % 100_000),
            cluster: Cluster::start(&targets(), &dir.path().join("kubeconfig")),
            dir,
            pace,
            targets: targets(),
            sluicectl: built_program("sluicectl", "sluicectl"),
            sluice_controller: controller_program(),
            gateways: [None, None, None],
            controller: None,
            servers: Vec::new(),
            downloads: Vec::new(),
            watch: Watch::default(),
        };
        let vips: Vec<_> = bed.targets.iter().filter(|t| t.way == Way::Router).map(|t| t.vip.clone()).collect();
        bed.script(&format!("set -e; make_fleet {}; for n in 11 12 13; do start_server $n; done", vips.join(" ")));
        bed.start_servers(&vips);
        bed.configure();
        bed.start_controller();
        (0..GATEWAYS).for_each(|n| bed.spawn(n));
        bed.script(&format!("start_frr {} {}", pace.bfd.0, pace.bfd.1));
        for n in 0..GATEWAYS {
            until("a gateway serves", || bed.sluicectl(n, &["services", "-o", "json"]).filter(|text| text.contains("ipip")));
            let sluicectl = bed.sluicectl.display();
            bed.script(&format!("start_bird {n} {sluicectl} {} {}", pace.bfd.0, pace.bfd.1));
        }
        let vips: Vec<_> = bed.targets.iter().filter(|t| t.way == Way::Link).map(|t| t.vip.clone()).collect();
        bed.watch = Watch::start(&bed.namespace("client"), "link0", "10", &vips);
        bed.settle("at the start");
        Some(bed)
    }

    /// Full name of a namespace.
    pub(crate) fn namespace(&self, name: &str) -> String {
        format!("{}-{name}", self.id)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs shell code with the functions of `demo/fleet-network.sh`, and returns its output.
    pub(crate) fn script(&self, code: &str) -> String {
        script(&self.id, self.dir.path(), &format!(". demo/fleet-network.sh; {code}"))
    }

    fn start_servers(&mut self, vips: &[String]) {
        for backend in BACKENDS {
            let namespace = self.namespace(backend);
            let own = format!("10.0.0.{}", &backend[1..]);
            let addresses: Vec<&str> = vips.iter().map(String::as_str).chain([own.as_str()]).collect();
            let port = DNS.to_string();
            let arguments = [&[port.as_str(), backend][..], &addresses].concat();
            self.servers.push(Program::start_script(&namespace, "dns_server.py", &arguments));
            self.servers.push(Program::start_script(&namespace, "tunnel_end.py", &["tunnel0"]));
            addresses.iter().for_each(|address| quic_like::serve(&namespace, address, QUIC, backend));
        }
    }

    /// Starts iperf3 for each VIP, in place of those that run.
    pub(crate) fn start_iperf3_servers(&mut self) {
        self.downloads.clear();
        let namespace = self.namespace("b11");
        for port in self.targets.iter().map(|target| target.bulk_port) {
            // It reports each download every second; nobody reads that.
            let code = format!("echo starts; exec iperf3 --server --port {port} >/dev/null 2>&1");
            self.downloads.push(Program::start(&namespace, &["bash", "-c", &code]).0);
        }
        until("iperf3 listens for each VIP", || {
            let listening = self.script("in_ns b11 ss -ltn");
            self.targets.iter().all(|target| listening.contains(&format!(":{} ", target.bulk_port))).then_some(())
        });
    }

    /// Lines of a gateway's configuration beside those that every gateway of the network has.
    fn gateway_lines(&self, n: usize) -> Vec<String> {
        let address = |n: usize| format!("\"10.0.0.{}:9437\"", n + 2);
        let partners: Vec<_> = (0..GATEWAYS).filter(|other| *other != n).map(address).collect();
        let (partners, key) = (partners.join(", "), self.path("fleet.key"));
        vec![
            format!("announce: {{election: keepalived, groups: {GROUPS}, advertisement: {}ms}}", self.pace.advertisement_ms),
            "drainOnStop: 4s".to_owned(),
            "logs: {level: debug}".to_owned(),
            // One address for each group of VIPs, with which it moves.
            "snat: {addresses: [10.0.0.20, 10.0.0.21, 10.0.0.22, 10.0.0.23]}".to_owned(),
            format!("fleet: {{listen: {}, partners: [{partners}], key: {}}}", address(n), key.display()),
        ]
    }

    fn configure(&self) {
        self.script("(umask 077; head -c 32 /dev/urandom | base64 >$work/fleet.key)");
        for n in 0..GATEWAYS {
            let lines: String = self.gateway_lines(n).iter().fold(String::new(), |mut all, line| {
                write!(all, " '{line}'").unwrap();
                all
            });
            self.script(&format!("write_gateway_configuration {n}{lines}"));
        }
        let (dir, probe) = (self.dir.path().display(), self.pace.probe_ms);
        // Without fail-open a gateway that reaches no backend withdraws its routes.
        let text = format!(
            "pools:
  - {{name: link, addresses: [192.0.2.100-192.0.2.119]}}
  - {{name: routed, addresses: [203.0.113.0/24], announce: routed}}
health: {{interval: {probe}ms, timeout: {probe}ms, failOpen: false}}
kubernetes: {{kubeconfig: {dir}/kubeconfig}}
listen: unix:{dir}/config.sock
admin: {{listen: \"unix:{dir}/controller.sock\"}}
"
        );
        fs::write(self.path("controller.yaml"), text).unwrap();
    }

    fn log_file(&self, name: &str) -> Stdio {
        fs::OpenOptions::new().create(true).append(true).open(self.path(name)).unwrap().into()
    }

    pub(crate) fn start_controller(&mut self) {
        let mut command = Command::new(&self.sluice_controller);
        command.args(["run", "--config"]).arg(self.path("controller.yaml")).stdin(Stdio::null());
        command.stdout(self.log_file("controller.log")).stderr(self.log_file("controller.log"));
        self.controller = Some(command.spawn().unwrap());
    }

    /// Kills the controller.
    pub(crate) fn end_controller(&mut self) {
        let mut child = self.controller.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Starts a gateway.
    pub(crate) fn spawn(&mut self, n: usize) {
        let log = format!("gw{n}/log");
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(&format!("gw{n}")), env!("CARGO_BIN_EXE_sluiced"), "run", "--config"]);
        command.arg(self.path(&format!("gw{n}/sluice.yaml"))).env("XDG_RUNTIME_DIR", self.path(&format!("gw{n}")));
        command.stdin(Stdio::null()).stdout(self.log_file(&log)).stderr(self.log_file(&log));
        self.gateways[n] = Some(command.spawn().unwrap());
    }

    /// The log of the gateway's newest process.
    pub(crate) fn log(&self, n: usize) -> String {
        fs::read_to_string(self.path(&format!("gw{n}/log"))).unwrap_or_default()
    }

    /// Sends a gateway a signal: `ip netns exec` replaces itself by the program.
    pub(crate) fn signal(&self, n: usize, signal: Signal) {
        kill_process(Pid::from_child(self.gateways[n].as_ref().unwrap()), signal).unwrap();
    }

    /// Waits until a gateway has ended after a signal, and returns its exit code.
    pub(crate) fn wait_for_exit(&mut self, n: usize) -> Option<i32> {
        let mut child = self.gateways[n].take().unwrap();
        let code = until("the gateway ends", || child.try_wait().unwrap()).code();
        let log = self.path(&format!("gw{n}/log"));
        fs::rename(&log, log.with_extension("before")).unwrap();
        code
    }

    fn call(&self, socket: &str, arguments: &[&str]) -> Option<String> {
        let mut command = Command::new(&self.sluicectl);
        command.arg(format!("--server=unix:{}", self.path(socket).display())).args(arguments);
        let output = command.output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }

    /// What `sluicectl` prints on a gateway; `None` if it fails.
    fn sluicectl(&self, n: usize, arguments: &[&str]) -> Option<String> {
        self.call(&format!("gw{n}/admin.sock"), arguments)
    }

    /// Number of gateways that have a VIP.
    pub(crate) fn having(&self, vip: &str) -> usize {
        (0..GATEWAYS).filter(|n| self.sluicectl(*n, &["services"]).is_some_and(|text| text.contains(vip))).count()
    }

    /// Whether a gateway follows a controller.
    pub(crate) fn follows_controller(&self, n: usize) -> bool {
        self.metrics(n).contains("\nsluice_controller_connected 1\n")
    }

    fn metrics(&self, n: usize) -> String {
        self.script(&format!("in_ns gw{n} curl -s http://127.0.0.1:9435/metrics || true"))
    }

    /// What `sluicectl` prints at the controller.
    pub(crate) fn controller(&self, arguments: &[&str]) -> Option<String> {
        self.call("controller.sock", arguments)
    }

    /// Number of gateways that the controller sees ready.
    fn ready(&self) -> usize {
        let text = self.controller(&["gateways", "-o", "json"]).unwrap_or_default();
        let rows: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap_or_default();
        rows.iter().filter(|row| row["ready"] == true && row["draining"] != true).count()
    }

    /// The Ethernet address of a gateway's uplink.
    pub(crate) fn mac(n: usize) -> String {
        format!("02:00:00:00:aa:0{n}")
    }

    /// The gateway that alone answers for a VIP on the link.
    pub(crate) fn owner(&self, vip: &str) -> Option<usize> {
        let owners = self.watch.owners();
        (0..GATEWAYS).find(|n| owners.get(vip) == Some(&BTreeSet::from([Self::mac(*n)])))
    }

    /// Gateways that the router sends packets for a VIP to.
    pub(crate) fn next_hops(&self, vip: &str) -> Vec<usize> {
        let text = self.script(&format!("in_ns router ip route show {vip}"));
        (0..GATEWAYS).filter(|n| text.contains(&format!("via 192.0.2.{} ", n + 2))).collect()
    }

    /// Whether no client is sent to a gateway.
    pub(crate) fn is_left(&self, n: usize) -> bool {
        let of_way = |way: Way| self.targets.iter().filter(move |target| target.way == way);
        of_way(Way::Link).all(|target| self.owner(&target.vip).is_some_and(|owner| owner != n))
            && of_way(Way::Router).all(|target| !self.next_hops(&target.vip).contains(&n))
    }

    /// Whether every VIP on the link has one owner, which has decided to keep it, and the router sends to all gateways.
    fn is_settled(&self) -> bool {
        let keeps = |n: usize| {
            let files = (0..GROUPS).map(move |group| self.path(&format!("gw{n}/state/keepalived/group-{group}")));
            files.filter(|file| fs::read_to_string(file).is_ok_and(|text| text.trim() == "50")).count()
        };
        let has_ways = |target: &Target| match target.way {
            Way::Link => self.owner(&target.vip).is_some(),
            Way::Router => self.next_hops(&target.vip).len() == GATEWAYS,
        };
        (0..GATEWAYS).all(|n| has_joined(&self.log(n), GROUPS))
            && (0..GATEWAYS).map(keeps).sum::<usize>() == GROUPS
            && self.targets.iter().all(has_ways)
            && self.ready() == GATEWAYS
            && (0..GATEWAYS).all(|n| self.follows_all(n))
    }

    /// Whether a gateway has the flows of all others.
    fn follows_all(&self, n: usize) -> bool {
        self.metrics(n).contains(&format!("\nsluice_fleet_followed_partners {}\n", GATEWAYS - 1))
    }

    /// Waits until all gateways take part again and nothing moves any more.
    pub(crate) fn settle(&self, when: &str) {
        let start = Instant::now();
        while !self.is_settled() {
            assert!(start.elapsed() < DEADLINE, "{when}: timeout after {DEADLINE:?}: {}", self.state());
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }

    /// What a person would look at first.
    fn state(&self) -> String {
        let ways = self.targets.iter().map(|target| match target.way {
            Way::Link => format!("{} at {:?}", target.vip, self.watch.owners().get(&target.vip)),
            Way::Router => format!("{} at {:?}", target.vip, self.next_hops(&target.vip)),
        });
        let joined = (0..GATEWAYS).map(|n| has_joined(&self.log(n), GROUPS)).collect::<Vec<_>>();
        let follow = (0..GATEWAYS).map(|n| self.follows_all(n)).collect::<Vec<_>>();
        format!("{:?}, joined {joined:?}, ready {}, follow all {follow:?}", ways.collect::<Vec<_>>(), self.ready())
    }

    /// Starts the router's programs again.
    pub(crate) fn restart_router(&self) {
        self.script(&format!("stop_frr; start_frr {} {}", self.pace.bfd.0, self.pace.bfd.1));
    }

    /// Starts a capture of ARP on the bridge of the link. Dropping the value ends it.
    pub(crate) fn capture(&self, file: &Path) -> Program {
        let file = file.display();
        let command = format!("exec tcpdump -i uplinks --immediate-mode -U -Z root -w {file} arp 2>&1");
        Program::start(&self.namespace("sw"), &["bash", "-c", &command]).0
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for n in 0..GATEWAYS {
                let log = self.log(n);
                let lines: Vec<_> = log.lines().filter(|line| !line.contains("DEBUG")).collect();
                eprintln!("--- the log of gateway {n}:\n{}", lines[lines.len().saturating_sub(60)..].join("\n"));
            }
            eprintln!("--- {}", self.state());
        }
        for mut child in self.gateways.iter_mut().chain([&mut self.controller]).filter_map(Option::take) {
            let _ = child.kill();
            let _ = child.wait();
        }
        self.servers.clear();
        self.downloads.clear();
        self.watch = Watch::default();
        self.script("remove_fleet");
    }
}

//! Two gateways behind a router that spreads flows over both by ECMP, with the configurations that `sluicectl config`
//! writes: the first announces its VIPs by BIRD, through its twin and with BFD, the second by FRR, through another
//! interface. The router runs BIRD or FRR.

#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used)]

mod edge;

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use edge::{Edge, Program, built_program, skip, until};
use rustix::process::Signal;

/// VIPs of modes `nat`, `dsr` and `gue`.
const NAT: &str = "203.0.113.1";
const DSR: &str = "203.0.113.2";
const GUE: &str = "203.0.113.3";
/// A VIP of mode `nat`, and the aggregate by which its pool is announced.
const AGGREGATED: &str = "203.0.113.200";
const AGGREGATE: &str = "203.0.113.192/26";
/// The routing sessions of the first gateway, as "PROTOCOL PEER STATUS".
const SESSIONS: [&str; 2] = ["bgp 192.0.2.1 up", "bfd 192.0.2.1 up"];
/// Both pools: attributes of one, aggregation of the other.
const POOLS: &str = "pools: \
    [{name: default, addresses: [203.0.113.0/25], announce: routed, bgp: {communities: ['64512:100', '64512:1:2'], med: 50}}, \
    {name: whole, addresses: [203.0.113.192/26], announce: routed, bgp: {communities: ['64512:200'], aggregationLength: 26}}]";

/// The Services of the three modes, and one with the VIP of the aggregate.
fn services() -> String {
    [("nat", "nat", NAT), ("dsr", "dsr", DSR), ("gue", "gue", GUE), ("nat", "aggregated", AGGREGATED)]
        .map(|(mode, name, vip)| {
            format!(
                "apiVersion: v1
kind: Service
metadata:
  namespace: demo
  name: {name}
  annotations: {{sluice.dev/mode: {mode}, sluice.dev/target: endpoint, sluice.dev/addresses: {vip}}}
spec:
  type: LoadBalancer
  loadBalancerClass: sluice.dev/gateway
  ports: [{{name: http, port: 8080, targetPort: 8080}}, {{name: echo, port: 9000, targetPort: 9000}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{namespace: demo, name: {name}-1, labels: {{kubernetes.io/service-name: {name}}}}}
addressType: IPv4
ports: [{{name: http, protocol: TCP, port: 8080}}, {{name: echo, protocol: TCP, port: 9000}}]
endpoints: [{{addresses: [10.0.0.11]}}, {{addresses: [10.0.0.12]}}, {{addresses: [10.0.0.13]}}]
"
            )
        })
        .join("---\n")
}

/// The routing daemon of the router.
#[derive(Clone, Copy, PartialEq)]
enum RouterDaemon {
    Bird,
    Frr,
}

/// The gateways, their routing daemons and the router. The first gateway is that of the edge.
struct Fleet {
    router: RouterDaemon,
    edge: Edge,
    second: Option<Program>,
    /// The router's daemons.
    of_router: Vec<Program>,
    /// Tunnel ends and the gateways' daemons.
    others: Vec<Program>,
}

impl Fleet {
    fn start(test: &str, name: &str, router: RouterDaemon) -> Option<Self> {
        let has = |program: &str| Path::new(program).exists();
        if !has("/usr/sbin/bird") || !has("/usr/lib/frr/bgpd") {
            skip(test, "no BIRD or no FRR here (Debian: apt-get install bird2 frr)");
            return None;
        }
        let edge = Edge::with_echo_servers(test, name, 9000)?;
        edge.script(&format!(
            "set -e; . tests/edge/router.sh; . tests/edge/two_gateways.sh; make_router 1500; make_second_gateway
             make_direct_ways 192.0.2.2=10.0.0.2 192.0.3.2=10.0.0.4 -- {DSR} {GUE}; write_router_configuration \"$work/router.conf\"
             mkdir $work/frr-router; write_frr_router_configuration \"$work/frr-router/frr.conf\""
        ));
        let mut fleet = Self { router, edge, second: None, of_router: Vec::new(), others: Vec::new() };
        fleet.configure();
        fleet.edge.write_manifest("services.yaml", &services());
        for node in ["b11", "b12", "b13"] {
            let end = fleet.edge.start_script(node, "tunnel_end.py", &["tunnel0"]);
            fleet.others.push(end);
        }
        fleet.edge.start();
        fleet.start_second();
        // The rule is for probes of the second gateway, whose routes to VIPs are in table `main`.
        fleet.edge.script(
            "set -e; in_ns gw ip route replace default via 192.0.2.1 dev uplink
             in_ns gw2 ip route replace default via 192.0.3.1 dev uplink
             in_ns gw2 ip route replace default via 192.0.3.1 dev uplink table 151
             in_ns gw2 ip rule add pref 1000 to 203.0.113.0/24 lookup 151",
        );
        fleet.start_daemons();
        Some(fleet)
    }

    /// The configurations: the second gateway has other addresses and sockets, and puts its routes into table `main`.
    fn configure(&self) {
        let edge = &self.edge;
        edge.configure_af_packet("tunnel: {sources: [10.0.0.2]}\ndrainOnStop: 8s");
        let first = fs::read_to_string(edge.path("sluice.yaml")).unwrap();
        let first: String = first
            .lines()
            .map(|line| if line.starts_with("pools:") { POOLS } else { line })
            .fold(String::new(), |all, line| all + line + "\n");
        let bird = format!("announce: {{daemon: bird, daemonSocket: {}}}\n", edge.path("bird.ctl").display());
        fs::write(edge.path("sluice.yaml"), first.clone() + &bird).unwrap();
        let second = [
            ("name: test", "name: second"),
            ("192.0.2.2/24, \"2001:db8::2/64\"", "192.0.3.2/24, \"2001:db8:3::2/64\""),
            ("10.0.0.2/24, \"fd00::2/64\"", "10.0.0.4/24, \"fd00::4/64\""),
            ("[10.0.0.3, \"fd00::3\"]", "[10.0.0.5, \"fd00::5\"]"),
            ("nodePortAddresses: [192.0.2.2]", "nodePortAddresses: [192.0.3.2]"),
            ("sources: [10.0.0.2]", "sources: [10.0.0.4]"),
            ("/status", "/status2"),
            ("/state\n", "/state2\n"),
            ("/config.sock", "/config2.sock"),
            ("/admin.sock", "/admin2.sock"),
        ];
        let second = second.iter().fold(first, |text, (old, new)| {
            assert!(text.contains(old), "{old} is not in\n{text}");
            text.replace(old, new)
        });
        let frr = format!("announce: {{routeTable: 254, daemon: frr, daemonSocket: {}}}\n", edge.path("frr").display());
        fs::write(edge.path("second.yaml"), second + &frr).unwrap();
    }

    fn wait_for_bfd(&self) {
        until("the BFD session is up", || {
            let sessions = self.router("show bfd sessions", "show bfd peers");
            (sessions.contains("Up") || sessions.contains("Status: up")).then_some(())
        });
    }

    fn start_second(&mut self) {
        let dir = self.edge.dir.path().display();
        let sluiced = env!("CARGO_BIN_EXE_sluiced");
        fs::create_dir_all(self.edge.path("run2")).unwrap();
        let code = format!(
            "echo starts; XDG_RUNTIME_DIR={dir}/run2 exec {sluiced} run --config {dir}/second.yaml >>{dir}/second.log 2>&1"
        );
        self.second = Some(self.edge.start_program("gw2", &["bash", "-c", &code]).0);
        until("the second gateway serves", || {
            fs::read_to_string(self.edge.path("second.log")).ok()?.contains("the gateway runs").then_some(())
        });
    }

    /// Starts BIRD on the router and the first gateway, and FRR on the second one.
    fn start_daemons(&mut self) {
        let dir = self.edge.dir.path().display().to_string();
        let bird = self.sluicectl(
            "admin.sock",
            &[
                "config",
                "bird",
                "--local-as",
                "64512",
                "--peer",
                "192.0.2.1=64513",
                "--bfd",
                "--bfd-interval",
                "1000",
                "--bfd-multiplier",
                "5",
            ],
        );
        let frr = self.sluicectl(
            "admin2.sock",
            &["config", "frr", "--local-as", "64512", "--peer", "10.9.0.1=64513", "--next-hop", "192.0.3.2"],
        );
        fs::write(self.edge.path("bird.conf"), bird.unwrap()).unwrap();
        fs::write(self.edge.path("frr.conf"), frr.unwrap()).unwrap();
        self.edge.script("set -e; chmod 711 $work; mkdir -p $work/frr; cp $work/frr.conf $work/frr/; chown -R frr:frr $work/frr $work/frr-router");
        let bird = |file: &str| format!("exec bird -f -c {dir}/{file}.conf -s {dir}/{file}.ctl -P {dir}/{file}.pid");
        let frr = |at: &str, daemon: &str| {
            format!(
                "exec /usr/lib/frr/{daemon} -f {dir}/{at}/frr.conf -i {dir}/{at}/{daemon}.pid --vty_socket {dir}/{at} \
                 -z {dir}/{at}/zserv.api -u frr -g frr --log file:{dir}/{at}/{daemon}.log"
            )
        };
        let of_router = |daemon: &str| ("router", frr("frr-router", daemon));
        let mut daemons = match self.router {
            RouterDaemon::Bird => vec![("router", bird("router"))],
            RouterDaemon::Frr => ["zebra", "bfdd", "bgpd"].map(of_router).to_vec(),
        };
        daemons.extend([("gw", bird("bird")), ("gw2", frr("frr", "zebra")), ("gw2", frr("frr", "bgpd"))]);
        for (namespace, command) in daemons {
            let code = format!("echo starts; {command} >>{dir}/daemons.log 2>&1");
            let (program, _) = self.edge.start_program(namespace, &["bash", "-c", &code]);
            let is_router = namespace == "router";
            if is_router { &mut self.of_router } else { &mut self.others }.push(program);
            if command.contains("zebra") {
                let at = if is_router { "frr-router" } else { "frr" };
                until("zebra listens", || self.edge.path(at).join("zserv.api").exists().then_some(()));
            }
        }
    }

    /// The routing sessions that a gateway shows, as "PROTOCOL PEER STATUS".
    fn shown_sessions(&self, socket: &str) -> Vec<String> {
        let Ok(text) = self.sluicectl(socket, &["gateways", "-o", "json"]) else { return Vec::new() };
        let gateways: serde_json::Value = serde_json::from_str(&text).unwrap();
        let word = |session: &serde_json::Value, field: &str| session[field].as_str().unwrap().to_owned();
        let row = |session| ["protocol", "peer", "status"].map(|field| word(session, field)).join(" ");
        gateways[0]["sessions"].as_array().unwrap().iter().map(row).collect()
    }

    /// Waits until a gateway shows these routing sessions.
    fn expect_sessions(&self, socket: &str, wanted: &[&str]) {
        until(&format!("{socket} shows sessions {wanted:?}"), || (self.shown_sessions(socket) == wanted).then_some(()));
    }

    /// What `sluicectl` prints on a gateway.
    fn sluicectl(&self, socket: &str, arguments: &[&str]) -> Result<String, String> {
        let output = Command::new(built_program("sluicectl", "sluicectl"))
            .arg(format!("--server=unix:{}", self.edge.path(socket).display()))
            .args(arguments)
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
    }

    /// The next hops of the router to a VIP.
    fn next_hops(&self, vip: &str) -> Vec<&'static str> {
        let output = self.edge.run("router", &["ip", "route", "show", vip]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ["192.0.2.2", "192.0.3.2"].into_iter().filter(|via| text.contains(&format!("via {via} "))).collect()
    }

    /// Waits until the router sends to these gateways, for every VIP.
    fn expect_next_hops(&self, what: &str, wanted: &[&str]) {
        until(what, || [NAT, DSR, GUE, AGGREGATE].iter().all(|vip| self.next_hops(vip) == wanted).then_some(()));
    }

    /// What the router's daemon answers to a command: of BIRD, or of FRR.
    fn router(&self, bird: &str, frr: &str) -> String {
        let output = match self.router {
            RouterDaemon::Bird => {
                Command::new("birdc").arg("-s").arg(self.edge.path("router.ctl")).args(bird.split(' ')).output()
            }
            RouterDaemon::Frr => {
                Command::new("vtysh").arg("--vty_socket").arg(self.edge.path("frr-router")).args(["-c", frr]).output()
            }
        };
        String::from_utf8_lossy(&output.unwrap().stdout).into_owned()
    }

    /// What the router knows about the routes to a prefix.
    fn routes(&self, prefix: &str) -> String {
        self.router(&format!("show route all {prefix}"), &format!("show bgp ipv4 unicast {prefix}"))
    }

    /// Checks what the router learned about the pools.
    fn assert_attributes(&self) {
        let (first, whole) = (self.routes(&format!("{NAT}/32")), self.routes(AGGREGATE));
        let [community, large, med, of_whole] = match self.router {
            RouterDaemon::Bird => ["(64512,100)", "(64512, 1, 2)", "BGP.med: 50", "(64512,200)"],
            RouterDaemon::Frr => ["Community: 64512:100", "Large Community: 64512:1:2", "metric 50", "Community: 64512:200"],
        };
        for part in [community, large, med] {
            assert_eq!(first.matches(part).count(), 2, "{part}, of both gateways: {first}");
        }
        assert_eq!(whole.matches(of_whole).count(), 2, "{whole}");
        assert!(!whole.contains(community) && !whole.contains(large) && !whole.contains(med), "{whole}");
        assert_eq!(self.next_hops(AGGREGATED), [""; 0], "the VIP is announced by its aggregate alone");
    }

    /// Whether the router knows that the first gateway drains, by its routes to a prefix.
    fn is_demoted(&self, prefix: &str) -> bool {
        let routes = self.routes(prefix);
        match self.router {
            RouterDaemon::Bird => routes.contains("(65535,0)"),
            RouterDaemon::Frr => routes.contains("graceful-shutdown") && routes.contains("localpref 0"),
        }
    }

    /// Number of BGP sessions of the router.
    fn sessions(&self) -> usize {
        let established = match self.router {
            RouterDaemon::Bird => "Established",
            RouterDaemon::Frr => "BGP state = Established",
        };
        self.router("show protocols", "show bgp neighbors").matches(established).count()
    }

    /// A request in each one-way mode, and a connection in `nat`. None may fail.
    fn assert_no_request_fails(&self, when: &str) {
        for vip in [DSR, GUE] {
            self.edge.curl(&format!("http://{vip}:8080/")).unwrap_or_else(|| panic!("a request to {vip} failed {when}"));
        }
        let address: SocketAddr = format!("{NAT}:9000").parse().unwrap();
        let connected = self.edge.in_namespace("client", || TcpStream::connect_timeout(&address, Duration::from_secs(60)));
        drop(connected.unwrap_or_else(|error| panic!("a new connection to {address} failed {when}: {error}")));
        self.edge.curl(&format!("http://{AGGREGATED}:8080/")).unwrap_or_else(|| panic!("a request failed {when}"));
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let file = |name: &str| fs::read_to_string(self.edge.path(name)).unwrap_or_default();
            eprintln!("--- the second gateway's log:\n{}--- daemons:\n{}", file("second.log"), file("daemons.log"));
            let protocols = self.router("show protocols all", "show bgp summary");
            eprintln!("--- the router:\n{protocols}{}", self.router("show route all", "show bgp ipv4 unicast"));
        }
    }
}

/// The thread of the first gateway's worker.
fn worker_thread(edge: &Edge) -> String {
    let tasks = format!("/proc/{}/task", edge.pid().as_raw_nonzero());
    let is_worker =
        |task: &fs::DirEntry| fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim() == "sluice-worker-0");
    let mut threads = fs::read_dir(tasks).unwrap().map(Result::unwrap);
    threads.find(is_worker).expect("the worker's thread").file_name().into_string().unwrap()
}

#[test]
fn a_gateway_that_drains_or_dies_leaves_its_flows_to_the_other_one() {
    let Some(fleet) = Fleet::start("two gateways behind a router", "fleet", RouterDaemon::Bird) else { return };
    drain_and_kill(fleet);
}

#[test]
fn a_router_of_frr_learns_the_same() {
    let Some(fleet) = Fleet::start("two gateways behind a router of FRR", "fleet-frr", RouterDaemon::Frr) else { return };
    drain_and_kill(fleet);
}

/// Drains and kills the gateways, one after the other, while connections are open.
fn drain_and_kill(mut fleet: Fleet) {
    let both = ["192.0.2.2", "192.0.3.2"];
    fleet.expect_next_hops("the router spreads flows over both gateways", &both);
    fleet.assert_attributes();
    until("requests pass", || {
        [NAT, DSR, GUE].iter().all(|vip| fleet.edge.curl(&format!("http://{vip}:8080/")).is_some()).then_some(())
    });
    let mut open: Vec<_> =
        (0..16).map(|n| fleet.edge.connect(&format!("{}:9000", [DSR, GUE][n % 2])).expect("a connection")).collect();

    for socket in ["admin.sock", "admin2.sock"] {
        let backends = fleet.sluicectl(socket, &["backends", "-o", "json"]).unwrap().replace(' ', "");
        assert!(backends.contains("\"healthy\":true") && !backends.contains("\"healthy\":false"), "probes pass: {backends}");
    }

    fleet.expect_sessions("admin.sock", &SESSIONS);
    fleet.expect_sessions("admin2.sock", &["bgp 10.9.0.1 up"]);

    // SIGTERM of the first gateway.
    fleet.edge.signal(Signal::TERM);
    let (mut was_demoted, mut was_aggregate_demoted) = (false, false);
    while fleet.edge.is_running() {
        was_demoted |= fleet.is_demoted(&format!("{NAT}/32"));
        was_aggregate_demoted |= fleet.is_demoted(AGGREGATE);
        fleet.assert_no_request_fails("while a gateway drains");
        open.iter_mut().for_each(|connection| connection.assert_alive("while a gateway drains"));
    }
    assert!(was_demoted && was_aggregate_demoted, "the router learned GRACEFUL_SHUTDOWN: {}", fleet.edge.log());
    assert_eq!(fleet.edge.wait_for_exit(), Some(0), "{}", fleet.edge.log());
    fleet.expect_next_hops("the router sends to the second gateway only", &both[1..]);
    fleet.assert_no_request_fails("after a gateway has ended");

    // kill -9 of the second one.
    fleet.edge.start();
    // BGP may be back before BFD. FRR then ends the session once more, because BFD is down.
    fleet.expect_sessions("admin.sock", &SESSIONS);
    fleet.expect_next_hops("the first gateway is back", &both);
    fleet.second.take().unwrap().end();
    fleet.expect_next_hops("the routes of a killed gateway are withdrawn", &both[..1]);
    assert_eq!(fleet.sessions(), 2, "the sessions of its routing daemon stay");
    fleet.assert_no_request_fails("after a gateway was killed");
    open.iter_mut().for_each(|connection| connection.assert_alive("after both gateways were gone once"));

    // A worker of the first one that hangs: the session over its twin passes the worker, and so does BFD.
    fleet.wait_for_bfd();
    let stopped = fleet.edge.start_script("gw", "stop_thread.py", &[&worker_thread(&fleet.edge)]);
    fleet.expect_next_hops("a gateway whose worker hangs loses its BFD session", &[]);
    drop(stopped);
    fleet.expect_next_hops("the worker goes on", &both[..1]);
    // BGP may be back first; FRR follows only a BFD session that has been up.
    fleet.wait_for_bfd();

    // kill -9 of the first one: its withdrawal does not get out, but BFD ends.
    fleet.edge.stop(true);
    fleet.expect_next_hops("a killed gateway loses its BFD session", &[]);

    // The end of the router.
    fleet.edge.start();
    fleet.start_second();
    fleet.expect_sessions("admin.sock", &SESSIONS);
    fleet.expect_sessions("admin2.sock", &["bgp 10.9.0.1 up"]);
    fleet.of_router.drain(..).for_each(|mut daemon| daemon.end());
    fleet.expect_sessions("admin.sock", &["bgp 192.0.2.1 down", "bfd 192.0.2.1 down"]);
    fleet.expect_sessions("admin2.sock", &["bgp 10.9.0.1 down"]);
    until("an Event says so", || {
        fleet.sluicectl("admin.sock", &["events"]).is_ok_and(|text| text.contains("SessionDown")).then_some(())
    });
}

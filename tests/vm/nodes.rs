//! Steps with `target: node`: the machine of nodes is two nodes with a Pod on the first, whose packets nftables or IPVS
//! lead to it as kube-proxy does.

use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::Step;
use crate::edge::node_manifest;
use crate::lab::{Kind, Lab, until};
use crate::world::node;

pub fn steps() -> Vec<Step> {
    vec![("kube-proxy's rules and IPVS take packets for nodes", false, node_proxies)]
}

const NODES: [&str; 2] = ["10.0.0.21", "10.0.0.22"];
const VIP: &str = "192.0.2.111";
const NODE_PORT: u16 = 30080;
const HEALTH_PORT: u16 = 30990;
/// The Pod, and the address of its node towards it.
const POD: &str = "10.244.0.2";
const POD_GATEWAY: &str = "10.244.0.1";
/// The source of the gateway's packets in mode `nat`.
const SNAT: &str = "10.0.0.3";
const CLIENT: &str = "192.0.2.10";

/// How a Service reaches its nodes, and the address of the client that the Pod then sees.
struct Case {
    mode: &'static str,
    policy: &'static str,
    is_ipvs: bool,
    seen: &'static str,
}

const CASES: [Case; 6] = [
    Case { mode: "nat", policy: "Cluster", is_ipvs: false, seen: POD_GATEWAY },
    Case { mode: "nat", policy: "Local", is_ipvs: false, seen: SNAT },
    Case { mode: "dsr", policy: "Cluster", is_ipvs: false, seen: POD_GATEWAY },
    Case { mode: "dsr", policy: "Local", is_ipvs: false, seen: CLIENT },
    Case { mode: "nat", policy: "Cluster", is_ipvs: true, seen: POD_GATEWAY },
    Case { mode: "dsr", policy: "Local", is_ipvs: true, seen: CLIENT },
];

impl Case {
    fn manifest(&self) -> String {
        let health = if self.policy == "Local" { format!("healthCheckNodePort: {HEALTH_PORT}") } else { String::new() };
        let mut text = format!(
            "apiVersion: v1
kind: Service
metadata: {{namespace: demo, name: node, annotations: {{sluice.dev/addresses: \"{VIP}\", sluice.dev/mode: {}, sluice.dev/target: node}}}}
spec:
  type: LoadBalancer
  loadBalancerClass: sluice.dev/gateway
  externalTrafficPolicy: {}
  ports: [{{name: http, port: 8080, targetPort: 8080, nodePort: {NODE_PORT}}}]
  {health}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{namespace: demo, name: node-ipv4, labels: {{kubernetes.io/service-name: node}}}}
addressType: IPv4
ports: [{{name: http, port: 8080}}]
endpoints: [{{addresses: [{POD}], nodeName: node-0}}]
",
            self.mode, self.policy
        );
        for (n, address) in NODES.iter().enumerate() {
            text += &node_manifest(&format!("node-{n}"), address);
        }
        text
    }

    /// Shell code that installs kube-proxy's rules, and counters of the clients' connections to each node port, without the
    /// gateway's probes. A node without endpoints forwards under `Cluster`, with its own
    /// address as the source, and drops under `Local`.
    fn rules(&self) -> String {
        let is_local = self.policy == "Local";
        let [first, second] = NODES;
        let mut rules = String::from(
            "add table ip lab; add counter ip lab first; add counter ip lab second
             add chain ip lab count { type filter hook prerouting priority raw; }
             add chain ip lab pre { type nat hook prerouting priority dstnat; }
             add chain ip lab post { type nat hook postrouting priority srcnat; }\n",
        );
        for (address, counter) in [(first, "first"), (second, "second")] {
            let _ = writeln!(
                rules,
                "add rule ip lab count ip saddr {SNAT} ip daddr {address} tcp dport {NODE_PORT} tcp flags syn counter name {counter}"
            );
        }
        let to_nodes = if is_local { format!("{{ {first} }}") } else { format!("{{ {first}, {second} }}") };
        if !self.is_ipvs {
            let _ = writeln!(rules, "add rule ip lab pre ip daddr {to_nodes} tcp dport {NODE_PORT} dnat to {POD}:8080");
            let _ = writeln!(rules, "add rule ip lab pre ip daddr {VIP} tcp dport 8080 dnat to {POD}:8080");
        }
        if !is_local {
            let _ = writeln!(rules, "add rule ip lab post ip daddr {POD} tcp dport 8080 masquerade");
        }
        let mut code = format!("nft delete table ip lab 2>/dev/null; ipvsadm -C\nnft -f - <<'RULES'\n{rules}RULES\n");
        if self.is_ipvs {
            for virtual_server in [format!("{first}:{NODE_PORT}"), format!("{second}:{NODE_PORT}"), format!("{VIP}:8080")] {
                if is_local && virtual_server.starts_with(second) {
                    continue;
                }
                let _ = writeln!(code, "ipvsadm -A -t {virtual_server} -s rr && ipvsadm -a -t {virtual_server} -r {POD}:8080 -m");
            }
        }
        code
    }

    fn name(&self) -> String {
        format!("{} {} {}", self.mode, self.policy, if self.is_ipvs { "IPVS" } else { "nftables" })
    }
}

/// The answers to requests, empty for those without one, and the connections to the port of each node.
fn requests(lab: &mut Lab, url: &str, number: usize) -> (Vec<String>, [u64; 2]) {
    lab.world().succeed("nft reset counters table ip lab");
    let answers = (0..number).map(|_| lab.edge.curl(url).unwrap_or_default()).collect();
    let counters = lab.world().succeed("nft list counters table ip lab");
    let packets = |line: &str| line.trim().strip_prefix("packets ")?.split(' ').next()?.parse().ok();
    let packets: Vec<u64> = counters.lines().filter_map(packets).collect();
    (answers, packets.try_into().expect("two counters"))
}

fn serves(lab: &mut Lab, case: &Case) {
    lab.world().succeed(&case.rules());
    lab.gateway().write("/etc/sluice/manifests/node.yaml", &case.manifest());
    let url = format!("http://{VIP}:8080/");
    let what = case.name();
    // Requests of the mode before may look alike.
    until(&format!("{what}: the Pod answers and sees {}", case.seen), || {
        let (answers, packets) = requests(lab, &url, 4);
        let is_by_port = packets.iter().sum::<u64>() > 0;
        (answers.iter().all(|seen| seen == case.seen) && is_by_port == (case.mode == "nat")).then_some(())
    });
    let (answers, packets) = requests(lab, &url, 10);
    assert!(answers.iter().all(|seen| seen == case.seen), "{what}: {answers:?}");
    let is_expected = match (case.mode, case.policy) {
        ("nat", "Cluster") => packets.iter().all(|packets| *packets > 0),
        ("nat", _) => packets[0] > 0 && packets[1] == 0,
        _ => packets == [0, 0],
    };
    assert!(is_expected, "{what}: connections to the ports of both nodes: {packets:?}");
}

fn node_proxies(lab: &mut Lab) {
    node(lab);
    lab.use_card(Kind::first(), "");
    lab.world().write("/run/node.py", include_str!("node.py"));
    let [first, second] = NODES;
    lab.world().succeed(&format!(
        "set -e; sysctl -qw net.ipv4.ip_forward=1; modprobe ip_vs; modprobe ip_vs_rr; sysctl -qw net.ipv4.vs.conntrack=1
         ip addr add {second}/24 dev eth3
         ip netns add pod; ip link add pod type veth peer name eth0 netns pod; ip link set pod up
         ip addr add {POD_GATEWAY}/24 dev pod; ip -n pod addr add {POD}/24 dev eth0; ip -n pod link set eth0 up
         ip -n pod link set lo up; ip -n pod route add default via {POD_GATEWAY}
         ip netns exec pod python3 /run/node.py {POD} 8080 200 >/dev/null 2>&1 &
         for node in {first} {second}; do python3 /run/node.py $node 10256 200 >/dev/null 2>&1 & done
         python3 /run/node.py {first} {HEALTH_PORT} 200 >/dev/null 2>&1 &
         python3 /run/node.py {second} {HEALTH_PORT} 503 >/dev/null 2>&1 &"
    ));
    let result = catch_unwind(AssertUnwindSafe(|| CASES.iter().for_each(|case| serves(lab, case))));
    // Other steps use the node, whatever happened.
    lab.world().succeed(&format!(
        "nft delete table ip lab; ipvsadm -C; ip netns pids pod | xargs -r kill; ip netns del pod
         ip addr del {second}/24 dev eth3; pkill -f '[/]run/node.py'; true"
    ));
    result.unwrap_or_else(|panic| resume_unwind(panic));
}

//! Steps over a whole kernel: nodes that take packets out of tunnels, SCTP, a lossy link, and the
//! way of the Vagrantfile.

use crate::Step;
use crate::lab::{Kind, Lab, until, vagrant_index};

pub fn steps() -> Vec<Step> {
    vec![
        ("a node of Linux takes packets by MAC address and out of tunnels", false, one_way),
        ("a download lives through loss, reordering and duplicates", false, lossy),
        ("SCTP between hosts with several addresses keeps its path", false, sctp),
        ("the way of the Vagrantfile", false, vagrant),
    ]
}

/// A Service with one backend, the node.
pub fn service(mode: &str, families: &[(&str, &str)], target_port: u16) -> String {
    let slices = families.iter().map(|(family, address)| {
        format!(
            "---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{namespace: demo, name: node-{}, labels: {{kubernetes.io/service-name: node}}}}
addressType: {family}
ports: [{{name: http, port: {target_port}}}]
endpoints: [{{addresses: [\"{address}\"]}}]
",
            family.to_lowercase()
        )
    });
    let ip_families: Vec<_> = families.iter().map(|(family, _)| *family).collect();
    let addresses = if families.len() == 2 { "192.0.2.111,2001:db8::1:11" } else { "192.0.2.111" };
    format!(
        "apiVersion: v1
kind: Service
metadata: {{namespace: demo, name: node, annotations: {{sluice.dev/addresses: \"{addresses}\", {mode}}}}}
spec:
  type: LoadBalancer
  loadBalancerClass: sluice.dev/gateway
  ipFamilyPolicy: PreferDualStack
  ipFamilies: [{}]
  ports: [{{name: http, port: 8080, targetPort: {target_port}}}]
{}",
        ip_families.join(", "),
        slices.collect::<String>()
    )
}

/// The families of the node's Service, and its addresses.
pub const BOTH: [(&str, &str); 2] = [("IPv4", "10.0.0.21"), ("IPv6", "fd00::21")];
const VIPS: [&str; 2] = ["192.0.2.111", "[2001:db8::1:11]"];

/// Gives the node its addresses and servers, once.
pub fn node(lab: &mut Lab) {
    let world = lab.world();
    world.succeed(
        "[ -e /run/node ] && exit; touch /run/node
         mkdir -p /opt/sluice && tar -xf /dev/vdb -C /opt/sluice
         sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0
         for rule in all default eth2 eth3; do sysctl -qw net.ipv4.conf.$rule.rp_filter=0; done
         sysctl -qw net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2
         ip link set eth2 up; ip link set eth3 up
         ip addr add 192.0.2.21/24 dev eth2; ip addr add 2001:db8::21/64 dev eth2 nodad
         ip addr add 10.0.0.21/24 dev eth3; ip addr add fd00::21/64 dev eth3 nodad
         ip addr add 192.0.2.111/32 dev lo; ip addr add 2001:db8::1:11/128 dev lo nodad
         mkdir -p /run/web && head -c 4M /dev/urandom >/run/web/file && cp -r /run/web /var/www/lab",
    );
    world.write(
        "/etc/nginx/conf.d/lab.conf",
        "server { listen 8080; listen [::]:8080; root /var/www/lab; location = / { return 200 \"node\\n\"; } }\n",
    );
    world.succeed("rm -f /etc/nginx/sites-enabled/default; systemctl restart nginx");
}

/// Waits until the VIPs of the node answer, and downloads its file whole.
fn assert_downloads(lab: &mut Lab, what: &str) {
    let expected = lab.world().succeed("sha256sum </var/www/lab/file");
    for vip in VIPS {
        let url = format!("http://{vip}:8080/");
        until(&format!("{what}: {url} answers"), || lab.edge.curl(&url).filter(|answer| answer == "node"));
        let command = format!("curl -sgf --max-time 120 {url}file | sha256sum");
        let sum = lab.edge.run("client", &["bash", "-c", &command]);
        assert_eq!(String::from_utf8_lossy(&sum.stdout), expected, "{what}: {url}file");
    }
}

fn one_way(lab: &mut Lab) {
    modes(lab, Kind::first());
}

/// Downloads through each mode without state, over the cards of a kind.
pub fn modes(lab: &mut Lab, kind: Kind) {
    node(lab);
    lab.use_card(kind, "");
    for (mode, devices) in [
        ("dsr", "true"),
        // As docs/guide/modes.md says.
        (
            "ipip",
            "modprobe ipip && ip link set tunl0 up && sysctl -qw net.ipv4.conf.tunl0.rp_filter=0 && modprobe ip6_tunnel && ip link set ip6tnl0 up",
        ),
        (
            "gue",
            "modprobe fou && modprobe fou6 && ip fou show | grep -q 6080 || { ip fou add port 6080 gue && ip fou add port 6080 gue -6; }",
        ),
    ] {
        lab.world().succeed(devices);
        let text = service(&format!("sluice.dev/mode: {mode}, sluice.dev/target: endpoint"), &BOTH, 8080);
        lab.gateway().write("/etc/sluice/manifests/node.yaml", &text);
        assert_downloads(lab, mode);
    }
}

fn lossy(lab: &mut Lab) {
    node(lab);
    lab.use_card(Kind::first(), "");
    lab.world()
        .succeed("modprobe sch_netem && tc qdisc replace dev eth3 root netem delay 2ms 1ms loss 2% duplicate 1% reorder 5%");
    lab.gateway().write("/etc/sluice/manifests/node.yaml", &service("sluice.dev/mode: nat", &BOTH, 8080));
    assert_downloads(lab, "nat over a lossy link");
    lab.world().succeed("tc qdisc del dev eth3 root");
}

/// A client and a server of the kernel's SCTP, each on a host with one more address, which the gateway does not reach.
fn sctp(lab: &mut Lab) {
    node(lab);
    lab.use_card(Kind::first(), "");
    let text = service("sluice.dev/mode: nat", &BOTH[..1], 8080).replace("name: http, port", "name: http, protocol: SCTP, port");
    lab.gateway().write("/etc/sluice/manifests/node.yaml", &text);
    lab.world().write("/run/sctp.py", include_str!("sctp.py"));
    let world = lab.world();
    world.succeed(
        "modprobe sctp; ip netns add sctp; ip -n sctp link set lo up
         ip link add link eth2 name mv0 type macvlan mode bridge; ip link set mv0 netns sctp
         ip -n sctp link set mv0 up; ip -n sctp addr add 192.0.2.41/24 dev mv0
         ip -n sctp link add other type dummy; ip -n sctp link set other up; ip -n sctp addr add 10.8.0.1/24 dev other
         ip link add other type dummy; ip link set other up; ip addr add 10.9.0.1/24 dev other
         ip netns exec sctp sysctl -qw net.sctp.hb_interval=1000; sysctl -qw net.sctp.hb_interval=1000
         python3 /run/sctp.py serve 8080 >/run/sctp.log 2>&1 &",
    );
    // Heartbeats go to each address that a peer has listed: the association would end within seconds.
    let heard =
        world.until("an association through the gateway", "ip netns exec sctp python3 /run/sctp.py ask 192.0.2.111 8080 15");
    assert_eq!(heard.lines().filter(|line| *line == "answer").count(), 15, "{heard}");
    world.succeed("ip netns del sctp; ip link del other; pkill -f sctp.py");
}

/// Both machines run the script of the Vagrantfile.
fn vagrant(lab: &mut Lab) {
    node(lab);
    lab.gateway().succeed(
        "systemctl stop sluiced; mkdir -p /root/before && cp -a /etc/sluice/. /root/before/ && rm -f /etc/sluice/manifests/*",
    );
    let first = vagrant_index();
    lab.world().succeed("cd /opt/sluice && .ci/machine world eth0 eth1");
    let ports = [first, first + 1].map(|index| lab.gateway().interface(index));
    lab.gateway().succeed(&format!("cd /opt/sluice && .ci/machine gateway {}", ports.join(" ")));
    lab.wait_until_ready();
    let answer = lab
        .world()
        .until("a server of the Vagrantfile answers", "ip netns exec sluice-client curl -sf --max-time 5 http://192.0.2.100/");
    assert!(["b11", "b12", "b13"].contains(&answer.trim()), "{answer}");
    lab.gateway()
        .succeed("systemctl stop sluiced; rm -rf /etc/sluice && cp -a /root/before /etc/sluice && systemctl start sluiced");
    lab.wait_until_ready();
}

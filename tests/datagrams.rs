//! UDP datagrams that arrive in fragments over af_packet, in every mode and both families, at one queue and at two: the
//! kernel must not reassemble them for the ports, whose rings have no room for whole datagrams.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::fmt::Write as _;

use edge::{Edge, skip, until};

/// Bytes of the datagrams: one packet, and 3, 7 and 28 fragments of an Ethernet link.
const SIZES: [&str; 4] = ["1000", "3000", "9000", "40000"];

/// The VIPs of the mode with this number.
fn vips(n: usize) -> [String; 2] {
    [format!("192.0.2.{}", 110 + n), format!("2001:db8::1:{}", 10 + n)]
}

/// A Service of each mode, by UDP port 9000, with all servers of the demo.
fn manifests(modes: &[&str]) -> String {
    let mut text = String::new();
    for (n, mode) in modes.iter().enumerate() {
        let addresses = vips(n).join(",");
        write!(
            text,
            "---
apiVersion: v1
kind: Service
metadata:
  namespace: demo
  name: {mode}
  annotations: {{sluice.dev/mode: {mode}, sluice.dev/target: endpoint, sluice.dev/addresses: '{addresses}'}}
spec:
  type: LoadBalancer
  loadBalancerClass: sluice.dev/gateway
  ipFamilyPolicy: RequireDualStack
  ipFamilies: [IPv4, IPv6]
  ports: [{{name: udp, port: 9000, protocol: UDP, targetPort: 9000}}]
"
        )
        .unwrap();
        for (family, prefix) in [(4, "10.0.0."), (6, "fd00::")] {
            let endpoints: Vec<_> = [11, 12, 13].iter().map(|n| format!("{{addresses: ['{prefix}{n}']}}")).collect();
            write!(
                text,
                "---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{namespace: demo, name: {mode}-{family}, labels: {{kubernetes.io/service-name: {mode}}}}}
addressType: IPv{family}
ports: [{{name: udp, protocol: UDP, port: 9000}}]
endpoints: [{}]
",
                endpoints.join(", ")
            )
            .unwrap();
        }
    }
    text
}

/// Datagrams of every size return from a VIP of each mode, with a worker on each of the cores. Linux, too, receives
/// fragments by the twin.
fn assert_datagrams_return(edge: &mut Edge, modes: &[&str], cores: &[usize]) {
    let script = format!("{}/tests/edge/datagrams.py", env!("CARGO_MANIFEST_DIR"));
    edge.configure_on(cores, edge::AF_PACKET[0], edge::AF_PACKET[1], "");
    edge.start();
    for (n, mode) in modes.iter().enumerate() {
        for vip in vips(n) {
            let command = [&["/usr/bin/python3", &script, "ask", &vip, "9000"][..], &SIZES].concat();
            let output = edge.run("client", &command);
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let expected: Vec<_> = SIZES.iter().map(|size| format!("{size} returned")).collect();
            assert_eq!(text.lines().collect::<Vec<_>>(), expected, "{mode}, {vip}, cores {cores:?}: {:?}", edge.drops());
        }
    }
    until("Linux answers a ping in fragments", || {
        edge.run("client", &["ping", "-c", "1", "-W", "1", "-s", "4000", "192.0.2.2"]).status.success().then_some(())
    });
    let cut_off: Vec<_> = edge.drops().into_iter().filter(|(reason, _)| reason == "truncated" || reason == "malformed").collect();
    assert_eq!(cut_off, [], "every fragment arrives as it was sent");
    edge.assert_account();
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}

/// Runs with one worker, then with two, where there are as many cores.
fn with_one_and_two_workers(test: &str, edge: &mut Edge, modes: &[&str]) {
    edge.write_manifest("datagrams.yaml", &manifests(modes));
    assert_datagrams_return(edge, modes, &[0]);
    if std::thread::available_parallelism().unwrap().get() < 2 {
        return skip(&format!("{test}, two workers"), "needs two cores");
    }
    assert_datagrams_return(edge, modes, &[0, 1]);
}

#[test]
fn datagrams_in_fragments_pass_modes_that_rewrite() {
    let test = "fragments through nat and dnat";
    let Some(mut edge) = Edge::new(test, "fra") else { return };
    edge.script(
        "for n in 11 12 13; do in_ns b$n ip route add default via 10.0.0.2; in_ns b$n ip -6 route add default via fd00::2; done",
    );
    let _servers = ["b11", "b12", "b13"].map(|n| edge.start_script(n, "datagrams.py", &["serve", "9000", "0.0.0.0", "::"]));
    with_one_and_two_workers(test, &mut edge, &["nat", "dnat"]);
}

#[test]
fn datagrams_in_fragments_pass_one_way_modes() {
    let test = "fragments through dsr, ipip and gue";
    let Some(mut edge) = Edge::new(test, "frd") else { return };
    let modes = ["dsr", "ipip", "gue"];
    let vips: Vec<String> = (0..modes.len()).flat_map(vips).collect();
    edge.script(&format!(
        ". tests/edge/direct.sh; make_direct {}; for n in 11 12 13; do make_tunnel_device $n; done",
        vips.join(" ")
    ));
    let _ends = ["b11", "b12", "b13"].map(|node| edge.start_script(node, "tunnel_end.py", &["tunnel0"]));
    let arguments: Vec<&str> = ["serve", "9000"].into_iter().chain(vips.iter().map(String::as_str)).collect();
    let _servers = ["b11", "b12", "b13"].map(|node| edge.start_script(node, "datagrams.py", &arguments));
    with_one_and_two_workers(test, &mut edge, &modes);
}

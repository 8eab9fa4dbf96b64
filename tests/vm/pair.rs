//! Steps with two gateways on one link: the machine over its cards, and one of the host over af_packet. Keepalived elects
//! the owner of each VIP.

use std::fs::{self, File};
use std::process::{Child, Command, Stdio};

use crate::Step;
use crate::edge::built_program;
use crate::lab::{Kind, Lab, VIP, until};

pub fn steps() -> Vec<Step> {
    vec![("VIPs move between two gateways: cable, crash, power cut", true, moves)]
}

/// The gateway of the host. Dropping it kills it.
struct Second(Child);

impl Drop for Second {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn second(lab: &Lab) -> Second {
    lab.edge.script(
        "ip netns list | grep -q \"^$id-gw2\" || {
           make_namespaces gw2
           cable gw2 uplink0 gw second0; in_ns gw ip link set second0 master uplinks
           cable gw2 cluster0 gw second1; in_ns gw ip link set second1 master nodes
         }",
    );
    let dir = lab.edge.path("second");
    fs::create_dir_all(dir.join("manifests")).unwrap();
    fs::write(dir.join("manifests/echo.yaml"), include_str!("echo.yaml")).unwrap();
    let path = dir.display();
    let text = format!(
        r#"name: second
ports:
  - {{name: uplink, device: "net_af_packet0,iface=uplink0", addresses: [192.0.2.3/24, "2001:db8::3/64"]}}
  - {{name: cluster, device: "net_af_packet1,iface=cluster0", addresses: [10.0.0.4/24, "fd00::4/64"]}}
workers: {{cores: [0], poll: adaptive}}
memory: {{hugepages: off}}
flows: {{maxPerWorker: 16384}}
snat: {{addresses: [10.0.0.5, "fd00::5"]}}
pools: [{{name: default, addresses: [192.0.2.100-192.0.2.119, "2001:db8::1:0/112"]}}]
announce: {{election: keepalived, groups: 2}}
manifests: {path}/manifests
statusDir: {path}/status
stateDir: {path}/state
listen: unix:{path}/config.sock
admin: {{listen: "unix:{path}/admin.sock"}}
"#
    );
    fs::write(dir.join("sluice.yaml"), text).unwrap();
    let log = File::options().create(true).append(true).open(dir.join("log")).unwrap();
    let child = Command::new("ip")
        .args(["netns", "exec", &lab.edge.namespace("gw2")])
        .arg(built_program("sluiced", "sluice"))
        .args(["run", "--config"])
        .arg(dir.join("sluice.yaml"))
        .env("XDG_RUNTIME_DIR", &dir)
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    Second(child)
}

/// Whether the gateway of the host is ready.
fn is_ready(lab: &Lab) -> Option<()> {
    let output = lab.edge.run("gw2", &["curl", "-sf", "--max-time", "5", "http://127.0.0.1:9435/metrics"]);
    String::from_utf8_lossy(&output.stdout).contains("\nsluice_ready 1").then_some(())
}

fn assert_answers(lab: &Lab, when: &str) {
    let url = format!("http://{VIP}/");
    until(&format!("the VIP answers {when}"), || lab.edge.curl(&url));
}

fn moves(lab: &mut Lab) {
    lab.use_card(Kind::first(), "announce: {election: keepalived, groups: 2}");
    assert_answers(lab, "with one gateway");
    let gateway = second(lab);
    until("the second gateway serves", || is_ready(lab));
    let index = Kind::first().index();
    lab.gateway().set_link(index, false);
    assert_answers(lab, "after the cable of the first was pulled");
    lab.gateway().set_link(index, true);
    // The owner fails without a word.
    drop(gateway);
    assert_answers(lab, "after the second was killed");
    let gateway = second(lab);
    until("the second gateway serves again", || is_ready(lab));
    lab.gateway = None;
    assert_answers(lab, "after a power cut of the first");
    lab.wait_until_ready();
    drop(gateway);
    assert_answers(lab, "after the first came back and the second was killed");
    lab.edge.script("ip netns del \"$id-gw2\"");
    lab.use_card(Kind::first(), "");
    lab.assert_serves();
}

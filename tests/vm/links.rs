//! Steps over links: three workers, jumbo frames, the Ethernet address of a port, tags, a bridge with multicast snooping.

use crate::Step;
use crate::lab::{Connections, Kind, Lab, Settings, VIP, VIP6, until};
use crate::world::{BOTH, node, service};

pub fn steps() -> Vec<Step> {
    vec![
        ("a VLAN device above a twin serves an l2 pool", false, |lab| tagged(lab, &VLAN)),
        ("a device with two tags, 802.1ad outside, serves an l2 pool", true, |lab| tagged(lab, &QINQ)),
        ("VIPs are reached through a bridge that snoops MLD", true, snooping),
        ("a port has the Ethernet address of its configuration", true, address_of_port),
        ("jumbo frames pass a card", true, |lab| assert_jumbo_frames(lab, Kind::first()).unwrap()),
        ("three workers share a card", true, |lab| three_workers(lab, Kind::first())),
        ("three workers share a card that takes two queues", true, |lab| three_workers(lab, Kind::Vmxnet3)),
    ]
}

/// The devices of a tagged link on a parent, the innermost of which is `tagged`, and the network behind them.
struct Tags {
    make: &'static str,
    /// The first three numbers of its addresses.
    network: &'static str,
}

const VLAN: Tags = Tags { make: "ip link add link PARENT name tagged type vlan id 77", network: "10.77.0" };

/// A frame with two tags and a whole packet is longer than bridges of Linux forward.
const QINQ: Tags = Tags {
    make: "ip link add link PARENT name outer type vlan proto 802.1ad id 200; ip link set outer up; \
           ip link add link outer name tagged mtu 1490 type vlan id 78",
    network: "10.78.0",
};

impl Tags {
    /// Shell code that makes the devices, with an address of the network.
    fn on(&self, parent: &str, host: u8) -> String {
        let make = self.make.replace("PARENT", parent);
        format!("set -e; {make}; ip link set tagged up; ip addr add {}.{host}/24 dev tagged", self.network)
    }
}

/// Deletes the devices of a tagged link.
const REMOVE: &str = "ip link del tagged; ip link del outer 2>/dev/null; true";

/// A pool in the prefix of a tagged device serves clients behind it. The device is deleted and made again.
fn tagged(lab: &mut Lab, tags: &Tags) {
    node(lab);
    let ports = Kind::first().ports();
    let vip = format!("{}.100", tags.network);
    let pools = format!(
        "{{name: default, addresses: [192.0.2.100-192.0.2.119, \"2001:db8::1:0/112\"]}}, \
         {{name: tagged, addresses: [{vip}-{}.109]}}",
        tags.network
    );
    lab.apply(&Settings { pools: &pools, ..Settings::of(&ports) });
    let text = service("sluice.dev/mode: nat", &BOTH[..1], 8080).replace("192.0.2.111", &vip);
    lab.gateway().write("/etc/sluice/manifests/node.yaml", &text);
    lab.world().succeed(&format!("modprobe 8021q; {}", tags.on("eth2", 9)));
    let expected = lab.world().succeed("sha256sum </var/www/lab/file");
    for when in ["made", "made again"] {
        lab.gateway().succeed(&tags.on("uplink", 2));
        let code = format!("set -o pipefail; curl -sf --max-time 60 http://{vip}:8080/file | sha256sum");
        let sum = lab.world().until(&format!("{vip} answers once its device was {when}"), &code);
        assert_eq!(sum, expected, "a download of {vip}, device {when}");
        lab.gateway().succeed(REMOVE);
    }
    lab.world().succeed(REMOVE);
}

/// A bridge that snoops forwards neighbour solicitations only to members of the group of the address.
fn snooping(lab: &mut Lab) {
    let bridge = |options: &str| {
        let code = format!("set -e; in_ns gw ip link set uplinks type bridge {options}");
        lab.edge.script(&code)
    };
    bridge("mcast_querier 1 mcast_query_interval 100 mcast_query_response_interval 100 mcast_startup_query_interval 100");
    bridge("mcast_snooping 1");
    lab.use_card(Kind::first(), "");
    let group = format!("port {} grp ff02::1:ff01:10 ", Kind::first().tap("uplinks"));
    // Seconds until the bridge forgets the member, which each report sets anew.
    let forgotten_in = |lab: &Lab| {
        let output = lab.edge.run("gw", &["bridge", "-s", "mdb", "show", "dev", "uplinks"]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().find(|line| line.contains(&group))?.split_whitespace().last()?.parse::<f64>().ok()
    };
    // Reports that nobody asked for are at most two.
    let (mut before, mut reports) = (f64::MAX, 0);
    until("the gateway answers queries for the group of the VIP", || {
        let seconds = forgotten_in(lab)?;
        reports += u32::from(seconds > before);
        before = seconds;
        (reports >= 4).then_some(())
    });
    for _ in 0..3 {
        lab.edge.script("set -e; in_ns client ip -6 neigh flush all; in_ns client ip neigh flush all");
        for url in [format!("http://[{VIP6}]/"), format!("http://{VIP}/")] {
            until(&format!("{url} answers through the bridge"), || lab.edge.curl(&url));
        }
    }
    lab.edge.script("set -e; in_ns gw ip link set uplinks type bridge mcast_snooping 0 mcast_querier 0");
}

/// Clients learn the configured address by ARP and neighbour discovery, and reach the card by it.
fn address_of_port(lab: &mut Lab) {
    const MAC: &str = "02:00:5e:00:53:01";
    let key = format!(", mac: \"{MAC}\"");
    lab.apply(&Settings { keys: [&key, ""], ..Settings::of(&Kind::first().ports()) });
    lab.edge.script("set -e; in_ns client ip neigh flush all; in_ns client ip -6 neigh flush all");
    lab.assert_serves();
    for vip in [VIP, VIP6] {
        let output = lab.edge.run("client", &["ip", "neigh", "show", vip]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains(MAC), "the neighbour of {vip}: {text}");
    }
    assert_eq!(lab.gateway().succeed("cat /sys/class/net/uplink/address").trim(), MAC, "the twin has it as well");
    // Back at its own address, the card announces it.
    lab.use_card(Kind::first(), "");
    lab.assert_serves();
}

/// Sets the MTU of everything on the host that frames pass.
fn set_host_mtu(lab: &Lab, mtu: u16) {
    lab.edge.script(&format!(
        "set -e; for ns in gw sw client b11 b12 b13; do
           in_ns $ns bash -ec 'for path in /sys/class/net/*; do
             [ ${{path##*/}} = lo ] || ip link set ${{path##*/}} mtu {mtu}; done'
         done"
    ));
}

/// Checks that connections over a kind of card have segments of an MTU of 9000, and that a download of these arrives whole.
/// Returns why not.
pub fn assert_jumbo_frames(lab: &mut Lab, kind: Kind) -> Result<(), String> {
    lab.write_settings(&Settings { cores: "[1]", keys: [", mtu: 9000"; 2], ..Settings::of(&kind.ports()) });
    lab.gateway().succeed("sluiced prepare");
    if lab.gateway().run("systemctl restart sluiced").code != 0 {
        let log = lab.log();
        return Err(log.lines().find(|line| line.contains("MTU")).unwrap_or("the gateway does not start").to_owned());
    }
    lab.wait_until_ready();
    set_host_mtu(lab, 9000);
    lab.edge.script(
        "set -e; in_ns client ip neigh flush all; head -c 2M /dev/urandom >$work/jumbo
         for n in 11 12 13; do cp $work/jumbo $work/b$n/jumbo; done",
    );
    let result = jumbo_downloads(lab);
    set_host_mtu(lab, 1500);
    result
}

fn jumbo_downloads(lab: &mut Lab) -> Result<(), String> {
    lab.assert_serves();
    let file = lab.edge.path("jumbo").display().to_string();
    for (vip, largest) in [(VIP, 8960), (VIP6, 8940)] {
        // The size of segments that both ends agreed on, less 12 bytes of timestamps.
        let code = format!("import socket; print(socket.create_connection((\"{vip}\", 80), 20).getsockopt(6, 2))");
        let output = lab.edge.run("client", &["python3", "-c", &code]);
        let segment = String::from_utf8_lossy(&output.stdout).trim().parse::<u32>().unwrap_or_default();
        if ![largest, largest - 12].contains(&segment) {
            return Err(format!("a connection to {vip} has segments of {segment} bytes instead of {largest}"));
        }
        let host = if vip.contains(':') { format!("[{vip}]") } else { vip.to_owned() };
        let code = format!("curl -sgf --max-time 60 http://{host}/jumbo | cmp - {file}");
        let output = lab.edge.run("client", &["bash", "-c", &code]);
        if !output.status.success() {
            return Err(format!("a download over {vip}: {}", String::from_utf8_lossy(&output.stderr)));
        }
    }
    Ok(())
}

/// Flows of both families spread over three workers, and live on.
fn three_workers(lab: &mut Lab, kind: Kind) {
    lab.apply(&Settings { cores: "[0, 1, 2]", ..Settings::of(&kind.ports()) });
    let mut connections = Connections::open(lab, 24);
    connections.assert_alive();
    let flows = lab.table("flows");
    for worker in 0..3 {
        let own = |flow: &&serde_json::Value| flow["worker"] == worker;
        assert!(flows.as_array().unwrap().iter().filter(own).count() > 0, "worker {worker} has flows: {flows}");
    }
    lab.assert_serves();
    connections.assert_alive();
    let drops = lab.table("drops");
    let lost = drops.as_array().unwrap().iter().filter(|row| row["reason"] == "no_flow" || row["reason"] == "handover_full");
    assert!(lost.clone().all(|row| row["packets"] == 0), "{drops}");
}

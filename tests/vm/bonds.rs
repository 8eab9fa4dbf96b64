//! Steps with a bond of two cards against the bond of Linux on the machine of nodes. Members lose their cables while
//! connections are open.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use serde_json::Value;

use crate::Step;
use crate::lab::{Kind, Lab, Settings, VIP, until};
use crate::machine::pci_address;

pub fn steps() -> Vec<Step> {
    vec![
        ("active backup with Linux's bond, members fail under connections", true, |lab| bond(lab, &ACTIVE_BACKUP)),
        ("802.3ad with Linux's bond, members fail under connections", true, |lab| bond(lab, &LACP)),
    ]
}

struct Mode {
    /// Number of the mode in DPDK's device.
    number: u8,
    /// Options of Linux's bond.
    linux: &'static str,
    /// Bridges of the host that join the members: one switch, or a cable for each.
    bridges: [&'static str; 2],
    /// A line of `/proc/net/bonding/bond0`, and how often it stands there once both members are in use.
    complete: (&'static str, u32),
}

const ACTIVE_BACKUP: Mode =
    Mode { number: 1, linux: "mode active-backup miimon 100", bridges: ["uplinks"; 2], complete: ("MII Status: up", 3) };

const LACP: Mode = Mode {
    number: 4,
    linux: "mode 802.3ad lacp_rate fast miimon 100",
    bridges: ["members0", "members1"],
    complete: ("Number of ports: 2", 1),
};

/// The indexes of the members on the gateway, which are two cards of one kind, and on the machine of nodes.
fn members() -> [(usize, usize); 2] {
    let first = Kind::first().index();
    [(first, 4), (first + 1, 5)]
}

/// Joins the taps of the members, on both machines, to bridges. Linux's bridges keep LACP to themselves, unless a port
/// says otherwise.
fn join(lab: &Lab, bridges: [[&str; 2]; 2]) {
    let [first, second] = [Kind::first().tap("uplinks"), Kind::first().tap("nodes")];
    for (taps, bridges) in [[first.as_str(), &second], ["wmembers0", "wmembers1"]].into_iter().zip(bridges) {
        for (tap, bridge) in taps.into_iter().zip(bridges) {
            lab.edge.script(&format!(
                "set -e; in_ns gw ip link set {tap} master {bridge}
                 in_ns gw ip link set {tap} type bridge_slave group_fwd_mask 4"
            ));
        }
    }
}

/// The cards and the gateway are as before, whatever happened: other steps use them.
fn bond(lab: &mut Lab, mode: &Mode) {
    lab.world();
    lab.gateway();
    let result = catch_unwind(AssertUnwindSafe(|| fail_members(lab, mode)));
    for (own, partner) in members() {
        lab.gateway().set_link(own, true);
        lab.world().set_link(partner, true);
    }
    lab.world().succeed("ip netns pids peer | xargs -r kill -9; ip netns del peer");
    lab.gateway().succeed("systemctl stop sluiced");
    join(lab, [["uplinks", "nodes"], ["members0", "members1"]]);
    result.unwrap_or_else(|panic| resume_unwind(panic));
    lab.use_card(Kind::first(), "");
    lab.assert_serves();
}

fn fail_members(lab: &mut Lab, mode: &Mode) {
    join(lab, [mode.bridges; 2]);
    let world = lab.world();
    world.write("/run/lines.py", include_str!("lines.py"));
    world.succeed(&format!(
        "set -e; modprobe bonding max_bonds=0; ip netns add peer; ip -n peer link set lo up
         ip -n peer link add bond0 type bond {}
         for card in eth4 eth5; do ip link set $card down; ip link set $card netns peer; ip -n peer link set $card master bond0; done
         ip -n peer link set bond0 up; ip -n peer addr add 192.0.2.31/24 dev bond0",
        mode.linux
    ));
    let [first, second] = members().map(|(own, _)| pci_address(own));
    let other = Kind::ALL.into_iter().filter(|kind| kind.is_known()).nth(1).unwrap();
    let device = format!("net_bonding0,mode={},slave={first},slave={second}", mode.number);
    let ports = [device, other.ports()[1].clone()];
    lab.apply(&Settings { cores: "[1]", ..Settings::of(&ports) });
    let (line, count) = mode.complete;
    let complete = format!("[ $(grep -c '{line}' /proc/net/bonding/bond0) = {count} ]");
    let within = |code: &str| format!("ip netns exec peer bash -c \"{}\"", code.replace('$', "\\$"));
    lab.world().until("both members are in use", &within(&complete));
    lab.world().succeed(&format!(
        "rm -rf /run/lines; mkdir /run/lines
         ip netns exec peer python3 /run/lines.py {VIP} 7000 10 /run/lines >/run/lines/log 2>&1 &"
    ));
    let answers = |lab: &mut Lab| -> Option<Value> { serde_json::from_str(&lab.world().run("cat /run/lines/state").text).ok() };
    let goes_on = |lab: &mut Lab, when: &str| {
        let before = until("the connections are open", || answers(lab).filter(|state| state["answers"].as_u64() > Some(0)));
        let enough = before["answers"].as_u64().unwrap() + 200;
        until(&format!("the connections go on {when}"), || {
            answers(lab).filter(|state| state["broken"] != 0 || state["answers"].as_u64() > Some(enough))
        })
    };
    goes_on(lab, "with both members");
    for (own, partner) in members() {
        for is_up in [false, true] {
            lab.gateway().set_link(own, is_up);
            lab.world().set_link(partner, is_up);
            goes_on(lab, &format!("after the cable of card {own} was {}", if is_up { "put in" } else { "pulled" }));
        }
        lab.world().until("both members are in use again", &within(&complete));
    }
    let end = goes_on(lab, "at the end");
    println!("bond of mode {}: {end}", mode.number);
    assert_eq!(end["broken"], 0, "connections broke: {end}");
    lab.world().succeed("touch /run/lines/stop");
}

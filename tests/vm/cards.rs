//! Steps over cards: traffic through each kind, what `sluicectl ports` says of it, and what goes wrong with cards.

use crate::Step;
use crate::lab::{Connections, Kind, Lab, until};

pub fn steps() -> Vec<Step> {
    vec![
        ("igb forwards over two workers", false, |lab| forwards(lab, Kind::Igb)),
        ("e1000e forwards over two workers", false, |lab| forwards(lab, Kind::E1000e)),
        ("virtio forwards over two workers", false, |lab| forwards(lab, Kind::Virtio)),
        ("vmxnet3 forwards over two workers", false, |lab| forwards(lab, Kind::Vmxnet3)),
        ("a cable that is pulled and put in again", false, cable),
        ("a card that is unplugged and plugged in again", false, unplug),
        ("a card that is unbound by hand", false, unbind),
    ]
}

/// Both families, TCP and UDP, over two workers; the connections live on while RSS is proven or refused.
fn forwards(lab: &mut Lab, kind: Kind) {
    if !kind.is_known() {
        return crate::edge::skip(&format!("lab: {}", kind.name()), "this QEMU has no such card");
    }
    lab.use_card(kind, "");
    let mut connections = Connections::open(lab, 24);
    connections.assert_alive();
    lab.assert_serves();
    connections.assert_alive();
    let ports = lab.table("ports");
    for port in ports.as_array().unwrap() {
        assert_eq!(port["link"], "up", "{port:#}");
    }
    println!("{ports:#}");
    println!("{}", lab.gateway().run("sluicectl ports; sluicectl drops").text);
}

fn cable(lab: &mut Lab) {
    lab.use_card(Kind::first(), "");
    let mut connections = Connections::open(lab, 6);
    let index = Kind::first().index();
    for is_up in [false, true] {
        lab.gateway().set_link(index, is_up);
        let link = if is_up { "up" } else { "down" };
        until("the link follows", || (lab.table("ports")[0]["link"] == link).then_some(()));
        lab.gateway().succeed(&format!("[ $(cat /sys/class/net/uplink/carrier) = {} ]", u8::from(is_up)));
    }
    connections.assert_alive();
}

fn unplug(lab: &mut Lab) {
    lab.use_card(Kind::first(), "");
    let mut connections = Connections::open(lab, 6);
    let index = Kind::first().index();
    lab.gateway().unplug(index);
    until("the kernel gets its card back", || lab.gateway().is_unplugged(index).then_some(()));
    until("the port is absent", || (lab.table("ports")[0]["link"] == "absent").then_some(()));
    // The host does not hang: a bus that is scanned again takes the same lock.
    lab.gateway().succeed("timeout 20 bash -c 'echo 1 >/sys/bus/pci/rescan' && timeout 20 journalctl --sync");
    lab.gateway().plug(index).unwrap();
    lab.gateway().until("the card is there again", &format!("[ -e /sys/bus/pci/devices/{} ]", Kind::first().ports()[0]));
    lab.gateway().succeed("systemctl restart sluiced-prepare");
    until("the port is attached again", || (lab.table("ports")[0]["link"] == "up").then_some(()));
    connections.assert_alive();
}

fn unbind(lab: &mut Lab) {
    lab.use_card(Kind::first(), "");
    let mut connections = Connections::open(lab, 6);
    let [uplink, _] = Kind::first().ports();
    lab.gateway().succeed(&format!("timeout 60 bash -c 'echo {uplink} >/sys/bus/pci/drivers/vfio-pci/unbind'"));
    until("the port is not up", || (lab.table("ports")[0]["link"] != "up").then_some(()));
    lab.gateway().succeed("systemctl restart sluiced-prepare");
    until("the port is attached again", || (lab.table("ports")[0]["link"] == "up").then_some(()));
    connections.assert_alive();
}

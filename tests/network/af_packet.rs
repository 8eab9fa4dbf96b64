//! Preparation of interfaces for af_packet, and their restoration.

use sluice::ports::af_packet;

use crate::{Namespace, run};

/// A veth pair: `inside` in the namespace of a gateway, its other end in the namespace of a client.
fn veth(test: &str, name: &str) -> Option<(Namespace, Namespace)> {
    let gateway = Namespace::new(test, &format!("{name}-a"))?;
    let client = Namespace::new(test, &format!("{name}-b"))?;
    gateway.ip(&format!("link add inside type veth peer name outside netns {}", client.name));
    gateway.ip("addr add 192.0.2.2/24 dev inside");
    client.ip("addr add 192.0.2.9/24 dev outside");
    gateway.ip("link set inside up");
    client.ip("link set outside up");
    Some((gateway, client))
}

fn state(namespace: &Namespace) -> [String; 4] {
    [
        namespace.run("tc qdisc show dev inside"),
        namespace.run("tc filter show dev inside ingress"),
        namespace.run("cat /proc/sys/net/ipv6/conf/inside/disable_ipv6"),
        namespace.ip("-d link show inside").split("promiscuity ").nth(1).map(|t| t[..1].to_owned()).unwrap_or_default(),
    ]
}

#[test]
fn an_af_packet_interface_is_hidden_from_linux_and_restored() {
    let Some((gateway, client)) = veth("an af_packet interface is hidden from Linux and restored", "afp") else { return };
    let ping = || client.try_run("ping -c 1 -W 5 192.0.2.2").0;
    assert!(ping());
    let before = state(&gateway);
    let prepared = gateway.enter(async || {
        let prepared = af_packet::prepare(&"net_af_packet0,iface=inside".parse().unwrap()).await.unwrap().unwrap();
        assert!(!ping(), "Linux still answers");
        let during = state(&gateway);
        assert!(during[1].contains("pref 49021") && during[2].trim() == "1" && during[3] == "1", "{during:?}");
        prepared.restore().await
    });
    prepared.unwrap();
    assert_eq!(state(&gateway), before);
    assert!(ping(), "Linux does not answer again");
}

#[test]
fn the_changes_of_a_killed_gateway_are_taken_over_and_undone() {
    let Some((gateway, _client)) = veth("the changes of a killed gateway are undone", "afpk") else { return };
    gateway.run("tc qdisc add dev inside clsact");
    let pass = "netns exec NAME tc filter add dev inside ingress pref 10 bpf da bytecode";
    let mut pass: Vec<&str> = pass.split(' ').map(|word| if word == "NAME" { &gateway.name } else { word }).collect();
    pass.push("1,6 0 0 0");
    run("ip", &pass);
    gateway.ip("link set inside promisc on");
    let before = state(&gateway);
    gateway.enter(async || {
        for _ in 0..2 {
            drop(af_packet::prepare(&"net_af_packet0,iface=inside".parse().unwrap()).await.unwrap().unwrap());
        }
        let last = af_packet::prepare(&"net_af_packet0,iface=inside".parse().unwrap()).await.unwrap().unwrap();
        last.restore().await.unwrap();
    });
    assert_eq!(state(&gateway), before);
}

#[test]
fn what_another_program_undid_is_put_back_and_the_former_state_is_still_known() {
    let Some((gateway, client)) = veth("what another program undid is put back", "afpb") else { return };
    let before = state(&gateway);
    let ping = || client.try_run("ping -c 1 -W 1 192.0.2.2").0;
    gateway.enter(async || {
        let mut prepared = af_packet::prepare(&"net_af_packet0,iface=inside".parse().unwrap()).await.unwrap().unwrap();
        assert!(prepared.put_back(true).await.unwrap().is_empty());
        let during = state(&gateway);
        for undo in ["tc filter del dev inside ingress pref 49021", "tc qdisc del dev inside clsact"] {
            gateway.run(undo);
            assert!(ping(), "Linux answers");
            assert_eq!(prepared.put_back(true).await.unwrap(), ["ingress filter"], "{undo}");
            assert!(!ping() && state(&gateway) == during, "{undo}");
        }
        gateway.run("sysctl -q net.ipv6.conf.inside.disable_ipv6=0");
        gateway.ip("link set inside promisc off");
        assert_eq!(prepared.put_back(true).await.unwrap(), ["disabled IPv6", "promiscuous mode"]);
        assert_eq!(state(&gateway), during);
        // An interface that is gone is no error here: its device is detached.
        gateway.ip("link set inside down");
        gateway.ip("link set inside name elsewhere");
        assert!(prepared.put_back(true).await.unwrap().is_empty());
        gateway.ip("link set elsewhere name inside");
        gateway.ip("link set inside up");
        prepared.restore().await.unwrap();
    });
    assert_eq!(state(&gateway), before);
}

#[test]
fn a_missing_interface_is_reported_by_name() {
    let Some(namespace) = Namespace::new("a missing interface is reported by name", "missing") else { return };
    let refused =
        namespace.enter(async || af_packet::prepare(&"net_af_packet0,iface=nowhere".parse().unwrap()).await.map(|_| ()));
    assert!(refused.unwrap_err().to_string().contains("no interface nowhere"));
    let other = namespace.enter(async || af_packet::prepare(&"0000:3b:00.0".parse().unwrap()).await.map(|p| p.is_none()));
    assert!(other.unwrap());
}

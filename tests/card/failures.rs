//! Links, resets and removals of a card, under connections that live on.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::edge::{Edge, until};
use crate::{cards, gateway, traffic};

/// Has a card fail.
fn command(edge: &Edge, card: &str, command: &str) {
    let sent = edge.in_namespace("gw", || {
        let card = SocketAddr::from_abstract_name(card)?;
        UnixDatagram::unbound()?.send_to_addr(command.as_bytes(), &card)
    });
    assert_eq!(sent.unwrap(), command.len());
}

fn until_link(edge: &Edge, port: usize, link: &str) {
    until(&format!("port {port} is {link}"), || edge.ports().filter(|ports| ports[port].link == link));
}

/// How often the log says something.
fn times(edge: &Edge, text: &str) -> usize {
    edge.log().matches(text).count()
}

#[test]
fn a_link_that_goes_and_comes_back_costs_no_connection() {
    let Some(mut edge) = gateway("the link of a card", "clink", &cards("profile=ice")) else { return };
    traffic::start(&mut edge);
    let mut connections = traffic::connections(&edge, 6);
    let carrier =
        |edge: &Edge| String::from_utf8_lossy(&edge.run("gw", &["cat", "/sys/class/net/uplink/carrier"]).stdout) == "1\n";
    for _ in 0..2 {
        edge.script("in_ns client ip link set eth0 down");
        until_link(&edge, 0, "down");
        until("the twin has no carrier", || (!carrier(&edge)).then_some(()));
        edge.script("in_ns client ip link set eth0 up; in_ns client ip -6 addr replace 2001:db8::10/64 dev eth0 nodad");
        until_link(&edge, 0, "up");
        until("the twin has its carrier", || carrier(&edge).then_some(()));
        traffic::assert_alive(&mut connections, "after the link came back");
    }
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}

#[test]
fn a_card_that_was_reset_is_opened_anew_and_connections_live_on() {
    let Some(mut edge) = gateway("a card that is reset", "crst", &cards("profile=i40e")) else { return };
    traffic::start(&mut edge);
    let mut connections = traffic::connections(&edge, 12);
    for (round, card) in ["net_card0", "net_card1", "net_card0"].into_iter().enumerate() {
        command(&edge, card, "reset");
        let attached = "the port's device appeared and was attached";
        until("the port is opened anew", || (times(&edge, attached) == round + 1).then_some(()));
        assert_eq!(times(&edge, "the port's device was reset"), round + 1);
        traffic::assert_alive(&mut connections, "after a reset");
        let ports = edge.ports().unwrap();
        assert!(ports.iter().all(|port| port.link == "up" && port.rss_table == 512), "{ports:?}");
    }
    traffic::assert_alive(&mut traffic::connections(&edge, 6), "new ones");
    edge.assert_account();
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}

#[test]
fn a_card_that_is_pulled_out_and_put_in_again_is_used_again() {
    let Some(mut edge) = gateway("a card that is pulled out", "cpull", &cards("profile=mlx5")) else { return };
    traffic::start(&mut edge);
    let mut connections = traffic::connections(&edge, 12);
    edge.script("set -e; in_ns gw ip link set cluster0 down; in_ns gw ip link set cluster0 name drawer0");
    command(&edge, "net_card1", "remove");
    until_link(&edge, 1, "failed");
    assert_eq!(times(&edge, "the driver reports that the port's device is being removed"), 1);
    let reason = edge.ports().unwrap()[1].reason.clone();
    assert!(reason.contains("No such device"), "{reason}");
    assert_eq!(edge.ports().unwrap()[0].link, "up", "the other card stays");
    edge.script("set -e; in_ns gw ip link set drawer0 name cluster0; in_ns gw ip link set cluster0 up");
    until_link(&edge, 1, "up");
    traffic::assert_alive(&mut connections, "after the card was put in again");
    edge.assert_all_servers_answer("http://192.0.2.100/");
    edge.assert_account();
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}

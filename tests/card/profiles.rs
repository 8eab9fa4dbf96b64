//! The start over each driver's rules of receive side scaling.

use proto::v1::PortStatus;

use crate::edge::until;
use crate::{cards, gateway, traffic};

/// What the gateway finds of a driver.
struct Row {
    profile: &'static str,
    /// Entries of the redirection table that it takes.
    table: u32,
    /// Whether it offers to release transmitted packets fast.
    fast_free: bool,
    /// What becomes of it under traffic, in `sluicectl ports`.
    steering: &'static str,
}

const PROVEN: &str = "rss: every queue proven by live packets";

const fn row(profile: &'static str, table: u32, fast_free: bool, steering: &'static str) -> Row {
    Row { profile, table, fast_free, steering }
}

const ROWS: [Row; 10] = [
    row("mlx5", 128, true, PROVEN),
    row("ice", 512, true, PROVEN),
    row("i40e", 512, true, PROVEN),
    row("nfp", 128, false, PROVEN),
    row("bnxt", 128, true, PROVEN),
    row("bnxt-p5", 64, true, PROVEN),
    row("cnxk", 64, true, PROVEN),
    row("ena", 128, true, PROVEN),
    row("virtio", 128, false, "Toeplitz computed here: the device reports no RSS hash with some packets"),
    row("virtio-no-rss", 0, false, "own hash: net_card offers no Toeplitz hash over TCP and UDP"),
];

#[test]
fn every_driver_spreads_packets_by_rss_or_says_why_not() {
    let test = "the start over each driver's rules of RSS";
    let Some(mut edge) = gateway(test, "rss", &cards("profile=mlx5")) else { return };
    for Row { profile, table, fast_free, steering } in ROWS {
        let [uplink, cluster] = cards(&format!("profile={profile}"));
        edge.configure_on(&[0, 1], &uplink, &cluster, "");
        traffic::start(&mut edge);
        let ports = until(&format!("{profile}: {steering}"), || {
            traffic::begin_flows(&edge, 50);
            edge.ports().filter(|ports| ports[0].steering == steering)
        });
        for port in ports {
            assert_queues(&port, profile, fast_free);
            assert_eq!(port.rss_table, table, "{profile}: {port:?}");
            assert!(steering != PROVEN || port.rss.iter().all(|kind| kind.state != "refuted"), "{profile}: {port:?}");
        }
        traffic::assert_alive(&mut traffic::connections(&edge, 6), profile);
        edge.assert_account();
        assert_eq!(edge.stop(false), Some(0), "{profile}: {}", edge.log());
    }
}

fn assert_queues(port: &PortStatus, profile: &str, fast_free: bool) {
    let (rx, tx) = (port.rx.as_ref().unwrap(), port.tx.as_ref().unwrap());
    assert_eq!((rx.queues, tx.queues, rx.descriptors, tx.descriptors), (2, 2, 1024, 1024), "{profile}");
    assert_eq!((&*port.driver, &*rx.burst_mode, &*tx.burst_mode), ("net_card", "Software", "Software"), "{profile}");
    let expected: &[&str] = if fast_free { &["MBUF_FAST_FREE"] } else { &[] };
    assert_eq!(tx.offloads, expected, "{profile}");
    let expected: &[&str] = if profile.starts_with("virtio") { &[] } else { &["RSS_HASH"] };
    assert_eq!(rx.offloads, expected, "{profile}");
    assert_eq!((port.tx_errors, &*port.link), (0, "up"), "{profile}");
}

/// No packet has to be handed over. (ICMP errors are, so these connections meet no closed port.)
#[test]
fn a_card_with_rss_leads_packets_to_their_workers_in_both_directions() {
    let Some(mut edge) = gateway("packets over a card with RSS", "prov", &cards("profile=ice")) else { return };
    traffic::start(&mut edge);
    let handed_in = || edge.status().map(|status| status.accounts.iter().map(|account| account.handed_in).sum::<u64>());
    let before = until("the first account", handed_in);
    let mut connections = traffic::connections(&edge, 40);
    traffic::assert_alive(&mut connections, "to a worker and back");
    assert_eq!(handed_in(), Some(before), "nothing is handed over");
    const MEGABYTES: u32 = 16;
    traffic::stream(&edge, MEGABYTES);
    assert_eq!(handed_in(), Some(before), "nothing is handed over");
    for port in edge.ports().unwrap() {
        // iperf3 counts what it has written, not what has arrived.
        let moved = (u64::from(MEGABYTES) << 20) / 2;
        assert!(port.rx_bytes > moved && port.tx_bytes > moved, "there and back: {port:?}");
        assert_eq!((port.tx_errors, port.rx_errors), (0, 0), "{port:?}");
    }
    let flows: Vec<_> = edge.status().unwrap().accounts.iter().map(|account| account.flows).collect();
    assert!(flows.iter().all(|flows| *flows > 0), "both workers have flows: {flows:?}");
}

#[test]
fn of_a_card_with_one_queue_one_worker_receives_and_hands_over() {
    let Some(mut edge) = gateway("a card with one queue", "oneq", &cards("profile=ice,queues=1")) else { return };
    let [uplink, cluster] = cards("profile=ice");
    let one = "net_card has 1 receive queue; 1 of 2 workers can transmit";
    let rows = [
        (cards("profile=ice,queues=1"), [format!("own hash: {one}"), format!("own hash: {one}")]),
        ([uplink, format!("{cluster},queues=1")], [PROVEN.to_owned(), format!("Toeplitz computed here: {one}")]),
    ];
    for ([uplink, cluster], steering) in rows {
        edge.configure_on(&[0, 1], &uplink, &cluster, "");
        traffic::start(&mut edge);
        let ports = until(&format!("{steering:?}"), || {
            traffic::begin_flows(&edge, 50);
            edge.ports().filter(|ports| ports.iter().map(|port| &port.steering).eq(&steering))
        });
        let queues = |port: &PortStatus| (port.rx.as_ref().unwrap().queues, port.tx.as_ref().unwrap().queues);
        assert_eq!(queues(&ports[1]), (1, 1));
        traffic::assert_alive(&mut traffic::connections(&edge, 20), "by one queue");
        edge.assert_all_servers_answer("http://192.0.2.100/");
        let accounts = edge.status().unwrap().accounts;
        assert!(accounts.iter().all(|account| account.flows > 0), "both workers have flows: {accounts:?}");
        assert!(accounts.iter().all(|account| account.handed_in > 0), "{accounts:?}");
        edge.assert_account();
        assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    }
}

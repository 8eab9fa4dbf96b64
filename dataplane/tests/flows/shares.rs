//! Fair shares (FORWARDING 2): in a table that is nearly full a Service keeps room for the others, and of the SNAT ports of a
//! backend that are nearly all in use a client keeps some for the others.

use std::net::SocketAddr;
use std::sync::Arc;

use dataplane::testing::Packet;
use dataplane::{DropReason, PacketOutcome, tcp_flags};
use proto::{Mode, Service, ServiceName};

use crate::rig::{CLUSTER, Rig, SECOND, UPLINK, ends, ip};

const ACK: u8 = tcp_flags::ACK;
const SYN: u8 = tcp_flags::SYN;
const WEB: [&str; 2] = ["192.0.2.100:80", "[2001:db8::1:0]:80"];
/// The same port of another Service.
const OTHER: [&str; 2] = ["192.0.2.110:80", "[2001:db8::1:10]:80"];

/// A rig with one more Service that is as `default/web`, but for its VIPs.
fn with_other_service(mut rig: Rig) -> Rig {
    let web = Service::clone(&rig.state.services[&ServiceName::new("default", "web")]);
    let name = ServiceName::new("tenant", "other");
    let mut other = Service { name: name.clone(), ..web };
    for port in &mut other.ports {
        port.vips = vec![ip(if port.vips[0].is_ipv4() { "192.0.2.110" } else { "2001:db8::1:10" })];
        port.node_port = None;
    }
    rig.state.services.insert(name, Arc::new(other));
    rig.publish();
    rig
}

fn client(family: usize, n: u32) -> String {
    let (high, low) = (n / 250, n % 250 + 1);
    [format!("198.51.{}.{low}:{}", 100 + high % 100, 2000 + n), format!("[2001:db8:7:{n:x}::{low}]:{}", 2000 + n)][family].clone()
}

/// A connection whose handshake both sides complete; its addresses at the backend, or why it failed.
fn connect(rig: &mut Rig, client: &str, vip: &str) -> Result<(SocketAddr, SocketAddr), DropReason> {
    let outcome = rig.put(UPLINK, &Packet::tcp(client, vip).build());
    let sent = rig.sent(CLUSTER);
    match outcome {
        Some(PacketOutcome::Forward(_)) => {}
        Some(PacketOutcome::Drop(reason)) => return Err(reason),
        other => panic!("{other:?}"),
    }
    let (snat, backend) = ends(sent.last().unwrap());
    rig.forward(CLUSTER, &Packet::tcp(&backend.to_string(), &snat.to_string()).flags(SYN | ACK).build());
    rig.forward(UPLINK, &Packet::tcp(client, vip).flags(ACK).build());
    Ok((snat, backend))
}

/// Opens connections until one fails; their number, and the reason.
fn fill(rig: &mut Rig, family: usize, vip: &str, from: u32) -> (u32, DropReason) {
    (0..).find_map(|n| connect(rig, &client(family, from + n), vip).err().map(|reason| (n, reason))).unwrap()
}

#[test]
fn a_service_leaves_room_in_the_flow_table_for_others_and_is_counted() {
    for family in 0..2 {
        for mode in [Mode::Nat, Mode::Dnat] {
            let mut rig = with_other_service(Rig::with_flows(900));
            rig.set_mode("web", mode);
            let (held, reason) = fill(&mut rig, family, WEB[family], 0);
            assert_eq!(reason, DropReason::FlowShare);
            // 8/9 of the table, where one Service wants all of it.
            assert!((792..=808).contains(&held), "{held} flows of {mode:?}");
            assert_eq!(rig.service_drops("web", DropReason::FlowShare), 1, "the Service that is limited has the drop");
            let (others, _) = fill(&mut rig, family, OTHER[family], 5_000);
            assert!(others >= 80, "{others} flows of the other Service");
            rig.assert_account();
        }
    }
}

#[test]
fn services_that_want_more_end_with_equal_shares_of_the_flow_table() {
    let mut rig = with_other_service(Rig::with_flows(900));
    let (first, _) = fill(&mut rig, 0, WEB[0], 0);
    let mut next = first;
    // Connections of the large Service end one by one, and both try to open others all the time.
    let mut open: std::collections::VecDeque<u32> = (0..first).collect();
    let (mut of_web, mut of_other) = (first, 0);
    for _ in 0..4_000 {
        if let Some(n) = open.pop_front() {
            let rst = Packet::tcp(&client(0, n), WEB[0]).flags(tcp_flags::RST | ACK).build();
            rig.put(UPLINK, &rst);
            rig.sent(CLUSTER);
        }
        next += 1;
        if connect(&mut rig, &client(0, 20_000 + next % 30_000), OTHER[0]).is_ok() {
            of_other += 1;
        }
        if connect(&mut rig, &client(0, next), WEB[0]).is_ok() {
            open.push_back(next);
        }
        if next % 50 == 0 {
            rig.now += 11 * SECOND;
            rig.settle();
        }
        of_web = u32::try_from(rig.counters.flows.get()).unwrap() - of_other;
        if of_other >= 400 {
            break;
        }
    }
    assert!(of_other >= 400, "{of_other} flows of the one that came second, {of_web} of the first");
}

#[test]
fn a_single_service_has_the_whole_flow_table() {
    let mut rig = Rig::with_flows(200);
    rig.keep_service("web");
    assert_eq!(fill(&mut rig, 0, WEB[0], 0), (200, DropReason::FlowTableFull));
}

#[test]
fn a_flood_on_one_service_ends_no_handshake_of_another_and_genuine_clients_of_the_first_still_get_in() {
    let mut rig = with_other_service(Rig::with_flows(900));
    for n in 0..3_000 {
        let spoofed = Packet::tcp(&format!("203.0.{}.{}:{}", 112 + n / 250 % 2, n % 250 + 1, 1024 + n), WEB[0]).build();
        rig.put(UPLINK, &spoofed);
    }
    rig.sent(CLUSTER);
    // A handshake of the other Service, while the flood goes on.
    let (snat, backend) = ends(&rig.forward(UPLINK, &Packet::tcp(&client(0, 1), OTHER[0]).build()));
    for n in 3_000..6_000 {
        let spoofed = Packet::tcp(&format!("203.0.{}.{}:{}", 112 + n / 250 % 2, n % 250 + 1, 1024 + n), WEB[0]).build();
        rig.put(UPLINK, &spoofed);
    }
    rig.sent(CLUSTER);
    rig.forward(CLUSTER, &Packet::tcp(&backend.to_string(), &snat.to_string()).flags(SYN | ACK).build());
    connect(&mut rig, &client(0, 2), WEB[0]).expect("a flow of the flood yields");
    let before = rig.counters.flows.get();
    let got = (0..400).filter(|n| connect(&mut rig, &client(0, 5_000 + n), OTHER[0]).is_ok()).count();
    assert!(got == 400, "{got} of 400, with {before} flows: those of the flood yield to a Service with fewer");
    rig.assert_account();
}

/// Clients that send UDP and get no answer have flows that are unconfirmed for as long as they send, so that these are the
/// oldest of all.
#[test]
fn genuine_clients_of_a_flooded_service_get_in_though_the_oldest_flows_that_yield_are_of_another() {
    let mut rig = with_other_service(Rig::with_flows(900));
    for n in 0..20 {
        rig.forward(UPLINK, &Packet::udp(&client(0, n), "192.0.2.101:53").payload(b"log").build());
    }
    for n in 0..3_000 {
        let spoofed = Packet::tcp(&format!("203.0.{}.{}:{}", 112 + n / 250 % 2, n % 250 + 1, 1024 + n), WEB[0]).build();
        rig.put(UPLINK, &spoofed);
    }
    rig.sent(CLUSTER);
    for n in 0..100 {
        connect(&mut rig, &client(0, 5_000 + n), WEB[0]).expect("a flow of the flood yields");
    }
    assert_eq!(rig.drops(DropReason::FlowShare), 0);
    rig.assert_account();
}

#[test]
fn one_way_flows_beyond_the_share_are_forwarded_without_state() {
    let mut rig = with_other_service(Rig::with_flows(900));
    rig.set_mode("web", Mode::Dsr);
    rig.set_backend_ports();
    for n in 0..1_000 {
        rig.forward(UPLINK, &Packet::tcp(&client(0, n), WEB[0]).build());
    }
    let held = rig.counters.flows.get();
    assert!((792..=808).contains(&held), "{held} flows");
    connect(&mut rig, &client(0, 5_000), OTHER[0]).expect("room for another Service");
}

/// A rig with 64 SNAT ports towards each backend, of which there is one.
fn few_ports() -> Rig {
    let mut rig = Rig::with_flows(4096);
    rig.worker.share_ports(1008);
    rig.keep_backends("web", &[11]);
    rig
}

fn port_of(family: usize, host: &str, n: u32) -> String {
    [format!("{host}:{}", 2000 + n), format!("[{host}]:{}", 2000 + n)][family].clone()
}

fn connections(rig: &mut Rig, family: usize, host: &str, tries: u32) -> (u32, Vec<DropReason>) {
    let all = (0..tries).map(|n| connect(rig, &port_of(family, host, n), WEB[family]));
    let (made, failed): (Vec<_>, Vec<_>) = all.partition(Result::is_ok);
    (u32::try_from(made.len()).unwrap(), failed.into_iter().filter_map(Result::err).collect())
}

#[test]
fn a_client_leaves_snat_ports_of_a_backend_to_others_and_is_counted() {
    for (family, hosts) in [["198.51.100.7", "198.51.100.8", "198.51.100.9"], ["2001:db8:7::1", "2001:db8:8::1", "2001:db8:9::1"]]
        .into_iter()
        .enumerate()
    {
        let mut rig = few_ports();
        let (alone, reasons) = connections(&mut rig, family, hosts[0], 100);
        assert!((58..=61).contains(&alone), "{alone}: a client that is alone leaves a sixteenth");
        assert!(reasons.iter().all(|reason| *reason == DropReason::SnatShare), "{reasons:?}");
        assert_eq!(rig.service_drops("web", DropReason::SnatShare), u64::from(100 - alone));
        let (second, _) = connections(&mut rig, family, hosts[1], 2);
        assert_eq!(second, 2, "others find ports");
        if family == 1 {
            let same_site = connect(&mut rig, "[2001:db8:7:0:1234::1]:9", WEB[1]);
            assert_eq!(same_site, Err(DropReason::SnatShare), "a /64 is one client");
        }
        let mut shared = few_ports();
        let (mut made, mut next) = ([0; 2], 0);
        while next < 100 {
            for (client, made) in made.iter_mut().enumerate() {
                *made += u32::from(connect(&mut shared, &port_of(family, hosts[client], next), WEB[family]).is_ok());
            }
            next += 1;
        }
        assert!(made[0].abs_diff(made[1]) <= 4 && made[0] + made[1] >= 48, "{made:?} of 64");
        let (third, _) = connections(&mut shared, family, hosts[2], 3);
        assert_eq!(third, 3, "{made:?}");
        shared.assert_account();
    }
}

#[test]
fn spoofed_syns_with_the_address_of_a_client_do_not_keep_it_from_connecting() {
    let mut rig = few_ports();
    connect(&mut rig, "198.51.100.9:5", WEB[0]).unwrap();
    for n in 0..200 {
        rig.put(UPLINK, &Packet::tcp(&port_of(0, "198.51.100.7", n), WEB[0]).build());
        rig.sent(CLUSTER);
    }
    for n in 1_000..1_020 {
        connect(&mut rig, &port_of(0, "198.51.100.7", n), WEB[0]).expect("a spoofed handshake of the same client yields");
    }
    assert!(connect(&mut rig, "198.51.100.9:6", WEB[0]).is_ok());
}

#[test]
fn ports_that_flows_gave_back_count_no_longer() {
    let mut rig = few_ports();
    let (made, _) = connections(&mut rig, 0, "198.51.100.7", 100);
    for n in 0..made {
        rig.put(UPLINK, &Packet::tcp(&port_of(0, "198.51.100.7", n), WEB[0]).flags(tcp_flags::FIN | ACK).build());
    }
    rig.now += 7_600 * SECOND;
    for _ in 0..200 {
        rig.now += SECOND;
        rig.settle();
    }
    assert_eq!(rig.counters.flows.get(), 0);
    let (again, _) = connections(&mut rig, 0, "198.51.100.7", 100);
    assert_eq!(again, made);
}

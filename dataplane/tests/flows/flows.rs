//! Flows over time: idle limits, full tables, backends that are removed and return, next hops that change, held
//! packets.

use std::sync::Arc;
use std::time::Duration;

use dataplane::testing::Packet;
use dataplane::{BackendCounters, DropReason, Mac, Neighbour, PacketOutcome, tcp_flags};
use proto::{Protocol, ServiceName};

use crate::rig::{self, CLUSTER, ROUTER_MAC, Rig, SECOND, UPLINK, ends, ip};

const ACK: u8 = tcp_flags::ACK;
const VIP: &str = "192.0.2.100:80";

fn client(n: u32) -> String {
    format!("198.51.{}.{}:{}", 100 + n / 50_000, n / 200 % 250 + 1, 2000 + n % 200)
}

fn syn(n: u32) -> Vec<u8> {
    Packet::tcp(&client(n), VIP).build()
}

/// Opens a connection, including the backend's answer and the client's acknowledgement.
fn establish(rig: &mut Rig, client: &str) -> (std::net::SocketAddr, std::net::SocketAddr) {
    let (snat, backend) = ends(&rig.forward(UPLINK, &Packet::tcp(client, VIP).build()));
    let syn_ack = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | ACK);
    rig.forward(CLUSTER, &syn_ack.build());
    rig.forward(UPLINK, &Packet::tcp(client, VIP).flags(ACK).build());
    (snat, backend)
}

fn idle(rig: &mut Rig, seconds: u64) {
    for _ in 0..seconds * 4 {
        rig.now += SECOND / 4;
        rig.worker.poll(rig.now);
    }
}

#[test]
fn an_idle_flow_ends_and_its_memory_is_used_again() {
    let mut rig = Rig::with_flows(64);
    rig.keep_service("web");
    for n in 0..64 {
        rig.forward(UPLINK, &syn(n));
    }
    assert_eq!((rig.counters.flows.get(), rig.counters.reclaimed.get()), (64, 0));
    idle(&mut rig, 45);
    assert_eq!(rig.counters.flows.get(), 0, "opening flows end after 30 s");
    rig.forward(UPLINK, &syn(64));
}

#[test]
fn an_established_connection_outlives_an_opening_one() {
    let mut rig = Rig::new();
    establish(&mut rig, "198.51.100.7:1");
    rig.forward(UPLINK, &Packet::tcp("198.51.100.7:2", VIP).build());
    idle(&mut rig, 60);
    assert_eq!(rig.counters.flows.get(), 1);
    rig.forward(UPLINK, &Packet::tcp("198.51.100.7:1", VIP).flags(ACK).build());
    let late = Packet::tcp("198.51.100.7:2", VIP).flags(ACK).build();
    assert_eq!(rig.put(UPLINK, &late), Some(PacketOutcome::Drop(DropReason::NoFlow)));
}

#[test]
fn an_ack_with_a_guessed_number_confirms_nothing() {
    let mut rig = Rig::new();
    let (snat, backend) = ends(&rig.forward(UPLINK, &syn(1)));
    let syn_ack = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | ACK).numbers(77, 1_001);
    rig.forward(CLUSTER, &syn_ack.build());
    rig.forward(UPLINK, &Packet::tcp(&client(1), VIP).flags(ACK).numbers(1_001, 1_001).build());
    rig.forward(UPLINK, &Packet::tcp(&client(1), VIP).flags(ACK | tcp_flags::PSH).numbers(1_001, 79).build());
    idle(&mut rig, 45);
    assert_eq!(rig.counters.flows.get(), 0, "it ends as an opening flow does");
}

#[test]
fn a_service_may_have_an_idle_timeout_of_its_own_and_change_it() {
    let mut rig = Rig::new();
    let set = |rig: &mut Rig, idle_timeout| {
        let name = ServiceName::new("default", "web");
        let service = proto::Service { idle_timeout, ..(*rig.state.services[&name]).clone() };
        rig.state.services.insert(name, Arc::new(service));
        rig.publish();
    };
    set(&mut rig, Some(Duration::from_secs(60)));
    establish(&mut rig, "198.51.100.7:1");
    idle(&mut rig, 50);
    rig.forward(UPLINK, &Packet::tcp("198.51.100.7:1", VIP).flags(ACK).build());
    idle(&mut rig, 75);
    assert_eq!(rig.counters.flows.get(), 0);
    establish(&mut rig, "198.51.100.7:1");
    set(&mut rig, Some(Duration::from_secs(20_000)));
    idle(&mut rig, 10_000);
    assert_eq!(rig.counters.flows.get(), 1, "flows follow the service, beyond the gateway's limit too");
    set(&mut rig, None);
    idle(&mut rig, 10);
    assert_eq!(rig.counters.flows.get(), 0);
}

#[test]
fn a_closed_connection_ends_soon_and_a_new_syn_creates_a_flow() {
    let mut rig = Rig::new();
    let (snat, backend) = establish(&mut rig, "198.51.100.7:1");
    fin(&mut rig, "198.51.100.7:1", (snat, backend), false);
    fin(&mut rig, "198.51.100.7:1", (snat, backend), true);
    let (again, _) = ends(&rig.forward(UPLINK, &Packet::tcp("198.51.100.7:1", VIP).build()));
    assert_ne!(snat.port(), again.port(), "the old port rests");
    assert_eq!(rig.counters.flows.get(), 1);
}

#[test]
fn an_unhealthy_backend_gets_no_new_flows_and_keeps_its_old_ones() {
    let mut rig = Rig::new();
    let (_, backend) = establish(&mut rig, "198.51.100.7:1");
    rig.health.failing.insert((Protocol::Tcp, backend));
    rig.publish();
    for n in 0..100 {
        assert_ne!(ends(&rig.forward(UPLINK, &syn(n))).1, backend);
    }
    let old = rig.forward(UPLINK, &Packet::tcp("198.51.100.7:1", VIP).flags(ACK).build());
    assert_eq!(ends(&old).1, backend);
}

#[test]
fn a_syn_that_an_unhealthy_backend_never_answered_is_sent_to_another_when_it_is_repeated() {
    let mut rig = Rig::new();
    let (_, backend) = ends(&rig.forward(UPLINK, &syn(1)));
    assert_eq!(ends(&rig.forward(UPLINK, &syn(1))).1, backend);
    rig.health.failing.insert((Protocol::Tcp, backend));
    rig.publish();
    assert_eq!(rig.put(UPLINK, &syn(1)), Some(PacketOutcome::Forward(CLUSTER)));
    let receivers: Vec<_> = rig.sent(CLUSTER).iter().map(|frame| ends(frame).1).collect();
    assert!(receivers[0] == backend && receivers[1] != backend, "a RST to the one, the SYN to another: {receivers:?}");
    assert_eq!(rig.counters.flows.get(), 1, "the flow to the unhealthy backend has ended");
}

#[test]
fn a_packet_that_cannot_be_forwarded_opens_no_flow() {
    let mut rig = Rig::new();
    let last_hop = Packet::tcp("198.51.100.7:1", VIP).hop_limit(1);
    assert_eq!(rig.put(UPLINK, &last_hop.build()), Some(PacketOutcome::Reply(UPLINK)));
    let too_big = Packet::udp("198.51.100.7:1", "192.0.2.101:53").payload(&[0; 1600]);
    assert_eq!(rig.put(UPLINK, &too_big.build()), Some(PacketOutcome::Reply(UPLINK)));
    assert_eq!(rig.counters.flows.get(), 0);
}

#[test]
fn when_all_backends_fail_all_are_used() {
    let mut rig = Rig::new();
    for n in rig::BACKENDS {
        rig.health.failing.insert((Protocol::Tcp, format!("10.0.0.{n}:8080").parse().unwrap()));
    }
    rig.publish();
    rig.forward(UPLINK, &syn(1));
}

#[test]
fn a_frontend_without_any_endpoint_refuses() {
    let mut rig = Rig::new();
    set_backends(&mut rig, &[]);
    assert_eq!(rig.put(UPLINK, &syn(1)), Some(PacketOutcome::Reply(UPLINK)));
    assert_eq!(rig.sent(UPLINK)[0][47] & tcp_flags::RST, tcp_flags::RST);
}

fn set_backends(rig: &mut Rig, keep: &[u8]) {
    let name = ServiceName::new("default", "web");
    let mut service = (*rig::state().services[&name]).clone();
    for port in &mut service.ports {
        port.backends.retain(|b| b.address.is_ipv4() && keep.contains(&rig::last_byte(b.address.ip())));
    }
    rig.state.services.insert(name, Arc::new(service));
    rig.state.generation.counter += 1;
    rig.publish();
}

#[test]
fn a_connection_to_a_removed_backend_continues_until_the_drain_ends() {
    let mut rig = Rig::new();
    let (_, backend) = establish(&mut rig, "198.51.100.7:1");
    let others: Vec<u8> = rig::BACKENDS.into_iter().filter(|n| *n != rig::last_byte(backend.ip())).collect();
    set_backends(&mut rig, &others);
    let data = Packet::tcp("198.51.100.7:1", VIP).flags(ACK).build();
    assert_eq!(ends(&rig.forward(UPLINK, &data)).1, backend);
    rig.now += 301 * SECOND;
    rig.publish();
    assert_eq!(rig.put(UPLINK, &data), Some(PacketOutcome::Drop(DropReason::NoFlow)));
    assert_ne!(ends(&rig.forward(UPLINK, &Packet::tcp("198.51.100.7:1", VIP).build())).1, backend);
}

#[test]
fn old_flows_follow_the_router_when_its_mac_and_then_its_address_change() {
    let mut rig = Rig::new();
    let flows: Vec<_> = (0..200).map(|n| (client(n), establish(&mut rig, &client(n)))).collect();
    let mac_of_replies = |rig: &mut Rig| {
        let macs: std::collections::HashSet<_> = flows
            .iter()
            .map(|(_, (snat, backend))| {
                let reply = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(ACK).build();
                rig.forward(CLUSTER, &reply)[0..6].to_vec()
            })
            .collect();
        assert_eq!(macs.len(), 1, "all follow");
        macs.into_iter().next().unwrap()
    };
    assert_eq!(mac_of_replies(&mut rig), ROUTER_MAC.0);
    let new_mac = Mac([2, 9, 9, 9, 9, 9]);
    for neighbour in &mut rig.network.neighbours {
        if neighbour.address == ip("192.0.2.1") {
            neighbour.mac = new_mac;
        }
    }
    rig.publish();
    assert_eq!(mac_of_replies(&mut rig), new_mac.0);
    let other = Neighbour { link: UPLINK.into(), address: ip("192.0.2.254"), mac: Mac([2, 8, 8, 8, 8, 8]) };
    rig.network.neighbours.push(other);
    rig.network.routes.iter_mut().filter(|r| r.via == Some(ip("192.0.2.1"))).for_each(|r| r.via = Some(other.address));
    rig.publish();
    assert_eq!(mac_of_replies(&mut rig), other.mac.0);
}

#[test]
fn a_packet_waits_for_its_next_hop_and_is_then_forwarded() {
    let mut rig = Rig::new();
    rig.network.neighbours.retain(|n| n.link == UPLINK.into());
    rig.publish();
    assert_eq!(rig.put(UPLINK, &syn(1)), None, "no verdict yet");
    assert_eq!(rig.counters.held.get(), 1);
    rig.assert_account();
    assert!(rig.neighbour_requests.pop().is_some_and(|(link, _)| link == CLUSTER.into()), "the kernel is asked to resolve it");
    rig.network = rig::network();
    let snapshot = rig.compiler.compile(&rig.state, &rig.network, &rig.health, rig.now);
    rig.publisher.publish(snapshot);
    rig.worker.poll(rig.now);
    assert_eq!(rig.counters.held.get(), 0);
    assert_eq!(rig.sent(CLUSTER).iter().filter(|f| f[12..14] == [8, 0]).count(), 1);
}

#[test]
fn a_packet_whose_next_hop_stays_silent_outwaits_one_request_that_is_lost_and_then_is_dropped() {
    let mut rig = Rig::new();
    rig.network.neighbours.retain(|n| n.link == UPLINK.into());
    rig.publish();
    rig.put(UPLINK, &syn(1));
    rig.now += SECOND + SECOND / 2;
    rig.worker.poll(rig.now);
    assert_eq!(rig.drops(DropReason::NeighbourUnresolved), 0, "Linux repeats its request after a second");
    rig.now += SECOND / 2;
    rig.worker.poll(rig.now);
    assert_eq!(rig.drops(DropReason::NeighbourUnresolved), 1);
    assert_eq!(rig.counters.held.get(), 0);
}

#[test]
fn packets_that_a_port_or_the_kernel_refuses_are_counted() {
    let mut rig = Rig::new();
    rig.worker.port_mut(CLUSTER).unwrap().room = 0;
    rig.put(UPLINK, &syn(1));
    assert_eq!(rig.drops(DropReason::TxFull), 1);
    let to_linux = Packet::tcp("198.51.100.7:5", "192.0.2.2:22").build();
    for _ in 0..dataplane::TO_LINUX_BURSTS + 1 {
        rig.put(UPLINK, &to_linux);
    }
    assert_eq!(rig.drops(DropReason::TwinFull), 1);
}

#[test]
fn an_on_link_client_is_resolved_again_while_its_flow_is_used() {
    let mut rig = Rig::new();
    let on_link = "192.0.2.10:4000";
    establish(&mut rig, on_link);
    let asked = |rig: &Rig| {
        std::iter::from_fn(|| rig.neighbour_requests.pop()).filter(|ask| *ask == (UPLINK.into(), ip("192.0.2.10"))).count()
    };
    asked(&rig);
    for _ in 0..3 {
        idle(&mut rig, 9);
        rig.forward(UPLINK, &Packet::tcp(on_link, VIP).flags(ACK).build());
        assert!(asked(&rig) > 0);
    }
    idle(&mut rig, 20);
    asked(&rig);
    idle(&mut rig, 20);
    assert_eq!(asked(&rig), 0, "an idle flow keeps no neighbour resolved");
}

/// A FIN of the client or of the backend.
fn fin(rig: &mut Rig, client: &str, (snat, backend): (std::net::SocketAddr, std::net::SocketAddr), by_client: bool) {
    let (at, from, to) = match by_client {
        true => (UPLINK, client.to_owned(), VIP.to_owned()),
        false => (CLUSTER, backend.to_string(), snat.to_string()),
    };
    rig.forward(at, &Packet::tcp(&from, &to).flags(tcp_flags::FIN | ACK).build());
}

#[test]
fn a_half_closed_connection_may_be_silent_for_five_minutes_and_a_closed_one_for_ten_seconds() {
    for by_client in [true, false] {
        let mut rig = Rig::new();
        let client = "198.51.100.7:1";
        let (snat, backend) = establish(&mut rig, client);
        fin(&mut rig, client, (snat, backend), by_client);
        idle(&mut rig, 290);
        // The other side continues to send, for longer than the limit of a closed connection, and gets
        // acknowledgements.
        let data = |from: &str, to: &str| Packet::tcp(from, to).flags(ACK | tcp_flags::PSH).payload(b"more").build();
        if by_client {
            rig.forward(CLUSTER, &data(&backend.to_string(), &snat.to_string()));
            rig.forward(UPLINK, &Packet::tcp(client, VIP).flags(ACK).build());
        } else {
            rig.forward(UPLINK, &data(client, VIP));
            rig.forward(CLUSTER, &Packet::tcp(&backend.to_string(), &snat.to_string()).flags(ACK).build());
        }
        idle(&mut rig, 290);
        assert_eq!(rig.counters.flows.get(), 1, "it may be silent for as long again");
        fin(&mut rig, client, (snat, backend), !by_client);
        idle(&mut rig, 21);
        assert_eq!(rig.counters.flows.get(), 0, "closed by both it ends soon");
        establish(&mut rig, client);
        fin(&mut rig, client, (snat, backend), true);
        idle(&mut rig, 310);
        assert_eq!(rig.counters.flows.get(), 0, "half closed it does not last as an established one");
    }
}

#[test]
fn a_reset_ends_a_connection_after_four_minutes_of_silence_and_those_of_both_sides_end_it_soon() {
    for (by, ends_after) in [(vec![true], 240), (vec![false], 240), (vec![true, false], 10), (vec![false, true], 10)] {
        let mut rig = Rig::new();
        let (snat, backend) = establish(&mut rig, "198.51.100.7:1");
        for by_client in &by {
            let (at, from, to) = match by_client {
                true => (UPLINK, "198.51.100.7:1".to_owned(), VIP.to_owned()),
                false => (CLUSTER, backend.to_string(), snat.to_string()),
            };
            rig.forward(at, &Packet::tcp(&from, &to).flags(tcp_flags::RST).build());
        }
        idle(&mut rig, ends_after - 1);
        assert_eq!(rig.counters.flows.get(), 1, "{by:?}");
        idle(&mut rig, 12);
        assert_eq!(rig.counters.flows.get(), 0, "{by:?}");
    }
}

#[test]
fn in_one_way_modes_the_clients_fin_closes_one_half_since_the_backends_is_never_seen() {
    for mode in [proto::Mode::Dsr, proto::Mode::Ipip, proto::Mode::Gue] {
        let mut rig = Rig::with_mode(mode);
        rig.forward(UPLINK, &syn(1));
        rig.now += 2 * SECOND;
        for flags in [ACK, ACK, tcp_flags::FIN | ACK] {
            rig.forward(UPLINK, &Packet::tcp(&client(1), VIP).flags(flags).build());
        }
        idle(&mut rig, 290);
        assert_eq!(rig.counters.flows.get(), 1, "{mode}: the backend may still send, and the client acknowledge");
        idle(&mut rig, 20);
        assert_eq!(rig.counters.flows.get(), 0, "{mode}");
    }
}

#[test]
fn an_idle_timeout_of_a_service_shortens_and_prolongs_the_life_of_a_half_closed_connection() {
    for (own, lives_to, ends_by) in [(60, 55, 75), (600, 595, 615)] {
        let mut rig = Rig::new();
        let name = ServiceName::new("default", "web");
        let service = proto::Service { idle_timeout: Some(Duration::from_secs(own)), ..(*rig.state.services[&name]).clone() };
        rig.state.services.insert(name, Arc::new(service));
        rig.publish();
        let ends = establish(&mut rig, "198.51.100.7:1");
        fin(&mut rig, "198.51.100.7:1", ends, true);
        idle(&mut rig, lives_to);
        assert_eq!(rig.counters.flows.get(), 1, "{own}");
        idle(&mut rig, ends_by - lives_to);
        assert_eq!(rig.counters.flows.get(), 0, "{own}");
    }
}

#[test]
fn with_its_index_at_the_highest_load_the_engine_finds_every_flow_in_both_directions_and_takes_new_ones() {
    // 2 x 57,344 keys in 16,384 buckets of 8: 87.5 %, the highest load of any capacity.
    const FLOWS: u32 = 57_344;
    let mut rig = Rig::with_flows(FLOWS);
    rig.keep_service("web");
    let from = |n: u32| format!("198.{}.{}.{}:{}", 51 + n / 60_000, n / 250 % 250, n % 250 + 1, 1024 + n % 60_000);
    let open = |rig: &mut Rig, n: u32| {
        rig.put(UPLINK, &Packet::tcp(&from(n), VIP).build());
        ends(rig.sent(CLUSTER).last().unwrap())
    };
    let seen: Vec<_> = (0..FLOWS).map(|n| open(&mut rig, n)).collect();
    assert_eq!((rig.counters.flows.get(), rig.counters.reclaimed.get()), (u64::from(FLOWS), 0));
    for (n, (snat, backend)) in (0..).zip(&seen) {
        let answer = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | ACK).build();
        assert_eq!(ends(&rig.forward(CLUSTER, &answer)).1.to_string(), from(n));
    }
    for n in FLOWS..FLOWS + 5_000 {
        assert_ne!(open(&mut rig, n), seen[(n - FLOWS) as usize]);
    }
    assert_eq!((rig.counters.flows.get(), rig.counters.reclaimed.get()), (u64::from(FLOWS), 5_000));
    for n in (5_000..FLOWS).step_by(7) {
        assert_eq!(ends(&rig.forward(UPLINK, &Packet::tcp(&from(n), VIP).flags(ACK).build())), seen[n as usize]);
    }
}

#[test]
fn backends_count_packets_by_direction_and_connections_that_fail_or_are_reset() {
    let mut rig = Rig::new();
    let counted =
        |rig: &Rig, of: fn(&BackendCounters) -> u64| -> u64 { (0..100).map(|slot| rig.counters.sum_of(slot, of)).sum() };
    let (snat, backend) = establish(&mut rig, "198.51.100.7:1");
    let reply = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(ACK);
    for _ in 0..3 {
        rig.forward(CLUSTER, &reply.build());
    }
    let packets = |rig: &Rig| [counted(rig, |of| of.packets(false)), counted(rig, |of| of.packets(true))];
    assert_eq!(packets(&rig), [2, 4], "SYN and ACK; SYN-ACK and three ACKs");
    assert_eq!(counted(&rig, |of| of.bytes(true)), 4 * 40);
    let reset = Packet::tcp("198.51.100.7:1", VIP).flags(tcp_flags::RST | ACK);
    rig.forward(UPLINK, &reset.build());
    rig.forward(UPLINK, &reset.build());
    rig.forward(UPLINK, &syn(1));
    idle(&mut rig, 255);
    assert_eq!((rig.counters.flows.get(), rig.counters.flows_peak.get()), (0, 2));
    assert_eq!((rig.counters.snat_ports.get(), rig.counters.snat_ports_peak.get()), (0, 2));
    assert_eq!(
        (counted(&rig, |of| of.reset.get()), counted(&rig, |of| of.failed.get())),
        (1, 1),
        "the second RST changes nothing"
    );
    assert_eq!(packets(&rig), [5, 4]);
}

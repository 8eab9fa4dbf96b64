//! Mode `dnat`: the backend sees the client's address, and its replies pass the gateway.

use std::net::SocketAddr;
use std::sync::Arc;

use dataplane::testing::{Packet, assert_checksums};
use dataplane::{DropReason, PacketOutcome, tcp_flags};
use proto::{Mode, Service, ServiceName};

use crate::rig::{self, CLUSTER, CLUSTER_MAC, ROUTER_MAC, Rig, SECOND, UPLINK, UPLINK_MAC, ip};

const ACK: u8 = tcp_flags::ACK;
const SYN: u8 = tcp_flags::SYN;
const CLIENT: &str = "198.51.100.7:5555";
const CLIENT_V6: &str = "[2001:db8:1::7]:5555";
const VIP: &str = "192.0.2.100:80";

fn socket(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn between(from: SocketAddr, to: SocketAddr) -> Packet {
    Packet::tcp(&from.to_string(), &to.to_string())
}

/// A second service address with the same backends.
fn second_vip(rig: &mut Rig) {
    let name = ServiceName::new("default", "web");
    let mut service = Service::clone(&rig.state.services[&name]);
    service.ports[0].vips.push(ip("192.0.2.102"));
    rig.state.services.insert(name, Arc::new(service));
    rig.publish();
}

#[test]
fn a_connection_goes_there_and_back_and_the_backend_sees_the_client() {
    for (client, vip) in [(CLIENT, VIP), (CLIENT_V6, "[2001:db8::1:0]:80")] {
        let mut rig = Rig::with_mode(Mode::Dnat);
        let sent = rig.forward(UPLINK, &Packet::tcp(client, vip).payload(b"hello").build());
        assert_checksums(&sent);
        assert_eq!(&sent[6..12], &CLUSTER_MAC.0);
        let (source, backend) = rig::ends(&sent);
        assert_eq!((source, backend.port(), rig::hop_limit(&sent)), (socket(client), 8080, 62));
        let back = rig.forward(CLUSTER, &between(backend, source).flags(SYN | ACK).payload(b"world").build());
        assert_checksums(&back);
        assert_eq!(rig::ends(&back), (socket(vip), socket(client)));
        assert_eq!((&back[0..6], &back[6..12]), (&ROUTER_MAC.0[..], &UPLINK_MAC.0[..]));
        let forged = between(backend, source).flags(ACK).build();
        assert_eq!(rig.put(UPLINK, &forged), Some(PacketOutcome::Drop(DropReason::SnatWrongPort)));
    }
}

#[test]
fn no_snat_address_is_needed() {
    let rig = Rig::with_mode(Mode::Dnat);
    let config = dataplane::Config { snat: Vec::new(), ..rig::config(1024) };
    let snapshot = dataplane::Compiler::new(config).compile(&rig.state, &rig.network, &rig.health, 0);
    let refused: Vec<_> = snapshot.refused().iter().map(|(name, _)| name.name.as_str()).collect();
    assert_eq!(refused, ["node-port"], "mode nat needs a SNAT address");
}

#[test]
fn mid_stream_packets_of_a_client_go_where_a_new_flow_would() {
    for flags in [ACK, ACK | tcp_flags::FIN, tcp_flags::RST] {
        let (mut first, mut restarted) = (Rig::with_mode(Mode::Dnat), Rig::with_mode(Mode::Dnat));
        for n in 0..20 {
            let client = format!("198.51.100.7:{}", 2000 + n);
            let before = first.forward(UPLINK, &Packet::tcp(&client, VIP).build());
            let after = restarted.forward(UPLINK, &Packet::tcp(&client, VIP).flags(flags).payload(b"data").build());
            assert_checksums(&after);
            assert_eq!(rig::ends(&before), rig::ends(&after));
        }
    }
}

#[test]
fn a_reply_without_a_flow_is_rewritten_where_only_one_frontend_leads_to_the_backend() {
    for (backend, client, vip) in
        [("10.0.0.12:8080", CLIENT, VIP), ("[fd00::12]:8080", CLIENT_V6, "[2001:db8::1:0]:80")].map(|(b, c, v)| (socket(b), c, v))
    {
        let mut rig = Rig::with_mode(Mode::Dnat);
        let reply = between(backend, socket(client)).flags(ACK).payload(b"data").build();
        assert_eq!(rig.put(UPLINK, &reply), Some(PacketOutcome::Drop(DropReason::SnatWrongPort)), "by the wrong port");
        let back = rig.forward(CLUSTER, &reply);
        assert_checksums(&back);
        assert_eq!(rig::ends(&back), (socket(vip), socket(client)));
        let there = rig.forward(UPLINK, &Packet::tcp(client, vip).flags(ACK).build());
        assert_eq!(rig::ends(&there), (socket(client), backend), "the client's packets follow that flow");
        let to_us = between(backend, SocketAddr::new(if backend.is_ipv4() { ip("10.0.0.2") } else { ip("fd00::2") }, 40_000));
        assert_eq!(
            rig.put(CLUSTER, &to_us.flags(SYN | ACK).build()),
            Some(PacketOutcome::Linux(CLUSTER)),
            "a probe's answer is Linux's"
        );
        let own = between(backend, SocketAddr::new(socket(client).ip(), 443));
        assert_eq!(rig.put(CLUSTER, &own.build()), Some(PacketOutcome::Linux(CLUSTER)), "a connection of the backend's own");
    }
}

#[test]
fn a_reply_without_a_flow_is_dropped_where_several_frontends_lead_to_the_backend() {
    let mut rig = Rig::with_mode(Mode::Dnat);
    second_vip(&mut rig);
    let reply = Packet::tcp("10.0.0.12:8080", CLIENT).flags(ACK).build();
    assert_eq!(rig.put(CLUSTER, &reply), Some(PacketOutcome::Drop(DropReason::NoFlow)));
    rig.set_mode("web", Mode::Nat);
    assert_eq!(rig.put(CLUSTER, &reply), Some(PacketOutcome::Linux(CLUSTER)), "the backend's mode has changed");
}

#[test]
fn a_stray_reset_of_a_backend_begins_no_flow() {
    let mut rig = Rig::with_mode(Mode::Dnat);
    let stray = Packet::tcp("10.0.0.12:8080", CLIENT).flags(tcp_flags::RST).build();
    assert_eq!(rig.put(CLUSTER, &stray), Some(PacketOutcome::Drop(DropReason::NoFlow)));
    assert_eq!(rig.counters.flows.get(), 0);
}

#[test]
fn a_packet_of_a_backend_to_an_address_that_no_client_has_begins_no_flow() {
    for destination in ["169.254.1.1:5555", "127.0.0.1:5555", "224.0.0.9:5555", "0.0.0.1:5555"] {
        let mut rig = Rig::with_mode(Mode::Dnat);
        let (_, backend) = rig::ends(&rig.forward(UPLINK, &Packet::tcp(CLIENT, VIP).build()));
        assert_eq!(
            rig.put(CLUSTER, &between(backend, socket(destination)).flags(ACK).build()),
            Some(PacketOutcome::Linux(CLUSTER))
        );
        assert_eq!(rig.counters.flows.get(), 1, "{destination}");
    }
}

/// Anyone can be named as the client of a packet of a backend. Only what the client sends is evidence of it.
#[test]
fn a_backend_that_sends_to_invented_clients_leaves_room_for_the_connections_of_others() {
    for v6 in [false, true] {
        let mut rig = Rig::with_flows(64);
        rig.set_mode("web", Mode::Dnat);
        rig.set_mode("dns", Mode::Dnat);
        let (web, dns) = if v6 { ("[fd00::12]:8080", "[fd00::12]:5353") } else { ("10.0.0.12:8080", "10.0.0.12:5353") };
        let vip = if v6 { "[2001:db8::1:0]:80" } else { VIP };
        let invented = |n: u16| if v6 { format!("[2001:db8:9::{n}]:7") } else { format!("203.0.113.{n}:7") };
        for n in 1..=100 {
            // Twice: the second is one of a flow that there is.
            for _ in 0..2 {
                // What would be an answer or an end in another flow comes first.
                let begins_with = [SYN | ACK, tcp_flags::FIN | ACK, ACK][usize::from(n % 3)];
                rig.put(CLUSTER, &Packet::tcp(web, &invented(n)).flags(begins_with).build());
                rig.put(CLUSTER, &Packet::tcp(web, &invented(n)).flags(ACK | tcp_flags::PSH).payload(b"x").build());
                rig.put(CLUSTER, &Packet::udp(dns, &invented(n)).payload(b"x").build());
                rig.put(CLUSTER, &Packet::sctp(web, &invented(n)).chunk(0xa1b2_c3d4, 0).build());
            }
        }
        rig.sent(UPLINK);
        rig.now += 2 * SECOND;
        // No more than the share of one of two Services.
        for n in 0..30 {
            let client = if v6 { format!("[2001:db8:1::7]:{}", 2000 + n) } else { format!("198.51.100.7:{}", 2000 + n) };
            assert_eq!(rig.put(UPLINK, &Packet::tcp(&client, vip).build()), Some(PacketOutcome::Forward(CLUSTER)));
            let (client, backend) = rig::ends(&rig.sent(CLUSTER).pop().unwrap());
            rig.forward(CLUSTER, &between(backend, client).flags(SYN | ACK).build());
            rig.forward(UPLINK, &Packet::tcp(&client.to_string(), vip).flags(ACK).build());
        }
        rig.sent(UPLINK);
        // What the backends began ends soon.
        for _ in 0..75 {
            rig.now += SECOND;
            rig.worker.poll(rig.now);
        }
        assert_eq!(rig.counters.flows.get(), 30);
    }
}

#[test]
fn what_a_backend_began_is_confirmed_by_the_packet_of_its_client() {
    let mut rig = Rig::with_mode(Mode::Dnat);
    let idle = |rig: &mut Rig, seconds| {
        for _ in 0..seconds {
            rig.now += SECOND;
            rig.worker.poll(rig.now);
        }
    };
    rig.forward(CLUSTER, &Packet::tcp("10.0.0.12:8080", CLIENT).flags(ACK | tcp_flags::PSH).payload(b"x").build());
    rig.forward(UPLINK, &Packet::tcp(CLIENT, VIP).flags(ACK).build());
    rig.forward(CLUSTER, &Packet::tcp("10.0.0.12:8080", "198.51.100.8:5").flags(ACK).build());
    idle(&mut rig, 45);
    assert_eq!(rig.counters.flows.get(), 1, "the other had no client");
    idle(&mut rig, 7_400);
    assert_eq!(rig.counters.flows.get(), 1);
}

#[test]
fn a_late_reply_of_a_backend_that_the_flow_left_is_dropped() {
    let mut rig = Rig::with_mode(Mode::Dnat);
    let (client, backend) = rig::ends(&rig.forward(UPLINK, &Packet::tcp(CLIENT, VIP).build()));
    let other = if backend.ip() == ip("10.0.0.11") { socket("10.0.0.12:8080") } else { socket("10.0.0.11:8080") };
    assert_eq!(rig.put(CLUSTER, &between(other, client).flags(ACK).build()), Some(PacketOutcome::Drop(DropReason::NoFlow)));
}

#[test]
fn of_two_flows_that_look_the_same_to_a_backend_the_established_one_stays() {
    let mut rig = Rig::with_mode(Mode::Dnat);
    second_vip(&mut rig);
    let name = ServiceName::new("default", "web");
    let mut service = Service::clone(&rig.state.services[&name]);
    service.ports[0].backends.truncate(1);
    rig.state.services.insert(name, Arc::new(service));
    rig.publish();
    let via = |vip: &str| Packet::tcp(CLIENT, &format!("{vip}:80"));
    let (client, backend) = rig::ends(&rig.forward(UPLINK, &via("192.0.2.100").build()));
    assert_eq!(rig.put(UPLINK, &via("192.0.2.102").build()), Some(PacketOutcome::Forward(CLUSTER)));
    let sent = rig.sent(CLUSTER);
    let flags: Vec<u8> = sent.iter().map(|frame| frame[47]).collect();
    assert_eq!(flags, [tcp_flags::RST, SYN], "the backend forgets the older handshake before it sees the new one");
    assert_eq!(rig.counters.flows.get(), 1, "the flow that was not established yet gave mode");
    let back = rig.forward(CLUSTER, &between(backend, client).flags(SYN | ACK).build());
    assert_eq!(rig::ends(&back).0, socket("192.0.2.102:80"));
    rig.forward(UPLINK, &via("192.0.2.102").flags(ACK).build());
    assert_eq!(rig.put(UPLINK, &via("192.0.2.100").build()), Some(PacketOutcome::Drop(DropReason::DnatPortInUse)));
    rig.forward(UPLINK, &via("192.0.2.102").flags(ACK | tcp_flags::FIN).build());
    let half_closed = rig.put(UPLINK, &via("192.0.2.100").build());
    assert_eq!(half_closed, Some(PacketOutcome::Drop(DropReason::DnatPortInUse)), "the backend may still send");
    rig.forward(CLUSTER, &between(backend, client).flags(ACK | tcp_flags::FIN).build());
    rig.forward(UPLINK, &via("192.0.2.100").build());
    assert_eq!(rig.counters.flows.get(), 1);
}

#[test]
fn a_packet_in_the_clients_name_to_a_second_frontend_ends_no_handshake_while_a_backend_is_free() {
    let mut rig = Rig::with_mode(Mode::Dnat);
    second_vip(&mut rig);
    for n in 0..30 {
        let client = format!("198.51.100.7:{}", 2000 + n);
        let via = |vip: &str| Packet::tcp(&client, &format!("{vip}:80"));
        let (source, backend) = rig::ends(&rig.forward(UPLINK, &via("192.0.2.100").build()));
        assert_ne!(rig::ends(&rig.forward(UPLINK, &via("192.0.2.102").build())).1, backend, "{client}");
        let back = rig.forward(CLUSTER, &between(backend, source).flags(SYN | ACK).build());
        assert_eq!(rig::ends(&back), (socket("192.0.2.100:80"), socket(&client)), "the handshake goes on");
    }
    assert_eq!(rig.counters.flows.get(), 60);
}

#[test]
fn a_client_that_uses_one_port_through_two_frontends_gets_another_backend_and_a_reason_when_none_is_left() {
    for (host, vips) in [
        ("198.51.100.7", ["192.0.2.100:80", "192.0.2.102:80"]),
        ("[2001:db8:1::7]", ["[2001:db8::1:0]:80", "[2001:db8::1:2]:80"]),
    ] {
        let mut rig = Rig::with_mode(Mode::Dnat);
        rig.change_service(&ServiceName::new("default", "web"), |web| {
            for (port, vip) in web.ports.iter_mut().zip(["192.0.2.102", "2001:db8::1:2"]) {
                port.vips.push(ip(vip));
            }
        });
        for n in 0..30 {
            let client = format!("{host}:{}", 2000 + n);
            let backends: Vec<_> = vips
                .iter()
                .map(|vip| {
                    let (source, backend) = rig::ends(&rig.forward(UPLINK, &Packet::tcp(&client, vip).build()));
                    let back = rig.forward(CLUSTER, &between(backend, source).flags(SYN | ACK).build());
                    assert_eq!(rig::ends(&back), (socket(vip), socket(&client)));
                    rig.forward(UPLINK, &Packet::tcp(&client, vip).flags(ACK).build());
                    backend
                })
                .collect();
            assert_ne!(backends[0], backends[1], "two flows that look the same to a backend");
            for (vip, backend) in vips.iter().zip(&backends) {
                let data = rig.forward(UPLINK, &Packet::tcp(&client, vip).flags(ACK).payload(b"x").build());
                assert_eq!(rig::ends(&data).1, *backend);
            }
        }
        assert_eq!(rig.drops(DropReason::DnatPortInUse) + rig.drops(DropReason::SnatExhausted), 0);
        // With as many frontends as backends and one more, none is left for the last.
        rig.change_service(&ServiceName::new("default", "web"), |web| {
            web.ports.iter_mut().take(2).for_each(|port| port.backends.truncate(2));
            for (port, vip) in web.ports.iter_mut().zip(["192.0.2.103", "2001:db8::1:3"]) {
                port.vips.push(ip(vip));
            }
        });
        let client = format!("{host}:999");
        for vip in vips {
            let (source, backend) = rig::ends(&rig.forward(UPLINK, &Packet::tcp(&client, vip).build()));
            rig.forward(CLUSTER, &between(backend, source).flags(SYN | ACK).build());
            rig.forward(UPLINK, &Packet::tcp(&client, vip).flags(ACK).build());
        }
        let third = if host.starts_with('[') { "[2001:db8::1:3]:80" } else { "192.0.2.103:80" };
        let outcome = rig.put(UPLINK, &Packet::tcp(&client, third).build());
        assert_eq!(outcome, Some(PacketOutcome::Drop(DropReason::DnatPortInUse)));
        assert_eq!(rig.service_drops("web", DropReason::DnatPortInUse), 1);
    }
}

#[test]
fn a_stream_of_udp_from_a_port_that_has_another_one_gets_another_backend() {
    let mut rig = Rig::with_mode(Mode::Dnat);
    let vips = ["192.0.2.101:53", "192.0.2.103:53"];
    rig.set_mode("dns", Mode::Dnat);
    rig.change_service(&ServiceName::new("default", "dns"), |dns| {
        let port = dns.ports.iter_mut().find(|port| port.vips.contains(&ip("192.0.2.101"))).unwrap();
        port.vips.push(ip("192.0.2.103"));
    });
    for n in 0..30 {
        let client = format!("198.51.100.7:{}", 2000 + n);
        let backends = vips.map(|vip| {
            let ask = Packet::udp(&client, vip).payload(b"?").build();
            let (source, backend) = rig::ends(&rig.forward(UPLINK, &ask));
            let answer = Packet::udp(&backend.to_string(), &source.to_string()).payload(b"!").build();
            assert_eq!(rig::ends(&rig.forward(CLUSTER, &answer)), (socket(vip), socket(&client)));
            assert_eq!(rig::ends(&rig.forward(UPLINK, &ask)).1, backend);
            backend
        });
        assert_ne!(backends[0], backends[1]);
    }
    assert_eq!(rig.drops(DropReason::DnatPortInUse), 0);
}

#[test]
fn flows_end_when_they_are_idle_and_leave_nothing_behind() {
    let mut rig = Rig::with_mode(Mode::Dnat);
    rig.forward(UPLINK, &Packet::udp(CLIENT, "192.0.2.101:53").payload(b"?").build());
    assert_eq!(rig.counters.flows.get(), 1);
    rig.now += 60 * SECOND;
    rig.settle();
    assert_eq!(rig.counters.flows.get(), 0);
    let sent = rig.forward(UPLINK, &Packet::udp(CLIENT, "192.0.2.101:53").payload(b"?").build());
    assert_checksums(&sent);
}

#[test]
fn a_backend_gets_icmp_errors_from_the_gateway_for_packets_that_cannot_reach_the_client() {
    for (client, vip, gateway) in [(CLIENT, VIP, "10.0.0.2"), (CLIENT_V6, "[2001:db8::1:0]:80", "fd00::2")] {
        let mut rig = Rig::with_mode(Mode::Dnat);
        let (client, backend) = rig::ends(&rig.forward(UPLINK, &Packet::tcp(client, vip).build()));
        let reply = || between(backend, client).flags(ACK);
        for packet in [reply().hop_limit(1), reply().payload(&[0; 1600])] {
            assert_eq!(rig.put(CLUSTER, &packet.build()), Some(PacketOutcome::Reply(CLUSTER)));
            let error = rig.sent(CLUSTER).remove(0);
            assert_checksums(&error);
            let (source, destination) = rig::ends(&error);
            assert_eq!((source.ip(), destination.ip()), (ip(gateway), backend.ip()), "not in the client's name");
        }
    }
}

//! Short connections that the server closes, and the ports that they leave in TIME_WAIT at the backend (FORWARDING 6).

use std::net::{Ipv4Addr, SocketAddr};

use dataplane::tcp_flags;
use dataplane::testing::Packet;

use crate::peers::{ROUND_TRIP, World, frame};
use crate::rig::{CLUSTER, Rig, SECOND, UPLINK, ends};

const VIP: &str = "192.0.2.100:80";

fn client(n: u32) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::from(0xcb00_7100 + n / 50_000), 2_000 + u16::try_from(n % 50_000).unwrap()))
}

/// A client with a port each: many clients, none of which has a large share.
fn alone(n: u32) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::from(0x0b00_0000 + n), 2_000))
}

#[test]
fn a_hundred_thousand_short_connections_through_one_backend_and_two_addresses_repeat_no_syn() {
    let mut world = World::new(Rig::with_snat(1 << 20, &["10.0.0.3", "10.0.0.4"]), VIP);
    world.rig.keep_backends("web", &[11]);
    for n in 0..100_000 {
        world.connect(client(n), n, b'a');
        // 5,000 connections a second: all begin within 20 s, so no port rests long enough to be reused.
        if n % 100 == 0 {
            world.pass(SECOND / 50);
        }
    }
    world.pass(ROUND_TRIP);
    world.pass(ROUND_TRIP);
    assert_eq!(world.backends.unanswered, 0, "every SYN was answered at once");
    assert!(world.connections.values().all(|c| c.answers == 1 && !c.broken));
    let counters = &world.rig.counters;
    assert_eq!((counters.snat_port_reused_early.get(), counters.reclaimed.get()), (0, 0));
}

#[test]
fn through_one_address_the_ports_of_the_oldest_connections_are_used_again_first_and_counted() {
    let mut rig = Rig::with_flows(1 << 20);
    rig.keep_backends("web", &[11]);
    let vip = VIP.parse().unwrap();
    let mut ports = Vec::new();
    for n in 0..64_512 {
        let (snat, backend) = ends(&rig.forward(UPLINK, &frame(alone(n), vip, tcp_flags::SYN, n, 0)));
        rig.forward(CLUSTER, &frame(backend, snat, tcp_flags::SYN | tcp_flags::ACK, 9, n + 1));
        rig.forward(UPLINK, &frame(alone(n), vip, tcp_flags::ACK, n + 1, 10));
        rig.forward(CLUSTER, &frame(backend, snat, tcp_flags::FIN | tcp_flags::ACK, 10, n + 1));
        // Each connection ends when its client returns: a new SYN on a closing flow, at 8,000 a second.
        ports.push(snat.port());
    }
    for n in 0..64_512 {
        rig.now += SECOND / 8_000;
        // A SYN on a closing flow ends it, so that its port rests; this SYN creates no flow, since its hop limit is
        // used up.
        let refused = Packet::tcp(&alone(n).to_string(), VIP).hop_limit(1).build();
        rig.put(UPLINK, &refused);
        rig.sent(UPLINK);
    }
    assert_eq!((rig.counters.flows.get(), rig.counters.snat_port_reused_early.get()), (0, 0));
    for n in 0..35_488u32 {
        let (snat, _) = ends(&rig.forward(UPLINK, &frame(alone(100_000 + n), vip, tcp_flags::SYN, n, 0)));
        assert_eq!(snat.port(), ports[n as usize], "connection {n} after all ports were used once");
    }
    assert_eq!(rig.counters.snat_port_reused_early.get(), 35_488);
    rig.now += 60 * SECOND;
    rig.forward(UPLINK, &frame(alone(200_000), vip, tcp_flags::SYN, 1, 0));
    assert_eq!(rig.counters.snat_port_reused_early.get(), 35_488, "use of a rested port is not early");
}

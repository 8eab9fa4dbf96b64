//! Every frontend of a service counts its own traffic, though they lead to the same backends: other ports, several
//! VIPs, node ports.

use std::sync::Arc;

use dataplane::testing::Packet;
use dataplane::{FrontendTotals, SavedAt, SavedFlows, tcp_flags};
use proto::{Mode, Service, ServiceName, State};

use crate::rig::{self, CLUSTER, Rig, SECOND, UPLINK, config, ends, ip, network};

const ACK: u8 = tcp_flags::ACK;
const NODE_PORT: &str = "192.0.2.2:30081";
/// The TCP frontends of [`state`] in the order of their ports.
const FRONTENDS: [&str; 5] = ["192.0.2.100:80", "192.0.2.105:80", "[2001:db8::1:0]:80", "192.0.2.100:81", NODE_PORT];

/// The Service `web` of the rig at two VIPs of IPv4, and with another port to the same ports of its backends, which has
/// a node port.
fn state(mode: Mode) -> State {
    let mut state = rig::state();
    let web = state.services.get_mut(&ServiceName::new("default", "web")).unwrap();
    let mut changed = Service { mode, ..Service::clone(web) };
    changed.ports[0].vips.push(ip("192.0.2.105"));
    let mut second = changed.ports[0].clone();
    (second.port, second.node_port, second.vips) = (81, Some(30081), vec![ip("192.0.2.100")]);
    changed.ports.push(second);
    *web = Arc::new(changed);
    state
}

fn gateway(mode: Mode) -> Rig {
    let mut rig = Rig::before_state(1024);
    (rig.state, rig.network) = (state(mode), network());
    rig.publish();
    rig
}

/// What each TCP frontend of `web` counted, in the order of [`FRONTENDS`].
fn totals(rig: &Rig) -> Vec<FrontendTotals> {
    let snapshot = rig.compiler.initial();
    let view = &snapshot.services()[&ServiceName::new("default", "web")];
    let tcp = view.frontends.iter().filter(|frontend| frontend.protocol == proto::Protocol::Tcp);
    let workers = [Arc::clone(&rig.counters)];
    let (names, totals): (Vec<_>, Vec<_>) =
        tcp.map(|frontend| (frontend.address.to_string(), frontend.counters.totals(&workers))).unzip();
    assert_eq!(names, FRONTENDS.map(|at| at.replace("192.0.2.2:", "node port ")));
    totals
}

/// Packets towards backends, packets towards clients, flows, new flows.
fn counts(rig: &Rig) -> Vec<[u64; 4]> {
    totals(rig).iter().map(|of| [of.packets_to_backends, of.packets_to_clients, of.flows, of.new_flows]).collect()
}

fn client(frontend: &str, n: usize) -> String {
    if frontend.starts_with('[') { format!("[2001:db8:9::7]:{}", 1000 + n) } else { format!("198.51.100.7:{}", 1000 + n) }
}

/// Connection `n` through a frontend, and this many packets of the client in it.
fn connect(rig: &mut Rig, frontend: &str, n: usize, packets: usize) {
    let client = client(frontend, n);
    let (snat, backend) = ends(&rig.forward(UPLINK, &Packet::tcp(&client, frontend).build()));
    let syn_ack = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | ACK);
    rig.forward(CLUSTER, &syn_ack.build());
    for _ in 0..packets {
        rig.forward(UPLINK, &Packet::tcp(&client, frontend).flags(ACK).build());
    }
}

#[test]
fn ports_vips_and_node_ports_count_what_came_through_them() {
    let mut rig = gateway(Mode::Nat);
    assert_eq!(totals(&rig), [FrontendTotals::default(); 5]);
    for (n, frontend) in FRONTENDS.iter().enumerate() {
        for connection in 0..=n {
            connect(&mut rig, frontend, connection, 3);
        }
    }
    let expected: Vec<_> = (1..=5).map(|n| [4 * n, n, n, n]).collect();
    assert_eq!(counts(&rig), expected);
    let bytes: Vec<_> = totals(&rig).iter().map(|of| (of.bytes_to_backends, of.bytes_to_clients)).collect();
    assert_eq!(bytes, [(160, 40), (320, 80), (3 * 240, 3 * 60), (640, 160), (800, 200)]);
    let of_backends: u64 = (0..100).map(|slot| rig.counters.sum_of(slot, |of| of.packets(false))).sum();
    assert_eq!(of_backends, 4 * 15, "the backends' counts are the same packets");

    // A connection that is reset, and one that never comes about.
    let reset = Packet::tcp(&client(NODE_PORT, 0), NODE_PORT).flags(tcp_flags::RST | ACK);
    rig.forward(UPLINK, &reset.build());
    rig.forward(UPLINK, &Packet::tcp(&client(FRONTENDS[1], 99), FRONTENDS[1]).build());
    for _ in 0..255 * 4 {
        rig.now += SECOND / 4;
        rig.worker.poll(rig.now);
    }
    let ends: Vec<_> = totals(&rig).iter().map(|of| (of.reset, of.failed, of.flows)).collect();
    assert_eq!(ends, [(0, 0, 1), (0, 1, 2), (0, 0, 3), (0, 0, 4), (1, 0, 4)]);
}

#[test]
fn totals_stay_when_backends_go_and_when_a_frontend_goes_the_others_stay() {
    let mut rig = gateway(Mode::Nat);
    for (n, frontend) in FRONTENDS.iter().enumerate() {
        (0..4).for_each(|connection| connect(&mut rig, frontend, 10 * n + connection, 1));
    }
    let before = totals(&rig);
    let web = ServiceName::new("default", "web");
    rig.change_service(&web, |service| {
        service.drain_timeout = std::time::Duration::ZERO;
        service.ports.iter_mut().for_each(|port| port.backends.truncate(1));
    });
    rig.publish();
    let gone: Vec<_> = totals(&rig).iter().map(|of| FrontendTotals { flows: 0, ..*of }).collect();
    assert_eq!(gone, before.iter().map(|of| FrontendTotals { flows: 0, ..*of }).collect::<Vec<_>>());
    // Other backends in their slots count from where the frontends are.
    rig.change_service(&web, |service| service.ports = state(Mode::Nat).services[&web].ports.clone());
    assert_eq!(totals(&rig).iter().map(|of| of.new_flows).collect::<Vec<_>>(), [4; 5]);
    connect(&mut rig, FRONTENDS[0], 77, 1);
    assert_eq!(totals(&rig).iter().map(|of| of.new_flows).collect::<Vec<_>>(), [5, 4, 4, 4, 4]);

    rig.change_service(&web, |service| {
        service.ports[0].vips.pop();
    });
    let snapshot = rig.compiler.initial();
    let new_flows = |address: &str| {
        let frontend = snapshot.services()[&web].frontends.iter().find(|of| of.address.to_string() == address);
        frontend.map(|of| of.counters.totals(&[Arc::clone(&rig.counters)]).new_flows)
    };
    assert_eq!(FRONTENDS[..2].iter().map(|at| new_flows(at)).collect::<Vec<_>>(), [Some(5), None]);
}

#[test]
fn one_way_modes_count_by_frontend_with_a_flow_and_without_room_for_one() {
    for max_flows in [1024, 0] {
        let mut rig = Rig::with_config(config(max_flows.max(1)));
        (rig.state, rig.network) = (state(Mode::Dsr), network());
        rig.set_backend_ports();
        rig.publish();
        if max_flows == 0 {
            rig.forward(UPLINK, &Packet::tcp("198.51.100.9:9", FRONTENDS[0]).build());
        }
        let before = totals(&rig);
        for (n, frontend) in FRONTENDS[..4].iter().enumerate() {
            for connection in 0..=n {
                let client = client(frontend, connection);
                rig.forward(UPLINK, &Packet::tcp(&client, frontend).build());
                rig.forward(UPLINK, &Packet::tcp(&client, frontend).flags(ACK).build());
            }
        }
        let packets = totals(&rig).into_iter().zip(before).map(|(now, then)| now.packets_to_backends - then.packets_to_backends);
        assert_eq!(packets.collect::<Vec<_>>(), [2, 4, 6, 8, 0], "{max_flows}");
    }
}

#[test]
fn restored_flows_go_on_counting_for_their_frontends() {
    let mut old = gateway(Mode::Nat);
    FRONTENDS.iter().enumerate().for_each(|(n, frontend)| connect(&mut old, frontend, n, 1));
    let at = SavedAt { boot: [5; 16], boottime_ns: SECOND };
    let part = old.worker.save(old.now);
    let header = SavedFlows::header(7, true, at, std::slice::from_ref(&part));
    let mut new = Rig::before_state(1024);
    new.now = old.now + SECOND;
    let saved = SavedFlows::read([header, part].concat(), at, new.now).unwrap();
    new.worker.restore(Arc::new(saved));
    (new.state, new.network) = (state(Mode::Nat), network());
    new.publish();
    for (n, frontend) in FRONTENDS.iter().enumerate() {
        for _ in 0..=n {
            new.forward(UPLINK, &Packet::tcp(&client(frontend, n), frontend).flags(ACK).build());
        }
    }
    assert_eq!(counts(&new), [[1, 0, 1, 0], [2, 0, 1, 0], [3, 0, 1, 0], [4, 0, 1, 0], [5, 0, 1, 0]]);
}

//! What changes while the engine forwards: SNAT addresses, addresses of node ports, and limits of flows.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use dataplane::testing::Packet;
use dataplane::{FlowLimits, PacketOutcome, Tunables, tcp_flags};

use crate::rig::{CLUSTER, Rig, SECOND, UPLINK, config, ends, ip};

const VIP: &str = "192.0.2.100:80";
const ACK: u8 = tcp_flags::ACK;

fn client(n: u16) -> String {
    format!("198.51.100.7:{}", 1000 + n)
}

/// Opens a connection; returns its SNAT address with the port, and its backend.
fn establish(rig: &mut Rig, client: &str) -> (SocketAddr, SocketAddr) {
    let (snat, backend) = ends(&rig.forward(UPLINK, &Packet::tcp(client, VIP).build()));
    let syn_ack = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | ACK);
    rig.forward(CLUSTER, &syn_ack.build());
    rig.forward(UPLINK, &Packet::tcp(client, VIP).flags(ACK).build());
    (snat, backend)
}

/// Changes the configuration of a rig with these limits.
fn tune(rig: &mut Rig, change: impl FnOnce(&mut Tunables)) {
    let mut tunables = config(1024).tunables();
    change(&mut tunables);
    rig.compiler.tune(&tunables);
    rig.publish();
}

#[test]
fn another_snat_address_serves_new_flows_and_old_flows_keep_theirs() {
    let mut rig = Rig::new();
    let before: Vec<_> = (0..50).map(|n| establish(&mut rig, &client(n))).collect();
    tune(&mut rig, |tunables| tunables.snat.push(ip("10.0.0.4")));
    for (n, (snat, backend)) in (0..).zip(&before) {
        let onwards = rig.forward(UPLINK, &Packet::tcp(&client(n), VIP).flags(ACK).build());
        assert_eq!(ends(&onwards), (*snat, *backend), "connection {n}");
        let reply = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(ACK);
        assert_eq!(ends(&rig.forward(CLUSTER, &reply.build())), (VIP.parse().unwrap(), client(n).parse().unwrap()));
    }
    let used: BTreeSet<IpAddr> = (50..150).map(|n| establish(&mut rig, &client(n)).0.ip()).collect();
    assert_eq!(used, BTreeSet::from([ip("10.0.0.3"), ip("10.0.0.4")]));
}

#[test]
fn node_ports_are_served_at_the_new_addresses_alone() {
    let mut rig = Rig::new();
    rig.network.addresses.push(ip("192.0.2.3"));
    rig.publish();
    let to = |address: &str| Packet::tcp(&client(0), &format!("{address}:30080")).build();
    let (old, new) = (to("192.0.2.2"), to("192.0.2.3"));
    let forwarded = Some(PacketOutcome::Forward(CLUSTER));
    assert_ne!(rig.put(UPLINK, &new), forwarded);
    tune(&mut rig, |tunables| tunables.node_port_addresses = vec![ip("192.0.2.3")]);
    assert_eq!(rig.put(UPLINK, &new), forwarded);
    assert_ne!(rig.put(UPLINK, &old), forwarded);
}

#[test]
fn new_limits_hold_for_flows_that_exist_and_the_size_of_tables_stays() {
    let mut rig = Rig::with_flows(64);
    rig.keep_service("web");
    establish(&mut rig, &client(0));
    let idle = |rig: &mut Rig, seconds: u64| {
        for _ in 0..seconds * 4 {
            rig.now += SECOND / 4;
            rig.worker.poll(rig.now);
        }
        rig.counters.flows.get()
    };
    assert_eq!(idle(&mut rig, 120), 1);
    tune(&mut rig, |tunables| {
        let limits = tunables.flows.clone();
        tunables.flows = FlowLimits { tcp_established: Duration::from_secs(60), max_per_worker: 8, ..limits };
    });
    assert_eq!(idle(&mut rig, 90), 0, "idle for longer than the new limit");
    for n in 0..64 {
        establish(&mut rig, &client(n));
    }
    assert_eq!(rig.counters.flows.get(), 64);
}

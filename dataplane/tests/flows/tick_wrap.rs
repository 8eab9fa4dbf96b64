//! The engine across the wrap of the tick (2^32 of 134 ms): idle limits, the order in which flows yield, and everything
//! else that is measured in ticks.

use std::net::SocketAddr;

use dataplane::testing::Packet;
use dataplane::{DropReason, PacketOutcome, PortIndex, tcp_flags};
use proto::{Mode, Protocol};

use crate::rig::{self, CLUSTER, Rig, SECOND, UPLINK, ends};

const VIP: &str = "192.0.2.100:80";
const DNS: &str = "192.0.2.101:53";
const ACK: u8 = tcp_flags::ACK;
const SYN: u8 = tcp_flags::SYN;
/// Time at which the tick wraps to 0, ns.
const WRAP: u64 = 1 << 59;

/// A gateway that was started this many seconds before the wrap.
fn gateway(seconds: u64, max_flows: u32, mode: Mode) -> Rig {
    let mut rig = Rig::before_state(max_flows);
    rig.now = WRAP - seconds * SECOND;
    (rig.state, rig.network) = (rig::state(), rig::network());
    rig.set_mode("web", mode);
    rig.set_mode("dns", mode);
    rig
}

/// Polls until this many seconds after the wrap; negative values are before it.
fn idle_until(rig: &mut Rig, seconds: i64) {
    let until = WRAP.checked_add_signed(seconds * i64::try_from(SECOND).unwrap()).unwrap();
    while rig.now < until {
        rig.now += SECOND / 4;
        rig.worker.poll(rig.now);
    }
}

fn reply(rig: &mut Rig, (snat, backend): (SocketAddr, SocketAddr)) {
    rig.forward(CLUSTER, &Packet::udp(&backend.to_string(), &snat.to_string()).build());
}

fn ask(rig: &mut Rig, client: &str) -> (SocketAddr, SocketAddr) {
    ends(&rig.forward(UPLINK, &Packet::udp(client, DNS).build()))
}

fn count(rig: &Rig) -> u64 {
    rig.counters.flows.get()
}

#[test]
fn flows_end_by_their_limits_and_no_sooner() {
    let mut rig = gateway(40, 64, Mode::Nat);
    idle_until(&mut rig, -8);
    let (snat, backend) = ends(&rig.forward(UPLINK, &Packet::tcp("198.51.100.7:1", VIP).build()));
    rig.forward(CLUSTER, &Packet::tcp(&backend.to_string(), &snat.to_string()).flags(SYN | ACK).build());
    rig.forward(UPLINK, &Packet::tcp("198.51.100.7:1", VIP).flags(ACK).build());
    rig.forward(UPLINK, &Packet::tcp("198.51.100.7:2", VIP).build());
    let exchange = ask(&mut rig, "198.51.100.7:3");
    reply(&mut rig, exchange);
    let stream = ask(&mut rig, "198.51.100.7:4");
    reply(&mut rig, stream);
    ask(&mut rig, "198.51.100.7:4");
    assert_eq!(count(&rig), 4);
    idle_until(&mut rig, 1);
    assert_eq!(count(&rig), 4, "all are as young as they were");
    idle_until(&mut rig, 13);
    assert_eq!(count(&rig), 4);
    idle_until(&mut rig, 34);
    assert_eq!(count(&rig), 2, "the exchange has ended, and the connection that never opened");
    idle_until(&mut rig, 105);
    assert_eq!(count(&rig), 2);
    idle_until(&mut rig, 124);
    assert_eq!(count(&rig), 1, "and the stream");
    rig.forward(UPLINK, &Packet::tcp("198.51.100.7:1", VIP).flags(ACK).build());
}

#[test]
fn a_gateway_that_starts_shortly_before_the_wrap_sweeps_its_flows() {
    let mut rig = gateway(1_000, 64, Mode::Nat);
    ask(&mut rig, "198.51.100.7:1");
    idle_until(&mut rig, -900);
    assert_eq!(count(&rig), 0);
}

#[test]
fn the_oldest_yields_though_its_number_is_the_highest() {
    let mut rig = gateway(20, 4, Mode::Nat);
    idle_until(&mut rig, -2);
    let syn = |n: u8| Packet::tcp(&format!("198.51.100.{n}:1"), VIP).build();
    let first = ends(&rig.forward(UPLINK, &syn(1)));
    idle_until(&mut rig, 1);
    (2..=4).for_each(|n| drop(rig.forward(UPLINK, &syn(n))));
    rig.put(UPLINK, &syn(5));
    assert_eq!(ends(&rig.sent(CLUSTER)[0]), first, "it is reset");
    assert_eq!(rig.counters.reclaimed.get(), 1);
    let v6 = Packet::tcp("[2001:db8:7::7]:1", "[2001:db8::1:0]:80").build();
    idle_until(&mut rig, 2);
    assert_eq!(rig.put(UPLINK, &v6), Some(PacketOutcome::Forward(CLUSTER)));
}

#[test]
fn a_stream_leaves_a_dead_backend_and_a_one_way_flow_is_confirmed() {
    let mut rig = gateway(20, 64, Mode::Nat);
    let seen = ask(&mut rig, "198.51.100.7:1");
    reply(&mut rig, seen);
    ask(&mut rig, "198.51.100.7:1");
    rig.health.failing.insert((Protocol::Udp, seen.1));
    idle_until(&mut rig, -6);
    rig.publish(); // which takes 5 s
    idle_until(&mut rig, 0);
    rig.now -= SECOND / 4;
    assert_eq!(ask(&mut rig, "198.51.100.7:1"), seen);
    idle_until(&mut rig, 1);
    assert_ne!(ask(&mut rig, "198.51.100.7:1").1, seen.1);

    let mut rig = gateway(20, 64, Mode::Dsr);
    idle_until(&mut rig, -1);
    for second in [0, 1] {
        rig.forward(UPLINK, &Packet::tcp("198.51.100.7:1", VIP).flags(if second == 0 { SYN } else { ACK }).build());
        idle_until(&mut rig, second);
    }
    rig.forward(UPLINK, &Packet::tcp("198.51.100.7:1", VIP).flags(ACK).build());
    idle_until(&mut rig, 60);
    assert_eq!(count(&rig), 1, "it is established: one that opens ends after 30 s");
    let at: PortIndex = UPLINK;
    assert_eq!(rig.put(at, &Packet::tcp("198.51.100.7:1", VIP).flags(ACK).build()), Some(PacketOutcome::Forward(CLUSTER)));
    assert_eq!(rig.drops(DropReason::NoFlow), 0);
}

//! Where the processor has AVX2, the fast way works on eight packets at a time. It comes to the same as one packet at a
//! time: the same bytes in the same order, the same counters,
//! flows, records and observed packets.

use std::net::SocketAddr;
use std::sync::Arc;

use dataplane::flow::{FlowRecords, FlowView, Tick};
use dataplane::forward::{About, FamilyInquiry, Inquired};
use dataplane::stats::BackendCounters;
use dataplane::testing::{Packet, Segment};
use dataplane::{BURST, Mac, Neighbour, Route, tcp_flags};
use proptest::prelude::*;
use proto::Mode;

use crate::rig::{CLUSTER, Rig, UPLINK, ends, ip};

const ACK: u8 = tcp_flags::ACK;

/// Known flows of three clients, the last two of UDP.
const FLOWS: [(&str, &str); 6] = [
    ("198.51.100.7:5001", "192.0.2.100:80"),
    ("198.51.100.7:5002", "192.0.2.100:80"),
    ("203.0.113.9:5001", "192.0.2.100:80"),
    ("192.0.2.10:5004", "192.0.2.100:80"),
    ("198.51.100.7:5005", "192.0.2.101:53"),
    ("203.0.113.9:5006", "192.0.2.101:53"),
];
const FIRST_OF_UDP: usize = 4;

/// What a packet has that few have.
#[derive(Clone, Copy, Debug)]
enum Oddity {
    None,
    Fin,
    WrongHeaderChecksum,
    WrongTransportChecksum,
    Fragment,
    LastHop,
    OtherStation,
    TooLong,
    UnknownFlow,
    NotIp,
    /// Shorter than the headers of TCP.
    Short,
    /// A TCP header that claims to be longer than the packet.
    TornHeader,
}

const ODDITIES: [Oddity; 11] = [
    Oddity::Fin,
    Oddity::WrongHeaderChecksum,
    Oddity::WrongTransportChecksum,
    Oddity::Fragment,
    Oddity::LastHop,
    Oddity::OtherStation,
    Oddity::TooLong,
    Oddity::UnknownFlow,
    Oddity::NotIp,
    Oddity::Short,
    Oddity::TornHeader,
];

#[derive(Clone, Copy, Debug)]
struct Sent {
    flow: usize,
    payload: usize,
    padding: usize,
    hop_limit: u8,
    dont_fragment: bool,
    /// Of UDP.
    checksum: bool,
    oddity: Oddity,
}

fn sent() -> impl Strategy<Value = Sent> {
    let oddity = prop_oneof![40 => Just(Oddity::None), 1 => prop::sample::select(ODDITIES.to_vec())];
    (0..FLOWS.len(), 0..80usize, 0..20usize, 2..=255u8, any::<bool>(), any::<bool>(), oddity).prop_map(
        |(flow, payload, padding, hop_limit, dont_fragment, checksum, oddity)| Sent {
            flow,
            payload,
            padding,
            hop_limit,
            dont_fragment,
            checksum,
            oddity,
        },
    )
}

fn packet(flow: usize, (from, to): (SocketAddr, SocketAddr), flags: u8, checksum: bool) -> Packet {
    let ports = [from.port(), to.port()];
    let segment = match flow < FIRST_OF_UDP {
        true => Segment::Tcp { ports, flags, sequence: 1_000, acknowledgement: 1_001 },
        false => Segment::Udp { ports, checksum },
    };
    Packet::between(from.ip(), to.ip(), segment)
}

/// The frame of a packet between these ends, of which the first bytes after the Ethernet header are those of IPv4.
fn frame(sent: Sent, ends: (SocketAddr, SocketAddr), may_fragment: bool) -> Vec<u8> {
    let flags = if matches!(sent.oddity, Oddity::Fin) { ACK | tcp_flags::FIN } else { ACK };
    let mut packet = packet(sent.flow, ends, flags, sent.checksum);
    if matches!(sent.oddity, Oddity::UnknownFlow) {
        packet.source = ip("198.51.100.200");
    }
    packet.payload = (0..sent.payload).map(|n| u8::try_from(n).unwrap()).collect();
    if matches!(sent.oddity, Oddity::TooLong) {
        packet.payload.resize(1480, 0);
    }
    packet.padding = sent.padding;
    packet.hop_limit = if matches!(sent.oddity, Oddity::LastHop) { 1 } else { sent.hop_limit };
    packet.fragmentation = match sent.oddity {
        Oddity::Fragment => 0x2000,
        _ if sent.dont_fragment || !may_fragment => 0x4000,
        _ => 0,
    };
    let mut frame = packet.build();
    match sent.oddity {
        Oddity::WrongHeaderChecksum => frame[24] ^= 1,
        Oddity::WrongTransportChecksum => frame[if sent.flow < FIRST_OF_UDP { 51 } else { 41 }] ^= 1,
        Oddity::OtherStation => frame[5] ^= 1,
        Oddity::NotIp => frame[12..14].copy_from_slice(&[0x88, 0xcc]),
        Oddity::Short => frame.truncate(50),
        Oddity::TornHeader if sent.flow < FIRST_OF_UDP => frame[46] = 0xf0,
        _ => {}
    }
    frame
}

/// A gateway with the known flows; the ends of packets of each, in the direction to the backend or from it; and the records
/// of flows.
fn gateway(mode: Mode, routed: bool, by_eight: bool, replies: bool) -> (Rig, Vec<(SocketAddr, SocketAddr)>, Arc<FlowRecords>) {
    let mut rig = Rig::with_mode(mode);
    let records = rig.record(64);
    if !by_eight {
        rig.worker.forgo_vectors();
    }
    for (n, router) in [(1, "10.0.0.71"), (2, "10.0.0.72")].into_iter().filter(|_| routed) {
        let route = Route { to: "10.0.0.8/29".parse().unwrap(), via: Some(ip(router)), link: CLUSTER.into(), weight: 1 };
        rig.network.routes.push(route);
        let mac = Mac([2, 0, 0, 0, 2, n]);
        rig.network.neighbours.push(Neighbour { link: CLUSTER.into(), address: ip(router), mac });
    }
    rig.publish();
    let establish = |(flow, (client, vip)): (usize, (&str, &str))| {
        let to_backend: (SocketAddr, SocketAddr) = (client.parse().unwrap(), vip.parse().unwrap());
        let sent = rig.forward(UPLINK, &packet(flow, to_backend, tcp_flags::SYN, true).build());
        let (snat, backend) = ends(&sent);
        rig.forward(CLUSTER, &packet(flow, (backend, snat), tcp_flags::SYN | ACK, true).build());
        rig.forward(UPLINK, &packet(flow, to_backend, ACK, true).build());
        rig.forward(CLUSTER, &packet(flow, (backend, snat), ACK, true).build());
        if replies { (backend, snat) } else { to_backend }
    };
    let ends = FLOWS.into_iter().enumerate().map(establish).collect();
    (rig, ends, records)
}

/// The flows as they are now, with the time since their last packets.
fn flows(rig: &mut Rig) -> Vec<FlowView> {
    let answer = rig.ask(Inquired::V4(FamilyInquiry::new(About::Flows { from: 0 })));
    let Inquired::V4(answered) = &answer.inquired else { panic!("an answer of the other family") };
    answered.flows.iter().map(|flow| FlowView::of(flow, Tick::at(answer.now_ns))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    #[test]
    fn eight_packets_at_a_time_come_to_the_same_as_one_at_a_time(
        mode in prop::sample::select(vec![Mode::Nat, Mode::Dnat]),
        [routed, replies, may_fragment, divided] in any::<[bool; 4]>(),
        packets in prop::collection::vec(sent(), 8..=BURST),
        seconds in 0..3u64,
    ) {
        let [by_eight, one_by_one] = [true, false].map(|by_eight| {
            let (mut rig, ends, records) = gateway(mode, routed, by_eight, replies);
            if divided {
                rig.worker.divide_bursts();
            }
            rig.now += seconds * crate::rig::SECOND;
            let from = if replies { CLUSTER } else { UPLINK };
            // The second burst finds what the first one left to be remembered.
            let bursts = [0, 1].map(|_| {
                for (id, sent) in (1..).zip(&packets) {
                    rig.arrive(from, &frame(*sent, ends[sent.flow], may_fragment), id);
                }
                rig.worker.poll(rig.now);
                [rig.sent(UPLINK), rig.sent(CLUSTER), rig.to_linux(UPLINK), rig.to_linux(CLUSTER)]
            });
            rig.worker.poll(rig.now);
            let counters = &rig.counters;
            let counts = [&counters.hits, &counters.misses, &counters.flows, &counters.transmitted].map(|counter| counter.get());
            let drops: Vec<_> = dataplane::DropReason::ALL.iter().map(|reason| rig.drops(*reason)).collect();
            let flows = flows(&mut rig);
            let backends: Vec<_> = (0..16)
                .flat_map(|slot| [false, true].map(|to_client| (slot, to_client)))
                .map(|(slot, to_client)| {
                    let sum = |of: fn(&BackendCounters, bool) -> u64| rig.counters.sum_of(slot, |counters| of(counters, to_client));
                    [sum(BackendCounters::packets), sum(BackendCounters::bytes)]
                })
                .collect();
            rig.worker.record_stop(rig.now);
            let records: Vec<_> = std::iter::from_fn(|| records.take()).collect();
            let log = std::mem::take(&mut rig.worker.observer_mut().0);
            (bursts, counts, drops, flows, backends, records, log)
        });
        prop_assert_eq!(by_eight, one_by_one);
    }
}

//! Packets of one flow and direction leave in the order in which they came, whatever they are: short datagrams, fragments,
//! packets with IPv4 options or IPv6 extension headers, with or without VLAN tags, in bursts of any length.

use std::collections::BTreeMap;

use dataplane::testing::{Packet, Segment, fragments};
use dataplane::{BURST, PortIndex, tcp_flags};
use proptest::prelude::*;
use proto::Mode;

use crate::bursts::{FLOWS, FlowKind, arrive_at_first, gateway, packet, workers};
use crate::rig::{CLUSTER, Rig, UPLINK, backend_mac, ends, ip};
use crate::team::Team;

/// The flows of a test: known ones, and of UDP some that begin in the burst.
const NEW_FLOWS: [FlowKind; 2] = [
    FlowKind { client: "198.51.100.9:6001", vip: "192.0.2.101:53", is_udp: true, is_known: false },
    FlowKind { client: "[2001:db8:1::8]:6002", vip: "[2001:db8::1:1]:53", is_udp: true, is_known: false },
];

fn flows() -> Vec<FlowKind> {
    FLOWS.into_iter().filter(|flow| flow.is_known).chain(NEW_FLOWS).collect()
}

/// What is odd about a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Oddity {
    None,
    /// Fewer bytes of data than the head that the fast path reads. TCP headers are long enough.
    Short,
    /// IPv4 options, or an IPv6 extension header.
    Options,
    /// In fragments, the first one first.
    Fragments,
    /// In fragments, the last one first.
    Reversed,
    /// A priority tag, which belongs to no VLAN.
    PriorityTag,
    /// Its hop limit ends here: it is answered.
    LastHop,
}

const ODDITIES: [Oddity; 7] =
    [Oddity::None, Oddity::Short, Oddity::Options, Oddity::Fragments, Oddity::Reversed, Oddity::PriorityTag, Oddity::LastHop];

#[derive(Clone, Copy, Debug)]
struct Sent {
    flow: usize,
    oddity: Oddity,
    fin: bool,
    padding: usize,
}

fn sent() -> impl Strategy<Value = Sent> {
    let count = flows().len();
    let flow = prop_oneof![1 => 0..count, 1 => 3..4usize];
    let oddity = prop_oneof![2 => Just(Oddity::None), 3 => (0..ODDITIES.len()).prop_map(|n| ODDITIES[n])];
    (flow, oddity, prop::bool::weighted(0.02), 0..3usize).prop_map(|(flow, oddity, fin, padding)| Sent {
        flow,
        oddity,
        fin,
        padding,
    })
}

/// The frames of a packet. The data of each ends in the number of the flow and that of the packet.
fn frames(mut packet: Packet, sent: Sent, number: usize) -> Vec<Vec<u8>> {
    let mark = [sent.flow, number].map(|n| u8::try_from(n).unwrap());
    let is_udp = matches!(packet.segment, Segment::Udp { .. });
    packet.payload = mark.repeat(if sent.oddity == Oddity::Short { 2 } else { 32 });
    packet.padding = sent.padding;
    match sent.oddity {
        Oddity::None | Oddity::Short => vec![packet.build()],
        Oddity::Options if packet.source.is_ipv4() => vec![Packet { options: vec![1; 4], ..packet }.build()],
        Oddity::Options => vec![Packet { extensions: vec![(60, vec![0, 0, 1, 4, 0, 0, 0, 0])], ..packet }.build()],
        // The end of a fragment is that of the packet, so these have no padding.
        Oddity::Fragments | Oddity::Reversed => {
            let whole = Packet { padding: 0, fragmentation: 0, ..packet }.build();
            let identification = 1000 + u32::try_from(number).unwrap();
            let mut pieces = fragments(&whole, if is_udp { 24 } else { 32 }, identification);
            if sent.oddity == Oddity::Reversed {
                pieces.reverse();
            }
            pieces
        }
        Oddity::PriorityTag => {
            let frame = packet.build();
            vec![[&frame[..12], &[0x81, 0, 0x60, 0], &frame[12..]].concat()]
        }
        Oddity::LastHop => vec![packet.hop_limit(1).build()],
    }
}

/// The packets of the client of a flow.
fn of_client(sent: Sent, number: usize) -> Vec<Vec<u8>> {
    let flags = if sent.fin { tcp_flags::ACK | tcp_flags::FIN } else { tcp_flags::ACK };
    frames(packet(flows()[sent.flow], flags), sent, number)
}

/// For each flow the numbers of its packets, as they left. Frames without such a number are answers.
fn numbers(frames: &[Vec<u8>]) -> BTreeMap<u8, Vec<u8>> {
    let mut flows: BTreeMap<u8, Vec<u8>> = BTreeMap::new();
    for frame in frames {
        let [.., flow, number] = frame[..] else { panic!("a short frame") };
        flows.entry(flow).or_default().push(number);
    }
    flows
}

/// What a burst that arrives at a port comes to, and what its frames come to one by one: the numbers as they left by
/// another port.
fn both_ways(rigs: [Rig; 2], [at, by]: [PortIndex; 2], frames: &[Vec<u8>]) -> [BTreeMap<u8, Vec<u8>>; 2] {
    let [mut together, mut one_by_one] = rigs;
    for frame in frames {
        together.arrive(at, frame, 1);
        one_by_one.arrive(at, frame, 1);
        one_by_one.worker.poll(one_by_one.now);
    }
    while together.worker.poll(together.now) > 0 {}
    [numbers(&together.sent(by)), numbers(&one_by_one.sent(by))]
}

/// Whether the numbers of each flow never decrease, but for those of datagrams whose first fragment came last.
fn are_in_order(numbers: &BTreeMap<u8, Vec<u8>>, packets: &[Sent]) -> bool {
    let counts = |number: &&u8| packets[usize::from(**number)].oddity != Oddity::Reversed;
    numbers.values().all(|numbers| numbers.iter().filter(counts).is_sorted())
}

/// The end of each flow towards its backend in mode `nat` or `dnat`, and the backend.
fn translated(rig: &mut Rig) -> Vec<(std::net::SocketAddr, std::net::SocketAddr)> {
    let ends_of = |flow: FlowKind| ends(&rig.forward(UPLINK, &packet(flow, tcp_flags::ACK).build()));
    flows().into_iter().map(ends_of).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn packets_of_a_flow_leave_in_the_order_in_which_they_came_whatever_they_are(
        mode in (0..Mode::ALL.len()).prop_map(|n| Mode::ALL[n]),
        packets in prop::collection::vec(sent(), 1..=BURST),
        by_vectors in any::<bool>(),
    ) {
        let mut rigs = [gateway(mode, false), gateway(mode, false)];
        if !by_vectors {
            rigs.iter_mut().for_each(|rig| rig.worker.forgo_vectors());
        }
        let frames: Vec<_> = packets.iter().enumerate().flat_map(|(number, packet)| of_client(*packet, number)).collect();
        let [together, one_by_one] = both_ways(rigs, [UPLINK, CLUSTER], &frames);
        prop_assert!(are_in_order(&together, &packets), "{:?}", together);
        prop_assert_eq!(together, one_by_one);
    }

    #[test]
    fn replies_of_a_flow_leave_in_the_order_in_which_they_came_whatever_they_are(
        mode in prop_oneof![Just(Mode::Nat), Just(Mode::Dnat)],
        packets in prop::collection::vec(sent(), 1..=BURST),
    ) {
        let mut rigs = [gateway(mode, false), gateway(mode, false)];
        let ends = rigs.each_mut().map(translated);
        prop_assert_eq!(&ends[0], &ends[1]);
        rigs.iter_mut().for_each(|rig| { rig.sent(CLUSTER); });
        let reply = |sent: Sent, number: usize| {
            let (outer, backend) = ends[0][sent.flow];
            let ports = [backend.port(), outer.port()];
            let segment = match flows()[sent.flow].is_udp {
                true => Segment::Udp { ports, checksum: true },
                false => Segment::Tcp { ports, flags: tcp_flags::ACK, sequence: 1_001, acknowledgement: 1_001 },
            };
            frames(Packet::between(backend.ip(), outer.ip(), segment), sent, number)
        };
        let frames: Vec<_> = packets.iter().enumerate().flat_map(|(number, packet)| reply(*packet, number)).collect();
        let [together, one_by_one] = both_ways(rigs, [CLUSTER, UPLINK], &frames);
        prop_assert!(are_in_order(&together, &packets), "{:?}", together);
        prop_assert_eq!(together, one_by_one);
    }
}

#[test]
fn packets_that_waited_for_a_neighbour_leave_before_those_that_arrive_with_its_answer() {
    let mut rig = Rig::with_mode(Mode::Nat);
    rig.keep_backends("dns", &[11]);
    let without: Vec<_> =
        rig.network.neighbours.iter().filter(|neighbour| neighbour.address != ip("10.0.0.11")).cloned().collect();
    let all = std::mem::replace(&mut rig.network.neighbours, without);
    assert_eq!(all.len(), rig.network.neighbours.len() + 1, "{:?}", backend_mac(11));
    rig.publish();
    let flow = flows().iter().position(|flow| flow.client == "198.51.100.9:5004").unwrap();
    let arrive = |rig: &mut Rig, number: usize| {
        let plain = Sent { flow, oddity: Oddity::None, fin: false, padding: 0 };
        of_client(plain, number).iter().for_each(|frame| rig.arrive(UPLINK, frame, 1));
    };
    (0..3).for_each(|number| arrive(&mut rig, number));
    rig.worker.poll(rig.now);
    assert!(rig.sent(CLUSTER).is_empty());
    rig.network.neighbours = all;
    rig.publisher.publish(rig.compiler.compile(&rig.state, &rig.network, &rig.health, rig.now));
    (3..6).for_each(|number| arrive(&mut rig, number));
    rig.worker.poll(rig.now);
    assert_eq!(numbers(&rig.sent(CLUSTER)).into_values().collect::<Vec<_>>(), [vec![0, 1, 2, 3, 4, 5]]);
}

/// The numbers of packets as they left, which all arrived at the first of some workers in bursts of some lengths.
fn by_workers(team: &mut Team, packets: &[Sent], burst: usize) -> BTreeMap<u8, Vec<u8>> {
    for (n, of_burst) in packets.chunks(burst).enumerate() {
        for (number, packet) in (n * burst..).zip(of_burst) {
            of_client(*packet, number).iter().for_each(|frame| arrive_at_first(team, UPLINK, frame));
        }
        team.poll();
    }
    numbers(&team.sent(CLUSTER))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn packets_of_a_flow_leave_in_the_order_in_which_they_came_when_they_are_handed_over(
        packets in prop::collection::vec(sent(), 1..=BURST),
        count in 2..=4_u8,
        burst in 1..=BURST,
    ) {
        let together = by_workers(&mut workers(count), &packets, burst);
        prop_assert!(are_in_order(&together, &packets), "{:?}", together);
        let alone = by_workers(&mut workers(count), &packets, 1);
        let counted = |flows: BTreeMap<u8, Vec<u8>>| flows.into_iter().map(|(flow, numbers)| (flow, numbers.len())).collect::<Vec<_>>();
        prop_assert_eq!(counted(together), counted(alone));
    }
}

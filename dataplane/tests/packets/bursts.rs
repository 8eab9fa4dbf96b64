//! A burst of packets of many kinds comes to the same as its packets one by one: the same bytes, and the packets of a flow
//! in their order. The loops of the fast path handle parts of a burst, and what one of them leaves another one takes.
//! With two workers they hand over what the other one owns.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use dataplane::stats::Counter;
use dataplane::testing::{Packet, Segment, arriving_at};
use dataplane::{BURST, MemoryBuffer, PortIndex, WorkerCounters, tcp_flags};
use proptest::prelude::*;
use proto::{Backend, BackendState, Mode, Service, ServiceName};

use crate::rig::{CLUSTER, Rig, SECOND, UPLINK, ends, ip, mac_of};
use crate::team::Team;

const SYN: u8 = tcp_flags::SYN;
const ACK: u8 = tcp_flags::ACK;

/// Client and frontend of a flow, whether it is of UDP, and whether it is known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlowKind {
    pub(crate) client: &'static str,
    pub(crate) vip: &'static str,
    pub(crate) is_udp: bool,
    pub(crate) is_known: bool,
}

const fn known(client: &'static str, vip: &'static str, is_udp: bool) -> FlowKind {
    FlowKind { client, vip, is_udp, is_known: true }
}

pub(crate) const FLOWS: [FlowKind; 9] = [
    known("198.51.100.7:5001", "192.0.2.100:80", false),
    known("198.51.100.7:5002", "192.0.2.100:80", false),
    known("198.51.100.8:5003", "192.0.2.100:80", false),
    known("198.51.100.9:5004", "192.0.2.101:53", true),
    known("[2001:db8:1::7]:5005", "[2001:db8::1:0]:80", false),
    known("[2001:db8:1::7]:5006", "[2001:db8::1:0]:80", false),
    known("[2001:db8:1::8]:5007", "[2001:db8::1:1]:53", true),
    FlowKind { is_known: false, ..known("198.51.100.7:5008", "192.0.2.100:80", false) },
    FlowKind { is_known: false, ..known("[2001:db8:1::7]:5009", "[2001:db8::1:0]:80", false) },
];

/// A packet of the client of a flow.
#[derive(Clone, Copy, Debug)]
struct Sent {
    flow: usize,
    fin: bool,
    dont_fragment: bool,
    padding: usize,
}

fn sent() -> impl Strategy<Value = Sent> {
    let flow = prop_oneof![3 => 0..FLOWS.len(), 2 => 0..3usize];
    (flow, prop::bool::weighted(0.1), any::<bool>(), 0..8usize).prop_map(|(flow, fin, dont_fragment, padding)| Sent {
        flow,
        fin,
        dont_fragment,
        padding,
    })
}

pub(crate) fn packet(flow: FlowKind, flags: u8) -> Packet {
    let (client, vip): (SocketAddr, SocketAddr) = (flow.client.parse().unwrap(), flow.vip.parse().unwrap());
    let ports = [client.port(), vip.port()];
    let segment = match flow.is_udp {
        true => Segment::Udp { ports, checksum: true },
        false => Segment::Tcp { ports, flags, sequence: 1_000, acknowledgement: 1_001 },
    };
    Packet::between(client.ip(), vip.ip(), segment)
}

/// The frame of a packet. Its data ends in the number of the flow and that of the packet.
fn frame(sent: Sent, number: usize) -> Vec<u8> {
    let flow = FLOWS[sent.flow];
    let mut packet = packet(flow, if sent.fin { ACK | tcp_flags::FIN } else { ACK });
    packet.payload = vec![0; 12];
    packet.payload.extend([sent.flow, number].map(|n| u8::try_from(n).unwrap()));
    packet.padding = sent.padding;
    packet.fragmentation = if sent.dont_fragment { 0x4000 } else { 0 };
    packet.build()
}

/// A gateway with the known flows, whose backends have slots above 4,352 if there are `many`.
pub(crate) fn gateway(mode: Mode, many: bool) -> Rig {
    let mut rig = Rig::with_mode(mode);
    if many {
        let name = ServiceName::new("default", "many");
        let mut service = Service::clone(&rig.state.services[&ServiceName::new("default", "dns")]);
        service.name = name.clone();
        service.ports.truncate(1);
        let port = &mut service.ports[0];
        port.vips = vec![ip("192.0.2.102")];
        let address = |n: u16| SocketAddr::new(ip(&format!("10.7.{}.{}", n / 200, n % 200 + 1)), 5353);
        port.backends = (0..4352).map(|n| Backend { address: address(n), weight: 1, state: BackendState::Active }).collect();
        rig.state.services.insert(name.clone(), Arc::new(service));
        // It is compiled before the others are, so they have the slots above.
        let others = std::mem::take(&mut rig.state.services);
        rig.state.services.insert(name.clone(), others[&name].clone());
        rig.publish();
        rig.state.services = others;
    }
    if !mode.is_two_way() {
        rig.set_backend_ports();
    }
    rig.publish();
    for flow in FLOWS.into_iter().filter(|flow| flow.is_known) {
        let sent = rig.forward(UPLINK, &packet(flow, SYN).build());
        if mode.is_two_way() {
            rig.forward(CLUSTER, &answer(flow, &sent));
        } else {
            rig.now += 2 * SECOND;
            rig.forward(UPLINK, &packet(flow, ACK).build());
        }
        rig.forward(UPLINK, &packet(flow, ACK).build());
    }
    rig
}

/// The answer of the backend to the first packet of a flow.
pub(crate) fn answer(flow: FlowKind, sent: &[u8]) -> Vec<u8> {
    let (snat, backend) = ends(sent);
    let ports = [backend.port(), snat.port()];
    let mut answer = packet(flow, SYN | ACK);
    (answer.source, answer.destination) = (backend.ip(), snat.ip());
    answer.segment = match flow.is_udp {
        true => Segment::Udp { ports, checksum: true },
        false => Segment::Tcp { ports, flags: SYN | ACK, sequence: 1_000, acknowledgement: 1_001 },
    };
    answer.build()
}

/// A gateway with some workers and the known flows, each with its owner.
pub(crate) fn workers(count: u8) -> Team {
    let mut team = Team::in_turn(count);
    team.publish();
    for flow in FLOWS.into_iter().filter(|flow| flow.is_known) {
        team.put(UPLINK, &[packet(flow, SYN).build()]);
        let sent = team.sent(CLUSTER).pop().unwrap();
        team.put(CLUSTER, &[answer(flow, &sent)]);
        team.put(UPLINK, &[packet(flow, ACK).build()]);
    }
    for port in [UPLINK, CLUSTER] {
        team.sent(port);
    }
    team
}

/// Puts a frame in at a port of the first worker.
pub(crate) fn arrive_at_first(team: &mut Team, port: PortIndex, frame: &[u8]) {
    let frame = arriving_at(mac_of(port), frame);
    team.workers[0].port_mut(port).unwrap().arriving.push_back(MemoryBuffer::new(&frame, 1));
}

/// Frames as they left, by flow. Identifications of packets that may be fragmented, and the checksums over them, depend on
/// the order of flows, and are left out.
fn by_flow(frames: Vec<Vec<u8>>) -> BTreeMap<u8, Vec<Vec<u8>>> {
    let mut flows: BTreeMap<u8, Vec<Vec<u8>>> = BTreeMap::new();
    for mut frame in frames {
        if frame[12..14] == [8, 0] && frame[20] & 0x40 == 0 {
            frame[18..20].fill(0);
            frame[24..26].fill(0);
        }
        flows.entry(frame[frame.len() - 2]).or_default().push(frame);
    }
    flows
}

/// The identifications of packets that may be fragmented, sorted, by addresses and protocol: those of one source and
/// destination are in a sequence, whichever flows they belong to.
fn identifications(frames: &[Vec<u8>]) -> BTreeMap<[u8; 9], Vec<[u8; 2]>> {
    let mut all: BTreeMap<[u8; 9], Vec<[u8; 2]>> = BTreeMap::new();
    for frame in frames.iter().filter(|frame| frame[12..14] == [8, 0] && frame[20] & 0x40 == 0) {
        let ends: [u8; 8] = frame[26..34].try_into().unwrap();
        let [a, b, c, d, e, f, g, h] = ends;
        all.entry([a, b, c, d, e, f, g, h, frame[23]]).or_default().push([frame[18], frame[19]]);
    }
    all.values_mut().for_each(|of_pair| of_pair.sort_unstable());
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn a_burst_comes_to_the_same_as_its_packets_one_by_one(
        mode in (0..Mode::ALL.len()).prop_map(|n| Mode::ALL[n]),
        many in any::<bool>(),
        packets in prop::collection::vec(sent(), 1..=BURST),
    ) {
        let [mut together, mut one_by_one] = [gateway(mode, many), gateway(mode, many)];
        for (number, packet) in packets.into_iter().enumerate() {
            let frame = frame(packet, number);
            together.arrive(UPLINK, &frame, 1);
            one_by_one.arrive(UPLINK, &frame, 1);
            one_by_one.worker.poll(one_by_one.now);
        }
        together.worker.poll(together.now);
        let [sent_together, sent_one_by_one] = [together.sent(CLUSTER), one_by_one.sent(CLUSTER)];
        prop_assert_eq!(identifications(&sent_together), identifications(&sent_one_by_one));
        prop_assert_eq!(by_flow(sent_together), by_flow(sent_one_by_one));
        prop_assert_eq!(together.sent(UPLINK).len(), one_by_one.sent(UPLINK).len(), "answers");
        let counts = |rig: &Rig| (rig.counters.hits.get(), rig.counters.misses.get(), rig.counters.flows.get());
        prop_assert_eq!(counts(&together), counts(&one_by_one));
    }

    #[test]
    fn a_burst_with_packets_of_another_worker_comes_to_the_same_as_its_packets_one_by_one(
        packets in prop::collection::vec(sent(), 1..=BURST),
    ) {
        let [mut together, mut one_by_one] = [workers(2), workers(2)];
        let of_known = packets.iter().filter(|packet| FLOWS[packet.flow].is_known).count();
        let half = packets.len() / 2;
        for (number, packet) in packets.into_iter().enumerate() {
            let frame = frame(packet, number);
            arrive_at_first(&mut together, UPLINK, &frame);
            arrive_at_first(&mut one_by_one, UPLINK, &frame);
            one_by_one.poll();
            // What the first burst was tells the worker whether to look for owners or for flows first.
            if number + 1 == half {
                together.poll();
            }
        }
        together.poll();
        let sent = together.sent(CLUSTER);
        prop_assert_eq!(sent.len(), of_known, "all packets of known flows leave");
        prop_assert_eq!(by_flow(sent), by_flow(one_by_one.sent(CLUSTER)));
        prop_assert_eq!(together.sent(UPLINK).len(), one_by_one.sent(UPLINK).len(), "answers");
        let counts = |team: &Team| {
            let count = |counters: &Arc<WorkerCounters>| [&counters.hits, &counters.misses, &counters.flows, &counters.handed_out].map(Counter::get);
            team.counters.iter().map(count).collect::<Vec<_>>()
        };
        prop_assert_eq!(counts(&together), counts(&one_by_one));
    }
}

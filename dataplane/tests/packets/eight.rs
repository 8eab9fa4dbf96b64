//! Where the processor has AVX2, the fast path works on eight packets at a time. It comes to the same as one packet at a time: the same bytes in the same order, the same counters, flows,
//! records and observed packets.

use std::net::SocketAddr;
use std::sync::Arc;

use dataplane::flow::{FlowRecords, FlowView, Tick};
use dataplane::forward::{About, FamilyInquiry, Inquired};
use dataplane::stats::BackendCounters;
use dataplane::testing::{Packet, Segment};
use dataplane::{BURST, Link, PortIndex, TagKind, Vlan, VlanLink, tcp_flags};
use proptest::prelude::*;
use proto::Mode;

use crate::rig::{CLUSTER, Rig, SECOND, UPLINK, config, ends, ip, network, state};

const ACK: u8 = tcp_flags::ACK;

/// Known flows of three clients, the last two of UDP.
const FLOWS_V4: [(&str, &str); 6] = [
    ("198.51.100.7:5001", "192.0.2.100:80"),
    ("198.51.100.7:5002", "192.0.2.100:80"),
    ("203.0.113.9:5001", "192.0.2.100:80"),
    ("192.0.2.10:5004", "192.0.2.100:80"),
    ("198.51.100.7:5005", "192.0.2.101:53"),
    ("203.0.113.9:5006", "192.0.2.101:53"),
];
const FLOWS_V6: [(&str, &str); 6] = [
    ("[2001:db8:1::7]:5001", "[2001:db8::1:0]:80"),
    ("[2001:db8:1::7]:5002", "[2001:db8::1:0]:80"),
    ("[2001:db8:2::9]:5001", "[2001:db8::1:0]:80"),
    ("[2001:db8:2::9]:5004", "[2001:db8::1:0]:80"),
    ("[2001:db8:1::7]:5005", "[2001:db8::1:1]:53"),
    ("[2001:db8:2::9]:5006", "[2001:db8::1:1]:53"),
];
const FIRST_OF_UDP: usize = 4;

/// The VLANs of the links of both sides, if these have any.
const VLANS: [u16; 2] = [100, 200];
/// Other VLANs of both ports.
const OTHERS: [u16; 2] = [101, 201];
const UNKNOWN_VLAN: u16 = 300;
/// The longest frame in memory.
const BUFFER_ROOM: usize = 9216;

/// What the fast path may use of the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Vectors {
    All,
    None,
}

/// One kind of gateway.
#[derive(Clone, Copy, Debug)]
struct Kind {
    mode: Mode,
    is_v4: bool,
    /// Which sides are on VLANs.
    tagged: [bool; 2],
    /// Backends are behind two routers.
    routed: bool,
    /// One of the routers is on the side of the clients, for tunnels.
    both_sides: bool,
    /// The packets are those of backends.
    replies: bool,
    /// Flows of UDP have the mode of the other tunnel, if those of TCP go into tunnels.
    both_tunnels: bool,
    /// Tunnels have several source addresses.
    many_sources: bool,
}

fn kind() -> impl Strategy<Value = Kind> {
    (0..Mode::ALL.len(), any::<[bool; 8]>()).prop_map(|(mode, bits)| {
        let [is_v4, uplink, cluster, routed, both_sides, replies, both_tunnels, many_sources] = bits;
        let mode = Mode::ALL[mode];
        // In mode `dsr` backends are on the link.
        Kind {
            mode,
            is_v4,
            tagged: [uplink, cluster],
            routed: routed && mode != Mode::Dsr,
            both_sides: both_sides && !mode.is_two_way(),
            replies: replies && mode.is_two_way(),
            both_tunnels,
            many_sources,
        }
    })
}

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
    /// The packet fits the MTU, perhaps not with outer headers.
    Long,
    /// There is no room for outer headers in its buffer.
    FullBuffer,
    UnknownFlow,
    NotIp,
    /// Shorter than the headers of TCP.
    Short,
    /// A TCP header that claims to be longer than the packet.
    TornHeader,
    /// Without the tag of its link.
    Untagged,
    UnknownVlan,
    /// Another VLAN of the port.
    OtherVlan,
    /// A tag with a priority only.
    PriorityTag,
    /// Another tag behind that of its link.
    TwoTags,
}

const ODDITIES: [Oddity; 18] = [
    Oddity::Fin,
    Oddity::WrongHeaderChecksum,
    Oddity::WrongTransportChecksum,
    Oddity::Fragment,
    Oddity::LastHop,
    Oddity::OtherStation,
    Oddity::TooLong,
    Oddity::Long,
    Oddity::FullBuffer,
    Oddity::UnknownFlow,
    Oddity::NotIp,
    Oddity::Short,
    Oddity::TornHeader,
    Oddity::Untagged,
    Oddity::UnknownVlan,
    Oddity::OtherVlan,
    Oddity::PriorityTag,
    Oddity::TwoTags,
];

#[derive(Clone, Copy, Debug)]
struct Sent {
    flow: usize,
    payload: usize,
    padding: usize,
    hop_limit: u8,
    traffic_class: u8,
    dont_fragment: bool,
    /// Of UDP.
    checksum: bool,
    /// Priority of its VLAN tag.
    priority: u16,
    oddity: Oddity,
}

fn sent() -> impl Strategy<Value = Sent> {
    let oddity = prop_oneof![40 => Just(Oddity::None), 1 => prop::sample::select(ODDITIES.to_vec())];
    let bits = any::<[bool; 2]>();
    (0..FLOWS_V4.len(), 0..80usize, 0..20usize, 2..=255u8, any::<u8>(), bits, 0..8u16, oddity).prop_map(
        |(flow, payload, padding, hop_limit, traffic_class, [dont_fragment, checksum], priority, oddity)| Sent {
            flow,
            payload,
            padding,
            hop_limit,
            traffic_class,
            dont_fragment,
            checksum,
            priority,
            oddity,
        },
    )
}

impl Kind {
    fn mode_of_udp(&self) -> Mode {
        match self.mode {
            Mode::Ipip if self.both_tunnels => Mode::Gue,
            Mode::Gue if self.both_tunnels => Mode::Ipip,
            mode => mode,
        }
    }

    fn packet(&self, flow: usize, (from, to): (SocketAddr, SocketAddr), flags: u8, checksum: bool) -> Packet {
        let ports = [from.port(), to.port()];
        let segment = match flow < FIRST_OF_UDP {
            true => Segment::Tcp { ports, flags, sequence: 1_000, acknowledgement: 1_001 },
            false => Segment::Udp { ports, checksum },
        };
        Packet::between(from.ip(), to.ip(), segment)
    }

    /// The frame of a packet between these ends, as it arrives on a port.
    fn frame(&self, port: PortIndex, sent: Sent, ends: (SocketAddr, SocketAddr), may_fragment: bool) -> Vec<u8> {
        let flags = if matches!(sent.oddity, Oddity::Fin) { ACK | tcp_flags::FIN } else { ACK };
        let mut packet = self.packet(sent.flow, ends, flags, sent.checksum);
        if matches!(sent.oddity, Oddity::UnknownFlow) {
            packet.source = ip(if self.is_v4 { "198.51.100.200" } else { "2001:db8:1::200" });
        }
        packet.payload = (0..sent.payload).map(|n| u8::try_from(n).unwrap()).collect();
        if matches!(sent.oddity, Oddity::TooLong) {
            packet.payload.resize(1480, 0);
        }
        if matches!(sent.oddity, Oddity::Long) {
            packet.payload.resize(1380 + sent.payload, 0);
        }
        packet.padding = sent.padding;
        packet.hop_limit = if matches!(sent.oddity, Oddity::LastHop) { 1 } else { sent.hop_limit };
        packet.fragmentation = match sent.oddity {
            Oddity::Fragment => 0x2000,
            _ if sent.dont_fragment || !may_fragment => 0x4000,
            _ => 0,
        };
        let mut frame = packet.build();
        self.set_traffic_class(&mut frame, sent.traffic_class);
        let transport = if self.is_v4 { 34 } else { 54 };
        match sent.oddity {
            Oddity::WrongHeaderChecksum if self.is_v4 => frame[24] ^= 1,
            Oddity::WrongTransportChecksum => frame[transport + if sent.flow < FIRST_OF_UDP { 17 } else { 7 }] ^= 1,
            Oddity::OtherStation => frame[5] ^= 1,
            Oddity::NotIp => frame[12..14].copy_from_slice(&[0x88, 0xcc]),
            Oddity::Short => frame.truncate(transport + 16),
            Oddity::FullBuffer => frame.resize(BUFFER_ROOM, 0),
            Oddity::TornHeader if sent.flow < FIRST_OF_UDP => frame[transport + 12] = 0xf0,
            _ => {}
        }
        let side = usize::from(port.0);
        if !self.tagged[side] {
            return frame;
        }
        let tagged = |vlan, frame: &[u8]| with_tag(sent.priority << 13 | vlan, frame);
        match sent.oddity {
            Oddity::Untagged => frame,
            Oddity::UnknownVlan => tagged(UNKNOWN_VLAN, &frame),
            Oddity::OtherVlan => tagged(OTHERS[side], &frame),
            Oddity::PriorityTag => tagged(0, &frame),
            Oddity::TwoTags => tagged(VLANS[side], &tagged(OTHERS[side], &frame)),
            _ => tagged(VLANS[side], &frame),
        }
    }

    /// Sets DSCP and ECN, which are 0, of the packet of a frame without tag, and of IPv6 some bits of the flow label.
    fn set_traffic_class(&self, frame: &mut [u8], class: u8) {
        if self.is_v4 {
            frame[15] = class;
            let sum = u32::from(!u16::from_be_bytes([frame[24], frame[25]])) + u32::from(class);
            let folded = u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap();
            frame[24..26].copy_from_slice(&(!folded).to_be_bytes());
        } else {
            frame[14] |= class >> 4;
            frame[15] |= class << 4;
            frame[17] = class;
        }
    }

    /// Forwards a packet of a frame without tag. Returns it as it left, without tag.
    fn forward(&self, rig: &mut Rig, port: PortIndex, frame: &[u8]) -> Vec<u8> {
        let from = usize::from(port.0);
        let sent = match self.tagged[from] {
            true => rig.forward(port, &with_tag(VLANS[from], frame)),
            false => rig.forward(port, frame),
        };
        if sent[12..14] == [0x81, 0] { [&sent[..12], &sent[16..]].concat() } else { sent }
    }

    /// Begins a flow and confirms it. Returns the ends of its packets.
    fn establish(&self, rig: &mut Rig, flow: usize, (client, vip): (SocketAddr, SocketAddr)) -> (SocketAddr, SocketAddr) {
        let packet = |ends, flags| self.packet(flow, ends, flags, true).build();
        let sent = self.forward(rig, UPLINK, &packet((client, vip), tcp_flags::SYN));
        if !self.mode.is_two_way() {
            rig.now += 2 * SECOND;
            self.forward(rig, UPLINK, &packet((client, vip), ACK));
            self.forward(rig, UPLINK, &packet((client, vip), ACK));
            return (client, vip);
        }
        let (snat, backend) = ends(&sent);
        self.forward(rig, CLUSTER, &packet((backend, snat), tcp_flags::SYN | ACK));
        self.forward(rig, UPLINK, &packet((client, vip), ACK));
        self.forward(rig, CLUSTER, &packet((backend, snat), ACK));
        if self.replies { (backend, snat) } else { (client, vip) }
    }

    /// A gateway with the known flows; the ends of packets of each; and the records of flows.
    fn gateway(&self, vectors: Vectors) -> (Rig, Vec<(SocketAddr, SocketAddr)>, Arc<FlowRecords>) {
        let mut config = config(1024);
        if self.many_sources {
            config.tunnel.sources = ["10.0.0.2", "10.0.0.4", "10.0.0.5", "fd00::2", "fd00::4", "fd00::5"].map(ip).into();
        }
        let mut rig = Rig::with_config(config);
        (rig.state, rig.network) = (state(), network());
        rig.set_mode("web", self.mode);
        rig.set_mode("dns", self.mode_of_udp());
        let records = rig.record(64);
        match vectors {
            Vectors::All => {}
            Vectors::None => rig.worker.forgo_vectors(),
        }
        if !self.mode.is_two_way() {
            rig.set_backend_ports();
        }
        if self.routed {
            rig.route_backends(self.is_v4);
            let network = &mut rig.network;
            if self.both_sides
                && let (Some(route), Some(router)) = (network.routes.last_mut(), network.neighbours.last_mut())
            {
                (route.link, router.link) = (UPLINK.into(), UPLINK.into());
            }
        }
        put_on_vlans(&mut rig, self.tagged);
        rig.publish();
        let flows = if self.is_v4 { FLOWS_V4 } else { FLOWS_V6 };
        let flows = flows.into_iter().map(|(client, vip)| (client.parse().unwrap(), vip.parse().unwrap()));
        let ends = flows.enumerate().map(|(flow, ends)| self.establish(&mut rig, flow, ends)).collect();
        (rig, ends, records)
    }
}

fn with_tag(tag: u16, frame: &[u8]) -> Vec<u8> {
    [&frame[..12], &[0x81, 0], &tag.to_be_bytes(), &frame[12..]].concat()
}

/// Moves the networks of some sides to VLANs. Their ports have other VLANs too.
fn put_on_vlans(rig: &mut Rig, tagged: [bool; 2]) {
    let on = |port: PortIndex, vlan| Link::new(port, Vlan::NONE.with(TagKind::Customer, vlan).unwrap());
    let moved = |link: Link| match usize::from(link.port().0) {
        side if tagged[side] => on(link.port(), VLANS[side]),
        _ => link,
    };
    let network = &mut rig.network;
    network.routes.iter_mut().for_each(|route| route.link = moved(route.link));
    network.neighbours.iter_mut().for_each(|neighbour| neighbour.link = moved(neighbour.link));
    let vlan = |link, addresses: [&str; 2]| VlanLink {
        link,
        mtu: 1500,
        addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
    };
    let sides = [
        (UPLINK, ["192.0.2.2/24", "2001:db8::2/64"], ["192.0.3.2/24", "2001:db8:3::2/64"]),
        (CLUSTER, ["10.0.0.2/24", "fd00::2/64"], ["10.0.3.2/24", "fd03::2/64"]),
    ];
    for (port, addresses, others) in sides.into_iter().filter(|(port, ..)| tagged[usize::from(port.0)]) {
        let side = usize::from(port.0);
        network.vlans.extend([vlan(on(port, VLANS[side]), addresses), vlan(on(port, OTHERS[side]), others)]);
    }
}

/// The flows as they are now, with the time since their last packets.
fn flows(rig: &mut Rig, is_v4: bool) -> Vec<FlowView> {
    let answer = rig.ask(match is_v4 {
        true => Inquired::V4(FamilyInquiry::new(About::Flows { from: 0 })),
        false => Inquired::V6(FamilyInquiry::new(About::Flows { from: 0 })),
    });
    let now = Tick::at(answer.now_ns);
    match &answer.inquired {
        Inquired::V4(answered) => answered.flows.iter().map(|flow| FlowView::of(flow, now)).collect(),
        Inquired::V6(answered) => answered.flows.iter().map(|flow| FlowView::of(flow, now)).collect(),
        Inquired::Capture(_) => panic!("an answer to another question"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]
    #[test]
    fn eight_packets_at_a_time_come_to_the_same_as_one_at_a_time(
        kind in kind(),
        may_fragment in any::<bool>(),
        packets in prop::collection::vec(sent(), 8..=BURST),
        seconds in 0..3u64,
    ) {
        let [by_eight, one_by_one] = [Vectors::All, Vectors::None].map(|vectors| {
            let (mut rig, ends, records) = kind.gateway(vectors);
            rig.now += seconds * SECOND;
            let from = if kind.replies { CLUSTER } else { UPLINK };
            // The second burst finds what the first one left to be remembered.
            let bursts = [0, 1].map(|_| {
                for (id, sent) in (1..).zip(&packets) {
                    rig.arrive(from, &kind.frame(from, *sent, ends[sent.flow], may_fragment), id);
                }
                rig.worker.poll(rig.now);
                [rig.sent(UPLINK), rig.sent(CLUSTER), rig.to_linux(UPLINK), rig.to_linux(CLUSTER)]
            });
            rig.worker.poll(rig.now);
            let counters = &rig.counters;
            let counts = [&counters.hits, &counters.misses, &counters.flows, &counters.transmitted].map(|counter| counter.get());
            let drops: Vec<_> = dataplane::DropReason::ALL.iter().map(|reason| rig.drops(*reason)).collect();
            let flows = flows(&mut rig, kind.is_v4);
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

//! Where the processor has AVX2, the fast path works on eight packets at a time. It comes to the same as one packet at a
//! time: the same bytes in the same order, the same counters, flows, records and observed packets.

use std::net::SocketAddr;
use std::sync::Arc;

use dataplane::flow::{FlowRecords, FlowView, Tick};
use dataplane::forward::{About, FamilyInquiry, Inquired};
use dataplane::stats::BackendCounters;
use dataplane::testing::{Packet, Segment};
use dataplane::{BURST, Link, PortIndex, TagKind, Vlan, VlanLink, tcp_flags};
use proptest::prelude::*;
use proto::{Family, Mode, Protocol};

use crate::rig::{CLUSTER, Rig, SECOND, UPLINK, config, ends, ip, network, service, service_port, state};

const ACK: u8 = tcp_flags::ACK;

/// Known flows of three clients: four of Service `web`, two of `dns`, and two of `more`.
const FLOWS_V4: [(&str, &str); 8] = [
    ("198.51.100.7:5001", "192.0.2.100:80"),
    ("198.51.100.7:5002", "192.0.2.100:80"),
    ("203.0.113.9:5001", "192.0.2.100:80"),
    ("192.0.2.10:5004", "192.0.2.100:80"),
    ("198.51.100.7:5005", "192.0.2.101:53"),
    ("203.0.113.9:5006", "192.0.2.101:53"),
    ("198.51.100.7:5007", "192.0.2.102:81"),
    ("203.0.113.9:5008", "192.0.2.102:81"),
];
const FLOWS_V6: [(&str, &str); 8] = [
    ("[2001:db8:1::7]:5001", "[2001:db8::1:0]:80"),
    ("[2001:db8:1::7]:5002", "[2001:db8::1:0]:80"),
    ("[2001:db8:2::9]:5001", "[2001:db8::1:0]:80"),
    ("[2001:db8:2::9]:5004", "[2001:db8::1:0]:80"),
    ("[2001:db8:1::7]:5005", "[2001:db8::1:1]:53"),
    ("[2001:db8:2::9]:5006", "[2001:db8::1:1]:53"),
    ("[2001:db8:1::7]:5007", "[2001:db8::1:2]:81"),
    ("[2001:db8:2::9]:5008", "[2001:db8::1:2]:81"),
];
const SERVICES: [&str; 3] = ["web", "dns", "more"];
/// The Service of UDP.
const OF_UDP: usize = 1;

/// The number of a flow's Service.
fn service_of(flow: usize) -> usize {
    match flow {
        0..4 => 0,
        4..6 => OF_UDP,
        _ => 2,
    }
}

fn is_udp(flow: usize) -> bool {
    service_of(flow) == OF_UDP
}

/// The sides of a gateway.
const CLIENTS: usize = 0;
const BACKENDS: usize = 1;

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

/// One kind of gateway, and which of its packets are in one burst.
#[derive(Clone, Copy, Debug)]
struct Kind {
    /// Of the Services, in their order.
    modes: [Mode; SERVICES.len()],
    /// `None`: both are in one burst.
    is_v4: Option<bool>,
    /// Which sides are on VLANs.
    tagged: [bool; 2],
    /// Backends are on the port of the clients, on a VLAN.
    one_port: bool,
    /// Backends are behind two routers.
    routed: bool,
    /// One of the routers is on the side of the clients, for tunnels.
    both_sides: bool,
    /// The packets are those of backends, but for one-way modes. `None`: those of both sides are in one burst.
    replies: Option<bool>,
    /// Packets of clients come by two VLANs, if they come by any.
    two_vlans: bool,
    /// Tunnels have several source addresses.
    many_sources: bool,
}

/// Modes of the Services: in half of the gateways one, or the two tunnels; else one of each kind, in any order.
fn modes() -> impl Strategy<Value = [Mode; SERVICES.len()]> {
    let alike = (prop::sample::select(Mode::ALL.to_vec()), any::<bool>()).prop_map(|(mode, both_tunnels)| {
        let mode_of_udp = match mode {
            Mode::Ipip if both_tunnels => Mode::Gue,
            Mode::Gue if both_tunnels => Mode::Ipip,
            mode => mode,
        };
        [mode, mode_of_udp, mode]
    });
    let translating = prop::sample::select(vec![Mode::Nat, Mode::Dnat]);
    let tunnel = prop::sample::select(vec![Mode::Gue, Mode::Ipip]);
    let mixed = (translating, tunnel).prop_flat_map(|(translating, tunnel)| {
        Just(vec![translating, tunnel, Mode::Dsr]).prop_shuffle().prop_map(|modes| [modes[0], modes[1], modes[2]])
    });
    prop_oneof![alike, mixed]
}

fn kind() -> impl Strategy<Value = Kind> {
    let either = || prop_oneof![2 => any::<bool>().prop_map(Some), 1 => Just(None)];
    (modes(), either(), either(), any::<[bool; 7]>()).prop_map(|(modes, is_v4, replies, bits)| {
        let [uplink, cluster, one_port, routed, both_sides, two_vlans, many_sources] = bits;
        // In mode `dsr` backends are on the link.
        let routed = routed && !modes.contains(&Mode::Dsr);
        let any_two_way = modes.iter().any(|mode| mode.is_two_way());
        // Packets of both sides are in one burst only if they come by one port.
        let one_port = one_port || replies.is_none();
        let both_sides = both_sides && !any_two_way && !one_port;
        // Without replies, all come from clients.
        let replies = if any_two_way { replies } else { Some(false) };
        // The port of the clients has no SNAT address for backends of mode `nat`, the VLAN of the backends has.
        let tagged = [uplink, cluster || one_port];
        Kind { modes, is_v4, tagged, one_port, routed, both_sides, replies, two_vlans, many_sources }
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
    /// If the burst has packets of both families.
    is_v4: bool,
    /// If the burst has packets of both sides.
    is_reply: bool,
    /// If packets come by two VLANs.
    on_other_vlan: bool,
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
    let bits = any::<[bool; 5]>();
    (0..FLOWS_V4.len(), 0..80usize, 0..20usize, 2..=255u8, any::<u8>(), bits, 0..8u16, oddity).prop_map(
        |(flow, payload, padding, hop_limit, traffic_class, bits, priority, oddity)| {
            let [is_v4, is_reply, on_other_vlan, dont_fragment, checksum] = bits;
            Sent {
                flow,
                is_v4,
                is_reply,
                on_other_vlan,
                payload,
                padding,
                hop_limit,
                traffic_class,
                dont_fragment,
                checksum,
                priority,
                oddity,
            }
        },
    )
}

/// The ends of a flow's packets: of those from its client, and of those from its backend. Both are the same in one-way modes.
type Ends = [(SocketAddr, SocketAddr); 2];

impl Kind {
    fn mode(&self, flow: usize) -> Mode {
        self.modes[service_of(flow)]
    }

    /// The families of its flows: whether these are of IPv4.
    fn families(&self) -> Vec<bool> {
        self.is_v4.map_or(vec![true, false], |is_v4| vec![is_v4])
    }

    /// The port of a side.
    fn port(&self, side: usize) -> PortIndex {
        if side == CLIENTS || self.one_port { UPLINK } else { CLUSTER }
    }

    /// The side from which a packet comes.
    fn side(&self, sent: Sent) -> usize {
        let is_reply = self.replies.unwrap_or(sent.is_reply) && self.mode(sent.flow).is_two_way();
        if is_reply { BACKENDS } else { CLIENTS }
    }

    fn packet(&self, flow: usize, (from, to): (SocketAddr, SocketAddr), flags: u8, checksum: bool) -> Packet {
        let ports = [from.port(), to.port()];
        let segment = match is_udp(flow) {
            true => Segment::Udp { ports, checksum },
            false => Segment::Tcp { ports, flags, sequence: 1_000, acknowledgement: 1_001 },
        };
        Packet::between(from.ip(), to.ip(), segment)
    }

    /// The frame of a packet of a flow with these ends, as it arrives.
    fn frame(&self, sent: Sent, ends: Ends, may_fragment: bool) -> Vec<u8> {
        let (side, is_v4) = (self.side(sent), ends[0].0.is_ipv4());
        let ends = ends[side];
        let flags = if matches!(sent.oddity, Oddity::Fin) { ACK | tcp_flags::FIN } else { ACK };
        let mut packet = self.packet(sent.flow, ends, flags, sent.checksum);
        if matches!(sent.oddity, Oddity::UnknownFlow) {
            packet.source = ip(if is_v4 { "198.51.100.200" } else { "2001:db8:1::200" });
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
        set_traffic_class(is_v4, &mut frame, sent.traffic_class);
        let transport = if is_v4 { 34 } else { 54 };
        match sent.oddity {
            Oddity::WrongHeaderChecksum if is_v4 => frame[24] ^= 1,
            Oddity::WrongTransportChecksum => frame[transport + if is_udp(sent.flow) { 7 } else { 17 }] ^= 1,
            Oddity::OtherStation => frame[5] ^= 1,
            Oddity::NotIp => frame[12..14].copy_from_slice(&[0x88, 0xcc]),
            Oddity::Short => frame.truncate(transport + 16),
            Oddity::FullBuffer => frame.resize(BUFFER_ROOM, 0),
            Oddity::TornHeader if !is_udp(sent.flow) => frame[transport + 12] = 0xf0,
            _ => {}
        }
        if !self.tagged[side] {
            return frame;
        }
        let vlan = if self.two_vlans && sent.on_other_vlan && side == CLIENTS { OTHERS[side] } else { VLANS[side] };
        let tagged = |vlan, frame: &[u8]| with_tag(sent.priority << 13 | vlan, frame);
        match sent.oddity {
            Oddity::Untagged => frame,
            Oddity::UnknownVlan => tagged(UNKNOWN_VLAN, &frame),
            Oddity::OtherVlan => tagged(OTHERS[side], &frame),
            Oddity::PriorityTag => tagged(0, &frame),
            Oddity::TwoTags => tagged(VLANS[side], &tagged(OTHERS[side], &frame)),
            _ => tagged(vlan, &frame),
        }
    }

    /// Forwards a packet of a frame without tag, from a side. Returns it as it left, without tag.
    fn forward(&self, rig: &mut Rig, side: usize, frame: &[u8]) -> Vec<u8> {
        let sent = match self.tagged[side] {
            true => rig.forward(self.port(side), &with_tag(VLANS[side], frame)),
            false => rig.forward(self.port(side), frame),
        };
        if sent[12..14] == [0x81, 0] { [&sent[..12], &sent[16..]].concat() } else { sent }
    }

    /// Begins all flows of a family and confirms them. Returns the ends of their packets.
    fn establish(&self, rig: &mut Rig, is_v4: bool) -> Vec<Ends> {
        let flows = if is_v4 { FLOWS_V4 } else { FLOWS_V6 };
        let packet = |flow, ends, flags| self.packet(flow, ends, flags, true).build();
        let begun: Vec<Ends> = (0..)
            .zip(flows.map(|(client, vip)| (client.parse().unwrap(), vip.parse().unwrap())))
            .map(|(flow, of_client)| {
                let sent = self.forward(rig, CLIENTS, &packet(flow, of_client, tcp_flags::SYN));
                if !self.mode(flow).is_two_way() {
                    return [of_client; 2];
                }
                let (snat, backend) = ends(&sent);
                self.forward(rig, BACKENDS, &packet(flow, (backend, snat), tcp_flags::SYN | ACK));
                [of_client, (backend, snat)]
            })
            .collect();
        if self.modes.iter().any(|mode| !mode.is_two_way()) {
            rig.now += 2 * SECOND;
        }
        for (flow, [of_client, of_backend]) in begun.iter().enumerate() {
            self.forward(rig, CLIENTS, &packet(flow, *of_client, ACK));
            let side = if self.mode(flow).is_two_way() { BACKENDS } else { CLIENTS };
            self.forward(rig, side, &packet(flow, *of_backend, ACK));
        }
        begun
    }

    /// A gateway with the known flows; the ends of packets of each of IPv4 and of IPv6; and the records of flows.
    fn gateway(&self, vectors: Vectors) -> (Rig, [Vec<Ends>; 2], Arc<FlowRecords>) {
        let mut config = config(1024);
        if self.many_sources {
            config.tunnel.sources = ["10.0.0.2", "10.0.0.4", "10.0.0.5", "fd00::2", "fd00::4", "fd00::5"].map(ip).into();
        }
        let mut rig = Rig::with_config(config);
        (rig.state, rig.network) = (state(), network());
        let more = [(Family::V4, "192.0.2.102"), (Family::V6, "2001:db8::1:2")];
        let more = more.map(|(family, vip)| service_port(Protocol::Tcp, family, &[vip], 81, None, 8080));
        let (name, more) = service("more", more.into());
        rig.state.services.insert(name, more);
        for (service, mode) in SERVICES.into_iter().zip(self.modes) {
            rig.set_mode(service, mode);
        }
        let records = rig.record(64);
        match vectors {
            Vectors::All => {}
            Vectors::None => rig.worker.forgo_vectors(),
        }
        if self.modes.iter().any(|mode| !mode.is_two_way()) {
            rig.set_backend_ports();
        }
        if self.routed {
            self.families().into_iter().for_each(|is_v4| rig.route_backends(is_v4));
            let network = &mut rig.network;
            if self.both_sides
                && let (Some(route), Some(router)) = (network.routes.last_mut(), network.neighbours.last_mut())
            {
                (route.link, router.link) = (UPLINK.into(), UPLINK.into());
            }
        }
        self.put_on_links(&mut rig);
        rig.publish();
        let mut ends = [Vec::new(), Vec::new()];
        for is_v4 in self.families() {
            ends[usize::from(!is_v4)] = self.establish(&mut rig, is_v4);
        }
        (rig, ends, records)
    }

    /// Moves the networks of the sides to their ports and VLANs. Their ports have other VLANs too.
    fn put_on_links(&self, rig: &mut Rig) {
        let on = |port: PortIndex, vlan| Link::new(port, Vlan::NONE.with(TagKind::Customer, vlan).unwrap());
        let moved = |link: Link| {
            let side = usize::from(link.port().0);
            if self.tagged[side] { on(self.port(side), VLANS[side]) } else { self.port(side).into() }
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
            (CLIENTS, ["192.0.2.2/24", "2001:db8::2/64"], ["192.0.3.2/24", "2001:db8:3::2/64"]),
            (BACKENDS, ["10.0.0.2/24", "fd00::2/64"], ["10.0.3.2/24", "fd03::2/64"]),
        ];
        for (side, addresses, others) in sides.into_iter().filter(|(side, ..)| self.tagged[*side]) {
            let port = self.port(side);
            network.vlans.extend([vlan(on(port, VLANS[side]), addresses), vlan(on(port, OTHERS[side]), others)]);
        }
    }
}

/// Sets DSCP and ECN, which are 0, of the packet of a frame without tag, and of IPv6 some bits of the flow label.
fn set_traffic_class(is_v4: bool, frame: &mut [u8], class: u8) {
    if is_v4 {
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

fn with_tag(tag: u16, frame: &[u8]) -> Vec<u8> {
    [&frame[..12], &[0x81, 0], &tag.to_be_bytes(), &frame[12..]].concat()
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
        Inquired::Capture(_) | Inquired::End(_) | Inquired::Watch(_) => panic!("an answer to another question"),
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
            // The second burst finds what the first one left to be remembered.
            let bursts = [0, 1].map(|_| {
                for (id, sent) in (1..).zip(&packets) {
                    let is_v4 = kind.is_v4.unwrap_or(sent.is_v4);
                    let ends = ends[usize::from(!is_v4)][sent.flow];
                    rig.arrive(kind.port(kind.side(*sent)), &kind.frame(*sent, ends, may_fragment), id);
                }
                rig.worker.poll(rig.now);
                [rig.sent(UPLINK), rig.sent(CLUSTER), rig.to_linux(UPLINK), rig.to_linux(CLUSTER)]
            });
            rig.worker.poll(rig.now);
            let counters = &rig.counters;
            let counts = [&counters.hits, &counters.misses, &counters.flows, &counters.transmitted].map(|counter| counter.get());
            let drops: Vec<_> = dataplane::DropReason::ALL.iter().map(|reason| rig.drops(*reason)).collect();
            let flows = [true, false].map(|is_v4| flows(&mut rig, is_v4));
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

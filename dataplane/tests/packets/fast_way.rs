//! The fast path forwards the same bytes by the same port as the slow path. One gateway gets a packet as it is. Its
//! twin gets it behind a packet of the same flow that is too big, so that it has to take the slow path too.
//!
//! Which path a packet took shows in the order of what leaves: the fast path sends before the slow path sends a packet
//! that arrived earlier, one that begins a flow of UDP or answers another flow.

use std::net::SocketAddr;

use dataplane::testing::{Packet, Segment, assert_checksums};
use dataplane::{Link, PortIndex, TagKind, Vlan, VlanLink, tcp_flags};
use proptest::prelude::*;
use proto::Mode;

use crate::rig::{CLUSTER, Rig, SECOND, UPLINK, ends, ip};

const ACK: u8 = tcp_flags::ACK;

/// One kind of packet.
#[derive(Clone, Copy, Debug)]
struct Case {
    mode: Mode,
    is_v4: bool,
    is_udp: bool,
    is_reply: bool,
    dont_fragment: bool,
    /// Of UDP.
    checksum: bool,
    payload: usize,
    padding: usize,
    hop_limit: u8,
    push: bool,
    /// Both sides are on VLANs.
    tagged: bool,
    /// Backends are behind two routers.
    routed: bool,
}

/// Datagrams with less data are shorter than the headers of TCP.
const SHORT: usize = 12;

fn case() -> impl Strategy<Value = Case> {
    let bits = any::<[bool; 8]>();
    let payload = prop_oneof![1 => 0..SHORT, 3 => SHORT..1200];
    (0..Mode::ALL.len(), bits, payload, 0usize..30, 2u8..=255).prop_map(|(mode, bits, payload, padding, hop_limit)| {
        // Without padding, as network cards add it, the slow path takes short datagrams.
        let padding = padding.max(SHORT.saturating_sub(payload));
        let mode = Mode::ALL[mode];
        let [is_v4, is_udp, is_reply, dont_fragment, checksum, push, tagged, routed] = bits;
        // In mode `dsr` backends are on the link.
        let routed = routed && mode != Mode::Dsr;
        let is_reply = is_reply && mode.is_two_way();
        let dont_fragment = dont_fragment || !is_v4;
        Case { mode, is_v4, is_udp, is_reply, dont_fragment, checksum, payload, padding, hop_limit, push, tagged, routed }
    })
}

const CLIENT_TAG: &[u8] = &[0x81, 0, 0, 100];
const BACKEND_TAGS: &[u8] = &[0x88, 0xa8, 0, 7, 0x81, 0, 0, 200];

fn tags(port: PortIndex) -> &'static [u8] {
    if port == UPLINK { CLIENT_TAG } else { BACKEND_TAGS }
}

impl Case {
    fn client(&self, port: u16) -> SocketAddr {
        SocketAddr::new(ip(if self.is_v4 { "198.51.100.7" } else { "2001:db8:1::7" }), port)
    }

    fn vip(&self) -> SocketAddr {
        match (self.is_v4, self.is_udp) {
            (true, false) => "192.0.2.100:80",
            (true, true) => "192.0.2.101:53",
            (false, false) => "[2001:db8::1:0]:80",
            (false, true) => "[2001:db8::1:1]:53",
        }
        .parse()
        .unwrap()
    }

    fn packet(&self, from: SocketAddr, to: SocketAddr, flags: u8) -> Packet {
        let ports = [from.port(), to.port()];
        let segment = match self.is_udp {
            true => Segment::Udp { ports, checksum: true },
            false => Segment::Tcp { ports, flags, sequence: 1_000, acknowledgement: 1_001 },
        };
        Packet::between(from.ip(), to.ip(), segment)
    }

    /// The packet of the case, from one end of the flow to the other.
    fn build(&self, (from, to): (SocketAddr, SocketAddr)) -> Packet {
        let mut packet = self.packet(from, to, if self.push { ACK | tcp_flags::PSH } else { ACK });
        if let Segment::Udp { checksum, .. } = &mut packet.segment {
            *checksum = self.checksum || !self.is_v4;
        }
        packet.payload = (0..=250).cycle().take(self.payload).collect();
        (packet.padding, packet.hop_limit) = (self.padding, self.hop_limit);
        packet.fragmentation = if self.dont_fragment { 0x4000 } else { 0 };
        packet
    }

    /// The side on which packets of the case arrive, and that by which they leave.
    fn sides(&self) -> (PortIndex, PortIndex) {
        if self.is_reply { (CLUSTER, UPLINK) } else { (UPLINK, CLUSTER) }
    }

    /// A gateway with services of the case's mode.
    fn gateway(&self) -> Rig {
        let mut rig = Rig::with_mode(self.mode);
        if !self.mode.is_two_way() {
            rig.set_backend_ports();
        }
        if self.routed {
            rig.route_backends(self.is_v4);
        }
        if self.tagged {
            let link = |port: PortIndex| match port {
                UPLINK => Link::new(UPLINK, Vlan::NONE.with(TagKind::Customer, 100).unwrap()),
                _ => Link::new(CLUSTER, Vlan::NONE.with(TagKind::Service, 7).unwrap().with(TagKind::Customer, 200).unwrap()),
            };
            let network = &mut rig.network;
            network.routes.iter_mut().for_each(|route| route.link = link(route.link.port()));
            network.neighbours.iter_mut().for_each(|neighbour| neighbour.link = link(neighbour.link.port()));
            let vlan = |link, addresses: [&str; 2]| VlanLink {
                link,
                mtu: 1500,
                addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            };
            network.vlans =
                vec![vlan(link(UPLINK), ["192.0.2.2/24", "2001:db8::2/64"]), vlan(link(CLUSTER), ["10.0.0.2/24", "fd00::2/64"])];
        }
        rig.publish();
        rig
    }

    fn tag(&self, port: PortIndex, frame: &[u8]) -> Vec<u8> {
        if self.tagged { [&frame[..12], tags(port), &frame[12..]].concat() } else { frame.to_vec() }
    }

    fn untag(&self, port: PortIndex, frame: &[u8]) -> Vec<u8> {
        if !self.tagged {
            return frame.to_vec();
        }
        let tags = tags(port);
        assert_eq!(&frame[12..12 + tags.len()], tags);
        [&frame[..12], &frame[12 + tags.len()..]].concat()
    }

    fn forward(&self, rig: &mut Rig, port: PortIndex, packet: &Packet) -> Vec<u8> {
        let sent = rig.forward(port, &self.tag(port, &packet.build()));
        self.untag(if port == UPLINK { CLUSTER } else { UPLINK }, &sent)
    }

    /// Begins a flow of the client's port; returns the ends of packets in the direction of the case, as they arrive.
    fn begin(&self, rig: &mut Rig, port: u16) -> (SocketAddr, SocketAddr) {
        let sent = self.forward(rig, UPLINK, &self.packet(self.client(port), self.vip(), tcp_flags::SYN));
        if self.is_reply { (ends(&sent).1, ends(&sent).0) } else { (self.client(port), self.vip()) }
    }

    /// Begins a flow and confirms it. The first packets that change nothing look up its route.
    fn establish(&self, rig: &mut Rig, port: u16) -> (SocketAddr, SocketAddr) {
        let (client, vip) = (self.client(port), self.vip());
        let sent = self.forward(rig, UPLINK, &self.packet(client, vip, tcp_flags::SYN));
        if self.mode.is_two_way() {
            let (snat, backend) = ends(&sent);
            let answer = self.packet(backend, snat, tcp_flags::SYN | ACK);
            let answer = if self.is_udp { answer } else { answer.numbers(1_000, 1_001) };
            self.forward(rig, CLUSTER, &answer);
            self.forward(rig, UPLINK, &self.packet(client, vip, ACK));
            self.forward(rig, CLUSTER, &self.packet(backend, snat, ACK));
            if self.is_reply { (backend, snat) } else { (client, vip) }
        } else {
            rig.now += 2 * SECOND;
            self.forward(rig, UPLINK, &self.packet(client, vip, ACK));
            self.forward(rig, UPLINK, &self.packet(client, vip, ACK));
            (client, vip)
        }
    }

    /// Feeds a burst, and returns what leaves by the case's port, without tags.
    fn burst(&self, rig: &mut Rig, frames: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let (from, to) = self.sides();
        for (frame, id) in frames.iter().zip(1..) {
            rig.arrive(from, &self.tag(from, frame), id);
        }
        rig.worker.poll(rig.now);
        rig.sent(to).iter().map(|frame| self.untag(to, frame)).collect()
    }
}

/// Whether a frame that left is the marker: it has no data.
fn is_marker(frame: &[u8], marker_len: usize) -> bool {
    frame.len() <= marker_len
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    #[test]
    fn both_ways_send_the_same_bytes_by_the_same_port(case in case()) {
        let [mut fast, mut slow] = [case.gateway(), case.gateway()];
        let (flow, same) = (case.establish(&mut fast, 5555), case.establish(&mut slow, 5555));
        prop_assert_eq!(flow, same);
        let frame = case.build(flow).build();
        let too_big = Packet { payload: vec![0; 1600], ..Case { dont_fragment: true, ..case }.build(flow) }.build();
        // A packet of the slow path that leaves by the same port: it begins a flow of UDP, or answers one. With its padding
        // the fast path recognises it; it would not overtake another packet between these addresses.
        let marker = |rig: &mut Rig| {
            let marker = match case.is_reply {
                true => {
                    let (backend, snat) = case.begin(rig, 6666);
                    case.packet(backend, snat, tcp_flags::SYN | ACK)
                }
                false => {
                    let udp = Case { is_udp: true, ..case };
                    udp.packet(udp.client(6666), udp.vip(), 0)
                }
            };
            Packet { padding: SHORT, ..marker }
        };
        let (marker_fast, marker_slow) = (marker(&mut fast), marker(&mut slow));
        let by_fast = case.burst(&mut fast, &[marker_fast.build(), frame.clone()]);
        let by_slow = case.burst(&mut slow, &[too_big, marker_slow.build(), frame]);
        prop_assert_eq!((by_fast.len(), by_slow.len()), (2, 2));
        let (first, second) = (&by_fast[0], &by_fast[1]);
        let longest_marker = 14 + 40 + 40 + 28;
        if case.payload > 100 {
            prop_assert!(!is_marker(first, longest_marker) && is_marker(second, longest_marker), "the fast way is first");
            prop_assert!(is_marker(&by_slow[0], longest_marker) && !is_marker(&by_slow[1], longest_marker), "the slow way keeps the order");
        }
        prop_assert_eq!(first, &by_slow[1]);
        if case.mode.is_two_way() || case.mode == Mode::Dsr {
            assert_checksums(first);
        }
        prop_assert_eq!(fast.counters.hits.get() + 1, slow.counters.hits.get(), "the packet that is too big has a flow too");
    }
}

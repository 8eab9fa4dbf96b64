//! The maximum segment size in SYN and SYN-ACK between ports of different MTU (FORWARDING 12).

use std::net::SocketAddr;

use dataplane::testing::{Packet, assert_checksums, segment_size, with_segment_size};
use dataplane::{Link, PortIndex, TagKind, Vlan, VlanLink, tcp_flags};
use proto::Mode;

use crate::rig::{self, CLUSTER, Rig, UPLINK, ends, ip};

const SYN: u8 = tcp_flags::SYN;
const ACK: u8 = tcp_flags::ACK;
const V4: (&str, &str) = ("198.51.100.7:5555", "192.0.2.100:80");
const V6: (&str, &str) = ("[2001:db8:7::7]:5555", "[2001:db8::1:0]:80");

fn gateway(mode: Mode, [uplink, cluster]: [u16; 2]) -> Rig {
    let mut config = rig::config(64);
    (config.ports[0].mtu, config.ports[1].mtu) = (uplink, cluster);
    let mut rig = Rig::with_config(config);
    (rig.state, rig.network) = (rig::state(), rig::network());
    rig.set_mode("web", mode);
    rig
}

/// The sizes that reach the backend and the client when both announce this one.
fn announced_mss(rig: &mut Rig, (client, vip): (&str, &str), announced: u16) -> [Option<u16>; 2] {
    let mut pass = |at: PortIndex, from: &str, to: &str, flags| {
        let sent = rig.forward(at, &with_segment_size(&Packet::tcp(from, to).flags(flags), announced));
        assert_checksums(&sent);
        (ends(&sent), segment_size(&sent))
    };
    let ((snat, backend), to_backend): ((SocketAddr, SocketAddr), _) = pass(UPLINK, client, vip, SYN);
    let (_, repeated) = pass(UPLINK, client, vip, SYN);
    assert_eq!(repeated, to_backend, "a repeated SYN is changed in the same way");
    let (_, to_client) = pass(CLUSTER, &backend.to_string(), &snat.to_string(), SYN | ACK);
    [to_backend, to_client]
}

#[test]
fn both_sides_announce_what_fits_the_smaller_port() {
    for mode in [Mode::Nat, Mode::Dnat] {
        for mtus in [[1500, 9000], [9000, 1500]] {
            for (ends, fits) in [(V4, 1460), (V6, 1440)] {
                assert_eq!(announced_mss(&mut gateway(mode, mtus), ends, 8_960), [Some(fits); 2], "{mode} {mtus:?}");
                assert_eq!(announced_mss(&mut gateway(mode, mtus), ends, 536), [Some(536); 2], "a smaller one stays");
            }
        }
    }
}

#[test]
fn between_ports_of_one_mtu_nothing_is_changed() {
    for mode in [Mode::Nat, Mode::Dnat] {
        for ends in [V4, V6] {
            assert_eq!(announced_mss(&mut gateway(mode, [1500, 1500]), ends, 8_960), [Some(8_960); 2], "{mode}");
        }
    }
}

#[test]
fn only_syns_are_changed() {
    let mut rig = gateway(Mode::Nat, [1500, 9000]);
    announced_mss(&mut rig, V4, 1_000);
    let segment = with_segment_size(&Packet::tcp(V4.0, V4.1).flags(ACK | tcp_flags::FIN), 8_960);
    assert_eq!(segment_size(&rig.forward(UPLINK, &segment)), Some(8_960));
    let without = Packet::tcp("198.51.100.8:1", V4.1).build();
    let sent = rig.forward(UPLINK, &without);
    assert_eq!(sent.len(), without.len(), "a SYN without the option gets none");
}

#[test]
fn the_mtu_of_a_vlan_device_is_that_of_its_link() {
    let link = Link::new(UPLINK, Vlan::NONE.with(TagKind::Customer, 7).unwrap());
    let mut rig = gateway(Mode::Nat, [1500, 1500]);
    rig.network.vlans = vec![VlanLink { link, mtu: 1400, addresses: vec!["198.51.100.1/24".parse().unwrap()] }];
    rig.network.routes.push(dataplane::Route { to: "198.51.100.0/24".parse().unwrap(), via: None, link, weight: 1 });
    let neighbour = dataplane::Neighbour { link, address: ip("198.51.100.7"), mac: dataplane::testing::PEER_MAC };
    rig.network.neighbours.push(neighbour);
    rig.publish();
    let tagged = |frame: Vec<u8>| [&frame[..12], &[0x81, 0, 0, 7], &frame[12..]].concat();
    let untagged = |frame: Vec<u8>| [&frame[..12], &frame[16..]].concat();
    let sent = rig.forward(UPLINK, &tagged(with_segment_size(&Packet::tcp(V4.0, V4.1), 1_460)));
    assert_eq!(segment_size(&sent), Some(1_360));
    let (snat, backend) = ends(&sent);
    let syn_ack = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(SYN | ACK);
    let sent = rig.forward(CLUSTER, &with_segment_size(&syn_ack, 1_460));
    assert_eq!(segment_size(&untagged(sent)), Some(1_360));
}

//! Neighbours whose Ethernet address changes: Linux learns it from what they ask the gateway, and is asked again for clients
//! that flows use.

use std::net::IpAddr;

use dataplane::testing::{Packet, arp_request, neighbour_solicitation};
use dataplane::{Mac, PacketOutcome, PortIndex};

use crate::rig::{CLUSTER, Rig, SECOND, UPLINK, backend_mac, ip};

/// The Ethernet address that `network` knows of the client 192.0.2.10.
const KNOWN: Mac = Mac([2, 0, 0, 0, 0, 10]);
const NEW: Mac = Mac([2, 0, 0, 0, 0x99, 0x20]);

/// The question of a station at this Ethernet address for another one.
fn question(sender: &str, mac: Mac, target: &str) -> Vec<u8> {
    match (ip(sender), ip(target)) {
        (IpAddr::V4(sender), IpAddr::V4(target)) => {
            let mut frame = arp_request(sender, target);
            frame[6..12].copy_from_slice(&mac.0);
            frame[22..28].copy_from_slice(&mac.0);
            frame
        }
        (IpAddr::V6(sender), IpAddr::V6(target)) => {
            let mut packet = neighbour_solicitation(sender, target);
            packet.source_mac = mac;
            packet.payload[18..24].copy_from_slice(&mac.0);
            packet.build()
        }
        _ => unreachable!(),
    }
}

/// What reaches Linux besides the answer to a question.
fn told(rig: &mut Rig, port: PortIndex, frame: &[u8]) -> Vec<Vec<u8>> {
    rig.to_linux(port);
    rig.worker.observer_mut().0.clear();
    rig.arrive(port, frame, 1);
    rig.worker.poll(rig.now);
    let outcomes: Vec<_> = rig.worker.observer_mut().0.iter().map(|(outcome, _)| *outcome).collect();
    assert!(outcomes.contains(&PacketOutcome::Reply(port)), "it is answered as always: {outcomes:?}");
    assert_eq!(rig.sent(port).len(), 1);
    rig.to_linux(port)
}

#[test]
fn a_known_neighbour_with_another_address_is_made_known_to_linux_by_its_question_for_an_address_of_ours() {
    let mut rig = Rig::new();
    let rows = [
        (UPLINK, "192.0.2.10", KNOWN, "192.0.2.100", "a VIP"),
        (UPLINK, "2001:db8::ffff", Mac([2, 0, 0, 0, 0, 1]), "2001:db8::1:0", "a VIP over IPv6"),
        (CLUSTER, "10.0.0.11", backend_mac(11), "10.0.0.3", "the SNAT address, by a backend"),
        (CLUSTER, "fd00::11", backend_mac(11), "fd00::3", "the SNAT address over IPv6"),
    ];
    for (port, sender, known, target, sentence) in rows {
        let known = rig.network.neighbours.iter().find(|n| n.address == ip(sender)).map_or(known, |n| n.mac);
        assert_eq!(told(&mut rig, port, &question(sender, known, target)), [[0; 0]; 0], "{sentence}: nothing new");
        let frames = told(&mut rig, port, &question(sender, NEW, target));
        assert_eq!(frames.len(), 1, "{sentence}");
        let is_of = |bytes: &[u8]| frames[0].windows(bytes.len()).any(|part| part == bytes);
        let address = match ip(sender) {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        assert!(is_of(&NEW.0) && is_of(&address), "{sentence}");
        // Linux ignores solicitations for addresses that it does not have.
        if let IpAddr::V6(target) = ip(target) {
            assert!(!is_of(&target.octets()), "{sentence}");
        }
    }
}

#[test]
fn no_entry_is_made_for_a_stranger_and_a_flood_of_changes_is_limited() {
    let mut rig = Rig::new();
    for (sender, target) in [("192.0.2.77", "192.0.2.100"), ("2001:db8::77", "2001:db8::1:0")] {
        assert_eq!(told(&mut rig, UPLINK, &question(sender, NEW, target)), [[0; 0]; 0], "{sender}");
    }
    let mut passed = 0;
    for _ in 0..100 {
        rig.now += SECOND / 1000;
        for _ in 0..100 {
            rig.put(UPLINK, &question("192.0.2.10", NEW, "192.0.2.100"));
        }
        passed += rig.to_linux(UPLINK).len();
        rig.sent(UPLINK);
    }
    assert!((1000..=4500).contains(&passed), "{passed} of 10,000: within the rates of questions and the rest");
}

#[test]
fn a_client_is_asked_for_while_a_flow_uses_it_in_a_handshake_too() {
    for (client, vip) in [("192.0.2.10:5555", "192.0.2.100:80"), ("[2001:db8::ffff]:5555", "[2001:db8::1:0]:80")] {
        let mut rig = Rig::new();
        rig.forward(UPLINK, &Packet::tcp(client, vip).build());
        while rig.neighbour_requests.pop().is_some() {}
        let address = client.parse::<std::net::SocketAddr>().unwrap().ip();
        let mut asked = 0;
        // A client whose answers are lost repeats its SYN.
        for second in 1..20 {
            rig.now += SECOND;
            if second % 4 == 0 {
                rig.forward(UPLINK, &Packet::tcp(client, vip).build());
            }
            rig.worker.poll(rig.now);
            asked += std::iter::from_fn(|| rig.neighbour_requests.pop()).filter(|(_, asked)| *asked == address).count();
        }
        assert!(asked >= 2, "{client}: {asked}");
        for _ in 0..60 {
            rig.now += SECOND;
            rig.worker.poll(rig.now);
        }
        while rig.neighbour_requests.pop().is_some() {}
        rig.now += 10 * SECOND;
        rig.worker.poll(rig.now);
        assert!(rig.neighbour_requests.is_empty(), "{client}: no flow uses it any more");
    }
}

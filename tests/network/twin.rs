//! Twins: the replies of Linux through them, their addresses, and their carrier.

use dataplane::Mac;
use sluice::ports::twin::{Interface, TwinConfig, TwinError};

use crate::{Namespace, PEER_MAC, TWIN_MAC, Twin, arp, config, ethernet, until};

/// The internet checksum (RFC 1071).
fn checksum(bytes: &[u8]) -> [u8; 2] {
    let mut sum: u32 = bytes.chunks(2).map(|b| u32::from(b[0]) << 8 | b.get(1).map_or(0, |b| u32::from(*b))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!u16::try_from(sum).unwrap()).to_be_bytes()
}

/// An ICMP echo request.
fn echo(from: [u8; 4], to: [u8; 4]) -> Vec<u8> {
    let mut icmp = [8, 0, 0, 0, 0x12, 0x34, 0, 1];
    let sum = checksum(&icmp);
    icmp[2..4].copy_from_slice(&sum);
    let mut ip = [&[0x45, 0, 0, 28, 0, 1, 0, 0, 64, 1, 0, 0][..], &from, &to].concat();
    let sum = checksum(&ip);
    ip[10..12].copy_from_slice(&sum);
    ethernet(TWIN_MAC, 0x0800, &[ip, icmp.to_vec()].concat())
}

/// A neighbour solicitation (RFC 4861) for 2001:db8::2 from 2001:db8::9.
fn solicitation() -> Vec<u8> {
    let address = |last: u8| [&[0x20, 1, 0x0d, 0xb8][..], &[0; 11], &[last]].concat();
    let group = [&[0xff, 2][..], &[0; 9], &[1, 0xff, 0, 0, 2]].concat();
    let mut icmp = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &address(2), &[1, 1], &PEER_MAC.0].concat();
    let length = u8::try_from(icmp.len()).unwrap();
    let sum = checksum(&[&address(9)[..], &group, &[0, 0, 0, length, 0, 0, 0, 58], &icmp].concat());
    icmp[2..4].copy_from_slice(&sum);
    let ip = [&[0x60, 0, 0, 0, 0, length, 58, 255][..], &address(9), &group].concat();
    ethernet(Mac([0x33, 0x33, 0xff, 0, 0, 2]), 0x86dd, &[ip, icmp].concat())
}

#[test]
fn linux_answers_arp_ndp_and_ping_through_the_twin() {
    let Some(namespace) = Namespace::new("linux answers arp ndp and ping through the twin", "answers") else { return };
    namespace.enter(async || {
        let twin = Twin::open(&config(&["192.0.2.2/24", "2001:db8::2/64"])).await;
        twin.send(arp(1, [192, 0, 2, 9], [192, 0, 2, 2]));
        twin.expect("ARP is answered", |f| f[12..14] == [8, 6] && f[20..22] == [0, 2] && f[22..28] == TWIN_MAC.0).await;
        twin.send(echo([192, 0, 2, 9], [192, 0, 2, 2]));
        twin.expect("ping is answered", |f| f[12..14] == [8, 0] && f[0..6] == PEER_MAC.0 && f[23] == 1 && f[34] == 0).await;
        // Linux starts IPv6 when it notices the carrier, up to a second later. Repeat the solicitation, as a host does.
        until("NDP is answered", || {
            twin.send(solicitation());
            twin.received().any(|f| f[12..14] == [0x86, 0xdd] && f[20] == 58 && f[54] == 136)
        })
        .await;
        assert_eq!(twin.counters.to_linux_refused.load(std::sync::atomic::Ordering::Relaxed), 0);
    });
    let link = namespace.ip("-d link show uplink");
    assert!(link.contains("02:00:00:00:aa:01") && link.contains("mtu 1400") && link.contains("sluice twin"), "{link}");
}

#[test]
fn a_restart_keeps_the_twin_and_removes_only_the_addresses_that_sluice_added() {
    let Some(namespace) = Namespace::new("a restart keeps the twin", "restart") else {
        return;
    };
    let first = config(&["192.0.2.2/24", "2001:db8::2/64"]);
    namespace.enter(async || drop(Twin::open(&first).await));
    namespace.ip("addr add 192.0.2.77/24 dev uplink");
    namespace.ip("route add 198.51.100.0/24 via 192.0.2.1 dev uplink");
    let index = |link: String| link.split(':').next().map(str::to_owned);
    let before = index(namespace.ip("link show uplink"));
    namespace.enter(async || drop(Twin::open(&first).await));
    assert_eq!(index(namespace.ip("link show uplink")), before);
    assert!(namespace.ip("route show").contains("198.51.100.0/24 via 192.0.2.1"), "routes survive a restart of the gateway");
    let other = TwinConfig { mac: Some(PEER_MAC), mtu: 1300, ..config(&["192.0.2.3/24"]) };
    namespace.enter(async || drop(Twin::open(&other).await));
    let link = namespace.ip("link show uplink");
    assert!(link.contains("mtu 1300") && link.contains("02:00:00:00:bb:09"), "{link}");
    let addresses = namespace.ip("addr show uplink");
    for (address, stays) in [("192.0.2.2/", false), ("2001:db8::2/", false), ("192.0.2.3/", true), ("192.0.2.77/", true)] {
        assert_eq!(addresses.contains(address), stays, "{address} in {addresses}");
    }
}

#[test]
fn an_interface_that_sluice_did_not_make_is_refused_and_not_changed() {
    let Some(namespace) = Namespace::new("an interface that sluice did not make is refused", "foreign") else { return };
    for kind in ["link add uplink type veth peer name other", "tuntap add dev uplink mode tap"] {
        namespace.ip(kind);
        let before = namespace.ip("addr show uplink");
        let refused = namespace.enter(async || Interface::open(&config(&["192.0.2.2/24"])).await.map(drop));
        assert!(matches!(refused, Err(TwinError::Foreign { .. })), "{kind}");
        assert_eq!(namespace.ip("addr show uplink"), before);
        namespace.ip("link del uplink");
    }
}

#[test]
fn the_carrier_of_the_twin_follows_the_link() {
    let Some(namespace) = Namespace::new("the carrier of the twin follows the link", "carrier") else { return };
    namespace.enter(async || {
        let mut twin = Twin::open(&config(&[])).await;
        for (up, text) in [(false, "NO-CARRIER"), (true, "LOWER_UP"), (false, "NO-CARRIER")] {
            twin.interface.set_carrier(up).await.unwrap();
            until(text, || namespace.ip("link show uplink").contains(text)).await;
        }
    });
}

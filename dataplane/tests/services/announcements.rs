//! Announcements of the addresses that a gateway answers for: all of them, however many there are, at a bounded rate.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use dataplane::Buffer;
use proto::{Service, ServiceName};

use crate::rig::{self, Rig, SECOND, UPLINK};

const MS: u64 = SECOND / 1000;
/// Maximum number of announcements in any second.
const RATE: usize = 4000;
/// Maximum number of announcements in one poll after a pause.
const BURST: usize = 8;

/// The VIP of the pool with this number.
fn vip(n: u16) -> Ipv6Addr {
    Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 1, n)
}

/// Gives the service `dns` these VIPs on its IPv6 port.
fn give(rig: &mut Rig, vips: impl Iterator<Item = u16>) {
    let name = ServiceName::new("default", "dns");
    let mut service = Service::clone(&rig.state.services[&name]);
    service.ports[1].vips = vips.map(|n| IpAddr::V6(vip(n))).collect();
    rig.state.services.insert(name, Arc::new(service));
    rig.state.generation.counter += 1;
    let snapshot = rig.compiler.compile(&rig.state, &rig.network, &rig.health, rig.now);
    rig.publisher.publish(snapshot);
}

/// Polls the gateway every millisecond until `until`, and records when which VIP was announced.
fn run(rig: &mut Rig, until: u64, noted: &mut Vec<(u64, Ipv6Addr)>) {
    while rig.now < until {
        rig.now += MS;
        rig.worker.poll(rig.now);
        for buffer in rig.worker.port_mut(UPLINK).unwrap().sent.drain(..) {
            let frame = buffer.bytes();
            // An unsolicited advertisement: its target follows 4 bytes of flags.
            if frame[12..14] == [0x86, 0xdd] && frame[54] == 136 {
                noted.push((rig.now, <[u8; 16]>::try_from(&frame[62..78]).unwrap().into()));
            }
        }
    }
}

fn by_vip(noted: &[(u64, Ipv6Addr)]) -> BTreeMap<Ipv6Addr, Vec<u64>> {
    let mut times: BTreeMap<_, Vec<u64>> = BTreeMap::new();
    noted.iter().for_each(|&(at, vip)| times.entry(vip).or_default().push(at));
    times
}

#[test]
fn all_vips_are_announced_three_times_however_many_there_are_and_paced() {
    let mut rig = Rig::before_state(64);
    (rig.state, rig.network) = (rig::state(), rig::network());
    let mut noted = Vec::new();
    give(&mut rig, 1..=10_000);
    let start = rig.now;
    run(&mut rig, start + 12 * SECOND, &mut noted);

    let times = by_vip(&noted);
    for n in 1..=10_000 {
        let times = times.get(&vip(n)).map_or(&[][..], Vec::as_slice);
        assert_eq!(times.len(), 3, "VIP {n}: {times:?}");
        assert!(times.windows(2).all(|pair| pair[1] - pair[0] >= SECOND), "VIP {n}: a second between them: {times:?}");
    }
    let last_first = times.values().map(|times| times[0]).max().unwrap();
    assert!(last_first - start <= 10_100 * SECOND / RATE as u64, "all are announced once before any again");
    for window in noted.windows(RATE + BURST + 1) {
        assert!(window[RATE + BURST].0 - window[0].0 >= SECOND, "more than {RATE} in a second");
    }
    run(&mut rig, start + 20 * SECOND, &mut noted);
    assert_eq!(noted.len(), 3 * 10_000 + 3, "and then it is quiet; one VIP more is that of service web");
}

#[test]
fn vips_added_meanwhile_are_announced_and_removed_ones_no_longer() {
    let mut rig = Rig::before_state(64);
    (rig.state, rig.network) = (rig::state(), rig::network());
    let mut noted = Vec::new();
    give(&mut rig, 1..=6_000);
    let start = rig.now;
    run(&mut rig, start + 1600 * MS, &mut noted);
    assert_eq!(by_vip(&noted).values().map(Vec::len).max(), Some(1), "the first round has just ended");
    give(&mut rig, 5_000..=7_000);
    let changed = rig.now;
    run(&mut rig, start + 12 * SECOND, &mut noted);

    let times = by_vip(&noted);
    for n in 1..5_000 {
        assert!(times[&vip(n)].iter().all(|&at| at <= changed), "VIP {n} is gone");
    }
    for n in 5_000..=7_000 {
        assert_eq!(times[&vip(n)].len(), 3, "VIP {n}");
    }
    give(&mut rig, 5_000..=6_999);
    give(&mut rig, 5_000..=7_000);
    let again = noted.len();
    run(&mut rig, start + 16 * SECOND, &mut noted);
    assert!(noted[again..].iter().all(|(_, address)| *address == vip(7_000)), "only what is new again");
}

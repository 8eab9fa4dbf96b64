//! The owner function: the same worker for both directions of any flow, with each method of steering (FORWARDING 5).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use dataplane::flow::Tick;
use dataplane::flow::{SnatAddress, SnatPorts, SnatTarget, TargetSlot};
use dataplane::testing::{Packet, Rss, Segment};
use dataplane::wire::RETA_ENTRIES;
use dataplane::workers::{PacketTarget, Steering, WorkerId};
use dataplane::{Address, Tuple};
use proptest::prelude::*;

const SLOT: TargetSlot = TargetSlot { index: 0, generation: 0 };

fn ways(workers: u8, seed: u64) -> [Steering; 2] {
    [Steering::own_hash(workers, seed), Steering::toeplitz(workers, seed)]
}

/// Checks a client's packet to a frontend against the owner of a backend's reply to it.
fn check<A: Address>(workers: u8, seed: u64, client: (A, u16), vip: (A, u16), backend: (A, u16), snat: A, flows_before: u16) {
    let packet = Tuple { source: client.0, destination: vip.0, source_port: client.1, destination_port: vip.1, protocol: 6 };
    for steering in ways(workers, seed) {
        let owner = steering.owner(&packet, PacketTarget::Frontend);
        assert!(owner.0 < workers);
        assert_eq!(steering.owner(&packet, PacketTarget::Frontend), owner, "a pure function");

        let mut ports = SnatPorts::new(1 << 16, steering.share(owner)).unwrap();
        let target = SnatTarget { slot: SLOT, address: backend.0, port: backend.1, protocol: 6 };
        let addresses = [SnatAddress { address: snat, index: 0 }];
        for _ in 0..flows_before {
            let lease = ports.allocate(target, &addresses, 0, Tick::at(0)).unwrap();
            let reply = Tuple {
                source: backend.0,
                destination: lease.address,
                source_port: backend.1,
                destination_port: lease.port,
                protocol: 6,
            };
            assert_eq!(steering.owner(&reply, PacketTarget::Snat), owner, "nat: the reply to port {}", lease.port);
        }

        let by_address = steering.owner(&packet, PacketTarget::FrontendOfAddress);
        let reply = Tuple { source: backend.0, source_port: backend.1, ..packet.reversed() };
        assert_eq!(steering.owner(&reply, PacketTarget::Client), by_address, "dnat: the reply to the client");
    }
}

proptest! {
    #[test]
    fn both_directions_of_a_flow_have_one_owner(
        workers in 1..=64_u8,
        seed: u64,
        [client, vip, backend, snat]: [u32; 4],
        [client_port, vip_port, backend_port]: [u16; 3],
    ) {
        check(workers, seed, (client, client_port), (vip, vip_port), (backend, backend_port), snat, 300);
    }

    #[test]
    fn both_directions_of_a_flow_have_one_owner_in_ipv6(
        workers in 1..=64_u8,
        seed: u64,
        [client, vip, backend, snat]: [u128; 4],
        [client_port, vip_port, backend_port]: [u16; 3],
    ) {
        check(workers, seed, (client, client_port), (vip, vip_port), (backend, backend_port), snat, 300);
    }

    #[test]
    fn a_card_with_key_and_table_finds_the_owner(workers in 1..=64_u8, seed: u64, ports: [u16; 2], bits: [u128; 2]) {
        let steering = Steering::toeplitz(workers, seed);
        let reta = (0..4 * RETA_ENTRIES).map(|entry| steering.reta(entry).0).collect();
        let card = Rss::new(*steering.rss_key().unwrap(), reta);
        let frame = |source: IpAddr, destination: IpAddr| {
            let (queue, hash) = card.queue(&Packet::between(source, destination, Segment::Udp { ports, checksum: true }).build());
            assert!(hash.is_some());
            WorkerId(queue)
        };
        let [source_port, destination_port] = ports;
        #[allow(clippy::cast_possible_truncation)] // any 32 bits
        let [a, b] = bits.map(|bits| bits as u32);
        let tuple = Tuple { source: a, destination: b, source_port, destination_port, protocol: 17 };
        prop_assert_eq!(steering.owner(&tuple, PacketTarget::Frontend), frame(Ipv4Addr::from(a).into(), Ipv4Addr::from(b).into()));
        let [a, b] = bits;
        let tuple = Tuple { source: a, destination: b, source_port, destination_port, protocol: 17 };
        prop_assert_eq!(steering.owner(&tuple, PacketTarget::Snat), frame(Ipv6Addr::from(a).into(), Ipv6Addr::from(b).into()));
    }
}

#[test]
fn the_shares_of_all_workers_hold_every_snat_port_once() {
    for workers in [1, 2, 3, 48, 64] {
        for steering in ways(workers, 5) {
            let target = SnatTarget { slot: SLOT, address: 0x0a00_000b_u32, port: 8080, protocol: 6 };
            let addresses = [SnatAddress { address: 0x0a00_0003, index: 0 }];
            let mut all = Vec::new();
            for worker in (0..workers).map(WorkerId) {
                let share = steering.share(worker);
                let count = share.count();
                let mut ports = SnatPorts::new(1 << 17, share).unwrap();
                let found = (0..count).map(|_| ports.allocate(target, &addresses, 0, Tick::at(0)).unwrap().port);
                all.extend(found);
                assert!(ports.allocate(target, &addresses, 0, Tick::at(0)).is_none(), "worker {worker:?} has {count} ports");
            }
            all.sort_unstable();
            assert!(all.into_iter().eq(1024..=u16::MAX), "{workers} workers");
        }
    }
}

#[test]
fn clients_are_spread_evenly() {
    for steering in ways(4, 11) {
        let mut flows = [0_u32; 4];
        for n in 0..40_000_u32 {
            let source_port = u16::try_from(1024 + n % 100).unwrap();
            let tuple = Tuple {
                source: 0x0a00_0000 + n / 100,
                destination: 0xc000_0264_u32,
                source_port,
                destination_port: 80,
                protocol: 6,
            };
            flows[usize::from(steering.owner(&tuple, PacketTarget::Frontend).0)] += 1;
        }
        assert!(flows.iter().all(|n| (9_000..11_000).contains(n)), "{flows:?}");
    }
}

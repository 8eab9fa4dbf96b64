//! Jumbo frames through the engine over DPDK. EAL starts once per process, so this file has one test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use dataplane::testing::{Packet, arriving_at, assert_checksums, reassembled};
use dataplane::{
    Buffer, Burst, Compiler, Config, DropReason, FlowLimits, Health, Mac, Neighbour, Network, Observe, PacketFlow, PacketOutcome,
    Parts, PortConfig, PortIndex, Publisher, Route, Tunnel, Worker, WorkerCounters, tcp_flags,
};
use dpdk_port::{DpdkPort, Packet as Received, QueuePair, QueueReceiver, size_memory};
use dpdk_sys::{Eal, EalConfig, Hugepages, Mbuf, Mempool, MempoolConfig, RingInput, RingOutput, RingPort};
use proto::limits::MAGLEV_HASH_VERSION;
use proto::{Backend, BackendState, Family, Generation, MaglevSpec, Protocol, Service, ServiceName, ServicePort, State};

const SECOND: u64 = 1_000_000_000;
const NAMES: [&str; 3] = ["uplink", "cluster", "narrow"];
/// Two ports with jumbo frames, and one without.
const MTUS: [u16; 3] = [9000, 9000, 1500];
const UPLINK: PortIndex = PortIndex(0);
const CLUSTER: PortIndex = PortIndex(1);
const NARROW: PortIndex = PortIndex(2);
/// Bytes of a segment.
const SEGMENT_BYTES: usize = 2048;

#[derive(Debug, Default)]
struct LastOutcome(Option<PacketOutcome>);

impl Observe<Received> for LastOutcome {
    fn observe(&mut self, _: &Received, outcome: PacketOutcome, _: impl FnOnce() -> Option<PacketFlow>) {
        self.0 = Some(outcome);
    }
}

struct Gateway {
    worker: Worker<DpdkPort, LastOutcome>,
    ends: Vec<(RingInput, RingOutput)>,
    counters: Arc<WorkerCounters>,
    /// Pool of the segments in which frames arrive.
    segments: Mempool,
    pool: Mempool,
    now: u64,
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn mac_of(port: PortIndex) -> Mac {
    Mac([2, 0, 0, 0, 0xaa, port.0])
}

/// Port `n` has the prefix 10.`n`.0.0/24 and a neighbour 10.`n`.0.11.
fn config() -> Config {
    let port = |n: u8| PortConfig {
        name: NAMES[usize::from(n)].into(),
        mac: mac_of(PortIndex(n)),
        mtu: MTUS[usize::from(n)],
        addresses: vec![format!("10.{n}.0.2/24").parse().unwrap()],
        twin: false,
    };
    Config {
        ports: (0..3).map(port).collect(),
        snat: vec![ip("10.1.0.3"), ip("10.2.0.3")],
        node_port_addresses: vec![],
        flows: FlowLimits::default(),
        shared_snat: false,
        targets_max: dataplane::flow::TARGETS_MAX,
        tunnel: Tunnel::default(),
    }
}

fn network() -> Network {
    let on_link =
        |n: u8| Route { to: format!("10.{n}.0.0/24").parse().unwrap(), via: None, link: PortIndex(n).into(), weight: 1 };
    let neighbour =
        |n: u8| Neighbour { link: PortIndex(n).into(), address: ip(&format!("10.{n}.0.11")), mac: Mac([2, 0, 0, 0, n, 11]) };
    let addresses = (0..3).map(|n| ip(&format!("10.{n}.0.2"))).collect();
    Network {
        routes: (0..3).map(on_link).collect(),
        neighbours: (0..3).map(neighbour).collect(),
        addresses,
        ..Network::default()
    }
}

/// A Service behind port 1 at 10.0.0.101:80, and one behind port 2 at 10.0.0.102:80.
fn state() -> State {
    let service = |n: u8| {
        let backend = SocketAddr::new(ip(&format!("10.{n}.0.11")), 8080);
        let port = ServicePort {
            vips: vec![ip(&format!("10.0.0.10{n}"))],
            backends: vec![Backend { address: backend, weight: 1, state: BackendState::Active }],
            ..ServicePort::new(
                Protocol::Tcp,
                Family::V4,
                80,
                MaglevSpec { size: 251, seed: 0, hash_version: MAGLEV_HASH_VERSION },
            )
        };
        let name = ServiceName::new("default", NAMES[usize::from(n)]);
        (name.clone(), Arc::new(Service::new(name, vec![port])))
    };
    let generation = Generation { epoch: "test".into(), counter: 1 };
    State { generation, services: [service(1), service(2)].into_iter().collect(), pools: vec![] }
}

impl Gateway {
    fn new() -> Self {
        let (pool_config, memory_mb) = size_memory(3, 1, 9000);
        let eal_config =
            EalConfig { hugepages: Hugepages::Off, memory_mb: memory_mb + 4, node: None, devices: vec![], cores: vec![] };
        let eal = Eal::start(&eal_config).unwrap();
        let pool = Mempool::new(eal, &pool_config).unwrap();
        let segments = MempoolConfig { name: "segments".into(), packets: 511, frame_bytes: 1518, node: None };
        let segments = Mempool::new(eal, &segments).unwrap();
        let (mut ports, mut ends) = (vec![], vec![]);
        for n in 0..3 {
            let RingPort { rx, tx, input, output, .. } = RingPort::new(eal, n, 64, pool).unwrap();
            ports.push((DpdkPort::new(QueueReceiver::fixed(QueuePair { rx: Some(rx), tx: Some(tx) }), pool), None));
            ends.push((input, output));
        }
        let (config, counters) = (config(), Arc::new(WorkerCounters::default()));
        let limits = config.flows.clone();
        let mut compiler = Compiler::new(config).counting(vec![counters.clone()]);
        let (mut publisher, mut subscribers) = Publisher::new(compiler.initial(), 1);
        let parts = Parts {
            ports,
            subscriber: subscribers.remove(0),
            limits,
            counters: counters.clone(),
            neighbour_requests: Arc::new(ArrayQueue::new(64)),
            seed: 7,
            peers: None,
            observer: LastOutcome::default(),
        };
        let worker = Worker::new(parts).unwrap();
        publisher.publish(compiler.compile(&state(), &network(), &Health::default(), SECOND));
        let mut gateway = Self { worker, ends, counters, segments, pool, now: SECOND };
        // Wait until the announcements of the VIPs are over.
        for _ in 0..40 {
            gateway.now += SECOND / 8;
            gateway.worker.poll(gateway.now);
        }
        for port in 0..3 {
            gateway.sent(PortIndex(port));
        }
        gateway
    }

    /// Delivers a frame to a port, in segments, and returns what the worker did with it.
    fn put(&mut self, port: PortIndex, frame: &[u8]) -> Option<PacketOutcome> {
        let frame = arriving_at(mac_of(port), frame);
        let mut parts = frame.chunks(SEGMENT_BYTES).map(|part| {
            let mut segment = self.segments.allocate().unwrap();
            assert!(segment.resize(part.len()));
            segment.bytes_mut().copy_from_slice(part);
            segment
        });
        let mut packet: Mbuf = parts.next().unwrap();
        parts.for_each(|segment| packet.append(segment).unwrap());
        let mut burst: Burst<Received> = [packet.into()].into_iter().collect();
        self.ends[usize::from(port.0)].0.put(&mut burst);
        self.worker.observer_mut().0 = None;
        self.worker.poll(self.now);
        self.worker.observer_mut().0
    }

    /// The frames that a port has sent.
    fn sent(&mut self, port: PortIndex) -> Vec<Vec<u8>> {
        let mut burst: Burst<Received> = Burst::new();
        self.ends[usize::from(port.0)].1.take(&mut burst);
        burst.iter().map(|packet| packet.bytes().to_vec()).collect()
    }
}

fn to_vip(n: u8, flags: u8, payload: &[u8]) -> Packet {
    Packet::tcp("10.0.0.11:5555", &format!("10.0.0.10{n}:80")).flags(flags).payload(payload)
}

#[test]
fn jumbo_frames_pass_unchanged_and_longer_ones_are_fragmented_or_answered_with_icmp() {
    let payload: Vec<u8> = (0..=250).cycle().take(8960).collect();
    let mut gateway = Gateway::new();

    // A frame of 6,054 bytes, in three segments.
    assert_eq!(gateway.put(UPLINK, &to_vip(1, tcp_flags::SYN, &[]).build()), Some(PacketOutcome::Forward(CLUSTER)));
    let syn = gateway.sent(CLUSTER).remove(0);
    let snat_port = u16::from_be_bytes([syn[34], syn[35]]);
    for len in [6000, 8960] {
        let data = to_vip(1, tcp_flags::ACK, &payload[..len]);
        assert_eq!(gateway.put(UPLINK, &data.build()), Some(PacketOutcome::Forward(CLUSTER)), "{len}");
        let sent = gateway.sent(CLUSTER);
        assert_eq!((sent.len(), sent[0].len()), (1, 54 + len));
        assert_checksums(&sent[0]);
        assert_eq!(sent[0][54..], payload[..len], "the payload is unchanged");
    }

    // The reply.
    let reply = Packet::tcp("10.1.0.11:8080", &format!("10.1.0.3:{snat_port}")).flags(tcp_flags::ACK).payload(&payload);
    assert_eq!(gateway.put(CLUSTER, &reply.build()), Some(PacketOutcome::Forward(UPLINK)));
    let sent = gateway.sent(UPLINK).remove(0);
    assert_checksums(&sent);
    assert_eq!(sent[54..], payload);

    // 9,000 bytes do not fit an MTU of 1,500. With DF set the sender gets an ICMP error; without, the packet is
    // fragmented.
    assert_eq!(gateway.put(UPLINK, &to_vip(2, tcp_flags::SYN, &[]).build()), Some(PacketOutcome::Forward(NARROW)));
    let _syn = gateway.sent(NARROW);
    let data = to_vip(2, tcp_flags::ACK, &payload);
    assert_eq!(gateway.put(UPLINK, &data.build()), Some(PacketOutcome::Reply(UPLINK)));
    let icmp_error = gateway.sent(UPLINK).remove(0);
    assert_checksums(&icmp_error);
    assert_eq!(
        (&icmp_error[34..36], &icmp_error[40..42]),
        (&[3, 4][..], &1500_u16.to_be_bytes()[..]),
        "fragmentation needed, 1500"
    );
    assert_eq!(icmp_error.len(), 14 + 576, "at most the length of an ICMP error");
    assert_eq!(gateway.put(UPLINK, &Packet { fragmentation: 0, ..data }.build()), Some(PacketOutcome::Forward(NARROW)));
    let pieces = gateway.sent(NARROW);
    assert_eq!(pieces.len(), 7);
    assert!(pieces.iter().all(|piece| piece.len() <= 1514));
    let whole = reassembled(&pieces);
    assert_checksums(&whole);
    assert_eq!(whole[54..], payload);

    // A frame that exceeds a buffer is malformed, one that lacks a segment ends before its packet.
    let longer = Packet::udp("10.0.0.11:5555", "10.0.0.101:80").payload(&[0; 9300]).build();
    assert_eq!(gateway.put(UPLINK, &longer), Some(PacketOutcome::Drop(DropReason::Malformed)), "longer than a buffer");
    let mut cut_off = to_vip(1, tcp_flags::ACK, &payload).build();
    cut_off.truncate(6000);
    assert_eq!(gateway.put(UPLINK, &cut_off), Some(PacketOutcome::Drop(DropReason::Truncated)), "a segment is missing");

    assert!(gateway.counters.account().closes(), "{:?}", gateway.counters.account());
    let (segments, pool) = (gateway.segments, gateway.pool);
    drop(gateway);
    assert_eq!((segments.available(), pool.available()), (segments.packets(), pool.packets()), "no buffer is lost");
}

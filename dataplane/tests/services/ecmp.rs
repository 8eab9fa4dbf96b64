//! Gateways behind routers that spread flows over them (ECMP): how many connections of modes without state change their
//! backend when a gateway comes or goes.

use std::sync::Arc;

use dataplane::testing::Packet;
use dataplane::{Neighbour, tcp_flags};
use proto::limits::MAGLEV_HASH_VERSION;
use proto::{Backend, BackendState, Family, MaglevSpec, Mode, Probe, Protocol, Service, ServiceName, ServicePort, State};

use crate::rig::{self, CLUSTER, Rig, SECOND, UPLINK, backend_mac, ip};

const VIP: &str = "192.0.2.100";
const MINUTE: u64 = 60 * SECOND;
const FLOWS: u64 = 1500;
/// Ages of the connections are spread over this time. None is silent for so long that its gateway forgets it.
const AGES: u64 = 14 * MINUTE;
/// Unix time at monotonic time 0.
const UNIX: u64 = 1_700_000_000 * SECOND;

/// How a router maps hashes to gateways.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ecmp {
    /// The remainder of the hash.
    Modulo,
    /// Buckets, of which only those of a gateway that leaves, or as many as one that joins needs, get another gateway.
    Resilient,
}

const BUCKETS: usize = 240;

impl Ecmp {
    /// Buckets of `gateways`, by their positions, before any comes or goes.
    fn buckets(self, gateways: usize) -> Vec<usize> {
        (0..BUCKETS).map(|bucket| bucket % gateways).collect()
    }

    fn leave(self, buckets: &[usize], gateway: usize, gateways: usize) -> Vec<usize> {
        let rest: Vec<usize> = (0..gateways).filter(|one| *one != gateway).collect();
        let mut next = rest.iter().cycle();
        match self {
            Self::Modulo => (0..BUCKETS).map(|bucket| rest[bucket % rest.len()]).collect(),
            Self::Resilient => buckets.iter().map(|one| if *one == gateway { *next.next().unwrap() } else { *one }).collect(),
        }
    }

    fn join(self, buckets: &[usize], gateways: usize) -> Vec<usize> {
        match self {
            Self::Modulo => self.buckets(gateways + 1),
            // Every so many buckets of each gateway.
            Self::Resilient => {
                let is_taken = |bucket: usize| (bucket / gateways).is_multiple_of(gateways + 1);
                buckets.iter().enumerate().map(|(bucket, one)| if is_taken(bucket) { gateways } else { *one }).collect()
            }
        }
    }
}

fn split_mix(n: u64) -> u64 {
    let mut z = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

fn packet(flow: u64, flags: u8) -> Vec<u8> {
    let client = format!("198.51.{}.{}:{}", 100 + flow / 250, 1 + flow % 250, 2000 + flow * 7);
    Packet::tcp(&client, &format!("{VIP}:80")).flags(flags).build()
}

/// Gateways that follow the same controller.
struct Fleet {
    gateways: Vec<Rig>,
    state: State,
    /// Backends of the service.
    listed: Vec<u8>,
    /// Whether the controller sends earlier backends.
    sends_earlier: bool,
    now: u64,
}

impl Fleet {
    fn new(mode: Mode, gateways: usize, backends: &[u8]) -> Self {
        let maglev = MaglevSpec { size: 2039, seed: 0, hash_version: MAGLEV_HASH_VERSION };
        let port = ServicePort { vips: vec![ip(VIP)], ..ServicePort::new(Protocol::Tcp, Family::V4, 80, maglev) };
        let mut service = Service::new(ServiceName::new("default", "web"), vec![port]);
        (service.mode, service.health.probe) = (mode, Probe::None);
        let mut state = rig::state();
        state.services = [(service.name.clone(), Arc::new(service))].into_iter().collect();
        let mut fleet = Self { gateways: Vec::new(), state, listed: Vec::new(), sends_earlier: true, now: 5 * 3600 * SECOND };
        fleet.set_backends(backends);
        (0..gateways).for_each(|_| fleet.join());
        // So that the first table is an old one.
        fleet.now += 3 * 3600 * SECOND;
        fleet
    }

    fn join(&mut self) {
        let mut rig = Rig::before_state(4096);
        rig.network = rig::network();
        let mac = |n| Neighbour { link: CLUSTER.into(), address: ip(&format!("10.0.0.{n}")), mac: backend_mac(n) };
        rig.network.neighbours.extend((14..40).map(mac));
        self.gateways.push(rig);
        self.publish();
    }

    /// A controller's change of the backends.
    fn set_backends(&mut self, backends: &[u8]) {
        let backend =
            |n: &u8| Backend { address: format!("10.0.0.{n}:80").parse().unwrap(), weight: 1, state: BackendState::Active };
        self.listed = backends.to_vec();
        let unix_s = (UNIX + self.now) / SECOND;
        for service in self.state.services.clone().values() {
            let mut service = Service::clone(service);
            for port in &mut service.ports {
                let new = ServicePort { backends: backends.iter().map(backend).collect(), ..port.clone() };
                let earlier = if self.sends_earlier { new.earlier_after(port, unix_s) } else { Vec::new() };
                *port = ServicePort { earlier, ..new };
            }
            self.state.services.insert(service.name.clone(), Arc::new(service));
        }
        self.publish();
    }

    fn publish(&mut self) {
        for rig in &mut self.gateways {
            rig.now = rig.now.max(self.now);
            rig.state = self.state.clone();
            rig.compiler.set_time_of_day(UNIX + rig.now, rig.now);
            rig.publish();
        }
    }

    /// The backend that gets a packet through this gateway.
    fn backend(&mut self, gateway: usize, flow: u64, flags: u8) -> u8 {
        let rig = &mut self.gateways[gateway];
        rig.now = rig.now.max(self.now);
        rig.forward(UPLINK, &packet(flow, flags))[5]
    }

    /// Opens connections over [`AGES`], and changes the backends some time before the end. Returns the backend of each.
    fn open(&mut self, buckets: &[usize], change: Option<(u64, &[u8])>) -> Vec<u8> {
        let (start, mut backends) = (self.now, vec![0; usize::try_from(FLOWS).unwrap()]);
        let mut steps: Vec<(u64, u64, u8)> = (0..FLOWS)
            .flat_map(|flow| {
                let opened = start + flow * (AGES / FLOWS);
                // The third packet of the client, later than one second, confirms the flow.
                [(0, tcp_flags::SYN), (SECOND / 10, tcp_flags::ACK), (2 * SECOND, tcp_flags::ACK)]
                    .map(|(later, flags)| (opened + later, flow, flags))
            })
            .collect();
        steps.sort_unstable();
        let mut change = change.map(|(before_end, backends)| (start + AGES - before_end, backends));
        for (at, flow, flags) in steps {
            if let Some((_, backends)) = change.take_if(|(due, _)| *due <= at) {
                self.now = at;
                self.set_backends(backends);
            }
            self.now = at;
            let chosen = self.backend(buckets[bucket(flow)], flow, flags);
            let own = &mut backends[usize::try_from(flow).unwrap()];
            assert!(flags == tcp_flags::SYN || *own == chosen, "a gateway keeps its flows");
            *own = chosen;
        }
        backends
    }

    /// How many connections get another backend when routers use these buckets, per thousand of all. Connections of a
    /// removed backend end with its process.
    fn moved(&mut self, buckets: &[usize], backends: &[u8]) -> f64 {
        let listed = self.listed.clone();
        let is_moved = |(flow, own): &(u64, &u8)| self.backend(buckets[bucket(*flow)], *flow, tcp_flags::ACK) != **own;
        let moved = (0..).zip(backends).filter(|(_, own)| listed.contains(own)).filter(is_moved).count();
        1000.0 * f64::from(u32::try_from(moved).unwrap()) / f64::from(u32::try_from(FLOWS).unwrap())
    }
}

fn bucket(flow: u64) -> usize {
    usize::try_from(split_mix(flow) % BUCKETS as u64).unwrap()
}

/// Connections that change their backend when the last of three gateways leaves, and when a fourth joins, per thousand.
fn come_and_go(mode: Mode, ecmp: Ecmp, change: Option<(u64, &[u8])>, sends_earlier: bool) -> [f64; 2] {
    let first: Vec<u8> = (11..21).collect();
    [false, true].map(|joins| {
        let mut fleet = Fleet::new(mode, 3, &first);
        fleet.sends_earlier = sends_earlier;
        let buckets = ecmp.buckets(3);
        let backends = fleet.open(&buckets, change);
        if joins {
            fleet.join();
            fleet.moved(&ecmp.join(&buckets, 3), &backends)
        } else {
            fleet.moved(&ecmp.leave(&buckets, 2, 3), &backends)
        }
    })
}

#[test]
fn within_minutes_of_a_change_at_most_one_connection_in_a_hundred_moves_with_resilient_hashing() {
    let (more, fewer): (Vec<u8>, Vec<u8>) = ((11..22).collect(), (11..20).collect());
    println!("per thousand: a gateway of three leaves, a fourth joins");
    for mode in [Mode::Dsr, Mode::Ipip, Mode::Gue] {
        for ecmp in [Ecmp::Modulo, Ecmp::Resilient] {
            assert_eq!(come_and_go(mode, ecmp, None, true), [0.0, 0.0], "without a change of backends none moves");
        }
    }
    for (what, backends) in [("one more backend", &more), ("one fewer backend", &fewer)] {
        for minutes in [1, 3, 5, 10] {
            for ecmp in [Ecmp::Modulo, Ecmp::Resilient] {
                let rates = come_and_go(Mode::Gue, ecmp, Some((minutes * MINUTE, backends)), true);
                println!("{what} {minutes} min before, {ecmp:?}: {rates:.1?}");
                // After four minutes an entry is given to its new backend. Then the older connections move.
                let at_most = match (ecmp, minutes) {
                    (Ecmp::Resilient, 1 | 3) => 10.0,
                    (Ecmp::Resilient, _) | (Ecmp::Modulo, 1 | 3) => 30.0,
                    (Ecmp::Modulo, _) => 60.0,
                };
                assert!(rates.iter().all(|rate| *rate <= at_most), "{what}, {minutes} min, {ecmp:?}: {rates:?}");
            }
        }
    }
}

#[test]
fn a_gateway_that_joins_keeps_connections_by_the_earlier_backends_that_the_controller_sends() {
    let backends: Vec<u8> = (11..22).collect();
    let change = Some((3 * MINUTE, &*backends));
    let [[_, with], [_, without]] = [true, false].map(|sends| come_and_go(Mode::Dsr, Ecmp::Resilient, change, sends));
    println!("per thousand, a fourth gateway joins: {with:.1} with earlier backends, {without:.1} without");
    assert!(with * 2.0 < without, "{with} {without}");
}

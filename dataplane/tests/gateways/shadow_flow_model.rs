//! Gateways that replicate flows against a map of open connections, and against nonsense of partners
//! (docs/internals/decisions/0060-shadow-flows.md).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use dataplane::flow::{FlowMode, FlowReplica, FlowState, ReplicaEvent, ShiftReplica};
use dataplane::tcp_flags;
use proptest::prelude::*;
use proto::ProxyProtocol;

use crate::fleet::{ALL, DATA, Gateway, NONE, new_clients};
use crate::rig::{SECOND, ip, state};

/// The states of a fleet of two gateways, one of which owns everything.
struct Fleet {
    gateways: [Gateway; 2],
    owner: usize,
}

impl Fleet {
    /// Lets time pass for both, and carries what either tells to the other.
    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            let [a, b] = &mut self.gateways;
            a.pass(1);
            b.receive(&a.sent());
            b.pass(1);
            a.receive(&b.sent());
        }
    }

    fn owner(&mut self) -> &mut Gateway {
        &mut self.gateways[self.owner]
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Open(u16),
    Data(u16),
    ResetByClient(u16),
    ResetByBackend(u16),
    Wait,
    TakeOver,
}

fn step() -> impl Strategy<Value = Step> {
    (0u8..9, 0u16..12).prop_map(|(kind, n)| match kind {
        0..=2 => Step::Open(n),
        3 => Step::Data(n),
        4 => Step::ResetByClient(n),
        5 => Step::ResetByBackend(n),
        6 => Step::Wait,
        _ => Step::TakeOver,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whoever owns the groups, and however often that changes: open connections go on, and both gateways know the
    /// same.
    #[test]
    fn both_gateways_know_what_a_map_of_open_connections_knows(
        workers in (1u8..4, 1u8..4),
        steps in proptest::collection::vec(step(), 1..30),
    ) {
        // With one seed the gateways hand out the same ports.
        let gateways = [workers.0, workers.1].map(|workers| Gateway::new(state(), workers, false, 7, 4096));
        let mut fleet = Fleet { gateways, owner: 0 };
        fleet.owner().own(ALL);
        let mut open: HashMap<u16, (SocketAddr, SocketAddr)> = HashMap::new();
        let client = |n: u16| vec![(format!("198.51.100.7:{}", 2000 + n), "192.0.2.100:80")];
        for step in steps {
            match step {
                Step::Open(n) if !open.contains_key(&n) => {
                    let ends = fleet.owner().team.establish(&client(n)).into_values().next().unwrap();
                    prop_assert!(open.values().all(|other| *other != ends), "{:?} is used twice", ends);
                    open.insert(n, ends);
                }
                Step::Open(n) | Step::Data(n) => {
                    if let Some(ends) = open.get(&n) {
                        let seen = fleet.owner().team.towards_backends(&client(n), DATA);
                        prop_assert_eq!(seen.values().next(), Some(ends));
                    }
                }
                Step::ResetByClient(n) => {
                    if open.remove(&n).is_some() {
                        fleet.owner().team.towards_backends(&client(n), tcp_flags::RST);
                    }
                }
                Step::ResetByBackend(n) => {
                    if let Some(ends) = open.remove(&n) {
                        fleet.owner().team.answered(&[(client(n)[0].0.clone(), ends)].into(), tcp_flags::RST);
                    }
                }
                Step::Wait => {
                    // Reset flows end within ten seconds, those whose news may be late within thirty more, and the
                    // sweep meets them within nine more.
                    fleet.pass(52);
                    // With different owners two workers may have a half each.
                    let (fewest, halves) = (open.len() as u64, if workers.0 == workers.1 { 1 } else { 2 });
                    for gateway in &fleet.gateways {
                        prop_assert!((fewest..=halves * fewest).contains(&gateway.flows()), "{} of {fewest}", gateway.flows());
                    }
                }
                Step::TakeOver => {
                    fleet.pass(2);
                    fleet.owner().own(NONE);
                    fleet.owner = 1 - fleet.owner;
                    fleet.owner().own(ALL);
                }
            }
            for (n, ends) in &open {
                let seen = fleet.owner().team.towards_backends(&client(*n), DATA);
                prop_assert_eq!(seen.values().next(), Some(ends));
                fleet.owner().team.answered(&seen, DATA);
            }
        }
    }
}

fn address() -> impl Strategy<Value = SocketAddr> {
    let known = ["192.0.2.100", "192.0.2.101", "198.51.100.7", "10.0.0.3", "10.0.0.4", "10.0.0.11", "10.0.0.2", "0.0.0.0"];
    let known_v6 = ["2001:db8::1:0", "2001:db8:1::7", "fd00::3", "fd00::4", "fd00::11", "::"];
    let ports = prop_oneof![Just(80_u16), Just(53), Just(8080), Just(5353), Just(0), 1000..1040_u16, any::<u16>()];
    (proptest::sample::select([&known[..], &known_v6[..]].concat()), ports).prop_map(|(to, port)| SocketAddr::new(ip(to), port))
}

fn replica() -> impl Strategy<Value = FlowReplica> {
    let modes = vec![FlowMode::Nat, FlowMode::Nat, FlowMode::Dnat, FlowMode::Dsr, FlowMode::Ipip, FlowMode::Gue];
    let kind = (proptest::sample::select(modes), proptest::sample::select(FlowState::ALL.to_vec()), any::<bool>());
    let ends = (address(), address(), address(), proptest::option::weighted(0.8, address()));
    let shifts = (any::<bool>(), prop_oneof![Just(28_u8), Just(52), any::<u8>()]).prop_map(|(is_v2, header_len)| ShiftReplica {
        version: if is_v2 { ProxyProtocol::V2 } else { ProxyProtocol::V1 },
        header_len,
    });
    let shift = proptest::option::weighted(0.3, shifts);
    (kind, ends, shift, 0u64..10_000, any::<u8>()).prop_map(|((mode, state, is_of_state), ends, shift, idle_s, protocol)| {
        FlowReplica {
            protocol: if is_of_state { state.protocol() } else { protocol },
            mode,
            state,
            client: ends.0,
            frontend: ends.1,
            backend: ends.2,
            snat: ends.3,
            idle: Duration::from_secs(idle_s),
            shift,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever a partner says, nothing panics, the account balances (which the gateway checks when it is dropped), and
    /// all that is kept ends some day.
    #[test]
    fn nonsense_of_partners_does_no_harm(
        events in proptest::collection::vec((replica(), 0u8..4), 1..200),
        workers in 1u8..4,
    ) {
        let mut gateway = Gateway::new(state(), workers, false, 7, 4096);
        let event = |(replica, kind): (FlowReplica, u8)| {
            if kind == 0 { ReplicaEvent::Ended(replica) } else { ReplicaEvent::Holds(replica) }
        };
        gateway.receive(&events.into_iter().map(event).collect::<Vec<_>>());
        gateway.own(ALL);
        gateway.team.exchange(&new_clients(3), tcp_flags::SYN);
        gateway.own(0b01);
        gateway.team.now += 12_000 * SECOND;
        gateway.pass(12);
        prop_assert_eq!(gateway.flows(), 0);
    }
}

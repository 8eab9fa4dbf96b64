//! Flows outlive a restart: what the workers of one gateway save is restored by those of the next, whose slots, workers
//! and clock differ. Bytes that are damaged in any way are refused.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use dataplane::testing::Packet;
use dataplane::workers::Steering;
use dataplane::{FlowFate, SavedAt, SavedFlows, SavedFlowsError, Worker, tcp_flags};
use proptest::prelude::*;
use proto::{Mode, Service, ServiceName, State};

use crate::rig::{self, CLUSTER, SECOND, UPLINK, ends, service, state};
use crate::team::{self, Delivery, SEED, Team, clients};

const BOOT: [u8; 16] = [5; 16];
/// When flows are saved, by the clock of the machine.
const SAVED_NS: u64 = 1000 * SECOND;

fn at(boottime_ns: u64) -> SavedAt {
    SavedAt { boot: BOOT, boottime_ns }
}

fn parts(team: &Team) -> Vec<Vec<u8>> {
    team.workers.iter().map(|worker| worker.save(team.now)).collect()
}

/// The bytes of a file with these parts.
fn file(parts: &[Vec<u8>]) -> Vec<u8> {
    let header = SavedFlows::header(SEED, true, at(SAVED_NS), parts);
    [header].iter().chain(parts).flatten().copied().collect()
}

/// The state of [`rig`] with another Service before the others, so that all slots differ.
fn state_with_other_slots() -> State {
    let mut state = state();
    let mut first = (*state.services[&ServiceName::new("default", "web")]).clone();
    first.name = ServiceName::new("a-namespace", "first");
    first.ports.truncate(1);
    first.ports[0].vips = vec![rig::ip("192.0.2.105")];
    first.ports[0].backends.truncate(2);
    state.services.insert(first.name.clone(), Arc::new(first));
    state
}

/// The gateways of the tests, by number of workers and how frames reach them.
fn gateway(state: State, workers: u8, has_cards: bool) -> Team {
    let steering = if has_cards { Steering::toeplitz(workers, SEED) } else { Steering::own_hash(workers, SEED) };
    let delivery = if has_cards { Delivery::Card(team::card(&steering)) } else { Delivery::InTurn };
    Team::serving(state, steering, delivery, workers)
}

/// A gateway that serves and has restored nothing.
fn running(state: State, workers: u8, has_cards: bool) -> Team {
    let mut team = gateway(state, workers, has_cards);
    team.poll();
    team.settle();
    team
}

/// Gives a gateway that has not polled yet the flows of `bytes`, `later_ns` after they were saved.
fn restore(team: &mut Team, bytes: Vec<u8>, later_ns: u64) -> Arc<SavedFlows> {
    let saved = Arc::new(SavedFlows::read(bytes, at(SAVED_NS + later_ns), team.now).unwrap());
    team.workers.iter_mut().for_each(|worker| worker.restore(Arc::clone(&saved)));
    team.poll();
    team.settle();
    saved
}

fn fates(saved: &SavedFlows) -> [u64; 6] {
    FlowFate::ALL.map(|fate| saved.report().count(fate))
}

const DATA: u8 = tcp_flags::ACK | tcp_flags::PSH;

#[test]
fn packets_of_both_directions_go_on_as_before_with_other_slots_and_another_number_of_workers() {
    let clients = clients(120);
    for (before, after) in [((3, false), (3, false)), ((1, false), (4, false)), ((4, true), (2, true)), ((4, true), (3, false))] {
        let mut old = running(state(), before.0, before.1);
        let seen = old.establish(&clients);
        old.now += 7000 * SECOND; // ticks of the two clocks differ
        assert_eq!(old.towards_backends(&clients, DATA), seen);
        let bytes = file(&parts(&old));
        let mut new = gateway(state_with_other_slots(), after.0, after.1);
        let saved = restore(&mut new, bytes, 2 * SECOND);
        let [restored, others @ ..] = fates(&saved);
        assert_eq!((saved.flows(), others), (120, [0; 5]), "{before:?} to {after:?}");
        assert_eq!(saved.report().workers(), u32::from(after.0));
        assert!(before != after || restored == 120, "with the same owners each flow has one");
        assert_eq!(new.sum(|counters| counters.flows.get()), restored);
        assert_eq!(new.towards_backends(&clients, DATA), seen, "{before:?} to {after:?}");
        new.answered(&seen, DATA);
        // New connections get ports that no restored flow holds.
        let more: Vec<_> = (0..60).map(|n| (format!("203.0.113.{}:{}", n + 1, 3000 + n), "192.0.2.100:80")).collect();
        let ends: HashSet<_> = new.establish(&more).into_values().chain(seen.values().copied()).collect();
        assert_eq!(ends.len(), more.len() + seen.len());
    }
}

#[test]
fn flows_that_two_workers_share_are_saved_once_and_are_one_again_with_as_many_workers_as_before() {
    let clients = clients(80);
    let mut one = running(state(), 1, false);
    let seen = one.establish(&clients);
    let mut four = gateway(state(), 4, false);
    let saved = restore(&mut four, file(&parts(&one)), SECOND);
    assert!(fates(&saved)[0] > 80, "some flows have two owners");
    four.answered(&seen, DATA);
    // They end in their sleep.
    four.workers.iter_mut().for_each(|worker| worker.subscriber_mut().sleep());
    let mut again = gateway(state(), 1, false);
    let saved = restore(&mut again, file(&parts(&four)), SECOND);
    assert_eq!(fates(&saved), [80, 0, 0, 0, 0, 0]);
    assert_eq!(again.towards_backends(&clients, DATA), seen);
    again.answered(&seen, DATA);
}

/// Lets a team sweep its tables for a while.
fn sweep(team: &mut Team, seconds: u64) {
    for _ in 0..seconds * 8 {
        team.now += SECOND / 8;
        team.poll();
    }
}

#[test]
fn both_halves_of_a_flow_that_two_workers_share_end_with_a_reset_by_either_side() {
    let clients = clients(80);
    let mut one = running(state(), 1, false);
    let seen = one.establish(&clients);
    for by_client in [true, false] {
        let mut four = gateway(state(), 4, false);
        let saved = restore(&mut four, file(&parts(&one)), SECOND);
        assert!(fates(&saved)[0] > 80, "some flows have two owners");
        match by_client {
            true => assert_eq!(four.towards_backends(&clients, tcp_flags::RST), seen),
            false => four.answered(&seen, tcp_flags::RST),
        }
        let resets = |counters: &dataplane::WorkerCounters| (0..100).map(|slot| counters.sum_of(slot, |of| of.reset.get())).sum();
        assert_eq!(four.sum(resets), 80, "each is counted once");
        if by_client {
            // Anyone can forge that, so the flow goes on, in both halves.
            assert_eq!(four.establish(&clients), seen);
            four.answered(&seen, tcp_flags::RST);
        }
        // The clients come back from the same ports, at once and once more.
        let again = four.establish(&clients);
        assert!(again.values().all(|ends| !seen.values().any(|before| before == ends)), "new flows have new ports");
        four.answered(&again, DATA);
        assert_eq!(four.towards_backends(&clients, DATA), again);
        sweep(&mut four, 20);
        assert_eq!(four.sum(|counters| counters.flows.get()), 80);
    }
}

#[test]
fn the_port_of_a_flow_that_two_workers_share_is_not_handed_out_again_while_a_half_may_live() {
    let clients = clients(80);
    let mut one = running(state(), 1, false);
    let seen = one.establish(&clients);
    let mut four = gateway(state(), 4, false);
    restore(&mut four, file(&parts(&one)), SECOND);
    // Only clients send, for longer than the idle limit: the halves of their packets live on, and the others end.
    let data: Vec<_> = clients.iter().map(|(from, to)| Packet::tcp(from, to).flags(DATA).build()).collect();
    for _ in 0..20 {
        four.now += 600 * SECOND;
        four.put(UPLINK, &data);
        assert_eq!(four.sent(CLUSTER).len(), 80);
    }
    sweep(&mut four, 20);
    let more: Vec<_> = (0..300_u16).map(|n| (format!("203.0.113.7:{}", 2000 + n), "192.0.2.100:80")).collect();
    let given: HashSet<_> = four.establish(&more).into_values().collect();
    let used: HashSet<_> = seen.into_values().collect();
    assert_eq!((given.len(), given.intersection(&used).count()), (300, 0));
}

#[test]
fn a_client_whose_datagrams_another_worker_owns_than_their_answers_gets_a_new_flow() {
    let udp: Vec<_> = (0..40).map(|n| (format!("198.51.100.{}:{}", n + 1, 4000 + n), "192.0.2.101:53")).collect();
    let datagrams: Vec<_> = udp.iter().map(|(from, to)| Packet::udp(from, to).build()).collect();
    let send = |team: &mut Team| {
        team.put(UPLINK, &datagrams);
        team.sent(CLUSTER).iter().map(|frame| ends(frame)).collect::<HashSet<_>>()
    };
    let mut one = running(state(), 1, false);
    let before = send(&mut one);
    let mut four = gateway(state(), 4, false);
    let saved = restore(&mut four, file(&parts(&one)), SECOND);
    let [restored, .., port_gone, _, _] = fates(&saved);
    assert!(restored == 40 && (1..40).contains(&port_gone), "{:?}", fates(&saved));
    let after = send(&mut four);
    assert_eq!((after.len(), after.difference(&before).count() as u64), (40, port_gone), "new ports");
}

#[test]
fn a_handshake_goes_on_and_so_do_exchanges_of_udp_in_every_mode() {
    let udp: Vec<_> = (0..20).map(|n| (format!("198.51.100.{}:{}", n + 1, 4000 + n), "192.0.2.101:53")).collect();
    let syns = clients(20);
    for mode in [Mode::Nat, Mode::Dnat, Mode::Dsr] {
        let mut state = state();
        for (name, service) in state.services.clone() {
            let mut changed = Service { mode, ..Service::clone(&service) };
            for port in changed.ports.iter_mut().filter(|_| mode == Mode::Dsr) {
                let number = port.port;
                port.backends.iter_mut().for_each(|backend| backend.address.set_port(number));
            }
            state.services.insert(name, Arc::new(changed));
        }
        let send = |team: &mut Team| {
            let frames: Vec<_> = udp.iter().map(|(from, to)| Packet::udp(from, to).build()).collect();
            let syns = syns.iter().map(|(from, to)| Packet::tcp(from, to).flags(tcp_flags::SYN).build());
            let frames: Vec<_> = frames.into_iter().chain(syns).collect();
            team.put(UPLINK, &frames);
            let sent = team.sent(CLUSTER);
            assert_eq!(sent.len(), 40, "{mode:?}");
            // The backend is in the Ethernet address in mode `dsr`.
            sent.iter().map(|frame| (frame[..6].to_vec(), ends(frame))).collect::<HashSet<_>>()
        };
        let mut old = running(state.clone(), 3, false);
        let sent = send(&mut old);
        let mut new = gateway(state, 3, false);
        let saved = restore(&mut new, file(&parts(&old)), SECOND);
        assert_eq!(fates(&saved), [40, 0, 0, 0, 0, 0], "{mode:?}");
        assert_eq!(send(&mut new), sent, "{mode:?}: the same backends from the same ports");
    }
}

#[test]
fn flows_are_left_behind_whose_time_is_over_or_whose_backend_or_port_is_gone() {
    let clients: Vec<_> = (0..30_u16).map(|n| (format!("198.51.100.7:{}", 2000 + n), "192.0.2.100:80")).collect();
    let mut old = running(state(), 1, false);
    let seen = old.establish(&clients);
    let bytes = file(&parts(&old));
    let of_12 = seen.values().filter(|(_, backend)| backend.to_string() == "10.0.0.12:8080").count() as u64;
    assert!(of_12 > 0);
    let fates_with = |state: State, later_ns: u64| {
        let mut new = gateway(state, 1, false);
        fates(&restore(&mut new, bytes.clone(), later_ns))
    };
    assert_eq!(fates_with(state(), 7100 * SECOND), [30, 0, 0, 0, 0, 0]);
    assert_eq!(fates_with(state(), 7600 * SECOND), [0, 30, 0, 0, 0, 0], "past the idle limit");
    let mut without_12 = state();
    let mut web = (*without_12.services[&ServiceName::new("default", "web")]).clone();
    web.ports[0].backends.retain(|backend| backend.address.to_string() != "10.0.0.12:8080");
    without_12.services.insert(web.name.clone(), Arc::new(web));
    assert_eq!(fates_with(without_12, SECOND), [30 - of_12, 0, of_12, 0, 0, 0]);
    let mut without_web = state();
    without_web.services.insert(ServiceName::new("default", "web"), service("web", vec![]).1);
    assert_eq!(fates_with(without_web, SECOND), [0, 0, 30, 0, 0, 0]);
    // A worker that saves nothing, and the same flows twice: the second ones have the same addresses and ports.
    let twice = [parts(&old), parts(&old)].concat();
    let mut new = gateway(state(), 1, false);
    assert_eq!(fates(&restore(&mut new, file(&twice), SECOND)), [30, 0, 0, 0, 0, 30]);
    assert_eq!(new.towards_backends(&clients, DATA), seen);
}

#[test]
fn ports_that_rested_are_not_handed_out_sooner_than_before() {
    let clients: Vec<_> = (0..40_u16).map(|n| (format!("198.51.100.7:{}", 2000 + n), "192.0.2.100:80")).collect();
    let mut old = running(state(), 2, false);
    let seen = old.establish(&clients);
    // The first half ends. Its ports rest.
    let (ended, going_on) = clients.split_at(20);
    for flags in [tcp_flags::FIN | tcp_flags::ACK, tcp_flags::ACK] {
        old.towards_backends(ended, flags);
        old.answered(
            &seen.iter().filter(|(from, _)| ended.iter().any(|(one, _)| one == *from)).map(|(a, b)| (a.clone(), *b)).collect(),
            flags,
        );
    }
    old.now += 12 * SECOND;
    for _ in 0..100 {
        old.now += SECOND / 8;
        old.poll();
    }
    assert_eq!(old.sum(|counters| counters.flows.get()), 20);
    let saved_parts = parts(&old);
    let new_ports = |later_ns: u64| {
        let mut new = gateway(state(), 2, false);
        let saved = restore(&mut new, file(&saved_parts), later_ns);
        assert_eq!(fates(&saved), [20, 0, 0, 0, 0, 0]);
        let more: Vec<_> = (0..40_u16).map(|n| (format!("198.51.100.8:{}", 2000 + n), "192.0.2.100:80")).collect();
        let ends: HashSet<(SocketAddr, SocketAddr)> = new.establish(&more).into_values().collect();
        assert!(going_on.iter().all(|(from, _)| !ends.contains(&seen[from])), "ports in use");
        assert_eq!(new.sum(|counters| counters.snat_port_reused_early.get()), 0);
        ended.iter().filter(|(from, _)| ends.contains(&seen[from])).count()
    };
    assert_eq!(new_ports(SECOND), 0, "they rest on");
    assert!(new_ports(100 * SECOND) > 0, "they have rested");
}

#[test]
fn a_client_with_affinity_keeps_a_backend_that_it_would_not_be_given_today() {
    let with = |backends: &[&str]| {
        let mut state = state();
        let mut web = (*state.services[&ServiceName::new("default", "web")]).clone();
        web.affinity = Some(Duration::from_secs(600));
        web.ports.truncate(1);
        web.ports[0].backends.retain(|backend| backends.contains(&&*backend.address.ip().to_string()));
        state.services.insert(web.name.clone(), Arc::new(web));
        state
    };
    let clients: Vec<_> = (0..40_u16).map(|n| (format!("198.51.100.{}:2000", n + 1), "192.0.2.100:80")).collect();
    let again: Vec<_> = (0..40_u16).map(|n| (format!("198.51.100.{}:2001", n + 1), "192.0.2.100:80")).collect();
    let backends = |team: &mut Team, clients: &[(String, &str)]| {
        let seen = team.establish(clients);
        clients.iter().map(|(from, _)| seen[from].1).collect::<Vec<_>>()
    };
    let mut old = running(with(&["10.0.0.11", "10.0.0.12"]), 2, false);
    let chosen = backends(&mut old, &clients);
    let all = ["10.0.0.11", "10.0.0.12", "10.0.0.13"];
    let mut fresh = running(with(&all), 2, false);
    assert_ne!(backends(&mut fresh, &again), chosen, "without memory some go to the third backend");
    let mut new = gateway(with(&all), 2, false);
    restore(&mut new, file(&parts(&old)), 5 * SECOND);
    assert_eq!(backends(&mut new, &again), chosen);
    let mut late = gateway(with(&all), 2, false);
    restore(&mut late, file(&parts(&old)), 700 * SECOND);
    assert_ne!(backends(&mut late, &again), chosen, "the timeout has passed");
}

/// A small file with flows of both families, a resting port and a client with affinity.
fn small_file() -> Vec<u8> {
    let mut old = running(state(), 2, false);
    old.establish(&clients(4));
    file(&parts(&old))
}

fn refusal(bytes: Vec<u8>) -> Option<SavedFlowsError> {
    SavedFlows::read(bytes, at(SAVED_NS), SECOND).err()
}

#[test]
fn a_file_is_refused_if_any_byte_is_changed_missing_or_added() {
    let good = small_file();
    assert_eq!(refusal(good.clone()), None);
    for position in 0..good.len() {
        for flipped in [0xff, 1, 0x80] {
            let mut bad = good.clone();
            bad[position] ^= flipped;
            let error = refusal(bad).unwrap_or_else(|| panic!("byte {position} was changed"));
            assert!(!error.to_string().is_empty());
        }
        assert!(refusal(good[..position].to_vec()).is_some(), "only {position} bytes");
    }
    for more in 1..20 {
        assert!(refusal([&good[..], &vec![0; more]].concat()).is_some(), "{more} more bytes");
    }
    let mut other = good.clone();
    other[8] = 9;
    assert_eq!(refusal(other), Some(SavedFlowsError::Format { found: 9 }));
    let read_at = |now| SavedFlows::read(good.clone(), now, SECOND).err();
    assert_eq!(read_at(SavedAt { boot: [6; 16], ..at(SAVED_NS) }), Some(SavedFlowsError::Boot));
    assert_eq!(read_at(at(SAVED_NS - 1)), Some(SavedFlowsError::Future));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// A checksum is no proof of sense: whatever a file with the right checksum holds, nothing panics, and the account of
    /// the worker balances.
    #[test]
    fn any_content_with_the_right_checksum_is_refused_or_restored_without_harm(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        thread_local!(static PARTS: Vec<Vec<u8>> = {
            let mut old = running(state(), 1, false);
            old.establish(&clients(6));
            parts(&old)
        });
        let mut parts = PARTS.with(Clone::clone);
        for (position, value) in changes {
            let position = position.index(parts[0].len());
            parts[0][position] = value;
        }
        if let Some(cut) = cut {
            let len = cut.index(parts[0].len() + 1) / 8 * 8;
            parts[0].truncate(len);
        }
        if let Ok(saved) = SavedFlows::read(file(&parts), at(SAVED_NS), SECOND) {
            let mut new = gateway(state(), 2, false);
            let saved = Arc::new(saved);
            new.workers.iter_mut().for_each(|worker| worker.restore(Arc::clone(&saved)));
            new.poll();
            new.settle();
            prop_assert_eq!(new.workers.iter().map(Worker::counters).map(|c| c.flows.get()).sum::<u64>(), fates(&saved)[0]);
            new.exchange(&[("203.0.113.9:999".to_owned(), "192.0.2.100:80")], tcp_flags::SYN);
            new.now += 8400 * SECOND;
            for _ in 0..200 {
                new.now += SECOND / 8;
                new.poll();
            }
            prop_assert_eq!(new.sum(|counters| counters.flows.get()), 0, "all flows end");
        }
    }
}

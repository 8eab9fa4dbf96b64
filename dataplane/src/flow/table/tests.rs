//! The table against two hash maps, at its highest load, and its sweep.

use super::flow_table::{FlowTable, Full};
use crate::flow::entry::Flow;
use crate::flow::snat::{PoolId, SnatLease};
use crate::flow::state::{Direction, FlowState};
use crate::flow::storage::FlowEnd;
use crate::flow::tick::Tick;
use crate::flow::{BackendId, FlowBackend, FlowMode};
use crate::wire::{Address, Tuple};
use proptest::prelude::*;
use std::collections::HashMap;

fn flow<A: Address>(n: u32, address: fn(u32) -> A) -> Flow<A> {
    let tuple = Tuple {
        source: address(0x0a00_0000 + n),
        destination: address(0xc000_0264),
        source_port: 4000,
        destination_port: 80,
        protocol: 6,
    };
    let (port, pool) = (u16::try_from(1024 + n % 64_000).unwrap(), PoolId(0));
    let lease = SnatLease { address: address(0xac10_0002 + n / 64_000), port, pool };
    let id = BackendId { slot: n % 131_072, generation: 1 + n / 131_072 };
    let backend = FlowBackend { id, address: address(0xac10_0001), port: 8080 };
    Flow::new(&tuple, FlowState::TcpOpening, FlowMode::Nat, backend, &lease, Tick(n))
}

/// The number that [`flow`] was given.
fn number<A>(flow: &Flow<A>) -> u32 {
    flow.backend.slot + (flow.backend.generation - 1) * 131_072
}

fn find<A: Address>(table: &FlowTable<A>, tuple: &Tuple<A>) -> Option<(u32, Direction)> {
    let hash = table.hash(tuple);
    table.prefetch(hash);
    let candidate = table.candidate(hash);
    let found = table.find(hash, tuple, candidate);
    assert_eq!(found, table.search(hash, tuple));
    found.map(|(index, direction)| (number(&table.get(index)), direction))
}

fn fills_to_capacity<A: Address>(capacity: u32, seed: u64, address: fn(u32) -> A) {
    let mut table = FlowTable::new(capacity, seed).unwrap();
    for n in 0..capacity {
        assert!(table.insert(flow(n, address)).is_ok(), "flow {n} of {capacity} found no room");
    }
    assert_eq!(table.insert(flow(capacity, address)).err(), Some(Full));
    for n in 0..capacity {
        let flow = flow(n, address);
        assert_eq!(find(&table, &flow.tuple(Direction::ToBackend)), Some((n, Direction::ToBackend)));
        assert_eq!(find(&table, &flow.tuple(Direction::ToClient)), Some((n, Direction::ToClient)));
    }
    assert_eq!(find(&table, &flow(capacity, address).tuple(Direction::ToBackend)), None);
}

#[test]
fn a_table_holds_as_many_flows_as_its_capacity() {
    fills_to_capacity(57_344, 1, |n| n);
    fills_to_capacity(57_344, 2, |n| 0x2001_0db8_u128 << 96 | u128::from(n));
    fills_to_capacity(1, 3, |n| n);
}

#[test]
fn a_full_table_takes_a_flow_for_each_one_that_ends() {
    let mut table = FlowTable::<u32>::new(1000, 9).unwrap();
    for n in 0..1000 {
        table.insert(flow(n, |n| n)).unwrap();
    }
    for n in 1000..50_000 {
        let (index, _) = {
            let tuple = flow(n - 1000, |n| n).tuple(Direction::ToClient);
            table.search(table.hash(&tuple), &tuple).unwrap()
        };
        assert_eq!(number(&table.remove(index, FlowEnd::Idle)), n - 1000);
        table.insert(flow(n, |n| n)).unwrap();
    }
    assert_eq!(table.len(), 1000);
}

#[test]
fn a_sweep_goes_on_where_it_stopped_and_ends_what_is_too_old_across_the_wrap() {
    let mut table = FlowTable::<u32>::new(100, 9).unwrap();
    for n in 0..100 {
        let mut flow = flow(n, |n| n);
        flow.last_seen = Tick(n.wrapping_sub(50));
        table.insert(flow).unwrap();
    }
    let now = Tick(49);
    table.set_time(now);
    let (mut start, mut rounds, mut seen) = (0, 0, 0);
    loop {
        start = table.sweep(start, 7, 1, |flow| {
            seen += 1;
            now.since(flow.last_seen).0 >= 50
        });
        rounds += 1;
        if start == 0 {
            break;
        }
    }
    assert_eq!((rounds, seen, table.len()), (15, 100, 50));
    assert_eq!(find(&table, &flow(49, |n| n).tuple(Direction::ToBackend)), None);
    assert!(find(&table, &flow(50, |n| n).tuple(Direction::ToBackend)).is_some());
}

#[test]
fn at_the_highest_load_flows_come_and_go_in_any_order() {
    let capacity = 57_375; // 13.5 keys in each bucket of 15
    let mut table = FlowTable::<u32>::new(capacity, 5).unwrap();
    let mut held: Vec<u32> = (0..capacity).collect();
    for &n in &held {
        table.insert(flow(n, |n| n)).unwrap();
    }
    for n in capacity..5 * capacity {
        let at = usize::try_from(crate::wire::split_mix(u64::from(n)) % u64::from(capacity)).unwrap();
        let tuple = flow(std::mem::replace(&mut held[at], n), |n| n).tuple(Direction::ToBackend);
        let (index, _) = table.search(table.hash(&tuple), &tuple).expect("it was inserted");
        table.remove(index, FlowEnd::Idle);
        table.insert(flow(n, |n| n)).unwrap();
    }
    assert_eq!(table.len(), capacity);
    for n in held {
        for direction in [Direction::ToBackend, Direction::ToClient] {
            assert_eq!(find(&table, &flow(n, |n| n).tuple(direction)), Some((n, direction)));
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Insert(u32),
    Remove(u32),
    Find(u32),
    Sweep(u32),
}

fn step() -> impl Strategy<Value = Step> {
    (0u32..10, 0u32..96).prop_map(|(kind, n)| match kind {
        0..=4 => Step::Insert(n),
        5..=6 => Step::Remove(n),
        7..=8 => Step::Find(n),
        _ => Step::Sweep(n),
    })
}

proptest! {
    #[test]
    fn the_table_equals_two_hash_maps(seed in any::<u64>(), steps in proptest::collection::vec(step(), 1..400)) {
        let mut table = FlowTable::<u32>::new(64, seed).unwrap();
        let mut model: HashMap<Tuple<u32>, (u32, Direction)> = HashMap::new();
        let directions = [Direction::ToBackend, Direction::ToClient];
        for step in steps {
            match step {
                Step::Insert(n) if !model.contains_key(&flow(n, |n| n).tuple(Direction::ToBackend)) => {
                    let inserted = table.insert(flow(n, |n| n));
                    prop_assert_eq!(inserted.is_ok(), model.len() < 128);
                    if inserted.is_ok() {
                        model.extend(directions.map(|d| (flow(n, |n| n).tuple(d), (n, d))));
                    }
                }
                Step::Remove(n) => {
                    let tuple = flow(n, |n| n).tuple(Direction::ToClient);
                    let found = table.search(table.hash(&tuple), &tuple);
                    prop_assert_eq!(found.is_some(), model.contains_key(&tuple));
                    if let Some((index, _)) = found {
                        prop_assert_eq!(number(&table.remove(index, FlowEnd::Idle)), n);
                        model.retain(|_, (slot, _)| *slot != n);
                    }
                }
                Step::Insert(n) | Step::Find(n) => for d in directions {
                    let tuple = flow(n, |n| n).tuple(d);
                    prop_assert_eq!(find(&table, &tuple), model.get(&tuple).copied());
                },
                Step::Sweep(n) => {
                    table.sweep(0, u32::MAX, 1, |flow| flow.backend.slot % 8 == n % 8);
                    model.retain(|_, (slot, _)| *slot % 8 != n % 8);
                }
            }
            prop_assert_eq!(table.len() as usize * 2, model.len());
        }
    }
}

//! Allocation, rest, early reuse and release of SNAT ports.

use super::*;
use crate::flow::tick::Tick;
use crate::wire::protocol;
use proptest::prelude::*;
use std::collections::{BTreeSet, VecDeque};

const TARGET: SnatTarget<u32> = towards(3);
const SECOND_NS: u64 = 1_000_000_000;

const fn towards(index: u32) -> SnatTarget<u32> {
    SnatTarget { slot: TargetSlot { index, generation: 0 }, address: 0x0a00_000b, port: 8080, protocol: protocol::TCP }
}

fn ports(flows: u32, share: PortShare) -> SnatPorts {
    SnatPorts::new(flows, share).unwrap()
}

fn addresses(count: u16) -> Vec<SnatAddress<u32>> {
    (0..count).map(|index| SnatAddress { address: 0x0a00_0003 + u32::from(index), index }).collect()
}

fn at(seconds: u64) -> Tick {
    Tick::at(seconds * SECOND_NS)
}

#[test]
fn shares_cover_every_port_once_and_identify_the_worker() {
    for workers in [1, 2, 3, 7] {
        let all: BTreeSet<u16> = (0..workers)
            .flat_map(|w| {
                let share = PortShare::of_worker(w, workers);
                (0..u32::from(share.count())).map(move |n| {
                    let port = share.port::<u32>(n, 0);
                    assert_eq!(port % workers, w);
                    port
                })
            })
            .collect();
        assert_eq!((all.len(), all.first(), all.last()), (64_512, Some(&1024), Some(&65_535)));
    }
}

#[test]
fn a_hundred_thousand_short_connections_through_two_addresses_reuse_nothing_early() {
    let mut snat = ports(1 << 20, PortShare::whole());
    let mut seen = BTreeSet::new();
    for n in 0..129_024u64 {
        let lease = snat.allocate(TARGET, &addresses(2), usize::try_from(n * 7).unwrap(), at(1)).unwrap();
        assert!(seen.insert((lease.address, lease.port)), "{lease:?} was handed out twice");
        snat.release(lease.pool, lease.port, at(1));
    }
    assert_eq!(snat.reused_early(), 0);
    snat.allocate(TARGET, &addresses(2), 0, at(1)).unwrap();
    assert_eq!(snat.reused_early(), 1);
}

#[test]
fn through_one_address_the_oldest_port_is_used_first_and_early_use_is_counted() {
    let mut snat = ports(1 << 20, PortShare::whole());
    let mut order = VecDeque::new();
    for n in 0..64_512u64 {
        let lease = snat.allocate(TARGET, &addresses(1), 0, at(0)).unwrap();
        snat.release(lease.pool, lease.port, at(n / 2000));
        order.push_back(lease.port);
    }
    for n in 0..35_488 {
        let lease = snat.allocate(TARGET, &addresses(1), 0, at(33)).unwrap();
        assert_eq!(Some(lease.port), order.pop_front(), "connection {n} after all ports were used once");
    }
    assert_eq!(snat.reused_early(), 35_488);
    snat.allocate(TARGET, &addresses(1), 0, at(33 + 61)).unwrap();
    assert_eq!(snat.reused_early(), 35_488, "use of a rested port is not early");
}

#[test]
fn when_all_ports_are_in_use_the_next_is_refused_and_other_targets_are_not() {
    let mut snat = ports(1 << 20, PortShare::of_worker(1, 16));
    for _ in 0..4032 {
        snat.allocate(TARGET, &addresses(1), 0, at(0)).unwrap();
    }
    assert_eq!(snat.allocate(TARGET, &addresses(1), 0, at(0)), None);
    assert!(snat.allocate(towards(4), &addresses(1), 0, at(0)).is_some());
    assert_eq!(snat.allocate(towards(TARGETS_MAX), &addresses(1), 0, at(0)), None, "no such target");
    assert_eq!(snat.allocate(TARGET, &[], 5, at(0)), None, "no address");
}

#[test]
fn a_sweep_takes_back_the_memory_of_idle_pools_after_the_rest() {
    let mut snat = ports(1000, PortShare::whole());
    let leases: Vec<_> = (0..500).map(|_| snat.allocate(TARGET, &addresses(1), 0, at(0)).unwrap()).collect();
    leases.iter().for_each(|lease| snat.release(lease.pool, lease.port, at(0)));
    assert_eq!(snat.sweep(0, 100, at(30)), 0);
    assert_eq!(snat.held, [500, 0]);
    assert_eq!(snat.sweep(0, 24, at(61)), 24, "pool 24 is the first of target 3");
    assert_eq!(snat.sweep(24, 2, at(61)), 0);
    assert_eq!((snat.held, snat.in_use()), ([0, 0], 0));
    let pages = snat.pages_high_water;
    for _ in 0..500 {
        let lease = snat.allocate(towards(0), &addresses(1), 0, at(61)).unwrap();
        snat.release(lease.pool, lease.port, at(61));
    }
    assert_eq!(snat.pages_high_water, pages, "the pages are used again");
}

#[test]
fn with_the_common_memory_used_up_large_pools_reuse_early_and_a_new_target_still_finds_ports() {
    let mut snat = ports(600, PortShare::whole());
    for n in 0..5000 {
        let lease = snat.allocate(TARGET, &addresses(1), 0, at(n / 1000)).unwrap();
        snat.release(lease.pool, lease.port, at(n / 1000));
    }
    assert_eq!((snat.held, snat.reused_early()), ([1200, 0], 3800));
    for _ in 0..256 {
        snat.allocate(towards(1), &addresses(1), 0, at(5)).unwrap();
    }
    assert_eq!(snat.reused_early(), 3800);
}

#[test]
fn ports_of_datagrams_that_rest_take_no_memory_from_connections() {
    let mut snat = ports(600, PortShare::whole());
    let datagrams = SnatTarget { protocol: protocol::UDP, ..towards(1) };
    for _ in 0..5000 {
        let lease = snat.allocate(datagrams, &addresses(1), 0, at(1)).unwrap();
        snat.release(lease.pool, lease.port, at(1));
    }
    assert_eq!((snat.held, snat.reused_early()), ([0, 1200], 3800));
    for _ in 0..1200 {
        snat.allocate(TARGET, &addresses(1), 0, at(1)).unwrap();
    }
    assert_eq!((snat.held, snat.reused_early()), ([1200, 1200], 3800));
}

#[test]
fn a_pool_starts_empty_with_a_new_target_and_takes_back_no_port_of_the_old_one() {
    let mut snat = ports(1000, PortShare::whole());
    let take = |snat: &mut SnatPorts, slot| snat.allocate(SnatTarget { slot, ..TARGET }, &addresses(1), 0, at(1)).unwrap();
    let (old, new) = (TARGET.slot, TARGET.slot.next());
    let leases: Vec<_> = (0..40).map(|_| take(&mut snat, old)).collect();
    leases[..30].iter().for_each(|lease| snat.release(lease.pool, lease.port, at(1)));
    let first: Vec<_> = (0..5).map(|_| take(&mut snat, new)).collect();
    assert!(first.iter().map(|lease| lease.port).eq(1024..1029), "all of its ports are fresh: {first:?}");
    assert!(first.iter().all(|lease| lease.pool != leases[0].pool && lease.pool.index() == leases[0].pool.index()));
    leases[30..].iter().for_each(|lease| snat.release(lease.pool, lease.port, at(1)));
    leases[..1].iter().for_each(|lease| assert_ne!(lease.pool, PoolId::NONE));
    assert_eq!((snat.held, snat.in_use(), snat.pools[24].resting), ([5, 0], 5, 0), "no port of the old target came back");
    first.iter().for_each(|lease| snat.release_clean(lease.pool, lease.port, at(1)));
    assert_eq!((snat.in_use(), snat.pools[24].resting), (0, 5));
    let of_new = take(&mut snat, new);
    assert_eq!(snat.sweep(0, 100, at(90)), 0);
    let third = new.next();
    let last = take(&mut snat, third);
    assert_eq!((last.port, snat.held), (1024, [1, 0]));
    snat.release(of_new.pool, of_new.port, at(90));
    assert_eq!((snat.in_use(), snat.pools[24].resting), (1, 0));
    snat.release(last.pool, last.port, at(90));
    snat.sweep(0, 100, at(200));
    assert_eq!((snat.held, snat.in_use(), snat.reused_early()), ([0, 0], 0, 0));
}

#[test]
fn the_last_generation_is_followed_by_the_first_and_none_is_no_pool() {
    let last = TargetSlot { index: TARGETS_MAX - 1, generation: TargetSlot::GENERATIONS - 1 };
    assert_eq!(last.next().generation, 0);
    let pool = PoolId::new(last, SNAT_ADDRESSES_MAX - 1);
    assert_ne!(pool, PoolId::NONE);
    assert_eq!((pool.index(), pool.generation()), ((1 << 20) - 1, 4094));
    assert_eq!(PoolId::new(TargetSlot { index: TARGETS_MAX, generation: 0 }, 0), PoolId::NONE);
}

#[test]
fn a_port_that_nothing_remembers_is_used_next() {
    let mut snat = ports(1000, PortShare::whole());
    let take = |snat: &mut SnatPorts, now| snat.allocate(TARGET, &addresses(1), 0, at(now)).unwrap();
    let leases: Vec<_> = (0..60).map(|_| take(&mut snat, 0)).collect();
    for (n, lease) in leases.iter().enumerate() {
        if n % 2 == 0 { snat.release(lease.pool, lease.port, at(5)) } else { snat.release_clean(lease.pool, lease.port, at(5)) }
    }
    let clean: Vec<u16> = (0..30).map(|_| take(&mut snat, 6).port).collect();
    assert!(clean.iter().eq(leases.iter().skip(1).step_by(2).rev().map(|lease| &lease.port)), "{clean:?}");
    assert!(!leases.iter().any(|lease| lease.port == take(&mut snat, 6).port), "the others rest");
    let rested: Vec<u16> = (0..30).map(|_| take(&mut snat, 70).port).collect();
    assert!(rested.iter().eq(leases.iter().step_by(2).map(|lease| &lease.port)), "{rested:?}");
    assert_eq!(snat.reused_early(), 0);
}

proptest! {
    #[test]
    fn ports_are_those_of_a_queue(
        limit in 40u32..2000,
        steps in proptest::collection::vec((any::<bool>(), 0u64..2, any::<proptest::sample::Index>()), 1..600),
    ) {
        let share = PortShare::of_worker(0, 1024);
        let mut snat = ports(limit, share.clone());
        let (mut fresh, mut queue, mut held) = (0, VecDeque::<(u16, u64)>::new(), Vec::new());
        let (mut now, mut early) = (0, 0);
        for (take, seconds, which) in steps {
            now += 7 * seconds; // never 60 s apart, where rounding decides
            if take || held.is_empty() {
                let rested = queue.front().is_some_and(|&(_, freed)| now > freed + 60);
                let expected = if rested { queue.pop_front().map(|(port, _)| port) }
                    else if fresh < u32::from(share.count()) { fresh += 1; Some(share.port::<u32>(fresh - 1, 0)) }
                    else { let head = queue.pop_front(); early += u64::from(head.is_some()); head.map(|(port, _)| port) };
                let found = snat.allocate(TARGET, &addresses(1), 0, at(now));
                prop_assert_eq!(found.map(|lease| lease.port), expected);
                held.extend(found);
            } else {
                let lease = held.swap_remove(which.index(held.len()));
                snat.release(lease.pool, lease.port, at(now));
                queue.push_back((lease.port, now));
            }
            prop_assert_eq!((snat.in_use() as usize, snat.reused_early()), (held.len(), early));
        }
    }
}

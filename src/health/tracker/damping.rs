//! Tests of damping: how long it lasts, and whose it is.

use std::time::Duration;

use proto::{HealthCheck, Protocol, Services};

use super::super::history::STEADY_AFTER;
use super::super::target::TargetTable;
use super::super::target::tests::{service, services, subject};
use super::tests::{BACKEND, backend, failing, observe, one_target, target};
use super::*;
use crate::agent::persist::sealed::Moment;

#[test]
fn a_target_that_flaps_needs_twice_as_many_passes_each_time_until_it_stays_healthy() {
    let mut tracker = HealthTracker::default();
    tracker.follow(one_target(2, 1), Origin::Controller);
    let (target, mut now) = (target(2, 1), Instant::now());
    let mut passes_to_return = |tracker: &mut HealthTracker, healthy_for: Duration| {
        now += healthy_for;
        let Some(HealthChange::Failing(needed)) = tracker.observe(&target, Err("it failed"), now) else { panic!() };
        for passes in 1.. {
            now += Duration::from_secs(1);
            if tracker.observe(&target, Ok(()), now) == Some(HealthChange::Healthy) {
                assert_eq!(passes, needed);
                return needed;
            }
        }
        unreachable!()
    };
    let soon = STEADY_AFTER.checked_sub(Duration::from_secs(1)).unwrap();
    let found: Vec<u32> = (0..7).map(|_| passes_to_return(&mut tracker, soon)).collect();
    assert_eq!(found, [2, 4, 8, 16, 32, 32, 32]);
    assert_eq!(passes_to_return(&mut tracker, STEADY_AFTER), 2);
}

/// A tracker whose target of service `web` has flapped: it fails, and needs four passes.
fn flapped(table: &mut TargetTable) -> HealthTracker {
    let mut tracker = HealthTracker::default();
    tracker.follow(table.follow(&named("web")), Origin::Controller);
    for passed in [false, true, true, false] {
        observe(&mut tracker, &target(2, 1), passed);
    }
    tracker
}

fn named(name: &str) -> Services {
    let health = HealthCheck { rise: 2, fall: 1, ..HealthCheck::default() };
    services(vec![service(name, Protocol::Tcp, &[BACKEND], health)])
}

/// Passes until the target returns.
fn passes_to_return(tracker: &mut HealthTracker) -> usize {
    (1..100).find(|_| observe(tracker, &target(2, 1), true) == Some(HealthChange::Healthy)).unwrap()
}

#[test]
fn damping_does_not_outlive_the_services_that_ask() {
    let both = |table: &mut TargetTable| table.follow(&named("web").union(named("also")));
    for keeps in [true, false] {
        let mut table = TargetTable::default();
        let mut tracker = flapped(&mut table);
        if keeps {
            tracker.follow(both(&mut table), Origin::Controller);
        }
        tracker.follow(table.follow(&named("also")), Origin::Controller);
        let also = subject("also", Protocol::Tcp, BACKEND);
        assert_eq!(*tracker.health(), failing(&[also]), "its last probe failed");
        assert_eq!(passes_to_return(&mut tracker), if keeps { 4 } else { 2 });
    }
}

#[test]
fn a_service_that_is_new_after_a_restart_begins_without_the_health_of_an_earlier_one() {
    let last = flapped(&mut TargetTable::default());
    let bytes = SavedHealth::encode(last.histories(), Instant::now(), Moment::now());
    for (origin, is_new) in [(Origin::Controller, true), (Origin::LastProcess, true), (Origin::Disk, false)] {
        let saved = SavedHealth::decode(&bytes, Instant::now(), Moment::now()).unwrap();
        let mut tracker = HealthTracker::resuming(failing(&[backend()]), saved);
        // The first state has no target.
        tracker.follow(Changes::new(), origin);
        assert_eq!(tracker.has_begun(), is_new, "{origin:?}");
        tracker.follow(one_target(2, 1), Origin::Controller);
        assert_eq!(tracker.health().failing.is_empty(), is_new, "{origin:?}");
        observe(&mut tracker, &target(2, 1), false);
        assert_eq!(passes_to_return(&mut tracker), if is_new { 2 } else { 4 }, "{origin:?}");
    }
}

//! Debounce: which changes are planned together.
//!
//! Invariant: the first change after a pause does not wait, and no change waits longer than [`BURST_MAX`]. A change of an
//! EndpointSlice waits only if a plan was made for another one just before: it does not wait among other changes, such as
//! the events of our own writes of statuses.
//! Deliberately not here: applying a change (`world`), and planning.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use crate::world::World;
use crate::world::change::Change;

/// Capacity of the channel of changes; a faster source has to wait.
pub(crate) const CHANGES_WAITING_MAX: usize = 1024;
/// The first change after a pause of this length is planned at once. Later changes often come in bursts (deleting a
/// namespace deletes tens of Services within milliseconds), so they are collected until there is a pause of this
/// length,
const QUIET: Duration = Duration::from_millis(3);
/// or at the latest for this time. A stream without such a pause, of more than 333 changes a second, costs 20 plans a
/// second regardless of its rate.
const BURST_MAX: Duration = Duration::from_millis(50);

/// When plans were made last.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LastPlans {
    any: Option<Instant>,
    of_slices: Option<Instant>,
}

impl LastPlans {
    /// Records a plan that was just made; `is_of_slices` says whether EndpointSlices were among its changes.
    pub(crate) fn made(&mut self, is_of_slices: bool) {
        let now = Some(Instant::now());
        self.any = now;
        if is_of_slices {
            self.of_slices = now;
        }
    }
}

/// Collects the changes that belong to a burst. A change within [`QUIET`] of the previous plan belongs to a burst; one of an
/// EndpointSlice only within [`QUIET`] of the previous plan for EndpointSlices.
pub(crate) async fn collect_burst(changes: &mut mpsc::Receiver<Change>, world: &mut World, plans: LastPlans) {
    let start = Instant::now();
    let end = start + BURST_MAX;
    let begins_burst = |since: Instant, last: Option<Instant>| last.is_some_and(|at| since < at + QUIET);
    let (mut slices_changed, mut is_burst) = (false, begins_burst(start, plans.any));
    loop {
        // The deadline ends the collection for a source that never pauses.
        for _ in 0..CHANGES_WAITING_MAX {
            let Ok(change) = changes.try_recv() else { break };
            world.apply(change);
        }
        let now = Instant::now();
        if !slices_changed && world.have_slices_changed() {
            (slices_changed, is_burst) = (true, begins_burst(now, plans.of_slices));
        }
        if !is_burst || now >= end {
            return;
        }
        match timeout_at(end.min(now + QUIET), changes.recv()).await {
            Ok(Some(change)) => world.apply(change),
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Service;
    use k8s_openapi::api::discovery::v1::EndpointSlice;

    use super::*;

    fn service(n: u32) -> Change {
        let service = serde_json::json!({"metadata": {"name": format!("s{n}"), "namespace": "shop"},
            "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]}});
        Change::ServiceApplied(Box::new(serde_json::from_value::<Service>(service).unwrap().into()))
    }

    fn slice(n: u32) -> Change {
        let slice = serde_json::json!({"metadata": {"name": format!("s{n}-1"), "namespace": "shop",
            "labels": {"kubernetes.io/service-name": format!("s{n}")}},
            "addressType": "IPv4", "ports": [{"port": 8080}], "endpoints": [{"addresses": ["10.0.0.1"]}]});
        Change::SliceApplied(Box::new(serde_json::from_value::<EndpointSlice>(slice).unwrap().into()))
    }

    /// A plan: when it was made, since the first change, the Services that were known, and whether slices had changed.
    type Planned = (Duration, usize, bool);

    /// The plans for changes that come `apart` from each other.
    async fn plans_of(all: impl IntoIterator<Item = Change>, apart: Duration) -> Vec<Planned> {
        let (sender, mut changes) = mpsc::channel(CHANGES_WAITING_MAX);
        let all: Vec<Change> = all.into_iter().collect();
        tokio::spawn(async move {
            for change in all {
                sender.send(change).await.unwrap();
                if !apart.is_zero() {
                    tokio::time::sleep(apart).await;
                }
            }
        });
        let (mut world, mut last, mut plans) = (World::default(), LastPlans::default(), Vec::new());
        let start = Instant::now();
        while let Some(first) = changes.recv().await {
            world.apply(first);
            collect_burst(&mut changes, &mut world, last).await;
            let is_of_slices = world.take_slices_changed();
            last.made(is_of_slices);
            plans.push((start.elapsed(), world.services().len(), is_of_slices));
        }
        plans
    }

    /// When plans were made for changes of Services, and the Services that were known.
    async fn plans(count: u32, apart: Duration) -> Vec<(Duration, usize)> {
        plans_of((0..count).map(service), apart).await.into_iter().map(|(at, services, _)| (at, services)).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_after_a_pause_is_planned_at_once() {
        let apart = 2 * QUIET;
        let plans = plans(3, apart).await;
        assert_eq!(plans, [(Duration::ZERO, 1), (apart, 2), (2 * apart, 3)]);
    }

    #[tokio::test(start_paused = true)]
    async fn thirty_changes_of_one_burst_are_two_plans() {
        let counts: Vec<usize> = plans(30, Duration::from_millis(1)).await.iter().map(|(_, count)| *count).collect();
        assert_eq!(counts, [1, 30]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_thousand_changes_at_once_are_a_few_plans() {
        let plans = plans(1000, Duration::ZERO).await;
        assert!(plans.len() <= 2 && plans.last().unwrap().1 == 1000, "{plans:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_without_a_pause_is_planned_twenty_times_a_second() {
        let plans = plans(1000, Duration::from_millis(1)).await;
        assert!(plans.windows(2).all(|two| two[1].0 - two[0].0 <= BURST_MAX + Duration::from_millis(1)), "{plans:?}");
        assert!((15..=25).contains(&plans.len()), "{plans:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_changed_endpoint_does_not_wait_among_changes_of_services() {
        let apart = Duration::from_millis(1);
        let all = (0..40).map(|n| if n % 20 == 10 { slice(n) } else { service(n) });
        let of_slices: Vec<Duration> = plans_of(all, apart).await.into_iter().filter(|plan| plan.2).map(|plan| plan.0).collect();
        assert_eq!(of_slices, [10 * apart, 30 * apart]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_of_changed_endpoints_is_planned_twenty_times_a_second() {
        let plans = plans_of((0..1000).map(slice), Duration::from_millis(1)).await;
        assert!((15..=25).contains(&plans.len()), "{plans:?}");
    }
}

//! Debounce: which changes are planned together.
//!
//! Invariant: the first change after a pause does not wait, and no change waits longer than [`BURST_MAX`].
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

/// Collects the changes that belong to a burst. A change within [`QUIET`] of the previous plan belongs to a burst.
pub(crate) async fn collect_burst(changes: &mut mpsc::Receiver<Change>, world: &mut World, planned_at: Option<Instant>) {
    let start = Instant::now();
    let end = start + BURST_MAX;
    let is_burst = planned_at.is_some_and(|at| start < at + QUIET);
    loop {
        // The deadline ends the collection for a source that never pauses.
        for _ in 0..CHANGES_WAITING_MAX {
            let Ok(change) = changes.try_recv() else { break };
            world.apply(change);
        }
        let now = Instant::now();
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
    use super::*;

    fn change(n: u32) -> Change {
        let service = serde_json::json!({"metadata": {"name": format!("s{n}"), "namespace": "shop"},
            "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]}});
        Change::ServiceApplied(Box::new(serde_json::from_value(service).unwrap()))
    }

    /// When plans were made for changes that come `apart` from each other, since the first, and the objects they were
    /// for.
    async fn plans(count: u32, apart: Duration) -> Vec<(Duration, usize)> {
        let (sender, mut changes) = mpsc::channel(CHANGES_WAITING_MAX);
        tokio::spawn(async move {
            for n in 0..count {
                sender.send(change(n)).await.unwrap();
                if !apart.is_zero() {
                    tokio::time::sleep(apart).await;
                }
            }
        });
        let (mut world, mut planned_at, mut plans) = (World::default(), None, Vec::new());
        let start = Instant::now();
        while let Some(first) = changes.recv().await {
            world.apply(first);
            collect_burst(&mut changes, &mut world, planned_at).await;
            planned_at = Some(Instant::now());
            plans.push((start.elapsed(), world.services().len()));
        }
        plans
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
}

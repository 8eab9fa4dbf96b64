//! When the status of a Service is written, and where.
//!
//! Invariant: an address whose traffic does not pass the VIP on to nodes (`ipMode: Proxy`) is told to the world once
//! every connected gateway forwards for it, or 2 s after the first does. While no gateway is connected nothing is
//! added; what is there is never cleared because gateways leave. Somebody else who writes the same status is overwritten
//! at most `REWRITES_MAX` times in `REWRITES_WITHIN`.
//! Deliberately not here: what a status should be (`plan`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use imbl::ordmap::DiffItem;
use proto::{Reason, ServiceName};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::gateways::Gateways;
use crate::kubernetes::StatusWriter;
use crate::manifests::StatusFiles;
use crate::plan::{WantedStatus, WantedStatuses};
use crate::source::{Ingress, IpMode, StatusWrite};

/// A gateway that is slow, or that nobody repairs, holds the status up no longer than this after the first one.
const SLOW_GATEWAY_WAITED_FOR: Duration = Duration::from_secs(2);
/// A status file that could not be written is tried again after this time.
const RETRY: Duration = Duration::from_secs(5);

/// Rewrites of what somebody else wrote, per Service and wish: two controllers must not wear out the API server.
const REWRITES_MAX: usize = 3;
/// The time that they are counted in; after it the Service is tried again.
const REWRITES_WITHIN: Duration = Duration::from_secs(600);

/// Where statuses are written.
#[derive(Debug)]
pub enum StatusSink {
    /// Files beside manifests.
    Files(StatusFiles),
    /// `services/status` of a Kubernetes API, through a queue that repeats and paces.
    Kubernetes(Arc<StatusWriter>),
}

/// The statuses that one plan wants.
#[derive(Clone, Debug, Default)]
pub struct Statuses {
    /// Counter of the generation that gateways forward by for them.
    pub counter: u64,
    /// All Services of type `LoadBalancer` that are ours.
    pub wanted: WantedStatuses,
}

/// Writes what is wanted, when it is due, until the sender of `statuses` is gone.
pub async fn write_statuses(
    mut statuses: watch::Receiver<Option<Arc<Statuses>>>,
    mut gateways: watch::Receiver<Gateways>,
    mut sink: StatusSink,
) {
    let mut queue = Queue::default();
    loop {
        let newest = statuses.borrow_and_update().clone();
        if let Some(newest) = newest {
            queue.take_in(&newest, Instant::now(), |write| sink.has_written(write));
            sink.forget_all_but(&newest.wanted);
        }
        let connected = gateways.borrow_and_update().clone();
        for write in queue.due(&connected, Instant::now()) {
            let done = sink.write(&write);
            queue.note(write, done, Instant::now());
            // Files are written here; other tasks get their turn between two.
            tokio::task::yield_now().await;
        }
        let wake_at = queue.next_due();
        tokio::select! {
            changed = statuses.changed() => if changed.is_err() { return },
            changed = gateways.changed() => if changed.is_err() { return },
            () = tokio::time::sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => {}
        }
    }
}

impl StatusSink {
    /// Whether it is written, or will be without our doing.
    fn write(&mut self, write: &StatusWrite) -> bool {
        match self {
            Self::Files(files) => match files.write(write) {
                Ok(()) => true,
                Err(error) => {
                    tracing::warn!(service = %write.service, %error, "status file not written; trying again");
                    false
                }
            },
            Self::Kubernetes(writer) => {
                writer.write(write.clone());
                true
            }
        }
    }

    /// Whether the object has had the status of `write`. Nobody else writes status files.
    fn has_written(&self, write: &StatusWrite) -> bool {
        match self {
            Self::Files(_) => false,
            Self::Kubernetes(writer) => writer.has_written(write),
        }
    }

    /// A Service that is gone has no status. In a cluster that went with the Service.
    fn forget_all_but(&mut self, services: &WantedStatuses) {
        if let Self::Files(files) = self {
            files.forget_all_but(|name| services.contains_key(name));
        }
    }
}

/// Writes that wait, and what was written.
#[derive(Debug, Default)]
struct Queue {
    /// What was taken in last: what is the same now was decided then.
    wanted: WantedStatuses,
    waiting: BTreeMap<ServiceName, Waiting>,
    written: BTreeMap<ServiceName, StatusWrite>,
    contests: BTreeMap<ServiceName, Contest>,
}

#[derive(Debug)]
struct Waiting {
    write: StatusWrite,
    /// The generation that gateways must have reached; none: it waits for nobody.
    counter: Option<u64>,
    not_before: Option<Instant>,
    first_reached_at: Option<Instant>,
    is_rewrite: bool,
}

/// What somebody else keeps changing.
#[derive(Clone, Debug)]
struct Contest {
    uid: String,
    wanted: Vec<Ingress>,
    rewritten_at: Vec<Instant>,
    is_told: bool,
}

impl Contest {
    fn is_about(&self, write: &StatusWrite) -> bool {
        self.uid == write.uid && self.wanted == write.ingress
    }

    /// When it may be rewritten; none: now.
    fn not_before(&self, now: Instant) -> Option<Instant> {
        let earliest = self.rewritten_at.iter().rev().nth(REWRITES_MAX - 1)?;
        Some(*earliest + REWRITES_WITHIN).filter(|time| *time > now)
    }

    fn tell(&mut self, wanted: &WantedStatus) {
        if !std::mem::replace(&mut self.is_told, true) {
            let (service, manager) = (&wanted.write.service, wanted.foreign_manager.as_deref().unwrap_or("unknown"));
            tracing::warn!(
                %service, reason = %Reason::ForeignStatusWriter, manager,
                "somebody else keeps writing its status; expected one writer, rewriting it again in 10 minutes: stop the other one"
            );
        }
    }
}

impl Queue {
    /// `has_written` tells whether the object has had the status of a write.
    fn take_in(&mut self, statuses: &Statuses, now: Instant, has_written: impl Fn(&StatusWrite) -> bool) {
        let before = std::mem::replace(&mut self.wanted, statuses.wanted.clone());
        for item in before.diff(&statuses.wanted) {
            let (name, wanted) = match item {
                DiffItem::Add(name, wanted) | DiffItem::Update { new: (name, wanted), .. } => (name, wanted),
                DiffItem::Remove(name, _) => {
                    self.contests.remove(name);
                    self.waiting.remove(name);
                    self.written.remove(name);
                    continue;
                }
            };
            let known = self.known(wanted).to_vec();
            let mut write = wanted.write.clone();
            if !wanted.served {
                write.ingress = known.iter().filter(|old| write.ingress.iter().any(|new| new.ip == old.ip)).copied().collect();
            }
            if write.ingress == known {
                self.waiting.remove(name);
                continue;
            }
            let waits = write.ingress.iter().any(|new| new.ip_mode == IpMode::Proxy && !known.contains(new));
            let counter = waits.then_some(statuses.counter);
            match self.waiting.get_mut(name) {
                // Gateways are not asked again for what they may already have reached.
                Some(old) if old.write.ingress == write.ingress => old.write = write,
                _ => {
                    let is_rewrite = self.written.get(name).is_some_and(|old| is_overwritten(old, &write) && has_written(old));
                    let contest = self.contests.get_mut(name).filter(|contest| is_rewrite && contest.is_about(&write));
                    let not_before = contest.and_then(|contest| {
                        let time = contest.not_before(now)?;
                        contest.tell(wanted);
                        Some(time)
                    });
                    let waiting = Waiting { write, counter, not_before, first_reached_at: None, is_rewrite };
                    self.waiting.insert(name.clone(), waiting);
                }
            }
        }
    }

    /// What the object's status is, as far as we know: our own write to this very version of it counts more.
    fn known<'a>(&'a self, wanted: &'a WantedStatus) -> &'a [Ingress] {
        let version = |write: &StatusWrite| (write.uid.clone(), write.resource_version.clone());
        match self.written.get(&wanted.write.service) {
            Some(write) if version(write) == version(&wanted.write) => &write.ingress,
            _ => &wanted.current,
        }
    }

    fn due(&mut self, gateways: &Gateways, now: Instant) -> Vec<StatusWrite> {
        let mut due = Vec::new();
        for waiting in self.waiting.values_mut() {
            if let Some(counter) = waiting.counter {
                let first = waiting.first_reached_at.filter(|_| gateways.any_reached(counter));
                waiting.first_reached_at = first.or_else(|| gateways.any_reached(counter).then_some(now));
                let waited_enough = first.is_some_and(|first| now >= first + SLOW_GATEWAY_WAITED_FOR);
                if waited_enough || gateways.all_reached(counter) {
                    waiting.counter = None;
                }
            }
            if waiting.counter.is_none() && waiting.not_before.is_none_or(|time| time <= now) {
                due.push(waiting.write.clone());
            }
        }
        due
    }

    fn note(&mut self, write: StatusWrite, done: bool, now: Instant) {
        if done {
            if self.waiting.remove(&write.service).is_some_and(|waiting| waiting.is_rewrite) {
                self.count_rewrite(&write, now);
            }
            self.written.insert(write.service.clone(), write);
        } else if let Some(waiting) = self.waiting.get_mut(&write.service) {
            waiting.not_before = Some(now + RETRY);
        }
    }

    fn count_rewrite(&mut self, write: &StatusWrite, now: Instant) {
        let (uid, wanted) = (write.uid.clone(), write.ingress.clone());
        let new = Contest { uid, wanted, rewritten_at: Vec::new(), is_told: false };
        let contest = self.contests.entry(write.service.clone()).or_insert_with(|| new.clone());
        if !contest.is_about(write) {
            *contest = new;
        }
        contest.rewritten_at.retain(|at| now < *at + REWRITES_WITHIN);
        contest.rewritten_at.push(now);
        contest.is_told = false;
    }

    /// When something is due without anything happening.
    fn next_due(&self) -> Option<Instant> {
        let slow = |waiting: &Waiting| waiting.first_reached_at.map(|first| first + SLOW_GATEWAY_WAITED_FOR);
        let of = |waiting: &Waiting| if waiting.counter.is_some() { slow(waiting) } else { waiting.not_before };
        self.waiting.values().filter_map(of).min()
    }
}

/// Whether what `old` wrote must be written again although only the object has changed.
fn is_overwritten(old: &StatusWrite, now: &StatusWrite) -> bool {
    old.uid == now.uid && old.resource_version != now.resource_version && old.ingress == now.ingress
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateways::Connection;

    fn ingress(last: u8, ip_mode: IpMode) -> Ingress {
        Ingress { ip: [192, 0, 2, last].into(), ip_mode }
    }

    fn statuses(counter: u64, version: &str, current: &[Ingress], wanted: &[Ingress], served: bool) -> Statuses {
        let service = ServiceName::new("shop", "web");
        let write = StatusWrite {
            service: service.clone(),
            uid: "u".to_owned(),
            resource_version: version.to_owned(),
            ingress: wanted.to_vec(),
        };
        let status = WantedStatus { write, current: current.to_vec(), foreign_manager: None, served };
        Statuses { counter, wanted: WantedStatuses::unit(service, Arc::new(status)) }
    }

    fn take(queue: &mut Queue, statuses: &Statuses) {
        queue.take_in(statuses, Instant::now(), |_| true);
    }

    #[test]
    fn a_status_waits_for_every_connected_gateway_or_two_seconds_after_the_first() {
        let gateways = watch::Sender::new(Gateways::default());
        let (now, mut queue) = (Instant::now(), Queue::default());
        take(&mut queue, &statuses(4, "1", &[], &[ingress(1, IpMode::Proxy)], true));
        assert!(queue.due(&gateways.borrow(), now).is_empty(), "nobody is connected");
        let fast = Connection::open(&gateways, "edge-1", "", Vec::new());
        let slow = Connection::open(&gateways, "edge-2", "", Vec::new());
        slow.acknowledge(3);
        assert!(queue.due(&gateways.borrow(), now).is_empty() && queue.next_due().is_none());
        fast.acknowledge(4);
        assert!(queue.due(&gateways.borrow(), now).is_empty());
        assert_eq!(queue.next_due(), Some(now + SLOW_GATEWAY_WAITED_FOR));
        assert_eq!(queue.due(&gateways.borrow(), now + SLOW_GATEWAY_WAITED_FOR).len(), 1);
        slow.acknowledge(4);
        assert_eq!(queue.due(&gateways.borrow(), now).len(), 1);
    }

    #[test]
    fn a_later_generation_does_not_make_a_waiting_status_wait_longer() {
        let gateways = watch::Sender::new(Gateways::default());
        let one = Connection::open(&gateways, "edge-1", "", Vec::new());
        let mut queue = Queue::default();
        take(&mut queue, &statuses(4, "1", &[], &[ingress(1, IpMode::Proxy)], true));
        take(&mut queue, &statuses(9, "2", &[], &[ingress(1, IpMode::Proxy)], true));
        one.acknowledge(4);
        let due = queue.due(&gateways.borrow(), Instant::now());
        assert_eq!(due[0].resource_version, "2");
    }

    #[test]
    fn a_vip_mode_and_a_clearing_wait_for_nobody() {
        let (now, nobody) = (Instant::now(), Gateways::default());
        let mut queue = Queue::default();
        take(&mut queue, &statuses(4, "1", &[], &[ingress(1, IpMode::Vip)], true));
        assert_eq!(queue.due(&nobody, now).len(), 1);
        let mut queue = Queue::default();
        take(&mut queue, &statuses(4, "1", &[ingress(1, IpMode::Proxy)], &[], true));
        assert_eq!(queue.due(&nobody, now)[0].ingress, []);
    }

    #[test]
    fn what_was_written_to_this_version_of_the_object_is_not_written_again() {
        let (now, nobody, mut queue) = (Instant::now(), Gateways::default(), Queue::default());
        let wanted = statuses(4, "1", &[], &[ingress(1, IpMode::Vip)], true);
        take(&mut queue, &wanted);
        let write = queue.due(&nobody, now).remove(0);
        queue.note(write, true, now);
        take(&mut queue, &wanted);
        assert!(queue.due(&nobody, now).is_empty());
        // A newer object without it: somebody took it away, or our write came too late.
        take(&mut queue, &statuses(5, "2", &[], &[ingress(1, IpMode::Vip)], true));
        assert_eq!(queue.due(&nobody, now).len(), 1);
    }

    #[test]
    fn a_service_that_is_not_served_keeps_the_address_it_holds_and_gets_none() {
        let (now, nobody, held) = (Instant::now(), Gateways::default(), ingress(1, IpMode::Vip));
        let mut queue = Queue::default();
        take(&mut queue, &statuses(4, "1", &[], &[held], false));
        assert!(queue.due(&nobody, now).is_empty());
        take(&mut queue, &statuses(4, "1", &[held, ingress(2, IpMode::Vip)], &[held], false));
        assert_eq!(queue.due(&nobody, now)[0].ingress, [held]);
    }

    #[test]
    fn a_failed_write_is_tried_again_later() {
        let (now, nobody, mut queue) = (Instant::now(), Gateways::default(), Queue::default());
        take(&mut queue, &statuses(4, "1", &[], &[ingress(1, IpMode::Vip)], true));
        let write = queue.due(&nobody, now).remove(0);
        queue.note(write, false, now);
        assert!(queue.due(&nobody, now).is_empty());
        assert_eq!(queue.due(&nobody, queue.next_due().unwrap()).len(), 1);
    }

    /// Lets somebody else clear the status `times` times, and counts how often it is written again at `now`.
    fn contested(queue: &mut Queue, versions: std::ops::Range<u32>, wanted: Ingress, now: Instant) -> usize {
        let nobody = Gateways::default();
        let write_due = |version: u32| {
            queue.take_in(&statuses(4, &version.to_string(), &[], &[wanted], true), now, |_| true);
            let due = queue.due(&nobody, now);
            due.into_iter().map(|write| queue.note(write, true, now)).count()
        };
        versions.map(write_due).sum()
    }

    #[test]
    fn a_foreign_writer_is_overwritten_three_times_in_ten_minutes_and_then_left_alone() {
        let (start, wanted, mut queue) = (Instant::now(), ingress(1, IpMode::Vip), Queue::default());
        assert_eq!(contested(&mut queue, 0..9, wanted, start), 1 + REWRITES_MAX, "the first write, and the rewrites");
        assert_eq!(queue.next_due(), Some(start + REWRITES_WITHIN));
        let later = start + REWRITES_WITHIN;
        assert_eq!(queue.due(&Gateways::default(), later - Duration::from_secs(1)), []);
        assert_eq!(contested(&mut queue, 10..20, wanted, later), REWRITES_MAX, "it starts again");
        assert_eq!(contested(&mut queue, 20..30, ingress(2, IpMode::Vip), later), 1 + REWRITES_MAX, "another wish");
    }

    #[test]
    fn a_write_that_came_too_late_is_no_contest() {
        let (now, nobody, mut queue) = (Instant::now(), Gateways::default(), Queue::default());
        for version in 0..9 {
            queue.take_in(&statuses(4, &version.to_string(), &[], &[ingress(1, IpMode::Vip)], true), now, |_| false);
            let write = queue.due(&nobody, now).remove(0);
            queue.note(write, true, now);
        }
    }
}

//! Publication of snapshots to workers, and their reclamation.
//!
//! Once per burst a worker reads one number and takes the new snapshot when it has changed.
//!
//! **Invariants:** a worker never drops the last reference to a snapshot, since the publisher keeps retired ones until
//! all workers have moved on. At most two retired snapshots exist; snapshots published meanwhile wait, and the newest
//! replaces older ones. A sleeping worker holds no snapshot but the initial one.
//!
//! Not here: waiting. The publisher's owner calls [`Publisher::advance`] periodically.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;

use super::tables::Snapshot;
use crate::port::Doorbell;

const RETIRED_MAX: usize = 2;
/// The sequence of a sleeping worker, which delays no publication.
const OFFLINE: u64 = u64::MAX;

/// Padded to two cache lines, which adjacent-line prefetching fetches together, so that no worker writes into a line of
/// another.
#[derive(Debug)]
#[repr(align(128))]
struct Running(AtomicU64);

#[derive(Debug)]
struct Shared {
    current: ArcSwap<Snapshot>,
    /// The snapshot that sleeping workers hold.
    initial: Arc<Snapshot>,
    /// Sequence of `current`, cheap to read.
    sequence: AtomicU64,
    /// For each worker, the sequence of its snapshot; 0 while it wakes up.
    running: Box<[Running]>,
}

/// The publishing side.
#[derive(Debug)]
pub struct Publisher {
    shared: Arc<Shared>,
    retired: Vec<Arc<Snapshot>>,
    waiting: Option<Snapshot>,
    /// Of the workers that sleep at times.
    doorbells: Vec<Arc<Doorbell>>,
}

/// Reads the snapshot that was published last. No worker waits for a reader.
#[derive(Clone, Debug)]
pub struct SnapshotReader {
    shared: Arc<Shared>,
}

impl SnapshotReader {
    /// The snapshot that was published last. A reader must drop it soon: while two retired snapshots are held, newer ones
    /// wait.
    #[must_use]
    pub fn current(&self) -> Arc<Snapshot> {
        self.shared.current.load_full()
    }
}

/// The receiving side of one worker.
#[derive(Debug)]
pub struct Subscriber {
    shared: Arc<Shared>,
    worker: usize,
    snapshot: Arc<Snapshot>,
    /// Sequence of the snapshot taken last.
    seen: u64,
    asleep: bool,
}

impl Publisher {
    /// A publisher whose workers start with `initial`, and the receiving sides.
    #[must_use]
    pub fn new(initial: Snapshot, workers: usize) -> (Self, Vec<Subscriber>) {
        let sequence = initial.sequence();
        let initial = Arc::new(initial);
        let shared = Arc::new(Shared {
            current: ArcSwap::new(initial.clone()),
            initial,
            sequence: AtomicU64::new(sequence),
            running: (0..workers).map(|_| Running(AtomicU64::new(sequence))).collect(),
        });
        let subscriber = |worker| Subscriber {
            shared: shared.clone(),
            worker,
            snapshot: shared.initial.clone(),
            seen: sequence,
            asleep: false,
        };
        let subscribers = (0..workers).map(subscriber).collect();
        (Self { shared, retired: Vec::new(), waiting: None, doorbells: Vec::new() }, subscribers)
    }

    /// Wakes the workers of these doorbells at every publication: packets may wait for what is new, and new addresses
    /// are to be announced.
    #[must_use]
    pub fn waking(self, doorbells: Vec<Arc<Doorbell>>) -> Self {
        Self { doorbells, ..self }
    }

    /// Publishes a snapshot, at once or in a later [`Publisher::advance`], replacing one that still waits. Returns its
    /// sequence, for [`Publisher::reached`].
    pub fn publish(&mut self, snapshot: Snapshot) -> u64 {
        let sequence = snapshot.sequence();
        self.waiting = Some(snapshot);
        self.advance();
        sequence
    }

    /// Frees retired snapshots that no worker uses, and publishes the waiting one if there is room. Returns true when
    /// none waits.
    pub fn advance(&mut self) -> bool {
        self.retired.retain(|snapshot| Arc::strong_count(snapshot) > 1);
        if self.retired.len() < RETIRED_MAX
            && let Some(snapshot) = self.waiting.take()
        {
            let sequence = snapshot.sequence();
            let old = self.shared.current.swap(Arc::new(snapshot));
            self.shared.sequence.store(sequence, Ordering::SeqCst);
            self.doorbells.iter().for_each(|doorbell| doorbell.ring());
            if !Arc::ptr_eq(&old, &self.shared.initial) {
                self.retired.push(old);
            }
        }
        self.waiting.is_none()
    }

    /// Whether every worker that is awake uses this snapshot or a later one.
    #[must_use]
    pub fn reached(&self, sequence: u64) -> bool {
        self.shared.sequence.load(Ordering::SeqCst) >= sequence
            && self.shared.running.iter().all(|running| running.0.load(Ordering::SeqCst) >= sequence)
    }

    /// The snapshot that was published last.
    #[must_use]
    pub fn current(&self) -> Arc<Snapshot> {
        self.shared.current.load_full()
    }

    /// A reader for other threads than workers.
    #[must_use]
    pub fn reader(&self) -> SnapshotReader {
        SnapshotReader { shared: Arc::clone(&self.shared) }
    }

    /// Number of retired snapshots that are still held; at most two.
    #[must_use]
    pub fn retired(&self) -> usize {
        self.retired.len()
    }
}

impl Subscriber {
    /// Takes the newest snapshot, if there is one, and wakes up. Called once per burst. Returns true when the snapshot
    /// changed.
    #[inline]
    pub fn refresh(&mut self) -> bool {
        if !self.asleep && self.shared.sequence.load(Ordering::Acquire) == self.snapshot.sequence() {
            return false;
        }
        self.take()
    }

    #[cold]
    fn take(&mut self) -> bool {
        let running = &self.shared.running[self.worker].0;
        if self.asleep {
            // Mark as awake before reading: either the publisher sees the mark, or this read sees what it published.
            running.store(0, Ordering::SeqCst);
            self.asleep = false;
        }
        self.snapshot = self.shared.current.load_full();
        let changed = self.seen != self.snapshot.sequence();
        self.seen = self.snapshot.sequence();
        running.store(self.seen, Ordering::SeqCst);
        changed
    }

    /// Releases the snapshot until the next [`Subscriber::refresh`]. Until then [`Subscriber::snapshot`] is the initial
    /// one, and the publisher does not wait for this worker.
    pub fn sleep(&mut self) {
        self.snapshot = self.shared.initial.clone();
        self.asleep = true;
        self.shared.running[self.worker].0.store(OFFLINE, Ordering::SeqCst);
    }

    /// The newest snapshot, for a sleeping worker too.
    #[must_use]
    pub fn newest(&self) -> Arc<Snapshot> {
        self.shared.current.load_full()
    }

    /// Index of the worker, from 0.
    #[must_use]
    pub const fn worker(&self) -> usize {
        self.worker
    }

    /// The snapshot taken last.
    #[must_use]
    #[inline]
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compiler::Compiler;
    use crate::flow::FlowLimits;
    use crate::snapshot::input::{Config, Health, Network, Tunnel};
    use std::time::Duration;

    struct Rig {
        compiler: Compiler,
        publisher: Publisher,
        workers: Vec<Subscriber>,
    }

    impl Rig {
        fn new(workers: usize) -> Self {
            let second = Duration::from_secs(1);
            let flows = FlowLimits {
                max_per_worker: 1,
                tcp_established: second,
                tcp_opening: second,
                tcp_closing: second,
                udp: second,
                udp_unreplied: second,
                ..FlowLimits::default()
            };
            let compiler = Compiler::new(Config {
                ports: vec![],
                snat: vec![],
                node_port_addresses: vec![],
                flows,
                shared_snat: false,
                targets_max: crate::flow::TARGETS_MAX,
                tunnel: Tunnel::default(),
            });
            let (publisher, workers) = Publisher::new(compiler.initial(), workers);
            Self { compiler, publisher, workers }
        }

        fn publish(&mut self) -> u64 {
            let state = proto::State::default();
            let snapshot = self.compiler.compile(&state, &Network::default(), &Health::default(), 0);
            self.publisher.publish(snapshot)
        }
    }

    #[test]
    fn a_snapshot_is_reached_when_every_worker_has_taken_it() {
        let mut rig = Rig::new(2);
        assert!(!rig.workers[0].refresh(), "there is nothing new");
        let sequence = rig.publish();
        assert!(!rig.publisher.reached(sequence));
        assert!(rig.workers[0].refresh() && !rig.workers[0].refresh());
        assert!(!rig.publisher.reached(sequence));
        assert!(rig.workers[1].refresh());
        assert!(rig.publisher.reached(sequence) && rig.workers[1].snapshot().ready());
    }

    #[test]
    fn at_most_two_retired_snapshots_exist_and_the_newest_change_is_not_lost() {
        let mut rig = Rig::new(2);
        let mut last = 0;
        for round in 0..9 {
            last = rig.publish();
            rig.workers[0].refresh();
            if round == 0 {
                rig.workers[1].refresh();
            }
            assert!(rig.publisher.retired() <= 2);
        }
        assert!(rig.publisher.advance(), "one worker holds one snapshot, which delays no publication");
        rig.workers[1].refresh();
        assert!(rig.publisher.reached(last));
        rig.publisher.advance();
        assert_eq!(rig.publisher.retired(), 0);
    }

    #[test]
    fn changes_coalesce_while_workers_hold_all_that_may_be_retired() {
        let mut rig = Rig::new(2);
        rig.publish();
        rig.workers[0].refresh();
        rig.publish();
        rig.workers[1].refresh();
        rig.publish();
        let (lost, last) = (rig.publish(), rig.publish());
        assert!(!rig.publisher.advance() && !rig.publisher.reached(lost));
        rig.workers[0].refresh();
        assert!(rig.publisher.advance());
        for worker in &mut rig.workers {
            worker.refresh();
        }
        assert_eq!(rig.workers[0].snapshot().sequence(), last);
        assert!(rig.publisher.reached(last));
    }

    #[test]
    fn a_sleeping_worker_delays_no_publication_and_wakes_to_the_newest() {
        let mut rig = Rig::new(1);
        rig.publish();
        rig.workers[0].refresh();
        rig.workers[0].sleep();
        let sequence = (0..5).map(|_| rig.publish()).last().unwrap();
        assert!(rig.publisher.advance() && rig.publisher.reached(sequence));
        assert_eq!(rig.publisher.retired(), 0);
        assert!(rig.workers[0].refresh());
        assert_eq!(rig.workers[0].snapshot().sequence(), sequence);
        rig.workers[0].sleep();
        assert!(!rig.workers[0].refresh(), "nothing changed meanwhile");
        assert_eq!(rig.workers[0].snapshot().sequence(), sequence);
        let next = rig.publish();
        assert!(!rig.publisher.reached(next), "it is awake again");
    }

    #[test]
    fn a_publication_wakes_workers_that_sleep() {
        let woken = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&woken);
        let doorbell = Arc::new(Doorbell::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        }));
        let Rig { compiler, publisher, workers } = Rig::new(1);
        let mut rig = Rig { compiler, publisher: publisher.waking(vec![Arc::clone(&doorbell)]), workers };
        rig.publish();
        assert_eq!(woken.load(Ordering::Relaxed), 0, "the worker is awake");
        doorbell.arm();
        rig.workers[0].sleep();
        rig.publish();
        assert_eq!(woken.load(Ordering::Relaxed), 1);
        assert!(rig.workers[0].refresh());
    }

    #[test]
    fn workers_that_run_on_other_threads_reach_every_snapshot() {
        let mut rig = Rig::new(2);
        let workers = std::mem::take(&mut rig.workers);
        std::thread::scope(|scope| {
            for mut worker in workers {
                scope.spawn(move || {
                    for turn in 0_u32.. {
                        worker.refresh();
                        if worker.snapshot().sequence() == 200 {
                            return;
                        }
                        if turn % 64 == 63 {
                            worker.sleep();
                            std::thread::yield_now();
                        }
                    }
                });
            }
            while rig.publish() < 200 {}
            while !rig.publisher.advance() {
                std::thread::yield_now();
            }
        });
        assert!(rig.publisher.reached(200));
    }
}

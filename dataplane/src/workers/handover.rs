//! Hand-over of packets to the other workers of the gateway: many at once through one bounded queue for each ordered
//! pair. No side ever waits. A sleeping worker is woken by its doorbell.
//!
//! **Invariant:** packets of one port with one task that one worker hands to another arrive in order. In a poll a
//! worker pushes at most one element that is not full for each port and task, however they are mixed. Packets that a
//! queue refuses are dropped and counted (`handover_full`).
//!
//! Not here: who owns a packet ([`super::steering`]).

use std::mem;
use std::sync::Arc;

use arrayvec::ArrayVec;
use crossbeam_queue::ArrayQueue;

use super::id::WorkerId;
use super::rss_proof::{Observer, RssProof};
use super::snat_port_share::PortShare;
use super::steering::Steering;
use crate::port::{BURST, Burst, Doorbell, PortIndex};

/// Maximum number of packets in one element of a queue. It is less than a burst: an element is copied whole, and a full
/// queue of full elements must not hold more packets than are reserved for it.
pub(super) const HANDED_OVER_MAX: usize = 32;
/// Maximum number of elements that wait for a worker, from all others together. If full, they hold the 4,096 packets that
/// the buffer pool reserves for each worker. At 14.88 million packets a second, half of them for other workers, that is
/// half a millisecond.
const ELEMENTS_PER_WORKER: usize = 128;
/// Minimum capacity of the queue between two workers, in elements.
const ELEMENTS_PER_PAIR_MIN: usize = 16;
/// Packets taken from one worker before the next one has its turn; the last burst may exceed it.
pub(crate) const PACKETS_PER_TURN: usize = 2 * BURST;

/// Packets of one element.
pub(super) type Handed<B> = ArrayVec<B, HANDED_OVER_MAX>;

/// What the receiving worker does with the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandoverTask {
    /// Decide on them: it is their owner.
    Decide,
    /// Determine their owner: they are fragments, and those of a datagram meet there; or they begin new flows in place of
    /// flows in two halves, of which this worker has one.
    Meet,
    /// Transmit them: they are finished, and it has a transmit queue of the port.
    Send,
}

/// Number of tasks.
const TASKS: usize = 3;

/// Packets that one worker hands to another: an element of a queue.
#[derive(Debug)]
pub struct HandedOver<B> {
    /// The port on which they arrived, or by which they leave.
    pub(crate) port: PortIndex,
    pub(crate) task: HandoverTask,
    pub(crate) packets: Handed<B>,
}

/// The queue from one worker to another.
#[derive(Debug)]
pub(crate) struct HandoverQueue<B> {
    elements: ArrayQueue<HandedOver<B>>,
    /// The receiver's; `None` if it never sleeps.
    doorbell: Option<Arc<Doorbell>>,
}

impl<B> HandoverQueue<B> {
    /// Pushes packets, and wakes the receiver if it sleeps.
    ///
    /// The packets, when the queue is full.
    pub(crate) fn push(&self, handed: HandedOver<B>) -> Result<(), HandedOver<B>> {
        let pushed = self.elements.push(handed);
        if let Some(doorbell) = &self.doorbell {
            doorbell.ring();
        }
        pushed
    }
}

/// The queues from other workers to one worker, for readers beside the workers.
#[derive(Clone, Debug)]
pub struct Inboxes(Vec<Arc<dyn Length>>);

impl Inboxes {
    /// Elements that wait in all of them.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.iter().map(|queue| queue.len()).sum()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A queue whose length any thread may read.
trait Length: std::fmt::Debug + Send + Sync {
    fn len(&self) -> usize;
}

impl<B: std::fmt::Debug + Send> Length for HandoverQueue<B> {
    fn len(&self) -> usize {
        self.elements.len()
    }
}

/// How the queues of a port are shared among the workers. Queue n belongs to worker n.
#[derive(Clone, Debug)]
pub struct PortQueues {
    /// Number of transmit queues, at least 1. Workers without one hand their packets over to another worker for
    /// transmission.
    pub transmit: u8,
    /// Set where the device was configured to spread packets by [`Steering::rss_key`] over as many receive queues as
    /// there are workers: what each worker finds out about that, in their order.
    pub rss: Option<Arc<[Arc<RssProof>]>>,
}

/// One worker's view of the others.
#[derive(Debug)]
pub struct Peers<B> {
    me: WorkerId,
    steering: Arc<Steering>,
    /// Queues from the other workers.
    inboxes: Vec<Arc<HandoverQueue<B>>>,
    /// Queues to the other workers, indexed by worker; `None` for itself.
    outboxes: Vec<Option<Arc<HandoverQueue<B>>>>,
    /// Packets collected for the other workers.
    pub(super) gathered: Gathered<B>,
    /// Indexed by port.
    proofs: Vec<Option<Observer>>,
    /// Indexed by port: the worker that transmits for this one, if it has no transmit queue of its own.
    senders: Vec<Option<WorkerId>>,
}

impl<B> Peers<B> {
    /// The views of all workers, in their order, if no worker sleeps. `ports` are in the order of the configuration.
    #[must_use]
    pub fn all(steering: &Arc<Steering>, ports: &[PortQueues]) -> Vec<Self> {
        Self::with_doorbells(steering, ports, &[])
    }

    /// The same, with the doorbells of the workers, in their order.
    #[must_use]
    pub fn with_doorbells(steering: &Arc<Steering>, ports: &[PortQueues], doorbells: &[Arc<Doorbell>]) -> Vec<Self> {
        let workers = steering.workers();
        let elements = (ELEMENTS_PER_WORKER / usize::from(workers.max(2) - 1)).max(ELEMENTS_PER_PAIR_MIN);
        let queue = |from: u8, to: u8| {
            let doorbell = doorbells.get(usize::from(to)).cloned();
            (from != to).then(|| Arc::new(HandoverQueue { elements: ArrayQueue::new(elements), doorbell }))
        };
        let queues: Vec<Vec<Option<Arc<HandoverQueue<B>>>>> =
            (0..workers).map(|from| (0..workers).map(|to| queue(from, to)).collect()).collect();
        let of = |(me, outboxes): (u8, &Vec<Option<Arc<HandoverQueue<B>>>>)| Self {
            me: WorkerId(me),
            steering: Arc::clone(steering),
            inboxes: queues.iter().filter_map(|from| from.get(usize::from(me))?.clone()).collect(),
            outboxes: outboxes.clone(),
            gathered: Gathered::new(workers.into(), ports.len()),
            proofs: ports.iter().map(|port| port.rss.as_ref()?.get(usize::from(me)).cloned().map(Observer::new)).collect(),
            senders: ports.iter().map(|port| sender(WorkerId(me), port.transmit)).collect(),
        };
        (0..workers).zip(&queues).map(of).collect()
    }

    pub(crate) fn me(&self) -> WorkerId {
        self.me
    }

    /// The inputs for the determination of owners, for packets of a port.
    pub(crate) fn steering(&mut self, port: PortIndex) -> (WorkerId, &Steering, Option<&mut Observer>) {
        (self.me, &self.steering, self.proofs.get_mut(usize::from(port.0)).and_then(Option::as_mut))
    }

    /// Whether the queue of a port by which a packet came tells its owner.
    #[inline]
    pub(crate) fn trusts_queue(&self, port: PortIndex) -> bool {
        self.proofs.get(usize::from(port.0)).is_some_and(|proof| proof.as_ref().is_some_and(Observer::trusts))
    }

    /// Index of this worker, and the number of workers.
    pub(crate) fn position(&self) -> (u16, u16) {
        (self.me.0.into(), self.steering.workers().into())
    }

    /// The SNAT ports of this worker.
    pub(crate) fn snat_share(&self) -> PortShare {
        self.steering.share(self.me)
    }

    /// Whether this worker sends the announcements; one worker does.
    pub(crate) fn announces(&self) -> bool {
        self.me == WorkerId(0)
    }

    pub(crate) fn owner_function(&self) -> &Steering {
        &self.steering
    }

    /// Whether this worker serves the twin of a port. One worker does, since the order of its packets matters.
    pub(crate) fn serves_twin_of(&self, port: PortIndex) -> bool {
        port.0 % self.steering.workers() == self.me.0
    }

    /// The queue for packets that leave by a port, if not a queue of this worker.
    pub(crate) fn sender(&self, port: PortIndex) -> Option<Arc<HandoverQueue<B>>> {
        let sender = (*self.senders.get(usize::from(port.0))?)?;
        self.outboxes.get(usize::from(sender.0))?.clone()
    }

    /// The queues to this worker, for readers beside the workers.
    #[must_use]
    pub fn inboxes(&self) -> Inboxes
    where
        B: std::fmt::Debug + Send + 'static,
    {
        Inboxes(self.inboxes.iter().map(|queue| Arc::clone(queue) as Arc<dyn Length>).collect())
    }

    /// Number of other workers.
    pub(crate) fn others(&self) -> usize {
        self.inboxes.len()
    }

    /// Takes a burst from another worker: `next`, or the oldest element, and those behind it with the same port and task,
    /// while there is room and the burst has fewer packets than `wanted`. `next` is then the element behind the burst, if it had to
    /// be taken to see that it is another.
    pub(crate) fn take(
        &self,
        other: usize,
        next: &mut Option<HandedOver<B>>,
        wanted: usize,
    ) -> Option<(PortIndex, HandoverTask, Burst<B>)> {
        let elements = &self.inboxes.get(other)?.elements;
        let HandedOver { port, task, packets } = next.take().or_else(|| elements.pop())?;
        let mut burst: Burst<B> = packets.into_iter().collect();
        while next.is_none() && burst.len() < wanted && burst.remaining_capacity() >= HANDED_OVER_MAX {
            let Some(handed) = elements.pop() else { break };
            if (handed.port, handed.task) == (port, task) {
                burst.extend(handed.packets);
            } else {
                *next = Some(handed);
            }
        }
        Some((port, task, burst))
    }

    /// Pushes packets to a worker.
    ///
    /// The packets, when the queue is full.
    pub(crate) fn push(&self, owner: WorkerId, handed: HandedOver<B>) -> Result<(), HandedOver<B>> {
        match self.outboxes.get(usize::from(owner.0)) {
            Some(Some(queue)) => queue.push(handed),
            _ => Err(handed),
        }
    }
}

/// Packets collected for other workers: an element for each worker, port and task. 280 bytes each: with 64 workers and 8
/// ports 430 KB per worker, of which a poll touches only what it fills.
#[derive(Debug)]
pub(super) struct Gathered<B> {
    ports: usize,
    /// Indexed by worker, port and task.
    elements: Vec<Handed<B>>,
    /// The elements that are not empty, each once.
    begun: Vec<(WorkerId, PortIndex, HandoverTask)>,
}

impl<B> Gathered<B> {
    fn new(workers: usize, ports: usize) -> Self {
        let count = workers * ports * TASKS;
        Self { ports, elements: (0..count).map(|_| Handed::new()).collect(), begun: Vec::with_capacity(count) }
    }

    fn element(&mut self, owner: WorkerId, port: PortIndex, task: HandoverTask) -> Option<&mut Handed<B>> {
        let position = (usize::from(owner.0) * self.ports + usize::from(port.0)) * TASKS + task as usize;
        self.elements.get_mut(position)
    }

    /// Adds a packet to the element for its owner. Returns the previous one if that was full; it must be pushed first.
    #[inline]
    pub(super) fn put(&mut self, owner: WorkerId, task: HandoverTask, port: PortIndex, buffer: B) -> Option<HandedOver<B>> {
        let packets = self.element(owner, port, task)?;
        let full = packets.is_full().then(|| mem::take(packets));
        let begins = packets.is_empty() && full.is_none();
        packets.push(buffer);
        if begins {
            self.begun.push((owner, port, task));
        }
        full.map(|packets| HandedOver { port, task, packets })
    }

    /// Takes one of the elements with its receiver; `None` when all are taken.
    pub(super) fn take(&mut self) -> Option<(WorkerId, HandedOver<B>)> {
        let (owner, port, task) = self.begun.pop()?;
        let packets = mem::take(self.element(owner, port, task)?);
        Some((owner, HandedOver { port, task, packets }))
    }
}

/// The worker that transmits for a worker on a port with this many transmit queues; `None` if it does so itself.
fn sender(worker: WorkerId, transmit_queues: u8) -> Option<WorkerId> {
    let queues = transmit_queues.max(1);
    (worker.0 >= queues).then_some(WorkerId(worker.0 % queues))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn a_hand_over_rings_at_the_worker_that_gets_it_alone() {
        let rings: Vec<_> = (0..2).map(|_| Arc::new(AtomicU32::new(0))).collect();
        let doorbell = |rings: &Arc<AtomicU32>| {
            let rings = Arc::clone(rings);
            let doorbell = Doorbell::new(move || {
                rings.fetch_add(1, Ordering::Relaxed);
            });
            doorbell.arm();
            Arc::new(doorbell)
        };
        let doorbells: Vec<_> = rings.iter().map(doorbell).collect();
        let ports = [PortQueues { transmit: 1, rss: None }];
        let steering = Arc::new(Steering::own_hash(2, 7));
        let views = Peers::with_doorbells(&steering, &ports, &doorbells);
        let handed = |n| HandedOver { port: PortIndex(0), task: HandoverTask::Send, packets: Handed::from_iter([n]) };
        assert!(views[0].push(WorkerId(1), handed(1)).is_ok());
        // The way of packets that another worker transmits.
        assert!(views[1].sender(PortIndex(0)).unwrap().push(handed(2)).is_ok());
        let rung = |n: usize| rings[n].load(Ordering::Relaxed);
        assert_eq!((rung(0), rung(1)), (1, 1));
        assert!(views[1].take(0, &mut None, BURST).is_some() && views[0].take(0, &mut None, BURST).is_some());
    }

    #[test]
    fn what_waits_is_merged_into_bursts_of_one_port_and_task_and_stays_in_order() {
        let views = Peers::all(&Arc::new(Steering::own_hash(2, 7)), &[]);
        let (decide, send) = (HandoverTask::Decide, HandoverTask::Send);
        let waiting = [
            (0, decide, 0..3),
            (0, decide, 3..5),
            (0, send, 5..6),
            (1, send, 6..7),
            (1, send, 7..39),
            (1, send, 39..71),
            (1, send, 71..103),
            (1, send, 103..134),
            (1, send, 134..136),
        ];
        for (port, task, packets) in waiting {
            let handed = HandedOver { port: PortIndex(port), task, packets: packets.collect() };
            assert!(views[0].push(WorkerId(1), handed).is_ok());
        }
        let mut next = None;
        let taken: Vec<_> = std::iter::from_fn(|| views[1].take(0, &mut next, BURST)).collect();
        let merged = [(0, decide, 0..5), (0, send, 5..6), (1, send, 6..103), (1, send, 103..136)];
        assert_eq!(taken, merged.map(|(port, task, packets)| (PortIndex(port), task, packets.collect::<Burst<i32>>())));
        assert!(next.is_none(), "nothing that was taken is kept");
    }

    #[test]
    fn nothing_more_is_taken_than_wanted() {
        let views = Peers::all(&Arc::new(Steering::own_hash(2, 7)), &[]);
        for n in 0..4 {
            let handed = HandedOver { port: PortIndex(n), task: HandoverTask::Decide, packets: Handed::from_iter([n]) };
            assert!(views[0].push(WorkerId(1), handed).is_ok());
        }
        let mut next = None;
        let mut take = |wanted| views[1].take(0, &mut next, wanted).map(|(port, _, burst)| (port.0, burst.len()));
        assert_eq!([2, 0].map(&mut take), [Some((0, 1)), Some((1, 1))]);
        assert!(next.is_none(), "the second element, which the first call had to take, was returned by the second call");
        assert_eq!(views[1].inboxes().len(), 2);
    }

    #[test]
    fn however_ports_and_tasks_are_mixed_elements_are_full_but_for_the_last_and_in_order() {
        let mut gathered = Gathered::new(3, 4);
        let kind = |n: usize| {
            let task = if n.is_multiple_of(2) { HandoverTask::Decide } else { HandoverTask::Meet };
            (WorkerId([1, 2][n / 2 % 2]), PortIndex([0, 1, 3][n % 3]), task)
        };
        let mut handed = Vec::new();
        for n in 0..1200 {
            let (owner, port, task) = kind(n);
            handed.extend(gathered.put(owner, task, port, n).map(|packets| (owner, packets)));
        }
        assert!(handed.iter().all(|(_, handed)| handed.packets.is_full()));
        handed.extend(std::iter::from_fn(|| gathered.take()));
        assert_eq!(handed.len(), 12 * 100_usize.div_ceil(HANDED_OVER_MAX), "12 kinds of 100 packets");
        let mut last = std::collections::HashMap::new();
        for (owner, HandedOver { port, task, packets }) in handed {
            for n in packets {
                let found = (owner, port, task);
                assert_eq!(found, kind(n));
                let before = last.insert((owner.0, port.0, task as usize), n);
                assert!(before.is_none_or(|before| before < n), "{n} after {before:?}");
            }
        }
        assert!(gathered.take().is_none());
    }
}

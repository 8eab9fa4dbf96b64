//! Hand-over of packets to the other workers of the gateway, through one bounded queue for each ordered pair of
//! workers. A worker collects packets into elements, one for each port and task, and pushes elements in batches: once
//! in a poll, when many are collected, and when a burst is handed over to be transmitted. No side ever waits. A
//! sleeping worker is woken by its doorbell.
//!
//! **Invariants:**
//!
//! - Packets of one port and one task arrive in the order in which they were handed over.
//! - A fragment does not overtake packets to decide on that were handed over before it.
//! - A push contains at most one partly filled element for each port and task, fragments excepted.
//! - Packets that a queue refuses are dropped and counted (`handover_full`).
//!
//! Not here: the owner of a packet ([`super::steering`]).

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrayvec::ArrayVec;
use crossbeam_utils::CachePadded;
use rtrb::{Consumer, Producer, RingBuffer};

use super::fragmented_flows::FragmentedFlows;
use super::id::WorkerId;
use super::identification_blocks::IdentificationBlocks;
use super::rss_proof::{Observer, RssProof};
use super::steering::Steering;
use crate::flow::PortShare;
use crate::port::{BURST, Burst, Doorbell, PortIndex};

/// Maximum number of packets in one element of a queue. A burst consists of full elements, and few packets take few
/// lines of memory from one core to another.
const HANDED_OVER_MAX: usize = 8;
/// Maximum number of packets that wait for a worker, from up to eight others together, which the buffer pool reserves.
/// At 14.88 million packets a second, half of them for other workers, that is half a millisecond.
const PACKETS_PER_WORKER: usize = 4096;
/// Minimum capacity of the queue between two workers, in elements.
const ELEMENTS_PER_PAIR_MIN: usize = 64;
/// Elements collected for a worker before they are pushed.
const ELEMENTS_AT_ONCE: usize = 32;
/// Packets taken from one worker before the next one has its turn; the last burst may exceed it.
pub(crate) const PACKETS_PER_TURN: usize = 2 * BURST;

/// What the receiving worker does with the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandoverTask {
    /// Decide on them: it is their owner.
    Decide,
    /// Determine their owner: they are fragments, and one worker receives all fragments of a datagram; or packets of
    /// the same flows, which must not overtake the fragments.
    FindOwner,
    /// End its half of their flows: they begin new ones in place of flows in two halves, of which it has one.
    Begin,
    /// Transmit them: they are finished, and it has a transmit queue of the port.
    Send,
}

/// Number of tasks.
const TASKS: usize = 4;

/// Packets that one worker hands to another: an element of a queue. 80 bytes.
#[derive(Debug)]
pub(super) struct HandedOver<B> {
    /// The port on which they arrived, or by which they leave.
    port: PortIndex,
    task: HandoverTask,
    pub(super) packets: ArrayVec<B, HANDED_OVER_MAX>,
}

impl<B> HandedOver<B> {
    fn is_of(&self, port: PortIndex, task: HandoverTask) -> bool {
        (self.port, self.task) == (port, task)
    }
}

/// Elements that a queue has had, for readers beside the workers.
#[derive(Debug, Default)]
struct QueueCounts {
    pushed: CachePadded<AtomicUsize>,
    taken: CachePadded<AtomicUsize>,
}

/// Adds to a count that this thread alone changes.
fn add(count: &AtomicUsize, more: usize) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(more), Ordering::Release);
}

/// The end of a queue at the worker that hands packets over, with those that it has collected.
#[derive(Debug)]
pub(super) struct Outbox<B> {
    queue: Producer<HandedOver<B>>,
    counts: Arc<QueueCounts>,
    /// The doorbell of the receiver; `None` if it never sleeps.
    doorbell: Option<Arc<Doorbell>>,
    /// The collected elements. All elements of a port and task but the last are full, unless they are fragments.
    collected: ArrayVec<HandedOver<B>, ELEMENTS_AT_ONCE>,
    /// For each port and task the position in `collected` of the last element that was begun.
    begun: Box<[u8]>,
}

impl<B> Outbox<B> {
    fn new(ports: usize, queue: Producer<HandedOver<B>>, counts: Arc<QueueCounts>, doorbell: Option<Arc<Doorbell>>) -> Self {
        Self { queue, counts, doorbell, collected: ArrayVec::new(), begun: vec![0; ports * TASKS].into() }
    }

    /// Collects a packet. Returns it if the collected elements must be pushed first, or if there is no such port.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // few elements
    pub(super) fn put(&mut self, task: HandoverTask, port: PortIndex, buffer: B) -> Result<(), B> {
        let of_port = usize::from(port.0) * TASKS;
        // A fragment does not join others before packets that were put in since.
        let after = if task == HandoverTask::FindOwner { self.last_begun(of_port, port, HandoverTask::Decide) } else { 0 };
        let Some(begun) = self.begun.get_mut(of_port + task as usize) else { return Err(buffer) };
        // Since the last push the position may be that of another kind of packets.
        if let Some(element) = self.collected.get_mut(usize::from(*begun))
            && element.is_of(port, task)
            && !element.packets.is_full()
            && *begun >= after
        {
            element.packets.push(buffer);
            return Ok(());
        }
        if self.collected.is_full() {
            return Err(buffer);
        }
        *begun = self.collected.len() as u8;
        self.collected.push(HandedOver { port, task, packets: ArrayVec::from_iter([buffer]) });
        Ok(())
    }

    /// The position of the last element with a task for a port, whose first entry in `begun` this is; 0 if there is
    /// none.
    #[inline(never)]
    fn last_begun(&self, of_port: usize, port: PortIndex, task: HandoverTask) -> u8 {
        let begun = self.begun.get(of_port + task as usize).copied().unwrap_or(0);
        self.collected.get(usize::from(begun)).filter(|element| element.is_of(port, task)).map_or(0, |_| begun)
    }

    /// Pushes the collected elements, and wakes the receiver if it sleeps. Returns the number of packets that the queue
    /// took. The elements that it refused stay in [`Outbox::refused`].
    pub(super) fn push(&mut self) -> u64 {
        let room = self.queue.slots().min(self.collected.len());
        let mut packets = 0;
        if let Ok(chunk) = self.queue.write_chunk_uninit(room) {
            // Counted before the receiver sees them, so that the count of taken elements is never higher.
            add(&self.counts.pushed, room);
            chunk.fill_from_iter(self.collected.drain(..room).inspect(|element| packets += element.packets.len() as u64));
        }
        if let Some(doorbell) = &self.doorbell {
            doorbell.ring();
        }
        packets
    }

    /// Takes the elements that are still collected.
    pub(super) fn refused(&mut self) -> impl Iterator<Item = HandedOver<B>> {
        self.collected.drain(..)
    }
}

/// The end of a queue at the worker that gets packets.
#[derive(Debug)]
struct Inbox<B> {
    queue: Consumer<HandedOver<B>>,
    counts: Arc<QueueCounts>,
}

impl<B> Inbox<B> {
    /// Takes the oldest element, and those behind it with the same port and task, while there is room and the burst has
    /// fewer packets than `wanted`.
    fn take(&mut self, wanted: usize) -> Option<(PortIndex, HandoverTask, Burst<B>)> {
        let chunk = self.queue.read_chunk(self.queue.slots().min(BURST)).ok()?;
        let (first, second) = chunk.as_slices();
        let &HandedOver { port, task, .. } = first.first()?;
        let mut packets = 0;
        let is_next = |element: &&HandedOver<B>| {
            let more = packets < wanted.max(1) && packets + element.packets.len() <= BURST && element.is_of(port, task);
            packets += element.packets.len();
            more
        };
        let count = first.iter().chain(second).take_while(is_next).count();
        let mut burst = Burst::new();
        chunk.into_iter().take(count).for_each(|element| burst.extend(element.packets));
        add(&self.counts.taken, count);
        Some((port, task, burst))
    }
}

/// The queues from other workers to one worker, for readers beside the workers.
#[derive(Clone, Debug)]
pub struct Inboxes(Vec<Arc<QueueCounts>>);

impl Inboxes {
    /// Elements that wait in all of them.
    #[must_use]
    pub fn len(&self) -> usize {
        // `taken` is read first: its elements were pushed before.
        let waits = |of: &Arc<QueueCounts>| {
            let taken = of.taken.load(Ordering::Acquire);
            of.pushed.load(Ordering::Relaxed).wrapping_sub(taken)
        };
        self.0.iter().map(waits).sum()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How the queues of a port are shared among the workers. Queue n belongs to worker n.
#[derive(Clone, Debug)]
pub struct PortQueues {
    /// Number of transmit queues, at least 1. Workers without one hand their packets over to another worker for
    /// transmission.
    pub transmit: u8,
    /// Set where the device was configured to spread packets by [`Steering::rss_key`] over as many receive queues as
    /// there are workers: the proof of each worker, in their order.
    pub rss: Option<Arc<[Arc<RssProof>]>>,
}

/// One worker's view of the others.
#[derive(Debug)]
pub struct Peers<B> {
    me: WorkerId,
    steering: Arc<Steering>,
    /// Queues from the other workers.
    inboxes: Vec<Inbox<B>>,
    /// Queues to the other workers, indexed by worker; `None` for itself.
    outboxes: Vec<Option<Outbox<B>>>,
    /// Whether packets were put into any outbox since all were pushed.
    may_have_collected: bool,
    /// Indexed by port.
    proofs: Vec<Option<Observer>>,
    /// Flows whose packets take the two steps of fragments.
    fragmented: FragmentedFlows,
    /// Indexed by port: the worker that transmits for this one, if it has no transmit queue of its own.
    senders: Vec<Option<WorkerId>>,
    identifications: IdentificationBlocks,
}

impl<B> Peers<B> {
    /// The views of all workers, in their order, if no worker sleeps. `ports` are in the order of the configuration.
    #[must_use]
    pub fn all(steering: &Arc<Steering>, ports: &[PortQueues]) -> Vec<Self> {
        Self::with_doorbells(steering, ports, &[])
    }

    /// The views of all workers with their doorbells, in their order.
    #[must_use]
    pub fn with_doorbells(steering: &Arc<Steering>, ports: &[PortQueues], doorbells: &[Arc<Doorbell>]) -> Vec<Self> {
        let (workers, identifications) = (steering.workers(), IdentificationBlocks::default());
        let of = |me: u8| Self {
            identifications: identifications.clone(),
            me: WorkerId(me),
            steering: Arc::clone(steering),
            inboxes: Vec::new(),
            outboxes: (0..workers).map(|_| None).collect(),
            may_have_collected: false,
            proofs: ports.iter().map(|port| port.rss.as_ref()?.get(usize::from(me)).cloned().map(Observer::new)).collect(),
            fragmented: FragmentedFlows::new(),
            senders: ports.iter().map(|port| sender(WorkerId(me), port.transmit)).collect(),
        };
        let mut views: Vec<Self> = (0..workers).map(of).collect();
        let elements = PACKETS_PER_WORKER / HANDED_OVER_MAX / usize::from(workers.max(2) - 1);
        for (from, to) in (0..workers).flat_map(|from| (0..workers).map(move |to| (from, to))).filter(|(from, to)| from != to) {
            let [from, to] = [from, to].map(usize::from);
            let ((producer, consumer), counts) =
                (RingBuffer::new(elements.max(ELEMENTS_PER_PAIR_MIN)), Arc::<QueueCounts>::default());
            views[to].inboxes.push(Inbox { queue: consumer, counts: Arc::clone(&counts) });
            views[from].outboxes[to] = Some(Outbox::new(ports.len(), producer, counts, doorbells.get(to).cloned()));
        }
        views
    }

    pub(crate) fn me(&self) -> WorkerId {
        self.me
    }

    /// The inputs for the determination of owners, for packets of a port.
    pub(crate) fn steering(&self, port: PortIndex) -> (WorkerId, &Steering, Option<&Observer>) {
        (self.me, &self.steering, self.proofs.get(usize::from(port.0)).and_then(Option::as_ref))
    }

    /// Flows whose packets take the two steps of fragments.
    pub(crate) fn fragmented_flows(&mut self) -> &mut FragmentedFlows {
        &mut self.fragmented
    }

    /// Counts the packets of a burst that a port received; the position of the one to be compared with its queue, if
    /// one is.
    #[inline]
    pub(crate) fn sample(&mut self, port: PortIndex, packets: usize) -> Option<usize> {
        self.proofs.get_mut(usize::from(port.0))?.as_mut()?.sample(packets)
    }

    /// Whether the device of a port may lead packets to their owners, so that they are compared with the queue that
    /// they came by.
    #[inline]
    pub(crate) fn looks_at_queue(&self, port: PortIndex) -> bool {
        self.proofs.get(usize::from(port.0)).is_some_and(Option::is_some)
    }

    /// Index of this worker, and the number of workers.
    pub(crate) fn position(&self) -> (u16, u16) {
        (self.me.0.into(), self.steering.workers().into())
    }

    /// The identifications that it shares with the others.
    pub(crate) fn identifications(&self) -> IdentificationBlocks {
        self.identifications.clone()
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

    /// The worker that transmits for this one by a port, if it has no transmit queue of its own.
    pub(crate) fn sender(&self, port: PortIndex) -> Option<WorkerId> {
        *self.senders.get(usize::from(port.0))?
    }

    /// The queues to this worker, for readers beside the workers.
    #[must_use]
    pub fn inboxes(&self) -> Inboxes {
        Inboxes(self.inboxes.iter().map(|inbox| Arc::clone(&inbox.counts)).collect())
    }

    /// Number of other workers.
    pub(crate) fn others(&self) -> usize {
        self.inboxes.len()
    }

    /// Takes a burst from another worker: packets of one port with one task, at most an element more than `wanted`.
    pub(crate) fn take(&mut self, other: usize, wanted: usize) -> Option<(PortIndex, HandoverTask, Burst<B>)> {
        self.inboxes.get_mut(other)?.take(wanted)
    }

    /// The queue to a worker; `None` for this one.
    #[inline(always)]
    pub(super) fn outbox(&mut self, to: WorkerId) -> Option<&mut Outbox<B>> {
        self.may_have_collected = true;
        self.outboxes.get_mut(usize::from(to.0))?.as_mut()
    }

    /// The queues for which packets are collected; all of these are to be pushed.
    pub(super) fn collected(&mut self) -> impl Iterator<Item = &mut Outbox<B>> {
        let outboxes = if mem::take(&mut self.may_have_collected) { &mut *self.outboxes } else { &mut [] };
        outboxes.iter_mut().flatten().filter(|outbox| !outbox.collected.is_empty())
    }
}

/// The worker that transmits for a worker on a port with this many transmit queues; `None` if it does so itself.
fn sender(worker: WorkerId, transmit_queues: u8) -> Option<WorkerId> {
    let queues = transmit_queues.max(1);
    (worker.0 >= queues).then_some(WorkerId(worker.0 % queues))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::atomic::AtomicU32;

    use HandoverTask::{Decide, FindOwner, Send};

    use super::*;

    /// Two workers that see each other.
    fn pair(ports: &[PortQueues], doorbells: &[Arc<Doorbell>]) -> [Peers<u32>; 2] {
        Peers::with_doorbells(&Arc::new(Steering::own_hash(2, 7)), ports, doorbells).try_into().unwrap()
    }

    fn ports(count: usize) -> Vec<PortQueues> {
        vec![PortQueues { transmit: 2, rss: None }; count]
    }

    /// Hands packets from the first worker to the second.
    fn hand_over(from: &mut Peers<u32>, port: u8, task: HandoverTask, packets: impl IntoIterator<Item = u32>) {
        let outbox = from.outbox(WorkerId(1)).unwrap();
        for packet in packets {
            if outbox.put(task, PortIndex(port), packet).is_err() {
                outbox.push();
                outbox.put(task, PortIndex(port), packet).unwrap();
            }
        }
        outbox.push();
        assert_eq!(outbox.refused().count(), 0);
    }

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
        let [mut first, mut second] = pair(&ports(1), &doorbells);
        hand_over(&mut first, 0, Send, [1]);
        let rung = || [0, 1].map(|n: usize| rings[n].load(Ordering::Relaxed));
        assert_eq!(rung(), [0, 1]);
        assert!(second.take(0, BURST).is_some() && first.take(0, BURST).is_none());
    }

    #[test]
    fn a_worker_without_transmit_queue_has_one_that_transmits_for_it() {
        let [first, second] = pair(&[PortQueues { transmit: 1, rss: None }], &[]);
        assert_eq!([&first, &second].map(|view| view.sender(PortIndex(0))), [None, Some(WorkerId(0))]);
    }

    #[test]
    fn what_waits_is_merged_into_bursts_of_one_port_and_task_and_stays_in_order() {
        let [mut first, mut second] = pair(&ports(2), &[]);
        let waiting =
            [(0, Decide, 0..3), (0, Decide, 3..5), (0, Send, 5..6), (1, Send, 6..7), (1, Send, 7..39), (1, Send, 39..140)];
        for (port, task, packets) in waiting {
            hand_over(&mut first, port, task, packets);
        }
        assert_eq!(second.inboxes().len(), 1 + 1 + 1 + 1 + 4 + 13);
        let taken: Vec<_> = std::iter::from_fn(|| second.take(0, BURST)).collect();
        // Behind the first one of port 1 there is room for fifteen full elements.
        let merged = [(0, Decide, 0..5), (0, Send, 5..6), (1, Send, 6..127), (1, Send, 127..140)];
        assert_eq!(taken, merged.map(|(port, task, packets)| (PortIndex(port), task, packets.collect::<Burst<u32>>())));
        assert!(second.inboxes().is_empty());
    }

    #[test]
    fn packets_in_full_elements_fill_a_burst() {
        let [mut first, mut second] = pair(&ports(1), &[]);
        let all: Vec<u32> = (0..).take(2 * BURST).collect();
        hand_over(&mut first, 0, Decide, all.clone());
        let bursts = [(); 2].map(|()| second.take(0, PACKETS_PER_TURN).unwrap().2);
        assert!(bursts.iter().all(|burst| burst.is_full()));
        assert_eq!(bursts.concat(), all);
    }

    #[test]
    fn nothing_more_is_taken_than_wanted() {
        let [mut first, mut second] = pair(&ports(4), &[]);
        for n in 0..4 {
            hand_over(&mut first, n, Decide, [n.into()]);
        }
        let mut take = |wanted| second.take(0, wanted).map(|(port, _, burst)| (port.0, burst.len()));
        assert_eq!([2, 0].map(&mut take), [Some((0, 1)), Some((1, 1))]);
        assert_eq!(second.inboxes().len(), 2);
        hand_over(&mut first, 3, Decide, 0..100);
        let mut take = |wanted| second.take(0, wanted).map(|(port, _, burst)| (port.0, burst.len()));
        assert_eq!([1, 1, 8].map(&mut take), [Some((2, 1)), Some((3, 1)), Some((3, 8))]);
    }

    #[test]
    fn however_ports_and_tasks_are_mixed_elements_are_full_but_for_the_last_and_in_order() {
        let [mut first, mut second] = pair(&ports(4), &[]);
        let kind = |n: u32| (PortIndex([0, 1, 3][n as usize % 3]), if n.is_multiple_of(2) { Decide } else { FindOwner });
        let outbox = first.outbox(WorkerId(1)).unwrap();
        let mut pushed = 0;
        for n in 0..2400 {
            let (port, task) = kind(n);
            if outbox.put(task, port, n).is_err() {
                pushed += outbox.push();
                outbox.put(task, port, n).unwrap();
            }
        }
        assert_eq!(pushed + outbox.push(), 2400);
        let pushes = 2400_usize.div_ceil((ELEMENTS_AT_ONCE - 5) * HANDED_OVER_MAX);
        let least = 2400 / HANDED_OVER_MAX;
        assert!((least..=least + 6 * pushes).contains(&second.inboxes().len()), "{} elements", second.inboxes().len());
        let (mut last, mut count) = (HashMap::new(), 0);
        while let Some((port, task, packets)) = second.take(0, BURST) {
            for n in packets {
                assert_eq!((port, task), kind(n));
                let before = last.insert((port.0, task as usize), n);
                assert!(before.is_none_or(|before| before < n), "{n} after {before:?}");
                count += 1;
            }
        }
        assert_eq!(count, 2400);
    }

    #[test]
    fn fragments_arrive_after_the_packets_to_decide_on_that_were_put_in_before_them() {
        let [mut first, mut second] = pair(&ports(1), &[]);
        let outbox = first.outbox(WorkerId(1)).unwrap();
        let tasks = [FindOwner, Decide, FindOwner, FindOwner, Decide, FindOwner];
        let mut put = |(number, task): (u32, HandoverTask)| outbox.put(task, PortIndex(0), number).unwrap();
        (0..).zip(tasks).for_each(&mut put);
        // A new element of packets to decide on begins, and more fragments follow it.
        (10..20).for_each(|number| put((number, Decide)));
        put((20, FindOwner));
        outbox.push();
        let taken = std::iter::from_fn(|| second.take(0, BURST))
            .flat_map(|(_, task, packets)| packets.into_iter().map(move |n| (n, task)));
        let taken: Vec<_> = taken.collect();
        for (at, (fragment, _)) in taken.iter().enumerate().filter(|(_, (_, task))| *task == FindOwner) {
            let overtaken = taken[at..].iter().find(|(number, task)| *task == Decide && number < fragment);
            assert_eq!(overtaken, None, "fragment {fragment} of {taken:?}");
        }
        assert_eq!(taken.len(), tasks.len() + 11);
    }

    #[test]
    fn a_full_queue_takes_the_oldest_and_returns_the_others() {
        let [mut first, mut second] = pair(&ports(1), &[]);
        let outbox = first.outbox(WorkerId(1)).unwrap();
        let (mut taken, mut refused) = (0, Vec::new());
        for n in 0..10_000 {
            if outbox.put(Decide, PortIndex(0), n).is_err() {
                taken += outbox.push();
                refused.extend(outbox.refused().flat_map(|element| element.packets));
                outbox.put(Decide, PortIndex(0), n).unwrap();
            }
        }
        taken += outbox.push();
        refused.extend(outbox.refused().flat_map(|element| element.packets));
        assert_eq!(taken, PACKETS_PER_WORKER as u64, "the buffers that are reserved");
        let waiting = std::iter::from_fn(|| second.take(0, BURST)).flat_map(|(_, _, burst)| burst);
        assert!(waiting.chain(refused).eq(0..10_000));
        hand_over(&mut first, 0, Decide, [1]);
        assert_eq!(second.inboxes().len(), 1, "there is room again");
    }

    #[test]
    fn a_packet_of_an_unknown_port_is_returned() {
        let [mut first, _second] = pair(&ports(2), &[]);
        assert_eq!(first.outbox(WorkerId(1)).unwrap().put(Decide, PortIndex(2), 7), Err(7));
        assert!(first.outbox(WorkerId(0)).is_none(), "no queue to itself");
    }
}

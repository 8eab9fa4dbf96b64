//! The other workers of the gateway, and how packets get to them: whole bursts through a bounded queue for each ordered
//! pair. No side ever waits, and a worker that sleeps is not woken: it looks within 50 microseconds.
//!
//! **Invariant:** packets of one port that one worker hands to another with one errand arrive in their order; and in a poll
//! it pushes at most one burst that is not full for each port and errand, however they are mixed. What a queue refuses is
//! dropped and counted (`handover_full`). Deliberately not here: who owns a packet ([`crate::steering`]).

use std::mem;
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;

use crate::snat::PortShare;
use crate::steering::{Observer, RssProof, Steering, WorkerId};
use crate::{BURST, Burst, PortIndex};

/// Bursts that may wait for a worker, of all others together: full ones are the 4,096 packets that the pool of buffers
/// holds for each worker. At 14.88 million packets a second, half of them another's, that is half a millisecond.
const BURSTS_PER_WORKER: usize = 128;
/// Bursts that may wait between two workers, at least.
const BURSTS_PER_PAIR_MIN: usize = 16;
/// Packets taken from one worker before the next has its turn, but for the last burst: four full bursts, and any number
/// of small ones that a queue holds.
pub(crate) const PACKETS_PER_TURN: usize = 4 * BURST;

/// What another worker is to do with packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Errand {
    /// Decide on them: it is their owner.
    Decide,
    /// Find out their owner: they are fragments, and those of a datagram meet there.
    Meet,
    /// Send them: they are finished, and it has a transmit queue of the port.
    Send,
}

/// How many errands there are.
const ERRANDS: usize = 3;

/// Packets that one worker gives another.
#[derive(Debug)]
pub struct Handed<B> {
    /// The port they came in by, or are to leave by.
    pub(crate) port: PortIndex,
    pub(crate) errand: Errand,
    pub(crate) burst: Burst<B>,
}

pub(crate) type HandoverQueue<B> = Arc<ArrayQueue<Handed<B>>>;

/// How the queues of a port are shared among the workers. Queue n is worker n's.
#[derive(Clone, Debug)]
pub struct PortQueues {
    /// Transmit queues, at least 1. Workers beyond them hand over what leaves by the port.
    pub transmit: u8,
    /// Where the device was told to spread packets by [`Steering::rss_key`] over as many receive queues as there are
    /// workers: what each worker finds out about that, in their order.
    pub rss: Option<Arc<[Arc<RssProof>]>>,
}

/// One worker's view of the others.
#[derive(Debug)]
pub struct Peers<B> {
    me: WorkerId,
    steering: Arc<Steering>,
    /// From the others.
    inboxes: Vec<HandoverQueue<B>>,
    /// By worker; none to itself.
    outboxes: Vec<Option<HandoverQueue<B>>>,
    gathered: Gathered<B>,
    /// By port.
    proofs: Vec<Option<Observer>>,
    /// By port: who sends for this worker, where it has no transmit queue of its own.
    senders: Vec<Option<WorkerId>>,
}

impl<B> Peers<B> {
    /// The views of all workers, in their order. `ports` are in the order of the configuration.
    #[must_use]
    pub fn all(steering: &Arc<Steering>, ports: &[PortQueues]) -> Vec<Self> {
        let workers = steering.workers();
        let bursts = (BURSTS_PER_WORKER / usize::from(workers.max(2) - 1)).max(BURSTS_PER_PAIR_MIN);
        let queue = |from: u8, to: u8| (from != to).then(|| Arc::new(ArrayQueue::new(bursts)));
        let queues: Vec<Vec<Option<HandoverQueue<B>>>> =
            (0..workers).map(|from| (0..workers).map(|to| queue(from, to)).collect()).collect();
        let of = |(me, outboxes): (u8, &Vec<Option<HandoverQueue<B>>>)| Self {
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

    /// What owners are found by, for packets of a port.
    pub(crate) fn steering(&mut self, port: PortIndex) -> (WorkerId, &Steering, Option<&mut Observer>) {
        (self.me, &self.steering, self.proofs.get_mut(usize::from(port.0)).and_then(Option::as_mut))
    }

    /// Which of how many workers it is.
    pub(crate) fn position(&self) -> (u16, u16) {
        (self.me.0.into(), self.steering.workers().into())
    }

    /// The SNAT ports of this worker.
    pub(crate) fn snat_share(&self) -> PortShare {
        self.steering.share(self.me)
    }

    /// Whether this worker makes the announcements: one does.
    pub(crate) fn announces(&self) -> bool {
        self.me == WorkerId(0)
    }

    pub(crate) fn owner_function(&self) -> &Steering {
        &self.steering
    }

    /// Whether this worker serves what exists once for each port: the packets of its Linux twin, whose order counts.
    pub(crate) fn serves_twin_of(&self, port: PortIndex) -> bool {
        port.0 % self.steering.workers() == self.me.0
    }

    /// Where packets that leave by a port go, if not to a queue of this worker's.
    pub(crate) fn sender(&self, port: PortIndex) -> Option<HandoverQueue<B>> {
        let sender = (*self.senders.get(usize::from(port.0))?)?;
        self.outboxes.get(usize::from(sender.0))?.clone()
    }

    /// How many other workers there are.
    pub(crate) fn others(&self) -> usize {
        self.inboxes.len()
    }

    /// The oldest burst of another worker.
    pub(crate) fn take(&self, other: usize) -> Option<Handed<B>> {
        self.inboxes.get(other)?.pop()
    }

    /// Gathers a packet for its owner. Returns a full burst that has to be pushed before it.
    pub(crate) fn gather(&mut self, owner: WorkerId, errand: Errand, port: PortIndex, buffer: B) -> Option<Handed<B>> {
        self.gathered.put(owner, errand, port, buffer)
    }

    /// One of the bursts that are gathered, and for whom; none when all are taken.
    pub(crate) fn gathered(&mut self) -> Option<(WorkerId, Handed<B>)> {
        self.gathered.take()
    }

    /// Gives a burst to a worker.
    ///
    /// # Errors
    /// The burst, when too many wait.
    pub(crate) fn push(&self, owner: WorkerId, handed: Handed<B>) -> Result<(), Handed<B>> {
        match self.outboxes.get(usize::from(owner.0)) {
            Some(Some(queue)) => queue.push(handed),
            _ => Err(handed),
        }
    }
}

/// Packets on their way to other workers: a burst for each worker, port and errand. 280 bytes each: of 64 workers with 8
/// ports 430 KB for each, of which a poll touches what it fills.
#[derive(Debug)]
struct Gathered<B> {
    ports: usize,
    /// By worker, port and errand.
    bursts: Vec<Burst<B>>,
    /// Those that are not empty, each once.
    begun: Vec<(WorkerId, PortIndex, Errand)>,
}

impl<B> Gathered<B> {
    fn new(workers: usize, ports: usize) -> Self {
        let count = workers * ports * ERRANDS;
        Self { ports, bursts: (0..count).map(|_| Burst::new()).collect(), begun: Vec::with_capacity(count) }
    }

    fn burst(&mut self, owner: WorkerId, port: PortIndex, errand: Errand) -> Option<&mut Burst<B>> {
        let position = (usize::from(owner.0) * self.ports + usize::from(port.0)) * ERRANDS + errand as usize;
        self.bursts.get_mut(position)
    }

    /// Adds a packet. Returns the burst before it, where that is full.
    fn put(&mut self, owner: WorkerId, errand: Errand, port: PortIndex, buffer: B) -> Option<Handed<B>> {
        let burst = self.burst(owner, port, errand)?;
        let full = burst.is_full().then(|| mem::take(burst));
        let begins = burst.is_empty() && full.is_none();
        burst.push(buffer);
        if begins {
            self.begun.push((owner, port, errand));
        }
        full.map(|burst| Handed { port, errand, burst })
    }

    fn take(&mut self) -> Option<(WorkerId, Handed<B>)> {
        let (owner, port, errand) = self.begun.pop()?;
        let burst = mem::take(self.burst(owner, port, errand)?);
        Some((owner, Handed { port, errand, burst }))
    }
}

/// Who sends for a worker on a port with so many transmit queues; none: it does so itself.
fn sender(worker: WorkerId, transmit_queues: u8) -> Option<WorkerId> {
    let queues = transmit_queues.max(1);
    (worker.0 >= queues).then_some(WorkerId(worker.0 % queues))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_ports_and_errands_are_mixed_bursts_are_full_but_for_the_last_and_in_order() {
        let mut gathered = Gathered::new(3, 4);
        let kind = |n: usize| {
            let errand = if n.is_multiple_of(2) { Errand::Decide } else { Errand::Meet };
            (WorkerId([1, 2][n / 2 % 2]), PortIndex([0, 1, 3][n % 3]), errand)
        };
        let mut handed = Vec::new();
        for n in 0..1200 {
            let (owner, port, errand) = kind(n);
            handed.extend(gathered.put(owner, errand, port, n).map(|burst| (owner, burst)));
        }
        assert!(handed.iter().all(|(_, handed)| handed.burst.is_full()));
        handed.extend(std::iter::from_fn(|| gathered.take()));
        assert_eq!(handed.len(), 12 * 100_usize.div_ceil(BURST), "12 kinds of 100 packets");
        let mut last = std::collections::HashMap::new();
        for (owner, Handed { port, errand, burst }) in handed {
            for n in burst {
                let found = (owner, port, errand);
                assert_eq!(found, kind(n));
                let before = last.insert((owner.0, port.0, errand as usize), n);
                assert!(before.is_none_or(|before| before < n), "{n} after {before:?}");
            }
        }
        assert!(gathered.take().is_none());
    }
}

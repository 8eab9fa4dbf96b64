//! The neighbour queue: packets whose next hop the kernel has not resolved yet. They wait unchanged and are decided
//! again once the neighbour is resolved, so each held packet has one final verdict.
//!
//! **Invariant:** at most [`PER_NEIGHBOUR`] packets for one neighbour, [`PER_WORKER`] in all, [`PATIENCE_NS`] each
//! (FORWARDING 7). A neighbour holds less than an eighth of what is free: a rack of silent backends leaves room for a
//! neighbour that answers.
//!
//! Not here: the request to resolve a neighbour.

use std::collections::VecDeque;
use std::net::IpAddr;

use hashbrown::HashMap;

use crate::port::{Arrival, Burst, Link};
use crate::wire::TableHash;

/// Maximum number of packets that wait for one neighbour.
pub(crate) const PER_NEIGHBOUR: usize = 16;
/// Maximum number of packets that wait on one worker.
pub(crate) const PER_WORKER: usize = 1024;
/// How long a packet waits, ns. Linux repeats a request that got no answer after 1 s (`retrans_time_ms`), so one lost
/// request loses no packet.
pub(crate) const PATIENCE_NS: u64 = 2_000_000_000;

/// A neighbour that packets wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnresolvedNeighbour {
    /// The link on which it is reached.
    pub link: Link,
    /// Its address.
    pub address: IpAddr,
}

/// A waiting packet.
#[derive(Debug)]
pub(crate) struct QueuedPacket<B> {
    pub(crate) buffer: B,
    /// How it arrived.
    pub(crate) arrival: Arrival,
    pub(crate) neighbour: UnresolvedNeighbour,
    deadline_ns: u64,
}

/// The waiting packets of one worker, oldest first.
#[derive(Debug)]
pub(crate) struct NeighbourQueue<B> {
    queue: VecDeque<QueuedPacket<B>>,
    /// Number of packets for each awaited neighbour.
    counts: HashMap<UnresolvedNeighbour, usize, TableHash>,
}

impl<B> NeighbourQueue<B> {
    pub(crate) fn new() -> Self {
        let counts = HashMap::with_capacity_and_hasher(2 * PER_WORKER, TableHash); // large enough that it is rehashed in place
        Self { queue: VecDeque::with_capacity(PER_WORKER), counts }
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Queues a packet; returns it when too many wait. The flag tells whether it is the first for its neighbour, whose
    /// resolution must then be requested.
    pub(crate) fn keep(&mut self, buffer: B, arrival: Arrival, neighbour: UnresolvedNeighbour) -> Result<bool, B> {
        let free = PER_WORKER - self.queue.len();
        let same = self.counts.get(&neighbour).copied().unwrap_or_default();
        if same >= PER_NEIGHBOUR || same * 8 >= free {
            return Err(buffer);
        }
        self.counts.insert(neighbour, same + 1);
        self.queue.push_back(QueuedPacket {
            buffer,
            arrival,
            neighbour,
            deadline_ns: arrival.now_ns.saturating_add(PATIENCE_NS),
        });
        Ok(same == 0)
    }

    /// Takes the next packet that has waited for too long.
    pub(crate) fn expired(&mut self, now_ns: u64) -> Option<QueuedPacket<B>> {
        if self.queue.front()?.deadline_ns > now_ns {
            return None;
        }
        self.queue.pop_front().inspect(|waiting| self.forget(waiting.neighbour))
    }

    /// Takes the oldest packets whose neighbours are `resolved`, at most a burst. It visits each packet once: call it
    /// when neighbours have changed, not in every poll.
    pub(crate) fn release(&mut self, resolved: impl Fn(UnresolvedNeighbour) -> bool) -> Burst<QueuedPacket<B>> {
        let mut released = Burst::new();
        for _ in 0..self.queue.len() {
            let Some(waiting) = self.queue.pop_front() else { break };
            if !released.is_full() && resolved(waiting.neighbour) {
                self.forget(waiting.neighbour);
                released.push(waiting);
            } else {
                self.queue.push_back(waiting);
            }
        }
        released
    }

    fn forget(&mut self, neighbour: UnresolvedNeighbour) {
        if let Some(count) = self.counts.get_mut(&neighbour) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&neighbour);
            }
        }
    }
}

/// A request to the kernel to resolve a neighbour: the link and the address.
pub type NeighbourRequest = (Link, IpAddr);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::PortIndex;
    use crate::wire::Tags;

    fn at(now_ns: u64) -> Arrival {
        Arrival { link: PortIndex(0).into(), tags: Tags::NONE, now_ns, origin: crate::port::Origin::Port }
    }

    fn neighbour(last: u8) -> UnresolvedNeighbour {
        UnresolvedNeighbour { link: PortIndex(0).into(), address: IpAddr::from([10, 0, 0, last]) }
    }

    #[test]
    fn a_neighbour_holds_16_packets_and_many_silent_ones_leave_room_for_another() {
        let mut held = NeighbourQueue::new();
        for n in 0..PER_NEIGHBOUR {
            assert_eq!(held.keep(n, at(0), neighbour(1)), Ok(n == 0));
        }
        assert_eq!(held.keep(99, at(0), neighbour(1)), Err(99));
        let mut kept = PER_NEIGHBOUR;
        for n in 2..=64 {
            for _ in 0..PER_NEIGHBOUR {
                kept += usize::from(held.keep(0, at(0), neighbour(n)).is_ok());
            }
        }
        assert_eq!(held.len(), kept);
        assert!((PER_WORKER - 128..PER_WORKER).contains(&kept), "{kept}");
        let another = |last| UnresolvedNeighbour { address: IpAddr::from([10, 0, 1, last]), ..neighbour(0) };
        // The last ones are for packets that are the only ones for their neighbours.
        let left = u8::try_from(PER_WORKER - kept).unwrap();
        assert!((0..left).all(|n| held.keep(0, at(0), another(n)) == Ok(true)));
        assert_eq!((held.len(), held.keep(7, at(0), another(255))), (PER_WORKER, Err(7)));
    }

    #[test]
    fn a_packet_waits_one_second() {
        let mut held = NeighbourQueue::new();
        assert!(held.keep(7, at(5), neighbour(1)).is_ok());
        assert!(held.expired(PATIENCE_NS + 4).is_none());
        assert_eq!(held.expired(PATIENCE_NS + 5).map(|w| w.buffer), Some(7));
        assert_eq!(held.len(), 0);
    }

    #[test]
    fn only_packets_of_resolved_neighbours_are_released() {
        let mut held = NeighbourQueue::new();
        assert!(held.keep(1, at(0), neighbour(1)).is_ok());
        assert!(held.keep(2, at(0), neighbour(2)).is_ok());
        assert!(held.keep(3, at(0), neighbour(2)).is_ok());
        let resolved = |a: UnresolvedNeighbour| a == neighbour(2);
        assert_eq!(held.release(resolved).into_iter().map(|w| w.buffer).collect::<Vec<_>>(), [2, 3]);
        assert!(held.release(resolved).is_empty());
        assert_eq!(held.len(), 1);
    }

    #[test]
    fn a_neighbour_that_was_resolved_may_be_waited_for_again_and_order_is_kept() {
        let mut held = NeighbourQueue::new();
        for round in 0..3 {
            for n in 0..2 * PER_NEIGHBOUR {
                let neighbour = neighbour(u8::from(n % 2 == 1));
                assert_eq!(held.keep(n, at(0), neighbour), Ok(n < 2), "round {round}, packet {n}");
            }
            let first = held.release(|_| true);
            assert_eq!(first.iter().map(|w| w.buffer).collect::<Vec<_>>(), (0..32).collect::<Vec<_>>());
            assert_eq!((held.len(), held.counts.len()), (0, 0));
        }
    }
}

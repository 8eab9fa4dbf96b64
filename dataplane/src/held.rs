//! Packets whose next hop Linux has not resolved yet. They wait, whole and unchanged, and are decided again once the
//! neighbour is known, so that a held packet has one final verdict.
//!
//! Bounded: [`PER_NEIGHBOUR`] packets for one neighbour, [`PER_WORKER`] in all, [`PATIENCE_NS`] each (FORWARDING 7).

use std::collections::VecDeque;
use std::net::IpAddr;

use crate::Link;
use crate::apply::Arrival;

/// Packets that may wait for one neighbour.
pub(crate) const PER_NEIGHBOUR: usize = 16;
/// Packets that may wait on one worker.
pub(crate) const PER_WORKER: usize = 1024;
/// How long a packet waits, ns. Linux asks three times within it.
pub(crate) const PATIENCE_NS: u64 = 1_000_000_000;

/// A neighbour that is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// The link it is reached by.
    pub link: Link,
    /// Its address.
    pub address: IpAddr,
}

/// One packet that waits.
#[derive(Debug)]
pub(crate) struct Waiting<B> {
    pub(crate) buffer: B,
    /// How it came in.
    pub(crate) arrival: Arrival,
    pub(crate) awaited: Awaited,
    deadline_ns: u64,
}

/// The packets of one worker that wait, oldest first. Linear in their number, which is bounded and at rest 0.
#[derive(Debug)]
pub(crate) struct Held<B> {
    queue: VecDeque<Waiting<B>>,
}

impl<B> Held<B> {
    pub(crate) fn new() -> Self {
        Self { queue: VecDeque::with_capacity(PER_WORKER) }
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Keeps a packet; gives it back when too many wait already. The flag says whether it is the first for its
    /// neighbour, which is then to be asked for.
    pub(crate) fn keep(&mut self, buffer: B, arrival: Arrival, awaited: Awaited) -> Result<bool, B> {
        let same = self.queue.iter().filter(|w| w.awaited == awaited).count();
        if same >= PER_NEIGHBOUR || self.queue.len() >= PER_WORKER {
            return Err(buffer);
        }
        self.queue.push_back(Waiting { buffer, arrival, awaited, deadline_ns: arrival.now_ns.saturating_add(PATIENCE_NS) });
        Ok(same == 0)
    }

    /// The next packet whose patience has ended.
    pub(crate) fn expired(&mut self, now_ns: u64) -> Option<Waiting<B>> {
        if self.queue.front()?.deadline_ns > now_ns {
            return None;
        }
        self.queue.pop_front()
    }

    /// Takes the oldest packet whose neighbour is `resolved`.
    pub(crate) fn release(&mut self, resolved: impl Fn(Awaited) -> bool) -> Option<Waiting<B>> {
        let position = self.queue.iter().position(|w| resolved(w.awaited))?;
        self.queue.remove(position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PortIndex;
    use crate::tags::Tags;

    fn at(now_ns: u64) -> Arrival {
        Arrival { link: PortIndex(0).into(), tags: Tags::NONE, now_ns, origin: crate::apply::Origin::Port }
    }

    fn awaited(last: u8) -> Awaited {
        Awaited { link: PortIndex(0).into(), address: IpAddr::from([10, 0, 0, last]) }
    }

    #[test]
    fn a_neighbour_holds_16_packets_and_a_worker_1024() {
        let mut held = Held::new();
        for n in 0..PER_NEIGHBOUR {
            assert_eq!(held.keep(n, at(0), awaited(1)), Ok(n == 0));
        }
        assert_eq!(held.keep(99, at(0), awaited(1)), Err(99));
        let mut kept = PER_NEIGHBOUR;
        for n in 2..=255 {
            for _ in 0..PER_NEIGHBOUR {
                kept += usize::from(held.keep(0, at(0), awaited(n)).is_ok());
            }
        }
        assert_eq!(kept, PER_WORKER);
        assert_eq!(held.len(), PER_WORKER);
    }

    #[test]
    fn a_packet_waits_one_second() {
        let mut held = Held::new();
        assert!(held.keep(7, at(5), awaited(1)).is_ok());
        assert!(held.expired(PATIENCE_NS + 4).is_none());
        assert_eq!(held.expired(PATIENCE_NS + 5).map(|w| w.buffer), Some(7));
        assert_eq!(held.len(), 0);
    }

    #[test]
    fn only_packets_of_resolved_neighbours_are_released() {
        let mut held = Held::new();
        assert!(held.keep(1, at(0), awaited(1)).is_ok());
        assert!(held.keep(2, at(0), awaited(2)).is_ok());
        assert!(held.keep(3, at(0), awaited(2)).is_ok());
        let resolved = |a: Awaited| a == awaited(2);
        assert_eq!(held.release(resolved).map(|w| w.buffer), Some(2));
        assert_eq!(held.release(resolved).map(|w| w.buffer), Some(3));
        assert!(held.release(resolved).is_none());
    }
}

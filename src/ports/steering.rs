//! How each port's packets come to their workers, and why so: what is asked of devices, what they can do, and what an
//! operator is told (`sluicectl ports`).

use std::sync::Arc;

use dataplane::steering::{Proof, RETA_ENTRIES, Refuted, RssProof, Steering};
use dataplane::{Peers, PortQueues};
use dpdk_sys::{NoSpread, Spread};

use crate::ports::dpdk::Packet;

/// What a device is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    /// Queues of each direction: one for every worker.
    pub(crate) queues: u16,
    /// How it shall spread what it receives.
    pub(crate) spread: Option<Spread>,
}

/// What a device has.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    /// Transmit queues.
    pub(crate) transmit: usize,
    /// Whether it spreads as it was asked.
    pub(crate) spread: Result<(), NoSpread>,
}

/// What is known of a port.
#[derive(Clone, Debug)]
pub(super) struct PortSteering {
    workers: u8,
    /// Whether owners are found by the hash that cards compute.
    by_cards: bool,
    /// None: the device was not there at the start.
    found: Option<Found>,
    proofs: Option<Arc<[Arc<RssProof>]>>,
}

/// Where the proof of a port's queues stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Nothing is to be proven.
    Settled,
    Observing {
        agreed: u32,
    },
    Proven,
    Refuted(Refuted),
}

/// What is asked of the devices at the start.
pub(super) fn wanted(workers: u8, by_cards: &Steering) -> Wanted {
    let spread = by_cards
        .rss_key()
        .filter(|_| workers > 1)
        .map(|key| Spread { key: *key, queues: std::array::from_fn(|entry| by_cards.reta(entry % RETA_ENTRIES).0.into()) });
    Wanted { queues: workers.into(), spread }
}

/// The owner function, now that is known what the devices can do: that of the cards where one of them takes part. `found` is
/// by port, none where the device is not there.
pub(super) fn choose(workers: u8, by_cards: Steering, own: Steering, found: Vec<Option<Found>>) -> (Steering, Vec<PortSteering>) {
    let takes_part = |found: &Option<Found>| found.as_ref().is_some_and(|found| found.spread.is_ok());
    let is_by_cards = workers > 1 && found.iter().any(takes_part);
    let of_port = |found: Option<Found>| {
        let proofs = takes_part(&found).then(|| (0..workers).map(|_| Arc::new(RssProof::default())).collect());
        PortSteering { workers, by_cards: is_by_cards, found, proofs }
    };
    let ports = found.into_iter().map(of_port).collect();
    (if is_by_cards { by_cards } else { own }, ports)
}

/// What each worker knows of the others; none where it is alone.
pub(super) fn peers(steering: &Arc<Steering>, ports: &[PortSteering]) -> Vec<Option<Peers<Packet>>> {
    if steering.workers() == 1 {
        return vec![None];
    }
    let queues: Vec<PortQueues> =
        ports.iter().map(|port| PortQueues { transmit: port.transmit(), rss: port.proofs.clone() }).collect();
    Peers::all(steering, &queues).into_iter().map(Some).collect()
}

impl PortSteering {
    /// Workers that have a transmit queue. A device that comes later must have one for each.
    pub(super) fn transmit(&self) -> u8 {
        let found = self.found.as_ref().and_then(|found| u8::try_from(found.transmit).ok());
        found.unwrap_or(self.workers).clamp(1, self.workers)
    }

    /// Where the proof stands: the worst of all queues.
    pub(super) fn standing(&self) -> Standing {
        let Some(proofs) = &self.proofs else { return Standing::Settled };
        let mut least = None;
        for proof in proofs.iter() {
            match proof.read() {
                Proof::Refuted(why) => return Standing::Refuted(why),
                Proof::Observing { agreed } => least = Some(least.unwrap_or(u32::MAX).min(agreed)),
                Proof::Proven => {}
            }
        }
        least.map_or(Standing::Proven, |agreed| Standing::Observing { agreed })
    }

    /// The way in use, and why.
    pub(super) fn text(&self) -> String {
        if self.workers == 1 {
            return "one worker".to_owned();
        }
        let sends = match self.transmit() {
            all if all == self.workers => String::new(),
            some => format!("; {some} of {} workers can transmit", self.workers),
        };
        let way = if self.by_cards { "Toeplitz computed here" } else { "own hash" };
        match (self.standing(), &self.found) {
            (Standing::Proven, _) => format!("rss: every queue proven by live packets{sends}"),
            (Standing::Observing { agreed }, _) => format!("{way} until rss is proven: {agreed} of 64 packets agree{sends}"),
            (Standing::Refuted(why), _) => format!("{way}: {}{sends}", reason(why)),
            (Standing::Settled, Some(Found { spread: Err(why), .. })) => format!("{way}: {why}{sends}"),
            (Standing::Settled, _) => format!("{way}: the device was not there at the start{sends}"),
        }
    }
}

/// What spoke against trusting a port's queues.
pub(super) const fn reason(why: Refuted) -> &'static str {
    match why {
        Refuted::NoHash => "the device reports no RSS hash with some packets",
        Refuted::OtherHash => "the device's RSS hash is not Toeplitz of the packet",
        Refuted::OtherQueue => "the device's queue is not what its RSS hash leads to",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steerings(workers: u8) -> (Steering, Steering) {
        (Steering::toeplitz(workers, 1), Steering::own_hash(workers, 1))
    }

    fn found(spread: Result<(), NoSpread>, transmit: usize) -> Option<Found> {
        Some(Found { transmit, spread })
    }

    fn no_hash() -> Result<(), NoSpread> {
        Err(NoSpread::NoHash { driver: "net_af_packet".to_owned() })
    }

    fn texts(workers: u8, found: Vec<Option<Found>>) -> Vec<String> {
        let (by_cards, own) = steerings(workers);
        choose(workers, by_cards, own, found).1.iter().map(PortSteering::text).collect()
    }

    #[test]
    fn an_operator_is_told_the_way_and_why() {
        assert_eq!(texts(1, vec![found(Err(NoSpread::NotAsked), 1)]), ["one worker"]);
        assert_eq!(
            texts(2, vec![found(no_hash(), 2), None]),
            [
                "own hash: net_af_packet offers no Toeplitz hash over TCP and UDP",
                "own hash: the device was not there at the start",
            ]
        );
        assert_eq!(
            texts(2, vec![found(Ok(()), 2), found(no_hash(), 1)]),
            [
                "Toeplitz computed here until rss is proven: 0 of 64 packets agree",
                "Toeplitz computed here: net_af_packet offers no Toeplitz hash over TCP and UDP; 1 of 2 workers can transmit",
            ]
        );
    }

    #[test]
    fn owners_are_found_by_the_cards_hash_only_where_a_card_takes_part() {
        let (by_cards, own) = steerings(2);
        assert!(choose(2, by_cards.clone(), own.clone(), vec![found(no_hash(), 2), None]).0.rss_key().is_none());
        let (steering, ports) = choose(2, by_cards, own, vec![found(no_hash(), 2), found(Ok(()), 2)]);
        assert!(steering.rss_key().is_some());
        let standings: Vec<_> = ports.iter().map(PortSteering::standing).collect();
        assert_eq!(standings, [Standing::Settled, Standing::Observing { agreed: 0 }]);
        assert_eq!(peers(&Arc::new(steering), &ports).iter().flatten().count(), 2);
    }

    #[test]
    fn one_worker_asks_for_one_queue_and_no_spreading() {
        let (by_cards, _) = steerings(1);
        let wanted = wanted(1, &by_cards);
        assert_eq!((wanted.queues, wanted.spread), (1, None));
        let (by_cards, _) = steerings(3);
        let spread = super::wanted(3, &by_cards).spread.unwrap();
        assert_eq!((spread.queues[0], spread.queues[4], spread.queues[127]), (0, 1, 1));
    }
}

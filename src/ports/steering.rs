//! Steering of each port's packets to their workers: the queues and the RSS that are requested of devices, what the
//! devices offer, and the text that explains the choice to an operator (`sluicectl ports`).

use std::sync::Arc;

use dataplane::workers::{Proof, RETA_ENTRIES, Refuted, RssProof, Steering};
use dataplane::{Doorbell, Peers, PortQueues};
use dpdk_sys::Spread;

use super::dpdk::{DeviceQueues, Packet, QueueRequest};

/// Steering of one port's packets to their workers.
#[derive(Clone, Debug)]
pub(super) struct PortSteering {
    workers: u8,
    /// Whether owners are found by the hash that NICs compute.
    by_nic: bool,
    /// `None`: the device was absent at the start.
    found: Option<DeviceQueues>,
    proofs: Option<Arc<[Arc<RssProof>]>>,
}

/// The state of the proof that a port's queues are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProofState {
    /// Nothing is to be proven.
    Settled,
    Observing {
        agreed: u32,
    },
    Proven,
    Refuted(Refuted),
}

/// The queues and the RSS that are requested of every device.
pub(super) fn request(workers: u8, by_nic: &Steering) -> QueueRequest {
    let spread = by_nic
        .rss_key()
        .filter(|_| workers > 1)
        .map(|key| Spread { key: *key, queues: std::array::from_fn(|entry| by_nic.reta(entry % RETA_ENTRIES).0.into()) });
    QueueRequest { queues: workers.into(), spread, wakes: false }
}

/// Chooses the owner function once the devices are open: the hash of NICs if one of them spreads by it, or else our
/// own. `found` is by port, `None` for an absent device.
pub(super) fn choose(
    workers: u8,
    by_nic: Steering,
    own: Steering,
    found: Vec<Option<DeviceQueues>>,
) -> (Steering, Vec<PortSteering>) {
    let spreads = |found: &Option<DeviceQueues>| found.as_ref().is_some_and(|found| found.spread.is_ok());
    let is_by_nic = workers > 1 && found.iter().any(spreads);
    let of_port = |found: Option<DeviceQueues>| {
        let proofs = spreads(&found).then(|| (0..workers).map(|_| Arc::new(RssProof::default())).collect());
        PortSteering { workers, by_nic: is_by_nic, found, proofs }
    };
    let ports = found.into_iter().map(of_port).collect();
    (if is_by_nic { by_nic } else { own }, ports)
}

/// Each worker's view of the other workers; none where there is one worker.
pub(super) fn peers(steering: &Arc<Steering>, ports: &[PortSteering], doorbells: &[Arc<Doorbell>]) -> Vec<Option<Peers<Packet>>> {
    if steering.workers() == 1 {
        return vec![None];
    }
    let queues: Vec<PortQueues> =
        ports.iter().map(|port| PortQueues { transmit: port.transmit(), rss: port.proofs.clone() }).collect();
    Peers::with_doorbells(steering, &queues, doorbells).into_iter().map(Some).collect()
}

impl PortSteering {
    /// Workers that have a transmit queue. A device that comes later must have one for each.
    pub(super) fn transmit(&self) -> u8 {
        let found = self.found.as_ref().and_then(|found| u8::try_from(found.transmit).ok());
        found.unwrap_or(self.workers).clamp(1, self.workers)
    }

    /// The state of the proof: the worst of all queues.
    pub(super) fn proof_state(&self) -> ProofState {
        let Some(proofs) = &self.proofs else { return ProofState::Settled };
        let mut least = None;
        for proof in proofs.iter() {
            match proof.read() {
                Proof::Refuted(why) => return ProofState::Refuted(why),
                Proof::Observing { agreed } => least = Some(least.unwrap_or(u32::MAX).min(agreed)),
                Proof::Proven => {}
            }
        }
        least.map_or(ProofState::Proven, |agreed| ProofState::Observing { agreed })
    }

    /// The text for operators: how packets find their worker, and why.
    pub(super) fn text(&self) -> String {
        if self.workers == 1 {
            return "one worker".to_owned();
        }
        let sends = match self.transmit() {
            all if all == self.workers => String::new(),
            some => format!("; {some} of {} workers can transmit", self.workers),
        };
        let method = if self.by_nic { "Toeplitz computed here" } else { "own hash" };
        match (self.proof_state(), &self.found) {
            (ProofState::Proven, _) => format!("rss: every queue proven by live packets{sends}"),
            (ProofState::Observing { agreed }, _) => format!("{method} until rss is proven: {agreed} of 64 packets agree{sends}"),
            (ProofState::Refuted(why), _) => format!("{method}: {}{sends}", reason(why)),
            (ProofState::Settled, Some(DeviceQueues { spread: Err(why), .. })) => format!("{method}: {why}{sends}"),
            (ProofState::Settled, _) => format!("{method}: the device was not there at the start{sends}"),
        }
    }
}

/// Why a port's queues are not trusted.
pub(super) const fn reason(why: Refuted) -> &'static str {
    match why {
        Refuted::NoHash => "the device reports no RSS hash with some packets",
        Refuted::OtherHash => "the device's RSS hash is not Toeplitz of the packet",
        Refuted::OtherQueue => "the device's queue is not what its RSS hash leads to",
    }
}

#[cfg(test)]
mod tests {
    use dpdk_sys::NoSpread;

    use super::*;

    fn steerings(workers: u8) -> (Steering, Steering) {
        (Steering::toeplitz(workers, 1), Steering::own_hash(workers, 1))
    }

    fn found(spread: Result<(), NoSpread>, transmit: usize) -> Option<DeviceQueues> {
        Some(DeviceQueues { transmit, spread })
    }

    fn no_hash() -> Result<(), NoSpread> {
        Err(NoSpread::NoHash { driver: "net_af_packet".to_owned() })
    }

    fn texts(workers: u8, found: Vec<Option<DeviceQueues>>) -> Vec<String> {
        let (by_nic, own) = steerings(workers);
        choose(workers, by_nic, own, found).1.iter().map(PortSteering::text).collect()
    }

    #[test]
    fn the_text_says_how_packets_find_their_worker_and_why() {
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
    fn owners_are_found_by_the_nics_hash_only_where_a_nic_spreads_by_it() {
        let (by_nic, own) = steerings(2);
        assert!(choose(2, by_nic.clone(), own.clone(), vec![found(no_hash(), 2), None]).0.rss_key().is_none());
        let (steering, ports) = choose(2, by_nic, own, vec![found(no_hash(), 2), found(Ok(()), 2)]);
        assert!(steering.rss_key().is_some());
        let states: Vec<_> = ports.iter().map(PortSteering::proof_state).collect();
        assert_eq!(states, [ProofState::Settled, ProofState::Observing { agreed: 0 }]);
        assert_eq!(peers(&Arc::new(steering), &ports, &[]).iter().flatten().count(), 2);
    }

    #[test]
    fn one_worker_asks_for_one_queue_and_no_spreading() {
        let (by_nic, _) = steerings(1);
        let request = request(1, &by_nic);
        assert_eq!((request.queues, request.spread), (1, None));
        let (by_nic, _) = steerings(3);
        let spread = super::request(3, &by_nic).spread.unwrap();
        assert_eq!((spread.queues[0], spread.queues[4], spread.queues[127]), (0, 1, 1));
    }
}

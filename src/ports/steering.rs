//! Steering of each port's packets to their workers: the queues and the RSS that are requested of devices, what the
//! devices offer, and the text that explains the choice to an operator (`sluicectl ports`).

use std::sync::Arc;

use dataplane::wire::RETA_ENTRIES;
use dataplane::workers::{Proof, Refuted, RssKind, RssProof, Steering};
use dataplane::{Doorbell, Peers, PortQueues};
use dpdk_port::Packet;
use dpdk_sys::{HashedKind, Spread};
use proto::v1;

use super::dpdk::{DeviceQueues, QueueRequest};

/// Number of packets that prove a kind at a queue.
const PACKETS_FIRST: u16 = 64;

/// Steering of one port's packets to their workers.
#[derive(Clone, Debug)]
pub(super) struct PortSteering {
    workers: u8,
    transmit: u8,
    /// `None`: the device was not open at the start, and has not come since.
    found: Option<DeviceQueues>,
    /// By worker. `None` where owners are not found by the hash that NICs compute.
    proofs: Option<Arc<[Arc<RssProof>]>>,
}

/// The state of the proof that a port's queues are right for a kind of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KindState {
    /// Nothing is to be proven: the device does not spread packets by RSS.
    Settled,
    /// The device does not hash such packets.
    NotOffered,
    Observing {
        agreed: u16,
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
    QueueRequest { queues: workers.into(), spread, wakes: false, is_one_pool: false }
}

/// Chooses the owner function once the devices are open: the hash of NICs if one of them spreads by it, or else our
/// own. `found` is by port, `None` for a device that is not open.
pub(super) fn choose(
    workers: u8,
    by_nic: Steering,
    own: Steering,
    found: Vec<Option<DeviceQueues>>,
) -> (Steering, Vec<PortSteering>) {
    let spreads = |found: &Option<DeviceQueues>| found.as_ref().is_some_and(|found| found.spread.is_ok());
    let is_by_nic = workers > 1 && found.iter().any(spreads);
    let of_port = |found: Option<DeviceQueues>| {
        let offered = found.as_ref().map_or_else(Vec::new, DeviceQueues::offered);
        let proofs = is_by_nic.then(|| (0..workers).map(|_| Arc::new(RssProof::of(&offered))).collect());
        let transmit = found.as_ref().and_then(|found| u8::try_from(found.transmit).ok());
        PortSteering { workers, transmit: transmit.unwrap_or(workers).clamp(1, workers), found, proofs }
    };
    let ports = found.into_iter().map(of_port).collect();
    (if is_by_nic { by_nic } else { own }, ports)
}

impl DeviceQueues {
    /// The kinds of packets that the device spreads as requested.
    fn offered(&self) -> Vec<RssKind> {
        let kind = |kind: &HashedKind| match kind {
            HashedKind::TcpV4 => RssKind::TcpV4,
            HashedKind::UdpV4 => RssKind::UdpV4,
            HashedKind::TcpV6 => RssKind::TcpV6,
            HashedKind::UdpV6 => RssKind::UdpV6,
        };
        self.spread.iter().flat_map(|spreading| &spreading.kinds).map(kind).collect()
    }
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
    /// Workers that have a transmit queue, at the start as later: a device that comes later must have one for each.
    pub(super) fn transmit(&self) -> u8 {
        self.transmit
    }

    /// Notes that a device came, whose packets are to prove its queues.
    pub(super) fn attached(&mut self, found: DeviceQueues) {
        self.found = Some(found);
        self.prove_again();
    }

    /// Begins the proof again: packets come by another card.
    pub(super) fn prove_again(&self) {
        let offered = self.found.as_ref().map_or_else(Vec::new, DeviceQueues::offered);
        self.proofs.iter().flat_map(|proofs| proofs.iter()).for_each(|proof| proof.restart(&offered));
    }

    /// Entries of the device's redirection table; 0: it spreads nothing by RSS.
    pub(super) fn table_entries(&self) -> u16 {
        let spread = self.found.as_ref().and_then(|found| found.spread.as_ref().ok());
        spread.map_or(0, |spreading| spreading.table_entries)
    }

    /// The state of the proof of each kind, in the order of [`RssKind::ALL`].
    pub(super) fn kind_states(&self) -> [KindState; 4] {
        RssKind::ALL.map(|kind| self.kind_state(kind))
    }

    /// The state of the proof of a kind: the worst of all queues.
    fn kind_state(&self, kind: RssKind) -> KindState {
        let spreads = self.found.as_ref().is_some_and(|found| found.spread.is_ok());
        let Some(proofs) = self.proofs.as_ref().filter(|_| spreads) else { return KindState::Settled };
        let mut least = None;
        for proof in proofs.iter() {
            match proof.read(kind) {
                Proof::NotOffered => return KindState::NotOffered,
                Proof::Refuted(why) => return KindState::Refuted(why),
                Proof::Observing { agreed } => least = Some(least.unwrap_or(agreed).min(agreed)),
                Proof::Proven => {}
            }
        }
        least.map_or(KindState::Proven, |agreed| KindState::Observing { agreed })
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
        let method = if self.proofs.is_some() { "Toeplitz computed here" } else { "own hash" };
        match &self.found {
            None => format!("{method}: the device was not open at the start{sends}"),
            Some(DeviceQueues { spread: Err(why), .. }) => format!("{method}: {why}{sends}"),
            Some(_) if self.proofs.is_none() => format!("{method}: no device spread packets at the start{sends}"),
            Some(_) => format!("{}{sends}", text_of_kinds(self.kind_states())),
        }
    }

    /// The state of each kind for programs; none where the device does not spread packets by RSS.
    pub(super) fn rows(&self) -> Vec<v1::RssStatus> {
        let row = |(kind, state): (RssKind, KindState)| {
            let (state, agreed, why) = match state {
                KindState::Settled => return None,
                KindState::NotOffered => ("not_offered", 0, NOT_OFFERED),
                KindState::Observing { agreed } => ("observing", agreed, ""),
                KindState::Proven => ("proven", PACKETS_FIRST, ""),
                KindState::Refuted(why) => ("refuted", 0, reason(why)),
            };
            let (family, protocol) = match kind {
                RssKind::TcpV4 => ("ipv4", "tcp"),
                RssKind::UdpV4 => ("ipv4", "udp"),
                RssKind::TcpV6 => ("ipv6", "tcp"),
                RssKind::UdpV6 => ("ipv6", "udp"),
            };
            let (state, agreed) = (state.to_owned(), agreed.into());
            Some(v1::RssStatus {
                family: family.to_owned(),
                protocol: protocol.to_owned(),
                state,
                agreed,
                reason: why.to_owned(),
            })
        };
        RssKind::ALL.into_iter().zip(self.kind_states()).filter_map(row).collect()
    }
}

/// How packets of each kind find their worker: kinds of which the same is true together.
fn text_of_kinds(states: [KindState; 4]) -> String {
    let phrase = |state: KindState| match state {
        KindState::Proven => ("rss", "every queue proven by live packets".to_owned()),
        KindState::Observing { .. } => {
            let least = states.iter().filter_map(|state| match state {
                KindState::Observing { agreed } => Some(*agreed),
                _ => None,
            });
            let least = least.min().unwrap_or_default();
            ("rss, not proven yet", format!("{least} of {PACKETS_FIRST} packets agree"))
        }
        KindState::Refuted(why) => ("Toeplitz computed here", reason(why).to_owned()),
        KindState::NotOffered | KindState::Settled => ("Toeplitz computed here", NOT_OFFERED.to_owned()),
    };
    let mut groups: Vec<((&str, String), Vec<&str>)> = Vec::new();
    for (kind, state) in RssKind::ALL.into_iter().zip(states) {
        let phrase = phrase(state);
        match groups.iter_mut().find(|(of, _)| *of == phrase) {
            Some((_, kinds)) => kinds.push(name(kind)),
            None => groups.push((phrase, vec![name(kind)])),
        }
    }
    let text = |((method, detail), kinds): &((&str, String), Vec<&str>)| match kinds.len() {
        4 => format!("{method}: {detail}"),
        _ => format!("{}, {method}: {detail}", kinds.join(" + ")),
    };
    groups.iter().map(text).collect::<Vec<_>>().join("; ")
}

/// The name of a kind of packets in messages.
pub(super) const fn name(kind: RssKind) -> &'static str {
    match kind {
        RssKind::TcpV4 => "IPv4 TCP",
        RssKind::UdpV4 => "IPv4 UDP",
        RssKind::TcpV6 => "IPv6 TCP",
        RssKind::UdpV6 => "IPv6 UDP",
    }
}

/// Why nothing is to be proven of a kind.
const NOT_OFFERED: &str = "the device does not hash them";

/// Why a port's queues are not those of the owners.
pub(super) const fn reason(why: Refuted) -> &'static str {
    match why {
        Refuted::NoHash => "the device reports no RSS hash with some packets",
        Refuted::OtherHash => "the device's RSS hash is not Toeplitz of the packet",
        Refuted::OtherQueue => "the device's queue is not what its RSS hash leads to",
    }
}

#[cfg(test)]
mod tests {
    use dpdk_sys::{NoSpread, Spreading};

    use super::*;

    const ALL: [HashedKind; 4] = [HashedKind::TcpV4, HashedKind::UdpV4, HashedKind::TcpV6, HashedKind::UdpV6];

    fn steerings(workers: u8) -> (Steering, Steering) {
        (Steering::toeplitz(workers, 1), Steering::own_hash(workers, 1))
    }

    fn found(kinds: Result<Vec<HashedKind>, NoSpread>, transmit: usize) -> Option<DeviceQueues> {
        Some(DeviceQueues { transmit, spread: kinds.map(|kinds| Spreading { kinds, table_entries: 128 }) })
    }

    fn no_hash() -> Result<Vec<HashedKind>, NoSpread> {
        Err(NoSpread::NoHash { driver: "net_af_packet".to_owned() })
    }

    fn chosen(workers: u8, found: Vec<Option<DeviceQueues>>) -> (Steering, Vec<PortSteering>) {
        let (by_nic, own) = steerings(workers);
        choose(workers, by_nic, own, found)
    }

    fn texts(workers: u8, found: Vec<Option<DeviceQueues>>) -> Vec<String> {
        chosen(workers, found).1.iter().map(PortSteering::text).collect()
    }

    #[test]
    fn the_text_says_how_packets_find_their_worker_and_why() {
        assert_eq!(texts(1, vec![found(Err(NoSpread::NotAsked), 1)]), ["one worker"]);
        assert_eq!(
            texts(2, vec![found(no_hash(), 2), None]),
            [
                "own hash: net_af_packet offers no Toeplitz hash over TCP and UDP",
                "own hash: the device was not open at the start",
            ]
        );
        assert_eq!(
            texts(2, vec![found(Ok(ALL.to_vec()), 2), found(no_hash(), 1), None]),
            [
                "rss, not proven yet: 0 of 64 packets agree",
                "Toeplitz computed here: net_af_packet offers no Toeplitz hash over TCP and UDP; 1 of 2 workers can transmit",
                "Toeplitz computed here: the device was not open at the start",
            ]
        );
        assert_eq!(
            texts(2, vec![found(Ok(vec![HashedKind::TcpV4, HashedKind::TcpV6]), 2)]),
            ["IPv4 TCP + IPv6 TCP, rss, not proven yet: 0 of 64 packets agree; \
              IPv4 UDP + IPv6 UDP, Toeplitz computed here: the device does not hash them"]
        );
    }

    #[test]
    fn the_text_names_the_kinds_of_packets_that_are_proven_and_why_others_are_not() {
        use KindState::{NotOffered, Observing, Proven, Refuted};
        let no_hash = Refuted(super::Refuted::NoHash);
        assert_eq!(text_of_kinds([Proven; 4]), "rss: every queue proven by live packets");
        assert_eq!(text_of_kinds([no_hash; 4]), "Toeplitz computed here: the device reports no RSS hash with some packets");
        assert_eq!(
            text_of_kinds([Proven, Observing { agreed: 9 }, no_hash, Observing { agreed: 3 }]),
            "IPv4 TCP, rss: every queue proven by live packets; \
             IPv4 UDP + IPv6 UDP, rss, not proven yet: 3 of 64 packets agree; \
             IPv6 TCP, Toeplitz computed here: the device reports no RSS hash with some packets"
        );
        assert_eq!(
            text_of_kinds([Proven, Proven, NotOffered, NotOffered]),
            "IPv4 TCP + IPv4 UDP, rss: every queue proven by live packets; \
             IPv6 TCP + IPv6 UDP, Toeplitz computed here: the device does not hash them"
        );
    }

    #[test]
    fn owners_are_found_by_the_nics_hash_only_where_a_nic_spreads_by_it() {
        let (steering, ports) = chosen(2, vec![found(no_hash(), 2), None]);
        assert!(steering.rss_key().is_none() && ports.iter().all(|port| port.rows().is_empty()));
        let (steering, ports) = chosen(2, vec![found(no_hash(), 2), found(Ok(vec![HashedKind::UdpV6]), 2)]);
        assert!(steering.rss_key().is_some());
        assert_eq!(ports[0].kind_states(), [KindState::Settled; 4]);
        let observing = KindState::Observing { agreed: 0 };
        assert_eq!(ports[1].kind_states(), [KindState::NotOffered, KindState::NotOffered, KindState::NotOffered, observing]);
        assert_eq!(peers(&Arc::new(steering), &ports, &[]).iter().flatten().count(), 2);
    }

    #[test]
    fn a_device_that_comes_later_offers_its_own_kinds_and_rows_say_so() {
        let (_, mut ports) = chosen(2, vec![found(Ok(ALL.to_vec()), 2), None]);
        let late = &mut ports[1];
        assert!(late.rows().is_empty());
        late.attached(found(Ok(vec![HashedKind::TcpV4]), 2).unwrap());
        let rows = late.rows();
        let rows: Vec<_> = rows.iter().map(|row| (&*row.family, &*row.protocol, &*row.state, row.agreed, &*row.reason)).collect();
        assert_eq!(
            rows,
            [
                ("ipv4", "tcp", "observing", 0, ""),
                ("ipv4", "udp", "not_offered", 0, "the device does not hash them"),
                ("ipv6", "tcp", "not_offered", 0, "the device does not hash them"),
                ("ipv6", "udp", "not_offered", 0, "the device does not hash them"),
            ]
        );
        late.attached(found(no_hash(), 2).unwrap());
        assert_eq!(late.kind_states(), [KindState::Settled; 4]);
        assert_eq!(late.text(), "Toeplitz computed here: net_af_packet offers no Toeplitz hash over TCP and UDP");
        let (_, mut ports) = chosen(2, vec![found(no_hash(), 2), None]);
        ports[1].attached(found(Ok(ALL.to_vec()), 2).unwrap());
        assert_eq!(ports[1].text(), "own hash: no device spread packets at the start");
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

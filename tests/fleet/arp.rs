//! ARP on the bridge, out of a capture: who announced VIPs and who answered requests for them, by the times of the capture.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use pcap_file::pcap::PcapReader;

/// Answers to one request arrive within this time: senders of requests repeat after two seconds.
const ROUND: Duration = Duration::from_millis(900);

/// An ARP frame that a gateway sent for a VIP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    /// Since the epoch.
    pub(crate) at: Duration,
    pub(crate) mac: String,
    vip: Ipv4Addr,
    /// Who had asked; `None` of an announcement.
    pub(crate) asked_by: Option<Ipv4Addr>,
}

/// Reads the claims of VIPs of a capture.
pub(crate) fn claims(file: &Path, vips: &[Ipv4Addr]) -> Vec<Claim> {
    let mut reader = PcapReader::new(File::open(file).unwrap()).unwrap();
    let mut found = Vec::new();
    // The last record may be incomplete: the capture was killed.
    while let Some(Ok(packet)) = reader.next_packet() {
        found.extend(parse(packet.timestamp, &packet.data).filter(|claim| vips.contains(&claim.vip)));
    }
    found
}

fn parse(at: Duration, frame: &[u8]) -> Option<Claim> {
    let arp = frame.get(14..42).filter(|_| frame[12..14] == [8, 6])?;
    let ip = |from: usize| Ipv4Addr::new(arp[from], arp[from + 1], arp[from + 2], arp[from + 3]);
    let mac = arp[8..14].iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":");
    let (sender, target, is_reply) = (ip(14), ip(24), arp[6..8] == [0, 2]);
    match (sender == target, is_reply) {
        (true, _) => Some(Claim { at, mac, vip: sender, asked_by: None }),
        (false, true) => Some(Claim { at, mac, vip: sender, asked_by: Some(target) }),
        (false, false) => None,
    }
}

/// When gateways took a VIP over: announced it, which another one had announced or answered for before.
fn takeovers(claims: &[Claim]) -> BTreeMap<Ipv4Addr, Vec<Duration>> {
    let mut owners: BTreeMap<Ipv4Addr, &str> = BTreeMap::new();
    let mut found: BTreeMap<Ipv4Addr, Vec<Duration>> = BTreeMap::new();
    for claim in claims {
        let times = found.entry(claim.vip).or_insert_with(|| vec![claim.at]);
        let owner = owners.entry(claim.vip).or_insert(&claim.mac);
        if claim.asked_by.is_none() && *owner != claim.mac {
            *owner = &claim.mac;
            times.push(claim.at);
        }
    }
    found
}

/// How long after the takeover of its VIP each request was answered twice; 0 before it, since a new owner may answer before
/// it announces the VIP.
pub(crate) fn double_answers(claims: &[Claim]) -> Vec<Duration> {
    let takeovers = takeovers(claims);
    let mut rounds: BTreeMap<(Ipv4Addr, Ipv4Addr), (Duration, BTreeSet<&str>)> = BTreeMap::new();
    let mut found = Vec::new();
    for claim in claims {
        let Some(asked_by) = claim.asked_by else { continue };
        let (start, answered) = rounds.entry((claim.vip, asked_by)).or_insert((claim.at, BTreeSet::new()));
        if claim.at.saturating_sub(*start) > ROUND {
            (*start, *answered) = (claim.at, BTreeSet::new());
        }
        answered.insert(&claim.mac);
        if answered.len() > 1 {
            let times = &takeovers[&claim.vip];
            let is_soon = times.iter().any(|time| *time > claim.at && *time < claim.at + ROUND);
            let last = times.iter().rfind(|time| **time <= claim.at).unwrap();
            found.push(if is_soon { Duration::ZERO } else { claim.at - *last });
        }
    }
    found
}

/// Requests that a gateway answered after a time.
pub(crate) fn answers_after(claims: &[Claim], mac: &str, after: Duration) -> usize {
    claims.iter().filter(|claim| claim.mac == mac && claim.at > after && claim.asked_by.is_some()).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(at_ms: u64, gateway: u8, asked_by: Option<u8>) -> Claim {
        let asked_by = asked_by.map(|n| Ipv4Addr::new(192, 0, 3, n));
        Claim { at: Duration::from_millis(at_ms), mac: gateway.to_string(), vip: Ipv4Addr::new(192, 0, 2, 100), asked_by }
    }

    #[test]
    fn a_request_that_two_gateways_answer_counts_from_the_takeover_on() {
        let handover = [
            claim(0, 0, Some(1)),
            claim(5000, 0, Some(2)),
            claim(5001, 1, Some(2)),
            claim(5010, 0, Some(3)),
            claim(5012, 1, None),
            claim(5013, 1, Some(3)),
            claim(5040, 1, Some(4)),
            claim(5052, 0, Some(4)),
        ];
        assert_eq!(double_answers(&handover), [0, 1, 40].map(Duration::from_millis));
        assert_eq!(answers_after(&handover, "0", Duration::from_millis(5012)), 1);
    }

    #[test]
    fn the_same_sender_asks_anew_later_and_repeated_announcements_are_one_takeover() {
        let rounds =
            [claim(0, 0, Some(1)), claim(5, 1, None), claim(2000, 1, Some(1)), claim(3000, 1, None), claim(3001, 1, Some(2))];
        assert!(double_answers(&rounds).is_empty());
    }

    #[test]
    fn frames_are_parsed() {
        let mut frame = [0; 42];
        frame[12..14].copy_from_slice(&[8, 6]);
        frame[20..22].copy_from_slice(&[0, 2]);
        frame[22..28].copy_from_slice(&[2, 0, 0, 0, 0xaa, 1]);
        frame[28..32].copy_from_slice(&[192, 0, 2, 100]);
        frame[38..42].copy_from_slice(&[192, 0, 3, 7]);
        let found = parse(Duration::ZERO, &frame).unwrap();
        assert_eq!((found.mac.as_str(), found.asked_by), ("02:00:00:00:aa:01", Some(Ipv4Addr::new(192, 0, 3, 7))));
        frame[38..42].copy_from_slice(&[192, 0, 2, 100]);
        assert_eq!(parse(Duration::ZERO, &frame).unwrap().asked_by, None, "an announcement");
        frame[20..22].copy_from_slice(&[0, 1]);
        frame[38..42].copy_from_slice(&[192, 0, 2, 101]);
        assert_eq!(parse(Duration::ZERO, &frame), None, "a request");
    }
}

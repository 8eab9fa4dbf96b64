//! Gateways that elect the owners of VIPs: who answers ARP and neighbour discovery, until when, and which
//! advertisements leave.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dataplane::testing::{Packet, Segment, arp_request, neighbour_solicitation};
use dataplane::{BURST, Config, DropReason, GroupsClaimed, Mac, OwnedGroups, PacketOutcome, VipAnswers, VipClaim, VipOwnership};
use proto::vip_group;

use crate::rig::{self, CLUSTER, Rig, UPLINK, UPLINK_MAC, config, ip};

const MILLISECOND: u64 = 1_000_000;
const ADVERTISEMENT_NS: u64 = 100 * MILLISECOND;
const LEASE_NS: u64 = 3 * ADVERTISEMENT_NS;
const GROUPS: u8 = 16;
const FIRST_VRID: u8 = 101;
const VIP: &str = "192.0.2.100";
const VIP_V6: &str = "2001:db8::1:0";
/// SNAT addresses of groups 0 and 1.
const SNAT: [[&str; 2]; 2] = [["10.0.0.3", "fd00::3"], ["10.0.0.4", "fd00::4"]];

/// A gateway that owns these groups in its snapshot.
fn gateway(owned: &[u8]) -> (Rig, Arc<VipOwnership>) {
    elected(Rig::new(), owned)
}

/// The same with SNAT addresses of the first two groups.
fn with_shared_snat(owned: &[u8]) -> (Rig, Arc<VipOwnership>) {
    let snat = SNAT.iter().flatten().map(|address| ip(address)).collect();
    let mut rig = Rig::with_config(Config { snat, shared_snat: true, ..config(1024) });
    (rig.state, rig.network) = (rig::state(), rig::network());
    elected(rig, owned)
}

fn elected(mut rig: Rig, owned: &[u8]) -> (Rig, Arc<VipOwnership>) {
    let ownership = Arc::new(VipOwnership::elected(GROUPS, FIRST_VRID, ADVERTISEMENT_NS));
    rig.worker.own_by(Arc::clone(&ownership), || 0);
    answers(&mut rig, owned);
    rig.sent(UPLINK);
    (rig, ownership)
}

fn answers(rig: &mut Rig, owned: &[u8]) {
    defends(rig, owned, &[]);
}

/// The same, and the gateway has defended these groups once.
fn defends(rig: &mut Rig, owned: &[u8], defended: &[u8]) {
    let owned = owned.iter().fold(0, |all, group| all | 1 << group);
    let groups = Some(OwnedGroups { groups: GROUPS, owned });
    let defended_groups = defended.iter().map(|group| (*group, 1)).collect();
    rig.compiler.answer_for(&VipAnswers { groups, defended_groups, ..VipAnswers::default() });
    let snapshot = rig.compiler.compile(&rig.state, &rig.network, &rig.health, rig.now);
    rig.publisher.publish(snapshot);
    rig.worker.poll(rig.now);
}

fn group(vip: &str) -> u8 {
    vip_group(ip(vip), GROUPS)
}

/// Whether an ARP request or a solicitation for the VIP is answered.
fn is_answered(rig: &mut Rig, vip: &str) -> bool {
    let frame = match ip(vip) {
        std::net::IpAddr::V4(vip) => arp_request([192, 0, 2, 10].into(), vip),
        std::net::IpAddr::V6(vip) => neighbour_solicitation("2001:db8::10".parse().unwrap(), vip).build(),
    };
    rig.put(UPLINK, &frame) == Some(PacketOutcome::Reply(UPLINK))
}

/// An advertisement of a VRID, as keepalived sends it.
fn advertisement(vrid: u8, priority: u8) -> Vec<u8> {
    let payload = [0x31, vrid, priority, 1, 0, 10, 0, 0, 169, 254, 83, vrid];
    let segment = Segment::Other { protocol: 112 };
    Packet::between(ip("192.0.2.2"), ip("224.0.0.18"), segment).payload(&payload).hop_limit(255).build()
}

/// Number of announcements of the VIP that have left.
fn announcements(rig: &mut Rig) -> usize {
    let is_of_vip = |frame: &&Vec<u8>| frame[12..14] == [8, 6] && frame[28..32] == [192, 0, 2, 100];
    rig.sent(UPLINK).iter().filter(is_of_vip).count()
}

/// Whether an advertisement for the group of the VIP leaves.
fn advertises(rig: &mut Rig, vip: &str, priority: u8) -> bool {
    rig.send_from_linux(UPLINK, &advertisement(FIRST_VRID + group(vip), priority));
    !rig.sent(UPLINK).is_empty()
}

#[test]
fn only_the_owner_answers_and_others_forward() {
    let (mut rig, ownership) = gateway(&[group(VIP)]);
    ownership.open();
    ownership.begin(group(VIP), rig.now);
    assert!(is_answered(&mut rig, VIP));
    assert!(!is_answered(&mut rig, VIP_V6), "another group");
    let packet = Packet::tcp("[2001:db8:1::7]:5555", "[2001:db8::1:0]:80").build();
    assert_eq!(rig.put(UPLINK, &packet), Some(PacketOutcome::Forward(rig::CLUSTER)), "the tables stay warm");
    ownership.end(group(VIP));
    assert!(!is_answered(&mut rig, VIP), "at once, whatever the snapshot says");
}

#[test]
fn a_lease_lasts_as_long_as_advertisements_leave() {
    let (mut rig, ownership) = gateway(&[group(VIP), group(VIP_V6)]);
    ownership.open();
    for vip in [VIP, VIP_V6] {
        ownership.begin(group(vip), rig.now);
    }
    for _ in 0..10 {
        rig.now += ADVERTISEMENT_NS;
        assert!(advertises(&mut rig, VIP, 150));
        assert!(is_answered(&mut rig, VIP));
    }
    assert!(!is_answered(&mut rig, VIP_V6), "no advertisement has renewed its lease");
    assert_eq!(ownership.expired(rig.now).collect::<Vec<_>>(), [group(VIP_V6)]);
    rig.now += LEASE_NS - 1;
    assert!(is_answered(&mut rig, VIP));
    rig.now += 1;
    assert!(!is_answered(&mut rig, VIP));
}

#[test]
fn advertisements_that_waited_while_the_gateway_was_stopped_renew_nothing() {
    let (mut rig, ownership) = gateway(&[group(VIP)]);
    ownership.open();
    ownership.begin(group(VIP), rig.now);
    rig.now += LEASE_NS;
    assert!(!advertises(&mut rig, VIP, 150), "another gateway owns the group by now");
    assert!(!is_answered(&mut rig, VIP));
    assert_eq!(rig.drops(DropReason::StaleAdvertisement), 1);
    // The agent ends this election and begins a new one.
    ownership.close();
    assert!(!advertises(&mut rig, VIP, 150), "left from the old one");
    ownership.begin(group(VIP), rig.now);
    assert!(!is_answered(&mut rig, VIP), "a notification of the old one");
    ownership.open();
    assert!(advertises(&mut rig, VIP, 150) && !is_answered(&mut rig, VIP), "won, and the agent does not know it yet");
    ownership.begin(group(VIP), rig.now);
    assert!(is_answered(&mut rig, VIP));
}

/// Time at the end of the polls of the next test.
static END_OF_POLL: AtomicU64 = AtomicU64::new(0);

#[test]
fn what_a_stopped_worker_was_about_to_send_for_a_lease_does_not_leave_after_it() {
    let (mut rig, ownership) = gateway(&[group(VIP), group(VIP_V6)]);
    rig.worker.own_by(Arc::clone(&ownership), || END_OF_POLL.load(Ordering::SeqCst));
    let begin = |rig: &Rig| [VIP, VIP_V6].into_iter().for_each(|vip| ownership.begin(group(vip), rig.now));
    ownership.open();
    let frames = |rig: &mut Rig| {
        begin(rig);
        // A whole burst, of both families.
        let arp = arp_request([192, 0, 2, 10].into(), [192, 0, 2, 100].into());
        let solicitation = neighbour_solicitation("2001:db8::10".parse().unwrap(), VIP_V6.parse().unwrap()).build();
        for (id, frame) in (1..).zip([vec![arp; BURST - 2], vec![solicitation; 2]].concat()) {
            rig.arrive(UPLINK, &frame, id);
        }
        rig.worker.poll(rig.now);
        let answers = rig.sent(UPLINK).len();
        begin(rig);
        (answers, usize::from(advertises(rig, VIP, 150)))
    };
    END_OF_POLL.store(rig.now + LEASE_NS - 1, Ordering::SeqCst);
    assert_eq!(frames(&mut rig), (BURST, 1), "the leases are still valid");
    END_OF_POLL.store(rig.now + LEASE_NS, Ordering::SeqCst);
    assert_eq!(frames(&mut rig), (0, 0), "the worker was stopped within the poll until the leases had ended");
    assert_eq!(rig.drops(DropReason::StaleAdvertisement), BURST as u64 + 1);
    // Announcements follow from a new snapshot.
    answers(&mut rig, &[]);
    rig.now += 10_000 * MILLISECOND;
    END_OF_POLL.store(rig.now + LEASE_NS, Ordering::SeqCst);
    begin(&rig);
    answers(&mut rig, &[group(VIP)]);
    assert_eq!(announcements(&mut rig), 0, "an announcement would take the VIP from its next owner");
    assert!(rig.drops(DropReason::StaleAdvertisement) > BURST as u64 + 1);
    // An owner that the agent does not know yet: what it advertises is as old.
    ownership.end(group(VIP));
    assert!(!advertises(&mut rig, VIP, 150));
    END_OF_POLL.store(rig.now, Ordering::SeqCst);
    assert!(advertises(&mut rig, VIP, 150));
}

#[test]
fn an_owner_that_resigns_answers_no_more() {
    let (mut rig, ownership) = gateway(&[group(VIP)]);
    ownership.open();
    ownership.begin(group(VIP), rig.now);
    assert!(advertises(&mut rig, VIP, 0));
    assert!(!is_answered(&mut rig, VIP));
    assert_eq!(ownership.expired(u64::MAX).count(), 0, "the lease ended, it did not expire");
}

#[test]
fn other_packets_of_linux_and_other_vrids_pass() {
    let (mut rig, _ownership) = gateway(&[]);
    for frame in [advertisement(FIRST_VRID - 1, 100), advertisement(FIRST_VRID + GROUPS, 100)] {
        rig.send_from_linux(UPLINK, &frame);
        assert_eq!(rig.sent(UPLINK).len(), 1);
    }
    assert!(!advertises(&mut rig, VIP, 100), "no election has begun");
}

#[test]
fn a_new_owner_announces_its_vips_and_an_old_one_does_not() {
    let (mut rig, ownership) = gateway(&[]);
    ownership.open();
    let announced = |rig: &mut Rig| {
        let mut count = 0;
        for _ in 0..40 {
            rig.now += 100 * MILLISECOND;
            rig.worker.poll(rig.now);
            ownership.begin(group(VIP), rig.now);
            count += announcements(rig);
        }
        count
    };
    assert_eq!(announced(&mut rig), 0);
    answers(&mut rig, &[group(VIP)]);
    assert_eq!(announced(&mut rig), 3);
    answers(&mut rig, &[]);
    assert_eq!(announced(&mut rig), 0);
    answers(&mut rig, &[group(VIP)]);
    assert_eq!(announced(&mut rig), 3, "a group that comes back");
}

#[test]
fn claims_of_other_stations_are_noted_without_an_election() {
    let other = Mac([2, 0, 0, 0, 0xbb, 1]);
    let claim = |vip: &str, from: Mac| {
        let std::net::IpAddr::V4(address) = ip(vip) else { unreachable!() };
        let mut frame = arp_request(address, address);
        frame[6..12].copy_from_slice(&from.0);
        frame[22..28].copy_from_slice(&from.0);
        frame
    };
    let mut advertisement = neighbour_solicitation(VIP_V6.parse().unwrap(), VIP_V6.parse().unwrap());
    advertisement.segment = Segment::Icmp { kind: 136, code: 0, rest: 0x2000_0000 };
    advertisement.source_mac = other;
    let ownership = Arc::<VipOwnership>::default();
    let mut rig = Rig::new();
    rig.worker.own_by(Arc::clone(&ownership), || 0);
    let rows = [
        ("another station has the VIP", claim(VIP, other), Some(VIP)),
        ("the same over IPv6", advertisement.build(), Some(VIP_V6)),
        ("our own announcement", claim(VIP, UPLINK_MAC), None),
        ("an address that is not ours", claim("192.0.2.77", other), None),
        ("a SNAT address, which belongs to no group", claim("10.0.0.3", other), None),
        ("a request for the VIP", arp_request([192, 0, 2, 10].into(), [192, 0, 2, 100].into()), None),
    ];
    for (sentence, frame, vip) in rows {
        rig.put(UPLINK, &frame);
        let expected = vip.map(|vip| VipClaim { link: UPLINK.into(), vip: ip(vip), other, own: UPLINK_MAC });
        assert_eq!(ownership.take_claim(), expected, "{sentence}");
    }
    let answers = VipAnswers { yielded: [ip(VIP)].into(), ..VipAnswers::default() };
    rig.compiler.answer_for(&answers);
    rig.publish();
    assert!(!is_answered(&mut rig, VIP) && is_answered(&mut rig, VIP_V6), "a VIP that is left to another station");
}

/// Whether an ARP request or a solicitation from a backend for a SNAT address is answered.
fn snat_is_answered(rig: &mut Rig, snat: &str) -> bool {
    let frame = match ip(snat) {
        std::net::IpAddr::V4(snat) => arp_request([10, 0, 0, 11].into(), snat),
        std::net::IpAddr::V6(snat) => neighbour_solicitation("fd00::11".parse().unwrap(), snat).build(),
    };
    rig.put(CLUSTER, &frame) == Some(PacketOutcome::Reply(CLUSTER))
}

#[test]
fn a_snat_address_of_a_group_is_answered_by_the_owner_of_the_group_during_its_lease() {
    let (mut rig, ownership) = with_shared_snat(&[0]);
    ownership.open();
    let answered = |rig: &mut Rig| SNAT.map(|group| group.map(|snat| snat_is_answered(rig, snat)));
    assert_eq!(answered(&mut rig), [[false; 2]; 2], "the lease has not begun");
    ownership.begin(0, rig.now);
    assert_eq!(answered(&mut rig), [[true; 2], [false; 2]]);
    let ping = |rig: &mut Rig, snat: &str| rig.put(CLUSTER, &Packet::echo_request("10.0.0.11", snat).build());
    assert_eq!(ping(&mut rig, SNAT[0][0]), Some(PacketOutcome::Reply(CLUSTER)));
    assert_eq!(ping(&mut rig, SNAT[1][0]), Some(PacketOutcome::Drop(DropReason::NoFlow)));
    rig.now += LEASE_NS;
    assert_eq!(answered(&mut rig), [[false; 2]; 2], "the gateway was stopped");
    // The groups change hands.
    ownership.begin(1, rig.now);
    answers(&mut rig, &[1]);
    assert_eq!(answered(&mut rig), [[false; 2], [true; 2]]);
}

#[test]
fn without_shared_snat_addresses_or_an_election_a_gateway_has_all_of_them() {
    let (mut rig, _ownership) = gateway(&[]);
    assert!(snat_is_answered(&mut rig, "10.0.0.3"), "no lease is needed");
    let mut rig = Rig::with_config(Config { shared_snat: true, ..config(1024) });
    (rig.state, rig.network) = (rig::state(), rig::network());
    rig.publish();
    assert!(snat_is_answered(&mut rig, "10.0.0.3") && snat_is_answered(&mut rig, "fd00::3"));
    let packet = Packet::tcp("198.51.100.7:5555", "192.0.2.100:80").flags(dataplane::tcp_flags::SYN).build();
    assert_eq!(rig.put(UPLINK, &packet), Some(PacketOutcome::Forward(CLUSTER)));
}

#[test]
fn a_new_owner_announces_the_snat_addresses_of_its_groups_and_an_expired_one_does_not() {
    let (mut rig, ownership) = with_shared_snat(&[]);
    ownership.open();
    let announced = |rig: &mut Rig, begins: bool| {
        let mut count = [0; 2];
        for _ in 0..40 {
            rig.now += 100 * MILLISECOND;
            if begins {
                (0..2).for_each(|group| ownership.begin(group, rig.now));
            }
            rig.worker.poll(rig.now);
            for frame in rig.sent(CLUSTER).iter().filter(|frame| frame[12..14] == [8, 6] && frame[28..32] != [0; 4]) {
                count[usize::from(frame[31] - 3)] += 1;
            }
        }
        count
    };
    assert_eq!(announced(&mut rig, true), [0, 0]);
    answers(&mut rig, &[1]);
    assert_eq!(announced(&mut rig, true), [0, 3]);
    answers(&mut rig, &[0, 1]);
    assert_eq!(announced(&mut rig, true), [3, 0], "only what is new");
    answers(&mut rig, &[]);
    rig.now += LEASE_NS;
    answers(&mut rig, &[0, 1]);
    assert_eq!(announced(&mut rig, false), [0, 0], "the snapshot says so, and the lease has expired");
    answers(&mut rig, &[0, 1]);
    announced(&mut rig, true);
    defends(&mut rig, &[0, 1], &[1, 2]);
    assert_eq!(announced(&mut rig, true), [0, 3], "of the groups that another gateway advertised, the one it owns");
    defends(&mut rig, &[0, 1], &[1, 2]);
    assert_eq!(announced(&mut rig, true), [0, 0], "only once");
}

#[test]
fn with_an_election_claims_of_others_are_noted_while_the_lease_lasts() {
    let (mut rig, ownership) = with_shared_snat(&[0]);
    ownership.open();
    let other = Mac([2, 0, 0, 0, 0xbb, 1]);
    let claimed = |rig: &mut Rig, snat: &str, sender: Option<&str>| {
        let std::net::IpAddr::V4(address) = ip(snat) else { unreachable!() };
        let sender = sender.map_or(address, |sender| sender.parse().unwrap());
        let mut frame = arp_request(sender, address);
        frame[6..12].copy_from_slice(&other.0);
        frame[22..28].copy_from_slice(&other.0);
        rig.put(CLUSTER, &frame);
        assert_eq!(ownership.take_claim(), None, "groups are noted, not addresses");
        let GroupsClaimed { announced, asked } = ownership.take_claimed_groups();
        (announced, asked)
    };
    assert_eq!(claimed(&mut rig, SNAT[0][0], None), (0, 0), "the lease has not begun");
    ownership.begin(0, rig.now);
    assert_eq!(claimed(&mut rig, SNAT[0][0], None), (1, 0));
    assert_eq!(claimed(&mut rig, SNAT[1][0], None), (0, 0), "of a group of the other gateway");
    assert_eq!(claimed(&mut rig, SNAT[0][0], Some("0.0.0.0")), (0, 1), "a probe of one that has lost it");
    assert_eq!(claimed(&mut rig, SNAT[0][0], Some("10.0.0.11")), (0, 0), "a request");
    rig.now += LEASE_NS;
    assert_eq!(claimed(&mut rig, SNAT[0][0], None), (0, 0), "the lease has ended");
}

#[test]
fn a_group_is_noted_however_many_addresses_were_claimed_before() {
    let (mut rig, ownership) = with_shared_snat(&[0, 1]);
    ownership.open();
    (0..2).for_each(|group| ownership.begin(group, rig.now));
    let probe = |rig: &mut Rig, snat: &str| {
        let std::net::IpAddr::V4(address) = ip(snat) else { unreachable!() };
        let mut frame = arp_request([0, 0, 0, 0].into(), address);
        frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0xbb, 1]);
        frame[22..28].copy_from_slice(&[2, 0, 0, 0, 0xbb, 1]);
        rig.put(CLUSTER, &frame);
    };
    for _ in 0..200 {
        probe(&mut rig, SNAT[0][0]);
    }
    probe(&mut rig, SNAT[1][0]);
    assert_eq!(ownership.take_claimed_groups(), GroupsClaimed { announced: 0, asked: 0b11 });
    assert_eq!(ownership.take_claimed_groups(), GroupsClaimed::default(), "they are taken once");
}

#[test]
fn a_gateway_that_loses_a_group_asks_once_for_each_of_its_addresses() {
    let (mut rig, ownership) = with_shared_snat(&[0, 1]);
    ownership.open();
    let asked = |rig: &mut Rig| {
        let frames: Vec<_> = (0..20)
            .flat_map(|_| {
                rig.now += 100 * MILLISECOND;
                rig.worker.poll(rig.now);
                rig.sent(CLUSTER)
            })
            .collect();
        // Probes by ARP, and solicitations from no address.
        let probes = frames.iter().filter(|frame| frame[12..14] == [8, 6] && frame[28..32] == [0; 4]).map(|frame| frame[41]);
        let solicitations = frames.iter().filter(|frame| frame[12..14] == [0x86, 0xdd] && frame[22..38] == [0; 16]);
        (probes.collect::<Vec<_>>(), solicitations.count())
    };
    assert_eq!(asked(&mut rig), (vec![], 0));
    answers(&mut rig, &[0]);
    assert_eq!(asked(&mut rig), (vec![4], 1));
    answers(&mut rig, &[0]);
    assert_eq!(asked(&mut rig), (vec![], 0), "only once");
    answers(&mut rig, &[0, 1]);
    answers(&mut rig, &[]);
    assert_eq!(asked(&mut rig), (vec![3, 4], 2));
}

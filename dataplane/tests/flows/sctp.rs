//! SCTP (RFC 9260): associations through every mode, packets without association, and refusals.

use dataplane::sctp_chunk::{
    ABORT, COOKIE_ACK, COOKIE_ECHO, DATA, ERROR, HEARTBEAT, INIT, INIT_ACK, SACK, SHUTDOWN_ACK, SHUTDOWN_COMPLETE,
};
use dataplane::testing::{Packet, assert_checksums, fragments};
use dataplane::{DropReason, PacketOutcome, PortIndex};
use proto::Mode;

use crate::rig::{self, CLUSTER, Rig, SECOND, UPLINK};

pub(crate) const CLIENT: &str = "198.51.100.7:5555";
pub(crate) const CLIENT_V6: &str = "[2001:db8:1::7]:5555";
pub(crate) const VIP: &str = "192.0.2.100:80";
pub(crate) const VIP_V6: &str = "[2001:db8::1:0]:80";
pub(crate) const BOTH: [(&str, &str); 2] = [(CLIENT, VIP), (CLIENT_V6, VIP_V6)];
/// The initiate tag of [`Packet::sctp`]'s INIT, which answers to its client carry.
pub(crate) const CLIENT_TAG: u32 = 0x0102_0304;
pub(crate) const BACKEND_TAG: u32 = 0xa1b2_c3d4;

/// Tag and chunks of an untagged frame.
pub(crate) fn tag_and_chunks(frame: &[u8]) -> (u32, &[u8]) {
    let at = if frame[12..14] == [8, 0] { 34 } else { 54 };
    let tag = <[u8; 4]>::try_from(&frame[at + 4..at + 8]).unwrap();
    (u32::from_be_bytes(tag), &frame[at + 12..])
}

/// An association through the gateway, as both ends see it.
pub(crate) struct Association {
    pub(crate) rig: Rig,
    pub(crate) to_backend: Packet,
    pub(crate) to_client: Packet,
}

impl Association {
    pub(crate) fn begin(mut rig: Rig, client: &str, vip: &str) -> Self {
        let to_backend = Packet::sctp(client, vip);
        let sent = rig.forward(UPLINK, &to_backend.build());
        assert_checksums(&sent);
        assert_eq!(tag_and_chunks(&sent), (0, &to_backend.payload[..]), "tag and chunks stay");
        let (source, destination) = rig::ends(&sent);
        assert_eq!(destination.port(), 8080);
        let to_client = Packet::sctp(&destination.to_string(), &source.to_string());
        Self { rig, to_backend, to_client }
    }

    pub(crate) fn established(rig: Rig, client: &str, vip: &str) -> Self {
        let mut association = Self::begin(rig, client, vip);
        for (from_client, chunk) in [(false, INIT_ACK), (true, COOKIE_ECHO), (false, COOKIE_ACK)] {
            association.says(from_client, chunk);
        }
        association
    }

    /// One end sends a chunk; returns what leaves at the other.
    pub(crate) fn says(&mut self, from_client: bool, chunk: u8) -> Vec<u8> {
        let (port, packet) = self.packet(from_client, chunk);
        let sent = self.rig.forward(port, &packet.build());
        assert_checksums(&sent);
        assert_eq!(tag_and_chunks(&sent), tag_and_chunks(&packet.build()), "tag and chunks stay");
        sent
    }

    pub(crate) fn packet(&self, from_client: bool, chunk: u8) -> (PortIndex, Packet) {
        let (port, packet, tag) = match from_client {
            true => (UPLINK, &self.to_backend, BACKEND_TAG),
            false => (CLUSTER, &self.to_client, CLIENT_TAG),
        };
        let mut packet = packet.clone().chunk(tag, chunk);
        if chunk == INIT_ACK {
            packet.payload[4..8].copy_from_slice(&BACKEND_TAG.to_be_bytes());
        }
        (port, packet)
    }

    pub(crate) fn waits(&mut self, seconds: u64) {
        for _ in 0..64 {
            self.rig.now += seconds * SECOND / 64;
            self.rig.worker.poll(self.rig.now);
        }
    }

    pub(crate) fn flows(&mut self) -> u64 {
        self.rig.settle();
        self.rig.counters.flows.get()
    }
}

#[test]
fn an_association_goes_there_and_back_with_its_ports_rewritten() {
    for mode in [Mode::Nat, Mode::Dnat] {
        for (client, vip) in BOTH {
            let mut association = Association::established(Rig::with_mode(mode), client, vip);
            let back = association.says(false, DATA);
            assert_eq!(rig::ends(&back), (vip.parse().unwrap(), client.parse().unwrap()));
            let there = association.says(true, SACK);
            let (source, _) = rig::ends(&there);
            assert_eq!(source == client.parse().unwrap(), mode == Mode::Dnat, "{mode:?}: the backend sees the client or us");
            assert_eq!(association.flows(), 1);
        }
    }
}

#[test]
fn a_client_on_the_link_is_asked_for_while_its_association_is_in_use() {
    let mut association = Association::established(Rig::new(), "192.0.2.10:5555", VIP);
    while association.rig.neighbour_requests.pop().is_some() {}
    let mut asked = Vec::new();
    for _ in 0..3 {
        association.says(true, HEARTBEAT);
        association.rig.settle();
        asked.extend(std::iter::from_fn(|| association.rig.neighbour_requests.pop()));
    }
    assert!(asked.contains(&(UPLINK.into(), rig::ip("192.0.2.10"))), "{asked:?}");
}

#[test]
fn one_way_modes_forward_sctp_unchanged() {
    for mode in [Mode::Dsr, Mode::Ipip, Mode::Gue] {
        for (client, vip) in BOTH {
            let mut rig = Rig::with_mode(mode);
            let mut seen = Vec::new();
            for packet in [Packet::sctp(client, vip), Packet::sctp(client, vip).chunk(BACKEND_TAG, COOKIE_ECHO)] {
                let sent = rig.forward(UPLINK, &packet.build());
                let whole = Packet { hop_limit: packet.hop_limit - 1, ..packet }.build();
                let carried = if mode == Mode::Dsr { 14 } else { 34 };
                let found = sent[carried.min(sent.len())..].windows(whole.len() - 14).any(|bytes| *bytes == whole[14..]);
                assert!(found, "{mode:?}: {sent:02x?}");
                seen.push(sent[..6].to_vec());
            }
            assert_eq!(seen[0], seen[1], "one backend");
            rig.settle();
            assert_eq!(rig.counters.flows.get(), 1);
        }
    }
}

#[test]
fn an_idle_association_outlives_its_handshake_only_if_the_backend_accepted_the_cookie() {
    let mut opening = Association::begin(Rig::new(), CLIENT, VIP);
    opening.says(false, INIT_ACK);
    opening.says(true, COOKIE_ECHO);
    opening.waits(60);
    assert_eq!(opening.flows(), 0);

    let mut established = Association::established(Rig::new(), CLIENT, VIP);
    established.waits(3000);
    assert_eq!(established.flows(), 1);
    established.says(true, HEARTBEAT);
    established.waits(3000);
    assert_eq!(established.flows(), 1);
    established.waits(1000);
    assert_eq!(established.flows(), 0);
}

#[test]
fn a_shutdown_or_an_abort_ends_an_association_soon() {
    let endings: [&[(bool, u8)]; 3] =
        [&[(true, SHUTDOWN_ACK), (false, SHUTDOWN_COMPLETE)], &[(false, ABORT)], &[(true, DATA), (true, ABORT)]];
    for ending in endings {
        let mut association = Association::established(Rig::new(), CLIENT, VIP);
        for &(from_client, chunk) in ending {
            association.says(from_client, chunk);
        }
        association.waits(30);
        assert_eq!(association.flows(), 0, "{ending:?}");
    }
    let mut forged = Association::established(Rig::new(), CLIENT, VIP);
    forged.says(true, ABORT);
    forged.says(false, DATA);
    forged.waits(30);
    assert_eq!(forged.flows(), 1, "data after a forged ABORT restores it");
}

#[test]
fn an_init_on_a_closing_association_or_one_without_its_backend_chooses_a_backend_again() {
    let mut association = Association::established(Rig::new(), CLIENT, VIP);
    let first = association.to_client.source;
    association.rig.forward(UPLINK, &Packet::sctp(CLIENT, VIP).build());
    assert_eq!(association.rig.counters.flows.get(), 1, "a restart of the client is between the two ends");
    let others: Vec<u8> = rig::BACKENDS.into_iter().filter(|n| *n != rig::last_byte(first)).collect();
    association.rig.keep_backends("web", &others);
    assert_eq!(rig::ends(&association.says(true, DATA)).1.ip(), first, "what has begun goes on to a draining backend");
    let again = rig::ends(&association.rig.forward(UPLINK, &Packet::sctp(CLIENT, VIP).build()));
    assert_ne!(again.1.ip(), first);
}

#[test]
fn in_a_full_table_an_association_that_the_backend_did_not_take_yields() {
    let mut rig = Rig::with_flows(2);
    rig.forward(UPLINK, &Packet::sctp("198.51.100.8:1", VIP).build());
    let mut association = Association::established(rig, CLIENT, VIP);
    for n in 0..8 {
        association.rig.forward(UPLINK, &Packet::sctp(&format!("198.51.100.9:{}", 100 + n), VIP).build());
    }
    association.says(false, DATA);
    assert_eq!(association.rig.drops(DropReason::FlowTableFull), 0);
}

/// A packet, its outcome, and the single chunk of the answer with its tag.
struct Row {
    sentence: &'static str,
    port: PortIndex,
    packet: Packet,
    outcome: PacketOutcome,
    answer: Option<(u32, [u8; 4])>,
}

fn check(rows: Vec<Row>) {
    for Row { sentence, port, packet, outcome, answer } in rows {
        let mut rig = Rig::new();
        assert_eq!(rig.put(port, &packet.build()), Some(outcome), "{sentence}");
        let sent = rig.sent(port);
        let found: Vec<_> = sent.iter().map(|frame| tag_and_chunks(frame)).collect();
        let expected: Vec<_> = answer.iter().map(|(tag, chunk)| (*tag, &chunk[..])).collect();
        assert_eq!(found, expected, "{sentence}");
        for frame in &sent {
            assert_checksums(frame);
            let (from, to) = rig::ends(&packet.build());
            assert_eq!(rig::ends(frame), (to, from), "{sentence}");
        }
    }
}

#[test]
fn packets_without_association_are_answered_by_rfc_9260_section_8_4() {
    let tag = 0x0a0b_0c0d;
    let of_none = |chunk: u8| Packet::sctp(CLIENT, VIP).chunk(tag, chunk);
    let with = |sentence, packet, answer| Row {
        sentence,
        port: UPLINK,
        packet,
        outcome: PacketOutcome::Drop(DropReason::NoFlow),
        answer,
    };
    let abort = Some((tag, [ABORT, 1, 0, 4]));
    let bundled = |first: u8, second: u8| {
        let mut packet = of_none(first);
        packet.payload.extend([second, 0, 0, 4]);
        packet
    };
    let error = |cause: u8| of_none(ERROR).payload(&[ERROR, 0, 0, 12, 0, cause, 0, 8, 0, 0, 0, 0]);
    let to_snat = Packet::sctp("10.0.0.11:8080", "10.0.0.3:2000");
    let of_backend = |packet, answer| Row { port: CLUSTER, ..with("to a SNAT port of no flow", packet, answer) };
    check(vec![
        with("data", of_none(DATA), abort),
        with("data over IPv6", Packet::sctp(CLIENT_V6, VIP_V6).chunk(tag, DATA), abort),
        with("a heartbeat", of_none(HEARTBEAT), abort),
        with("a cookie", of_none(COOKIE_ECHO), abort),
        with("an error", error(1), abort),
        with("the end of a shutdown gets its answer", of_none(SHUTDOWN_ACK), Some((tag, [SHUTDOWN_COMPLETE, 1, 0, 4]))),
        with("an ABORT gets none", of_none(ABORT), None),
        with("nor behind another chunk", bundled(ERROR, ABORT), None),
        with("nor does the last packet of an association", of_none(SHUTDOWN_COMPLETE), None),
        with("nor an answer to a cookie", of_none(COOKIE_ACK), None),
        with("nor a stale cookie", error(3), None),
        with("chunks that claim more than there is", of_none(DATA).payload(&[0, 0, 255, 255]), abort),
        of_backend(to_snat.clone().chunk(tag, DATA), abort),
        of_backend(to_snat.clone().chunk(tag, INIT_ACK), abort),
        of_backend(to_snat.clone().chunk(tag, ABORT), None),
        of_backend(to_snat, Some((CLIENT_TAG, [ABORT, 0, 0, 4]))),
    ]);
}

#[test]
fn a_closed_port_refuses() {
    let refused = |sentence, to: &str, chunk: Option<u8>, outcome, answer| {
        let init = Packet::sctp(if to.starts_with('[') { CLIENT_V6 } else { CLIENT }, to);
        let packet = chunk.map_or_else(|| init.clone(), |kind| init.clone().chunk(9, kind));
        Row { sentence, port: UPLINK, packet, outcome, answer }
    };
    let reply = PacketOutcome::Reply(UPLINK);
    let to_init = Some((CLIENT_TAG, [ABORT, 0, 0, 4]));
    check(vec![
        refused("INIT, under its own tag", "192.0.2.100:81", None, reply, to_init),
        refused("INIT over IPv6", "[2001:db8::1:0]:81", None, reply, to_init),
        refused("INIT to a frontend of UDP", "192.0.2.101:53", None, reply, to_init),
        refused("data, under the tag that it came with", "192.0.2.100:81", Some(DATA), reply, Some((9, [ABORT, 1, 0, 4]))),
        refused("an ABORT is not answered", "192.0.2.100:81", Some(ABORT), PacketOutcome::Drop(DropReason::NoFlow), None),
        refused("an unused address stays silent", "192.0.2.119:80", None, PacketOutcome::Drop(DropReason::UnknownVip), None),
        refused("the twin's own are Linux's", "192.0.2.2:80", None, PacketOutcome::Linux(UPLINK), None),
    ]);
    let mut rig = Rig::new();
    let untagged = Packet::sctp(CLIENT, "192.0.2.100:81").payload(&[&[INIT, 0, 0, 20][..], &[0; 16]].concat());
    assert_eq!(
        rig.put(UPLINK, &untagged.build()),
        Some(PacketOutcome::Drop(DropReason::AnswerLimited)),
        "INIT without a tag of its own"
    );
}

#[test]
fn in_mode_dnat_mid_stream_packets_go_where_a_new_association_would() {
    for (client, vip) in BOTH {
        let (mut first, mut restarted) = (Rig::with_mode(Mode::Dnat), Rig::with_mode(Mode::Dnat));
        let before = rig::ends(&first.forward(UPLINK, &Packet::sctp(client, vip).build()));
        let after = restarted.forward(UPLINK, &Packet::sctp(client, vip).chunk(BACKEND_TAG, DATA).build());
        assert_checksums(&after);
        assert_eq!(rig::ends(&after), before);

        let mut restarted = Rig::with_mode(Mode::Dnat);
        let reply = Packet::sctp(&before.1.to_string(), client).chunk(CLIENT_TAG, DATA);
        let back = restarted.forward(CLUSTER, &reply.build());
        assert_checksums(&back);
        assert_eq!(rig::ends(&back), (vip.parse().unwrap(), client.parse().unwrap()));
    }
}

#[test]
fn fragments_cannot_pass_a_port_rewrite() {
    for (client, vip) in BOTH {
        let big = Packet::sctp(client, vip).chunk(BACKEND_TAG, DATA).payload(&[&[DATA, 3, 4, 0][..], &[7; 1020]].concat());
        let parts = fragments(&big.build(), 512, 9);
        let mut association = Association::established(Rig::new(), client, vip);
        for part in &parts {
            assert_eq!(association.rig.put(UPLINK, part), Some(PacketOutcome::Drop(DropReason::SctpFragment)));
        }
        assert_eq!(association.rig.service_drops("web", DropReason::SctpFragment), 1, "the first one tells the service");
        let init = Packet::sctp(client, vip);
        let long_init = Packet { payload: [&init.payload[..2], &[2, 0], &init.payload[4..], &[0; 492]].concat(), ..init };
        let mut rig = Rig::new();
        for part in &fragments(&long_init.build(), 256, 10) {
            assert_eq!(rig.put(UPLINK, part), Some(PacketOutcome::Drop(DropReason::SctpFragment)));
        }
        assert_eq!((rig.counters.flows.get(), rig.counters.snat_ports.get()), (0, 0), "nothing remains of it");
        let mut rig = Rig::with_mode(Mode::Dsr);
        rig.forward(UPLINK, &Packet::sctp(client, vip).build());
        for part in &parts {
            assert_eq!(rig.put(UPLINK, part), Some(PacketOutcome::Forward(CLUSTER)), "without a rewrite they do");
        }
    }
}

#[test]
fn frames_that_are_no_sctp_are_malformed() {
    let mut bundled = Packet::sctp(CLIENT, VIP);
    bundled.payload.extend([SACK, 0, 0, 4]);
    let rows = [
        ("no chunk", Packet::sctp(CLIENT, VIP).payload(&[])),
        ("a chunk shorter than its header", Packet::sctp(CLIENT, VIP).chunk(9, DATA).payload(&[DATA, 0, 0, 3])),
        ("an INIT under a tag", Packet::sctp(CLIENT, VIP).chunk(9, INIT)),
        ("another chunk under the tag 0", Packet::sctp(CLIENT, VIP).chunk(0, SACK)),
        ("an INIT with another chunk behind it", bundled),
        ("an INIT cut short", Packet::sctp(CLIENT, VIP).payload(&[INIT, 0, 0, 20, 1, 2, 3, 4])),
        ("an INIT that claims to be shorter", Packet::sctp(CLIENT, VIP).payload(&[INIT, 0, 0, 8, 1, 2, 3, 4])),
    ];
    for (sentence, packet) in rows {
        assert_eq!(Rig::new().put(UPLINK, &packet.build()), Some(PacketOutcome::Drop(DropReason::Malformed)), "{sentence}");
    }
}

/// A chunk that lists an IPv4, an IPv6 and a host name address beside a cookie, and the same with hidden addresses.
fn with_addresses(packet: &Packet, kind: u8) -> [Packet; 2] {
    let list = |ipv4: &[u8], ipv6: &[u8], host: &[u8]| {
        [ipv4, &[0, 8, 10, 9, 9, 9], ipv6, &[0, 20], &[0xfd; 16], &[0, 7, 0, 12, 0, 5, 0, 8, 10, 9, 9, 9], host, &[0, 8], b"host"]
            .concat()
    };
    let padding = [0x80, 5];
    [list(&[0, 5], &[0, 6], &[0, 11]), list(&padding, &padding, &padding)].map(|parameters| {
        let len = u16::try_from(20 + parameters.len()).unwrap().to_be_bytes();
        let fixed = [&[kind, 0][..], &len, &packet.payload[4..20]].concat();
        packet.clone().payload(&[fixed, parameters].concat())
    })
}

#[test]
fn further_addresses_of_both_ends_are_hidden_where_packets_are_rewritten() {
    for mode in [Mode::Nat, Mode::Dnat] {
        for (client, vip) in BOTH {
            let mut association = Association::begin(Rig::with_mode(mode), client, vip);
            // The INIT again, the answer, and an INIT of the backend at the same time.
            let rows = [
                (UPLINK, association.to_backend.clone(), INIT),
                (CLUSTER, association.packet(false, INIT_ACK).1, INIT_ACK),
                (CLUSTER, association.to_client.clone(), INIT),
            ];
            for (n, (port, packet, kind)) in rows.into_iter().enumerate() {
                let [listed, hidden] = with_addresses(&packet, kind);
                let sent = association.rig.forward(port, &listed.build());
                assert_checksums(&sent);
                assert_eq!(tag_and_chunks(&sent), tag_and_chunks(&hidden.build()), "{mode:?}, {client}, row {n}");
            }
            association.rig.settle();
            assert_eq!(association.rig.counters.sctp_hidden_addresses.get(), 9, "{mode:?}");
        }
    }
}

#[test]
fn one_way_modes_leave_the_addresses_of_a_peer() {
    for mode in [Mode::Dsr, Mode::Ipip, Mode::Gue] {
        for (client, vip) in BOTH {
            let mut rig = Rig::with_mode(mode);
            let [listed, _] = with_addresses(&Packet::sctp(client, vip), INIT);
            let sent = rig.forward(UPLINK, &listed.build());
            assert!(sent.ends_with(&listed.payload), "{mode:?}: {sent:02x?}");
            rig.settle();
            assert_eq!(rig.counters.sctp_hidden_addresses.get(), 0);
        }
    }
}

#[test]
fn a_later_fragment_teaches_no_tag() {
    for (client, vip) in BOTH {
        let mut rig = Rig::with_mode(Mode::Dsr);
        let from = Packet::sctp(client, vip);
        for chunk in [COOKIE_ECHO, DATA] {
            rig.forward(UPLINK, &from.clone().chunk(BACKEND_TAG, chunk).build());
            rig.now += 2 * SECOND;
        }
        let mut long = from.clone().chunk(BACKEND_TAG, DATA);
        long.payload.resize(2000, 7);
        for part in &fragments(&long.build(), 1024, 9) {
            rig.forward(UPLINK, part);
        }
        // The end of a stranger, who knows no tag, would shorten the limit of an hour to five minutes.
        rig.forward(UPLINK, &from.clone().chunk(BACKEND_TAG ^ 1, ABORT).build());
        for _ in 0..64 {
            rig.now += 30 * SECOND;
            rig.worker.poll(rig.now);
        }
        rig.settle();
        assert_eq!(rig.counters.flows.get(), 1, "{client}");
    }
}

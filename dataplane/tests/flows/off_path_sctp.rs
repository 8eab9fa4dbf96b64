//! What a stranger off the path of an SCTP association may change by spoofed packets: nothing, whatever chunk and tag he
//! takes, from either side, in every state and mode; at most a timer that the next genuine packet restores.

use std::net::SocketAddr;

use dataplane::flow::{Flow, FlowState, FlowView, Tick, VerificationTags};
use dataplane::forward::{About, FamilyInquiry, Inquired};
use dataplane::sctp_chunk::{
    ABORT, COOKIE_ACK, COOKIE_ECHO, DATA, ERROR, HEARTBEAT, HEARTBEAT_ACK, I_DATA, INIT, INIT_ACK, SACK, SHUTDOWN_ACK,
    SHUTDOWN_COMPLETE,
};
use dataplane::testing::Packet;
use dataplane::{Address, PacketOutcome, SavedAt, SavedFlows};
use proto::Mode;

use crate::rig::{self, CLUSTER, Rig, SECOND, UPLINK};
use crate::sctp::{Association, BACKEND_TAG, BOTH, CLIENT, CLIENT_TAG, VIP, tag_and_chunks};

const WRONG: u32 = 0x5eed_5eed;
/// Chunks that may begin a packet, and their flags.
const CHUNKS: [(u8, u8); 15] = [
    (DATA, 3),
    (INIT, 0),
    (INIT_ACK, 0),
    (SACK, 0),
    (HEARTBEAT, 0),
    (HEARTBEAT_ACK, 0),
    (ABORT, 0),
    (ABORT, 1),
    (SHUTDOWN_ACK, 0),
    (ERROR, 0),
    (COOKIE_ECHO, 0),
    (COOKIE_ACK, 0),
    (SHUTDOWN_COMPLETE, 0),
    (SHUTDOWN_COMPLETE, 1),
    (I_DATA, 0),
];

/// A spoofed packet with this chunk on the tuple of another one.
fn spoofed(genuine: &Packet, (chunk, flags): (u8, u8), tag: u32) -> Packet {
    let mut packet = genuine.clone().chunk(if chunk == INIT { 0 } else { tag }, chunk);
    packet.payload[1] = flags;
    if matches!(chunk, INIT | INIT_ACK) {
        packet.payload[4..8].copy_from_slice(&WRONG.to_be_bytes());
    }
    packet
}

fn only_flow<A: Address>(flows: &[Flow<A>], now: Tick) -> (FlowView, VerificationTags) {
    assert_eq!(flows.len(), 1);
    (FlowView::of(&flows[0], now), flows[0].tags)
}

impl Association {
    /// A stranger sends a packet; it is passed on or dropped, and nothing else leaves but that.
    fn is_attacked(&mut self, from_client: bool, chunk: (u8, u8), tag: u32) {
        let (port, genuine) = self.packet(from_client, DATA);
        let outcome = self.rig.put(port, &spoofed(&genuine, chunk, tag).build());
        let sent = [UPLINK, CLUSTER].map(|port| self.rig.sent(port).len());
        let passed = [UPLINK, CLUSTER].map(|port| usize::from(outcome == Some(PacketOutcome::Forward(port))));
        assert_eq!(sent, passed, "{chunk:?} from the client {from_client}: {outcome:?}");
    }

    /// The only flow.
    fn flow(&mut self) -> (FlowView, VerificationTags) {
        let asked = match self.to_backend.source.is_ipv4() {
            true => Inquired::V4(FamilyInquiry::new(About::Flows { from: 0 })),
            false => Inquired::V6(FamilyInquiry::new(About::Flows { from: 0 })),
        };
        let answer = self.rig.ask(asked);
        let now = Tick::at(answer.now_ns);
        match &answer.inquired {
            Inquired::V4(answered) => only_flow(&answered.flows, now),
            Inquired::V6(answered) => only_flow(&answered.flows, now),
            Inquired::Capture(_) | Inquired::End(_) | Inquired::Watch(_) => panic!("not what was asked"),
        }
    }

    /// Each end's address and port as the other knows them.
    fn ends(&mut self, chunk: u8) -> [(SocketAddr, SocketAddr); 2] {
        [true, false].map(|from_client| rig::ends(&self.says(from_client, chunk)))
    }
}

/// A dnat or one-way flow whose gateway was started in the middle of it.
fn adopted(mode: Mode, (client, vip): (&str, &str)) -> Association {
    let before = Association::begin(Rig::with_mode(mode), client, vip);
    let mut association = Association { rig: Rig::with_mode(mode), ..before };
    association.says(true, DATA);
    association.says(false, SACK);
    association
}

/// Tags that a stranger may try for a chunk: one that nobody has, and where it proves nothing that of the other direction.
fn tags_to_try(from_client: bool, (_, flags): (u8, u8)) -> Vec<u32> {
    let other_way = if from_client { CLIENT_TAG } else { BACKEND_TAG };
    if flags == 1 { vec![WRONG, if from_client { BACKEND_TAG } else { CLIENT_TAG }] } else { vec![WRONG, other_way] }
}

#[test]
fn a_wrong_tag_changes_no_association_and_both_ends_go_on_with_heartbeats_alone() {
    for mode in [Mode::Nat, Mode::Dnat] {
        for (client, vip) in BOTH {
            let mut association = Association::established(Rig::with_mode(mode), client, vip);
            let ends = association.ends(DATA);
            let tags = VerificationTags { client: CLIENT_TAG, backend: BACKEND_TAG, proven: true };
            for (from_client, chunk) in [true, false].into_iter().flat_map(|side| CHUNKS.map(|chunk| (side, chunk))) {
                for tag in tags_to_try(from_client, chunk) {
                    association.is_attacked(from_client, chunk, tag);
                    let (flow, known) = association.flow();
                    assert_eq!((flow.state, known), (FlowState::Sctp, tags), "{mode:?} {chunk:?} {from_client}");
                }
            }
            for _ in 0..8 {
                association.waits(17);
                assert_eq!(association.ends(HEARTBEAT), ends, "{mode:?}");
            }
            assert_eq!(association.flows(), 1);
            association.rig.assert_account();
        }
    }
}

#[test]
fn a_stranger_during_the_handshake_neither_ends_nor_moves_the_association() {
    const HANDSHAKE: [(bool, u8); 3] = [(false, INIT_ACK), (true, COOKIE_ECHO), (false, COOKIE_ACK)];
    for (client, vip) in BOTH {
        for (at, chunk) in (0..=HANDSHAKE.len()).flat_map(|at| CHUNKS.map(|chunk| (at, chunk))) {
            let mut association = Association::begin(Rig::new(), client, vip);
            for (step, (from_client, genuine)) in HANDSHAKE.into_iter().enumerate() {
                if step == at {
                    association.is_attacked(true, chunk, WRONG);
                }
                association.says(from_client, genuine);
            }
            let ends = association.ends(HEARTBEAT);
            if at == HANDSHAKE.len() {
                association.is_attacked(true, chunk, WRONG);
            }
            association.is_attacked(true, (ABORT, 0), WRONG);
            for _ in 0..8 {
                association.waits(17);
                assert_eq!(association.ends(HEARTBEAT), ends, "{chunk:?} before step {at}");
            }
            assert_eq!(association.flows(), 1, "{chunk:?} before step {at}");
        }
    }
}

#[test]
fn a_flow_adopted_in_mid_stream_learns_its_tags_and_a_stranger_shortens_its_limit_at_most() {
    for (client, vip) in BOTH {
        let mut association = adopted(Mode::Dnat, (client, vip));
        let learnt = VerificationTags { client: CLIENT_TAG, backend: BACKEND_TAG, proven: false };
        assert_eq!(association.flow(), (association.flow().0, learnt));
        for (from_client, chunk) in [true, false].into_iter().flat_map(|side| CHUNKS.map(|chunk| (side, chunk))) {
            if matches!(chunk.0, ABORT | SHUTDOWN_ACK | SHUTDOWN_COMPLETE) {
                for tag in tags_to_try(from_client, chunk) {
                    association.is_attacked(from_client, chunk, tag);
                    assert_eq!(association.flow().0.state, FlowState::Sctp, "{chunk:?} under a wrong tag");
                }
            }
            // With a packet that goes on, the stranger has his tag learnt. Then he ends the association under it.
            association.is_attacked(from_client, chunk, WRONG);
            association.is_attacked(from_client, (ABORT, 0), WRONG);
            association.waits(90);
            let ends = association.ends(HEARTBEAT);
            assert_eq!(association.flow(), (association.flow().0, learnt), "{chunk:?}: the genuine packets restore all");
            assert_eq!(association.flow().0.state, FlowState::Sctp, "{chunk:?}");
            association.waits(90);
            assert_eq!(association.ends(SACK), ends);
        }
        assert_eq!(association.flows(), 1);
        association.says(true, ABORT);
        assert_eq!(association.flow().0.state, FlowState::SctpHalfClosed, "the client's own");
        association.waits(400);
        assert_eq!(association.flows(), 0);
    }
}

#[test]
fn a_one_way_flow_stays_at_its_backend_whatever_a_stranger_sends() {
    let modes = [Mode::Dsr, Mode::Ipip, Mode::Gue];
    for (mode, (client, vip)) in modes.into_iter().flat_map(|mode| BOTH.map(|ends| (mode, ends))) {
        for chunk in CHUNKS {
            let mut rig = Rig::with_mode(mode);
            let genuine = Packet::sctp(client, vip);
            let first = rig.forward(UPLINK, &genuine.build())[..6].to_vec();
            let heartbeat = genuine.clone().chunk(BACKEND_TAG, HEARTBEAT).build();
            for _ in 0..3 {
                rig.now += SECOND;
                rig.forward(UPLINK, &heartbeat);
            }
            for tag in [WRONG, CLIENT_TAG].into_iter().filter(|tag| chunk.1 == 0 || *tag == WRONG) {
                rig.forward(UPLINK, &spoofed(&genuine, chunk, tag).build());
            }
            rig.forward(UPLINK, &spoofed(&genuine, (ABORT, 0), WRONG).build());
            rig.forward(UPLINK, &spoofed(&genuine, (INIT, 0), WRONG).build());
            // Another backend would get a packet whose flow is forgotten.
            let others: Vec<u8> = rig::BACKENDS.into_iter().filter(|n| *n != first[5]).collect();
            rig.keep_backends("web", &others);
            for _ in 0..30 {
                rig.now += SECOND;
                rig.worker.poll(rig.now);
            }
            assert_eq!(rig.forward(UPLINK, &heartbeat)[..6], first[..], "{mode:?} {chunk:?}");
            assert_eq!(rig.counters.flows.get(), 1, "{mode:?} {chunk:?}");
        }
    }
}

#[test]
fn tags_outlive_a_restart() {
    const SEED: u64 = 7;
    let at = |boottime_ns| SavedAt { boot: [5; 16], boottime_ns };
    for (client, vip) in BOTH {
        let mut before = Association::established(Rig::new(), client, vip);
        let ends = before.ends(DATA);
        let parts = [before.rig.worker.save(before.rig.now)];
        let header = SavedFlows::header(SEED, true, at(SECOND), &parts);
        let bytes: Vec<u8> = [&header[..], &parts[0]].concat();
        let mut rig = Rig::before_state(1024);
        (rig.state, rig.network) = (rig::state(), rig::network());
        let saved = SavedFlows::read(bytes, at(2 * SECOND), rig.now).unwrap();
        rig.worker.restore(saved.into());
        rig.publish();
        let mut after = Association { rig, ..before };
        assert_eq!(after.flow().1, VerificationTags { client: CLIENT_TAG, backend: BACKEND_TAG, proven: true });
        after.is_attacked(true, (ABORT, 0), WRONG);
        after.is_attacked(false, (SHUTDOWN_COMPLETE, 1), WRONG);
        after.waits(17);
        assert_eq!(after.ends(HEARTBEAT), ends);
        after.says(false, ABORT);
        after.waits(17);
        assert_eq!(after.flows(), 0, "the backend's own");
    }
}

#[test]
fn an_end_under_the_right_tag_gets_the_gateway_s_own_answer_only_when_the_flow_is_over() {
    let mut association = Association::established(Rig::new(), CLIENT, VIP);
    association.is_attacked(true, (ABORT, 0), WRONG);
    association.waits(17);
    association.says(true, HEARTBEAT);
    association.says(true, ABORT);
    association.waits(17);
    for from_client in [true, false] {
        let (port, packet) = association.packet(from_client, HEARTBEAT);
        association.rig.put(port, &packet.build());
        let sent = association.rig.sent(port);
        let tag = if from_client { BACKEND_TAG } else { CLIENT_TAG };
        assert_eq!(sent.iter().map(|frame| tag_and_chunks(frame)).collect::<Vec<_>>(), [(tag, &[ABORT, 1, 0, 4][..])]);
    }
}

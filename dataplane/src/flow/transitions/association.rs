//! State changes of SCTP associations, by verification tags (RFC 9260 section 8.5).
//!
//! A stranger off the path knows no tag, so a packet under a wrong tag changes nothing. The tags are *proven* where
//! this gateway has seen the handshake: the client's in its INIT, the backend's in its INIT ACK under the client's, and
//! each used by the other end. Proven tags stay: if an end starts anew under another tag (section 5.2), its flow goes
//! on, and only its idle limit ends it. The tags of an association whose handshake was not seen, as one that was
//! adopted in mid-stream, are learnt for each direction from the last packet that goes on. A stranger may have sent it,
//! so an end by such a tag only shortens the idle limit, and any packet that goes on restores it. The same holds in
//! one-way modes, where the backend's packets are never seen.
//!
//! Not here: where tags are stored, and packets without association (`forward`).

use super::segment::Segment;
use crate::flow::entry::{Flow, VerificationTags};
use crate::flow::state::{Direction, FlowState, next_state};
use crate::wire::{Address, Transport, sctp_chunk};

/// The verification tag of a packet, compared with the flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TagCheck {
    /// It is the tag that the flow has.
    Right,
    /// It is another tag.
    Wrong,
    /// The flow has none to compare.
    Unknown,
}

/// Whether the sender of this first chunk has ended the association.
const fn ends(chunk: u8) -> bool {
    matches!(chunk, sctp_chunk::ABORT | sctp_chunk::SHUTDOWN_ACK | sctp_chunk::SHUTDOWN_COMPLETE)
}

/// The tags of a flow with this first packet, which the client sends.
pub(crate) fn tags_of_first(transport: Transport, segment: Segment) -> VerificationTags {
    let none = VerificationTags::default();
    match transport {
        Transport::Sctp { chunk: sctp_chunk::INIT } => VerificationTags { client: segment.acknowledgement, ..none },
        Transport::Sctp { chunk } if !ends(chunk) => VerificationTags { backend: segment.sequence, ..none },
        _ => none,
    }
}

/// The state after a packet with this first chunk. Updates the tags of the flow.
pub(super) fn next<A: Address>(flow: &mut Flow<A>, chunk: u8, direction: Direction, segment: Segment) -> FlowState {
    match flow.state {
        FlowState::SctpOpening if flow.mode.is_two_way() => shake_hands(flow, chunk, direction, segment),
        FlowState::SctpOpening => one_way(flow, chunk, segment),
        FlowState::SctpFromBackend => {
            learn(&mut flow.tags, chunk, direction, segment);
            next_state(flow.state, Transport::Sctp { chunk }, direction)
        }
        _ => go_on(flow, chunk, direction, segment),
    }
}

/// The tag under which packets in this direction are sent.
fn tag_of(tags: &mut VerificationTags, direction: Direction) -> &mut u32 {
    match direction {
        Direction::ToBackend => &mut tags.backend,
        Direction::ToClient => &mut tags.client,
    }
}

/// Learns the tag of a packet that goes on. An INIT has the tag 0, and the end of an association may carry a reflected
/// tag.
fn learn(tags: &mut VerificationTags, chunk: u8, direction: Direction, segment: Segment) {
    if chunk != sctp_chunk::INIT && !ends(chunk) {
        *tag_of(tags, direction) = segment.sequence;
    }
}

/// A packet of an association that its backend has not taken yet.
///
/// A stranger may add INITs and other packets of the client. So an INIT changes nothing here: which one counts is what
/// the backend tells. Tags that do not fit together are no proof.
fn shake_hands<A: Address>(flow: &mut Flow<A>, chunk: u8, direction: Direction, segment: Segment) -> FlowState {
    let next = next_state(flow.state, Transport::Sctp { chunk }, direction);
    let (tags, tag) = (&mut flow.tags, segment.sequence);
    match (direction, chunk) {
        (_, sctp_chunk::INIT) => {}
        (Direction::ToClient, sctp_chunk::INIT_ACK) if tag == tags.client => tags.backend = segment.acknowledgement,
        (Direction::ToBackend, _) if !ends(chunk) && tag != tags.backend => {
            *tags = VerificationTags { client: 0, backend: tag, proven: false };
        }
        (Direction::ToClient, _) if next == FlowState::Sctp => {
            tags.proven = tag == tags.client && tags.backend != 0;
            tags.client = tag;
        }
        _ => {}
    }
    next
}

/// A packet of the client of an unconfirmed one-way flow. A repeated INIT is not evidence of an answer.
fn one_way<A: Address>(flow: &mut Flow<A>, chunk: u8, segment: Segment) -> FlowState {
    match chunk {
        sctp_chunk::INIT => FlowState::SctpOpening,
        _ if ends(chunk) => FlowState::SctpHalfClosed,
        _ => {
            flow.tags.backend = segment.sequence;
            FlowState::Sctp
        }
    }
}

/// A packet of a confirmed association.
fn go_on<A: Address>(flow: &mut Flow<A>, chunk: u8, direction: Direction, segment: Segment) -> FlowState {
    let check = check(flow.tags, chunk, direction, segment);
    match (flow.tags.proven, ends(chunk)) {
        (true, _) if check != TagCheck::Right => flow.state,
        (true, true) => FlowState::SctpClosing,
        (true, false) if flow.state == FlowState::SctpClosing && !matches!(chunk, sctp_chunk::DATA | sctp_chunk::I_DATA) => {
            flow.state
        }
        (true, false) => FlowState::Sctp,
        (false, true) if check == TagCheck::Wrong => flow.state,
        (false, true) => FlowState::SctpHalfClosed,
        (false, false) if chunk == sctp_chunk::INIT => flow.state,
        (false, false) => {
            learn(&mut flow.tags, chunk, direction, segment);
            FlowState::Sctp
        }
    }
}

/// Compares the tag of a packet. The end of an association may come under the tag of its sender, from an end that has
/// no such association and reflects what it received (section 8.5.1).
fn check(mut tags: VerificationTags, chunk: u8, direction: Direction, segment: Segment) -> TagCheck {
    let may_reflect = matches!(chunk, sctp_chunk::ABORT | sctp_chunk::SHUTDOWN_COMPLETE);
    let is_reflected = may_reflect && segment.acknowledgement != 0;
    let expected = *tag_of(&mut tags, if is_reflected { direction.opposite() } else { direction });
    match expected {
        0 => TagCheck::Unknown,
        _ if expected == segment.sequence => TagCheck::Right,
        _ => TagCheck::Wrong,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::entry::FlowBackend;
    use crate::flow::snat::{PoolId, SnatLease};
    use crate::flow::state::FlowMode;
    use crate::flow::tick::Tick;
    use crate::flow::{Ticks, advance};
    use crate::wire::{Tuple, protocol};
    use Direction::{ToBackend, ToClient};
    use FlowState::{Sctp, SctpClosing, SctpHalfClosed, SctpOpening};
    use sctp_chunk::{ABORT, COOKIE_ACK, COOKIE_ECHO, DATA, HEARTBEAT, INIT, INIT_ACK, SACK, SHUTDOWN_ACK, SHUTDOWN_COMPLETE};

    /// The tags of the client, the backend, and a stranger.
    const CLIENT: u32 = 0xc1c1_c1c1;
    const BACKEND: u32 = 0xb2b2_b2b2;
    const OTHER: u32 = 0x0bad_0bad;

    type Step = (Direction, u8, u32, u32);

    const HANDSHAKE: [Step; 4] = [
        (ToBackend, INIT, 0, CLIENT),
        (ToClient, INIT_ACK, CLIENT, BACKEND),
        (ToBackend, COOKIE_ECHO, BACKEND, 0),
        (ToClient, COOKIE_ACK, CLIENT, 0),
    ];

    fn after(mode: FlowMode, steps: &[Step]) -> (FlowState, VerificationTags) {
        let [(_, chunk, tag, more), rest @ ..] = steps else { panic!("a first packet") };
        let transport = Transport::Sctp { chunk: *chunk };
        let lease = SnatLease { address: 0, port: 0, pool: PoolId::NONE };
        let tuple = Tuple { protocol: protocol::SCTP, ..Tuple::default() };
        let mut flow: Flow<u32> =
            Flow::new(&tuple, FlowState::first(transport, mode), mode, FlowBackend::default(), &lease, Tick(1));
        flow.tags = tags_of_first(transport, Segment { sequence: *tag, acknowledgement: *more, end: 0 });
        for (at, &(direction, chunk, sequence, acknowledgement)) in (1..).zip(rest) {
            let now = Tick(1 + at * Ticks::from(std::time::Duration::from_secs(1)).0);
            advance(&mut flow, Transport::Sctp { chunk }, direction, Segment { sequence, acknowledgement, end: 0 }, now);
        }
        (flow.state, flow.tags)
    }

    #[test]
    fn only_right_tags_end_an_association_whose_handshake_was_seen() {
        let rows: [(&str, &[Step], FlowState); 14] = [
            ("the handshake", &[], Sctp),
            ("an ABORT of the client", &[(ToBackend, ABORT, BACKEND, 0)], SctpClosing),
            ("of the backend", &[(ToClient, ABORT, CLIENT, 0)], SctpClosing),
            ("of a client without association, by its own tag", &[(ToBackend, ABORT, CLIENT, 1)], SctpClosing),
            ("its own tag without the flag", &[(ToBackend, ABORT, CLIENT, 0)], Sctp),
            ("the flag with the other tag", &[(ToBackend, ABORT, BACKEND, 1)], Sctp),
            ("a stranger's ABORTs", &[(ToBackend, ABORT, OTHER, 0), (ToClient, ABORT, OTHER, 1)], Sctp),
            ("and ends of a shutdown", &[(ToBackend, SHUTDOWN_ACK, OTHER, 0), (ToClient, SHUTDOWN_COMPLETE, OTHER, 0)], Sctp),
            ("a SHUTDOWN ACK reflects nothing", &[(ToBackend, SHUTDOWN_ACK, CLIENT, 0)], Sctp),
            ("a shutdown", &[(ToBackend, SHUTDOWN_ACK, BACKEND, 0), (ToClient, SHUTDOWN_COMPLETE, CLIENT, 0)], SctpClosing),
            ("data restores", &[(ToBackend, ABORT, BACKEND, 0), (ToClient, DATA, CLIENT, 0)], Sctp),
            ("not a stranger's", &[(ToBackend, ABORT, BACKEND, 0), (ToClient, DATA, OTHER, 0)], SctpClosing),
            ("nor acknowledgements", &[(ToBackend, ABORT, BACKEND, 0), (ToClient, SACK, CLIENT, 0)], SctpClosing),
            ("a stranger's INIT", &[(ToBackend, INIT, 0, OTHER), (ToClient, INIT_ACK, OTHER, 9)], Sctp),
        ];
        for mode in [FlowMode::Nat, FlowMode::Dnat] {
            for (sentence, steps, expected) in rows {
                let (state, tags) = after(mode, &[&HANDSHAKE[..], steps].concat());
                assert_eq!(state, expected, "{sentence}");
                assert_eq!(tags, VerificationTags { client: CLIENT, backend: BACKEND, proven: true }, "{sentence}");
            }
        }
    }

    #[test]
    fn a_stranger_during_the_handshake_proves_nothing_and_gets_no_tag_proven() {
        let [init, init_ack, echo, ack] = HANDSHAKE;
        let others = [
            (ToBackend, INIT, 0, OTHER),
            (ToClient, INIT_ACK, OTHER, OTHER),
            (ToBackend, COOKIE_ECHO, OTHER, 0),
            (ToBackend, DATA, OTHER, 0),
            (ToClient, ABORT, OTHER, 1),
        ];
        for other in others {
            let rows = [
                vec![other, init, init_ack, echo, ack],
                vec![init, other, init_ack, echo, ack],
                vec![init, init_ack, other, echo, ack],
                vec![init, init_ack, echo, other, ack],
            ];
            for steps in rows.into_iter().filter(|steps| steps[0].0 == ToBackend) {
                let (state, tags) = after(FlowMode::Nat, &steps);
                assert_eq!((state, tags.client), (Sctp, CLIENT), "{steps:?}");
                assert!(!tags.proven || tags.backend == BACKEND, "{steps:?}: {tags:?}");
                // The client's next packet tells its tag if none is proven, and its end is known.
                let more = [&steps[..], &[(ToBackend, HEARTBEAT, BACKEND, 0), (ToBackend, ABORT, BACKEND, 0)]].concat();
                let closed = after(FlowMode::Nat, &more);
                assert_eq!(closed.1.backend, BACKEND, "{steps:?}");
                assert_eq!(closed.0, if tags.proven { SctpClosing } else { SctpHalfClosed }, "{steps:?}");
            }
        }
    }

    #[test]
    fn tags_that_were_only_learnt_end_nothing_that_goes_on() {
        let adopted = [(ToBackend, DATA, BACKEND, 0), (ToClient, SACK, CLIENT, 0)];
        let rows: [(&str, &[Step], FlowState); 8] = [
            ("both are learnt", &[], Sctp),
            ("a wrong one changes nothing", &[(ToBackend, ABORT, OTHER, 0), (ToClient, ABORT, OTHER, 0)], Sctp),
            ("nor a wrong reflected one", &[(ToBackend, ABORT, OTHER, 1)], Sctp),
            ("a right one shortens the limit", &[(ToBackend, ABORT, BACKEND, 0)], SctpHalfClosed),
            ("so does a reflected one", &[(ToBackend, SHUTDOWN_COMPLETE, CLIENT, 1)], SctpHalfClosed),
            ("the other end goes on", &[(ToBackend, ABORT, BACKEND, 0), (ToClient, HEARTBEAT, CLIENT, 0)], Sctp),
            ("so does the same end", &[(ToBackend, ABORT, BACKEND, 0), (ToBackend, HEARTBEAT, BACKEND, 0)], Sctp),
            ("a stranger's tag lasts until the next packet", &[(ToBackend, DATA, OTHER, 0), (ToBackend, SACK, BACKEND, 0)], Sctp),
        ];
        for (sentence, steps, expected) in rows {
            let (state, tags) = after(FlowMode::Dnat, &[&adopted[..], steps].concat());
            assert_eq!(state, expected, "{sentence}");
            assert_eq!(tags, VerificationTags { client: CLIENT, backend: BACKEND, proven: false }, "{sentence}");
        }
    }

    #[test]
    fn an_end_that_starts_anew_keeps_its_flow() {
        let again = 0xc2c2_c2c2;
        let restart = [
            (ToBackend, INIT, 0, again),
            (ToClient, INIT_ACK, again, 7),
            (ToBackend, COOKIE_ECHO, 7, 0),
            (ToClient, COOKIE_ACK, again, 0),
            (ToBackend, DATA, 7, 0),
        ];
        let with = |more: &[Step]| after(FlowMode::Nat, &[&HANDSHAKE[..], &restart, more].concat());
        let tags = VerificationTags { client: CLIENT, backend: BACKEND, proven: true };
        assert_eq!(with(&[]), (Sctp, tags), "a stranger can send an INIT and an answer to a cookie too");
        assert_eq!(with(&[(ToBackend, ABORT, 7, 0)]), (Sctp, tags));
    }

    #[test]
    fn one_way_flows_learn_the_tag_of_the_client_s_packets() {
        let begin = [(ToBackend, INIT, 0, CLIENT), (ToBackend, COOKIE_ECHO, BACKEND, 0), (ToBackend, DATA, BACKEND, 0)];
        for mode in [FlowMode::Dsr, FlowMode::Ipip, FlowMode::Gue] {
            let with = |more: &[Step]| after(mode, &[&begin[..], more].concat()).0;
            assert_eq!(after(mode, &begin[..2]).0, SctpOpening);
            assert_eq!(with(&[]), Sctp);
            assert_eq!(with(&[(ToBackend, ABORT, OTHER, 0)]), Sctp);
            assert_eq!(with(&[(ToBackend, ABORT, BACKEND, 0)]), SctpHalfClosed);
            assert_eq!(with(&[(ToBackend, ABORT, CLIENT, 1)]), SctpHalfClosed);
            assert_eq!(with(&[(ToBackend, ABORT, BACKEND, 0), (ToBackend, HEARTBEAT, BACKEND, 0)]), Sctp);
        }
    }
}

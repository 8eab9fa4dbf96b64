//! State changes of a flow that depend on sequence numbers, verification tags and time as well.
//!
//! A two-way TCP flow is confirmed by the client's acknowledgement of the backend's SYN. The number is compared;
//! otherwise a flood of SYN and ACK from spoofed addresses could confirm any number of flows. A one-way flow is
//! confirmed by its third packet, but not before one second has passed.
//!
//! A FIN counts once the other side has acknowledged it. Until then its number is kept with the flow: the sender of a
//! forged FIN does not know the number that the other side expects, and that side acknowledges another number.
//!
//! Not here: the packets that can change a state at all ([`super::is_plain`]).

mod association;
mod segment;

use std::time::Duration;

use super::entry::Flow;
use super::state::{Direction, FlowState, begins, next_state};
use super::tick::{Tick, Ticks};
use crate::wire::{Address, Transport, sctp_chunk, tcp_flags};
pub(crate) use association::tags_of_first;
pub use segment::Segment;

/// Bytes that may be under way between two ends: as many as a socket of Linux sends without an acknowledgement
/// (`net.ipv4.tcp_wmem`). A number that is less than this behind the number of a FIN may belong to a packet that was
/// sent before the FIN; the number of a forged FIN is in this range once in 1,024 times.
const UNDER_WAY: u32 = 4 << 20;

/// Number of the client's packets that confirms a one-way flow (FORWARDING 2).
const ONE_WAY_PACKETS: u8 = 3;
/// Minimum age of a one-way flow at its confirmation.
const ONE_WAY_AGE: Duration = Duration::from_secs(1);

/// Applies a packet for which [`super::is_plain`] is false to the flow's state. Returns true when the flow
/// changed its yield class or left it. Later fragments of TCP and SCTP change nothing, because their headers are in the
/// first one; each later fragment of UDP counts as a packet.
pub fn advance<A: Address>(flow: &mut Flow<A>, transport: Transport, direction: Direction, segment: Segment, now: Tick) -> bool {
    if tells_nothing(transport) {
        return false;
    }
    let next = match transport {
        Transport::Sctp { chunk } => association::next(flow, chunk, direction, segment),
        _ => next_state(flow.state, transport, direction),
    };
    let Some(next) = checked(flow, next, transport, direction, segment, now) else { return false };
    let class = flow.state.yield_class();
    keep_numbers(flow, next, transport, direction, segment);
    flow.state = next;
    next.yield_class() != class
}

/// Whether a packet shows nothing of the connection: a later fragment, or a TCP segment without any of these flags,
/// which receivers discard (RFC 9293 section 3.10.7.4).
const fn tells_nothing(transport: Transport) -> bool {
    use tcp_flags::{ACK, FIN, RST, SYN};
    match transport {
        Transport::Tcp { flags } => flags & (SYN | ACK | FIN | RST) == 0,
        Transport::Sctp { chunk } => chunk == sctp_chunk::RESERVED,
        _ => false,
    }
}

/// The state after this packet, of which `next` is what its flags propose; `None`: the packet changes nothing.
fn checked<A: Address>(
    flow: &mut Flow<A>,
    next: FlowState,
    transport: Transport,
    direction: Direction,
    segment: Segment,
    now: Tick,
) -> Option<FlowState> {
    use FlowState::*;
    let acknowledges = has(transport, tcp_flags::ACK) && segment.acknowledgement == flow.acknowledgement;
    match (flow.state, next) {
        (TcpAnswered, TcpEstablished | TcpFinOfClient) if direction == Direction::ToBackend => acknowledges.then_some(next),
        (TcpFinOfClient | TcpFinDoubted, TcpHalfClosedByClient | TcpClosing) if direction == Direction::ToClient => {
            let was_under_way = flow.acknowledgement.wrapping_sub(segment.acknowledgement) <= UNDER_WAY;
            Some(match () {
                () if acknowledges || has(transport, tcp_flags::RST) => next,
                () if has(transport, tcp_flags::FIN) => TcpHalfClosedByBackend,
                () if was_under_way => TcpFinDoubted,
                () => TcpEstablished,
            })
        }
        (TcpHalfClosedByBackend, TcpClosing) => acknowledges.then_some(next),
        (TcpOneWayHalfClosed, TcpOneWay) => {
            let may_be_before = flow.acknowledgement.wrapping_sub(segment.sequence) <= UNDER_WAY;
            (begins(transport) || !may_be_before).then_some(next)
        }
        (SctpOpening, _) if flow.mode.is_two_way() || next == SctpOpening => Some(next),
        (TcpOneWayNew | SctpOpening | UdpOneWayNew, _) => {
            (one_more(flow) && now.since(flow.since) >= Ticks::from(ONE_WAY_AGE)).then_some(next)
        }
        _ => Some(next),
    }
}

/// Keeps the numbers by which later packets are checked.
fn keep_numbers<A: Address>(flow: &mut Flow<A>, next: FlowState, transport: Transport, direction: Direction, segment: Segment) {
    match next {
        FlowState::TcpAnswered if is_syn_ack(transport, direction) => {
            flow.acknowledgement = segment.sequence.wrapping_add(1);
            // Of several SYNs, the one that the backend has accepted.
            flow.initial_sequence = segment.acknowledgement.wrapping_sub(1);
        }
        FlowState::TcpFinOfClient | FlowState::TcpHalfClosedByBackend | FlowState::TcpOneWayHalfClosed
            if has(transport, tcp_flags::FIN) =>
        {
            flow.acknowledgement = segment.end;
        }
        _ => {}
    }
}

/// Whether a segment has this flag.
const fn has(transport: Transport, flag: u8) -> bool {
    matches!(transport, Transport::Tcp { flags } if flags & flag != 0)
}

/// Whether this is the backend's SYN-ACK, whose number the client must acknowledge. A repeated SYN-ACK may carry
/// another number.
const fn is_syn_ack(transport: Transport, direction: Direction) -> bool {
    let both = tcp_flags::SYN | tcp_flags::ACK;
    matches!((transport, direction), (Transport::Tcp { flags }, Direction::ToClient) if flags & both == both)
}

/// Counts a packet of the client. Returns true from the third packet on; the first one created the flow.
fn one_more<A: Address>(flow: &mut Flow<A>) -> bool {
    flow.packets = flow.packets.saturating_add(1).max(2);
    flow.packets >= ONE_WAY_PACKETS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::entry::FlowBackend;
    use crate::flow::snat::{PoolId, SnatLease};
    use crate::flow::state::FlowMode;
    use crate::wire::Tuple;
    use crate::wire::tcp_flags::{ACK, FIN, PSH, RST, SYN};
    use Direction::{ToBackend, ToClient};

    fn flow(mode: FlowMode, transport: Transport, now: Tick) -> Flow<u32> {
        let protocol = if transport == Transport::Udp { 17 } else { 6 };
        let tuple = Tuple { protocol, ..Tuple::default() };
        let lease = SnatLease { address: 0, port: 0, pool: PoolId::NONE };
        Flow::new(&tuple, FlowState::first(transport, mode), mode, FlowBackend::default(), &lease, now)
    }

    fn tcp(flags: u8) -> Transport {
        Transport::Tcp { flags }
    }

    fn numbers(sequence: u32, acknowledgement: u32) -> Segment {
        Segment { sequence, acknowledgement, end: sequence }
    }

    #[test]
    fn only_the_acknowledgement_of_the_backends_syn_confirms() {
        let mut flow = flow(FlowMode::Nat, tcp(SYN), Tick(5));
        let backend_sequence = u32::MAX;
        assert!(!advance(&mut flow, tcp(SYN | ACK), ToClient, numbers(backend_sequence, 1), Tick(5)));
        for wrong in [1, 77, u32::MAX] {
            assert!(!advance(&mut flow, tcp(ACK), ToBackend, numbers(1, wrong), Tick(5)), "{wrong}");
            assert_eq!(flow.state, FlowState::TcpAnswered);
        }
        assert!(!advance(&mut flow, tcp(SYN | ACK), ToClient, numbers(6, 1), Tick(6)), "repeated with another number");
        assert!(!advance(&mut flow, tcp(ACK), ToBackend, numbers(1, 0), Tick(6)));
        assert!(advance(&mut flow, tcp(ACK), ToBackend, numbers(1, 7), Tick(6)));
        assert_eq!(flow.state, FlowState::TcpEstablished);
    }

    #[test]
    fn the_backends_data_confirms_whatever_was_acknowledged() {
        let mut flow = flow(FlowMode::Dnat, tcp(SYN), Tick(5));
        assert!(!advance(&mut flow, tcp(SYN | ACK), ToClient, numbers(9, 1), Tick(5)));
        assert!(advance(&mut flow, tcp(ACK | PSH), ToClient, numbers(10, 1), Tick(6)));
        assert!(!advance(&mut flow, tcp(ACK | FIN), ToClient, numbers(10, 1), Tick(6)), "it is confirmed once");
        assert_eq!(flow.state, FlowState::TcpHalfClosedByBackend);
    }

    /// A segment: direction, flags, sequence number, acknowledgement number, bytes of data.
    type Sent = (Direction, u8, u32, u32, u32);

    fn after(flow: &Flow<u32>, sent: &[Sent]) -> FlowState {
        let mut flow = *flow;
        for &(direction, flags, sequence, acknowledgement, data) in sent {
            let end = sequence.wrapping_add(data).wrapping_add(u32::from(flags & FIN != 0));
            advance(&mut flow, tcp(flags), direction, Segment { sequence, acknowledgement, end }, Tick(9));
        }
        flow.state
    }

    /// The client's next byte is 2^32 - 2, which a FIN with 3 bytes wraps; the backend's is 700.
    const CLIENT: u32 = u32::MAX - 1;
    const CLIENT_END: u32 = 2;
    const FIN_OF_CLIENT: Sent = (ToBackend, FIN | ACK | PSH, CLIENT, 700, 3);
    const FIN_OF_BACKEND: Sent = (ToClient, FIN | ACK, 700, CLIENT, 10);

    #[test]
    fn a_fin_of_the_client_counts_once_the_backend_acknowledges_it() {
        use FlowState::*;
        let mut established = flow(FlowMode::Nat, tcp(SYN), Tick(5));
        established.state = TcpEstablished;
        let with = |more: &[Sent]| after(&established, &[&[FIN_OF_CLIENT], more].concat());
        let acknowledged = (ToClient, ACK, 700, CLIENT_END, 0);
        let forged = |sequence| (ToBackend, FIN | ACK, sequence, 1, 0);
        let challenge = (ToClient, ACK, 700, CLIENT, 0);
        let last = (ToBackend, ACK, CLIENT_END, 711, 0);
        let rows: [(&str, FlowState, FlowState); 18] = [
            ("nobody has acknowledged it", with(&[]), TcpFinOfClient),
            ("the client's packets after it show nothing", with(&[(ToBackend, ACK | PSH, 5, 700, 5)]), TcpFinOfClient),
            ("the acknowledgement closes one half", with(&[acknowledged]), TcpHalfClosedByClient),
            ("data that acknowledges it, too", with(&[(ToClient, ACK | PSH, 700, CLIENT_END, 9)]), TcpHalfClosedByClient),
            ("a packet that was under way does not", with(&[(ToClient, ACK | PSH, 690, CLIENT, 10)]), TcpFinDoubted),
            (
                "the acknowledgement comes behind it",
                with(&[(ToClient, ACK, 690, CLIENT, 0), acknowledged]),
                TcpHalfClosedByClient,
            ),
            ("a forged FIN gets a challenge ACK", after(&established, &[forged(0x7000_0000), challenge]), TcpEstablished),
            ("or looks like one that is under way", after(&established, &[forged(CLIENT_END + 9), challenge]), TcpFinDoubted),
            (
                "until the client is beyond it",
                after(&established, &[forged(CLIENT_END + 9), challenge, (ToClient, ACK, 700, 900, 0)]),
                TcpEstablished,
            ),
            (
                "the genuine FIN follows a forged one",
                after(&established, &[forged(77), FIN_OF_CLIENT, acknowledged]),
                TcpHalfClosedByClient,
            ),
            ("a packet without flags tells nothing", with(&[(ToClient, 0, 700, CLIENT_END, 0)]), TcpFinOfClient),
            ("both FINs close", with(&[acknowledged, (ToClient, FIN | ACK, 700, CLIENT_END, 10)]), TcpClosing),
            ("in one packet, too", with(&[(ToClient, FIN | ACK, 700, CLIENT_END, 10)]), TcpClosing),
            ("the last ACK restores nothing", with(&[(ToClient, FIN | ACK, 700, CLIENT_END, 10), last]), TcpClosing),
            (
                "nor does repeated data",
                with(&[(ToClient, FIN | ACK, 700, CLIENT_END, 10), (ToClient, ACK | PSH, 690, CLIENT_END, 10)]),
                TcpClosing,
            ),
            ("FINs that cross each other", with(&[FIN_OF_BACKEND]), TcpHalfClosedByBackend),
            ("a RST of the backend closes", with(&[(ToClient, RST, 700, 0, 0)]), TcpClosing),
            ("a SYN-ACK answers a SYN that came since", with(&[acknowledged, (ToClient, SYN | ACK, 1, 2, 0)]), TcpEstablished),
        ];
        for (sentence, found, expected) in rows {
            assert_eq!(found, expected, "{sentence}");
        }
    }

    #[test]
    fn after_the_backends_fin_only_a_client_that_has_it_closes() {
        use FlowState::*;
        let mut established = flow(FlowMode::Nat, tcp(SYN), Tick(5));
        established.state = TcpEstablished;
        let with = |more: &[Sent]| after(&established, &[&[FIN_OF_BACKEND], more].concat());
        let rows = [
            ("the client may go on", with(&[(ToBackend, ACK | PSH, CLIENT, 711, 9)]), TcpHalfClosedByBackend),
            ("a forged FIN changes nothing", with(&[(ToBackend, FIN | ACK, 5, 6, 0)]), TcpHalfClosedByBackend),
            ("nor does one without ACK", with(&[(ToBackend, FIN, 5, 711, 0)]), TcpHalfClosedByBackend),
            ("nor a forged RST", with(&[(ToBackend, RST | ACK, 5, 6, 0)]), TcpHalfClosedByBackend),
            ("a FIN that acknowledges the backend's closes", with(&[(ToBackend, FIN | ACK, CLIENT, 711, 0)]), TcpClosing),
            ("so does a RST that does", with(&[(ToBackend, RST | ACK, CLIENT, 711, 0)]), TcpClosing),
            ("a RST of the backend is one", with(&[(ToClient, RST, 711, 0, 0)]), TcpResetByBackend),
        ];
        for (sentence, found, expected) in rows {
            assert_eq!(found, expected, "{sentence}");
        }
    }

    #[test]
    fn one_way_a_fin_is_undone_by_packets_from_beyond_it() {
        use FlowState::*;
        let mut open = flow(FlowMode::Dsr, tcp(SYN), Tick(5));
        open.state = TcpOneWay;
        let with = |more: &[Sent]| after(&open, &[&[FIN_OF_CLIENT], more].concat());
        let rows = [
            ("a FIN closes one half", with(&[]), TcpOneWayHalfClosed),
            ("acknowledgements follow it", with(&[(ToBackend, ACK, CLIENT_END, 800, 0)]), TcpOneWayHalfClosed),
            ("a repeated segment was sent before", with(&[(ToBackend, ACK | PSH, CLIENT - 100, 800, 100)]), TcpOneWayHalfClosed),
            ("the client goes on elsewhere", with(&[(ToBackend, ACK, CLIENT_END + 1, 800, 0)]), TcpOneWay),
            ("far behind it, too", with(&[(ToBackend, ACK, CLIENT - (8 << 20), 800, 0)]), TcpOneWay),
            ("another connection", with(&[(ToBackend, SYN, CLIENT_END, 0, 0)]), TcpOneWay),
            (
                "a genuine FIN follows a forged one",
                after(&open, &[(ToBackend, FIN, 9, 9, 0), FIN_OF_CLIENT, (ToBackend, ACK, CLIENT_END, 8, 0)]),
                TcpOneWayHalfClosed,
            ),
        ];
        for (sentence, found, expected) in rows {
            assert_eq!(found, expected, "{sentence}");
        }
    }

    #[test]
    fn of_several_syns_the_number_of_the_one_that_the_backend_accepted_is_kept() {
        let mut flow = flow(FlowMode::Nat, tcp(SYN), Tick(5));
        flow.initial_sequence = 1;
        advance(&mut flow, tcp(SYN), ToBackend, numbers(500, 0), Tick(5));
        assert_eq!(flow.initial_sequence, 1, "nobody knows whose the second is");
        advance(&mut flow, tcp(SYN | ACK), ToClient, numbers(9, 501), Tick(5));
        assert_eq!((flow.initial_sequence, flow.state), (500, FlowState::TcpAnswered));
        assert!(!advance(&mut flow, tcp(ACK), ToBackend, numbers(2, 11), Tick(5)));
        assert!(advance(&mut flow, tcp(ACK | FIN), ToBackend, numbers(501, 10), Tick(5)));
        assert_eq!(flow.state, FlowState::TcpFinOfClient, "an ACK with a FIN confirms as well");
    }

    #[test]
    fn one_way_tcp_is_confirmed_by_its_third_packet_when_a_second_has_passed() {
        let second = Ticks::from(ONE_WAY_AGE).0;
        let rows = [
            ("two packets are too few", vec![(ACK, 10 * second)], FlowState::TcpOneWayNew),
            ("three within a second are too early", vec![(ACK, 0), (ACK, second - 1)], FlowState::TcpOneWayNew),
            ("the third after a second", vec![(ACK, 0), (ACK, second)], FlowState::TcpOneWay),
            ("the fourth, if the third came too early", vec![(ACK, 0), (ACK, 1), (ACK, second)], FlowState::TcpOneWay),
            ("a FIN that confirms closes one half", vec![(ACK, 0), (FIN | ACK, second)], FlowState::TcpOneWayHalfClosed),
            ("a FIN too early does not", vec![(ACK, 0), (FIN | ACK, 1)], FlowState::TcpOneWayNew),
        ];
        for (sentence, packets, expected) in rows {
            for mode in [FlowMode::Dsr, FlowMode::Ipip, FlowMode::Gue] {
                let start = Tick(u32::MAX - 1);
                let mut flow = flow(mode, tcp(SYN), start);
                let confirmed = packets.iter().fold(false, |_, &(flags, at)| {
                    advance(&mut flow, tcp(flags), ToBackend, Segment::default(), Tick(start.0.wrapping_add(at)))
                });
                assert_eq!((flow.state, confirmed), (expected, expected.is_confirmed()), "{sentence}");
            }
        }
    }

    #[test]
    fn one_way_udp_is_confirmed_by_its_third_packet_when_a_second_has_passed() {
        let second = Ticks::from(ONE_WAY_AGE).0;
        let mut flow = flow(FlowMode::Dsr, Transport::Udp, Tick(9));
        let mut packet = |at| (advance(&mut flow, Transport::Udp, ToBackend, Segment::default(), Tick(at)), flow.state);
        assert_eq!(packet(9), (false, FlowState::UdpOneWayNew));
        assert_eq!(packet(9 + second - 1), (false, FlowState::UdpOneWayNew));
        assert_eq!(packet(9 + second), (true, FlowState::UdpOneWay));
    }

    #[test]
    fn the_class_that_udp_yields_in_changes_with_the_first_reply_and_with_the_packet_after_it() {
        let mut flow = flow(FlowMode::Nat, Transport::Udp, Tick(9));
        let packets = [ToBackend, ToClient, ToClient, ToBackend, ToClient];
        let changes = packets.map(|direction| advance(&mut flow, Transport::Udp, direction, Segment::default(), Tick(9)));
        assert_eq!((changes, flow.state), ([false, true, false, true, false], FlowState::Udp));
    }
}

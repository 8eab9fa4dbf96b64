//! State changes of a flow that depend on sequence numbers, verification tags and time as well.
//!
//! A two-way TCP flow is confirmed by the client's acknowledgement of the backend's SYN. The number is compared;
//! otherwise a flood of SYN and ACK from spoofed addresses could confirm any number of flows. A one-way flow is
//! confirmed by its third packet, but not before one second has passed.
//!
//! Not here: which packets can change a state at all ([`super::is_plain`]).

mod association;

use std::time::Duration;

use zerocopy::network_endian::U32;

use super::entry::Flow;
use super::state::{Direction, FlowState, next_state};
use super::tick::{Tick, Ticks};
use crate::wire::{Address, Chunk, Headers, Sctp, Tcp, Transport, sctp_chunk, take, tcp_flags};
pub(crate) use association::tags_of_first;

/// The numbers of a TCP segment, or of an SCTP packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Sequence number of its first byte. SCTP: the verification tag.
    pub sequence: u32,
    /// The acknowledgement number, whether or not the flag ACK is set. SCTP: the initiate tag of INIT and INIT ACK; of
    /// ABORT and SHUTDOWN COMPLETE the flag T, that the sender reflects a tag (RFC 9260 section 8.5.1); otherwise 0.
    pub acknowledgement: u32,
}

impl Segment {
    /// The numbers of a parsed frame; zeros if it is neither TCP nor SCTP.
    #[must_use]
    pub fn of<A: Address>(frame: &[u8], headers: &Headers<A>) -> Self {
        let transport = match headers.transport {
            Transport::Tcp { .. } => frame.get(usize::from(headers.transport_offset)..),
            Transport::Sctp { .. } => {
                let packet = frame.get(usize::from(headers.transport_offset)..);
                return packet.and_then(Self::of_sctp).unwrap_or_default();
            }
            _ => None,
        };
        let tcp = transport.and_then(take::<Tcp>).map(|(tcp, _)| tcp);
        tcp.map_or_else(Self::default, |tcp| Self { sequence: tcp.sequence.get(), acknowledgement: tcp.acknowledgement.get() })
    }

    fn of_sctp(packet: &[u8]) -> Option<Self> {
        let (sctp, chunks) = take::<Sctp>(packet)?;
        let (chunk, value) = take::<Chunk>(chunks)?;
        let acknowledgement = match chunk.kind {
            sctp_chunk::INIT | sctp_chunk::INIT_ACK => take::<U32>(value).map_or(0, |(tag, _)| tag.get()),
            sctp_chunk::ABORT | sctp_chunk::SHUTDOWN_COMPLETE => (chunk.flags & Chunk::REFLECTED).into(),
            _ => 0,
        };
        Some(Self { sequence: sctp.tag.get(), acknowledgement })
    }
}

/// Number of the client's packets that confirms a one-way flow (FORWARDING 2).
const ONE_WAY_PACKETS: u8 = 3;
/// Minimum age of a one-way flow at its confirmation.
const ONE_WAY_AGE: Duration = Duration::from_secs(1);

/// Applies a packet for which [`super::state::is_plain`] is false to the flow's state. Returns true when the flow
/// changed its yield class or left it.
pub fn advance<A: Address>(flow: &mut Flow<A>, transport: Transport, direction: Direction, segment: Segment, now: Tick) -> bool {
    let next = match transport {
        Transport::Sctp { chunk } => association::next(flow, chunk, direction, segment),
        _ => next_state(flow.state, transport, direction),
    };
    let class = flow.state.yield_class();
    let may = match flow.state {
        FlowState::TcpAnswered if direction == Direction::ToBackend && next == FlowState::TcpEstablished => {
            segment.acknowledgement == flow.acknowledgement
        }
        FlowState::SctpOpening if flow.mode.is_two_way() || next == FlowState::SctpOpening => true,
        FlowState::TcpOneWayNew | FlowState::SctpOpening | FlowState::UdpOneWayNew => {
            one_more(flow) && now.since(flow.since) >= Ticks::from(ONE_WAY_AGE)
        }
        _ => true,
    };
    if !may {
        return false;
    }
    if next == FlowState::TcpAnswered && is_syn_ack(transport, direction) {
        flow.acknowledgement = segment.sequence.wrapping_add(1);
    }
    flow.state = next;
    next.yield_class() != class
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
    use crate::flow::entry::BackendId;
    use crate::flow::snat::{PoolId, SnatLease};
    use crate::flow::state::FlowMode;
    use crate::wire::Tuple;
    use crate::wire::tcp_flags::{ACK, FIN, PSH, SYN};
    use Direction::{ToBackend, ToClient};

    fn flow(mode: FlowMode, transport: Transport, now: Tick) -> Flow<u32> {
        let protocol = if transport == Transport::Udp { 17 } else { 6 };
        let tuple = Tuple { protocol, ..Tuple::default() };
        let lease = SnatLease { address: 0, port: 0, pool: PoolId::NONE };
        Flow::new(&tuple, (FlowState::first(transport, mode), mode), (BackendId::default(), 0, 0), &lease, now)
    }

    fn tcp(flags: u8) -> Transport {
        Transport::Tcp { flags }
    }

    fn numbers(sequence: u32, acknowledgement: u32) -> Segment {
        Segment { sequence, acknowledgement }
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

//! Which packets change the state of a flow.

use super::states::YieldClass;
use super::*;
use crate::wire::{Transport, sctp_chunk, tcp_flags};
use Direction::{ToBackend, ToClient};

const SYN: u8 = tcp_flags::SYN;
const ACK: u8 = tcp_flags::ACK;
const FIN: u8 = tcp_flags::FIN;
const RST: u8 = tcp_flags::RST;
const PSH: u8 = tcp_flags::PSH;

fn after(first: FlowState, steps: &[(Direction, u8)]) -> FlowState {
    steps.iter().fold(first, |state, &(direction, flags)| next_state(state, Transport::Tcp { flags }, direction))
}

#[test]
fn two_way_tcp_passes_through_its_handshake() {
    use FlowState::{TcpAnswered, TcpEstablished, TcpOpening, TcpRefused};
    let after = |steps: &[_]| after(TcpOpening, steps);
    let handshake = [(ToClient, SYN | ACK), (ToBackend, ACK)];
    let rows = [
        ("a repeated SYN stays opening", after(&[(ToBackend, SYN)]), TcpOpening),
        ("an ACK that answers nothing confirms nothing", after(&[(ToBackend, ACK)]), TcpOpening),
        ("an ACK of the backend without SYN confirms nothing", after(&[(ToClient, ACK)]), TcpOpening),
        ("a SYN-ACK answers", after(&handshake[..1]), TcpAnswered),
        ("its ACK establishes", after(&handshake), TcpEstablished),
        ("so does data of the backend", after(&[handshake[0], (ToClient, ACK | PSH)]), TcpEstablished),
        ("a bare ACK of the backend may be a challenge", after(&[handshake[0], (ToClient, ACK)]), TcpAnswered),
        ("a refused connection is not confirmed", after(&[(ToClient, RST | ACK)]), TcpRefused),
        (
            "SYN, FIN and data of a client alone change nothing",
            after(&[(ToBackend, FIN), (ToBackend, ACK | PSH), (ToBackend, RST), (ToBackend, FIN | ACK)]),
            TcpOpening,
        ),
        ("nor does a RST of it after the SYN-ACK", after(&[handshake[0], (ToBackend, RST | ACK)]), TcpAnswered),
        ("a RST of the backend is undone by its SYN-ACK", after(&[(ToClient, RST), handshake[0]]), TcpAnswered),
        ("or its data", after(&[handshake[0], (ToClient, RST), (ToClient, ACK | PSH)]), TcpEstablished),
    ];
    for (sentence, found, expected) in rows {
        assert_eq!(found, expected, "{sentence}");
    }
}

#[test]
fn a_reset_is_undone_by_any_packet_of_the_other_side() {
    use FlowState::{TcpClosing, TcpEstablished, TcpHalfClosedByBackend, TcpResetByBackend, TcpResetByClient};
    let sides = [(TcpResetByClient, ToBackend, ToClient), (TcpResetByBackend, ToClient, ToBackend)];
    for (reset, from, to) in sides {
        let with = |more: &[(Direction, u8)]| after(TcpEstablished, &[&[(from, RST)], more].concat());
        let mut rows = vec![
            ("a RST shortens the limit", with(&[]), reset),
            ("repeated, it does no more", with(&[(from, RST | ACK)]), reset),
            ("the same side restores nothing", with(&[(from, ACK), (from, ACK | PSH)]), reset),
            ("a bare ACK of the other side does", with(&[(to, ACK)]), TcpEstablished),
            ("so does data", with(&[(to, ACK | PSH)]), TcpEstablished),
            ("a RST of the other side closes", with(&[(to, RST)]), TcpClosing),
            ("after which nothing restores", with(&[(to, RST), (to, ACK), (from, ACK | PSH)]), TcpClosing),
        ];
        if from == ToBackend {
            rows.push(("a SYN goes on", with(&[(from, SYN)]), reset));
            rows.push(("and its SYN-ACK restores", with(&[(from, SYN), (to, SYN | ACK)]), TcpEstablished));
            rows.push(("a FIN of the backend shows that it went on", with(&[(to, FIN | ACK)]), TcpHalfClosedByBackend));
        }
        for (sentence, found, expected) in rows {
            assert_eq!(found, expected, "{sentence}, {from:?}");
        }
    }
}

#[test]
fn what_only_a_client_has_ended_begins_no_new_flow_and_what_a_backend_has_ended_does() {
    use FlowState::*;
    let by_backend = [TcpHalfClosedByBackend, TcpClosing, TcpRefused, TcpResetByBackend, SctpClosing];
    let tcp = [TcpFinOfClient, TcpHalfClosedByClient, TcpResetByClient, TcpOneWayHalfClosed, TcpOneWayReset];
    let by_client = [&tcp[..], &[SctpHalfClosed]].concat();
    for state in FlowState::ALL {
        let found = (state.is_ended_by_backend(), state.is_ended_by_client());
        assert_eq!(found, (by_backend.contains(&state), by_client.contains(&state)), "{state:?}");
    }
}

#[test]
fn one_way_tcp_sees_the_client_only() {
    use FlowState::{TcpOneWay, TcpOneWayHalfClosed, TcpOneWayNew, TcpOneWayReset};
    let rows = [
        ("any packet may confirm", after(TcpOneWayNew, &[(ToBackend, ACK)]), TcpOneWay),
        ("a FIN that does, closes one half", after(TcpOneWayNew, &[(ToBackend, FIN | ACK)]), TcpOneWayHalfClosed),
        ("the client's FIN closes one half", after(TcpOneWay, &[(ToBackend, FIN | ACK)]), TcpOneWayHalfClosed),
        ("a RST shortens the limit", after(TcpOneWay, &[(ToBackend, RST)]), TcpOneWayReset),
        ("after a FIN too", after(TcpOneWayHalfClosed, &[(ToBackend, RST)]), TcpOneWayReset),
        ("whoever goes on has not sent it: an ACK restores", after(TcpOneWayReset, &[(ToBackend, ACK)]), TcpOneWay),
        ("so does data", after(TcpOneWayReset, &[(ToBackend, ACK | PSH)]), TcpOneWay),
        ("and a SYN", after(TcpOneWayReset, &[(ToBackend, SYN)]), TcpOneWay),
        ("a FIN after a RST closes one half", after(TcpOneWayReset, &[(ToBackend, FIN)]), TcpOneWayHalfClosed),
    ];
    for (sentence, found, expected) in rows {
        assert_eq!(found, expected, "{sentence}");
    }
}

#[test]
fn a_flow_found_in_mid_stream_is_confirmed_by_its_backend() {
    use FlowState::{TcpAdopted, TcpEstablished, TcpRefused};
    assert_eq!(FlowState::first(Transport::Tcp { flags: ACK }, FlowMode::Dnat), TcpAdopted);
    let rows = [
        ("the client alone confirms nothing", after(TcpAdopted, &[(ToBackend, ACK | PSH)]), TcpAdopted),
        ("the backend's ACK does", after(TcpAdopted, &[(ToClient, ACK)]), TcpEstablished),
        ("a backend that knows nothing of it refuses", after(TcpAdopted, &[(ToClient, RST)]), TcpRefused),
        ("a RST of the client shows nothing", after(TcpAdopted, &[(ToBackend, RST), (ToBackend, FIN)]), TcpAdopted),
    ];
    for (sentence, found, expected) in rows {
        assert_eq!(found, expected, "{sentence}");
    }
}

#[test]
fn a_flow_that_a_backend_begins_is_confirmed_by_its_client() {
    use FlowState::*;
    use sctp_chunk::{COOKIE_ACK, DATA, HEARTBEAT_ACK, INIT};
    let tcp = |steps: &[(Direction, u8)]| after(TcpFromBackend, steps);
    let sctp = |steps: &[(Direction, u8)]| {
        let next = |state, &(direction, chunk): &(_, u8)| next_state(state, Transport::Sctp { chunk }, direction);
        steps.iter().fold(SctpFromBackend, next)
    };
    let udp = |steps: &[Direction]| steps.iter().fold(UdpFromBackend, |state, to| next_state(state, Transport::Udp, *to));
    let rows = [
        ("whatever the backend sends confirms nothing", tcp(&[(ToClient, ACK), (ToClient, ACK | PSH)]), TcpFromBackend),
        ("nor does data behind its end", tcp(&[(ToClient, FIN | ACK), (ToClient, ACK | PSH)]), TcpFromBackend),
        ("or behind a RST", tcp(&[(ToClient, RST), (ToClient, ACK | PSH)]), TcpFromBackend),
        ("or behind a SYN-ACK", tcp(&[(ToClient, SYN | ACK), (ToClient, ACK | PSH)]), TcpFromBackend),
        ("a RST of the client confirms nothing", tcp(&[(ToBackend, RST | ACK)]), TcpFromBackend),
        ("its SYN is one of another connection", tcp(&[(ToBackend, SYN)]), TcpFromBackend),
        ("which is confirmed by its ACK", tcp(&[(ToBackend, SYN), (ToClient, SYN | ACK), (ToBackend, ACK)]), TcpEstablished),
        ("its ACK confirms", tcp(&[(ToBackend, ACK)]), TcpEstablished),
        ("so does a FIN", tcp(&[(ToBackend, FIN | ACK)]), TcpFinOfClient),
        ("SCTP: the backend confirms nothing", sctp(&[(ToClient, DATA), (ToClient, COOKIE_ACK)]), SctpFromBackend),
        ("SCTP: nor does an INIT", sctp(&[(ToBackend, INIT)]), SctpFromBackend),
        ("SCTP: an answer of the client does", sctp(&[(ToBackend, HEARTBEAT_ACK)]), Sctp),
        ("UDP: the backend confirms nothing", udp(&[ToClient, ToClient]), UdpFromBackend),
        ("UDP: the client makes an exchange of it", udp(&[ToBackend]), UdpExchange),
        ("UDP: and then a stream", udp(&[ToBackend, ToBackend]), Udp),
    ];
    for (sentence, found, expected) in rows {
        assert_eq!(found, expected, "{sentence}");
    }
    for state in [TcpFromBackend, UdpFromBackend, SctpFromBackend] {
        assert_eq!(state.yield_class(), Some(YieldClass::Unconfirmed));
    }
}

#[test]
fn sctp_is_confirmed_by_chunks_that_only_a_backend_with_the_association_sends() {
    use FlowState::{Sctp, SctpOpening};
    use sctp_chunk::{ABORT, COOKIE_ACK, COOKIE_ECHO, DATA, ERROR, INIT, INIT_ACK, SACK, SHUTDOWN_COMPLETE};
    let after = |steps: &[(Direction, u8)]| {
        steps.iter().fold(SctpOpening, |state, &(direction, chunk)| next_state(state, Transport::Sctp { chunk }, direction))
    };
    let handshake = [(ToClient, INIT_ACK), (ToBackend, COOKIE_ECHO), (ToClient, COOKIE_ACK)];
    let client = [INIT, COOKIE_ECHO, DATA, SACK, ABORT, SHUTDOWN_COMPLETE].map(|chunk| (ToBackend, chunk));
    let rows = [
        ("whatever a client says alone confirms nothing", after(&client), SctpOpening),
        ("an answer to INIT costs the backend nothing", after(&handshake[..2]), SctpOpening),
        ("a refusal confirms nothing", after(&[(ToClient, ABORT)]), SctpOpening),
        ("nor does an error", after(&[(ToClient, ERROR)]), SctpOpening),
        ("the answer to a cookie confirms", after(&handshake), Sctp),
        ("so does data, where that answer was lost", after(&[(ToClient, DATA)]), Sctp),
    ];
    for (sentence, found, expected) in rows {
        assert_eq!(found, expected, "{sentence}");
    }
}

#[test]
fn udp_is_a_single_exchange_until_the_client_sends_after_the_first_reply() {
    use FlowState::{Udp, UdpExchange, UdpOneWay, UdpOneWayNew, UdpUnreplied};
    let rows = [
        (UdpUnreplied, ToBackend, UdpUnreplied),
        (UdpUnreplied, ToClient, UdpExchange),
        (UdpExchange, ToClient, UdpExchange),
        (UdpExchange, ToBackend, Udp),
        (Udp, ToBackend, Udp),
        (Udp, ToClient, Udp),
        (UdpOneWayNew, ToBackend, UdpOneWay),
    ];
    for (state, direction, expected) in rows {
        assert_eq!(next_state(state, Transport::Udp, direction), expected, "{state:?} {direction:?}");
    }
    let classes = [UdpUnreplied, UdpExchange, Udp].map(FlowState::yield_class);
    assert_eq!(classes, [Some(YieldClass::Unconfirmed), Some(YieldClass::SingleExchange), None]);
}

#[test]
fn the_first_packet_determines_the_initial_state() {
    let syn = Transport::Tcp { flags: SYN };
    for mode in [FlowMode::Nat, FlowMode::Dnat, FlowMode::Dsr, FlowMode::Ipip, FlowMode::Gue] {
        let two = mode.is_two_way();
        let rows = [
            (syn, if two { FlowState::TcpOpening } else { FlowState::TcpOneWayNew }),
            (Transport::Udp, if two { FlowState::UdpUnreplied } else { FlowState::UdpOneWayNew }),
            (Transport::Sctp { chunk: sctp_chunk::INIT }, FlowState::SctpOpening),
        ];
        for (transport, expected) in rows {
            assert_eq!(FlowState::first(transport, mode), expected, "{mode:?}");
            assert!(!expected.is_confirmed());
        }
    }
}

//! Where a flow stands, and how long it may be silent there.
//!
//! FIN and RST only shorten the limit, since anyone can forge them; data restores it. Data is known by PSH, which
//! every sender sets at the end of a write: acknowledgements must not count, or the last one of a closed connection
//! would keep it for hours. Deliberately not here: sequence numbers, and what a SYN on a closing flow does (the
//! decision's matter).

use zerocopy::FromZeros;

use super::Direction;
use crate::tick::{Tick, Ticks};
use crate::{FlowLimits, Transport, tcp_flags};

const PSH: u8 = 0x08;

/// Where a flow stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromZeros)]
#[repr(u8)]
pub enum FlowState {
    /// The client's SYN was seen.
    TcpOpening,
    /// The backend's SYN-ACK was seen too.
    TcpAnswered,
    /// The client acknowledged it: confirmed.
    TcpEstablished,
    /// A FIN or RST was seen.
    TcpClosing,
    /// Only the client has spoken.
    UdpUnreplied,
    /// The backend replied: confirmed.
    Udp,
}

/// The state after a packet with this transport header went in this direction.
#[must_use]
#[inline]
pub fn next_state(state: FlowState, transport: Transport, direction: Direction) -> FlowState {
    match (transport, direction) {
        (Transport::Tcp { flags }, _) => next_tcp_state(state, flags, direction),
        (Transport::Udp, Direction::ToClient) => FlowState::Udp,
        _ => state,
    }
}

#[inline]
fn next_tcp_state(state: FlowState, flags: u8, direction: Direction) -> FlowState {
    use tcp_flags::{ACK, FIN, RST, SYN};
    if flags & (FIN | RST) != 0 {
        return FlowState::TcpClosing;
    }
    match (state, direction) {
        (FlowState::TcpOpening, Direction::ToClient) if flags & (SYN | ACK) == SYN | ACK => FlowState::TcpAnswered,
        (FlowState::TcpAnswered, Direction::ToBackend) if flags & (SYN | ACK) == ACK => FlowState::TcpEstablished,
        (FlowState::TcpClosing, _) if flags & PSH != 0 => FlowState::TcpEstablished,
        _ => state,
    }
}

/// How long a flow may be silent, by state.
#[derive(Clone, Copy, Debug)]
pub struct IdleLimits {
    by_state: [Ticks; 6],
}

impl IdleLimits {
    /// From the configuration.
    #[must_use]
    pub fn new(limits: &FlowLimits) -> Self {
        let opening = limits.tcp_opening.into();
        let mut by_state = [opening; 6];
        by_state[FlowState::TcpEstablished as usize] = limits.tcp_established.into();
        by_state[FlowState::TcpClosing as usize] = limits.tcp_closing.into();
        by_state[FlowState::UdpUnreplied as usize] = limits.udp_unreplied.into();
        by_state[FlowState::Udp as usize] = limits.udp.into();
        Self { by_state }
    }

    /// Whether a flow in `state`, last seen then, has been silent for too long.
    #[must_use]
    #[inline]
    pub fn expired(&self, state: FlowState, last_seen: Tick, now: Tick) -> bool {
        now.since(last_seen) >= self.by_state[state as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const SYN: u8 = tcp_flags::SYN;
    const ACK: u8 = tcp_flags::ACK;

    fn after(steps: &[(Direction, u8)]) -> FlowState {
        steps
            .iter()
            .fold(FlowState::TcpOpening, |state, &(direction, flags)| next_state(state, Transport::Tcp { flags }, direction))
    }

    #[test]
    fn tcp_walks_through_its_states() {
        use Direction::{ToBackend, ToClient};
        let handshake = [(ToClient, SYN | ACK), (ToBackend, ACK)];
        let with = |more: &[(Direction, u8)]| after(&[&handshake[..], more].concat());
        let rows: [(&str, FlowState, FlowState); 10] = [
            ("a repeated SYN stays opening", after(&[(ToBackend, SYN)]), FlowState::TcpOpening),
            ("an ACK that answers nothing confirms nothing", after(&[(ToBackend, ACK)]), FlowState::TcpOpening),
            ("an ACK of the backend without SYN confirms nothing", after(&[(ToClient, ACK)]), FlowState::TcpOpening),
            ("a SYN-ACK answers", after(&handshake[..1]), FlowState::TcpAnswered),
            ("its ACK establishes", after(&handshake), FlowState::TcpEstablished),
            ("a refused connection closes", after(&[(ToClient, tcp_flags::RST | ACK)]), FlowState::TcpClosing),
            ("a FIN closes", with(&[(ToClient, tcp_flags::FIN | ACK)]), FlowState::TcpClosing),
            ("the last ACK does not reopen", with(&[(ToClient, tcp_flags::FIN | ACK), (ToBackend, ACK)]), FlowState::TcpClosing),
            (
                "data after a forged RST restores",
                with(&[(ToClient, tcp_flags::RST), (ToBackend, ACK | PSH)]),
                FlowState::TcpEstablished,
            ),
            ("data establishes nothing that was never answered", after(&[(ToBackend, ACK | PSH)]), FlowState::TcpOpening),
        ];
        for (sentence, found, expected) in rows {
            assert_eq!(found, expected, "{sentence}");
        }
    }

    #[test]
    fn udp_is_confirmed_by_a_reply_only() {
        let step = |state, direction| next_state(state, Transport::Udp, direction);
        assert_eq!(step(FlowState::UdpUnreplied, Direction::ToBackend), FlowState::UdpUnreplied);
        assert_eq!(step(FlowState::UdpUnreplied, Direction::ToClient), FlowState::Udp);
        assert_eq!(step(FlowState::Udp, Direction::ToBackend), FlowState::Udp);
    }

    #[test]
    fn each_state_has_its_limit_across_the_wrap_of_the_tick() {
        let limits = IdleLimits::new(&FlowLimits {
            max_per_worker: 1,
            tcp_established: Duration::from_secs(7200),
            tcp_opening: Duration::from_secs(30),
            tcp_closing: Duration::from_secs(10),
            udp: Duration::from_secs(120),
            udp_unreplied: Duration::from_secs(31),
            ..FlowLimits::default()
        });
        let seen = Tick(u32::MAX - 3);
        let rows = [
            (FlowState::TcpOpening, 30),
            (FlowState::TcpAnswered, 30),
            (FlowState::TcpEstablished, 7200),
            (FlowState::TcpClosing, 10),
            (FlowState::UdpUnreplied, 31),
            (FlowState::Udp, 120),
        ];
        for (state, seconds) in rows {
            let ticks = Ticks::from(Duration::from_secs(seconds)).0;
            assert!(!limits.expired(state, seen, Tick(seen.0.wrapping_add(ticks - 1))), "{state:?}");
            assert!(limits.expired(state, seen, Tick(seen.0.wrapping_add(ticks))), "{state:?}");
        }
    }
}

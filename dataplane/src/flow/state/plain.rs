//! Plain packets: packets that change nothing of their flow, so that the fast path may take them.
//!
//! **Invariant:** almost every packet leaves the state of its flow unchanged, and a test of one bit tells
//! ([`is_plain`]).
//!
//! Not here: the states and their changes (`states`).

use super::states::{Direction, FlowMode, FlowState, STATE_BITS, keeps_number, next_state};
use crate::wire::{Transport, protocol, tcp_flags};

/// Bits of a transport header that a state may depend on: the lower five TCP flags.
const SIGNALS: u8 = 32;

/// For each state, one bit per direction (upper half: to the client) and signal. It is set where the packet changes
/// nothing and carries no SYN. It is never set for SCTP, whose packets all take the slow path. 28 x 8 B, four cache
/// lines, of which flows in use read one.
const PLAIN: [u64; FlowState::ALL.len()] = plain();

const fn plain() -> [u64; FlowState::ALL.len()] {
    let mut table = [0; FlowState::ALL.len()];
    let mut number = 0;
    while number < table.len() {
        let state = FlowState::ALL[number];
        let mut signal = if is_of_sctp(state) { SIGNALS } else { 0 };
        while signal < SIGNALS {
            let transport = transport_of(state, signal);
            // Of TCP, such a segment begins a flow, or tells a number and the segment size.
            let has_syn = signal & tcp_flags::SYN != 0;
            if !changes(state, transport, Direction::ToBackend) && !has_syn {
                table[number] |= 1 << signal;
            }
            if !changes(state, transport, Direction::ToClient) && !has_syn {
                table[number] |= 1 << (signal + SIGNALS);
            }
            signal += 1;
        }
        number += 1;
    }
    table
}

/// Whether a packet may change the state of its flow, or a number that is kept with it.
const fn changes(state: FlowState, transport: Transport, direction: Direction) -> bool {
    next_state(state, transport, direction) as u8 != state as u8 || keeps_number(state, transport)
}

/// The transport header of flows in this state, TCP or UDP.
const fn transport_of(state: FlowState, signal: u8) -> Transport {
    match state.protocol() {
        protocol::UDP => Transport::Udp,
        _ => Transport::Tcp { flags: signal },
    }
}

const fn is_of_sctp(state: FlowState) -> bool {
    state.protocol() == protocol::SCTP
}

/// Whether a packet neither changes the state of its flow nor begins a new flow: true for all but a handful of a
/// connection's packets.
#[must_use]
#[inline(always)]
pub const fn is_plain(state: FlowState, transport: Transport, direction: Direction) -> bool {
    let signal = match transport {
        Transport::Tcp { flags } => flags & (SIGNALS - 1),
        _ => 0,
    };
    PLAIN[state as usize] >> (signal | (direction as u8) << 5) & 1 == 1
}

/// The bit by which a packet of UDP differs from one of TCP, whose lower five flags are below it.
pub(crate) const UDP_SIGNAL: u8 = SIGNALS;

/// The packets that the fast path admits: plain packets ([`is_plain`]) of flows in some modes. None is
/// for flows of the other protocol, free entries, and flows whose handshake is under way, which keep no route.
///
/// A bit for each signal, the lower five TCP flags or [`UDP_SIGNAL`], by the byte of mode and state and by direction. 4
/// KiB, of which flows use few lines.
pub(crate) struct Admission([[u64; 2]; 256]);

impl Admission {
    /// Admits packets of flows in these modes.
    pub(crate) const fn of(modes: &[FlowMode]) -> Self {
        let mut table = [[0; 2]; 256];
        let mut position = 0;
        while position < modes.len() {
            let mut number = 0;
            while number < FlowState::ALL.len() {
                let state = FlowState::ALL[number];
                if !state.shakes_hands() && !is_of_sctp(state) {
                    let byte = (modes[position] as usize) << STATE_BITS | number;
                    let shift = if matches!(transport_of(state, 0), Transport::Udp) { UDP_SIGNAL } else { 0 };
                    // UDP has one signal.
                    let signals = if shift == 0 { u32::MAX as u64 } else { 1 };
                    table[byte] = [(PLAIN[number] & signals) << shift, (PLAIN[number] >> SIGNALS & signals) << shift];
                }
                number += 1;
            }
            position += 1;
        }
        Self(table)
    }

    /// Whether a packet with this signal is admitted in its direction, of a flow with this byte of mode and state.
    #[must_use]
    #[inline(always)]
    pub(crate) const fn admits(&self, mode_and_state: u8, signal: u8, direction: Direction) -> bool {
        self.0[mode_and_state as usize][direction as usize] >> (signal & (2 * SIGNALS - 1)) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Direction::{ToBackend, ToClient};

    const SYN: u8 = tcp_flags::SYN;
    const ACK: u8 = tcp_flags::ACK;
    const PSH: u8 = tcp_flags::PSH;

    #[test]
    fn a_packet_is_plain_if_it_changes_no_state_and_has_no_syn() {
        for state in FlowState::ALL {
            assert_eq!(FlowState::ALL[state as usize], state);
            for direction in [ToBackend, ToClient] {
                for flags in 0..=u8::MAX {
                    let transport = transport_of(state, flags);
                    let moves = next_state(state, transport, direction) != state;
                    let has_syn = matches!(transport, Transport::Tcp { .. }) && flags & SYN != 0;
                    let plain = !moves && !has_syn && !is_of_sctp(state) && !keeps_number(state, transport);
                    assert_eq!(is_plain(state, transport, direction), plain, "{state:?} {direction:?} {flags:#x}");
                }
            }
        }
        assert!(is_plain(FlowState::TcpEstablished, Transport::Tcp { flags: ACK | PSH }, ToBackend));
    }

    #[test]
    fn the_fast_way_admits_plain_packets_of_its_modes_but_during_handshakes() {
        const MODES: [FlowMode; 2] = [FlowMode::Nat, FlowMode::Ipip];
        static ADMISSION: Admission = Admission::of(&MODES);
        for (byte, signal) in (0..=u8::MAX).flat_map(|byte| (0..=UDP_SIGNAL).map(move |signal| (byte, signal))) {
            let state = FlowState::ALL.get(usize::from(byte & 31)).copied();
            let is_of_mode = MODES.iter().any(|mode| *mode as u8 == byte >> STATE_BITS);
            let transport = if signal == UDP_SIGNAL { Transport::Udp } else { Transport::Tcp { flags: signal } };
            for direction in [ToBackend, ToClient] {
                let is_plain_of = |state: FlowState| {
                    let is_same_protocol = matches!(transport_of(state, 0), Transport::Udp) == (signal == UDP_SIGNAL);
                    is_same_protocol && !state.shakes_hands() && !is_of_sctp(state) && is_plain(state, transport, direction)
                };
                let expected = is_of_mode && state.is_some_and(is_plain_of);
                assert_eq!(ADMISSION.admits(byte, signal, direction), expected, "{byte:#x} {signal:#x} {direction:?}");
            }
        }
    }
}

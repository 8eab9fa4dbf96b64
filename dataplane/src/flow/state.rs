//! The states of a flow, and the packets that change them.
//!
//! A flow is *confirmed* when both sides have shown that they exist (in one-way modes: when its client has continued
//! for a while). Until then it is the first to yield when memory or ports run out (FORWARDING 3), and nothing that a
//! client alone can forge may confirm it. UDP has a class in between: one reply makes a *single exchange*, which yields
//! after all unconfirmed flows; the client's next packet makes a *stream*, which never yields.
//!
//! FIN and RST only shorten the idle limit, since anyone can forge them; data restores it. Data is recognised by PSH,
//! which every sender sets at the end of a write. Acknowledgements must not count, or the last one of a closed
//! connection would keep it for hours. After the FIN of one side only data of that side restores the limit, since the
//! other side may continue to send for as long as it likes (docs/internals/decisions/0007-closing-flows.md).
//!
//! **Invariant:** almost every packet leaves the state of its flow unchanged, and a test of one bit tells
//! ([`is_plain`]).
//!
//! Not here: sequence numbers and time, which a state change may need too ([`super::advance()`]), and idle limits
//! ([`super::IdleLimits`]).

use proto::Mode;
use zerocopy::FromZeros;

use crate::wire::{Transport, protocol, sctp_chunk, tcp_flags};

/// Direction of a packet of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the VIP.
    ToBackend,
    /// From the backend to the SNAT address.
    ToClient,
}
impl Direction {
    /// The other direction.
    #[must_use]
    #[inline(always)]
    pub const fn opposite(self) -> Self {
        match self {
            Self::ToBackend => Self::ToClient,
            Self::ToClient => Self::ToBackend,
        }
    }
}

/// How a flow's packets reach the backend: [`proto::Mode`], one byte wide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromZeros)]
#[repr(u8)]
pub enum FlowMode {
    /// Destination and source are rewritten.
    #[default]
    Nat,
    /// The destination is rewritten.
    Dnat,
    /// Only the MAC addresses are rewritten.
    Dsr,
    /// IP-in-IP encapsulation.
    Ipip,
    /// Generic UDP encapsulation, variant 1.
    Gue,
}
impl From<Mode> for FlowMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Nat => Self::Nat,
            Mode::Dnat => Self::Dnat,
            Mode::Dsr => Self::Dsr,
            Mode::Ipip => Self::Ipip,
            Mode::Gue => Self::Gue,
        }
    }
}
impl FlowMode {
    /// Its name, that of [`proto::Mode`].
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Nat => Mode::Nat.as_str(),
            Self::Dnat => Mode::Dnat.as_str(),
            Self::Dsr => Mode::Dsr.as_str(),
            Self::Ipip => Mode::Ipip.as_str(),
            Self::Gue => Mode::Gue.as_str(),
        }
    }

    /// The mode with this number, of which the lower three bits count.
    #[inline(always)]
    pub(crate) const fn of_number(number: u32) -> Self {
        match number & 7 {
            0 => Self::Nat,
            1 => Self::Dnat,
            2 => Self::Dsr,
            3 => Self::Ipip,
            _ => Self::Gue,
        }
    }

    /// Whether packets are encapsulated.
    #[must_use]
    #[inline(always)]
    pub const fn is_tunnel(self) -> bool {
        matches!(self, Self::Ipip | Self::Gue)
    }

    /// Whether replies come back through the gateway. If so the flow is indexed in both directions, otherwise only by
    /// the client's packets.
    #[must_use]
    #[inline]
    pub const fn is_two_way(self) -> bool {
        matches!(self, Self::Nat | Self::Dnat)
    }
}

/// State of a flow. *Two-way* flows are seen in both directions (`nat`, `dnat`), *one-way* flows only in the direction
/// from the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromZeros)]
#[repr(u8)]
pub enum FlowState {
    /// TCP, two-way: the client's SYN was seen.
    TcpOpening,
    /// TCP, two-way: the backend's SYN-ACK was seen too.
    TcpAnswered,
    /// TCP, two-way: the client acknowledged the SYN-ACK; confirmed.
    TcpEstablished,
    /// TCP, two-way: the client's FIN was seen after confirmation; the backend may continue.
    TcpHalfClosedByClient,
    /// TCP, two-way: the backend's FIN was seen after confirmation; the client may continue.
    TcpHalfClosedByBackend,
    /// TCP, two-way: the FINs of both sides, or a RST, were seen after confirmation.
    TcpClosing,
    /// TCP, two-way: a FIN or RST was seen before confirmation: refused, abandoned or forged.
    TcpRefused,
    /// TCP, two-way, adopted in mid-stream (FORWARDING 4, `dnat`): the backend has not yet shown that it knows the
    /// connection.
    TcpAdopted,
    /// TCP, one-way: the client has not continued for long enough yet.
    TcpOneWayNew,
    /// TCP, one-way: confirmed.
    TcpOneWay,
    /// TCP, one-way: the client's FIN was seen. The backend's FIN is never seen.
    TcpOneWayHalfClosed,
    /// TCP, one-way: a RST was seen.
    TcpOneWayClosing,
    /// UDP, two-way: only the client has sent.
    UdpUnreplied,
    /// UDP, two-way: the backend replied, and the client has not sent since: a single exchange.
    UdpExchange,
    /// UDP, two-way: the client has sent again after the first reply: a stream, confirmed.
    Udp,
    /// UDP, one-way: the client has not continued for long enough yet.
    UdpOneWayNew,
    /// UDP, one-way: confirmed.
    UdpOneWay,
    /// SCTP: the association is being set up; in one-way modes, not confirmed yet.
    SctpOpening,
    /// SCTP: confirmed.
    Sctp,
    /// SCTP: shut down or aborted, as the verification tags prove.
    SctpClosing,
    /// SCTP: one end has shut down or aborted, perhaps: its tag was not proven by a handshake. The next packet that goes on
    /// restores it.
    SctpHalfClosed,
}

/// Classes of flows that yield when memory or ports run out (FORWARDING 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum YieldClass {
    /// Only the client has shown that the flow is real.
    Unconfirmed,
    /// An answered UDP flow whose client has not sent since.
    SingleExchange,
}

impl YieldClass {
    /// Both classes, in the order in which flows of the same age yield.
    pub const ALL: [Self; 2] = [Self::Unconfirmed, Self::SingleExchange];
}

impl FlowState {
    /// Its name; states of different protocols may have the same one.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TcpOpening | Self::SctpOpening => "opening",
            Self::TcpAnswered => "answered",
            Self::TcpEstablished | Self::Sctp => "established",
            Self::TcpHalfClosedByClient => "half_closed_by_client",
            Self::TcpHalfClosedByBackend => "half_closed_by_backend",
            Self::TcpClosing | Self::SctpClosing => "closing",
            Self::TcpRefused => "refused",
            Self::TcpAdopted => "adopted",
            Self::TcpOneWayNew | Self::UdpOneWayNew => "one_way_new",
            Self::TcpOneWay | Self::UdpOneWay => "one_way",
            Self::TcpOneWayHalfClosed => "one_way_half_closed",
            Self::SctpHalfClosed => "half_closed",
            Self::TcpOneWayClosing => "one_way_closing",
            Self::UdpUnreplied => "unreplied",
            Self::UdpExchange => "exchange",
            Self::Udp => "stream",
        }
    }

    /// Every state, in the order of their numbers.
    pub const ALL: [Self; 21] = [
        Self::TcpOpening,
        Self::TcpAnswered,
        Self::TcpEstablished,
        Self::TcpHalfClosedByClient,
        Self::TcpHalfClosedByBackend,
        Self::TcpClosing,
        Self::TcpRefused,
        Self::TcpAdopted,
        Self::TcpOneWayNew,
        Self::TcpOneWay,
        Self::TcpOneWayHalfClosed,
        Self::TcpOneWayClosing,
        Self::UdpUnreplied,
        Self::UdpExchange,
        Self::Udp,
        Self::UdpOneWayNew,
        Self::UdpOneWay,
        Self::SctpOpening,
        Self::Sctp,
        Self::SctpClosing,
        Self::SctpHalfClosed,
    ];

    /// The initial state of a flow with this first packet.
    #[must_use]
    pub const fn first(transport: Transport, mode: FlowMode) -> Self {
        match (transport, mode.is_two_way()) {
            (Transport::Tcp { flags }, true) if is_opening(flags) => Self::TcpOpening,
            (Transport::Tcp { .. }, true) => Self::TcpAdopted,
            (Transport::Tcp { .. }, false) => Self::TcpOneWayNew,
            (Transport::Sctp { .. }, _) => Self::SctpOpening,
            (_, true) => Self::UdpUnreplied,
            (_, false) => Self::UdpOneWayNew,
        }
    }

    /// The transport protocol number of flows in this state.
    #[must_use]
    pub const fn protocol(self) -> u8 {
        match self {
            Self::UdpUnreplied | Self::UdpExchange | Self::Udp | Self::UdpOneWayNew | Self::UdpOneWay => protocol::UDP,
            state if is_of_sctp(state) => protocol::SCTP,
            _ => protocol::TCP,
        }
    }

    /// The class in which the flow yields; `None` if it never yields.
    #[must_use]
    #[inline]
    pub const fn yield_class(self) -> Option<YieldClass> {
        match self {
            Self::TcpEstablished | Self::TcpHalfClosedByClient | Self::TcpHalfClosedByBackend | Self::TcpClosing => None,
            Self::TcpOneWay | Self::TcpOneWayHalfClosed | Self::TcpOneWayClosing => None,
            Self::Udp | Self::UdpOneWay | Self::Sctp | Self::SctpClosing | Self::SctpHalfClosed => None,
            Self::UdpExchange => Some(YieldClass::SingleExchange),
            Self::TcpOpening | Self::TcpAnswered | Self::TcpRefused | Self::TcpAdopted => Some(YieldClass::Unconfirmed),
            Self::TcpOneWayNew | Self::UdpUnreplied | Self::UdpOneWayNew | Self::SctpOpening => Some(YieldClass::Unconfirmed),
        }
    }

    /// Whether the flow is of two-way TCP whose handshake is under way.
    #[must_use]
    pub const fn shakes_hands(self) -> bool {
        matches!(self, Self::TcpOpening | Self::TcpAnswered | Self::TcpRefused)
    }

    /// Whether the flow never yields.
    #[must_use]
    #[inline]
    pub const fn is_confirmed(self) -> bool {
        self.yield_class().is_none()
    }

    /// Whether the flow is closing or was refused.
    #[must_use]
    pub const fn is_closing(self) -> bool {
        matches!(self, Self::TcpClosing | Self::TcpRefused | Self::TcpOneWayClosing | Self::SctpClosing)
    }

    /// Whether one side has visibly closed its half of the connection.
    #[must_use]
    pub const fn is_half_closed(self) -> bool {
        matches!(self, Self::TcpHalfClosedByClient | Self::TcpHalfClosedByBackend | Self::TcpOneWayHalfClosed | Self::SctpHalfClosed)
    }
}

/// Whether TCP flags are those of a connection's first packet.
#[must_use]
#[inline]
pub const fn is_opening(flags: u8) -> bool {
    flags & (tcp_flags::SYN | tcp_flags::ACK | tcp_flags::RST | tcp_flags::FIN) == tcp_flags::SYN
}

/// Whether a packet requests a connection: a SYN, or SCTP's INIT.
#[must_use]
#[inline]
pub const fn begins(transport: Transport) -> bool {
    match transport {
        Transport::Tcp { flags } => is_opening(flags),
        Transport::Sctp { chunk } => chunk == sctp_chunk::INIT,
        _ => false,
    }
}

/// Whether a packet belongs to a connection that must have begun earlier. Never true for UDP.
#[must_use]
#[inline]
pub const fn is_mid_stream(transport: Transport) -> bool {
    matches!(transport, Transport::Tcp { .. } | Transport::Sctp { .. }) && !begins(transport)
}

/// The state that a packet with this transport header and direction moves a flow to; the same state if it changes
/// nothing. A change into a confirmed state is a proposal: [`crate::flow::advance()`] checks numbers and time too. How an
/// association goes on once it is confirmed depends on its tags, so it decides that alone.
#[must_use]
pub const fn next_state(state: FlowState, transport: Transport, direction: Direction) -> FlowState {
    match transport {
        Transport::Tcp { flags } => next_tcp_state(state, flags, direction),
        Transport::Udp => next_udp_state(state, direction),
        Transport::Sctp { chunk } => next_sctp_state(state, chunk, direction),
        _ => state,
    }
}

const fn next_tcp_state(state: FlowState, flags: u8, direction: Direction) -> FlowState {
    use Direction::{ToBackend, ToClient};
    use FlowState::*;
    use tcp_flags::{ACK, FIN, PSH, RST, SYN};
    let resets = flags & RST != 0;
    let ends = flags & (FIN | RST) != 0;
    let is_data = flags & PSH != 0;
    match (state, direction) {
        (TcpEstablished | TcpHalfClosedByClient | TcpHalfClosedByBackend, _) if resets => TcpClosing,
        (TcpEstablished, ToBackend) if ends => TcpHalfClosedByClient,
        (TcpEstablished, ToClient) if ends => TcpHalfClosedByBackend,
        (TcpHalfClosedByClient, ToClient) | (TcpHalfClosedByBackend, ToBackend) if ends => TcpClosing,
        // A side that has closed its half sends no data, so the FIN was forged.
        (TcpHalfClosedByClient, ToBackend) | (TcpHalfClosedByBackend, ToClient) if is_data && !ends => TcpEstablished,
        (TcpClosing, _) if is_data && !ends => TcpEstablished,
        (TcpOpening | TcpAnswered | TcpAdopted, _) if ends => TcpRefused,
        (TcpOpening | TcpRefused, ToClient) if flags & (SYN | ACK) == SYN | ACK && !ends => TcpAnswered,
        (TcpAnswered, ToBackend) if flags & (SYN | ACK) == ACK => TcpEstablished,
        // A backend sends data only on a connection that it regards as open (a challenge ACK has no PSH).
        (TcpAnswered | TcpRefused, ToClient) if is_data && !ends => TcpEstablished,
        (TcpAdopted, ToClient) if flags & (SYN | ACK) == ACK => TcpEstablished,
        (TcpOneWayNew | TcpOneWay | TcpOneWayHalfClosed, _) if resets => TcpOneWayClosing,
        (TcpOneWayNew | TcpOneWay, _) if ends => TcpOneWayHalfClosed,
        (TcpOneWayHalfClosed | TcpOneWayClosing, _) if is_data && !ends => TcpOneWay,
        (TcpOneWayNew, _) => TcpOneWay,
        _ => state,
    }
}

const fn next_udp_state(state: FlowState, direction: Direction) -> FlowState {
    match (state, direction) {
        (FlowState::UdpUnreplied, Direction::ToClient) => FlowState::UdpExchange,
        (FlowState::UdpExchange, Direction::ToBackend) => FlowState::Udp,
        (FlowState::UdpOneWayNew, _) => FlowState::UdpOneWay,
        _ => state,
    }
}

/// For two-way flows. The backend keeps state of the association from the client's cookie on (RFC 9260 section 5.1),
/// and only a backend with that state sends these chunks. For other changes see [`crate::flow::advance()`].
const fn next_sctp_state(state: FlowState, chunk: u8, direction: Direction) -> FlowState {
    use sctp_chunk::{COOKIE_ACK, DATA, HEARTBEAT, HEARTBEAT_ACK, I_DATA, SACK};
    match (state, direction) {
        (FlowState::SctpOpening, Direction::ToClient)
            if matches!(chunk, COOKIE_ACK | DATA | I_DATA | SACK | HEARTBEAT | HEARTBEAT_ACK) =>
        {
            FlowState::Sctp
        }
        _ => state,
    }
}

/// Bits of a transport header that a state may depend on: the lower five TCP flags.
const SIGNALS: u8 = 32;

/// For each state, one bit per direction (upper half: to the client) and signal. It is set where the packet changes no
/// state and carries no SYN. It is never set for SCTP, whose
/// packets all take the slow path. 21 x 8 B, three cache lines.
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
            if next_state(state, transport, Direction::ToBackend) as u8 == state as u8 && !has_syn {
                table[number] |= 1 << signal;
            }
            if next_state(state, transport, Direction::ToClient) as u8 == state as u8 && !has_syn {
                table[number] |= 1 << (signal + SIGNALS);
            }
            signal += 1;
        }
        number += 1;
    }
    table
}

/// The transport header of flows in this state, TCP or UDP.
const fn transport_of(state: FlowState, signal: u8) -> Transport {
    match state {
        FlowState::UdpUnreplied | FlowState::UdpExchange | FlowState::Udp => Transport::Udp,
        FlowState::UdpOneWayNew | FlowState::UdpOneWay => Transport::Udp,
        _ => Transport::Tcp { flags: signal },
    }
}

pub(super) const fn is_of_sctp(state: FlowState) -> bool {
    matches!(state, FlowState::SctpOpening | FlowState::Sctp | FlowState::SctpClosing | FlowState::SctpHalfClosed)
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

/// Bits of the number of a state, below that of a mode, in the byte by which [`Admission`] finds both.
pub(crate) const STATE_BITS: u32 = 5;

/// Which packets a loop of the fast path admits: those that are plain ([`is_plain`]) for flows in some modes. None is
/// for flows of the other protocol, free entries, and flows whose handshake is under way, which keep no route.
///
/// A bit for each signal, the lower five TCP flags or [`UDP_SIGNAL`], by the byte of mode and state and by direction. 4 KiB,
/// of which flows use few lines.
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
    const FIN: u8 = tcp_flags::FIN;
    const RST: u8 = tcp_flags::RST;
    const PSH: u8 = tcp_flags::PSH;

    fn after(first: FlowState, steps: &[(Direction, u8)]) -> FlowState {
        steps.iter().fold(first, |state, &(direction, flags)| next_state(state, Transport::Tcp { flags }, direction))
    }

    #[test]
    fn two_way_tcp_passes_through_its_states() {
        use FlowState::{TcpAnswered, TcpClosing, TcpEstablished, TcpOpening, TcpRefused};
        let after = |steps: &[_]| after(TcpOpening, steps);
        let handshake = [(ToClient, SYN | ACK), (ToBackend, ACK)];
        let with = |more: &[(Direction, u8)]| after(&[&handshake[..], more].concat());
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
                "SYN, FIN and data of a client alone confirm nothing",
                after(&[(ToBackend, FIN), (ToBackend, ACK | PSH)]),
                TcpRefused,
            ),
            ("a forged RST while opening is undone by the SYN-ACK", after(&[(ToBackend, RST), handshake[0]]), TcpAnswered),
            (
                "a forged RST after that by the backend's data",
                after(&[handshake[0], (ToBackend, RST), (ToClient, ACK | PSH)]),
                TcpEstablished,
            ),
            ("the FINs of both close", with(&[(ToClient, FIN | ACK), (ToBackend, FIN | ACK)]), TcpClosing),
            ("FINs with data close", with(&[(ToBackend, FIN | ACK | PSH), (ToClient, FIN | ACK | PSH)]), TcpClosing),
            ("a RST closes", with(&[(ToClient, RST | ACK)]), TcpClosing),
            ("the last ACK does not reopen", with(&[(ToClient, FIN), (ToBackend, FIN), (ToClient, ACK)]), TcpClosing),
            ("data after a forged RST restores", with(&[(ToClient, RST), (ToBackend, ACK | PSH)]), TcpEstablished),
            ("data establishes nothing that was never answered", after(&[(ToBackend, ACK | PSH)]), TcpOpening),
        ];
        for (sentence, found, expected) in rows {
            assert_eq!(found, expected, "{sentence}");
        }
    }

    #[test]
    fn one_fin_closes_one_half_whoever_sends_it() {
        use FlowState::{TcpClosing, TcpEstablished, TcpHalfClosedByBackend, TcpHalfClosedByClient};
        for (half, from, to) in [(TcpHalfClosedByClient, ToBackend, ToClient), (TcpHalfClosedByBackend, ToClient, ToBackend)] {
            let with = |more: &[(Direction, u8)]| after(TcpEstablished, &[&[(from, FIN | ACK)], more].concat());
            let rows = [
                ("a FIN closes one half", with(&[]), half),
                ("repeated, it closes no more", with(&[(from, FIN | ACK)]), half),
                ("the other side may send", with(&[(to, ACK | PSH), (from, ACK)]), half),
                ("its FIN closes the other half", with(&[(to, ACK | PSH), (to, FIN | ACK)]), TcpClosing),
                ("a RST of either closes", with(&[(from, RST)]), TcpClosing),
                ("a RST of the other closes", with(&[(to, RST)]), TcpClosing),
                ("an ACK of the side that closed restores nothing", with(&[(from, ACK)]), half),
                ("data of the side that closed shows that the FIN was forged", with(&[(from, ACK | PSH)]), TcpEstablished),
            ];
            for (sentence, found, expected) in rows {
                assert_eq!(found, expected, "{sentence}, {from:?}");
            }
        }
    }

    #[test]
    fn one_way_tcp_sees_the_client_only() {
        use FlowState::{TcpOneWay, TcpOneWayClosing, TcpOneWayHalfClosed, TcpOneWayNew};
        let rows = [
            ("any packet may confirm", after(TcpOneWayNew, &[(ToBackend, ACK)]), TcpOneWay),
            ("a FIN that does, closes one half", after(TcpOneWayNew, &[(ToBackend, FIN | ACK)]), TcpOneWayHalfClosed),
            ("the client's FIN closes one half", after(TcpOneWay, &[(ToBackend, FIN | ACK)]), TcpOneWayHalfClosed),
            ("a RST closes", after(TcpOneWay, &[(ToBackend, RST)]), TcpOneWayClosing),
            ("after a FIN too", after(TcpOneWayHalfClosed, &[(ToBackend, RST)]), TcpOneWayClosing),
            ("an ACK does not restore", after(TcpOneWayClosing, &[(ToBackend, ACK)]), TcpOneWayClosing),
            ("nor after a FIN", after(TcpOneWayHalfClosed, &[(ToBackend, ACK)]), TcpOneWayHalfClosed),
            ("data does", after(TcpOneWayClosing, &[(ToBackend, ACK | PSH)]), TcpOneWay),
            ("after a FIN too", after(TcpOneWayHalfClosed, &[(ToBackend, ACK | PSH)]), TcpOneWay),
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
        ];
        for (sentence, found, expected) in rows {
            assert_eq!(found, expected, "{sentence}");
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
    fn a_packet_is_plain_if_it_changes_no_state_and_has_no_syn() {
        for state in FlowState::ALL {
            assert_eq!(FlowState::ALL[state as usize], state);
            for direction in [ToBackend, ToClient] {
                for flags in 0..=u8::MAX {
                    let transport = transport_of(state, flags);
                    let moves = next_state(state, transport, direction) != state;
                    let has_syn = matches!(transport, Transport::Tcp { .. }) && flags & SYN != 0;
                    let plain = !moves && !has_syn && !is_of_sctp(state);
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
}

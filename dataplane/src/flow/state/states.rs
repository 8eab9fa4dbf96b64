//! The states of a flow, and the packets that change them.
//!
//! A flow is *confirmed* when both sides have shown that they exist (in one-way modes: when its client has continued
//! for a while). Until then it is the first to yield when memory or ports run out (FORWARDING 3), and nothing that a
//! client alone can forge may confirm it. UDP has a class in between: one reply makes a *single exchange*, which yields
//! after all unconfirmed flows; the client's next packet makes a *stream*, which never yields.
//!
//! Anyone can forge FIN and RST from the client's address, so they only shorten the idle limit, and later packets of
//! the other side restore it, a bare acknowledgement included (docs/internals/decisions/0082-who-may-end-a-flow.md):
//!
//! - A FIN counts once the other side has acknowledged exactly that FIN ([`crate::flow::advance()`] compares the
//!   numbers). Until then any other packet of the other side shows that it did not accept it.
//! - A RST is never acknowledged. Any packet of the other side shows that it did not accept it.
//! - Packets of the backend arrive by its own link, so nobody outside can forge them. Its FIN and RST let the client's
//!   next SYN begin a new flow.
//!
//! Not here: sequence numbers and time, which a state change may need too ([`crate::flow::advance()`]), idle limits
//! ([`crate::flow::IdleLimits`]), and which packets change nothing ([`crate::flow::is_plain`]).

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
/// The numbers of shifted flows, see [`FlowMode::number`].
const SHIFTED_NAT: u32 = 5;
const SHIFTED_DNAT: u32 = 6;
const _: () = assert!((FlowMode::Gue as u32) < SHIFTED_NAT);
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

    /// The number of flows in this mode, in three bits; `is_shifted`: of those with a [`super::Shift`], which two-way modes
    /// have. No table of the fast path knows these.
    #[inline(always)]
    pub(crate) const fn number(self, is_shifted: bool) -> u32 {
        match self {
            Self::Nat if is_shifted => SHIFTED_NAT,
            Self::Dnat if is_shifted => SHIFTED_DNAT,
            _ => self as u32,
        }
    }

    /// Whether flows with this number are shifted, of which the lower three bits count.
    #[inline(always)]
    pub(crate) const fn is_shifted_number(number: u32) -> bool {
        matches!(number & 7, SHIFTED_NAT | SHIFTED_DNAT)
    }

    /// The mode with this number, of which the lower three bits count.
    #[inline(always)]
    pub(crate) const fn of_number(number: u32) -> Self {
        match number & 7 {
            0 | SHIFTED_NAT => Self::Nat,
            1 | SHIFTED_DNAT => Self::Dnat,
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
    /// TCP, two-way: the backend has acknowledged the client's FIN; the backend may continue.
    TcpHalfClosedByClient,
    /// TCP, two-way: the backend's FIN was seen after confirmation; the client may continue.
    TcpHalfClosedByBackend,
    /// TCP, two-way: both sides have closed, and at least one has acknowledged the other's FIN; or the client has
    /// closed and the backend has sent a RST.
    TcpClosing,
    /// TCP, two-way: the backend's FIN or RST was seen before confirmation.
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
    /// TCP, one-way: a RST of the client was seen, and nothing of it since.
    TcpOneWayReset,
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
    /// TCP, two-way: the client's FIN was seen after confirmation, and nothing of the backend since.
    TcpFinOfClient,
    /// TCP, two-way: the same, but the backend has sent a packet since that acknowledged less. That packet was under
    /// way already, or the FIN was forged.
    TcpFinDoubted,
    /// TCP, two-way: a RST of the client was seen after confirmation, and nothing of the backend since.
    TcpResetByClient,
    /// TCP, two-way: a RST of the backend was seen after confirmation, and nothing of the client since.
    TcpResetByBackend,
    /// TCP, two-way, begun by a packet of the backend (FORWARDING 4, `dnat`): the client has not yet shown that it
    /// knows the connection.
    TcpFromBackend,
    /// UDP, two-way, begun by a packet of the backend: the client has not sent yet.
    UdpFromBackend,
    /// SCTP, two-way, begun by a packet of the backend: the client has not yet shown that it knows the association.
    SctpFromBackend,
    /// SCTP: one end seems to have shut down or aborted, but no handshake has proven its tag. The next packet that goes
    /// on restores the association.
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
            Self::TcpOneWayReset => "one_way_reset",
            Self::SctpHalfClosed => "half_closed",
            Self::UdpUnreplied => "unreplied",
            Self::UdpExchange => "exchange",
            Self::Udp => "stream",
            Self::TcpFinOfClient => "fin_of_client",
            Self::TcpFinDoubted => "fin_doubted",
            Self::TcpResetByClient => "reset_by_client",
            Self::TcpResetByBackend => "reset_by_backend",
            Self::TcpFromBackend | Self::UdpFromBackend | Self::SctpFromBackend => "from_backend",
        }
    }

    /// Every state, in the order of their numbers, which never change: files of saved flows hold them.
    pub const ALL: [Self; 28] = [
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
        Self::TcpOneWayReset,
        Self::UdpUnreplied,
        Self::UdpExchange,
        Self::Udp,
        Self::UdpOneWayNew,
        Self::UdpOneWay,
        Self::SctpOpening,
        Self::Sctp,
        Self::SctpClosing,
        Self::TcpFinOfClient,
        Self::TcpFinDoubted,
        Self::TcpResetByClient,
        Self::TcpResetByBackend,
        Self::TcpFromBackend,
        Self::UdpFromBackend,
        Self::SctpFromBackend,
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

    /// The initial state of a flow that a packet of the backend begins.
    #[must_use]
    pub const fn first_of_backend(transport: Transport) -> Self {
        match transport {
            Transport::Tcp { .. } => Self::TcpFromBackend,
            Transport::Sctp { .. } => Self::SctpFromBackend,
            _ => Self::UdpFromBackend,
        }
    }

    /// The transport protocol number of flows in this state.
    #[must_use]
    pub const fn protocol(self) -> u8 {
        match self {
            Self::UdpUnreplied | Self::UdpExchange | Self::Udp | Self::UdpOneWayNew | Self::UdpOneWay => protocol::UDP,
            Self::UdpFromBackend => protocol::UDP,
            Self::SctpOpening | Self::Sctp | Self::SctpClosing | Self::SctpHalfClosed | Self::SctpFromBackend => protocol::SCTP,
            _ => protocol::TCP,
        }
    }

    /// The class in which the flow yields; `None` if it never yields.
    #[must_use]
    #[inline]
    pub const fn yield_class(self) -> Option<YieldClass> {
        match self {
            Self::TcpEstablished | Self::TcpHalfClosedByClient | Self::TcpHalfClosedByBackend | Self::TcpClosing => None,
            Self::TcpFinOfClient | Self::TcpFinDoubted | Self::TcpResetByClient | Self::TcpResetByBackend => None,
            Self::TcpOneWay | Self::TcpOneWayHalfClosed | Self::TcpOneWayReset => None,
            Self::Udp | Self::UdpOneWay | Self::Sctp | Self::SctpClosing | Self::SctpHalfClosed => None,
            Self::UdpExchange => Some(YieldClass::SingleExchange),
            Self::TcpOpening | Self::TcpAnswered | Self::TcpRefused | Self::TcpAdopted => Some(YieldClass::Unconfirmed),
            Self::TcpOneWayNew | Self::UdpUnreplied | Self::UdpOneWayNew | Self::SctpOpening => Some(YieldClass::Unconfirmed),
            Self::TcpFromBackend | Self::UdpFromBackend | Self::SctpFromBackend => Some(YieldClass::Unconfirmed),
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
        matches!(self, Self::TcpClosing | Self::TcpRefused | Self::SctpClosing)
    }

    /// Whether one side has visibly closed its half of the connection.
    #[must_use]
    pub const fn is_half_closed(self) -> bool {
        matches!(
            self,
            Self::TcpFinOfClient
                | Self::TcpHalfClosedByClient
                | Self::TcpHalfClosedByBackend
                | Self::TcpOneWayHalfClosed
                | Self::SctpHalfClosed
        )
    }

    /// Whether the last that was seen of the connection is a RST of one side.
    #[must_use]
    pub const fn is_reset(self) -> bool {
        matches!(self, Self::TcpResetByClient | Self::TcpResetByBackend | Self::TcpOneWayReset)
    }

    /// Whether a number is kept with the flow by which the next packets are checked.
    #[must_use]
    pub(in crate::flow) const fn awaits_number(self) -> bool {
        matches!(
            self,
            Self::TcpAnswered
                | Self::TcpFinOfClient
                | Self::TcpFinDoubted
                | Self::TcpHalfClosedByBackend
                | Self::TcpOneWayHalfClosed
        )
    }

    /// Whether the backend has shown that it ended or refused the connection, so that the client's next SYN begins
    /// another one.
    #[must_use]
    pub const fn is_ended_by_backend(self) -> bool {
        self.is_closing() || matches!(self, Self::TcpHalfClosedByBackend | Self::TcpResetByBackend)
    }

    /// Whether only packets of the client, which anyone can forge, have ended the connection.
    #[must_use]
    pub const fn is_ended_by_client(self) -> bool {
        !self.is_ended_by_backend() && (self.is_half_closed() || self.is_reset())
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
/// nothing. A change into a confirmed state is a proposal: [`crate::flow::advance()`] checks numbers and time too. How
/// an association goes on once it is confirmed depends on its tags, so it decides that alone.
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
    match direction {
        Direction::ToBackend => after_client(state, flags),
        Direction::ToClient => after_backend(state, flags),
    }
}

/// The next state after a segment of the client, which anyone can forge.
const fn after_client(state: FlowState, flags: u8) -> FlowState {
    use FlowState::*;
    use tcp_flags::{ACK, FIN, RST, SYN};
    let resets = flags & RST != 0;
    let closes = flags & FIN != 0 && !resets;
    let continues = !resets && !closes;
    let is_later = !resets && flags & (SYN | ACK) == ACK;
    match state {
        TcpEstablished | TcpFinDoubted if resets => TcpResetByClient,
        TcpEstablished | TcpFinDoubted if closes => TcpFinOfClient,
        // Only if it acknowledges the backend's FIN.
        TcpHalfClosedByBackend if resets || closes => TcpClosing,
        // Whoever has sent the RST has forgotten the connection, and would answer this with another.
        TcpResetByBackend if resets || closes => TcpClosing,
        TcpResetByBackend => TcpEstablished,
        // Only if it acknowledges the backend's SYN.
        TcpAnswered if is_later && closes => TcpFinOfClient,
        TcpAnswered if is_later => TcpEstablished,
        TcpFromBackend if is_later && closes => TcpFinOfClient,
        TcpFromBackend if is_later => TcpEstablished,
        TcpOneWayNew | TcpOneWay | TcpOneWayHalfClosed if resets => TcpOneWayReset,
        TcpOneWayNew | TcpOneWay | TcpOneWayReset if closes => TcpOneWayHalfClosed,
        // Unless it comes before or right behind the FIN.
        TcpOneWayHalfClosed if continues => TcpOneWay,
        TcpOneWayNew => TcpOneWay,
        TcpOneWayReset if continues => TcpOneWay,
        _ => state,
    }
}

/// The next state after a segment of the backend.
const fn after_backend(state: FlowState, flags: u8) -> FlowState {
    use FlowState::*;
    use tcp_flags::{ACK, FIN, PSH, RST, SYN};
    let resets = flags & RST != 0;
    let closes = flags & FIN != 0 && !resets;
    let ends = resets || closes;
    let answers = !ends && flags & (SYN | ACK) == SYN | ACK;
    let is_data = !ends && flags & PSH != 0;
    match state {
        TcpEstablished | TcpFinDoubted | TcpHalfClosedByBackend if resets => TcpResetByBackend,
        TcpEstablished if closes => TcpHalfClosedByBackend,
        TcpFinOfClient | TcpHalfClosedByClient | TcpResetByClient if resets => TcpClosing,
        // To a SYN of the client that came since.
        TcpFinOfClient | TcpFinDoubted | TcpHalfClosedByClient | TcpResetByClient if answers => TcpEstablished,
        // Only if it acknowledges the client's FIN.
        TcpFinOfClient | TcpFinDoubted if closes => TcpClosing,
        TcpFinOfClient | TcpFinDoubted => TcpHalfClosedByClient,
        TcpHalfClosedByClient if closes => TcpClosing,
        TcpResetByClient if closes => TcpHalfClosedByBackend,
        TcpResetByClient => TcpEstablished,
        // Not what a backend began: data of it would confirm that from there.
        TcpOpening | TcpAnswered | TcpAdopted if ends => TcpRefused,
        TcpOpening | TcpRefused if answers => TcpAnswered,
        // A backend sends data only on a connection that it regards as open (a challenge ACK has no PSH).
        TcpAnswered | TcpRefused if is_data => TcpEstablished,
        TcpAdopted if flags & (SYN | ACK) == ACK => TcpEstablished,
        _ => state,
    }
}

/// Whether the number of a packet is kept although it does not change the state: another FIN of the client.
pub(in crate::flow) const fn keeps_number(state: FlowState, transport: Transport) -> bool {
    matches!((state, transport), (FlowState::TcpFinOfClient | FlowState::TcpOneWayHalfClosed, Transport::Tcp { flags })
        if flags & tcp_flags::FIN != 0)
}

const fn next_udp_state(state: FlowState, direction: Direction) -> FlowState {
    match (state, direction) {
        (FlowState::UdpUnreplied, Direction::ToClient) => FlowState::UdpExchange,
        (FlowState::UdpExchange, Direction::ToBackend) => FlowState::Udp,
        (FlowState::UdpFromBackend, Direction::ToBackend) => FlowState::UdpExchange,
        (FlowState::UdpOneWayNew, _) => FlowState::UdpOneWay,
        _ => state,
    }
}

/// For two-way flows. The backend keeps state of the association from the client's cookie on (RFC 9260 section 5.1),
/// and only a backend with that state sends these chunks. For other changes see [`crate::flow::advance()`].
const fn next_sctp_state(state: FlowState, chunk: u8, direction: Direction) -> FlowState {
    use FlowState::{Sctp, SctpFromBackend, SctpOpening};
    use sctp_chunk::{COOKIE_ACK, DATA, HEARTBEAT, HEARTBEAT_ACK, I_DATA, SACK};
    match (state, direction) {
        (SctpFromBackend, Direction::ToBackend) if matches!(chunk, DATA | I_DATA | SACK | HEARTBEAT | HEARTBEAT_ACK) => Sctp,
        (SctpOpening, Direction::ToClient) if matches!(chunk, COOKIE_ACK | DATA | I_DATA | SACK | HEARTBEAT | HEARTBEAT_ACK) => {
            Sctp
        }
        _ => state,
    }
}

/// Bits of the number of a state, below that of a mode, in the byte by which [`super::Admission`] finds both.
pub(crate) const STATE_BITS: u32 = 5;

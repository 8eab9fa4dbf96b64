//! Idle limits by flow state: those of the gateway, and those of a service for flows that carry data.
//!
//! Not here: ending flows.

use std::time::Duration;

use super::entry::Flow;
use super::state::FlowState;
use super::tick::{Tick, Ticks};
use crate::wire::Address;

/// Bounds of the time between two news of a flow.
const REFRESH: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(600)];

/// Idle limits of flows, and their maximum number (DESIGN section 7, key `flows`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowLimits {
    /// Maximum number of flows of both families together, per worker.
    pub max_per_worker: u32,
    /// TCP, established.
    pub tcp_established: Duration,
    /// TCP, SYN seen, handshake not complete.
    pub tcp_opening: Duration,
    /// TCP, one side's FIN seen (RFC 5382 REQ-5: at least 4 minutes).
    pub tcp_half_closed: Duration,
    /// TCP, the FINs of both sides or a RST seen.
    pub tcp_closing: Duration,
    /// TCP in a one-way mode, in which only the client's packets are seen.
    pub tcp_one_way: Duration,
    /// UDP streams: the client has sent again after the first reply.
    pub udp: Duration,
    /// UDP single exchanges: answered, and the client has not sent since.
    pub udp_exchange: Duration,
    /// UDP, unanswered.
    pub udp_unreplied: Duration,
    /// SCTP.
    pub sctp: Duration,
    /// How long a removed backend still gets mid-stream packets of connections that this gateway does not know
    /// (FORWARDING 4).
    pub table_grace: Duration,
}
impl FlowLimits {
    /// The longest idle limit of services without an idle timeout of their own.
    #[must_use]
    pub fn longest_idle(&self) -> Duration {
        let Self { tcp_established, tcp_opening, tcp_half_closed, tcp_closing, tcp_one_way, .. } = *self;
        let Self { udp, udp_exchange, udp_unreplied, sctp, .. } = *self;
        let tcp = [tcp_established, tcp_opening, tcp_half_closed, tcp_closing, tcp_one_way];
        tcp.into_iter().chain([udp, udp_exchange, udp_unreplied, sctp]).fold(Duration::ZERO, Duration::max)
    }
}
impl Default for FlowLimits {
    /// DESIGN section 7, key `flows`.
    fn default() -> Self {
        Self {
            max_per_worker: 1 << 20,
            tcp_established: Duration::from_secs(7200),
            tcp_opening: Duration::from_secs(30),
            tcp_half_closed: Duration::from_secs(300),
            tcp_closing: Duration::from_secs(10),
            tcp_one_way: Duration::from_secs(900),
            udp: Duration::from_secs(120),
            udp_exchange: Duration::from_secs(10),
            udp_unreplied: Duration::from_secs(30),
            sctp: Duration::from_secs(3600),
            table_grace: Duration::from_secs(60),
        }
    }
}

/// Idle limits of all states.
#[derive(Clone, Copy, Debug)]
pub struct IdleLimits {
    by_state: [Ticks; FlowState::ALL.len()],
    /// The smaller of `by_state` and the shortest idle timeout of any service.
    at_least: [Ticks; FlowState::ALL.len()],
    /// The smallest of `at_least`.
    shortest: Ticks,
}

/// How often partners are told that a flow with this idle limit carries packets: after a quarter of it, within [`REFRESH`].
pub(crate) fn refresh_interval(limit: Ticks) -> Ticks {
    let [least, most] = REFRESH.map(Ticks::from);
    Ticks(limit.0 / 4).clamp(least, most)
}

impl IdleLimits {
    /// The limits from the configuration.
    #[must_use]
    pub fn new(limits: &FlowLimits) -> Self {
        let by_state = FlowState::ALL.map(|state| Ticks::from(limit(limits, state)));
        Self { by_state, at_least: by_state, shortest: smallest(&by_state) }
    }

    /// Updates the lower bounds from the shortest idle timeout that a service of the snapshot sets.
    pub fn follow(&mut self, shortest: Option<Ticks>) {
        let shortest = shortest.unwrap_or(Ticks(u32::MAX));
        self.at_least = FlowState::ALL.map(|state| self.by_state[state as usize].min(shortest));
        self.shortest = smallest(&self.at_least);
    }

    /// No flow that was seen more recently has exceeded its limit, whatever its state and service.
    #[must_use]
    #[inline]
    pub(crate) const fn shortest(&self) -> Ticks {
        self.shortest
    }

    /// Whether a flow in `state`, last seen then, may have exceeded its limit. If this returns false the flow is alive,
    /// whatever its service.
    #[must_use]
    #[inline]
    pub fn may_be_over(&self, state: FlowState, last_seen: Tick, now: Tick) -> bool {
        now.since(last_seen) >= self.at_least[state as usize]
    }

    /// Whether a flow in a handshake has exceeded its limit, which no service changes.
    #[must_use]
    #[inline]
    pub(crate) fn is_handshake_over(&self, state: FlowState, idle: Ticks) -> bool {
        idle >= self.by_state[state as usize]
    }

    /// Whether a flow in `state`, last seen then, has exceeded its limit. `own` is the idle timeout of its service. It
    /// replaces the limit in states in which flows carry data; for half-closed flows and single exchanges it can only
    /// shorten the limit.
    #[must_use]
    pub fn is_over(&self, state: FlowState, own: Option<Ticks>, last_seen: Tick, now: Tick) -> bool {
        now.since(last_seen) >= self.of(state, own)
    }

    /// The limit of a flow in `state`, whose service has the idle timeout `own`.
    pub(crate) fn of(&self, state: FlowState, own: Option<Ticks>) -> Ticks {
        let built_in = self.by_state[state as usize];
        match own {
            Some(own) if state.is_half_closed() || state == FlowState::UdpExchange => own.min(built_in),
            Some(own) if state.is_confirmed() && !state.is_closing() => own,
            _ => built_in,
        }
    }

    /// Whether a flow has exceeded its limit, see [`Self::is_over`]. One with a foreign port lasts one interval longer while
    /// it is in use: partners or another worker may have seen packets meanwhile that this worker does not know. So does
    /// every shadow, in any state.
    pub(crate) fn is_flow_over<A: Address>(&self, flow: &Flow<A>, own: Option<Ticks>, is_shadow: bool, now: Tick) -> bool {
        let limit = self.of(flow.state, own);
        let is_in_use = flow.state.is_confirmed() && !flow.state.is_closing();
        let is_told_late = is_shadow || is_in_use && flow.has_foreign_port();
        let late = if is_told_late { refresh_interval(limit).0 } else { 0 };
        now.since(flow.last_seen).0 >= limit.0.saturating_add(late)
    }

    /// Whether a flow has been silent for half of its limit: so long that partners, who hear of packets at intervals,
    /// have to hear of the next one at once.
    pub(crate) fn is_long_silent<A: Address>(&self, flow: &Flow<A>, own: Option<Ticks>, now: Tick) -> bool {
        now.since(flow.last_seen).0 >= self.of(flow.state, own).0 / 2
    }

    /// Whether a flow last seen then has been idle for as long as a closing flow may be.
    #[must_use]
    pub fn is_silent(&self, last_seen: Tick, now: Tick) -> bool {
        now.since(last_seen) >= self.by_state[FlowState::TcpClosing as usize]
    }
}

fn smallest(limits: &[Ticks]) -> Ticks {
    limits.iter().copied().min().unwrap_or(Ticks(0))
}

/// The gateway's limit of a state. SCTP associations that open or close have the limits of TCP connections that do. A
/// FIN only shortens the limit, and a single exchange lives no longer than a stream.
fn limit(limits: &FlowLimits, state: FlowState) -> Duration {
    use FlowState::*;
    match state {
        TcpOpening | TcpAnswered | TcpAdopted | TcpOneWayNew | SctpOpening => limits.tcp_opening,
        TcpEstablished => limits.tcp_established,
        TcpHalfClosedByClient | TcpHalfClosedByBackend => limits.tcp_half_closed.min(limits.tcp_established),
        TcpOneWayHalfClosed => limits.tcp_half_closed.min(limits.tcp_one_way),
        SctpHalfClosed => limits.tcp_half_closed.min(limits.sctp),
        TcpClosing | TcpRefused | TcpOneWayClosing | SctpClosing => limits.tcp_closing,
        TcpOneWay => limits.tcp_one_way,
        UdpUnreplied | UdpOneWayNew => limits.udp_unreplied,
        UdpExchange => limits.udp_exchange.min(limits.udp),
        Udp | UdpOneWay => limits.udp,
        Sctp => limits.sctp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> IdleLimits {
        let seconds = Duration::from_secs;
        IdleLimits::new(&FlowLimits {
            max_per_worker: 1,
            tcp_established: seconds(7200),
            tcp_opening: seconds(30),
            tcp_half_closed: seconds(300),
            tcp_closing: seconds(10),
            tcp_one_way: seconds(900),
            udp: seconds(120),
            udp_exchange: seconds(11),
            udp_unreplied: seconds(31),
            sctp: seconds(3600),
            ..FlowLimits::default()
        })
    }

    fn ticks(seconds: u64) -> Ticks {
        Ticks::from(Duration::from_secs(seconds))
    }

    #[test]
    fn each_state_has_its_limit_across_the_wrap_of_the_tick() {
        use FlowState::*;
        let rows = [
            (TcpOpening, 30),
            (TcpAnswered, 30),
            (TcpEstablished, 7200),
            (TcpHalfClosedByClient, 300),
            (TcpHalfClosedByBackend, 300),
            (TcpClosing, 10),
            (TcpRefused, 10),
            (TcpAdopted, 30),
            (TcpOneWayNew, 30),
            (TcpOneWay, 900),
            (TcpOneWayHalfClosed, 300),
            (TcpOneWayClosing, 10),
            (UdpUnreplied, 31),
            (UdpExchange, 11),
            (Udp, 120),
            (UdpOneWayNew, 31),
            (UdpOneWay, 120),
            (SctpOpening, 30),
            (Sctp, 3600),
            (SctpClosing, 10),
            (SctpHalfClosed, 300),
        ];
        assert_eq!(rows.map(|(state, _)| state), FlowState::ALL);
        let (limits, seen) = (limits(), Tick(u32::MAX - 3));
        for (state, seconds) in rows {
            let ticks = ticks(seconds).0;
            let (before, then) = (Tick(seen.0.wrapping_add(ticks - 1)), Tick(seen.0.wrapping_add(ticks)));
            assert!(!limits.is_over(state, None, seen, before) && !limits.may_be_over(state, seen, before), "{state:?}");
            assert!(limits.is_over(state, None, seen, then) && limits.may_be_over(state, seen, then), "{state:?}");
        }
    }

    #[test]
    fn a_service_has_its_own_limit_for_flows_that_carry_data() {
        let mut limits = limits();
        let own = ticks(60);
        limits.follow(Some(own));
        let rows = [
            (FlowState::TcpEstablished, true),
            (FlowState::TcpOneWay, true),
            (FlowState::Udp, true),
            (FlowState::Sctp, true),
            (FlowState::TcpOpening, false),
            (FlowState::TcpClosing, false),
            (FlowState::TcpHalfClosedByClient, true),
            (FlowState::TcpOneWayHalfClosed, true),
            (FlowState::UdpUnreplied, false),
            (FlowState::UdpExchange, false),
        ];
        for (state, holds) in rows {
            let until = if holds { own } else { limits.by_state[state as usize] };
            assert!(!limits.is_over(state, Some(own), Tick(0), Tick(until.0 - 1)), "{state:?}");
            assert!(limits.is_over(state, Some(own), Tick(0), Tick(until.0)), "{state:?}");
        }
        let other = (FlowState::TcpEstablished, Tick(0), Tick(own.0));
        assert!(limits.may_be_over(other.0, other.1, other.2) && !limits.is_over(other.0, None, other.1, other.2));
        limits.follow(None);
        assert!(!limits.may_be_over(other.0, other.1, other.2), "no service sets one now");
        let day = Some(ticks(86_400));
        assert!(!limits.is_over(FlowState::TcpEstablished, day, Tick(0), Tick(ticks(7200).0)), "longer than the gateway's");
        for (state, seconds) in [(FlowState::TcpHalfClosedByBackend, 300), (FlowState::UdpExchange, 11)] {
            assert!(limits.is_over(state, day, Tick(0), Tick(ticks(seconds).0)), "{state:?} is not prolonged");
        }
        assert!(limits.is_over(FlowState::UdpExchange, Some(ticks(5)), Tick(0), Tick(ticks(5).0)), "and shortened");
    }
}

//! Idle limits by flow state: those of the gateway, and those of a service for flows that carry data.
//!
//! Not here: ending flows.

use std::time::Duration;

use super::entry::Flow;
use super::state::FlowState;
use super::tick::{Tick, Ticks};
use crate::wire::Address;

/// Bounds of the time between two events of a flow that go to partners.
const REFRESH: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(600)];

/// Ports below this one are well known: questions to them are answered at once (RFC 6335 section 6).
const WELL_KNOWN_BELOW: u16 = 1024;
/// Maximum limit of single exchanges with well-known ports (RFC 4787 REQ-5a). Each of them holds a SNAT port.
const WELL_KNOWN_EXCHANGE: Duration = Duration::from_secs(30);

/// Idle limits of flows, and their maximum number (DESIGN section 7, key `flows`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowLimits {
    /// Maximum number of flows of both families together, per worker.
    pub max_per_worker: u32,
    /// TCP, established (RFC 5382 REQ-5: at least 2 h 4 m, since Linux sends its first keep-alive after 2 h).
    pub tcp_established: Duration,
    /// TCP, SYN seen, handshake not complete.
    pub tcp_opening: Duration,
    /// TCP, one side's FIN seen (RFC 5382 REQ-5: at least 4 minutes).
    pub tcp_half_closed: Duration,
    /// TCP, a RST of one side seen, and nothing of the other since (RFC 7857 section 2: 4 minutes).
    pub tcp_reset: Duration,
    /// TCP, both sides have ended it.
    pub tcp_closing: Duration,
    /// TCP in a one-way mode, in which only the client's packets are seen.
    pub tcp_one_way: Duration,
    /// UDP streams: the client has sent again after the first reply.
    pub udp: Duration,
    /// UDP single exchanges: answered, and the client has not sent since (RFC 4787 REQ-5: at least 2 minutes). With
    /// ports below 1024 at most 30 s (REQ-5a).
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
        let Self { tcp_established, tcp_opening, tcp_half_closed, tcp_reset, tcp_closing, tcp_one_way, .. } = *self;
        let Self { udp, udp_exchange, udp_unreplied, sctp, .. } = *self;
        let tcp = [tcp_established, tcp_opening, tcp_half_closed, tcp_reset, tcp_closing, tcp_one_way];
        tcp.into_iter().chain([udp, udp_exchange, udp_unreplied, sctp]).fold(Duration::ZERO, Duration::max)
    }
}
impl Default for FlowLimits {
    /// DESIGN section 7, key `flows`.
    fn default() -> Self {
        Self {
            max_per_worker: 1 << 20,
            tcp_established: Duration::from_secs(7500),
            tcp_opening: Duration::from_secs(30),
            tcp_half_closed: Duration::from_secs(300),
            tcp_reset: Duration::from_secs(240),
            tcp_closing: Duration::from_secs(10),
            tcp_one_way: Duration::from_secs(900),
            udp: Duration::from_secs(120),
            udp_exchange: Duration::from_secs(120),
            udp_unreplied: Duration::from_secs(60),
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

/// Interval at which a flow with this idle limit that carries packets is sent to partners: a quarter of the limit,
/// within
/// [`REFRESH`].
pub(crate) fn refresh_interval(limit: Ticks) -> Ticks {
    let [least, most] = REFRESH.map(Ticks::from);
    Ticks(limit.0 / 4).clamp(least, most)
}

impl IdleLimits {
    /// The limits from the configuration.
    #[must_use]
    pub fn new(limits: &FlowLimits) -> Self {
        let by_state = FlowState::ALL.map(|state| Ticks::from(limit(limits, state)));
        let mut idle = Self { by_state, at_least: by_state, shortest: smallest(&by_state) };
        idle.follow(None);
        idle
    }

    /// Updates the lower bounds from the shortest idle timeout that a service of the snapshot sets.
    pub fn follow(&mut self, shortest: Option<Ticks>) {
        let shortest = shortest.unwrap_or(Ticks(u32::MAX));
        self.at_least = FlowState::ALL.map(|state| self.by_state[state as usize].min(shortest));
        let exchange = &mut self.at_least[FlowState::UdpExchange as usize];
        *exchange = (*exchange).min(Ticks::from(WELL_KNOWN_EXCHANGE));
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

    /// Whether a flow, wherever it is, has exceeded its limit. `own` is the idle timeout of its service, see
    /// `Self::of`.
    #[must_use]
    pub fn is_over<A: Address>(&self, flow: &Flow<A>, own: Option<Ticks>, now: Tick) -> bool {
        now.since(flow.last_seen) >= self.of(flow, own)
    }

    /// The limit of a flow whose service has the idle timeout `own`. It replaces the limits of all states in which
    /// flows carry data. A RST only shortens the limit.
    pub(crate) fn of<A: Address>(&self, flow: &Flow<A>, own: Option<Ticks>) -> Ticks {
        let built_in = self.by_state[flow.state as usize];
        match own {
            Some(own) if flow.state.is_reset() => own.min(built_in),
            Some(own) if carries_data(flow.state) => own,
            _ if flow.state == FlowState::UdpExchange && flow.vip_port < WELL_KNOWN_BELOW => {
                built_in.min(Ticks::from(WELL_KNOWN_EXCHANGE))
            }
            _ => built_in,
        }
    }

    /// Whether a flow has exceeded its limit by what this worker knows, see [`Self::is_over`]. A flow with a foreign
    /// port lasts one interval longer while it is in use: partners or another worker may have seen packets meanwhile
    /// that this worker does not know. A shadow flow lasts longer in any state.
    pub(crate) fn is_flow_over<A: Address>(&self, flow: &Flow<A>, own: Option<Ticks>, is_shadow: bool, now: Tick) -> bool {
        let limit = self.of(flow, own);
        let is_in_use = flow.state.is_confirmed() && !flow.state.is_closing();
        let is_known_late = is_shadow || is_in_use && flow.has_foreign_port();
        let late = if is_known_late { refresh_interval(limit).0 } else { 0 };
        now.since(flow.last_seen).0 >= limit.0.saturating_add(late)
    }

    /// Whether a flow has been silent for half of its limit: so long that the next packet has to be sent to
    /// partners at once, which otherwise learn of packets at intervals.
    pub(crate) fn is_long_silent<A: Address>(&self, flow: &Flow<A>, own: Option<Ticks>, now: Tick) -> bool {
        now.since(flow.last_seen).0 >= self.of(flow, own).0 / 2
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

/// Whether flows in a state carry data, so that their service's idle timeout is theirs.
const fn carries_data(state: FlowState) -> bool {
    use FlowState::{UdpExchange, UdpFromBackend, UdpOneWayNew, UdpUnreplied};
    let is_open = state.is_confirmed() && !state.is_closing() && !state.is_reset();
    is_open || matches!(state, UdpUnreplied | UdpExchange | UdpOneWayNew | UdpFromBackend)
}

/// The gateway's limit of a state. SCTP associations that open or close have the limits of TCP connections that do. FIN
/// and RST only shorten the limit, and a single exchange lives no longer than a stream.
fn limit(limits: &FlowLimits, state: FlowState) -> Duration {
    use FlowState::*;
    match state {
        TcpOpening | TcpAnswered | TcpAdopted | TcpFromBackend | TcpOneWayNew => limits.tcp_opening,
        SctpOpening | SctpFromBackend => limits.tcp_opening,
        TcpEstablished | TcpFinDoubted => limits.tcp_established,
        TcpFinOfClient | TcpHalfClosedByClient | TcpHalfClosedByBackend => limits.tcp_half_closed.min(limits.tcp_established),
        TcpOneWayHalfClosed => limits.tcp_half_closed.min(limits.tcp_one_way),
        TcpResetByClient | TcpResetByBackend => limits.tcp_reset.min(limits.tcp_established),
        TcpOneWayReset => limits.tcp_reset.min(limits.tcp_one_way),
        SctpHalfClosed => limits.tcp_half_closed.min(limits.sctp),
        TcpClosing | TcpRefused | SctpClosing => limits.tcp_closing,
        TcpOneWay => limits.tcp_one_way,
        UdpUnreplied | UdpOneWayNew | UdpFromBackend => limits.udp_unreplied,
        UdpExchange => limits.udp_exchange.min(limits.udp),
        Udp | UdpOneWay => limits.udp,
        Sctp => limits.sctp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::entry::FlowBackend;
    use crate::flow::snat::{PoolId, SnatLease};
    use crate::flow::state::FlowMode;
    use crate::wire::Tuple;

    fn limits() -> IdleLimits {
        let seconds = Duration::from_secs;
        IdleLimits::new(&FlowLimits {
            tcp_established: seconds(7200),
            tcp_opening: seconds(30),
            tcp_half_closed: seconds(300),
            tcp_reset: seconds(241),
            tcp_closing: seconds(10),
            tcp_one_way: seconds(900),
            udp: seconds(120),
            udp_exchange: seconds(51),
            udp_unreplied: seconds(31),
            sctp: seconds(3600),
            ..FlowLimits::default()
        })
    }

    fn ticks(seconds: u64) -> Ticks {
        Ticks::from(Duration::from_secs(seconds))
    }

    /// A flow to this port in this state.
    fn flow(state: FlowState, vip_port: u16, last_seen: Tick) -> Flow<u32> {
        let tuple = Tuple { protocol: state.protocol(), destination_port: vip_port, ..Tuple::default() };
        let lease = SnatLease { address: 0, port: 0, pool: PoolId::NONE };
        Flow::new(&tuple, state, FlowMode::Nat, FlowBackend::default(), &lease, last_seen)
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
            (TcpOneWayReset, 241),
            (UdpUnreplied, 31),
            (UdpExchange, 51),
            (Udp, 120),
            (UdpOneWayNew, 31),
            (UdpOneWay, 120),
            (SctpOpening, 30),
            (Sctp, 3600),
            (SctpClosing, 10),
            (TcpFinOfClient, 300),
            (TcpFinDoubted, 7200),
            (TcpResetByClient, 241),
            (TcpResetByBackend, 241),
            (TcpFromBackend, 30),
            (UdpFromBackend, 31),
            (SctpFromBackend, 30),
            (SctpHalfClosed, 300),
        ];
        assert_eq!(rows.map(|(state, _)| state), FlowState::ALL);
        let (limits, seen) = (limits(), Tick(u32::MAX - 3));
        for (state, seconds) in rows {
            let ticks = ticks(seconds).0;
            let (before, then) = (Tick(seen.0.wrapping_add(ticks - 1)), Tick(seen.0.wrapping_add(ticks)));
            let flow = flow(state, 5060, seen);
            assert!(!limits.is_over(&flow, None, before), "{state:?}");
            assert!(limits.is_over(&flow, None, then) && limits.may_be_over(state, seen, then), "{state:?}");
            if state != UdpExchange {
                assert!(!limits.may_be_over(state, seen, before), "{state:?}");
            }
        }
    }

    #[test]
    fn the_defaults_are_those_of_the_rfcs() {
        let FlowLimits { tcp_established, tcp_half_closed, tcp_reset, udp, udp_exchange, udp_unreplied, .. } =
            FlowLimits::default();
        assert!(tcp_established >= Duration::from_secs(2 * 3600 + 4 * 60), "RFC 5382 REQ-5");
        assert!(tcp_half_closed >= Duration::from_secs(4 * 60), "RFC 5382 REQ-5");
        assert!(tcp_reset >= Duration::from_secs(4 * 60), "RFC 7857 section 2");
        assert!(udp_exchange >= Duration::from_secs(2 * 60) && udp >= udp_exchange, "RFC 4787 REQ-5");
        assert_eq!(udp_unreplied, Duration::from_secs(60));
    }

    #[test]
    fn a_single_exchange_with_a_well_known_port_lives_half_a_minute_at_most() {
        let mut limits = limits();
        let of = |limits: &IdleLimits, port, own| limits.of(&flow(FlowState::UdpExchange, port, Tick(0)), own);
        assert_eq!([1023, 1024].map(|port| of(&limits, port, None)), [ticks(30), ticks(51)]);
        assert!(limits.may_be_over(FlowState::UdpExchange, Tick(0), Tick(ticks(30).0)));
        let own = Some(ticks(600));
        limits.follow(own);
        assert_eq!(of(&limits, 53, own), ticks(600), "a Service may want more");
        let short = IdleLimits::new(&FlowLimits { udp_exchange: Duration::from_secs(7), ..FlowLimits::default() });
        assert_eq!([53, 5060].map(|port| of(&short, port, None)), [ticks(7); 2]);
        assert_eq!(limits.of(&flow(FlowState::Udp, 53, Tick(0)), None), ticks(120), "streams have the limit of streams");
    }

    #[test]
    fn a_service_has_its_own_limit_for_all_flows_that_carry_data() {
        use FlowState::*;
        let built_in = limits();
        let carry = [
            TcpEstablished,
            TcpHalfClosedByClient,
            TcpHalfClosedByBackend,
            TcpOneWay,
            TcpOneWayHalfClosed,
            UdpUnreplied,
            UdpExchange,
            Udp,
            UdpOneWayNew,
            UdpOneWay,
            Sctp,
            TcpFinOfClient,
            TcpFinDoubted,
            UdpFromBackend,
            SctpHalfClosed,
        ];
        for own in [ticks(5), ticks(86_400)] {
            let mut limits = limits();
            limits.follow(Some(own));
            for state in FlowState::ALL {
                let (flow, of_gateway) = (flow(state, 5060, Tick(0)), built_in.by_state[state as usize]);
                let until = match () {
                    () if carry.contains(&state) => own,
                    // A RST only shortens the limit.
                    () if state.is_reset() => own.min(of_gateway),
                    () => of_gateway,
                };
                assert!(!limits.is_over(&flow, Some(own), Tick(until.0 - 1)), "{state:?}");
                assert!(limits.is_over(&flow, Some(own), Tick(until.0)), "{state:?}");
                assert!(limits.may_be_over(state, Tick(0), Tick(until.0)), "{state:?}");
            }
            limits.follow(None);
            assert_eq!(limits.at_least, built_in.at_least, "no service sets one now");
        }
    }
}

//! What a gateway reports about its part in the fleet: VIPs that it owns, partners, sessions of its routing daemon.
//!
//! Invariant: lists are bounded by [`FLEET_ROWS_MAX`](crate::limits::FLEET_ROWS_MAX), whoever sent them.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::ServiceName;

/// The part of a gateway in the fleet, as it sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FleetStatus {
    /// The election of the owners of VIPs; `None` without one.
    pub election: Option<VipElection>,
    /// VIPs that another station announces too, with its Ethernet address as text.
    pub duplicates: BTreeMap<IpAddr, String>,
    /// The gateways to which it replicates flows.
    pub partners: Vec<FleetPartner>,
    /// Flows of partners that it keeps.
    pub shadow_flows: u64,
    /// Sessions of the routing daemon beside it.
    pub sessions: Vec<RoutingSession>,
    /// Services that get less than they ask for.
    pub limits: Vec<ServiceLimit>,
}

/// A Service that a gateway serves, but not all of whose new flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceLimit {
    /// The Service.
    pub service: ServiceName,
    /// What it lacks.
    pub kind: LimitKind,
    /// The same for operators, with figures.
    pub text: String,
}

/// What a Service lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LimitKind {
    /// It has its share of a flow table that is nearly full.
    FlowShare,
    /// A client has its share of the SNAT ports of a backend, most of which are in use.
    SnatShare,
    /// SNAT ports are used again before they have rested, or are all in use.
    SnatPorts,
}

impl LimitKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::FlowShare, Self::SnatShare, Self::SnatPorts];

    /// The word for operators, which is the reason of an Event.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::FlowShare => "FlowShareReached",
            Self::SnatShare => "SnatShareReached",
            Self::SnatPorts => "SnatPortsShort",
        }
    }
}

/// An election of the owners of VIPs, as one gateway sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VipElection {
    /// Number of groups of VIPs.
    pub groups: u8,
    /// The groups that this gateway owns: bit N is group N.
    pub owned: u64,
    /// How often it has taken over a group since its start.
    pub takeovers: u64,
    /// How often it gave up its groups and began anew, because it was stopped or overloaded.
    pub restarts: u64,
    /// Why it leaves its VIPs to others, if it does.
    pub unfit: Option<String>,
}

/// A gateway to which another one replicates flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetPartner {
    /// Its name, or its address while the name is unknown.
    pub name: String,
    /// Where it is reached.
    pub address: String,
    /// Whether it has all flows.
    pub is_in_sync: bool,
    /// Age of the oldest change that it has not acknowledged, milliseconds; `None` while it is not reached.
    pub lag_ms: Option<u64>,
}

/// A session of a routing daemon with a router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingSession {
    /// Its protocol.
    pub protocol: SessionProtocol,
    /// The router: an address, or an interface where the daemon finds the address by itself.
    pub peer: String,
    /// What this means for operators.
    pub health: SessionHealth,
    /// The state in the words of the daemon.
    pub state: String,
    /// Since when the gateway has seen it in this health, seconds since 1970.
    pub since_s: u64,
}

/// The protocol of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SessionProtocol {
    /// Routes.
    Bgp,
    /// Whether the router is reached.
    Bfd,
}

/// Whether a session does what it is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionHealth {
    /// It is established.
    Up,
    /// It is not.
    Down,
    /// An operator has switched it off in the daemon.
    Disabled,
}

impl FleetStatus {
    /// The same without what changes all the time: lag, shadow flows, the words of the routing daemon, and those of
    /// limits. A change of the rest is news.
    #[must_use]
    pub fn without_figures(&self) -> Self {
        let partners = self.partners.iter().map(|partner| FleetPartner { lag_ms: None, ..partner.clone() }).collect();
        let sessions = self.sessions.iter().map(|session| RoutingSession { state: String::new(), ..session.clone() }).collect();
        let limits = self.limits.iter().map(|limit| ServiceLimit { text: String::new(), ..limit.clone() }).collect();
        Self { partners, sessions, limits, shadow_flows: 0, ..self.clone() }
    }

    /// The largest lag of a partner that is reached, milliseconds.
    #[must_use]
    pub fn lag_ms(&self) -> Option<u64> {
        self.partners.iter().filter_map(|partner| partner.lag_ms).max()
    }

    /// Number of partners that have all flows.
    #[must_use]
    pub fn partners_in_sync(&self) -> usize {
        self.partners.iter().filter(|partner| partner.is_in_sync).count()
    }

    /// Number of sessions that are up, and of those that should be.
    #[must_use]
    pub fn sessions_up(&self) -> (usize, usize) {
        let count = |health| self.sessions.iter().filter(|session| session.health == health).count();
        let up = count(SessionHealth::Up);
        (up, up + count(SessionHealth::Down))
    }
}

impl VipElection {
    /// The groups that the gateway owns, ascending.
    pub fn owned_groups(&self) -> impl Iterator<Item = u8> + use<> {
        let (groups, owned) = (self.groups, self.owned);
        (0..groups).filter(move |group| owned >> group & 1 == 1)
    }
}

impl SessionProtocol {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Bgp, Self::Bfd];

    /// Its name in lists and messages.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Bgp => "bgp",
            Self::Bfd => "bfd",
        }
    }
}

impl SessionHealth {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Up, Self::Down, Self::Disabled];

    /// Its name in lists and messages.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
            Self::Disabled => "disabled",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(health: SessionHealth, state: &str) -> RoutingSession {
        let (peer, state) = ("192.0.2.1".to_owned(), state.to_owned());
        RoutingSession { protocol: SessionProtocol::Bgp, peer, health, state, since_s: 7 }
    }

    fn partner(is_in_sync: bool, lag_ms: Option<u64>) -> FleetPartner {
        FleetPartner { name: "edge-2".to_owned(), address: "192.0.2.3:9436".to_owned(), is_in_sync, lag_ms }
    }

    #[test]
    fn figures_are_no_news_and_everything_else_is() {
        let before = FleetStatus {
            election: Some(VipElection { groups: 16, owned: 3, takeovers: 2, ..VipElection::default() }),
            partners: vec![partner(true, Some(4))],
            sessions: vec![session(SessionHealth::Down, "Active")],
            ..FleetStatus::default()
        };
        let figures = FleetStatus {
            partners: vec![partner(true, None)],
            sessions: vec![session(SessionHealth::Down, "Connect")],
            shadow_flows: 9,
            ..before.clone()
        };
        assert_eq!(figures.without_figures(), before.without_figures());
        let owns =
            FleetStatus { election: Some(VipElection { groups: 16, owned: 1, ..VipElection::default() }), ..before.clone() };
        let lags = FleetStatus { partners: vec![partner(false, Some(4))], ..before.clone() };
        let is_up = FleetStatus { sessions: vec![session(SessionHealth::Up, "Established")], ..before.clone() };
        for news in [owns, lags, is_up] {
            assert_ne!(news.without_figures(), before.without_figures());
        }
    }

    #[test]
    fn sessions_that_are_switched_off_are_not_missed() {
        let sessions = [SessionHealth::Up, SessionHealth::Down, SessionHealth::Disabled].map(|health| session(health, ""));
        let status = FleetStatus { sessions: sessions.into(), ..FleetStatus::default() };
        assert_eq!(status.sessions_up(), (1, 2));
    }

    #[test]
    fn the_largest_lag_is_that_of_partners_that_are_reached() {
        let partners = vec![partner(true, Some(4)), partner(false, None), partner(false, Some(90))];
        let status = FleetStatus { partners, ..FleetStatus::default() };
        assert_eq!((status.lag_ms(), status.partners_in_sync()), (Some(90), 1));
        assert_eq!(FleetStatus::default().lag_ms(), None);
    }

    #[test]
    fn owned_groups_are_bits() {
        let owned = |groups, owned| VipElection { groups, owned, ..VipElection::default() }.owned_groups().collect::<Vec<_>>();
        assert_eq!(owned(16, 0b1000_0101), [0, 2, 7]);
        assert_eq!(owned(64, 1 << 63), [63]);
        assert_eq!(owned(2, u64::MAX), [0, 1]);
    }
}

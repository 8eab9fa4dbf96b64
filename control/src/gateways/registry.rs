//! The registry of gateways: which are connected, the generation that each has applied, its reports, which gateways are
//! drained, and when disconnected ones were last seen.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::SystemTime;

use imbl::OrdMap;
use ipnet::IpNet;
use proto::limits::PARTNERS_MAX;
use proto::{AddressRange, FleetStatus, GatewayProfile, Member, Reason, Refusal, ServiceName};
use tokio::sync::watch;

/// One connected gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// Its name.
    pub name: String,
    /// Version of its program.
    pub version: String,
    /// Counter of the newest generation of our epoch that all its workers have applied.
    pub acknowledged: Option<u64>,
    /// What it says about itself.
    pub profile: Arc<GatewayProfile>,
    /// Where it replicates flows; `None`: it does not.
    pub replication: Option<SocketAddr>,
    /// Whether every worker uses a complete state.
    pub ready: bool,
    /// The backends of each service as the gateway sees them. Copies share unchanged parts.
    pub health: OrdMap<ServiceName, Health>,
    /// Time of its last message.
    pub last_seen: SystemTime,
    /// Its number of flows in its last report.
    pub flows: u64,
    /// Its part in the fleet, as of its last report; `None` before it, and of older versions.
    pub fleet: Option<Arc<FleetStatus>>,
}

impl Gateway {
    /// Takes over its part in the fleet; returns whether more than figures has changed.
    fn reports(&mut self, fleet: FleetStatus) -> bool {
        let is_news = self.fleet.as_ref().is_none_or(|before| before.without_figures() != fleet.without_figures());
        self.fleet = Some(Arc::new(fleet));
        is_news
    }

    /// Whether it says that it cannot answer ARP and NDP for all addresses of a range.
    fn cannot_announce(&self, range: &AddressRange) -> bool {
        let holds = |net: &IpNet| net.contains(&range.first()) && net.contains(&range.last());
        !self.profile.prefixes.is_empty() && !self.profile.prefixes.iter().any(holds)
    }
}

/// Maximum number of disconnected gateways in the registry, the most recent ones; a group has about a dozen.
const DISCONNECTED_MAX: usize = 1024;

/// One service as one gateway sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// The complete set.
    pub backends: u32,
    /// Backends that pass their probes, or have none.
    pub healthy: u32,
    /// Why the gateway refuses it, wholly or in part.
    pub refusal: Option<Arc<Refusal>>,
}

/// A report of a gateway: changes since its last one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Whether every worker uses a complete state.
    pub ready: bool,
    /// Changed entries.
    pub health: Vec<(ServiceName, Health)>,
    /// Removed services.
    pub removed: Vec<ServiceName>,
    /// Its number of flows.
    pub flows: u64,
    /// Its part in the fleet, if it reports it.
    pub fleet: Option<FleetStatus>,
    /// The networks of its links, if they have changed.
    pub links: Option<Vec<IpNet>>,
}

/// Connected gateways by connection. A gateway that reconnects may appear twice for a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gateways {
    connected: BTreeMap<u64, Gateway>,
    last_connection: u64,
    disconnected: BTreeMap<String, SystemTime>,
    drained: Arc<BTreeSet<String>>,
    /// The addresses of `l2` pools.
    l2: Arc<[AddressRange]>,
}

impl Gateways {
    /// The connected gateways, each with the number of its connection.
    pub fn connections(&self) -> impl Iterator<Item = (u64, &Gateway)> {
        self.connected.iter().map(|(number, gateway)| (*number, gateway))
    }

    /// The connected gateways.
    pub fn iter(&self) -> impl Iterator<Item = &Gateway> {
        self.connected.values()
    }

    /// Disconnected gateways, and when each was last seen.
    #[must_use]
    pub const fn disconnected(&self) -> &BTreeMap<String, SystemTime> {
        &self.disconnected
    }

    /// Whether an operator drained the gateway of this name, whether or not it is connected.
    #[must_use]
    pub fn is_drained(&self, name: &str) -> bool {
        self.drained.contains(name)
    }

    /// Sets the drained gateways.
    pub fn drain(gateways: &watch::Sender<Self>, drained: BTreeSet<String>) {
        gateways.send_if_modified(|all| {
            let is_news = *all.drained != drained;
            if is_news {
                all.drained = Arc::new(drained);
            }
            is_news
        });
    }

    /// Sets the addresses of `l2` pools.
    pub fn serve_l2(gateways: &watch::Sender<Self>, ranges: &[AddressRange]) {
        gateways.send_if_modified(|all| {
            let is_news = *all.l2 != *ranges;
            if is_news {
                all.l2 = ranges.into();
            }
            is_news
        });
    }

    /// The addresses of `l2` pools; clones share them.
    #[must_use]
    pub const fn l2_ranges(&self) -> &Arc<[AddressRange]> {
        &self.l2
    }

    /// The relevant gateways, as for [`Gateways::all_reached`], that say that they cannot answer ARP and NDP for all
    /// addresses of a range.
    #[must_use]
    pub fn unannounced_by(&self, range: &AddressRange) -> BTreeSet<&str> {
        self.relevant().filter(|gateway| gateway.cannot_announce(range)).map(|gateway| gateway.name.as_str()).collect()
    }

    /// The same for a pool with these addresses; `None` if it is no `l2` pool in use.
    #[must_use]
    pub fn pool_unannounced_by(&self, addresses: &[String]) -> Option<BTreeSet<&str>> {
        let ranges: Vec<AddressRange> = addresses.iter().filter_map(|text| text.parse().ok()).collect();
        let is_l2 = ranges.first().is_some_and(|first| self.l2.contains(first));
        is_l2.then(|| ranges.iter().flat_map(|range| self.unannounced_by(range)).collect())
    }

    /// Whether a relevant gateway has said which networks its links have.
    #[must_use]
    pub fn knows_links(&self) -> bool {
        self.relevant().any(|gateway| !gateway.profile.prefixes.is_empty())
    }

    /// Why an address of an `l2` pool among `addresses` is not announced: all relevant gateways, which are returned, say that
    /// they cannot.
    #[must_use]
    pub fn unannounced(&self, addresses: impl IntoIterator<Item = IpAddr>) -> Option<(BTreeSet<&str>, Refusal)> {
        let address =
            addresses.into_iter().filter(|address| self.l2.iter().any(|range| range.contains(*address))).find(|address| {
                let alone = AddressRange::new(*address, *address);
                self.relevant().next().is_some()
                    && alone.is_ok_and(|alone| self.relevant().all(|gateway| gateway.cannot_announce(&alone)))
            })?;
        let message = format!(
            "{address} is of a pool with `announce: l2`, and lies in no network of a port or VLAN device, so that no gateway answers \
             ARP or NDP for it; give a port an address of its network, or set `announce: routed`"
        );
        let all = self.relevant().map(|gateway| gateway.name.as_str()).collect();
        Some((all, Refusal { reason: Reason::Refused, message }))
    }

    /// The connected gateways that replicate flows, except the one of this name, by name. One that reconnects counts with
    /// its newest connection.
    #[must_use]
    pub fn members_beside(&self, name: &str) -> Vec<Member> {
        let others = self.iter().filter(|gateway| gateway.name != name);
        let by_name: BTreeMap<_, _> = others.filter_map(|gateway| Some((&gateway.name, gateway.replication?))).collect();
        let member = |(gateway, replication): (&String, SocketAddr)| Member { gateway: gateway.clone(), replication };
        by_name.into_iter().map(member).take(PARTNERS_MAX).collect()
    }

    /// Whether any relevant gateway, as for [`Gateways::all_reached`], has applied `counter` or a newer generation.
    #[must_use]
    pub fn any_reached(&self, counter: u64) -> bool {
        self.relevant().any(|gateway| gateway.acknowledged >= Some(counter))
    }

    /// Counter of the newest generation that all of them have applied; 0 while one has applied none of this epoch;
    /// `None` if no gateway is connected.
    #[must_use]
    pub fn reached_by_all(&self) -> Option<u64> {
        self.iter().map(|gateway| gateway.acknowledged.unwrap_or(0)).min()
    }

    /// The gateways that count: those that are not drained, or all if all are drained.
    fn relevant(&self) -> impl Iterator<Item = &Gateway> {
        let is_any_undrained = self.iter().any(|gateway| !self.is_drained(&gateway.name));
        self.iter().filter(move |gateway| !(is_any_undrained && self.is_drained(&gateway.name)))
    }

    /// Whether all relevant gateways have applied `counter` or a newer generation: those that are not drained, or all
    /// if all are drained. False if none is connected.
    #[must_use]
    pub fn all_reached(&self, counter: u64) -> bool {
        let mut awaited = self.relevant().peekable();
        awaited.peek().is_some() && awaited.all(|gateway| gateway.acknowledged >= Some(counter))
    }

    /// The gateways that have applied `counter` or a newer generation and refuse the Service wholly or in part, and the
    /// refusal of the first of them by name. Drained gateways count only if all are drained.
    #[must_use]
    pub fn refusal(&self, service: &ServiceName, counter: u64) -> Option<(BTreeSet<&str>, &Refusal)> {
        let applied = self.relevant().filter(|gateway| gateway.acknowledged >= Some(counter));
        let refusals: BTreeMap<&str, &Refusal> = applied
            .filter_map(|gateway| Some((gateway.name.as_str(), gateway.health.get(service)?.refusal.as_deref()?)))
            .collect();
        let first = *refusals.values().next()?;
        Some((refusals.into_keys().collect(), first))
    }

    /// Whether any gateway refuses the Service wholly or in part, in any generation.
    #[must_use]
    pub fn is_refused(&self, service: &ServiceName) -> bool {
        self.iter().filter_map(|gateway| gateway.health.get(service)).any(|health| health.refusal.is_some())
    }

    fn leave(&mut self, number: u64) {
        let Some(Gateway { name, last_seen, .. }) = self.connected.remove(&number) else { return };
        if self.iter().any(|gateway| gateway.name == name) {
            return;
        }
        self.disconnected.insert(name, last_seen);
        if self.disconnected.len() > DISCONNECTED_MAX
            && let Some(oldest) = self.disconnected.iter().min_by_key(|(_, seen)| **seen).map(|(name, _)| name.clone())
        {
            self.disconnected.remove(&oldest);
        }
    }
}

/// Registration of a gateway, which is removed when this is dropped.
#[derive(Debug)]
pub struct Connection {
    gateways: watch::Sender<Gateways>,
    number: u64,
}

impl Connection {
    /// Adds a gateway.
    #[must_use]
    pub fn open(gateways: &watch::Sender<Gateways>, name: &str, version: &str, profile: impl Into<GatewayProfile>) -> Self {
        let profile = Arc::new(profile.into());
        let mut number = 0;
        gateways.send_modify(|all| {
            all.last_connection += 1;
            number = all.last_connection;
            all.disconnected.remove(name);
            let gateway = Gateway {
                name: name.to_owned(),
                version: version.to_owned(),
                acknowledged: None,
                profile,
                replication: None,
                ready: false,
                health: OrdMap::new(),
                last_seen: SystemTime::now(),
                flows: 0,
                fleet: None,
            };
            all.connected.insert(number, gateway);
        });
        Self { gateways: gateways.clone(), number }
    }

    /// The number of the connection.
    #[must_use]
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// Records where the gateway replicates flows.
    #[must_use]
    pub fn replicating(self, replication: Option<SocketAddr>) -> Self {
        self.gateways.send_if_modified(|all| {
            let Some(gateway) = all.connected.get_mut(&self.number) else { return false };
            gateway.replication = replication;
            replication.is_some()
        });
        self
    }

    /// Records the generation that the gateway has applied.
    pub fn acknowledge(&self, counter: u64) {
        self.gateways.send_if_modified(|all| {
            let Some(gateway) = all.connected.get_mut(&self.number) else { return false };
            gateway.last_seen = SystemTime::now();
            let is_news = gateway.acknowledged < Some(counter);
            gateway.acknowledged = gateway.acknowledged.max(Some(counter));
            is_news
        });
    }

    /// Records a report of the gateway. Figures alone are no news.
    pub fn report(&self, report: Report) {
        self.gateways.send_if_modified(|all| {
            let Some(gateway) = all.connected.get_mut(&self.number) else { return false };
            gateway.last_seen = SystemTime::now();
            let is_news = gateway.ready != report.ready || !report.health.is_empty() || !report.removed.is_empty();
            let links = report.links.filter(|links| gateway.profile.prefixes != *links);
            let are_new_links = links.is_some();
            links.into_iter().for_each(|links| Arc::make_mut(&mut gateway.profile).prefixes = links);
            let is_fleet_news = report.fleet.is_some_and(|fleet| gateway.reports(fleet));
            gateway.ready = report.ready;
            gateway.flows = report.flows;
            gateway.health.extend(report.health);
            for name in &report.removed {
                gateway.health.remove(name);
            }
            is_news || is_fleet_news || are_new_links
        });
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.gateways.send_modify(|all| all.leave(self.number));
    }
}

#[cfg(test)]
mod tests {
    use proto::VipElection;

    use super::*;

    #[test]
    fn reports_add_up() {
        let gateways = watch::Sender::new(Gateways::default());
        let one = Connection::open(&gateways, "edge-1", "0.1.0", Vec::new());
        let (a, b) = (ServiceName::new("shop", "a"), ServiceName::new("shop", "b"));
        let health = |healthy| Health { backends: 3, healthy, refusal: None };
        one.report(Report {
            ready: true,
            health: vec![(a.clone(), health(3)), (b.clone(), health(1))],
            flows: 7,
            ..Report::default()
        });
        one.report(Report { ready: true, health: vec![(a.clone(), health(2))], removed: vec![b], flows: 5, ..Report::default() });
        let all = gateways.borrow();
        let gateway = all.iter().next().unwrap();
        assert!(gateway.ready);
        assert_eq!(gateway.flows, 5);
        assert_eq!(gateway.health, [(a, health(2))].into_iter().collect());
    }

    #[test]
    fn an_address_of_an_l2_pool_that_no_gateway_can_announce_is_told() {
        let gateways = watch::Sender::new(Gateways::default());
        let range = |text: &str| text.parse::<AddressRange>().unwrap();
        let links = |one: &Connection, nets: &[&str]| {
            let links = Some(nets.iter().map(|net| net.parse().unwrap()).collect());
            one.report(Report { ready: true, links, ..Report::default() });
        };
        let told = |address: &str| {
            let all = gateways.borrow();
            all.unannounced([address.parse().unwrap()]).map(|(names, refusal)| (names.len(), refusal.message))
        };
        Gateways::serve_l2(&gateways, &[range("198.51.100.0/24"), range("192.0.2.0/25")]);
        assert_eq!(told("198.51.100.1"), None, "no gateway is there");
        let one = Connection::open(&gateways, "edge-1", "1", Vec::new());
        assert_eq!(told("198.51.100.1"), None, "it has not said anything");
        links(&one, &["192.0.2.0/24", "2001:db8::/64"]);
        let (count, message) = told("198.51.100.1").unwrap();
        assert!(count == 1 && message.contains("198.51.100.1 is of a pool"), "{message}");
        assert_eq!((told("192.0.2.1"), told("203.0.113.1")), (None, None), "one is on its link, the other in no l2 pool");
        assert_eq!(gateways.borrow().unannounced_by(&range("192.0.2.0-192.0.3.1")), ["edge-1"].into(), "in part");
        one.report(Report { ready: true, ..Report::default() });
        assert!(told("198.51.100.1").is_some(), "a report without them changes nothing");
        let two = Connection::open(&gateways, "edge-2", "1", Vec::new());
        links(&two, &["198.51.100.0/24"]);
        assert_eq!(told("198.51.100.1"), None, "one of both can");
        assert_eq!(gateways.borrow().unannounced_by(&range("198.51.100.0/24")), ["edge-1"].into());
        let pool = |texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
            gateways.borrow().pool_unannounced_by(&texts).map(|names| names.len())
        };
        assert_eq!((pool(&["198.51.100.0/24", "192.0.2.0/25"]), pool(&["203.0.113.0/24"])), (Some(2), None));
    }

    #[test]
    fn a_takeover_wakes_readers_and_lag_does_not() {
        let gateways = watch::Sender::new(Gateways::default());
        let mut seen = gateways.subscribe();
        let one = Connection::open(&gateways, "edge-1", "0.1.0", Vec::new());
        let mut wakes = |owned, shadow_flows| {
            let election = Some(VipElection { groups: 16, owned, ..VipElection::default() });
            seen.borrow_and_update();
            let fleet = Some(FleetStatus { election, shadow_flows, ..FleetStatus::default() });
            one.report(Report { fleet, ..Report::default() });
            seen.has_changed().unwrap()
        };
        assert_eq!([wakes(1, 5), wakes(1, 6), wakes(3, 6), wakes(3, 7)], [true, false, true, false]);
        one.report(Report::default());
        let all = gateways.borrow();
        assert_eq!(all.iter().next().unwrap().fleet.as_ref().unwrap().shadow_flows, 7);
    }

    #[test]
    fn all_reached_a_generation_once_the_slowest_did_and_none_if_no_gateway_is_connected() {
        let gateways = watch::Sender::new(Gateways::default());
        assert!(!gateways.borrow().all_reached(0));
        let one = Connection::open(&gateways, "edge-1", "0.1.0", Vec::new());
        let two = Connection::open(&gateways, "edge-2", "0.1.0", Vec::new());
        one.acknowledge(5);
        assert!(gateways.borrow().any_reached(5) && !gateways.borrow().all_reached(5));
        two.acknowledge(6);
        assert!(gateways.borrow().all_reached(5) && !gateways.borrow().all_reached(6));
        drop(one);
        assert!(gateways.borrow().all_reached(6));
        drop(two);
        assert!(!gateways.borrow().any_reached(0));
    }

    #[test]
    fn a_drained_gateway_is_not_waited_for_and_a_disconnected_one_is_kept() {
        let gateways = watch::Sender::new(Gateways::default());
        let one = Connection::open(&gateways, "edge-1", "0.1.0", Vec::new());
        let two = Connection::open(&gateways, "edge-2", "0.1.0", Vec::new());
        one.acknowledge(5);
        Gateways::drain(&gateways, ["edge-2".to_owned()].into());
        assert!(gateways.borrow().all_reached(5) && gateways.borrow().is_drained("edge-2"));
        two.acknowledge(6);
        assert!(!gateways.borrow().any_reached(6), "a drained gateway does not count");
        Gateways::drain(&gateways, ["edge-1".to_owned(), "edge-2".to_owned()].into());
        assert!(gateways.borrow().any_reached(6) && !gateways.borrow().all_reached(6), "if all are drained, all count");
        let again = Connection::open(&gateways, "edge-2", "0.1.0", Vec::new());
        drop(two);
        assert!(gateways.borrow().disconnected().is_empty(), "it is registered twice while it reconnects");
        drop(again);
        assert_eq!(gateways.borrow().disconnected().keys().collect::<Vec<_>>(), ["edge-2"]);
        let _again = Connection::open(&gateways, "edge-2", "0.1.0", Vec::new());
        assert!(gateways.borrow().disconnected().is_empty());
    }

    #[test]
    fn gateways_that_replicate_are_named_to_each_other_and_others_are_not() {
        let gateways = watch::Sender::new(Gateways::default());
        let open = |name, at: Option<&str>| {
            Connection::open(&gateways, name, "0.1.0", Vec::new()).replicating(at.map(|at| at.parse().unwrap()))
        };
        let before = open("edge-1", Some("192.0.2.9:9437"));
        let _others = (open("edge-2", Some("192.0.2.3:9437")), open("edge-3", None));
        let _again = open("edge-1", Some("192.0.2.2:9437"));
        let beside = |name| {
            let members = gateways.borrow().members_beside(name);
            members.into_iter().map(|one| format!("{} {}", one.gateway, one.replication)).collect::<Vec<_>>()
        };
        assert_eq!(beside("edge-2"), ["edge-1 192.0.2.2:9437"]);
        assert_eq!(beside("edge-3"), ["edge-1 192.0.2.2:9437", "edge-2 192.0.2.3:9437"]);
        drop(before);
        assert_eq!(beside("edge-1"), ["edge-2 192.0.2.3:9437"]);
    }

    #[test]
    fn gateways_that_disconnected_first_are_forgotten_first() {
        let gateways = watch::Sender::new(Gateways::default());
        for number in 0..=DISCONNECTED_MAX {
            drop(Connection::open(&gateways, &format!("edge-{number}"), "0.1.0", Vec::new()));
        }
        let all = gateways.borrow();
        assert_eq!(all.disconnected().len(), DISCONNECTED_MAX);
        assert!(!all.disconnected().contains_key("edge-0") && all.disconnected().contains_key("edge-1"));
    }
}

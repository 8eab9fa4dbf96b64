//! What gateways said about themselves, and the state that all of them have applied.
//!
//! Invariant: a gateway counts until it is known to be gone: its `EdgeGateway` was deleted, or it was last seen longer ago
//! than it uses a state that no controller confirms. Before that it may forward for every VIP of the last state that it
//! applied (decision 121). Deliberately not here: which gateways are connected (`gateways::registry`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proto::GatewayProfile;
use proto::limits::MAX_STATE_AGE;

use crate::config::settings::ControllerSettings;
use crate::gateways::registry::Gateways;
use crate::plan::addresses::AbsentGateway;
use crate::world::World;
use crate::world::change::{KnownGateway, LAST_SEEN_AGE_MAX};
use crate::world::checkpoint::Checkpoint;

/// The reports of this term.
#[derive(Clone, Debug, Default)]
pub(super) struct GatewayReports {
    gateways: BTreeMap<String, SeenGateway>,
    /// The gateways of our group that had an `EdgeGateway` when these were last examined.
    listed: BTreeMap<String, KnownGateway>,
    /// Gateways whose `EdgeGateway` was deleted since they connected last. They count while they are connected.
    gone: BTreeSet<String>,
    /// The state for which the last assignment waits.
    reached: Option<u64>,
    /// Gateways that serve node ports, also as a previous leader knew them; `None`: unknown.
    pub(super) node_ports: Option<Arc<BTreeSet<String>>>,
    /// Grows when the assignment depends on a change.
    pub(super) revision: u64,
}

/// The last report of a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SeenGateway {
    /// `None`: it was not connected in this term.
    profile: Option<Arc<GatewayProfile>>,
    /// Counter of the newest state that it has applied; 0: none of this term.
    acknowledged: u64,
    /// When it was last seen, seconds since 1970; `None`: it is connected.
    last_seen_s: Option<u64>,
}

/// The state that gateways may forward.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reach {
    /// Counter of the oldest state that any gateway may forward; `None` if no gateway may forward any.
    pub(super) counter: Option<u64>,
    /// The gateways among them that are not connected.
    pub(super) absent: Vec<AbsentGateway>,
}

impl GatewayReports {
    /// Starts with what a previous leader knew. One that served anything may have had node ports and not said so.
    pub(super) fn recall(&mut self, checkpoint: &Checkpoint) {
        let is_new = checkpoint.services.is_empty();
        self.node_ports = checkpoint.node_port_gateways.clone().or_else(|| is_new.then(Arc::default));
        if !self.gateways.is_empty() {
            self.record_node_ports();
        }
    }

    /// Records the reports of the connected gateways. Returns true if they change the assignment; `waits`: it waits for
    /// gateways. `now_s` is the Unix time, seconds, if it is known.
    pub(super) fn follow(&mut self, gateways: &Gateways, waits: bool, now_s: Option<u64>) -> bool {
        let mut newest: BTreeMap<String, SeenGateway> = BTreeMap::new();
        for gateway in gateways.iter() {
            // One that reconnects appears twice for a moment.
            let acknowledged = gateway.acknowledged.unwrap_or(0);
            let least = newest.get(&gateway.name).map_or(acknowledged, |other| other.acknowledged.min(acknowledged));
            let before = self.gateways.get(&gateway.name).and_then(|one| one.profile.as_deref());
            let former = before.or_else(|| self.listed.get(&gateway.name).map(|known| &known.profile));
            let profile = with_former_prefixes(&gateway.profile, former);
            let reported = SeenGateway { profile: Some(profile), acknowledged: least, last_seen_s: None };
            newest.insert(gateway.name.clone(), reported);
            if self.gateways.get(&gateway.name).is_none_or(|before| before.last_seen_s.is_some()) {
                self.gone.remove(&gateway.name);
            }
        }
        for (name, seen) in gateways.disconnected().iter().filter(|(name, _)| !self.gone.contains(*name)) {
            let before = self.gateways.get(name).cloned().unwrap_or_default();
            newest.insert(name.clone(), SeenGateway { last_seen_s: Some(unix_s(*seen)), ..before });
        }
        for (name, before) in self.gateways.iter().filter(|(name, _)| !self.gone.contains(*name)) {
            newest.entry(name.clone()).or_insert_with(|| before.clone());
        }
        let is_other = !profiles(&newest).eq(profiles(&self.gateways));
        self.gateways = newest;
        if is_other {
            self.record_node_ports();
        }
        let is_changed = is_other || (waits && self.reach_at(now_s).counter != self.reached);
        self.revision += u64::from(is_changed);
        is_changed
    }

    /// Records which gateways serve node ports. While that is unknown, it stays so until all gateways that have an
    /// `EdgeGateway` have connected: one that does not serve them may be the first.
    fn record_node_ports(&mut self) {
        let has_said = |name: &String| self.gateways.get(name).is_some_and(|one| one.profile.is_some());
        if self.node_ports.is_none() && (self.listed.is_empty() || !self.listed.keys().all(has_said)) {
            return;
        }
        let mut serving = self.node_ports.as_deref().cloned().unwrap_or_default();
        for (name, one) in &self.gateways {
            match one.profile.as_ref().map(|profile| profile.serves_node_ports) {
                Some(Some(false)) => drop(serving.remove(name)),
                // An earlier version does not say.
                Some(Some(true) | None) => drop(serving.insert(name.clone())),
                None => {}
            }
        }
        if self.node_ports.as_deref() != Some(&serving) {
            self.node_ports = Some(Arc::new(serving));
        }
    }

    /// Records the gateways that have an `EdgeGateway`, and forgets those whose `EdgeGateway` was deleted, unless they are
    /// connected.
    pub(super) fn note_listed(&mut self, world: &World, group: &str) {
        let of_group = world.gateways().iter().filter(|(_, one)| one.group == group);
        let listed = of_group.map(|(name, one)| (name.clone(), one.clone())).collect();
        let before = std::mem::replace(&mut self.listed, listed);
        for (name, known) in &self.listed {
            if let Some(profile) = self.gateways.get_mut(name).and_then(|one| one.profile.as_mut()) {
                *profile = with_former_prefixes(profile, Some(&known.profile));
            }
        }
        self.gone.extend(before.into_keys());
        self.gone.retain(|name| !self.listed.contains_key(name));
        self.gateways.retain(|name, one| one.last_seen_s.is_none() || !self.gone.contains(name));
        let is_gone = |name: &String| self.gone.contains(name) && !self.gateways.contains_key(name);
        if let Some(serving) = self.node_ports.as_mut().filter(|serving| serving.iter().any(is_gone)) {
            Arc::make_mut(serving).retain(|name| !is_gone(name));
        }
        self.record_node_ports();
    }

    /// The profiles of all gateways that are not known to be gone, each with the gateway's name, and that of the gateway
    /// that embeds this controller.
    pub(super) fn profiles<'a>(
        &'a self,
        world: &'a World,
        settings: &'a ControllerSettings,
    ) -> Vec<(Option<&'a str>, &'a GatewayProfile)> {
        let is_reported = |name: &str| self.gateways.get(name).is_some_and(|one| one.profile.is_some());
        let listed = world.gateways().iter().filter(|(name, _)| !is_reported(name));
        let listed = listed.map(|(name, one)| (Some(name.as_str()), &one.profile));
        let of_reports = profiles(&self.gateways).map(|(name, profile)| (Some(name.as_str()), &**profile));
        std::iter::once((None, &settings.profile)).chain(listed).chain(of_reports).collect()
    }

    /// The state that gateways may forward at the Unix time `now_s`, seconds. While that is unknown, all count.
    pub(super) fn reach(&mut self, now_s: Option<u64>) -> Reach {
        let reach = self.reach_at(now_s);
        self.reached = reach.counter;
        reach
    }

    fn reach_at(&self, now_s: Option<u64>) -> Reach {
        let is_recent = |profile: &GatewayProfile, seen_s: u64, margin: Duration| {
            // An earlier version does not say it.
            let age = profile.max_state_age.unwrap_or(MAX_STATE_AGE) + margin;
            now_s.is_none_or(|now_s| now_s.saturating_sub(seen_s) <= age.as_secs())
        };
        let unsaid = GatewayProfile::default();
        let counts = |one: &SeenGateway| {
            let profile = one.profile.as_deref().unwrap_or(&unsaid);
            one.last_seen_s.is_none_or(|seen_s| is_recent(profile, seen_s, Duration::ZERO))
        };
        let reported = self.gateways.iter().filter(|(_, one)| counts(one));
        let reported = reported.map(|(name, one)| (name, one.acknowledged, one.last_seen_s.is_some()));
        let may_forward = |(name, one): &(&String, &KnownGateway)| {
            !self.gateways.contains_key(*name)
                && one.last_seen_s.is_some_and(|seen_s| is_recent(&one.profile, seen_s, LAST_SEEN_AGE_MAX))
        };
        // Known from its object, and not connected in this term.
        let listed = self.listed.iter().filter(may_forward).map(|(name, _)| (name, 0, true));
        let mut reach = Reach::default();
        for (name, counter, is_absent) in reported.chain(listed) {
            reach.counter = Some(reach.counter.map_or(counter, |least| least.min(counter)));
            reach.absent.extend(is_absent.then(|| AbsentGateway { name: name.clone(), acknowledged: counter }));
        }
        reach
    }

    /// Whether any gateway serves node ports, or may do so.
    pub(super) fn serve_node_ports(&self, settings: &ControllerSettings) -> bool {
        let is_any = self.node_ports.as_ref().is_none_or(|serving| !serving.is_empty());
        is_any || settings.profile.serves_node_ports == Some(true)
    }
}

/// The profile of a connected gateway. It reports the networks of Linux some time after its Hello; until then those count
/// that it reported before, or that its object tells.
fn with_former_prefixes(profile: &Arc<GatewayProfile>, former: Option<&GatewayProfile>) -> Arc<GatewayProfile> {
    match former.filter(|former| profile.prefixes.is_empty() && !former.prefixes.is_empty()) {
        Some(former) => Arc::new(GatewayProfile { prefixes: former.prefixes.clone(), ..GatewayProfile::clone(profile) }),
        None => Arc::clone(profile),
    }
}

fn profiles(all: &BTreeMap<String, SeenGateway>) -> impl Iterator<Item = (&String, &Arc<GatewayProfile>)> {
    all.iter().filter_map(|(name, one)| Some((name, one.profile.as_ref()?)))
}

fn unix_s(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use proto::ServiceName;
    use tokio::sync::watch;

    use super::*;
    use crate::gateways::registry::Connection;
    use crate::plan::tests::settings;
    use crate::world::change::Change;
    use crate::world::checkpoint::Decided;

    fn world(gateways: &[(&str, Option<u64>)]) -> World {
        let mut world = World::default();
        let known = |(name, last_seen_s): &(&str, Option<u64>)| {
            let known = KnownGateway { group: "default".to_owned(), last_seen_s: *last_seen_s, ..KnownGateway::default() };
            ((*name).to_owned(), known)
        };
        world.apply(Change::GatewaysReplaced(gateways.iter().map(known).collect()));
        world
    }

    fn now_s() -> u64 {
        unix_s(SystemTime::now())
    }

    #[test]
    fn a_gateway_counts_while_it_may_forward_and_no_longer_once_it_is_known_to_be_gone() {
        let all = watch::Sender::new(Gateways::default());
        let (mut reports, day_s) = (GatewayReports::default(), 86_400);
        let mut reach = |world: &World, now_s: u64| {
            reports.follow(&all.borrow(), true, Some(now_s));
            reports.note_listed(world, "default");
            let reach = reports.reach(Some(now_s));
            (reach.counter, reach.absent.into_iter().map(|one| one.name).collect::<Vec<_>>().join(","))
        };
        let away = |name: &str| name.to_owned();
        assert_eq!(reach(&world(&[]), now_s()), (None, away("")), "nobody forwards");
        let one = Connection::open(&all, "edge-1", "", Vec::new());
        one.acknowledge(7);
        let profile = GatewayProfile { max_state_age: Some(Duration::from_secs(60)), ..GatewayProfile::default() };
        let two = Connection::open(&all, "edge-2", "", profile);
        two.acknowledge(5);
        assert_eq!(reach(&world(&[]), now_s()), (Some(5), away("")));
        drop(two);
        assert_eq!(reach(&world(&[]), now_s()), (Some(5), away("edge-2")), "it forwards what it had");
        assert_eq!(reach(&world(&[]), now_s() + 62), (Some(7), away("")), "it uses no state that is older");
        // A gateway that this leader only knows from its object has applied nothing of this term.
        let seen = now_s() - 10;
        let with_third = world(&[("edge-1", None), ("edge-2", None), ("edge-3", Some(seen))]);
        assert_eq!(reach(&with_third, seen + 11), (Some(0), away("edge-2,edge-3")));
        assert_eq!(reach(&with_third, seen + day_s + 61), (Some(7), away("")));
        // One that is connected forwards whether or not it has an object.
        assert_eq!(reach(&world(&[("edge-3", Some(seen))]), seen + 11), (Some(0), away("edge-3")), "edge-2 is deleted");
        assert_eq!(reach(&world(&[]), seen + 11), (Some(7), away("")), "so is edge-3, and edge-1 is connected");
        let again = Connection::open(&all, "edge-2", "", Vec::new());
        assert_eq!(reach(&world(&[]), now_s()), (Some(0), away("")), "it is back");
        drop(again);
        // Gateways of other groups forward other VIPs.
        let mut other = world(&[("edge-9", Some(seen))]);
        let known = KnownGateway { group: "other".to_owned(), ..other.gateways()["edge-9"].clone() };
        other.apply(Change::GatewaysReplaced([("edge-9".to_owned(), known)].into()));
        assert_eq!(reach(&other, now_s() + day_s + 62), (Some(7), away("")));
    }

    #[test]
    fn node_ports_are_served_where_a_gateway_says_so_and_a_new_leader_knows_it_before_any_gateway_connects() {
        let mut settings = settings();
        settings.profile.serves_node_ports = None;
        let all = watch::Sender::new(Gateways::default());
        let open = |name, serves_node_ports| {
            Connection::open(&all, name, "", GatewayProfile { serves_node_ports, ..GatewayProfile::default() })
        };
        let recalled = |checkpoint: &Checkpoint| {
            let mut reports = GatewayReports::default();
            reports.recall(checkpoint);
            reports
        };
        let (mut reports, mut used) = (recalled(&Checkpoint::default()), Checkpoint::default());
        used.put(
            &ServiceName::new("shop", "web"),
            Decided { addresses: vec!["192.0.2.1".parse().unwrap()], ..Decided::default() },
        );
        assert!(!reports.serve_node_ports(&settings), "no gateway has ever said so");
        assert!(recalled(&used).serve_node_ports(&settings), "the checkpoint of an earlier version does not say");
        // The first one that connects after an upgrade does not serve them, and edge-2 does, which has not connected yet.
        let one = open("edge-1", Some(false));
        let mut upgraded = recalled(&used);
        upgraded.follow(&all.borrow(), false, None);
        assert!(upgraded.serve_node_ports(&settings), "no list of gateways is known");
        upgraded.note_listed(&world(&[("edge-1", None), ("edge-2", None)]), "default");
        assert!(upgraded.serve_node_ports(&settings), "edge-2 has not said");
        upgraded.note_listed(&world(&[("edge-1", None)]), "default");
        assert!(!upgraded.serve_node_ports(&settings), "all have said");
        assert!(reports.follow(&all.borrow(), false, None) && !reports.serve_node_ports(&settings));
        let two = open("edge-2", Some(true));
        assert!(reports.follow(&all.borrow(), false, None) && reports.serve_node_ports(&settings));
        drop((one, two));
        reports.follow(&all.borrow(), false, None);
        assert!(reports.serve_node_ports(&settings), "it returns");
        let checkpoint = Checkpoint { node_port_gateways: reports.node_ports.clone(), ..used };
        let mut next = recalled(&checkpoint);
        let first = open("edge-1", Some(false));
        next.follow(&all.borrow(), false, None);
        assert!(next.serve_node_ports(&settings), "edge-2 has not connected yet");
        let second = open("edge-2", Some(false));
        next.follow(&all.borrow(), false, None);
        assert!(!next.serve_node_ports(&settings));
        let earlier = open("edge-4", None);
        next.follow(&all.borrow(), false, None);
        assert!(next.serve_node_ports(&settings), "an earlier version does not say");
        settings.profile.serves_node_ports = Some(true);
        assert!(recalled(&Checkpoint::default()).serve_node_ports(&settings), "the gateway that embeds the controller");
        drop((first, second, earlier));
    }
    #[test]
    fn a_gateway_whose_object_was_deleted_does_not_count_once_it_is_cut_off_in_whichever_order_both_are_seen() {
        for is_seen_first in [true, false] {
            let (all, mut reports) = (watch::Sender::new(Gateways::default()), GatewayReports::default());
            let one = Connection::open(&all, "edge-1", "", Vec::new());
            reports.follow(&all.borrow(), true, None);
            reports.note_listed(&world(&[("edge-1", None)]), "default");
            drop(one);
            if is_seen_first {
                reports.follow(&all.borrow(), true, None);
            }
            reports.note_listed(&world(&[]), "default");
            reports.follow(&all.borrow(), true, None);
            assert_eq!(reports.reach(None), Reach::default());
            let _again = Connection::open(&all, "edge-1", "", Vec::new());
            reports.follow(&all.borrow(), true, None);
            assert_eq!(reports.reach(None).counter, Some(0));
        }
    }

    #[test]
    fn only_a_change_of_the_state_for_which_it_waits_has_addresses_assigned_again() {
        let (all, mut reports, now_s) = (watch::Sender::new(Gateways::default()), GatewayReports::default(), now_s());
        let seen = |age_s| {
            let mut known = KnownGateway { group: "default".to_owned(), last_seen_s: Some(now_s), ..KnownGateway::default() };
            known.profile.max_state_age = Some(Duration::from_secs(age_s));
            known
        };
        let mut world = World::default();
        world.apply(Change::GatewaysReplaced([("edge-9".to_owned(), seen(100))].into()));
        let one = Connection::open(&all, "edge-1", "", Vec::new());
        assert!(reports.follow(&all.borrow(), true, Some(now_s)));
        reports.note_listed(&world, "default");
        assert_eq!(reports.reach(Some(now_s)).counter, Some(0));
        for counter in 1..4 {
            one.acknowledge(counter);
            assert!(!reports.follow(&all.borrow(), true, Some(now_s)), "edge-9 is away");
        }
        // Its object says how long it uses a state, and LAST-SEEN is up to a minute old.
        assert!(!reports.follow(&all.borrow(), true, Some(now_s + 160)));
        assert!(reports.follow(&all.borrow(), true, Some(now_s + 161)));
        assert_eq!(reports.reach(Some(now_s + 161)).counter, Some(3));
        one.acknowledge(4);
        assert!(reports.follow(&all.borrow(), true, Some(now_s + 161)), "edge-9 no longer counts");
    }

    #[test]
    fn the_networks_of_a_gateway_stay_known_until_it_has_reported_them_again() {
        let (all, mut reports) = (watch::Sender::new(Gateways::default()), GatewayReports::default());
        let profile = GatewayProfile { prefixes: vec!["192.0.2.2/24".parse().unwrap()], ..GatewayProfile::default() };
        let known = KnownGateway { group: "default".to_owned(), profile: profile.clone(), last_seen_s: None };
        let mut world = World::default();
        world.apply(Change::GatewaysReplaced([("edge-1".to_owned(), known)].into()));
        reports.note_listed(&world, "default");
        let first = Connection::open(&all, "edge-1", "", Vec::new());
        assert!(reports.follow(&all.borrow(), false, None));
        let settings = settings();
        let has = |reports: &GatewayReports| {
            reports.profiles(&world, &settings).iter().any(|(_, one)| one.prefixes == profile.prefixes)
        };
        assert!(has(&reports), "from its object");
        drop(first);
        let _second = Connection::open(&all, "edge-1", "", profile.clone());
        assert!(!reports.follow(&all.borrow(), false, None), "its report is no news");
        let _third = Connection::open(&all, "edge-1", "", Vec::new());
        assert!(!reports.follow(&all.borrow(), false, None) && has(&reports), "it connects again");
        // Objects may be listed after gateways have connected.
        let mut reports = GatewayReports::default();
        assert!(reports.follow(&all.borrow(), false, None) && !has(&reports));
        reports.note_listed(&world, "default");
        assert!(has(&reports) && !reports.follow(&all.borrow(), false, None));
    }
}

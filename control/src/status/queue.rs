//! The queue of all Services whose objects sluice writes: those that are ours, and those that it releases.
//!
//! Invariant: a Service is examined again only when its plan, a gateway or the time may change what is due for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use imbl::OrdMap;
use imbl::ordmap::DiffItem;
use proto::{AddressRange, GatewayProfile, ServiceName};
use tokio::time::Instant;

use super::dispute::Dispute;
use super::life::Life;
use crate::gateways::registry::{Gateway, Gateways, Health};
use crate::plan::service_life::{GatewaysView, PlannedObject};
use crate::plan::{Cleanup, WantedStatuses};
use objects::note::{Note, Subject};
use objects::status::StatusWrite;

/// Time from the first gateway of a term until the fleet counts as heard: gateways dial again within it.
pub(super) const FLEET_HEARD_AFTER: Duration = Duration::from_secs(2);

/// The desired statuses of one plan.
#[derive(Clone, Debug, Default)]
pub struct Statuses {
    /// Counter of the generation with which gateways implement them.
    pub counter: u64,
    /// All Services of type `LoadBalancer` that are ours.
    pub wanted: WantedStatuses,
    /// Services that are not ours, or no longer ours, but still carry our finalizer, conditions or addresses.
    pub cleanups: BTreeMap<ServiceName, Cleanup>,
}

/// A write that is due, and the notes for its owner.
#[derive(Debug)]
pub(super) struct Due {
    pub(super) write: Option<StatusWrite>,
    pub(super) uid: String,
    /// Reported regardless of the result of the write.
    pub(super) notes: Vec<Note>,
    /// Reported once the write was accepted.
    pub(super) notes_of_write: Vec<Note>,
}

/// The lives of all Services.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// The statuses of the last plan; an equal one needs no new decision.
    wanted: WantedStatuses,
    cleanups: BTreeMap<ServiceName, Cleanup>,
    /// Boxed, since a map of 10,000 would move and reserve much more memory than they take.
    pub(super) lives: BTreeMap<ServiceName, Box<Life>>,
    /// Services that changed since they were examined.
    changed: BTreeSet<ServiceName>,
    /// Services that become due by an acknowledgement of a gateway.
    waiting: BTreeSet<ServiceName>,
    wakes: BTreeMap<ServiceName, Instant>,
    absent_since: Option<Instant>,
    /// When the first gateway of this term was seen.
    first_gateway_at: Option<Instant>,
    /// The last report of each connected gateway about the Services.
    health: BTreeMap<u64, OrdMap<ServiceName, Health>>,
    links: Links,
    /// Rewrites of objects that were released lately: another program may put our marks back.
    released: BTreeMap<ServiceName, (String, Dispute)>,
}

/// What tells whether gateways can announce addresses. Clones share the parts with the registry of gateways.
#[derive(Debug, Default, PartialEq)]
struct Links {
    /// The profile of each connection, and whether its gateway is drained.
    profiles: BTreeMap<u64, (Arc<GatewayProfile>, bool)>,
    /// The addresses of `l2` pools.
    l2: Arc<[AddressRange]>,
}

impl Queue {
    /// An empty queue, before any gateway is connected.
    pub(super) fn new(now: Instant) -> Self {
        Self { absent_since: Some(now), ..Self::default() }
    }

    /// Records a plan. Only Services whose part of it changed are examined.
    pub(super) fn set_plan(&mut self, statuses: &Statuses, now: Instant) {
        self.released.retain(|_, (_, dispute)| dispute.is_recent(now));
        let before = std::mem::replace(&mut self.wanted, statuses.wanted.clone());
        let mut claims: BTreeMap<ServiceName, Option<PlannedObject>> = BTreeMap::new();
        for item in before.diff(&statuses.wanted) {
            let (name, claim) = match item {
                DiffItem::Add(name, wanted) | DiffItem::Update { new: (name, wanted), .. } => {
                    (name, Some(PlannedObject::Ours(Arc::clone(wanted))))
                }
                DiffItem::Remove(name, _) => (name, None),
            };
            claims.insert(name.clone(), claim);
        }
        let before = std::mem::replace(&mut self.cleanups, statuses.cleanups.clone());
        let gone = before.keys().filter(|name| !self.cleanups.contains_key(*name) && !self.wanted.contains_key(*name));
        claims.extend(gone.map(|name| (name.clone(), None)));
        let other = self.cleanups.iter().filter(|(name, cleanup)| before.get(*name) != Some(*cleanup));
        claims.extend(other.map(|(name, cleanup)| (name.clone(), Some(PlannedObject::Left(cleanup.clone())))));
        for (name, claim) in claims {
            self.claim(name, claim, statuses.counter, now);
        }
    }

    /// What is remembered of a Service is forgotten together with it, except for how often it was released.
    fn claim(&mut self, name: ServiceName, claim: Option<PlannedObject>, counter: u64, now: Instant) {
        let Some(claim) = claim else {
            if let Some((uid, dispute)) = self.lives.remove(&name).and_then(|life| life.released()) {
                self.released.insert(name.clone(), (uid, dispute));
            }
            self.wakes.remove(&name);
            self.waiting.remove(&name);
            return;
        };
        match self.lives.get_mut(&name) {
            Some(life) if life.claim.object().uid == claim.object().uid => life.plan(claim, counter, now),
            _ => {
                let before =
                    self.released.remove(&name).filter(|(uid, _)| *uid == claim.object().uid).map(|(_, dispute)| dispute);
                let life = Life::new(claim, counter, now).after_release(before);
                self.lives.insert(name.clone(), Box::new(life));
            }
        }
        self.changed.insert(name);
    }

    /// Records the connected gateways and their reports. Services whose report changed are examined again, and all of them
    /// once links or `l2` pools have changed.
    pub(super) fn set_gateways(&mut self, gateways: &Gateways, now: Instant) {
        let is_absent = gateways.iter().next().is_none();
        let profile = |one: &Gateway| (Arc::clone(&one.profile), gateways.is_drained(&one.name));
        let profiles = gateways.connections().map(|(number, one)| (number, profile(one))).collect();
        let links = Links { profiles, l2: Arc::clone(gateways.l2_ranges()) };
        let are_same_links = links == self.links;
        self.links = links;
        if is_absent != self.absent_since.is_some() || !are_same_links {
            self.changed.extend(self.lives.keys().cloned());
        }
        self.changed.extend(self.waiting.iter().cloned());
        let health: BTreeMap<_, _> = gateways.connections().map(|(number, one)| (number, one.health.clone())).collect();
        let before = std::mem::replace(&mut self.health, health);
        let none = OrdMap::new();
        for number in before.keys().chain(self.health.keys()).collect::<BTreeSet<_>>() {
            let of = |all: &BTreeMap<u64, _>| all.get(number).unwrap_or(&none).clone();
            self.changed.extend(of(&before).diff(&of(&self.health)).map(|item| name(&item).clone()));
        }
        self.absent_since = is_absent.then(|| self.absent_since.unwrap_or(now));
        self.first_gateway_at = self.first_gateway_at.or((!is_absent).then_some(now));
    }

    /// The writes that are due now; they count as sent.
    pub(super) fn due(&mut self, gateways: &Gateways, now: Instant) -> Vec<Due> {
        let heard_at = self.first_gateway_at.map(|at| at + FLEET_HEARD_AFTER);
        let view = GatewaysView { gateways, absent_since: self.absent_since, heard_at, now };
        let mut names = std::mem::take(&mut self.changed);
        names.extend(self.wakes.iter().filter(|(_, at)| **at <= now).map(|(name, _)| name.clone()));
        let mut due = Vec::new();
        for name in names {
            self.wakes.remove(&name);
            self.waiting.remove(&name);
            let Some(life) = self.lives.get_mut(&name) else { continue };
            let step = life.step(&view);
            self.wakes.extend(step.again_at.map(|at| (name.clone(), at)));
            if step.waits_for_gateways {
                self.waiting.insert(name.clone());
            }
            if step.write.is_some() || !step.remarks.is_empty() {
                let note = |remark| Note { subject: Subject::Service(name.clone()), remark };
                let notes = step.remarks.into_iter().map(note).collect();
                let notes_of_write = step.remarks_of_write.into_iter().map(note).collect();
                due.push(Due { write: step.write, uid: life.claim.object().uid.clone(), notes, notes_of_write });
            }
        }
        due
    }

    /// Records the server's answer to a write.
    pub(super) fn answered(&mut self, write: &StatusWrite, is_accepted: bool) {
        if let Some(life) = self.lives.get_mut(&write.service) {
            life.answered(write, is_accepted);
        }
    }

    /// Records that a write could not be queued.
    pub(super) fn failed(&mut self, service: &ServiceName, retry_at: Instant) {
        if let Some(life) = self.lives.get_mut(service) {
            life.failed(retry_at);
            self.wakes.insert(service.clone(), retry_at);
        }
    }

    /// When the next write becomes due without any event.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.wakes.values().copied().min()
    }
}

fn name<'a>(item: &DiffItem<'a, 'a, ServiceName, Health>) -> &'a ServiceName {
    match item {
        DiffItem::Add(name, _) | DiffItem::Remove(name, _) | DiffItem::Update { new: (name, _), .. } => name,
    }
}

#[cfg(test)]
impl Queue {
    pub(super) fn remembers_released(&self) -> bool {
        !self.released.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use ipnet::IpNet;
    use objects::ConditionType;
    use objects::status::IpMode;
    use tokio::sync::watch;

    use super::*;
    use crate::gateways::registry::{Connection, Report};
    use crate::status::tests::{Lab, ingress};

    #[test]
    fn a_service_is_no_longer_programmed_once_no_gateway_can_announce_its_address() {
        let mut lab = Lab::new(&[ingress(1, IpMode::Vip)]);
        let (one, two) = (lab.connect("edge-1"), lab.connect("edge-2"));
        let links = |gateway: &Connection, net: &str| {
            let links = Some(vec![net.parse::<IpNet>().unwrap()]);
            gateway.report(Report { ready: true, links, ..Report::default() });
            gateway.acknowledge(4);
        };
        let programmed = |lab: &mut Lab| {
            lab.settle_due(4);
            lab.condition(ConditionType::Programmed).map(|(holds, _)| holds)
        };
        let pool = |lab: &Lab, last: u8| {
            let range = AddressRange::new([192, 0, 2, 0].into(), [192, 0, 2, last].into()).unwrap();
            Gateways::serve_l2(lab.gateways(), &[range]);
        };
        pool(&lab, 9);
        links(&one, "192.0.2.0/24");
        links(&two, "198.51.100.0/24");
        lab.plan(4);
        assert_eq!(programmed(&mut lab), Some(true));
        links(&one, "198.51.100.0/24");
        assert_eq!(programmed(&mut lab), Some(false), "a link has gone");
        links(&one, "192.0.2.0/24");
        assert_eq!(programmed(&mut lab), Some(true));
        Gateways::drain(lab.gateways(), ["edge-1".to_owned()].into());
        assert_eq!(programmed(&mut lab), Some(false), "the gateway with the link is drained");
        pool(&lab, 0);
        assert_eq!(programmed(&mut lab), Some(true), "the pool has another announcement");
        pool(&lab, 9);
        assert_eq!(programmed(&mut lab), Some(false), "its pool is one of l2 again");
    }

    #[test]
    fn a_report_marks_only_the_services_that_it_changes() {
        let gateways = watch::Sender::new(Gateways::default());
        let one = Connection::open(&gateways, "edge-1", "", Vec::new());
        let other = Connection::open(&gateways, "edge-2", "", Vec::new());
        let named = |n: u32| ServiceName::new("shop", &format!("s{n}"));
        let health = |n: u32, healthy| (named(n), Health { backends: 1, healthy, refusal: None });
        let all = || Report { ready: true, health: (0..1000).map(|n| health(n, 1)).collect(), ..Report::default() };
        one.report(all());
        other.report(all());
        let mut queue = Queue::new(Instant::now());
        let mut looked_at = || {
            queue.set_gateways(&gateways.borrow(), Instant::now());
            let names = std::mem::take(&mut queue.changed);
            (names.len(), names.into_iter().next())
        };
        assert_eq!(looked_at().0, 1000);
        one.report(Report { ready: true, health: vec![health(7, 0)], ..Report::default() });
        assert_eq!(looked_at(), (1, Some(named(7))));
        one.report(Report { ready: true, health: Vec::new(), removed: vec![named(8)], ..Report::default() });
        assert_eq!(looked_at(), (1, Some(named(8))));
        other.report(Report { ready: false, ..Report::default() });
        assert_eq!(looked_at(), (0, None), "readiness of a gateway concerns no Service");
        drop(other);
        assert_eq!(looked_at().0, 1000, "reports of a disconnected gateway no longer count");
    }
}

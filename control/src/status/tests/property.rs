//! Random lives: objects, gateways and leaders that change. Every transition is one of docs/internals/service-life.md.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use proto::Reason;

use super::*;
use crate::gateways::registry::{Connection, Health, Report};
use crate::plan::service_life::{LifeState, Phase, STATUS_WAITED_FOR};
use crate::plan::{Cleanup, LeftBy, WantedStatus};
use objects::status::{Ingress, IpMode};
use objects::{ConditionType, OwnedParts, ServiceObject};

/// What happens to a Service.
#[derive(Clone, Copy, Debug)]
enum Happening {
    /// The plan assigns this address, in a mode in which nodes see it or not.
    Assign(u8, bool),
    /// The plan refuses it; it keeps its address, or loses it.
    Refuse(bool),
    Delete,
    /// It is deleted as soon as a write to it was accepted.
    DeleteWritten,
    Connect,
    /// All gateways apply the newest generation.
    Acknowledge,
    Report(u32),
    Disconnect,
    /// Another controller leads.
    ChangeLeader,
    /// Another program writes the status, or takes our marks away.
    Interfere(bool),
    Pass(u64),
    /// The API server takes no write from now on, or takes them again.
    Outage(bool),
}

fn happenings() -> impl Strategy<Value = Vec<Happening>> {
    use Happening::*;
    let one = prop_oneof![
        3 => (1..4_u8, any::<bool>()).prop_map(|(last, is_seen)| Assign(last, is_seen)),
        1 => any::<bool>().prop_map(Refuse),
        1 => Just(Delete),
        1 => Just(DeleteWritten),
        3 => Just(Connect),
        3 => Just(Acknowledge),
        1 => (0..3_u32).prop_map(Report),
        1 => Just(Disconnect),
        1 => Just(ChangeLeader),
        1 => any::<bool>().prop_map(Interfere),
        2 => (0..12_u64).prop_map(Pass),
        2 => any::<bool>().prop_map(Outage),
    ];
    prop::collection::vec(one, 1..40)
}

/// The transitions of the page, as pairs of states.
static TABLE: LazyLock<BTreeSet<(String, String)>> = LazyLock::new(|| {
    let page = include_str!("../../../../docs/internals/service-life.md");
    let page = page.split("## Transitions").nth(1).unwrap();
    let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let rows = page.lines().filter(|line| line.starts_with("| ")).map(cells).filter(|row| row.len() == 5);
    rows.map(|row| (row[1].clone(), row[2].clone())).filter(|(from, _)| from != "from").collect()
});

const fn name_of(state: &LifeState) -> &'static str {
    match state {
        LifeState::Marking => "marking",
        LifeState::Programming { .. } => "programming",
        LifeState::Serving { .. } => "serving",
        LifeState::Refused => "refused",
        LifeState::Withdrawing { .. } => "withdrawing",
    }
}

struct Walk {
    queue: Queue,
    gateways: watch::Sender<Gateways>,
    connections: Vec<Connection>,
    now: Instant,
    counter: u64,
    version: u64,
    /// The object; `None` once it is gone.
    held: Option<OwnedParts>,
    wanted: WantedStatus,
    /// Why the plan refuses it.
    refusal: Option<Reason>,
    /// What gateways get, and by which mode they forward.
    phase: Option<Phase>,
    forwarded_as: Option<IpMode>,
    /// Since when gateways wait for a write.
    waits_since: Option<Instant>,
    /// What gateways got too early.
    fault: Option<String>,
    is_deleted: bool,
    is_down: bool,
    /// The newest write that the server has not answered.
    queued: Option<StatusWrite>,
    /// Whether a gateway ever forwarded for it.
    is_forwarded: bool,
    is_deleted_once_written: bool,
    seen: BTreeSet<(String, String)>,
}

impl Walk {
    fn new(is_down: bool) -> Self {
        let now = Instant::now();
        let wanted = wanted(&[ingress(1, IpMode::Proxy)]);
        Self {
            queue: Queue::new(now),
            gateways: watch::Sender::new(Gateways::default()),
            connections: Vec::new(),
            now,
            counter: 1,
            version: 1,
            held: Some(OwnedParts::default()),
            wanted,
            refusal: None,
            phase: None,
            forwarded_as: None,
            waits_since: None,
            fault: None,
            is_deleted: false,
            is_down,
            queued: None,
            is_forwarded: false,
            is_deleted_once_written: false,
            seen: BTreeSet::new(),
        }
    }

    fn state(&self) -> String {
        match self.queue.lives.get(&web()) {
            Some(life) => name_of(&life.state).to_owned(),
            None if self.held.is_none() => "released".to_owned(),
            None => "unclaimed".to_owned(),
        }
    }

    fn plan(&mut self) {
        let mut statuses = Statuses { counter: self.counter, ..Statuses::default() };
        if let Some(held) = &self.held {
            let resource_version = self.version.to_string();
            if self.is_deleted {
                self.phase = None;
                let left = ServiceObject { resource_version, is_deleted: true, held: held.clone(), ..object() };
                statuses.cleanups = BTreeMap::from([(web(), Cleanup { left: Arc::new(left), by: LeftBy::Us })]);
            } else {
                let object = ServiceObject { resource_version, held: held.clone(), ..object() };
                let phase = self.next_phase(&object);
                let wanted = WantedStatus { object: Arc::new(object), phase, ..self.wanted.clone() };
                statuses.wanted = WantedStatuses::unit(web(), Arc::new(wanted));
            }
        }
        self.queue.set_plan(&statuses, self.now);
    }

    /// Decides what gateways get, and checks that they get nothing before the object tells of it.
    fn next_phase(&mut self, object: &ServiceObject) -> Phase {
        let allocated: Vec<_> = self.wanted.addresses().collect();
        let mode = self.wanted.ingress.first().map_or(IpMode::Proxy, |ingress| ingress.ip_mode);
        let turns = self.forwarded_as == Some(IpMode::Proxy) && mode == IpMode::Vip;
        let phase = Phase::next(self.phase, object, &allocated, self.refusal, turns, self.now.into_std());
        let ours = || object.held.ingress.iter().filter(|old| allocated.contains(&old.ip));
        let has_waited = self.waits_since.is_some_and(|since| self.now >= since + STATUS_WAITED_FOR);
        let is_told = match self.phase {
            Some(Phase::Given { .. }) => !turns || ours().all(|old| old.ip_mode == IpMode::Vip),
            _ => object.held.finalizer || ours().next().is_some(),
        };
        if phase == Phase::GIVEN {
            if !is_told && !has_waited {
                self.fault = Some(format!("gateways get it as {mode:?} before {:?} tells of it", object.held));
            }
            self.forwarded_as = Some(mode);
        } else if !phase.is_turning() {
            self.forwarded_as = None;
        }
        let waits = matches!(phase, Phase::Marking { .. }) || phase.is_turning();
        self.waits_since = waits.then(|| self.waits_since.unwrap_or(self.now));
        self.phase = Some(phase);
        phase
    }

    /// Writes what is due, as the server would, until nothing is.
    fn settle(&mut self) -> Result<(), TestCaseError> {
        for _ in 0..8 {
            let gateways = self.gateways.borrow().clone();
            self.queue.set_gateways(&gateways, self.now);
            let due = self.queue.due(&gateways, self.now);
            self.queued = due.into_iter().find_map(|due| due.write).or(self.queued.take());
            let Some(write) = self.queued.take_if(|_| !self.is_down) else { return Ok(()) };
            let is_accepted = write.resource_version == self.version.to_string();
            self.queue.answered(&write, is_accepted);
            if is_accepted {
                self.version += 1;
                self.apply(&write)?;
                if std::mem::take(&mut self.is_deleted_once_written) {
                    self.happen(Happening::Delete);
                }
            }
            self.observe(Self::plan);
        }
        Err(TestCaseError::fail("it writes without end"))
    }

    fn apply(&mut self, write: &StatusWrite) -> Result<(), TestCaseError> {
        let Some(held) = &mut self.held else { return Ok(()) };
        if let Some(ingress) = &write.ingress {
            let is_wanted = |old: &Ingress| self.wanted.ingress.iter().any(|new| new.ip == old.ip);
            let keeps = |old: &&Ingress| ingress.iter().any(|new| new.ip == old.ip);
            let lost = held.ingress.iter().filter(|old| !keeps(old)).find(|old| is_wanted(old));
            prop_assert!(self.is_deleted || lost.is_none(), "{lost:?} is withdrawn without a reason");
            let is_new = |new: &&Ingress| !held.ingress.iter().any(|old| old.leads_as(new));
            let new = ingress.iter().filter(is_new).any(|new| new.ip_mode == IpMode::Proxy);
            prop_assert!(!new || self.is_forwarded, "an address is published before a gateway forwards");
            (held.ingress, held.ingress_without_ip) = (ingress.clone(), 0);
        }
        if write.finalizer == Some(false) {
            prop_assert!(self.is_deleted, "the finalizer is taken from a Service that is ours");
        }
        held.finalizer = write.finalizer.unwrap_or(held.finalizer);
        if let Some(group) = &write.group {
            held.group = Some(group.clone()).filter(|group| !group.is_empty());
        }
        for (kind, condition) in &write.conditions {
            held.conditions.remove(kind);
            held.conditions.extend(condition.clone().map(|condition| (*kind, condition)));
        }
        if self.is_deleted && !held.finalizer {
            prop_assert!(!held.conditions.contains_key(&ConditionType::Programmed));
            self.held = None;
        }
        Ok(())
    }

    /// Records the transition that an action causes.
    fn observe(&mut self, act: impl FnOnce(&mut Self)) {
        let before = self.state();
        act(self);
        let after = self.state();
        // An object that vanishes before anything was planned has no life.
        if before != after && (before.as_str(), after.as_str()) != ("unclaimed", "released") {
            self.seen.insert((before, after));
        }
    }

    fn happen(&mut self, happening: Happening) {
        self.counter += 1;
        match happening {
            Happening::Assign(last, is_seen) => {
                let mode = if is_seen { IpMode::Vip } else { IpMode::Proxy };
                self.wanted.ingress = vec![ingress(last, mode)];
                (self.refusal, self.wanted.shortfall) = (None, None);
            }
            Happening::Refuse(keeps) => {
                self.refusal = Some(Reason::Refused);
                if !keeps {
                    self.wanted.ingress = Vec::new();
                    self.wanted.shortfall = Some(Shortfall::Lacks(Reason::Exhausted));
                }
            }
            Happening::Connect if self.connections.len() < 3 => {
                let name = format!("edge-{}", self.connections.len());
                self.connections.push(Connection::open(&self.gateways, &name, "", Vec::new()));
            }
            Happening::Connect => {}
            Happening::Acknowledge => {
                self.is_forwarded |= !self.connections.is_empty();
                self.connections.iter().for_each(|gateway| gateway.acknowledge(self.counter));
            }
            Happening::Report(healthy) => self.connections.iter().for_each(|gateway| {
                let health = vec![(web(), Health { backends: 3, healthy, refusal: None })];
                gateway.report(Report { ready: true, health, ..Report::default() });
            }),
            Happening::Disconnect => drop(self.connections.pop()),
            Happening::ChangeLeader => {
                self.connections.clear();
                (self.queue, self.queued) = (Queue::new(self.now), None);
                (self.phase, self.forwarded_as, self.waits_since) = (None, None, None);
            }
            Happening::Interfere(is_status) => {
                let Some(held) = &mut self.held else { return };
                if is_status {
                    held.conditions.clear();
                } else {
                    (held.finalizer, held.group) = (false, None);
                    self.held.take_if(|_| self.is_deleted);
                }
                self.version += 1;
            }
            Happening::Delete if !self.is_deleted => {
                self.is_deleted = true;
                self.version += 1;
                // Without a finalizer the object vanishes.
                self.held.take_if(|held| !held.finalizer);
            }
            Happening::Delete => {}
            Happening::DeleteWritten => self.is_deleted_once_written = true,
            Happening::Pass(seconds) => self.now += Duration::from_secs(seconds),
            Happening::Outage(is_down) => self.is_down = is_down,
        }
    }

    fn walk(&mut self, happenings: Vec<Happening>) -> Result<(), TestCaseError> {
        for happening in happenings {
            // A new leader remembers no state.
            if matches!(happening, Happening::ChangeLeader) {
                self.happen(happening);
            } else {
                self.observe(|walk| walk.happen(happening));
            }
            self.observe(Self::plan);
            let before = self.state();
            self.settle()?;
            let after = self.state();
            if before != after && before != "unclaimed" && after != "released" {
                self.seen.insert((before, after));
            }
            prop_assert!(self.fault.is_none(), "{:?}", self.fault);
        }
        self.is_down = false;
        self.happen(Happening::Delete);
        self.observe(Self::plan);
        self.now += GATEWAYS_WAITED_FOR;
        self.settle()?;
        // A write that the server refused, or another program that took part, costs one more.
        self.now += GATEWAYS_WAITED_FOR;
        self.settle()?;
        let left = self.held.as_ref().map(|held| held.finalizer || held.has_marks());
        prop_assert!(left != Some(true), "{:?} is left on a deleted object", self.held);
        Ok(())
    }
}

/// Lives with the transitions that random ones seldom have, each with whether it begins during an outage.
fn rare() -> Vec<(bool, Vec<Happening>)> {
    use Happening::*;
    let served = [Connect, Assign(1, false), Acknowledge];
    let then = |rest: &[Happening]| (false, [&served[..], rest].concat());
    vec![
        (true, vec![Assign(1, false), Refuse(true)]),
        (true, vec![Assign(1, false), Delete]),
        (true, vec![Assign(1, false), DeleteWritten, Outage(false)]),
        (true, vec![Assign(1, false), Pass(11), Delete]),
        (true, vec![Refuse(true), Assign(1, false)]),
        (true, vec![Refuse(true), Delete]),
        (false, vec![Assign(1, false), ChangeLeader]),
        then(&[Outage(true), Refuse(true), Assign(1, false)]),
        then(&[Outage(true), Interfere(false), Delete]),
        then(&[ChangeLeader]),
        // Programmed with another address, and its finalizer taken away, before this leader marked it.
        then(&[Outage(true), Assign(2, true), Interfere(false), ChangeLeader, Outage(false)]),
    ]
}

#[test]
fn a_random_life_follows_the_table_withdraws_nothing_without_a_reason_and_leaves_no_finalizer() {
    let seen = std::cell::RefCell::new(BTreeSet::new());
    let follow = |(is_down, happenings): (bool, Vec<Happening>)| {
        let mut walk = Walk::new(is_down);
        walk.walk(happenings)?;
        let unknown: Vec<_> = walk.seen.iter().filter(|transition| !TABLE.contains(*transition)).collect();
        prop_assert!(unknown.is_empty(), "not in docs/internals/service-life.md: {unknown:?}");
        seen.borrow_mut().extend(walk.seen);
        Ok(())
    };
    rare().into_iter().for_each(|life| follow(life).unwrap());
    let mut runner = TestRunner::new(Config { cases: 2_000, failure_persistence: None, ..Config::default() });
    runner.run(&(any::<bool>(), happenings()), follow).unwrap();
    let seen = seen.into_inner();
    let never: Vec<_> = TABLE.difference(&seen).collect();
    assert!(never.is_empty(), "in docs/internals/service-life.md, but never seen: {never:?}");
}

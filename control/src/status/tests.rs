//! Tests: what is written to a Service and when, as plans, gateways and other writers change.

use std::collections::{BTreeMap, BTreeSet};

use super::goal::{ABSENCE_TOLERATED, REPORTS_AWAITED, SLICES_AWAITED};
use super::life::{GATEWAYS_WAITED_FOR, OTHERS_WAITED_FOR};
use super::queue::FLEET_HEARD_AFTER;
use super::*;
use crate::gateways::registry::{Connection, Health, Report};
use crate::plan::selection::MissingBackends;
use crate::plan::service_life::{Limitation, Phase, SLOW_GATEWAY_WAITED_FOR, Shortfall};
use crate::plan::{Cleanup, LeftBy, WantedStatus};
use objects::note::Cause;
use objects::status::{Ingress, IpMode, PortStatus};
use objects::{Condition, ConditionType, OwnedParts, ServiceObject};
use proto::{Reason, Refusal, ServiceName};

mod property;
mod release;

/// A Service, the content of its object, and its gateways.
pub(super) struct Lab {
    pub(super) queue: Queue,
    gateways: watch::Sender<Gateways>,
    pub(super) now: Instant,
    pub(super) wanted: WantedStatus,
    pub(super) version: u64,
    pub(super) causes: Vec<Cause>,
    pub(super) texts: Vec<String>,
}

pub(super) fn web() -> ServiceName {
    ServiceName::new("shop", "web")
}

pub(super) fn ingress(last: u8, ip_mode: IpMode) -> Ingress {
    Ingress::new([192, 0, 2, last].into(), ip_mode)
}

pub(super) fn held(ingress: &[Ingress]) -> OwnedParts {
    OwnedParts { ingress: ingress.to_vec(), ..OwnedParts::default() }
}

/// The object of the Service, of which sluice wrote the status.
fn object() -> ServiceObject {
    ServiceObject {
        name: web(),
        uid: "u".to_owned(),
        resource_version: String::new(),
        created_s: None,
        class: None,
        gateway_group: None,
        is_load_balancer: true,
        is_deleted: false,
        held: OwnedParts::default(),
        status_is_ours: true,
        foreign_manager: Some("rival".to_owned()),
        object_manager: Some("argocd-controller".to_owned()),
    }
}

/// The status of a Service that is served at these addresses.
pub(super) fn wanted(ingress: &[Ingress]) -> WantedStatus {
    WantedStatus {
        object: Arc::new(object()),
        group: "east".to_owned(),
        phase: Phase::GIVEN,
        ingress: ingress.to_vec(),
        pools: vec!["edge".to_owned()],
        shortfall: None,
        limitations: Vec::new(),
        missing: MissingBackends::default(),
        fails_open: true,
    }
}

pub(super) fn leftover(by: LeftBy, is_deleted: bool) -> Cleanup {
    let conditions = [(ConditionType::Programmed, Condition::new(true, "Programmed", ""))].into();
    let held = OwnedParts { conditions, finalizer: true, ..held(&[ingress(1, IpMode::Proxy)]) };
    let resource_version = "90".to_owned();
    let left = ServiceObject { resource_version, is_load_balancer: is_deleted, is_deleted, held, ..object() };
    Cleanup { left: Arc::new(left), by }
}

impl Lab {
    pub(super) fn new(wish: &[Ingress]) -> Self {
        let wanted = wanted(wish);
        let now = Instant::now();
        let gateways = watch::Sender::new(Gateways::default());
        Self { queue: Queue::new(now), gateways, now, wanted, version: 0, causes: Vec::new(), texts: Vec::new() }
    }

    /// A Service with one address that a gateway forwards for, with all of its status written.
    pub(super) fn programmed() -> (Self, Connection) {
        let mut lab = Self::new(&[ingress(1, IpMode::Vip)]);
        let gateway = lab.connect("edge-1");
        gateway.acknowledge(4);
        lab.settle(4);
        (lab, gateway)
    }

    pub(super) fn connect(&self, name: &str) -> Connection {
        Connection::open(&self.gateways, name, "", Vec::new())
    }

    /// A plan of generation `counter`, for the object as it is.
    pub(super) fn plan(&mut self, counter: u64) {
        self.object().resource_version = self.version.to_string();
        let wanted = WantedStatuses::unit(web(), Arc::new(self.wanted.clone()));
        let statuses = Statuses { counter, wanted, cleanups: BTreeMap::new() };
        self.queue.set_plan(&statuses, self.now);
    }

    pub(super) fn object(&mut self) -> &mut ServiceObject {
        Arc::make_mut(&mut self.wanted.object)
    }

    /// What the object has, to be changed.
    pub(super) fn held(&mut self) -> &mut OwnedParts {
        &mut self.object().held
    }

    pub(super) fn leave(&mut self, counter: u64, cleanup: Cleanup) {
        let statuses = Statuses { counter, wanted: WantedStatuses::new(), cleanups: [(web(), cleanup)].into() };
        self.queue.set_plan(&statuses, self.now);
    }

    /// The write that is due. `is_accepted`: whether the server accepts it. The changed object is not seen yet.
    pub(super) fn due_unless(&mut self, is_accepted: bool) -> Option<StatusWrite> {
        let gateways = self.gateways.borrow().clone();
        self.queue.set_gateways(&gateways, self.now);
        let mut due = self.queue.due(&gateways, self.now);
        let remarks = due.iter().flat_map(|due| due.notes.iter().chain(&due.notes_of_write)).map(|note| &note.remark);
        remarks.for_each(|remark| {
            self.causes.push(remark.cause);
            self.texts.push(remark.text.clone());
        });
        assert!(due.len() <= 1, "{due:?}");
        let write = due.pop()?.write?;
        self.queue.answered(&write, is_accepted);
        Some(write)
    }

    pub(super) fn due(&mut self) -> Option<StatusWrite> {
        self.due_unless(true)
    }

    /// The object is seen as the write left it.
    pub(super) fn see(&mut self, write: &StatusWrite, counter: u64) {
        let held = self.held();
        held.finalizer = write.finalizer.unwrap_or(held.finalizer);
        if let Some(group) = &write.group {
            held.group = Some(group.clone()).filter(|group| !group.is_empty());
        }
        if let Some(ingress) = &write.ingress {
            (held.ingress, held.ingress_without_ip) = (ingress.clone(), 0);
        }
        for (kind, condition) in &write.conditions {
            held.conditions.remove(kind);
            held.conditions.extend(condition.clone().map(|condition| (*kind, condition)));
        }
        self.version += 1;
        self.plan(counter);
    }

    pub(super) const fn gateways(&self) -> &watch::Sender<Gateways> {
        &self.gateways
    }

    /// Writes everything that is due and sees the results, until nothing is due.
    pub(super) fn settle(&mut self, counter: u64) {
        self.plan(counter);
        self.settle_due(counter);
    }

    /// The same without another plan first.
    pub(super) fn settle_due(&mut self, counter: u64) {
        while let Some(write) = self.due() {
            self.see(&write, counter);
        }
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    pub(super) fn condition(&self, kind: ConditionType) -> Option<(bool, &str)> {
        self.wanted.object.held.conditions.get(&kind).map(|condition| (condition.holds, &*condition.reason))
    }
}

#[test]
fn an_address_waits_for_every_connected_gateway_or_two_seconds_after_the_first() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Proxy)]);
    let (fast, slow) = (lab.connect("edge-1"), lab.connect("edge-2"));
    lab.settle(4);
    assert!(lab.wanted.object.held.finalizer && lab.wanted.object.held.ingress.is_empty());
    assert_eq!(lab.wanted.object.held.group.as_deref(), Some("east"));
    assert_eq!(lab.condition(ConditionType::AddressAssigned), Some((true, "Assigned")));
    assert_eq!(lab.condition(ConditionType::Programmed), Some((false, "Pending")));
    slow.acknowledge(3);
    assert!(lab.due().is_none() && lab.queue.next_due().is_none());
    fast.acknowledge(4);
    assert!(lab.due().is_none());
    assert_eq!(lab.queue.next_due(), Some(lab.now + SLOW_GATEWAY_WAITED_FOR));
    lab.pass(SLOW_GATEWAY_WAITED_FOR);
    let write = lab.due().unwrap();
    assert_eq!(write.ingress, Some(vec![ingress(1, IpMode::Proxy)]));
    assert!(write.conditions[&ConditionType::Programmed].as_ref().unwrap().holds);
    assert_eq!(write.finalizer, None, "it is there already");
    assert_eq!(lab.causes, [Cause::Programmed], "one Event for a new Service");
    assert_eq!(lab.texts, ["Gateways forward for the Service at address 192.0.2.1 of pool edge"]);
}

#[test]
fn the_slowest_gateway_makes_an_address_due_at_once() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Proxy)]);
    let (one, two) = (lab.connect("edge-1"), lab.connect("edge-2"));
    lab.settle(4);
    one.acknowledge(4);
    two.acknowledge(4);
    assert!(lab.due().unwrap().ingress.is_some());
}

#[test]
fn a_drained_gateway_is_not_waited_for() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Proxy)]);
    let (one, _drained) = (lab.connect("edge-1"), lab.connect("edge-2"));
    lab.settle(4);
    one.acknowledge(4);
    assert!(lab.due().is_none(), "it is not drained yet");
    Gateways::drain(&lab.gateways, ["edge-2".to_owned()].into());
    assert!(lab.due().unwrap().ingress.is_some());
}

#[test]
fn a_drained_gateway_does_not_begin_the_wait_for_the_others() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Proxy)]);
    let (one, drained) = (lab.connect("edge-1"), lab.connect("edge-2"));
    Gateways::drain(&lab.gateways, ["edge-2".to_owned()].into());
    lab.settle(4);
    drained.acknowledge(4);
    assert!(lab.due().is_none() && lab.queue.next_due().is_none());
    lab.pass(SLOW_GATEWAY_WAITED_FOR);
    assert!(lab.due().is_none(), "no gateway that gets traffic forwards for it");
    one.acknowledge(4);
    assert!(lab.due().unwrap().ingress.is_some());
}

#[test]
fn if_all_gateways_are_drained_addresses_and_deletions_wait_for_them() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Proxy)]);
    let (one, two) = (lab.connect("edge-1"), lab.connect("edge-2"));
    Gateways::drain(&lab.gateways, ["edge-1".to_owned(), "edge-2".to_owned()].into());
    lab.settle(4);
    one.acknowledge(4);
    assert!(lab.due().is_none());
    two.acknowledge(4);
    assert!(lab.due().unwrap().ingress.is_some());
    lab.leave(5, leftover(LeftBy::Us, true));
    one.acknowledge(5);
    lab.pass(FLEET_HEARD_AFTER);
    assert!(lab.due().is_none(), "the other gateway still forwards for it");
    two.acknowledge(5);
    assert_eq!(lab.due().unwrap().finalizer, Some(false), "both have removed it");
}

#[test]
fn a_later_generation_does_not_make_a_waiting_address_wait_longer() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Proxy)]);
    let gateway = lab.connect("edge-1");
    lab.settle(4);
    lab.version += 1;
    lab.plan(9);
    gateway.acknowledge(4);
    let write = lab.due().unwrap();
    assert_eq!(write.resource_version, lab.version.to_string());
    assert!(write.ingress.is_some());
}

#[test]
fn the_next_write_to_the_same_version_repeats_the_queued_changes() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Proxy)]);
    let gateway = lab.connect("edge-1");
    lab.plan(4);
    assert_eq!(lab.due().unwrap().finalizer, Some(true));
    gateway.acknowledge(4);
    let write = lab.due().unwrap();
    assert!(write.finalizer == Some(true) && write.ingress.is_some(), "{write:?}");
    assert!(lab.due().is_none());
}

#[test]
fn an_address_of_a_vip_mode_waits_for_no_gateway() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Vip)]);
    let gateway = lab.connect("edge-1");
    lab.wanted.phase = Phase::Marking { until: lab.now.into_std() };
    lab.plan(4);
    let write = lab.due().unwrap();
    assert_eq!((write.ingress.as_deref(), write.finalizer), (Some(&[ingress(1, IpMode::Vip)][..]), Some(true)));
    lab.wanted.phase = Phase::GIVEN;
    lab.see(&write, 5);
    gateway.acknowledge(4);
    assert!(lab.due().is_none(), "gateways have it since generation 5");
    gateway.acknowledge(5);
    assert!(lab.due().unwrap().conditions[&ConditionType::Programmed].as_ref().unwrap().holds);
}

#[test]
fn without_gateways_no_address_is_published_or_withdrawn() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Proxy)]);
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::Programmed), Some((false, "NoGateway")));
    assert!(lab.wanted.object.held.ingress.is_empty());
    let gateway = lab.connect("edge-1");
    assert!(lab.due().is_none());
    gateway.acknowledge(4);
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::Programmed), Some((true, "Programmed")));
    drop(gateway);
    assert!(lab.due().is_none(), "it may reconnect");
    assert_eq!(lab.queue.next_due(), Some(lab.now + ABSENCE_TOLERATED));
    lab.pass(ABSENCE_TOLERATED);
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::Programmed), Some((false, "NoGateway")));
    assert_eq!(lab.wanted.object.held.ingress, [ingress(1, IpMode::Proxy)]);
}

#[test]
fn a_refused_service_has_the_reason_and_keeps_its_published_address() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Vip), ingress(2, IpMode::Vip)]);
    *lab.held() = held(&[ingress(1, IpMode::Vip), ingress(9, IpMode::Vip)]);
    lab.wanted.phase = Phase::Refused(Reason::Unsupported);
    lab.settle(4);
    assert_eq!(lab.wanted.object.held.ingress, [ingress(1, IpMode::Vip)]);
    assert_eq!(lab.condition(ConditionType::AddressAssigned), Some((true, "Assigned")));
    assert_eq!(lab.condition(ConditionType::Programmed), Some((false, "Unsupported")));
    let mut lab = Lab::new(&[]);
    lab.wanted.phase = Phase::Refused(Reason::Exhausted);
    lab.wanted.shortfall = Some(Shortfall::Lacks(Reason::Exhausted));
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::AddressAssigned), Some((false, "Exhausted")));
    assert!(lab.causes.is_empty(), "the plan reports refusals");
}

#[test]
fn a_service_that_lacks_a_required_family_is_served_and_says_so() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Vip)]);
    lab.connect("edge-1").acknowledge(4);
    lab.wanted.shortfall = Some(Shortfall::Lacks(Reason::Exhausted));
    lab.settle(4);
    assert_eq!(lab.wanted.object.held.ingress, [ingress(1, IpMode::Vip)]);
    assert_eq!(lab.condition(ConditionType::AddressAssigned), Some((false, "Exhausted")));
    let message = &lab.wanted.object.held.conditions[&ConditionType::AddressAssigned].message;
    assert!(message.contains("the address of the other family is missing"), "{message}");
    lab.wanted.shortfall = None;
    lab.settle(5);
    assert_eq!(lab.condition(ConditionType::AddressAssigned), Some((true, "Assigned")));
    lab.wanted.shortfall = Some(Shortfall::LacksPreferredFamily);
    lab.settle(6);
    assert_eq!(lab.condition(ConditionType::AddressAssigned), Some((true, "Assigned")));
    let message = &lab.wanted.object.held.conditions[&ConditionType::AddressAssigned].message;
    assert_eq!(message, "Served at the address of one family, from pool edge; the Service does not require the other.");
}

#[test]
fn a_manifest_has_conditions_and_no_finalizer() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Vip)]);
    lab.object().uid = String::new();
    lab.plan(4);
    let write = lab.due().unwrap();
    assert!(write.finalizer.is_none() && write.conditions.len() == 2);
}

#[test]
fn a_failed_write_is_tried_again_later() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Vip)]);
    lab.plan(4);
    assert!(lab.due().is_some());
    lab.queue.failed(&web(), lab.now + RETRY);
    assert!(lab.due().is_none());
    lab.pass(RETRY);
    assert!(lab.due().is_some());
}

#[test]
fn a_stale_write_does_not_count_as_overwritten() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Vip)]);
    for _ in 0..9 {
        lab.version += 1;
        lab.plan(4);
        assert!(lab.due_unless(false).is_some());
    }
}

#[test]
fn a_change_of_health_is_written_at_most_every_thirty_seconds() {
    let (mut lab, gateway) = Lab::programmed();
    assert_eq!(lab.condition(ConditionType::BackendsHealthy), None, "no gateway has reported");
    let report = |healthy| {
        let health = vec![(web(), Health { backends: 3, healthy, refusal: None })];
        gateway.report(Report { ready: true, health, ..Report::default() });
    };
    report(3);
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::BackendsHealthy), Some((true, "Healthy")));
    report(1);
    assert!(lab.due().is_none(), "some are still healthy");
    report(0);
    lab.settle(4);
    assert_eq!(
        lab.condition(ConditionType::BackendsHealthy),
        Some((false, "NoHealthyBackend")),
        "the first condition is not a change"
    );
    assert_eq!(lab.causes.last(), Some(&Cause::NoHealthyBackend));
    report(3);
    assert!(lab.due().is_none());
    assert_eq!(lab.queue.next_due(), Some(lab.now + Duration::from_secs(30)));
    lab.pass(Duration::from_secs(30));
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::BackendsHealthy), Some((true, "Healthy")));
}

#[test]
fn a_change_of_health_with_a_stale_write_is_written_to_the_newer_object_at_once() {
    let (mut lab, gateway, report) = served();
    lab.wanted.missing = MissingBackends::default();
    report(&gateway, 3, 3);
    lab.settle(4);
    report(&gateway, 3, 0);
    for _ in 0..3 {
        let write = lab.due_unless(false).expect("a write is due");
        assert!(write.conditions.contains_key(&ConditionType::BackendsHealthy), "{write:?}");
        lab.version += 1;
        lab.plan(4);
    }
}

/// A Service with a published address, its gateway, and a function that reports the numbers of backends and of
/// healthy ones.
fn served() -> (Lab, Connection, impl Fn(&Connection, u32, u32)) {
    let mut lab = Lab::new(&[ingress(1, IpMode::Vip)]);
    let gateway = lab.connect("edge-1");
    gateway.acknowledge(4);
    lab.wanted.missing = no_backends("");
    lab.settle(4);
    let report = |gateway: &Connection, backends, healthy| {
        let health = vec![(web(), Health { backends, healthy, refusal: None })];
        gateway.report(Report { ready: true, health, ..Report::default() });
    };
    (lab, gateway, report)
}

fn no_backends(sentence: &str) -> MissingBackends {
    let unmatched = if sentence.is_empty() { BTreeSet::new() } else { [(proto::Protocol::Tcp, 80)].into() };
    MissingBackends { is_whole: true, unmatched, sentence: sentence.to_owned() }
}

#[test]
fn slices_that_arrive_shortly_after_their_service_cause_no_warning() {
    let (mut lab, gateway, report) = served();
    report(&gateway, 0, 0);
    assert!(lab.due().is_none());
    assert_eq!(lab.queue.next_due(), Some(lab.now + SLICES_AWAITED));
    lab.pass(SLICES_AWAITED / 2);
    lab.wanted.missing = MissingBackends::default();
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::BackendsHealthy), None, "the report of the gateway is older");
    report(&gateway, 2, 2);
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::BackendsHealthy), Some((true, "Healthy")), "at once");
    assert!(!lab.causes.iter().any(|cause| matches!(cause, Cause::NoEndpoints | Cause::NoHealthyBackend)), "{:?}", lab.causes);
}

#[test]
fn missing_endpoints_a_port_without_match_and_failing_probes_have_different_messages() {
    let condition_after = |missing: MissingBackends, backends: u32, fails_open: bool| {
        let (mut lab, gateway, report) = served();
        (lab.wanted.missing, lab.wanted.fails_open) = (missing, fails_open);
        report(&gateway, backends, 0);
        lab.pass(SLICES_AWAITED);
        lab.settle(4);
        let reason = lab.condition(ConditionType::BackendsHealthy).unwrap().1.to_owned();
        assert_eq!(lab.causes.last().unwrap().as_str(), reason);
        (reason, lab.texts.pop().unwrap())
    };
    let none = condition_after(no_backends(""), 0, true);
    let unmatched = condition_after(no_backends("they have web (tcp 8080)"), 0, true);
    let failing = condition_after(MissingBackends::default(), 2, true);
    let closed = condition_after(MissingBackends::default(), 2, false);
    assert_eq!([&*none.0, &*unmatched.0, &*failing.0], ["NoEndpoints", "NoMatchingPort", "NoHealthyBackend"]);
    assert!(none.1.contains("no endpoint") && unmatched.1.contains("web (tcp 8080)") && failing.1.contains("probes"));
    assert!(failing.1.contains("All of them are used") && !closed.1.contains("are used") && closed.1.contains("failOpen: false"));
}

#[test]
fn every_port_is_in_the_status_and_one_that_no_slice_has_with_an_error() {
    let port =
        |port, error: Option<&'static str>| PortStatus { port, protocol: proto::Protocol::Tcp, error: error.map(Into::into) };
    let wish = Ingress { ports: vec![port(80, None), port(443, None)], ..ingress(1, IpMode::Vip) };
    let mut lab = Lab::new(&[wish]);
    let gateway = lab.connect("edge-1");
    gateway.acknowledge(4);
    let unmatched = [(proto::Protocol::Tcp, 443)].into();
    lab.wanted.missing = MissingBackends { is_whole: false, unmatched, sentence: "they have web (tcp 8080)".to_owned() };
    lab.settle(4);
    assert_eq!(
        lab.wanted.object.held.ingress[0].ports,
        [port(80, None), port(443, None)],
        "the grace time for slices is two seconds"
    );
    lab.pass(SLICES_AWAITED);
    lab.settle(4);
    let expected = [port(80, None), port(443, Some("sluice.dev/NoMatchingPort"))];
    assert_eq!(lab.wanted.object.held.ingress[0].ports, expected);
    assert_eq!(
        (lab.causes.last(), lab.condition(ConditionType::Programmed)),
        (Some(&Cause::NoMatchingPort), Some((true, "Programmed")))
    );
    lab.queue = Queue::new(lab.now);
    lab.settle(4);
    assert_eq!(lab.wanted.object.held.ingress[0].ports, expected, "a new leader changes nothing");
    lab.wanted.missing = MissingBackends::default();
    lab.settle(4);
    assert_eq!(lab.wanted.object.held.ingress[0].ports, [port(80, None), port(443, None)]);
    lab.wanted.phase = Phase::Refused(Reason::Unsupported);
    lab.settle(4);
    let refused = Some("sluice.dev/Unsupported");
    assert_eq!(lab.wanted.object.held.ingress[0].ports, [port(80, refused), port(443, refused)]);
}

#[test]
fn an_exchanged_address_is_reported_like_the_first_one() {
    let (mut lab, _gateway) = Lab::programmed();
    lab.wanted.ingress = vec![ingress(2, IpMode::Vip)];
    lab.settle(4);
    let expected =
        ["Gateways forward for the Service at address 192.0.2.1 of pool edge", "Assigned address 192.0.2.2 of pool edge"];
    assert_eq!(lab.texts, expected);
}

#[test]
fn conditions_name_the_pool_and_the_ignored_annotation() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Vip)]);
    let gateway = lab.connect("edge-1");
    gateway.acknowledge(4);
    lab.wanted.limitations = vec![Limitation::Unread];
    lab.settle(4);
    assert!(lab.wanted.object.held.conditions[&ConditionType::AddressAssigned].message.contains("from pool edge."));
    assert_eq!(lab.condition(ConditionType::Programmed), Some((true, "AnnotationIgnored")));
    lab.wanted.limitations.insert(0, Limitation::PartRefused);
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::Programmed), Some((true, "Refused")));
}

#[test]
fn a_service_that_a_gateway_refuses_is_not_programmed_and_the_condition_names_gateway_and_reason() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Vip)]);
    let (one, two) = (lab.connect("edge-1"), lab.connect("edge-2"));
    let report = |gateway: &Connection, refusal: Option<&str>| {
        let refusal = refusal.map(|why| Arc::new(Refusal { reason: Reason::Refused, message: why.to_owned() }));
        let health = vec![(web(), Health { backends: 3, healthy: 3, refusal })];
        gateway.report(Report { ready: true, health, ..Report::default() });
    };
    report(&two, Some("no SNAT address"));
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::Programmed), Some((false, "Pending")), "it may have been of an older generation");
    one.acknowledge(4);
    two.acknowledge(4);
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::Programmed), Some((false, "Refused")));
    let message = |lab: &Lab| lab.wanted.object.held.conditions[&ConditionType::Programmed].message.clone();
    assert_eq!(message(&lab), "Not served, or not wholly, by gateway edge-2: no SNAT address");
    assert_eq!(lab.causes.iter().filter(|cause| **cause == Cause::Reason(Reason::Refused)).count(), 1, "reported once");
    report(&one, Some("no way"));
    lab.settle(4);
    assert_eq!(message(&lab), "Not served, or not wholly, by gateway edge-1, edge-2: no way");
    Gateways::drain(&lab.gateways, ["edge-1".to_owned()].into());
    report(&one, None);
    lab.settle(4);
    assert_eq!(message(&lab), "Not served, or not wholly, by gateway edge-2: no SNAT address");

    // A controller that has just started reads the condition before any gateway has acknowledged a generation.
    let mut again = Lab::new(&[ingress(1, IpMode::Vip)]);
    again.object().held = lab.wanted.object.held.clone();
    let _gateway = again.connect("edge-2");
    again.plan(1);
    assert!(again.due().is_none_or(|write| write.conditions.is_empty()), "the condition stays until gateways have reported");

    report(&two, None);
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::Programmed), Some((true, "Programmed")));
}

#[test]
fn what_is_remembered_of_a_service_is_forgotten_with_it() {
    let (mut lab, _gateway) = Lab::programmed();
    assert_eq!(lab.queue.lives.len(), 1);
    lab.queue.set_plan(&Statuses::default(), lab.now);
    assert!(lab.queue.lives.is_empty() && lab.queue.next_due().is_none());
}

#[test]
fn no_healthy_backend_is_reported_once_all_gateways_have_reported_or_after_two_seconds() {
    let (mut lab, one, report) = served();
    let other = lab.connect("edge-2");
    lab.wanted.missing = MissingBackends::default();
    report(&one, 1, 0);
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::BackendsHealthy), None, "the other gateway has not reported");
    assert_eq!(lab.queue.next_due(), Some(lab.now + REPORTS_AWAITED));
    report(&other, 1, 1);
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::BackendsHealthy), Some((true, "Healthy")));
    assert!(!lab.causes.contains(&Cause::NoHealthyBackend), "{:?}", lab.causes);
    let (mut lab, one, report) = served();
    let _silent = lab.connect("edge-2");
    lab.wanted.missing = MissingBackends::default();
    report(&one, 1, 0);
    lab.settle(4);
    lab.pass(REPORTS_AWAITED);
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::BackendsHealthy), Some((false, "NoHealthyBackend")), "the other one is silent");
}

#[test]
fn a_service_whose_clients_lose_their_address_is_programmed_and_its_condition_tells_so() {
    let (mut lab, _gateway) = Lab::programmed();
    lab.wanted.limitations = vec![Limitation::ClientAddressLost];
    lab.settle(4);
    assert_eq!(lab.condition(ConditionType::Programmed), Some((true, "Programmed")));
    let message = &lab.wanted.object.held.conditions[&ConditionType::Programmed].message;
    assert!(message.contains("externalTrafficPolicy: Local") && message.contains("dnat"), "{message}");
}

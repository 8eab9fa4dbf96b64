//! Notes about backends that fail their probes or pass them again, on their Services.
//!
//! Invariant: what changes within a burst is one note for each Service over all gateways, and a burst that concerns many
//! Services is one note for the others. What a gateway reports first is no change. Not here: a Service without any healthy
//! backend, which is a condition (`goal`), and which backend it is, which gateways know (`sluicectl history`).

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use imbl::OrdMap;
use imbl::ordmap::DiffItem;
use objects::note::{Cause, Note, Remark, Subject};
use proto::ServiceName;
use tokio::sync::watch;
use tokio::time::sleep;

use super::fleet_notes::GatewayUids;
use super::queue::Statuses;
use crate::gateways::registry::{Gateways, Health};
use crate::kubernetes::recorder::Recorder;

/// A burst is over after this time: gateways report at most once a second.
const SETTLE: Duration = Duration::from_secs(2);
/// Services with a note of their own in one burst.
const SERVICES_MAX: usize = 16;

/// The health of Services as gateways reported it, by gateway.
type HealthByGateway = BTreeMap<String, OrdMap<ServiceName, Health>>;

/// Records notes while it is polled and `gateways` has a sender.
pub(crate) async fn record(
    mut gateways: watch::Receiver<Gateways>,
    statuses: watch::Receiver<Option<Arc<Statuses>>>,
    uids: watch::Receiver<GatewayUids>,
    recorder: Arc<Recorder>,
) {
    let mut before = HealthByGateway::new();
    loop {
        let now = reported(&gateways.borrow_and_update());
        let (planned, gateway_uids) = (statuses.borrow().clone(), uids.borrow().clone());
        for note in notes(&before, &now) {
            recorder.record_change(&note, uid(&note.subject, planned.as_deref(), &gateway_uids));
        }
        before = now;
        if gateways.changed().await.is_err() {
            return;
        }
        sleep(SETTLE).await;
    }
}

/// The uid of the object of a note, if it is known.
fn uid<'a>(subject: &Subject, planned: Option<&'a Statuses>, gateways: &'a BTreeMap<String, String>) -> Option<&'a str> {
    let uid = match subject {
        Subject::Service(name) => &planned?.wanted.get(name)?.object.uid,
        Subject::Gateway(name) => gateways.get(name)?,
        _ => return None,
    };
    Some(uid.as_str()).filter(|uid| !uid.is_empty())
}

/// A gateway that reconnects appears twice; the last connection is in use.
fn reported(gateways: &Gateways) -> HealthByGateway {
    gateways.iter().map(|gateway| (gateway.name.clone(), gateway.health.clone())).collect()
}

/// What a gateway sees of a Service: unhealthy backends, and all of them.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FailingBackends {
    failing: u32,
    backends: u32,
}

impl From<&Health> for FailingBackends {
    fn from(health: &Health) -> Self {
        Self { failing: health.backends.saturating_sub(health.healthy), backends: health.backends }
    }
}

/// A change of a Service at a gateway.
#[derive(Clone, Copy, PartialEq, Eq)]
struct HealthChange<'a> {
    gateway: &'a str,
    cause: Cause,
    before: FailingBackends,
    now: FailingBackends,
}

impl<'a> HealthChange<'a> {
    /// The change, if backends have failed or returned. That an unhealthy one is removed is no return.
    fn between(gateway: &'a str, old: &Health, new: &Health) -> Option<Self> {
        let (before, now) = (FailingBackends::from(old), FailingBackends::from(new));
        let cause = match now.failing.cmp(&before.failing) {
            Ordering::Greater => Cause::BackendsUnhealthy,
            Ordering::Less if new.healthy > old.healthy => Cause::BackendsReturned,
            Ordering::Less | Ordering::Equal => return None,
        };
        Some(Self { gateway, cause, before, now })
    }

    const fn has_grown(&self) -> bool {
        matches!(self.cause, Cause::BackendsUnhealthy)
    }
}

fn notes(before: &HealthByGateway, now: &HealthByGateway) -> Vec<Note> {
    let mut changes = BTreeMap::<&ServiceName, Vec<HealthChange<'_>>>::new();
    for (gateway, now) in now {
        let Some(before) = before.get(gateway) else { continue };
        for change in before.diff(now) {
            let DiffItem::Update { old: (name, old), new: (_, new) } = change else { continue };
            if let Some(change) = HealthChange::between(gateway, old, new) {
                changes.entry(name).or_default().push(change);
            }
        }
    }
    let mut changes: Vec<_> = changes.into_iter().collect();
    // Failures have notes of their own rather than returns.
    changes.sort_by_key(|(_, of_service)| !of_service.iter().any(HealthChange::has_grown));
    let others = changes.split_off(changes.len().min(SERVICES_MAX));
    let own = changes
        .iter()
        .filter_map(|(name, of_service)| Some(Note { subject: Subject::Service((*name).clone()), remark: remark(of_service)? }));
    own.chain(merged(&others)).collect()
}

/// What a Service is told: the worst change, at how many gateways it is the same, and at how many there is another one.
fn remark(changes: &[HealthChange<'_>]) -> Option<Remark> {
    let worst = changes.iter().max_by_key(|change| (change.has_grown(), change.now.failing))?;
    let same = changes.iter().filter(|change| HealthChange { gateway: worst.gateway, ..**change } == *worst).count();
    let at = if same == 1 { format!("gateway {}", worst.gateway) } else { format!("{same} gateways") };
    let (before, now) = (worst.before, worst.now);
    let others = match changes.len() - same {
        0 => String::new(),
        others => format!("; on {others} more the number changed otherwise"),
    };
    let text = format!(
        "on {at} {} of {} backends are unhealthy, before {} of {}{others}",
        now.failing, now.backends, before.failing, before.backends
    );
    Some(Remark::new(worst.cause, text))
}

/// One note for Services without a note of their own, about the gateway at which most of them changed.
fn merged(others: &[(&ServiceName, Vec<HealthChange<'_>>)]) -> Option<Note> {
    let mut by_gateway = BTreeMap::<&str, usize>::new();
    for change in others.iter().flat_map(|(_, changes)| changes) {
        *by_gateway.entry(change.gateway).or_default() += 1;
    }
    // Of equal ones the first by name.
    let (gateway, _) = by_gateway.iter().rev().max_by_key(|(_, services)| **services)?;
    let at = if by_gateway.len() == 1 { String::new() } else { format!(" on {} gateways", by_gateway.len()) };
    let failing = others.iter().filter(|(_, changes)| changes.iter().any(HealthChange::has_grown)).count();
    let cause = if failing > 0 { Cause::BackendsUnhealthy } else { Cause::BackendsReturned };
    let text = format!("of {} other Services the number of unhealthy backends changed{at}, of {failing} it grew", others.len());
    Some(Note { subject: Subject::Gateway((*gateway).to_owned()), remark: Remark::new(cause, text) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reports(services: &[(&str, u32, u32)]) -> HealthByGateway {
        on(&["edge-1"], services)
    }

    fn on(gateways: &[&str], services: &[(&str, u32, u32)]) -> HealthByGateway {
        let health = |(name, backends, healthy): &(&str, u32, u32)| {
            (ServiceName::new("shop", name), Health { backends: *backends, healthy: *healthy, refusal: None })
        };
        gateways.iter().map(|gateway| ((*gateway).to_owned(), services.iter().map(health).collect())).collect()
    }

    fn text(note: &Note) -> String {
        format!("{} {}: {}", note.subject, note.remark.cause.as_str(), note.remark.text)
    }

    fn texts(before: &[(&str, u32, u32)], now: &[(&str, u32, u32)]) -> Vec<String> {
        notes(&reports(before), &reports(now)).iter().map(text).collect()
    }

    #[test]
    fn backends_that_fail_and_return_are_told_and_those_that_come_and_go_are_not() {
        let expected = "Service shop/web BackendsUnhealthy: on gateway edge-1 2 of 3 backends are unhealthy, before 0 of 3";
        assert_eq!(texts(&[("web", 3, 3)], &[("web", 3, 1)]), [expected]);
        let expected = "Service shop/web BackendsReturned: on gateway edge-1 0 of 3 backends are unhealthy, before 2 of 3";
        assert_eq!(texts(&[("web", 3, 1)], &[("web", 3, 3)]), [expected]);
        assert!(texts(&[("web", 3, 3)], &[("web", 5, 5)]).is_empty());
        assert!(texts(&[("web", 3, 2)], &[("web", 2, 2)]).is_empty(), "the unhealthy one is removed");
        assert!(texts(&[("web", 3, 3)], &[("web", 3, 3), ("new", 2, 0)]).is_empty());
        assert!(notes(&HealthByGateway::new(), &reports(&[("web", 3, 0)])).is_empty(), "the first report");
    }

    #[test]
    fn a_service_has_one_note_over_all_gateways() {
        let names: Vec<_> = (0..20).map(|n| format!("edge-{n:02}")).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let before = on(&names, &[("web", 3, 3)]);
        let mut now = on(&names, &[("web", 3, 2)]);
        let one = |now: &HealthByGateway| {
            let notes = notes(&before, now);
            assert_eq!(notes.len(), 1);
            text(&notes[0])
        };
        let expected = "Service shop/web BackendsUnhealthy: on 20 gateways 1 of 3 backends are unhealthy, before 0 of 3";
        assert_eq!(one(&now), expected);
        now.extend(on(&names[..1], &[("web", 3, 1)]));
        let expected = "Service shop/web BackendsUnhealthy: on gateway edge-00 2 of 3 backends are unhealthy, before 0 of 3; \
                        on 19 more the number changed otherwise";
        assert_eq!(one(&now), expected);
    }

    #[test]
    fn a_burst_over_many_services_is_merged() {
        let names: Vec<_> = (0..100).map(|n| format!("web-{n:03}")).collect();
        let all = |healthy| names.iter().map(|name| (name.as_str(), 3, healthy)).collect::<Vec<_>>();
        let texts = texts(&all(3), &all(2));
        assert_eq!(texts.len(), SERVICES_MAX + 1);
        assert_eq!(
            texts[SERVICES_MAX],
            "EdgeGateway edge-1 BackendsUnhealthy: of 84 other Services the number of unhealthy backends changed, of 84 it grew"
        );
        let gateways = ["edge-1", "edge-2", "edge-3"];
        let notes = notes(&on(&gateways, &all(3)), &on(&gateways, &all(2)));
        assert_eq!(notes.len(), SERVICES_MAX + 1, "however many gateways there are");
        let expected = "EdgeGateway edge-1 BackendsUnhealthy: of 84 other Services the number of unhealthy backends changed on \
                        3 gateways, of 84 it grew";
        assert_eq!(text(&notes[SERVICES_MAX]), expected);
    }

    #[test]
    fn a_note_about_a_gateway_has_its_uid() {
        let uids = BTreeMap::from([("edge-1".to_owned(), "u-1".to_owned()), ("edge-2".to_owned(), String::new())]);
        let gateway = |name: &str| Subject::Gateway(name.to_owned());
        let known = ["edge-1", "edge-2", "edge-3"].map(|name| uid(&gateway(name), None, &uids));
        assert_eq!(known, [Some("u-1"), None, None]);
        assert_eq!(uid(&Subject::Service(ServiceName::new("shop", "web")), None, &uids), None);
    }
}

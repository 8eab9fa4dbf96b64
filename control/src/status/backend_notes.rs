//! Notes about backends that fail their probes or pass them again, on their Services.
//!
//! Invariant: what changes within a burst is one note for each Service and gateway, and a burst that concerns many
//! Services is one note for the others. What a gateway reports first is no change. Not here: a Service without any healthy
//! backend, which is a condition (`goal`), and which backend it is, which gateways know (`sluicectl history`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use imbl::OrdMap;
use imbl::ordmap::DiffItem;
use objects::note::{Cause, Note, Remark, Subject};
use proto::ServiceName;
use tokio::sync::watch;
use tokio::time::sleep;

use super::queue::Statuses;
use crate::gateways::registry::{Gateways, Health};
use crate::kubernetes::recorder::Recorder;

/// A burst is over after this time: gateways report at most once a second.
const SETTLE: Duration = Duration::from_secs(2);
/// Services with a note of their own in one burst of a gateway.
const SERVICES_MAX: usize = 16;

/// The health of Services as gateways reported it, by gateway.
type HealthByGateway = BTreeMap<String, OrdMap<ServiceName, Health>>;

/// Records notes while it is polled and `gateways` has a sender.
pub(crate) async fn record(
    mut gateways: watch::Receiver<Gateways>,
    statuses: watch::Receiver<Option<Arc<Statuses>>>,
    recorder: Arc<Recorder>,
) {
    let mut before = HealthByGateway::new();
    loop {
        let now = reported(&gateways.borrow_and_update());
        let planned = statuses.borrow().clone();
        for note in notes(&before, &now) {
            let uid = match &note.subject {
                Subject::Service(name) => planned.as_ref().and_then(|planned| Some(planned.wanted.get(name)?.object.uid.clone())),
                _ => None,
            };
            recorder.record(&note, uid.as_deref().filter(|uid| !uid.is_empty()));
        }
        before = now;
        if gateways.changed().await.is_err() {
            return;
        }
        sleep(SETTLE).await;
    }
}

/// A gateway that reconnects appears twice; the last connection is in use.
fn reported(gateways: &Gateways) -> HealthByGateway {
    gateways.iter().map(|gateway| (gateway.name.clone(), gateway.health.clone())).collect()
}

fn notes(before: &HealthByGateway, now: &HealthByGateway) -> Vec<Note> {
    let of_gateway = |(gateway, now): (&String, &OrdMap<ServiceName, Health>)| {
        let before = before.get(gateway)?;
        let changes = before.diff(now).filter_map(|change| match change {
            DiffItem::Update { old: (name, old), new: (_, new) } => Some((name.clone(), remark(gateway, old, new)?)),
            DiffItem::Add(..) | DiffItem::Remove(..) => None,
        });
        Some(merged(changes.collect(), gateway))
    };
    now.iter().filter_map(of_gateway).flatten().collect()
}

/// What a Service is told, if the number of its unhealthy backends has changed.
fn remark(gateway: &str, old: &Health, new: &Health) -> Option<Remark> {
    let failing = |health: &Health| health.backends.saturating_sub(health.healthy);
    let (was, is, all) = (failing(old), failing(new), new.backends);
    let cause = match is.cmp(&was) {
        std::cmp::Ordering::Greater => Cause::BackendsUnhealthy,
        std::cmp::Ordering::Less => Cause::BackendsReturned,
        std::cmp::Ordering::Equal => return None,
    };
    let text = format!("on gateway {gateway} {is} of {all} backends are unhealthy, before {was} of {}", old.backends);
    Some(Remark::new(cause, text))
}

/// At most [`SERVICES_MAX`] notes about Services, and one about the gateway for the others.
fn merged(changes: Vec<(ServiceName, Remark)>, gateway: &str) -> Vec<Note> {
    let others = changes.len().saturating_sub(SERVICES_MAX);
    let failing = changes.iter().skip(SERVICES_MAX).filter(|(_, remark)| remark.cause == Cause::BackendsUnhealthy).count();
    let mut notes: Vec<_> =
        changes.into_iter().take(SERVICES_MAX).map(|(name, remark)| Note { subject: Subject::Service(name), remark }).collect();
    if others > 0 {
        let cause = if failing > 0 { Cause::BackendsUnhealthy } else { Cause::BackendsReturned };
        let text = format!("of {others} other Services the number of unhealthy backends changed, of {failing} it grew");
        notes.push(Note { subject: Subject::Gateway(gateway.to_owned()), remark: Remark::new(cause, text) });
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reports(services: &[(&str, u32, u32)]) -> HealthByGateway {
        let health = |(name, backends, healthy): &(&str, u32, u32)| {
            (ServiceName::new("shop", name), Health { backends: *backends, healthy: *healthy, refusal: None })
        };
        [("edge-1".to_owned(), services.iter().map(health).collect())].into()
    }

    fn texts(before: &[(&str, u32, u32)], now: &[(&str, u32, u32)]) -> Vec<String> {
        let text = |note: Note| format!("{} {}: {}", note.subject, note.remark.cause.as_str(), note.remark.text);
        notes(&reports(before), &reports(now)).into_iter().map(text).collect()
    }

    #[test]
    fn backends_that_fail_and_return_are_told_and_those_that_come_and_go_are_not() {
        let expected = "Service shop/web BackendsUnhealthy: on gateway edge-1 2 of 3 backends are unhealthy, before 0 of 3";
        assert_eq!(texts(&[("web", 3, 3)], &[("web", 3, 1)]), [expected]);
        let expected = "Service shop/web BackendsReturned: on gateway edge-1 0 of 3 backends are unhealthy, before 2 of 3";
        assert_eq!(texts(&[("web", 3, 1)], &[("web", 3, 3)]), [expected]);
        assert!(texts(&[("web", 3, 3)], &[("web", 5, 5)]).is_empty());
        assert!(texts(&[("web", 3, 3)], &[("web", 3, 3), ("new", 2, 0)]).is_empty());
        assert!(notes(&HealthByGateway::new(), &reports(&[("web", 3, 0)])).is_empty(), "the first report");
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
    }
}

//! Writes `addresspools/status`: the usage figures and conditions of each pool.
//!
//! Invariant: a status is written only if it differs from the object, and each pool at most once a second, because
//! every new or deleted Service changes some figure. Deliberately not here: the figures (`addresses`).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::Patch;
use serde_json::json;
use tokio::sync::watch;

use super::accepted;
use crate::gateways::registry::Gateways;
use crate::kubernetes::{Cluster, Retry, patch_params};
use crate::plan::addresses::{PoolUse, absence};
use objects::crd::{AddressPool, AddressPoolStatus};

/// Minimum time between two writes: 20 a second, as for Services.
const WRITE_PERIOD: Duration = Duration::from_millis(50);
/// Interval at which all pools are examined.
const EXAMINATION_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of gateways named in a message; a group has about a dozen.
const GATEWAYS_NAMED_MAX: usize = 12;

/// Usage figures of every pool, and the `AddressPool` objects.
#[derive(Clone, Debug, Default)]
pub struct PoolsReport {
    /// The figures.
    pub uses: Arc<Vec<PoolUse>>,
    /// Revision that grows when an object changes.
    pub revision: u64,
    /// The objects, by name.
    pub objects: Arc<BTreeMap<String, AddressPool>>,
}

/// Last known content of each object: its uid, and its status as last read or written.
type KnownStatuses = HashMap<String, (Option<String>, AddressPoolStatus)>;

/// Writes statuses while it is polled and `reports` has a sender.
pub async fn write_pools(cluster: &Cluster, mut reports: watch::Receiver<PoolsReport>, mut gateways: watch::Receiver<Gateways>) {
    let api = Api::<AddressPool>::all(cluster.client.clone());
    let mut retry = Retry::new("patch addresspools/status", &cluster.server);
    let mut known = KnownStatuses::new();
    loop {
        let now = reports.borrow_and_update().clone();
        known.retain(|name, (uid, _)| now.objects.get(name).is_some_and(|pool| pool.metadata.uid == *uid));
        let mut waits = None;
        let statuses = due(&now, &mut known, &gateways.borrow_and_update(), Timestamp::now());
        for (name, status) in statuses {
            let body =
                json!({"metadata": {"uid": now.objects.get(&name).and_then(|pool| pool.metadata.uid.clone())}, "status": status});
            let answer = api.patch_status(&name, &patch_params(), &Patch::Merge(body)).await;
            // Deleted, replaced or rejected: decided again when the object changes.
            if let Err(outage) = accepted(answer, &[400, 404, 409, 422]) {
                waits = Some(retry.failed(outage, Instant::now()));
                break;
            }
            retry.succeeded();
            if let Some((_, kept)) = known.get_mut(&name) {
                *kept = status;
            }
            tokio::time::sleep(WRITE_PERIOD).await;
        }
        match waits {
            Some(wait) => tokio::time::sleep(wait).await,
            None => {
                tokio::select! {
                    changed = reports.changed() => if changed.is_err() { return },
                    Ok(()) = gateways.changed() => {}
                }
                tokio::time::sleep(EXAMINATION_INTERVAL).await;
            }
        }
    }
}

/// The statuses that differ from the known content of their objects.
fn due(report: &PoolsReport, known: &mut KnownStatuses, gateways: &Gateways, now: Timestamp) -> Vec<(String, AddressPoolStatus)> {
    let mut due = Vec::new();
    for one in report.uses.iter().filter(|one| one.state.is_object) {
        let Some(object) = report.objects.get(&one.state.name) else { continue };
        let of_object = || (object.metadata.uid.clone(), object.status.clone().unwrap_or_default());
        let (_, before) = known.entry(one.state.name.clone()).or_insert_with(of_object);
        let status = status(one, object.metadata.generation, before, (gateways, now));
        if status != *before {
            due.push((one.state.name.clone(), status));
        }
    }
    due
}

fn status(
    one: &PoolUse,
    generation: Option<i64>,
    before: &AddressPoolStatus,
    (gateways, now): (&Gateways, Timestamp),
) -> AddressPoolStatus {
    let condition = |type_: &str, is_true: bool, reason: &str, message: String| {
        let status = if is_true { "True" } else { "False" };
        let same = before.conditions.iter().find(|old| old.type_ == type_ && old.status == status);
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message,
            last_transition_time: same.map_or(Time(now), |old| old.last_transition_time.clone()),
            observed_generation: generation,
        }
    };
    let conflict = match &one.state.conflict {
        Some(why) => condition("Conflict", true, "Conflict", format!("the pool is not used: {why}")),
        None => condition("Conflict", false, "Used", String::new()),
    };
    // Of a pool that is announced by routes nobody answers ARP and NDP; of another one nobody knows before a gateway reports.
    let unannounced = gateways.pool_unannounced_by(&one.state.addresses).filter(|_| gateways.knows_links());
    let announced = unannounced.map(|gateways| {
        if gateways.is_empty() {
            return condition("Announceable", true, "OnLink", String::new());
        }
        let names = gateways.iter().take(GATEWAYS_NAMED_MAX).copied().collect::<Vec<_>>().join(", ");
        let more = if gateways.len() > GATEWAYS_NAMED_MAX { " and others" } else { "" };
        let message = format!(
            "gateway {names}{more} cannot answer ARP and NDP for all of its addresses, because no port or VLAN device has an address \
             of their network; give one an address, or set announce: routed"
        );
        condition("Announceable", false, "NotOnLink", message)
    });
    let exhausted = match exhaustion(one) {
        Exhaustion::NotUsed => {
            condition("Exhausted", true, "NotUsed", "none of its addresses is allocated: the pool is not used".to_owned())
        }
        Exhaustion::SomeLeft(text) => condition("Exhausted", false, "SomeLeft", text),
        Exhaustion::NoneLeft(text) => condition("Exhausted", true, "NoneLeft", text),
    };
    AddressPoolStatus {
        total: Some(one.text_of(|figures| figures.total)),
        used: Some(one.text_of(|figures| figures.used)),
        available: Some(one.text_of(|figures| figures.available)),
        conditions: [conflict, exhausted].into_iter().chain(announced).collect(),
    }
}

/// Whether a pool has addresses to give, with the message of the condition.
enum Exhaustion {
    NotUsed,
    SomeLeft(String),
    NoneLeft(String),
}

fn exhaustion(one: &PoolUse) -> Exhaustion {
    if one.state.conflict.is_some() {
        return Exhaustion::NotUsed;
    }
    let mut lacking: Vec<String> = one.exhausted().map(|(family, _)| family.to_string()).collect();
    let awaiting = if lacking.is_empty() { one.awaiting() } else { one.exhausted().map(|(_, awaiting)| awaiting).sum() };
    let absence = absence(&one.awaited);
    let wait = if awaiting == 1 {
        "1 freed address waits until every gateway has removed it".to_owned()
    } else {
        format!("{awaiting} freed addresses wait until every gateway has removed them")
    };
    if let Some(last) = lacking.pop() {
        let before: String = lacking.iter().map(|family| format!("{family} and no ")).collect();
        let waits = if awaiting > 0 { format!("; {wait}{absence}") } else { String::new() };
        return Exhaustion::NoneLeft(format!("no {before}{last} address is left; add addresses or remove Services{waits}"));
    }
    Exhaustion::SomeLeft(if absence.is_empty() { String::new() } else { format!("{wait}{absence}") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateways::registry::{Connection, Report};
    use crate::plan::addresses::Figures;
    use crate::plan::pools::PoolState;

    fn report_of(available: u128, conflict: Option<&str>) -> PoolsReport {
        let one = PoolUse {
            state: PoolState {
                name: "edge".to_owned(),
                is_object: true,
                addresses: vec!["2001:db8::/64".to_owned()],
                conflict: conflict.map(str::to_owned),
            },
            families: vec![(proto::Family::V6, Figures { total: 1 << 64, used: 0, available, awaiting: 0 })],
            awaited: Vec::new(),
        };
        let state = PoolState { name: "default".to_owned(), ..PoolState::default() };
        let of_file = PoolUse { state, ..PoolUse::default() };
        let object: AddressPool = serde_json::from_value(json!({"apiVersion": "sluice.dev/v1beta1", "kind": "AddressPool",
            "metadata": {"name": "edge", "uid": "u", "generation": 3}, "spec": {"addresses": ["2001:db8::/64"]}}))
        .unwrap();
        PoolsReport { uses: Arc::new(vec![of_file, one]), revision: 1, objects: Arc::new([("edge".to_owned(), object)].into()) }
    }

    #[test]
    fn a_status_is_due_if_it_differs_and_unchanged_conditions_keep_their_time() {
        let (mut known, early, late) =
            (KnownStatuses::new(), Timestamp::from_second(1).unwrap(), Timestamp::from_second(2).unwrap());
        let first = due(&report_of(5, None), &mut known, &Gateways::default(), early);
        assert_eq!(first.len(), 1, "only objects have a status: {first:?}");
        let (name, written) = first[0].clone();
        assert_eq!(written.total.as_deref(), Some("18446744073709551616"));
        let of = |status: &AddressPoolStatus| -> Vec<_> {
            let summary = |one: &Condition| (one.type_.clone(), one.status.clone(), one.last_transition_time.0.as_second());
            status.conditions.iter().map(summary).collect()
        };
        let expect = |conflict: (&str, i64), exhausted: (&str, i64)| {
            vec![
                ("Conflict".to_owned(), conflict.0.to_owned(), conflict.1),
                ("Exhausted".to_owned(), exhausted.0.to_owned(), exhausted.1),
            ]
        };
        assert_eq!(of(&written), expect(("False", 1), ("False", 1)));
        known.insert(name, (Some("u".to_owned()), written));
        assert_eq!(due(&report_of(5, None), &mut known, &Gateways::default(), late), []);
        let later = due(&report_of(0, None), &mut known, &Gateways::default(), late);
        assert_eq!(of(&later[0].1), expect(("False", 1), ("True", 2)));
        let clashing = due(&report_of(0, Some("it overlaps")), &mut known, &Gateways::default(), late);
        assert_eq!(of(&clashing[0].1), expect(("True", 2), ("True", 2)), "an unused pool has no available address");
        assert!(clashing[0].1.conditions[0].message.contains("it overlaps"));
    }

    #[test]
    fn an_exhausted_pool_names_the_gateways_that_may_still_forward_its_freed_addresses() {
        let exhausted = |available, awaiting, awaited: &[&str]| {
            let mut report = report_of(available, None);
            let one = &mut Arc::make_mut(&mut report.uses)[1];
            one.families[0].1.awaiting = awaiting;
            one.awaited = awaited.iter().map(|name| (*name).to_owned()).collect();
            let mut all = due(&report, &mut KnownStatuses::new(), &Gateways::default(), Timestamp::from_second(1).unwrap());
            let condition = all.remove(0).1.conditions.into_iter().find(|one| one.type_ == "Exhausted").unwrap();
            (condition.status, condition.message)
        };
        let away = "; not connected: edge-2 (delete the EdgeGateway of one that is gone for good)";
        let none = "no IPv6 address is left; add addresses or remove Services";
        for (available, awaiting, awaited, status, message) in [
            (0, 0, &[][..], "True", none.to_owned()),
            (2, 2, &["edge-2"], "True", format!("{none}; 2 freed addresses wait until every gateway has removed them{away}")),
            (1, 1, &[], "True", format!("{none}; 1 freed address waits until every gateway has removed it")),
            (2, 1, &["edge-2"], "False", format!("1 freed address waits until every gateway has removed it{away}")),
            (2, 1, &[], "False", String::new()),
        ] {
            assert_eq!(exhausted(available, awaiting, awaited), (status.to_owned(), message));
        }
    }

    #[test]
    fn of_a_family_that_is_full_no_freed_address_of_the_other_one_waits() {
        let figures = |available, awaiting| Figures { total: 4, used: 4 - available, available, awaiting };
        let mut one = report_of(0, None).uses[1].clone();
        one.families = vec![(proto::Family::V4, figures(0, 0)), (proto::Family::V6, figures(2, 1))];
        one.awaited = vec!["edge-2".to_owned()];
        let Exhaustion::NoneLeft(text) = exhaustion(&one) else { panic!("IPv4 is full") };
        assert_eq!(text, "no IPv4 address is left; add addresses or remove Services");
    }

    #[test]
    fn the_condition_of_an_l2_pool_names_the_gateways_that_cannot_announce_it() {
        let gateways = watch::Sender::new(Gateways::default());
        let (report, now) = (report_of(5, None), Timestamp::from_second(1).unwrap());
        let announceable = || {
            let mut all = due(&report, &mut KnownStatuses::new(), &gateways.borrow(), now);
            let (_, status) = all.remove(0);
            status.conditions.into_iter().find(|one| one.type_ == "Announceable").map(|one| (one.status, one.message))
        };
        assert_eq!(announceable(), None, "a pool that is announced by routes");
        Gateways::serve_l2(&gateways, &["2001:db8::/64".parse().unwrap()]);
        assert_eq!(announceable(), None, "no gateway has said anything");
        let open = |name: &str, net: &str| {
            let one = Connection::open(&gateways, name, "1", Vec::new());
            one.report(Report { links: Some(vec![net.parse().unwrap()]), ..Report::default() });
            one
        };
        let _one = open("edge-1", "2001:db8::/64");
        assert_eq!(announceable(), Some(("True".to_owned(), String::new())));
        let _two = open("edge-2", "192.0.2.0/24");
        let (status, message) = announceable().unwrap();
        assert!(status == "False" && message.contains("gateway edge-2 cannot answer"), "{message}");
    }
}

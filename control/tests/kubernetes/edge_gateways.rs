//! The status of gateways, as EdgeGateway objects show it.

use kube::Api;
use objects::crd::{EdgeGateway, EdgeGatewayStatus};
use proto::v1::{DuplicateReport, ElectionReport, FleetReport, PartnerReport, SessionReport};
use serde_json::json;

use crate::api_server::{Fault, FaultRule, Kind};
use crate::installation::Installation;
use crate::user::{User, wait_for};

#[tokio::test]
async fn a_connected_gateway_is_shown_in_the_cluster() {
    let (_server, user) = User::with_test_server().await;
    let _installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    user.wait_for_ingress("web").await;
    let gateways = Api::<EdgeGateway>::all(user.cluster.client.clone());
    let look = async || gateways.get_opt("edge-1").await.unwrap().filter(|object| object.status.is_some());
    let object = wait_for("an EdgeGateway", look, Option::is_some).await.unwrap();
    let status = object.status.unwrap();
    assert_eq!((object.spec.group, status.version.as_deref()), (user.group(), Some("test")));
    assert!(status.last_seen.is_some() && status.ready.is_some(), "{status:?}");
}

#[tokio::test]
async fn edge_gateways_follow_changes_of_services_and_failed_writes() {
    let (server, user) = User::with_test_server().await;
    server.inject(FaultRule { fault: Fault::Internal, times: 2, method: "PATCH", path_contains: "/edgegateways/", watch: false });
    let _installation = Installation::start(&user).await;
    let gateways = Api::<EdgeGateway>::all(user.cluster.client.clone());
    let services_shown = async || gateways.get_opt("edge-1").await.unwrap().and_then(|object| object.status?.services);
    wait_for("a status, once the server accepts it", &services_shown, Option::is_some).await;
    for count in 1..=2 {
        user.add(&format!("web-{count}"), &json!({})).await;
        wait_for("the number of Services", &services_shown, |services| *services == Some(count)).await;
    }
}

#[tokio::test]
async fn a_gateway_whose_object_is_refused_hides_no_other_and_a_deleted_object_returns() {
    let (server, user) = User::with_test_server().await;
    for name in ["edge-1", "edge-3"] {
        server.refuse(Kind::EdgeGateway, name, "not this one");
    }
    let installation = Installation::start(&user).await;
    let _others = ["edge-2", "edge-3", "edge-4"].map(|name| installation.add_gateway(name));
    let uid = |name: &str| server.get(Kind::EdgeGateway, "", name).map(|object| object["metadata"]["uid"].clone());
    let is_shown =
        |name: &str| server.get(Kind::EdgeGateway, "", name).is_some_and(|object| object["status"]["ready"].is_string());
    wait_for("the others", async || is_shown("edge-2") && is_shown("edge-4"), |shown| *shown).await;
    let first = uid("edge-2");
    server.delete(Kind::EdgeGateway, "", "edge-2");
    wait_for("a new object", async || uid("edge-2"), |now| now.is_some() && *now != first).await;
    wait_for("its status", async || is_shown("edge-2"), |shown| *shown).await;
    assert_eq!((uid("edge-1"), uid("edge-3")), (None, None));
    let attempts = server.log().iter().filter(|logged| logged.method == "POST" && logged.body.contains("edge-1")).count();
    assert!(attempts >= 1);
}

#[tokio::test]
async fn many_new_services_cost_few_writes_of_edge_gateways() {
    let (server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    let _others: Vec<_> = (2..6).map(|number| installation.add_gateway(&format!("edge-{number}"))).collect();
    let objects = || server.list(Kind::EdgeGateway, "");
    let are_ready =
        |objects: &Vec<serde_json::Value>| objects.iter().filter(|one| one["status"]["ready"].is_string()).count() == 5;
    wait_for("five gateways", async || objects(), are_ready).await;
    let since = server.log().len();
    for number in 0..12 {
        user.add(&format!("web-{number}"), &json!({})).await;
        user.wait_for_ingress(&format!("web-{number}")).await;
    }
    let have_count = |objects: &Vec<serde_json::Value>| objects.iter().all(|one| one["status"]["services"] == 12);
    wait_for("the number of Services", async || objects(), have_count).await;
    let requests = |method: &str| {
        let log = server.log().split_off(since);
        log.into_iter().filter(|one| one.method == method && one.path.contains("/edgegateways") && !one.is_watch()).count()
    };
    assert!(requests("PATCH") < 5 * 12 / 2 && requests("GET") == 0, "{} patches, {} lists", requests("PATCH"), requests("GET"));
}

/// A gateway that owns these groups of 16, with a partner and a router.
fn fleet(owned: u64, lag_ms: u64) -> FleetReport {
    let election = ElectionReport { groups: 16, owned, takeovers: owned.count_ones().into(), ..Default::default() };
    let partner = PartnerReport { name: "edge-2".into(), in_sync: true, lag_ms: Some(lag_ms), ..Default::default() };
    let session = |status: &str| SessionReport {
        protocol: "bgp".into(),
        peer: "192.0.2.1".into(),
        status: status.into(),
        ..Default::default()
    };
    let sessions = vec![session(if owned == 0 { "up" } else { "down" })];
    FleetReport { election: Some(election), partners: vec![partner], shadow_flows: lag_ms, sessions, ..Default::default() }
}

#[tokio::test]
async fn a_takeover_is_a_status_and_an_event_of_the_gateway() {
    let (server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    let gateways = Api::<EdgeGateway>::all(user.cluster.client.clone());
    let status = async || gateways.get_opt("edge-1").await.unwrap().and_then(|object| object.status).unwrap_or_default();
    let owns = async |text: &str| {
        let is_shown = |status: &EdgeGatewayStatus| status.vip_groups.as_deref() == Some(text);
        wait_for(&format!("groups {text}"), &status, is_shown).await
    };
    let of = |reason: &str| server.list(Kind::Event, "default").into_iter().find(|event| event["reason"] == reason);
    let duplicate = DuplicateReport { vip: vec![192, 0, 2, 200], station: "02:00:00:00:00:09".into() };
    installation.report_fleet(FleetReport { duplicates: vec![duplicate], ..fleet(0, 1) });
    wait_for("the first look, which later ones are compared with", async || of("DuplicateVIP"), Option::is_some).await;
    let first = owns("0/16").await;
    assert_eq!((first.sessions_up.as_deref(), first.shadow_flows), (Some("1/1"), Some(1)));
    installation.report_fleet(fleet(0xff, 20));
    let taken = owns("8/16").await;
    assert_eq!((taken.takeovers, taken.lag_ms, taken.owned_groups), (Some(8), Some(20), Some((0..8).collect())));
    let conditions: Vec<_> = taken.conditions.iter().map(|one| (one.type_.as_str(), one.status.as_str())).collect();
    assert!(conditions.contains(&("SessionsUp", "False")) && conditions.contains(&("InSync", "True")), "{conditions:?}");
    let event = wait_for("an Event of the takeover", async || of("TookOver"), Option::is_some).await.unwrap();
    let uid = gateways.get("edge-1").await.unwrap().metadata.uid.unwrap();
    assert_eq!((&event["regarding"]["kind"], &event["regarding"]["uid"]), (&json!("EdgeGateway"), &json!(uid)));
    assert!(event["note"].as_str().unwrap().contains("8 of 16 groups of VIPs (0-7)"), "{event}");
    wait_for("an Event of the session", async || of("SessionDown"), Option::is_some).await;
}

#[tokio::test]
async fn a_vip_that_another_station_announces_is_an_event_of_its_service() {
    let (_server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    let vip = proto::convert::address_bytes(user.wait_for_address("web").await.parse().unwrap());
    let station = "02:00:00:00:00:09".to_owned();
    installation.report_fleet(FleetReport { duplicates: vec![DuplicateReport { vip, station }], ..Default::default() });
    let event = user.wait_for_event("web", "DuplicateVIP").await;
    assert!(event.note.as_deref().unwrap().contains("02:00:00:00:00:09"), "{event:?}");
    let gateways = Api::<EdgeGateway>::all(user.cluster.client.clone());
    let is_duplicate = async || {
        let status = gateways.get("edge-1").await.unwrap().status.unwrap_or_default();
        status.conditions.iter().any(|one| one.type_ == "DuplicateVIP" && one.status == "True")
    };
    wait_for("the condition", is_duplicate, |is_duplicate| *is_duplicate).await;
}

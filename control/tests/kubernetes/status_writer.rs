//! Writes of a status: the resulting Service, and writes that are outdated or refused.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use control::kubernetes::recorder::Recorder;
use control::kubernetes::{ApiError, Cluster, PatchOutcome, StatusError, StatusWriter, patch};
use objects::note::{Cause, Note, Remark, Subject};
use objects::status::{Ingress, IpMode, StatusWrite};
use proto::ServiceName;
use serde_json::{Value, json};

use crate::api_server::{ApiServer, Availability, Fault, FaultRule, Kind};
use crate::user::connect_to;

async fn start() -> (ApiServer, Cluster, Value) {
    let server = ApiServer::start().await;
    let cluster = connect_to(&server).await;
    let spec = json!({"type": "LoadBalancer", "ports": [{"port": 80}]});
    let service = server.create(Kind::Service, json!({"metadata": {"name": "web", "namespace": "a"}, "spec": spec}));
    (server, cluster, service)
}

fn write(service: &Value, ips: &[&str]) -> StatusWrite {
    let text = |field| service["metadata"][field].as_str().unwrap().to_owned();
    StatusWrite {
        service: ServiceName::new(&text("namespace"), &text("name")),
        uid: text("uid"),
        resource_version: text("resourceVersion"),
        ingress: Some(ips.iter().map(|ip| Ingress::new(ip.parse().unwrap(), IpMode::Proxy)).collect()),
        conditions: BTreeMap::new(),
        finalizer: None,
        group: None,
    }
}

fn next_write_fails(fault: Fault) -> FaultRule {
    FaultRule { fault, times: 1, method: "PATCH", path_contains: "/status", watch: false }
}

#[tokio::test]
async fn addresses_are_written_with_their_mode_and_cleared_again() {
    let (server, cluster, service) = start().await;
    assert_eq!(patch(&cluster.client, &write(&service, &["192.0.2.1", "2001:db8::1"])).await, Ok(PatchOutcome::Written));
    let service = server.get(Kind::Service, "a", "web").unwrap();
    let expected = json!([{"ip": "192.0.2.1", "ipMode": "Proxy"}, {"ip": "2001:db8::1", "ipMode": "Proxy"}]);
    assert_eq!(service["status"]["loadBalancer"]["ingress"], expected);
    assert_eq!(patch(&cluster.client, &write(&service, &[])).await, Ok(PatchOutcome::Written));
    assert_eq!(server.get(Kind::Service, "a", "web").unwrap()["status"], json!({"loadBalancer": {}}));
    let requests = server.log();
    assert_eq!(requests.len(), 2, "one request per write");
    assert_eq!(requests[0].content_type, "application/strategic-merge-patch+json");
    assert!(requests[0].query.contains("fieldManager=sluice"), "{}", requests[0].query);
}

#[tokio::test]
async fn a_write_that_was_decided_on_an_older_object_changes_nothing() {
    let (server, cluster, service) = start().await;
    server.update(Kind::Service, "a", "web", &json!({"metadata": {"annotations": {"touched": "yes"}}}));
    assert_eq!(patch(&cluster.client, &write(&service, &["192.0.2.1"])).await, Ok(PatchOutcome::Stale));
    assert_eq!(server.get(Kind::Service, "a", "web").unwrap()["status"], json!({"loadBalancer": {}}));
}

#[tokio::test]
async fn a_write_to_a_deleted_service_is_gone_and_a_recreated_one_is_not_changed() {
    let (server, cluster, service) = start().await;
    server.delete(Kind::Service, "a", "web");
    assert_eq!(patch(&cluster.client, &write(&service, &["192.0.2.1"])).await, Ok(PatchOutcome::Gone));
    let spec = json!({"type": "LoadBalancer", "ports": [{"port": 80}]});
    let recreated = server.create(Kind::Service, json!({"metadata": {"name": "web", "namespace": "a"}, "spec": spec}));
    let mut wrong_uid = write(&recreated, &["192.0.2.1"]);
    wrong_uid.uid = write(&service, &[]).uid;
    let refused = patch(&cluster.client, &wrong_uid).await;
    assert!(matches!(refused, Err(StatusError::Refused { code: 422, .. })), "{refused:?}");
}

#[tokio::test]
async fn a_refusal_that_embeds_the_object_is_cut_to_a_thousand_characters() {
    let (server, cluster, service) = start().await;
    server.inject(next_write_fails(Fault::Invalid("x".repeat(50_000))));
    let Err(StatusError::Refused { code: 422, message, .. }) = patch(&cluster.client, &write(&service, &["192.0.2.1"])).await
    else {
        panic!("the write was not refused");
    };
    assert_eq!(message.chars().count(), 1_001, "including the mark of the cut");
}

#[tokio::test]
async fn temporary_errors_are_distinguished_from_refusals() {
    let (server, cluster, service) = start().await;
    let write = write(&service, &["192.0.2.1"]);
    server.inject(next_write_fails(Fault::TooMany { retry_after_s: 3 }));
    let busy = patch(&cluster.client, &write).await.unwrap_err();
    let StatusError::Later(ApiError::Busy { retry_after, .. }) = busy else { panic!("{busy:?}") };
    assert_eq!(retry_after.as_secs(), 3);
    server.inject(next_write_fails(Fault::Internal));
    assert!(matches!(patch(&cluster.client, &write).await, Err(StatusError::Later(ApiError::Failing { code: 500, .. }))));
    server.inject(next_write_fails(Fault::Forbidden));
    let forbidden = patch(&cluster.client, &write).await.unwrap_err().to_string();
    assert!(forbidden.contains("services/status") && forbidden.contains("patch"), "{forbidden}");
    server.set_availability(Availability::Down).await;
    assert!(matches!(patch(&cluster.client, &write).await, Err(StatusError::Later(ApiError::Unreachable(_)))));
}

fn address(server: &ApiServer) -> Option<String> {
    let service = server.get(Kind::Service, "a", "web").unwrap();
    service["status"]["loadBalancer"]["ingress"][0]["ip"].as_str().map(str::to_owned)
}

fn patches(server: &ApiServer) -> usize {
    server.log().iter().filter(|logged| logged.method == "PATCH").count()
}

/// Runs a writer until the condition holds.
async fn run_until(writer: &StatusWriter, cluster: &Cluster, what: &str, is_reached: impl Fn() -> bool) {
    let reached = async {
        while !is_reached() {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = writer.run(cluster) => unreachable!("a writer never ends"),
        result = tokio::time::timeout(Duration::from_secs(30), reached) => result.unwrap_or_else(|_| panic!("{what}: not within 30 s")),
    }
}

#[tokio::test]
async fn a_write_is_repeated_until_the_server_accepts_it() {
    let (server, cluster, service) = start().await;
    for retry in [Fault::TooMany { retry_after_s: 1 }, Fault::Internal, Fault::Forbidden] {
        server.inject(next_write_fails(retry));
    }
    let writer = StatusWriter::default();
    writer.write(write(&service, &["192.0.2.1"]), Vec::new());
    run_until(&writer, &cluster, "the address", || address(&server).as_deref() == Some("192.0.2.1")).await;
    assert_eq!(patches(&server), 4);
}

#[tokio::test]
async fn a_write_that_keeps_failing_delays_no_other_service() {
    let (server, cluster, web) = start().await;
    let spec = json!({"type": "LoadBalancer", "ports": [{"port": 80}]});
    let writer = StatusWriter::default();
    let rows = [("aaa", Fault::Internal, "/services/aaa/status"), ("bbb", Fault::Forbidden, "/services/bbb/status")];
    for (name, fault, path_contains) in rows {
        server.inject(FaultRule { fault, times: usize::MAX, method: "PATCH", path_contains, watch: false });
        let service = server.create(Kind::Service, json!({"metadata": {"name": name, "namespace": "a"}, "spec": spec}));
        writer.write(write(&service, &["192.0.2.9"]), Vec::new());
    }
    let has_address = |name: &str| !server.get(Kind::Service, "a", name).unwrap()["status"]["loadBalancer"]["ingress"].is_null();
    let steps = async {
        while patches(&server) < 6 {
            tokio::task::yield_now().await;
        }
        let before = patches(&server);
        writer.write(write(&web, &["192.0.2.1"]), Vec::new());
        while !has_address("web") {
            tokio::task::yield_now().await;
        }
        // Each of the other writes may have been retried once meanwhile, not more often: their backoff grows.
        let between = patches(&server) - before;
        assert!(between <= 3, "{between} writes before it was sent");
        server.clear_faults();
        while !(has_address("aaa") && has_address("bbb")) {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = writer.run(&cluster) => unreachable!("a writer never ends"),
        result = tokio::time::timeout(Duration::from_secs(30), steps) => result.unwrap(),
    }
}

#[tokio::test]
async fn an_outdated_write_is_not_repeated() {
    let (server, cluster, service) = start().await;
    server.update(Kind::Service, "a", "web", &json!({"metadata": {"annotations": {"touched": "yes"}}}));
    let writer = StatusWriter::default();
    let outdated = write(&service, &["192.0.2.1"]);
    writer.write(outdated.clone(), Vec::new());
    // The write of the other Service shows that nothing came before it.
    let spec = json!({"type": "LoadBalancer", "ports": [{"port": 80}]});
    let other = server.create(Kind::Service, json!({"metadata": {"name": "zzz", "namespace": "a"}, "spec": spec}));
    run_until(&writer, &cluster, "the answer", || writer.take_answers() == [(outdated.clone(), false)]).await;
    writer.write(write(&other, &["192.0.2.9"]), Vec::new());
    run_until(&writer, &cluster, "the other write", || patches(&server) == 2).await;
}

#[tokio::test]
async fn a_status_that_admission_refuses_is_tried_again_and_its_owner_is_told_once() {
    let (server, cluster, service) = start().await;
    let denied = "admission webhook \"policy.example.com\" denied the request";
    for _ in 0..3 {
        server.inject(next_write_fails(Fault::Invalid(denied.to_owned())));
    }
    let recorder = Arc::new(Recorder::default());
    let writer = StatusWriter::new(Arc::clone(&recorder));
    let accepted = write(&service, &["192.0.2.1"]);
    writer.write(accepted.clone(), Vec::new());
    run_until(&writer, &cluster, "the address", || writer.take_answers() == [(accepted.clone(), true)]).await;
    assert_eq!(patches(&server), 4);
    let notes: Vec<Remark> = recorder.newest().into_iter().map(|event| event.note.remark).collect();
    assert_eq!(notes.iter().map(|remark| remark.cause).collect::<Vec<_>>(), [Cause::StatusRefused]);
    assert!(notes[0].text.contains(denied) && notes[0].text.contains("services/status"), "{notes:?}");
}

#[tokio::test]
async fn only_the_newest_write_of_a_service_is_sent() {
    let (server, cluster, service) = start().await;
    let writer = StatusWriter::default();
    writer.write(write(&service, &["192.0.2.1"]), Vec::new());
    writer.write(write(&service, &["192.0.2.2"]), Vec::new());
    run_until(&writer, &cluster, "the newer address", || address(&server).as_deref() == Some("192.0.2.2")).await;
    assert_eq!(patches(&server), 1);
}

#[tokio::test]
async fn notes_are_recorded_once_the_server_accepted_the_write() {
    let (server, cluster, service) = start().await;
    let note = |text: &str| Note {
        subject: Subject::Service(ServiceName::new("a", "web")),
        remark: Remark::new(Cause::Programmed, text),
    };
    let recorder = Arc::new(Recorder::default());
    let writer = StatusWriter::new(Arc::clone(&recorder));
    server.inject(next_write_fails(Fault::Conflict));
    writer.write(write(&service, &["192.0.2.1"]), vec![note("outdated")]);
    run_until(&writer, &cluster, "the conflict", || patches(&server) == 1).await;
    writer.write(write(&service, &["192.0.2.2"]), vec![note("replaced")]);
    writer.write(write(&service, &["192.0.2.3"]), vec![note("accepted")]);
    run_until(&writer, &cluster, "the note", || !recorder.newest().is_empty()).await;
    let texts: Vec<String> = recorder.newest().into_iter().map(|event| event.note.remark.text).collect();
    assert_eq!((texts, address(&server).as_deref()), (vec!["accepted".to_owned()], Some("192.0.2.3")));
}

#[tokio::test]
async fn a_namespace_with_many_writes_delays_no_other() {
    let (server, cluster, web) = start().await;
    let writer = StatusWriter::default();
    let spec = json!({"type": "LoadBalancer", "ports": [{"port": 80}]});
    for number in 0..60 {
        let name = format!("aaa-{number:02}");
        let service = server.create(Kind::Service, json!({"metadata": {"name": name, "namespace": "busy"}, "spec": spec}));
        writer.write(write(&service, &["192.0.2.9"]), Vec::new());
    }
    writer.write(write(&web, &["192.0.2.1"]), Vec::new());
    run_until(&writer, &cluster, "the address of the last Service", || address(&server).is_some()).await;
    let position = server.log().iter().position(|logged| logged.path.ends_with("/web/status")).unwrap();
    assert!(position <= 4, "it was sent after {position} other writes");
}

//! Writing a status: what the Service then says, and what becomes of writes that come too late or are refused.

use control::kubernetes::{Cluster, Outage, Outcome, StatusError, connect, patch};
use control::source::{Ingress, IpMode, StatusWrite};
use proto::ServiceName;
use serde_json::{Value, json};

use crate::api_server::{ApiServer, Fault, Kind, Presence, Trap};

async fn start() -> (ApiServer, Cluster, Value) {
    let server = ApiServer::start().await;
    let file = tempfile::NamedTempFile::new().unwrap();
    server.write_kubeconfig(file.path());
    let cluster = connect(Some(file.path())).await.unwrap();
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
        ingress: ips.iter().map(|ip| Ingress { ip: ip.parse().unwrap(), ip_mode: IpMode::Proxy }).collect(),
    }
}

fn fault(fault: Fault) -> Trap {
    Trap { fault, times: 1, method: "PATCH", path_contains: "/status", watch: false }
}

#[tokio::test]
async fn addresses_are_written_with_their_mode_and_cleared_again() {
    let (server, cluster, service) = start().await;
    assert_eq!(patch(&cluster.client, &write(&service, &["192.0.2.1", "2001:db8::1"])).await, Ok(Outcome::Written));
    let service = server.get(Kind::Service, "a", "web").unwrap();
    let expected = json!([{"ip": "192.0.2.1", "ipMode": "Proxy"}, {"ip": "2001:db8::1", "ipMode": "Proxy"}]);
    assert_eq!(service["status"]["loadBalancer"]["ingress"], expected);
    assert_eq!(patch(&cluster.client, &write(&service, &[])).await, Ok(Outcome::Written));
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
    assert_eq!(patch(&cluster.client, &write(&service, &["192.0.2.1"])).await, Ok(Outcome::Stale));
    assert_eq!(server.get(Kind::Service, "a", "web").unwrap()["status"], json!({"loadBalancer": {}}));
}

#[tokio::test]
async fn a_service_that_was_deleted_is_gone_and_one_made_anew_is_not_touched() {
    let (server, cluster, service) = start().await;
    server.delete(Kind::Service, "a", "web");
    assert_eq!(patch(&cluster.client, &write(&service, &["192.0.2.1"])).await, Ok(Outcome::Gone));
    let spec = json!({"type": "LoadBalancer", "ports": [{"port": 80}]});
    let anew = server.create(Kind::Service, json!({"metadata": {"name": "web", "namespace": "a"}, "spec": spec}));
    let mut mixed = write(&anew, &["192.0.2.1"]);
    mixed.uid = write(&service, &[]).uid;
    let refused = patch(&cluster.client, &mixed).await;
    assert!(matches!(refused, Err(StatusError::Refused { code: 422, .. })), "{refused:?}");
}

#[tokio::test]
async fn a_refusal_that_embeds_the_object_is_cut_to_a_thousand_characters() {
    let (server, cluster, service) = start().await;
    server.trap(fault(Fault::Invalid("x".repeat(50_000))));
    let Err(StatusError::Refused { code: 422, message, .. }) = patch(&cluster.client, &write(&service, &["192.0.2.1"])).await
    else {
        panic!("not refused");
    };
    assert_eq!(message.chars().count(), 1_001, "with the mark that something was cut");
}

#[tokio::test]
async fn trouble_that_passes_is_told_from_a_refusal() {
    let (server, cluster, service) = start().await;
    let write = write(&service, &["192.0.2.1"]);
    server.trap(fault(Fault::TooMany { retry_after_s: 3 }));
    let busy = patch(&cluster.client, &write).await.unwrap_err();
    let StatusError::Later(Outage::Busy { retry_after, .. }) = busy else { panic!("{busy:?}") };
    assert_eq!(retry_after.as_secs(), 3);
    server.trap(fault(Fault::Internal));
    assert!(matches!(patch(&cluster.client, &write).await, Err(StatusError::Later(Outage::Failing { code: 500, .. }))));
    server.trap(fault(Fault::Forbidden));
    let forbidden = patch(&cluster.client, &write).await.unwrap_err().to_string();
    assert!(forbidden.contains("services/status") && forbidden.contains("patch"), "{forbidden}");
    server.set_presence(Presence::Away).await;
    assert!(matches!(patch(&cluster.client, &write).await, Err(StatusError::Later(Outage::Unreachable(_)))));
}

//! Checks the test server against recorded exchanges with a kube-apiserver. If it answers differently, the other tests
//! prove nothing.

use std::path::Path;

use control::kubernetes::{Cluster, connect};
use http_body_util::BodyExt;
use hyper::Request;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api_server::{ApiServer, Fault, FaultRule, Kind, WatchEnd};

/// An answer as received over the wire.
pub struct HttpReply {
    pub code: u16,
    content_type: String,
    retry_after: Option<String>,
    pub body: String,
}

async fn client(server: &ApiServer) -> Cluster {
    let file = tempfile::NamedTempFile::new().unwrap();
    server.write_kubeconfig(file.path());
    connect(Some(file.path())).await.unwrap()
}

/// One exchange by a plain HTTP client that changes nothing, as the user with all rights.
pub async fn exchange(server: &ApiServer, method: &str, path: &str, content_type: &str, body: &str) -> HttpReply {
    exchange_as(server, "Bearer test", method, path, content_type, body).await
}

/// The same as another user.
pub async fn exchange_as(
    server: &ApiServer,
    authorization: &str,
    method: &str,
    path: &str,
    content_type: &str,
    body: &str,
) -> HttpReply {
    let stream = tokio::net::TcpStream::connect(server.url().strip_prefix("http://").unwrap()).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = Request::builder().method(method).uri(path).header("host", "test").header("content-type", content_type);
    let request = request.header("authorization", authorization);
    let response = sender.send_request(request.body(body.to_owned()).unwrap()).await.unwrap();
    let header = |name| response.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    let (code, content_type, retry_after) = (response.status().as_u16(), header("content-type").unwrap(), header("retry-after"));
    let body = response.into_body().collect().await.unwrap().to_bytes();
    HttpReply { code, content_type, retry_after, body: String::from_utf8(body.to_vec()).unwrap() }
}

pub fn fixture<T: for<'a> Deserialize<'a>>(name: &str) -> T {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/recordings").join(name);
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

#[derive(Deserialize)]
struct StatusPatches {
    given: Vec<Value>,
    exchanges: Vec<StatusPatch>,
}

#[derive(Deserialize)]
struct StatusPatch {
    what: String,
    /// The state of the Service before the request, reduced to the fields that such a patch can change.
    before: Option<Value>,
    path: String,
    content_type: String,
    request: String,
    code: u16,
    answer: Value,
}

/// The fields of a Service that such a patch can change.
fn touched(service: &Value) -> Value {
    let metadata = &service["metadata"];
    json!({
        "name": metadata["name"], "annotations": metadata["annotations"], "labels": metadata["labels"],
        "finalizers": metadata["finalizers"], "status": service["status"],
    })
}

fn with_state(server: &ApiServer, name: &str, before: &Value) -> Value {
    let mut service = server.get(Kind::Service, "rec", name).unwrap();
    for field in ["annotations", "labels", "finalizers"] {
        service["metadata"].as_object_mut().unwrap().remove(field);
        if let Some(value) = before["metadata"].get(field) {
            service["metadata"][field] = value.clone();
        }
    }
    service["status"] = before["status"].clone();
    service
}

#[tokio::test]
async fn status_patches_are_answered_as_recorded() {
    let server = ApiServer::start().await;
    let recorded: StatusPatches = fixture("status-patches.json");
    for service in recorded.given {
        server.put_raw(Kind::Service, service);
    }
    for StatusPatch { what, before, path, content_type, request, code, answer } in recorded.exchanges {
        if let Some(before) = before {
            server.put_raw(Kind::Service, with_state(&server, path.split('/').nth(6).unwrap(), &before));
        }
        let received = exchange(&server, "PATCH", &path, &content_type, &request).await;
        assert_eq!(received.code, code, "{what}: {}", received.body);
        let body: Value = serde_json::from_str(&received.body).unwrap();
        if code == 200 {
            assert_eq!(touched(&body), touched(&answer), "{what}");
        } else {
            assert_eq!(body, answer, "{what}");
        }
    }
}

#[derive(Deserialize)]
struct Refusal {
    file: String,
    method: String,
    path: String,
    code: u16,
    content_type: String,
    retry_after: Option<String>,
    answer: String,
}

#[tokio::test]
async fn refusals_are_worded_as_recorded() {
    for recorded in fixture::<Vec<Refusal>>("refusals.json") {
        let server = ApiServer::start().await;
        let watch = recorded.path.contains("watch=1");
        let fault = match recorded.code {
            429 => Some(Fault::TooMany { retry_after_s: 1 }),
            403 => Some(Fault::Forbidden),
            410 => Some(Fault::Expired),
            500 if !watch => Some(Fault::Internal),
            _ => None,
        };
        let method = if recorded.method == "GET" { "GET" } else { "PATCH" };
        if let Some(fault) = fault {
            server.inject(FaultRule { fault, times: 1, method, path_contains: "", watch });
        }
        let content_type = "application/merge-patch+json";
        let received = exchange(&server, method, &recorded.path, content_type, "{}").await;
        let is_same = (received.code, &received.content_type, &received.retry_after)
            == (recorded.code, &recorded.content_type, &recorded.retry_after);
        assert!(is_same, "{}: {} {}", recorded.file, received.code, received.content_type);
        let Ok(mut expected) = serde_json::from_str::<Value>(&recorded.answer) else {
            assert_eq!(received.body, recorded.answer);
            continue;
        };
        let mut body: Value = serde_json::from_str(&received.body).unwrap();
        // The user and the failed webhook differ.
        for status in [&mut expected, &mut body] {
            let message = status["message"].as_str().unwrap().replace("system:serviceaccount:rec:gw", "U");
            status["message"] = message.replace("system:serviceaccount:sluice:sluice", "U").into();
            if recorded.code == 500 && !watch {
                status["message"] = Value::Null;
                status["details"]["causes"][0]["message"] = Value::Null;
            }
        }
        assert_eq!(body, expected, "{}", recorded.file);
    }
}

fn keys(value: &Value) -> Vec<&String> {
    value.as_object().unwrap().keys().collect()
}

#[tokio::test]
async fn lists_and_watches_have_the_recorded_shape() {
    let server = ApiServer::start().await;
    let recorded: Value = fixture("shapes.json");
    let list = exchange(&server, "GET", "/api/v1/namespaces/rec/services", "", "").await;
    assert_eq!(keys(&serde_json::from_str(&list.body).unwrap()), keys(&recorded["list"]));
    for name in ["a", "b", "c"] {
        server.create(Kind::Service, json!({"metadata": {"name": name, "namespace": "rec"}, "spec": {"ports": [{"port": 80}]}}));
    }
    let page = exchange(&server, "GET", "/api/v1/namespaces/rec/services?limit=1", "", "").await;
    let page: Value = serde_json::from_str(&page.body).unwrap();
    assert_eq!(keys(&page["metadata"]), keys(&recorded["page"]["metadata"]));
    assert_eq!(page["metadata"]["remainingItemCount"], 2);
    assert!(page["items"][0]["kind"].is_null(), "items of a list have no kind");

    let path = "/api/v1/services?watch=1&resourceVersion=0&timeoutSeconds=0&allowWatchBookmarks=true";
    let lines = exchange(&server, "GET", path, "", "").await.body;
    let events: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(events.len(), 4, "three Services and the bookmark before the timeout");
    assert_eq!(keys(&events[0]["object"]), keys(&recorded["added"]["object"]));
    let mut bookmark = events[3].clone();
    bookmark["object"]["metadata"] = recorded["service_bookmark"]["object"]["metadata"].clone();
    assert_eq!(bookmark, recorded["service_bookmark"]);

    let path = "/apis/discovery.k8s.io/v1/endpointslices?watch=1&resourceVersion=1&timeoutSeconds=0&allowWatchBookmarks=true";
    let mut bookmark: Value = serde_json::from_str(&exchange(&server, "GET", path, "", "").await.body).unwrap();
    bookmark["object"]["metadata"] = recorded["slice_bookmark"]["object"]["metadata"].clone();
    assert_eq!(bookmark, recorded["slice_bookmark"]);

    server.compact();
    let path = "/api/v1/services?watch=1&resourceVersion=50";
    let mut expired: Value = serde_json::from_str(&exchange(&server, "GET", path, "", "").await.body).unwrap();
    expired["object"]["message"] = recorded["expired"]["object"]["message"].clone();
    assert_eq!(expired, recorded["expired"], "an expired watch is reported by an event in a 200 answer");
}

#[tokio::test]
async fn a_strategic_patch_adds_finalizers_and_replaces_the_addresses() {
    let server = ApiServer::start().await;
    let spec = json!({"type": "LoadBalancer", "ports": [{"port": 80}]});
    server
        .create(Kind::Service, json!({"metadata": {"name": "web", "namespace": "a", "finalizers": ["other/one"]}, "spec": spec}));
    let patch = |body: Value| {
        let path = "/api/v1/namespaces/a/services/web/status";
        let server = &server;
        async move { exchange(server, "PATCH", path, "application/strategic-merge-patch+json", &body.to_string()).await }
    };
    patch(json!({"metadata": {"finalizers": ["our/own"]}, "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}})).await;
    patch(json!({"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.2", "ipMode": "Proxy"}]}}})).await;
    let service = server.get(Kind::Service, "a", "web").unwrap();
    assert_eq!(service["metadata"]["finalizers"], json!(["other/one", "our/own"]));
    assert_eq!(service["status"]["loadBalancer"]["ingress"], json!([{"ip": "192.0.2.2", "ipMode": "Proxy"}]));
    patch(
        json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["our/own"]}, "status": {"loadBalancer": {"ingress": null}}}),
    )
    .await;
    let service = server.get(Kind::Service, "a", "web").unwrap();
    assert_eq!((&service["metadata"]["finalizers"], &service["status"]), (&json!(["other/one"]), &json!({"loadBalancer": {}})));
}

#[tokio::test]
async fn a_service_with_a_finalizer_is_deleted_once_the_finalizer_is_removed() {
    let server = ApiServer::start().await;
    server.create(Kind::Service, json!({"metadata": {"name": "web", "namespace": "a", "finalizers": ["our/own"]}, "spec": {}}));
    server.delete(Kind::Service, "a", "web");
    assert!(server.get(Kind::Service, "a", "web").unwrap()["metadata"]["deletionTimestamp"].is_string());
    let path = "/api/v1/namespaces/a/services/web/status";
    exchange(&server, "PATCH", path, "application/merge-patch+json", r#"{"metadata": {"finalizers": null}}"#).await;
    assert!(server.get(Kind::Service, "a", "web").is_none());
}

#[tokio::test]
async fn a_watch_that_is_cut_breaks_off_without_a_last_chunk() {
    let server = ApiServer::start().await;
    let cluster = client(&server).await;
    let request = Request::get("/api/v1/services?watch=1&resourceVersion=100").body(kube::client::Body::empty()).unwrap();
    let response = cluster.client.send(request).await.unwrap();
    server.end_watches(WatchEnd::Aborted);
    assert!(response.into_body().collect_bytes().await.is_err());
}

//! Checks the test server against recorded exchanges with a kube-apiserver. If it answers differently, the other tests
//! prove nothing.

use std::path::Path;

use http_body_util::BodyExt;
use hyper::Request;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api_server::{Account, ApiServer, Fault, FaultRule, Grant, Kind, WatchEnd};
use crate::user::connect_to;

/// An answer as received over the wire.
struct HttpReply {
    code: u16,
    content_type: String,
    retry_after: Option<String>,
    body: String,
}

/// One exchange by a plain HTTP client that changes nothing, as the user with all rights.
async fn exchange(server: &ApiServer, method: &str, path: &str, content_type: &str, body: &str) -> HttpReply {
    exchange_as(server, "Bearer test", method, path, content_type, body).await
}

/// The same as another user.
async fn exchange_as(
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

fn fixture<T: for<'a> Deserialize<'a>>(name: &str) -> T {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/recordings").join(name);
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

#[derive(Deserialize)]
struct RecordedPatches {
    given: Vec<Value>,
    exchanges: Vec<RecordedPatch>,
}

#[derive(Deserialize)]
struct RecordedPatch {
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
fn patchable(service: &Value) -> Value {
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
    let recorded: RecordedPatches = fixture("status-patches.json");
    for service in recorded.given {
        server.put_raw(Kind::Service, service);
    }
    for RecordedPatch { what, before, path, content_type, request, code, answer } in recorded.exchanges {
        if let Some(before) = before {
            server.put_raw(Kind::Service, with_state(&server, path.split('/').nth(6).unwrap(), &before));
        }
        let received = exchange(&server, "PATCH", &path, &content_type, &request).await;
        assert_eq!(received.code, code, "{what}: {}", received.body);
        let body: Value = serde_json::from_str(&received.body).unwrap();
        if code == 200 {
            assert_eq!(patchable(&body), patchable(&answer), "{what}");
        } else {
            assert_eq!(body, answer, "{what}");
        }
    }
}

#[derive(Deserialize)]
struct RecordedRefusal {
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
    for recorded in fixture::<Vec<RecordedRefusal>>("refusals.json") {
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
async fn an_aborted_watch_ends_without_a_last_chunk() {
    let server = ApiServer::start().await;
    let cluster = connect_to(&server).await;
    let request = Request::get("/api/v1/services?watch=1&resourceVersion=100").body(kube::client::Body::empty()).unwrap();
    let response = cluster.client.send(request).await.unwrap();
    server.end_watches(WatchEnd::Aborted);
    assert!(response.into_body().collect_bytes().await.is_err());
}

#[derive(Deserialize)]
struct RecordedExchanges {
    given: Vec<Value>,
    exchanges: Vec<RecordedExchange>,
}

#[derive(Deserialize)]
struct RecordedExchange {
    file: String,
    what: String,
    identity: String,
    method: String,
    path: String,
    content_type: String,
    request: Option<Value>,
    code: u16,
    answer: Value,
}

/// Replaces or removes fields that differ between servers, and fields that only one of the two servers sets.
fn comparable(mut body: Value) -> Value {
    if let Some(metadata) = body["metadata"].as_object_mut() {
        for field in ["uid", "resourceVersion", "creationTimestamp", "deletionTimestamp"] {
            if let Some(value) = metadata.get_mut(field) {
                *value = "*".into();
            }
        }
        metadata.remove("managedFields");
    }
    if let Some(message) = body["message"].as_str().map(str::to_owned) {
        let message = message.split("current: ").next().unwrap().to_owned();
        // If a message embeds the object, only the text after the object is compared.
        body["message"] = message.rfind("\": parsing").map_or(message.clone(), |at| message[at..].to_owned()).into();
        if message.contains("\": parsing") {
            body["details"]["causes"] = json!([]);
        }
    }
    body
}

#[tokio::test]
async fn leases_events_deletions_and_ending_namespaces_are_answered_as_recorded() {
    let server = ApiServer::start().await;
    server.create(Kind::Namespace, json!({"metadata": {"name": "rec"}}));
    server.create(Kind::Pod, json!({"metadata": {"name": "p", "namespace": "rec"}, "spec": {"nodeName": "n1"}}));
    let recorded: RecordedExchanges = fixture("exchanges.json");
    for object in recorded.given {
        let kind = if object["kind"] == "Service" { Kind::Service } else { Kind::EndpointSlice };
        server.put_raw(kind, object);
    }
    for RecordedExchange { file, what, identity, method, path, content_type, request, code, answer } in recorded.exchanges {
        if file.starts_with("19-remove-finalizer") {
            assert!(server.get(Kind::Service, "rec", "lb-ip").unwrap()["metadata"]["deletionTimestamp"].is_null());
            server.end_pod("rec", "p");
        }
        let mut request = request.unwrap_or_default();
        if file.starts_with("15-lease-renew") {
            for field in ["uid", "resourceVersion"] {
                request["metadata"][field] = server.get(Kind::Lease, "rec", "gw").unwrap()["metadata"][field].clone();
            }
        }
        let authorization = match identity.as_str() {
            "token bogus" => "Bearer bogus",
            "token  " => "",
            _ => "Bearer test",
        };
        let received = exchange_as(&server, authorization, &method, &path, &content_type, &request.to_string()).await;
        assert_eq!(received.code, code, "{what}: {}", received.body);
        assert_eq!(comparable(serde_json::from_str(&received.body).unwrap()), comparable(answer), "{file}");
    }
    let services = server.list(Kind::Service, "rec");
    assert_eq!(services.len(), 1, "the object with a finalizer blocks the deletion of its namespace");
    server.update(Kind::Service, "rec", "lb-finalizer", &json!({"metadata": {"finalizers": null}}));
    assert!(server.list(Kind::Service, "rec").is_empty() && server.get(Kind::Namespace, "", "rec").is_none());
}

#[tokio::test]
async fn a_page_shows_the_state_of_the_first_page_and_its_token_expires() {
    let server = ApiServer::start().await;
    for name in ["a", "b", "c"] {
        server.create(Kind::ConfigMap, json!({"metadata": {"name": name, "namespace": "x"}}));
    }
    let path = "/api/v1/namespaces/x/configmaps?limit=1";
    let first: Value = serde_json::from_str(&exchange(&server, "GET", path, "", "").await.body).unwrap();
    let token = first["metadata"]["continue"].as_str().unwrap();
    server.delete(Kind::ConfigMap, "x", "b");
    let next = format!("{path}&continue={token}");
    let second: Value = serde_json::from_str(&exchange(&server, "GET", &next, "", "").await.body).unwrap();
    assert_eq!(second["items"][0]["metadata"]["name"], "b", "state of the first page");
    assert_eq!(second["metadata"]["resourceVersion"], first["metadata"]["resourceVersion"]);
    server.compact();
    let expired = exchange(&server, "GET", &next, "", "").await;
    let status: Value = serde_json::from_str(&expired.body).unwrap();
    assert_eq!((expired.code, &status["reason"]), (410, &json!("Expired")));
    assert!(status["message"].as_str().unwrap().starts_with("The provided continue parameter is too old"));
    let offered = format!("{path}&continue={}", status["metadata"]["continue"].as_str().unwrap());
    let rest: Value = serde_json::from_str(&exchange(&server, "GET", &offered, "", "").await.body).unwrap();
    assert_eq!(rest["items"][0]["metadata"]["name"], "c", "current state");
}

#[tokio::test]
async fn requests_for_a_kind_that_is_not_installed_get_404() {
    let server = ApiServer::start().await;
    server.set_installed(Kind::AddressPool, false);
    let path = "/apis/sluice.dev/v1beta1/addresspools";
    assert_eq!(exchange(&server, "GET", path, "", "").await.code, 404);
    server.set_installed(Kind::AddressPool, true);
    assert_eq!(exchange(&server, "GET", path, "", "").await.code, 200);
}

#[tokio::test]
async fn custom_resources_accept_only_merge_patches_and_a_status_patch_changes_only_the_status() {
    let server = ApiServer::start().await;
    let path = "/apis/sluice.dev/v1beta1/addresspools";
    let body = json!({"metadata": {"name": "p"}, "spec": {"addresses": ["192.0.2.0/24"]}, "status": {"total": "1"}});
    assert_eq!(exchange(&server, "POST", path, "application/json", &body.to_string()).await.code, 201);
    let pool = || server.get(Kind::AddressPool, "", "p").unwrap();
    assert!(pool()["status"].is_null(), "a status is writable through its own path only");
    let status = format!("{path}/p/status");
    let patch = json!({"metadata": {"labels": {"a": "b"}}, "spec": {"addresses": []}, "status": {"total": "256"}}).to_string();
    let strategic = "application/strategic-merge-patch+json";
    assert_eq!(exchange(&server, "PATCH", &status, strategic, &patch).await.code, 415);
    let merge = "application/merge-patch+json";
    assert_eq!(exchange(&server, "PATCH", &status, merge, &patch).await.code, 200);
    assert_eq!(pool()["status"]["total"], "256");
    assert!(pool()["metadata"]["labels"].is_null() && pool()["metadata"]["generation"] == 1);
    let patch = json!({"spec": {"addresses": ["198.51.100.0/24"]}, "status": {"total": "0"}}).to_string();
    exchange(&server, "PATCH", &format!("{path}/p"), merge, &patch).await;
    assert_eq!((&pool()["status"]["total"], &pool()["metadata"]["generation"]), (&json!("256"), &json!(2)));
}

#[tokio::test]
async fn managed_fields_name_the_last_writer_of_a_status() {
    let server = ApiServer::start().await;
    let spec = json!({"type": "LoadBalancer", "ports": [{"port": 80}]});
    server.create(Kind::Service, json!({"metadata": {"name": "web", "namespace": "a"}, "spec": spec}));
    let owners = || -> Vec<String> {
        let service = server.get(Kind::Service, "a", "web").unwrap();
        let entries = service["metadata"]["managedFields"].as_array().unwrap().clone();
        let has_ingress = |entry: &&Value| entry["fieldsV1"]["f:status"]["f:loadBalancer"]["f:ingress"].is_object();
        entries.iter().filter(has_ingress).map(|entry| format!("{}/{}", entry["manager"], entry["subresource"])).collect()
    };
    let write = async |query: &str, ip: &str| {
        let path = format!("/api/v1/namespaces/a/services/web/status?{query}");
        let body = json!({"status": {"loadBalancer": {"ingress": [{"ip": ip}]}}}).to_string();
        exchange(&server, "PATCH", &path, "application/merge-patch+json", &body).await;
    };
    write("fieldManager=sluice", "192.0.2.1").await;
    assert_eq!(owners(), [r#""sluice"/"status""#]);
    write("fieldManager=other", "192.0.2.2").await;
    assert_eq!(owners(), [r#""other"/"status""#]);
    write("fieldManager=sluice", "192.0.2.2").await;
    assert_eq!(owners(), [r#""other"/"status""#], "a write without changes takes over no fields");
}

#[tokio::test]
async fn requests_without_a_rule_are_forbidden_as_recorded() {
    let server = ApiServer::start().await;
    let rule = json!({"apiGroups": [""], "resources": ["services"], "verbs": ["get", "list", "watch"]});
    let own = json!({"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"], "resourceNames": ["mine"]});
    let grants =
        vec![Grant { namespace: None, rules: vec![rule] }, Grant { namespace: Some("own".to_owned()), rules: vec![own] }];
    server.add_account("gw", Account { name: "system:serviceaccount:rec:gw".to_owned(), grants: Some(grants) });
    for namespace in ["own", "rec"] {
        server.create(Kind::ConfigMap, json!({"metadata": {"name": "mine", "namespace": namespace}}));
    }
    let request = |method: &'static str, path: &'static str| {
        let server = &server;
        async move { exchange_as(server, "Bearer gw", method, path, "application/merge-patch+json", "{}").await }
    };
    for path in ["/api/v1/services", "/api/v1/namespaces/own/configmaps/mine"] {
        assert_eq!(request("GET", path).await.code, 403, "its cache of roles is empty at the start");
        assert_eq!(request("GET", path).await.code, 200);
    }
    assert_eq!(request("GET", "/api/v1/namespaces/own/configmaps/other").await.code, 403);
    assert_eq!(request("GET", "/api/v1/namespaces/rec/configmaps/mine").await.code, 403);
    let refused = request("PATCH", "/api/v1/namespaces/rec/services/lb-ip/status").await;
    assert_eq!(refused.code, 403);
    let message = "services \\\"lb-ip\\\" is forbidden: User \\\"system:serviceaccount:rec:gw\\\" cannot patch resource \
                   \\\"services/status\\\" in API group \\\"\\\" in the namespace \\\"rec\\\"";
    assert!(refused.body.contains(message), "{}", refused.body);
}

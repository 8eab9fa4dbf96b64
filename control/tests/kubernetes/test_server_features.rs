//! Checks the test server against recordings of Leases, Events, deletions, namespaces and rights, and checks its
//! features that exist only for tests.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::api_server::{Account, ApiServer, Grant, Kind};
use crate::test_server::{exchange, exchange_as, fixture};

#[derive(Deserialize)]
struct Recorded {
    given: Vec<Value>,
    exchanges: Vec<Exchange>,
}

#[derive(Deserialize)]
struct Exchange {
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

/// Replaces or removes what differs between servers or is filled in by only one of the two.
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
    let recorded: Recorded = fixture("exchanges.json");
    for object in recorded.given {
        let kind = if object["kind"] == "Service" { Kind::Service } else { Kind::EndpointSlice };
        server.put_raw(kind, object);
    }
    for Exchange { file, what, identity, method, path, content_type, request, code, answer } in recorded.exchanges {
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
    let held = server.list(Kind::Service, "rec");
    assert_eq!(held.len(), 1, "the object with a finalizer blocks the deletion of its namespace");
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
async fn a_kind_that_is_not_installed_has_no_page() {
    let server = ApiServer::start().await;
    server.set_installed(Kind::AddressPool, false);
    let path = "/apis/sluice.dev/v1beta1/addresspools";
    assert_eq!(exchange(&server, "GET", path, "", "").await.code, 404);
    server.set_installed(Kind::AddressPool, true);
    assert_eq!(exchange(&server, "GET", path, "", "").await.code, 200);
}

#[tokio::test]
async fn custom_resources_take_merge_patches_only_and_their_status_changes_nothing_else() {
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
    let ask = |method: &'static str, path: &'static str| {
        let server = &server;
        async move { exchange_as(server, "Bearer gw", method, path, "application/merge-patch+json", "{}").await }
    };
    for path in ["/api/v1/services", "/api/v1/namespaces/own/configmaps/mine"] {
        assert_eq!(ask("GET", path).await.code, 403, "its cache of roles is empty at the start");
        assert_eq!(ask("GET", path).await.code, 200);
    }
    assert_eq!(ask("GET", "/api/v1/namespaces/own/configmaps/other").await.code, 403);
    assert_eq!(ask("GET", "/api/v1/namespaces/rec/configmaps/mine").await.code, 403);
    let refused = ask("PATCH", "/api/v1/namespaces/rec/services/lb-ip/status").await;
    assert_eq!(refused.code, 403);
    let message = "services \\\"lb-ip\\\" is forbidden: User \\\"system:serviceaccount:rec:gw\\\" cannot patch resource \
                   \\\"services/status\\\" in API group \\\"\\\" in the namespace \\\"rec\\\"";
    assert!(refused.body.contains(message), "{}", refused.body);
}

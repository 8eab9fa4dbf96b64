//! A cluster that may be in use: the objects that scenarios create in it, and their removal.

use std::path::{Path, PathBuf};

use control::kubernetes::connect;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, CustomResourceExt, ResourceExt};
use objects::crd::{AddressPool, EdgeGateway};
use proto::limits::{FIELD_MANAGER, FINALIZER, LOAD_BALANCER_CLASS};
use serde_json::{Value, json};

use crate::api_server::{ApiServer, Kind};
use crate::user::{User, wait_for};

/// Environment variable with the kubeconfig of a cluster in which scenarios may run.
const REAL_CLUSTER: &str = "SLUICE_TEST_KUBECONFIG";

/// The cluster for tests, if there is one.
pub fn real_cluster_kubeconfig() -> Option<PathBuf> {
    std::env::var_os(REAL_CLUSTER).map(PathBuf::from)
}

/// Installs the missing sluice kinds, and removes them after `act`. Existing kinds may be in use and are not changed.
pub async fn with_installed_kinds(kubeconfig: &Path, act: impl AsyncFnOnce()) {
    let client = connect(Some(kubeconfig)).await.unwrap().client;
    let definitions = Api::<CustomResourceDefinition>::all(client);
    let mut installed = Vec::new();
    for definition in [AddressPool::crd(), EdgeGateway::crd()] {
        let name = definition.name_any();
        if definitions.get_opt(&name).await.unwrap().is_some() {
            continue;
        }
        definitions.create(&PostParams::default(), &definition).await.unwrap();
        let look = async || definitions.get(&name).await.unwrap().status.and_then(|status| status.conditions).unwrap_or_default();
        wait_for(&format!("the kind {name}"), look, |all| {
            all.iter().any(|one| one.type_ == "Established" && one.status == "True")
        })
        .await;
        println!("installed {name}");
        installed.push(name);
    }
    act().await;
    for name in installed {
        definitions.delete(&name, &DeleteParams::default()).await.unwrap();
        println!("removed {name}");
    }
}

/// Runs `act`, which must not panic, in a new namespace, and deletes the namespace.
pub async fn in_new_namespace<T>(kubeconfig: &Path, act: impl AsyncFnOnce(&User) -> T) -> T {
    let client = connect(Some(kubeconfig)).await.unwrap().client;
    let namespaces = Api::<Namespace>::all(client);
    let wanted: Namespace = serde_json::from_value(json!({"metadata": {"generateName": "sluice-test-"}})).unwrap();
    let namespace = namespaces.create(&PostParams::default(), &wanted).await.unwrap().name_any();
    let user = User::of_cluster(kubeconfig, &namespace).await;
    let result = act(&user).await;
    user.delete_services().await;
    namespaces.delete(&namespace, &DeleteParams::default()).await.unwrap();
    result
}

/// All objects except Events, which the API server deletes by itself.
fn objects(server: &ApiServer) -> Vec<Value> {
    Kind::ALL.iter().filter(|kind| **kind != Kind::Event).flat_map(|kind| server.list(*kind, "")).collect()
}

/// Names of objects that were created, deleted or changed since `before`, or that have Events.
pub fn changed_objects(server: &ApiServer, before: &[Value]) -> Vec<String> {
    let now = objects(server);
    let name = |object: &Value| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        format!("{} {}/{}", text(&object["kind"]), text(&object["metadata"]["namespace"]), text(&object["metadata"]["name"]))
    };
    let is_about = |event: &Value, object: &Value| {
        let about = &event["regarding"];
        ["kind", "name"].map(|field| &about[field]) == [&object["kind"], &object["metadata"]["name"]]
    };
    let events = server.list(Kind::Event, "");
    let added_or_changed = now.iter().filter(|object| !before.contains(object));
    let removed_or_reported =
        before.iter().filter(|object| !now.contains(object) || events.iter().any(|event| is_about(event, object)));
    added_or_changed.chain(removed_or_reported).map(name).collect()
}

/// Creates the objects of another installation: pools for all Services, which come first and overlap with those
/// of the scenarios, NodePort Services, and Services of the default class. Returns all objects.
pub fn create_other_installation(server: &ApiServer) -> Vec<Value> {
    let pool = |name: &str, addresses: &[&str], priority: u32| {
        let spec = json!({"addresses": addresses, "priority": priority});
        server.create(Kind::AddressPool, json!({"metadata": {"name": name}, "spec": spec}));
    };
    pool("shared", &["192.0.2.0/24"], 1);
    pool("spare", &["198.51.100.0/24", "203.0.113.0/24"], 0);
    let service = |name: &str, kind: &str, more: &Value| {
        let mut service = json!({"metadata": {"name": name, "namespace": "production"}, "spec": {"type": kind}});
        service["spec"]["ports"] = json!([{"name": "http", "port": 80, "targetPort": 8080, "nodePort": more["nodePort"]}]);
        service["spec"]["loadBalancerClass"] = more["class"].clone();
        service["metadata"]["finalizers"] = more["finalizers"].clone();
        server.create(Kind::Service, service);
        let labels = json!({"kubernetes.io/service-name": name});
        let slice = json!({
            "metadata": {"name": format!("{name}-1"), "namespace": "production", "labels": labels}, "addressType": "IPv4",
            "ports": [{"port": 8080, "protocol": "TCP", "name": "http"}], "endpoints": [{"addresses": ["10.0.0.99"]}],
        });
        server.create(Kind::EndpointSlice, slice);
    };
    for (name, port) in [("dashboard", 30_080), ("registry", 30_081)] {
        service(name, "NodePort", &json!({"nodePort": port}));
    }
    let of_sluice = json!({"class": LOAD_BALANCER_CLASS, "finalizers": [FINALIZER]});
    service("shop", "LoadBalancer", &of_sluice);
    let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.100", "ipMode": "Proxy"}]}}});
    server.update_status(Kind::Service, "production", "shop", &status, FIELD_MANAGER);
    service("unclaimed", "LoadBalancer", &json!({}));
    server.create(Kind::EdgeGateway, json!({"metadata": {"name": "edge-1"}, "spec": {"group": "default"}}));
    let overrides =
        json!({"metadata": {"name": "sluice-overrides", "namespace": "sluice-system"}, "data": {"default": "version: 1"}});
    server.create(Kind::ConfigMap, overrides);
    objects(server)
}

#[tokio::test]
async fn scenarios_leave_nothing_behind_in_a_cluster() {
    let server = ApiServer::start().await;
    for kind in [Kind::AddressPool, Kind::EdgeGateway] {
        server.set_installed(kind, false);
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    server.write_kubeconfig(file.path());
    let before = objects(&server);
    with_installed_kinds(file.path(), async || {
        in_new_namespace(file.path(), async |user| {
            user.add("web", &json!({"metadata": {"finalizers": ["example.com/left-behind"]}})).await;
            user.add_pool("p", &["192.0.2.0/24"], &json!({})).await;
            assert!(!server.list(Kind::AddressPool, "").is_empty());
            user.clean_up().await;
        })
        .await;
    })
    .await;
    assert_eq!(objects(&server), before);
}

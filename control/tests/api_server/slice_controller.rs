//! Simulates the EndpointSlice controller for Services that select Pods: shortly after a change of the Service or of a
//! Pod there is a slice of the Pods. Deliberately not here: several slices per Service, Services without Pods (they
//! would have an empty slice), and named target ports.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::Shared;
use super::kind::Kind;
use super::merge::Strategy;
use super::store::{Change, ObjectKey, Part, Store};

/// Delay between a change and the slice. Recorded: some ten milliseconds; in a busy cluster one second.
const DELAY: Duration = Duration::from_millis(150);
const MANAGER: &str = "endpointslice-controller.k8s.io";

/// Keeps the slices up to date until the runtime ends.
pub async fn run(shared: Arc<Shared>) {
    let mut revision = shared.revision.subscribe();
    loop {
        let seen = *revision.borrow_and_update();
        if wanted(&shared.store.lock().unwrap()).next().is_some() {
            tokio::time::sleep(DELAY).await;
            shared.change(|store| {
                let wanted: Vec<Value> = wanted(store).collect();
                wanted.into_iter().for_each(|slice| put(store, slice));
            });
        }
        if revision.wait_for(|now| *now != seen).await.is_err() {
            return;
        }
    }
}

/// The slices that are missing or outdated. Without Pods there are none, and no Service is examined.
fn wanted(store: &Store) -> impl Iterator<Item = Value> {
    let has_pods = store.has_any(Kind::Pod);
    let services = has_pods.then(|| store.list(Kind::Service, "")).into_iter().flatten();
    services.filter_map(|service| slice(store, service)).filter(|slice| {
        let text = |field: &str| slice["metadata"][field].as_str().unwrap_or_default();
        let found = store.get(&ObjectKey::new(Kind::EndpointSlice, text("namespace"), text("name")));
        found.map_or(true, |found| found["endpoints"] != slice["endpoints"] || found["ports"] != slice["ports"])
    })
}

fn slice(store: &Store, service: &Value) -> Option<Value> {
    let (metadata, spec) = (&service["metadata"], &service["spec"]);
    let selector = spec["selector"].as_object().filter(|selector| !selector.is_empty())?;
    let namespace = metadata["namespace"].as_str()?;
    let is_labelled = |pod: &&Value| selector.iter().all(|(key, value)| pod["metadata"]["labels"][key] == *value);
    // Like the real controller it leaves out Pods of a Node that it does not know.
    let node = |pod: &Value| ObjectKey::new(Kind::Node, "", pod["spec"]["nodeName"].as_str().unwrap_or_default());
    let is_selected = |pod: &&Value| is_labelled(pod) && store.get(&node(pod)).is_ok();
    let pods: Vec<&Value> = store.list(Kind::Pod, namespace).into_iter().filter(is_selected).collect();
    let endpoint = |pod: &&Value| {
        let conditions = pod["status"]["conditions"].as_array();
        let is_ready = conditions.into_iter().flatten().any(|one| one["type"] == "Ready" && one["status"] == "True");
        let address = pod["status"]["podIP"].as_str()?;
        let conditions = json!({"ready": is_ready, "serving": is_ready, "terminating": false});
        Some(json!({"addresses": [address], "conditions": conditions, "nodeName": pod["spec"]["nodeName"]}))
    };
    let endpoints: Vec<Value> = pods.iter().filter_map(endpoint).collect();
    let port = |port: &Value| {
        let name = port["name"].as_str().unwrap_or_default();
        json!({"name": name, "protocol": port["protocol"], "port": port["targetPort"]})
    };
    let ports: Vec<Value> = spec["ports"].as_array().into_iter().flatten().map(port).collect();
    let labels = json!({"kubernetes.io/service-name": metadata["name"], "endpointslice.kubernetes.io/managed-by": MANAGER});
    let name = format!("{}-managed", metadata["name"].as_str()?);
    let slice = json!({"metadata": {"name": name, "namespace": namespace, "labels": labels}, "addressType": "IPv4",
        "ports": ports, "endpoints": endpoints});
    (!pods.is_empty()).then_some(slice)
}

fn put(store: &mut Store, slice: Value) {
    let text = |field: &str| slice["metadata"][field].as_str().unwrap_or_default().to_owned();
    let key = ObjectKey::new(Kind::EndpointSlice, &text("namespace"), &text("name"));
    if store.get(&key).is_ok() {
        let body = json!({"ports": slice["ports"], "endpoints": slice["endpoints"]});
        let change = Change { body: &body, strategy: Some(Strategy::Merge), part: Part::Main, manager: MANAGER };
        store.change(&key, &change).ok();
    } else {
        // Fails in a namespace that is being deleted.
        store.create(Kind::EndpointSlice, slice, MANAGER).ok();
    }
}

//! A user of a cluster, which is the test server or a real one. It uses only the API.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use control::kubernetes::{Cluster, connect};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::events::v1::Event;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use objects::crd::{AddressPool, EdgeGateway};
use serde_json::{Value, json};

use crate::api_proxy::ApiProxy;
use crate::api_server::{ApiServer, Kind};

/// The finalizer of the contract.
pub const FINALIZER: &str = "sluice.dev/load-balancer-cleanup";
/// Longer than any expected wait. A test that reaches it has failed.
pub const DEADLINE: Duration = Duration::from_secs(120);

pub struct User {
    pub cluster: Cluster,
    /// The kubeconfig for controllers: it connects through the proxy.
    pub kubeconfig: PathBuf,
    pub api_proxy: ApiProxy,
    pub namespace: String,
    /// The name of the gateway in this user's installation.
    pub gateway: String,
    /// Pools that this user created.
    pools: Mutex<Vec<String>>,
    directory: tempfile::TempDir,
}

impl User {
    /// A new test server and a user of it.
    pub async fn with_test_server() -> (ApiServer, Self) {
        let server = ApiServer::start().await;
        let user = Self::of_test_server(&server).await;
        (server, user)
    }

    pub async fn of_test_server(server: &ApiServer) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        server.write_kubeconfig(file.path());
        server.create(Kind::Namespace, json!({"metadata": {"name": "a"}}));
        Self { gateway: "edge-1".to_owned(), ..Self::of_cluster(file.path(), "a").await }
    }

    /// In an existing namespace. Cluster-scoped objects of this user have unique names.
    pub async fn of_cluster(kubeconfig: &Path, namespace: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let cluster = connect(Some(kubeconfig)).await.unwrap();
        let over_link = directory.path().join("kubeconfig");
        let api_proxy = ApiProxy::write_kubeconfig(kubeconfig, &over_link, namespace).await;
        let (namespace, gateway, pools) = (namespace.to_owned(), format!("{namespace}-edge"), Mutex::default());
        Self { cluster, kubeconfig: over_link, api_proxy, namespace, gateway, pools, directory }
    }

    /// Directory for the sockets and files of this user.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// A class that is unique among tests, because they may share a real cluster.
    pub fn class(&self) -> String {
        format!("sluice.dev/{}", self.namespace)
    }

    /// The name of the installation, unique too.
    pub fn group(&self) -> String {
        format!("group-{}", self.namespace)
    }

    /// Labels of this user's pools.
    pub fn own_pools(&self) -> BTreeMap<String, String> {
        [("sluice.dev/test".to_owned(), self.namespace.clone())].into()
    }

    pub fn full_name(&self, service: &str) -> String {
        format!("{}/{service}", self.namespace)
    }

    /// Creates a Service of type `LoadBalancer` with one backend.
    pub async fn add_service(&self, name: &str, class: &str) {
        self.add(name, &json!({"spec": {"loadBalancerClass": class}})).await;
    }

    /// Creates a Service of our class with one backend; `more` is merged over it.
    pub async fn add(&self, name: &str, more: &Value) {
        self.add_without_slice(name, more).await;
        self.add_slice(name, &json!([{"port": 8080, "protocol": "TCP", "name": "http"}])).await;
    }

    /// Creates a Service of our class without a slice; `more` is merged over it.
    pub async fn add_without_slice(&self, name: &str, more: &Value) {
        let spec = json!({
            "type": "LoadBalancer", "loadBalancerClass": self.class(), "ports": [{"name": "http", "port": 80, "targetPort": 8080}],
        });
        let mut service = json!({"metadata": {"name": name, "namespace": self.namespace}, "spec": spec});
        merge(&mut service, more);
        let service: Service = serde_json::from_value(service).unwrap();
        self.services().create(&PostParams::default(), &service).await.unwrap();
    }

    /// Creates a Service of our class, which the server may refuse.
    ///
    /// # Errors
    /// The message of the server.
    pub async fn try_add(&self, name: &str) -> Result<(), String> {
        let spec = json!({"type": "LoadBalancer", "loadBalancerClass": self.class(), "ports": [{"port": 80}]});
        let service = json!({"metadata": {"name": name, "namespace": self.namespace}, "spec": spec});
        let service: Service = serde_json::from_value(service).unwrap();
        self.services().create(&PostParams::default(), &service).await.map(drop).map_err(|error| error.to_string())
    }

    /// Creates the slice of a Service, with these ports and one endpoint.
    pub async fn add_slice(&self, name: &str, ports: &Value) {
        let labels = json!({"kubernetes.io/service-name": name, "endpointslice.kubernetes.io/managed-by": "test"});
        let slice = json!({
            "metadata": {"name": format!("{name}-1"), "namespace": self.namespace, "labels": labels},
            "addressType": "IPv4", "ports": ports, "endpoints": endpoints(1),
        });
        let slice: EndpointSlice = serde_json::from_value(slice).unwrap();
        self.slices().create(&PostParams::default(), &slice).await.unwrap();
    }

    /// Gives a Service this many ready backends.
    pub async fn set_backends(&self, name: &str, count: u8) {
        let patch = Patch::Merge(json!({"endpoints": endpoints(count)}));
        self.slices().patch(&format!("{name}-1"), &PatchParams::default(), &patch).await.unwrap();
    }

    /// Changes the slice of a Service by a merge patch.
    pub async fn change_slice(&self, name: &str, patch: &Value) {
        self.slices().patch(&format!("{name}-1"), &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    /// Creates a ready Pod with the label `app`, on a Node without a kubelet, so that nobody changes it. The EndpointSlice
    /// controller leaves out Pods whose Node does not exist.
    pub async fn add_ready_pod(&self, app: &str, address: &str) {
        let nodes = Api::<Node>::all(self.cluster.client.clone());
        let taint = json!({"key": "sluice.dev/test", "effect": "NoSchedule"});
        let node = json!({"metadata": {"name": self.node_name()}, "spec": {"taints": [taint]}});
        let node: Node = serde_json::from_value(node).unwrap();
        // It stays until the end of the scenario.
        nodes.create(&PostParams::default(), &node).await.ok();
        let pods = Api::<Pod>::namespaced(self.cluster.client.clone(), &self.namespace);
        let spec = json!({"nodeName": self.node_name(), "containers": [{"name": "main", "image": "example.com/none"}]});
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": app, "labels": {"app": app}}, "spec": spec})).unwrap();
        // A new namespace rejects Pods until it has its service account.
        let create = async || pods.create(&PostParams::default(), &pod).await.map(drop).map_err(|error| error.to_string());
        wait_for("a Pod", create, Result::is_ok).await.unwrap();
        let status = json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": "True"}]}});
        pods.patch_status(app, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }

    fn node_name(&self) -> String {
        format!("{}-node", self.namespace)
    }

    /// Deletes a Pod without grace period.
    pub async fn end_pod(&self, app: &str) {
        let pods = Api::<Pod>::namespaced(self.cluster.client.clone(), &self.namespace);
        pods.delete(app, &DeleteParams::default().grace_period(0)).await.unwrap();
    }

    /// All Events of the controller in the namespace.
    pub async fn events(&self) -> Vec<Event> {
        let events = Api::<Event>::namespaced(self.cluster.client.clone(), &self.namespace);
        let mut all = events.list(&ListParams::default()).await.unwrap().items;
        all.retain(|event| event.reporting_controller.as_deref() == Some("sluice.dev/controller"));
        all
    }

    /// Changes a Service by a merge patch.
    pub async fn change(&self, name: &str, patch: &Value) {
        self.services().patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    pub async fn annotate(&self, name: &str, annotation: &str, value: &str) {
        self.change(name, &json!({"metadata": {"annotations": {annotation: value}}})).await;
    }

    /// Writes an address into a Service's status, as another controller or a person could do.
    pub async fn write_address(&self, name: &str, address: &str) {
        let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": address}]}}});
        self.services().patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }

    pub async fn delete_service(&self, name: &str) {
        self.services().delete(name, &DeleteParams::default()).await.unwrap();
        let slice = format!("{name}-1");
        self.slices().delete(&slice, &DeleteParams::default()).await.unwrap();
    }

    /// Waits until a Service is deleted.
    pub async fn wait_until_deleted(&self, name: &str) {
        let poll = async || self.services().get_opt(name).await.unwrap().is_none();
        wait_for(&format!("the end of {name}"), poll, |is_gone| *is_gone).await;
    }

    pub async fn has_service(&self, name: &str) -> bool {
        self.services().get_opt(name).await.unwrap().is_some()
    }

    /// A Service as stored in the API server.
    pub async fn service(&self, name: &str) -> Value {
        serde_json::to_value(self.services().get(name).await.unwrap()).unwrap()
    }

    /// `status.loadBalancer.ingress` of a Service.
    pub async fn ingress(&self, name: &str) -> Value {
        self.service(name).await["status"]["loadBalancer"]["ingress"].clone()
    }

    /// Waits for the ingress and returns it.
    pub async fn wait_for_ingress(&self, name: &str) -> Value {
        wait_for(&format!("an address of {name}"), async || self.ingress(name).await, |ingress| !ingress.is_null()).await
    }

    /// Waits for the ingress and returns its first address.
    pub async fn wait_for_address(&self, name: &str) -> String {
        self.wait_for_ingress(name).await[0]["ip"].as_str().unwrap().to_owned()
    }

    /// Waits until a condition of a Service has this status, and returns its reason.
    pub async fn wait_for_condition(&self, name: &str, kind: &str, status: &str) -> String {
        let poll = async || condition(&self.service(name).await, kind).unwrap_or_default();
        let found = wait_for(&format!("{kind}={status} of {name}"), poll, |found| found.split(' ').next() == Some(status)).await;
        found.split(' ').nth(1).unwrap().to_owned()
    }

    /// Waits until a condition of a Service has this status and reason, and returns the Service.
    pub async fn wait_for_reason(&self, name: &str, kind: &str, wanted: &str) -> Value {
        let poll = async || self.service(name).await;
        wait_for(&format!("{kind} {wanted}"), poll, |service| condition(service, kind).as_deref() == Some(wanted)).await
    }

    /// Waits for an Event about a Service with this reason.
    pub async fn wait_for_event(&self, name: &str, reason: &str) -> Event {
        let find =
            |all: &Vec<Event>| all.iter().find(|event| is_about(event, name) && event.reason.as_deref() == Some(reason)).cloned();
        let all =
            wait_for(&format!("an Event {reason} of {name}"), async || self.events().await, |all| find(all).is_some()).await;
        find(&all).unwrap()
    }

    /// Waits until the checkpoint of this user's installation contains this text.
    pub async fn wait_for_checkpoint(&self, text: &str) {
        let api = Api::<ConfigMap>::namespaced(self.cluster.client.clone(), &self.namespace);
        let poll = async || {
            let all = api.list(&ListParams::default()).await.unwrap().items.into_iter().filter_map(|one| one.data);
            all.filter_map(|mut data| data.remove(&self.group())).collect::<Vec<_>>().concat()
        };
        wait_for(&format!("{text} in the checkpoint"), poll, |found| found.contains(text)).await;
    }

    /// Creates an `AddressPool` for our class only; `more` is merged over its spec. Returns its name.
    pub async fn add_pool(&self, name: &str, addresses: &[&str], more: &Value) -> String {
        let name = format!("{}-{name}", self.namespace);
        let mut spec = json!({"addresses": addresses, "loadBalancerClass": self.class()});
        merge(&mut spec, more);
        let metadata = json!({"name": name, "labels": self.own_pools()});
        let pool: AddressPool = serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
        self.pools.lock().unwrap().push(name.clone());
        self.all_pools().create(&PostParams::default(), &pool).await.unwrap();
        name
    }

    /// Changes the addresses of a pool.
    pub async fn set_pool(&self, name: &str, addresses: &[&str]) {
        let patch = Patch::Merge(json!({"spec": {"addresses": addresses}}));
        self.all_pools().patch(name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// The status of an `AddressPool`.
    pub async fn pool_status(&self, name: &str) -> Value {
        serde_json::to_value(self.all_pools().get_status(name).await.unwrap().status).unwrap()
    }

    pub async fn delete_pool(&self, name: &str) {
        self.all_pools().delete(name, &DeleteParams::default()).await.unwrap();
    }

    /// Waits until the server's clock is at a later second than the creation of a Service: timestamps of objects have
    /// this resolution.
    pub async fn wait_for_a_later_second(&self, name: &str) {
        let created = self.service(name).await["metadata"]["creationTimestamp"].clone();
        let api = Api::<ConfigMap>::namespaced(self.cluster.client.clone(), &self.namespace);
        let probe: ConfigMap = serde_json::from_value(json!({"metadata": {"generateName": "clock-"}})).unwrap();
        let poll = async || {
            let made = api.create(&PostParams::default(), &probe).await.unwrap();
            api.delete(&made.name_any(), &DeleteParams::default()).await.unwrap();
            serde_json::to_value(made.metadata.creation_timestamp).unwrap()
        };
        wait_for("a later second", poll, |now| now.as_str() > created.as_str()).await;
    }

    /// Deletes all remaining Services, without a controller, and waits for their end: the namespace controller deletes them
    /// some time later, and until then the next scenario would find their addresses in use.
    pub async fn delete_services(&self) {
        for service in self.services().list(&ListParams::default()).await.unwrap() {
            let name = service.name_any();
            self.change(&name, &json!({"metadata": {"finalizers": null}})).await;
            // It may have been deleted before, and ended without its finalizers.
            self.services().delete(&name, &DeleteParams::default()).await.ok();
        }
        let left = async || self.services().list(&ListParams::default()).await.unwrap().items.len();
        wait_for("the end of all Services", left, |count| *count == 0).await;
    }

    /// Removes cluster-scoped objects, after all our controllers have stopped.
    pub async fn clean_up(&self) {
        let pools = std::mem::take(&mut *self.pools.lock().unwrap());
        for name in pools {
            // The scenario may have deleted it.
            self.all_pools().delete(&name, &DeleteParams::default()).await.ok();
        }
        // Absent unless the scenario had a Pod.
        let nodes = Api::<Node>::all(self.cluster.client.clone());
        nodes.delete(&self.node_name(), &DeleteParams::default()).await.ok();
        let gateways = Api::<EdgeGateway>::all(self.cluster.client.clone());
        // Absent if the scenario had no gateway, or its controller did not report it.
        gateways.delete(&self.gateway, &DeleteParams::default()).await.ok();
    }

    fn services(&self) -> Api<Service> {
        Api::namespaced(self.cluster.client.clone(), &self.namespace)
    }

    fn slices(&self) -> Api<EndpointSlice> {
        Api::namespaced(self.cluster.client.clone(), &self.namespace)
    }

    fn all_pools(&self) -> Api<AddressPool> {
        Api::all(self.cluster.client.clone())
    }
}

/// Status and reason of a condition, for example `True Programmed`. `None` if it is absent.
pub fn condition(service: &Value, kind: &str) -> Option<String> {
    let all = service["status"]["conditions"].as_array()?;
    let found = all.iter().find(|condition| condition["type"] == format!("sluice.dev/{kind}"))?;
    Some(format!("{} {}", found["status"].as_str()?, found["reason"].as_str()?))
}

/// Whether a Service has our finalizer.
pub fn has_finalizer(service: &Value) -> bool {
    service["metadata"]["finalizers"].as_array().is_some_and(|all| all.contains(&json!(FINALIZER)))
}

/// Whether an Event is about the object of this name.
pub fn is_about(event: &Event, name: &str) -> bool {
    event.regarding.as_ref().and_then(|object| object.name.as_deref()) == Some(name)
}

fn endpoints(count: u8) -> Value {
    (0..count).map(|n| json!({"addresses": [format!("10.0.0.{}", 11 + n)], "conditions": {"ready": true}})).collect()
}

/// RFC 7396, for objects.
fn merge(target: &mut Value, patch: &Value) {
    match patch {
        Value::Object(patch) => {
            for (key, value) in patch {
                merge(&mut target[key], value);
            }
        }
        value => *target = value.clone(),
    }
}

/// Connects to a test server as a user with all rights.
pub async fn connect_to(server: &ApiServer) -> Cluster {
    let file = tempfile::NamedTempFile::new().unwrap();
    server.write_kubeconfig(file.path());
    connect(Some(file.path())).await.unwrap()
}

/// Polls until `poll` returns a value that satisfies `is_wanted`.
pub async fn wait_for<T: Debug>(what: &str, poll: impl AsyncFn() -> T, is_wanted: impl Fn(&T) -> bool) -> T {
    let end = std::time::Instant::now() + DEADLINE;
    loop {
        let seen = poll().await;
        if is_wanted(&seen) {
            return seen;
        }
        assert!(std::time::Instant::now() < end, "{what}: still {seen:?} after {DEADLINE:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

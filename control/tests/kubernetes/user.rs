//! Somebody who works with a cluster, the test server's or a real one, through its API only.

use std::fmt::Debug;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::kubernetes::{Cluster, connect};
use futures::FutureExt;
use k8s_openapi::api::core::v1::{Namespace, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::api_server::{ApiServer, Kind};
use crate::skip::skip;

/// Longer than any wait that is expected; a test that needs it has failed.
const DEADLINE: Duration = Duration::from_secs(30);

/// Names a kubeconfig of a cluster that tests may work in, each in a namespace of its own.
const REAL_CLUSTER: &str = "SLUICE_TEST_KUBECONFIG";

pub struct User {
    cluster: Cluster,
    pub kubeconfig: PathBuf,
    pub namespace: String,
    directory: tempfile::TempDir,
}

impl User {
    pub async fn of_test_server(server: &ApiServer) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let kubeconfig = directory.path().join("kubeconfig");
        server.write_kubeconfig(&kubeconfig);
        let cluster = connect(Some(&kubeconfig)).await.unwrap();
        server.create(Kind::Namespace, json!({"metadata": {"name": "a"}}));
        Self { cluster, kubeconfig, namespace: "a".to_owned(), directory }
    }

    /// Where sockets and files of this user go.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// A class that no other test has: they may share a real cluster.
    pub fn class(&self) -> String {
        format!("sluice.dev/{}", self.namespace)
    }

    pub fn full_name(&self, service: &str) -> String {
        format!("{}/{service}", self.namespace)
    }

    /// Creates a Service of type `LoadBalancer` with one backend.
    pub async fn add_service(&self, name: &str, class: &str) {
        let spec = json!({"type": "LoadBalancer", "loadBalancerClass": class, "ports": [{"port": 80, "targetPort": 8080}]});
        let service = json!({"metadata": {"name": name, "namespace": self.namespace}, "spec": spec});
        let service: Service = serde_json::from_value(service).unwrap();
        self.services().create(&PostParams::default(), &service).await.unwrap();
        let labels = json!({"kubernetes.io/service-name": name, "endpointslice.kubernetes.io/managed-by": "test"});
        let slice = json!({
            "metadata": {"name": format!("{name}-1"), "namespace": self.namespace, "labels": labels},
            "addressType": "IPv4", "ports": [{"port": 8080, "protocol": "TCP", "name": ""}],
            "endpoints": [{"addresses": ["10.0.0.11"], "conditions": {"ready": true}}],
        });
        let slice: EndpointSlice = serde_json::from_value(slice).unwrap();
        let slices = Api::namespaced(self.cluster.client.clone(), &self.namespace);
        slices.create(&PostParams::default(), &slice).await.unwrap();
    }

    pub async fn annotate(&self, name: &str, annotation: &str) {
        let patch = Patch::Merge(json!({"metadata": {"annotations": {annotation: "yes"}}}));
        self.services().patch(name, &PatchParams::default(), &patch).await.unwrap();
    }

    pub async fn delete_service(&self, name: &str) {
        self.services().delete(name, &DeleteParams::default()).await.unwrap();
    }

    /// `status.loadBalancer.ingress` of a Service.
    pub async fn ingress(&self, name: &str) -> Value {
        let service = self.services().get(name).await.unwrap();
        serde_json::to_value(service.status).unwrap()["loadBalancer"]["ingress"].clone()
    }

    /// The ingress, once there is one.
    pub async fn ingress_comes(&self, name: &str) -> Value {
        reached(&format!("an address of {name}"), async || self.ingress(name).await, |ingress| !ingress.is_null()).await
    }

    fn services(&self) -> Api<Service> {
        Api::namespaced(self.cluster.client.clone(), &self.namespace)
    }
}

/// Runs a scenario in a namespace of its own of a real cluster, and removes it whatever happens. Without a cluster it
/// prints that it was skipped.
pub async fn on_a_real_cluster(test: &str, scenario: impl AsyncFnOnce(&User)) {
    let Some(kubeconfig) = std::env::var_os(REAL_CLUSTER).map(PathBuf::from) else {
        skip(&format!("{test} (on a real cluster)"), &format!("{REAL_CLUSTER} names no kubeconfig"));
        return;
    };
    let cluster = connect(Some(&kubeconfig)).await.unwrap();
    let namespaces = Api::<Namespace>::all(cluster.client.clone());
    let wanted: Namespace = serde_json::from_value(json!({"metadata": {"generateName": "sluice-test-"}})).unwrap();
    let namespace = namespaces.create(&PostParams::default(), &wanted).await.unwrap().metadata.name.unwrap();
    let user = User { cluster, kubeconfig, namespace: namespace.clone(), directory: tempfile::tempdir().unwrap() };
    let result = AssertUnwindSafe(scenario(&user)).catch_unwind().await;
    namespaces.delete(&namespace, &DeleteParams::default()).await.unwrap();
    if let Err(panic) = result {
        std::panic::resume_unwind(panic);
    }
}

/// Looks until what is seen is as wanted.
pub async fn reached<T: Debug>(what: &str, look: impl AsyncFn() -> T, is_wanted: impl Fn(&T) -> bool) -> T {
    let end = std::time::Instant::now() + DEADLINE;
    loop {
        let seen = look().await;
        if is_wanted(&seen) {
            return seen;
        }
        assert!(std::time::Instant::now() < end, "{what}: still {seen:?} after {DEADLINE:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

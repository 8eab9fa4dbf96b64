//! A cluster that somebody works with: what is made in it for the scenarios, and removed again.

use std::path::{Path, PathBuf};

use control::crd::{AddressPool, EdgeGateway};
use control::kubernetes::connect;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, CustomResourceExt, ResourceExt};
use serde_json::json;

use crate::api_server::{ApiServer, Kind};
use crate::user::{User, reached};

/// Names a kubeconfig of a cluster that scenarios may work in.
const REAL_CLUSTER: &str = "SLUICE_TEST_KUBECONFIG";

/// The cluster that is there for tests, if any.
pub fn real() -> Option<PathBuf> {
    std::env::var_os(REAL_CLUSTER).map(PathBuf::from)
}

/// Installs the kinds that sluice adds, where they are missing, and removes those again afterwards. Kinds that are there
/// stay as they are: they may be in use.
pub async fn with_kinds(kubeconfig: &Path, act: impl AsyncFnOnce()) {
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
        reached(&format!("the kind {name}"), look, |all| {
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

/// Runs what must not panic in a namespace of its own, and removes that.
pub async fn in_own_namespace<T>(kubeconfig: &Path, act: impl AsyncFnOnce(&User) -> T) -> T {
    let client = connect(Some(kubeconfig)).await.unwrap().client;
    let namespaces = Api::<Namespace>::all(client);
    let wanted: Namespace = serde_json::from_value(json!({"metadata": {"generateName": "sluice-test-"}})).unwrap();
    let namespace = namespaces.create(&PostParams::default(), &wanted).await.unwrap().name_any();
    let user = User::of_cluster(kubeconfig, &namespace).await;
    let result = act(&user).await;
    user.free_services().await;
    namespaces.delete(&namespace, &DeleteParams::default()).await.unwrap();
    result
}

#[tokio::test]
async fn scenarios_leave_nothing_behind_in_a_cluster() {
    let server = ApiServer::start().await;
    for kind in [Kind::AddressPool, Kind::EdgeGateway] {
        server.set_installed(kind, false);
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    server.write_kubeconfig(file.path());
    let objects = || -> Vec<_> { Kind::ALL.iter().flat_map(|kind| server.list(*kind, "")).collect() };
    let before = objects();
    with_kinds(file.path(), async || {
        in_own_namespace(file.path(), async |user| {
            user.add("web", &json!({"metadata": {"finalizers": ["example.com/left-behind"]}})).await;
            user.add_pool("p", &["192.0.2.0/24"], &json!({})).await;
            assert!(!server.list(Kind::AddressPool, "").is_empty());
            user.clean_up().await;
        })
        .await;
    })
    .await;
    assert_eq!(objects(), before);
}

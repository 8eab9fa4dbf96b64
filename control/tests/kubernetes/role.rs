//! The shipped role: a controller lives its whole life under exactly it.

use std::collections::BTreeSet;
use std::path::Path;

use control::kubernetes::connect;
use control::overrides::store::Store;
use control::overrides::{Drained, Said};
use control::settings::{Certificates, ControllerSettings, ListenTcp, Source};
use serde_json::{Value, json};

use crate::api_server::{ApiServer, Attributes, Grant, Kind, Person};
use crate::installation::Installation;
use crate::user::{User, reached};

const TOKEN: &str = "of-the-service-account";

/// What `deploy/rbac.yaml` gives its service account.
struct Role {
    person: Person,
    namespace: String,
}

fn shipped() -> Role {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/rbac.yaml");
    let text = std::fs::read_to_string(file).unwrap();
    let objects: Vec<Value> = text.split("\n---\n").map(|part| serde_saphyr::from_str(part).unwrap()).collect();
    let of_kind = |kind: &'static str| objects.iter().filter(move |object| object["kind"] == kind);
    let account = &of_kind("ServiceAccount").next().unwrap()["metadata"];
    let (name, namespace) = (account["name"].as_str().unwrap(), account["namespace"].as_str().unwrap().to_owned());
    let is_bound = |role: &Value| {
        of_kind(if role["kind"] == "ClusterRole" { "ClusterRoleBinding" } else { "RoleBinding" }).any(|binding| {
            binding["roleRef"]["name"] == role["metadata"]["name"]
                && binding["metadata"]["namespace"] == role["metadata"]["namespace"]
                && binding["subjects"].as_array().unwrap().iter().any(|subject| subject["name"] == name)
        })
    };
    let roles = of_kind("ClusterRole").chain(of_kind("Role")).filter(|role| is_bound(role));
    let grants = roles.map(|role| Grant {
        namespace: role["metadata"]["namespace"].as_str().map(str::to_owned),
        rules: role["rules"].as_array().unwrap().clone(),
    });
    let grants = Some(grants.collect());
    Role { person: Person { name: format!("system:serviceaccount:{namespace}:{name}"), grants }, namespace }
}

/// Everything that a controller does, under the role; gives what it asked for.
async fn live(role: &Role) -> Vec<Attributes> {
    let server = ApiServer::start().await;
    server.admit(TOKEN, role.person.clone());
    server.create(Kind::Namespace, json!({"metadata": {"name": role.namespace}}));
    let user = User::of_test_server(&server).await;
    let kubeconfig = user.directory().join("of-the-role");
    server.write_kubeconfig_of(TOKEN, &kubeconfig);
    let source = Source::Kubernetes { kubeconfig: Some(kubeconfig.clone()), namespace: Some(role.namespace.clone()) };
    let configure = |settings: &mut ControllerSettings| {
        settings.source = source.clone();
        // As the shipped configuration has it; there is no such Secret here, which the controller says and goes on.
        let certificates = Certificates::Secret("sluice-controller-tls".to_owned());
        settings.listen.tcp = Some(ListenTcp { address: ([127, 0, 0, 1], 0).into(), certificates, advertise: None });
    };
    let installation = Installation::start_with(&user, configure).await;
    user.add_pool("p", &["198.51.100.0/24"], &json!({})).await;
    user.add("web", &json!({})).await;
    user.ingress_comes("web").await;
    installation.serves(&user, "web", 1).await;
    // What an operator sets by hand, twice: the first time makes the ConfigMap.
    let mut cluster = connect(Some(&kubeconfig)).await.unwrap();
    cluster.namespace.clone_from(&role.namespace);
    let store = Store::config_map(&cluster, &user.group());
    for node in ["n1", "n2"] {
        let (mut overrides, version) = store.load().await.unwrap();
        overrides.drain(Drained::Node(node.to_owned()), Said { by: "test".to_owned(), at_s: 0 }).unwrap();
        store.save(&overrides, version).await.unwrap();
    }
    user.delete_service("web").await;
    installation.withdraws(&user, "web").await;
    user.service_goes("web").await;
    // A refusal that stands is told by every controller: the next one finds its Event there and repeats it.
    user.add("refused", &json!({"metadata": {"annotations": {"sluice.dev/addresses": "203.0.113.9"}}})).await;
    user.event_comes("refused", "OutsidePools").await;
    installation.stop().await;
    let _installation = Installation::start_with(&user, configure).await;
    let asked = || -> Vec<Attributes> {
        server.log().into_iter().filter(|logged| logged.user == role.person.name).filter_map(|logged| logged.asked).collect()
    };
    for (resource, verb) in [("leases", "update"), ("secrets", "get"), ("events", "patch")] {
        let is_there = |all: &Vec<Attributes>| all.iter().any(|one| one.resource == resource && one.verb == verb);
        reached(&format!("{verb} of {resource}"), async || asked(), is_there).await;
    }
    asked()
}

fn is_allowed(role: &Role, asked: &Attributes) -> bool {
    role.person.check(asked).is_ok()
}

#[tokio::test]
async fn a_controller_lives_under_exactly_the_shipped_role() {
    let role = shipped();
    let asked = live(&role).await;
    let refused: BTreeSet<_> = asked.iter().filter(|asked| !is_allowed(&role, asked)).collect();
    assert!(refused.is_empty(), "the role lacks {refused:#?}");
}

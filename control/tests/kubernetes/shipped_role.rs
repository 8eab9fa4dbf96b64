//! The shipped role: a controller can do everything with exactly this role, and needs every rule in it.

use std::collections::BTreeSet;
use std::path::Path;

use control::config::settings::{Certificates, ControllerSettings, Listen, ListenTcp, Source};
use control::controller::preflight;
use control::kubernetes::connect;
use control::store::Storage;
use control::store::overrides::{load, save};
use control::world::overrides::{Author, DrainTarget};
use serde_json::{Value, json};

use crate::api_server::{Account, ApiServer, Attributes, Grant, Kind};
use crate::installation::Installation;
use crate::user::{User, wait_for};

const TOKEN: &str = "of-the-service-account";
/// The group of the shipped configuration. The role names the Lease of this group only.
const GROUP: &str = "default";

/// The rights of the service account in `deploy/rbac.yaml`.
struct Role {
    account: Account,
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
    Role { account: Account { name: format!("system:serviceaccount:{namespace}:{name}"), grants }, namespace }
}

/// Runs everything that a controller does with the role; returns its requests.
async fn run_controller(role: &Role) -> Vec<Attributes> {
    let server = ApiServer::start().await;
    server.add_account(TOKEN, role.account.clone());
    server.create(Kind::Namespace, json!({"metadata": {"name": role.namespace}}));
    let user = User::of_test_server(&server).await;
    let kubeconfig = user.directory().join("of-the-role");
    server.write_kubeconfig_of(TOKEN, &kubeconfig);
    // A gateway that was not seen for 30 days is deleted.
    server.create(Kind::EdgeGateway, json!({"metadata": {"name": "gone"}, "spec": {"group": GROUP}}));
    server.update_status(Kind::EdgeGateway, "", "gone", &json!({"status": {"lastSeen": "2020-01-01T00:00:00Z"}}), "test");
    let source = Source::Kubernetes { kubeconfig: Some(kubeconfig.clone()), namespace: Some(role.namespace.clone()) };
    let configure = |settings: &mut ControllerSettings| {
        settings.source = source.clone();
        settings.group = GROUP.to_owned();
        // As in the shipped configuration. The Secret does not exist here; the controller reports that and continues.
        let certificates = Certificates::Secret("sluice-controller-tls".to_owned());
        settings.listen.tcp = Some(ListenTcp { address: ([127, 0, 0, 1], 0).into(), certificates, advertise: None });
    };
    let installation = Installation::start_with(&user, configure).await;
    user.add_pool("p", &["198.51.100.0/24"], &json!({})).await;
    user.add("web", &json!({})).await;
    user.wait_for_ingress("web").await;
    installation.wait_until_served(&user, "web", 1).await;
    // Overrides by hand, twice: the first one creates the ConfigMap.
    let mut cluster = connect(Some(&kubeconfig)).await.unwrap();
    cluster.namespace.clone_from(&role.namespace);
    let store = Storage::in_cluster(&cluster, GROUP);
    for node in ["n1", "n2"] {
        let (mut overrides, version) = load(&store).await.unwrap();
        overrides.drain(DrainTarget::Node(node.to_owned()), Author { by: "test".to_owned(), at_s: 0 }).unwrap();
        save(&store, &overrides, version).await.unwrap();
    }
    user.delete_service("web").await;
    installation.wait_until_withdrawn(&user, "web").await;
    user.wait_until_deleted("web").await;
    // Every controller reports a persistent refusal: the second controller finds the Event of the first and repeats it.
    user.add("refused", &json!({"metadata": {"annotations": {"sluice.dev/addresses": "203.0.113.9"}}})).await;
    user.wait_for_event("refused", "OutsidePools").await;
    installation.stop().await;
    let _installation = Installation::start_with(&user, configure).await;
    let requests = || -> Vec<Attributes> {
        server
            .log()
            .into_iter()
            .filter(|logged| logged.user == role.account.name)
            .filter_map(|logged| logged.attributes)
            .collect()
    };
    let last = [
        ("leases", "update"),
        ("secrets", "get"),
        ("events", "patch"),
        ("edgegateways", "delete"),
        ("edgegateways/status", "patch"),
        ("addresspools/status", "patch"),
    ];
    for (resource, verb) in last {
        let is_there = |all: &Vec<Attributes>| all.iter().any(|one| one.resource == resource && one.verb == verb);
        wait_for(&format!("{verb} of {resource}"), async || requests(), is_there).await;
    }
    requests()
}

fn is_allowed(role: &Role, request: &Attributes) -> bool {
    role.account.check(request).is_ok()
}

fn is_used(requests: &[Attributes], single: &Value) -> bool {
    requests.iter().any(|request| request.is_allowed_by(single))
}

#[tokio::test]
async fn a_controller_needs_exactly_the_shipped_role() {
    let role = shipped();
    let requests = run_controller(&role).await;
    let refused: BTreeSet<_> = requests.iter().filter(|request| !is_allowed(&role, request)).collect();
    assert!(refused.is_empty(), "the role lacks {refused:#?}");
    let rules = role.account.grants.iter().flatten().flat_map(|grant| &grant.rules);
    let unused: Vec<_> = rules.flat_map(single_rules).filter(|single| !is_used(&requests, single)).collect();
    assert!(unused.is_empty(), "the role grants unused rights: {unused:#?}");
}

/// What `check` says about a kubeconfig with this token.
async fn preflight(server: &ApiServer, token: &str, namespace: &str) -> preflight::Finding {
    let directory = tempfile::tempdir().unwrap();
    let kubeconfig = directory.path().join("kubeconfig");
    server.write_kubeconfig_of(token, &kubeconfig);
    let source = Source::Kubernetes { kubeconfig: Some(kubeconfig), namespace: Some(namespace.to_owned()) };
    let certificates = Certificates::Secret("sluice-controller-tls".to_owned());
    let tcp = ListenTcp { address: ([127, 0, 0, 1], 0).into(), certificates, advertise: None };
    let listen = Listen { unix: None, tcp: Some(tcp) };
    let settings = ControllerSettings { listen, ..crate::settings::settings(source, &[]) };
    let findings = preflight::examine(&settings).await;
    findings.into_iter().find(|finding| finding.key == "kubernetes.kubeconfig").unwrap()
}

#[tokio::test]
async fn a_check_names_each_right_of_the_shipped_role_that_is_missing() {
    let role = shipped();
    let server = ApiServer::start().await;
    server.add_account(TOKEN, role.account.clone());
    let found = preflight(&server, TOKEN, &role.namespace).await;
    assert_eq!(found.level, preflight::Level::Ok, "{found}");
    let unknown = preflight(&server, "of-nobody", &role.namespace).await;
    assert!(unknown.level == preflight::Level::Fault && unknown.text.contains("401"), "{unknown}");
    let grants = role.account.grants.clone().unwrap();
    let places = (0..grants.len()).flat_map(|grant| (0..grants[grant].rules.len()).map(move |rule| (grant, rule)));
    for (grant, rule) in places.collect::<Vec<_>>() {
        let whole = grants[grant].rules[rule].clone();
        for single in single_rules(&whole) {
            let mut fewer = grants.clone();
            fewer[grant].rules.remove(rule);
            fewer[grant].rules.extend(single_rules(&whole).into_iter().filter(|other| *other != single));
            server.add_account(TOKEN, Account { grants: Some(fewer), ..role.account.clone() });
            let (verb, resource) = (single["verbs"][0].as_str().unwrap(), single["resources"][0].as_str().unwrap());
            let found = preflight(&server, TOKEN, &role.namespace).await;
            assert_eq!(found.level, preflight::Level::Fault, "{single}");
            assert!(found.text.contains(&format!("{verb} {resource}")), "{single}: {found}");
        }
    }
}

/// The role names our objects in our namespace. Only the right to create cannot be limited to a name.
#[test]
fn the_role_reaches_only_our_own_objects_in_our_namespace() {
    let role = shipped();
    let may = |verb, group, resource: &str, name: &str| {
        let (resource, namespace, name) = (resource.to_owned(), role.namespace.clone(), name.to_owned());
        is_allowed(&role, &Attributes { verb, group, resource, namespace, name })
    };
    for (group, resource, name) in [
        ("coordination.k8s.io", "leases", "sluice-controller-default"),
        ("", "configmaps", "sluice-overrides"),
        ("", "configmaps", "sluice-checkpoint-0"),
        ("", "configmaps", "sluice-checkpoint-3"),
        ("", "secrets", "sluice-controller-tls"),
    ] {
        assert!(may("get", group, resource, name), "{resource}");
        for verb in ["get", "update", "patch", "delete"] {
            assert!(!may(verb, group, resource, "of-another"), "{verb} {resource}");
        }
        assert!(!may("list", group, resource, "") && !may("watch", group, resource, ""), "{resource}");
    }
    assert!(may("create", "coordination.k8s.io", "leases", "") && may("create", "", "configmaps", ""));
}

/// Splits a rule into rules with one resource and one verb each.
fn single_rules(rule: &Value) -> Vec<Value> {
    let list = |field: &str| rule[field].as_array().unwrap().clone();
    let pairs =
        list("resources").into_iter().flat_map(|resource| list("verbs").into_iter().map(move |verb| (resource.clone(), verb)));
    let single = |(resource, verb)| {
        let mut single = rule.clone();
        single["resources"] = json!([resource]);
        single["verbs"] = json!([verb]);
        single
    };
    pairs.map(single).collect()
}

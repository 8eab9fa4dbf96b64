//! The finalizer of a Service, and the release of Services: by deletion, by another class, and by `uninstall`.

use std::process::Command;
use std::time::{Duration, Instant};

use kube::Api;
use objects::crd::EdgeGateway;
use serde_json::{Value, json};

use crate::api_server::{Fault, FaultRule, Kind};
use crate::installation::Installation;
use crate::user::{FINALIZER, User, condition, has_finalizer, wait_for};

#[tokio::test]
async fn gateways_receive_a_service_once_it_has_its_finalizer_or_after_ten_seconds() {
    let (server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    installation.wait_for_state("a first message", |received| received.messages > 0).await;
    server.inject(FaultRule {
        fault: Fault::Forbidden,
        times: usize::MAX,
        method: "PATCH",
        path_contains: "/status",
        watch: false,
    });
    let start = Instant::now();
    user.add("web", &json!({})).await;
    installation.wait_until_served(&user, "web", 1).await;
    assert!(start.elapsed() >= Duration::from_secs(9), "after {:?}", start.elapsed());
    server.clear_faults();
    user.wait_for_ingress("web").await;
}

#[tokio::test]
async fn a_removed_finalizer_is_restored() {
    let (_server, user) = User::with_test_server().await;
    let _installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    user.wait_for_reason("web", "Programmed", "True Programmed").await;
    user.change("web", &json!({"metadata": {"finalizers": null}})).await;
    wait_for("the finalizer", async || user.service("web").await, has_finalizer).await;
}

#[tokio::test]
async fn a_deleted_service_loses_our_fields_and_keeps_the_finalizers_of_others() {
    let (_server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    user.add("web", &json!({"metadata": {"finalizers": ["example.com/other"]}})).await;
    user.wait_for_reason("web", "Programmed", "True Programmed").await;
    user.delete_service("web").await;
    let look = async || user.service("web").await;
    let service = wait_for("a Service without our fields", look, |service| !has_finalizer(service)).await;
    assert_eq!(service["metadata"]["finalizers"], json!(["example.com/other"]));
    assert_eq!(service["status"]["conditions"].as_array().map_or(0, Vec::len), 0, "{service}");
    assert!(service["status"]["loadBalancer"]["ingress"].is_null(), "{service}");
    installation.wait_until_withdrawn(&user, "web").await;
}

#[tokio::test]
async fn a_service_that_moves_to_another_class_through_another_type_is_released() {
    let (_server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    user.wait_for_reason("web", "Programmed", "True Programmed").await;
    user.change("web", &json!({"spec": {"type": "ClusterIP"}})).await;
    let look = async || user.service("web").await;
    let is_released = |service: &Value| !has_finalizer(service) && condition(service, "Programmed").is_none();
    wait_for("a Service without our fields", &look, is_released).await;
    user.wait_for_event("web", "Released").await;
    installation.wait_until_withdrawn(&user, "web").await;
    user.change("web", &json!({"spec": {"type": "LoadBalancer", "loadBalancerClass": "example.com/other"}})).await;
    user.add("next", &json!({})).await;
    user.wait_for_reason("next", "Programmed", "True Programmed").await;
    assert!(is_released(&look().await), "it belongs to another controller");
}

/// Runs `sluice-controller` with the configuration of a user's installation.
fn sluice_controller(user: &User, arguments: &[&str]) -> (Option<i32>, String) {
    let config = user.directory().join("controller.yaml");
    let text = format!(
        "group: {}\nkubernetes: {{kubeconfig: {}, loadBalancerClass: {}, namespace: {}}}\n",
        user.group(),
        user.kubeconfig.display(),
        user.class(),
        user.namespace
    );
    std::fs::write(&config, text).unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_sluice-controller")).args(arguments).arg("--config").arg(&config).output().unwrap();
    let output_text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    (output.status.code(), output_text)
}

#[tokio::test(flavor = "multi_thread")]
async fn uninstall_is_refused_while_a_leader_renews_its_lease_even_slowly() {
    let (server, user) = User::with_test_server().await;
    let name = format!("sluice-controller-{}", user.group());
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": user.namespace},
        "spec": {"holderIdentity": "slow", "leaseDurationSeconds": 15},
    });
    server.create(Kind::Lease, lease);
    // A leader whose renewal hung for 3 s renews 7 s after the last one, and still leads.
    let (code, output_text) = std::thread::scope(|scope| {
        let uninstall = scope.spawn(|| sluice_controller(&user, &["uninstall"]));
        // Again and again: on a busy machine the command may read the Lease late.
        for renewal in 1..=20 {
            std::thread::sleep(Duration::from_secs(7));
            if uninstall.is_finished() {
                break;
            }
            server.update(Kind::Lease, &user.namespace, &name, &json!({"spec": {"leaseTransitions": renewal}}));
        }
        uninstall.join().unwrap()
    });
    assert!(code == Some(1) && output_text.contains("slow leads"), "{code:?} {output_text}");
    // Its process was killed: no renewal follows.
    let (code, output_text) = sluice_controller(&user, &["uninstall"]);
    assert_eq!(code, Some(0), "{output_text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn uninstall_leaves_nothing_on_services() {
    let (server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    user.wait_for_reason("web", "Programmed", "True Programmed").await;
    user.add("theirs", &json!({"metadata": {"finalizers": [FINALIZER]}, "spec": {"loadBalancerClass": "example.com/other"}}))
        .await;
    let other_group = json!({"finalizers": [FINALIZER], "annotations": {"sluice.dev/group": "another"}});
    user.add("of-another", &json!({"metadata": other_group, "spec": {"loadBalancerClass": null}})).await;
    let (code, output_text) = sluice_controller(&user, &["uninstall"]);
    assert!(code == Some(1) && output_text.contains("leads"), "{code:?} {output_text}");
    let fleet = Api::<EdgeGateway>::all(user.cluster.client.clone());
    wait_for("an EdgeGateway", async || fleet.get_opt("edge-1").await.unwrap(), Option::is_some).await;
    installation.stop().await;
    let web = user.full_name("web");
    let (code, output_text) = sluice_controller(&user, &["uninstall", "--dry-run"]);
    assert!(code == Some(0) && output_text.contains(&format!("would release Service {web}")), "{code:?} {output_text}");
    assert!(has_finalizer(&user.service("web").await));
    let (code, output_text) = sluice_controller(&user, &["release"]);
    assert!(
        code == Some(0) && output_text.contains("released 0 Services"),
        "Services of our own class are not released: {code:?} {output_text}"
    );
    // One write conflicts with another writer, and the role grants no right to get one Service.
    server.inject(FaultRule {
        fault: Fault::Conflict,
        times: 1,
        method: "PATCH",
        path_contains: "/services/web/status",
        watch: false,
    });
    let before = server.log().len();
    let (code, output_text) = sluice_controller(&user, &["uninstall"]);
    assert!(code == Some(0) && output_text.contains(&format!("released Service {web}")), "{code:?} {output_text}");
    let requests = server.log().split_off(before).into_iter().filter_map(|logged| logged.attributes).collect::<Vec<_>>();
    assert_eq!(requests.iter().filter(|request| request.resource == "services/status").count(), 2, "{requests:?}");
    assert!(!requests.iter().any(|request| request.resource == "services" && request.verb == "get"), "{requests:?}");
    let service = user.service("web").await;
    assert!(!has_finalizer(&service) && service["status"]["loadBalancer"]["ingress"].is_null(), "{service}");
    assert_eq!(condition(&service, "Programmed"), None);
    assert!(service["metadata"]["annotations"]["sluice.dev/group"].is_null(), "{service}");
    assert!(has_finalizer(&user.service("theirs").await), "of another class");
    assert!(has_finalizer(&user.service("of-another").await), "of another installation");
    assert!(server.get(Kind::EdgeGateway, "", "edge-1").is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn uninstall_goes_on_after_a_busy_api_server_and_ends_with_a_reason_if_it_stays_busy() {
    let (server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    user.wait_for_reason("web", "Programmed", "True Programmed").await;
    installation.stop().await;
    let busy = |times| FaultRule {
        fault: Fault::TooMany { retry_after_s: 1 },
        times,
        method: "PATCH",
        path_contains: "/services/web/status",
        watch: false,
    };
    server.inject(busy(usize::MAX));
    let (code, output_text) = sluice_controller(&user, &["uninstall"]);
    assert!(
        code == Some(1) && output_text.contains("8 attempts failed") && output_text.contains("429"),
        "{code:?} {output_text}"
    );
    assert!(has_finalizer(&user.service("web").await));
    server.clear_faults();
    server.inject(busy(2));
    let start = Instant::now();
    let (code, output_text) = sluice_controller(&user, &["uninstall"]);
    assert!(code == Some(0) && output_text.contains("released 1 Services"), "{code:?} {output_text}");
    assert!(start.elapsed() >= Duration::from_secs(2), "the server asks for a second twice");
    assert!(!has_finalizer(&user.service("web").await));
}

#[tokio::test(flavor = "multi_thread")]
async fn uninstall_scales_the_controllers_down_before_it_releases_services() {
    let (server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    user.wait_for_reason("web", "Programmed", "True Programmed").await;
    let scale = format!("/apis/apps/v1/namespaces/{}/deployments/sluice-controller/scale", user.namespace);
    let scaled = || server.log().into_iter().find(|logged| logged.path == scale);
    let (uninstall, user) = {
        let user = std::sync::Arc::new(user);
        let other = std::sync::Arc::clone(&user);
        let command = move || sluice_controller(&other, &["uninstall", "--scale-down", "sluice-controller"]);
        (tokio::task::spawn_blocking(command), user)
    };
    let request = wait_for("a smaller scale", async || scaled(), Option::is_some).await.unwrap();
    assert_eq!(serde_json::from_str::<Value>(&request.body).unwrap(), json!({"spec": {"replicas": 0}}));
    assert!(has_finalizer(&user.service("web").await), "released although a controller leads");
    // Its Pods end.
    installation.stop().await;
    let (code, output_text) = uninstall.await.unwrap();
    let released = format!("released Service {}", user.full_name("web"));
    assert!(code == Some(0) && output_text.contains(&released), "{code:?} {output_text}");
    assert!(!has_finalizer(&user.service("web").await));
}

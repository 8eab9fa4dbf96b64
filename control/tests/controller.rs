//! The complete controller over a directory of manifests, observed by a gateway on its socket and by readers of status
//! files.

#![allow(clippy::unwrap_used, clippy::panic)]

mod fake_gateway;
mod settings;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::config::settings::{ControllerSettings, Listen, Source};
use control::controller::{self, ControllerError, Running};
use control::metrics::{ControllerMetrics, TextFormat};
use fake_gateway::{DEADLINE, FakeGateway};
use proto::v1::WatchResponse;
use settings::settings;
use tokio_util::sync::CancellationToken;

/// The directory of a controller: its manifests, its status files and its socket.
struct ControllerDir {
    root: tempfile::TempDir,
}

impl ControllerDir {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("manifests")).unwrap();
        Self { root }
    }

    fn socket(&self) -> PathBuf {
        self.root.path().join("config.sock")
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.root.path().join("manifests").join(file), text).unwrap();
    }

    fn status(&self, name: &str) -> PathBuf {
        self.root.path().join("status/default").join(format!("{name}.yaml"))
    }

    fn settings(&self) -> ControllerSettings {
        let source = Source::Manifests { dir: self.root.path().join("manifests"), status_dir: self.root.path().join("status") };
        ControllerSettings { listen: Listen::unix(self.socket()), ..settings(source, &["192.0.2.100-192.0.2.199"]) }
    }

    async fn start(&self) -> (Running, CancellationToken) {
        let shutdown = CancellationToken::new();
        (controller::start(self.settings(), shutdown.clone()).await.unwrap(), shutdown)
    }
}

fn service(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec:\n  type: LoadBalancer\n  \
         loadBalancerClass: sluice.dev/gateway\n  ports: [{{port: 80}}]\n---\n"
    )
}

fn slice(of: &str, address: &str) -> String {
    format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: {of}-1\n  labels: \
         {{kubernetes.io/service-name: {of}}}\naddressType: IPv4\nports: [{{port: 8080}}]\nendpoints: [{{addresses: [{address}]}}]\n---\n"
    )
}

/// Waits for the first message with this Service.
async fn wait_for_service(gateway: &mut FakeGateway, name: &str) -> WatchResponse {
    gateway.wait_for(name, |message| message.services.iter().any(|service| service.name == name)).await
}

/// Waits until `file` contains `text`; without `text`, until the file is gone.
async fn wait_for_file(file: &Path, text: Option<&str>) {
    let wait = async {
        let has_text = || match (fs::read_to_string(file), text) {
            (Ok(found), Some(text)) => found.contains(text),
            (found, None) => found.is_err(),
            (Err(_), Some(_)) => false,
        };
        while !has_text() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(DEADLINE, wait).await.unwrap_or_else(|_| panic!("{} never contained {text:?}", file.display()));
}

#[tokio::test]
async fn a_status_file_has_the_address_once_a_gateway_serves_and_is_deleted_with_the_manifest() {
    let dir = ControllerDir::new();
    dir.write("web.yaml", &(service("web") + &slice("web", "10.0.0.1")));
    let (running, shutdown) = dir.start().await;
    let mut states = running.view.states.clone();
    tokio::time::timeout(DEADLINE, states.wait_for(Option::is_some)).await.unwrap().unwrap();
    wait_for_file(&dir.status("web"), Some("NoGateway")).await;
    assert!(!fs::read_to_string(dir.status("web")).unwrap().contains("192.0.2."), "no gateway is connected");

    let mut gateway = FakeGateway::connect(&dir.socket(), "edge-1").await;
    let first = gateway.wait_for("the Service", |message| !message.services.is_empty()).await;
    assert_eq!(first.services[0].ports[0].backends.len(), 1);
    wait_for_file(&dir.status("web"), Some("192.0.2.100")).await;

    dir.write("more.yaml", &service("more"));
    wait_for_service(&mut gateway, "more").await;
    wait_for_file(&dir.status("more"), Some("192.0.2.101")).await;

    fs::remove_file(dir.root.path().join("manifests/web.yaml")).unwrap();
    let gone = gateway.wait_for("the removal", |message| !message.removed.is_empty()).await;
    assert_eq!(gone.removed, ["default/web"]);
    wait_for_file(&dir.status("web"), None).await;
    shutdown.cancel();
    running.stopped().await.unwrap();
    assert!(!dir.socket().exists());
}

#[tokio::test]
async fn a_restart_changes_no_address() {
    let dir = ControllerDir::new();
    dir.write("m.yaml", &(service("m") + &service("z")));
    let (running, shutdown) = dir.start().await;
    let mut gateway = FakeGateway::connect(&dir.socket(), "edge-1").await;
    gateway.wait_for("the Services", |message| message.services.len() == 2).await;
    wait_for_file(&dir.status("z"), Some("192.0.2.101")).await;
    shutdown.cancel();
    running.stopped().await.unwrap();

    dir.write("a.yaml", &service("a"));
    let (running, shutdown) = dir.start().await;
    let mut gateway = FakeGateway::connect(&dir.socket(), "edge-1").await;
    gateway.wait_for("the Services", |message| message.services.len() == 3).await;
    wait_for_file(&dir.status("a"), Some("192.0.2.102")).await;
    wait_for_file(&dir.status("m"), Some("192.0.2.100")).await;
    wait_for_file(&dir.status("z"), Some("192.0.2.101")).await;
    shutdown.cancel();
    running.stopped().await.unwrap();
}

#[tokio::test]
async fn a_service_with_a_broken_manifest_at_start_keeps_its_address_until_the_repair() {
    let dir = ControllerDir::new();
    dir.write("web.yaml", &service("web").replace("ports:", "loadBalancerIP: 192.0.2.150\n  ports:"));
    let (running, shutdown) = dir.start().await;
    let mut gateway = FakeGateway::connect(&dir.socket(), "edge-1").await;
    gateway.wait_for("the Services", |message| message.services.len() == 1).await;
    wait_for_file(&dir.status("web"), Some("192.0.2.150")).await;
    shutdown.cancel();
    running.stopped().await.unwrap();

    dir.write("web.yaml", "kind: [");
    dir.write("more.yaml", &service("more"));
    let (running, shutdown) = dir.start().await;
    let mut gateway = FakeGateway::connect(&dir.socket(), "edge-1").await;
    gateway.wait_for("the Services", |message| message.services.len() == 1).await;
    wait_for_file(&dir.status("more"), Some("192.0.2.100")).await;
    wait_for_file(&dir.status("web"), Some("192.0.2.150")).await;
    dir.write("web.yaml", &service("web"));
    let message = wait_for_service(&mut gateway, "web").await;
    assert_eq!(message.services[0].ports[0].vips, [[192, 0, 2, 150]]);
    shutdown.cancel();
    running.stopped().await.unwrap();
}

#[tokio::test]
async fn a_broken_manifest_changes_nothing_and_other_files_are_still_applied() {
    let dir = ControllerDir::new();
    dir.write("web.yaml", &service("web"));
    let (running, shutdown) = dir.start().await;
    let mut gateway = FakeGateway::connect(&dir.socket(), "edge-1").await;
    gateway.wait_for("the Services", |message| message.services.len() == 1).await;
    dir.write("web.yaml", "kind: [");
    dir.write("more.yaml", &service("more"));
    let message = wait_for_service(&mut gateway, "more").await;
    assert!(message.removed.is_empty() && !message.full);
    let state = running.view.states.borrow().clone().unwrap();
    assert_eq!(state.state.services.len(), 2);
    shutdown.cancel();
    running.stopped().await.unwrap();
}

#[tokio::test]
async fn a_refused_service_reaches_the_gateway_with_the_refusal_and_its_status_has_no_address() {
    let dir = ControllerDir::new();
    dir.write("web.yaml", &service("web").replace("  ports:", "  sessionAffinity: Cookie\n  ports:"));
    let (running, shutdown) = dir.start().await;
    let mut gateway = FakeGateway::connect(&dir.socket(), "edge-1").await;
    let message = gateway.wait_for("the Services", |message| message.services.len() == 1).await;
    let refusal = message.services[0].refusal.clone().unwrap();
    assert_eq!(refusal.reason, "Refused");
    assert!(refusal.message.contains("spec.sessionAffinity"), "{}", refusal.message);
    assert!(message.services[0].ports.is_empty());
    dir.write("good.yaml", &service("good"));
    wait_for_service(&mut gateway, "good").await;
    wait_for_file(&dir.status("good"), Some("192.0.2.100")).await;
    wait_for_file(&dir.status("web"), Some("Refused")).await;
    assert!(!fs::read_to_string(dir.status("web")).unwrap().contains("192.0.2."));
    shutdown.cancel();
    running.stopped().await.unwrap();
}

#[tokio::test]
async fn a_second_controller_on_the_same_socket_is_an_error_and_does_not_disturb_the_first() {
    let dir = ControllerDir::new();
    let (running, shutdown) = dir.start().await;
    let second = controller::start(dir.settings(), CancellationToken::new()).await;
    assert!(matches!(second, Err(ControllerError::Listen(_))));
    FakeGateway::connect(&dir.socket(), "edge-1").await;
    shutdown.cancel();
    running.stopped().await.unwrap();
}

#[tokio::test]
async fn a_missing_manifests_directory_is_an_error_with_its_name() {
    let dir = ControllerDir::new();
    fs::remove_dir(dir.root.path().join("manifests")).unwrap();
    let (running, _shutdown) = dir.start().await;
    let error = tokio::time::timeout(DEADLINE, running.stopped()).await.unwrap().unwrap_err().to_string();
    assert!(error.contains("manifests"), "{error}");
}

#[tokio::test]
async fn the_time_from_a_changed_slice_to_its_last_acknowledgement_is_measured() {
    let dir = ControllerDir::new();
    dir.write("web.yaml", &(service("web") + &slice("web", "10.0.0.1")));
    let (running, shutdown) = dir.start().await;
    let mut gateway = FakeGateway::connect(&dir.socket(), "edge-1").await;
    wait_for_service(&mut gateway, "web").await;
    let metrics = ControllerMetrics(running.view.clone());
    let has = |line: &str| TextFormat::Prometheus.text(metrics.clone()).unwrap().lines().any(|other| other == line);
    assert!(has("sluice_network_programming_duration_seconds_count 0"), "the first state is no change");
    assert!(has("sluice_gateways{state=\"connected\"} 1"));
    dir.write("web.yaml", &(service("web") + &slice("web", "10.0.0.2")));
    wait_for_service(&mut gateway, "web").await;
    let counted = async {
        while !has("sluice_network_programming_duration_seconds_count 1") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(DEADLINE, counted).await.unwrap();
    assert!(has("sluice_pool_addresses{pool=\"default\",family=\"IPv4\",state=\"used\"} 1.0"));
    shutdown.cancel();
    running.stopped().await.unwrap();
}

//! The complete controller over a directory of manifests, observed by a gateway on its socket and by readers of status
//! files.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::config::settings::{ControllerSettings, Defaults, Listen, OwnershipRules, Source};
use control::controller::{self, ControllerError, Running};
use objects::PoolSpec;
use proto::v1::config_client::ConfigClient;
use proto::v1::{Hello, WatchRequest, WatchResponse, watch_request};
use proto::{HealthCheck, Mode, Scheduler};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tonic::transport::Endpoint;

const WAIT: Duration = Duration::from_secs(120);

struct Lab {
    dir: tempfile::TempDir,
}

impl Lab {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("manifests")).unwrap();
        Self { dir }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("config.sock")
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.dir.path().join("manifests").join(file), text).unwrap();
    }

    fn status(&self, name: &str) -> PathBuf {
        self.dir.path().join("status/default").join(format!("{name}.yaml"))
    }

    fn settings(&self) -> ControllerSettings {
        let source = Source::Manifests { dir: self.dir.path().join("manifests"), status_dir: self.dir.path().join("status") };
        let ranges = vec!["192.0.2.100-192.0.2.199".parse().unwrap()];
        ControllerSettings {
            listen: Listen::unix(self.socket()),
            group: "default".to_owned(),
            source,
            load_balancer_class: "sluice.dev/gateway".to_owned(),
            ownership: OwnershipRules::default(),
            defaults: Defaults { mode: Mode::Nat, scheduler: Scheduler::Maglev, drain_timeout: Duration::from_secs(300) },
            health: HealthCheck::default(),
            backends_allowed: None,
            cluster_cidrs: Vec::new(),
            pools: vec![PoolSpec::new("default", ranges)],
            reserved: Vec::new(),
            lock_dir: None,
        }
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

/// A gateway that serves everything that it receives.
struct Gateway {
    requests: mpsc::Sender<WatchRequest>,
    messages: Streaming<WatchResponse>,
}

impl Gateway {
    async fn dial(socket: &Path) -> Self {
        let channel = Endpoint::try_from(format!("unix:{}", socket.display())).unwrap().connect().await.unwrap();
        let (requests, outbound) = mpsc::channel(8);
        let hello = Hello { gateway: "edge-1".to_owned(), ..Hello::default() };
        requests.send(WatchRequest { message: Some(watch_request::Message::Hello(hello)) }).await.unwrap();
        let messages = ConfigClient::new(channel).watch(ReceiverStream::new(outbound)).await.unwrap().into_inner();
        Self { requests, messages }
    }

    /// The next message for which `wanted` holds; acknowledges all messages.
    async fn until(&mut self, wanted: impl Fn(&WatchResponse) -> bool) -> WatchResponse {
        let wait = async {
            loop {
                let message = self.messages.message().await.unwrap().unwrap();
                let acknowledge = watch_request::Message::Acknowledge(message.generation.clone().unwrap());
                self.requests.send(WatchRequest { message: Some(acknowledge) }).await.unwrap();
                if wanted(&message) {
                    return message;
                }
            }
        };
        tokio::time::timeout(WAIT, wait).await.unwrap()
    }
}

/// Waits until `file` contains `text`; without `text`, until the file is gone.
async fn until_file(file: &Path, text: Option<&str>) {
    let wait = async {
        let is_so = || match (fs::read_to_string(file), text) {
            (Ok(found), Some(text)) => found.contains(text),
            (found, None) => found.is_err(),
            (Err(_), Some(_)) => false,
        };
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WAIT, wait).await.unwrap_or_else(|_| panic!("{} never contained {text:?}", file.display()));
}

#[tokio::test]
async fn a_service_gets_an_address_once_a_gateway_forwards_for_it_and_loses_its_file_with_its_manifest() {
    let lab = Lab::new();
    lab.write("web.yaml", &(service("web") + &slice("web", "10.0.0.1")));
    let (running, shutdown) = lab.start().await;
    let mut states = running.view.states.clone();
    tokio::time::timeout(WAIT, states.wait_for(Option::is_some)).await.unwrap().unwrap();
    until_file(&lab.status("web"), Some("NoGateway")).await;
    assert!(!fs::read_to_string(lab.status("web")).unwrap().contains("192.0.2."), "no gateway is connected");

    let mut gateway = Gateway::dial(&lab.socket()).await;
    let first = gateway.until(|message| !message.services.is_empty()).await;
    assert_eq!(first.services[0].ports[0].backends.len(), 1);
    until_file(&lab.status("web"), Some("192.0.2.100")).await;

    lab.write("more.yaml", &service("more"));
    gateway.until(|message| message.services.iter().any(|service| service.name == "more")).await;
    until_file(&lab.status("more"), Some("192.0.2.101")).await;

    fs::remove_file(lab.dir.path().join("manifests/web.yaml")).unwrap();
    let gone = gateway.until(|message| !message.removed.is_empty()).await;
    assert_eq!(gone.removed, ["default/web"]);
    until_file(&lab.status("web"), None).await;
    shutdown.cancel();
    running.stopped().await.unwrap();
    assert!(!lab.socket().exists());
}

#[tokio::test]
async fn a_restart_moves_no_service() {
    let lab = Lab::new();
    lab.write("m.yaml", &(service("m") + &service("z")));
    let (running, shutdown) = lab.start().await;
    let mut gateway = Gateway::dial(&lab.socket()).await;
    gateway.until(|message| message.services.len() == 2).await;
    until_file(&lab.status("z"), Some("192.0.2.101")).await;
    shutdown.cancel();
    running.stopped().await.unwrap();

    lab.write("a.yaml", &service("a"));
    let (running, shutdown) = lab.start().await;
    let mut gateway = Gateway::dial(&lab.socket()).await;
    gateway.until(|message| message.services.len() == 3).await;
    until_file(&lab.status("a"), Some("192.0.2.102")).await;
    until_file(&lab.status("m"), Some("192.0.2.100")).await;
    until_file(&lab.status("z"), Some("192.0.2.101")).await;
    shutdown.cancel();
    running.stopped().await.unwrap();
}

#[tokio::test]
async fn a_service_with_a_broken_manifest_at_start_keeps_its_address_until_the_repair() {
    let lab = Lab::new();
    lab.write("web.yaml", &service("web").replace("ports:", "loadBalancerIP: 192.0.2.150\n  ports:"));
    let (running, shutdown) = lab.start().await;
    let mut gateway = Gateway::dial(&lab.socket()).await;
    gateway.until(|message| message.services.len() == 1).await;
    until_file(&lab.status("web"), Some("192.0.2.150")).await;
    shutdown.cancel();
    running.stopped().await.unwrap();

    lab.write("web.yaml", "kind: [");
    lab.write("more.yaml", &service("more"));
    let (running, shutdown) = lab.start().await;
    let mut gateway = Gateway::dial(&lab.socket()).await;
    gateway.until(|message| message.services.len() == 1).await;
    until_file(&lab.status("more"), Some("192.0.2.100")).await;
    until_file(&lab.status("web"), Some("192.0.2.150")).await;
    lab.write("web.yaml", &service("web"));
    let message = gateway.until(|message| message.services.iter().any(|service| service.name == "web")).await;
    assert_eq!(message.services[0].ports[0].vips, [[192, 0, 2, 150]]);
    shutdown.cancel();
    running.stopped().await.unwrap();
}

#[tokio::test]
async fn a_broken_manifest_changes_nothing_and_other_files_are_still_applied() {
    let lab = Lab::new();
    lab.write("web.yaml", &service("web"));
    let (running, shutdown) = lab.start().await;
    let mut gateway = Gateway::dial(&lab.socket()).await;
    gateway.until(|message| message.services.len() == 1).await;
    lab.write("web.yaml", "kind: [");
    lab.write("more.yaml", &service("more"));
    let message = gateway.until(|message| message.services.iter().any(|service| service.name == "more")).await;
    assert!(message.removed.is_empty() && !message.full);
    let state = running.view.states.borrow().clone().unwrap();
    assert_eq!(state.state.services.len(), 2);
    shutdown.cancel();
    running.stopped().await.unwrap();
}

#[tokio::test]
async fn a_refused_service_reaches_the_gateway_with_the_refusal_and_its_status_has_no_address() {
    let lab = Lab::new();
    lab.write("web.yaml", &service("web").replace("  ports:", "  sessionAffinity: Cookie\n  ports:"));
    let (running, shutdown) = lab.start().await;
    let mut gateway = Gateway::dial(&lab.socket()).await;
    let message = gateway.until(|message| message.services.len() == 1).await;
    let refusal = message.services[0].refusal.clone().unwrap();
    assert_eq!(refusal.reason, "Refused");
    assert!(refusal.message.contains("spec.sessionAffinity"), "{}", refusal.message);
    assert!(message.services[0].ports.is_empty());
    lab.write("good.yaml", &service("good"));
    gateway.until(|message| message.services.iter().any(|service| service.name == "good")).await;
    until_file(&lab.status("good"), Some("192.0.2.100")).await;
    until_file(&lab.status("web"), Some("Refused")).await;
    assert!(!fs::read_to_string(lab.status("web")).unwrap().contains("192.0.2."));
    shutdown.cancel();
    running.stopped().await.unwrap();
}

#[tokio::test]
async fn a_second_controller_on_the_same_socket_is_an_error_and_leaves_the_first_alone() {
    let lab = Lab::new();
    let (running, shutdown) = lab.start().await;
    let second = controller::start(lab.settings(), CancellationToken::new()).await;
    assert!(matches!(second, Err(ControllerError::Listen(_))));
    Gateway::dial(&lab.socket()).await;
    shutdown.cancel();
    running.stopped().await.unwrap();
}

#[tokio::test]
async fn a_manifests_directory_that_is_missing_is_an_error_that_names_it() {
    let lab = Lab::new();
    fs::remove_dir(lab.dir.path().join("manifests")).unwrap();
    let (running, _shutdown) = lab.start().await;
    let error = tokio::time::timeout(WAIT, running.stopped()).await.unwrap().unwrap_err().to_string();
    assert!(error.contains("manifests"), "{error}");
}

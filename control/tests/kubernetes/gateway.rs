//! A gateway for tests of the controller: it receives messages and acknowledges them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use ipnet::IpNet;
use proto::v1::config_client::ConfigClient;
use proto::v1::watch_request::Message;
use proto::v1::{FleetReport, Hello, Links, Report, Service, ServiceHealth, WatchRequest, WatchResponse};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint, Uri};

/// What a gateway received.
#[derive(Clone, Debug, Default)]
pub struct ReceivedState {
    /// Number of messages.
    pub messages: usize,
    pub services: BTreeMap<String, Service>,
    /// All Services that were ever removed.
    pub removed: Vec<String>,
}

impl ReceivedState {
    /// Number of backends in all ports of a Service.
    pub fn backends(&self, service: &str) -> usize {
        self.services.get(service).map_or(0, |service| service.ports.iter().map(|port| port.backends.len()).sum())
    }
}

/// Whether a gateway reaches its controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Up,
    /// It has vanished: the controller sees the end of the stream, and the gateway keeps what it has.
    Cut,
    /// The stream is open, but the gateway neither reads nor acknowledges anything.
    Stalled,
}

pub struct Gateway {
    received: Arc<Mutex<ReceivedState>>,
    reports: watch::Sender<Option<Report>>,
    link: watch::Sender<Link>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Gateway {
    /// Dials the controller until it answers, then stays connected.
    pub fn start(socket: &Path) -> Self {
        Self::start_as("edge-1", socket)
    }

    /// The same with another name.
    pub fn start_as(name: &str, socket: &Path) -> Self {
        Self::start_with(name, socket, false)
    }

    /// A gateway that also reports how many backends are healthy: all that it received.
    pub fn start_reporting(name: &str, socket: &Path) -> Self {
        Self::start_with(name, socket, true)
    }

    fn start_with(name: &str, socket: &Path, reports: bool) -> Self {
        let received = Arc::new(Mutex::new(ReceivedState::default()));
        let (name, socket, state) = (name.to_owned(), socket.to_owned(), Arc::clone(&received));
        let (own_reports, mut reported) = watch::channel(None);
        let (link, mut linked) = watch::channel(Link::Up);
        let task = tokio::spawn(async move {
            let mut cut = linked.clone();
            loop {
                tokio::select! {
                    ended = watch_controller(&name, &socket, (&state, reports), &mut reported, &mut linked) => {
                        if ended.is_ok() {
                            return;
                        }
                    }
                    _ = async { cut.wait_for(|link| *link == Link::Cut).await.map(drop) } => {}
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
                if cut.wait_for(|link| *link != Link::Cut).await.is_err() {
                    return;
                }
            }
        });
        Self { received, reports: own_reports, link, task }
    }

    /// Vanishes until [`Gateway::return_to_controller`]: it keeps what it received, as a gateway behind a broken link
    /// goes on forwarding.
    pub fn vanish(&self) {
        self.link.send_replace(Link::Cut);
    }

    /// Stays connected, but takes and acknowledges nothing until [`Gateway::return_to_controller`].
    pub fn stall(&self) {
        self.link.send_replace(Link::Stalled);
    }

    pub fn return_to_controller(&self) {
        self.link.send_replace(Link::Up);
    }

    /// Reports this about the fleet.
    pub fn report_fleet(&self, fleet: FleetReport) {
        self.report(Report { fleet: Some(fleet), ..Report::default() });
    }

    /// Reports that its links have these networks.
    pub fn report_links(&self, networks: &[&str]) {
        let networks: Vec<IpNet> = networks.iter().map(|network| network.parse().unwrap()).collect();
        let links = Links { prefixes: proto::convert::prefixes(&networks) };
        self.report(Report { links: Some(links), ..Report::default() });
    }

    fn report(&self, report: Report) {
        self.reports.send_replace(Some(Report { ready: true, ..report }));
    }

    pub fn received(&self) -> ReceivedState {
        self.received.lock().unwrap().clone()
    }
}

async fn watch_controller(
    name: &str,
    socket: &Path,
    (received, reports): (&Mutex<ReceivedState>, bool),
    own_reports: &mut watch::Receiver<Option<Report>>,
    link: &mut watch::Receiver<Link>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let mut client = ConfigClient::new(dial(socket.to_owned()).await?);
    let (requests, receiver) = mpsc::channel(16);
    let hello = Hello { gateway: name.to_owned(), version: "test".to_owned(), ..Hello::default() };
    requests.send(WatchRequest { message: Some(Message::Hello(hello)) }).await?;
    let mut responses = client.watch(ReceiverStream::new(receiver)).await?.into_inner();
    loop {
        link.wait_for(|link| *link != Link::Stalled).await?;
        let response = tokio::select! {
            Ok(()) = async { link.wait_for(|link| *link == Link::Stalled).await.map(drop) } => continue,
            response = responses.message() => response?,
            Ok(()) = own_reports.changed() => {
                let report = own_reports.borrow_and_update().clone();
                requests.send(WatchRequest { message: report.map(Message::Report) }).await?;
                continue;
            }
        };
        let Some(response) = response else { return Ok(()) };
        let acknowledgement = response.generation.clone().map(Message::Acknowledge);
        let report = Report { ready: true, services: response.services.iter().map(health).collect(), ..Report::default() };
        apply(&mut received.lock().unwrap(), response);
        requests.send(WatchRequest { message: acknowledgement }).await?;
        if reports {
            requests.send(WatchRequest { message: Some(Message::Report(report)) }).await?;
        }
    }
}

pub async fn dial(socket: PathBuf) -> Result<Channel, tonic::transport::Error> {
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://controller").connect_with_connector(connector).await
}

fn health(service: &Service) -> ServiceHealth {
    let addresses: BTreeSet<_> = service.ports.iter().flat_map(|port| &port.backends).map(|backend| &backend.address).collect();
    let backends = u32::try_from(addresses.len()).unwrap();
    ServiceHealth { service: format!("{}/{}", service.namespace, service.name), backends, healthy: backends, refusal: None }
}

fn apply(received: &mut ReceivedState, response: WatchResponse) {
    received.messages += 1;
    if response.full {
        received.services.clear();
    }
    for service in response.services {
        received.services.insert(format!("{}/{}", service.namespace, service.name), service);
    }
    for name in response.removed {
        received.services.remove(&name);
        received.removed.push(name);
    }
}

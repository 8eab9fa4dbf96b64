//! A gateway as the controller sees it, without tables: it receives state, acknowledges it, and sends the reports that
//! the benchmark asks for.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use prost::Message as _;
use proto::v1::config_client::ConfigClient;
use proto::v1::watch_request::Message;
use proto::v1::{Hello, Report, ServiceHealth, WatchRequest};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// A complete change, with all its parts.
pub struct Change {
    pub at: Instant,
    pub bytes: usize,
    /// The Services that it contains.
    pub services: Vec<String>,
}

pub struct Gateway {
    _runtime: tokio::runtime::Runtime,
    requests: mpsc::Sender<WatchRequest>,
    changes: Receiver<Change>,
}

impl Gateway {
    /// Connects until the controller leads and accepts the stream.
    pub fn start(socket: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let url = format!("unix:{}", socket.display());
        let deadline = Instant::now() + Duration::from_secs(60);
        let (requests, responses) = loop {
            if let Some(taken) = runtime.block_on(dial(&url)) {
                break taken;
            }
            assert!(Instant::now() < deadline, "the controller leads within 60 s");
            std::thread::sleep(Duration::from_millis(20));
        };
        let (sender, changes) = channel();
        runtime.spawn(take(responses, requests.clone(), sender));
        Self { _runtime: runtime, requests, changes }
    }

    pub fn report(&self, services: Vec<ServiceHealth>) {
        let report = Report { ready: true, services, ..Report::default() };
        self.requests.blocking_send(WatchRequest { message: Some(Message::Report(report)) }).unwrap();
    }

    /// Waits for the next change.
    pub fn next(&self) -> Change {
        self.changes.recv_timeout(Duration::from_secs(300)).expect("a change within 300 s")
    }

    /// Discards changes until none has arrived for this long.
    pub fn settle(&self, silence: Duration) {
        while self.changes.recv_timeout(silence).is_ok() {}
    }
}

type Stream = (mpsc::Sender<WatchRequest>, tonic::Streaming<proto::v1::WatchResponse>);

async fn dial(url: &str) -> Option<Stream> {
    let channel = tonic::transport::Endpoint::try_from(url.to_owned()).unwrap().connect().await.ok()?;
    let mut client = ConfigClient::new(channel).max_decoding_message_size(proto::limits::MESSAGE_BYTES_MAX);
    let (requests, later) = mpsc::channel(16);
    let hello =
        Hello { gateway: "bench-2".to_owned(), version: "bench".to_owned(), parts: true, node_sets: true, ..Hello::default() };
    requests.send(WatchRequest { message: Some(Message::Hello(hello)) }).await.ok()?;
    Some((requests, client.watch(ReceiverStream::new(later)).await.ok()?.into_inner()))
}

async fn take(
    mut responses: tonic::Streaming<proto::v1::WatchResponse>,
    acknowledge: mpsc::Sender<WatchRequest>,
    changes: Sender<Change>,
) {
    let (mut bytes, mut services) = (0, Vec::new());
    while let Ok(Some(response)) = responses.message().await {
        bytes += response.encoded_len();
        services.extend(response.services.iter().map(|service| format!("{}/{}", service.namespace, service.name)));
        if response.more {
            continue;
        }
        let message = response.generation.map(Message::Acknowledge);
        let change = Change { at: Instant::now(), bytes: std::mem::take(&mut bytes), services: std::mem::take(&mut services) };
        if acknowledge.send(WatchRequest { message }).await.is_err() || changes.send(change).is_err() {
            return;
        }
    }
}

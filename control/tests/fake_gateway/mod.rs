//! A gateway that acknowledges every message of its controller. Tests read the messages.

use std::path::Path;
use std::time::Duration;

use proto::v1::config_client::ConfigClient;
use proto::v1::{Hello, WatchRequest, WatchResponse, watch_request::Message};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

/// Longer than any expected wait. A test that reaches it has failed.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) struct FakeGateway {
    requests: mpsc::Sender<WatchRequest>,
    messages: Streaming<WatchResponse>,
}

/// Connects to the socket of a controller.
pub(crate) async fn dial(socket: &Path) -> Channel {
    Endpoint::try_from(format!("unix:{}", socket.display())).unwrap().connect().await.unwrap()
}

impl FakeGateway {
    /// A connected gateway of version 9.
    pub(crate) async fn connect(socket: &Path, name: &str) -> Self {
        let (requests, outbound) = mpsc::channel(8);
        let hello = Hello { gateway: name.to_owned(), version: "9".to_owned(), ..Hello::default() };
        requests.send(WatchRequest { message: Some(Message::Hello(hello)) }).await.unwrap();
        let responses = ConfigClient::new(dial(socket).await).watch(ReceiverStream::new(outbound)).await.unwrap();
        Self { requests, messages: responses.into_inner() }
    }

    /// Waits for the first message that satisfies `is_wanted`. Acknowledges all messages.
    pub(crate) async fn wait_for(&mut self, what: &str, is_wanted: impl Fn(&WatchResponse) -> bool) -> WatchResponse {
        let wait = async {
            loop {
                let message = self.messages.message().await.unwrap().unwrap();
                let acknowledge = Message::Acknowledge(message.generation.clone().unwrap());
                self.requests.send(WatchRequest { message: Some(acknowledge) }).await.unwrap();
                if is_wanted(&message) {
                    return message;
                }
            }
        };
        tokio::time::timeout(DEADLINE, wait).await.unwrap_or_else(|_| panic!("{what}: no message after {DEADLINE:?}"))
    }
}

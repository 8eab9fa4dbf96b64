//! `sluice.v1.Config` on a unix socket: gateways dial it, say what they have, and are sent what they lack.
//!
//! Invariant: before the first complete state nothing is sent, so that no gateway ever takes a controller that has just
//! started for an empty cluster. A slow gateway holds one message at most; what it gets next is the newest state.
//! Deliberately not here: TLS, which a unix socket does not need.

use std::sync::Arc;
use std::time::Duration;

use proto::limits::{MESSAGE_BYTES_MAX, SERVICES_MAX};
use proto::v1::config_server::{Config, ConfigServer};
use proto::v1::{self, Hello, WatchRequest, WatchResponse, watch_request};
use proto::{Generation, v1::FILE_DESCRIPTOR_SET};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use crate::gateways::{Connection, Gateways};
use crate::publish::Published;

/// A gateway that connects says hello within this time, or it is none.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Kubernetes allows names of 253 characters.
const GATEWAY_NAME_MAX: usize = 253;

/// What the service is made of.
#[derive(Clone, Debug)]
pub struct ConfigService {
    /// The newest state; none before the first.
    pub states: watch::Receiver<Option<Arc<Published>>>,
    /// Where connected gateways are listed.
    pub gateways: watch::Sender<Gateways>,
    /// Ends all streams.
    pub shutdown: CancellationToken,
}

/// Why the server ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Server reflection has no valid descriptors.
    #[error("server reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The transport failed.
    #[error("the configuration API failed: {0}")]
    Transport(#[from] tonic::transport::Error),
}

/// Serves until `service.shutdown`.
///
/// # Errors
/// When the transport fails.
pub async fn serve(listener: UnixListener, service: ConfigService) -> Result<(), ServeError> {
    let shutdown = service.shutdown.clone();
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<ConfigServer<ConfigService>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    let config =
        ConfigServer::new(service).max_decoding_message_size(MESSAGE_BYTES_MAX).max_encoding_message_size(MESSAGE_BYTES_MAX);
    Server::builder()
        .add_service(config)
        .add_service(health)
        .add_service(reflection)
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), shutdown.cancelled_owned())
        .await?;
    Ok(())
}

#[tonic::async_trait]
impl Config for ConfigService {
    type WatchStream = ReceiverStream<Result<WatchResponse, Status>>;

    async fn watch(&self, request: Request<Streaming<WatchRequest>>) -> Result<Response<Self::WatchStream>, Status> {
        // One message: whatever else changes while the gateway reads it is sent as one difference.
        let (messages, stream) = mpsc::channel(1);
        let service = self.clone();
        tokio::spawn(async move {
            if let Err(status) = service.converse(request.into_inner(), &messages).await {
                tracing::warn!(%status, "gateway disconnected");
                // Nobody may be left to hear it.
                let _ = messages.send(Err(status)).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

impl ConfigService {
    /// One gateway, until either side goes.
    async fn converse(
        mut self,
        mut inbound: Streaming<WatchRequest>,
        messages: &mpsc::Sender<Result<WatchResponse, Status>>,
    ) -> Result<(), Status> {
        let hello = hello(&mut inbound).await?;
        let connection = Connection::open(&self.gateways, &hello.gateway, &hello.version);
        tracing::info!(gateway = hello.gateway, version = hello.version, "gateway connected");
        let mut sent: Option<Generation> = None;
        loop {
            let has_news = self.states.borrow().as_ref().is_some_and(|newest| sent.as_ref() != Some(&newest.state.generation));
            tokio::select! {
                () = self.shutdown.cancelled() => return Err(Status::unavailable("the controller stops; dial again")),
                message = inbound.message() => match message? {
                    None => return Ok(()),
                    Some(message) => acknowledge(&connection, message, sent.as_ref())?,
                },
                permit = messages.reserve(), if has_news => {
                    let Ok(permit) = permit else { return Ok(()) };
                    let Some(newest) = self.states.borrow_and_update().clone() else { continue };
                    // What was sent lately is remembered unless the gateway slept through thousands of changes.
                    let changes = sent.as_ref().and_then(|have| newest.since(have));
                    let first_or_full = || if sent.is_none() { newest.answer(&hello) } else { proto::convert::full(&newest.state) };
                    permit.send(Ok(changes.unwrap_or_else(first_or_full)));
                    sent = Some(newest.state.generation.clone());
                }
                changed = self.states.changed(), if !has_news => {
                    changed.map_err(|_| Status::unavailable("the controller stops; dial again"))?;
                }
            }
        }
    }
}

/// The first message, checked.
async fn hello(inbound: &mut Streaming<WatchRequest>) -> Result<Hello, Status> {
    let first = tokio::time::timeout(HELLO_TIMEOUT, inbound.message()).await;
    let first = first.map_err(|_| Status::deadline_exceeded("expected hello within 10 s of connecting"))??;
    let Some(WatchRequest { message: Some(watch_request::Message::Hello(hello)) }) = first else {
        return Err(Status::invalid_argument("expected hello as the first message"));
    };
    if hello.gateway.is_empty() || hello.gateway.len() > GATEWAY_NAME_MAX {
        let found = hello.gateway.len();
        return Err(Status::invalid_argument(format!("expected a gateway name of 1 to {GATEWAY_NAME_MAX} bytes, found {found}")));
    }
    if hello.hashes.len() > SERVICES_MAX {
        let found = hello.hashes.len();
        return Err(Status::invalid_argument(format!("expected at most {SERVICES_MAX} hashes, found {found}")));
    }
    Ok(hello)
}

fn acknowledge(connection: &Connection, message: WatchRequest, sent: Option<&Generation>) -> Result<(), Status> {
    match message.message {
        // What it had before it connected proves nothing about this epoch; what it was never sent, nothing at all.
        Some(watch_request::Message::Acknowledge(v1::Generation { epoch, counter })) => {
            if sent.is_some_and(|sent| sent.epoch == epoch && counter <= sent.counter) {
                connection.acknowledge(counter);
            }
            Ok(())
        }
        Some(watch_request::Message::Hello(_)) => Err(Status::invalid_argument("hello is said once, at the start")),
        // A message of a newer version.
        None => Ok(()),
    }
}

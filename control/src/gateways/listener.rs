//! Listeners for connections of gateways, on a unix socket and on TCP with TLS, and of operators on TCP; and the identity
//! of each peer.
//!
//! Invariant: a TCP peer presents a certificate of our authority before any other byte of it is read. Handshakes are
//! bounded in number and time, and stalled handshakes cannot block new ones. Changed certificates are loaded again at
//! each handshake, and at each scrape of their expiration.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::server::danger::ClientCertVerifier;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;
use tonic::{Request, Status};

use crate::config::settings::{AdminListen, CertificateFiles};
use crate::gateways::local_connections::{LocalStream, accept};
use crate::gateways::socket::not_accepted;
use crate::gateways::tls::{self, Acceptance, CONTROLLER, Credential, Identity, Material, TlsError, Validity};

/// Timeout of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of concurrent handshakes: a whole group of gateways at 30 KB each, 2 MB.
const HANDSHAKES_MAX: usize = 64;
/// Maximum number of connections to the unix socket: gateways on this machine.
const LOCAL_MAX: usize = 64;

/// The peer of a connection.
#[derive(Clone, Debug)]
pub enum Peer {
    /// A process on this machine that the permissions of the socket admit.
    Local,
    /// A peer with a certificate, and its address.
    Named(Credential, SocketAddr),
}

impl Peer {
    /// The peer of a request's connection.
    pub(crate) fn of<T>(request: &Request<T>) -> Result<Self, Status> {
        let peer = request.extensions().get::<Self>().cloned();
        peer.ok_or_else(|| Status::internal("the connection does not identify its peer"))
    }

    /// Waits until the peer's certificate has expired and returns the message for it. Without a certificate it never
    /// returns.
    pub async fn expired(&self) -> Status {
        let Self::Named(credential, _) = self else { return std::future::pending().await };
        let error = credential.expired().await;
        Status::unauthenticated(format!("the gateway's certificate is no longer accepted: {error}; renew it and dial again"))
    }

    /// Succeeds if the peer may act as the gateway of this name.
    pub(crate) fn may_speak_for(&self, gateway: &str, group: &str) -> Result<(), Status> {
        let Self::Named(credential, _) = self else { return Ok(()) };
        let names = credential.names();
        let claimed = Identity::new(group, gateway);
        if gateway == CONTROLLER {
            return Err(Status::permission_denied(format!("no gateway may be named {CONTROLLER}; give it another `name`")));
        }
        if names.contains(&claimed) {
            return Ok(());
        }
        let found = if names.is_empty() { "no gateway of sluice".to_owned() } else { Identity::list(names) };
        let advice = "correct the gateway's `name`, or issue its certificate with that URI SAN";
        Err(Status::permission_denied(format!("the gateway's certificate is for {found}; expected {claimed}: {advice}")))
    }
}

/// The byte stream of a connection.
trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// One connection.
pub struct PeerStream {
    stream: Box<dyn Duplex>,
    peer: Peer,
}

impl PeerStream {
    fn unix(stream: LocalStream) -> Self {
        Self { stream: Box::new(stream), peer: Peer::Local }
    }

    fn tls(stream: TlsStream<TcpStream>, from: SocketAddr, verifier: Arc<dyn ClientCertVerifier>) -> Self {
        let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let peer = Peer::Named(Credential::new(chain, verifier), from);
        Self { stream: Box::new(stream), peer }
    }
}

impl Connected for PeerStream {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Source of a server's certificates.
#[derive(Clone, Debug)]
pub enum CertificateSource {
    /// Files.
    Files(CertificateFiles),
    /// The Secret of this name, with its last content.
    Secret(String, watch::Receiver<Option<Material>>),
}

/// Who shows certificates.
#[derive(Clone, Debug)]
pub enum ShownBy {
    /// A server, which keeps the last valid ones in use.
    Server(Arc<ServerTls>),
    /// A client, which reads these files for each connection.
    Client(CertificateFiles),
}

/// The certificates of a key of the configuration.
#[derive(Clone, Debug)]
pub struct KeyCertificates {
    /// The key.
    pub key: &'static str,
    /// Who shows them.
    pub shown_by: ShownBy,
}

impl KeyCertificates {
    /// Those of the admin API.
    #[must_use]
    pub const fn of_admin(tls: Arc<ServerTls>) -> Self {
        Self { key: "admin.tls", shown_by: ShownBy::Server(tls) }
    }

    /// From when until when those that the next connection uses are valid; `None` if they cannot be read. Files are read,
    /// which takes microseconds.
    #[must_use]
    pub fn validity(&self) -> Option<Validity> {
        match &self.shown_by {
            ShownBy::Server(tls) => tls.validity(),
            ShownBy::Client(files) => of_files(files),
        }
    }
}

/// The validity of files, whether or not they are usable.
fn of_files(files: &CertificateFiles) -> Option<Validity> {
    Validity::of_texts(&fs::read(&files.ca).ok()?, &fs::read(&files.cert).ok()?)
}

/// Who connects.
#[derive(Clone, Debug)]
enum Clients {
    /// Gateways of this group.
    Gateways(String),
    /// Operators.
    Operators,
}

/// A server's certificates, and the TLS settings from the last valid ones.
#[derive(Debug)]
pub struct ServerTls {
    source: CertificateSource,
    clients: Clients,
    last_valid: Mutex<Option<(Material, Acceptance)>>,
    logged_error: Mutex<String>,
    /// Serializes reads; connections that arrive faster than files are read wait here and can be cancelled.
    turn: tokio::sync::Mutex<()>,
}

impl ServerTls {
    /// For a controller of `group`.
    #[must_use]
    pub fn new(source: CertificateSource, group: &str) -> Self {
        Self::of(source, Clients::Gateways(group.to_owned()))
    }

    /// For an admin API, if it listens on TCP.
    #[must_use]
    pub fn of_admin(listen: &AdminListen) -> Option<Arc<Self>> {
        let (_, files) = listen.tcp.as_ref()?;
        Some(Arc::new(Self::of(CertificateSource::Files(files.clone()), Clients::Operators)))
    }

    fn of(source: CertificateSource, clients: Clients) -> Self {
        let (last_valid, logged_error, turn) = (Mutex::default(), Mutex::default(), tokio::sync::Mutex::default());
        Self { source, clients, last_valid, logged_error, turn }
    }

    /// Where they are.
    #[must_use]
    pub const fn source(&self) -> &CertificateSource {
        &self.source
    }

    /// Reads them and creates the TLS settings for incoming connections.
    ///
    /// # Errors
    /// If they are unusable.
    pub async fn read(&self) -> Result<Acceptance, TlsError> {
        let material = match &self.source {
            CertificateSource::Files(files) if matches!(self.clients, Clients::Operators) => {
                Material::read_guarded(files).await?
            }
            CertificateSource::Files(files) => Material::read(files).await?,
            CertificateSource::Secret(name, read) => secret(name, read)?,
        };
        self.accept_with(material)
    }

    /// The TLS settings from a material, which is the last valid one from now on.
    fn accept_with(&self, material: Material) -> Result<Acceptance, TlsError> {
        let mut last_valid = self.last_valid.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, acceptance)) = last_valid.as_ref().filter(|(kept, _)| *kept == material) {
            return Ok(acceptance.clone());
        }
        let acceptance = match &self.clients {
            Clients::Gateways(group) => tls::acceptance(&material, group)?,
            Clients::Operators => tls::operator_acceptance(&material)?,
        };
        tracing::info!(from = material.from, "certificates loaded");
        *last_valid = Some((material, acceptance.clone()));
        Ok(acceptance)
    }

    /// From when until when those that the next connection uses are valid: the newest ones if they are usable, else the last
    /// valid ones, and before there are any, those that are there.
    fn validity(&self) -> Option<Validity> {
        let newest = match &self.source {
            CertificateSource::Files(files) if matches!(self.clients, Clients::Operators) => Material::read_guarded_now(files),
            CertificateSource::Files(files) => Material::read_now(files),
            CertificateSource::Secret(name, read) => secret(name, read),
        };
        // `newest` logs why they are unusable.
        let _ = newest.and_then(|material| self.accept_with(material));
        let last_valid = self.last_valid.lock().unwrap_or_else(PoisonError::into_inner);
        match (last_valid.as_ref(), &self.source) {
            (Some((material, _)), _) => Validity::of(material),
            (None, CertificateSource::Files(files)) => of_files(files),
            (None, CertificateSource::Secret(_, read)) => Validity::of(read.borrow().as_ref()?),
        }
    }

    /// The newest valid ones. The reason why newer ones are invalid is logged once.
    pub(crate) async fn newest(&self) -> Option<Acceptance> {
        let _turn = self.turn.lock().await;
        let error = match self.read().await {
            Ok(acceptance) => {
                self.logged_error.lock().unwrap_or_else(PoisonError::into_inner).clear();
                return Some(acceptance);
            }
            Err(error) => error.to_string(),
        };
        let mut logged_error = self.logged_error.lock().unwrap_or_else(PoisonError::into_inner);
        if *logged_error != error {
            tracing::error!(error, "the certificates are unusable; the last valid ones stay in use, if there are any");
            *logged_error = error;
        }
        self.last_valid.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|(_, acceptance)| acceptance.clone())
    }
}

/// The content of a Secret.
fn secret(name: &str, read: &watch::Receiver<Option<Material>>) -> Result<Material, TlsError> {
    read.borrow().clone().ok_or_else(|| TlsError::NotYet(name.to_owned()))
}

/// A listening socket.
#[derive(Debug, Default)]
pub struct Listeners {
    /// A unix socket.
    pub unix: Option<UnixListener>,
    /// TCP, with certificates.
    pub tcp: Option<(TcpListener, Arc<ServerTls>)>,
}

impl From<UnixListener> for Listeners {
    fn from(listener: UnixListener) -> Self {
        Self { unix: Some(listener), tcp: None }
    }
}

impl Listeners {
    /// The certificates for gateways, if any listen on TCP.
    #[must_use]
    pub fn certificates(&self) -> Vec<KeyCertificates> {
        self.tcp.iter().map(|(_, tls)| KeyCertificates { key: "tls", shown_by: ShownBy::Server(Arc::clone(tls)) }).collect()
    }

    /// Accepts connections until the receiver is dropped.
    #[must_use]
    pub fn incoming(self) -> ReceiverStream<io::Result<PeerStream>> {
        let (streams, incoming) = mpsc::channel(1);
        if let Some(listener) = self.unix {
            tokio::spawn(accept(listener, LOCAL_MAX, |stream| Ok(PeerStream::unix(stream)), streams.clone()));
        }
        if let Some((listener, tls)) = self.tcp {
            tokio::spawn(accept_tcp(listener, tls, streams));
        }
        ReceiverStream::new(incoming)
    }
}

type PeerStreams = mpsc::Sender<io::Result<PeerStream>>;

async fn accept_tcp(listener: TcpListener, tls: Arc<ServerTls>, streams: PeerStreams) {
    let mut handshakes = NewestTasks::new(HANDSHAKES_MAX);
    loop {
        let accepted = tokio::select! {
            () = streams.closed() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, from)) => {
                let (tls, streams) = (Arc::clone(&tls), streams.clone());
                handshakes.spawn(async move {
                    if let Some(stream) = perform_handshake(stream, from, &tls).await {
                        let _ = streams.send(Ok(stream)).await;
                    }
                });
            }
            Err(error) => not_accepted(&error).await,
        }
    }
}

async fn perform_handshake(stream: TcpStream, from: SocketAddr, tls: &ServerTls) -> Option<PeerStream> {
    let Acceptance { config, clients } = tls.newest().await?;
    let _ = stream.set_nodelay(true);
    match timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(config).accept(stream)).await {
        Ok(Ok(stream)) => return Some(PeerStream::tls(stream, from, clients)),
        Ok(Err(error)) => tracing::warn!(%from, error = chain(&error), "a connection over TCP was refused"),
        Err(_) => tracing::warn!(%from, "a connection over TCP did not complete its handshake within 10 s"),
    }
    None
}

/// A bounded set of tasks for unauthenticated peers. A new task replaces the oldest: a healthy handshake ends within
/// milliseconds, so the oldest of many is a stalled one.
#[derive(Debug)]
pub(crate) struct NewestTasks {
    max: usize,
    running: VecDeque<AbortHandle>,
}

impl NewestTasks {
    pub(crate) const fn new(max: usize) -> Self {
        Self { max, running: VecDeque::new() }
    }

    pub(crate) fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.running.retain(|task| !task.is_finished());
        if self.running.len() >= self.max
            && let Some(oldest) = self.running.pop_front()
        {
            oldest.abort();
        }
        self.running.push_back(tokio::spawn(task).abort_handle());
    }
}

/// An error with its causes: tonic's own text is "transport error". Some of them repeat their cause.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source()).map(ToString::to_string);
    let join = |text: String, cause: String| if text.ends_with(&cause) { text } else { format!("{text}: {cause}") };
    causes.fold(error.to_string(), join)
}

#[cfg(test)]
mod tests;

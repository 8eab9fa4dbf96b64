//! The client of one API server, from a kubeconfig or from the service account of the pod.
//!
//! Invariant: no request hangs. Socket options detect a dead link ([`TCP_USER_TIMEOUT`]), and [`READ_TIMEOUT`] detects
//! a server that accepts requests and does not answer: the server ends watches well before that time, so silence is
//! always an error. The client does not retry; callers decide when to retry, and errors carry the delay that the server
//! asks for. Credentials that the server refuses are read again (`credentials`).

mod credentials;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::api::{PatchParams, PostParams};
use kube::client::{Body, ConfigExt};
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::Status;
use kube::core::response::StatusDetails;
use kube::{Client, Config};
use proto::limits::FIELD_MANAGER;
use thiserror::Error;
use tower::ServiceBuilder;

use super::activity::ApiActivity;
use credentials::RenewedClient;

/// Duration of a watch, after which the server sends a bookmark and ends it, and the client resumes it. It is short so
/// that a dead connection is noticed within 20 s (CONTROL section 8); two resumed watches in 12 s are no load for a
/// server.
pub(super) const WATCH_SECONDS: u32 = 12;
/// Duration of watches of kinds that rarely change. Socket options detect a dead link there too; the short watches
/// detect a silent server and restart the long ones (`watch`).
pub(super) const LONG_WATCH_SECONDS: u32 = 120;
/// Read timeout of a connection: longer than a watch, shorter than 20 s.
const READ_TIMEOUT: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 5);
/// Read timeout of long watches.
const LONG_READ_TIMEOUT: Duration = Duration::from_secs(LONG_WATCH_SECONDS as u64 + 5);
/// Idle time after which the first TCP keep-alive probe is sent; further ones follow every [`KEEPALIVE_INTERVAL`].
const KEEPALIVE_IDLE: Duration = Duration::from_secs(4);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(3);
/// `TCP_USER_TIMEOUT`: the longest time that data or a probe may stay unacknowledged. 4 s and two more probes make 10 s
/// for an idle connection, and at most 13 s if a request was sent meanwhile. kube's own sockets need about 295 s.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(9);
/// Connect timeout.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// An API server and the clients for it.
#[derive(Clone)]
pub struct Cluster {
    /// The client.
    pub client: Client,
    /// Client for long watches of kinds that rarely change.
    pub(super) patient: Client,
    /// What is done by these clients.
    pub activity: Arc<ApiActivity>,
    /// URL of the API server, for messages.
    pub server: String,
    /// Our own namespace, with the Lease and our ConfigMaps: that of the pod, or of the kubeconfig's context.
    pub namespace: String,
}

/// Why a client cannot be created.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The kubeconfig cannot be read or used.
    #[error(
        "kubeconfig {}: expected a readable kubeconfig with a current context, found: {}; try `kubectl --kubeconfig {} version`, \
         then correct the file or `kubernetes.kubeconfig`",
        file.display(), first_line(cause), file.display()
    )]
    Kubeconfig {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        cause: Box<KubeconfigError>,
    },
    /// No kubeconfig was given, and this process does not run in a pod.
    #[error("no kubeconfig is configured and this is no pod with a service account ({0}); name one by `kubernetes.kubeconfig`")]
    NoPod(#[from] InClusterError),
    /// The configuration is complete but unusable (certificates, keys, proxies).
    #[error("no client for the API server {server} ({from}): {cause}; correct its certificates, keys or proxy")]
    Unusable {
        /// The server.
        server: String,
        /// Where the configuration came from.
        from: String,
        /// What is wrong.
        cause: Box<kube::Error>,
    },
}

/// The name of this machine or pod, which Events have as reporting instance.
#[must_use]
pub fn instance() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    if name.trim().is_empty() { "unknown".to_owned() } else { name.trim().to_owned() }
}

/// Creates a client from a kubeconfig, or without one from the service account of the pod. It sends nothing, so an
/// unreachable API server is no error here.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Cluster, ConnectError> {
    let config = config_of(kubeconfig).await?;
    let (server, namespace) = (config.cluster_url.to_string(), config.default_namespace.clone());
    let client = async |read_timeout| {
        let client = client_of_source(Some(config.clone()), kubeconfig, read_timeout).await?;
        let kubeconfig = kubeconfig.map(Path::to_owned);
        let make = move || {
            let kubeconfig = kubeconfig.clone();
            let client = async move { Ok(client_of_source(None, kubeconfig.as_deref(), read_timeout).await?) };
            client.boxed()
        };
        let renewed = RenewedClient::new(client, Box::new(make));
        Ok::<_, ConnectError>(with_retry_after(renewed, namespace.clone()))
    };
    let (client, patient) = (client(READ_TIMEOUT).await?, client(LONG_READ_TIMEOUT).await?);
    Ok(Cluster { client, patient, activity: Arc::default(), server, namespace })
}

/// A client of a configuration, which is read unless given. A plugin that it names runs meanwhile.
async fn client_of_source(
    config: Option<Config>,
    kubeconfig: Option<&Path>,
    read_timeout: Duration,
) -> Result<Client, ConnectError> {
    let mut config = match config {
        Some(config) => config,
        None => config_of(kubeconfig).await?,
    };
    config.read_timeout = Some(read_timeout);
    let server = config.cluster_url.to_string();
    let from = kubeconfig.map_or_else(|| "service account of the pod".to_owned(), |file| file.display().to_string());
    let unusable = |cause: kube::Error| ConnectError::Unusable { server, from, cause: Box::new(cause) };
    match tokio::task::spawn_blocking(move || client_of(config)).await {
        Ok(client) => client.map_err(unusable),
        Err(error) => Err(unusable(kube::Error::Service(error.into()))),
    }
}

/// The configuration of a client, except for its read timeout.
async fn config_of(kubeconfig: Option<&Path>) -> Result<Config, ConnectError> {
    let mut config = match kubeconfig {
        Some(file) => read(file).await?,
        None => Config::incluster()?,
    };
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.reset_reader_on_write = true;
    config.default_retry = false;
    Ok(config)
}

/// The same client as kube creates, except for the options of its sockets.
fn client_of(config: Config) -> Result<Client, kube::Error> {
    if config.proxy_url.is_some() {
        // kube returns its own error, because this program is built without proxy support.
        return Client::try_from(config);
    }
    let mut sockets = HttpConnector::new();
    sockets.enforce_http(false);
    sockets.set_nodelay(true);
    sockets.set_keepalive(Some(KEEPALIVE_IDLE));
    sockets.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    sockets.set_tcp_user_timeout(Some(TCP_USER_TIMEOUT));
    let mut connector = TimeoutConnector::new(config.rustls_https_connector_with_connector(sockets)?);
    connector.set_connect_timeout(config.connect_timeout);
    connector.set_read_timeout(config.read_timeout);
    connector.set_reset_reader_on_write(config.reset_reader_on_write);
    let client = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build::<_, Body>(connector);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(tower::BoxError::from)
        .service(client);
    Ok(Client::new(service, config.default_namespace))
}

async fn read(file: &Path) -> Result<Config, ConnectError> {
    let broken = |cause| ConnectError::Kubeconfig { file: file.to_owned(), cause: Box::new(cause) };
    let kubeconfig = Kubeconfig::read_from(file).map_err(broken)?;
    Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.map_err(broken)
}

/// The first line of the message; the following lines only mark the position in the file.
fn first_line(cause: &KubeconfigError) -> String {
    cause.to_string().lines().next().unwrap_or_default().to_owned()
}

/// The API server requests a delay in the `Retry-After` header of an answer whose body is no Status, but kube keeps
/// only the body. Therefore this replaces the body by a Status with the delay.
fn with_retry_after(client: RenewedClient, namespace: String) -> Client {
    let service = tower::service_fn(move |request| {
        let client = client.clone();
        async move {
            let mut response = client.send(request).await?;
            if let Some(status) = status_of_retry_after(response.status().as_u16(), response.headers()) {
                *response.body_mut() = Body::from(serde_json::to_vec(&status).map_err(kube::Error::SerdeError)?);
            }
            Ok::<_, kube::Error>(response)
        }
    });
    Client::new(service, namespace)
}

fn status_of_retry_after(code: u16, headers: &http::HeaderMap) -> Option<Status> {
    let text = |name| headers.get(name).and_then(|value: &http::HeaderValue| value.to_str().ok());
    let is_json = text("content-type").is_some_and(|kind| kind.starts_with("application/json"));
    if code < 400 || is_json {
        return None;
    }
    let seconds = text("retry-after")?.parse().ok()?;
    let details = StatusDetails { retry_after_seconds: seconds, ..status_details() };
    Some(Status { details: Some(details), ..Status::failure("asked to retry later", "TooManyRequests").with_code(code) })
}

fn status_details() -> StatusDetails {
    StatusDetails {
        name: String::new(),
        group: String::new(),
        kind: String::new(),
        uid: String::new(),
        causes: Vec::new(),
        retry_after_seconds: 0,
    }
}

/// Parameters of create and replace requests, with our field manager.
pub(crate) fn post_params() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

/// The same as [`post_params`], for patches.
pub(crate) fn patch_params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_error_for_a_missing_kubeconfig_says_what_to_do() {
        let error = connect(Some(Path::new("/nonexistent/kubeconfig"))).await.err().unwrap().to_string();
        assert!(error.contains("/nonexistent/kubeconfig"), "{error}");
        assert!(error.contains("kubernetes.kubeconfig"), "{error}");
    }

    #[tokio::test]
    async fn a_broken_kubeconfig_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "clusters: [").unwrap();
        let error = connect(Some(file.path())).await.err().unwrap().to_string();
        assert!(error.contains(&file.path().display().to_string()) && error.contains("line 1"), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }

    #[tokio::test]
    async fn a_kubeconfig_without_a_context_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "apiVersion: v1\nkind: Config\nclusters: []\n").unwrap();
        let error = connect(Some(file.path())).await.err().unwrap().to_string();
        assert!(error.contains("context"), "{error}");
    }

    #[test]
    fn the_delay_requested_by_a_plain_text_answer_is_kept() {
        let mut headers = http::HeaderMap::new();
        headers.insert("content-type", http::HeaderValue::from_static("text/plain; charset=utf-8"));
        headers.insert("retry-after", http::HeaderValue::from_static("7"));
        let status = status_of_retry_after(429, &headers).unwrap();
        assert_eq!((status.code, status.details.unwrap().retry_after_seconds), (429, 7));
        assert!(status_of_retry_after(200, &headers).is_none());
        headers.insert("content-type", http::HeaderValue::from_static("application/json"));
        assert!(status_of_retry_after(504, &headers).is_none(), "a Status contains the delay itself");
    }
}

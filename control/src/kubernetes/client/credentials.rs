//! Credentials that are read again once the API server has refused them: a kubeconfig whose token or certificate was
//! replaced, the file that `tokenFile` names, a plugin (`exec`), and the service account of the pod.
//!
//! Invariant: a request is sent once. An answer 401 has the client made again from its source, at most every
//! [`REREAD_PERIOD`], and reaches the caller, who repeats the request with the new client. While the source cannot be
//! read, the last client stays in use.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use http::{Request, Response, StatusCode};
use kube::client::Body;
use kube::{Client, Config};
use tokio::sync::Mutex;

use super::{ConnectError, client_of, config_of};

/// Minimum time between two reads. A plugin is a process that may ask a server far away.
const REREAD_PERIOD: Duration = Duration::from_secs(2);

/// A client of one source, with the newest credentials.
#[derive(Clone)]
pub(super) struct RenewedClient(Arc<Shared>);

struct Shared {
    /// The kubeconfig; `None`: the service account of the pod.
    kubeconfig: Option<PathBuf>,
    read_timeout: Duration,
    /// The client, and how often it was made.
    newest: RwLock<(Client, u64)>,
    /// Held while the source is read.
    last_read: Mutex<LastRead>,
}

struct LastRead {
    at: Option<Instant>,
    /// The error of the last read, which is logged once.
    failure: Option<String>,
}

impl RenewedClient {
    /// `client` was made from the source just now.
    pub(super) fn new(client: Client, kubeconfig: Option<PathBuf>, read_timeout: Duration) -> Self {
        let (newest, last_read) = (RwLock::new((client, 0)), Mutex::new(LastRead { at: None, failure: None }));
        Self(Arc::new(Shared { kubeconfig, read_timeout, newest, last_read }))
    }

    /// Sends a request with the newest credentials.
    pub(super) async fn send(&self, request: Request<Body>) -> Result<Response<Body>, kube::Error> {
        let (client, number) = self.newest();
        let response = client.send(request).await?;
        if response.status() == StatusCode::UNAUTHORIZED {
            self.renew(number).await;
        }
        Ok(response)
    }

    fn newest(&self) -> (Client, u64) {
        self.0.newest.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes the client again, unless that was done since the client with this number was used.
    async fn renew(&self, used: u64) {
        let mut last = self.0.last_read.lock().await;
        let is_early = last.at.is_some_and(|at| at.elapsed() < REREAD_PERIOD);
        if is_early || self.newest().1 != used {
            return;
        }
        last.at = Some(Instant::now());
        match self.read().await {
            Ok(client) => {
                *self.0.newest.write().unwrap_or_else(PoisonError::into_inner) = (client, used + 1);
                last.failure = None;
                tracing::debug!(source = self.source(), "the API server refused our credentials; read again");
            }
            Err(error) => {
                let failure = Some(error.to_string());
                if last.failure != failure {
                    tracing::warn!(%error, "the API server refused our credentials, and they cannot be read again");
                    last.failure = failure;
                }
            }
        }
    }

    async fn read(&self) -> Result<Client, ConnectError> {
        let mut config = config_of(self.0.kubeconfig.as_deref()).await?;
        config.read_timeout = Some(self.0.read_timeout);
        made(config, self.source()).await
    }

    fn source(&self) -> String {
        source(self.0.kubeconfig.as_deref())
    }
}

/// Where credentials come from, for messages.
pub(super) fn source(kubeconfig: Option<&std::path::Path>) -> String {
    kubeconfig.map_or_else(|| "service account of the pod".to_owned(), |file| file.display().to_string())
}

/// The client of a configuration. A plugin runs meanwhile.
pub(super) async fn made(config: Config, from: String) -> Result<Client, ConnectError> {
    let server = config.cluster_url.to_string();
    let unusable = |cause: kube::Error| ConnectError::Unusable { server, from, cause: Box::new(cause) };
    match tokio::task::spawn_blocking(move || client_of(config)).await {
        Ok(client) => client.map_err(unusable),
        Err(error) => Err(unusable(kube::Error::Service(error.into()))),
    }
}

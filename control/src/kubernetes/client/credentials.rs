//! Credentials that are read again once the API server has refused them: a kubeconfig whose token or certificate was
//! replaced, the file that `tokenFile` names, a plugin (`exec`), and the service account of the pod.
//!
//! Invariant: a request is sent once. An answer 401 has the client made again from its source, at most every
//! [`REREAD_PERIOD`], and reaches the caller, who repeats the request with the new client. While the source cannot be
//! read, the last client stays in use. Deliberately not here: how a client is made (`client`).

use std::error::Error;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use http::{Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use tokio::sync::Mutex;

/// Minimum time between two reads. A plugin is a process that may ask a server far away.
const REREAD_PERIOD: Duration = Duration::from_secs(2);

/// Makes a client from the source as it is now.
type MakeClient = dyn Fn() -> BoxFuture<'static, Result<Client, Box<dyn Error + Send + Sync>>> + Send + Sync;

/// A client of one source, with the newest credentials.
#[derive(Clone)]
pub(super) struct RenewedClient(Arc<ClientOfSource>);

struct ClientOfSource {
    make: Box<MakeClient>,
    /// The client, and how often it was made.
    newest: RwLock<(Client, u64)>,
    /// Held while the source is read.
    last_read: Mutex<LastRead>,
}

#[derive(Default)]
struct LastRead {
    at: Option<Instant>,
    /// The error of the last read, which is logged once.
    failure: Option<String>,
}

impl RenewedClient {
    /// `client` was just made, as `make` makes the next ones.
    pub(super) fn new(client: Client, make: Box<MakeClient>) -> Self {
        Self(Arc::new(ClientOfSource { make, newest: RwLock::new((client, 0)), last_read: Mutex::default() }))
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
        match (self.0.make)().await {
            Ok(client) => {
                *self.0.newest.write().unwrap_or_else(PoisonError::into_inner) = (client, used + 1);
                last.failure = None;
                tracing::debug!("the API server refused our credentials; read again");
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
}

//! Credentials that are read again once the API server has refused them: a kubeconfig whose token or certificate was
//! replaced, the file that `tokenFile` names, a plugin (`exec`), and the service account of the pod.
//!
//! Invariant: a request is sent once, and none waits for the source, because a plugin may hang. An answer 401 reaches the
//! caller, who repeats the request, and has the client made again by a task, at most every [`REREAD_PERIOD`] and one at a
//! time. While the source cannot be read, the last client stays in use. Deliberately not here: how a client is made
//! (`client`).

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use http::{Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use tokio::sync::Semaphore;

/// Minimum time between two reads. A plugin is a process that may ask a server far away.
const REREAD_PERIOD: Duration = Duration::from_secs(2);
/// Time after which a read that has not ended counts as failed, so that the next one may begin.
const READ_MAX: Duration = Duration::from_secs(30);
/// Maximum number of reads that have not ended. Nobody can end the thread that waits for a plugin, so that plugins that hang
/// for ever must not use up the threads of this process.
const HANGING_MAX: usize = 4;

/// Makes a client from the source as it is now.
type MakeClient = dyn Fn() -> BoxFuture<'static, Result<Client, Box<dyn Error + Send + Sync>>> + Send + Sync;

/// A client of one source, with the newest credentials.
#[derive(Clone)]
pub(super) struct RenewedClient(Arc<ClientOfSource>);

struct ClientOfSource {
    make: Box<MakeClient>,
    /// The client, and how often it was made.
    newest: RwLock<(Client, u64)>,
    last_read: Mutex<LastRead>,
    /// A permit for each read that has not ended.
    hanging: Arc<Semaphore>,
}

#[derive(Default)]
struct LastRead {
    at: Option<Instant>,
    /// Whether a read has begun that neither ended nor took longer than [`READ_MAX`].
    is_reading: bool,
    /// The error of the last read, which is logged once.
    failure: Option<String>,
}

impl RenewedClient {
    /// `client` was just made, as `make` makes the next ones.
    pub(super) fn new(client: Client, make: Box<MakeClient>) -> Self {
        let (newest, last_read) = (RwLock::new((client, 0)), Mutex::default());
        Self(Arc::new(ClientOfSource { make, newest, last_read, hanging: Arc::new(Semaphore::new(HANGING_MAX)) }))
    }

    /// Sends a request with the newest credentials.
    pub(super) async fn send(&self, request: Request<Body>) -> Result<Response<Body>, kube::Error> {
        let (client, number) = self.newest();
        let response = client.send(request).await?;
        if response.status() == StatusCode::UNAUTHORIZED {
            self.begin_renewal(number);
        }
        Ok(response)
    }

    fn newest(&self) -> (Client, u64) {
        self.0.newest.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Has the client made again, unless that was done since the client with this number was used, or is being done.
    fn begin_renewal(&self, used: u64) {
        let mut last = self.0.last_read.lock().unwrap_or_else(PoisonError::into_inner);
        let is_early = last.at.is_some_and(|at| at.elapsed() < REREAD_PERIOD);
        if is_early || last.is_reading || self.newest().1 != used {
            return;
        }
        last.at = Some(Instant::now());
        let Ok(permit) = Arc::clone(&self.0.hanging).try_acquire_owned() else { return };
        last.is_reading = true;
        let made = (self.0.make)();
        let reading = tokio::spawn(async move {
            let made = made.await;
            drop(permit);
            made
        });
        let this = self.clone();
        tokio::spawn(async move {
            let made = match tokio::time::timeout(READ_MAX, reading).await {
                Ok(Ok(made)) => made,
                Ok(Err(error)) => Err(error.into()),
                Err(_) => Err(format!("nothing was read within {} s; does the plugin (`exec`) hang?", READ_MAX.as_secs()).into()),
            };
            this.end_renewal(made, used);
        });
    }

    fn end_renewal(&self, made: Result<Client, Box<dyn Error + Send + Sync>>, used: u64) {
        let mut last = self.0.last_read.lock().unwrap_or_else(PoisonError::into_inner);
        last.is_reading = false;
        match made {
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::FutureExt as _;

    use super::*;

    /// A client that gets these answers.
    fn answered(code: u16) -> Client {
        let server = tower::service_fn(move |_: Request<Body>| async move {
            Ok::<_, std::convert::Infallible>(Response::builder().status(code).body(Body::empty()).unwrap())
        });
        Client::new(server, "a")
    }

    async fn code(client: &RenewedClient) -> u16 {
        let request = Request::builder().uri("/api").body(Body::empty()).unwrap();
        tokio::time::timeout(Duration::from_secs(60), client.send(request)).await.unwrap().unwrap().status().as_u16()
    }

    /// Lets the next read begin although the last one just did.
    fn later(client: &RenewedClient) {
        client.0.last_read.lock().unwrap().at = None;
    }

    #[tokio::test]
    async fn no_request_waits_for_a_plugin_that_hangs_and_one_is_read_at_a_time() {
        let (begun, release) = (Arc::new(AtomicUsize::new(0)), Arc::new(tokio::sync::Notify::new()));
        let (count, released) = (Arc::clone(&begun), Arc::clone(&release));
        let make = move || {
            count.fetch_add(1, Ordering::Relaxed);
            let released = Arc::clone(&released);
            async move {
                released.notified().await;
                Ok(answered(200))
            }
            .boxed()
        };
        let client = RenewedClient::new(answered(401), Box::new(make));
        for _ in 0..3 {
            assert_eq!(code(&client).await, 401);
            later(&client);
        }
        assert_eq!(begun.load(Ordering::Relaxed), 1);
        release.notify_one();
        while client.newest().1 == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(code(&client).await, 200);
    }

    #[tokio::test(start_paused = true)]
    async fn a_read_that_hangs_gives_way_to_the_next_one_and_few_of_them_are_left() {
        let begun = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&begun);
        let make = move || {
            count.fetch_add(1, Ordering::Relaxed);
            std::future::pending().boxed()
        };
        let client = RenewedClient::new(answered(401), Box::new(make));
        for _ in 0..2 * HANGING_MAX {
            assert_eq!(code(&client).await, 401);
            tokio::time::sleep(READ_MAX + Duration::from_secs(1)).await;
            later(&client);
        }
        assert_eq!(begun.load(Ordering::Relaxed), HANGING_MAX);
        assert!(client.0.last_read.lock().unwrap().failure.as_ref().is_some_and(|why| why.contains("hang")));
    }
}

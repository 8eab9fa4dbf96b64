//! `/livez` and `/readyz` over plain HTTP (key `health.listen`), as the probes of a Deployment ask for them, and
//! `/metrics` (key `metrics.listen`), beside further pages of a gateway.
//!
//! Invariant: `/livez` takes no lock that the planner holds while it works, so that it reports a hung planner instead
//! of waiting for it. Answers to probes are public: they contain no names and no foreign text, which are in the log.
//! Deliberately not here: what the metrics are (`metrics`), and not here: the gRPC health service, which is beside the configuration API (`gateways::server`).

pub mod systemd;

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::gateways::listener::{NewestTasks, ServerTls};
use crate::gateways::publish::Published;
use crate::gateways::socket::not_accepted;
use crate::kubernetes::lease::Leadership;
use crate::store::override_editor::{OverrideEditor, OverridesState};

/// Heartbeat interval of a working planner.
pub(crate) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// Time without a heartbeat after which a planner counts as hung: a plan of 10,000 Services takes less than a second.
pub const STALLED_AFTER: Duration = Duration::from_secs(30);
/// Timeout of a connection, which serves one request: as long as Prometheus waits by default.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of connections: a kubelet or a Prometheus has two. A new one replaces the oldest.
const CONNECTIONS_MAX: usize = 16;

/// Time of the last heartbeat; `None` while there is no planner.
#[derive(Clone, Debug, Default)]
pub struct Heartbeat(Arc<Mutex<Option<Instant>>>);

/// A running planner, until this is dropped.
#[derive(Debug)]
pub(crate) struct RunningPlanner(Heartbeat);

impl Heartbeat {
    fn set(&self, at: Option<Instant>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = at;
    }

    /// Registers a planner.
    pub(crate) fn start(&self) -> RunningPlanner {
        self.set(Some(Instant::now()));
        RunningPlanner(self.clone())
    }

    /// Time since the last heartbeat.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Option<Duration> {
        let last = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.map(|last| now.saturating_duration_since(last))
    }
}

impl RunningPlanner {
    /// Records a heartbeat.
    pub(crate) fn beat(&self) {
        self.0.set(Some(Instant::now()));
    }
}

impl Drop for RunningPlanner {
    fn drop(&mut self) {
        self.0.set(None);
    }
}

/// The answer to a request for a host that is not of this machine.
pub const MISDIRECTED: &str = "expected an IP address, `localhost`, or the name of the gateway or of its machine as the host of \
                               the URL: another name may lead here on behalf of another site";

/// Why a probe fails: a sentence for its answer.
pub type Unwell = &'static str;

/// What is served over HTTP.
pub trait Pages: Clone + Send + Sync + 'static {
    /// Liveness: succeeds unless a restart may help.
    ///
    /// # Errors
    /// Why a restart may help.
    fn live(&self) -> Result<(), Unwell>;

    /// Readiness: succeeds if the program does its work.
    ///
    /// # Errors
    /// What is missing.
    fn ready(&self) -> impl Future<Output = Result<(), Unwell>> + Send;

    /// The metrics in a format that the header `Accept` allows, and its `Content-Type`; `None` where none are served.
    /// May block.
    fn metrics(&self, accept: Option<&str>) -> Option<(&'static str, Result<String, fmt::Error>)>;

    /// Whether `/metrics` is answered to a request with these headers.
    fn is_addressed(&self, _headers: &HeaderMap) -> bool {
        true
    }

    /// The answer to a GET or HEAD request of any other path; `None` if there is no such page. May block.
    fn page(&self, _request: &Parts) -> Option<Response<Full<Bytes>>> {
        None
    }
}

/// State of a controller that probes examine.
#[derive(Clone, Debug)]
pub struct Probes {
    /// Whether the planner works.
    pub planner: Heartbeat,
    /// Time without a heartbeat after which the planner counts as hung.
    pub stalled_after: Duration,
    /// The leader.
    pub leadership: watch::Receiver<Leadership>,
    /// The published state, once there is one.
    pub states: watch::Receiver<Option<Arc<Published>>>,
    /// Manual overrides; nothing is planned before they are known.
    pub editor: OverrideEditor,
    /// Certificates for TCP, if it is configured.
    pub tls: Option<Arc<ServerTls>>,
}

impl Pages for Probes {
    fn live(&self) -> Result<(), Unwell> {
        let silence = self.planner.silence(Instant::now());
        if silence.is_some_and(|silence| silence > self.stalled_after) { Err("the planner hangs") } else { Ok(()) }
    }

    /// Readiness: succeeds if gateways that dial get the state, or the address of the leader.
    async fn ready(&self) -> Result<(), Unwell> {
        self.live()?;
        if let Some(tls) = &self.tls
            && tls.newest().await.is_none()
        {
            return Err("there is no usable certificate; the log says why");
        }
        match (&*self.leadership.borrow(), self.editor.state()) {
            (Leadership::Following(Some(_)), _) => Ok(()),
            (Leadership::Following(None), _) => Err("the leader is not known; the log says why"),
            (Leadership::Leading { .. }, OverridesState::Unreadable(_)) => {
                Err("drains and weights set by hand cannot be read, so nothing is planned; the log says why")
            }
            (Leadership::Leading { .. }, _) if self.states.borrow().is_some() => Ok(()),
            (Leadership::Leading { .. }, _) => Err("the first plan is not made yet"),
        }
    }

    fn metrics(&self, _: Option<&str>) -> Option<(&'static str, Result<String, fmt::Error>)> {
        None
    }
}

/// Answers until `stop`.
pub async fn serve(listener: TcpListener, pages: impl Pages, stop: CancellationToken) {
    let mut connections = NewestTasks::new(CONNECTIONS_MAX);
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => connections.spawn(converse(stream, pages.clone())),
            Err(error) => not_accepted(&error).await,
        }
    }
}

async fn converse(stream: TcpStream, pages: impl Pages) {
    let service = service_fn(|request| respond(request, &pages));
    let connection = http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(stream), service);
    // A client that sends no request, or disconnects, gets no answer.
    let _ = timeout(CONNECTION_TIMEOUT, connection).await;
}

async fn respond(request: Request<Incoming>, pages: &impl Pages) -> Result<Response<Full<Bytes>>, Infallible> {
    let path = request.uri().path();
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return Ok(answer(StatusCode::METHOD_NOT_ALLOWED, "expected GET or HEAD"));
    }
    let result = match path {
        "/livez" => pages.live(),
        "/readyz" => pages.ready().await,
        "/metrics" if !pages.is_addressed(request.headers()) => return Ok(answer(StatusCode::MISDIRECTED_REQUEST, MISDIRECTED)),
        "/metrics" => return Ok(metrics(&request, pages).await),
        _ => return Ok(other_page(request, pages).await),
    };
    Ok(match result {
        Ok(()) => answer(StatusCode::OK, "ok"),
        Err(why) => answer(StatusCode::SERVICE_UNAVAILABLE, why),
    })
}

/// Metrics of many backends take milliseconds, so they are written on a thread that may block.
async fn metrics(request: &Request<Incoming>, pages: &impl Pages) -> Response<Full<Bytes>> {
    let accept = request.headers().get(header::ACCEPT).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let pages = pages.clone();
    match tokio::task::spawn_blocking(move || pages.metrics(accept.as_deref())).await {
        Ok(Some((content_type, Ok(text)))) => {
            let mut response = Response::new(Full::new(Bytes::from(text)));
            response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
            response
        }
        Ok(None) => answer(StatusCode::NOT_FOUND, "metrics are served on the address of key `metrics.listen`"),
        Ok(Some((_, Err(_)))) | Err(_) => answer(StatusCode::INTERNAL_SERVER_ERROR, "the metrics cannot be written"),
    }
}

/// A page may read many counters, so it is made on a thread that may block.
async fn other_page(request: Request<Incoming>, pages: &impl Pages) -> Response<Full<Bytes>> {
    let (parts, _) = request.into_parts();
    let pages = pages.clone();
    match tokio::task::spawn_blocking(move || pages.page(&parts)).await {
        Ok(Some(response)) => response,
        Ok(None) => answer(StatusCode::NOT_FOUND, "expected /livez, /readyz or, by key `metrics.listen`, /metrics"),
        Err(_) => answer(StatusCode::INTERNAL_SERVER_ERROR, "the page cannot be made"),
    }
}

fn answer(code: StatusCode, text: &str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(format!("{text}\n"))));
    *response.status_mut() = code;
    response
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::gateways::publish::tests::services;
    use crate::kubernetes::lease::Leader;
    use crate::store::Storage;

    const WAIT: Duration = Duration::from_secs(20);

    /// A follower without any state.
    struct Lab {
        probes: Probes,
        leadership: watch::Sender<Leadership>,
        states: watch::Sender<Option<Arc<Published>>>,
    }

    impl Lab {
        fn new() -> Self {
            let (leadership, led) = watch::channel(Leadership::Following(None));
            let (states, seen) = watch::channel(None);
            let probes = Probes {
                planner: Heartbeat::default(),
                stalled_after: STALLED_AFTER,
                leadership: led,
                states: seen,
                editor: OverrideEditor::new(Storage::File("/nonexistent/overrides.yaml".into())),
                tls: None,
            };
            Self { probes, leadership, states }
        }
    }

    /// Code and text of the answer to a request of one line.
    async fn asked(address: std::net::SocketAddr, request: &str) -> (u16, String) {
        asked_of(address, request, "a").await
    }

    async fn asked_of(address: std::net::SocketAddr, request: &str, host: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("{request} HTTP/1.1\r\nhost: {host}\r\n\r\n").as_bytes()).await.unwrap();
        let mut text = String::new();
        tokio::time::timeout(WAIT, stream.read_to_string(&mut text)).await.unwrap().unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    #[tokio::test]
    async fn http_requests_are_answered_beside_many_idle_connections() {
        let lab = Lab::new();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let serving = tokio::spawn(serve(listener, lab.probes.clone(), stop.clone()));
        let mut idle = Vec::new();
        for _ in 0..4 * CONNECTIONS_MAX {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        assert_eq!(asked(address, "GET /livez").await, (200, "ok\n".to_owned()));
        assert_eq!(asked(address, "GET /readyz").await, (503, "the leader is not known; the log says why\n".to_owned()));
        assert_eq!(asked(address, "HEAD /livez").await, (200, String::new()));
        assert_eq!(asked(address, "POST /livez").await.0, 405);
        assert_eq!(asked(address, "GET /").await.0, 404);
        assert_eq!(asked(address, "GET /metrics").await.0, 404, "on the address of probes");
        stop.cancel();
        serving.await.unwrap();
    }

    /// Pages of which no host but `gateway` gets the metrics.
    #[derive(Clone)]
    struct Guarded;

    impl Pages for Guarded {
        fn live(&self) -> Result<(), Unwell> {
            Ok(())
        }

        async fn ready(&self) -> Result<(), Unwell> {
            Ok(())
        }

        fn metrics(&self, _: Option<&str>) -> Option<(&'static str, Result<String, fmt::Error>)> {
            Some(("text/plain", Ok("secret".to_owned())))
        }

        fn is_addressed(&self, headers: &HeaderMap) -> bool {
            headers.get(header::HOST).is_some_and(|host| host == "gateway")
        }
    }

    #[tokio::test]
    async fn metrics_are_not_given_to_a_host_that_is_not_of_this_machine() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let serving = tokio::spawn(serve(listener, Guarded, stop.clone()));
        assert_eq!(asked(address, "GET /metrics").await, (421, format!("{MISDIRECTED}\n")));
        assert_eq!(asked_of(address, "GET /metrics", "gateway").await, (200, "secret".to_owned()));
        assert_eq!(asked(address, "GET /livez").await.0, 200, "probes are public");
        stop.cancel();
        serving.await.unwrap();
    }

    #[tokio::test]
    async fn a_replica_is_ready_once_it_has_the_state_or_knows_the_leader() {
        let Lab { probes, leadership, states } = Lab::new();
        assert_eq!(probes.ready().await, Err("the leader is not known; the log says why"));
        leadership.send_replace(Leadership::Following(Some(Leader { identity: "b".to_owned(), address: None })));
        assert_eq!(probes.ready().await, Ok(()));
        leadership.send_replace(Leadership::Leading { epoch: "e".to_owned() });
        assert_eq!(probes.ready().await, Err("the first plan is not made yet"));
        states.send_replace(Some(Arc::new(Published::first("e".to_owned(), services(&[("web", 1)]), Vec::new()))));
        assert_eq!(probes.ready().await, Ok(()));
    }

    #[tokio::test]
    async fn without_certificates_a_replica_that_serves_over_tcp_is_alive_and_not_ready() {
        let Lab { mut probes, leadership, .. } = Lab::new();
        leadership.send_replace(Leadership::Following(Some(Leader { identity: "b".to_owned(), address: None })));
        let (_secret, read) = watch::channel(None);
        let source = crate::gateways::listener::CertificateSource::Secret("tls".to_owned(), read);
        probes.tls = Some(Arc::new(ServerTls::new(source, "east")));
        assert_eq!(probes.ready().await, Err("there is no usable certificate; the log says why"));
        assert_eq!(probes.live(), Ok(()));
    }

    #[test]
    fn a_planner_without_heartbeat_counts_as_hung_and_a_missing_planner_does_not() {
        let Lab { mut probes, .. } = Lab::new();
        assert_eq!(probes.live(), Ok(()), "a follower");
        let beating = probes.planner.start();
        assert_eq!(probes.live(), Ok(()));
        probes.stalled_after = Duration::ZERO;
        while probes.live() == Ok(()) {
            std::hint::spin_loop();
        }
        assert_eq!(probes.live(), Err("the planner hangs"));
        drop(beating);
        assert_eq!(probes.live(), Ok(()), "it no longer leads");
    }
}

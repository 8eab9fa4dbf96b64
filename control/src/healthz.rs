//! `/livez` and `/readyz` over plain HTTP (key `health.listen`), as the probes of a Deployment ask for them.
//!
//! Invariant: `/livez` takes no lock that the planner holds while it works, so that a hung planner is told and not waited
//! for. What is said is for everybody on the network: no names, no texts of others; those are in the log.
//! Deliberately not here: the gRPC health service, which stands beside the configuration API (`server`).

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::incoming::{NewestTasks, ServerTls, not_accepted};
use crate::lease::Leadership;
use crate::overrides::{Desk, Held};
use crate::publish::Published;

/// A planner that works shows it this often.
pub(crate) const BEAT_EVERY: Duration = Duration::from_secs(5);
/// A planner that has not shown it for this long hangs: a plan of 10,000 Services takes less than a second.
pub const STALLED_AFTER: Duration = Duration::from_secs(30);
/// A connection asks one question, and has this long for it.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections at once: a kubelet has two. The oldest gives way.
const CONNECTIONS_MAX: usize = 16;

/// When the planner came round last; none while nobody plans.
#[derive(Clone, Debug, Default)]
pub struct Heartbeat(Arc<Mutex<Option<Instant>>>);

/// A planner at work. Dropped, there is none any more.
#[derive(Debug)]
pub(crate) struct Beating(Heartbeat);

impl Heartbeat {
    fn set(&self, at: Option<Instant>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = at;
    }

    /// A planner begins.
    pub(crate) fn start(&self) -> Beating {
        self.set(Some(Instant::now()));
        Beating(self.clone())
    }

    /// For how long the planner has not come round.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Option<Duration> {
        let last = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.map(|last| now.saturating_duration_since(last))
    }
}

impl Beating {
    /// It came round.
    pub(crate) fn beat(&self) {
        self.0.set(Some(Instant::now()));
    }
}

impl Drop for Beating {
    fn drop(&mut self) {
        self.0.set(None);
    }
}

/// What is asked about a controller.
#[derive(Clone, Debug)]
pub struct Probes {
    /// Whether the planner works.
    pub planner: Heartbeat,
    /// A planner that is silent for longer than this hangs.
    pub stalled_after: Duration,
    /// Who leads.
    pub leadership: watch::Receiver<Leadership>,
    /// What gateways are served, once there is something.
    pub states: watch::Receiver<Option<Arc<Published>>>,
    /// What operators set by hand: nothing is planned before it is known.
    pub desk: Desk,
    /// Certificates for TCP, where gateways are served over it.
    pub tls: Option<Arc<ServerTls>>,
}

impl Probes {
    /// Whether a restart would help nothing.
    ///
    /// # Errors
    /// Why one would.
    fn live(&self) -> Result<(), &'static str> {
        let silence = self.planner.silence(Instant::now());
        if silence.is_some_and(|silence| silence > self.stalled_after) { Err("the planner hangs") } else { Ok(()) }
    }

    /// Whether gateways that dial get what they need: the state, or who has it.
    ///
    /// # Errors
    /// What is missing.
    async fn ready(&self) -> Result<(), &'static str> {
        self.live()?;
        if let Some(tls) = &self.tls
            && tls.newest().await.is_none()
        {
            return Err("there is no usable certificate; the log says why");
        }
        match (&*self.leadership.borrow(), self.desk.held()) {
            (Leadership::Following(Some(_)), _) => Ok(()),
            (Leadership::Following(None), _) => Err("who leads is not known; the log says why"),
            (Leadership::Leading { .. }, Held::Unreadable(_)) => {
                Err("drains and weights set by hand cannot be read, so nothing is planned; the log says why")
            }
            (Leadership::Leading { .. }, _) if self.states.borrow().is_some() => Ok(()),
            (Leadership::Leading { .. }, _) => Err("the first plan is not made yet"),
        }
    }
}

/// Answers until `stop`.
pub async fn serve(listener: TcpListener, probes: Probes, stop: CancellationToken) {
    let mut connections = NewestTasks::new(CONNECTIONS_MAX);
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => connections.spawn(converse(stream, probes.clone())),
            Err(error) => not_accepted(&error).await,
        }
    }
}

async fn converse(stream: TcpStream, probes: Probes) {
    let service = service_fn(|request| respond(request, &probes));
    let connection = http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(stream), service);
    // Who asks nothing, or breaks off, is told nothing.
    let _ = timeout(CONNECTION_TIMEOUT, connection).await;
}

async fn respond(request: Request<Incoming>, probes: &Probes) -> Result<Response<Full<Bytes>>, Infallible> {
    let result = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/livez") => probes.live(),
        (&Method::GET | &Method::HEAD, "/readyz") => probes.ready().await,
        (_, "/livez" | "/readyz") => return Ok(answer(StatusCode::METHOD_NOT_ALLOWED, "expected GET or HEAD")),
        _ => return Ok(answer(StatusCode::NOT_FOUND, "expected /livez or /readyz")),
    };
    Ok(match result {
        Ok(()) => answer(StatusCode::OK, "ok"),
        Err(why) => answer(StatusCode::SERVICE_UNAVAILABLE, why),
    })
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
    use crate::lease::Leader;
    use crate::overrides::store::Store;
    use crate::publish::tests::services;

    const WAIT: Duration = Duration::from_secs(20);

    /// A follower that knows nothing yet.
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
                desk: Desk::new(Store::File("/nonexistent/overrides.yaml".into())),
                tls: None,
            };
            Self { probes, leadership, states }
        }
    }

    /// Code and text of the answer to a request of one line.
    async fn asked(address: std::net::SocketAddr, request: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("{request} HTTP/1.1\r\nhost: a\r\n\r\n").as_bytes()).await.unwrap();
        let mut text = String::new();
        tokio::time::timeout(WAIT, stream.read_to_string(&mut text)).await.unwrap().unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    #[tokio::test]
    async fn what_is_asked_over_http_is_answered_even_beside_many_who_ask_nothing() {
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
        assert_eq!(asked(address, "GET /readyz").await, (503, "who leads is not known; the log says why\n".to_owned()));
        assert_eq!(asked(address, "HEAD /livez").await, (200, String::new()));
        assert_eq!(asked(address, "POST /livez").await.0, 405);
        assert_eq!(asked(address, "GET /").await.0, 404);
        stop.cancel();
        serving.await.unwrap();
    }

    #[tokio::test]
    async fn a_replica_is_ready_when_gateways_get_the_state_from_it_or_are_told_who_has_it() {
        let Lab { probes, leadership, states } = Lab::new();
        assert_eq!(probes.ready().await, Err("who leads is not known; the log says why"));
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
        let source = crate::incoming::CertificateSource::Secret("tls".to_owned(), read);
        probes.tls = Some(Arc::new(ServerTls::new(source, "east")));
        assert_eq!(probes.ready().await, Err("there is no usable certificate; the log says why"));
        assert_eq!(probes.live(), Ok(()));
    }

    #[test]
    fn a_planner_that_does_not_come_round_hangs_and_where_there_is_none_nothing_does() {
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
        assert_eq!(probes.live(), Ok(()), "it leads no more");
    }
}

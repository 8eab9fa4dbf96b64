//! The load of the client: connections that are held, and new flows all the time. One thread holds all of them.
//!
//! For each connection it records whether it broke and its longest gap, for each new flow whether it succeeded.

mod iperf3;

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{sleep, sleep_until, timeout};

use super::bed::{Bed, DNS, HTTP, QUIC, Target, Way};
use super::edge::peers::enter_namespace;
use super::edge::until;
use super::quic_like;

/// Between two exchanges of a connection.
pub(crate) const INTERVAL: Duration = Duration::from_millis(1000);
/// Between two new flows of a kind to a VIP.
pub(crate) const NEW_FLOW_EVERY: Duration = Duration::from_millis(40);
/// A new flow that takes longer has failed: a SYN is repeated after a second.
const PATIENCE: Duration = Duration::from_millis(950);
/// Failures that are further apart belong to different outages.
const APART: Duration = Duration::from_millis(1000);

/// Kinds of connections and of new flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// HTTP keep-alive to nginx.
    Http,
    /// A download from iperf3.
    Iperf3,
    /// Datagrams of [`quic_like`].
    Quic,
    /// A DNS query from a port of its own.
    Dns,
    /// A TCP connection that is opened and reset.
    Connect,
}

/// A connection at the end of the load.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Held {
    pub(crate) kind: Kind,
    pub(crate) target: String,
    /// Why it broke, if it did.
    pub(crate) broken: Option<String>,
    /// When it ended, since the load began.
    pub(crate) ended_at_ms: u64,
    /// Whether another server answered than before.
    pub(crate) moved: bool,
    pub(crate) longest_gap_ms: u64,
}

/// A new flow.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Attempt {
    pub(crate) kind: Kind,
    pub(crate) target: String,
    /// Since the load began.
    pub(crate) at_ms: u64,
    pub(crate) succeeded: bool,
}

/// What happened to the load.
#[derive(Debug, Default)]
pub(crate) struct Record {
    pub(crate) held: Vec<Held>,
    pub(crate) attempts: Vec<Attempt>,
}

/// What the tasks share.
struct Shared {
    start: Instant,
    /// Milliseconds after `start` from which gaps count.
    counts_from_ms: AtomicU64,
    is_over: AtomicBool,
    /// A connection without an answer for this long is broken.
    stalled: Duration,
    open: AtomicUsize,
    ended: AtomicUsize,
    record: Mutex<Record>,
}

impl Shared {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// The length of a gap, as far as it counts.
    fn gap_ms(&self, from: Instant, to: Instant) -> u64 {
        let counts_from = self.start + Duration::from_millis(self.counts_from_ms.load(Ordering::Relaxed));
        u64::try_from(to.saturating_duration_since(from.max(counts_from)).as_millis()).unwrap()
    }
}

/// A connection while it is held.
struct Connection {
    shared: Arc<Shared>,
    held: Held,
    server: Option<String>,
}

impl Connection {
    fn new(shared: &Arc<Shared>, kind: Kind, target: &Target) -> Self {
        let held = Held { kind, target: target.name.clone(), broken: None, ended_at_ms: 0, moved: false, longest_gap_ms: 0 };
        Self { shared: Arc::clone(shared), held, server: None }
    }

    /// An answer of this server has arrived, which was due at a time.
    fn answered(&mut self, server: &str, due: Instant) {
        match &self.server {
            None => {
                self.server = Some(server.to_owned());
                self.shared.open.fetch_add(1, Ordering::Relaxed);
            }
            Some(known) => self.held.moved |= known != server,
        }
        self.held.longest_gap_ms = self.held.longest_gap_ms.max(self.shared.gap_ms(due, Instant::now()));
    }

    fn end(mut self, result: Result<(), String>) {
        self.held.broken = result.err();
        self.held.ended_at_ms = u64::try_from(self.shared.start.elapsed().as_millis()).unwrap();
        self.shared.record.lock().unwrap().held.push(self.held);
        self.shared.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// The tasks of the client.
pub(crate) struct Load {
    runtime: tokio::runtime::Runtime,
    shared: Arc<Shared>,
    connections: usize,
}

impl Load {
    /// Opens this many connections of each kind by each way, and begins to open new flows.
    pub(crate) fn begin(bed: &mut Bed, each: usize) -> Self {
        // Those of the last load may wait for connections that broke without a word.
        bed.start_iperf3_servers();
        let namespace = bed.namespace("client");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .on_thread_start(move || enter_namespace(&namespace))
            .enable_all()
            .build()
            .unwrap();
        let shared = Arc::new(Shared {
            start: Instant::now(),
            counts_from_ms: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            stalled: bed.pace.stalled,
            open: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            record: Mutex::default(),
        });
        let mut load = Self { runtime, shared, connections: 0 };
        for way in [Way::Link, Way::Router] {
            let targets: Vec<&Target> = bed.targets.iter().filter(|target| target.way == way).collect();
            for (n, target) in targets.iter().enumerate() {
                // The first ones have one more where the number does not divide.
                load.open(target, (each + targets.len() - 1 - n) / targets.len());
            }
        }
        until("every connection is open", || {
            let broken: Vec<_> = load.shared.record.lock().unwrap().held.clone();
            assert!(broken.is_empty(), "connections break without an event: {broken:?}");
            (load.shared.open.load(Ordering::Relaxed) == load.connections).then_some(())
        });
        load
    }

    fn open(&mut self, target: &Target, each: usize) {
        let address: Ipv4Addr = target.vip.parse().unwrap();
        for n in 0..each {
            // Exchanges are spread over the interval.
            let delay = INTERVAL * u32::try_from(n).unwrap() / u32::try_from(each).unwrap();
            let http = Connection::new(&self.shared, Kind::Http, target);
            self.runtime
                .spawn(hold(http, delay, move |connection| Box::pin(http_keep_alive(connection, (address, HTTP).into()))));
            let quic = Connection::new(&self.shared, Kind::Quic, target);
            self.runtime.spawn(hold(quic, delay, move |connection| Box::pin(datagrams(connection, (address, QUIC).into()))));
        }
        for kind in [Kind::Dns, Kind::Connect] {
            self.runtime.spawn(new_flows(Arc::clone(&self.shared), kind, target.clone()));
        }
        let connections = (0..each).map(|_| Connection::new(&self.shared, Kind::Iperf3, target)).collect();
        self.runtime.spawn(iperf3::downloads(connections, (address, target.bulk_port).into()));
        self.connections += 3 * each;
    }

    /// Gaps count from now on.
    pub(crate) fn mark(&self) -> u64 {
        let now = u64::try_from(self.shared.start.elapsed().as_millis()).unwrap();
        self.shared.counts_from_ms.store(now, Ordering::Relaxed);
        now
    }

    /// Waits until no new flow of any VIP fails any more: for two seconds, since a time.
    pub(crate) fn until_traffic_returns(&self, what: &str) {
        let from = Instant::now();
        until(&format!("{what}: new flows succeed at every VIP"), || {
            let now = u64::try_from(self.shared.start.elapsed().as_millis()).unwrap();
            let since = now.saturating_sub(2000);
            let record = self.shared.record.lock().unwrap();
            let mut seen: BTreeMap<(&str, Kind), bool> = BTreeMap::new();
            for attempt in record.attempts.iter().rev().take_while(|attempt| attempt.at_ms + 4000 > now) {
                if attempt.at_ms >= since {
                    *seen.entry((&attempt.target, attempt.kind)).or_insert(true) &= attempt.succeeded;
                }
            }
            (from.elapsed() > Duration::from_secs(3) && !seen.is_empty() && seen.values().all(|all| *all)).then_some(())
        });
    }

    /// Lets each connection exchange once more, and ends the load.
    pub(crate) fn end(self) -> Record {
        self.shared.is_over.store(true, Ordering::Relaxed);
        until("every connection is over", || (self.shared.ended.load(Ordering::Relaxed) == self.connections).then_some(()));
        self.runtime.shutdown_timeout(Duration::from_secs(5));
        std::mem::take(&mut self.shared.record.lock().unwrap())
    }
}

type Exchange<'a> = std::pin::Pin<Box<dyn Future<Output = io::Result<()>> + Send + 'a>>;

/// Holds a connection from its opening to the end.
async fn hold(mut connection: Connection, delay: Duration, exchange: impl for<'a> FnOnce(&'a mut Connection) -> Exchange<'a>) {
    sleep(delay).await;
    let result = exchange(&mut connection).await;
    connection.end(result.map_err(|error| error.to_string()));
}

fn broken(why: &str) -> io::Error {
    io::Error::other(why.to_owned())
}

/// Waits for an answer, but no longer than this; without one the connection is broken.
async fn answer<T>(stalled: Duration, wait: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(stalled, wait).await.map_err(|_| broken("no answer"))?
}

/// Requests the name of the server again and again.
async fn http_keep_alive(connection: &mut Connection, address: SocketAddr) -> io::Result<()> {
    let stalled = connection.shared.stalled;
    let mut stream = answer(stalled, TcpStream::connect(address)).await?;
    let mut response = Vec::new();
    loop {
        let is_last = connection.shared.is_over();
        let sent = Instant::now();
        response.clear();
        answer(stalled, async {
            stream.write_all(b"GET / HTTP/1.1\r\nHost: fleet\r\n\r\n").await?;
            // The body is a name and a line feed.
            while !response.ends_with(b"\n") || response.ends_with(b"\r\n") {
                if stream.read_buf(&mut response).await? == 0 {
                    return Err(broken("closed by the server"));
                }
            }
            Ok(())
        })
        .await?;
        let name = response.rsplitn(3, |byte| *byte == b'\n').nth(1).unwrap_or_default();
        connection.answered(&String::from_utf8_lossy(name), sent);
        if is_last {
            return Ok(());
        }
        sleep_until((sent + INTERVAL).into()).await;
    }
}

/// Sends numbered datagrams through one flow.
async fn datagrams(connection: &mut Connection, address: SocketAddr) -> io::Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0").await?;
    socket.connect(address).await?;
    let (mut sequence, mut newest, mut answered_at) = (0_u64, 0_u64, Instant::now());
    let mut buffer = [0; 64];
    loop {
        let is_last = connection.shared.is_over();
        let before = newest;
        sequence += 1;
        let kind = if connection.server.is_none() { quic_like::OPEN } else { quic_like::DATA };
        // Errors of routers on the way pass.
        let _ = socket.send(&quic_like::datagram(kind, sequence)).await;
        let next = Instant::now() + INTERVAL;
        while let Ok(received) = tokio::time::timeout_at(next.into(), socket.recv(&mut buffer)).await {
            let Some((kind, number, server)) = received.ok().and_then(|length| quic_like::parse(&buffer[..length])) else {
                sleep(INTERVAL / 20).await;
                continue;
            };
            if kind == quic_like::RESET {
                connection.held.moved |= connection.server.as_ref().is_some_and(|known| *known != server);
                return Err(broken("reset by the server"));
            }
            newest = newest.max(number);
            connection.answered(&server, answered_at + INTERVAL);
            answered_at = Instant::now();
        }
        if is_last && newest > before {
            return Ok(());
        }
        if answered_at.elapsed() > connection.shared.stalled {
            return Err(broken("no answer"));
        }
    }
}

/// Opens flow after flow until the end.
async fn new_flows(shared: Arc<Shared>, kind: Kind, target: Target) {
    let address: Ipv4Addr = target.vip.parse().unwrap();
    while !shared.is_over() {
        let start = Instant::now();
        let (shared_then, name) = (Arc::clone(&shared), target.name.clone());
        tokio::spawn(async move {
            let result = match kind {
                Kind::Dns => timeout(PATIENCE, query((address, DNS).into())).await,
                _ => timeout(PATIENCE, connect((address, HTTP).into())).await,
            };
            let at_ms = u64::try_from(start.duration_since(shared_then.start).as_millis()).unwrap();
            let attempt = Attempt { kind, target: name, at_ms, succeeded: matches!(result, Ok(Ok(()))) };
            shared_then.record.lock().unwrap().attempts.push(attempt);
        });
        sleep_until((start + NEW_FLOW_EVERY).into()).await;
    }
}

/// A TXT question (RFC 1035) from a new port.
async fn query(address: SocketAddr) -> io::Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0").await?;
    socket.connect(address).await?;
    let question = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01n\x00\x00\x10\x00\x01";
    socket.send(question).await?;
    let length = socket.recv(&mut [0; 128]).await?;
    if length > question.len() { Ok(()) } else { Err(broken("a short answer")) }
}

/// A new connection, which is reset so that it leaves nothing behind.
async fn connect(address: SocketAddr) -> io::Result<()> {
    let stream = TcpStream::connect(address).await?;
    stream.set_zero_linger()
}

impl Record {
    /// The longest outage of new flows at a VIP after a time: from the first failure to the last one, plus the interval
    /// between flows; 0 without a failure.
    pub(crate) fn outage_ms(&self, target: &str, after_ms: u64) -> u64 {
        let failed = self.attempts.iter().filter(|a| a.target == target && a.at_ms + 100 >= after_ms && !a.succeeded);
        let mut failures: Vec<u64> = failed.map(|attempt| attempt.at_ms).collect();
        failures.sort_unstable();
        let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap();
        let outages = failures.chunk_by(|a, b| b - a <= ms(APART));
        outages.map(|failures| failures[failures.len() - 1] - failures[0] + ms(NEW_FLOW_EVERY)).max().unwrap_or(0)
    }

    /// Each connection and each new flow as a line of JSON.
    pub(crate) fn json_lines(&self) -> String {
        let held = self.held.iter().map(|held| serde_json::to_string(held).unwrap());
        let attempts = self.attempts.iter().map(|attempt| serde_json::to_string(attempt).unwrap());
        held.chain(attempts).fold(String::new(), |all, line| all + &line + "\n")
    }
}

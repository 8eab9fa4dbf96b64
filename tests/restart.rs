//! A restart of the gateway under many connections of mode `nat`: none breaks.

#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used)]

mod edge;

use std::fs;
use std::net::{TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use edge::{DEADLINE, Edge, ServiceManifest, until};
use rustix::process::{Resource, Signal, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const ADDRESS: &str = "192.0.2.110";
const CONNECTIONS: usize = 1000;
/// Interval of the exchanges of one connection.
const EXCHANGE_EVERY: Duration = Duration::from_millis(100);
/// Interval of the datagrams that measure the gap.
const DATAGRAM_EVERY: Duration = Duration::from_millis(1);

/// What the clients have seen.
#[derive(Debug, Default)]
struct Seen {
    exchanges: AtomicU64,
    broken: AtomicU64,
    /// The longest exchange, ms.
    longest_ms: AtomicU64,
    is_over: AtomicBool,
}

/// Sends and expects echoes until the end.
async fn exchange(socket: TcpStream, seen: Arc<Seen>) {
    let mut socket = tokio::net::TcpStream::from_std(socket).unwrap();
    let mut number = 0_u64;
    while !seen.is_over.load(Ordering::Relaxed) {
        number += 1;
        let (start, sent, mut echo) = (Instant::now(), number.to_be_bytes(), [0; 8]);
        let both = async {
            socket.write_all(&sent).await?;
            socket.read_exact(&mut echo).await
        };
        let is_right = matches!(tokio::time::timeout(DEADLINE, both).await, Ok(Ok(_))) && echo == sent;
        if !is_right {
            seen.broken.fetch_add(1, Ordering::Relaxed);
            return;
        }
        seen.longest_ms.fetch_max(u64::try_from(start.elapsed().as_millis()).unwrap(), Ordering::Relaxed);
        seen.exchanges.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(EXCHANGE_EVERY).await;
    }
}

/// Sends numbered datagrams through one flow until the end. Returns how many got no answer.
fn datagrams(socket: UdpSocket, seen: Arc<Seen>) -> std::thread::JoinHandle<(u64, u64)> {
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    std::thread::spawn(move || {
        let answers = {
            let (socket, seen) = (socket.try_clone().unwrap(), Arc::clone(&seen));
            std::thread::spawn(move || {
                let mut answers = 0;
                loop {
                    match socket.recv(&mut [0; 64]) {
                        Ok(_) => answers += 1,
                        Err(_) if seen.is_over.load(Ordering::Relaxed) => return answers,
                        Err(_) => {}
                    }
                }
            })
        };
        let mut sent = 0_u64;
        while !seen.is_over.load(Ordering::Relaxed) {
            sent += u64::from(socket.send(b"x").is_ok());
            std::thread::sleep(DATAGRAM_EVERY);
        }
        (sent, answers.join().unwrap())
    })
}

/// Segments that a namespace has sent again.
fn retransmitted(edge: &Edge, namespace: &str) -> u64 {
    let text = String::from_utf8(edge.run(namespace, &["cat", "/proc/net/snmp"]).stdout).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("Tcp:")).collect();
    let position = lines[0].split(' ').position(|word| word == "RetransSegs").unwrap();
    lines[1].split(' ').nth(position).unwrap().parse().unwrap()
}

/// The value of a field in the last line of the log that contains `message`.
fn logged(edge: &Edge, message: &str, field: &str) -> Option<u64> {
    let log = edge.log();
    let line = log.lines().rfind(|line| line.contains(message))?.to_owned();
    let (_, rest) = line.split_once(&format!("{field}="))?;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

const RESTORED: &str = "the flows of the last process go on";

/// A gateway with echo servers of TCP and UDP.
fn gateway(test: &str, name: &str) -> Option<Edge> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut edge = Edge::with_echo_servers(test, name, 9000)?;
    for server in ["b11", "b12", "b13"] {
        edge.udp_echo_server(server, 9000);
    }
    edge.write_manifest("own.yaml", &ServiceManifest { protocols: &["TCP", "UDP"], ..ServiceManifest::default() }.yaml());
    edge.start();
    Some(edge)
}

#[test]
fn a_thousand_connections_outlive_restarts_by_either_signal_and_with_another_number_of_workers() {
    let Some(mut edge) = gateway("restarts under 1,000 connections", "restart") else { return };
    let address = format!("{ADDRESS}:90");
    until("the first connection", || edge.connect(&address));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let seen = Arc::new(Seen::default());
    for n in 0..CONNECTIONS {
        let socket = edge.connect(&address).unwrap_or_else(|| panic!("connection {n}")).into_socket();
        socket.set_nonblocking(true).unwrap();
        runtime.spawn(exchange(socket, Arc::clone(&seen)));
    }
    let all = CONNECTIONS as u64;
    let go_on = |edge: &Edge| {
        let before = seen.exchanges.load(Ordering::Relaxed);
        until("all connections go on", || (seen.exchanges.load(Ordering::Relaxed) > before + 2 * all).then_some(()));
        assert_eq!(seen.broken.load(Ordering::Relaxed), 0, "broken connections; drops {:?}", edge.drops());
    };
    go_on(&edge);
    let cores: Vec<usize> = (0..std::thread::available_parallelism().unwrap().get()).take(2).collect();
    for (signal, changes_workers) in [(Signal::USR2, false), (Signal::TERM, false), (Signal::USR2, true)] {
        if changes_workers {
            edge.configure_on(&cores, edge::AF_PACKET[0], edge::AF_PACKET[1], "");
        }
        let again = ["client", "b11", "b12", "b13"].map(|namespace| retransmitted(&edge, namespace));
        let measured = Arc::new(Seen::default());
        let gap = datagrams(edge.udp(&address), Arc::clone(&measured));
        go_on(&edge);
        seen.longest_ms.store(0, Ordering::Relaxed);
        let start = Instant::now();
        edge.signal(signal);
        assert_eq!(edge.wait_for_exit(), Some(0), "{}", edge.log());
        let stopped = start.elapsed();
        edge.start();
        let restarted = start.elapsed();
        go_on(&edge);
        measured.is_over.store(true, Ordering::Relaxed);
        let (sent, answered) = gap.join().unwrap();
        let again: u64 = ["client", "b11", "b12", "b13"].iter().zip(again).map(|(n, b)| retransmitted(&edge, n) - b).sum();
        println!(
            "{signal:?}: ended after {stopped:?}, served again after {restarted:?}; {} of {sent} datagrams lost at one each ms; \
             {again} segments sent again, longest exchange {} ms",
            sent - answered,
            seen.longest_ms.load(Ordering::Relaxed)
        );
        assert!(answered > 0, "the flow of UDP goes on");
        let restored = until("the flows are restored", || logged(&edge, RESTORED, "restored"));
        assert!(restored >= all, "{restored} flows, log:\n{}", edge.log());
        assert_eq!(logged(&edge, RESTORED, "invalid"), Some(0));
        edge.connect(&address).expect("a new connection").assert_alive("after a restart");
        assert!(!edge.path("state/flows").exists(), "the file is used once");
    }
    seen.is_over.store(true, Ordering::Relaxed);
    edge.assert_account();
}

#[test]
fn a_damaged_file_of_flows_is_not_used_and_the_log_says_why() {
    let Some(mut edge) = gateway("a damaged file of flows", "flowfile") else { return };
    let address = format!("{ADDRESS}:90");
    until("a connection", || edge.connect(&address));
    assert_eq!(edge.stop(false), Some(0));
    let path = edge.path("state/flows");
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).unwrap();
    edge.start();
    until("a connection", || edge.connect(&address));
    let log = edge.log();
    assert!(log.contains("the flows of the last process are not used") && log.contains("its checksum does not match"), "{log}");
    assert!(!path.exists());
    // A crash leaves none.
    edge.stop(true);
    edge.start();
    until("a connection", || edge.connect(&address));
    assert!(!edge.log().contains(RESTORED), "{}", edge.log());
}

//! A restart of the gateway under many connections of mode `nat`: none breaks.

#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used)]

mod edge;

use std::fs;
use std::io::Write as _;
use std::net::{TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use edge::{DEADLINE, Edge, ServiceManifest, skip, until};
use proto::v1::DrainRequest;
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

/// A disk of 256 KiB, until it is dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts it; `None` if this machine does not let a test mount anything: then it reports `test` as skipped.
    fn mount(test: &str, path: PathBuf) -> Option<Self> {
        fs::create_dir_all(&path).unwrap();
        let mount = ["-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs"];
        if !Command::new("mount").args(mount).arg(&path).status().is_ok_and(|status| status.success()) {
            skip(test, "a tmpfs cannot be mounted here");
            return None;
        }
        Some(Self(path))
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }

    /// Fills it, so that no byte has room.
    fn fill(&self) {
        let mut file = fs::File::create(self.filler()).unwrap();
        assert!((0..1024).any(|_| file.write_all(&[0; 1024]).is_err()));
    }

    fn empty(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn with_a_full_disk_connections_outlive_a_restart_and_a_drain_that_cannot_be_stored_is_refused() {
    const TEST: &str = "a restart with a full disk";
    let Some(mut edge) = Edge::with_echo_servers(TEST, "fulldisk", 9000) else { return };
    let disks = [edge.path("state"), edge.path("status")].map(|path| SmallDisk::mount(TEST, path));
    let [Some(state), Some(status)] = disks else { return };
    fs::create_dir(edge.path("run")).unwrap();
    edge.environment.push(("RUNTIME_DIRECTORY", edge.path("run")));
    edge.write_manifest("own.yaml", &ServiceManifest::default().yaml());
    state.fill();
    edge.start();
    let address = format!("{ADDRESS}:90");
    until("the first connection", || edge.connect(&address));
    let mut connections: Vec<_> = (0..6).map(|n| edge.connect(&address).unwrap_or_else(|| panic!("connection {n}"))).collect();
    let kept = edge.path("run/state");
    until("the state is kept in memory", || kept.join("state").exists().then_some(()));
    assert!(edge.log().contains("the state directory cannot be written"), "{}", edge.log());

    let restart = |edge: &mut Edge, dir: &Path, other: &Path| {
        edge.signal(Signal::USR2);
        assert_eq!(edge.wait_for_exit(), Some(0), "{}", edge.log());
        let exists = |dir: &Path, name: &str| dir.join(name).exists();
        // Health is saved once a probe has ended, and the first one begins within two seconds.
        assert!(["flows", "state"].iter().all(|name| exists(dir, name)), "{}", edge.log());
        assert!(!["flows", "health", "state"].iter().any(|name| exists(other, name)), "{}", edge.log());
        edge.start();
        until("the flows are restored", || logged(edge, RESTORED, "restored").filter(|restored| *restored >= 6));
        assert!(!dir.join("flows").exists(), "the file is used once");
    };
    restart(&mut edge, &kept, &state.0);
    connections.iter_mut().for_each(|connection| connection.assert_alive("after a restart with a full disk"));

    let drain = || DrainRequest { target: "10.0.0.12:9000".to_owned(), by: "test".to_owned() };
    until("the controller has stored what it decided", || status.0.join("checkpoint.txt").exists().then_some(()));
    status.fill();
    let refused = edge.admin(async |mut client| Some(client.drain(drain()).await)).unwrap().unwrap_err();
    assert!(refused.message().contains("overrides.yaml") && refused.message().contains("No space left"), "{refused:?}");
    status.empty();
    state.empty();
    edge.admin(async |mut client| client.drain(drain()).await.ok()).expect("a drain, now that there is room");
    until("the state is on the disk again", || (state.0.join("state").exists() && !kept.join("state").exists()).then_some(()));

    restart(&mut edge, &state.0, &kept);
    connections.iter_mut().for_each(|connection| connection.assert_alive("after a restart with room on the disk"));
}

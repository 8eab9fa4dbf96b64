//! The gateway's interaction with Linux, against the running kernel. Needs root, `ip` and `tc`. Each test has its own
//! network namespace.

#![allow(clippy::unwrap_used, clippy::panic)]

mod af_packet;
mod follower;
#[path = "../edge/skip.rs"]
#[allow(unreachable_pub)]
mod skip;
mod twin;

use std::fs::File;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane::{Buffer, Burst, Mac, MemoryBuffer, TwinQueues};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use skip::can_create_namespaces;
use sluice::ports::twin::{Interface, TwinConfig, TwinCounters, TwinPort, TwinThread};

const DEADLINE: Duration = Duration::from_secs(120);
const TWIN_MAC: Mac = Mac([2, 0, 0, 0, 0xaa, 1]);
const PEER_MAC: Mac = Mac([2, 0, 0, 0, 0xbb, 9]);

/// A network namespace, removed on drop.
struct Namespace {
    name: String,
}

impl Namespace {
    /// `None` if this process cannot create namespaces: then it reports `test` as skipped.
    fn new(test: &str, name: &str) -> Option<Self> {
        if !can_create_namespaces(test) {
            return None;
        }
        let this = Self { name: format!("sluice-{name}-{}", std::process::id()) };
        run("ip", &["netns", "add", &this.name]);
        this.ip("link set lo up");
        Some(this)
    }

    /// Runs `ip ARGUMENTS` in the namespace.
    fn ip(&self, arguments: &str) -> String {
        let mut all = vec!["-n", &self.name];
        all.extend(arguments.split_whitespace());
        run("ip", &all)
    }

    /// Runs a command in the namespace; returns whether it succeeded, and its output.
    fn try_run(&self, command: &str) -> (bool, String) {
        let output = Command::new("ip").args(["netns", "exec", &self.name]).args(command.split_whitespace()).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn run(&self, command: &str) -> String {
        let (success, output) = self.try_run(command);
        assert!(success, "{command}: {output}");
        output
    }

    /// Runs a future on a thread in the namespace.
    fn enter<T: Send>(&self, body: impl AsyncFnOnce() -> T + Send) -> T {
        let path = format!("/run/netns/{}", self.name);
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let file = File::open(path).unwrap();
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(body())
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _gone = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Waits for a condition.
async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < DEADLINE, "timeout: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn config(addresses: &[&str]) -> TwinConfig {
    let addresses = addresses.iter().map(|a| a.parse().unwrap()).collect();
    TwinConfig { name: "uplink".to_owned(), mac: Some(TWIN_MAC), mtu: 1400, addresses }
}

/// A twin with its thread. The test acts as the worker.
struct Twin {
    queues: Arc<TwinQueues<MemoryBuffer>>,
    counters: Arc<TwinCounters>,
    interface: Interface,
    _thread: TwinThread,
}

impl Twin {
    async fn open(config: &TwinConfig) -> Self {
        let (interface, tap) = Interface::open(config).await.unwrap();
        let queues = Arc::new(TwinQueues::new());
        let counters = Arc::new(TwinCounters::default());
        let (port, _) = TwinPort::new(tap, queues.clone(), counters.clone(), config.mtu);
        let thread = TwinThread::start(vec![port], None, || Some(MemoryBuffer::default())).unwrap();
        Self { queues, counters, interface, _thread: thread }
    }

    fn send(&self, frame: Vec<u8>) {
        let mut burst = Burst::new();
        burst.push(MemoryBuffer::new(&frame, 0));
        self.queues.to_linux.push(burst).unwrap();
    }

    /// Frames that Linux has sent so far.
    fn received(&self) -> impl Iterator<Item = Vec<u8>> {
        std::iter::from_fn(|| self.queues.from_linux.pop()).flatten().map(|frame| frame.bytes().to_vec())
    }

    /// Waits for a frame from Linux for which `fits` is true.
    async fn expect(&self, what: &str, mut fits: impl FnMut(&[u8]) -> bool) {
        until(what, || self.received().any(|frame| fits(&frame))).await;
    }
}

fn ethernet(destination: Mac, kind: u16, payload: &[u8]) -> Vec<u8> {
    [&destination.0[..], &PEER_MAC.0, &kind.to_be_bytes(), payload].concat()
}

/// An ARP packet from `from` for `to` (RFC 826). Operation 1 is a request, 2 a reply.
fn arp(operation: u8, from: [u8; 4], to: [u8; 4]) -> Vec<u8> {
    let head = [0, 1, 8, 0, 6, 4, 0, operation];
    let target = if operation == 1 { Mac([0; 6]) } else { TWIN_MAC };
    let destination = if operation == 1 { Mac([0xff; 6]) } else { TWIN_MAC };
    ethernet(destination, 0x0806, &[&head[..], &PEER_MAC.0, &from, &target.0, &to].concat())
}

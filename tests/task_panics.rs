//! A panic in a task of the agent affects only that task: workers keep forwarding, and the supervisor restarts the
//! task.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../dataplane/tests/rig/mod.rs"]
mod rig;

use std::mem::replace;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use core_affinity::CoreId;
use dataplane::testing::Packet;
use dataplane::{Compiler, DropReason, MemoryBuffer, PacketOutcome, Publisher};
use proto::{GatewayState, Origin, ServiceName};
use rig::{CLUSTER, Rig, SECOND, UPLINK};
use sluice::agent::backend_health::Health;
use sluice::agent::compile_loop::{CompileLoop, Inputs, Outputs, SnapshotPipeline};
use sluice::agent::served::Served;
use sluice::agent::supervisor::{Failure, Supervisor};
use sluice::worker_threads::{self, Turn};
use tokio::sync::{Mutex, watch};
use tokio_util::sync::CancellationToken;

/// Number of panics before the task works.
const PANICS: u64 = 3;
/// Number of panics of a task while a pinned worker runs.
const PANICS_UNDER_LOAD: u64 = 20;
/// Packets between two panics.
const PACKETS: u64 = 10_000;
/// Frames that arrive for each poll.
const FRAMES_PER_POLL: usize = 32;

/// Takes the compiler and publisher out of the rig, for the task that publishes snapshots instead.
fn take_tables(rig: &mut Rig) -> SnapshotPipeline {
    let other = Compiler::new(rig::config(1));
    let (publisher, _) = Publisher::new(other.initial(), 1);
    SnapshotPipeline { compiler: replace(&mut rig.compiler, other), publisher: replace(&mut rig.publisher, publisher) }
}

fn syn(n: u64) -> Vec<u8> {
    Packet::tcp(&format!("198.51.100.7:{}", 2000 + n % 500), "192.0.2.100:80").build()
}

#[test]
fn a_task_that_panics_loses_no_packet_and_publishes_again_after_its_restart() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let _entered = runtime.enter();
    let mut rig = Rig::new();
    let tables = Arc::new(Mutex::new(take_tables(&mut rig)));
    let known = |state| Some(GatewayState { state: Arc::new(state), origin: Origin::Controller });
    let (states, states_seen) = watch::channel(known(rig.state.clone()));
    let (network, health) = (watch::Sender::new(rig.network.clone()), watch::Sender::new(Health::default()));
    let tags = watch::Sender::new(proto::ProbeTags::new());
    let tunables = watch::Sender::new(rig::config(1).tunables());
    let answers = watch::Sender::new(dataplane::VipAnswers::default());
    let inputs = Inputs {
        state: states_seen,
        network: network.subscribe(),
        health: health.subscribe(),
        tags: tags.subscribe(),
        tunables: tunables.subscribe(),
        answers: answers.subscribe(),
        clock: || 100 * SECOND,
    };
    let outputs = Outputs {
        next_hops: watch::Sender::default(),
        answered: watch::Sender::default(),
        routed: watch::Sender::default(),
        served: watch::Sender::new(Served::default()),
        routes: watch::Sender::default(),
        applied: watch::Sender::new(None),
    };

    let stop = CancellationToken::new();
    let mut supervisor = Supervisor::new(stop.clone());
    let runs = AtomicU64::new(0);
    supervisor.run("compile", (tables, inputs, outputs), move |(tables, inputs, outputs)| {
        let run = runs.fetch_add(1, Ordering::Relaxed);
        async move {
            if run < PANICS {
                let _tables = tables.lock().await;
                panic!("in run {run}, while it holds the lock of the tables");
            }
            CompileLoop { pipeline: tables, inputs, outputs }.run().await
        }
    });

    let deadline = Instant::now() + Duration::from_secs(120);
    let mut sent = 0;
    while supervisor.tasks().status()[0].restarts < PANICS {
        assert!(Instant::now() < deadline, "{:?}", supervisor.tasks().status());
        rig.now += 1000;
        rig.forward(UPLINK, &syn(sent));
        sent += 1;
    }
    assert!(sent > 0);
    assert!(DropReason::ALL.iter().all(|reason| rig.drops(*reason) == 0), "{sent} packets, none lost");

    rig.state.services.remove(&ServiceName::new("default", "web"));
    states.send_replace(known(rig.state.clone()));
    let new_client = Packet::tcp("198.51.100.8:1", "192.0.2.100:80").build();
    while rig.put(UPLINK, &new_client) == Some(PacketOutcome::Forward(CLUSTER)) {
        assert!(Instant::now() < deadline, "the change does not reach the worker");
        std::thread::yield_now();
    }
    assert_eq!(rig.put(UPLINK, &new_client), Some(PacketOutcome::Drop(DropReason::UnknownVip)));
    stop.cancel();
    runtime.block_on(supervisor.finished());
}

/// Packets in and out, counted outside the engine.
#[derive(Debug, Default)]
struct Traffic {
    stopped: AtomicBool,
    sent: AtomicU64,
    forwarded: AtomicU64,
}

impl Traffic {
    fn forwarded(&self) -> u64 {
        self.forwarded.load(Ordering::Acquire)
    }
}

/// Polls the gateway with frames of 480 clients, over and over.
fn worker_body(mut rig: Rig, traffic: Arc<Traffic>) -> impl FnMut(Turn<'_>) -> usize + Send {
    let frames: Vec<_> = (0..480).map(syn).collect();
    let mut next = frames.chunks(FRAMES_PER_POLL).map(<[_]>::to_vec).collect::<Vec<_>>().into_iter().cycle();
    let start = Instant::now();
    move |turn| {
        if !matches!(turn, Turn::Poll { .. }) {
            return 0;
        }
        if !traffic.stopped.load(Ordering::Acquire) {
            let chunk = next.next().unwrap_or_default();
            traffic.sent.fetch_add(chunk.len() as u64, Ordering::Release);
            let port = rig.worker.port_mut(UPLINK).unwrap();
            port.arriving.extend(chunk.iter().map(|frame| MemoryBuffer::new(frame, 1)));
        }
        let now_ns = rig.now + u64::try_from(start.elapsed().as_nanos()).unwrap();
        let handled = rig.worker.poll(now_ns);
        rig.worker.observer_mut().0.clear();
        let left = rig.worker.port_mut(CLUSTER).unwrap().sent.drain(..).count();
        traffic.forwarded.fetch_add(left as u64, Ordering::Release);
        handled
    }
}

/// Yields until the worker has forwarded `packets` more.
async fn wait_for_forwarded(traffic: &Traffic, packets: u64) {
    let (start, before) = (Instant::now(), traffic.forwarded());
    while traffic.forwarded() < before + packets {
        assert!(start.elapsed() < Duration::from_secs(120), "the worker stopped forwarding");
        std::thread::yield_now();
        tokio::task::yield_now().await;
    }
}

// Tokio's time is paused, so that the supervisor's backoff takes no time. The worker has its own clock.
#[tokio::test(start_paused = true)]
async fn a_task_that_panics_twenty_times_loses_no_packet() {
    let (rig, traffic) = (Rig::new(), Arc::new(Traffic::default()));
    let counters = Arc::clone(&rig.counters);
    let before = counters.account();
    let core = core_affinity::get_core_ids().unwrap().into_iter().map(|core| core.id).max().unwrap();
    let worker = worker_threads::spawn(0, CoreId { id: core }, None, None, worker_body(rig, Arc::clone(&traffic))).unwrap();

    let stop = CancellationToken::new();
    let mut supervisor = Supervisor::new(stop.clone());
    let inputs = (Arc::clone(&traffic), Arc::new(AtomicU64::new(0)), stop.clone());
    supervisor.run("shaky", inputs, |(traffic, panics, end)| async move {
        wait_for_forwarded(&traffic, PACKETS).await;
        let n = panics.fetch_add(1, Ordering::Relaxed) + 1;
        assert!(n > PANICS_UNDER_LOAD, "panic {n}");
        end.cancel();
        Ok::<_, Failure>(())
    });
    let tasks = supervisor.tasks();
    supervisor.finished().await;
    let status = tasks.status();
    assert_eq!((status[0].restarts, status[0].last_failure.as_str()), (PANICS_UNDER_LOAD, "panicked: panic 20"));

    traffic.stopped.store(true, Ordering::Release);
    worker.stop();
    let (sent, forwarded) = (traffic.sent.load(Ordering::Acquire), traffic.forwarded());
    assert!(sent >= PANICS_UNDER_LOAD * PACKETS, "{sent} packets");
    assert_eq!(
        forwarded,
        sent,
        "a packet was lost; drops: {:?}",
        DropReason::ALL.iter().map(|r| counters.drops(*r).get()).sum::<u64>()
    );
    let account = counters.account();
    assert!(account.closes(), "{account:?}");
    assert_eq!((account.received - before.received, account.dropped), (sent, before.dropped));
}
